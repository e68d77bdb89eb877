"""Options of a runtime: grouped, frozen, checked as a whole.

Precedence, highest first: keyword, config object, environment (`APREFETCH_*`), default. A field of
a config object that equals its default counts as not given. The environment is read in
`RuntimeConfig.build` only, never at import. Every wrong option of a call is reported in one
`ConfigError`.

Every option has one flat name, as used by keywords and, in capitals after `APREFETCH_`, by the
environment: `vram_budget` is `MemoryConfig.vram_budget` and `APREFETCH_VRAM_BUDGET`.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self, get_args

from aprefetch.errors import ConfigError
from aprefetch.sizes import Checks, Size, parse_bytes
from aprefetch.types import ALIGNMENT

__all__ = [
    "ENVIRONMENT_PREFIX",
    "BatchConfig",
    "CachePolicy",
    "LookaheadConfig",
    "MemoryConfig",
    "PackConfig",
    "PrefixConfig",
    "ReaderConfig",
    "RamTier",
    "RuntimeConfig",
    "Size",
    "TraceConfig",
    "parse_bytes",
]

_log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "APREFETCH_"

CachePolicy = Literal["layered", "lfu", "lru"]
RamTier = Literal["exclusive", "inclusive"]
DeviceName = Literal["auto", "cpu", "cuda"]
KernelsName = Literal["auto", "fast", "reference"]
ReaderBackend = Literal["auto", "io_uring", "workers", "threads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Byte budgets of the tiers, and the context.

    Args:
        vram_budget: Device slots for experts; "auto" takes what is sensible on the device.
        ram_budget: Landing slots and the RAM tier; "auto" as above.
        ram_tier: "exclusive" copies back to RAM what leaves the device, so that the tiers hold
            different experts; "inclusive" keeps copies of what was read. "auto" is the former
            where the device has memory of its own, and the latter on the CPU, whose cores would
            have to make the copies.
        context_tokens: Most tokens of one sequence; None is the model's own limit.
        hot_list: File that names the experts worth loading at the opening, written at the close;
            None begins with empty tiers. A missing, damaged or foreign file is passed over.

    Sizes are bytes or "auto" once the object exists.
    """

    vram_budget: Size = "auto"
    ram_budget: Size = "auto"
    ram_tier: Literal["auto"] | RamTier = "auto"
    context_tokens: int | None = None
    hot_list: str | None = None

    def __post_init__(self) -> None:
        checks = Checks()
        if self.hot_list is not None and not isinstance(self.hot_list, str | os.PathLike):
            checks.problems.append(f"hot_list must be a path, got {self.hot_list!r:.60}")
        for name in ("vram_budget", "ram_budget"):
            object.__setattr__(self, name, checks.size(name, getattr(self, name)))
        checks.one_of("ram_tier", self.ram_tier, ("auto", *get_args(RamTier)))
        if self.context_tokens is not None:
            checks.whole("context_tokens", self.context_tokens, 1)
        checks.finish()

    @property
    def vram_bytes(self) -> int | None:
        """`vram_budget` in bytes; None where it is to be chosen."""
        return None if isinstance(self.vram_budget, str) else self.vram_budget

    def ram_tier_on(self, device: str) -> RamTier:
        """`ram_tier`, chosen if need be for a device of this name."""
        if self.ram_tier == "auto":
            return "inclusive" if device == "cpu" else "exclusive"
        return self.ram_tier

    @property
    def ram_bytes(self) -> int | None:
        """`ram_budget` in bytes; None where it is to be chosen."""
        return None if isinstance(self.ram_budget, str) else self.ram_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    """How files are read.

    Args:
        queue_depth: Reads in flight at most, 1 to 64.
        strict_direct: Refuse file systems without direct reads, rather than read buffered.
        slice_bytes: Cut longer reads into pieces of this size; None reads each whole.
        alignment: Bytes, a power of two from 512; None asks the file system.
        retries: How often a read that failed for a passing reason is tried again, 0 to 100.
        backend: Who reads: the kernel through "io_uring", "workers" (threads of compiled code) or
            "threads" (of Python); "auto" takes the first of these that can be had.
    """

    queue_depth: int = 8
    strict_direct: bool = False
    slice_bytes: Size | None = None
    alignment: Size | None = None
    retries: int = 2
    backend: ReaderBackend = "auto"

    def __post_init__(self) -> None:
        checks = Checks()
        checks.one_of("backend", self.backend, get_args(ReaderBackend))
        checks.whole("queue_depth", self.queue_depth, 1, 64)
        checks.flag("strict_direct", self.strict_direct)
        checks.whole("retries", self.retries, 0, 100)
        for name, low in (("slice_bytes", ALIGNMENT), ("alignment", 512)):
            value = getattr(self, name)
            if value is None:
                continue
            value = checks.size(name, value)
            object.__setattr__(self, name, value)
            if value == "auto":
                checks.problems.append(f"{name} is a size or None, got 'auto'")
            elif type(value) is int and value < low:
                checks.problems.append(f"{name} must be at least {low}, got {value}")
            elif name == "alignment" and type(value) is int and value & (value - 1):
                checks.problems.append(f"alignment must be a power of two, got {value}")
        checks.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackConfig:
    """Where experts are read from.

    Args:
        mode: "auto" uses a good Expert Pack if there is one and else reads the GGUF directly;
            "pack" builds one if there is none; "gguf" never looks for one.
        folders: Folders where packs are looked for, before the model's own, and built; several are
            striped over. One folder may be given as text.
        verify: When objects are compared with their digests: not at all, some of them at the
            opening, each when it is first read, or all at the opening.
    """

    mode: Literal["auto", "pack", "gguf"] = "auto"
    folders: tuple[str, ...] = ()
    verify: Literal["off", "sampled", "first_read", "full"] = "off"

    def __post_init__(self) -> None:
        checks = Checks()
        checks.one_of("experts", self.mode, ("auto", "pack", "gguf"))
        checks.one_of("verify", self.verify, ("off", "sampled", "first_read", "full"))
        given = self.folders
        paths = (given,) if isinstance(given, str | os.PathLike) else given
        if isinstance(paths, tuple | list) and all(isinstance(p, str | os.PathLike) for p in paths):
            object.__setattr__(self, "folders", tuple(os.fspath(p) for p in paths))
        else:
            checks.problems.append(f"pack_folders must be folders, got {given!r:.60}")
        checks.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadConfig:
    """Guesses about the experts of the next layers.

    Args:
        mode: "off" evaluates no early router and issues no guess.
        depth: How many layers ahead, 0 to 8; 0 is off.
        width: Experts guessed per row; None lets the runtime choose by what guesses bring, up to
            three times the layer's top-k, none where they don't pay.
        max_experts: Most experts guessed per layer over all rows; None is twice the width for one
            row and one more width for each further row.
        max_rows: Rows whose scores are looked at; of longer chunks only some rows are.
    """

    mode: Literal["on", "off"] = "on"
    depth: int = 1
    width: int | None = None
    max_experts: int | None = None
    max_rows: int = 64

    def __post_init__(self) -> None:
        checks = Checks()
        checks.one_of("lookahead", self.mode, ("on", "off"))
        checks.whole("lookahead_depth", self.depth, 0, 8)
        if self.width is not None:
            checks.whole("lookahead_width", self.width, 1)
        if self.max_experts is not None:
            checks.whole("lookahead_max_experts", self.max_experts, 1)
        checks.whole("lookahead_max_rows", self.max_rows, 1)
        checks.finish()

    @property
    def is_on(self) -> bool:
        """May any guess be made?"""
        return self.mode == "on" and self.depth > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Recording of spans for `export_trace`; at most `max_events`, the oldest are dropped.

    Args:
        routing: Also note picks, guesses, tiers and times for `Runtime.routing_trace`.
        settled: Let every load end before a layer looks for its experts. Slow; hits and misses
            then repeat exactly from run to run. For studies.
    """

    enabled: bool = False
    max_events: int = 1_000_000
    routing: bool = False
    settled: bool = False

    def __post_init__(self) -> None:
        checks = Checks()
        checks.flag("trace", self.enabled)
        checks.whole("trace_max_events", self.max_events, 1)
        checks.flag("trace_routing", self.routing)
        checks.flag("trace_settled", self.settled)
        checks.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Many requests at a time.

    Args:
        max_waiting: Requests that may wait while `max_requests` run; more are refused.
        state_budget: Bytes for the caches (KV) of running requests. A request is admitted when its
            caches fit at their longest, prompt and `max_tokens`; "auto" is a quarter of the memory
            that is free at the opening.
        request_timeout_s: Seconds that a request may take, waiting included; None for no limit.
        token_gap_s: Longest step, in seconds, that is wished for while some requests decode:
            chunks of other prompts shrink to keep within it. None for no such wish.
    """

    max_waiting: int = 256
    state_budget: Size = "auto"
    request_timeout_s: float | None = None
    token_gap_s: float | None = 0.25

    def __post_init__(self) -> None:
        checks = Checks()
        checks.whole("max_waiting", self.max_waiting, 0)
        object.__setattr__(self, "state_budget", checks.size("state_budget", self.state_budget))
        checks.seconds("request_timeout_s", self.request_timeout_s)
        checks.seconds("token_gap_s", self.token_gap_s)
        checks.finish()

    @property
    def state_bytes(self) -> int | None:
        """`state_budget` in bytes; None where it is to be chosen."""
        return None if isinstance(self.state_budget, str) else self.state_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """States that are kept, so that a prompt that extends an earlier one continues from there.

    Args:
        budget: Bytes of host memory for kept states; 0 keeps none.
        folder: Where states go that leave the memory, to be found by later runs too; None is
            nowhere. The files hold the prompts' tokens.
        disk_budget: Bytes for all state files of that folder.
    """

    budget: Size = 0
    folder: str | None = None
    disk_budget: Size = "8GiB"

    def __post_init__(self) -> None:
        checks = Checks()
        for name in ("budget", "disk_budget"):
            value = checks.size(f"prefix_{name}", getattr(self, name))
            object.__setattr__(self, name, value)
            if value == "auto":
                checks.problems.append(f"prefix_{name} is a size, got 'auto'")
        if self.folder is not None:
            if not isinstance(self.folder, str | os.PathLike):
                checks.problems.append(f"prefix_folder must be a path, got {self.folder!r}")
            elif self.budget == 0:
                checks.problems.append("prefix_folder needs a prefix_budget above 0")
        checks.finish()

    @property
    def budget_bytes(self) -> int:
        """`budget` in bytes."""
        return self.budget if isinstance(self.budget, int) else 0

    @property
    def disk_budget_bytes(self) -> int:
        """`disk_budget` in bytes."""
        return self.disk_budget if isinstance(self.disk_budget, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """All options of a runtime.

    Args:
        device: Where compute and device slots live.
        kernels: "fast" needs the compiled kernels, "reference" is plain torch.
        n_threads: Compute threads; None uses the cores that this process may use.
        chunk_tokens: Most tokens of one sequence in one step of prefill.
        max_requests: Most requests that are stepped together; others wait.
        cache_policy: Which expert leaves a full tier first: "layered" (ageing frequency, and whose
            layer comes last), "lfu" (ageing frequency), "lru".
    """

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    device: DeviceName = "auto"
    kernels: KernelsName = "auto"
    n_threads: int | None = None
    chunk_tokens: int = 512
    max_requests: int = 16
    cache_policy: CachePolicy = "layered"

    def __post_init__(self) -> None:
        checks = Checks()
        for name, kind in _GROUPS.items():
            if not isinstance(getattr(self, name), kind):
                checks.problems.append(f"{name} must be a {kind.__name__}")
        checks.one_of("device", self.device, get_args(DeviceName))
        checks.one_of("kernels", self.kernels, get_args(KernelsName))
        checks.one_of("cache_policy", self.cache_policy, get_args(CachePolicy))
        if self.n_threads is not None:
            checks.whole("n_threads", self.n_threads, 1, 1024)
        checks.whole("chunk_tokens", self.chunk_tokens, 1)
        checks.whole("max_requests", self.max_requests, 1)
        checks.finish()

    @classmethod
    def build(
        cls,
        config: RuntimeConfig | None = None,
        env: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> Self:
        """Merge keywords, a config object and the environment.

        Args:
            config: Its fields win over the environment where they differ from the defaults.
            env: Stands in for `os.environ`.
            keywords: Flat option names (`vram_budget=`, `queue_depth=`, ...) or whole groups
                (`memory=MemoryConfig(...)`).

        Raises:
            ConfigError: All unknown names and wrong values at once.
        """
        problems: list[str] = []
        if config is not None and not isinstance(config, RuntimeConfig):
            raise ConfigError(f"config must be a RuntimeConfig, got {type(config).__name__}")
        values = _from_environment(os.environ if env is None else env, problems)
        if config is not None:
            values |= _differences(config)
        values |= _from_keywords(keywords, problems)
        arguments: dict[str, Any] = {}
        for name, kind in _GROUPS.items():
            chosen = {
                o.field: values[f] for f, o in _OPTIONS.items() if o.group == name and f in values
            }
            try:
                arguments[name] = kind(**chosen)
            except ConfigError as error:
                problems += error.problems
        arguments |= {f: values[f] for f, o in _OPTIONS.items() if not o.group and f in values}
        try:
            built = cls(**arguments)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return built


_GROUPS: dict[str, type[Any]] = {
    "memory": MemoryConfig,
    "reader": ReaderConfig,
    "pack": PackConfig,
    "lookahead": LookaheadConfig,
    "trace": TraceConfig,
    "batch": BatchConfig,
    "prefix": PrefixConfig,
}


def _parse_paths(text: str) -> tuple[str, ...]:
    return tuple(path for path in text.split(os.pathsep) if path)


def _parse_whole(text: str) -> int:
    return int(text)


def _parse_flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)


def _parse_switch(text: str) -> str:
    return "on" if _parse_flag(text) else "off"


class _Option(NamedTuple):
    """Where a flat name goes, and how text becomes its value."""

    group: str  # "" for RuntimeConfig itself
    field: str
    parse: Callable[[str], Any]
    wanted: str


_WHOLE = (_parse_whole, "a whole number")
_TEXT = (str, "text")
_SECONDS = (float, "a number of seconds")
_FLAG = (_parse_flag, "one of 1, 0, true, false, yes, no, on, off")
_OPTIONS: dict[str, _Option] = {
    "vram_budget": _Option("memory", "vram_budget", *_TEXT),
    "ram_budget": _Option("memory", "ram_budget", *_TEXT),
    "ram_tier": _Option("memory", "ram_tier", *_TEXT),
    "context_tokens": _Option("memory", "context_tokens", *_WHOLE),
    "hot_list": _Option("memory", "hot_list", *_TEXT),
    "queue_depth": _Option("reader", "queue_depth", *_WHOLE),
    "strict_direct": _Option("reader", "strict_direct", *_FLAG),
    "slice_bytes": _Option("reader", "slice_bytes", *_TEXT),
    "alignment": _Option("reader", "alignment", *_TEXT),
    "retries": _Option("reader", "retries", *_WHOLE),
    "reader_backend": _Option("reader", "backend", *_TEXT),
    "experts": _Option("pack", "mode", *_TEXT),
    "pack_folders": _Option("pack", "folders", _parse_paths, "folders"),
    "verify": _Option("pack", "verify", *_TEXT),
    "lookahead": _Option("lookahead", "mode", _parse_switch, _FLAG[1]),
    "lookahead_depth": _Option("lookahead", "depth", *_WHOLE),
    "lookahead_width": _Option("lookahead", "width", *_WHOLE),
    "lookahead_max_experts": _Option("lookahead", "max_experts", *_WHOLE),
    "lookahead_max_rows": _Option("lookahead", "max_rows", *_WHOLE),
    "trace": _Option("trace", "enabled", *_FLAG),
    "trace_max_events": _Option("trace", "max_events", *_WHOLE),
    "trace_routing": _Option("trace", "routing", *_FLAG),
    "trace_settled": _Option("trace", "settled", *_FLAG),
    "max_waiting": _Option("batch", "max_waiting", *_WHOLE),
    "state_budget": _Option("batch", "state_budget", *_TEXT),
    "request_timeout_s": _Option("batch", "request_timeout_s", *_SECONDS),
    "token_gap_s": _Option("batch", "token_gap_s", *_SECONDS),
    "prefix_budget": _Option("prefix", "budget", *_TEXT),
    "prefix_folder": _Option("prefix", "folder", *_TEXT),
    "prefix_disk_budget": _Option("prefix", "disk_budget", *_TEXT),
    "device": _Option("", "device", *_TEXT),
    "kernels": _Option("", "kernels", *_TEXT),
    "n_threads": _Option("", "n_threads", *_WHOLE),
    "chunk_tokens": _Option("", "chunk_tokens", *_WHOLE),
    "max_requests": _Option("", "max_requests", *_WHOLE),
    "cache_policy": _Option("", "cache_policy", *_TEXT),
}


def _from_environment(env: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in env.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text.strip():
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        option = _OPTIONS.get(name)
        if option is None:
            # Not an error: it may be meant for another version, or for a program around this one.
            _log.warning("environment: %s is no option%s", variable, _nearest(name))
            continue
        try:
            values[name] = option.parse(text.strip())
        except ValueError:
            problems.append(f"{variable}={text!r}: expected {option.wanted}")
    return values


def _differences(config: RuntimeConfig) -> dict[str, Any]:
    """The options, by flat name, that differ from their defaults."""
    values = {}
    for name, option in _OPTIONS.items():
        holder = getattr(config, option.group) if option.group else config
        value = getattr(holder, option.field)
        default = next(f.default for f in fields(holder) if f.name == option.field)
        if value != default:
            values[name] = value
    return values


def _from_keywords(keywords: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in keywords.items():
        kind = _GROUPS.get(name)
        if kind is not None and isinstance(value, kind):
            values |= {f: getattr(value, o.field) for f, o in _OPTIONS.items() if o.group == name}
    for name, value in keywords.items():  # a flat name is more particular than its group
        kind = _GROUPS.get(name)
        if kind is not None and isinstance(value, kind):
            continue
        if name not in _OPTIONS:
            known = f" must be a {kind.__name__}" if kind else f" is no option{_nearest(name)}"
            problems.append(f"{name}{known}")
        elif name == "lookahead" and isinstance(value, bool):
            values[name] = "on" if value else "off"
        else:
            values[name] = value
    return values


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, [*_OPTIONS, *_GROUPS], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
