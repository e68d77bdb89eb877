"""`kimi-k3` and `kimi-linear` on the GPU: the reference's logits and tokens, and the same bits.

The files are random, with experts in Q2_K and Q3_K. Either side's float32 stays within 2e-4 of
float64 on logits of order one (`test_kimi_k3` holds the reference to that), hence 4e-4 between
them; a wrong ingredient moves logits by tenths.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import kimi_checks
import numpy as np
import pytest
import torch
from make_tiny_kimi import TINY_LINEAR, KimiConfig, write_kimi
from resident import Resident
from runtime_parts import full_budgets, minimum_budgets

from aprefetch import Runtime
from aprefetch.kernels.cpu import cpu_ops
from aprefetch.models.base import Chunk

N_TOKENS = 24
TOLERANCE = 4e-4
CONFIGS = {
    "k3": KimiConfig(),
    "linear": TINY_LINEAR,
    "k3-groups": replace(KimiConfig(), n_groups=4, n_used_groups=2, n_layers=4),
    "k3-old-file": replace(KimiConfig(), has_kv_b=True, lower_bound=None, n_layers=5),
}
PROMPTS = [
    np.random.default_rng(seed).integers(0, 500, n).tolist()
    for seed, n in enumerate((75, 5, 18))
]  # fmt: skip
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def ops():
    from aprefetch.kernels.triton.ops import TritonOps

    return TritonOps("cuda")


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("kimi") / "m.gguf"
    return write_kimi(path, CONFIGS[request.param])[0]


@pytest.fixture(scope="module")
def resident(model, ops):
    made = Resident(model, ops, "cuda")
    yield made
    made.source.close()


@pytest.fixture(scope="module")
def reference(model):
    """Logits and expert choices of the first prompt, greedy tokens after each, on the CPU."""
    resident, seen = Resident(model, cpu_ops("reference"), "cpu"), {}
    logits = resident.logits(PROMPTS[0], 0, seen)
    tokens = [resident.greedy(ids, N_TOKENS) for ids in PROMPTS]
    resident.source.close()
    return logits, seen, tokens


@pytest.mark.parametrize("check", kimi_checks.CHECKS)
def test_operation(ops, check):
    getattr(kimi_checks, f"check_{check}")(ops, "cuda")


@pytest.mark.parametrize(
    "types", [("Q2_K", "Q2_K", "Q3_K"), ("Q3_K", "Q2_K", "Q6_K"), ("MXFP4",) * 3, ("F32",) * 3]
)
def test_experts(ops, types):
    kimi_checks.check_experts(ops, types, 512, 256, "cuda")


def test_logits_and_expert_choices(resident, reference):
    seen: dict[int, np.ndarray] = {}
    ours = resident.logits(PROMPTS[0], 0, seen).cpu()
    assert reference[0].std() > 0.5
    torch.testing.assert_close(ours, reference[0], rtol=0, atol=TOLERANCE)
    for layer, ids in reference[1].items():
        assert np.array_equal(seen[layer], ids)


def test_greedy_continuation(resident, reference):
    assert [resident.greedy(ids, N_TOKENS) for ids in PROMPTS] == reference[2]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_do_not_change_a_bit(resident, chunk):
    assert resident.ops.batch_invariant
    assert torch.equal(resident.logits(PROMPTS[0]), resident.logits(PROMPTS[0], chunk))


def test_company_does_not_change_a_bit(resident):
    alone = [resident.logits(ids) for ids in PROMPTS]
    states = [resident.model.new_state() for _ in PROMPTS]
    chunks = [Chunk(s, np.array(ids), "all") for s, ids in zip(states, PROMPTS, strict=True)]
    for ours, wanted in zip(resident.step(chunks), alone, strict=True):
        assert torch.equal(ours, wanted)


async def outcome(model, **options):
    async with Runtime.open(model, device="cuda", **options) as rt:
        scored = await rt.score(PROMPTS[0], logits=True)
        done = await rt.generate(PROMPTS[0], max_tokens=N_TOKENS, **GREEDY)
        return scored.logits, done.token_ids, rt.stats()


@pytest.fixture(scope="module")
def plain(model):
    """Everything resident, no lookahead."""
    return asyncio.run(outcome(model, lookahead="off", **full_budgets(model)))


def test_a_runtime_gives_the_references_tokens(plain, reference):
    np.testing.assert_allclose(plain[0], reference[0].numpy(), rtol=0, atol=TOLERANCE)
    assert plain[1] == reference[2][0]


@pytest.mark.parametrize("lookahead", ["off", "on"])
async def test_the_smallest_budget_changes_no_bit(model, plain, lookahead):
    budgets = minimum_budgets(model)
    logits, tokens, stats = await outcome(model, lookahead=lookahead, chunk_tokens=13, **budgets)
    assert tokens == plain[1]
    assert np.array_equal(logits, plain[0])
    assert stats.memory["vram_peak_bytes"] <= budgets["vram_budget"]
    assert stats.duplicate_reads == stats.io_errors == 0


async def test_requests_beside_each_other_get_what_they_would_alone(model, reference):
    async with Runtime.open(model, device="cuda", chunk_tokens=16, **full_budgets(model)) as rt:
        answers = [rt.generate(ids, max_tokens=N_TOKENS, **GREEDY) for ids in PROMPTS]
        together = await asyncio.gather(*answers)
    assert [done.token_ids for done in together] == reference[2]
