"""The reader backend of threads: `queue_depth` of them, each with one positional read at a time.

Works everywhere. Each read costs a hand-over of the interpreter's lock or two, which is little
beside a slow drive and much beside a fast GPU; `ring_reader` has none.

A few long-lived threads take the most urgent read each; what they share with the loop's thread,
which is all of `JobQueue`, is under one lock.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aprefetch.pipeline.io.jobs import JobQueue, Part, Priority, ReaderStatistics, ReadJob
from aprefetch.pipeline.io.transfer import Tally

__all__ = ["ThreadReader"]


class ThreadReader(JobQueue):
    """Positional direct reads on threads. Make it on a running event loop.

    Args: see `JobQueue`.
    """

    backend = "threads"

    def __init__(self, paths: Sequence[str | Path], **options: Any) -> None:
        super().__init__(paths, **options)
        self._wakeup = threading.Condition(threading.Lock())
        self._n_workers = self.queue_depth
        self._workers = [
            threading.Thread(target=self._work, name=f"aprefetch-read-{i}", daemon=True)
            for i in range(self.queue_depth)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, job: ReadJob) -> None:
        """See `JobQueue`."""
        parts = self._cut(job)
        with self._wakeup:
            self._enqueue(job, parts)
            self._wakeup.notify(len(parts))

    def promote(self, job: ReadJob, priority: Priority) -> None:
        """See `JobQueue`."""
        with self._wakeup:
            super().promote(job, priority)

    def cancel(self, job: ReadJob) -> None:
        """See `JobQueue`."""
        with self._wakeup:
            super().cancel(job)

    def statistics(self) -> ReaderStatistics:
        """See `JobQueue`."""
        with self._wakeup:
            return super().statistics()

    def _collect(self) -> tuple[deque[ReadJob], Tally, int]:
        with self._wakeup:
            return super()._collect()

    def _begin_closing(self) -> None:
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify_all()

    def _end_closing(self) -> None:
        for worker in self._workers:
            worker.join()  # it has nothing left to do but return
        super()._end_closing()

    # -- the threads' side ------------------------------------------------------------------

    def _take(self) -> Part | None:
        """The most urgent read; waits for one. None: no more will come."""
        while (part := self._next()) is None:
            if self._is_closing:
                return None
            self._wakeup.wait()
        return part

    def _work(self) -> None:
        part: Part | None = None
        error: BaseException | None = None
        tally = Tally()
        while True:
            with self._wakeup:
                if part is not None:
                    self._tally.add(tally)
                    self._land(part, error, time.perf_counter_ns())
                    part = error = None
                part = self._take()
                if part is None:
                    self._n_workers -= 1
                    if self._n_workers == 0:
                        self._call_loop(self._end_closing)
                    return
                if part.job.start_ns == 0:
                    part.job.start_ns = time.perf_counter_ns()
            tally = Tally()
            try:
                part.file.fetch(part.view, part.offset, part.needed, tally, part.job.key)
            except BaseException as caught:  # whatever it is, the job must hear of it
                traceback.clear_frames(caught.__traceback__)  # they hold views of the buffer
                error = caught
