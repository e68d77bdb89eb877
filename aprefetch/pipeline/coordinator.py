"""The one owner of budgets, caches and slot states: demand, guess, lease, evict.

Two tiers. Landing slots in host RAM take direct reads and stay as cached copies; device slots are
what compute reads. A demand pins what is on the device and queues the rest; a guess moves bytes
ahead of a demand and claims nothing. Everything happens on the event loop's thread in plain calls:
the reader and the device report back through callbacks, and there is no task or future per object.

Invariants
- An object is read at most once at a time, and published only after all its bytes arrived.
- A slot that is arriving, promised or leased is no victim; a slot is overwritten only after the
  compute that used it is done.
- Demands are served by age. One slot of each pool is left to the oldest demand that lacks an
  object, so that it can go on whatever younger demands and guesses hold.
- Bytes of slots in use are within the tiers' budgets at every instant (`Ledger`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Sequence

from torch import Tensor

from aprefetch.device.base import Device
from aprefetch.errors import AprefetchError, DeviceError, RuntimeClosedError, RuntimeStateError
from aprefetch.pipeline.arena import Pool
from aprefetch.pipeline.budget import (
    device_classes,
    landing_classes,
    minimum_bytes,
)
from aprefetch.pipeline.demand import Demand
from aprefetch.pipeline.guesses import GuessTrust
from aprefetch.pipeline.objects import Entry, Lane, ObjectRead, Stage, WantQueue, Wish
from aprefetch.pipeline.reader import Priority, Reader, ReadJob
from aprefetch.pipeline.slots import Lease, Slot, SlotState, move
from aprefetch.pipeline.tiers import Tiers
from aprefetch.pipeline.uploader import Uploader
from aprefetch.stats import Counters
from aprefetch.storage.experts import ExpertSource
from aprefetch.trace import Kind, Tracer

__all__ = ["Coordinator", "Demand", "Lease"]

_FREE, _READING, _READY = SlotState.FREE, SlotState.READING, SlotState.READY
_UPLOADING, _RESIDENT, _LEASED = SlotState.UPLOADING, SlotState.RESIDENT, SlotState.LEASED
_DRAINING, _FAILED = SlotState.DRAINING, SlotState.FAILED

_KINDS: dict[Priority, Kind] = {
    Priority.DEMAND: "demand",
    Priority.EXACT: "exact",
    Priority.GUESS: "guess",
}


class Coordinator:
    """Moves experts between the SSD, host RAM and the device. Make it on a running event loop.

    Args:
        experts: where objects lie.
        device: where slots and copies are.
        reader: reads the files of `experts.paths`; close it after the coordinator.
        vram_budget: bytes of the device cache.
        ram_budget: bytes of the host-RAM tier; 0 turns the tier off and leaves a small staging.
        policy: "lfu" (ageing frequency) or "lru", for both tiers.
        counters: written on the loop's thread.
        tracer: spans of reads, uploads and waits; None for none.
        guess_share: the largest part of each pool that guesses may hold at a time.

    Raises:
        BudgetError: a budget is below the minimum.
        ConfigError: unknown policy.
        DeviceError: no memory.
    """

    def __init__(
        self,
        experts: ExpertSource,
        device: Device,
        reader: Reader,
        *,
        vram_budget: int,
        ram_budget: int,
        policy: str = "lfu",
        counters: Counters,
        tracer: Tracer | None = None,
        guess_share: float = 0.25,
    ) -> None:
        self._experts = experts
        self._device = device
        self._reader = reader
        self._counters = counters
        self._tracer = tracer
        self._guess_share = guess_share
        self._trust = GuessTrust()
        self._tiers = Tiers(
            experts,
            vram_budget=vram_budget,
            ram_budget=ram_budget,
            policy=policy,
            counters=counters,
        )
        self._objects = self._tiers.objects
        self._lanes = self._tiers.lanes
        self._host = device.alloc_host(max(self._tiers.landing_bytes, 1), experts.alignment)
        self._arena: Tensor | None = device.alloc_slots(max(self._tiers.device_bytes, 1))
        self._uploader: Uploader | None = Uploader(
            experts, device, self._host.tensor, self._arena, counters, tracer
        )
        self._sequence = 0
        self._n_moving = 0  # reads, uploads and releases that have yet to report
        self._is_pumping = False
        self._open: dict[Demand, None] = {}  # demands that lack an object
        self._idle: asyncio.Future[None] | None = None
        self.is_closed = False

    @staticmethod
    def minimum_budgets(experts: ExpertSource) -> tuple[int, int]:
        """(vram, ram): the smallest legal budgets in bytes; `ram_budget` may be 0 besides."""
        return minimum_bytes(device_classes(experts)), minimum_bytes(landing_classes(experts))

    @property
    def arena(self) -> Tensor:
        """The device slots, uint8; leases are byte offsets into it.

        Raises:
            RuntimeClosedError: after `aclose`.
        """
        if self._arena is None:
            raise RuntimeClosedError("the coordinator was closed")
        return self._arena

    def memory(self) -> dict[str, int]:
        """Bytes of each tier: in use, most ever in use, and the budget (whole slots)."""
        return self._tiers.memory()

    # -- demands ----------------------------------------------------------------------------

    def demand(self, layer: int, experts: Sequence[int]) -> Demand:
        """Ask for objects that a layer needs now. Never blocks.

        Args:
            layer: the model's own layer number.
            experts: ids, ascending, each once.

        Raises:
            RuntimeClosedError: after `aclose`.
            RuntimeStateError: no such layer or expert.
        """
        lane = self._lane(layer)
        self._sequence += 1
        demand = Demand(self, lane, self._sequence)
        if experts and not 0 <= experts[0] <= experts[-1] < lane.n_experts:
            raise RuntimeStateError(
                f"layer {layer} has experts 0 to {lane.n_experts - 1}; asked for {list(experts)}"
            )
        pool = lane.device
        touch, first, objects = pool.policy.touch, lane.first_item, self._objects
        n_hits = 0
        for expert in experts:
            entry = objects[first + expert] or self._tiers.new_entry(lane, expert)
            touch(entry.item)
            if entry.wish:
                self._confirm(entry)
            slot = entry.device
            if slot is None or slot.state is _UPLOADING:
                self._miss(demand, entry)
                continue
            n_hits += 1
            if slot.pins:
                slot.pins += 1
            elif not pool.open or pool.has_spare():
                self._tiers.claim(pool, entry, slot)
                slot.pins = 1
            else:  # promised when the older demands leave room
                entry.waiters.append(demand)
                demand.missing[entry] = None
                pool.wanted.push(entry)
                continue
            demand.ready.append(entry)
        self._counters.hits_device += n_hits
        self._counters.misses_device += len(experts) - n_hits
        if len(experts) > pool.n_slots:
            self._counters.waves += 1
        if demand.missing:
            self._open[demand] = pool.open[demand] = lane.landing.open[demand] = None
            self._pump()
        return demand

    def _lane(self, layer: int) -> Lane:
        if self.is_closed:
            raise RuntimeClosedError("the coordinator was closed")
        lane = self._lanes.get(layer)
        if lane is None:
            raise RuntimeStateError(f"layer {layer} has no routed experts")
        return lane

    def _miss(self, demand: Demand, entry: Entry) -> None:
        """Note that `demand` lacks `entry`, and see that it is under way."""
        counters, landing = self._counters, entry.lane.landing
        stage = entry.stage
        entry.waiters.append(demand)
        demand.missing[entry] = None
        landing.policy.touch(entry.item)
        if entry.landing is not None and stage not in (Stage.READING, Stage.DRAINING):
            counters.hits_ram += 1
        else:
            counters.misses_ram += 1
        if stage is Stage.IDLE:
            self._route(entry, ahead=bool(landing.open))
        elif stage is Stage.READING:
            assert entry.job is not None
            self._reader.promote(entry.job, Priority.DEMAND)
        elif stage is Stage.WANTED:
            landing.wanted.push(entry)
        elif stage is Stage.STAGED:
            entry.lane.device.wanted.push(entry)

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

    def unpin(self, slots: list[Slot]) -> None:
        """Take back what `Demand.release` gave back, once the compute enqueued so far is done."""
        if self.is_closed:
            return
        ticket = self._device.record()
        if ticket.done():
            self._unpin_now(slots)
        else:
            self._n_moving += 1
            self._device.when_done(ticket, functools.partial(self._unpin_later, slots))

    def _unpin_later(self, slots: list[Slot]) -> None:
        self._n_moving -= 1
        self._unpin_now(slots)
        self._note_idle()

    def _unpin_now(self, slots: Iterable[Slot]) -> None:
        pool = None
        for slot in slots:
            slot.pins -= 1
            if not slot.pins:
                entry = slot.entry
                assert entry is not None
                pool = entry.lane.device
                move(slot, _RESIDENT)
                pool.n_unavailable -= 1
                pool.policy.admit(entry.item)
        if pool is not None and pool.wanted:
            self._pump()

    def forget(self, demand: Demand) -> None:
        """Undo what a demand that closes still claims, and drop loads that only it wanted."""
        self._close_books(demand)
        is_pump_due = bool(demand.missing)
        for entry in demand.missing:
            entry.waiters.remove(demand)
            if not entry.waiters:
                self._abandon(entry)
        demand.missing.clear()
        slots = [entry.device for entry in demand.ready if entry.device is not None]
        demand.ready.clear()
        if not self.is_closed:
            self._unpin_now(slots)  # promised, but never seen by compute
            if is_pump_due:
                self._pump()

    def _close_books(self, demand: Demand) -> None:
        if self._open.pop(demand, demand) is None:
            del demand.lane.device.open[demand], demand.lane.landing.open[demand]

    def count_stall(self, layer: int, start_ns: int, end_ns: int, n_missing: int) -> None:
        """Compute of `layer` stood still for experts."""
        counters = self._counters
        counters.stalls += 1
        counters.stall_ns += end_ns - start_ns
        by_layer = counters.stall_ns_by_layer
        by_layer[layer] = by_layer.get(layer, 0) + end_ns - start_ns
        if self._tracer is not None:
            self._tracer.wait(layer, start_ns, end_ns, n_missing)

    # -- guesses ----------------------------------------------------------------------------

    def guess(self, layer: int, experts: Iterable[int], *, exact: bool = False) -> None:
        """Wish for objects ahead of their layer's turn, without a claim on them.

        Args:
            layer: the model's own layer number.
            experts: ids.
            exact: the layer will certainly use them (it routes by token id): they are read right
                after demands and displace others as a demand would. Otherwise the wish is refused
                where there is no room for it.
        """
        lane = self._lane(layer)
        for expert in experts:
            if not 0 <= expert < lane.n_experts:
                raise RuntimeStateError(
                    f"layer {layer} has experts 0 to {lane.n_experts - 1}, not {expert}"
                )
            entry = self._objects[lane.first_item + expert] or self._tiers.new_entry(lane, expert)
            if entry.device is not None or entry.stage or entry.wish or entry.waiters:
                self._counters.guesses_dropped += not exact
            elif exact:
                entry.wish = Wish.EXACT
                lane.wishes[entry] = None
                self._route(entry, ahead=True)
            elif self._start_guess(entry):
                lane.wishes[entry] = None
                self._counters.guesses_issued += 1
            else:
                self._counters.guesses_dropped += 1
        self._pump()

    def end_layer(self, layer: int) -> None:
        """The layer's turn is over: wishes for it that no demand took up are dropped."""
        lane = self._lanes.get(layer)
        if lane is not None and lane.wishes and not self.is_closed:
            for entry in list(lane.wishes):
                self._drop_wish(entry)
            self._pump()

    def drop_wishes(self) -> None:
        """No step is under way: drop all wishes."""
        for layer in self._lanes:
            self.end_layer(layer)

    def _start_guess(self, entry: Entry) -> bool:
        """Read ahead, or copy ahead if the bytes are in RAM; false if there is no room."""
        landing = entry.lane.landing
        if entry.landing is not None:
            return self._upload_ahead(entry)
        quota = max(int(self._guess_share * landing.n_slots), int(self._guess_share > 0))
        if len(landing.guesses) >= quota or landing.wanted or not landing.has_spare():
            return False
        if not self._trust.admits():
            return False
        displaces = self._trust.may_evict()
        if not self._tiers.make_room_for_guess(landing, entry, may_displace=displaces):
            return False
        entry.wish = Wish.GUESS
        landing.guesses[entry] = None
        self._read(entry, landing.take())
        return True

    def _upload_ahead(self, entry: Entry) -> bool:
        """Copy a guess to the device if its share and the objects there allow it."""
        pool, landing = entry.lane.device, entry.lane.landing
        quota = int(self._guess_share * pool.n_slots)
        if len(pool.guesses) >= quota or pool.wanted or not pool.has_spare():
            return False
        displaces = self._trust.may_evict()
        if not self._tiers.make_room_for_guess(pool, entry, may_displace=displaces):
            return False
        entry.wish = Wish.GUESS
        pool.guesses[entry] = None
        landing.policy.hold(entry.item)
        landing.n_unavailable += 1
        self._upload(entry, pool.take())
        return True

    def _confirm(self, entry: Entry) -> None:
        """A demand asks for an object that was wished for."""
        if entry.wish is Wish.GUESS:
            self._counters.guesses_useful += 1
            self._trust.resolved(True)
        self._forget_wish(entry, stays=True)

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

    # -- movement ---------------------------------------------------------------------------

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
        finally:
            self._is_pumping = False

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
            if not self._tiers.make_room(pool, entry, self._drop_wish):
                break
            WantQueue.drop(entry)
            if entry.wish is Wish.EXACT:
                pool.exact[entry] = None
            self._upload(entry, pool.take())
        return has_rerouted

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
        entry = job.entry
        slot, pool = entry.landing, entry.lane.landing
        assert slot is not None
        self._n_moving -= 1
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
        elif not self.is_closed:
            self._upload_ahead(entry)  # else it stays in RAM until its layer's turn

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
        kind: Kind = "demand" if entry.waiters else "exact" if entry.wish is Wish.EXACT else "guess"
        assert self._uploader is not None
        self._uploader.start(entry, kind, self._uploaded)

    def _uploaded(self, entry: Entry, error: Exception | None) -> None:
        """The object is on the device, or the copy failed."""
        lane, slot, copy = entry.lane, entry.device, entry.landing
        assert slot is not None and copy is not None
        self._n_moving -= 1
        entry.stage = Stage.IDLE
        lane.landing.n_unavailable -= 1
        lane.landing.guesses.pop(entry, None)
        lane.landing.exact.pop(entry, None)
        self._tiers.settle_copy(entry, copy)
        if error is not None:
            move(slot, _FAILED)
            move(slot, _FREE)
            lane.device.n_unavailable -= 1
            lane.device.give(slot)
            entry.device = None
            self._fail(entry, error)
        elif entry.waiters:
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

    # -- the end ----------------------------------------------------------------------------

    def _note_idle(self) -> None:
        if self._idle is not None and self._n_moving == 0 and not self._idle.done():
            self._idle.set_result(None)

    async def aclose(self) -> None:
        """Take no new work, wait for reads and copies that are under way, free the memory.

        Tasks that wait for a demand get `RuntimeClosedError`. Idempotent. A caller who is
        cancelled stops waiting; call again to be sure that the memory is free.
        """
        if not self.is_closed:
            self.is_closed = True
            for demand in list(self._open):
                demand.wake(RuntimeClosedError("the coordinator was closed"))
            for entry in self._objects:
                if entry is not None and entry.job is not None:
                    self._reader.cancel(entry.job)
            self._idle = asyncio.get_running_loop().create_future()
            self._note_idle()
        assert self._idle is not None
        await asyncio.shield(self._idle)
        self._arena = None
        self._uploader = None
        self._host.close()
