"""Many requests on one engine: equal to solo runs, limits, deadlines, memory, fairness."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_parts import minimum_budgets

import aprefetch
from aprefetch import Runtime

GREEDY = {"temperature": 0, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"device": "cpu"}


@pytest.fixture(scope="module")
def model(oracle_dir: Path) -> Path:
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"


@pytest.fixture(scope="module")
def facts(model: Path) -> dict[str, Any]:
    return json.loads(model.with_suffix(".json").read_text())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the thing watched has no event
            await asyncio.sleep(0.001)


async def test_requests_that_come_and_go_get_what_they_get_alone(model, facts) -> None:
    rng = random.Random(5)
    text = facts["prompts"]["p150"]["ids"]
    requests = []
    for i in range(12):
        start = rng.randrange(60)
        ids = text[start : start + rng.choice([3, 20, 80])]
        sampling = GREEDY if i % 2 else {"seed": i, "temperature": 1.3, "ignore_eos": True}
        requests.append((ids, {"max_tokens": rng.randrange(2, 9), **sampling}))
    async with Runtime.open(model, **OPTIONS) as rt:
        alone = [(await rt.generate(ids, **kw)).token_ids for ids, kw in requests]
        reads_alone = rt.stats().bytes_read
    options = {"chunk_tokens": 16, "token_gap_s": 0.002, "max_requests": 5}
    async with Runtime.open(model, **options, **OPTIONS) as rt:

        async def later(i: int) -> list[int]:
            await asyncio.sleep(0.003 * i)
            ids, kw = requests[i]
            return (await rt.generate(ids, **kw)).token_ids

        together = await asyncio.gather(*(later(i) for i in range(len(requests))))
        assert together == alone
        assert rt.stats().duplicate_reads == 0
        assert rt._engine._scheduler.reserved_bytes == 0
    assert reads_alone > 0


async def test_an_expert_wanted_by_several_is_read_once_per_step(model, facts) -> None:
    """With room for nothing but the step at hand, reads per token fall with the batch."""
    ids = facts["prompts"]["p7"]["ids"]
    read = {}
    for n in (1, 6):
        async with Runtime.open(model, lookahead="off", **OPTIONS, **minimum_budgets(model)) as rt:
            await asyncio.gather(*(rt.generate(ids, max_tokens=6, **GREEDY) for _ in range(n)))
            stats = rt.stats()
            read[n] = stats.bytes_read / stats.output_tokens
    assert read[6] < read[1] / 2


async def test_a_full_queue_refuses_and_recovers(model, facts) -> None:
    ids = facts["prompts"]["p7"]["ids"]
    async with Runtime.open(model, max_requests=1, max_waiting=1, **OPTIONS) as rt:
        running, waiting = rt.stream(ids, max_tokens=90, **GREEDY), rt.stream(ids, max_tokens=2)
        async with running, waiting:
            await anext(running)
            with pytest.raises(aprefetch.QueueFullError, match="max_waiting"):
                await rt.generate(ids)
            with pytest.raises(aprefetch.QueueFullError):
                await rt.score(ids)
            phases = [(info.phase, info.kind) for info in rt.requests()]
            assert phases == [("running", "generate"), ("waiting", "generate")]
        assert rt.requests() == []
        done = await rt.generate(ids, max_tokens=3, **GREEDY)
        assert done.token_ids == facts["greedy"]["p7"][:3]


async def test_caches_are_admitted_by_bytes(model, facts) -> None:
    ids = facts["prompts"]["p7"]["ids"]
    async with Runtime.open(model, **OPTIONS) as rt:
        info = rt.model_info
        one = info.state_bytes_fixed + 2 * info.state_bytes_per_token * (len(ids) + 99)
        one += info.state_bytes_per_chunk_token * len(ids)
        async with rt.stream(ids, max_tokens=100, **GREEDY) as stream:
            async for event in stream:
                if event.index == 90:
                    held = rt.requests()[0].state_bytes
                    break
        assert 0 < held <= one  # the estimate is an upper bound
    async with Runtime.open(model, state_budget=int(1.5 * one), **OPTIONS) as rt:
        first, second = (rt.stream(ids, max_tokens=100, **GREEDY) for _ in range(2))
        async with first, second:
            await anext(first)
            assert [r.phase for r in rt.requests()] == ["running", "waiting"]
            await first.aclose()
            assert (await anext(second)).token_id == facts["greedy"]["p7"][0]
        with pytest.raises(aprefetch.BudgetError, match="state_budget") as caught:
            await rt.generate(ids, max_tokens=8000)
        assert caught.value.option == "state_budget"
        assert len((await rt.generate(ids, max_tokens=3, **GREEDY)).token_ids) == 3


async def test_deadlines(model, facts) -> None:
    ids = facts["prompts"]["p7"]["ids"]
    async with Runtime.open(model, max_requests=1, **OPTIONS) as rt:
        slow = rt.stream(ids, max_tokens=500, **GREEDY)  # its reader stops: it waits for ever
        async with slow:
            await anext(slow)
            with pytest.raises(aprefetch.DeadlineError) as caught:  # while waiting
                await rt.generate(ids, timeout_s=0.02)
            assert caught.value.timeout_s == 0.02
            assert isinstance(caught.value, TimeoutError)
            assert len(rt.requests()) == 1
        for wrong in (0, -1, float("nan"), "1", True):
            with pytest.raises(aprefetch.InvalidRequestError, match="timeout_s"):
                rt.stream(ids, timeout_s=wrong)
        done = await rt.generate(ids, max_tokens=3, timeout_s=100, **GREEDY)
        assert done.token_ids == facts["greedy"]["p7"][:3]
    async with Runtime.open(model, request_timeout_s=0.05, **OPTIONS) as rt:
        stream = rt.stream(ids, max_tokens=8000, **GREEDY)
        with pytest.raises(aprefetch.DeadlineError):  # while running, and while held up
            async for _ in stream:
                pass
        with pytest.raises(aprefetch.DeadlineError):  # within the prompt, within a step
            await rt.generate(facts["prompts"]["p300"]["ids"] * 20, max_tokens=1)
        with pytest.raises(aprefetch.DeadlineError):
            await rt.score(facts["prompts"]["p300"]["ids"] * 20)
        assert rt.requests() == []


async def test_a_long_prompt_gives_way_to_those_who_decode(model, facts) -> None:
    ids, long = facts["prompts"]["p7"]["ids"], facts["prompts"]["p300"]["ids"]
    async with Runtime.open(model, token_gap_s=0.000_001, **OPTIONS) as rt:
        async with rt.stream(ids, max_tokens=60, **GREEDY) as stream:
            await anext(stream)
            prompt = asyncio.create_task(rt.generate(long, max_tokens=1, **GREEDY))
            got = [event.index async for event in stream]
            assert got[-1] == 59
            assert not prompt.done()  # at most 32 + 58 * 4 of its tokens had their turn
        assert (await prompt).token_ids == facts["greedy"]["p300"][:1]
