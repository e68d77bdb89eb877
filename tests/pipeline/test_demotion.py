"""The exclusive RAM tier: what leaves the device is copied back where that is worth it."""

from __future__ import annotations

import asyncio

import pytest
from objects_on_disk import FileExperts
from ordered_device import OrderedDevice
from pipeline_rig import settle
from scripted_device import ScriptedDevice

from aprefetch.errors import DeviceError
from aprefetch.pipeline.coordinator import Coordinator
from aprefetch.pipeline.slots import SlotState
from aprefetch.trace import Tracer, validate_trace
from aprefetch.types import ExpertKey

SMALL = {1: (3000, 3000, 2100)}
OBJECT = 8100


@pytest.fixture
def small(tmp_path) -> FileExperts:
    """One layer of 8 objects, so that slots are easy to count."""
    return FileExperts(tmp_path / "small.bin", SMALL)


@pytest.fixture
def tiers(rig, small):
    """Makes exclusive tiers of so many device and landing slots."""

    def make(n_device: int, n_landing: int, **options):
        experts = options.pop("experts", small)
        vram, ram = Coordinator.minimum_budgets(experts)
        return rig(
            experts=experts,
            vram=vram // 2 * n_device,
            ram=ram // 2 * n_landing,
            ram_tier="exclusive",
            **options,
        )

    return make


def places(r, n_experts: int = 8) -> list[int]:
    return r.coordinator.where(1, range(n_experts))


async def use_each(r, experts) -> None:
    for expert in experts:
        await r.use(1, [expert])
        await settle(r)
        r.assert_sound()


async def test_the_tiers_hold_different_objects_and_all_bytes_survive(tiers):
    r = tiers(3, 4)
    await use_each(r, range(6))
    assert places(r)[:6] == [1, 1, 1, 0, 0, 0]
    n_reads = r.counters.bytes_read
    await use_each(r, [0, 1, 2, 3, 4, 5] * 3)
    assert r.counters.bytes_read == n_reads
    assert r.counters.hits_ram == 18 and r.counters.demotions > 10
    assert r.counters.bytes_demoted == r.counters.demotions * OBJECT
    assert r.counters.bytes_uploaded == r.counters.uploads * OBJECT


async def test_an_inclusive_tier_of_the_same_size_reads_more(rig, small, tiers):
    vram, ram = Coordinator.minimum_budgets(small)
    r = rig(experts=small, vram=vram // 2 * 3, ram=ram * 2, ram_tier="inclusive")
    await use_each(r, [0, 1, 2, 3, 4, 5] * 4)
    assert r.counters.misses_ram > 6 and r.counters.demotions == 0


async def test_copies_of_what_is_on_the_device_leave_first(tiers):
    r = tiers(4, 3)
    await use_each(r, [0, 0, 0, 1, 2])
    landing = r.coordinator._lanes[1].landing
    assert [entry.key.expert for entry in landing.duplicates] == [0, 1, 2]
    await use_each(r, [3])
    assert [entry.key.expert for entry in landing.duplicates] == [1, 2, 3]
    assert places(r)[:4] == [0, 0, 0, 0] and r.counters.demotions == 0


async def test_what_is_colder_than_all_in_ram_leaves_without_a_copy(tiers):
    r = tiers(2, 4)
    await use_each(r, list(range(5)) * 6)
    n, n_skipped = r.counters.demotions, r.counters.demotions_skipped
    await use_each(r, [7, 6, 5])
    assert r.counters.demotions_skipped == n_skipped + 2  # 7 and 6
    assert r.counters.demotions <= n + 1
    assert sum(place < 2 for place in places(r)[:5]) >= 4


async def test_the_slot_is_reused_only_after_the_copy(tiers):
    device = ScriptedDevice()
    r = tiers(2, 3, device=device)
    await use_each(r, [0, 1, 2, 3])
    device.holds = lambda is_back: is_back
    with r.coordinator.demand(1, [0]) as demand:
        waiting = asyncio.ensure_future(demand.wait())
        await asyncio.sleep(0.02)
        assert len(device.held) == 1 and not waiting.done()
        r.assert_sound(idle=False)
        assert sum(slot.state is SlotState.DEMOTING for p in (
            r.coordinator._lanes[1].device, r.coordinator._lanes[1].landing
        ) for slot in p.slots) == 2  # fmt: skip
        device.let_go()
        r.check(await waiting)
    await settle(r)
    r.assert_sound()


async def test_a_demand_for_what_is_being_copied_back_keeps_it(tiers):
    device = ScriptedDevice()
    r = tiers(2, 3, device=device)
    await use_each(r, [0, 1, 2, 3])
    device.holds = lambda is_back: is_back
    first = r.coordinator.demand(1, [0])  # 2 has to leave for it
    await asyncio.sleep(0.02)
    assert places(r)[:4] == [1, 1, 1, 0] and device.held
    uploads = r.counters.uploads
    with r.coordinator.demand(1, [2]) as second:
        assert second.take() == []
        first.close()
        device.let_go()
        device.holds = lambda is_back: False
        leases = await second.wait()
        r.check(leases)
        assert r.counters.uploads == uploads
        second.release(leases)
    await settle(r)
    r.assert_sound()
    assert places(r)[2] == 0


async def test_both_the_waiting_demand_and_a_younger_one_are_served(tiers):
    device = ScriptedDevice()
    r = tiers(2, 3, device=device)
    await use_each(r, [0, 1, 2, 3])
    device.holds = lambda is_back: is_back
    first = r.coordinator.demand(1, [0])
    await asyncio.sleep(0.02)
    assert places(r)[:4] == [1, 1, 1, 0] and device.held
    second = r.coordinator.demand(1, [2])
    r.assert_sound(idle=False)
    device.holds = lambda is_back: False
    device.let_go()
    async with asyncio.timeout(5):
        assert await asyncio.gather(r.drain(first), r.drain(second)) == [[0], [2]]
    first.close()
    second.close()
    await settle(r)
    r.assert_sound()


async def test_a_failed_copy_back_loses_nothing_but_the_copy(tiers):
    device = ScriptedDevice()
    r = tiers(2, 6, device=device)
    device.fails = lambda is_back: is_back
    await use_each(r, [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3])
    assert device.n_back > 0 and r.counters.demotions == 0
    device.fails = lambda is_back: False
    await use_each(r, list(range(8)) * 2)
    assert r.counters.demotions > 0


async def test_reads_come_before_copies_back(scripted, small):
    vram, ram = Coordinator.minimum_budgets(small)
    r = scripted(experts=small, vram=vram, ram=ram, ram_tier="exclusive")
    await use_each(r, [0, 1])
    r.reader.holds = lambda job: True
    with r.coordinator.demand(1, [2, 3, 4, 5]) as demand:
        r.reader.holds = lambda job: False
        r.reader.let_go()
        assert sorted(await r.drain(demand)) == [2, 3, 4, 5]
    await settle(r)
    r.assert_sound()
    assert r.counters.demotions_skipped > 0


async def test_closing_waits_for_copies_back(tiers):
    device = ScriptedDevice()
    r = tiers(2, 3, device=device)
    await use_each(r, [0, 1, 2, 3])
    device.holds = lambda is_back: is_back
    demand = r.coordinator.demand(1, [0])
    await asyncio.sleep(0.02)
    demand.close()
    settling = asyncio.ensure_future(r.coordinator.settled())
    closing = asyncio.ensure_future(r.coordinator.aclose())
    await asyncio.sleep(0.02)
    assert device.held and not closing.done() and not settling.done()
    device.let_go()
    await closing
    await settling
    assert r.coordinator._n_moving == 0


async def test_without_a_ram_tier_nothing_is_copied_back(rig, small):
    r = rig(experts=small, ram=0, ram_tier="exclusive")
    await use_each(r, list(range(8)) * 2)
    assert r.counters.demotions == r.counters.demotions_skipped == 0


@pytest.fixture
def wide(tmp_path) -> FileExperts:
    """So many objects that slots are kept free."""
    return FileExperts(tmp_path / "wide.bin", SMALL, n_experts=200)


async def test_slots_are_kept_free_ahead_of_need(tiers, wide):
    r = tiers(128, 60, experts=wide)
    pool = r.coordinator._lanes[1].device
    assert pool.reserve == 2
    for first in range(0, 200, 10):
        await r.use(1, range(first, first + 10))
        await settle(r)
        r.assert_sound()
        assert len(pool.free) >= pool.reserve
    assert sum(place < 2 for place in places(r, 200)) >= 128 - 2 + 60 - 2
    assert r.counters.demotions > 40


async def test_guesses_take_slots_that_were_kept_free(tiers, wide):
    r = tiers(128, 60, experts=wide)
    for first in range(0, 200, 10):
        await r.use(1, range(first, first + 10))
    await settle(r)
    pool = r.coordinator._lanes[1].device
    guessed = [e for e in range(200) if places(r, 200)[e] == 1][-3:]
    n_free = len(pool.free)
    r.coordinator.guess(1, guessed)
    await settle(r)
    assert n_free == pool.reserve == len(pool.free)
    n_there = sum(places(r, 200)[e] == 0 for e in guessed)
    assert n_there == r.counters.guesses_issued >= 2
    r.coordinator.drop_wishes()
    await settle(r)
    r.assert_sound()


async def test_what_fits_stays(tiers, wide):
    r = tiers(200, 60, experts=wide)
    for _ in range(2):
        for first in range(0, 200, 20):
            await r.use(1, range(first, first + 20))
    await settle(r)
    r.assert_sound()
    assert r.counters.evictions_device == r.counters.demotions == 0


async def test_a_hot_list_fills_both_tiers(tiers, wide):
    r = tiers(128, 60, experts=wide)
    n = await r.coordinator.warm([ExpertKey(1, e) for e in range(200)])
    r.assert_sound()
    found = places(r, 200)
    assert n == found.count(0) + found.count(1)
    assert found[:126] == [0] * 126 and found[126:186] == [1] * 60
    assert r.counters.evictions_device == r.counters.demotions == 0
    assert [key.expert for key in r.coordinator.hottest()] == list(range(186))


async def test_spans_of_copies_back(tiers):
    tracer = Tracer()
    r = tiers(2, 6, tracer=tracer)
    await use_each(r, list(range(8)) * 2)
    trace = tracer.to_dict()
    assert validate_trace(trace) == []
    spans = [e for e in trace["traceEvents"] if e.get("cat") == "demote"]
    assert len(spans) == r.counters.demotions > 0
    assert all(s["args"]["bytes"] == OBJECT and s["args"]["layer"] == 1 for s in spans)


async def test_slow_and_failing_copies_in_any_order(tiers):
    device = ScriptedDevice()
    r = tiers(3, 5, device=device)
    for turn in range(60):
        device.holds = lambda is_back, turn=turn: is_back and turn % 3 == 0
        device.fails = lambda is_back, turn=turn: is_back and turn % 7 == 0
        task = asyncio.ensure_future(r.use(1, {turn % 8, turn * 3 % 8}))
        for _ in range(turn % 11):
            await asyncio.sleep(0)
        if turn % 4 == 0:
            task.cancel()
        device.let_go()
        device.holds = lambda is_back: False
        await asyncio.wait([task])
        r.assert_sound(idle=False)
    device.let_go()
    await settle(r)
    r.assert_sound()
    assert r.counters.demotions > 5


async def use_in_order(r, device, experts) -> None:
    for expert in experts:
        with r.coordinator.demand(1, [expert]) as demand:
            while leases := demand.take() or await demand.wait():
                for lease in leases:
                    if lease.copy is not None:
                        device.follow(lease.copy)
                r.check(leases)
                demand.release(leases)
        r.assert_sound(idle=False)


async def test_beside_copies_that_compute_follows(tiers):
    device = OrderedDevice()
    r = tiers(3, 4, device=device)
    async with asyncio.timeout(10):
        await use_in_order(r, device, range(6))
        device.expedite()
        await settle(r)
        n_reads = r.counters.reads
        await use_in_order(r, device, list(range(6)) * 3)
    device.expedite()
    await settle(r)
    r.assert_sound()
    assert r.counters.reads == n_reads and device.n_back == r.counters.demotions > 10


async def test_an_ordered_copy_back_that_cannot_be_started(tiers):
    device = OrderedDevice()
    r = tiers(2, 3, device=device)
    await use_in_order(r, device, range(4))
    device.expedite()
    await settle(r)
    n, works = r.counters.demotions, device.enqueue_copies_back

    def broken(copies):
        raise DeviceError("bus error")

    device.enqueue_copies_back = broken
    async with asyncio.timeout(10):
        await use_in_order(r, device, [0, 1, 2, 3])
        assert r.counters.demotions == n
        device.enqueue_copies_back = works
        await use_in_order(r, device, list(range(8)) * 2)
    device.expedite()
    await settle(r)
    r.assert_sound()
    assert r.counters.demotions > n
