"""Guesses and exact wishes: promotion, shares, waste, and that they never hurt."""

from __future__ import annotations

import random

import pytest
from pipeline_rig import BIG, settle

from aprefetch.pipeline.coordinator import Coordinator


async def test_r4_a_guess_is_promoted_and_read_once(scripted):
    r = scripted(vram=BIG, ram=BIG)
    r.reader.holds = lambda job: True
    r.coordinator.guess(2, [1, 2])
    with r.coordinator.demand(2, [2, 3]) as demand:
        assert ("promote", (2, 2), 0) in r.reader.log
        r.reader.let_go()
        assert sorted(await r.drain(demand)) == [2, 3]
    r.coordinator.end_layer(2)
    await settle(r)
    submitted = [key for what, key, _ in r.reader.log if what == "submit"]
    assert len(submitted) == len(set(submitted)) == 3
    n = r.counters
    assert (n.guesses_issued, n.guesses_useful, n.guesses_wasted) == (2, 1, 1)
    assert n.duplicate_reads == 0
    r.assert_sound()


async def test_r4_guesses_past_their_layer_are_cancelled(scripted):
    r = scripted(vram=BIG, ram=BIG)
    r.reader.holds = lambda job: True
    r.coordinator.guess(2, [1, 2])
    r.coordinator.end_layer(2)
    assert {key for what, key, _ in r.reader.log if what == "cancel"} == {(2, 1), (2, 2)}
    await settle(r)
    assert r.counters.guesses_wasted == 2 and r.counters.bytes_wasted == 0
    r.assert_sound()


async def test_a_guess_that_landed_and_was_wrong_counts_its_bytes(rig):
    r = rig(vram=BIG, ram=BIG)
    r.coordinator.guess(2, [1])
    await settle(r)
    r.coordinator.end_layer(2)
    assert r.counters.bytes_wasted == 8100
    r.assert_sound()


async def test_a_guess_that_came_true_is_a_device_hit(rig):
    r = rig(vram=BIG, ram=BIG)
    r.coordinator.guess(2, [1])
    await settle(r)
    assert await r.use(2, [1]) == [1]
    assert r.counters.hits_device == 1 and r.counters.stalls == 0
    r.assert_sound()


async def test_with_the_ram_tier_off_a_guess_is_not_read_twice(rig):
    r = rig(ram=0)
    r.coordinator.guess(4, [1])
    await settle(r)
    assert await r.use(4, [1]) == [1]
    assert r.counters.reads == 3 and r.counters.guesses_useful == 1
    r.coordinator.end_layer(4)
    r.assert_sound()


async def test_guesses_for_what_is_there_move_nothing(rig):
    r = rig(vram=BIG, ram=BIG)
    await r.use(1, [0, 1])
    n = r.counters.reads
    r.coordinator.guess(1, [0, 1])
    assert r.counters.guesses_dropped == 2 and r.counters.guesses_issued == 0
    assert r.counters.reads == n


async def test_share_zero_issues_nothing(rig):
    r = rig(vram=BIG, ram=BIG, guess_share=0.0)
    r.coordinator.guess(1, range(8))
    assert r.counters.guesses_issued == 0 and r.counters.guesses_dropped == 8


async def test_c6_guesses_keep_to_their_share(rig, experts):
    vram, ram = Coordinator.minimum_budgets(experts)
    r = rig(vram=vram * 4, ram=ram * 4, guess_share=0.25)
    for layer in (1, 2, 4):
        r.coordinator.guess(layer, range(8))
    await settle(r)
    for pool in (*r.coordinator._tiers.landing_pools, *r.coordinator._tiers.device_pools):
        assert len(pool.guesses) <= max(1, pool.n_slots // 4)
    r.assert_sound(idle=False)


async def test_a_failed_guess_is_wasted_and_harms_nobody(scripted):
    r = scripted(vram=BIG, ram=BIG)
    r.reader.fails = lambda job: True
    r.coordinator.guess(2, [1])
    await settle(r)
    assert r.counters.guesses_wasted == 1
    r.reader.fails = lambda job: False
    assert await r.use(2, [1]) == [1]
    r.assert_sound()


async def test_x6_exact_wishes_are_read_before_their_layers_turn(scripted):
    r = scripted(vram=BIG, ram=BIG)
    r.coordinator.guess(1, [0, 1, 2], exact=True)
    assert r.counters.reads_before_turn == 3 and r.counters.guesses_issued == 0
    assert {priority for _, _, priority in r.reader.log} == {1}
    await settle(r)
    assert sorted(await r.use(1, [0, 1, 2])) == [0, 1, 2]
    assert r.counters.hits_device == 3
    r.coordinator.end_layer(1)
    r.assert_sound()


@pytest.mark.parametrize("ram", [0, None, BIG])
async def test_exact_wishes_beyond_all_room_wait_their_turn(rig, ram):
    r = rig(ram=ram)
    for layer in (1, 2, 4):
        r.coordinator.guess(layer, range(8), exact=True)
    for layer in (1, 2, 4):
        assert sorted(await r.use(layer, range(8))) == list(range(8))
        r.coordinator.end_layer(layer)
    assert r.counters.reads == 3 * 24
    await settle(r)
    r.assert_sound()


async def test_exact_wishes_that_are_not_taken_up_are_dropped(rig):
    r = rig()
    r.coordinator.guess(4, range(8), exact=True)
    r.coordinator.end_layer(4)
    await settle(r)
    r.assert_sound()
    assert sorted(await r.use(1, range(8))) == list(range(8))


async def run_tokens(r, guesses, n_tokens: int = 60) -> None:
    """Decode-like traffic with hot experts; `guesses(layer, picked)` names the next layer's."""
    rng = random.Random(7)
    layers = (1, 2, 4)
    weights = [8, 6, 5, 3, 2, 1, 1, 1]
    plan = [
        [sorted(set(rng.choices(range(8), weights, k=3))) for _ in layers] for _ in range(n_tokens)
    ]
    for picks in plan:
        for i, layer in enumerate(layers):
            with r.coordinator.demand(layer, picks[i]) as demand:
                if i + 1 < len(layers):
                    r.coordinator.guess(layers[i + 1], guesses(picks[i + 1]))
                await r.drain(demand)
            await settle(r)  # as if compute took longer than any read
            r.coordinator.end_layer(layer)
    r.coordinator.drop_wishes()
    await settle(r)
    r.assert_sound()


@pytest.mark.parametrize("policy", ["lfu", "lru"])
async def test_c6_always_wrong_guesses_do_not_flush_the_cache(rig, experts, policy):
    vram, ram = Coordinator.minimum_budgets(experts)
    rigs = [rig(vram=vram * 3, ram=ram * 3, policy=policy) for _ in range(3)]
    off, wrong, right = rigs
    await run_tokens(off, lambda picks: [])
    await run_tokens(wrong, lambda picks: [e for e in range(8) if e not in picks][::-1])
    await run_tokens(right, lambda picks: picks)
    assert off.counters.guesses_issued == 0
    assert wrong.counters.guesses_useful == 0 < wrong.counters.guesses_wasted
    assert wrong.counters.hits_device >= 0.95 * off.counters.hits_device
    found = [r.counters.hits_device + r.counters.hits_ram for r in rigs]
    assert found[1] >= 0.95 * found[0]
    assert right.counters.guesses_wasted == 0 < right.counters.guesses_useful
    assert right.counters.hits_device > off.counters.hits_device
