"""The two tiers: pools of slots, the objects in them, and how room is made.

Part of the coordinator, which is its only user; split off because it is all about room and nothing
about time. The landing tier's slots take reads and stay as cached copies; the device tier's slots
are what compute reads. Room comes from free slots, then from the policy's coldest object, and for a
demand at last from objects that came ahead of their turn.

An inclusive RAM tier keeps what was read, by the policy. In an exclusive one copies of objects that
are on the device leave first, and what leaves the device may be copied back (see `demotion`).
"""

from __future__ import annotations

from collections.abc import Callable

from aprefetch.pipeline.arena import Pool, carve
from aprefetch.pipeline.budget import (
    Ledger,
    PoolPlan,
    device_classes,
    divide,
    landing_classes,
    staging,
)
from aprefetch.pipeline.cache import Policy, new_policy
from aprefetch.pipeline.objects import Entry, Lane, Stage, WantQueue
from aprefetch.pipeline.slots import Slot, SlotState, move
from aprefetch.stats import Counters
from aprefetch.storage.experts import ExpertSource
from aprefetch.types import ExpertKey

__all__ = ["Tiers"]

RESERVE_SHARE, MOST_RESERVED = 64, 8
"""Device slots kept free over an exclusive RAM tier: one in so many, and no more than these."""

_FREE, _RESIDENT, _LEASED = SlotState.FREE, SlotState.RESIDENT, SlotState.LEASED


class Tiers:
    """Pools, lanes and entries of one coordinator.

    Raises:
        BudgetError: a budget is below the minimum.
        ConfigError: unknown policy.
    """

    def __init__(
        self,
        experts: ExpertSource,
        *,
        vram_budget: int,
        ram_budget: int,
        policy: str,
        is_exclusive: bool,
        counters: Counters,
    ) -> None:
        self._counters = counters
        self.keeps_copies = ram_budget > 0
        self.is_exclusive = is_exclusive and self.keeps_copies
        device_plans = divide(device_classes(experts), vram_budget, option="vram_budget")
        landing_plans = (
            divide(landing_classes(experts), ram_budget, option="ram_budget")
            if self.keeps_copies
            else staging(landing_classes(experts))
        )
        n_objects = sum(layout.n_experts for layout in experts.layers.values())

        layer_of = [
            place
            for place, layout in enumerate(experts.layers.values())
            for _ in range(layout.n_experts)
        ]

        def make_policy(plan: PoolPlan) -> Policy:
            # Two rounds over all objects: with k of E experts used per token, 2 E / k tokens.
            return new_policy(policy, half_life=2.0 * n_objects, layer_of=layer_of)

        self.vram = Ledger(sum(plan.n_bytes for plan in device_plans))
        self.ram = Ledger(sum(plan.n_bytes for plan in landing_plans))
        landing, self.landing_bytes = carve(landing_plans, self.ram, make_policy, WantQueue)
        device, self.device_bytes = carve(device_plans, self.vram, make_policy, WantQueue)
        self.landing_pools = tuple(dict.fromkeys(landing.values()))
        self.device_pools = tuple(dict.fromkeys(device.values()))
        if self.is_exclusive:
            for pool, plan in zip(self.device_pools, device_plans, strict=True):
                if plan.n_slots < plan.size_class.n_objects:  # else nothing need ever leave
                    pool.reserve = min(MOST_RESERVED, plan.n_slots // RESERVE_SHARE)
        self.lanes: dict[int, Lane] = {}
        first = 0
        for layer, layout in experts.layers.items():
            self.lanes[layer] = Lane(layer, layout, first, landing[layer], device[layer])
            first += layout.n_experts
        self.objects: list[Entry | None] = [None] * n_objects

    def memory(self) -> dict[str, int]:
        """Bytes of each tier: in use, most ever in use, and the budget (whole slots)."""
        return {
            "vram_used_bytes": self.vram.used_bytes,
            "vram_peak_bytes": self.vram.peak_bytes,
            "vram_budget_bytes": self.vram.limit_bytes,
            "ram_used_bytes": self.ram.used_bytes,
            "ram_peak_bytes": self.ram.peak_bytes,
            "ram_budget_bytes": self.ram.limit_bytes,
        }

    def new_entry(self, lane: Lane, expert: int) -> Entry:
        """The entry of an object that is asked for the first time."""
        entry = Entry(ExpertKey(lane.layer, expert), lane)
        self.objects[entry.item] = entry
        return entry

    def claim(self, pool: Pool, entry: Entry, slot: Slot) -> None:
        """A resident object is promised to a demand."""
        move(slot, _LEASED)
        pool.n_unavailable += 1
        pool.policy.hold(entry.item)

    def may_claim(self, pool: Pool, entry: Entry) -> bool:
        """Whether the object's turn has come to take one more slot of `pool`."""
        if not entry.waiters:
            return len(pool.exact) < pool.n_slots // 2 and pool.has_spare()
        return entry.waiters[0] is pool.oldest() or pool.has_spare()

    def make_room(self, pool: Pool, entry: Entry, give_way: Callable[[Entry], None]) -> bool:
        """See that `pool` has a free slot for a demand or an exact wish.

        `give_way` drops the wish for an object that came ahead of its turn.
        """
        if pool.free:
            return True
        victim = pool.coldest()
        if victim is None and entry.waiters:
            for ahead in (*pool.guesses, *pool.exact):
                if ahead.stage is Stage.IDLE:
                    give_way(ahead)
                    break
            if pool.free:
                return True
            victim = pool.coldest()
        if victim is None:
            return False
        self._evict_item(pool, victim)
        return True

    def make_room_for_guess(self, pool: Pool, entry: Entry, *, may_displace: bool) -> bool:
        """Free room, or room of an object colder than the guess; `may_displace`: of any coldest."""
        if pool.has_room:
            return True
        policy = pool.policy
        victim = pool.coldest()
        if victim is None:
            return False
        if pool.duplicates:
            self._evict_item(pool, victim)
            return True
        if policy.score(victim) > policy.score(entry.item) and not may_displace:
            return False
        if pool.reserve:  # a slot kept free stands for the victim's, which follows
            return bool(pool.free)
        self._evict_item(pool, victim)
        return True

    def _evict_item(self, pool: Pool, item: int) -> None:
        entry = self.objects[item]
        assert entry is not None
        if pool is entry.lane.device:
            self.evict(entry)
        else:
            self.evict_copy(entry)

    def evict(self, entry: Entry) -> None:
        """Take an object from the device. Its copy in RAM, if there is one, counts as used."""
        pool, slot = entry.lane.device, entry.device
        assert slot is not None
        move(slot, _FREE)
        pool.policy.hold(entry.item)
        if entry.landing is not None:
            entry.lane.landing.policy.touch(entry.item)
        self._counters.evictions_device += 1
        self.free_device(entry, slot)

    def free_device(self, entry: Entry, slot: Slot) -> None:
        """Give back a device slot whose state is FREE already."""
        entry.lane.device.give(slot)
        entry.device = None
        landing = entry.lane.landing
        if entry in landing.duplicates:  # the copy is the only one from now on
            del landing.duplicates[entry]
            landing.policy.admit(entry.item)

    def evict_copy(self, entry: Entry) -> None:
        """Drop an object's copy in host RAM."""
        slot = entry.landing
        assert slot is not None
        move(slot, _FREE)
        self.free_landing(entry, slot)
        self._counters.evictions_ram += 1

    def free_landing(self, entry: Entry, slot: Slot) -> None:
        """Give back a landing slot whose state is FREE already."""
        landing = entry.lane.landing
        landing.policy.hold(entry.item)
        landing.duplicates.pop(entry, None)
        landing.give(slot)
        entry.landing = None

    def settle_copy(self, entry: Entry, slot: Slot, *, stays: bool = False) -> None:
        """Bytes in RAM that nothing is going on with: a cached copy, or gone if RAM is off.

        `stays`: they are kept for the moment even then, as someone is about to use them.
        """
        if self.keeps_copies or stays:
            if slot.state is not _RESIDENT:
                move(slot, _RESIDENT)
            if self.is_exclusive and entry.device is not None:
                entry.lane.landing.duplicates[entry] = None
            else:
                entry.lane.landing.policy.admit(entry.item)
        else:
            move(slot, _FREE)
            self.free_landing(entry, slot)
