"""Read jobs, and the queue that every reader backend has.

A job is all reads of one object. Its reads are queued one by one in one heap for all files, so the
queue depth is spent across objects; a job is done when its last read has landed. `JobQueue` owns
the files, the queue and the accounts; its subclasses move the bytes, and call what is marked as
theirs. It holds no lock: a backend with threads puts one around what it shares with them.

Invariants: `job.done` is called exactly once, on the loop's thread, never from inside `submit`,
`promote` or `cancel`, and only when nothing writes into the job's buffer any more. At most
`queue_depth` reads are in flight. Counters are written on the loop's thread only.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from aprefetch.errors import AprefetchError, ConfigError, RuntimeClosedError
from aprefetch.pipeline.io.threads import Files, PosixFiles
from aprefetch.pipeline.io.transfer import LARGEST_TRANSFER_BYTES, OpenFile, Tally
from aprefetch.stats import Counters
from aprefetch.types import ALIGNMENT, AlignedRead, ExpertKey, align_up

__all__ = ["JobQueue", "Part", "Priority", "ReadCancelled", "ReadJob", "ReaderStatistics"]


class Priority(IntEnum):
    """Who waits for a read; the lower goes first."""

    DEMAND = 0  # a layer waits for it now
    EXACT = 1  # a layer will certainly want it (routed by token id)
    GUESS = 2  # a layer may want it


class ReadCancelled(AprefetchError):
    """Given to `done` of a job that was cancelled; never seen by users."""


class ReadJob:
    """All reads of one object, and where they land.

    Args:
        key: Names the object in errors; None for other bytes.
        reads: Where to read; `landing_offset` counts from the start of `buffer`.
        buffer: Writable, aligned in memory, at least up to the end of the last read. The reader
            writes to it from `submit` until `done`.
        done: Called with the job and the error, None if every byte is there.
    """

    __slots__ = (
        "_error",
        "_first_loss",
        "_n_open",
        "_parts",
        "_state",
        "buffer",
        "done",
        "end_ns",
        "key",
        "priority",
        "reads",
        "start_ns",
        "submit_ns",
    )

    def __init__(
        self,
        key: ExpertKey | None,
        reads: Sequence[AlignedRead],
        buffer: memoryview,
        priority: Priority,
        done: Callable[[ReadJob, BaseException | None], None],
    ) -> None:
        self.key = key
        self.reads = tuple(reads)
        self.buffer = buffer
        self.priority = priority
        self.done = done
        self.submit_ns = 0
        self.start_ns = 0  # first read began; 0 if none did
        self.end_ns = 0  # last read landed
        self._parts: list[Part] = []
        self._n_open = 0  # parts that are queued or in flight
        self._error: BaseException | None = None
        self._state = _NEW


_NEW, _OPEN, _DONE = 0, 1, 2
_QUEUED, _IN_FLIGHT, _OVER = 0, 1, 2


class Part:
    """One read of a job, or one slice of it."""

    __slots__ = ("address", "at", "file", "job", "length", "needed", "offset", "state")

    def __init__(
        self,
        job: ReadJob,
        file: OpenFile,
        at: int,
        length: int,
        offset: int,
        needed: int,
        address: int,
    ) -> None:
        self.job = job
        self.file = file
        self.at = at  # where in the job's buffer it lands
        self.length = length
        self.offset = offset  # in the file
        self.needed = needed
        self.address = address  # in memory
        self.state = _QUEUED

    @property
    def view(self) -> memoryview:
        """Where it lands. Not kept: an arena is freed when no view is left."""
        return self.job.buffer[self.at : self.at + self.length]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStatistics:
    """A snapshot of the reader."""

    backend: str  # "io_uring", "workers" or "threads"
    queue_depth: int
    queued: int  # reads waiting for their turn
    in_flight: int
    max_in_flight: int
    open_jobs: int  # submitted, `done` not yet called
    n_files: int
    n_direct: int  # files that are read past the page cache


class JobQueue:
    """What backends share: open files, jobs in order of priority, counters.

    Args:
        paths: The files that `AlignedRead.file` counts; each is opened once, here.
        counters: Written on the loop's thread.
        queue_depth: The most reads in flight; 1 to 64.
        slice_bytes: Cut longer reads into pieces of this size (rounded up to the alignment).
        alignment: Bytes; offsets, lengths and addresses are multiples of it.
        strict_direct, retries, backoff_s, largest_transfer_bytes: See `OpenFile`.
        files: The system calls.

    Raises:
        ReadError: A file cannot be opened.
        ConfigError: The alignment is no power of two.
    """

    backend = ""

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        counters: Counters,
        queue_depth: int = 8,
        strict_direct: bool = False,
        slice_bytes: int | None = None,
        alignment: int | None = None,
        retries: int = 2,
        backoff_s: float = 0.002,
        largest_transfer_bytes: int = LARGEST_TRANSFER_BYTES,
        files: Files | None = None,
    ) -> None:
        self.queue_depth = queue_depth
        self.alignment = alignment or ALIGNMENT
        if self.alignment & (self.alignment - 1):
            raise ConfigError(f"reader.alignment must be a power of two, got {self.alignment}")
        self._slice_bytes = align_up(slice_bytes, self.alignment) if slice_bytes else None
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._files: list[OpenFile] = []
        try:
            for path in paths:
                self._files.append(
                    OpenFile(
                        path,
                        files or PosixFiles(),
                        alignment=self.alignment,
                        strict_direct=strict_direct,
                        retries=retries,
                        backoff_s=backoff_s,
                        largest_transfer_bytes=largest_transfer_bytes,
                    )
                )
        except BaseException:
            self._close_files()
            raise
        counters.fallback_count += sum(file.fell_back for file in self._files)
        self._heap: list[tuple[int, int, Part]] = []
        self._sequence = 0
        self._n_queued = 0  # live entries of the heap
        self._n_in_flight = 0
        self._max_in_flight = 0
        self._finished: deque[ReadJob] = deque()
        self._tally = Tally()
        self._is_report_due = False
        self._is_closing = False
        self._open_jobs: set[ReadJob] = set()
        self._stopped: asyncio.Future[None] | None = None

    # -- for users, on the loop's thread ------------------------------------------------------

    def submit(self, job: ReadJob) -> None:
        """Queue the job's reads.

        Raises:
            RuntimeClosedError: After `aclose`.
            ValueError: A read or the buffer is not aligned, or does not fit.
        """
        self._enqueue(job, self._cut(job))

    def promote(self, job: ReadJob, priority: Priority) -> None:
        """Make what is still queued more urgent; nothing if it already is, or is over."""
        if priority >= job.priority:
            return
        job.priority = priority
        if job._state == _OPEN:
            self._push([part for part in job._parts if part.state == _QUEUED], priority)

    def cancel(self, job: ReadJob) -> None:
        """Drop what is queued. Reads in flight still land; then `done` gets `ReadCancelled`."""
        if job._state != _OPEN or job._n_open == 0:
            return
        self._fail(job, ReadCancelled("the read was cancelled"))
        if job._n_open == 0:
            self._finish(job)

    def statistics(self) -> ReaderStatistics:
        """A snapshot."""
        return ReaderStatistics(
            backend=self.backend,
            queue_depth=self.queue_depth,
            queued=self._n_queued,
            in_flight=self._n_in_flight,
            max_in_flight=self._max_in_flight,
            open_jobs=len(self._open_jobs),
            n_files=len(self._files),
            n_direct=sum(file.is_direct for file in self._files),
        )

    async def aclose(self) -> None:
        """Cancel what is queued, wait for what is in flight, close the files. Idempotent.

        A caller who is cancelled stops waiting; the closing goes on.
        """
        if self._stopped is None:
            self._stopped = self._loop.create_future()
            for job in list(self._open_jobs):
                self.cancel(job)
            self._begin_closing()
        await asyncio.shield(self._stopped)

    # -- for backends ---------------------------------------------------------------------------

    def _begin_closing(self) -> None:
        """Set `_is_closing`; see to it that `_end_closing` runs when nothing is in flight."""
        raise NotImplementedError

    def _end_closing(self) -> None:
        """Nothing is in flight: tell the last jobs, close the files."""
        self._report()
        self._close_files()
        assert self._stopped is not None
        self._stopped.set_result(None)

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def _call_loop(self, callback: Callable[..., None], *args: object) -> None:
        """Have the loop call, from any thread."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # a closed loop has nobody left to tell

    def _next(self) -> Part | None:
        """The most urgent read, in flight from now on; None if none is queued."""
        while self._heap:
            part = heapq.heappop(self._heap)[2]
            if part.state == _QUEUED:
                part.state = _IN_FLIGHT
                self._n_queued -= 1
                self._n_in_flight += 1
                if self._n_in_flight > self._max_in_flight:
                    self._max_in_flight = self._n_in_flight
                return part
        return None

    def _land(self, part: Part, error: BaseException | None, end_ns: int) -> None:
        """A read is over."""
        job = part.job
        part.state = _OVER
        self._n_in_flight -= 1
        job._n_open -= 1
        job.end_ns = end_ns
        if error is not None:
            self._fail(job, error)
        if job._n_open == 0:
            self._finish(job)

    def _collect(self) -> tuple[deque[ReadJob], Tally, int]:
        """What there is to report, and begin anew."""
        finished, tally = self._finished, self._tally
        self._finished, self._tally = deque(), Tally()
        self._is_report_due = False
        return finished, tally, self._max_in_flight

    def _report(self) -> None:
        """Count what was done, and tell whose jobs are done."""
        finished, tally, max_in_flight = self._collect()
        counters = self._counters
        counters.reads += tally.reads
        counters.bytes_read += tally.bytes_read
        counters.io_errors += tally.io_errors
        counters.io_retries += tally.io_retries
        counters.short_reads += tally.short_reads
        counters.fallback_count += tally.fallbacks
        counters.max_in_flight = max(counters.max_in_flight, max_in_flight)
        for job in finished:
            self._open_jobs.discard(job)
            job._state = _DONE
            try:
                job.done(job, job._error)
            except Exception as error:  # the others must hear of theirs all the same
                context = {"message": f"done of read job {job.key} failed", "exception": error}
                self._loop.call_exception_handler(context)

    # -- inner ------------------------------------------------------------------------------------

    def _cut(self, job: ReadJob) -> list[Part]:
        """The job's reads as parts. Alignment is checked here: kernels differ in what they take."""
        if self._is_closing:
            raise RuntimeClosedError("the reader is closed")
        if job._state != _NEW:
            raise ValueError("a read job is submitted once")
        n_bytes = len(job.buffer)
        # Never of a slice: one call per object is what an address costs.
        address = ctypes.addressof(ctypes.c_char.from_buffer(job.buffer)) if n_bytes else 0
        bits = address
        parts = []
        for read in job.reads:
            bits |= read.offset | read.length | read.landing_offset
            end = read.landing_offset + read.length
            if end > n_bytes or not 0 < read.needed <= read.length:
                raise ValueError(f"{read} does not fit into a buffer of {n_bytes} bytes")
            file = self._files[read.file]
            step = self._slice_bytes or read.length
            for start in range(0, read.needed, step):
                at = read.landing_offset + start
                length = min(step, end - at)
                needed = min(read.needed - start, length)
                parts.append(Part(job, file, at, length, read.offset + start, needed, address + at))
        if bits & (self.alignment - 1):
            raise ValueError(f"job {job.key}: reads or buffer not aligned to {self.alignment}")
        return parts

    def _enqueue(self, job: ReadJob, parts: list[Part]) -> None:
        job.submit_ns = time.perf_counter_ns()
        job._parts = parts
        job._n_open = len(parts)
        job._state = _OPEN
        self._open_jobs.add(job)
        if not parts:
            self._finish(job)
            return
        self._push(parts, job.priority)
        self._n_queued += len(parts)

    def _push(self, parts: Sequence[Part], priority: Priority) -> None:
        for part in parts:
            heapq.heappush(self._heap, (priority, self._sequence, part))
            self._sequence += 1
        # Promoted and cancelled reads leave dead entries behind; they hold on to buffers.
        if len(self._heap) > 4 * (self._n_queued + len(parts)) + 64:
            self._heap = [entry for entry in self._heap if entry[2].state == _QUEUED]
            heapq.heapify(self._heap)

    def _fail(self, job: ReadJob, error: BaseException) -> None:
        """Note the first error and drop what is queued."""
        if job._error is None:
            job._error = error
        for part in job._parts:
            if part.state == _QUEUED:
                part.state = _OVER
                job._n_open -= 1
                self._n_queued -= 1

    def _finish(self, job: ReadJob) -> None:
        job._parts = []
        self._finished.append(job)
        if not self._is_report_due:
            self._is_report_due = True
            self._schedule_report()

    def _schedule_report(self) -> None:
        """Have the loop call `_report`."""
        self._call_loop(self._report)
