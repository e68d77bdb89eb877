"""What every reader must do, whatever it is made of. Backends subclass `ReaderConformance`."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aprefetch.errors import ReadError, RuntimeClosedError
from aprefetch.pipeline.reader import Priority, ReadCancelled, Reader, ReadJob
from aprefetch.stats import Counters
from aprefetch.types import AlignedRead, ExpertKey, align_down, align_up

CANARY = 0xA5
SECTOR = 4096


class Landing:
    """Aligned memory with canaries around it."""

    def __init__(self, n_bytes: int, alignment: int = SECTOR) -> None:
        n_bytes = align_up(n_bytes, alignment)
        self._guard = alignment
        self._map = mmap.mmap(-1, n_bytes + 4 * alignment)
        whole = memoryview(self._map)
        whole[:] = bytes([CANARY]) * len(whole)
        # mmap is aligned to pages; more must be sought.
        import numpy as np

        address = np.frombuffer(whole, dtype=np.uint8).ctypes.data
        start = align_up(address, alignment) - address + alignment
        self.view = whole[start : start + n_bytes]
        self._before = whole[:start]
        self._after = whole[start + n_bytes :]

    def is_intact(self) -> bool:
        """Was nothing written outside of `view`?"""
        return all(set(bytes(v)) <= {CANARY} for v in (self._before, self._after))


class Outcome:
    """Takes `done` calls, and checks that they come once and on the loop's thread."""

    def __init__(self) -> None:
        self.errors: dict[ReadJob, BaseException | None] = {}
        self.order: list[ReadJob] = []
        self._thread = threading.get_ident()
        self._changed = asyncio.Event()

    def done(self, job: ReadJob, error: BaseException | None) -> None:
        assert threading.get_ident() == self._thread
        assert job not in self.errors, "done was called twice"
        self.errors[job] = error
        self.order.append(job)
        self._changed.set()

    async def wait(self, n_jobs: int) -> None:
        async with asyncio.timeout(20):
            while len(self.order) < n_jobs:
                self._changed.clear()
                await self._changed.wait()


def span(
    file: int, offset: int, n_bytes: int, landing: int, alignment: int = SECTOR
) -> AlignedRead:
    """The aligned read that covers bytes `offset .. offset + n_bytes` of a file."""
    start = align_down(offset, alignment)
    needed = offset + n_bytes - start
    return AlignedRead(
        file=file,
        offset=start,
        length=align_up(needed, alignment),
        needed=needed,
        landing_offset=landing,
    )


def write_files(folder: Path, sizes: Sequence[int], seed: int = 7) -> list[tuple[Path, bytes]]:
    """Files of random bytes."""
    source = random.Random(seed)
    out = []
    for i, size in enumerate(sizes):
        path = folder / f"part {i} é.bin"
        data = source.randbytes(size)
        path.write_bytes(data)
        out.append((path, data))
    return out


async def check_owned_from_done_on(
    reader: Any,
    data: bytes,
    source: random.Random,
    upset: Callable[[], object],
    *,
    rest: tuple[float, float] = (0.1, 0.001),
    is_drained: bool = False,
) -> None:
    """Random submits, promotions and cancels: a buffer is its owner's from `done` on.

    Closes the reader, whose one file has 40 sectors, `data`.

    Args:
        upset: plans faults, or not, after each submit.
        rest: how often the loop gets a rest, and seconds of it.
        is_drained: wait for all but a few jobs before closing.
    """
    landings: list[Landing] = []
    outcomes: list[type[BaseException] | None] = []
    open_jobs: list[ReadJob] = []

    def done(job: ReadJob, error: BaseException | None) -> None:
        if error is None:
            for read in job.reads:
                got = job.buffer[read.landing_offset :][: read.length]
                assert got == data[read.offset :][: read.length]
        outcomes.append(type(error) if error is not None else None)
        open_jobs.remove(job)
        job.buffer[:] = b"\x5a" * len(job.buffer)

    for n in range(150):
        landings.append(Landing(4 * SECTOR))
        reads = [
            span(0, source.randrange(40) * SECTOR, SECTOR, i * SECTOR)
            for i in range(source.randint(1, 4))
        ]
        priority = source.choice(list(Priority))
        job = ReadJob(ExpertKey(0, n), reads, landings[-1].view, priority, done)
        open_jobs.append(job)
        reader.submit(job)
        upset()
        if source.random() < 0.3:
            reader.cancel(source.choice(open_jobs))
        if source.random() < 0.3:
            reader.promote(source.choice(open_jobs), source.choice(list(Priority)))
        if source.random() < rest[0]:
            await asyncio.sleep(rest[1])
    if is_drained:
        async with asyncio.timeout(20):
            while len(open_jobs) > 10:  # noqa: ASYNC110 - closing cancels those that are left
                await asyncio.sleep(0.001)
    await reader.aclose()
    assert not open_jobs
    assert len(outcomes) == 150
    assert set(outcomes) <= {None, ReadCancelled, ReadError}
    assert None in outcomes, "how many are cancelled or fail is a matter of time; not all"
    assert all(landing.is_intact() for landing in landings)
    assert all(set(bytes(landing.view)) == {0x5A} for landing in landings)


def require_direct(folder: Path) -> None:
    """Skip the test where the file system refuses direct reads."""
    probe = folder / "probe"
    probe.write_bytes(bytes(SECTOR))
    try:
        fd = os.open(probe, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("the file system refuses direct reads")
    try:
        os.preadv(fd, [mmap.mmap(-1, SECTOR)], 0)
    except OSError:
        pytest.skip("the file system refuses direct reads")
    finally:
        os.close(fd)


class ReaderConformance:
    """Subclasses say how to make the reader; on a running loop."""

    def make(self, paths: Sequence[Path], counters: Counters, **options: Any) -> Reader:
        raise NotImplementedError

    @pytest.fixture
    def counters(self) -> Counters:
        return Counters()

    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[tuple[Path, bytes]]:
        return write_files(tmp_path, [300_000, 1_234_567, SECTOR])

    @pytest_asyncio.fixture
    async def build(
        self, parts: list[tuple[Path, bytes]], counters: Counters
    ) -> AsyncIterator[Callable[..., Reader]]:
        """Makes readers over `parts`, and closes them."""
        readers: list[Reader] = []

        def build(**options: Any) -> Reader:
            reader = self.make([path for path, _ in parts], counters, **options)
            readers.append(reader)
            return reader

        yield build
        for reader in readers:
            await reader.aclose()

    async def test_bytes_are_the_files_bytes(
        self, build: Callable[..., Reader], parts: list[tuple[Path, bytes]], counters: Counters
    ) -> None:
        reader, outcome, landing = build(), Outcome(), Landing(2_000_000)
        wanted = [(0, 10, 5000), (1, 1_000_000, 234_567), (2, 0, SECTOR), (1, 4095, 2)]
        reads, at = [], 0
        for file, offset, n_bytes in wanted:
            reads.append(span(file, offset, n_bytes, at))
            at += reads[-1].length
        key = ExpertKey(3, 4)
        job = ReadJob(key, reads, landing.view, Priority.DEMAND, outcome.done)
        reader.submit(job)
        assert not outcome.order  # never from inside submit
        await outcome.wait(1)
        assert outcome.errors[job] is None
        for (file, offset, n_bytes), read in zip(wanted, reads, strict=True):
            start = read.landing_offset + offset - read.offset
            assert landing.view[start : start + n_bytes] == parts[file][1][offset:][:n_bytes]
        assert landing.is_intact()
        assert job.submit_ns <= job.start_ns <= job.end_ns
        assert counters.reads == 4
        assert counters.bytes_read >= sum(read.needed for read in reads)
        assert counters.io_errors == counters.short_reads == counters.duplicate_reads == 0

    @pytest.mark.parametrize("slice_bytes", [None, SECTOR, 3 * SECTOR])
    @pytest.mark.parametrize("queue_depth", [1, 5])
    async def test_many_jobs_in_any_slices(
        self,
        build: Callable[..., Reader],
        parts: list[tuple[Path, bytes]],
        counters: Counters,
        slice_bytes: int | None,
        queue_depth: int,
    ) -> None:
        reader = build(slice_bytes=slice_bytes, queue_depth=queue_depth)
        outcome, source = Outcome(), random.Random(3)
        jobs: list[tuple[ReadJob, Landing, int, int, int]] = []
        for i in range(60):
            file = source.randrange(2)
            data = parts[file][1]
            offset = source.randrange(len(data))
            n_bytes = source.randint(1, min(40_000, len(data) - offset))
            landing = Landing(n_bytes + 2 * SECTOR)
            read = span(file, offset, n_bytes, SECTOR * (i % 2))
            if read.landing_offset + read.length > len(landing.view):
                read = span(file, offset, n_bytes, 0)
            priority = source.choice(list(Priority))
            job = ReadJob(ExpertKey(0, i), [read], landing.view, priority, outcome.done)
            jobs.append((job, landing, file, offset, n_bytes))
            reader.submit(job)
        await outcome.wait(60)
        for job, landing, file, offset, n_bytes in jobs:
            assert outcome.errors[job] is None
            start = job.reads[0].landing_offset + offset - job.reads[0].offset
            assert landing.view[start : start + n_bytes] == parts[file][1][offset:][:n_bytes]
            assert landing.is_intact()
        statistics = reader.statistics()
        assert (statistics.queued, statistics.in_flight, statistics.open_jobs) == (0, 0, 0)
        assert 1 <= statistics.max_in_flight <= queue_depth
        assert counters.max_in_flight == statistics.max_in_flight

    async def test_a_job_without_reads_is_done_at_once(self, build: Callable[..., Reader]) -> None:
        reader, outcome = build(), Outcome()
        job = ReadJob(None, [], Landing(SECTOR).view, Priority.DEMAND, outcome.done)
        reader.submit(job)
        assert not outcome.order
        await outcome.wait(1)
        assert outcome.errors[job] is None

    async def test_reading_past_the_end_fails_alone(
        self, build: Callable[..., Reader], parts: list[tuple[Path, bytes]], counters: Counters
    ) -> None:
        reader, outcome = build(), Outcome()
        bad_landing, good_landing = Landing(8 * SECTOR), Landing(SECTOR)
        read = AlignedRead(
            file=0,
            offset=align_down(300_000),
            length=8 * SECTOR,
            needed=8 * SECTOR,
            landing_offset=0,
        )
        bad = ReadJob(ExpertKey(1, 2), [read], bad_landing.view, Priority.DEMAND, outcome.done)
        good = ReadJob(
            ExpertKey(1, 3), [span(0, 0, 9, 0)], good_landing.view, Priority.GUESS, outcome.done
        )
        reader.submit(bad)
        reader.submit(good)
        await outcome.wait(2)
        error = outcome.errors[bad]
        assert isinstance(error, ReadError)
        assert error.path == parts[0][0]
        assert error.key == (1, 2)
        assert (error.offset, error.length) == (read.offset, read.length)
        assert "ends early" in str(error)
        assert outcome.errors[good] is None
        assert bad_landing.is_intact()
        assert counters.io_errors == 1

    async def test_truncation_and_change_while_running(
        self, build: Callable[..., Reader], parts: list[tuple[Path, bytes]]
    ) -> None:
        reader, outcome = build(), Outcome()
        os.truncate(parts[1][0], 500_000)
        with parts[2][0].open("r+b") as f:
            f.write(b"other")
        os.utime(parts[2][0], ns=(1, 1))
        for file, offset in ((1, 600_000), (1, 0), (2, 0)):
            read = span(file, offset, 100, 0)
            landing = Landing(2 * SECTOR).view
            reader.submit(
                ReadJob(ExpertKey(0, file), [read], landing, Priority.DEMAND, outcome.done)
            )
        await outcome.wait(3)
        for error in outcome.errors.values():
            assert isinstance(error, ReadError)
            assert "changed while running" in str(error)

    async def test_a_replaced_file_is_read_as_it_was_opened(
        self, build: Callable[..., Reader], parts: list[tuple[Path, bytes]], tmp_path: Path
    ) -> None:
        reader, outcome, landing = build(), Outcome(), Landing(2 * SECTOR)
        other = tmp_path / "other"
        other.write_bytes(b"?" * 300_000)
        other.replace(parts[0][0])
        job = ReadJob(None, [span(0, 0, 100, 0)], landing.view, Priority.DEMAND, outcome.done)
        reader.submit(job)
        await outcome.wait(1)
        assert outcome.errors[job] is None
        assert landing.view[:100] == parts[0][1][:100]

    async def test_cancel_after_the_end_and_twice(self, build: Callable[..., Reader]) -> None:
        reader, outcome, landing = build(queue_depth=1), Outcome(), Landing(SECTOR)
        jobs = [
            ReadJob(None, [span(0, 0, 9, 0)], landing.view, Priority.GUESS, outcome.done)
            for _ in range(50)
        ]
        for job in jobs:
            reader.submit(job)
        for job in jobs[10:]:
            reader.cancel(job)
            reader.cancel(job)
            reader.promote(job, Priority.DEMAND)
        assert not outcome.order
        await outcome.wait(50)
        kinds = [type(outcome.errors[job]) for job in jobs]
        assert kinds[:10] == [type(None)] * 10
        assert set(kinds[10:]) <= {ReadCancelled, type(None)}  # the reader may have been quicker
        for job in jobs:
            reader.cancel(job)
            reader.promote(job, Priority.DEMAND)
        assert reader.statistics().open_jobs == 0

    async def test_misaligned_jobs_are_refused(self, build: Callable[..., Reader]) -> None:
        reader, outcome, landing = build(), Outcome(), Landing(4 * SECTOR)
        sound = {"file": 0, "offset": 0, "length": SECTOR, "needed": 9, "landing_offset": 0}
        for change in (
            {"offset": 512},
            {"length": 1000},
            {"landing_offset": 8},
            {"landing_offset": 4 * SECTOR},
            {"needed": 0},
            {"needed": SECTOR + 1},
        ):
            read = AlignedRead(**(sound | change))
            job = ReadJob(None, [read], landing.view, Priority.DEMAND, outcome.done)
            with pytest.raises(ValueError, match=r"aligned|fit"):
                reader.submit(job)
        job = ReadJob(None, [AlignedRead(**sound)], landing.view[8:], Priority.DEMAND, outcome.done)
        with pytest.raises(ValueError, match="aligned"):
            reader.submit(job)
        assert reader.statistics().open_jobs == 0

    async def test_closing(self, build: Callable[..., Reader], counters: Counters) -> None:
        reader, outcome = build(queue_depth=2), Outcome()
        landings = [Landing(40_000) for _ in range(40)]
        jobs = [
            ReadJob(None, [span(1, 40_000 * i, 1, 0)], landing.view, Priority.DEMAND, outcome.done)
            for i, landing in enumerate(landings[:30])
        ]
        for job in jobs:
            reader.submit(job)
        first = asyncio.ensure_future(reader.aclose())
        await asyncio.sleep(0)
        first.cancel()  # who waits may give up; the closing goes on
        await asyncio.gather(first, return_exceptions=True)
        await reader.aclose()
        await reader.aclose()
        assert len(outcome.order) == 30
        late = ReadJob(None, [span(0, 0, 1, 0)], landings[-1].view, Priority.DEMAND, outcome.done)
        with pytest.raises(RuntimeClosedError):
            reader.submit(late)
        assert all(e is None or isinstance(e, ReadCancelled) for e in outcome.errors.values())
        assert all(landing.is_intact() for landing in landings)

    async def test_nothing_is_left_over(self, build: Callable[..., Reader]) -> None:
        threads = set(threading.enumerate())
        descriptors = set(os.listdir("/proc/self/fd"))
        reader, outcome, landing = build(), Outcome(), Landing(SECTOR)
        reader.submit(
            ReadJob(None, [span(0, 0, 9, 0)], landing.view, Priority.DEMAND, outcome.done)
        )
        await outcome.wait(1)
        await reader.aclose()
        assert set(threading.enumerate()) <= threads
        assert len(os.listdir("/proc/self/fd")) <= len(descriptors)

    async def test_a_missing_file(self, counters: Counters, tmp_path: Path) -> None:
        (tmp_path / "there").write_bytes(b"x")
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ReadError, match="cannot be opened") as caught:
            self.make([tmp_path / "there", tmp_path / "gone"], counters)
        assert caught.value.path == tmp_path / "gone"
        assert caught.value.errno is not None
        assert len(os.listdir("/proc/self/fd")) == before

    async def test_a_done_that_raises_does_not_stop_the_others(
        self, build: Callable[..., Reader]
    ) -> None:
        reader, outcome, landing = build(queue_depth=1), Outcome(), Landing(SECTOR)
        heard: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))

        def broken(job: ReadJob, error: BaseException | None) -> None:
            raise KeyError("broken")

        read = [span(0, 0, 9, 0)]
        reader.submit(ReadJob(None, read, landing.view, Priority.DEMAND, broken))
        reader.submit(ReadJob(None, read, landing.view, Priority.DEMAND, outcome.done))
        await outcome.wait(1)
        assert isinstance(heard[0]["exception"], KeyError)
