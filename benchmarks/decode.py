"""Decode with more and more overlap, beside the bound of a system that knows the future.

    python benchmarks/decode.py [-m MODEL.gguf] [--vram 0.4] [--ram 0] [-n 64] [--gbps 3]
        [--latency-us 100] [--corrections FILE] [--picture OUT.png]

Modes, all with the same tokens: `sync` (nothing moves while anything computes), `overlap` (reads
and the rest of the layer), `lookahead` (guesses one layer ahead, widths by the runtime), `learned`
(and fitted corrections, where there are any), `foresight` (guesses are what a recorded run picked,
so always right). Budgets up to 1 are shares of all experts' bytes. With `--gbps` reads are paced
to a stated drive; otherwise the drive is taken as it is and its ceiling is measured first. The
bound is Belady's cache over both tiers with reads and compute overlapping perfectly; compute is
that of the mode which had the least of it (a busy machine disturbs some more than others). The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from replay import Setting, bounds

from aprefetch import Runtime, embedded
from aprefetch.pipeline.correction import load_corrections
from aprefetch.pipeline.io.wrappers import PacedFiles
from aprefetch.pipeline.lookahead import Lookahead, Replay
from aprefetch.pipeline.reader import make_reader
from aprefetch.plan import plan_model
from aprefetch.routing_trace import RoutingTrace
from aprefetch.trace_summary import STAGES, TimeTable, of_routing

COLOURS = {
    "dense": "tab:orange",
    "guess": "tab:purple",
    "shared": "tab:green",
    "experts": "tab:brown",
    "wait": "tab:red",
    "head": "tab:pink",
    "other": "lightgray",
}
MODES = ("sync", "overlap", "lookahead", "learned", "foresight")


@dataclass(slots=True, kw_only=True)
class Row:
    """One mode's numbers, of decoding alone; milliseconds and bytes are per token."""

    mode: str
    tokens_per_s: float
    stall_ms: float
    device_hits: float
    ram_hits: float  # of the device's misses
    read_bytes: float
    wasted_bytes: float
    gbps: float  # while any read was in flight
    recall: float
    of_ceiling: float = 0.0
    of_bound: float = 0.0


@dataclass(slots=True)
class Run:
    """What a mode left behind."""

    row: Row
    trace: RoutingTrace
    table: TimeTable
    token_ids: list[int]


@contextlib.contextmanager
def fitted(files: Any, corrections: Any, strategy: Any) -> Iterator[None]:
    """Runtimes opened inside read through `files` and guess as told."""
    lookahead = functools.partial(Lookahead, strategy=strategy)
    with (
        mock.patch("aprefetch.runtime.make_reader", functools.partial(make_reader, files=files)),
        mock.patch("aprefetch.loading.Lookahead", lookahead),
        mock.patch("aprefetch.loading.load_corrections", lambda path, device: corrections),
    ):
        yield


async def run(args: argparse.Namespace, mode: str, picks: Any, budgets: dict[str, int]) -> Run:
    """One mode: a warm-up answer (compiles, fills the caches), then the measured one."""
    gc.collect()  # what the mode before left must not be swept up at this one's expense
    files = None
    if args.gbps:
        files = PacedFiles(None, bytes_per_s=args.gbps * 1e9, latency_s=args.latency_us / 1e6)
    corrections = load_corrections(Path(args.corrections), args.device) if mode == "learned" else {}
    options: dict[str, Any] = {**budgets, "trace": True, "trace_routing": True}
    options |= {"queue_depth": args.queue_depth, "device": args.device}
    if mode in ("sync", "overlap"):
        options |= {"lookahead": "off", "trace_settled": mode == "sync"}
    strategy = None
    if mode == "foresight":
        strategy = Replay(picks)
        options["lookahead_max_experts"] = 1 << 20
    with fitted(files, corrections, strategy):
        runtime = await Runtime.open(args.model, **options)
    async with runtime:
        await runtime.generate(
            args.prompt, max_tokens=args.warm_up, temperature=0.0, ignore_eos=True
        )
        n_before, ids = len(runtime.routing_trace().steps), []
        before, start_ns = runtime.stats(), 0
        async with runtime.stream(
            args.prompt + " ", max_tokens=args.max_tokens + 1, temperature=0.0, ignore_eos=True
        ) as stream:
            async for event in stream:
                ids.append(event.token_id)
                if not start_ns:  # prefill is over
                    before, start_ns = runtime.stats(), time.perf_counter_ns()
        wall_s = (time.perf_counter_ns() - start_ns) / 1e9
        await asyncio.sleep(0.05)
        trace, stats = runtime.routing_trace(), runtime.stats().since(before)
    n = max(1, len(ids) - 1)
    lookups = max(1, stats.hits_device + stats.misses_device)
    row = Row(
        mode=mode,
        tokens_per_s=n / wall_s,
        stall_ms=stats.stall_ns / 1e6 / n if mode != "sync" else _settling_ms(trace, n),
        device_hits=stats.hits_device / lookups,
        ram_hits=stats.hits_ram / max(1, stats.misses_device),
        read_bytes=stats.bytes_read / n,
        wasted_bytes=stats.bytes_wasted / n,
        gbps=stats.bytes_read / max(1, stats.read_busy_ns),
        recall=stats.lookahead_recall,
    )
    measured = _part(trace, n_before + len(trace.steps) - n_before - n)
    return Run(row, measured, of_routing(measured), ids)


def _settling_ms(trace: RoutingTrace, n: int) -> float:
    """Sync: what the steps took beyond compute was spent waiting for loads to end."""
    part = _part(trace, len(trace.steps) - n)
    return of_routing(part).other_ns / 1e6 / n


def _part(trace: RoutingTrace, first: int) -> RoutingTrace:
    """The steps from `first` on."""
    calls = trace.calls[trace.calls["step"] >= first].copy()
    calls["step"] -= first
    since = trace.steps["start_ns"][first] if first < len(trace.steps) else 0
    return RoutingTrace(
        meta=trace.meta,
        steps=trace.steps[first:],
        calls=calls,
        picks=trace.picks,
        guesses=trace.guesses,
        loads=trace.loads[trace.loads["end_ns"] >= since],
    )


def drive_gbps(path: Path, queue_depth: int, n_bytes: int = 1 << 29) -> float:
    """The drive's own rate: direct reads of 4 MiB at random places, `queue_depth` at a time."""
    import mmap

    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    size, block = path.stat().st_size, 1 << 22
    places = np.random.default_rng(0).integers(0, max(1, size // block), n_bytes // block)

    def read(place: int) -> int:
        with mmap.mmap(-1, block) as buffer:
            return os.preadv(fd, [buffer], int(place) * block)

    try:
        start_ns = time.perf_counter_ns()
        with ThreadPoolExecutor(queue_depth) as pool:
            total = sum(pool.map(read, places))
        return total / (time.perf_counter_ns() - start_ns)
    finally:
        os.close(fd)


def picture(runs: dict[str, Run], out: Path) -> None:
    """Stacked time per token of each mode; the timeline of one token with lookahead."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 8), height_ratios=(2, 3))
    left = np.zeros(len(runs))
    for stage in (*STAGES, "other"):
        ms = np.array(
            [
                (run.table.other_ns if stage == "other" else run.table.total(stage))
                / 1e6
                / max(1, run.table.n_steps)
                for run in runs.values()
            ]
        )
        top.barh(list(runs), ms, left=left, label=stage, color=COLOURS[stage])
        left += ms
    top.invert_yaxis()
    top.set_xlabel("ms per token (sync: loads are in 'other')")
    top.legend(ncols=4, fontsize=8)
    name = "lookahead" if "lookahead" in runs else next(iter(runs))
    _timeline(bottom, runs[name].trace, name)
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _timeline(axes: Any, trace: RoutingTrace, name: str) -> None:
    """The token in the middle: layers' stages, and reads and uploads beside them."""
    step = len(trace.steps) // 2
    start, end = int(trace.steps["start_ns"][step]), int(trace.steps["end_ns"][step])
    at = start
    for row in trace.calls[trace.calls["step"] == step]:
        for stage in ("dense", "shared", "guess", "wait", "experts"):
            ns = int(row[f"{stage}_ns"])
            axes.broken_barh([((at - start) / 1e6, ns / 1e6)], (2, 0.8), color=COLOURS[stage])
            at += ns
    loads = trace.loads[(trace.loads["end_ns"] > start) & (trace.loads["start_ns"] < end)]
    for what, lane, kinds in (
        (0, 0.0, ("tab:blue", "tab:cyan", "tab:olive")),
        (1, 1.0, ("tab:gray",) * 3),
    ):
        for load in loads[loads["what"] == what]:
            span = (
                (int(load["start_ns"]) - start) / 1e6,
                int(load["end_ns"] - load["start_ns"]) / 1e6,
            )
            axes.broken_barh([span], (lane, 0.8), color=kinds[int(load["kind"])], alpha=0.4)
    axes.set_yticks([0.4, 1.4, 2.4], ["reads", "uploads", "step"])
    axes.set_xlim(0, (end - start) / 1e6)
    axes.set_xlabel(f"ms of one token, {name} (reads: demand blue, by token id cyan, guess olive)")


def main() -> int:
    """The command."""
    args = _arguments()
    path = Path(args.model or embedded.MODEL_PATH)
    plan = plan_model(path)
    budgets = {
        "vram_budget": _size(args.vram, plan.vram_full_bytes, plan.vram_minimum_bytes),
        "ram_budget": _size(args.ram, plan.ram_full_bytes, plan.ram_minimum_bytes),
    }
    ceiling = args.gbps or drive_gbps(path, args.queue_depth)
    runs: dict[str, Run] = {}
    picks: Any = None
    for mode in args.modes.split(","):
        if mode == "learned" and not (args.corrections and Path(args.corrections).is_file()):
            continue
        if mode == "foresight" and picks is None:
            picks = asyncio.run(_all_picks(args, budgets))
        runs[mode] = asyncio.run(run(args, mode, picks, budgets))
    if len({tuple(run.token_ids) for run in runs.values()}) != 1:
        print("the modes' tokens differ", file=sys.stderr)
        return 1
    setting = Setting(**budgets, gbps=ceiling)
    limits = [bounds(run.trace, setting) for mode, run in runs.items() if mode != "sync"]
    limit = max(
        limits or [bounds(runs["sync"].trace, setting)],
        key=lambda limit: limit["clairvoyant_tokens_per_s"],
    )
    for r in (run.row for run in runs.values()):
        r.of_ceiling = r.gbps / ceiling
        r.of_bound = r.tokens_per_s / limit["clairvoyant_tokens_per_s"]
    _print(runs, limit, ceiling, plan, budgets)
    if args.picture:
        picture(runs, Path(args.picture))
    print(
        json.dumps(
            {
                "model": path.name,
                "budgets": budgets,
                "drive_gbps": ceiling,
                "paced": bool(args.gbps),
                "bounds": limit,
                "rows": [asdict(run.row) for run in runs.values()],
            }
        )
    )
    return 0


async def _all_picks(args: argparse.Namespace, budgets: dict[str, int]) -> Any:
    """Picks of every layer of both answers, in order, as the runtime will see them."""
    options = {**budgets, "trace_routing": True, "lookahead": "off", "device": args.device}
    async with Runtime.open(args.model, **options) as runtime:
        for prompt, n in ((args.prompt, args.warm_up), (args.prompt + " ", args.max_tokens + 1)):
            await runtime.generate(prompt, max_tokens=n, temperature=0.0, ignore_eos=True)
        trace = runtime.routing_trace()
    return [
        (int(row["layer"]), trace.picked(i)["expert"].tolist()) for i, row in enumerate(trace.calls)
    ]


def _print(runs: dict[str, Run], limit: Any, ceiling: float, plan: Any, budgets: Any) -> None:
    shares = [
        f"{budgets[name] / full:.0%}"
        for name, full in (
            ("vram_budget", plan.vram_full_bytes),
            ("ram_budget", plan.ram_full_bytes),
        )
    ]
    print(
        f"{plan.path.name}: {plan.routed_bytes / 1e9:.3g} GB of experts, device {shares[0]}, "
        f"RAM {shares[1]}; drive {ceiling:.2f} GB/s"
    )
    print(
        f"{'mode':<10}{'token/s':>9}{'stall ms':>10}{'dev hit':>9}{'RAM hit':>9}{'MB read':>9}"
        f"{'wasted':>8}{'GB/s':>7}{'of drive':>9}{'recall':>8}{'of bound':>9}"
    )
    for r in (run.row for run in runs.values()):
        print(
            f"{r.mode:<10}{r.tokens_per_s:9.2f}{r.stall_ms:10.2f}{r.device_hits:9.1%}"
            f"{r.ram_hits:9.1%}{r.read_bytes / 1e6:9.2f}{r.wasted_bytes / 1e6:8.2f}{r.gbps:7.2f}"
            f"{r.of_ceiling:9.0%}{r.recall:8.1%}{r.of_bound:9.1%}"
        )
    print(
        f"bounds: no cache {limit['no_cache_tokens_per_s']:.2f}, compute alone "
        f"{limit['compute_tokens_per_s']:.2f}, clairvoyant {limit['clairvoyant_tokens_per_s']:.2f} "
        f"token/s ({limit['belady_bytes_per_step'] / 1e6:.2f} MB per token)"
    )


def _size(text: str, full: int, least: int) -> int:
    value = float(text)
    if not value:
        return 0
    return max(least, int(value * full) if value <= 1 else int(value))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="GGUF file (default: built-in)")
    parser.add_argument("-p", "--prompt", default="Once upon a time there was a")
    parser.add_argument("-n", "--max-tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=16, help="tokens before measuring")
    parser.add_argument("--vram", default="0.4", help="bytes, or a share of all experts")
    parser.add_argument("--ram", default="0")
    parser.add_argument("--gbps", type=float, help="pace reads to a drive of 1e9 bytes/s")
    parser.add_argument("--latency-us", type=float, default=100.0)
    parser.add_argument("--queue-depth", type=int, default=8)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--corrections", help="file of tools/fit_lookahead.py, for `learned`")
    parser.add_argument("--picture", metavar="OUT.png")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
