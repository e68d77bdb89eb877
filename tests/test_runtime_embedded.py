"""The model that ships with the package: its recorded answers and likelihoods, streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aprefetch import Runtime, embedded

LEAST_MARGIN = 0.2  # below it another order of additions may pick the other token


@pytest.fixture(scope="module")
def goldens() -> dict[str, Any]:
    return json.loads(embedded.GOLDENS_PATH.read_text(encoding="utf-8"))


def n_certain(margins: list[float]) -> int:
    return next((i for i, margin in enumerate(margins) if margin < LEAST_MARGIN), len(margins))


async def test_greedy_continuations(goldens) -> None:
    async with Runtime.open() as rt:
        for golden in goldens["greedy"]:
            n = n_certain(golden["top1_top2_margin"])
            done = await rt.generate(golden["prompt"], max_tokens=max(1, n), temperature=0)
            assert done.prompt_token_ids == golden["prompt_ids"]
            assert done.token_ids[:n] == golden["ids"][:n]
        stats = rt.stats()
        assert stats.bytes_read > 0
        assert stats.memory["vram_peak_bytes"] < rt.plan.routed_bytes


async def test_a_question_through_the_template(goldens) -> None:
    golden = next(g for g in goldens["greedy"] if g["name"] == "sky")
    messages = [{"role": "user", "content": "Explain why the sky appears blue."}]
    async with Runtime.open() as rt:
        done = await rt.generate(messages, max_tokens=60, temperature=0)
        assert done.prompt_token_ids == golden["prompt_ids"]
        assert done.template == "file"
        assert done.token_ids == golden["ids"]
        end = rt.tokenizer.token_text(done.token_ids[-1])
        assert (done.text + end, done.finish_reason) == (golden["text"], "stop")


@pytest.mark.slow
async def test_likelihood_of_held_out_text(goldens) -> None:
    ids, want = (
        goldens["heldout"]["ids"],
        goldens["heldout"]["mean_nll_per_window_fp32_activations"],
    )
    n = len(ids) // len(want)
    async with Runtime.open() as rt:
        for i, mean_nll in enumerate(want):
            scored = await rt.score(ids[i * n : (i + 1) * n])
            assert scored.mean_nll == pytest.approx(mean_nll, abs=1e-4)
