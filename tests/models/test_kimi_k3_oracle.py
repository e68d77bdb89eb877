"""The math of `kimi-k3` against llama.cpp's float32 evaluation of the oracle files.

Tolerances are the oracle README's: largest difference 1e-3 in at least 99 % of the positions,
median over positions of the largest difference 1e-4. The files are not in the repository; see
`oracle_files`. What needs none of them is in `test_kimi_k3.py`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from oracle_files import oracle_file
from resident import Resident

from aprefetch.kernels.cpu import cpu_ops
from aprefetch.models.base import Chunk
from aprefetch.storage import open_source
from aprefetch.text.vocab import load_tokenizer

MODEL = "tiny-kimi-k3-q2k"
PROMPTS = ["p7", "p40", "p150", "p300"]


@pytest.fixture(scope="module")
def facts():
    return json.loads(oracle_file(f"{MODEL}.json").read_text())


@pytest.fixture(scope="module")
def arrays():
    found = {}
    for part in ("logits", "select"):
        with np.load(oracle_file(f"{MODEL}.{part}.npz")) as file:
            found.update({key: file[key] for key in file if not key.startswith("native/")})
    return found


@pytest.fixture(scope="module", params=["numba", "reference"])
def resident(request):
    # The third shard: any one of them opens the model.
    return Resident(oracle_file(f"{MODEL}-00003-of-00004.gguf"), cpu_ops(request.param, 1))


def close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    worst = np.abs(ours - theirs).max(axis=-1)
    return bool((worst <= 1e-3).mean() >= 0.99 and np.median(worst) <= 1e-4)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_last_position(resident, facts, arrays, prompt):
    ours = resident.logits(facts["prompts"][prompt]["ids"]).numpy()
    assert close(ours[-1:], arrays[f"exact/last_{prompt}"][None])


@pytest.mark.parametrize("chunk", [0, 1, 7, 64])
def test_every_position_and_every_expert_choice(resident, facts, arrays, chunk):
    if chunk in (1, 7) and not resident.ops.batch_invariant:
        pytest.skip("the reference kernels are slow; two sizes are enough")
    seen: dict[int, np.ndarray] = {}
    ours = resident.logits(facts["prompts"]["p300"]["ids"], chunk, seen).numpy()
    assert close(ours, arrays["exact/all_p300"])
    if not chunk:
        assert sorted(seen) == list(range(1, 8))
        for layer, ids in seen.items():
            theirs = np.sort(arrays[f"p300/ffn_moe_topk-{layer}"], axis=1)
            assert (theirs == ids).all(axis=1).mean() >= 0.999


def test_expert_weights(resident, facts, arrays, monkeypatch):
    """The routed norm hides a wrong scale of the weights from the logits, so look at them."""
    seen = []
    inner = type(resident.ops).route_sigmoid

    def watched(self, *args, **kwargs):
        seen.append(inner(self, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(type(resident.ops), "route_sigmoid", watched)
    resident.logits(facts["prompts"]["p150"]["ids"])
    for layer, (ids, weights) in enumerate(seen, start=1):
        theirs = arrays[f"p150/ffn_moe_topk-{layer}"]
        order = np.argsort(theirs, axis=1)
        assert (np.take_along_axis(theirs, order, 1) == ids.numpy()).all()
        scaled = np.take_along_axis(arrays[f"p150/ffn_moe_weights_scaled-{layer}"], order, 1)
        np.testing.assert_allclose(weights.numpy(), scaled, atol=2e-5)


def test_mean_negative_log_likelihood(resident, facts, arrays):
    ids = torch.tensor(facts["nll_ids"])
    ours = resident.logits(facts["nll_ids"])
    assert close(ours.numpy(), arrays["exact/all_nll"])
    picked = torch.log_softmax(ours, dim=-1)[:-1].gather(1, ids[1:, None])
    assert -picked.mean().item() == pytest.approx(facts["nll"]["exact"], abs=1e-4)


def test_teacher_forced_decode(resident, facts, arrays):
    n_steps = 64 if resident.ops.batch_invariant else 8
    prompt, greedy = facts["prompts"]["p40"]["ids"], facts["greedy"]["p40"][:n_steps]
    state = resident.model.new_state()
    rows = [resident.step([Chunk(state, np.array(prompt))])[0]]
    rows += [resident.step([Chunk(state, np.array([token]))])[0] for token in greedy[:-1]]
    assert close(torch.cat(rows).numpy(), arrays["exact/steps_p40"][:n_steps])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_continuation(resident, facts, prompt):
    if not resident.ops.batch_invariant and prompt != "p7":
        pytest.skip("the reference kernels are slow; one prompt is enough")
    n_steps = 64 if resident.ops.batch_invariant else 12
    ours = resident.greedy(facts["prompts"][prompt]["ids"], n_steps)
    assert ours == facts["greedy"][prompt][:n_steps]


def test_ragged_batch_equals_solo_runs(resident, facts):
    n_prompts = 4 if resident.ops.batch_invariant else 2
    prompts = [facts["prompts"][p]["ids"] for p in PROMPTS[:n_prompts]]
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


def test_chunks_do_not_change_a_bit(resident, facts):
    if not resident.ops.batch_invariant:
        pytest.skip("only batch-invariant kernels promise this")
    ids = facts["prompts"]["p300"]["ids"]
    whole = resident.logits(ids)
    for chunk in (1, 7, 64, 299):
        assert torch.equal(whole, resident.logits(ids, chunk)), chunk


def test_tokens(facts):
    with open_source(oracle_file(f"{MODEL}-00002-of-00004.gguf")) as source:
        tokenizer = load_tokenizer(source)
    for case in facts["tokenizer_tests"]:
        for options, ids in case["ids"].items():
            special, parse = (part.endswith("=1") for part in options.split(","))
            ours = tokenizer.encode(case["text"], add_special=special, parse_special=parse)
            assert list(ours) == ids, (case["text"], options)
