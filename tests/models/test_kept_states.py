"""A state that was taken apart and put together again continues with the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from make_tiny_kimi import TINY_LINEAR, KimiConfig, write_kimi
from resident import Resident

from aprefetch.kernels.cpu import cpu_ops
from aprefetch.models.base import Chunk, SequenceState
from aprefetch.models.kv_cache import GrowingRows, SlidingRows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def residents(tmp_path_factory, oracle_dir):
    folder = tmp_path_factory.mktemp("kept")
    paths = {"deepseek4": oracle_dir / "tiny-deepseek4-mxfp4.gguf"}
    for name, config in (("k3", KimiConfig()), ("linear", TINY_LINEAR)):
        paths[name] = write_kimi(folder / f"{name}.gguf", config)[0]
    return {name: Resident(path, cpu_ops("numba", 1)) for name, path in paths.items()}


def copy(resident: Resident, state: SequenceState) -> SequenceState:
    fresh = resident.model.new_state()
    fresh.load([(values.clone(), first) for values, first in state.dump()], state.n_tokens)
    return fresh


@pytest.mark.parametrize("name", ["deepseek4", "k3", "linear"])
@pytest.mark.parametrize("cut", [1, 4, 130, 257])
def test_the_continuation_is_bit_equal(residents, name, cut) -> None:
    resident = residents[name]
    ids = np.random.default_rng(cut).integers(0, 300, cut + 70)
    state = resident.model.new_state()
    resident.step([Chunk(state, ids[:cut], "none")])
    kept = copy(resident, state)
    untouched = [values.clone() for values, _ in kept.dump()]
    assert kept.n_tokens == cut
    for chunk in (1, 70):
        again = copy(resident, kept)
        outputs = [
            torch.cat(
                [
                    resident.step([Chunk(s, ids[at : at + chunk], "all")])[0]
                    for at in range(cut, cut + 70, chunk)
                ]
            )
            for s in (copy(resident, state), again)
        ]
        whole = resident.logits(ids)[cut:]
        assert torch.equal(outputs[0], whole)
        assert torch.equal(outputs[1], whole)
        assert again.n_tokens == len(ids)
    for values, (now, _) in zip(untouched, kept.dump(), strict=True):
        assert torch.equal(values, now)  # who continues from a copy leaves what was kept


@pytest.mark.parametrize("name", ["deepseek4", "k3", "linear"])
def test_states_of_other_models_are_refused(residents, name) -> None:
    resident = residents[name]
    state = resident.model.new_state()
    resident.step([Chunk(state, np.arange(20), "none")])
    parts = state.dump()
    for wrong in (
        parts[1:],
        [*parts, parts[0]],
        [(torch.zeros(3, 7), 0), *parts[1:]],
        [(parts[0][0].to(torch.float64), 0), *parts[1:]],
        [(torch.zeros(5), 0), *parts[1:]],
    ):
        with pytest.raises(ValueError, match="state of"):
            resident.model.new_state().load(wrong, 20)


@pytest.mark.parametrize("n", [0, 1, 5, 8, 9, 100])
def test_rows_take_over_dumps(n) -> None:
    for make in (lambda: SlidingRows(3, 8, CPU), lambda: GrowingRows(3, CPU)):
        rows = make()
        for i in range(n):
            rows.append(torch.full((1, 3), float(i)))
        ((values, first),) = rows.dump()
        assert values.shape[0] == n - first
        loaded = make()
        loaded.load((values.clone(), first))
        for store in (rows, loaded):
            store.append(torch.full((20, 3), -1.0))
        last = rows.view()[-20 - min(n, 8) :]
        assert torch.equal(loaded.view()[-20 - min(n, 8) :], last)
