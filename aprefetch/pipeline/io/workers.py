"""Threads that read without Python: the same requests and outcomes as a `Ring`, anywhere.

Each thread runs one compiled loop from its start to its end: it sleeps on a pipe, reads what it is
told to, and writes the outcome to a pipe that the event loop watches. It never takes the
interpreter's lock, which a thread in Python needs half a dozen times per read, each time taking it
from the loop. For kernels and sandboxes without io_uring, and for files whose bytes the kernel
copies: io_uring's own workers copy those of one submission one after the other.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from aprefetch.pipeline.io.uring import RingRefused

__all__ = ["WorkerRing"]

_QUIT, _READ, _WAKE = 0, 1, 2
_REQUEST = struct.Struct("<6q")  # what, tag, descriptor, address, length, offset
_WAKE_AT = struct.Struct("<6q")  # what, tag, seconds, nanoseconds, 0, 0
_OUTCOME = struct.Struct("<3q")  # tag, bytes read or a negative errno, thread


class WorkerRing:
    """As many threads as there may be requests open; see `Ring` for what the methods do.

    Raises:
        RingRefused: not on Linux, or numba is missing.
    """

    def __init__(self, n_requests: int, n_workers: int | None = None) -> None:
        if sys.platform != "linux" or sys.byteorder != "little":
            raise RingRefused(0, "compiled reader threads are for Linux on little-endian machines")
        try:
            from aprefetch.pipeline.io.worker_loop import serve
        except ImportError as error:
            raise RingRefused(0, f"no compiled reader threads: {error}") from error
        self.n_requests = n_requests
        self.fd, self._reply_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self._pipes: list[int] = []  # to each thread
        self._threads: list[threading.Thread] = []
        self._idle = list(range(n_requests))[::-1]
        self._queued: list[tuple[int, bytes]] = []
        for i in range(n_requests):
            theirs, ours = os.pipe2(os.O_CLOEXEC)
            self._pipes.append(ours)
            thread = threading.Thread(
                target=_run, args=(serve, theirs, self._reply_fd, i), name=f"aprefetch-read-{i}",
                daemon=True,
            )  # fmt: skip
            self._threads.append(thread)
            thread.start()

    def read(self, tag: int, fd: int, address: int, length: int, offset: int) -> None:
        """Queue a read of `length` bytes at `offset` into memory at `address`."""
        record = _REQUEST.pack(_READ, tag, fd, address, length, offset)
        self._queued.append((self._idle.pop(), record))

    def wake(self, tag: int, due_ns: int) -> None:
        """Queue an outcome that comes at `due_ns` of `time.perf_counter_ns`."""
        record = _WAKE_AT.pack(_WAKE, tag, *divmod(due_ns, 1_000_000_000), 0, 0)
        self._queued.append((self._idle.pop(), record))

    def submit(self) -> Sequence[int]:
        """Hand over all that is queued; there is a thread for each."""
        queued, self._queued = self._queued, []
        for i, record in queued:
            os.write(self._pipes[i], record)
        return ()

    def reap(self) -> list[tuple[int, int]]:
        """(tag, bytes read or a negative errno) of what has ended."""
        ended = []
        with contextlib.suppress(BlockingIOError):
            records = os.read(self.fd, _OUTCOME.size * self.n_requests)
            for tag, outcome, thread in _OUTCOME.iter_unpack(records):
                self._idle.append(thread)
                ended.append((tag, outcome))
        return ended

    def close(self) -> None:
        """End the threads; no request may be open. Idempotent."""
        if self.fd < 0:
            return
        for pipe in self._pipes:
            os.write(pipe, _REQUEST.pack(_QUIT, 0, 0, 0, 0, 0))
        for thread in self._threads:
            thread.join()
        for fd in (*self._pipes, self._reply_fd, self.fd):
            os.close(fd)
        self.fd = -1


def _run(serve: Any, request_fd: int, reply_fd: int, number: int) -> None:
    """One thread's life. The records are arrays of Python's, so that they stay where they are."""
    request, reply = np.zeros(6, np.int64), np.zeros(3, np.int64)
    try:
        serve(request_fd, reply_fd, number, request, reply)
    finally:
        os.close(request_fd)
