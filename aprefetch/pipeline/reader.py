"""Stage 2: bytes from files into landing slots, by priority, many at a time.

A `Reader` takes jobs and never looks at what their bytes mean. Two backends do the same with
different means: `ThreadReader` blocks threads of ours in positional reads, `RingReader` leaves the
reads to the kernel through io_uring and needs no thread. `io/jobs.py` has what they share, and what
must hold; `make_reader` chooses.
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
from aprefetch.pipeline.io.uring import Ring, RingRefused

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

AUTO: tuple[str, ...] = ("io_uring", "threads")
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
    make_ring: Callable[[int, int], Ring] = Ring,
    **options: Any,
) -> JobQueue:
    """A reader of `paths`. Make it on a running event loop.

    Args:
        backend: "threads", "io_uring", or "auto": io_uring where the kernel allows it. Another
            choice by "auto" is no loss of bytes or speed worth counting: it is logged, once.
        make_ring: See `RingReader`.
        options: For every backend, see `JobQueue`.

    Raises:
        ConfigError: io_uring was asked for and cannot be had.
        ReadError: A file cannot be opened.
    """
    names = AUTO if backend == "auto" else (backend,)
    if "io_uring" in names:
        try:
            return RingReader(paths, make_ring=make_ring, **options)
        except RingRefused as error:
            reason = error.strerror or str(error)
            if "threads" not in names:
                raise ConfigError(
                    f"reader_backend='io_uring' cannot be had: {reason}; use 'auto' or 'threads'"
                ) from error
            if reason not in _said:
                _said.add(reason)
                _log.info("reading with threads: %s", reason)
    return ThreadReader(paths, **options)
