"""Which sequences step together.

Plain bookkeeping without asyncio: requests wait in order of arrival until there is room, then run.
Where results do not depend on what shares a step (`batch_invariant`), a step takes every sequence
that decodes and one chunk of one that is still in its prompt, in turn (and short prompts that fit
beside it); elsewhere it takes a single sequence, in turn. So nobody's prompt, however long, keeps
another one from its tokens for more than a chunk.

What runs holds caches, so admission counts bytes: a request is admitted when the most that its
caches may come to fits beside what the running ones may come to. Nobody overtakes: a large request
at the head of the line is not starved by small ones behind it.
"""

from __future__ import annotations

from collections import deque

from aprefetch.engine.request import Phase, Request
from aprefetch.errors import BudgetError, QueueFullError

__all__ = ["Scheduler"]


class Scheduler:
    """Queues of the requests that are not over.

    Args:
        max_sequences: most requests that run (hold caches) at a time.
        batch_invariant: whether sequences may share steps.
        max_waiting: most requests beyond those; None for no limit.
        state_budget_bytes: most that the running requests' caches may come to; None for no limit.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        batch_invariant: bool,
        max_waiting: int | None = None,
        state_budget_bytes: int | None = None,
    ) -> None:
        self._max_sequences = max_sequences
        self._batch_invariant = batch_invariant
        self._max_waiting = max_waiting
        self._state_budget_bytes = state_budget_bytes
        self._reserved_bytes = 0
        self._waiting: deque[Request] = deque()
        self._running: deque[Request] = deque()  # whose turn it is stands in front

    @property
    def reserved_bytes(self) -> int:
        """What the running requests' caches may come to."""
        return self._reserved_bytes

    def add(self, request: Request) -> None:
        """A new request, last in line.

        Raises:
            QueueFullError: too many wait already.
            BudgetError: its caches do not fit even if it runs alone.
        """
        if self._max_waiting is not None:
            limit = self._max_sequences + self._max_waiting
            if len(self._running) + len(self._waiting) >= limit:
                raise QueueFullError(
                    f"{limit} requests run or wait, which is the limit (max_waiting); "
                    "try again later",
                    limit=limit,
                )
        budget = self._state_budget_bytes
        if budget is not None and request.reserved_bytes > budget:
            raise BudgetError(
                f"the request's caches may take {request.reserved_bytes} bytes, more than the "
                f"state_budget of {budget}; shorten the prompt or lower max_tokens",
                minimum_bytes=request.reserved_bytes,
                option="state_budget",
            )
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """A request that is over; harmless if it is not here."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running:
            self._running.remove(request)
            self._reserved_bytes -= request.reserved_bytes

    def all(self) -> list[Request]:
        """Every request that is not over."""
        return [*self._running, *self._waiting]

    def doomed(self) -> list[Request]:
        """Requests that are to be ended before the next step: cancelled, or out of time."""
        return [request for request in self.all() if request.doomed]

    def next_deadline_ns(self) -> int | None:
        """When the next request runs out of time; None if none may."""
        deadlines = [r.deadline_ns for r in self.all() if r.deadline_ns is not None]
        return min(deadlines, default=None)

    def admit(self) -> list[Request]:
        """Move waiting requests to the running ones while there is room; returns them."""
        admitted = []
        while self._waiting and len(self._running) < self._max_sequences:
            needed = self._reserved_bytes + self._waiting[0].reserved_bytes
            if self._state_budget_bytes is not None and needed > self._state_budget_bytes:
                break
            self._reserved_bytes = needed
            request = self._waiting.popleft()
            request.phase = Phase.RUNNING
            self._running.append(request)
            admitted.append(request)
        return admitted

    def n_decoding(self) -> int:
        """How many sequences would decode in the next step beside a prompt."""
        if not self._batch_invariant:
            return 0
        return sum(not (r.blocked or r.prefilling) for r in self._running)

    def next_step(self, chunk_tokens: int = 1) -> list[Request]:
        """The requests of the next step, those that decode first; empty if none can run.

        Args:
            chunk_tokens: most prompt tokens of the step. The prompt whose turn it is gets a chunk;
                others join if all that is left of them fits beside it.
        """
        ready = [request for request in self._running if not request.blocked]
        if not self._batch_invariant:
            batch = turn = ready[:1]
        else:
            prefilling = [request for request in ready if request.prefilling]
            turn, room = prefilling[:1], chunk_tokens
            if turn:
                room -= turn[0].n_prompt - turn[0].n_run
            for request in prefilling[1:]:
                left = request.n_prompt - request.n_run
                if left <= room:
                    room -= left
                    turn.append(request)
            batch = [request for request in ready if not request.prefilling] + turn
        for request in turn or batch[-1:]:  # it had its turn
            self._running.remove(request)
            self._running.append(request)
        return batch
