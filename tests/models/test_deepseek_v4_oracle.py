"""The math of `deepseek4` against llama.cpp's float32 evaluation of the oracle file.

Tolerances are the oracle README's: largest difference 1e-3 in at least 99 % of the positions,
median over positions of the largest difference 1e-4.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from resident import Resident

from aprefetch.kernels.cpu import cpu_ops
from aprefetch.models.base import Chunk

PROMPTS = ["p7", "p40", "p150", "p300"]


@pytest.fixture(scope="module")
def oracle(oracle_dir):
    stem = oracle_dir / "tiny-deepseek4-mxfp4"
    facts = json.loads(stem.with_suffix(".json").read_text())
    with np.load(f"{stem}.logits.npz") as logits, np.load(f"{stem}.select.npz") as select:
        return facts, dict(logits), dict(select)


@pytest.fixture(scope="module", params=["numba", "reference"])
def resident(request, oracle_dir):
    return Resident(oracle_dir / "tiny-deepseek4-mxfp4.gguf", cpu_ops(request.param))


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    worst = np.abs(ours - theirs).max(axis=-1)
    return bool((worst <= 1e-3).mean() >= 0.99 and np.median(worst) <= 1e-4)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_last_position(resident, oracle, prompt):
    facts, logits, _ = oracle
    ours = resident.logits(facts["prompts"][prompt]["ids"]).numpy()
    assert close(ours[-1:], logits[f"exact/last_{prompt}"][None])


@pytest.mark.parametrize("chunk", [0, 64])
def test_every_position_and_every_expert_choice(resident, oracle, chunk):
    facts, logits, select = oracle
    seen: dict[int, np.ndarray] = {}
    ours = resident.logits(facts["prompts"]["p300"]["ids"], chunk, seen).numpy()
    assert close(ours, logits["exact/all_p300"])
    if not chunk:
        for layer, ids in seen.items():
            theirs = np.sort(select[f"p300/ffn_moe_topk-{layer}"], axis=1)
            assert (theirs == ids).all(axis=1).mean() >= 0.999


def test_mean_negative_log_likelihood(resident, oracle):
    facts, logits, _ = oracle
    ids = torch.tensor(facts["nll_ids"])
    ours = resident.logits(facts["nll_ids"])
    assert close(ours.numpy(), logits["exact/all_nll"])
    picked = torch.log_softmax(ours, dim=-1)[:-1].gather(1, ids[1:, None])
    assert -picked.mean().item() == pytest.approx(facts["nll"]["exact"], abs=1e-4)


def test_teacher_forced_decode(resident, oracle):
    if resident.ops.name == "reference":
        pytest.skip("greedy continuation covers decoding with the slow reference kernels")
    facts, logits, _ = oracle
    prompt, greedy = facts["prompts"]["p40"]["ids"], facts["greedy"]["p40"]
    state = resident.model.new_state()
    rows = [resident.step([Chunk(state, np.array(prompt))])[0]]
    rows += [resident.step([Chunk(state, np.array([token]))])[0] for token in greedy[:-1]]
    assert close(torch.cat(rows).numpy(), logits["exact/steps_p40"])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_continuation(resident, oracle, prompt):
    if resident.ops.name == "reference" and prompt != "p7":
        pytest.skip("one prompt is enough for the slow reference kernels")
    facts, _, _ = oracle
    theirs = facts["greedy"][prompt]
    assert resident.greedy(facts["prompts"][prompt]["ids"], len(theirs)) == theirs


def test_ragged_batch_equals_solo_runs(resident, oracle):
    facts, _, _ = oracle
    prompts = [facts["prompts"][p]["ids"] for p in PROMPTS]
    states = [resident.model.new_state() for _ in prompts]
    together = resident.step(
        [Chunk(s, np.array(p), "all") for s, p in zip(states, prompts, strict=True)]
    )
    for ids, ours in zip(prompts, together, strict=True):
        solo = resident.logits(ids)
        if resident.ops.batch_invariant:
            assert torch.equal(ours, solo)
        else:  # torch's products round differently for other row counts
            assert close(ours.numpy(), solo.numpy())


def test_chunks_do_not_change_a_bit(resident, oracle):
    if not resident.ops.batch_invariant:
        pytest.skip("only batch-invariant kernels promise this")
    facts, _, _ = oracle
    ids = facts["prompts"]["p300"]["ids"]
    whole = resident.logits(ids)
    for chunk in (1, 7, 64, 128, 299):
        assert torch.equal(whole, resident.logits(ids, chunk)), chunk


def test_waves_and_order_do_not_change_a_bit(resident, oracle):
    """Experts run one by one and backwards give the same bits as all at once."""
    facts, _, _ = oracle
    ids = np.array(facts["prompts"]["p150"]["ids"])
    whole = resident.logits(ids)
    assert torch.equal(whole, resident.logits_one_by_one(ids))
