"""Stage 3: one object's bytes from its landing slot to its device slot.

The pieces of a read plan drop the ragged edges of direct reads on the way. Uploads are started in
the order in which they are asked for and report in any order. Where the device orders compute
behind copies they are enqueued by address, and nobody waits for the report.
The uploader owns no memory and changes no state.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from torch import Tensor

from aprefetch.device.base import Device, OrdersCopies, Ticket
from aprefetch.errors import DeviceError
from aprefetch.pipeline.objects import Entry
from aprefetch.stats import Counters
from aprefetch.storage.experts import ExpertSource
from aprefetch.trace import Kind, Tracer

__all__ = ["Uploader", "ordered_copies"]


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
        self._ordered = ordered_copies(device)
        self._landing_address = landing.data_ptr()
        self._arena_address = arena.data_ptr()

    def start(
        self, entry: Entry, kind: Kind, done: Callable[[Entry, Exception | None], None]
    ) -> Ticket | None:
        """Copy `entry`'s bytes; both of its slots must stay as they are until `done`.

        Returns what compute has to follow if the device sees to that; else None, and compute has to
        wait for `done`.
        """
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

        source, target = entry.landing.offset, entry.device.offset
        if self._ordered is not None:
            source += self._landing_address
            target += self._arena_address
            try:
                ticket = self._ordered.enqueue_copies(
                    [
                        (target + p.device_offset, source + p.landing_offset, p.n_bytes)
                        for p in pieces
                    ]
                )
            except DeviceError as error:
                asyncio.get_running_loop().call_soon(finished, error)
                return None
            self._device.when_done(ticket, functools.partial(finished, None))
            return ticket
        copies = []
        for piece in pieces:
            src = source + piece.landing_offset
            dst = target + piece.device_offset
            copies.append(
                (self._arena[dst : dst + piece.n_bytes], self._landing[src : src + piece.n_bytes])
            )
        self._device.copy_async(copies, finished)
        return None


def ordered_copies(device: Device) -> OrdersCopies | None:
    """The device, if it orders compute behind copies from the memory that it has given out."""
    return device if isinstance(device, OrdersCopies) and device.orders_copies else None
