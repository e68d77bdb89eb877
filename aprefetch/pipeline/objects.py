"""What the coordinator knows of one object, and the queue of objects that want a slot.

Entries are made when an object is first asked for and stay: they are small. Their fields belong to
the coordinator. `Stage` is the way from the SSD to the device; where the bytes are is told by the
slots.
"""

from __future__ import annotations

import itertools
from enum import IntEnum
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from aprefetch.pipeline.reader import ReadJob
from aprefetch.types import ExpertKey, LayerLayout

if TYPE_CHECKING:
    from aprefetch.pipeline.arena import Pool
    from aprefetch.pipeline.demand import Demand
    from aprefetch.pipeline.slots import Slot

__all__ = ["Entry", "Lane", "ObjectRead", "Stage", "WantQueue", "Wish"]

AFTER_DEMANDS = 1 << 62

_ORDERS = itertools.count(1)
"""Order numbers are unique over all queues: a place that an entry left behind in one queue must
not look live because of the entry's place in another."""


class Stage(IntEnum):
    """What is going on with an object."""

    IDLE = 0  # nothing: it is where its slots say, or on the SSD only
    WANTED = 1  # in a landing pool's queue
    READING = 2  # its reads are queued or in flight
    STAGED = 3  # bytes in a landing slot that is held; in a device pool's queue
    UPLOADING = 4  # being copied to its device slot
    DRAINING = 5  # a read nobody wants any more has yet to land
    DEMOTING = 6  # being copied back from its device slot to a landing slot


class Wish(IntEnum):
    """Whether the object was asked for ahead of its layer's turn, and not yet by a demand."""

    NONE = 0
    GUESS = 1
    EXACT = 2
    WARM = 3  # from the hot list of an earlier run


class Lane:
    """What all objects of one layer share."""

    __slots__ = ("device", "first_item", "landing", "layer", "n_experts", "payload_bytes", "wishes")

    def __init__(
        self,
        layer: int,
        layout: LayerLayout,
        first_item: int,
        landing: Pool,
        device: Pool,
    ) -> None:
        self.layer = layer
        self.n_experts = layout.n_experts
        self.payload_bytes = layout.payload_bytes
        self.first_item = first_item  # number of expert 0 in the policies
        self.landing = landing
        self.device = device
        self.wishes: dict[Entry, None] = {}  # objects with a wish, oldest first


class Entry:
    """One object."""

    __slots__ = (
        "device",
        "item",
        "job",
        "key",
        "landing",
        "lane",
        "order",
        "stage",
        "waiters",
        "wish",
        "wish_bytes",
    )

    def __init__(self, key: ExpertKey, lane: Lane) -> None:
        self.key = key
        self.lane = lane
        self.item = lane.first_item + key.expert  # its number in the policies
        self.landing: Slot | None = None
        self.device: Slot | None = None
        self.stage = Stage.IDLE
        self.wish = Wish.NONE
        self.wish_bytes = 0  # read for a guess that has not come true yet
        self.waiters: list[Demand] = []  # demands that lack it, oldest first
        self.job: ReadJob | None = None
        self.order = 0  # its live place in a queue; 0 if in none

    def urgency(self) -> int:
        """Sequence number of the oldest demand that lacks it; after all demands if none does."""
        return self.waiters[0].sequence if self.waiters else AFTER_DEMANDS


class ObjectRead(ReadJob):
    """The reads of an entry."""

    __slots__ = ("entry",)

    entry: Entry


class WantQueue:
    """Objects that want a slot of one pool: the oldest demand's first, in order of arrival.

    Entries leave by mark, not by search: `drop` only clears the entry's order number. The place of
    an entry whose demands came or went is set right when it reaches the head.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Entry]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, entry: Entry) -> None:
        """Queue an entry, or queue it anew because it became more urgent."""
        entry.order = next(_ORDERS)
        heappush(self._heap, (entry.urgency(), entry.order, entry))

    @staticmethod
    def drop(entry: Entry) -> None:
        """Take an entry out of the queue it is in."""
        entry.order = 0

    def head(self) -> Entry | None:
        """The most urgent entry, which stays queued."""
        heap = self._heap
        while heap:
            urgency, order, entry = heap[0]
            if entry.order != order:
                heappop(heap)
                continue
            now = entry.urgency()
            if now == urgency:
                return entry
            heapreplace(heap, (now, order, entry))
        return None
