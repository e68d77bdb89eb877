"""What goes wrong between a file and a buffer: each fault ends in right bytes or a typed error."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from conformance.reader import SECTOR, Landing, Outcome, require_direct, span, write_files
from rings import BACKENDS, JudgedRing

from aprefetch.errors import ReadError
from aprefetch.pipeline.io.wrappers import FaultFiles, RecordingFiles, ReorderFiles
from aprefetch.pipeline.reader import Priority, Reader, ReadJob, RingReader, ThreadReader
from aprefetch.stats import Counters
from aprefetch.types import ExpertKey

N_SECTORS = 32


class Bench:
    """A reader over one file whose faults are planned, and a landing buffer for all of it."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.backend = backend
        self.counters = Counters()
        ((self.path, self.data),) = write_files(folder, [N_SECTORS * SECTOR - 100])
        self.log = RecordingFiles()
        self.faults = FaultFiles(self.log)
        self.landing = Landing(N_SECTORS * SECTOR)
        self._reader: Reader | None = None

    def open(self, **options: Any) -> Reader:
        options = {"backoff_s": 0.0001, "counters": self.counters, "files": self.faults} | options
        if self.backend == "io_uring":
            self.faults.is_transparent = True  # the ring sees to it
            options["make_ring"] = lambda *sizes: JudgedRing(*sizes, faults=self.faults)
            self._reader = RingReader([self.path], **options)
        else:
            self._reader = ThreadReader([self.path], **options)
        return self._reader

    async def read(self, n_reads: int = 1) -> BaseException | None:
        """Read the whole file as one job of `n_reads` reads."""
        reader = self._reader or self.open()
        outcome, step = Outcome(), N_SECTORS // n_reads * SECTOR
        self.landing.view[:] = bytes(len(self.landing.view))
        spans = [(at, min(step, len(self.data) - at)) for at in range(0, len(self.data), step)]
        reads = [span(0, at, n_bytes, at) for at, n_bytes in spans]
        view = self.landing.view
        job = ReadJob(ExpertKey(5, 6), reads, view, Priority.DEMAND, outcome.done)
        reader.submit(job)
        await outcome.wait(1)
        assert self.landing.is_intact()
        error = outcome.errors[job]
        if error is None:
            assert view[: len(self.data)] == self.data
        return error

    async def aclose(self) -> None:
        if self._reader is not None:
            await self._reader.aclose()
        assert self.faults.n_open == self.log.n_open == 0


@pytest_asyncio.fixture(params=BACKENDS)
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    require_direct(tmp_path)
    bench = Bench(tmp_path, request.param)
    yield bench
    await bench.aclose()


@pytest.mark.parametrize("n_bytes", [1, 511, SECTOR, SECTOR + 1, 5 * SECTOR, 20 * SECTOR + 7])
async def test_short_reads_are_continued(bench: Bench, n_bytes: int) -> None:
    bench.faults.shorten(n_bytes, times=3)
    assert await bench.read() is None
    assert bench.counters.short_reads >= 1
    assert bench.counters.io_errors == bench.counters.fallback_count == 0
    for record in bench.log.reads:
        assert not record.direct or record.offset % SECTOR == record.address % SECTOR == 0


@pytest.mark.parametrize("n_bytes", [1, 700, 3 * SECTOR + 9])
async def test_short_for_ever_still_ends(bench: Bench, n_bytes: int) -> None:
    """A direct read that never gets past a sector is finished through the page cache."""
    bench.faults.shorten(n_bytes, times=-1, direct=True)
    assert await bench.read(n_reads=4) is None
    assert bench.counters.fallback_count == 0  # direct reads are not refused
    assert bench.counters.io_errors == 0


async def test_short_to_nothing_everywhere_is_an_error(bench: Bench) -> None:
    bench.faults.shorten(0, times=-1)
    error = await bench.read()
    assert isinstance(error, ReadError)
    assert "ends early" in str(error)


async def test_eio_passes_after_retries(bench: Bench) -> None:
    bench.faults.fail(errno.EIO, times=2)
    assert await bench.read() is None
    assert bench.counters.io_retries == 2
    assert bench.counters.io_errors == 0


async def test_eio_that_stays_is_an_error_and_then_forgotten(bench: Bench) -> None:
    bad = range(8 * SECTOR, 8 * SECTOR + 1)
    bench.faults.fail(errno.EIO, times=-1, offsets=bad)
    error = await bench.read(n_reads=8)
    assert isinstance(error, ReadError)
    assert isinstance(error, OSError)
    assert (error.path, error.errno, error.key) == (bench.path, errno.EIO, (5, 6))
    assert (error.offset, error.length) == (8 * SECTOR, 4 * SECTOR)
    assert bench.counters.io_errors == 1
    assert bench.counters.io_retries == 2
    assert "after 2 retries" in str(error)
    bench.faults.lift()
    assert await bench.read(n_reads=8) is None
    assert bench.counters.io_errors == 1


async def test_how_often_to_retry_is_an_option(bench: Bench) -> None:
    bench.open(retries=0)
    bench.faults.fail(errno.EIO)
    assert isinstance(await bench.read(), ReadError)
    assert bench.counters.io_retries == 0


async def test_errors_that_do_not_pass_are_not_retried(bench: Bench) -> None:
    bench.faults.fail(errno.EBADF)
    error = await bench.read()
    assert isinstance(error, ReadError)
    assert error.errno == errno.EBADF
    assert bench.counters.io_retries == 0


async def test_the_rest_of_a_failed_job_is_dropped(bench: Bench) -> None:
    bench.open(queue_depth=1)
    bench.faults.fail(errno.EBADF, times=-1)
    assert isinstance(await bench.read(n_reads=8), ReadError)
    assert bench.faults.n_struck == 1


async def test_interruptions_are_retried(bench: Bench) -> None:
    bench.open(retries=0)
    bench.faults.fail(errno.EINTR, times=20)
    assert await bench.read() is None
    assert bench.counters.io_retries == 20


async def test_interruptions_without_end_are_an_error(bench: Bench) -> None:
    bench.faults.fail(errno.EINTR, times=-1)
    error = await bench.read()
    assert isinstance(error, ReadError)
    assert error.errno == errno.EINTR


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("at", ["open", "read"])
async def test_refused_direct_reads_fall_back(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: int, at: str
) -> None:
    if at == "open":
        bench.faults.refuse_open(error)
    else:
        bench.faults.fail(error, times=-1, direct=True)
    with caplog.at_level(logging.WARNING):
        reader = bench.open(queue_depth=8)
        assert await bench.read(n_reads=16) is None
        assert await bench.read(n_reads=16) is None
    assert bench.counters.fallback_count == 1
    assert bench.counters.io_errors == bench.counters.io_retries == 0
    assert [r.getMessage().count(str(bench.path)) for r in caplog.records] == [1]
    assert not any(record.direct for record in bench.log.reads)
    assert reader.statistics().n_direct == 0


@pytest.mark.parametrize("at", ["open", "read"])
async def test_strict_mode_names_the_file(bench: Bench, at: str) -> None:
    error: BaseException | None
    if at == "open":
        bench.faults.refuse_open()
        with pytest.raises(ReadError) as caught:
            bench.open(strict_direct=True)
        error = caught.value
    else:
        bench.open(strict_direct=True)
        bench.faults.fail(errno.EINVAL, times=-1)
        error = await bench.read()
    assert isinstance(error, ReadError)
    assert str(bench.path) in str(error)
    assert "strict_direct" in str(error)
    assert error.errno == errno.EINVAL
    assert bench.counters.fallback_count == 0


async def test_a_buffered_read_that_is_invalid_is_an_error(bench: Bench) -> None:
    bench.faults.fail(errno.EINVAL, times=-1)
    error = await bench.read()
    assert isinstance(error, ReadError)
    assert error.errno == errno.EINVAL


async def test_falling_back_may_fail_too(bench: Bench) -> None:
    bench.faults.fail(errno.EINVAL, times=-1, direct=True)
    bench.faults.refuse_open(errno.EMFILE, direct=False)
    error = await bench.read()
    assert isinstance(error, ReadError)
    assert (error.errno, error.key) == (errno.EMFILE, (5, 6))


async def test_truncation_is_noticed(bench: Bench) -> None:
    assert await bench.read() is None
    for size in (0, 3 * SECTOR + 1, len(bench.data) - 1):
        bench.faults.truncate(bench.path, size)
        error = await bench.read(n_reads=4)
        assert isinstance(error, ReadError)
        assert "changed while running" in str(error)
    bench.faults.lift()
    assert await bench.read() is None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", BACKENDS)
async def test_any_mix_of_faults(tmp_path: Path, seed: int, backend: str) -> None:
    """Either all bytes are right, or the error is typed; and afterwards all is well."""
    source = random.Random(seed)
    require_direct(tmp_path)
    bench = Bench(tmp_path, backend)
    bench.faults = FaultFiles(ReorderFiles(bench.log, seed=seed, most_s=0.0005))
    bench.open(queue_depth=source.randint(1, 8), slice_bytes=source.choice([None, 3 * SECTOR]))
    plans: list[Callable[[], None]] = [
        lambda: bench.faults.fail(errno.EIO, times=source.randint(1, 4)),
        lambda: bench.faults.fail(errno.EINTR, times=source.randint(1, 9)),
        lambda: bench.faults.shorten(source.randrange(1, 5 * SECTOR), times=source.randint(1, 9)),
        lambda: bench.faults.fail(errno.EINVAL, times=1, direct=True, at_read=20),
    ]
    for _ in range(8):
        for plan in source.sample(plans, 2):
            plan()
        error = await bench.read(n_reads=source.choice([1, 4, 16]))
        assert error is None or isinstance(error, ReadError)
    bench.faults.lift()
    assert await bench.read(n_reads=8) is None
    assert bench.counters.bytes_read >= len(bench.data)
    await bench.aclose()
