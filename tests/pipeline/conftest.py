"""Fixtures of the pipeline's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from objects_on_disk import FileExperts
from pipeline_rig import SIZES, Rig, ScriptedReader


@pytest.fixture
def experts(tmp_path: Path) -> FileExperts:
    return FileExperts(tmp_path / "experts.bin", SIZES)


@pytest.fixture
async def rig(experts: FileExperts) -> AsyncIterator[Callable[..., Rig]]:
    """Makes pipelines that are closed after the test."""
    async with AsyncExitStack() as stack:

        def make(**options: Any) -> Rig:
            made = Rig(options.pop("experts", experts), **options)
            stack.push_async_callback(made.aclose)
            return made

        yield make


@pytest.fixture
async def scripted(rig: Callable[..., Rig]) -> Callable[..., Rig]:
    """Makes pipelines whose reader does as it is told."""

    def make(**options: Any) -> Rig:
        loop = asyncio.get_running_loop()
        return rig(reader=lambda base: ScriptedReader(base, loop), **options)

    return make
