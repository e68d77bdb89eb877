"""The door: answers, streams, scores, and the errors of one request."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_parts import full_budgets, minimum_budgets, parts

import aprefetch
from aprefetch import Runtime, SamplingParams
from aprefetch.pipeline.io.wrappers import FaultFiles
from aprefetch.trace import validate_trace

GREEDY = {"temperature": 0, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"device": "cpu"}


@pytest.fixture(scope="module")
def model(oracle_dir: Path) -> Path:
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"


@pytest.fixture(scope="module")
def facts(model: Path) -> dict[str, Any]:
    return json.loads(model.with_suffix(".json").read_text())


async def test_greedy_answer_and_its_accounts(model, facts) -> None:
    ids, want = facts["prompts"]["p7"]["ids"], facts["greedy"]["p7"][:8]
    async with Runtime.open(model, **OPTIONS) as rt:
        done = await rt.generate(ids, max_tokens=8, **GREEDY)
        assert done.token_ids == want
        assert done.finish_reason == "length"
        assert done.prompt_token_ids == ids
        assert (done.template, done.prompt, done.logprobs) == (None, None, None)
        usage = done.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 8, 15)
        assert usage.time_to_first_token_s is not None
        assert (done.stats.prompt_tokens, done.stats.output_tokens, done.stats.steps) == (7, 8, 8)
        pairs = (7 + 7) * rt.model_info.num_experts_per_tok
        assert done.stats.routed_calls == dict.fromkeys(rt.model_info.routed_layers, pairs)
        again = await rt.generate(ids, SamplingParams(max_tokens=3, temperature=0))
        assert again.token_ids == want[:3]
        assert again.stats.output_tokens == 3
        assert rt.stats().output_tokens == 11
        json.dumps(done.to_dict())
        text = "\n".join(rt.report(done.usage, done.stats).lines())
        for word in ("device", "direct GGUF", "7 prompt, 8 output", "hit rate", "ceiling"):
            assert word in text


async def test_a_stream_gives_what_generate_gives(model, facts) -> None:
    text = facts["nll_text"][:40]
    async with Runtime.open(model, **OPTIONS) as rt:
        done = await rt.generate(text, max_tokens=8, logprobs=2, **GREEDY)
        async with rt.stream(text, max_tokens=8, logprobs=2, **GREEDY) as stream:
            events = [event async for event in stream]
        assert [e.token_id for e in events] == done.token_ids == stream.token_ids
        assert [e.index for e in events] == list(range(8))
        assert [e.finish_reason for e in events] == [None] * 7 + ["length"]
        assert "".join(e.text for e in events) == done.text
        assert done.text == rt.tokenizer.decode(done.token_ids, skip_special=True)
        assert stream.prompt == done.prompt == text
        assert stream.usage.total_tokens == done.usage.total_tokens
        assert done.logprobs == [e.logprob for e in events]
        assert all(e.top_logprobs[0] == (e.token_id, e.logprob) for e in events)  # greedy: the best


async def test_requests_beside_each_other_get_what_they_get_alone(model, facts) -> None:
    requests = [
        (facts["prompts"]["p7"]["ids"], {"seed": 1, "temperature": 1.5}),
        (facts["prompts"]["p40"]["ids"], GREEDY),
        (facts["prompts"]["p40"]["ids"][::-1], {"seed": 2, "top_p": 0.9}),
        (facts["prompts"]["p7"]["ids"], {"seed": 3, "top_k": 20, "presence_penalty": 1.0}),
    ]
    async with Runtime.open(model, chunk_tokens=15) as rt:
        alone = [await rt.generate(ids, max_tokens=6, **kw) for ids, kw in requests]
        steps_alone = rt.stats().steps
        together = await asyncio.gather(
            *(rt.generate(ids, max_tokens=6, **kw) for ids, kw in requests)
        )
        assert [d.token_ids for d in together] == [d.token_ids for d in alone]
        if rt._device.ops.batch_invariant:
            assert rt.stats().steps - steps_alone < steps_alone  # they shared steps
        assert rt.stats().duplicate_reads == 0


async def test_a_long_prompt_does_not_hold_up_others(model, facts) -> None:
    order = []
    async with Runtime.open(model, chunk_tokens=4, **OPTIONS) as rt:

        async def run(name: str, ids: list[int]) -> None:
            async for event in rt.stream(ids, max_tokens=5, **GREEDY):
                order.append((name, event.index))  # noqa: PERF401 - as they come

        await asyncio.gather(
            run("long", facts["prompts"]["p150"]["ids"]),
            run("short", facts["prompts"]["p7"]["ids"]),
        )
    assert order.index(("short", 4)) < order.index(("long", 0))


async def test_only_so_many_run_at_a_time(model, facts) -> None:
    ids = facts["prompts"]["p7"]["ids"]
    async with Runtime.open(model, max_requests=1, **OPTIONS) as rt:
        first, second = rt.stream(ids, max_tokens=50), rt.stream(ids, max_tokens=2, **GREEDY)
        async with first, second:
            await anext(first)
            waiting = asyncio.create_task(anext(second))
            await anext(first)
            assert not waiting.done()
            await first.aclose()
            assert (await waiting).token_id == facts["greedy"]["p7"][0]


async def test_a_slow_reader_holds_up_its_own_request_only(model, facts) -> None:
    ids = facts["prompts"]["p7"]["ids"]
    async with Runtime.open(model, **OPTIONS) as rt:
        async with rt.stream(ids, max_tokens=30, **GREEDY) as slow:
            await anext(slow)
            done = await rt.generate(ids, max_tokens=25, **GREEDY)
            assert done.token_ids == facts["greedy"]["p7"][:25]
            assert len(slow.token_ids) <= 18
            rest = [event.token_id async for event in slow]
        assert [slow.token_ids[0], *rest] == facts["greedy"]["p7"][:30]


async def test_how_answers_end(model, facts) -> None:
    ids, greedy = facts["prompts"]["p7"]["ids"], facts["greedy"]["p7"]
    async with Runtime.open(model, **OPTIONS) as rt:
        eos = rt.tokenizer.eos_id
        whole = await rt.generate(ids, max_tokens=12, **GREEDY)
        stop = whole.text[5:8]
        cut = await rt.generate(ids, max_tokens=12, stop=stop, **GREEDY)
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]
        by_id = await rt.generate(ids, max_tokens=12, stop_token_ids=[greedy[4]], **GREEDY)
        assert by_id.token_ids == greedy[: greedy.index(greedy[4]) + 1]
        assert by_id.finish_reason == "stop"
        ends = {"temperature": 0, "max_tokens": 4, "logit_bias": {eos: 1e6}}
        done = await rt.generate(ids, **ends)
        assert (done.text, done.token_ids, done.finish_reason) == ("", [eos], "stop")
        done = await rt.generate(ids, ignore_eos=True, **ends)
        assert (done.token_ids, done.finish_reason) == ([eos] * 4, "length")
        done = await rt.generate(ids, min_tokens=2, **ends)
        assert len(done.token_ids) == 3
        assert done.token_ids[-1] == eos
    async with Runtime.open(model, context_tokens=10, **OPTIONS) as rt:
        done = await rt.generate(ids, max_tokens=100, **GREEDY)
        assert (done.token_ids, done.finish_reason) == (greedy[:3], "length")


@pytest.mark.parametrize("chunk", [512, 37])
async def test_scores_are_the_oracles(model, facts, oracle_dir, chunk) -> None:
    want = np.load(oracle_dir / "tiny-deepseek4-mxfp4.logits.npz")["exact/all_nll"]
    seen: list[tuple[int, int]] = []
    async with Runtime.open(model, chunk_tokens=chunk, **OPTIONS) as rt:
        scored = await rt.score(
            facts["nll_text"], logits=True, progress=lambda done, total: seen.append((done, total))
        )
    assert scored.token_ids == facts["nll_ids"]
    assert scored.n_tokens == len(facts["nll_ids"])
    assert scored.mean_nll == pytest.approx(facts["nll"]["exact"], abs=1e-4)
    assert scored.perplexity == pytest.approx(math.exp(scored.mean_nll))
    assert scored.logits.dtype == np.float32
    worst = np.abs(scored.logits - want).max(axis=1)
    assert np.median(worst) <= 1e-4
    assert np.mean(worst <= 1e-3) >= 0.99
    assert seen[-1] == (scored.n_tokens, scored.n_tokens)
    assert len(seen) == -(-scored.n_tokens // chunk)
    json.dumps(scored.to_dict())


async def test_wrong_requests_are_refused_and_the_next_one_is_right(model, facts) -> None:
    ids = facts["prompts"]["p7"]["ids"]
    async with Runtime.open(model, context_tokens=20, **OPTIONS) as rt:
        bad: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
            (aprefetch.ContextLengthError, "20", list(range(20)), {}),
            (aprefetch.ContextLengthError, "20", ids, {"min_tokens": 14}),
            (aprefetch.InvalidRequestError, "no tokens", [], {}),
            (aprefetch.InvalidRequestError, "vocabulary", [1, 1024], {}),
            (aprefetch.InvalidRequestError, "vocabulary", [-1], {}),
            (aprefetch.InvalidRequestError, "integer", [1, "2"], {}),
            (aprefetch.InvalidRequestError, "integer", [True], {}),
            (aprefetch.InvalidRequestError, "a prompt is", 5, {}),
            (aprefetch.InvalidRequestError, "a prompt is", b"bytes", {}),
            (aprefetch.InvalidRequestError, "chat_options", ids, {"chat_options": {"x": 1}}),
            (aprefetch.InvalidRequestError, "role", [{"content": "x"}], {}),
            (aprefetch.InvalidRequestError, "top_k", ids, {"topk": 3}),
            (aprefetch.InvalidRequestError, "num_experts", ids, {"num_experts_per_tok": 1}),
            (aprefetch.InvalidRequestError, "stop_token_ids", ids, {"stop_token_ids": [9999]}),
        ]
        for kind, words, prompt, keywords in bad:
            with pytest.raises(kind, match=words):
                await rt.generate(prompt, **keywords)
        for prompt in ([1], list(range(21)), []):
            with pytest.raises(aprefetch.RequestError):
                await rt.score(prompt)
        done = await rt.generate(ids, max_tokens=3, **GREEDY)
        assert done.token_ids == facts["greedy"]["p7"][:3]


async def test_chat_tells_its_template(model) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    async with Runtime.open(model, **OPTIONS) as rt:
        done = await rt.generate(messages, max_tokens=2)
        assert done.template
        assert "Hello" in done.prompt
        assert done.prompt_token_ids.count(rt.tokenizer.bos_id) == 1
        plain = await rt.generate("Hello", max_tokens=2)
        assert plain.template is None


async def test_an_empty_text_begins_with_bos(model) -> None:
    async with Runtime.open(model, **OPTIONS) as rt:
        if rt.tokenizer.add_bos:
            done = await rt.generate("", max_tokens=1)
            assert done.prompt_token_ids == [rt.tokenizer.bos_id]
        else:
            with pytest.raises(aprefetch.InvalidRequestError, match="empty"):
                await rt.generate("")


async def test_a_read_error_ends_only_the_request_that_needs_the_bytes(model, facts) -> None:
    files = FaultFiles()
    ids, greedy = facts["prompts"]["p7"]["ids"], facts["greedy"]["p7"]
    with parts(files, backoff_s=0):
        async with Runtime.open(model, lookahead="off", **OPTIONS, **minimum_budgets(model)) as rt:
            await rt.generate(ids, max_tokens=2, **GREEDY)
            files.fail(times=-1)
            with pytest.raises(aprefetch.ReadError) as caught:
                await rt.generate(ids, max_tokens=2, **GREEDY)
            assert caught.value.key is not None
            assert rt.stats().io_errors > 0
            files.lift()
            done = await rt.generate(ids, max_tokens=6, **GREEDY)
            assert done.token_ids == greedy[:6]


async def test_a_read_error_leaves_others_in_the_same_step_alone(model, facts) -> None:
    files = FaultFiles()
    p7, p40 = facts["prompts"]["p7"]["ids"], facts["prompts"]["p40"]["ids"]
    with parts(files, backoff_s=0):
        async with Runtime.open(model, lookahead="off", **full_budgets(model)) as rt:
            await rt.generate(p7, max_tokens=20, **GREEDY)  # its experts are resident now
            files.fail(times=-1)
            good, bad = await asyncio.gather(
                rt.generate(p7, max_tokens=20, **GREEDY),
                rt.generate(p40, max_tokens=20, **GREEDY),
                return_exceptions=True,
            )
            assert isinstance(bad, aprefetch.ReadError)
            assert good.token_ids == facts["greedy"]["p7"][:20]
            files.lift()
            done = await rt.generate(p40, max_tokens=20, **GREEDY)
            assert done.token_ids == facts["greedy"]["p40"][:20]


async def test_a_file_that_changes_under_a_live_run(model, facts, tmp_path) -> None:
    copy = tmp_path / "copy.gguf"
    data = model.read_bytes()
    copy.write_bytes(data)
    ids = facts["prompts"]["p7"]["ids"]
    async with Runtime.open(copy, **OPTIONS, **minimum_budgets(model)) as rt:
        stream = rt.stream(ids, max_tokens=60, **GREEDY)
        got = [(await anext(stream)).token_id]
        with copy.open("r+b") as file:
            file.truncate(len(data) // 2)
        with pytest.raises((aprefetch.ReadError, aprefetch.SourceError)):
            async for event in stream:
                got.append(event.token_id)  # noqa: PERF401 - kept when it raises
        assert got == facts["greedy"]["p7"][: len(got)]
        with pytest.raises((aprefetch.ReadError, aprefetch.SourceError)):
            await rt.generate(ids)


async def test_a_trace_opens_in_a_viewer(model, facts, tmp_path) -> None:
    async with Runtime.open(model, trace=True, **OPTIONS) as rt:
        await rt.generate(facts["prompts"]["p7"]["ids"], max_tokens=3, **GREEDY)
        await rt.export_trace(tmp_path / "run.json")
        with pytest.raises(aprefetch.ConfigError, match="nowhere"):
            await rt.export_trace(tmp_path / "nowhere" / "run.json")
    trace = json.loads((tmp_path / "run.json").read_text())
    validate_trace(trace)
    categories = {event.get("cat") for event in trace["traceEvents"]}
    assert {"read", "upload", "compute", "step", "request", "expert"} <= categories
    async with Runtime.open(model, **OPTIONS) as rt:
        with pytest.raises(aprefetch.ConfigError, match="trace=True"):
            await rt.export_trace(tmp_path / "none.json")
