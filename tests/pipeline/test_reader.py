"""The threaded reader: conformance, order, depth, several files, alignment."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from conformance.reader import (
    SECTOR,
    Landing,
    Outcome,
    ReaderConformance,
    check_owned_from_done_on,
    require_direct,
    span,
    write_files,
)

from aprefetch.errors import ConfigError
from aprefetch.pipeline.io.threads import Files
from aprefetch.pipeline.io.wrappers import (
    DelayFiles,
    FaultFiles,
    GateFiles,
    PacedFiles,
    RecordingFiles,
    ReorderFiles,
)
from aprefetch.pipeline.reader import Priority, ReadCancelled, ReadJob, ThreadReader
from aprefetch.stats import Counters
from aprefetch.types import AlignedRead, ExpertKey

Make = Callable[..., ThreadReader]


class TestThreads(ReaderConformance):
    def make(self, paths: Sequence[Path], counters: Counters, **options: Any) -> ThreadReader:
        return ThreadReader(paths, counters=counters, **options)


class TestThreadsShuffled(ReaderConformance):
    def make(self, paths: Sequence[Path], counters: Counters, **options: Any) -> ThreadReader:
        files = ReorderFiles(seed=11, most_s=0.001)
        return ThreadReader(paths, counters=counters, files=files, **options)


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest_asyncio.fixture
async def make(counters: Counters) -> AsyncIterator[Make]:
    """Makes readers, and closes them (gates must be open by then)."""
    readers: list[ThreadReader] = []

    def make(paths: Sequence[Path], files: Files | None = None, **options: Any) -> ThreadReader:
        readers.append(ThreadReader(paths, counters=counters, files=files, **options))
        return readers[-1]

    yield make
    for reader in readers:
        await reader.aclose()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something that other threads do has happened."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - threads set no asyncio events
            await asyncio.sleep(0.001)


def jobs_of_sectors(
    sectors: Sequence[int], priority: Priority, outcome: Outcome, view: memoryview
) -> list[ReadJob]:
    return [
        ReadJob(ExpertKey(0, n), [span(0, n * SECTOR, SECTOR, 0)], view, priority, outcome.done)
        for n in sectors
    ]


async def test_reads_are_direct_and_land_in_the_buffer(make: Make, tmp_path: Path) -> None:
    require_direct(tmp_path)
    ((path, _),) = write_files(tmp_path, [100_000])
    files, outcome, landing = RecordingFiles(), Outcome(), Landing(8 * SECTOR)
    reader = make([path], files)
    reads = [span(0, 5000, 9000, 0), span(0, 99_000, 1000, 4 * SECTOR)]
    job = ReadJob(ExpertKey(0, 0), reads, landing.view, Priority.DEMAND, outcome.done)
    reader.submit(job)
    await outcome.wait(1)
    assert files.opens == [(path, True)]
    base = min(record.address for record in files.reads)
    by_offset = {record.offset: record for record in files.reads}
    assert set(by_offset) == {4096, 98_304}
    for read in reads:
        record = by_offset[read.offset]
        assert record.direct
        assert record.length == read.length
        assert record.address - base == read.landing_offset
        assert record.address % SECTOR == 0
        assert record.n_bytes >= read.needed
    assert reader.statistics().n_direct == 1


async def test_urgent_reads_go_first(make: Make, tmp_path: Path) -> None:
    ((path, _),) = write_files(tmp_path, [40 * SECTOR])
    gate = GateFiles()
    log = RecordingFiles(gate)
    reader, outcome, landing = make([path], log, queue_depth=1), Outcome(), Landing(SECTOR)
    (blocker,) = jobs_of_sectors([39], Priority.DEMAND, outcome, landing.view)
    reader.submit(blocker)
    await until(lambda: len(gate.waiting) == 1)
    guesses = jobs_of_sectors([0, 1, 2, 3], Priority.GUESS, outcome, landing.view)
    exact = jobs_of_sectors([10, 11], Priority.EXACT, outcome, landing.view)
    demands = jobs_of_sectors([20, 21], Priority.DEMAND, outcome, landing.view)
    for job in guesses + exact + demands:
        reader.submit(job)
    reader.promote(guesses[2], Priority.DEMAND)
    reader.promote(exact[0], Priority.GUESS)  # never less urgent
    reader.cancel(guesses[0])
    assert reader.statistics().queued == 7
    gate.open_gate()
    await outcome.wait(9)
    order = [record.offset // SECTOR for record in log.reads]
    assert order == [39, 20, 21, 2, 10, 11, 1, 3]  # 2 is read once, 0 never
    assert isinstance(outcome.errors[guesses[0]], ReadCancelled)
    assert guesses[2].priority is Priority.DEMAND


async def test_promotions_leave_no_dead_weight(make: Make, tmp_path: Path) -> None:
    ((path, _),) = write_files(tmp_path, [4 * SECTOR])
    gate = GateFiles()
    reader, outcome, landing = make([path], gate, queue_depth=1), Outcome(), Landing(SECTOR)
    for job in jobs_of_sectors([0] * 10, Priority.DEMAND, outcome, landing.view):
        reader.submit(job)
    for _ in range(300):
        (job,) = jobs_of_sectors([1], Priority.GUESS, outcome, landing.view)
        reader.submit(job)
        reader.promote(job, Priority.EXACT)
        reader.cancel(job)
    assert len(reader._heap) < 300
    gate.open_gate()
    await outcome.wait(310)


async def test_depth_is_reached_and_never_passed(
    make: Make, tmp_path: Path, counters: Counters
) -> None:
    ((path, _),) = write_files(tmp_path, [64 * SECTOR])
    gate = GateFiles()
    log = RecordingFiles(gate)
    reader, outcome, landing = make([path], log, queue_depth=4), Outcome(), Landing(64 * SECTOR)
    for n in range(8):  # depth is for reads of all jobs: one job alone may fill it
        reads = [span(0, (n * 8 + i) * SECTOR, SECTOR, (n * 8 + i) * SECTOR) for i in range(8)]
        reader.submit(ReadJob(ExpertKey(0, n), reads, landing.view, Priority.DEMAND, outcome.done))
    await until(lambda: len(gate.waiting) == 4)
    assert reader.statistics().in_flight == 4
    assert reader.statistics().queued == 60
    gate.open_gate()
    await outcome.wait(8)
    assert log.max_in_flight == reader.statistics().max_in_flight == counters.max_in_flight == 4
    assert len(log.reads) == counters.reads == 64


async def test_completions_do_not_wait_for_the_first(make: Make, tmp_path: Path) -> None:
    ((path, _),) = write_files(tmp_path, [8 * SECTOR])
    gate = GateFiles()
    slow_first = DelayFiles(gate, lambda path, offset, length: 0.05 if offset == 0 else 0.0)
    gate.open_gate()
    reader, outcome, landing = make([path], slow_first, queue_depth=2), Outcome(), Landing(SECTOR)
    jobs = jobs_of_sectors(range(8), Priority.DEMAND, outcome, landing.view)
    for job in jobs:
        reader.submit(job)
    await outcome.wait(8)
    assert outcome.order[-1] is jobs[0]
    assert slow_first.delayed_s == 0.05


async def test_a_cancelled_read_in_flight_still_lands(make: Make, tmp_path: Path) -> None:
    ((path, data),) = write_files(tmp_path, [8 * SECTOR])
    gate = GateFiles()
    reader, outcome, landing = make([path], gate, queue_depth=1), Outcome(), Landing(2 * SECTOR)
    reads = [span(0, 0, SECTOR, 0), span(0, SECTOR, SECTOR, SECTOR)]
    job = ReadJob(ExpertKey(0, 0), reads, landing.view, Priority.DEMAND, outcome.done)
    reader.submit(job)
    await until(lambda: len(gate.waiting) == 1)
    reader.cancel(job)
    await asyncio.sleep(0.01)
    assert not outcome.order  # the kernel may still write into the buffer
    assert reader.statistics().queued == 0
    gate.open_gate()
    await outcome.wait(1)
    assert isinstance(outcome.errors[job], ReadCancelled)
    assert landing.view[:SECTOR] == data[:SECTOR]
    assert landing.view[SECTOR] == 0xA5  # the second read was dropped


async def test_closing_waits_for_what_is_in_flight(make: Make, tmp_path: Path) -> None:
    ((path, _),) = write_files(tmp_path, [8 * SECTOR])
    gate = GateFiles()
    reader, outcome, landing = make([path], gate, queue_depth=2), Outcome(), Landing(SECTOR)
    jobs = jobs_of_sectors(range(6), Priority.DEMAND, outcome, landing.view)
    for job in jobs:
        reader.submit(job)
    await until(lambda: len(gate.waiting) == 2)
    closing = asyncio.ensure_future(reader.aclose())
    await outcome.wait(4)
    await asyncio.sleep(0.01)
    assert not closing.done()
    assert gate.n_open == 1
    gate.open_gate()
    await closing
    assert len(outcome.order) == 6
    assert gate.n_open == 0


async def test_several_files_are_read_at_once(make: Make, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (first, _), (second, _) = (
        *write_files(tmp_path / "one", [16 * SECTOR]),
        *write_files(tmp_path / "two", [16 * SECTOR]),
    )
    gate = GateFiles()
    reader, outcome, landing = make([first, second], gate), Outcome(), Landing(16 * SECTOR)
    for n in range(8):
        read = span(n % 2, n * SECTOR, SECTOR, n * SECTOR)
        reader.submit(ReadJob(ExpertKey(0, n), [read], landing.view, Priority.DEMAND, outcome.done))
    await until(lambda: len(gate.waiting) == 8)
    assert {path for path, _ in gate.waiting} == {first, second}
    gate.open_gate()
    await outcome.wait(8)


async def test_a_wider_alignment(make: Make, tmp_path: Path) -> None:
    wide = 65536
    ((path, data),) = write_files(tmp_path, [5 * wide + 777])
    log = RecordingFiles()
    reader, outcome = make([path], log, alignment=wide, slice_bytes=SECTOR), Outcome()
    landing = Landing(4 * wide, wide)
    read = span(0, 3 * wide - 5, 2 * wide + 700, 0, wide)
    reader.submit(ReadJob(None, [read], landing.view, Priority.DEMAND, outcome.done))
    await outcome.wait(1)
    assert list(outcome.errors.values()) == [None]
    start = 3 * wide - 5 - read.offset
    assert landing.view[start : start + 2 * wide + 700] == data[3 * wide - 5 :][: 2 * wide + 700]
    for record in log.reads:
        assert record.offset % wide == record.length % wide == record.address % wide == 0
    narrow = AlignedRead(file=0, offset=SECTOR, length=wide, needed=1, landing_offset=0)
    with pytest.raises(ValueError, match="aligned to 65536"):
        reader.submit(ReadJob(None, [narrow], landing.view, Priority.DEMAND, outcome.done))
    with pytest.raises(ConfigError, match="power of two"):
        make([path], alignment=5000)


async def test_reads_longer_than_one_call_may_move(
    make: Make, tmp_path: Path, counters: Counters
) -> None:
    ((path, data),) = write_files(tmp_path, [10 * SECTOR + 5])
    log = RecordingFiles()
    reader = make([path], log, largest_transfer_bytes=3 * SECTOR + 100)
    outcome, landing = Outcome(), Landing(11 * SECTOR)
    read = span(0, 0, len(data), 0)
    reader.submit(ReadJob(None, [read], landing.view, Priority.DEMAND, outcome.done))
    await outcome.wait(1)
    assert landing.view[: len(data)] == data
    assert [record.length for record in log.reads] == [3 * SECTOR] * 3 + [2 * SECTOR]
    assert counters.short_reads == 0


async def test_nobody_holds_the_buffer_after_done(make: Make, tmp_path: Path) -> None:
    """An arena can only be unmapped once no view of it is left."""
    ((path, _),) = write_files(tmp_path, [SECTOR])
    reader, outcome = make([path]), Outcome()
    memory = bytearray(4 * SECTOR)
    import numpy as np

    at = -np.frombuffer(memory, dtype=np.uint8).ctypes.data % SECTOR
    view = memoryview(memory)[at : at + 2 * SECTOR]
    past_the_end = AlignedRead(
        file=0, offset=SECTOR, length=SECTOR, needed=9, landing_offset=SECTOR
    )
    for reads in ([span(0, 0, 9, 0)], [past_the_end]):
        reader.submit(ReadJob(None, reads, view, Priority.DEMAND, outcome.done))
    await outcome.wait(2)
    await until(lambda: reader.statistics().in_flight == 0)
    errors = [error for error in outcome.errors.values() if error is not None]
    assert len(errors) == 1
    outcome.errors.clear()
    outcome.order.clear()
    view.release()
    gc.collect()
    memory.clear()  # BufferError while anybody holds a view


async def test_wrappers_compose(make: Make, tmp_path: Path) -> None:
    ((path, data),) = write_files(tmp_path, [20 * SECTOR])
    log = RecordingFiles(ReorderFiles(PacedFiles(None, bytes_per_s=1e9, latency_s=1e-4), seed=5))
    reader, outcome, landing = make([path], log), Outcome(), Landing(20 * SECTOR)
    for n in range(20):
        read = span(0, n * SECTOR, SECTOR, n * SECTOR)
        reader.submit(ReadJob(ExpertKey(0, n), [read], landing.view, Priority.DEMAND, outcome.done))
    await outcome.wait(20)
    assert landing.view == data
    assert log.n_open == 1


async def test_the_loop_may_die_before_the_reader(tmp_path: Path) -> None:
    """Threads that outlive their loop end quietly."""
    ((path, _),) = write_files(tmp_path, [SECTOR])
    gate = GateFiles()
    threads: list[threading.Thread] = []

    def run() -> None:
        async def main() -> None:
            outcome, landing = Outcome(), Landing(SECTOR)
            reader = ThreadReader([path], counters=Counters(), queue_depth=1, files=gate)
            threads.extend(reader._workers)
            for job in jobs_of_sectors([0], Priority.DEMAND, outcome, landing.view):
                reader.submit(job)
            await until(lambda: len(gate.waiting) == 1)
            closing = asyncio.ensure_future(reader.aclose())
            await asyncio.sleep(0)
            closing.cancel()

        asyncio.run(main())

    await asyncio.to_thread(run)
    gate.open_gate()
    await until(lambda: not any(thread.is_alive() for thread in threads))
    for fd in list(gate._opened):
        os.close(fd)


def test_on_uvloop(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")
    ((path, data),) = write_files(tmp_path, [20 * SECTOR])

    async def main() -> None:
        outcome, landing = Outcome(), Landing(20 * SECTOR)
        reader = ThreadReader([path], counters=Counters(), files=ReorderFiles(seed=2))
        for n in range(20):
            read = span(0, n * SECTOR, SECTOR, n * SECTOR)
            reader.submit(
                ReadJob(ExpertKey(0, n), [read], landing.view, Priority.DEMAND, outcome.done)
            )
        await outcome.wait(20)
        assert landing.view == data
        await reader.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_written_after_done(make: Make, tmp_path: Path, seed: int) -> None:
    """Random submits, promotions, cancels and faults: a buffer is its owner's from `done` on."""
    source = random.Random(seed)
    ((path, data),) = write_files(tmp_path, [40 * SECTOR])
    faults = FaultFiles(ReorderFiles(seed=seed, most_s=0.0005))
    reader = make([path], faults, queue_depth=source.randint(1, 6), backoff_s=0.0)
    await check_owned_from_done_on(
        reader, data, source, upset=lambda: source.random() < 0.1 and faults.fail(errno.EBADF)
    )
