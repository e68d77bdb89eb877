"""The slot state machine: exactly the edges that are documented."""

from __future__ import annotations

import itertools

import pytest

from aprefetch.pipeline.slots import Slot, SlotState, move

S = SlotState
EDGES = {
    (S.FREE, S.READING),
    (S.FREE, S.UPLOADING),
    (S.READING, S.READY),
    (S.READING, S.DRAINING),
    (S.READING, S.FAILED),
    (S.READY, S.UPLOADING),
    (S.READY, S.RESIDENT),
    (S.READY, S.FREE),
    (S.UPLOADING, S.RESIDENT),
    (S.UPLOADING, S.FREE),
    (S.UPLOADING, S.FAILED),
    (S.RESIDENT, S.LEASED),
    (S.RESIDENT, S.UPLOADING),
    (S.RESIDENT, S.FREE),
    (S.LEASED, S.RESIDENT),
    (S.DRAINING, S.FREE),
    (S.FAILED, S.FREE),
    (S.FREE, S.DEMOTING),
    (S.RESIDENT, S.DEMOTING),
    (S.DEMOTING, S.FREE),
    (S.DEMOTING, S.RESIDENT),
    (S.DEMOTING, S.FAILED),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(S, S)))
def test_u1_only_documented_edges_exist(old: SlotState, new: SlotState) -> None:
    slot = Slot(0, 256)
    slot.state = old
    if (old, new) in EDGES:
        move(slot, new)
        assert slot.state is new
    else:
        with pytest.raises(AssertionError, match=f"{old.name} -> {new.name}"):
            move(slot, new)
