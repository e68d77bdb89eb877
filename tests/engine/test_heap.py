"""Memory stays level over many requests of all kinds and ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sys
from pathlib import Path

import pytest

from aprefetch import AprefetchError, Runtime
from aprefetch.engine.heap import HeapTrimmer, resident_bytes


async def one_request(runtime: Runtime, rng: random.Random) -> None:
    """Scored, broken off, cancelled, out of time, or finished."""
    ids = [rng.randrange(1000) for _ in range(rng.randrange(2, 120))]
    kind = rng.randrange(5)
    if kind == 0:
        await runtime.score(ids, logits=rng.random() < 0.5)
    elif kind == 1:
        async with runtime.stream(ids, max_tokens=8, ignore_eos=True) as stream:
            async for event in stream:
                if event.index == 2:
                    break
    elif kind == 2:
        task = asyncio.create_task(runtime.generate(ids, max_tokens=20))
        await asyncio.sleep(rng.random() * 0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    elif kind == 3:
        with contextlib.suppress(AprefetchError):
            await runtime.generate(ids, max_tokens=20, timeout_s=0.02)
    else:
        await runtime.generate([{"role": "user", "content": "Hello"}], max_tokens=4)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory from /proc")
async def test_memory_stays_level(oracle_dir: Path) -> None:
    rng = random.Random(5)
    async with Runtime.open(
        oracle_dir / "tiny-deepseek4-mxfp4.gguf",
        vram_budget="2MiB",
        ram_budget="1MiB",
        kernels="reference",
    ) as runtime:
        seen = []
        for _ in range(5):
            await asyncio.gather(*(one_request(runtime, rng) for _ in range(16)))
            await asyncio.sleep(0.02)  # the engine's turn to be idle
            gc.collect()
            seen.append(resident_bytes())
        assert runtime.requests() == []
    assert seen[-1] - seen[1] < 24 << 20


def test_trims_only_after_growth() -> None:
    trimmer = HeapTrimmer(growth_bytes=1 << 30)
    for _ in range(3):
        trimmer.when_idle()
    assert trimmer.n_trims == 0
    eager = HeapTrimmer(growth_bytes=0)
    eager.when_idle()
    assert eager.n_trims == (1 if sys.platform.startswith("linux") and eager._trim else 0)
