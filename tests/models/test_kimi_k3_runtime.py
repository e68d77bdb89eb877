"""Kimi models through the whole runtime: experts from disk, any budget, any company, same bits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from make_tiny_kimi import TINY_LINEAR, KimiConfig, write_kimi
from runtime_parts import full_budgets, minimum_budgets, parts

import aprefetch
from aprefetch.pipeline.lookahead import BestScores, Misled, Recorder, RoutedLayer
from aprefetch.storage import GgufExperts, open_source
from aprefetch.storage.pack import build_pack, open_pack
from aprefetch.types import ExpertKey

N_TOKENS = 6
CONFIGS = {"k3": KimiConfig(n_layers=5), "linear": TINY_LINEAR}
PROMPTS = [
    np.random.default_rng(seed).integers(0, 500, n).tolist()
    for seed, n in enumerate((33, 5, 18))
]  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("kimi") / "m.gguf"
    # The second of three shards.
    return write_kimi(path, CONFIGS[request.param], shards=3)[1]


async def outcome(model, **options):
    async with aprefetch.Runtime.open(model, **options) as rt:
        scored = await rt.score(PROMPTS[0], logits=True)
        done = await rt.generate(PROMPTS[0], max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
        return scored.logits, done.token_ids, rt.stats()


@pytest.fixture(scope="module")
def plain(model):
    """Everything resident, no lookahead."""
    return asyncio.run(outcome(model, lookahead="off", **full_budgets(model)))


def assert_equal(ours, plain):
    assert ours[1] == plain[1]
    assert np.array_equal(ours[0], plain[0])


@pytest.mark.parametrize("lookahead", ["off", "on"])
async def test_the_smallest_budget_changes_no_bit(model, plain, lookahead):
    ours = await outcome(model, lookahead=lookahead, **minimum_budgets(model))
    assert_equal(ours, plain)
    stats = ours[2]
    assert stats.fallback_count == stats.io_errors == stats.duplicate_reads == 0
    assert stats.waves > 0


@pytest.mark.parametrize("chunk_tokens", [1, 7])
async def test_prefill_chunks_change_no_bit(model, plain, chunk_tokens):
    assert_equal(await outcome(model, chunk_tokens=chunk_tokens), plain)


async def test_every_pick_of_every_routed_layer_runs(model):
    async with aprefetch.Runtime.open(model, **minimum_budgets(model)) as rt:
        await rt.generate(PROMPTS[1], max_tokens=4, temperature=0, ignore_eos=True)
        stats, info = rt.stats(), rt.model_info
    n_pairs = (len(PROMPTS[1]) + 3) * info.num_experts_per_tok
    assert info.routed_layers == tuple(range(1, info.n_layers))
    assert stats.routed_calls == dict.fromkeys(info.routed_layers, n_pairs)


async def test_wrong_guesses_change_counters_only(model, plain):
    layers = {n: RoutedLayer(16, 4) for n in range(1, 7)}
    small = {name: 8 * n for name, n in minimum_budgets(model).items()}
    recorder = Recorder(BestScores(layers))
    with parts(strategy=recorder):
        honest = await outcome(model, **small)
    with parts(strategy=Misled(recorder.picks, layers)):
        wrong = await outcome(model, **small)
    assert_equal(honest, plain)
    assert_equal(wrong, plain)
    assert honest[2].predicted_right > honest[2].predicted // 2
    assert wrong[2].predicted_right == 0 < wrong[2].predicted


async def test_concurrent_and_cancelled_requests_do_not_share_state(model):
    async def run(rt, ids):
        return (
            await rt.generate(ids, max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
        ).token_ids

    async with aprefetch.Runtime.open(model, chunk_tokens=8, **minimum_budgets(model)) as rt:
        alone = [await run(rt, ids) for ids in PROMPTS]
        given_up = asyncio.create_task(
            rt.generate(PROMPTS[0][::-1], max_tokens=50, temperature=0, ignore_eos=True)
        )
        running = [asyncio.create_task(run(rt, ids)) for ids in PROMPTS]
        await running[1]
        given_up.cancel()
        assert [await task for task in running] == alone
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert await run(rt, PROMPTS[0]) == alone[0]


async def test_chat_by_the_built_in_template(tmp_path):
    path = write_kimi(tmp_path / "m.gguf", CONFIGS["k3"])[0]
    messages = [{"role": "user", "content": "hello there"}]
    async with aprefetch.Runtime.open(path) as rt:
        assert rt.answer_format.notation == "xtml"
        done = await rt.generate(messages, max_tokens=4, temperature=0, ignore_eos=True)
        assert done.template == "builtin:kimi-k3"
        assert done.prompt is not None
        assert done.prompt.endswith("<|open|>think<|sep|>")
        markers = {rt.tokenizer.token_id(m) for m in ("<|open|>", "<|sep|>", "<|end_of_msg|>")}
        assert markers <= set(done.prompt_token_ids)
        assert rt.tokenizer.token_id("<|end_of_msg|>") in rt.tokenizer.eog_ids
        assert rt.tokenizer.bos_id not in done.prompt_token_ids


def payload(experts, key) -> list[bytes]:
    """The bytes of one object, role by role, as its read plan finds them."""
    plan = experts.read_plan(key)
    landing = bytearray(plan.landing_bytes)
    for read in plan.reads:
        with experts.paths[read.file].open("rb") as file:
            file.seek(read.offset)
            raw = file.read(read.length)
            landing[read.landing_offset : read.landing_offset + len(raw)] = raw
    return [
        bytes(landing[piece.landing_offset : piece.landing_offset + piece.n_bytes])
        for piece in sorted(plan.pieces, key=lambda piece: piece.device_offset)
    ]


def test_a_pack_holds_the_same_objects(model, tmp_path):
    result = build_pack(model, [tmp_path])
    with open_source(model) as source:
        experts, pack = GgufExperts(source, range(7)), open_pack(result.paths[0])
        assert dict(pack.layers) == experts.layers
        for layer in experts.layers:
            for expert in (0, 7, 15):
                key = ExpertKey(layer, expert)
                assert payload(pack, key) == payload(experts, key)
