"""Which sequences step together.

Plain bookkeeping without asyncio: requests wait in order of arrival until there is room, then run.
Where results do not depend on what shares a step (`batch_invariant`), a step takes every sequence
that decodes and one chunk of one that is still in its prompt, in turn; elsewhere it takes a single
sequence, in turn. So nobody's prompt, however long, keeps another one from its tokens for more
than a chunk.
"""

from __future__ import annotations

from collections import deque

from aprefetch.engine.request import Phase, Request

__all__ = ["Scheduler"]


class Scheduler:
    """Queues of the requests that are not over.

    Args:
        max_sequences: most requests that run (hold caches) at a time.
        batch_invariant: whether sequences may share steps.
    """

    def __init__(self, *, max_sequences: int, batch_invariant: bool) -> None:
        self._max_sequences = max_sequences
        self._batch_invariant = batch_invariant
        self._waiting: deque[Request] = deque()
        self._running: deque[Request] = deque()  # whose turn it is stands in front

    def add(self, request: Request) -> None:
        """A new request, last in line."""
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """A request that is over; harmless if it is not here."""
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)

    def all(self) -> list[Request]:
        """Every request that is not over."""
        return [*self._running, *self._waiting]

    def cancelled(self) -> list[Request]:
        """Requests that are to be ended before the next step."""
        return [request for request in self.all() if request.cancelled]

    def admit(self) -> list[Request]:
        """Move waiting requests to the running ones while there is room; returns them."""
        admitted = []
        while self._waiting and len(self._running) < self._max_sequences:
            request = self._waiting.popleft()
            request.phase = Phase.RUNNING
            self._running.append(request)
            admitted.append(request)
        return admitted

    def next_step(self) -> list[Request]:
        """The requests of the next step; empty if none can run."""
        ready = [request for request in self._running if not request.blocked]
        if not self._batch_invariant:
            batch = ready[:1]
        else:
            prefilling = [request for request in ready if request.prefilling]
            batch = [request for request in ready if not request.prefilling] + prefilling[:1]
        if batch:  # the last one of the batch took its turn
            self._running.remove(batch[-1])
            self._running.append(batch[-1])
        return batch
