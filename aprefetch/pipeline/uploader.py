"""Stage 3: one object's bytes from its landing slot to its device slot.

The pieces of a read plan drop the ragged edges of direct reads on the way. Each upload is one
`copy_async`; uploads are started in the order in which they are asked for and report in any order.
The uploader owns no memory and changes no state.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from aprefetch.device.base import Device
from aprefetch.pipeline.objects import Entry
from aprefetch.stats import Counters
from aprefetch.storage.experts import ExpertSource
from aprefetch.trace import Kind, Tracer

__all__ = ["Uploader"]


class Uploader:
    """Copies objects between the two arenas of a coordinator."""

    def __init__(
        self,
        experts: ExpertSource,
        device: Device,
        landing: Tensor,
        arena: Tensor,
        counters: Counters,
        tracer: Tracer | None,
    ) -> None:
        self._experts = experts
        self._device = device
        self._landing = landing
        self._arena = arena
        self._counters = counters
        self._tracer = tracer

    def start(
        self, entry: Entry, kind: Kind, done: Callable[[Entry, Exception | None], None]
    ) -> None:
        """Copy `entry`'s bytes; both of its slots must stay as they are until `done`."""
        assert entry.landing is not None and entry.device is not None
        source, target = entry.landing.offset, entry.device.offset
        n_bytes = 0
        copies = []
        for piece in self._experts.read_plan(entry.key).pieces:
            src = source + piece.landing_offset
            dst = target + piece.device_offset
            n_bytes += piece.n_bytes
            copies.append(
                (self._arena[dst : dst + piece.n_bytes], self._landing[src : src + piece.n_bytes])
            )
        start_ns = time.perf_counter_ns()

        def finished(error: Exception | None) -> None:
            if error is None:
                self._counters.uploads += 1
                self._counters.bytes_uploaded += n_bytes
                if self._tracer is not None:
                    end_ns = time.perf_counter_ns()
                    self._tracer.upload(entry.key, start_ns, end_ns, n_bytes, kind)
            done(entry, error)

        self._device.copy_async(copies, finished)
