"""A demand: the objects one layer needs now, and the leases on those that are there.

Made by `Coordinator.demand` and owned by whoever asked. Every path must end in `close` (a demand is
a context manager too). Release leases before waiting for more: objects that found no room come in
waves, and a wave needs the room of the one before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aprefetch.errors import AprefetchError, RuntimeClosedError, RuntimeStateError
from aprefetch.pipeline.objects import Entry, Lane, Stage
from aprefetch.pipeline.slots import Lease

if TYPE_CHECKING:
    from aprefetch.pipeline.coordinator import Coordinator

__all__ = ["Demand"]

_UNREAD = (Stage.WANTED, Stage.READING, Stage.DRAINING)


class Demand:
    """See the module's text. All methods belong to the loop's thread; one task may wait."""

    __slots__ = (
        "_coordinator",
        "_future",
        "_is_closed",
        "_leases",
        "failed",
        "lane",
        "layer",
        "missing",
        "ready",
        "sequence",
    )

    def __init__(self, coordinator: Coordinator, lane: Lane, sequence: int) -> None:
        self._coordinator = coordinator
        self.lane = lane
        self.layer = lane.layer
        self.sequence = sequence  # demands are served in this order
        self.ready: list[Entry] = []  # pinned for this demand and not yet taken
        self.missing: dict[Entry, None] = {}  # not there yet
        self.failed: dict[int, AprefetchError] = {}
        """Experts that will not come, with the reason (a `ReadError`). The next demand for one of
        them reads it again."""
        self._leases: list[Lease] = []
        self._future: asyncio.Future[None] | None = None
        self._is_closed = False

    @property
    def n_unread(self) -> int:
        """Objects that have yet to come from the SSD."""
        return sum(entry.stage in _UNREAD for entry in self.missing)

    def take(self) -> list[Lease]:
        """Leases on what is there and was not taken before. Never blocks; may be empty.

        Raises:
            RuntimeStateError: the demand was closed.
        """
        if self._is_closed:
            raise RuntimeStateError("the demand was closed")
        ready = self.ready
        if not ready:
            return []
        if self._coordinator.is_closed:
            raise RuntimeClosedError("the coordinator was closed")
        # A pinned entry keeps its device slot, so `device` is never None here.
        leases = [Lease(entry.key, entry.device) for entry in ready]  # type: ignore[arg-type]
        self._leases += leases
        ready.clear()
        return leases

    async def wait(self) -> list[Lease]:
        """At least one lease that was not taken before; [] when nothing is left to come.

        Returns at once when there is one already. Otherwise the time is counted as a stall.

        Raises:
            RuntimeClosedError: the coordinator was closed.
            RuntimeStateError: the demand was closed, another task waits, or all room for this
                layer's objects is leased by this demand itself, so that nothing can ever come.
        """
        if self.ready or self._is_closed:
            return self.take()
        coordinator = self._coordinator
        if coordinator.is_closed:
            raise RuntimeClosedError("the coordinator was closed")
        if not self.missing:
            return []
        if self._future is not None:
            raise RuntimeStateError("another task waits for this demand")
        pool = self.lane.device
        if sum(lease.is_live for lease in self._leases) == pool.n_slots:
            raise RuntimeStateError(
                f"this demand leases all {pool.n_slots} slots there are for layer {self.layer}; "
                "release leases before waiting for more"
            )
        n_missing = len(self.missing)
        start_ns = time.perf_counter_ns()
        try:
            while self.missing and not self.ready and not self._is_closed:
                self._future = asyncio.get_running_loop().create_future()
                await self._future
        finally:
            self._future = None
            coordinator.count_stall(self.layer, start_ns, time.perf_counter_ns(), n_missing)
        return self.take()

    def release(self, leases: Iterable[Lease]) -> None:
        """Give leases back after their compute was done (or enqueued, on a GPU).

        Raises:
            RuntimeStateError: a lease was released before.
        """
        slots = []
        for lease in leases:
            slot = lease._slot
            if slot is None:
                raise RuntimeStateError(f"the lease of expert {tuple(lease.key)} was released")
            lease._slot = None
            slots.append(slot)
        if slots:
            self._coordinator.unpin(slots)

    def close(self) -> None:
        """Release everything, and drop loads that nobody else wants. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.release([lease for lease in self._leases if lease.is_live])
        self._leases.clear()
        self._coordinator.forget(self)
        self.wake()

    def wake(self, error: Exception | None = None) -> None:
        """Let the waiting task look again, or raise `error` in it. The coordinator's business."""
        future = self._future
        if future is not None and not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
