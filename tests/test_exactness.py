"""Contract section 1: budgets, guesses, threads and timing move bytes and change no bit."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from runtime_parts import full_budgets, minimum_budgets, parts

import aprefetch
from aprefetch.errors import ConfigError, InvalidRequestError
from aprefetch.pipeline.io.wrappers import ReorderFiles
from aprefetch.pipeline.lookahead import BestScores, Misled, Recorder, Replay, RoutedLayer

PROMPT = "p40"
N_TOKENS = 24


@pytest.fixture(scope="module")
def model(oracle_dir):
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"


@pytest.fixture(scope="module")
def facts(model):
    return json.loads(model.with_suffix(".json").read_text())


async def outcome(model, facts, **options):
    """Logits of a scored prompt, and greedy tokens after another, with the stats of both."""
    async with aprefetch.Runtime.open(model, **options) as rt:
        scored = await rt.score(facts["prompts"]["p150"]["ids"], logits=True)
        done = await rt.generate(
            facts["prompts"][PROMPT]["ids"], max_tokens=N_TOKENS, temperature=0, ignore_eos=True
        )
        return scored.logits, done.token_ids, rt.stats()


@pytest.fixture(scope="module")
def plain(model, facts):
    """Everything resident, no lookahead."""
    return asyncio.run(outcome(model, facts, lookahead="off", **full_budgets(model)))


def assert_equal(ours, plain):
    assert ours[1] == plain[1]
    assert np.array_equal(ours[0], plain[0])


async def test_greedy_tokens_are_the_oracles(plain, facts):
    assert plain[1] == facts["greedy"][PROMPT][:N_TOKENS]


@pytest.mark.parametrize("lookahead", ["off", "on"])
@pytest.mark.parametrize("size", ["minimum", "small", "half", "device only", "RAM only"])
async def test_x3_budgets_change_no_bit(model, facts, plain, size, lookahead):
    least, most = minimum_budgets(model), full_budgets(model)
    budgets = {
        "minimum": least,
        "small": {name: 3 * n for name, n in least.items()},
        "half": {name: n // 2 for name, n in most.items()},
        "device only": {**most, "ram_budget": 0},
        "RAM only": {**least, "ram_budget": most["ram_budget"]},
    }[size]
    ours = await outcome(model, facts, lookahead=lookahead, **budgets)
    assert_equal(ours, plain)
    stats = ours[2]
    assert stats.memory["vram_peak_bytes"] <= budgets["vram_budget"]
    assert stats.duplicate_reads == 0


@pytest.mark.parametrize("share", [3, 6])
async def test_x3_an_exclusive_ram_tier_changes_no_bit(model, facts, plain, share):
    budgets = {name: n // share for name, n in full_budgets(model).items()}
    ours = await outcome(model, facts, ram_tier="exclusive", **budgets)
    assert_equal(ours, plain)
    assert ours[2].demotions > 0


@pytest.mark.parametrize("queue_depth", [1, 3, 16])
async def test_x3_reader_threads_change_no_bit(model, facts, plain, queue_depth):
    half = {name: n // 2 for name, n in full_budgets(model).items()}
    ours = await outcome(model, facts, queue_depth=queue_depth, **half)
    assert_equal(ours, plain)
    assert 1 <= ours[2].max_in_flight <= queue_depth


@pytest.mark.parametrize("seed", [1, 2])
async def test_x3_order_of_arrival_changes_no_bit(model, facts, plain, seed):
    with parts(files=ReorderFiles(seed=seed)):
        ours = await outcome(model, facts, **{n: b * 4 for n, b in minimum_budgets(model).items()})
    assert_equal(ours, plain)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
async def test_x3_chunks_change_no_bit(model, facts, plain, chunk_tokens):
    ours = await outcome(model, facts, chunk_tokens=chunk_tokens)
    assert_equal(ours, plain)


async def test_x4_wrong_and_perfect_guesses_change_counters_only(model, facts, plain):
    layers = {n: RoutedLayer(16, 4) for n in range(8)}
    small = {name: 8 * n for name, n in minimum_budgets(model).items()}
    recorder = Recorder(BestScores(layers))
    with parts(strategy=recorder):
        assert_equal(await outcome(model, facts, **small), plain)
    with parts(strategy=Misled(recorder.picks, layers)):
        wrong = await outcome(model, facts, **small)
    with parts(strategy=Replay(recorder.picks)):
        perfect = await outcome(model, facts, lookahead_max_experts=16, **small)
    assert_equal(wrong, plain)
    assert_equal(perfect, plain)
    assert wrong[2].predicted_right == 0 < wrong[2].predicted
    assert perfect[2].predicted_right == perfect[2].predicted > 0
    assert perfect[2].guesses_useful > wrong[2].guesses_useful


async def test_x1_every_pick_runs(model, facts):
    """Executed (token, expert) pairs are tokens x top-k in every layer, at the smallest budget."""
    n_prompt = len(facts["prompts"][PROMPT]["ids"])
    async with aprefetch.Runtime.open(model, **minimum_budgets(model)) as rt:
        done = await rt.generate(
            facts["prompts"][PROMPT]["ids"], max_tokens=5, temperature=0, ignore_eos=True
        )
        routed = rt.stats().routed_calls
    assert routed == dict.fromkeys(range(8), (n_prompt + 4) * 4)
    assert done.token_ids == facts["greedy"][PROMPT][:5]


@pytest.mark.parametrize("name", ["num_experts_per_tok", "expert_used_count", "moe_top_k"])
async def test_x2_top_k_is_no_option(model, name):
    with pytest.raises(ConfigError, match=name):
        await aprefetch.Runtime.open(model, **{name: 2})
    async with aprefetch.Runtime.open(model) as rt:
        with pytest.raises(InvalidRequestError, match=name):
            await rt.generate([1, 2, 3], **{name: 2})


async def test_x6_layers_routed_by_token_are_read_before_their_turn(model, facts, plain):
    small = {name: 6 * n for name, n in minimum_budgets(model).items()}
    ours = await outcome(model, facts, lookahead="off", **small)
    assert_equal(ours, plain)
    assert ours[2].reads_before_turn > 0


async def test_c7_concurrent_requests_get_what_they_would_alone(model, facts):
    prompts = [facts["prompts"][p]["ids"] for p in ("p7", "p40", "p150")]
    wanted = [facts["greedy"][p][:N_TOKENS] for p in ("p7", "p40", "p150")]
    half = {name: n // 2 for name, n in full_budgets(model).items()}
    async with aprefetch.Runtime.open(model, chunk_tokens=32, **half) as rt:
        together = await asyncio.gather(
            *(
                rt.generate(ids, max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
                for ids in prompts
            )
        )
        assert rt.stats().duplicate_reads == 0
    assert [done.token_ids for done in together] == wanted
