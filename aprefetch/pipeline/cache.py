"""Eviction policies: which object leaves a tier when room is needed.

A policy knows objects by number. `touch` is one use, remembered for objects outside the cache as
well; `admit` makes an object a possible victim, `hold` withdraws it (in use, arriving, or gone).
An object that is held is never a victim.

Policies rank by a score that only a use can raise, so a heap may keep old scores: an entry that
surfaces with a score of the past is put back with today's. A use then costs a few float operations
and no heap work at all, and finding a victim is O(log n) amortised, never a scan. What changes for
a whole layer at once (`LayeredPolicy`) is kept per layer, with a heap of layers above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from typing import Literal, Protocol

from aprefetch.errors import ConfigError

__all__ = ["LayeredPolicy", "LfuPolicy", "LruPolicy", "Policy", "PolicyName", "new_policy"]

PolicyName = Literal["layered", "lfu", "lru"]

PHASE = 1.0
"""How much an object whose layer had its turn is colder, in halvings of its weight."""

_SLACK = 1e-6  # keeps a key that was moved below the score it stands for, whatever rounding does

NEVER = -math.inf
"""Score of an object that no demand has asked for."""


class Policy(Protocol):
    """Ranks the objects of one pool."""

    def begin(self, item: int) -> None:
        """The turn of `item`'s layer begins; `touch` of what it uses follows."""
        ...

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

    def begin(self, item: int) -> None:
        """Turns make no difference."""

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


class LayeredPolicy(LfuPolicy):
    """Ageing frequency; objects of layers whose turn is over count half until the next token.

    Layers take turns: what layer 3 used now cannot be wanted before all the others had theirs. The
    wait for an object's next use is the tokens until its layer wants it, which frequency tells,
    and the part of a token until its layer's turn, which its place in the order tells.

    Args:
        half_life: as for `LfuPolicy`.
        layer_of: for each item the place of its layer in the order of turns, from 0.
    """

    __slots__ = ("_epoch", "_heaps", "_keys", "_last", "_layer_of", "_n_layers", "_top", "_turns")

    def __init__(self, half_life: float, layer_of: Sequence[int]) -> None:
        super().__init__(half_life)
        self._layer_of = layer_of
        self._n_layers = n = max(layer_of, default=0) + 1
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in range(n)]
        self._turns = [0] * n  # the token of each layer's last turn
        self._epoch = 0  # the token under way
        self._last = n  # the layer of the last turn
        self._keys: dict[int, float] = {}  # layer -> at most the score of its coldest object
        self._top: list[tuple[float, int]] = []  # (key, layer); those with an old key are void

    def begin(self, item: int) -> None:
        layer = self._layer_of[item]
        if layer <= self._last:  # the next token; layers that a step left out catch up
            self._epoch += 1
            for other, turn in enumerate(self._turns):
                if turn < self._epoch - 1:
                    self._set_turn(other, self._epoch - 1)
        self._last = layer
        self._set_turn(layer, self._epoch)

    def _set_turn(self, layer: int, turn: int) -> None:
        fall = turn - self._turns[layer]
        self._turns[layer] = turn
        key = self._keys.get(layer)
        if fall and key is not None:
            self._push(layer, key - PHASE * fall - _SLACK)

    def _push(self, layer: int, key: float) -> None:
        self._keys[layer] = key
        self.n_steps += 1
        if len(self._top) > 4 * self._n_layers:  # mostly void
            self._top = sorted((key, layer) for layer, key in self._keys.items())
        else:
            heappush(self._top, (key, layer))

    def _offset(self, layer: int) -> float:
        return PHASE * (self._turns[layer] + layer / self._n_layers)

    def admit(self, item: int) -> None:
        self._admitted.add(item)
        if item in self._in_heap:
            return
        self._in_heap.add(item)
        layer = self._layer_of[item]
        score = self._scores.get(item, NEVER)
        heappush(self._heaps[layer], (score, item))
        self.n_steps += 1
        key = score - self._offset(layer)
        if key < self._keys.get(layer, math.inf):
            self._push(layer, key)

    def coldest(self) -> int | None:
        keys = self._keys
        while self._top:
            key, layer = self._top[0]
            if keys.get(layer) != key:
                heappop(self._top)
                continue
            self._heap = self._heaps[layer]
            item = super().coldest()
            if item is None:
                heappop(self._top)
                del keys[layer]
                continue
            today = self._scores.get(item, NEVER) - self._offset(layer)
            if today == key:
                return item
            keys[layer] = today
            heapreplace(self._top, (today, layer))
            self.n_steps += 1
        return None

    def score(self, item: int) -> float:
        return self._scores.get(item, NEVER) - self._offset(self._layer_of[item])


def new_policy(name: str, *, half_life: float, layer_of: Sequence[int] | None = None) -> Policy:
    """A policy by name: "layered", "lfu" or "lru".

    Args:
        half_life: in uses; not for "lru".
        layer_of: the place of each item's layer in the order of turns; "layered" is "lfu" without.

    Raises:
        ConfigError: the name is none of these.
    """
    if name == "layered" and layer_of is not None:
        return LayeredPolicy(half_life, layer_of)
    if name in ("lfu", "layered"):
        return LfuPolicy(half_life)
    if name == "lru":
        return LruPolicy()
    raise ConfigError(f"unknown eviction policy {name!r}; use 'layered', 'lfu' or 'lru'")
