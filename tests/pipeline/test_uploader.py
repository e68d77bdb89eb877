"""Uploads: trace spans, failures, and slots that late compute still uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from pipeline_rig import BIG, settle

from aprefetch.device.cpu import CpuDevice
from aprefetch.errors import DeviceError
from aprefetch.trace import Tracer, validate_trace


class LateTicket:
    def __init__(self) -> None:
        self.is_done = False
        self.callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self.is_done


class LateDevice(CpuDevice):
    """Compute is only enqueued, as on a GPU: tickets are done when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: list[LateTicket] = []

    def record(self) -> LateTicket:
        self.tickets.append(LateTicket())
        return self.tickets[-1]

    def when_done(self, ticket: LateTicket, callback: Callable[[], None]) -> None:
        ticket.callbacks.append(callback)

    def finish(self) -> None:
        """All compute enqueued so far is done."""
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            ticket.is_done = True
            for callback in ticket.callbacks:
                asyncio.get_running_loop().call_soon(callback)


async def test_u1_a_slot_is_overwritten_only_after_its_last_use_is_done(rig):
    device = LateDevice()
    r = rig(device=device)
    with r.coordinator.demand(4, range(4)) as demand:
        first = await demand.wait()
        while len(first) < 2:  # all slots of this size
            first += await demand.wait()
        bytes_of = {lease.offset: lease.key for lease in first}
        demand.release(first)
        assert len(device.tickets) == 1  # one per release
        waiting = asyncio.ensure_future(demand.wait())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        arena = r.coordinator.arena.numpy()
        for offset, key in bytes_of.items():  # compute still reads the right bytes
            for at, want in r.experts.expected(key):
                assert (arena[offset + at : offset + at + len(want)] == want).all()
        device.finish()
        second = await waiting
        r.check(second)
    device.finish()
    await settle(r)
    r.assert_sound()


async def test_u1_a_hit_on_a_slot_whose_compute_is_late_needs_no_wait(rig):
    device = LateDevice()
    r = rig(device=device, vram=BIG)
    with r.coordinator.demand(1, [0]) as demand:
        demand.release(await demand.wait())
    with r.coordinator.demand(1, [0]) as demand:
        assert len(demand.take()) == 1
        device.finish()
        await settle(r)
    device.finish()
    await settle(r)
    r.assert_sound()


async def test_closing_waits_for_late_compute(rig):
    device = LateDevice()
    r = rig(device=device, vram=BIG)
    with r.coordinator.demand(1, [0]) as demand:
        demand.release(await demand.wait())
    closing = asyncio.ensure_future(r.coordinator.aclose())
    await asyncio.sleep(0.01)
    assert not closing.done()
    device.finish()
    await closing


class BrokenCopies(CpuDevice):
    """Every copy fails while `is_broken`."""

    is_broken = True

    def copy_async(self, copies, done):
        if self.is_broken:
            asyncio.get_running_loop().call_soon(done, RuntimeError("bus error"))
        else:
            super().copy_async(copies, done)


@pytest.mark.parametrize("ram", [0, BIG])
async def test_a_failed_copy_publishes_nothing(rig, ram):
    device = BrokenCopies()
    r = rig(device=device, ram=ram)
    with r.coordinator.demand(1, [0, 1, 2]) as demand:
        assert await demand.wait() == []
        assert sorted(demand.failed) == [0, 1, 2]
        assert all(isinstance(error, DeviceError) for error in demand.failed.values())
    assert r.counters.uploads == 0
    r.assert_sound()
    device.is_broken = False
    assert sorted(await r.use(1, [0, 1, 2])) == [0, 1, 2]
    r.assert_sound()


async def test_k4_spans_of_read_upload_and_wait(rig):
    tracer = Tracer()
    r = rig(tracer=tracer, vram=BIG, ram=BIG)
    r.coordinator.guess(2, [5])
    await settle(r)
    await r.use(1, [0, 1])
    trace = tracer.to_dict()
    assert validate_trace(trace) == []
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    kinds = [(s["cat"], s["args"].get("expert"), s["args"].get("kind")) for s in spans]
    for cat in ("read", "upload"):
        assert {(cat, 5, "guess"), (cat, 0, "demand"), (cat, 1, "demand")} <= set(kinds)
    assert [s["args"]["layer"] for s in spans if s["cat"] == "wait"][0] == 1
    assert sum(s["args"]["bytes"] for s in spans if s["cat"] == "upload") == 3 * 8100


async def test_large_copies_do_not_hold_up_the_loop_thread(rig):
    r = rig(device=CpuDevice(inline_copy_bytes=0))
    for layer in (1, 2, 4):
        assert sorted(await r.use(layer, range(8))) == list(range(8))
    r.assert_sound()
