"""What a cache with perfect foresight would miss: the bound for any eviction policy.

Belady's rule: the object that is needed latest leaves. Requests come in demands, all of whose
objects are needed at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

__all__ = ["belady_misses"]

NEVER = 1 << 60
NOW = -1


def belady_misses(demands: Sequence[Iterable[int]], capacity: int) -> list[int]:
    """Misses of each demand in a cache of `capacity` objects that starts empty."""
    demands = [list(items) for items in demands]
    next_use: dict[int, int] = {}
    coming: list[list[int]] = []
    for at in range(len(demands) - 1, -1, -1):
        coming.append([next_use.get(item, NEVER) for item in demands[at]])
        for item in demands[at]:
            next_use[item] = at
    coming.reverse()
    due: dict[int, int] = {}  # of what is in the cache
    heap: list[tuple[int, int]] = []  # (-next use, item), old entries left in
    misses = []
    for items, uses in zip(demands, coming, strict=True):
        n_missed = 0
        for item in items:  # needed together: none of them is a victim now
            n_missed += item not in due
            due[item] = NOW
        _trim(due, heap, capacity)
        for item, use in zip(items, uses, strict=True):
            due[item] = use
            heapq.heappush(heap, (-use, item))
        _trim(due, heap, capacity)  # a demand larger than the cache comes in waves
        misses.append(n_missed)
    return misses


def _trim(due: dict[int, int], heap: list[tuple[int, int]], capacity: int) -> None:
    while len(due) > capacity and heap:
        until, victim = heapq.heappop(heap)
        if due.get(victim) == -until:
            del due[victim]
