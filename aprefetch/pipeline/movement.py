"""How objects move: queue, read, stage, upload, arrive.

The lower half of the coordinator, which is its only user: what happens to an object between the
call that asked for it and the moment it is there, or will not come. Everything runs on the loop's
thread; the reader and the device report back through `_read_done` and `_uploaded`, and each report
lets `_pump` start what has room now.

Invariants: an object's slot is published only after all its bytes arrived; a slot that a read may
still write to is READING or DRAINING and not reused; the oldest demand is served first.
"""

from __future__ import annotations

import asyncio
from collections import deque

from torch import Tensor

from aprefetch.device.base import Device, OrdersCopies
from aprefetch.errors import AprefetchError, DeviceError, RuntimeClosedError
from aprefetch.pipeline.arena import Pool
from aprefetch.pipeline.copies import ArenaCopies
from aprefetch.pipeline.demand import Demand
from aprefetch.pipeline.demotion import Demotions
from aprefetch.pipeline.guesses import GuessTrust
from aprefetch.pipeline.objects import Entry, ObjectRead, Stage, WantQueue, Wish
from aprefetch.pipeline.reader import Priority, Reader, ReadJob
from aprefetch.pipeline.slots import Slot, SlotState, move
from aprefetch.pipeline.tiers import Tiers
from aprefetch.pipeline.uploader import Uploader
from aprefetch.stats import Counters
from aprefetch.storage.experts import ChecksObjects, ExpertSource
from aprefetch.trace import Kind, Tracer

__all__ = ["Movement"]

_FREE, _READING, _READY = SlotState.FREE, SlotState.READING, SlotState.READY
_UPLOADING, _RESIDENT, _LEASED = SlotState.UPLOADING, SlotState.RESIDENT, SlotState.LEASED
_DRAINING, _FAILED = SlotState.DRAINING, SlotState.FAILED

_KINDS: dict[Priority, Kind] = {
    Priority.DEMAND: "demand",
    Priority.EXACT: "exact",
    Priority.GUESS: "guess",
}


class Movement:
    """State and steps of loads. `Coordinator` is the class to use.

    `is_orderly`: what a read brought is published once no copy is under way. With one read at a
    time all happens in one order then, however long anything takes. For runs that repeat exactly.
    """

    def __init__(
        self,
        experts: ExpertSource,
        device: Device,
        reader: Reader,
        tiers: Tiers,
        counters: Counters,
        tracer: Tracer | None,
        guess_share: float,
    ) -> None:
        self._experts = experts
        self._device = device
        self._reader = reader
        self._tiers = tiers
        self._counters = counters
        self._tracer = tracer
        self._guess_share = guess_share
        self._trust = GuessTrust()
        self._checker = experts if isinstance(experts, ChecksObjects) else None
        self._busy_until_ns = 0  # end of the latest read
        self.is_orderly = False
        self._held_back: deque[tuple[ObjectRead, BaseException | None]] = deque()
        self._host = device.alloc_host(max(tiers.landing_bytes, 1), experts.alignment)
        self._arena: Tensor | None = device.alloc_slots(max(tiers.device_bytes, 1))
        copies = ArenaCopies(device, self._host.tensor, self._arena)
        self._uploader: Uploader | None = Uploader(experts, copies, counters, tracer)
        self._demotions: Demotions | None = Demotions(
            experts, copies, tiers, counters, tracer, self._demoted
        )
        self._ordered = copies.ordered
        self._n_moving = 0  # reads, uploads, copies back and releases that have yet to report
        self._n_copying = 0  # uploads and copies back among them
        self._is_pumping = False
        self._open: dict[Demand, None] = {}  # demands that lack an object
        self._idle: asyncio.Future[None] | None = None
        self._settling: list[asyncio.Future[None]] = []
        self._is_telling = False  # of reads that were held back
        self.is_closed = False

    def _route(self, entry: Entry, *, ahead: bool) -> None:
        """Queue an idle object for what it needs next. `ahead`: others come before it."""
        landing = entry.lane.landing
        if entry.device is not None:
            entry.lane.device.wanted.push(entry)
        elif entry.waiters and entry.landing is not None and (not ahead or landing.has_spare()):
            self._stage(entry)
        else:
            entry.stage = Stage.WANTED
            landing.wanted.push(entry)

    def _stage(self, entry: Entry) -> None:
        """Hold the copy in host RAM until it is on the device."""
        landing = entry.lane.landing
        landing.policy.hold(entry.item)
        landing.n_unavailable += 1
        entry.stage = Stage.STAGED
        entry.lane.device.wanted.push(entry)

    def _abandon(self, entry: Entry) -> None:
        """Nobody wants the object any more: stop what can be stopped."""
        WantQueue.drop(entry)
        if entry.stage is Stage.WANTED:
            entry.stage = Stage.IDLE
        elif entry.stage is Stage.READING:
            assert entry.landing is not None and entry.job is not None
            move(entry.landing, _DRAINING)
            entry.stage = Stage.DRAINING
            self._reader.cancel(entry.job)
        elif entry.stage is Stage.STAGED:
            assert entry.landing is not None
            entry.stage = Stage.IDLE
            entry.lane.landing.n_unavailable -= 1
            self._tiers.settle_copy(entry, entry.landing)

    def _drop_wish(self, entry: Entry) -> None:
        """A wish did not come true, or gives way to a demand."""
        if entry.wish is Wish.GUESS:
            self._counters.guesses_wasted += 1
            self._trust.resolved(False)
            if entry.job is None or entry.job.start_ns:
                self._counters.bytes_wasted += entry.wish_bytes
        self._forget_wish(entry)
        self._abandon(entry)

    def _forget_wish(self, entry: Entry, *, stays: bool = False) -> None:
        """From now on the object is like any other; whatever is going on with it goes on."""
        lane = entry.lane
        entry.wish = Wish.NONE
        entry.wish_bytes = 0
        lane.wishes.pop(entry, None)
        for pool, slot in ((lane.landing, entry.landing), (lane.device, entry.device)):
            pool.guesses.pop(entry, None)
            pool.exact.pop(entry, None)
            if slot is None or entry.stage:
                continue
            if pool is lane.landing:
                self._tiers.settle_copy(entry, slot, stays=stays)
            elif slot.state is _RESIDENT:
                pool.policy.admit(entry.item)

    def _close_books(self, demand: Demand) -> None:
        if self._open.pop(demand, demand) is None:
            del demand.lane.device.open[demand], demand.lane.landing.open[demand]

    # -- landing and device pools --------------------------------------------------------------

    def _pump(self) -> None:
        """Start whatever has room. Nested calls leave the work to the outer one."""
        if self._is_pumping or self.is_closed:
            return
        self._is_pumping = True
        try:
            goes_on = True
            while goes_on:
                goes_on = False
                for pool in self._tiers.landing_pools:
                    if pool.wanted:
                        goes_on |= self._feed_landing(pool)
                for pool in self._tiers.device_pools:
                    if pool.wanted:
                        goes_on |= self._feed_device(pool)
                    if pool.reserve:
                        self._free_ahead(pool, pool.reserve)
                if not goes_on and self._open and self._ordered is not None:
                    goes_on = self._hurry(self._ordered)
        finally:
            self._is_pumping = False
        if self._settling and self._n_copying and self._ordered is not None:
            asyncio.get_running_loop().call_soon(self._ordered.expedite)

    def _hurry(self, device: OrdersCopies) -> bool:
        """Where an object waits for a slot it waits for work to end; whether some had by now."""
        if not any(p.wanted for p in (*self._tiers.landing_pools, *self._tiers.device_pools)):
            return False
        n_moving = self._n_moving
        device.expedite()
        return self._n_moving != n_moving

    def _feed_landing(self, pool: Pool) -> bool:
        """Begin reads for those whose turn it is; whether another pool's queue has grown."""
        has_staged = False
        while (entry := pool.wanted.head()) is not None and self._tiers.may_claim(pool, entry):
            if entry.landing is not None:  # has been in RAM all along
                if entry.wish is Wish.EXACT:
                    pool.exact[entry] = None
                self._stage(entry)
                has_staged = True
                continue
            if not self._tiers.make_room(pool, entry, self._drop_wish):
                break
            WantQueue.drop(entry)
            if entry.wish is Wish.EXACT:
                pool.exact[entry] = None
            self._read(entry, pool.take())
        return has_staged

    def _feed_device(self, pool: Pool) -> bool:
        """Begin uploads for those whose turn it is; whether another pool's queue has grown."""
        has_rerouted = False
        while (entry := pool.wanted.head()) is not None:
            slot = entry.device
            if slot is None and entry.stage is Stage.IDLE:  # evicted before its turn came
                WantQueue.drop(entry)
                self._route(entry, ahead=True)
                has_rerouted = True
                continue
            if slot is not None and slot.pins:
                WantQueue.drop(entry)
                self._grant(entry, slot)
                continue
            if not self._tiers.may_claim(pool, entry):
                break
            if slot is not None:
                WantQueue.drop(entry)
                self._tiers.claim(pool, entry, slot)
                self._grant(entry, slot)
                continue
            if not self._make_device_room(pool, entry):
                break
            WantQueue.drop(entry)
            if entry.wish is Wish.EXACT:
                pool.exact[entry] = None
            self._upload(entry, pool.take())
        return has_rerouted

    def _make_device_room(self, pool: Pool, entry: Entry) -> bool:
        """See that a device pool has a free slot; false as well if one is about to become free."""
        if not pool.free and self._tiers.is_exclusive:
            self._free_ahead(pool, max(1, pool.reserve))
            if pool.n_demoting and not pool.free:
                return False
        return self._tiers.make_room(pool, entry, self._drop_wish)

    def _free_ahead(self, pool: Pool, n_slots: int) -> None:
        """Let the coldest objects leave the device until `n_slots` are, or will be, free."""
        assert self._demotions is not None
        n_begun = self._demotions.free_ahead(pool, n_slots)
        self._n_moving += n_begun
        self._n_copying += n_begun

    def _demoted(self, entry: Entry, error: Exception | None) -> None:
        """An object was copied back to host RAM, or the copy failed."""
        self._n_moving -= 1
        self._n_copying -= 1
        assert self._demotions is not None
        self._demotions.settle(entry, error)
        self._pump()
        self._note_idle()

    def _read(self, entry: Entry, slot: Slot) -> None:
        """Read an object into a landing slot."""
        slot.entry = entry
        entry.landing = slot
        move(slot, _READING)
        entry.lane.landing.n_unavailable += 1
        entry.stage = Stage.READING
        if entry.waiters:
            priority = Priority.DEMAND
        elif entry.wish is Wish.EXACT:
            priority = Priority.EXACT
            self._counters.reads_before_turn += 1
        else:
            priority = Priority.GUESS
            entry.wish_bytes = entry.lane.payload_bytes
        if entry.job is not None:
            self._counters.duplicate_reads += 1
        plan = self._experts.read_plan(entry.key)
        buffer = self._host.view[slot.offset : slot.offset + slot.n_bytes]
        job = ObjectRead(entry.key, plan.reads, buffer, priority, self._read_done)
        job.entry = entry
        entry.job = job
        self._n_moving += 1
        try:
            self._reader.submit(job)
        except RuntimeClosedError as error:
            asyncio.get_running_loop().call_soon(self._read_done, job, error)

    def _read_done(self, job: ReadJob, error: BaseException | None) -> None:
        """All reads of an object have landed, or nothing writes to its slot any more."""
        assert isinstance(job, ObjectRead)
        checker = self._checker
        slot = job.entry.landing
        if (
            error is None
            and checker is not None
            and slot is not None
            and slot.state is not _DRAINING
            and checker.needs_check(job.entry.key)
        ):
            checking = asyncio.get_running_loop().run_in_executor(
                None, checker.check_or_restore, job.entry.key, job.buffer
            )
            checking.add_done_callback(lambda done: self._checked(job, done))
            return
        self._settle_read(job, error)

    def _checked(self, job: ObjectRead, checking: asyncio.Future[bool]) -> None:
        """The landed bytes were compared with their digest, and mended if that was possible."""
        error = checking.exception()
        if error is None and checking.result():
            self._counters.fallback_count += 1
        self._settle_read(job, error)

    def _settle_read(self, job: ObjectRead, error: BaseException | None) -> None:
        """Publish what a read brought, or give its slot back."""
        if self.is_orderly and self._n_copying:
            self._held_back.append((job, error))
            return
        entry = job.entry
        slot, pool = entry.landing, entry.lane.landing
        assert slot is not None
        self._n_moving -= 1
        if job.start_ns:
            busy_from = max(job.start_ns, self._busy_until_ns)
            self._counters.read_busy_ns += max(0, job.end_ns - busy_from)
            self._busy_until_ns = max(job.end_ns, self._busy_until_ns)
        entry.job = None
        entry.stage = Stage.IDLE
        pool.n_unavailable -= 1
        if self._tracer is not None and error is None:
            n_bytes = sum(read.needed for read in job.reads)
            kind = _KINDS[job.priority]
            self._tracer.read(entry.key, job.start_ns, job.end_ns, n_bytes, kind)
        if slot.state is _DRAINING:
            move(slot, _FREE)
            self._tiers.free_landing(entry, slot)
            if entry.waiters or entry.wish:
                self._route(entry, ahead=True)
        elif error is not None:
            move(slot, _FAILED)
            move(slot, _FREE)
            self._tiers.free_landing(entry, slot)
            self._fail(entry, error)
        else:
            move(slot, _READY)
            self._landed(entry, slot)
        self._pump()
        self._note_idle()

    def _landed(self, entry: Entry, slot: Slot) -> None:
        if entry.waiters or entry.wish is Wish.EXACT:
            self._stage(entry)
        elif entry.wish is Wish.NONE:
            self._tiers.settle_copy(entry, slot)
        elif entry.wish is Wish.WARM:
            self._forget_wish(entry, stays=True)
            self._upload_warm(entry, slot)
        elif not self.is_closed:
            self._upload_ahead(entry)  # else it stays in RAM until its layer's turn

    def _upload_warm(self, entry: Entry, slot: Slot) -> None:
        """Copy an object of the hot list on if the device has room that nobody wants."""
        pool, landing = entry.lane.device, entry.lane.landing
        if pool.has_room and pool.has_spare() and not pool.wanted and not self.is_closed:
            landing.policy.hold(entry.item)
            landing.n_unavailable += 1
            self._upload(entry, pool.take())
        else:
            self._tiers.settle_copy(entry, slot)

    def _fail(self, entry: Entry, error: BaseException) -> None:
        """Tell those who wait that the object will not come, this time."""
        if entry.wish:
            self._drop_wish(entry)
        failure = error
        if not isinstance(failure, AprefetchError):
            failure = DeviceError(f"expert {tuple(entry.key)} could not be loaded: {error}")
            failure.__cause__ = error
        waiters, entry.waiters = entry.waiters, []
        for demand in waiters:
            demand.failed[entry.key.expert] = failure
            self._arrive(demand, entry)

    def _upload_ahead(self, entry: Entry) -> bool:
        """Copy a guess to the device if its share and the objects there allow it."""
        pool, landing = entry.lane.device, entry.lane.landing
        quota = int(self._guess_share * pool.n_slots)
        if len(pool.guesses) >= quota or pool.wanted or not pool.has_spare():
            return False
        displaces = self._trust.may_displace()
        if not self._tiers.make_room_for_guess(pool, entry, may_displace=displaces):
            return False
        entry.wish = Wish.GUESS
        pool.guesses[entry] = None
        landing.policy.hold(entry.item)
        landing.n_unavailable += 1
        self._upload(entry, pool.take())
        return True

    def _upload(self, entry: Entry, slot: Slot) -> None:
        """Copy an object from its landing slot, which is held, to a device slot."""
        assert entry.landing is not None
        slot.entry = entry
        entry.device = slot
        move(slot, _UPLOADING)
        move(entry.landing, _UPLOADING)
        entry.lane.device.n_unavailable += 1
        entry.stage = Stage.UPLOADING
        self._n_moving += 1
        self._n_copying += 1
        kind: Kind = "demand" if entry.waiters else "exact" if entry.wish is Wish.EXACT else "guess"
        assert self._uploader is not None
        slot.copy = self._uploader.start(entry, kind, self._uploaded)
        if slot.copy is not None and entry.waiters:
            self._grant(entry, slot)  # their compute follows the copy

    def _uploaded(self, entry: Entry, error: Exception | None) -> None:
        """The object is on the device, or the copy failed."""
        lane, slot, copy = entry.lane, entry.device, entry.landing
        assert slot is not None and copy is not None
        self._n_moving -= 1
        self._n_copying -= 1
        slot.copy = None
        entry.stage = Stage.IDLE
        lane.landing.n_unavailable -= 1
        lane.landing.guesses.pop(entry, None)
        lane.landing.exact.pop(entry, None)
        self._tiers.settle_copy(entry, copy)
        if error is not None:
            move(slot, _FAILED)
            move(slot, _FREE)
            lane.device.n_unavailable -= 1
            self._tiers.free_device(entry, slot)
            self._fail(entry, error)
        elif entry.waiters or slot.pins:  # pinned: leased while it was being copied
            move(slot, _RESIDENT)
            move(slot, _LEASED)
            self._grant(entry, slot)
        else:
            move(slot, _RESIDENT)
            lane.device.n_unavailable -= 1
            if not entry.wish:
                lane.device.policy.admit(entry.item)
        self._pump()
        self._note_idle()

    def _grant(self, entry: Entry, slot: Slot) -> None:
        """Pin a resident object, already claimed, for all who wait for it."""
        waiters, entry.waiters = entry.waiters, []
        slot.pins += len(waiters)
        for demand in waiters:
            demand.ready.append(entry)
            self._arrive(demand, entry)

    def _arrive(self, demand: Demand, entry: Entry) -> None:
        del demand.missing[entry]
        if not demand.missing:
            self._close_books(demand)
        demand.wake()

    # -- at rest -------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until no read, upload or release is under way. For runs that must repeat exactly."""
        while self._n_moving and not self.is_closed:
            if self._ordered is not None:
                self._ordered.expedite()  # may find that all is over
                if not self._n_moving:
                    break
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._settling.append(waiter)
            await waiter

    def _note_idle(self) -> None:
        if not self._is_telling:
            self._is_telling = True  # each of them ends here again
            try:
                while self._held_back and not self._n_copying:
                    self._settle_read(*self._held_back.popleft())
            finally:
                self._is_telling = False
        if self._settling and self._n_moving == 0:
            settling, self._settling = self._settling, []
            for waiter in settling:
                if not waiter.done():
                    waiter.set_result(None)
        if self._idle is not None and self._n_moving == 0 and not self._idle.done():
            self._idle.set_result(None)
