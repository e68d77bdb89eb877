"""Slots and their states, and the leases that users of a slot hold.

Only the coordinator changes states, and only through `move`, which checks the edge:

    FREE -> READING -> READY -> UPLOADING -> RESIDENT <-> LEASED      (then back to FREE)

A landing slot goes FREE, READING, READY, UPLOADING and stays RESIDENT as the RAM tier's copy (or
goes back to FREE where that tier is off); a device slot goes FREE, UPLOADING, RESIDENT <-> LEASED.
Where the device orders compute behind copies, a slot is leased while UPLOADING already.
DEMOTING: a device slot whose bytes are being copied back to a landing slot, and that landing slot.
Then the one is FREE, or RESIDENT again if a demand came meanwhile, and the other RESIDENT.
FAILED: the read ended with an error, nothing was published. DRAINING: nobody wants the read any
more, but it may still write; the slot is not reused before it has landed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from aprefetch.errors import RuntimeStateError
from aprefetch.types import ExpertKey

if TYPE_CHECKING:
    from aprefetch.device.base import Ticket
    from aprefetch.pipeline.objects import Entry

__all__ = ["Lease", "Slot", "SlotState", "move"]


class SlotState(IntEnum):
    """See the module's text."""

    FREE = 0
    READING = 1
    READY = 2
    UPLOADING = 3
    RESIDENT = 4
    LEASED = 5
    DRAINING = 6
    FAILED = 7
    DEMOTING = 8


_S = SlotState
_EDGES: dict[SlotState, frozenset[SlotState]] = {
    _S.FREE: frozenset({_S.READING, _S.UPLOADING, _S.DEMOTING}),
    _S.READING: frozenset({_S.READY, _S.DRAINING, _S.FAILED}),
    _S.READY: frozenset({_S.UPLOADING, _S.RESIDENT, _S.FREE}),
    _S.UPLOADING: frozenset({_S.RESIDENT, _S.FREE, _S.FAILED}),
    _S.RESIDENT: frozenset({_S.LEASED, _S.UPLOADING, _S.DEMOTING, _S.FREE}),
    _S.LEASED: frozenset({_S.RESIDENT}),
    _S.DRAINING: frozenset({_S.FREE}),
    _S.FAILED: frozenset({_S.FREE}),
    _S.DEMOTING: frozenset({_S.FREE, _S.RESIDENT, _S.FAILED}),
}


class Slot:
    """Room for one object in an arena: `n_bytes` from byte `offset`."""

    __slots__ = ("copy", "entry", "n_bytes", "offset", "pins", "state")

    def __init__(self, offset: int, n_bytes: int) -> None:
        self.offset = offset
        self.n_bytes = n_bytes
        self.state = SlotState.FREE
        self.entry: Entry | None = None  # whose bytes these are, or are to be
        self.pins = 0  # leases out or promised; device slots only
        self.copy: Ticket | None = None  # an ordered copy into it that was not seen to end


def move(slot: Slot, state: SlotState) -> None:
    """Change a slot's state; an edge that does not exist is a broken invariant."""
    assert state in _EDGES[slot.state], f"slot {slot.offset}: {slot.state.name} -> {state.name}"
    slot.state = state


class Lease:
    """The right to read one object in the device arena, until it is released to its demand."""

    __slots__ = ("_slot", "expert", "key")

    def __init__(self, key: ExpertKey, slot: Slot) -> None:
        self.key = key
        self.expert = key[1]
        self._slot: Slot | None = slot

    @property
    def offset(self) -> int:
        """Byte of the coordinator's arena at which the object's layout starts.

        Raises:
            RuntimeStateError: the lease was released; the slot may hold another object by now.
        """
        if self._slot is None:
            raise RuntimeStateError(f"the lease of expert {tuple(self.key)} was released")
        return self._slot.offset

    @property
    def copy(self) -> Ticket | None:
        """The copy that compute on this object has to follow, if one is under way."""
        return None if self._slot is None else self._slot.copy

    @property
    def is_live(self) -> bool:
        """Whether the lease was not yet released."""
        return self._slot is not None
