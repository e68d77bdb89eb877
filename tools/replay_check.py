"""Stall times of timed runs on paced drives, beside those that their replays predict.

    python tools/replay_check.py [-n 48]

Runs the built-in model on four stated drives and budgets. Each run's trace is replayed twice: on
the drive as stated, and with the latency that the run's own reads had on top of it (median read
against median read: threads and timers add to what is stated). The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from replay import Setting, replay

from aprefetch import Runtime
from aprefetch.pipeline.io.wrappers import PacedFiles
from aprefetch.pipeline.reader import make_reader
from aprefetch.routing_trace import RoutingTrace

QUEUE_DEPTH = 4
SETTINGS = (  # GB/s, latency, device and RAM budgets, lookahead depth
    (0.05, 2.0e-3, 3_000_000, 0, 1),
    (0.1, 1.0e-3, 4_000_000, 2_000_000, 1),
    (0.1, 3.0e-3, 2_000_000, 0, 0),
    (0.2, 0.5e-3, 5_000_000, 0, 2),
)


async def run(setting: Setting, depth: int, n_tokens: int) -> tuple[RoutingTrace, dict[str, Any]]:
    """Two answers on a paced drive."""
    files = PacedFiles(None, bytes_per_s=setting.gbps * 1e9, latency_s=setting.latency_s)
    reader = functools.partial(make_reader, files=files)
    with mock.patch("aprefetch.runtime.make_reader", reader):
        runtime = await Runtime.open(
            vram_budget=setting.vram_budget,
            ram_budget=setting.ram_budget,
            lookahead_depth=depth,
            queue_depth=QUEUE_DEPTH,
            trace=True,
            trace_routing=True,
        )
    async with runtime:
        for prompt in ("Once upon a time", "What is a whale?"):
            await runtime.generate(prompt, max_tokens=n_tokens, temperature=0.0)
        return runtime.routing_trace(), runtime.stats().to_dict()


def median_read_s(trace: RoutingTrace) -> float:
    """Seconds of the run's reads."""
    reads = trace.loads[trace.loads["what"] == 0]
    return float(np.median(reads["end_ns"] - reads["start_ns"])) / 1e9


def check(setting: Setting, depth: int, n_tokens: int) -> dict[str, float]:
    """One row."""
    trace, stats = asyncio.run(run(setting, depth, n_tokens))
    stated = replay(trace, setting, with_spans=True)
    slower_s = max(0.0, median_read_s(trace) - median_read_s(stated.trace))
    measured = replay(trace, replace(setting, latency_s=setting.latency_s + slower_s))
    real_s = stats["stall_ns"] / 1e9
    return {
        "gbps": setting.gbps,
        "latency_us": setting.latency_s * 1e6,
        "vram_budget": setting.vram_budget,
        "ram_budget": setting.ram_budget,
        "depth": depth,
        "stall_s": real_s,
        "as_stated": stated.counters.stall_ns / 1e9 / real_s - 1,
        "reads_slower_us": slower_s * 1e6,
        "as_measured": measured.counters.stall_ns / 1e9 / real_s - 1,
        "hits": stats["hits_device"],
        "hits_as_stated": stated.counters.hits_device,
        "hits_as_measured": measured.counters.hits_device,
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--max-tokens", type=int, default=48)
    args = parser.parse_args()
    rows = []
    for gbps, latency_s, vram, ram, depth in SETTINGS:
        setting = Setting(
            vram_budget=vram,
            ram_budget=ram,
            gbps=gbps,
            latency_s=latency_s,
            queue_depth=QUEUE_DEPTH,
            depth=max(1, depth),
            guesses="trace" if depth else "off",
        )
        row = check(setting, depth, args.max_tokens)
        rows.append(row)
        print(
            f"{gbps} GB/s, {latency_s * 1e3} ms, {vram / 1e6:.0f} + {ram / 1e6:.0f} MB, depth "
            f"{depth}: stalls {row['stall_s']:.3f} s, replay {row['as_stated']:+.1%} as stated, "
            f"{row['as_measured']:+.1%} with reads {row['reads_slower_us']:.0f} us slower; hits "
            f"{row['hits']}, {row['hits_as_stated']}, {row['hits_as_measured']}; "
            f"load {row['load']:.1f}",
            flush=True,
        )
    print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
