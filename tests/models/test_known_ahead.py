"""What a call says about the streams ahead, while its experts run one by one."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from resident import Resident

from aprefetch.kernels.cpu import cpu_ops
from aprefetch.models.base import Chunk


@pytest.fixture(scope="module", params=["numba", "reference"])
def resident(request, oracle_dir):
    return Resident(oracle_dir / "tiny-deepseek4-mxfp4.gguf", cpu_ops(request.param, 1))


def test_streams_ahead_grow_into_those_of_the_next_layer(resident) -> None:
    state = resident.model.new_state()
    resident.step([Chunk(state, np.arange(5), "none")])
    distances, states, routers = {}, [], resident.model.early_routers
    for call in resident.model.forward([Chunk(state, np.array([7]))]):
        if not call.finishing:
            assert call.ahead is None
            continue
        leases = resident.leases(call)
        seen = [call.ahead()]
        assert (call.next_scores is not None) == (call.layer + 1 in routers)
        call.parts.fill_(float("nan"))  # as fresh memory may hold
        for lease in reversed(leases):
            call.run(resident.arena, [lease])
            seen.append(call.ahead())
            if call.next_scores is not None:
                assert torch.equal(call.next_scores(), routers[call.layer + 1](seen[-1]))
        assert all(torch.isfinite(s).all() for s in seen)
        states.append(seen)
        distances[call.layer] = [float((s - seen[-1]).norm()) for s in seen]
    assert all(d[0] > d[-2] > d[-1] == 0 for d in distances.values())

    for call, seen in zip(
        _finishing(resident, [*range(5), 7]), states, strict=True
    ):  # all at once is the same to the bit
        assert torch.equal(call.ahead(), seen[0])
        call.run(resident.arena, resident.leases(call))
        assert torch.equal(call.ahead(), seen[-1])


def _finishing(resident: Resident, ids: list[int]):
    """Calls of the last token, to be run by the caller."""
    state = resident.model.new_state()
    resident.step([Chunk(state, np.array(ids[:-1]), "none")])
    for call in resident.model.forward([Chunk(state, np.array(ids[-1:]))]):
        if call.finishing:
            yield call


def test_of_several_rows_only_the_shared_expert_is_known(resident) -> None:
    for call in resident.model.forward([Chunk(resident.model.new_state(), np.arange(3))]):
        if call.finishing:
            before = call.ahead()
            assert call.next_scores is None
            call.run(resident.arena, resident.leases(call))
            assert torch.equal(call.ahead(), before)


def test_a_call_does_not_keep_itself_alive(resident) -> None:
    calls = []
    gc.disable()
    try:
        for call in _finishing(resident, [1, 2]):
            call.run(resident.arena, resident.leases(call))
            calls.append(weakref.ref(call.ahead))
            if call.next_scores is not None:
                calls.append(weakref.ref(call.next_scores))
            del call
        assert not any(ahead() for ahead in calls)
    finally:
        gc.enable()
