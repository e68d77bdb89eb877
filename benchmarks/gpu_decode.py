"""Decode with everything resident: milliseconds per token and layer, and where they go.

    python tools/make_full_shape.py /dev/shm/flash.gguf --layers 12 --experts 16
    python benchmarks/gpu_decode.py /dev/shm/flash.gguf

Fewer experts than the real model's 256 fit into memory faster; a token touches as many bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "models"))

from resident import Resident

from aprefetch.kernels.triton.ops import TritonOps
from aprefetch.models.base import Chunk


def tokens(resident: Resident, n_prompt: int, n: int, logits: str) -> tuple[float, float]:
    """Median milliseconds of a token, and of its host part (until the last launch returned)."""
    rng = np.random.default_rng(0)
    state = resident.model.new_state()
    vocab = resident.model.info.n_vocab
    for _ in range(0, n_prompt, 64):
        resident.step([Chunk(state, rng.integers(vocab, size=64), "none")])
    whole, host = [], []
    for _ in range(n):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        resident.step([Chunk(state, rng.integers(vocab, size=1), logits)])
        host.append(time.perf_counter_ns() - begin)
        torch.cuda.synchronize()
        whole.append(time.perf_counter_ns() - begin)
    return statistics.median(whole[5:]) / 1e6, statistics.median(host[5:]) / 1e6


def replays(resident: Resident) -> list[float]:
    """Microseconds of each layer's captured stretch, of the head, and of the experts, alone."""
    decoder = resident.model._decoder
    graphs = list(decoder._graphs.values())[-1] + list(decoder._expert_graphs.values())
    out = []
    for graph in graphs:
        times = []
        for _ in range(20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000)
        out.append(statistics.median(times))
    return out


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    began = time.perf_counter()
    resident = Resident(args.path, TritonOps("cuda"), "cuda")
    n = resident.model.info.n_layers
    print(f"{n} layers loaded in {time.perf_counter() - began:.1f} s")
    for name, logits in (("one by one", "all"), ("captured", "last")):
        began = time.perf_counter()
        total, host = tokens(resident, args.prompt, args.tokens, logits)
        print(
            f"{name:12} {total:7.2f} ms/token {total / n:7.3f} ms/layer, host busy {host:7.2f} ms, "
            f"({time.perf_counter() - began:.1f} s with compiling)"
        )
    print("captured stretches alone, us:", " ".join(f"{us:.0f}" for us in replays(resident)))
    total, host = tokens(resident, 4096, args.tokens, "last")
    print(f"after 4096 tokens (indexer at work): {total:.2f} ms/token {total / n:.3f} ms/layer")
    print("captured stretches alone, us:", " ".join(f"{us:.0f}" for us in replays(resident)))
    rng = np.random.default_rng(1)
    for _ in range(2):
        state = resident.model.new_state()
        torch.cuda.synchronize()
        began = time.perf_counter()
        resident.step([Chunk(state, rng.integers(resident.model.info.n_vocab, size=512), "last")])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    print(f"prefill of 512 tokens, resident: {seconds / n * 1e3:.1f} ms/layer")
    print(f"device memory in use: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
