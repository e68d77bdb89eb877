"""How fast the CPU kernels read weights, by block format and batch.

    python benchmarks/cpu_kernels.py [--rows 2048] [--inputs 4096] [--threads 1] [--types Q8_0 ...]

The ceiling is a plain sum over memory, measured in the same run with the same number of threads on
a block of the same size: where a weight fits into a cache, so does the ceiling's. Best of several
passes, since other programs can only make a pass slower. The last line is JSON for scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable

import torch

from aprefetch.kernels.cpu import cpu_ops
from aprefetch.quant import SUPPORTED, row_bytes
from aprefetch.quant.base import QuantTensor

BATCHES = (1, 8, 64)
NAMES = {f.name: f.ggml_type for f in SUPPORTED.values()}


def best_seconds(call: Callable[[], object], budget_s: float) -> float:
    """The shortest of as many runs as fit into the budget, at least three."""
    call()
    best, stop, n = float("inf"), time.perf_counter() + budget_s, 0
    while n < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        n += 1
    return best


def random_weight(ggml_type: int, n_out: int, n_in: int) -> QuantTensor:
    """Random bytes: speed does not depend on them, but NaN and subnormal numbers are kept out."""
    raw = torch.randint(0, 64, (n_out, row_bytes(ggml_type, n_in)), dtype=torch.uint8)
    return QuantTensor(raw, ggml_type, n_out, n_in)


def memory_ceiling(n_bytes: int, threads: int, budget_s: float) -> float:
    """GB/s of reading a block of `n_bytes` of float32 and summing it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        block = torch.ones(n_bytes // 4)
        return n_bytes / best_seconds(block.sum, budget_s) / 1e9
    finally:
        torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="per cell")
    parser.add_argument("--kernels", choices=("numba", "reference"), default="numba")
    parser.add_argument("--types", nargs="+", choices=sorted(NAMES), default=list(NAMES))
    args = parser.parse_args()

    ops = cpu_ops(args.kernels, args.threads)
    if args.kernels == "reference":
        torch.set_num_threads(args.threads)
    cells = []
    print(
        f"{args.rows} x {args.inputs}, {args.threads} thread(s), {ops.name}; {platform.machine()}"
    )
    head = "".join(f"{f'batch {n}':>9}{'GFLOP/s':>9}" for n in BATCHES)
    print(f"{'type':8}{'MB':>7}{'ceiling':>9}{head}{'of ceiling':>12}   (GB/s of weight bytes)")
    for name in args.types:
        w = random_weight(NAMES[name], args.rows, args.inputs)
        ceiling = memory_ceiling(w.n_bytes, args.threads, args.seconds)
        line, ratio = "", 0.0
        for n in BATCHES:
            x = torch.randn(n, args.inputs)
            seconds = best_seconds(lambda x=x, w=w: ops.linear(x, w), args.seconds)  # type: ignore[misc]
            rate = w.n_bytes / seconds / 1e9
            flops = 2 * n * args.rows * args.inputs / seconds / 1e9
            ratio = rate / ceiling if n == 1 else ratio
            line += f"{rate:9.2f}{flops:9.1f}"
            cells.append(
                {"type": name, "batch": n, "gb_per_s": round(rate, 3),
                 "gflop_per_s": round(flops, 1), "ceiling_gb_per_s": round(ceiling, 2)}
            )  # fmt: skip
        print(f"{name:8}{w.n_bytes / 1e6:7.1f}{ceiling:9.1f}{line}{ratio:12.2f}")
    print(
        json.dumps(
            {
                "benchmark": "cpu_kernels",
                "kernels": ops.name,
                "rows": args.rows,
                "inputs": args.inputs,
                "threads": args.threads,
                "cores": os.cpu_count(),
                "cells": cells,
            }
        )
    )


if __name__ == "__main__":
    main()
