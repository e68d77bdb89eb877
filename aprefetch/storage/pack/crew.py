"""A few threads that work through a list of pieces, and the caller who watches them.

Hashes, copies and positional I/O release the GIL, so plain threads use all cores. The calling
thread does no piece itself: it reports progress, notes what is done, and looks whether to stop.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from aprefetch.errors import PackBuildError

__all__ = ["Cancel", "PackProgress", "Progress", "Reporter", "default_workers", "run_crew"]

Piece = TypeVar("Piece")
Scratch = TypeVar("Scratch")

Cancel = threading.Event
"""Set from any thread to stop a build or a verification soon."""

_TICK_S = 0.05
_REPORT_NS = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PackProgress:
    """How far a build or a verification is.

    `bytes_done` of `total_bytes` are done, `bytes_before` of them by an earlier, interrupted run;
    `elapsed_s` counts from the beginning of the phase.
    """

    phase: Literal["wait", "compare", "copy", "commit", "verify", "repair"]
    bytes_done: int
    total_bytes: int
    bytes_before: int = 0
    elapsed_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Mean rate of this phase."""
        n = self.bytes_done - self.bytes_before
        return n / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds to go at the mean rate; None while that is unknown."""
        rate = self.bytes_per_s
        return (self.total_bytes - self.bytes_done) / rate if rate > 0 else None


Progress = Callable[[PackProgress], None]


class Reporter:
    """Sends progress, not too often, and raises once the caller wants to stop.

    Args:
        progress: called on the thread that builds.
        cancel: looked at on every call.
    """

    def __init__(self, progress: Progress | None, cancel: Cancel | None) -> None:
        self._progress = progress
        self._cancel = cancel
        self._phase: Literal["wait", "compare", "copy", "commit", "verify", "repair"] = "wait"
        self._started_ns = self._last_ns = 0

    def begin(
        self, phase: Literal["wait", "compare", "copy", "commit", "verify", "repair"]
    ) -> None:
        """A phase begins."""
        self._phase = phase
        self._started_ns = time.perf_counter_ns()
        self._last_ns = 0

    def report(self, done: int, total: int, before: int = 0) -> None:
        """`done` of `total` bytes.

        Raises:
            PackBuildError: the build was cancelled.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise PackBuildError("the work on the pack was cancelled; the next run goes on from it")
        now = time.perf_counter_ns()
        if self._progress is None or (done < total and now - self._last_ns < _REPORT_NS):
            return
        self._last_ns = now
        self._progress(
            PackProgress(
                phase=self._phase,
                bytes_done=done,
                total_bytes=total,
                bytes_before=before,
                elapsed_s=(now - self._started_ns) / 1e9,
            )
        )


def default_workers() -> int:
    """Threads: enough to keep a drive busy while every core hashes."""
    return min(16, max(4, 2 * len(os.sched_getaffinity(0))))


def run_crew(
    pieces: Iterable[Piece],
    work: Callable[[Piece, Scratch], None],
    scratch: Callable[[], Scratch],
    *,
    n_workers: int,
    tick: Callable[[], None],
) -> None:
    """Call `work` for every piece. Blocking; returns, or raises the first error, when all rest.

    Args:
        scratch: makes what each thread keeps for itself, such as buffers.
        tick: called by the calling thread, often and once more at the end; may raise.
    """
    queue = iter(pieces)
    changed = threading.Condition()
    errors: list[BaseException] = []
    stopping = False
    n_running = n_workers

    def take() -> Piece | None:
        with changed:
            return None if stopping or errors else next(queue, None)

    def run() -> None:
        nonlocal n_running
        try:
            own = scratch()
            while (piece := take()) is not None:
                work(piece, own)
        except BaseException as error:
            with changed:
                errors.append(error)
        finally:
            with changed:
                n_running -= 1
                changed.notify()

    threads = [
        threading.Thread(target=run, name=f"aprefetch-pack-{i}", daemon=True)
        for i in range(n_workers)
    ]
    for thread in threads:
        thread.start()
    try:
        while True:
            with changed:
                if n_running:
                    changed.wait(_TICK_S)
                if not n_running:
                    break
            tick()
    finally:
        with changed:
            stopping = True
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    tick()
