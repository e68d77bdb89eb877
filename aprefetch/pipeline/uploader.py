"""Stage 3: one object's bytes from its landing slot to its device slot, counted and traced.

The uploader owns no memory and changes no state; `copies` says how bytes move.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from aprefetch.device.base import Ticket
from aprefetch.pipeline.copies import ArenaCopies
from aprefetch.pipeline.objects import Entry
from aprefetch.stats import Counters
from aprefetch.storage.experts import ExpertSource
from aprefetch.trace import Kind, Tracer

__all__ = ["Uploader"]


class Uploader:
    """Copies objects to the device arena of a coordinator."""

    def __init__(
        self, experts: ExpertSource, copies: ArenaCopies, counters: Counters, tracer: Tracer | None
    ) -> None:
        self._experts = experts
        self._copies = copies
        self._counters = counters
        self._tracer = tracer

    def start(
        self, entry: Entry, kind: Kind, done: Callable[[Entry, Exception | None], None]
    ) -> Ticket | None:
        """Copy `entry`'s bytes; returns what `ArenaCopies.start` does."""
        assert entry.landing is not None and entry.device is not None
        pieces = self._experts.read_plan(entry.key).pieces
        n_bytes = entry.lane.payload_bytes
        start_ns = time.perf_counter_ns()

        def finished(error: Exception | None) -> None:
            if error is None:
                self._counters.uploads += 1
                self._counters.bytes_uploaded += n_bytes
                if self._tracer is not None:
                    end_ns = time.perf_counter_ns()
                    self._tracer.upload(entry.key, start_ns, end_ns, n_bytes, kind)
            done(entry, error)

        return self._copies.start(pieces, entry.landing.offset, entry.device.offset, finished)
