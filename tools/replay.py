"""Replay a routing trace at any budgets, policy, lookahead and drive; print hits, stalls, bounds.

    python tools/replay.py TRACE.npz [--vram 0.2] [--ram 0.1] [--policy layered] [--guesses trace]
        [--depth 1] [--width N] [--gbps 7] [--latency-us 80] [--queue-depth 8] [--compute-us ...]
    python tools/replay.py TRACE.npz --geometry v4-flash --vram 20e9 --ram 32e9

The coordinator, caches, lookahead and step driver are the product's own (see `replay_parts`). With
a trace that was recorded settled, hits repeat exactly. Budgets below 1 are shares of all experts'
bytes. `--geometry` replays synthetic routing of a large model, whose skew, reuse and predictability
are fitted to the trace (see `synthetic_routing`). The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from belady import belady_misses
from replay_parts import Costs, SimDevice, SimDisk, SimExperts, SimModel, VirtualLoop, virtual_time

from aprefetch.config import LookaheadConfig, RamTier
from aprefetch.engine.step import StepRunner
from aprefetch.models.base import Chunk
from aprefetch.pipeline import budget
from aprefetch.pipeline.coordinator import Coordinator
from aprefetch.pipeline.lookahead import Lookahead, Misled, Replay, RoutedLayer
from aprefetch.routing_trace import RoutingRecorder, RoutingTrace
from aprefetch.stats import Counters
from aprefetch.trace import Tracer

__all__ = ["Outcome", "Setting", "bounds", "replay"]

Guesses = Literal["trace", "perfect", "wrong", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What to replay with. Budgets in bytes; `latency_s` includes what threads and timers add."""

    vram_budget: int
    ram_budget: int
    policy: str = "layered"
    ram_tier: RamTier = "inclusive"
    guesses: Guesses = "trace"
    depth: int = 1
    width: int | None = None
    adaptive: bool = False  # the product's own pace; else as wide as the trace or `width`
    guess_share: float = 0.25
    gbps: float = 7.0
    latency_s: float = 80e-6
    queue_depth: int = 8
    upload_gbps: float = 50.0
    costs: Costs = field(default_factory=Costs)
    settled: bool = False


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of it. Times are virtual seconds; "decode" are steps of one row."""

    counters: Counters
    trace: RoutingTrace
    tracer: Tracer | None
    decode_s: float
    n_decoded: int
    total_s: float
    disk_busy_s: float
    bytes_read: int

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second."""
        return self.n_decoded / self.decode_s if self.decode_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        c = self.counters
        lookups = max(1, c.hits_device + c.misses_device)
        steps = max(1, c.steps)
        return {
            "tokens_per_s": self.tokens_per_s,
            "hits_device": c.hits_device,
            "misses_device": c.misses_device,
            "hits_ram": c.hits_ram,
            "misses_ram": c.misses_ram,
            "device_hit_rate": c.hits_device / lookups,
            "ram_hit_rate": c.hits_ram / max(1, c.misses_device),
            "bytes_read_per_step": self.bytes_read / steps,
            "bytes_wasted_per_step": c.bytes_wasted / steps,
            "demotions_per_step": c.demotions / steps,
            "uploads_per_step": c.uploads / steps,
            "guesses_issued": c.guesses_issued,
            "guesses_useful": c.guesses_useful,
            "guesses_wasted": c.guesses_wasted,
            "guesses_dropped": c.guesses_dropped,
            "stall_s": c.stall_ns / 1e9,
            "stall_ms_per_step": c.stall_ns / 1e6 / steps,
            "total_s": self.total_s,
            "disk_busy": self.disk_busy_s / self.total_s if self.total_s else 0.0,
        }


class _TraceGuesses:
    """A lookahead strategy: what the traced run guessed at the same place."""

    def __init__(self, model: SimModel, trace: RoutingTrace, width: int | None) -> None:
        self._model, self._trace, self._width = model, trace, width

    def guess(self, layer: int, scores: torch.Tensor) -> list[int]:
        """See `Strategy`."""
        rows = self._trace.guessed(self._model.call)
        mine = rows["expert"][rows["layer"] == layer].tolist()
        is_one = int(self._trace.calls["n_rows"][self._model.call]) == 1
        return mine[: self._width] if self._width is not None and is_one else mine

    def saw(self, layer: int, picked: Sequence[int]) -> None:
        """See `Strategy`."""


def replay(
    trace: RoutingTrace,
    setting: Setting,
    *,
    experts: SimExperts | None = None,
    with_spans: bool = False,
) -> Outcome:
    """Run all steps of the trace.

    Raises:
        BudgetError: a budget is below the minimum.
    """
    with virtual_time() as loop:
        return loop.run_until_complete(_run(trace, setting, experts, with_spans, loop))


async def _run(
    trace: RoutingTrace,
    setting: Setting,
    experts: SimExperts | None,
    with_spans: bool,
    loop: VirtualLoop,
) -> Outcome:
    experts = experts or SimExperts.of(trace)
    counters, recorder = Counters(), RoutingRecorder(trace.meta)
    tracer = Tracer(2_000_000, {"model": trace.meta["model"]}) if with_spans else None
    device = SimDevice(setting.upload_gbps, is_duplex=not setting.settled)
    disk = SimDisk(
        gbps=setting.gbps,
        latency_s=setting.latency_s,
        queue_depth=setting.queue_depth,
        counters=counters,
    )
    model = SimModel(trace, device, setting.costs)
    device_any: Any = device
    coordinator = Coordinator(
        experts,
        device_any,
        disk,
        vram_budget=setting.vram_budget,
        ram_budget=setting.ram_budget,
        policy=setting.policy,
        ram_tier=setting.ram_tier,
        counters=counters,
        tracer=tracer,
        guess_share=setting.guess_share,
    )
    model_any: Any = model
    runner = StepRunner(
        model_any,
        coordinator,
        _lookahead(trace, setting, model, device, counters),
        device_any,
        counters,
        tracer,
        recorder=recorder,
        settled=setting.settled,
    )
    decode_s, n_decoded = 0.0, 0
    n_rows = trace.steps["n_rows"].tolist()
    state: Any = None
    for step, rows in enumerate(n_rows):
        start_s = loop.time()
        await runner.step([Chunk(state, np.full(rows, step, np.int64))])
        if step + 1 < len(n_rows) and n_rows[step + 1] == 1:
            runner.announce(np.array([step + 1]))
        if setting.costs.head_ns is None and step + 1 < len(n_rows) and n_rows[step + 1] == 1:
            gap_ns = int(trace.steps["start_ns"][step + 1] - trace.steps["end_ns"][step])
            await asyncio.sleep(max(0, gap_ns) / 1e9)
        if rows == 1:
            decode_s += loop.time() - start_s
            n_decoded += 1
    total_s = loop.time()
    await coordinator.aclose()
    return Outcome(
        counters=counters,
        trace=recorder.trace(tracer.loads() if tracer is not None else ()),
        tracer=tracer,
        decode_s=decode_s,
        n_decoded=n_decoded,
        total_s=total_s,
        disk_busy_s=disk.busy_s,
        bytes_read=disk.bytes_read,
    )


def _lookahead(
    trace: RoutingTrace, setting: Setting, model: SimModel, device: SimDevice, counters: Counters
) -> Lookahead | None:
    if setting.guesses == "off" or setting.depth == 0:
        return None
    meta = trace.meta
    layers = {
        n: RoutedLayer(meta["n_experts"], meta["num_experts_per_tok"], meta["object_bytes"][str(n)])
        for n in trace.layers
    }
    picks = (
        [(int(c["layer"]), trace.picked(i)["expert"].tolist()) for i, c in enumerate(trace.calls)]
        if setting.guesses != "trace"
        else []
    )
    strategy: Any = {
        "trace": lambda: _TraceGuesses(model, trace, setting.width),
        "perfect": lambda: Replay(picks),
        "wrong": lambda: Misled(picks, layers),
    }[setting.guesses]()
    nothing = torch.empty(1, 0)

    def router(streams: torch.Tensor) -> torch.Tensor:
        device.spend(model.guess_ns() / setting.depth)
        return nothing

    token_routed = set(meta["token_routed_layers"])
    routers = {n: router for n in trace.layers if n not in token_routed}
    options = LookaheadConfig(
        depth=setting.depth,
        width=setting.width,
        max_experts=None if setting.adaptive else meta["n_experts"],
    )
    return Lookahead(routers, layers, options, counters, strategy=strategy)


def demands_of(trace: RoutingTrace) -> list[list[int]]:
    """Objects of each call, numbered layer by layer."""
    n_experts = int(trace.meta["n_experts"])
    index = {layer: i for i, layer in enumerate(trace.layers)}
    return [
        (index[int(row["layer"])] * n_experts + trace.picked(i)["expert"].astype(int)).tolist()
        for i, row in enumerate(trace.calls)
    ]


def bounds(trace: RoutingTrace, setting: Setting, experts: SimExperts | None = None) -> dict:
    """Bytes per step without a cache and with Belady's over both tiers, and token/s they allow.

    A clairvoyant system hides all it can: a step takes its compute or its reads, the longer of the
    two. The two tiers count as one cache of their bytes together, per size class.
    """
    experts = experts or SimExperts.of(trace)
    n_experts = int(trace.meta["n_experts"])
    payload = {layer: layout.payload_bytes for layer, layout in experts.layers.items()}
    classes = budget.device_classes(experts)  # type: ignore[arg-type]
    plans = budget.divide(classes, setting.vram_budget, option="vram_budget")
    full = sum(c.n_objects * c.slot_bytes for c in classes)
    ram_share = setting.ram_budget / max(1, full)
    demands = demands_of(trace)
    layer_of_call = [int(layer) for layer in trace.calls["layer"]]
    bytes_by_call = np.zeros(len(demands))
    for plan in plans:
        mine = [i for i, layer in enumerate(layer_of_call) if layer in plan.size_class.layers]
        n_ram = int(ram_share * plan.size_class.n_objects)
        capacity = min(plan.n_slots + n_ram, plan.size_class.n_objects)
        misses = belady_misses([demands[i] for i in mine], capacity)
        for i, n in zip(mine, misses, strict=True):
            bytes_by_call[i] = n * payload[layer_of_call[i]]
    n_steps = len(trace.steps)
    by_step = np.bincount(trace.calls["step"], bytes_by_call, n_steps)
    all_bytes = np.bincount(
        trace.calls["step"],
        [len(d) * payload[n] for d, n in zip(demands, layer_of_call, strict=True)],
        n_steps,
    )
    compute_s = _compute_s(trace, setting.costs)
    decode = trace.steps["n_rows"] == 1
    per_s = setting.gbps * 1e9
    n = max(1, int(decode.sum()))
    clairvoyant_s = np.maximum(compute_s, by_step / per_s)[decode].sum()
    return {
        "n_objects": n_experts * len(payload),
        "no_cache_bytes_per_step": float(all_bytes.mean()),
        "belady_bytes_per_step": float(by_step.mean()),
        "no_cache_tokens_per_s": n / float((compute_s + all_bytes / per_s)[decode].sum()),
        "clairvoyant_tokens_per_s": n / float(clairvoyant_s),
        "compute_tokens_per_s": n / float(compute_s[decode].sum()),
    }


def _compute_s(trace: RoutingTrace, costs: Costs) -> np.ndarray:
    """Seconds of compute of each step."""
    calls, n_steps = trace.calls, len(trace.steps)

    def total(stated: float | None, name: str) -> np.ndarray:
        each = calls[f"{name}_ns"].astype(float) if stated is None else np.full(len(calls), stated)
        return np.bincount(calls["step"], each, n_steps)

    experts = (
        calls["experts_ns"].astype(float)
        if costs.expert_ns is None
        else calls["n_picks"] * costs.expert_ns
    )
    waits = np.bincount(calls["step"], calls["wait_ns"].astype(float), n_steps)
    spans = (trace.steps["end_ns"] - trace.steps["start_ns"]).astype(float) - waits
    parts = sum(total(None, n) for n in ("dense", "guess", "shared", "experts"))
    head = np.maximum(0, spans - parts) if costs.head_ns is None else costs.head_ns
    return (
        total(costs.dense_ns, "dense")
        + total(costs.guess_ns, "guess")
        + total(costs.shared_ns, "shared")
        + np.bincount(calls["step"], experts, n_steps)
        + head
    ) / 1e9


def _bytes(text: str, full: int) -> int:
    value = float(text)
    return int(value * full) if value <= 1 else int(value)


def main() -> int:
    """The command."""
    args = _arguments()
    trace = RoutingTrace.load(args.trace)
    experts = SimExperts.of(trace)
    if args.geometry:
        from synthetic_routing import GEOMETRIES, fit, generate

        geometry = GEOMETRIES[args.geometry]
        trace = generate(geometry, fit(trace), n_tokens=args.tokens, seed=0)
        experts = SimExperts.of(trace)
    full = sum(c.n_objects * c.slot_bytes for c in budget.device_classes(experts))  # type: ignore[arg-type]
    costs = Costs()
    if args.compute_us is not None:
        per_layer, per_expert, head = (float(x) * 1e3 for x in args.compute_us.split(","))
        costs = Costs(
            dense_ns=per_layer * 0.85,
            guess_ns=per_layer * 0.05,
            shared_ns=per_layer * 0.1,
            expert_ns=per_expert,
            head_ns=head,
        )
    setting = Setting(
        vram_budget=_bytes(args.vram, full),
        ram_budget=_bytes(args.ram, full),
        policy=args.policy,
        ram_tier=args.ram_tier or ("exclusive" if args.geometry else "inclusive"),
        guesses=args.guesses,
        depth=args.depth,
        width=args.width,
        adaptive=args.adaptive,
        gbps=args.gbps,
        latency_s=args.latency_us / 1e6,
        queue_depth=args.queue_depth,
        upload_gbps=args.upload_gbps,
        costs=costs,
        settled=args.settled,
    )
    result = replay(trace, setting, experts=experts).to_dict()
    limit = bounds(trace, setting, experts)
    print(f"{len(trace.steps)} steps, {limit['n_objects']} objects, {full / 1e9:.3g} GB of experts")
    for name, value in {**result, **limit}.items():
        print(f"{name:<28} {value:,.4g}" if isinstance(value, float) else f"{name:<28} {value:,}")
    print(
        "share of the clairvoyant bound "
        f"{result['tokens_per_s'] / limit['clairvoyant_tokens_per_s']:.1%}"
    )
    stated = {k: v for k, v in asdict(setting).items() if k != "costs"}
    print(json.dumps({"setting": stated, **result, "bounds": limit}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--vram", default="0.2", help="bytes, or a share of all experts (0.2)")
    parser.add_argument("--ram", default="0", help="bytes, or a share; 0: off")
    parser.add_argument("--policy", default="layered")
    parser.add_argument(
        "--ram-tier",
        choices=("exclusive", "inclusive"),
        help="by default what the runtime chooses: exclusive on a GPU, which --geometry stands for",
    )
    parser.add_argument("--guesses", choices=("trace", "perfect", "wrong", "off"), default="trace")
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--width", type=int, help="most guesses per layer and row")
    parser.add_argument("--adaptive", action="store_true", help="the runtime's own widths")
    parser.add_argument("--gbps", type=float, default=7.0, help="drive, 1e9 bytes/s")
    parser.add_argument("--latency-us", type=float, default=80.0)
    parser.add_argument("--queue-depth", type=int, default=8)
    parser.add_argument("--upload-gbps", type=float, default=50.0)
    parser.add_argument("--compute-us", metavar="LAYER,EXPERT,HEAD", help="instead of the trace's")
    parser.add_argument("--settled", action="store_true")
    parser.add_argument("--geometry", choices=("v4-flash", "kimi-k3"))
    parser.add_argument("--tokens", type=int, default=64, help="of synthetic routing")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
