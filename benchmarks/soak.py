"""Mixed requests with random cancels for minutes: is memory flat, does nothing stay claimed?

    python benchmarks/soak.py --requests 1000
    python benchmarks/soak.py --device cuda --minutes 8 [-m model.gguf] [--gbps 12] [--out FILE]

Bursts of 1 to 8 clients send requests of every kind: whole answers and streams, greedy and sampled,
prompts of one to some hundred tokens, prompts that extend earlier ones, scored texts, answers that
are cancelled at any time, left in the midst, or out of time, requests that are refused. A greedy
probe must give the same tokens always, in company and alone. After some bursts all clients stop;
then no request may be left, no slot leased, no demand open, and memory is noted. Minutes count from
the start of the program.

Flat: over the second half of the rests, a straight line through the values rises by no more than a
stated tolerance, and the last quarter's largest value is above the second quarter's by no more than
that. The first quarter is warm-up: caches fill, kernels compile. Descriptors, threads, tasks and
pinned memory have no tolerance. What a request may lose without being noticed follows from
tolerance and number of requests, and is printed. The last line is JSON; exit code 1 if anything is
wrong. A model without a vocabulary is lent the embedded one's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from aprefetch import Runtime, embedded
from aprefetch.config import parse_bytes
from aprefetch.errors import DeadlineError, RequestError
from aprefetch.pipeline.io.wrappers import PacedFiles
from aprefetch.pipeline.reader import make_reader
from aprefetch.pipeline.slots import SlotState
from aprefetch.storage import open_source
from aprefetch.text.vocab import load_tokenizer

MIB = 1 << 20
LATENCY_S = 80e-6
KINDS = {
    "generate": 24, "stream": 14, "cancel": 26, "leave": 10, "deadline": 8, "score": 5,
    "refused": 3, "look": 4, "probe": 6,
}  # fmt: skip
_CLOSING_S = 6.0  # of the minutes, kept for the last rest and the closing
_GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Tolerance(NamedTuple):
    """How far a value may rise: the larger of the two."""

    absolute: float
    share: float = 0.0

    def of(self, level: float) -> float:
        return max(self.absolute, self.share * level)


TOLERANCES = {
    "rss_bytes": Tolerance(24 * MIB, 0.03),  # the heap is trimmed after every 16 MiB of growth
    "pinned_bytes": Tolerance(0),
    "gpu_allocated_bytes": Tolerance(8 * MIB, 0.01),
    "gpu_reserved_bytes": Tolerance(64 * MIB, 0.02),
    "gpu_used_bytes": Tolerance(64 * MIB, 0.02),
    "gpu_pinned_bytes": Tolerance(8 * MIB),
    # Kept states are bounded by bytes, not by number; up to 4096 shapes of tensors are remembered.
    "n_objects": Tolerance(6000, 0.02),
    "n_descriptors": Tolerance(0),
    "n_threads": Tolerance(0),
    "n_tasks": Tolerance(0),
}

CUDA_TOLERANCES = {"n_descriptors": Tolerance(8)}  # the driver may open some late


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What was held while no request ran."""

    at_s: float
    n_requests: int  # begun so far
    rss_bytes: int
    pinned_bytes: int  # the landing arena, if it is pinned
    gpu_allocated_bytes: int
    gpu_reserved_bytes: int
    gpu_used_bytes: int
    gpu_pinned_bytes: int  # PyTorch's own pinned host memory
    n_objects: int  # that Python's collector knows, after a collection
    n_descriptors: int
    n_threads: int
    n_tasks: int
    vram_used_bytes: int
    vram_peak_bytes: int
    ram_used_bytes: int
    ram_peak_bytes: int
    kept_states_bytes: int
    peak_rss_bytes: int  # since the sample before, under load
    peak_gpu_reserved_bytes: int


class Verdict(NamedTuple):
    """Whether one value stayed flat."""

    is_flat: bool
    rise: float  # of the line through the second half
    above: float  # the last quarter's largest over the second quarter's
    tolerance: float
    level: float  # mean of the second half


def judge(values: Sequence[float], tolerance: Tolerance) -> Verdict:
    """Is a series flat, its first quarter aside? Needs eight values or more."""
    n = len(values)
    half = values[n // 2 :]
    level = sum(half) / len(half)
    middle = (len(half) - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(len(half)))
    slope = sum((i - middle) * (v - level) for i, v in enumerate(half)) / spread
    rise = slope * (len(half) - 1)
    above = max(values[3 * n // 4 :]) - max(values[n // 4 : n // 2])
    limit = tolerance.of(level)
    return Verdict(rise <= limit and above <= limit, rise, above, limit, level)


def resident_bytes() -> int:
    """VmRSS of this process."""
    with open("/proc/self/status", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def process_age_s() -> float:
    """Seconds since this process began, imports included."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    up_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(0.0, up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


@dataclass
class Load:
    """Sends requests to a runtime, and knows what came of them."""

    rt: Runtime
    rng: random.Random
    most_tokens: int
    n_begun: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    recent: deque[list[int]] = field(default_factory=lambda: deque(maxlen=8))
    typical_s: float = 0.2
    probe_ids: list[int] = field(default_factory=list)
    n_probes: int = 0

    def ids(self, n: int) -> list[int]:
        """Random token ids."""
        n_vocab = min(self.rt.model_info.n_vocab, self.rt.tokenizer.n_vocab)
        return [self.rng.randrange(4, n_vocab) for _ in range(n)]

    def prompt(self) -> list[int]:
        """One to `most_tokens` ids; some extend an earlier prompt and its answer."""
        if self.recent and self.rng.random() < 0.15:
            begun = self.rng.choice(self.recent)
            return [*begun, *self.ids(self.rng.randint(1, 8))][: self.most_tokens]
        return self.ids(int(math.exp(self.rng.uniform(0, math.log(self.most_tokens)))))

    def sampling(self) -> dict[str, Any]:
        """Greedy or not, short or long."""
        options: dict[str, Any] = {"max_tokens": int(math.exp(self.rng.uniform(0, 4.2)))}
        if self.rng.random() < 0.4:
            return options | _GREEDY
        options |= {"temperature": self.rng.uniform(0.3, 1.3), "seed": self.rng.getrandbits(30)}
        return options | self.rng.choice(
            [{}, {"top_p": 0.9}, {"top_k": 20}, {"logprobs": 3}, {"repetition_penalty": 1.2}]
        )

    async def burst(self, most: float) -> None:
        """Some clients at a time, each with some requests; hardly more than `most` of these."""
        n_clients = min(self.rng.randint(1, 8), most)
        n_each = min(3, most // n_clients)
        async with asyncio.TaskGroup() as group:
            for _ in range(int(n_clients)):
                group.create_task(self.client(self.rng.randint(1, int(n_each))))

    async def client(self, n: int) -> None:
        for _ in range(n):
            kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
            self.n_begun += 1
            try:
                outcome = await getattr(self, f"_{kind}")()
            except Exception as error:
                outcome = "failed"
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            self.outcomes[f"{kind}: {outcome}"] += 1
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.random() * 0.2 * self.typical_s)

    async def _generate(self) -> str:
        begin_ns = time.perf_counter_ns()
        prompt, options = self.prompt(), self.sampling()
        done = await self.rt.generate(prompt, **options)
        self.typical_s += 0.1 * ((time.perf_counter_ns() - begin_ns) / 1e9 - self.typical_s)
        if len(prompt) + len(done.token_ids) < self.most_tokens:
            self.recent.append([*prompt, *done.token_ids])
        return str(done.finish_reason)

    async def _stream(self) -> str:
        async with self.rt.stream(self.prompt(), **self.sampling()) as stream:
            async for _ in stream:
                if self.rng.random() < 0.05:  # a slow reader
                    await asyncio.sleep(0.2 * self.typical_s)
        return str(stream.finish_reason)

    async def _leave(self) -> str:
        n = self.rng.randint(1, 12)
        stream = self.rt.stream(self.prompt(), **self.sampling())
        if self.rng.random() < 0.5:
            async with stream:
                async for event in stream:
                    if event.index + 1 >= n:
                        break
        else:
            async for event in stream:
                if event.index + 1 >= n:
                    break
            await stream.aclose()
        return str(stream.finish_reason)

    async def _cancel(self) -> str:
        begin = self._generate if self.rng.random() < 0.7 else self._stream
        task = asyncio.create_task(begin())
        try:
            if self.rng.random() < 0.3:  # mostly before its first layer is through
                for _ in range(self.rng.randrange(200)):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(self.rng.random() ** 2 * 1.5 * self.typical_s)
        finally:
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            return "cancelled"
        task.result()
        return "done before"

    async def _deadline(self) -> str:
        timeout_s = 1e-4 + self.rng.random() * self.typical_s
        try:
            await self.rt.generate(self.prompt(), timeout_s=timeout_s, **self.sampling())
        except DeadlineError:
            return "out of time"
        return "in time"

    async def _score(self) -> str:
        await self.rt.score(self.ids(self.rng.randint(2, 60)))
        return "scored"

    async def _refused(self) -> str:
        bad: list[dict[str, Any]] = [
            {"prompt": self.ids(5), "temperature": -1},
            {"prompt": []},
            {"prompt": [self.rt.model_info.n_vocab]},
        ]
        try:
            await self.rt.generate(**self.rng.choice(bad))
        except RequestError:
            return "refused"
        self.wrong.append("a wrong request was taken")
        return "taken"

    async def _look(self) -> str:
        json.dumps(self.rt.stats().to_dict())
        self.rt.requests()
        if self.rng.random() < 0.2 and self.rt.config.trace.enabled:
            with tempfile.TemporaryDirectory() as folder:
                await self.rt.export_trace(Path(folder) / "trace.json")
        return "seen"

    async def _probe(self) -> str:
        prompt = random.Random(0).sample(range(4, 300), 24)
        done = await self.rt.generate(prompt, max_tokens=24, **_GREEDY)
        self.n_probes += 1
        self.probe_ids = self.probe_ids or done.token_ids
        if done.token_ids != self.probe_ids:
            self.wrong.append(f"probe {self.n_probes} gave {done.token_ids}")
            return "differs"
        return "same"


@dataclass
class Watch:
    """Notes memory while no request runs, and its peaks while some do."""

    rt: Runtime
    load: Load
    started_s: float
    own_tasks: int
    samples: list[Sample] = field(default_factory=list)
    peak_rss_bytes: int = 0
    peak_reserved_bytes: int = 0

    async def peaks(self) -> None:
        """Runs until cancelled."""
        while True:
            self.peak_rss_bytes = max(self.peak_rss_bytes, resident_bytes())
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self._gpu("memory_reserved"))
            await asyncio.sleep(0.1)

    def _gpu(self, name: str) -> int:
        return int(getattr(torch.cuda, name)()) if self.rt.plan.device == "cuda" else 0

    async def rest(self) -> Sample:
        """Wait until nothing moves, check that nothing is claimed, note what is held."""
        rt, wrong = self.rt, self.load.wrong
        async with asyncio.timeout(60):
            while rt.requests():  # noqa: ASYNC110 - the thing watched has no event
                await asyncio.sleep(0.002)
            await rt._coordinator.settled()
        pools = rt._coordinator._tiers.device_pools
        n_leased = sum(
            slot.pins > 0 or slot.state is SlotState.LEASED for pool in pools for slot in pool.slots
        )
        if n_leased or rt._coordinator._open:
            wrong.append(f"at rest: {n_leased} slots leased, {len(rt._coordinator._open)} demands")
        memory = rt.stats().memory
        for tier in ("vram", "ram"):
            if memory[f"{tier}_peak_bytes"] > memory[f"{tier}_budget_bytes"]:
                wrong.append(f"{tier} is over its budget: {memory}")
        if memory["states_bytes"]:
            wrong.append(f"at rest: {memory['states_bytes']} bytes of states")
        rss_bytes = resident_bytes()
        gc.collect()
        sample = self._sample(rss_bytes, memory)
        self.samples.append(sample)
        self.peak_rss_bytes = self.peak_reserved_bytes = 0
        return sample

    def _sample(self, rss_bytes: int, memory: dict[str, int]) -> Sample:
        used = pinned = 0
        if self.rt.plan.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            used = total - free
            with contextlib.suppress(AttributeError, RuntimeError):
                host = torch.cuda.host_memory_stats()
                pinned = int(host.get("allocated_bytes.current", 0))
        # Those of the loop's own pool come one by one as they are first needed.
        threads = [t for t in threading.enumerate() if not t.name.startswith("asyncio_")]
        return Sample(
            at_s=round(time.perf_counter() - self.started_s, 2),
            n_requests=self.load.n_begun,
            rss_bytes=rss_bytes,
            pinned_bytes=getattr(self.rt._device, "n_pinned_bytes", 0),
            gpu_allocated_bytes=self._gpu("memory_allocated"),
            gpu_reserved_bytes=self._gpu("memory_reserved"),
            gpu_used_bytes=used,
            gpu_pinned_bytes=pinned,
            n_objects=len(gc.get_objects()),
            n_descriptors=len(os.listdir("/proc/self/fd")),
            n_threads=len(threads),
            n_tasks=len(asyncio.all_tasks()) - self.own_tasks,
            vram_used_bytes=memory["vram_used_bytes"],
            vram_peak_bytes=memory["vram_peak_bytes"],
            ram_used_bytes=memory["ram_used_bytes"],
            ram_peak_bytes=memory["ram_peak_bytes"],
            kept_states_bytes=memory["kept_states_bytes"],
            peak_rss_bytes=max(self.peak_rss_bytes, rss_bytes),
            peak_gpu_reserved_bytes=max(self.peak_reserved_bytes, self._gpu("memory_reserved")),
        )


async def soak(rt: Runtime, args: argparse.Namespace, started_s: float) -> dict[str, Any]:
    """Load and rest in turn until the time or the requests are used up."""
    rng = random.Random(args.seed)
    room = rt.model_info.context_length - 72
    load = Load(rt, rng, most_tokens=max(1, min(args.most_tokens, room)))
    peaks = None
    own_tasks = len(asyncio.all_tasks())
    watch = Watch(rt, load, started_s, own_tasks + 1)
    peaks = asyncio.create_task(watch.peaks())
    end_s = started_s + args.minutes * 60 - _CLOSING_S if args.minutes else math.inf
    per_rest = max(1, math.ceil((args.requests or 10**9) / args.rests))
    rest_s = (end_s - time.perf_counter()) / args.rests if args.minutes else math.inf
    _head()
    try:
        await load._probe()
        _row(await watch.rest())
        while time.perf_counter() < end_s and load.n_begun < (args.requests or math.inf):
            until_s, until_n = time.perf_counter() + rest_s, load.n_begun + per_rest
            while time.perf_counter() < min(until_s, end_s) and load.n_begun < until_n:
                with contextlib.suppress(TimeoutError):  # the clients are cancelled with it
                    async with asyncio.timeout(max(0.1, end_s - time.perf_counter())):
                        await load.burst(until_n - load.n_begun)
            if not rt.is_open or len(load.wrong) > 20:
                load.wrong.append("given up" if rt.is_open else "the runtime failed")
                break
            outcome = await load._probe()
            load.outcomes[f"probe at rest: {outcome}"] += 1
            _row(await watch.rest())
    finally:
        peaks.cancel()
    return _summary(rt, load, watch, args)


def _summary(rt: Runtime, load: Load, watch: Watch, args: argparse.Namespace) -> dict[str, Any]:
    samples = watch.samples
    tolerances = TOLERANCES | (CUDA_TOLERANCES if rt.plan.device == "cuda" else {})
    verdicts = {
        name: judge([getattr(s, name) for s in samples], tolerance)
        for name, tolerance in tolerances.items()
        if len(samples) >= 8 and any(getattr(s, name) for s in samples)
    }
    if not verdicts:
        load.wrong.append(f"{len(samples)} rests are too few to judge; run longer")
    n_half = max(1, samples[-1].n_requests - samples[len(samples) // 2].n_requests)
    stats = rt.stats()
    return {
        "benchmark": "soak",
        "model": rt.model_info.name or rt.plan.path.name,
        "device": getattr(rt._device, "label", rt.plan.device),
        "seed": args.seed,
        "seconds": samples[-1].at_s,
        "requests": load.n_begun,
        "output_tokens": stats.output_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "reused_tokens": stats.reused_tokens,
        "bytes_read": stats.bytes_read,
        "duplicate_reads": stats.duplicate_reads,
        "fallback_count": stats.fallback_count,
        "probes": load.n_probes,
        "outcomes": dict(sorted(load.outcomes.items())),
        "requests_of_second_half": n_half,
        "verdicts": {name: v._asdict() for name, v in verdicts.items()},
        "is_flat": bool(verdicts) and all(v.is_flat for v in verdicts.values()),
        "wrong": load.wrong[:20],
        "samples": [asdict(s) for s in samples],
    }


_COLUMNS: tuple[tuple[str, str, Callable[[Sample], str]], ...] = (
    ("s", ">7", lambda s: f"{s.at_s:.1f}"),
    ("requests", ">9", lambda s: str(s.n_requests)),
    ("RSS MB", ">9", lambda s: f"{s.rss_bytes / 1e6:.1f}"),
    ("peak", ">8", lambda s: f"{s.peak_rss_bytes / 1e6:.0f}"),
    ("pinned", ">8", lambda s: f"{s.pinned_bytes / 1e6:.1f}"),
    ("GPU MB", ">9", lambda s: f"{s.gpu_allocated_bytes / 1e6:.1f}"),
    ("reserved", ">9", lambda s: f"{s.gpu_reserved_bytes / 1e6:.0f}"),
    ("used", ">8", lambda s: f"{s.gpu_used_bytes / 1e6:.0f}"),
    ("VRAM tier", ">10", lambda s: f"{s.vram_used_bytes / 1e6:.2f}"),
    ("RAM tier", ">9", lambda s: f"{s.ram_used_bytes / 1e6:.2f}"),
    ("kept", ">7", lambda s: f"{s.kept_states_bytes / 1e6:.1f}"),
    ("objects", ">9", lambda s: str(s.n_objects)),
    ("fds", ">5", lambda s: str(s.n_descriptors)),
    ("threads", ">8", lambda s: str(s.n_threads)),
    ("tasks", ">6", lambda s: str(s.n_tasks)),
)


def _head() -> None:
    print("".join(f"{name:{width}}" for name, width, _ in _COLUMNS))


def _row(sample: Sample) -> None:
    print("".join(f"{show(sample):{width}}" for _, width, show in _COLUMNS), flush=True)


def _show(result: dict[str, Any]) -> None:
    """The verdicts, for people."""
    print(f"\n{'second half':<22}{'mean':>14}{'rise':>12}{'above':>12}{'tolerance':>12}  flat")
    n = result["requests_of_second_half"]
    for name, v in result["verdicts"].items():
        unit, text = (1e6, "MB") if name.endswith("_bytes") else (1, "")
        print(
            f"{name.removesuffix('_bytes'):<16}{text:<6}{v['level'] / unit:>14.2f}"
            f"{v['rise'] / unit:>12.3f}{v['above'] / unit:>12.3f}{v['tolerance'] / unit:>12.3f}"
            f"  {'yes' if v['is_flat'] else 'NO'}"
            + (f"  (a loss of {v['tolerance'] / n / 1e3:.1f} kB per request shows)" if text else "")
        )
    print(", ".join(f"{name} {count}" for name, count in result["outcomes"].items()))
    for text in result["wrong"]:
        print(f"WRONG: {text}")


@contextlib.contextmanager
def lent_parts(model: Path | None, gbps: float | None) -> Iterator[None]:
    """A vocabulary for a model that has none; reads at a stated pace."""
    with contextlib.ExitStack() as stack:
        if model is not None:
            source = open_source(model)
            has_words = source.metadata.get("tokenizer.ggml.model", "none") != "none"
            source.close()
            if not has_words:
                own = open_source(embedded.MODEL_PATH)
                words = load_tokenizer(own)
                own.close()
                lend = mock.patch("aprefetch.loading.load_tokenizer", lambda *_, **__: words)
                stack.enter_context(lend)
        if gbps:
            files = PacedFiles(None, bytes_per_s=gbps * 1e9, latency_s=LATENCY_S)
            reader = functools.partial(make_reader, files=files)
            stack.enter_context(mock.patch("aprefetch.runtime.make_reader", reader))
        yield


async def run(args: argparse.Namespace, started_s: float) -> dict[str, Any]:
    """Open, soak, close."""
    options: dict[str, Any] = {"device": args.device, "max_requests": 8}
    for name in ("vram_budget", "ram_budget"):
        if (value := getattr(args, name)) is not None:
            options[name] = value
    if not args.no_trace:  # a short memory, so that it is full before warm-up is over
        options |= {"trace": True, "trace_max_events": 20_000}
    if args.prefix_budget:
        options["prefix_budget"] = args.prefix_budget
    with lent_parts(args.model, args.gbps):
        rt = await Runtime.open(args.model, **options)
    async with rt:
        plan = rt.plan
        print(
            f"{rt.model_info.name or plan.path.name} on {getattr(rt._device, 'label', plan.device)}"
            f": device cache {plan.vram_budget_bytes / 1e6:.1f} MB of "
            f"{plan.vram_full_bytes / 1e6:.1f}, RAM tier {plan.ram_budget_bytes / 1e6:.1f} MB; "
            f"opened after {time.perf_counter() - started_s:.1f} s"
        )
        return await soak(rt, args, started_s)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Minutes count from the start of the process if there are no arguments here."""
    started_s = time.perf_counter() - (process_age_s() if argv is None else 0.0)
    args = _arguments(argv)
    result = asyncio.run(run(args, started_s))
    result["seconds_in_all"] = round(time.perf_counter() - started_s, 1)
    _show(result)
    is_good = result["is_flat"] and not result["wrong"]
    print("flat, nothing left over" if is_good else "NOT AS IT SHOULD BE")
    text = json.dumps(result)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if is_good else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, help="default: the embedded model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=0.0, help="from the program's start")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--rests", type=int, default=40, help="how often memory is noted")
    parser.add_argument("--most-tokens", type=int, default=400, help="of a prompt")
    parser.add_argument("--vram-budget", type=parse_bytes)
    parser.add_argument("--ram-budget", type=parse_bytes)
    parser.add_argument("--prefix-budget", type=parse_bytes, default=8 * MIB, help="0: none kept")
    parser.add_argument("--gbps", type=float, help="read at the pace of such a drive")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    args = parser.parse_args(argv)
    if not args.minutes and not args.requests:
        parser.error("give --minutes or --requests")
    return args


if __name__ == "__main__":
    sys.exit(main())
