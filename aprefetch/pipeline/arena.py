"""One tier's memory as pools of equal slots.

A `Pool` owns the slots of one size class: the free list, the policy that ranks what is in them, the
queue of objects that want one, and the count of slots that cannot be had. The memory itself belongs
to the device; `carve` only gives out offsets, each a multiple of the alignment. The coordinator is
the one user of a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from aprefetch.pipeline.budget import Ledger, PoolPlan
from aprefetch.pipeline.cache import Policy
from aprefetch.pipeline.slots import Slot

if TYPE_CHECKING:
    from aprefetch.pipeline.demand import Demand
    from aprefetch.pipeline.objects import Entry, WantQueue

__all__ = ["Pool", "carve"]


class Pool:
    """The slots of one size class in one tier."""

    __slots__ = (
        "duplicates",
        "exact",
        "free",
        "guesses",
        "ledger",
        "n_demoting",
        "n_slots",
        "n_unavailable",
        "open",
        "policy",
        "reserve",
        "slot_bytes",
        "slots",
        "wanted",
    )

    def __init__(
        self, plan: PoolPlan, first: int, ledger: Ledger, policy: Policy, wanted: WantQueue
    ) -> None:
        self.slot_bytes = plan.size_class.slot_bytes
        self.n_slots = plan.n_slots
        self.slots = [
            Slot(first + i * self.slot_bytes, self.slot_bytes) for i in range(self.n_slots)
        ]
        self.free = self.slots[::-1]  # the last is taken first: the lowest offset
        self.ledger = ledger
        self.policy = policy
        self.wanted = wanted  # objects waiting for a slot of this pool
        self.open: dict[Demand, None] = {}  # open demands on this pool, oldest first
        self.n_unavailable = 0  # slots neither free nor evictable: arriving, promised or leased
        # Objects with a slot here that came ahead of their layer's turn, oldest first. Policies
        # do not see them: they leave for a demand that finds nothing else, and for no guess.
        self.guesses: dict[Entry, None] = {}
        self.exact: dict[Entry, None] = {}
        # Of an exclusive RAM tier: copies whose objects are on the device. Policies do not see them
        # either: they leave before all others, the oldest first.
        self.duplicates: dict[Entry, None] = {}
        self.reserve = 0  # slots kept free ahead of need: of device pools over an exclusive tier
        self.n_demoting = 0  # slots that are being copied back

    def take(self) -> Slot:
        """A free slot; there must be one."""
        slot = self.free.pop()
        self.ledger.take(slot.n_bytes)
        return slot

    def give(self, slot: Slot) -> None:
        """A slot is free again."""
        slot.entry = None
        self.ledger.give(slot.n_bytes)
        self.free.append(slot)

    @property
    def has_room(self) -> bool:
        """Whether a slot is free besides those kept free."""
        return len(self.free) > self.reserve

    def coldest(self) -> int | None:
        """The next victim, which stays; None if there is none."""
        for entry in self.duplicates:
            return entry.item
        return self.policy.coldest()

    def oldest(self) -> Demand | None:
        """The open demand that has waited longest and still lacks an object."""
        for demand in self.open:
            if demand.missing:
                return demand
        return None

    def has_spare(self) -> bool:
        """Whether one more slot can be claimed and one is left for the oldest demand."""
        return self.n_unavailable < self.n_slots - 1


def carve(
    plans: Iterable[PoolPlan],
    ledger: Ledger,
    new_policy: Callable[[PoolPlan], Policy],
    new_queue: Callable[[], WantQueue],
) -> tuple[dict[int, Pool], int]:
    """Lay pools one behind the other: the pool of each layer, and the bytes of all of them."""
    by_layer: dict[int, Pool] = {}
    at = 0
    for plan in plans:
        pool = Pool(plan, at, ledger, new_policy(plan), new_queue())
        at += plan.n_bytes
        for layer in plan.size_class.layers:
            by_layer[layer] = pool
    return by_layer, at
