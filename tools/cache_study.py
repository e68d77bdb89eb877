"""Miss bytes of eviction policies against Belady's bound, on a routing trace.

    python tools/cache_study.py TRACE.npz [--shares 0.05,0.1,0.2,0.4]

One cache over all layers; every pick is a use. The policies are the product's own. `next token` and
`next 2 tokens` know all picks of that future and nothing beyond (there the layered policy decides):
what a perfect predictor of so much would be worth. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from belady import belady_misses
from replay import demands_of

from aprefetch.pipeline.cache import LayeredPolicy, LfuPolicy, LruPolicy, Policy
from aprefetch.routing_trace import RoutingTrace


def walk(
    demands: Iterable[Sequence[int]], policy: Policy, capacity: int
) -> Iterator[tuple[list[int], set[int]]]:
    """What each demand misses, and what is cached as its turn begins (to read, not to keep).

    The cache starts empty; what a demand uses is no victim of its own.
    """
    cached: set[int] = set()
    for items in demands:
        missing = [item for item in items if item not in cached]
        yield missing, cached
        policy.begin(items[0])
        for item in items:
            policy.touch(item)
            policy.hold(item)
        for item in missing:
            if len(cached) >= capacity:
                victim = policy.coldest()
                if victim is None:  # a demand larger than the cache comes in waves
                    continue
                policy.hold(victim)
                cached.discard(victim)
            cached.add(item)
        for item in items:
            if item in cached:
                policy.admit(item)


def misses(demands: Iterable[Sequence[int]], policy: Policy, capacity: int) -> int:
    """Misses of a cache that starts empty."""
    return sum(len(missing) for missing, _ in walk(demands, policy, capacity))


class Foresight(LayeredPolicy):
    """Knows the uses of the next `n_calls` calls; scans, as it is a bound and no product."""

    def __init__(
        self,
        demands: Sequence[Sequence[int]],
        half_life: float,
        layer_of: Sequence[int],
        n_calls: int,
    ) -> None:
        super().__init__(half_life, layer_of)
        self._uses: dict[int, list[int]] = {}
        for at, items in reversed(list(enumerate(demands))):
            for item in items:
                self._uses.setdefault(item, []).append(at)
        self._n_calls, self._at = n_calls, -1

    def begin(self, item: int) -> None:
        super().begin(item)
        self._at += 1

    def coldest(self) -> int | None:
        def warmth(item: int) -> tuple[int, float]:
            uses = self._uses.get(item, [])
            while uses and uses[-1] <= self._at:
                uses.pop()
            ahead = uses[-1] - self._at if uses else self._n_calls + 1
            return (
                (-ahead, 0.0) if ahead <= self._n_calls else (-self._n_calls - 1, self.score(item))
            )

        return min(self._admitted, key=warmth, default=None)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--shares", default="0.05,0.1,0.2,0.4")
    args = parser.parse_args()
    trace = RoutingTrace.load(args.trace)
    demands = demands_of(trace)
    n_experts, n_layers = int(trace.meta["n_experts"]), len(trace.layers)
    n = n_experts * n_layers
    layer_of = [item // n_experts for item in range(n)]
    half_life = 2.0 * n
    n_uses = sum(map(len, demands))
    size = int(np.mean(list(trace.meta["object_bytes"].values())))
    print(f"{len(trace.steps)} steps, {n_uses} uses, {n} objects of {size} bytes")
    names = ("LRU", "LFU", "layered", "next token", "next 2 tokens")
    print("share | Belady misses | over Belady: " + ", ".join(names))
    rows = []
    for share in map(float, args.shares.split(",")):
        capacity = int(share * n)
        best = sum(belady_misses(demands, capacity))
        policies = (
            LruPolicy(),
            LfuPolicy(half_life),
            LayeredPolicy(half_life, layer_of),
            Foresight(demands, half_life, layer_of, n_layers),
            Foresight(demands, half_life, layer_of, 2 * n_layers),
        )
        over = [misses(demands, policy, capacity) / best for policy in policies]
        print(f"{share:5.0%} | {best / n_uses:6.1%} | " + " | ".join(f"{x:.3f}" for x in over))
        rows.append(
            {"share": share, "belady_miss_rate": best / n_uses}
            | dict(zip(names, over, strict=True))
        )
    print(json.dumps({"trace": args.trace, "n_uses": n_uses, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
