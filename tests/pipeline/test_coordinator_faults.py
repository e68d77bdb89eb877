"""Failed and cancelled reads, slow reads, and the end."""

from __future__ import annotations

import asyncio

import pytest
from pipeline_rig import BIG, settle

from aprefetch.errors import ReadError, RuntimeClosedError
from aprefetch.pipeline.slots import SlotState


@pytest.mark.parametrize("bad", range(5))
async def test_r6_a_failed_read_is_no_hit_and_is_read_again(scripted, bad):
    r = scripted(ram=BIG)
    r.reader.fails = lambda job: job.key.expert == bad
    with r.coordinator.demand(1, range(5)) as demand:
        assert sorted(await r.drain(demand)) == [e for e in range(5) if e != bad]
        assert isinstance(demand.failed[bad], ReadError) and list(demand.failed) == [bad]
    r.assert_sound()
    r.reader.fails = lambda job: False
    n = r.counters.hits_device + r.counters.hits_ram
    assert await r.use(1, [bad]) == [bad]
    assert r.counters.hits_device + r.counters.hits_ram == n
    r.assert_sound()


async def test_f1_both_demands_hear_of_a_failure_and_the_rest_goes_on(scripted):
    r = scripted(vram=BIG)
    r.reader.fails = lambda job: job.key.expert == 2
    with r.coordinator.demand(1, [1, 2]) as first, r.coordinator.demand(1, [2, 3]) as second:
        assert await r.drain(first) == [1] and await r.drain(second) == [3]
        assert list(first.failed) == list(second.failed) == [2]
    r.assert_sound()


async def test_all_reads_fail_and_wait_returns(scripted):
    r = scripted()
    r.reader.fails = lambda job: True
    with r.coordinator.demand(4, range(8)) as demand:
        assert await demand.wait() == []
        assert len(demand.failed) == 8
    r.assert_sound()


async def test_u2_a_delayed_first_read_does_not_hold_up_the_others(scripted):
    r = scripted(vram=BIG, ram=BIG)
    r.reader.holds = lambda job: job.key.expert == 0
    with r.coordinator.demand(1, range(6)) as demand:
        got: list[int] = []
        while len(got) < 5:
            leases = await demand.wait()
            r.check(leases)
            got += [lease.key.expert for lease in leases]
        assert sorted(got) == [1, 2, 3, 4, 5]
        assert r.counters.uploads == 5
        r.reader.let_go()
        assert [lease.key.expert for lease in await demand.wait()] == [0]
    r.assert_sound()


async def test_u3_hits_are_there_while_misses_load(scripted):
    r = scripted(vram=BIG, ram=BIG)
    await r.use(1, [2, 3])
    r.reader.holds = lambda job: True
    with r.coordinator.demand(1, range(5)) as demand:
        assert [lease.key.expert for lease in demand.take()] == [2, 3]
        r.reader.let_go()
        assert sorted(await r.drain(demand)) == [0, 1, 4]


async def test_x3_order_of_completion_does_not_matter(scripted):
    r = scripted(vram=BIG, ram=BIG)
    r.reader.holds = lambda job: True
    with r.coordinator.demand(2, range(8)) as demand:
        r.reader.let_go()  # the last first
        assert sorted(await r.drain(demand)) == list(range(8))
    r.assert_sound()


async def test_closing_early_drops_queued_reads_and_drains_the_rest(scripted):
    r = scripted(vram=BIG, ram=BIG)
    r.reader.holds = lambda job: job.key.expert % 2 == 0
    demand = r.coordinator.demand(1, range(6))
    demand.close()
    slots = [s for p in r.coordinator._tiers.landing_pools for s in p.slots]
    assert any(slot.state is SlotState.DRAINING for slot in slots)
    await settle(r)
    r.assert_sound()
    r.reader.holds = lambda job: False
    assert sorted(await r.use(1, range(6))) == list(range(6))
    r.assert_sound()


async def test_a_demand_for_a_draining_object_reads_it_again(scripted):
    r = scripted()
    r.reader.holds = lambda job: True
    r.coordinator.demand(1, [0, 1]).close()
    r.reader.holds = lambda job: False
    assert sorted(await r.use(1, [0, 1])) == [0, 1]
    r.assert_sound()


async def test_closing_one_of_two_leaves_the_shared_load_alone(scripted):
    r = scripted(vram=BIG)
    r.reader.holds = lambda job: True
    first = r.coordinator.demand(1, [0, 1])
    second = r.coordinator.demand(1, [1, 2])
    first.close()
    r.reader.holds = lambda job: False
    r.reader.let_go()
    assert sorted(await r.drain(second)) == [1, 2]
    assert ("cancel", (1, 0), 0) in r.reader.log and ("cancel", (1, 1), 0) not in r.reader.log
    second.close()
    await settle(r)
    r.assert_sound()


async def test_f3_cancelling_a_waiting_task_leaks_nothing(rig):
    r = rig()
    for turn in range(50):
        task = asyncio.ensure_future(r.use((1, 2, 4)[turn % 3], range(8)))
        for _ in range(turn % 13):
            await asyncio.sleep(0 if turn % 2 else 0.0003)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
            raise asyncio.CancelledError  # it was done before
        r.assert_sound(idle=False)
    await settle(r)
    r.assert_sound()
    assert sorted(await r.use(4, range(8))) == list(range(8))


async def test_r7_no_leak_after_a_thousand_mixed_operations(rig):
    r = rig(ram=200_000, vram=120_000)
    open_demands = []
    for i in range(1000):
        layer = (1, 2, 4)[i % 3]
        if i % 4 == 0:
            r.coordinator.guess(layer, [i % 8, (i * 5) % 8])
        elif i % 4 == 1:
            open_demands.append(r.coordinator.demand(layer, sorted({i % 8, (i * 3) % 8})))
        elif i % 4 == 2 and len(open_demands) > 2:
            open_demands.pop(0).close()
        else:
            r.coordinator.end_layer(layer)
            await asyncio.sleep(0)
    for demand in open_demands:
        demand.close()
    r.coordinator.drop_wishes()
    await settle(r)
    r.assert_sound()
    for layer in (1, 2, 4):
        await r.use(layer, range(8))
    memory = r.coordinator.memory()
    assert memory["vram_peak_bytes"] == memory["vram_budget_bytes"] <= r.vram
    assert memory["ram_peak_bytes"] == memory["ram_budget_bytes"] <= r.ram


async def test_f5_closing_waits_for_reads_before_memory_is_given_back(scripted):
    r = scripted()
    host = r.coordinator._host
    r.reader.holds = lambda job: job.key.expert == 0
    demand = r.coordinator.demand(1, range(4))
    waiting = asyncio.ensure_future(demand.wait())
    await asyncio.sleep(0)
    held = next(iter(r.reader.held.values()), None)
    assert held is not None
    r.reader.cancel = lambda job: None  # a read in flight can't be stopped
    closing = asyncio.ensure_future(r.coordinator.aclose())
    await asyncio.sleep(0.02)
    assert not closing.done()
    assert len(host.view) > 0  # still there
    r.reader.let_go()
    await closing
    with pytest.raises(RuntimeClosedError):
        _ = host.view
    with pytest.raises(RuntimeClosedError):
        await waiting
    demand.close()


async def test_k3_a_stall_is_counted_with_its_layer(scripted):
    r = scripted(vram=BIG)
    await r.use(1, [0])
    n, ns = r.counters.stalls, dict(r.counters.stall_ns_by_layer)
    await r.use(1, [0])
    assert r.counters.stalls == n
    r.reader.holds = lambda job: True
    with r.coordinator.demand(2, [0]) as demand:
        task = asyncio.ensure_future(demand.wait())
        await asyncio.sleep(0)
        r.reader.let_go()
        demand.release(await task)
    assert r.counters.stalls == n + 1
    assert set(r.counters.stall_ns_by_layer) == {1, 2}
    assert r.counters.stall_ns_by_layer[1] == ns[1]
    assert sum(r.counters.stall_ns_by_layer.values()) == r.counters.stall_ns


async def test_r6_bytes_around_a_slot_stay_as_they_are(experts, rig):
    """A canary in every free byte of both arenas survives a load beside it."""
    r = rig()
    coordinator = r.coordinator
    host, arena = coordinator._host.tensor, coordinator.arena
    host.fill_(0x5A)
    arena.fill_(0x5A)
    with coordinator.demand(1, [3]) as demand:
        (lease,) = await demand.wait()
        landing = coordinator._objects[lease.key.expert].landing
        layout = experts.layers[1]
        outside = arena.clone()
        outside[lease.offset : lease.offset + layout.device_bytes] = 0x5A
        assert bool((outside == 0x5A).all())
        outside = host.clone()
        outside[landing.offset : landing.offset + landing.n_bytes] = 0x5A
        assert bool((outside == 0x5A).all())
        r.check([lease])
