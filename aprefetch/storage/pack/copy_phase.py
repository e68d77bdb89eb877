"""The copying phase of a build: threads copy, the calling thread syncs, notes and reports.

Invariant: an object enters the journal only after a sync that began when it had been written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from aprefetch.errors import PackError
from aprefetch.storage.pack.copy import Copier, CopyScratch, Span, Target
from aprefetch.storage.pack.crew import Reporter, run_crew
from aprefetch.storage.pack.journal import Journal
from aprefetch.storage.pack.shape import PackShape

__all__ = ["CopyPhase"]

_log = logging.getLogger(__name__)

_SYNC_BYTES = 512 << 20
_SYNC_S = 2.0


class CopyPhase:
    """Copies what is not done yet.

    Args:
        shape: of the pack.
        copier: takes spans over.
        journal: notes what is on the drive.
        targets: the parts, to be synced.
        done: objects that need no copying, `[n_objects]`.
        digests: filled in for every object copied, `[n_objects, DIGEST_BYTES]`.
        reporter: hears of progress, and stops the phase.
    """

    def __init__(
        self,
        shape: PackShape,
        copier: Copier,
        journal: Journal,
        targets: Sequence[Target],
        done: NDArray[np.bool_],
        digests: NDArray[np.uint8],
        reporter: Reporter,
    ) -> None:
        self._shape = shape
        self._copier = copier
        self._journal = journal
        self._targets = targets
        self._done = done
        self._digests = digests
        self._reporter = reporter
        self._lock = threading.Lock()
        self._fresh: list[tuple[int, bytes]] = []  # written, not yet noted
        payload = np.concatenate(
            [np.full(one.n_experts, one.payload_bytes, dtype=np.int64) for one in shape.layers]
        )
        self._before = self._copied = int(payload[done].sum())
        self._synced = self._copied
        self._synced_ns = time.perf_counter_ns()
        self.bytes_read = 0
        self.bytes_written = 0

    def run(self, n_workers: int) -> None:
        """Copy, sync and note everything. Blocking.

        Raises:
            PackBuildError, ReadError: what stopped it; what was done is noted if that can be.
        """
        try:
            run_crew(
                self._spans(),
                self._work,
                self._copier.scratch,
                n_workers=n_workers,
                tick=self._tick,
            )
        except BaseException:
            self._try_to_note()
            raise
        self._note()

    def _spans(self) -> Iterator[Span]:
        for layout, at, n in self._copier.spans():
            number = self._shape.first_object[layout.layer] + at
            if not self._done[number : number + n].all():
                yield layout, at, n

    def _work(self, span: Span, scratch: CopyScratch) -> None:
        numbers, digests, n_read = self._copier.copy(span, scratch)
        layout = span[0]
        n_new = len(numbers) - int(self._done[numbers].sum())
        with self._lock:
            self._fresh += zip(numbers, digests, strict=True)
            self._copied += n_new * layout.payload_bytes
            self.bytes_read += n_read
            self.bytes_written += len(numbers) * self._shape.stored_bytes(layout)

    def _tick(self) -> None:
        is_due = time.perf_counter_ns() - self._synced_ns >= _SYNC_S * 1e9
        if is_due or self._copied - self._synced >= _SYNC_BYTES:
            self._note()
        self._reporter.report(self._copied, self._shape.payload_bytes, self._before)

    def _note(self) -> None:
        """Sync what was written so far, then put it into the journal."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            copied = self._copied
        for target in self._targets:
            target.file.sync()
        self._journal.append(fresh)
        for number, digest in fresh:
            self._digests[number] = np.frombuffer(digest, dtype=np.uint8)
        self._synced, self._synced_ns = copied, time.perf_counter_ns()

    def _try_to_note(self) -> None:
        """Keep what can be kept; the error that stopped the build matters more."""
        try:
            self._note()
        except (PackError, OSError) as error:
            _log.debug("the journal could not be brought up to date: %s", error)
