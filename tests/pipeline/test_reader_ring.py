"""The reader through io_uring, and the choice between backends."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import gc
import logging
import mmap
import os
import random
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio
from conformance.reader import (
    SECTOR,
    Landing,
    Outcome,
    ReaderConformance,
    check_owned_from_done_on,
    span,
    write_files,
)
from rings import GateRing, JudgedRing, needs_ring

import aprefetch.pipeline.reader as reader_module
from aprefetch import Runtime
from aprefetch.errors import ConfigError, ReadError
from aprefetch.pipeline.io.uring import Ring, RingRefused
from aprefetch.pipeline.io.workers import WorkerRing
from aprefetch.pipeline.io.wrappers import Drive, FaultFiles, PacedFiles, RecordingFiles
from aprefetch.pipeline.reader import (
    Priority,
    ReadCancelled,
    ReadJob,
    RingReader,
    ThreadReader,
    make_reader,
)
from aprefetch.stats import Counters
from aprefetch.types import AlignedRead, ExpertKey


@needs_ring
class TestRing(ReaderConformance):
    def make(self, paths: Sequence[Path], counters: Counters, **options: Any) -> RingReader:
        return RingReader(paths, counters=counters, **options)


@needs_ring
class TestRingPaced(ReaderConformance):
    """Reads come before their timers."""

    def make(self, paths: Sequence[Path], counters: Counters, **options: Any) -> RingReader:
        files = PacedFiles(None, bytes_per_s=1e9, latency_s=5e-4)
        return RingReader(paths, counters=counters, files=files, **options)


@needs_ring
class TestRingLate(ReaderConformance):
    """Timers come before their reads."""

    def make(self, paths: Sequence[Path], counters: Counters, **options: Any) -> RingReader:
        files = PacedFiles(None, bytes_per_s=1e15)
        return RingReader(paths, counters=counters, files=files, **options)


class TestWorkers(ReaderConformance):
    """Threads of compiled code instead of the kernel's ring."""

    def make(self, paths: Sequence[Path], counters: Counters, **options: Any) -> RingReader:
        return RingReader(paths, counters=counters, make_ring=WorkerRing, **options)


class TestWorkersPaced(ReaderConformance):
    """With timers, where no ring is to be had for them either."""

    def make(self, paths: Sequence[Path], counters: Counters, **options: Any) -> RingReader:
        files = PacedFiles(None, bytes_per_s=1e9, latency_s=5e-4)
        with mock.patch("aprefetch.pipeline.io.ring_reader.Ring", refuse):
            return RingReader(
                paths, counters=counters, files=files, make_ring=WorkerRing, **options
            )


class Bench:
    """A ring reader whose outcomes wait at a gate."""

    def __init__(self, paths: Sequence[Path], queue_depth: int, **options: Any) -> None:
        self.counters = Counters()
        rings: list[GateRing] = []

        def make_ring(*sizes: int) -> GateRing:
            rings.append(GateRing(*sizes))
            return rings[0]

        self.reader = RingReader(
            paths,
            counters=self.counters,
            queue_depth=queue_depth,
            make_ring=make_ring,
            **options,
        )
        (self.ring,) = rings
        self.ring.reader = self.reader
        self.outcome = Outcome()

    def submit(
        self, n: int, view: memoryview, priority: Priority = Priority.DEMAND, n_reads: int = 1
    ) -> ReadJob:
        """A job of the sectors from `n`."""
        reads = [span(0, (n + i) * SECTOR, SECTOR, i * SECTOR) for i in range(n_reads)]
        job = ReadJob(ExpertKey(0, n), reads, view, priority, self.outcome.done)
        self.reader.submit(job)
        return job


@pytest_asyncio.fixture
async def gated() -> AsyncIterator[Callable[..., Bench]]:
    """Makes benches, and closes them."""
    benches: list[Bench] = []

    def make(paths: Sequence[Path], queue_depth: int, **options: Any) -> Bench:
        benches.append(Bench(paths, queue_depth, **options))
        return benches[-1]

    yield make
    for bench in benches:
        if bench.ring.fd >= 0:
            bench.ring.open_gate()
        await bench.reader.aclose()


@needs_ring
async def test_requests_are_direct_and_land_in_the_buffer(gated: Any, tmp_path: Path) -> None:
    ((path, data),) = write_files(tmp_path, [100_000])
    bench, landing = gated([path], 4), Landing(8 * SECTOR)
    reads = [span(0, 5000, 9000, 0), span(0, 99_000, 1000, 4 * SECTOR)]
    job = ReadJob(ExpertKey(0, 0), reads, landing.view, Priority.DEMAND, bench.outcome.done)
    bench.reader.submit(job)
    statistics = bench.reader.statistics()
    assert (statistics.backend, statistics.n_direct) == ("io_uring", 1)
    assert [(r.offset, r.length) for r in bench.ring.requests] == [
        (read.offset, read.length) for read in reads
    ]
    base = bench.ring.requests[0].address
    for read, request in zip(reads, bench.ring.requests, strict=True):
        assert request.address == base + read.landing_offset
        assert request.address % SECTOR == 0
        assert fcntl.fcntl(request.fd, fcntl.F_GETFL) & os.O_DIRECT
    bench.ring.open_gate()
    await bench.outcome.wait(1)
    assert landing.view[: 3 * SECTOR] == data[SECTOR : 4 * SECTOR]
    assert not any(t.name == "aprefetch-mend" for t in threading.enumerate())


@needs_ring
async def test_urgent_reads_go_first(gated: Any, tmp_path: Path) -> None:
    ((path, _),) = write_files(tmp_path, [40 * SECTOR])
    bench, view = gated([path], 1), Landing(SECTOR).view
    bench.submit(39, view)
    guesses = [bench.submit(n, view, Priority.GUESS) for n in (0, 1, 2, 3)]
    exact = [bench.submit(n, view, Priority.EXACT) for n in (10, 11)]
    for n in (20, 21):
        bench.submit(n, view)
    bench.reader.promote(guesses[2], Priority.DEMAND)
    bench.reader.promote(exact[0], Priority.GUESS)  # never less urgent
    bench.reader.cancel(guesses[0])
    assert bench.reader.statistics().queued == 7
    bench.ring.open_gate()
    await bench.outcome.wait(9)
    order = [request.offset // SECTOR for request in bench.ring.requests]
    assert order == [39, 20, 21, 2, 10, 11, 1, 3]  # 2 is read once, 0 never
    assert isinstance(bench.outcome.errors[guesses[0]], ReadCancelled)


@needs_ring
async def test_depth_is_reached_and_never_passed(gated: Any, tmp_path: Path) -> None:
    ((path, _),) = write_files(tmp_path, [64 * SECTOR])
    bench, view = gated([path], 4), Landing(8 * SECTOR).view
    for n in range(8):
        bench.submit(8 * n, view, n_reads=8)
    statistics = bench.reader.statistics()
    assert (statistics.in_flight, statistics.queued, len(bench.ring.requests)) == (4, 60, 4)
    bench.ring.open_gate()
    await bench.outcome.wait(8)
    assert bench.reader.statistics().max_in_flight == bench.counters.max_in_flight == 4
    assert bench.counters.reads == len(bench.ring.requests) == 64
    assert bench.counters.bytes_read == 64 * SECTOR


@needs_ring
async def test_a_cancelled_read_in_flight_still_lands(gated: Any, tmp_path: Path) -> None:
    ((path, data),) = write_files(tmp_path, [8 * SECTOR])
    bench, landing = gated([path], 1), Landing(2 * SECTOR)
    job = bench.submit(0, landing.view, n_reads=2)
    bench.reader.cancel(job)
    await asyncio.sleep(0.01)
    assert not bench.outcome.order  # the kernel may still write into the buffer
    assert bench.reader.statistics().queued == 0
    bench.ring.open_gate()
    await bench.outcome.wait(1)
    assert isinstance(bench.outcome.errors[job], ReadCancelled)
    assert landing.view[:SECTOR] == data[:SECTOR]
    assert landing.view[SECTOR] == 0xA5  # the second read was dropped
    assert bench.submit(0, landing.view, n_reads=2)
    await bench.outcome.wait(2)
    assert landing.view[: 2 * SECTOR] == data[: 2 * SECTOR]


@needs_ring
async def test_closing_waits_for_what_is_in_flight(gated: Any, tmp_path: Path) -> None:
    ((path, _),) = write_files(tmp_path, [8 * SECTOR])
    n_before = len(os.listdir("/proc/self/fd"))
    bench, view = gated([path], 2), Landing(SECTOR).view
    jobs = [bench.submit(n, view) for n in range(6)]
    closing = asyncio.ensure_future(bench.reader.aclose())
    await bench.outcome.wait(4)
    await asyncio.sleep(0.01)
    assert not closing.done()
    closing.cancel()  # who waits may give up; the closing goes on
    await asyncio.gather(closing, return_exceptions=True)
    bench.ring.open_gate()
    await bench.reader.aclose()
    assert set(bench.outcome.errors) == set(jobs)
    assert len(os.listdir("/proc/self/fd")) == n_before


@needs_ring
async def test_several_files_are_read_at_once(gated: Any, tmp_path: Path) -> None:
    files = write_files(tmp_path, [16 * SECTOR, 16 * SECTOR])
    bench, landing = gated([path for path, _ in files], 8), Landing(8 * SECTOR)
    reads = [span(n % 2, n * SECTOR, SECTOR, n * SECTOR) for n in range(8)]
    job = ReadJob(None, reads, landing.view, Priority.DEMAND, bench.outcome.done)
    bench.reader.submit(job)
    assert len({request.fd for request in bench.ring.open.values()}) == 2
    assert bench.reader.statistics().in_flight == 8
    bench.ring.open_gate()
    await bench.outcome.wait(1)
    for n in range(8):
        at = slice(n * SECTOR, (n + 1) * SECTOR)
        assert landing.view[at] == files[n % 2][1][at]


@needs_ring
async def test_a_file_cut_short_is_a_read_error_and_no_end(gated: Any, tmp_path: Path) -> None:
    files = write_files(tmp_path, [8 * SECTOR, 3 * SECTOR + 5])
    bench, landing = gated([path for path, _ in files], 2), Landing(4 * SECTOR)
    bench.ring.open_gate()
    os.truncate(files[0][0], 5 * SECTOR)
    bad = bench.submit(4, landing.view, n_reads=2)
    end = span(1, 2 * SECTOR, SECTOR + 5, 2 * SECTOR)  # the last read of a file is short
    good = ReadJob(None, [end], landing.view, Priority.DEMAND, bench.outcome.done)
    bench.reader.submit(good)
    await bench.outcome.wait(2)
    error = bench.outcome.errors[bad]
    assert isinstance(error, ReadError)
    assert "changed while running" in str(error)
    assert error.key == (0, 4)
    assert bench.outcome.errors[good] is None
    assert landing.view[2 * SECTOR : 3 * SECTOR + 5] == files[1][1][2 * SECTOR :]


@needs_ring
async def test_reads_longer_than_one_call_may_move(gated: Any, tmp_path: Path) -> None:
    ((path, data),) = write_files(tmp_path, [10 * SECTOR + 5])
    bench = gated([path], 2, largest_transfer_bytes=3 * SECTOR + 100)
    landing, read = Landing(11 * SECTOR), span(0, 0, len(data), 0)
    bench.reader.submit(ReadJob(None, [read], landing.view, Priority.DEMAND, bench.outcome.done))
    await bench.outcome.wait(1)
    assert landing.view[: len(data)] == data
    assert bench.counters.reads == 4
    assert not bench.ring.requests


@needs_ring
async def test_nobody_holds_the_buffer_after_done(tmp_path: Path) -> None:
    ((path, _),) = write_files(tmp_path, [SECTOR])
    reader, outcome = RingReader([path], counters=Counters()), Outcome()
    memory = mmap.mmap(-1, 2 * SECTOR)
    view = memoryview(memory)
    past_the_end = AlignedRead(
        file=0, offset=SECTOR, length=SECTOR, needed=9, landing_offset=SECTOR
    )
    for reads in ([span(0, 0, 9, 0)], [past_the_end]):
        reader.submit(ReadJob(None, reads, view, Priority.DEMAND, outcome.done))
    await outcome.wait(2)
    outcome.errors.clear()
    outcome.order.clear()
    await reader.aclose()
    view.release()
    gc.collect()
    memory.close()  # BufferError while anybody holds a view


class StingyRing(JudgedRing):
    """A kernel that takes the first of the requests, and lacks memory for the others."""

    def submit(self) -> Sequence[int]:
        n_queued, first = self._n_queued, self._tail
        if n_queued <= 1:
            return super().submit()
        self._n_queued = 1
        assert not super().submit()
        left = [(first + i) & self._request_mask for i in range(1, n_queued)]
        tags = [int.from_bytes(self._requests[64 * i + 32 : 64 * i + 40], "little") for i in left]
        for tag in tags:
            del self.open[tag]
        return tags


@needs_ring
async def test_what_the_kernel_does_not_take_is_read_all_the_same(tmp_path: Path) -> None:
    ((path, data),) = write_files(tmp_path, [8 * SECTOR])
    counters, outcome, landing = Counters(), Outcome(), Landing(8 * SECTOR)
    reader = RingReader([path], counters=counters, make_ring=StingyRing)
    reads = [span(0, n * SECTOR, SECTOR, n * SECTOR) for n in range(8)]
    for n in range(3):
        job = ReadJob(None, reads, landing.view, Priority.DEMAND, outcome.done)
        reader.submit(job)
        assert not outcome.errors.get(job)
        await outcome.wait(n + 1)
        assert outcome.errors[job] is None
        assert landing.view == data
    assert counters.reads == 24
    await reader.aclose()


@needs_ring
@pytest.mark.parametrize("error", [errno.ECANCELED, errno.EINVAL, errno.EOPNOTSUPP])
async def test_a_ring_that_refuses_reads_is_not_the_file_system(tmp_path: Path, error: int) -> None:
    """Direct reads go on by other means: nothing has said that the file system refuses them."""

    class Refusing(Ring):
        def reap(self) -> list[tuple[int, int]]:
            return [(tag, -error) for tag, _ in super().reap()]

    ((path, data),) = write_files(tmp_path, [8 * SECTOR])
    counters, outcome, landing = Counters(), Outcome(), Landing(8 * SECTOR)
    reader = RingReader([path], counters=counters, make_ring=Refusing)
    reads = [span(0, n * SECTOR, SECTOR, n * SECTOR) for n in range(8)]
    reader.submit(ReadJob(None, reads, landing.view, Priority.DEMAND, outcome.done))
    await outcome.wait(1)
    assert outcome.errors[outcome.order[0]] is None
    assert landing.view == data
    assert (counters.reads, counters.fallback_count, counters.io_errors) == (8, 0, 0)
    assert reader.statistics().n_direct == 1
    await reader.aclose()


@needs_ring
async def test_no_thread_to_be_had_is_a_read_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((path, _),) = write_files(tmp_path, [SECTOR])
    counters, outcome, landing = Counters(), Outcome(), Landing(2 * SECTOR)
    reader = RingReader([path], counters=counters)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    past_the_end = AlignedRead(file=0, offset=0, length=2 * SECTOR, needed=5000, landing_offset=0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        reader.submit(ReadJob(None, [past_the_end], landing.view, Priority.DEMAND, outcome.done))
        await outcome.wait(1)
    error = outcome.errors[outcome.order[0]]
    assert isinstance(error, ReadError)
    assert "for want of a thread" in str(error)
    assert counters.io_errors == 1
    job = ReadJob(None, [past_the_end], landing.view, Priority.DEMAND, outcome.done)
    reader.submit(job)
    await outcome.wait(2)
    assert "ends early" in str(outcome.errors[job])
    await reader.aclose()


@needs_ring
async def test_the_ring_takes_back_what_was_not_submitted() -> None:
    """A refusing system call leaves the ring as if nothing had been queued."""
    ring = Ring(8)
    real, ring._syscall = ring._syscall, lambda *_: -1
    ring.wake(7, 0)
    ring.wake(9, 0)
    assert list(ring.submit()) == [7, 9]
    ring._syscall = real
    ring.wake(11, 0)
    assert not ring.submit()
    async with asyncio.timeout(20):
        while not (ended := ring.reap()):  # noqa: ASYNC110 - a descriptor sets no event
            await asyncio.sleep(0.001)
    assert ended == [(11, -errno.ETIME)]
    ring.close()
    ring.close()


def test_a_drive_tells_when_reads_are_due() -> None:
    drive = Drive(bytes_per_s=1e9, latency_s=1e-6)  # a byte per ns
    assert drive.due_ns(1000, 500) == 2500
    assert drive.due_ns(1100, 500) == 3000  # after the first
    assert drive.due_ns(9000, 100) == 10_100  # idle in between


@needs_ring
async def test_paced_reads_are_due_in_order_and_never_early(tmp_path: Path) -> None:
    """Due in the order of dispatch, however they land; told when due, or later if they are late."""
    ((path, data),) = write_files(tmp_path, [16 * SECTOR])
    files = PacedFiles(None, bytes_per_s=1e8, latency_s=1e-3)
    due: list[int] = []
    plan = files.drive.due_ns

    def noted(now_ns: int, n_bytes: int) -> int:
        due.append(plan(now_ns, n_bytes))
        return due[-1]

    files.drive.due_ns = noted  # type: ignore[method-assign]
    reader = RingReader([path], counters=Counters(), files=files, queue_depth=16)
    outcome, landing, told = Outcome(), Landing(16 * SECTOR), {}

    def done(job: ReadJob, error: BaseException | None) -> None:
        told[job] = time.perf_counter_ns()
        outcome.done(job, error)

    jobs = [
        ReadJob(None, [span(0, n * SECTOR, SECTOR, n * SECTOR)], landing.view, Priority(0), done)
        for n in range(16)
    ]
    for job in jobs:
        reader.submit(job)
    await outcome.wait(16)
    await reader.aclose()
    assert landing.view == data
    assert len(due) == 16
    assert due[0] == jobs[0].start_ns + 1_000_000 + SECTOR * 10
    assert all(after - before >= SECTOR * 10 - 1 for before, after in pairwise(due))
    assert all(told[job] >= at for job, at in zip(jobs, due, strict=True))


@needs_ring
@pytest.mark.parametrize("paced", [False, True])
def test_on_uvloop_and_when_the_loop_is_busy(tmp_path: Path, paced: bool) -> None:
    uvloop = pytest.importorskip("uvloop")
    ((path, data),) = write_files(tmp_path, [20 * SECTOR])

    async def main() -> None:
        outcome, landing = Outcome(), Landing(20 * SECTOR)
        files = PacedFiles(None, bytes_per_s=1e9, latency_s=1e-4) if paced else None
        reader = RingReader([path], counters=Counters(), files=files)
        for n in range(20):
            read = span(0, n * SECTOR, SECTOR, n * SECTOR)
            reader.submit(
                ReadJob(ExpertKey(0, n), [read], landing.view, Priority.DEMAND, outcome.done)
            )
            sum(range(20_000))
        await outcome.wait(20)
        assert landing.view == data
        await reader.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@needs_ring
@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_written_after_done(tmp_path: Path, seed: int) -> None:
    """Random submits, promotions, cancels and faults: a buffer is its owner's from `done` on."""
    source = random.Random(seed)
    ((path, data),) = write_files(tmp_path, [40 * SECTOR])
    faults = FaultFiles()
    faults.is_transparent = True  # the ring sees to it
    reader = RingReader(
        [path],
        counters=Counters(),
        files=faults,
        queue_depth=source.randint(1, 6),
        backoff_s=0.0,
        make_ring=lambda *sizes: JudgedRing(*sizes, faults=faults),
    )

    def upset() -> None:
        if source.random() < 0.1:
            faults.fail(source.choice([errno.EBADF, errno.EIO]))
        if source.random() < 0.1:
            faults.shorten(source.randrange(SECTOR))

    await check_owned_from_done_on(reader, data, source, upset, rest=(0.3, 0.0005), is_drained=True)


def refuse(*sizes: int) -> Ring:
    raise RingRefused(errno.EPERM, "io_uring is forbidden here")


class TestChoice:
    """Which backend is made."""

    @pytest.fixture(autouse=True)
    def as_always(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(reader_module, "AUTO", ("io_uring", "threads"))
        monkeypatch.setattr(reader_module, "_said", set())
        ((self.path, _),) = write_files(tmp_path, [SECTOR])

    @needs_ring
    async def test_auto_takes_the_ring(self) -> None:
        for files in (None, PacedFiles(None, bytes_per_s=1e9)):
            reader = make_reader([self.path], counters=Counters(), files=files)
            assert isinstance(reader, RingReader)
            await reader.aclose()

    async def test_auto_takes_threads_where_the_ring_is_refused(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        counters = Counters()
        n_before = len(os.listdir("/proc/self/fd"))
        with caplog.at_level(logging.INFO, "aprefetch.pipeline.reader"):
            for _ in range(2):
                reader = make_reader([self.path], counters=counters, make_ring=refuse)
                assert isinstance(reader, ThreadReader)
                assert reader.statistics().backend == "threads"
                await reader.aclose()
        said = [r.getMessage() for r in caplog.records]
        assert said == ["reading with threads: io_uring is forbidden here"]
        assert counters.fallback_count == 0
        assert len(os.listdir("/proc/self/fd")) == n_before

    async def test_auto_takes_threads_where_every_read_must_be_seen(self) -> None:
        for files in (RecordingFiles(), PacedFiles(RecordingFiles(), bytes_per_s=1e12)):
            reader = make_reader([self.path], counters=Counters(), files=files)
            assert isinstance(reader, ThreadReader)
            await reader.aclose()

    async def test_what_is_forced_is_made_or_an_error(self) -> None:
        reader = make_reader([self.path], backend="threads", counters=Counters())
        assert isinstance(reader, ThreadReader)
        await reader.aclose()
        for options in ({"make_ring": refuse}, {"files": RecordingFiles()}):
            with pytest.raises(ConfigError, match=r"reader_backend='io_uring'.*'threads'"):
                make_reader([self.path], backend="io_uring", counters=Counters(), **options)

    @needs_ring
    async def test_a_loop_that_watches_no_descriptors(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def cannot(*_: Any) -> None:
            raise NotImplementedError

        loop = asyncio.get_running_loop()
        if not hasattr(loop, "__dict__"):
            pytest.skip("the loop cannot be changed")
        monkeypatch.setattr(loop, "add_reader", cannot)
        n_before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match="cannot watch"):
            make_reader([self.path], backend="io_uring", counters=Counters())
        assert len(os.listdir("/proc/self/fd")) == n_before

    @pytest.mark.parametrize(
        ("number", "words"),
        [(errno.ENOSYS, "no io_uring"), (errno.EPERM, "forbidden"), (errno.EINVAL, "set up")],
    )
    def test_refusals_say_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, number: int, words: str
    ) -> None:
        class Refusing:
            def __call__(self, *_: Any) -> int:
                return -1

        libc = types.SimpleNamespace(syscall=Refusing())
        monkeypatch.setattr("ctypes.PyDLL", lambda *_, **__: libc)
        monkeypatch.setattr("ctypes.get_errno", lambda: number)
        with pytest.raises(RingRefused, match=words) as caught:
            Ring(8)
        assert caught.value.errno == number


async def test_the_option_reaches_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await Runtime.open(device="cpu", reader_backend="threads") as runtime:
        assert runtime._reader.statistics().backend == "threads"
    monkeypatch.setattr(
        "aprefetch.runtime.make_reader", functools.partial(make_reader, make_ring=refuse)
    )
    with pytest.raises(ConfigError, match="reader_backend='io_uring'"):
        await Runtime.open(device="cpu", reader_backend="io_uring")
    with pytest.raises(ConfigError, match="backend must be one of"):
        await Runtime.open(device="cpu", reader_backend="aio")
