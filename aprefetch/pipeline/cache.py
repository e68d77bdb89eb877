"""Eviction policies: which object leaves a tier when room is needed.

A policy knows objects by number. `touch` is one use, remembered for objects outside the cache as
well; `admit` makes an object a possible victim, `hold` withdraws it (in use, arriving, or gone).
An object that is held is never a victim.

Both policies rank by a score that only a use can raise, so a heap may keep old scores: an entry
that surfaces with a score of the past is put back with today's. A use then costs a few float
operations and no heap work at all, and finding a victim is O(log n) amortised, never a scan.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush, heapreplace
from typing import Literal, Protocol

from aprefetch.errors import ConfigError

__all__ = ["LfuPolicy", "LruPolicy", "Policy", "PolicyName", "new_policy"]

PolicyName = Literal["lfu", "lru"]

NEVER = -math.inf
"""Score of an object that no demand has asked for."""


class Policy(Protocol):
    """Ranks the objects of one pool."""

    def touch(self, item: int) -> None:
        """One use of `item`."""
        ...

    def admit(self, item: int) -> None:
        """`item` is in the cache and may be evicted from now on."""
        ...

    def hold(self, item: int) -> None:
        """`item` may not be evicted (any more)."""
        ...

    def coldest(self) -> int | None:
        """The next victim, which stays admitted; None if every object is held."""
        ...

    def score(self, item: int) -> float:
        """Comparable between items of this policy: the higher the warmer."""
        ...


class _Ranking:
    """The part that policies share: scores that never fall, and a heap that may be behind."""

    __slots__ = ("_admitted", "_heap", "_in_heap", "_scores", "n_steps")

    def __init__(self) -> None:
        self._scores: dict[int, float] = {}
        self._admitted: set[int] = set()
        self._in_heap: set[int] = set()
        self._heap: list[tuple[float, int]] = []
        self.n_steps = 0  # heap operations, for the test that victims are not found by scanning

    def admit(self, item: int) -> None:
        self._admitted.add(item)
        if item not in self._in_heap:
            self._in_heap.add(item)
            heappush(self._heap, (self._scores.get(item, NEVER), item))
            self.n_steps += 1

    def hold(self, item: int) -> None:
        self._admitted.discard(item)

    def coldest(self) -> int | None:
        heap = self._heap
        while heap:
            score, item = heap[0]
            if item not in self._admitted:
                heappop(heap)
                self._in_heap.discard(item)
            else:
                today = self._scores.get(item, NEVER)
                if today == score:
                    return item
                heapreplace(heap, (today, item))
            self.n_steps += 1
        return None

    def score(self, item: int) -> float:
        return self._scores.get(item, NEVER)


class LruPolicy(_Ranking):
    """The object whose last use is longest ago leaves first."""

    __slots__ = ("_now",)

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def touch(self, item: int) -> None:
        self._now += 1.0
        self._scores[item] = self._now


class LfuPolicy(_Ranking):
    """The least used object leaves first; uses lose half their weight every `half_life` uses.

    An object's weight is the sum over its uses of 2 ** -(uses of any object since / half_life):
    frequency, which ages, with recency deciding among equals. All weights fall at one rate, so
    their order changes only by uses. The score is the base-2 logarithm of the weight plus the time
    in half-lives, which does not have to be updated as time goes by.
    """

    __slots__ = ("_now", "_tick")

    def __init__(self, half_life: float) -> None:
        super().__init__()
        self._now = 0.0  # in half-lives
        self._tick = 1.0 / half_life

    def touch(self, item: int) -> None:
        now = self._now = self._now + self._tick
        old = self._scores.get(item)
        if old is None:
            self._scores[item] = now
        elif old > now:
            self._scores[item] = old + math.log2(1.0 + 2.0 ** (now - old))
        else:
            self._scores[item] = now + math.log2(1.0 + 2.0 ** (old - now))


def new_policy(name: str, *, half_life: float) -> Policy:
    """A policy by name: "lfu" or "lru".

    Raises:
        ConfigError: the name is neither.
    """
    if name == "lfu":
        return LfuPolicy(half_life)
    if name == "lru":
        return LruPolicy()
    raise ConfigError(f"unknown eviction policy {name!r}; use 'lfu' or 'lru'")
