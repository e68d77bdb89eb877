"""A request cancelled at any await leaves nothing behind, and the next one is right."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_parts import minimum_budgets

from aprefetch import Runtime

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(oracle_dir: Path) -> Path:
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"


@pytest.fixture(scope="module")
def facts(model: Path) -> dict[str, Any]:
    return json.loads(model.with_suffix(".json").read_text())


async def ticks(n: int) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def at_rest(rt: Runtime) -> bool:
    return rt._engine.n_requests == 0 and not rt._coordinator._open


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the thing watched has no event
            await asyncio.sleep(0.001)


async def settle(rt: Runtime) -> None:
    """Let reads that were given up land."""
    await until(lambda: not rt._coordinator._n_moving and at_rest(rt))


@pytest.mark.parametrize("how", ["generate", "stream", "score"])
async def test_cancel_at_random_points(model, facts, how) -> None:
    rng = random.Random(7)
    p7, p40 = facts["prompts"]["p7"]["ids"], facts["prompts"]["p40"]["ids"]
    options = {"chunk_tokens": 13, **minimum_budgets(model)}
    async with Runtime.open(model, **options) as rt:
        tasks = asyncio.all_tasks()

        async def read() -> None:
            async with rt.stream(p40, max_tokens=50) as stream:
                async for _ in stream:
                    pass

        for _ in range(20):
            calls = {
                "generate": lambda: rt.generate(p40, max_tokens=50),
                "stream": read,
                "score": lambda: rt.score(p40),
            }
            call = asyncio.create_task(calls[how]())
            if rng.random() < 0.5:
                await ticks(rng.randrange(400))  # mostly in the prompt's first layers
            else:
                await asyncio.sleep(rng.random() * 0.25)  # anywhere
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
                raise asyncio.CancelledError  # it was done before: as good
            assert at_rest(rt)
            assert asyncio.all_tasks() == tasks
        await settle(rt)
        done = await rt.generate(p7, max_tokens=4, **GREEDY)
        assert done.token_ids == facts["greedy"]["p7"][:4]
        assert rt.stats().duplicate_reads == 0


async def test_cancelling_some_leaves_the_others_right(model, facts) -> None:
    rng = random.Random(3)
    ids = facts["prompts"]["p7"]["ids"]
    async with Runtime.open(model, **minimum_budgets(model)) as rt:
        good = asyncio.create_task(rt.generate(ids, max_tokens=16, **GREEDY))
        while not good.done():
            call = asyncio.create_task(rt.generate(ids, max_tokens=16, **GREEDY))
            await ticks(rng.randrange(600))
            call.cancel()
            await asyncio.wait({call})
        assert (await good).token_ids == facts["greedy"]["p7"][:16]
        await settle(rt)


async def test_a_prompt_that_nobody_waits_for_is_given_up_within_the_step(model, facts) -> None:
    async with Runtime.open(model, chunk_tokens=300) as rt:
        call = asyncio.create_task(rt.generate(facts["prompts"]["p300"]["ids"]))
        await until(lambda: rt._coordinator._open or rt.stats().reads)
        call.cancel()
        await asyncio.wait({call})
        assert rt.stats().steps == 0  # no step came to its end
        assert rt.stats().prompt_tokens == 0
        assert at_rest(rt)
