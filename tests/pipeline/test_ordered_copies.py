"""Where compute can follow copies on the device, nobody waits for them on the host."""

from __future__ import annotations

import asyncio
import sys

import pytest
from objects_on_disk import FileExperts
from ordered_device import OrderedDevice
from pipeline_rig import BIG, settle

from aprefetch import Runtime, embedded
from aprefetch.errors import DeviceError
from aprefetch.pipeline.slots import SlotState
from aprefetch.plan import plan_model
from aprefetch.types import ExpertKey


async def until_enqueued(device, n):
    async with asyncio.timeout(10):
        while len(device.under_way) < n:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)


def follow(device, leases):
    for lease in leases:
        if lease.copy is not None:
            device.follow(lease.copy)


async def test_a_lease_comes_before_its_copy_has_ended(rig):
    device = OrderedDevice()
    r = rig(device=device, vram=BIG, ram=BIG)
    with r.coordinator.demand(1, [0, 1]) as demand:
        leases = await demand.wait()
        while len(leases) < 2:
            leases += await demand.wait()
        assert len(device.under_way) == 2 and all(lease.copy for lease in leases)
        with pytest.raises(AssertionError):
            r.check(leases)
        follow(device, leases)
        r.check(leases)
        r.assert_sound(idle=False)
        demand.release(leases)
        r.assert_sound(idle=False)
        device.poll()
        assert all(slot.state is SlotState.RESIDENT for slot in r.coordinator._lanes[1].device.slots
                   if slot.entry is not None)  # fmt: skip
    await settle(r)
    r.assert_sound()
    assert r.counters.uploads == 2
    with r.coordinator.demand(1, [0, 1]) as demand:
        hits = demand.take()
        assert len(hits) == 2 and not any(lease.copy for lease in hits)
        r.check(hits)


async def test_a_report_between_lease_and_release_keeps_the_slot(rig):
    device = OrderedDevice()
    r = rig(device=device, vram=BIG)
    with r.coordinator.demand(1, [3]) as demand:
        (lease,) = await demand.wait()
        follow(device, [lease])
        device.poll()
        assert lease._slot.state is SlotState.LEASED and lease.copy is None
        r.assert_sound(idle=False)
        r.check([lease])
    await settle(r)
    r.assert_sound()


async def test_two_demands_share_a_copy_that_is_under_way(rig):
    device = OrderedDevice()
    r = rig(device=device, vram=BIG, ram=BIG)
    with r.coordinator.demand(1, [3]) as first, r.coordinator.demand(1, [3]) as second:
        one = await first.wait()
        two = second.take() or await second.wait()
        with r.coordinator.demand(1, [3]) as third:  # asked for when it is being copied
            three = third.take()
            assert three[0].copy is one[0].copy is two[0].copy is not None
            follow(device, three)
            r.check([*one, *two, *three])
            r.assert_sound(idle=False)
        first.release(one)
        device.poll()
        assert two[0]._slot.state is SlotState.LEASED
    await settle(r)
    r.assert_sound()
    assert (r.counters.reads, r.counters.hits_ram) == (3, 1)


async def test_a_guess_under_way_is_had_at_once(rig):
    device = OrderedDevice()
    r = rig(device=device, vram=BIG, ram=BIG)
    r.coordinator.guess(2, [5])
    await until_enqueued(device, 1)
    with r.coordinator.demand(2, [5]) as demand:
        leases = demand.take()
        assert leases[0].copy is not None
        follow(device, leases)
        r.check(leases)
    device.poll()
    await settle(r)
    r.assert_sound()
    assert r.counters.guesses_useful == 1 and r.counters.stalls == 0


@pytest.mark.parametrize("ram", [None, 0, BIG])
async def test_waves_in_the_smallest_cache_hurry_the_device(rig, ram):
    device = OrderedDevice()
    r = rig(device=device, ram=ram)
    with r.coordinator.demand(4, range(6)) as demand:
        got = []
        async with asyncio.timeout(10):
            while leases := demand.take() or await demand.wait():
                follow(device, leases)
                r.check(leases)
                got += [lease.expert for lease in leases]
                demand.release(leases)
    assert sorted(got) == list(range(6))
    device.expedite()
    await settle(r)
    r.assert_sound()


async def test_closing_a_demand_before_its_copy_has_ended(rig):
    device = OrderedDevice()
    r = rig(device=device, vram=BIG, ram=BIG)
    with r.coordinator.demand(1, [0, 1, 2]) as demand:
        await demand.wait()
    r.assert_sound(idle=False)
    device.expedite()
    await settle(r)
    r.assert_sound()
    with r.coordinator.demand(1, [0]) as demand:
        leases = demand.take() or await demand.wait()
        follow(device, leases)
        r.check(leases)
    device.expedite()
    await settle(r)


async def test_closing_the_coordinator_hurries_copies(rig):
    device = OrderedDevice()
    r = rig(device=device, vram=BIG)
    with r.coordinator.demand(1, [0]) as demand:
        await demand.wait()
    async with asyncio.timeout(5):
        await r.coordinator.aclose()
    assert not device.under_way


async def test_a_copy_that_cannot_be_started_fails_its_expert(rig):
    device = OrderedDevice()
    r = rig(device=device, vram=BIG)
    device.is_broken = True
    with r.coordinator.demand(1, [0]) as demand:
        assert await demand.wait() == []
        assert isinstance(demand.failed[0], DeviceError)
    r.assert_sound()
    device.is_broken = False
    with r.coordinator.demand(1, [0]) as demand:
        leases = await demand.wait()
        follow(device, leases)
        r.check(leases)
    device.expedite()
    await settle(r)
    r.assert_sound()


async def answer(**options):
    plan = plan_model(embedded.MODEL_PATH, device="cpu")
    budgets = {"vram_budget": plan.vram_full_bytes // 8, "ram_budget": plan.ram_full_bytes // 8}
    async with Runtime.open(embedded.MODEL_PATH, **budgets, **options) as rt:
        result = await rt.generate("A small boy", max_tokens=12, temperature=0)
        await rt._coordinator.settled()
        stats = rt.stats()
        assert stats.hits_ram + stats.misses_ram == stats.misses_device
        return result.token_ids


@pytest.mark.parametrize(
    ("lookahead", "ram_tier"), [("on", "inclusive"), ("off", "inclusive"), ("on", "exclusive")]
)
async def test_tokens_are_those_of_a_device_that_waits(monkeypatch, lookahead, ram_tier):
    expected = await answer(lookahead=lookahead)
    made = []

    def device(*_, **__):
        made.append(OrderedDevice())
        return made[-1]

    monkeypatch.setattr("aprefetch.plan.CpuDevice", device)
    assert await answer(lookahead=lookahead, ram_tier=ram_tier) == expected
    assert sum(one.n_followed for one in made) > 100
    assert (sum(one.n_back for one in made) > 0) == (ram_tier == "exclusive")


async def test_what_has_ended_unseen_does_not_leave_anybody_waiting(rig):
    device = OrderedDevice()
    r = rig(device=device, vram=BIG, ram=BIG)
    with r.coordinator.demand(1, [0]) as demand:
        follow(device, await demand.wait())
        async with asyncio.timeout(5):
            await r.coordinator.settled()
    await settle(r)
    r.assert_sound()


async def test_any_number_of_reads_may_be_held_back(rig, tmp_path):
    """In orderly runs reads are told of between copies: one after the other, not one in another."""
    experts = FileExperts(tmp_path / "many.bin", {1: (40, 40, 40)}, n_experts=400)
    device = OrderedDevice()
    r = rig(device=device, experts=experts, ram=BIG, queue_depth=8)
    r.coordinator.is_orderly = device.is_deaf = True
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    warming = asyncio.ensure_future(
        r.coordinator.warm([ExpertKey(1, expert) for expert in range(400)])
    )
    async with asyncio.timeout(20):
        while len(r.coordinator._held_back) < 390:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        device.is_deaf = False
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(400)
        try:
            while not warming.done():
                device.expedite()
                await asyncio.sleep(0.001)
        finally:
            sys.setrecursionlimit(limit)
    assert await warming == 400 and not errors
    await settle(r)
    r.assert_sound()
