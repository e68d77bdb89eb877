"""The whole runtime on a GPU: the oracle's tokens; budgets and timing change no bit."""

from __future__ import annotations

import asyncio
import json
import random

import numpy as np
import pytest
from runtime_parts import full_budgets, minimum_budgets

from aprefetch import Runtime

N_TOKENS = 24
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(oracle_dir):
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"


@pytest.fixture(scope="module")
def facts(model):
    return json.loads(model.with_suffix(".json").read_text())


async def outcome(model, facts, **options):
    """Logits of a scored prompt and greedy tokens after another, with the stats of both."""
    async with Runtime.open(model, device="cuda", **options) as rt:
        scored = await rt.score(facts["prompts"]["p300"]["ids"], logits=True)
        done = await rt.generate(facts["prompts"]["p40"]["ids"], max_tokens=N_TOKENS, **GREEDY)
        return scored.logits, done.token_ids, rt.stats()


@pytest.fixture(scope="module")
def plain(model, facts):
    """Everything resident, no lookahead."""
    return asyncio.run(outcome(model, facts, lookahead="off", **full_budgets(model)))


async def test_tokens_and_logits_are_the_oracles(model, facts, plain):
    assert plain[1] == facts["greedy"]["p40"][:N_TOKENS]
    with np.load(f"{str(model)[:-5]}.logits.npz") as logits:
        worst = np.abs(plain[0] - logits["exact/all_p300"]).max(axis=-1)
    assert (worst <= 1e-3).mean() >= 0.99 and np.median(worst) <= 1e-4
    assert plain[2].fallback_count == 0  # pinned, and read past the page cache


@pytest.mark.parametrize("lookahead", ["off", "on"])
@pytest.mark.parametrize("size", ["minimum", "half", "device only"])
async def test_budgets_and_guesses_change_no_bit(model, facts, plain, size, lookahead):
    most = full_budgets(model)
    budgets = {
        "minimum": minimum_budgets(model),
        "half": {name: n // 2 for name, n in most.items()},
        "device only": {**most, "ram_budget": 0},
    }[size]
    ours = await outcome(model, facts, lookahead=lookahead, **budgets)
    assert ours[1] == plain[1]
    assert np.array_equal(ours[0], plain[0])
    stats = ours[2]
    assert stats.memory["vram_peak_bytes"] <= budgets["vram_budget"]
    assert stats.duplicate_reads == 0
    assert (stats.predicted > 0) == (lookahead == "on")


async def test_requests_beside_each_other_get_what_they_would_alone(model, facts):
    names = ("p7", "p40", "p150")
    half = {name: n // 2 for name, n in full_budgets(model).items()}
    async with Runtime.open(model, device="cuda", chunk_tokens=32, **half) as rt:
        answers = [
            rt.generate(facts["prompts"][n]["ids"], max_tokens=N_TOKENS, **GREEDY) for n in names
        ]
        together = await asyncio.gather(*answers)
    assert [done.token_ids for done in together] == [facts["greedy"][n][:N_TOKENS] for n in names]


async def test_cancelled_requests_leave_nothing_behind(model, facts, plain):
    rng = random.Random(3)
    ids = facts["prompts"]["p40"]["ids"]
    async with Runtime.open(model, device="cuda", chunk_tokens=13, **minimum_budgets(model)) as rt:
        for i in range(12):
            call = asyncio.create_task(
                rt.score(ids) if i % 3 == 0 else rt.generate(ids, max_tokens=50, ignore_eos=True)
            )
            await asyncio.sleep(rng.random() * 0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
                raise asyncio.CancelledError  # it was done before: as good
        assert not rt.requests() and not rt._coordinator._open
        done = await rt.generate(ids, max_tokens=N_TOKENS, **GREEDY)
        assert done.token_ids == plain[1]


async def test_kept_states_continue_with_the_same_tokens(model, facts, plain):
    ids = facts["prompts"]["p40"]["ids"]
    async with Runtime.open(model, device="cuda", prefix_budget="64MiB") as rt:
        first = await rt.generate(ids, max_tokens=10, **GREEDY)
        longer = [*ids, *first.token_ids]
        rest = await rt.generate(longer, max_tokens=N_TOKENS - 10, **GREEDY)
        assert rest.usage.reused_tokens == len(longer) - 1
    assert [*first.token_ids, *rest.token_ids] == plain[1]


async def test_a_seed_gives_the_same_tokens_alone_and_in_company(model, facts):
    ids = facts["prompts"]["p7"]["ids"]
    sampling = {"seed": 5, "temperature": 0.9, "top_p": 0.9, "ignore_eos": True}
    async with Runtime.open(model, device="cuda") as rt:
        alone = await rt.generate(ids, max_tokens=12, **sampling)
        both = await asyncio.gather(
            rt.generate(ids, max_tokens=12, **sampling),
            rt.generate(facts["prompts"]["p40"]["ids"], max_tokens=12, **GREEDY),
        )
        report = rt.report(alone.usage, alone.stats)
    assert both[0].token_ids == alone.token_ids
    assert report.device.startswith("cuda, ") and "triton" in report.device
