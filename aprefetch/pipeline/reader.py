"""Stage 2: bytes from files into landing slots, by priority, many at a time.

A `Reader` takes jobs and never looks at what their bytes mean. Backends do the same with different
means: `ThreadReader` blocks Python threads in positional reads; `RingReader` leaves the reads to
the kernel through io_uring, or to threads of compiled code ("workers"), and never contends for the
interpreter's lock. `io/jobs.py` has what they share, and what must hold; `make_reader` chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from aprefetch.errors import ConfigError
from aprefetch.pipeline.io.jobs import (
    JobQueue,
    Priority,
    ReadCancelled,
    ReaderStatistics,
    ReadJob,
)
from aprefetch.pipeline.io.ring_reader import RingReader
from aprefetch.pipeline.io.thread_reader import ThreadReader
from aprefetch.pipeline.io.uring import Requests, Ring, RingRefused
from aprefetch.pipeline.io.workers import WorkerRing

__all__ = [
    "Priority",
    "ReadCancelled",
    "ReadJob",
    "Reader",
    "ReaderStatistics",
    "RingReader",
    "ThreadReader",
    "make_reader",
]

_log = logging.getLogger(__name__)
_said: set[str] = set()  # refusals that were logged

AUTO: tuple[str, ...] = ("io_uring", "workers", "threads")
"""What "auto" tries, in this order."""


class Reader(Protocol):
    """What the coordinator needs. All methods belong to the loop's thread."""

    def submit(self, job: ReadJob) -> None:
        """Queue the job's reads. Raises RuntimeClosedError after `aclose`."""
        ...

    def promote(self, job: ReadJob, priority: Priority) -> None:
        """Make what is still queued more urgent; nothing if it already is, or is over."""
        ...

    def cancel(self, job: ReadJob) -> None:
        """Drop what is queued. Reads in flight still land; then `done` gets `ReadCancelled`."""
        ...

    def statistics(self) -> ReaderStatistics:
        """A snapshot."""
        ...

    async def aclose(self) -> None:
        """Cancel what is queued, wait for what is in flight, close the files. Idempotent."""
        ...


def make_reader(
    paths: Sequence[str | Path],
    *,
    backend: str = "auto",
    make_ring: Callable[[int, int], Requests] = Ring,
    **options: Any,
) -> JobQueue:
    """A reader of `paths`. Make it on a running event loop.

    Args:
        backend: "io_uring", "workers", "threads", or "auto": the first of these that can be had.
            What "auto" could not have is no loss of bytes or speed worth counting: it is logged,
            once.
        make_ring: Makes io_uring's ring, see `RingReader`.
        options: For every backend, see `JobQueue`.

    Raises:
        ConfigError: The backend that was asked for cannot be had.
        ReadError: A file cannot be opened.
    """
    names = AUTO if backend == "auto" else (backend,)
    rings: dict[str, Callable[[int, int], Requests]] = {
        "io_uring": make_ring,
        "workers": WorkerRing,
    }
    for name, other in zip(names, (*names[1:], ""), strict=True):
        if name not in rings:
            break
        try:
            return RingReader(paths, make_ring=rings[name], backend=name, **options)
        except RingRefused as error:
            reason = error.strerror or str(error)
            if not other:
                raise ConfigError(
                    f"reader_backend={name!r} cannot be had: {reason}; use 'auto' or 'threads'"
                ) from error
            if reason not in _said:
                _said.add(reason)
                _log.info("reading with %s: %s", other, reason)
    return ThreadReader(paths, **options)
