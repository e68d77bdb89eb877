"""The backend of io_uring and its like: others read, the loop's thread does the rest.

Who reads are the kernel's workers (`uring`) or threads of compiled code (`workers`). No thread in
Python takes part, so no read waits for the interpreter's lock or takes it from the loop. Requests
are handed over as soon as there is room in the queue depth; the loop watches the ring's own
descriptor, which is readable while outcomes wait.

A read that brings all that is needed is over. Anything else (a short read, any error, a file that
has changed) goes to `OpenFile.fetch` with what came of it, on one thread that exists from the first
such read on: retries, falling back and errors are the same for every backend, and in one place.
Only that direct reads are refused it is not told, but finds out: the ring may be what refuses.

Files that play a drive (`PacedFiles`) are read at its pace: each read has a timer in a second ring,
which ends when the drive would be done, and the read is over when both are. The loop watches the
timers alone, unless a read is late: the drive that is played would not wake it twice.
"""

from __future__ import annotations

import errno
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from aprefetch.errors import ReadError
from aprefetch.pipeline.io.jobs import JobQueue, Part, ReadJob
from aprefetch.pipeline.io.threads import PosixFiles, is_transparent
from aprefetch.pipeline.io.transfer import REFUSALS, OpenFile, Tally
from aprefetch.pipeline.io.uring import Requests, Ring, RingRefused
from aprefetch.pipeline.io.workers import WorkerRing

__all__ = ["RingReader"]

_NOT_READ = -(1 << 31)  # instead of an outcome: the kernel did not take the request
_UNTOLD = frozenset({-number for number in REFUSALS} | {-errno.ECANCELED, _NOT_READ})
_TIMER = 1  # lowest bit of a tag; above it is the place

# Readers that are not closed: the kernel may be writing into buffers that they hold on to, and a
# loop that dies early would let go of them.
_alive: set[RingReader] = set()


class RingReader(JobQueue):
    """Reads through io_uring. Make it on a running event loop, whose thread owns it.

    Args:
        make_ring: Makes the ring, from the most requests that are open and the most reads at once.
        backend: What statistics call it.
        options: See `JobQueue`. `files` must be real ones, maybe paced.

    Raises:
        RingRefused: The kernel, the loop or `files` do not allow it.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        make_ring: Callable[[int, int], Requests] = Ring,
        backend: str = "io_uring",
        **options: Any,
    ) -> None:
        self.backend = backend
        files = options.get("files") or PosixFiles()
        if not is_transparent(files):
            raise RingRefused(0, f"{type(files).__name__} must see every read")
        depth = options.get("queue_depth", 8)
        drive = getattr(files, "drive", None)
        self._due_ns: Callable[[int, int], int] | None = None if drive is None else drive.due_ns
        self._ring = make_ring(depth, depth)
        self._timers: Requests | None = None
        try:
            super().__init__(paths, **options)
            try:
                self._watch()
            except BaseException:
                self._close_files()
                raise
        except BaseException:
            self._close_rings()
            raise
        # Requests that are open have a place each, the number of which is in their tag.
        self._parts: list[Part | None] = [None] * depth
        self._outcomes = [0] * depth
        self._n_awaited = [0] * depth  # outcomes: one, or two with a timer
        self._n_late = 0  # reads whose timer has ended before them
        self._places = list(range(depth))
        self._mender = _Mender(self._call_loop, self._mended)
        _alive.add(self)

    def _watch(self) -> None:
        if self._due_ns is not None:
            try:
                self._timers = Ring(self.queue_depth)
            except RingRefused:
                self._timers = WorkerRing(self.queue_depth)
        watched = self._ring if self._timers is None else self._timers
        try:
            self._loop.add_reader(watched.fd, self._reap)
        except NotImplementedError as error:
            text = f"{type(self._loop).__name__} cannot watch descriptors"
            raise RingRefused(0, text) from error

    def _close_rings(self) -> None:
        self._ring.close()
        if self._timers is not None:
            self._timers.close()

    def submit(self, job: ReadJob) -> None:
        """See `JobQueue`. What there is room for is with the kernel when this returns."""
        super().submit(job)
        if self._n_in_flight < self.queue_depth:
            self._dispatch()

    def _begin_closing(self) -> None:
        self._is_closing = True
        if self._n_in_flight == 0:
            self._loop.call_soon(self._end_closing)

    def _end_closing(self) -> None:
        if self._ring.fd < 0:
            return
        self._loop.remove_reader(self._ring.fd)
        if self._timers is not None:
            self._loop.remove_reader(self._timers.fd)
        self._close_rings()
        self._mender.close()
        _alive.discard(self)
        super()._end_closing()

    def _dispatch(self) -> None:
        """Hand the most urgent reads to the kernel, as many as there is room for."""
        ring, timers, due_ns = self._ring, self._timers, self._due_ns
        now_ns = time.perf_counter_ns()
        n_requests = 0
        while self._n_in_flight < self.queue_depth:
            part = self._next()
            if part is None:
                break
            file = part.file
            if part.job.start_ns == 0:
                part.job.start_ns = now_ns
            fd = file.descriptor
            if fd is None or part.length > file.largest_bytes:
                self._mender.mend(part, _NOT_READ)
                continue
            place = self._places.pop()
            self._parts[place] = part
            self._n_awaited[place] = 1
            ring.read(2 * place, fd, part.address, part.length, part.offset)
            if timers is not None and due_ns is not None:
                self._n_awaited[place] = 2
                timers.wake(2 * place + _TIMER, due_ns(now_ns, part.length))
            n_requests += 1
        if n_requests:
            for tag in ring.submit():
                self._arrive(tag, _NOT_READ)
            if timers is not None:
                for tag in timers.submit():
                    self._arrive(tag, 0)

    def _reap(self) -> None:
        """The ring's descriptor is readable: account for all that has ended."""
        self._is_report_due = True  # at the end
        checked: OpenFile | None = None  # for changes, after the reads that are accounted for
        now_ns = time.perf_counter_ns()
        ended = self._ring.reap()
        if self._timers is not None:
            ended += self._timers.reap()
        for tag, outcome in ended:
            part = self._arrive(tag, outcome)
            if part is None:
                continue
            n_bytes = self._outcomes[tag >> 1]
            if part.file is not checked and part.file.is_unchanged():
                checked = part.file
            if part.file is checked:
                self._tally.reads += 1
                self._tally.bytes_read += n_bytes
                self._land(part, None, now_ns)
            else:
                self._mender.mend(part, n_bytes)
        self._settle()

    def _arrive(self, tag: int, outcome: int) -> Part | None:
        """One outcome. Returns its read if that is over and all that is needed has come."""
        place = tag >> 1
        self._n_awaited[place] -= 1
        if tag & _TIMER:
            if self._n_awaited[place]:
                self._n_late += 1
                if self._n_late == 1:
                    self._loop.add_reader(self._ring.fd, self._reap)
                return None
        else:
            self._outcomes[place] = outcome
            if self._n_awaited[place]:
                return None
            if self._timers is not None:
                self._n_late -= 1
                if self._n_late == 0:
                    self._loop.remove_reader(self._ring.fd)
        part = self._parts[place]
        assert part is not None
        self._parts[place] = None
        self._places.append(place)
        outcome = self._outcomes[place]
        if outcome >= part.needed:
            return part
        self._mender.mend(part, outcome)
        return None

    def _mended(self, part: Part, error: BaseException | None, tally: Tally, end_ns: int) -> None:
        self._tally.add(tally)
        self._is_report_due = True  # by `_settle`
        self._land(part, error, end_ns)
        self._settle()

    def _settle(self) -> None:
        """Some reads are over: begin others, then tell."""
        if self._n_queued:
            self._dispatch()
        self._report()
        if self._is_closing and self._n_in_flight == 0:
            self._end_closing()

    def _schedule_report(self) -> None:
        self._loop.call_soon(self._report)


class _Mender:
    """One thread that brings to an end what a request did not; started when first needed."""

    def __init__(self, call_loop: Callable[..., None], mended: Callable[..., None]) -> None:
        self._call_loop = call_loop
        self._mended = mended
        self._queue: SimpleQueue[tuple[Part, int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def mend(self, part: Part, outcome: int) -> None:
        """Fetch `part`, whose first read came to `outcome`. `mended` is called on the loop."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="aprefetch-mend", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system's limit; the job must hear of it
                failed = ReadError(
                    f"cannot be read again, for want of a thread: {error}",
                    path=part.file.path,
                    offset=part.offset,
                    length=part.length,
                    errno=errno.EAGAIN,
                    key=part.job.key,
                )
                now_ns = time.perf_counter_ns()
                self._call_loop(self._mended, part, failed, Tally(io_errors=1), now_ns)
                return
            self._thread = thread
        self._queue.put((part, outcome))

    def close(self) -> None:
        """End the thread; it has nothing to do."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            part, outcome = task
            error: BaseException | None = None
            tally = Tally()
            first = None if outcome in _UNTOLD else outcome
            try:
                part.file.fetch(part.view, part.offset, part.needed, tally, part.job.key, first)
            except BaseException as caught:  # whatever it is, the job must hear of it
                traceback.clear_frames(caught.__traceback__)  # they hold views of the buffer
                error = caught
            self._call_loop(self._mended, part, error, tally, time.perf_counter_ns())
            del part, error, task  # nothing may hold on to the buffer
