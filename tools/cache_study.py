"""Miss bytes of eviction policies against Belady's bound, on a routing trace.

    python tools/cache_study.py TRACE.npz [--shares 0.05,0.1,0.2,0.4]
    python tools/cache_study.py TRACE.npz --tiers 0.2,0.2 [--geometry v4-flash --warm-up 100]

One cache over all layers; every pick is a use. The policies are the product's own. `next token` and
`next 2 tokens` know all picks of that future and nothing beyond (there the layered policy decides):
what a perfect predictor of so much would be worth. The last line is JSON.

`--tiers` studies a device cache over one in RAM, shares of each (`two_tiers` says what the kinds of
RAM tiers are): objects that come from the drive, and copies back per such object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from belady import belady_misses
from replay import demands_of
from synthetic_routing import GEOMETRIES, fit, generate

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


KINDS = ("inclusive", "duplicates first", "exclusive", "exclusive, admission")


class _Ram:
    """The RAM tier of `two_tiers`."""

    def __init__(self, kind: str, policy: Policy, capacity: int, device: set[int]) -> None:
        self.kind, self.policy, self.capacity, self.device = kind, policy, capacity, device
        self.items: set[int] = set()
        self.duplicates: dict[int, None] = {}

    def make_room(self, back: int | None = None) -> bool:
        """For one object; `back`: it is this one, copied back."""
        if len(self.items) < self.capacity:
            return True
        victim = next(iter(self.duplicates), None)
        if victim is None:
            victim = self.policy.coldest()
            score = self.policy.score
            if victim is None or (
                back is not None
                and self.kind == "exclusive, admission"
                and score(victim) >= score(back)
            ):
                return False
        self.duplicates.pop(victim, None)
        self.policy.hold(victim)
        self.items.discard(victim)
        return True

    def rest(self, item: int) -> None:
        """The copy of `item` may leave from now on."""
        if item in self.items:
            if self.kind != "inclusive" and item in self.device:
                self.duplicates[item] = None
            else:
                self.policy.admit(item)

    def left_device(self, item: int) -> bool:
        """`item` was evicted there; whether it is copied back."""
        self.duplicates.pop(item, None)
        is_exclusive = self.kind.startswith("exclusive")
        if is_exclusive or item in self.items:
            self.policy.touch(item)
        goes_back = item not in self.items and is_exclusive and self.make_room(item)
        if goes_back:
            self.items.add(item)
        self.rest(item)
        return goes_back


def two_tiers(
    demands: Sequence[Sequence[int]],
    kind: str,
    policies: tuple[Policy, Policy],
    sizes: Sequence[int],
) -> Iterator[tuple[int, int]]:
    """For each demand, objects that come from the drive and objects that are copied back.

    Args:
        kind: "inclusive": RAM keeps what was read, by its policy. "duplicates first": copies of
            what is on the device leave first. "exclusive": besides, what leaves the device is
            copied back. "exclusive, admission": unless it is colder than all there is in RAM.
        policies, sizes: of the device and of RAM.
    """
    device: set[int] = set()
    policy, ram = policies[0], _Ram(kind, policies[1], sizes[1], device)
    for items in demands:
        n_read = n_back = 0
        policy.begin(items[0])
        ram.policy.begin(items[0])
        for item in items:
            policy.touch(item)
            policy.hold(item)
            if item not in device:
                ram.policy.touch(item)
        for item in [item for item in items if item not in device]:
            ram.policy.hold(item)
            if item not in ram.items:
                n_read += 1
                if ram.make_room():
                    ram.items.add(item)
            if len(device) >= sizes[0]:
                victim = policy.coldest()
                if victim is None:  # a demand larger than the cache comes in waves
                    ram.rest(item)
                    continue
                policy.hold(victim)
                device.discard(victim)
                n_back += ram.left_device(victim)
            device.add(item)
            ram.rest(item)
        for item in items:
            if item in device:
                policy.admit(item)
        yield n_read, n_back


def study_tiers(trace: RoutingTrace, shares: Sequence[float], n_warm_up: int) -> dict[str, object]:
    """Print and return what kinds of RAM tiers are worth."""
    demands = demands_of(trace)
    n_experts, n_layers = int(trace.meta["n_experts"]), len(trace.layers)
    n = n_experts * n_layers
    layer_of = [item // n_experts for item in range(n)]
    sizes = [int(share * n) for share in shares]
    first = n_warm_up * n_layers
    n_uses = sum(map(len, demands[first:]))
    best = sum(belady_misses(demands, sum(sizes))[first:])
    print(f"{n_uses} uses; device {sizes[0]} and RAM {sizes[1]} of {n} objects; Belady {best}")
    rows = []
    for kind in KINDS:
        policies = (LayeredPolicy(2.0 * n, layer_of), LayeredPolicy(2.0 * n, layer_of))
        moved = np.array(list(two_tiers(demands, kind, policies, sizes)))[first:].sum(0)
        n_read, n_back = int(moved[0]), int(moved[1])
        print(f"{kind:<22} {n_read:>7} {n_read / n_uses:6.1%}  {n_back / n_read:5.2f} copies back")
        rows.append({"kind": kind, "reads": n_read, "copies_back": n_back})
    return {"sizes": sizes, "n_uses": n_uses, "belady": best, "rows": rows}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--shares", default="0.05,0.1,0.2,0.4")
    parser.add_argument("--tiers", metavar="DEVICE,RAM", help="shares: study two tiers instead")
    parser.add_argument("--geometry", choices=("v4-flash", "kimi-k3"), help="with --tiers")
    parser.add_argument("--warm-up", type=int, default=0, help="tokens not counted, with --tiers")
    args = parser.parse_args()
    trace = RoutingTrace.load(args.trace)
    if args.tiers:
        if args.geometry:
            trace = generate(GEOMETRIES[args.geometry], fit(trace), n_tokens=400, seed=0)
        found = study_tiers(trace, [float(x) for x in args.tiers.split(",")], args.warm_up)
        print(json.dumps({"trace": args.trace, "geometry": args.geometry, **found}))
        return 0
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
