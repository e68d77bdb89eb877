"""Bandwidth of the expert and dense kernels at V4-Flash shapes, beside the copy bandwidth.

    python benchmarks/gpu_kernels.py

Times are medians over CUDA graph replays that rotate among expert sets larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from aprefetch.kernels.triton import matvec
from aprefetch.kernels.triton.experts import expert_planes
from aprefetch.kernels.triton.ops import TritonOps
from aprefetch.quant import row_bytes, type_name
from aprefetch.quant.base import QuantTensor
from aprefetch.types import LayerLayout, RoleLayout, align_up

D, F, TOP_K, SETS = 4096, 2048, 6, 8
TYPES = (39, 8, 10, 11, 12, 13, 14, 30)


def timed(calls: list[Callable[[], None]], repeats: int = 7) -> float:
    """Microseconds per call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def copy_bandwidth(repeats: int = 7) -> float:
    """GB/s, read and written bytes counted, of a plain copy much larger than the L2 cache."""
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    b.copy_(a)
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            b.copy_(a)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 4)
    return 2 * a.numel() / statistics.median(times) / 1e6


def fill(n_bytes: int, ggml_type: int) -> torch.Tensor:
    """Random bytes whose scales are sane: exponent bytes near 2^0, halves near 1."""
    data = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, device="cuda")
    if ggml_type == 39:
        data.view(-1, 17)[:, 0] = 120
    else:
        data &= 0x3B  # no exponent field is all ones
    return data


def layout_of(ggml_type: int) -> LayerLayout:
    def role(name, n_out, n_in):
        n_bytes = n_out * row_bytes(ggml_type, n_in)
        return RoleLayout(role=name, ggml_type=ggml_type, n_out=n_out, n_in=n_in, n_bytes=n_bytes)

    roles = (role("gate", F, D), role("up", F, D), role("down", D, F))
    return LayerLayout(layer=0, n_experts=256, roles=roles)


def experts(ops: TritonOps, ggml_type: int, n_rows: int) -> tuple[float, float, int]:
    """Microseconds of gate+up and of down, and weight bytes, for TOP_K experts of `n_rows` rows.

    The first time includes what prepares inputs of either.
    """
    torch.manual_seed(0)
    layout = layout_of(ggml_type)
    stride = align_up(layout.device_bytes, 256)
    arena = fill(stride * TOP_K * SETS // 17 * 17, ggml_type)
    tokens = 1 if n_rows == 1 else 2 if n_rows == 2 else 4
    tiles = [
        (e, e * n_rows + i, min(tokens, n_rows - i))
        for e in range(TOP_K)
        for i in range(0, n_rows, tokens)
    ]
    pairs = torch.arange(TOP_K * n_rows, device="cuda")
    x, hidden = (
        torch.randn(n_rows * TOP_K, D, device="cuda"),
        torch.empty(n_rows * TOP_K, F, device="cuda"),
    )
    planes, out = expert_planes(x, hidden), torch.empty(n_rows * TOP_K, D, device="cuda")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    calls = []
    for s in range(SETS):
        table = torch.tensor([((s * TOP_K + e) * stride, b, n) for e, b, n in tiles], device="cuda")
        calls.append(
            lambda table=table: ops.experts_from_table(
                x, arena, layout, table, len(tiles), 1, counter, pairs, 10.0, hidden, planes, out,
                pairs, tokens,
            )
        )  # fmt: skip
    both = timed(calls)
    real = matvec.expert_down_kernel

    class Nothing:
        def __getitem__(self, grid):
            return lambda *a, **k: None

    matvec.expert_down_kernel = Nothing()
    first = timed(calls)
    matvec.expert_down_kernel = real
    return first, both - first, layout.payload_bytes * TOP_K


def dense(ops: TritonOps, ggml_type: int, n_out: int, n_in: int, n_rows: int) -> tuple[float, int]:
    n_bytes = row_bytes(ggml_type, n_in)
    count = max(1, 200_000_000 // (n_out * n_bytes))
    weights = [
        QuantTensor(fill(n_out * n_bytes, ggml_type).view(n_out, -1), ggml_type, n_out, n_in)
        for _ in range(min(count, 24))
    ]
    x, out = torch.randn(n_rows, n_in, device="cuda"), torch.empty(n_rows, n_out, device="cuda")
    return timed([lambda w=w: ops.linear_into(x, w, out) for w in weights]), n_out * n_bytes


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    ops = TritonOps("cuda")
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy:.0f} GB/s (read + write)")
    print("type    rows  gate+up us  down us  GB/s of weights   % of copy")
    for ggml_type in TYPES:
        for n_rows in (1, 8) if ggml_type == 39 else (1,):
            first, second, n_bytes = experts(ops, ggml_type, n_rows)
            rate = n_bytes / (first + second) / 1e3
            print(
                f"{type_name(ggml_type):7} {n_rows:4}  {first:9.1f} {second:9.1f}  {rate:9.0f}"
                f"  {100 * rate / copy:12.1f}"
            )
    print("dense   rows  shape            us    GB/s   % of copy")
    for ggml_type, n_out, n_in in (
        (8, 1536, 4096), (8, 32768, 1024), (8, 4096, 8192), (8, 4096, 4096), (8, 4096, 2048),
        (30, 2048, 4096), (30, 256, 4096), (30, 65536, 4096),
    ):  # fmt: skip
        for n_rows in (1, 512) if n_out == 4096 and n_in == 4096 else (1,):
            us, n_bytes = dense(ops, ggml_type, n_out, n_in, n_rows)
            rate = n_bytes / us / 1e3
            print(
                f"{type_name(ggml_type):7} {n_rows:4}  {n_out:6} x {n_in:5} {us:8.1f} {rate:8.0f}"
                f" {100 * rate / copy:8.1f}"
            )


if __name__ == "__main__":
    main()
