"""Packs under the reader: one read per object, all drives at once, exact bytes in the slots."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest

from aprefetch.errors import ReadError
from aprefetch.pipeline.io.wrappers import GateFiles, RecordingFiles
from aprefetch.pipeline.reader import Priority, ReadJob, ThreadReader
from aprefetch.stats import Counters
from aprefetch.storage.pack import PackExperts, build_pack, open_pack
from aprefetch.types import ExpertKey


@pytest.fixture
def striped(oracle_model: Path, tmp_path: Path) -> PackExperts:
    folders = [tmp_path / "drive a", tmp_path / "drive b"]
    return open_pack(build_pack(oracle_model, folders).paths[0], folders=folders)


class Landing:
    """Submits objects, and waits for them."""

    def __init__(self, experts: PackExperts, reader: ThreadReader) -> None:
        self.experts = experts
        self.reader = reader
        self.buffers: dict[ExpertKey, memoryview] = {}
        self.errors: dict[ExpertKey, BaseException | None] = {}
        self.changed = asyncio.Event()

    def submit(self, keys: Sequence[ExpertKey]) -> None:
        for key in keys:
            plan = self.experts.read_plan(key)
            buffer = memoryview(mmap.mmap(-1, plan.landing_bytes))
            self.buffers[key] = buffer
            self.reader.submit(ReadJob(key, plan.reads, buffer, Priority.DEMAND, self.done))

    def done(self, job: ReadJob, error: BaseException | None) -> None:
        assert job.key is not None
        self.errors[job.key] = error
        self.changed.set()

    async def wait(self) -> None:
        async with asyncio.timeout(20):
            while len(self.errors) < len(self.buffers):
                self.changed.clear()
                await self.changed.wait()


async def test_one_contiguous_read_per_object(striped: PackExperts) -> None:
    files, counters = RecordingFiles(), Counters()
    reader = ThreadReader(striped.paths, counters=counters, files=files)
    landing = Landing(striped, reader)
    keys = [ExpertKey(layer, e) for layer in (0, 3, 7) for e in range(16)]
    landing.submit(keys)
    await landing.wait()
    await reader.aclose()
    assert set(landing.errors.values()) == {None}
    assert len(files.reads) == len(keys)
    assert counters.bytes_read == sum(striped.max_landing_bytes(key.layer) for key in keys)
    for read in files.reads:
        assert (read.offset | read.length | read.address) % 4096 == 0
    for key in keys:
        striped.check(key, landing.buffers[key])


async def test_a_layers_objects_come_from_all_parts_at_once(striped: PackExperts) -> None:
    gate = GateFiles()
    reader = ThreadReader(striped.paths, counters=Counters(), queue_depth=4, files=gate)
    landing = Landing(striped, reader)
    landing.submit([ExpertKey(5, e) for e in range(4)])
    async with asyncio.timeout(20):
        while len(gate.waiting) < 4:  # noqa: ASYNC110 - other threads come to the gate
            await asyncio.sleep(0.001)
    assert {path.parent.name for path, _ in gate.waiting} == {"drive a", "drive b"}
    gate.open_gate()
    await landing.wait()
    await reader.aclose()


async def test_a_pack_that_changes_under_way_is_an_error(striped: PackExperts) -> None:
    reader = ThreadReader(striped.paths, counters=Counters())
    landing = Landing(striped, reader)
    with striped.paths[1].open("rb+") as file:
        file.truncate(striped.parts[1].n_bytes - 4096)
    landing.submit([ExpertKey(0, 1)])
    await landing.wait()
    assert isinstance(landing.errors[ExpertKey(0, 1)], ReadError)
    await reader.aclose()
