"""What lives where: sizes of a model's parts, budgets of the tiers, and the ceiling they imply.

Everything here follows from the header: nothing large is read. Budgets that are left to "auto" are
chosen as `choose_budgets` says. For the model that ships with the package they are chosen smaller
than the model, so that its experts stream as those of a large one do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from aprefetch import embedded
from aprefetch.config import RuntimeConfig
from aprefetch.device.base import Device, MemoryInfo
from aprefetch.device.cpu import CpuDevice
from aprefetch.errors import (
    AprefetchError,
    BudgetError,
    ConfigError,
    UnsupportedModelError,
)
from aprefetch.models import registry
from aprefetch.pipeline import budget
from aprefetch.quant import SUPPORTED, type_name
from aprefetch.storage import GgufExperts, ModelSource, direct_io_alignment, open_source
from aprefetch.storage.experts import ExpertSource
from aprefetch.storage.hf_config import check_config_beside
from aprefetch.storage.pack import PackState, select_experts
from aprefetch.types import ALIGNMENT

__all__ = ["Examined", "Plan", "choose_budgets", "examine", "open_device", "plan_model"]

_BLOCK = re.compile(r"blk\.(\d+)\.")
_HIT_RATES = (0.0, 0.3, 0.6)
EMBEDDED_DEVICE_SHARE = 0.4  # of the embedded model's experts, when budgets are "auto"
EMBEDDED_RAM_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Bytes of each part of a model, and of the tiers that hold its experts.

    `bytes_per_token` are the bytes of the experts that one decoded token uses. `*_minimum_bytes`
    are the smallest legal budgets, `*_full_bytes` those that hold every expert.
    """

    path: Path
    architecture: str
    device: str
    n_layers: int
    n_routed_layers: int
    n_experts: int
    num_experts_per_tok: int
    dense_bytes: int
    routed_bytes: int
    unread_bytes: int
    bytes_per_token: int
    vram_budget_bytes: int
    vram_minimum_bytes: int
    vram_full_bytes: int
    ram_budget_bytes: int
    ram_staging_bytes: int
    ram_minimum_bytes: int
    ram_full_bytes: int

    def ceiling(self, ssd_gbps: float, hit_rate: float) -> float:
        """Most decoded tokens per second that a drive of `ssd_gbps` (1e9 bytes/s) allows."""
        missed = self.bytes_per_token * (1 - hit_rate)
        return ssd_gbps * 1e9 / missed if missed > 0 else float("inf")

    def to_dict(self, *, ssd_gbps: float) -> dict[str, Any]:
        """JSON-ready, with ceilings at some hit rates."""
        out: dict[str, Any] = {
            name: getattr(self, name) for name in self.__slots__ if name != "path"
        }
        out["path"] = str(self.path)
        out["ssd_gbps"] = ssd_gbps
        out["ceiling_tokens_per_s"] = {
            f"{rate:.1f}": self.ceiling(ssd_gbps, rate) for rate in _HIT_RATES
        }
        return out

    def lines(self, *, ssd_gbps: float) -> list[str]:
        """For people."""
        ceilings = ", ".join(
            f"{self.ceiling(ssd_gbps, rate):.2f} at {rate:.0%} hits" for rate in _HIT_RATES
        )
        n_objects = self.n_routed_layers * self.n_experts
        return [
            f"model      {self.path.name} ({self.architecture}, {self.n_layers} layers)",
            f"dense      {_size(self.dense_bytes)}, in memory all the time ({self.device})",
            (
                f"experts    {_size(self.routed_bytes)} on the SSD: {n_objects} in "
                f"{self.n_routed_layers} layers, {self.num_experts_per_tok} of {self.n_experts} "
                "per token and layer"
            ),
            f"not read   {_size(self.unread_bytes)}",
            self.device_line(),
            self.ram_line(),
            f"per token  {_size(self.bytes_per_token)} of experts",
            f"ceiling    at {ssd_gbps:g} GB/s: {ceilings} tokens/s",
        ]

    def device_line(self) -> str:
        """The device cache, its share of the experts and its bounds."""
        return _tier(
            "device", self.vram_budget_bytes, self.vram_full_bytes, self.vram_minimum_bytes
        )

    def ram_line(self) -> str:
        """The RAM tier, its share of the experts and its bounds."""
        if self.ram_budget_bytes == 0:
            return f"RAM tier   off; {_size(self.ram_staging_bytes)} for reads in flight"
        return _tier("RAM tier", self.ram_budget_bytes, self.ram_full_bytes, self.ram_minimum_bytes)


def _tier(name: str, n_bytes: int, full: int, minimum: int) -> str:
    share = min(1.0, n_bytes / full) if full else 1.0
    return (
        f"{name:<10} {_size(n_bytes)}, {share:.0%} of the experts "
        f"(minimum {_size(minimum)}, all {_size(full)})"
    )


def _size(n_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return (
                f"{n_bytes / scale:.3g} {unit}"
                if n_bytes < 999 * scale
                else (f"{n_bytes / scale:.0f} {unit}")
            )
    return f"{n_bytes} bytes"


class Examined(NamedTuple):
    """A model whose header was found good. The source is open; its owner closes it.

    `pack_state` says where `experts` are read from: the model file itself, or a pack, and how the
    pack came to be.
    """

    source: ModelSource
    entry: registry.Architecture
    experts: ExpertSource
    pack_state: PackState
    device: Device
    config: RuntimeConfig
    plan: Plan


def open_device(config: RuntimeConfig) -> Device:
    """The device that the configuration asks for.

    Raises:
        DeviceError: this version or machine does not have it.
    """
    if config.device == "cuda" or (config.device == "auto" and _has_cuda()):
        from aprefetch.device.cuda import CudaDevice

        return CudaDevice()
    kernels = "numba" if config.kernels == "fast" else config.kernels
    return CpuDevice(kernels, config.n_threads)


def _has_cuda() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def examine(
    path: str | os.PathLike[str] | None,
    config: RuntimeConfig | None = None,
    *,
    may_build: bool = True,
    cancel: threading.Event | None = None,
    **options: Any,
) -> Examined:
    """Check options, header, architecture, types and budgets; then choose where experts come from.

    Blocks. Reads headers only, unless a pack is to be built or verified. A `config.json` beside the
    model must be of the same model.

    Args:
        path: the model; None is the embedded one.
        config, options: see `RuntimeConfig`.
        may_build: build a pack that is asked for and not there; else plan without it.
        cancel: set it from another thread to stop a build or a verification.

    Raises:
        AprefetchError: what is wrong; of several problems, all of them in one error.
    """
    problems: list[AprefetchError] = []
    built = device = source = None
    try:
        built = RuntimeConfig.build(config, **options)
        device = open_device(built)
    except AprefetchError as error:
        problems.append(error)
    try:
        source = open_source(embedded.MODEL_PATH if path is None else path)
        entry = registry.lookup(source.metadata)
        n_layers = entry.n_layers(source.metadata, source.tensors)
        in_file = GgufExperts(source, layers=range(n_layers))
    except AprefetchError as error:
        if source is not None:
            source.close()
        raise _merged([*problems, error]) from error
    try:
        problems += _model_problems(source, entry, in_file)
        if built is None or device is None or problems:
            raise _merged(problems)
        experts, pack_state = select_experts(
            source,
            in_file.layers,
            built.pack.mode if may_build or built.pack.mode != "pack" else "auto",
            built.pack.folders,
            verify=built.pack.verify if may_build else "off",
            alignment=_alignment(built, source),
            cancel=cancel,
        )
        plan = _plan(source, experts, built, device, is_embedded=path is None)
    except BaseException:
        source.close()
        raise
    return Examined(source, entry, experts, pack_state, device, built, plan)


def _alignment(config: RuntimeConfig, source: ModelSource) -> int:
    """Of direct reads from the model's files: as chosen, else the widest that they ask for."""
    chosen = config.reader.alignment
    if isinstance(chosen, int):
        return max(chosen, ALIGNMENT)
    return max(direct_io_alignment(path) for path in source.paths)


def plan_model(
    path: str | os.PathLike[str] | None = None,
    config: RuntimeConfig | None = None,
    **options: Any,
) -> Plan:
    """The plan of a model, from its header; None is the embedded model. Blocks.

    Raises:
        AprefetchError: as `Runtime.open`.
    """
    examined = examine(path, config, may_build=False, **options)
    examined.source.close()
    examined.device.close()
    return examined.plan


def _model_problems(
    source: ModelSource, entry: registry.Architecture, experts: GgufExperts
) -> list[AprefetchError]:
    problems: list[AprefetchError] = []
    checks: tuple[Callable[[], object], ...] = (
        lambda: entry.check(source.metadata, source.tensors),
        lambda: check_config_beside(source.metadata, source.paths),
    )
    for check in checks:
        try:
            check()
        except AprefetchError as error:
            problems.append(error)
    unknown = {
        role.ggml_type: f"layer {layer}, {role.role}"
        for layer, layout in reversed(experts.layers.items())
        for role in layout.roles
        if role.ggml_type not in SUPPORTED
    }
    if unknown:
        found = ", ".join(f"{type_name(i)} ({where})" for i, where in unknown.items())
        known = ", ".join(f.name for f in SUPPORTED.values())
        problems.append(
            UnsupportedModelError(
                f"experts are stored as {found}, which is not supported; known types: {known}"
            )
        )
    return problems


def _merged(problems: list[AprefetchError]) -> AprefetchError:
    """One error for all; a single one stays what it is."""
    if len(problems) == 1:
        return problems[0]
    texts: list[str] = []
    for problem in problems:
        texts += getattr(problem, "problems", None) or [str(problem)]
    wrong_options = any(isinstance(problem, ConfigError) for problem in problems)
    return ConfigError(texts) if wrong_options else UnsupportedModelError(texts)


def _plan(
    source: ModelSource,
    experts: ExpertSource,
    config: RuntimeConfig,
    device: Device,
    *,
    is_embedded: bool,
) -> Plan:
    layers = experts.layers
    prefix = f"{source.metadata['general.architecture']}."
    used = source.metadata.get(prefix + "expert_used_count", 0)
    top_k = {layer: _of_layer(used, layer) for layer in layers}
    n_layers = max(layers, default=-1) + 1
    unread = sum(
        info.n_bytes
        for name, info in source.tensors.items()
        if (block := _BLOCK.match(name)) and int(block[1]) >= n_layers
    )
    routed = sum(layout.n_experts * layout.payload_bytes for layout in layers.values())
    dense = sum(info.n_bytes for info in source.tensors.values()) - routed - unread
    on_device, landing = budget.device_classes(experts), budget.landing_classes(experts)
    staging = sum(pool.n_bytes for pool in budget.staging(landing))
    full = budget.total_bytes(on_device), budget.total_bytes(landing)
    if is_embedded:
        automatic = int(full[0] * EMBEDDED_DEVICE_SHARE), int(full[1] * EMBEDDED_RAM_SHARE)
    else:
        automatic = choose_budgets(
            full_bytes=full,
            minimum_bytes=(budget.minimum_bytes(on_device), budget.minimum_bytes(landing)),
            needed_bytes=dense + staging,
            host=_host_memory(),
            device=None if device.name == "cpu" else device.memory_info(),
        )
    vram, ram = config.memory.vram_bytes, config.memory.ram_bytes
    plan = Plan(
        path=source.paths[0],
        architecture=prefix[:-1],
        device=device.name,
        n_layers=n_layers,
        n_routed_layers=len(layers),
        n_experts=max((layout.n_experts for layout in layers.values()), default=0),
        num_experts_per_tok=max(top_k.values(), default=0),
        dense_bytes=dense,
        routed_bytes=routed,
        unread_bytes=unread,
        bytes_per_token=sum(
            top_k[layer] * layout.payload_bytes for layer, layout in layers.items()
        ),
        vram_budget_bytes=automatic[0] if vram is None else vram,
        vram_minimum_bytes=budget.minimum_bytes(on_device),
        vram_full_bytes=full[0],
        ram_budget_bytes=automatic[1] if ram is None else ram,
        ram_staging_bytes=staging,
        ram_minimum_bytes=budget.minimum_bytes(landing),
        ram_full_bytes=full[1],
    )
    _check_budgets(plan)
    return plan


def _of_layer(value: Any, layer: int) -> int:
    """A number of the metadata that may be an array of one per layer."""
    return int(value[layer]) if isinstance(value, Sequence | np.ndarray) else int(value)


def _check_budgets(plan: Plan) -> None:
    for option, n_bytes, minimum in (
        ("vram_budget", plan.vram_budget_bytes, plan.vram_minimum_bytes),
        ("ram_budget", plan.ram_budget_bytes, plan.ram_minimum_bytes),
    ):
        if n_bytes < minimum and (n_bytes or option == "vram_budget"):
            off = " (or 0, which is off)" if option == "ram_budget" else ""
            raise BudgetError(
                f"{option} of {n_bytes} bytes is too small for this model: "
                f"give at least {minimum} bytes{off}",
                minimum_bytes=minimum,
                option=option,
            )


def choose_budgets(
    *,
    full_bytes: tuple[int, int],
    minimum_bytes: tuple[int, int],
    needed_bytes: int,
    host: MemoryInfo,
    device: MemoryInfo | None,
) -> tuple[int, int]:
    """Budgets of the device cache and the RAM tier, in bytes, where the user names none.

    Free memory less a reserve (a tenth of all, at least 1 GiB) and less what the model needs
    besides. Where the device shares the host's memory (`device` is None), the RAM tier would only
    hold copies of what the device cache may hold itself: it is off. Never more than all experts;
    never less than the minimum, which may then be more than the machine has.

    Args:
        full_bytes, minimum_bytes: for (device, RAM).
        needed_bytes: dense weights and landing slots.
    """
    free_host = _spare(host)
    if device is None:
        return _clamp(free_host - needed_bytes, minimum_bytes[0], full_bytes[0]), 0
    on_device = _clamp(_spare(device) - needed_bytes, minimum_bytes[0], full_bytes[0])
    return on_device, _clamp(free_host, minimum_bytes[1], full_bytes[1])


def _clamp(n_bytes: int, low: int, high: int) -> int:
    return max(low, min(n_bytes, high))


def _spare(memory: MemoryInfo) -> int:
    return memory.free_bytes - max(memory.total_bytes // 10, 1 << 30)


def _host_memory() -> MemoryInfo:
    """The machine's memory, or the container's where that is less."""
    total, free = CpuDevice().memory_info()
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, or another kind of system
        return MemoryInfo(total, free)
    return MemoryInfo(min(total, limit), min(free, max(0, limit - used)))
