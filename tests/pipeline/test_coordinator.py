"""Demands: bytes, hits, waves, sharing, leases."""

from __future__ import annotations

import asyncio

import pytest
from pipeline_rig import BIG

from aprefetch.errors import BudgetError, RuntimeClosedError, RuntimeStateError
from aprefetch.pipeline.coordinator import Coordinator


async def test_x5_bytes_in_a_slot_are_the_bytes_of_the_source(rig):
    r = rig()
    for layer in (1, 2, 4):
        assert sorted(await r.use(layer, range(8))) == list(range(8))
    r.assert_sound()


async def test_second_demand_hits_and_reads_nothing(rig):
    r = rig(vram=BIG, ram=BIG)
    await r.use(1, [0, 3])
    n = r.counters.reads
    with r.coordinator.demand(1, [0, 3]) as demand:
        leases = demand.take()
        assert [lease.key.expert for lease in leases] == [0, 3]
        r.check(leases)
        assert await demand.wait() == []
    assert r.counters.reads == n and r.counters.hits_device == 2
    r.assert_sound()


async def test_c5_minimum_budget_serves_a_whole_layer_in_waves(rig):
    r = rig()
    assert sorted(await r.use(4, range(8))) == list(range(8))
    assert r.counters.waves == 1
    assert r.coordinator.memory()["vram_peak_bytes"] <= r.vram
    r.assert_sound()


async def test_c8_each_expert_is_read_once_per_demand(rig):
    r = rig()
    await r.use(1, range(8))
    assert r.counters.reads == 3 * 8
    assert r.counters.uploads == 8
    assert r.counters.bytes_uploaded == 8 * 8100


async def test_c2_a_ram_hit_costs_no_read(rig):
    r = rig(ram=BIG)
    for layer in (1, 2, 4):
        await r.use(layer, range(8))
    n = r.counters.reads
    for layer in (1, 2, 4):
        await r.use(layer, range(8))
    assert r.counters.reads == n
    assert r.counters.hits_ram > 0 and r.counters.evictions_device > 0
    r.assert_sound()


async def test_c2_ram_tier_off_keeps_no_copies(rig):
    r = rig(ram=0)
    await r.use(1, range(4))
    r.assert_sound()
    assert r.coordinator.memory()["ram_used_bytes"] == 0
    await r.use(1, [0])
    assert r.counters.hits_ram == 0


async def test_r7_budget_below_the_minimum_names_option_and_minimum(experts, rig):
    vram, ram = Coordinator.minimum_budgets(experts)
    r = rig()
    for options, name, least in (
        ({"vram_budget": vram - 1, "ram_budget": ram}, "vram_budget", vram),
        ({"vram_budget": vram, "ram_budget": ram - 1}, "ram_budget", ram),
    ):
        with pytest.raises(BudgetError) as caught:
            Coordinator(experts, r.device, r.reader, counters=r.counters, **options)
        assert caught.value.option == name and caught.value.minimum_bytes == least
        assert str(least) in str(caught.value)


async def test_c7_an_expert_wanted_twice_is_read_once(rig):
    r = rig(vram=BIG)
    first = r.coordinator.demand(1, [0, 1, 2])
    second = r.coordinator.demand(1, [1, 2, 3])
    got = await asyncio.gather(r.drain(first), r.drain(second))
    assert [sorted(g) for g in got] == [[0, 1, 2], [1, 2, 3]]
    assert r.counters.reads == 3 * 4 and r.counters.duplicate_reads == 0
    first.close()
    second.close()
    r.assert_sound()


async def test_many_demands_at_the_minimum_budget_never_lock_up(rig):
    r = rig()

    async def client(i: int) -> None:
        for step in range(6):
            await r.use((1, 2, 4)[(i + step) % 3], [(i * 3 + step * k) % 8 for k in range(5)])

    async with asyncio.timeout(20):
        await asyncio.gather(*(client(i) for i in range(6)))
    r.assert_sound()


async def test_two_demands_that_hold_leases_and_wait_go_on(rig, experts):
    r = rig(vram=Coordinator.minimum_budgets(experts)[0] * 2, ram=BIG)

    async def holder(wanted: list[int]) -> int:
        """Holds what it got until one more object is there."""
        n = 0
        with r.coordinator.demand(1, wanted) as demand:
            held = await demand.wait()
            while more := await demand.wait():
                demand.release(held)
                n += len(held)
                held = more
            return n + len(held)

    async with asyncio.timeout(20):
        assert await asyncio.gather(holder([0, 1, 2, 3, 4]), holder([3, 4, 5, 6, 7])) == [5, 5]
    r.assert_sound()


async def test_waiting_with_all_slots_leased_is_an_error_not_a_hang(rig):
    r = rig()
    with r.coordinator.demand(4, range(8)) as demand:
        held = await demand.wait()
        while len(held) < 2:
            held += await demand.wait()
        with pytest.raises(RuntimeStateError, match="release leases"):
            await demand.wait()


async def test_a_lease_is_dead_after_release(rig):
    r = rig()
    with r.coordinator.demand(1, [5]) as demand:
        (lease,) = await demand.wait()
        assert lease.offset % 256 == 0
        demand.release([lease])
        with pytest.raises(RuntimeStateError):
            _ = lease.offset
        with pytest.raises(RuntimeStateError):
            demand.release([lease])
    demand.close()
    with pytest.raises(RuntimeStateError):
        demand.take()
    r.assert_sound()


async def test_close_releases_what_was_taken_and_what_was_not(rig):
    r = rig(vram=BIG)
    await r.use(1, [0, 1])
    with r.coordinator.demand(1, [0, 1]) as demand:
        demand.take()
    r.coordinator.demand(1, [0, 1]).close()
    r.assert_sound()


async def test_unknown_layer_or_expert(rig):
    r = rig()
    with pytest.raises(RuntimeStateError, match="layer 3"):
        r.coordinator.demand(3, [0])
    with pytest.raises(RuntimeStateError, match="experts 0 to 7"):
        r.coordinator.demand(1, [8])
    with pytest.raises(RuntimeStateError, match="experts 0 to 7"):
        r.coordinator.guess(1, [-1])


async def test_closing_wakes_waiters_with_runtime_closed(rig):
    r = rig()
    demand = r.coordinator.demand(4, range(8))
    task = asyncio.ensure_future(r.drain(demand))
    await asyncio.sleep(0)
    await r.coordinator.aclose()
    with pytest.raises(RuntimeClosedError):
        await task
    demand.close()
    with pytest.raises(RuntimeClosedError):
        r.coordinator.demand(1, [0])
    with pytest.raises(RuntimeClosedError):
        _ = r.coordinator.arena
    await r.coordinator.aclose()
