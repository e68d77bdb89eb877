"""Files that fail, wait, shuffle, keep a log or play a stated drive, around any other files.

For tests, studies and benchmarks. Wrappers compose: `FaultFiles(RecordingFiles(PosixFiles()))`.
Each knows the paths of the descriptors that were opened through it. All calls may come from any
thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from aprefetch.pipeline.io.threads import Files, FileStatus, PosixFiles, is_transparent

__all__ = [
    "DelayFiles",
    "Drive",
    "FaultFiles",
    "FilesWrapper",
    "GateFiles",
    "PacedFiles",
    "ReadRecord",
    "RecordingFiles",
    "ReorderFiles",
]


class FilesWrapper:
    """Passes everything on, and knows which path and mode a descriptor has."""

    is_transparent = False  # reads by other means than `preadv` would not be seen

    def __init__(self, inner: Files | None = None) -> None:
        self._inner: Files = inner if inner is not None else PosixFiles()
        self._lock = threading.Lock()
        self._opened: dict[int, tuple[Path, bool]] = {}

    def open(self, path: Path, *, direct: bool) -> int:
        """See `Files`."""
        fd = self._inner.open(path, direct=direct)
        with self._lock:
            self._opened[fd] = (path, direct)
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        return self._inner.preadv(fd, buffers, offset)

    def fstat(self, fd: int) -> FileStatus:
        """See `Files`."""
        return self._inner.fstat(fd)

    def close(self, fd: int) -> None:
        """See `Files`."""
        with self._lock:
            self._opened.pop(fd, None)
        self._inner.close(fd)

    @property
    def n_open(self) -> int:
        """Descriptors open at the moment."""
        with self._lock:
            return len(self._opened)


@dataclass(slots=True)
class _Fault:
    """One planned fault of reads; counts itself down."""

    errno: int  # 0: a short read
    short_bytes: int
    times: int  # how often still; negative for always
    path: Path | None
    offsets: range | None
    direct: bool | None
    at_read: int | None

    def strikes(self, path: Path, direct: bool, offset: int, length: int, n_read: int) -> bool:
        return (
            self.times != 0
            and (self.path is None or self.path == path)
            and (self.direct is None or self.direct == direct)
            and (self.at_read is None or n_read >= self.at_read)
            and (
                self.offsets is None
                or (offset < self.offsets.stop and self.offsets.start < offset + length)
            )
        )


class FaultFiles(FilesWrapper):
    """Fails as planned. Every plan can be narrowed to a path, an offset, a mode, a read.

    Common arguments of the planning methods:
        times: How many reads are hit; -1 for all until `lift`.
        path: Only this file.
        offsets: Only reads that touch these byte offsets.
        direct: Only direct, or only buffered, reads.
        at_read: Not before this read, counted from 0 over all files.
    """

    def __init__(self, inner: Files | None = None) -> None:
        super().__init__(inner)
        self.n_struck = 0
        self._n_reads = 0
        self._faults: list[_Fault] = []
        self._refusals: dict[bool, int] = {}
        self._sizes: dict[Path, int] = {}

    def fail(
        self,
        error: int = errno.EIO,
        *,
        times: int = 1,
        path: str | Path | None = None,
        offsets: range | None = None,
        direct: bool | None = None,
        at_read: int | None = None,
    ) -> None:
        """Reads raise OSError with this errno."""
        self._plan(_Fault(error, 0, times, _path(path), offsets, direct, at_read))

    def shorten(
        self,
        n_bytes: int,
        *,
        times: int = 1,
        path: str | Path | None = None,
        offsets: range | None = None,
        direct: bool | None = None,
        at_read: int | None = None,
    ) -> None:
        """Reads return at most `n_bytes`."""
        self._plan(_Fault(0, n_bytes, times, _path(path), offsets, direct, at_read))

    def refuse_open(self, error: int = errno.EINVAL, *, direct: bool = True) -> None:
        """Opening in this mode raises OSError with this errno."""
        with self._lock:
            self._refusals[direct] = error

    def truncate(self, path: str | Path, size: int) -> None:
        """Behave as if the file had been cut to `size` bytes just now."""
        with self._lock:
            self._sizes[Path(path)] = size

    def lift(self) -> None:
        """No faults from now on."""
        with self._lock:
            self._faults.clear()
            self._refusals.clear()
            self._sizes.clear()

    def _plan(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def open(self, path: Path, *, direct: bool) -> int:
        """See `Files`."""
        with self._lock:
            error = self._refusals.get(direct)
        if error is not None:
            raise OSError(error, os.strerror(error), str(path))
        return super().open(path, direct=direct)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        error, wanted = self._strike(fd, offset, sum(len(buffer) for buffer in buffers))
        if error:
            raise OSError(error, os.strerror(error))
        # Direct reads must keep an aligned length: read all, tell of less.
        return min(wanted, super().preadv(fd, buffers, offset)) if wanted else 0

    def judge(self, fd: int, offset: int, length: int, outcome: int) -> int:
        """What becomes of a read made by other means; outcomes are bytes or a negative errno."""
        error, wanted = self._strike(fd, offset, length)
        return -error if error else min(wanted, outcome)

    def _strike(self, fd: int, offset: int, length: int) -> tuple[int, int]:
        """The errno that a read raises, and the most bytes that it brings."""
        with self._lock:
            path, direct = self._opened[fd]
            n_read = self._n_reads
            self._n_reads += 1
            striking = (f for f in self._faults if f.strikes(path, direct, offset, length, n_read))
            fault = next(striking, None)
            if fault is not None:
                fault.times -= 1
                self.n_struck += 1
            end = self._sizes.get(path)
        wanted = length if fault is None or fault.errno else min(length, fault.short_bytes)
        if end is not None:
            wanted = max(0, min(wanted, end - offset))
        return (0 if fault is None else fault.errno), wanted

    def fstat(self, fd: int) -> FileStatus:
        """See `Files`."""
        status = super().fstat(fd)
        with self._lock:
            size = self._sizes.get(self._opened[fd][0])
        return status if size is None else FileStatus(size, status.mtime_ns + 1)


class DelayFiles(FilesWrapper):
    """Each read takes longer.

    Args:
        delay_s: Seconds, or a function of path, offset and length of the read.
    """

    def __init__(
        self, inner: Files | None, delay_s: float | Callable[[Path, int, int], float]
    ) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self.delayed_s = 0.0  # what was added in all

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        delay_s = self.delay_s
        with self._lock:
            path = self._opened[fd][0]
            if callable(delay_s):
                delay_s = delay_s(path, offset, sum(len(buffer) for buffer in buffers))
            self.delayed_s += delay_s
        if delay_s > 0:
            time.sleep(delay_s)
        return super().preadv(fd, buffers, offset)


class GateFiles(FilesWrapper):
    """Reads wait at a gate: for tests that must know what is in flight.

    The gate starts shut. `open_gate` lets all pass, now and later; `pass_one` lets one pass.
    """

    def __init__(self, inner: Files | None = None) -> None:
        super().__init__(inner)
        self._passes = threading.Condition()
        self._n_passes = 0
        self._is_open = False
        self.waiting: list[tuple[Path, int]] = []  # path and offset, in order of arrival

    def open_gate(self) -> None:
        """Let everything pass."""
        with self._passes:
            self._is_open = True
            self._passes.notify_all()

    def shut_gate(self) -> None:
        """Let nothing pass from now on."""
        with self._passes:
            self._is_open = False

    def pass_one(self) -> None:
        """Let one read pass: one of those that wait, or the next to come."""
        with self._passes:
            self._n_passes += 1
            self._passes.notify()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        with self._lock:
            path = self._opened[fd][0]
        with self._passes:
            self.waiting.append((path, offset))
            while not self._is_open and not self._n_passes:
                self._passes.wait()
            if not self._is_open:
                self._n_passes -= 1
            self.waiting.remove((path, offset))
        return super().preadv(fd, buffers, offset)


class ReorderFiles(FilesWrapper):
    """Shuffles the order in which reads finish, by waits that a seed determines."""

    def __init__(self, inner: Files | None = None, *, seed: int = 0, most_s: float = 0.003) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self._most_s = most_s

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        n = super().preadv(fd, buffers, offset)
        with self._lock:
            wait_s = self._random.random() * self._most_s
        time.sleep(wait_s)
        return n


class ReadRecord(NamedTuple):
    """One read, as it was asked for."""

    path: Path
    direct: bool
    offset: int
    length: int
    address: int  # of the buffer in memory
    n_bytes: int  # what came; -1 after an error


class RecordingFiles(FilesWrapper):
    """Keeps a log of opens and reads."""

    def __init__(self, inner: Files | None = None) -> None:
        super().__init__(inner)
        self.opens: list[tuple[Path, bool]] = []
        self.reads: list[ReadRecord] = []
        self.max_in_flight = 0
        self._n_in_flight = 0

    def open(self, path: Path, *, direct: bool) -> int:
        """See `Files`."""
        fd = super().open(path, direct=direct)
        self.opens.append((path, direct))
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        with self._lock:
            path, direct = self._opened[fd]
            self._n_in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._n_in_flight)
        n = -1
        try:
            n = super().preadv(fd, buffers, offset)
        finally:
            length = sum(len(buffer) for buffer in buffers)
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffers[0]))
            record = ReadRecord(path, direct, offset, length, address, n)
            with self._lock:
                self._n_in_flight -= 1
                self.reads.append(record)
        return n


class Drive:
    """When reads would be over on a drive of stated bandwidth and latency.

    Reads share the bandwidth one after the other; the latency of several overlaps.

    Args:
        bytes_per_s: Bandwidth of the drive.
        latency_s: Seconds that each read takes besides.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._ns_per_byte = 1e9 / bytes_per_s
        self._latency_ns = latency_s * 1e9
        self._free_from_ns = 0.0
        self._lock = threading.Lock()

    def due_ns(self, now_ns: int, n_bytes: int) -> int:
        """When a read of `n_bytes` that begins now is over. Any thread; calls in order."""
        with self._lock:
            begin_ns = max(self._free_from_ns, now_ns)
            self._free_from_ns = begin_ns + n_bytes * self._ns_per_byte
            return int(self._free_from_ns + self._latency_ns)


class PacedFiles(FilesWrapper):
    """Plays a `Drive`, where the real one is faster.

    Backends that make the reads themselves ask `drive` when to tell of each.
    """

    def __init__(self, inner: Files | None, *, bytes_per_s: float, latency_s: float = 0.0) -> None:
        super().__init__(inner)
        self.drive = Drive(bytes_per_s, latency_s)
        self.is_transparent = is_transparent(self._inner) and not hasattr(self._inner, "drive")

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See `Files`."""
        length = sum(len(buffer) for buffer in buffers)
        until_ns = self.drive.due_ns(time.perf_counter_ns(), length)
        n = super().preadv(fd, buffers, offset)
        left_ns = until_ns - time.perf_counter_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        return n


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)
