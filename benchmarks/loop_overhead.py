"""How much of the event loop's time does the coordinator take per decoded token?

A synthetic model with no math: every layer asks for its experts, takes the leases, releases them
and ends; everything is resident. The aim is under 1 ms per token at 43 layers x 6 experts. The
table is for people; the last line is JSON.

    python benchmarks/loop_overhead.py [--layers 43] [--top-k 6] [--tokens 300]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from aprefetch.device.cpu import CpuDevice
from aprefetch.pipeline.coordinator import Coordinator
from aprefetch.pipeline.reader import ThreadReader
from aprefetch.stats import Counters
from aprefetch.types import (
    ALIGNMENT,
    ROLES,
    AlignedRead,
    ExpertKey,
    LayerLayout,
    Piece,
    ReadPlan,
    RoleLayout,
)

ROLE_BYTES = 256
LIMIT_MS = 1.0


class SmallExperts:
    """Objects of 768 bytes, one aligned sector each."""

    alignment = ALIGNMENT
    tensor_names: frozenset[str] = frozenset()

    def __init__(self, path: Path, n_layers: int, n_experts: int) -> None:
        roles = tuple(
            RoleLayout(role=role, ggml_type=0, n_out=1, n_in=ROLE_BYTES, n_bytes=ROLE_BYTES)
            for role in ROLES
        )
        self.paths = (path,)
        self.layers = {
            i: LayerLayout(layer=i, n_experts=n_experts, roles=roles) for i in range(n_layers)
        }
        self._n_experts = n_experts
        path.write_bytes(bytes(ALIGNMENT) * n_layers * n_experts)

    def read_plan(self, key: ExpertKey) -> ReadPlan:
        at = (key.layer * self._n_experts + key.expert) * ALIGNMENT
        read = AlignedRead(file=0, offset=at, length=ALIGNMENT, needed=ALIGNMENT, landing_offset=0)
        pieces = tuple(
            Piece(landing_offset=i * ROLE_BYTES, device_offset=i * ROLE_BYTES, n_bytes=ROLE_BYTES)
            for i in range(3)
        )
        return ReadPlan(key=key, reads=(read,), pieces=pieces, landing_bytes=ALIGNMENT)

    def max_landing_bytes(self, layer: int) -> int:
        return ALIGNMENT


async def measure(path: Path, n_layers: int, top_k: int, n_tokens: int) -> float:
    """Median ns per token of the coordinator's calls on this loop, all hits."""
    n_experts = 8 * top_k
    experts = SmallExperts(path, n_layers, n_experts)
    counters, device = Counters(), CpuDevice()
    reader = ThreadReader(experts.paths, counters=counters)
    coordinator = Coordinator(
        experts, device, reader, vram_budget=1 << 40, ram_budget=1 << 40, counters=counters
    )
    try:
        for layer in range(n_layers):
            with coordinator.demand(layer, range(n_experts)) as demand:
                while leases := await demand.wait():
                    demand.release(leases)
        rng = random.Random(0)
        took = []
        for _ in range(n_tokens):
            picks = [sorted(rng.sample(range(n_experts), top_k)) for _ in range(n_layers)]
            start = time.perf_counter_ns()
            for layer, picked in enumerate(picks):
                demand = coordinator.demand(layer, picked)
                leases = demand.take()
                while leases:
                    demand.release(leases)
                    leases = demand.take() or await demand.wait()
                demand.close()
                coordinator.end_layer(layer)
            took.append(time.perf_counter_ns() - start)
            await asyncio.sleep(0)
        assert counters.hits_device == n_tokens * n_layers * top_k
        return sorted(took)[len(took) // 2]
    finally:
        await coordinator.aclose()
        await reader.aclose()
        device.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=43)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    factories = {"asyncio": asyncio.new_event_loop}
    try:
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    except ImportError:
        pass
    result: dict[str, object] = {"benchmark": "loop_overhead", **vars(args), "limit_ms": LIMIT_MS}
    print(f"{args.layers} layers x {args.top_k} experts, all hits; limit {LIMIT_MS} ms per token")
    print(f"{'loop':<10}{'us/layer':>10}{'ms/token':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for name, factory in factories.items():
            with asyncio.Runner(loop_factory=factory) as runner:
                path = Path(folder) / "experts.bin"
                ns = runner.run(measure(path, args.layers, args.top_k, args.tokens))
            print(f"{name:<10}{ns / args.layers / 1e3:>10.2f}{ns / 1e6:>10.3f}")
            result[f"{name}_ms_per_token"] = round(ns / 1e6, 4)
            result[f"{name}_us_per_layer"] = round(ns / args.layers / 1e3, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
