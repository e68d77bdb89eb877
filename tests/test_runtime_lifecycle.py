"""Opening, closing and failing of a runtime: whoever does it, whenever, nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runtime_parts import minimum_budgets, parts

import aprefetch
from aprefetch import Runtime, embedded
from aprefetch.pipeline.io.wrappers import GateFiles

GREEDY = {"temperature": 0, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"device": "cpu"}


@pytest.fixture(scope="module")
def model(oracle_dir: Path) -> Path:
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"


@pytest.fixture(scope="module")
def facts(model: Path) -> dict[str, Any]:
    return json.loads(model.with_suffix(".json").read_text())


def descriptors() -> set[str]:
    """What the open descriptors point to, as far as it is a file of ours."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.endswith(".gguf"):
            found.add(target)
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the thing watched has no event
            await asyncio.sleep(0.001)


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("aprefetch")}


@pytest.fixture(autouse=True)
async def nothing_left():
    before = threads()  # kernels that other tests keep have threads of their own
    yield
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("aprefetch")] == []
    assert threads() <= before
    assert descriptors() == set()


async def test_await_and_close_from_another_task(model, facts) -> None:
    rt = await asyncio.create_task(Runtime.open(model, **OPTIONS)._open())
    done = await rt.generate(facts["prompts"]["p7"]["ids"], max_tokens=2, **GREEDY)
    assert done.token_ids == facts["greedy"]["p7"][:2]
    await asyncio.gather(rt.aclose(), asyncio.create_task(rt.aclose()))
    await rt.aclose()
    for call in (rt.generate("x"), rt.score([1, 2])):
        with pytest.raises(aprefetch.RuntimeClosedError):
            await call
    with pytest.raises(aprefetch.RuntimeClosedError):
        rt.stream("x")
    assert rt.stats().output_tokens == 2


async def test_awaiting_the_opening_itself_and_only_once(model) -> None:
    opening = Runtime.open(model, **OPTIONS)
    rt = await opening
    with pytest.raises(aprefetch.RuntimeStateError, match="opened already"):
        await opening
    async with rt:
        pass
    with pytest.raises(aprefetch.RuntimeClosedError):
        await rt.generate("x")


async def test_closing_ends_the_requests_that_run(model, facts) -> None:
    ids = facts["prompts"]["p150"]["ids"]
    rt = await Runtime.open(model, max_requests=2, **OPTIONS)
    calls = [asyncio.create_task(rt.generate(ids, max_tokens=500, **GREEDY)) for _ in range(3)]
    calls.append(asyncio.create_task(rt.score(ids)))
    await until(lambda: rt.stats().steps >= 2)
    await rt.aclose()
    for call in calls:
        with pytest.raises(aprefetch.RuntimeClosedError):
            await call


async def test_closing_with_reads_in_flight(model, facts) -> None:
    files = GateFiles()
    with parts(files):
        rt = await Runtime.open(model, **OPTIONS)
        call = asyncio.create_task(rt.generate(facts["prompts"]["p7"]["ids"]))
        await until(lambda: files.waiting)
        closing = asyncio.create_task(rt.aclose())
        await asyncio.sleep(0.01)
        assert not closing.done()  # the kernel may still write into our memory
        files.open_gate()
        await closing
        with pytest.raises(aprefetch.RuntimeClosedError):
            await call


async def test_the_supervisor_may_be_cancelled(model, facts) -> None:
    """As `asyncio.run` does at its end with what is left."""
    rt = await Runtime.open(model, **OPTIONS)
    call = asyncio.create_task(rt.generate(facts["prompts"]["p7"]["ids"], max_tokens=500, **GREEDY))
    await until(lambda: rt.stats().steps >= 2)
    rt._supervisor.cancel()
    with pytest.raises(aprefetch.RuntimeClosedError):
        await call
    await rt.aclose()
    with pytest.raises(aprefetch.RuntimeClosedError):
        await rt.generate("x")


async def test_opening_may_be_cancelled_at_any_time(model) -> None:
    before = threads()
    for n_ticks in range(0, 60, 3):
        opening = asyncio.create_task(Runtime.open(model, **OPTIONS)._open())
        for _ in range(n_ticks):
            await asyncio.sleep(0.002)
            if opening.done():
                break
        opening.cancel()
        try:
            await (await opening).aclose()
            break
        except asyncio.CancelledError:
            assert threads() <= before
            assert descriptors() == set()


async def test_a_broken_invariant_fails_everything_with_its_cause(model, facts) -> None:
    ids = facts["prompts"]["p7"]["ids"]
    async with Runtime.open(model, **OPTIONS) as rt:
        stream = rt.stream(ids, max_tokens=500, **GREEDY)
        await anext(stream)

        async def broken(*_: Any) -> None:
            raise ZeroDivisionError("a slot is nowhere")

        rt._runner.step = broken
        with pytest.raises(aprefetch.RuntimeFailedError, match="a slot is nowhere") as caught:
            async for _ in stream:
                pass
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        await asyncio.sleep(0.01)
        with pytest.raises(aprefetch.RuntimeFailedError, match="a slot is nowhere"):
            await rt.generate(ids)
        await stream.aclose()


async def test_a_dropped_runtime_warns(model) -> None:
    rt = await Runtime.open(model, **OPTIONS)
    supervisor = rt._supervisor
    with pytest.warns(ResourceWarning, match="Runtime was dropped"):
        rt.__del__()
    del rt
    supervisor.cancel()
    await asyncio.wait({supervisor})
    gc.collect()


async def test_wrong_openings(model, tmp_path) -> None:
    least = minimum_budgets(model)
    (tmp_path / "text.gguf").write_text("not a model")
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (aprefetch.SourceError, "none.gguf", tmp_path / "none.gguf", {}),
        (aprefetch.SourceError, "text.gguf", tmp_path / "text.gguf", {}),
        (aprefetch.SourceError, tmp_path.name, tmp_path, {}),
        (aprefetch.ConfigError, "vram_budget", model, {"vram_bugdet": 1}),
        (aprefetch.ConfigError, "queue_depth", model, {"queue_depth": 0}),
        (aprefetch.ConfigError, "num_experts_per_tok", model, {"num_experts_per_tok": 1}),
        (aprefetch.DeviceError, "cuda", model, {"device": "cuda"}),
        (aprefetch.BudgetError, "vram_budget", model, {"vram_budget": least["vram_budget"] - 1}),
        (aprefetch.BudgetError, "ram_budget", model, {"ram_budget": least["ram_budget"] - 1}),
        (aprefetch.TokenizerError, "tokenizer.json", model, {"tokenizer": tmp_path}),
        (aprefetch.ConfigError, "path must be a path", 5, {}),
        (aprefetch.ConfigError, "path must be a path", b"model.gguf", {}),
        (aprefetch.ConfigError, "tokenizer must be a path", model, {"tokenizer": 5}),
    ]
    for kind, words, path, options in cases:
        with pytest.raises(kind, match=words) as caught:
            await Runtime.open(path, **{**OPTIONS, **options})
        assert "\n" not in str(caught.value)
    with pytest.raises(aprefetch.BudgetError) as low:
        await Runtime.open(model, vram_budget=1, **OPTIONS)
    assert (low.value.minimum_bytes, low.value.option) == (least["vram_budget"], "vram_budget")


async def test_several_faults_are_one_error(tmp_path) -> None:
    with pytest.raises(aprefetch.ConfigError) as caught:
        await Runtime.open(tmp_path / "none.gguf", queue_depth=0, chunk_tokens=0, **OPTIONS)
    for words in ("queue_depth", "chunk_tokens", "none.gguf"):
        assert words in str(caught.value)
    assert len(caught.value.problems) == 3


async def test_the_embedded_model_is_the_default_and_streams() -> None:
    async with Runtime.open(**OPTIONS) as rt:
        assert rt.plan.path == embedded.MODEL_PATH
        assert rt.plan.vram_budget_bytes < rt.plan.routed_bytes
        assert rt.plan.vram_budget_bytes + rt.plan.ram_budget_bytes < rt.plan.routed_bytes
        done = await rt.generate("Once upon a time", max_tokens=4, **GREEDY)
        assert done.stats.bytes_read > 0
