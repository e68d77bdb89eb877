"""`deepseek4` on the GPU: llama.cpp's float32 logits, and bits that never change."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from resident import Resident

from aprefetch.models.base import Chunk


@pytest.fixture(scope="module")
def oracle(oracle_dir):
    stem = oracle_dir / "tiny-deepseek4-mxfp4"
    facts = json.loads(stem.with_suffix(".json").read_text())
    with np.load(f"{stem}.logits.npz") as logits, np.load(f"{stem}.select.npz") as select:
        return facts, dict(logits), dict(select)


@pytest.fixture(scope="module")
def resident(oracle_dir):
    from aprefetch.kernels.triton.ops import TritonOps

    return Resident(oracle_dir / "tiny-deepseek4-mxfp4.gguf", TritonOps("cuda"), "cuda")


def close(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    worst = np.abs(ours.cpu().numpy() - theirs).max(axis=-1)
    return bool((worst <= 1e-3).mean() >= 0.99 and np.median(worst) <= 1e-4)


@pytest.mark.parametrize("chunk", [0, 7, 64])
def test_every_position_and_every_expert_choice(resident, oracle, chunk):
    facts, logits, select = oracle
    seen: dict[int, np.ndarray] = {}
    ours = resident.logits(facts["prompts"]["p300"]["ids"], chunk, seen)
    assert close(ours, logits["exact/all_p300"])
    if not chunk:
        for layer, ids in seen.items():
            theirs = np.sort(select[f"p300/ffn_moe_topk-{layer}"], axis=1)
            assert (theirs == ids).all(axis=1).mean() >= 0.999


def test_mean_negative_log_likelihood(resident, oracle):
    facts, logits, _ = oracle
    ours = resident.logits(facts["nll_ids"])
    assert close(ours, logits["exact/all_nll"])
    picked = torch.log_softmax(ours.cpu(), dim=-1)[:-1].gather(
        1, torch.tensor(facts["nll_ids"])[1:, None]
    )
    assert -picked.mean().item() == pytest.approx(facts["nll"]["exact"], abs=1e-4)


def test_greedy_continuation(resident, oracle):
    facts, _, _ = oracle
    for prompt in ("p7", "p40"):
        theirs = facts["greedy"][prompt]
        assert resident.greedy(facts["prompts"][prompt]["ids"], len(theirs)) == theirs


def test_chunks_do_not_change_a_bit(resident, oracle):
    ids = oracle[0]["prompts"]["p300"]["ids"]
    whole = resident.logits(ids)
    for chunk in (7, 64, 299):
        assert torch.equal(whole, resident.logits(ids, chunk)), chunk
    assert torch.equal(whole[:40], resident.logits(ids[:40], 1))


def test_waves_and_order_do_not_change_a_bit(resident, oracle):
    ids = np.array(oracle[0]["prompts"]["p150"]["ids"])
    whole = resident.logits(ids)
    assert torch.equal(whole, resident.logits_one_by_one(ids))


@pytest.mark.parametrize("capacity", [2048, 32])
def test_captured_decode_equals_the_ordinary_forward(oracle_dir, oracle, capacity):
    """The same bits, with the indexer's choice coming in and the caches growing on the way."""
    from aprefetch.kernels.triton.ops import TritonOps

    resident = Resident(oracle_dir / "tiny-deepseek4-mxfp4.gguf", TritonOps("cuda"), "cuda")
    ids = oracle[0]["prompts"]["p300"]["ids"]
    whole = resident.logits(ids)
    resident.model._decoder._first_capacity = capacity
    first, second = resident.model.new_state(), resident.model.new_state()
    for state, n in ((first, 30), (second, 1)):
        resident.step([Chunk(state, np.array(ids[:n]), "none")])
    for i in range(30, 200):
        assert torch.equal(resident.step([Chunk(first, np.array(ids[i : i + 1]))])[0][0], whole[i])
        if i % 40 == 0:  # another sequence moves in and out
            j = second.n_tokens
            logits = resident.step([Chunk(second, np.array(ids[j : j + 1]))])[0]
            assert torch.equal(logits[0], whole[j])
    # Back to the ordinary forward, in the middle of blocks.
    rest = resident.step([Chunk(first, np.array(ids[200:]), "all")])[0]
    assert torch.equal(rest, whole[200:])
    resident.source.close()
