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

from aprefetch.config import RamTier
from aprefetch.device.base import Device
from aprefetch.errors import RuntimeClosedError, RuntimeStateError
from aprefetch.pipeline.budget import (
    device_classes,
    landing_classes,
    minimum_bytes,
)
from aprefetch.pipeline.demand import Demand
from aprefetch.pipeline.guesses import Verdict
from aprefetch.pipeline.movement import Movement
from aprefetch.pipeline.objects import Entry, Lane, Stage, Wish
from aprefetch.pipeline.reader import Priority, Reader
from aprefetch.pipeline.slots import Lease, Slot, SlotState, move
from aprefetch.pipeline.tiers import Tiers
from aprefetch.stats import Counters
from aprefetch.storage.experts import ExpertSource
from aprefetch.trace import Tracer
from aprefetch.types import ExpertKey

__all__ = ["Coordinator", "Demand", "Lease"]

_UPLOADING, _RESIDENT = SlotState.UPLOADING, SlotState.RESIDENT
_DEMOTING = SlotState.DEMOTING


class Coordinator(Movement):
    """Moves experts between the SSD, host RAM and the device. Make it on a running event loop.

    Args:
        experts: where objects lie.
        device: where slots and copies are.
        reader: reads the files of `experts.paths`; close it after the coordinator.
        vram_budget: bytes of the device cache.
        ram_budget: bytes of the host-RAM tier; 0 turns the tier off and leaves a small staging.
        policy: "layered", "lfu" (ageing frequency) or "lru", for both tiers; see `cache`.
        ram_tier: "inclusive" keeps copies of what was read; "exclusive" takes what leaves the
            device, and keeps no copies of what is there longer than their room is of no other use.
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
        ram_tier: RamTier = "inclusive",
        counters: Counters,
        tracer: Tracer | None = None,
        guess_share: float = 0.25,
    ) -> None:
        tiers = Tiers(
            experts,
            vram_budget=vram_budget,
            ram_budget=ram_budget,
            policy=policy,
            is_exclusive=ram_tier == "exclusive",
            counters=counters,
        )
        super().__init__(experts, device, reader, tiers, counters, tracer, guess_share)
        self._objects = tiers.objects
        self._lanes = tiers.lanes
        self._sequence = 0

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

    def where(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Where each object is: 0 device, 1 host RAM, 2 being read, 3 SSD only. For studies."""
        lane = self._lane(layer)
        found = []
        for expert in experts:
            entry = self._objects[lane.first_item + expert]
            if entry is None:
                found.append(3)
            elif entry.device is not None and not entry.stage:
                found.append(0)
            elif entry.stage is Stage.READING or entry.stage is Stage.DRAINING:
                found.append(2)
            else:
                found.append(1 if entry.landing is not None else 3)
        return found

    # -- demands -------------------------------------------------------------------------------

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
        if self._ordered is not None:
            self._ordered.poll()
        self._sequence += 1
        demand = Demand(self, lane, self._sequence)
        if experts and not 0 <= experts[0] <= experts[-1] < lane.n_experts:
            raise RuntimeStateError(
                f"layer {layer} has experts 0 to {lane.n_experts - 1}; asked for {list(experts)}"
            )
        pool = lane.device
        touch, first, objects = pool.policy.touch, lane.first_item, self._objects
        pool.policy.begin(first)
        lane.landing.policy.begin(first)
        n_hits = 0
        for expert in experts:
            entry = objects[first + expert] or self._tiers.new_entry(lane, expert)
            touch(entry.item)
            if entry.wish:
                self._confirm(entry)
            slot = entry.device
            if slot is None or slot.state is _UPLOADING or slot.state is _DEMOTING:
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
        """Note that `entry` is not on the device, and see that it is under way."""
        counters, landing, slot = self._counters, entry.lane.landing, entry.device
        stage = entry.stage
        landing.policy.touch(entry.item)
        if entry.landing is not None and stage not in (Stage.READING, Stage.DRAINING):
            counters.hits_ram += 1
        else:
            counters.misses_ram += 1
        if slot is not None and slot.copy is not None:  # compute can follow the copy
            slot.pins += 1
            demand.ready.append(entry)
            return
        entry.waiters.append(demand)
        demand.missing[entry] = None
        if stage is Stage.IDLE:
            self._route(entry, ahead=bool(landing.open))
        elif stage is Stage.READING:
            assert entry.job is not None
            self._reader.promote(entry.job, Priority.DEMAND)
        elif stage is Stage.WANTED:
            landing.wanted.push(entry)
        elif stage is Stage.STAGED:
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
            if not slot.pins and slot.state is not _UPLOADING:
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

    def count_stall(self, layer: int, start_ns: int, end_ns: int, n_missing: int) -> None:
        """Compute of `layer` stood still for experts."""
        counters = self._counters
        counters.stalls += 1
        counters.stall_ns += end_ns - start_ns
        by_layer = counters.stall_ns_by_layer
        by_layer[layer] = by_layer.get(layer, 0) + end_ns - start_ns
        if self._tracer is not None:
            self._tracer.wait(layer, start_ns, end_ns, n_missing)

    # -- guesses -------------------------------------------------------------------------------

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

    def hottest(self) -> list[ExpertKey]:
        """Objects that are in a tier, the device's first, each tier's warmest first."""
        found: list[tuple[bool, float, ExpertKey]] = []
        for entry in self._objects:
            if entry is not None and (entry.device is not None or entry.landing is not None):
                pool = entry.lane.device if entry.device is not None else entry.lane.landing
                found.append((entry.device is None, -pool.policy.score(entry.item), entry.key))
        return [key for _, _, key in sorted(found)]

    async def warm(self, keys: Iterable[ExpertKey]) -> int:
        """Bring objects into room that is still free, in this order; how many were brought.

        Keys that do not exist, or for which there is no room, are passed over. May go on beside
        demands, which come first.
        """
        entries = []
        for key in keys:
            lane = self._lanes.get(key.layer)
            if lane is not None and 0 <= key.expert < lane.n_experts:
                item = lane.first_item + key.expert
                entries.append(self._objects[item] or self._tiers.new_entry(lane, key.expert))
        for entry in reversed(entries):  # as if used once each, the warmest last
            entry.lane.device.policy.touch(entry.item)
            entry.lane.landing.policy.touch(entry.item)
        n_brought = 0
        for entry in entries:
            lane = entry.lane
            if not (lane.landing.free and lane.landing.has_spare()):
                await self.settled()
            if self.is_closed:
                break
            is_idle = not (entry.stage or entry.wish or entry.waiters)
            if not is_idle or entry.device is not None or entry.landing is not None:
                continue
            if lane.landing.wanted or not lane.landing.has_spare():
                continue
            # A copy whose object is on the device already may make room for one that is not.
            if not lane.landing.free and not (
                (lane.landing.duplicates if self._tiers.is_exclusive else lane.device.free)
                and self._tiers.make_room(lane.landing, entry, self._drop_wish)
            ):
                continue
            entry.wish = Wish.WARM
            self._read(entry, lane.landing.take())
            n_brought += 1
        await self.settled()
        return n_brought

    def _start_guess(self, entry: Entry) -> bool:
        """Read ahead, or copy ahead if the bytes are in RAM; false if there is no room."""
        landing = entry.lane.landing
        if entry.landing is not None:
            return self._upload_ahead(entry)
        quota = max(int(self._guess_share * landing.n_slots), int(self._guess_share > 0))
        if len(landing.guesses) >= quota or landing.wanted or not landing.has_spare():
            return False
        verdict = self._trust.verdict()
        if verdict is Verdict.REFUSED:
            return False
        displaces = verdict is Verdict.DISPLACES
        if not self._tiers.make_room_for_guess(landing, entry, may_displace=displaces):
            return False
        entry.wish = Wish.GUESS
        landing.guesses[entry] = None
        self._read(entry, landing.take())
        return True

    def _confirm(self, entry: Entry) -> None:
        """A demand asks for an object that was wished for."""
        if entry.wish is Wish.GUESS:
            self._counters.guesses_useful += 1
            self._trust.resolved(True)
        self._forget_wish(entry, stays=True)

    # -- the end -------------------------------------------------------------------------------

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
            if self._ordered is not None:
                self._ordered.expedite()
        assert self._idle is not None
        await asyncio.shield(self._idle)
        self._arena = None
        self._uploader = None
        self._demotions = None
        self._host.close()
