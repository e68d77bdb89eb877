"""What guesses are worth, by source, depth and width: over picks, over misses, and how early.

    python tools/lookahead_study.py [-m MODEL.gguf] [--corrections FILE.npz] [-n 128] [--share 0.2]
        [--prompts FILE.json]

Generates answers through the product's own runtime, routers, lookahead
(drift, corrections) and cache policy. For each decoded token and layer every source ranks experts:

- `present`: the router on the streams as they enter the layer before it (or 2, 3 before);
- `shared`: on the streams with that layer's shared expert and mixing; the runtime's state;
- `drift`: that, and the running mean of what scores were short of;
- `late`: that, with the layer's routed experts but for the last of those that miss, as the runtime
  guesses on a CPU: while one read is left, and at once where nothing misses (depth 1 only);
- `fitted`: that, and the corrections of a file of `tools/fit_lookahead.py`;
- `history`: the layer's own uses so far, ageing by half in `--half-life` tokens;
- `union`: the best of the routers' (`fitted`, `late` or `drift`), each with `history` beside it: up
  to twice as many names as the width says.

Misses are those of a device cache with `--share` of all experts and the product's policy, which
only demands fill; the same say what `late` knows. `wasted` is the share of guesses, of those that
were not cached and would have been read, that the layer did not pick. Lead is compute between the
moment of the guess and its layer's turn: medians of this run, without the time of guessing. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from cache_study import walk

from aprefetch import Runtime, embedded
from aprefetch.config import LookaheadConfig
from aprefetch.engine.step import StepRunner
from aprefetch.models.moe import RoutedCall
from aprefetch.pipeline.cache import LfuPolicy, Policy, new_policy
from aprefetch.pipeline.correction import load_corrections, path_beside
from aprefetch.pipeline.lookahead import BestScores, Lookahead, RoutedLayer
from aprefetch.routing_trace import RoutingTrace
from aprefetch.stats import Counters

__all__ = ["Seen", "main", "study"]

DEPTHS = (1, 2, 3)
WIDTHS = (1.0, 1.5, 2.0, 3.0)  # in top-k
SOURCES = ("present", "shared", "drift", "late", "fitted", "history", "union")
BEST = ("fitted", "late", "drift")  # of the routers, the first that there is
PROMPTS: tuple[Any, ...] = (
    "The old man walked down to the river",
    [{"role": "user", "content": "Why is the sky blue?"}],
    "There was a little dog who lived in a",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
    "On the morning of the third day the army began its march",
    [{"role": "user", "content": "Tell me a story about a boat."}],
)
"""Others than `tools/fit_lookahead.py` fits to."""

Rankings = dict[tuple[str, int], list[int]]  # (source, depth) -> the likeliest first


@dataclass(slots=True)
class Seen:
    """One layer's turn: what was picked, and what had been guessed (single rows only)."""

    layer: int
    n_rows: int
    picked: list[int]
    rankings: Rankings = field(default_factory=dict)


class Watching(StepRunner):
    """The step driver, with every source asked where the runtime would guess."""

    corrections_path: Path | None = None
    half_life_tokens = 4.0
    share = 0.2  # of all experts that is cached

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        info = self._model.info
        self.top_k, self.n_experts = info.num_experts_per_tok, info.n_experts
        self.n_tokens = 0
        self.seen: list[Seen] = []
        self.guess_ns: list[int] = []  # of the runtime's way at depth 1
        sizes = {n: RoutedLayer(self.n_experts, self.top_k) for n in info.routed_layers}
        options = LookaheadConfig(depth=max(DEPTHS), width=self.top_k)
        routers = self._model.early_routers
        found = load_corrections(self.corrections_path, "cpu") if self.corrections_path else {}
        self._drift = Lookahead(routers, sizes, options, Counters())
        one_ahead = LookaheadConfig(depth=1, width=self.top_k)
        self._late = {"late": Lookahead(routers, sizes, one_ahead, Counters())}
        if found:
            self._late["fitted"] = Lookahead(
                routers, sizes, one_ahead, Counters(), corrections=found
            )
        self._quick = Lookahead(routers, sizes, LookaheadConfig(depth=1), Counters())
        self._best = BestScores(sizes, min(self.n_experts, round(max(WIDTHS) * self.top_k)))
        self._uses = {n: LfuPolicy(self.half_life_tokens * self.top_k) for n in routers}
        self._coming: dict[int, Rankings] = {}
        self._place = {layer: i * self.n_experts for i, layer in enumerate(info.routed_layers)}
        self._demand: list[int] = []
        n = self.n_experts * len(self._place)
        policy = _policy(n, self.n_experts)
        self._cache = walk(iter(lambda: self._demand, None), policy, int(self.share * n))
        self._unknown: list[int] = []  # places in the row, of the call under way

    def _guesses_late(self, call: RoutedCall) -> bool:
        return False  # what is known then is put together here, by the cache of the study

    async def _guess(self, call: RoutedCall) -> None:
        layer, n_rows = call.layer, call.n_rows
        seen = Seen(layer, n_rows, list(call.experts), self._coming.pop(layer, {}))
        self.seen.append(seen)
        uses = self._uses.get(layer)
        if uses is not None:
            if n_rows == 1:
                ranked = sorted(range(self.n_experts), key=uses.score, reverse=True)
                seen.rankings["history", 0] = ranked
            for row in call.ids:
                for expert in row.tolist():
                    uses.touch(expert)
        first = self._place[layer]
        self._demand = [first + expert for expert in call.experts]
        missing, _ = next(self._cache)
        # Where nothing misses the runtime does not wait for anything, and knows nothing.
        last = missing[-1] - first if missing else None
        self._unknown = [i for i, e in enumerate(call.experts) if last is None or e == last]
        for lookahead in (self._drift, *self._late.values()):
            lookahead.learn(layer, call.ranked)
        self._rank(call)

    def _end_layer(self, call: RoutedCall) -> None:
        """The experts have run: what is known of them when the last one is waited for?"""
        if call.known_weights is not None:
            call.known_weights = call.known_weights.clone()
            call.known_weights[0, self._unknown] = 0.0
        for name, lookahead in self._late.items():
            streams = call.streams if call.ahead is None else call.ahead
            for target, scores in lookahead.look(call.layer, streams, call.x):
                self._note(call, name, target, scores)
        super()._end_layer(call)

    def _rank(self, call: RoutedCall) -> None:
        """Every router's word about the next layers."""
        ahead = call.streams if call.ahead is None else call.ahead()
        for target, scores in self._drift.look(call.layer, ahead):
            self._note(call, "drift", target, scores)
        for name, streams in (("present", call.streams), ("shared", ahead)):
            for depth in DEPTHS:
                router = self._model.early_routers.get(call.layer + depth)
                if router is not None:
                    self._note(call, name, call.layer + depth, router(streams))
        start_ns = time.perf_counter_ns()
        if self._quick.look(call.layer, ahead if call.ahead is None else call.ahead()):
            self.guess_ns.append(time.perf_counter_ns() - start_ns)
        self._quick.forget()

    def _note(self, call: RoutedCall, name: str, target: int, scores: Any) -> None:
        if call.n_rows == 1:
            rankings = self._coming.setdefault(target, {})
            rankings[name, target - call.layer] = self._best.guess(target, scores)


def _policy(n_objects: int, n_experts: int) -> Policy:
    """The product's own, over all layers."""
    layer_of = [item // n_experts for item in range(n_objects)]
    return new_policy("layered", half_life=2.0 * n_objects, layer_of=layer_of)


class Tally:
    """Counts of one source, depth and width."""

    __slots__ = (
        "n_calls",
        "n_fresh",
        "n_fresh_right",
        "n_missed",
        "n_named",
        "n_picked",
        "n_right",
    )

    def __init__(self) -> None:
        self.n_calls = self.n_named = self.n_right = self.n_picked = 0
        self.n_fresh = self.n_fresh_right = self.n_missed = 0

    def add(self, named: set[int], picked: set[int], missed: set[int], cached: set[int]) -> None:
        """One layer's turn. A guess that came true and was not cached is a miss foretold."""
        self.n_calls += 1
        self.n_named += len(named)
        self.n_right += len(named & picked)
        self.n_picked += len(picked)
        self.n_fresh += len(named - cached)
        self.n_fresh_right += len(named & missed)
        self.n_missed += len(missed)

    def row(self) -> dict[str, float]:
        """Shares."""
        return {
            "recall": self.n_right / max(1, self.n_picked),
            "recall_misses": self.n_fresh_right / max(1, self.n_missed),
            "precision": self.n_right / max(1, self.n_named),
            "wasted": 1 - self.n_fresh_right / max(1, self.n_fresh),
            "named": self.n_named / max(1, self.n_calls),
        }


def _named(rankings: Rankings, source: str, depth: int, width: int) -> set[int] | None:
    """What a source named; None where it had no say."""
    if source == "history":
        depth = 0
    if source != "union":
        ranked = rankings.get((source, depth))
        return None if ranked is None else set(ranked[:width])
    routers = next((r for name in BEST if (r := rankings.get((name, depth)))), None)
    if routers is None:
        return None
    return {*routers[:width], *rankings["history", 0][:width]}


def study(
    seen: Sequence[Seen], n_experts: int, top_k: int, share: float, warm_up: int
) -> tuple[list[dict[str, Any]], float]:
    """Rows of the table, and the cache's share of misses, over decoded tokens after `warm_up`."""
    layers = sorted({s.layer for s in seen})
    index = {layer: i for i, layer in enumerate(layers)}
    n = n_experts * len(layers)
    policy = _policy(n, n_experts)
    demands = [[index[s.layer] * n_experts + e for e in s.picked] for s in seen]
    tallies = {
        (source, depth, width): Tally()
        for source in SOURCES
        for depth in (DEPTHS if source != "history" else (1,))
        for width in WIDTHS
    }
    n_steps = n_missed = n_picked = 0
    for s, (missing, cached) in zip(seen, walk(demands, policy, int(share * n)), strict=True):
        n_steps += s.layer == layers[0] and s.n_rows == 1
        if s.n_rows != 1 or n_steps <= warm_up or not s.rankings:
            continue
        first = index[s.layer] * n_experts
        picked, missed = set(s.picked), {item - first for item in missing}
        held = {item - first for item in cached}
        n_missed, n_picked = n_missed + len(missed), n_picked + len(picked)
        for (source, depth, width), tally in tallies.items():
            named = _named(s.rankings, source, depth, round(width * top_k))
            if named is not None:
                tally.add(named, picked, missed, held)
    rows = [
        {"source": source, "depth": depth, "width": width, **tally.row()}
        for (source, depth, width), tally in tallies.items()
        if tally.n_calls
    ]
    return rows, n_missed / max(1, n_picked)


def leads_us(trace: RoutingTrace) -> dict[str, float]:
    """Microseconds from guess to turn: by depth after the shared expert (`1`, `2`, `3`), what more
    there is before it (`shared`), with one expert left (`late`), and from one token to the next
    (`history`)."""
    calls = trace.calls[trace.calls["n_rows"] == 1]

    def median_us(layer: int, part: str) -> float:
        return float(np.median(calls[f"{part}_ns"][calls["layer"] == layer])) / 1e3

    layers = trace.layers
    dense, shared, experts = (
        {layer: median_us(layer, part) for layer in layers}
        for part in ("dense", "shared", "experts")
    )
    whole = {layer: dense[layer] + shared[layer] + experts[layer] for layer in layers}
    targets = set(layers) - set(trace.meta["token_routed_layers"])
    out = {"shared": float(np.mean(list(shared.values()))), "history": sum(whole.values())}
    n_picks = max(1, int(np.median(calls["n_picks"])))
    out["late"] = float(
        np.mean([experts[n] / n_picks + dense[n + 1] for n in layers if n + 1 in targets])
    )
    for depth in DEPTHS:
        out[str(depth)] = float(
            np.mean(
                [
                    experts[n] + sum(whole[m] for m in range(n + 1, n + depth)) + dense[n + depth]
                    for n in layers
                    if n + depth in targets
                ]
            )
        )
    return out


async def collect(
    model: str | None, prompts: Sequence[Any], n_tokens: int
) -> tuple[Watching, RoutingTrace]:
    """Generate the answers; the driver holds what was seen."""
    made: list[Watching] = []

    def make(*args: Any, **kwargs: Any) -> Watching:
        made.append(Watching(*args, **kwargs))
        return made[0]

    with mock.patch("aprefetch.runtime.StepRunner", make):
        runtime = await Runtime.open(model, lookahead="off", trace_routing=True)
    async with runtime:
        for seed, prompt in enumerate(prompts):
            await runtime.generate(
                prompt, max_tokens=n_tokens, temperature=0.8, top_p=0.95, seed=seed, ignore_eos=True
            )
        return made[0], runtime.routing_trace()


def _print(rows: Sequence[dict[str, Any]], leads: dict[str, float], top_k: int) -> None:
    print(
        f"{'source':<9}{'depth':>6}{'width':>6}{'recall':>9}{'of misses':>10}{'precision':>10}"
        f"{'wasted':>8}{'named':>7}{'lead us':>9}"
    )
    for row in rows:
        print(
            f"{row['source']:<9}{row['depth'] or '-':>6}{round(row['width'] * top_k):>6}"
            f"{row['recall']:9.3f}{row['recall_misses']:10.3f}{row['precision']:10.3f}"
            f"{row['wasted']:8.3f}{row['named']:7.1f}{row['lead_us']:9.0f}"
        )
    print(f"the shared expert takes {leads['shared']:.0f} us, all layers {leads['history']:.0f} us")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="GGUF file (default: built-in)")
    parser.add_argument("--corrections", help="default: NAME.lookahead.npz beside the model")
    parser.add_argument("--prompts", help="JSON list of prompts (default: built-in)")
    parser.add_argument("-n", "--max-tokens", type=int, default=128, help="per prompt")
    parser.add_argument("--share", type=float, default=0.2, help="of all experts that is cached")
    parser.add_argument("--half-life", type=float, default=4.0, help="of history, in tokens")
    parser.add_argument("--warm-up", type=int, default=32, help="tokens before counting")
    args = parser.parse_args()
    path = Path(args.model or embedded.MODEL_PATH)
    Watching.corrections_path = Path(args.corrections) if args.corrections else path_beside(path)
    Watching.half_life_tokens, Watching.share = args.half_life, args.share
    prompts = json.loads(Path(args.prompts).read_text()) if args.prompts else PROMPTS
    watching, trace = asyncio.run(collect(args.model, prompts, args.max_tokens))
    top_k = watching.top_k
    rows, miss_rate = study(watching.seen, watching.n_experts, top_k, args.share, args.warm_up)
    leads = leads_us(trace)
    for row in rows:
        source, depth = row["source"], str(row["depth"])
        if source in ("late", "fitted") or (source == "union" and depth == "1"):
            row["lead_us"] = leads["late"]
        elif source == "history":
            row["lead_us"], row["depth"] = leads["history"], 0  # a token ahead, not some layers
        else:
            row["lead_us"] = leads[depth] + leads["shared"] * (source == "present")
    n_tokens = sum(1 for s in watching.seen if s.layer == trace.layers[0] and s.n_rows == 1)
    guess_us = float(np.median(watching.guess_ns)) / 1e3
    load = os.getloadavg()[0]
    print(
        f"{n_tokens} decoded tokens, {args.warm_up} of them not counted; {args.share:.0%} of "
        f"experts cached, {miss_rate:.1%} of picks missed; one early router takes {guess_us:.0f} "
        f"us; load {load:.1f}"
    )
    _print(rows, leads, top_k)
    print(
        json.dumps(
            {
                "model": path.name,
                "n_tokens": n_tokens,
                "share": args.share,
                "miss_rate": miss_rate,
                "guess_us": guess_us,
                "leads_us": leads,
                "load": load,
                "rows": rows,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
