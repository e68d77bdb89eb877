"""What leaves the device is copied back to host RAM, where that is worth its room.

The other way of an upload, for an exclusive RAM tier: an object that the policy lets go from the
device and that has no copy in RAM gets a landing slot that is free, holds a duplicate, or holds an
object that is colder. Reads come first: while any waits for a landing slot nothing is copied back.
`copies` says how bytes move.

Invariants: both slots are held from `free_ahead` until `settle`; only objects whose compute is done
leave the device, so nothing but the copy reads the device slot meanwhile. Owns no memory.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from aprefetch.pipeline.arena import Pool
from aprefetch.pipeline.copies import ArenaCopies
from aprefetch.pipeline.objects import Entry, Stage
from aprefetch.pipeline.slots import Slot, SlotState, move
from aprefetch.pipeline.tiers import Tiers
from aprefetch.stats import Counters
from aprefetch.storage.experts import ExpertSource
from aprefetch.trace import Tracer

__all__ = ["Demotions"]

_FREE, _RESIDENT, _DEMOTING = SlotState.FREE, SlotState.RESIDENT, SlotState.DEMOTING


class Demotions:
    """Lets objects leave the device pools of one coordinator.

    Args:
        reported: called with an object whose copy ended, and the error if it failed; passes both
            to `settle`.
    """

    def __init__(
        self,
        experts: ExpertSource,
        copies: ArenaCopies,
        tiers: Tiers,
        counters: Counters,
        tracer: Tracer | None,
        reported: Callable[[Entry, Exception | None], None],
    ) -> None:
        self._experts = experts
        self._copies = copies
        self._tiers = tiers
        self._counters = counters
        self._tracer = tracer
        self._reported = reported

    def free_ahead(self, pool: Pool, n_slots: int) -> int:
        """Let the coldest leave a device pool until `n_slots` are free or about to be.

        Returns how many copies were begun; each reports.
        """
        n_begun = 0
        while len(pool.free) + pool.n_demoting < n_slots:
            item = pool.policy.coldest()
            if item is None:
                break
            entry = self._tiers.objects[item]
            assert entry is not None
            slot = self._landing_slot(entry)
            if slot is None:
                self._tiers.evict(entry)
            else:
                self._begin(entry, slot)
                n_begun += 1
        return n_begun

    def _landing_slot(self, entry: Entry) -> Slot | None:
        """Where the object's copy goes; None if it leaves without."""
        if entry.landing is not None:
            return None  # it has one
        pool = entry.lane.landing
        # One that a demand waits to be granted will be back at once: not worth two copies.
        if pool.wanted or entry.waiters or not pool.has_spare():
            self._counters.demotions_skipped += 1
            return None
        policy = pool.policy
        policy.touch(entry.item)
        if not pool.free:
            victim = pool.coldest()
            if victim is None or (
                not pool.duplicates and policy.score(victim) >= policy.score(entry.item)
            ):
                self._counters.demotions_skipped += 1
                return None
            colder = self._tiers.objects[victim]
            assert colder is not None
            self._tiers.evict_copy(colder)
        return pool.take()

    def _begin(self, entry: Entry, slot: Slot) -> None:
        lane, source = entry.lane, entry.device
        assert source is not None
        lane.device.policy.hold(entry.item)
        lane.device.n_unavailable += 1
        lane.device.n_demoting += 1
        lane.landing.n_unavailable += 1
        slot.entry = entry
        entry.landing = slot
        entry.stage = Stage.DEMOTING
        move(source, _DEMOTING)
        move(slot, _DEMOTING)
        finished = functools.partial(self._finished, entry, time.perf_counter_ns())
        pieces = self._experts.read_plan(entry.key).pieces
        self._copies.start(pieces, slot.offset, source.offset, finished, back=True)

    def _finished(self, entry: Entry, start_ns: int, error: Exception | None) -> None:
        if error is None:
            n_bytes = entry.lane.payload_bytes
            self._counters.demotions += 1
            self._counters.bytes_demoted += n_bytes
            if self._tracer is not None:
                self._tracer.demote(entry.key, start_ns, time.perf_counter_ns(), n_bytes)
        self._reported(entry, error)

    def settle(self, entry: Entry, error: Exception | None) -> None:
        """The copy ended: free the device slot, unless a demand came for the object meanwhile."""
        lane, device, landing = entry.lane, entry.device, entry.landing
        assert device is not None and landing is not None
        entry.stage = Stage.IDLE
        lane.device.n_unavailable -= 1
        lane.device.n_demoting -= 1
        lane.landing.n_unavailable -= 1
        if error is not None:
            move(landing, SlotState.FAILED)
            move(landing, _FREE)
            self._tiers.free_landing(entry, landing)
        if entry.waiters:
            move(device, _RESIDENT)
            lane.device.policy.admit(entry.item)
            lane.device.wanted.push(entry)
        else:
            move(device, _FREE)
            self._counters.evictions_device += 1
            self._tiers.free_device(entry, device)
        if error is None:
            self._tiers.settle_copy(entry, landing)
