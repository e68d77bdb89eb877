"""Kept states are found by exact prefix, live within a budget, and go to files when they leave."""

from __future__ import annotations

import numpy as np
import torch

from aprefetch.engine.prefix_cache import KeptState, PrefixCache
from aprefetch.storage.state_files import StateFiles


def kept(ids: list[int], n: int = 100) -> KeptState:
    return KeptState(np.array(ids, np.int64), [(torch.full((n, 1), float(ids[-1])), 0)])


async def find(cache: PrefixCache, ids: list[int]) -> list[int] | None:
    found = await cache.find(ids)
    return None if found is None else found.ids.tolist()


async def test_the_longest_beginning_that_leaves_a_token() -> None:
    cache = PrefixCache(1 << 20)
    for ids in ([1, 2], [1, 2, 3, 4], [1, 9], [5]):
        cache.keep(kept(ids))
    assert await find(cache, [1, 2, 3, 4, 5]) == [1, 2, 3, 4]
    assert await find(cache, [1, 2, 3, 4]) == [1, 2]
    assert await find(cache, [1, 2, 3]) == [1, 2]
    assert await find(cache, [1, 2]) is None
    assert await find(cache, [2, 1, 3]) is None
    assert await find(cache, [1]) is None
    assert cache.holds(np.array([5])) and not cache.holds(np.array([6]))


async def test_the_budget_and_who_leaves() -> None:
    one = kept([1]).n_bytes
    cache = PrefixCache(3 * one)
    for i in (1, 2, 3):
        cache.keep(kept([i]))
    assert cache.n_bytes == 3 * one
    await cache.find([1, 0])  # used: it leaves last
    cache.keep(kept([4]))
    assert len(cache) == 3
    assert await find(cache, [1, 0]) == [1]
    assert await find(cache, [2, 0]) is None
    cache.keep(kept([9], n=10_000))
    assert await find(cache, [9, 0]) is None
    cache.keep(kept([4]))
    assert cache.n_bytes == 3 * one
    await cache.aclose()
    assert (cache.n_bytes, len(cache)) == (0, 0)


async def test_what_leaves_is_found_in_files(tmp_path) -> None:
    one = kept([1, 1]).n_bytes
    cache = PrefixCache(2 * one, StateFiles(tmp_path, "ab" * 16, 1 << 20))
    for i in (1, 2, 3):
        cache.keep(kept([i, i]))
    while cache._leaving:
        await next(iter(cache._leaving))
    assert len(list(tmp_path.iterdir())) == 1
    found = await cache.find([1, 1, 5])
    assert found is not None
    assert torch.equal(found.parts[0][0], kept([1, 1]).parts[0][0])
    assert cache.holds(np.array([1, 1]))  # back in memory, and another one left
    await cache.aclose()
    assert len(list(tmp_path.iterdir())) == 3
    later = PrefixCache(2 * one, StateFiles(tmp_path, "ab" * 16, 1 << 20))
    for i in (1, 2, 3):
        assert await find(later, [i, i, 7]) == [i, i]
    for path in tmp_path.iterdir():
        path.write_bytes(b"damaged")
    damaged = PrefixCache(2 * one, StateFiles(tmp_path, "ab" * 16, 1 << 20))
    assert await find(damaged, [1, 1, 7]) is None
    await later.aclose()


async def test_a_collision_of_keys_is_no_hit() -> None:
    cache = PrefixCache(1 << 20)
    cache.keep(kept([1, 2]))
    (entry,) = cache._kept.values()
    entry.ids = np.array([1, 3])
    assert await find(cache, [1, 2, 3]) is None
