"""The engine's loop: admit, step, sample, again.

One task runs `Engine.run`; it alone calls the step driver and ends requests. A request's error goes
to that request. Only an exception that is none of ours leaves the loop: then all requests get
`RuntimeFailedError` and the runtime is over. Requests are cancelled between steps, or in the midst
of a step that has only cancelled ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from aprefetch.device.base import Device
from aprefetch.device.cpu import INLINE_COMPUTE_COST
from aprefetch.engine.heap import HeapTrimmer
from aprefetch.engine.pacing import ChunkPacer
from aprefetch.engine.prefix_cache import KeptState, PrefixCache
from aprefetch.engine.request import GenerateRequest, Request, ScoreRequest
from aprefetch.engine.scheduler import Scheduler
from aprefetch.engine.step import StepAbandoned, StepRunner
from aprefetch.errors import AprefetchError, RuntimeClosedError, RuntimeFailedError
from aprefetch.models.base import ModelInfo, SequenceState
from aprefetch.stats import Counters
from aprefetch.trace import Tracer

__all__ = ["Engine"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_SAMPLE_PASSES = 16  # passes over a row of logits that sampling takes, for `Device.inline`
_SCORE_PASSES = 8
_GROWTH = 2  # stores that grow double their capacity


class _StateMaker(Protocol):
    info: ModelInfo

    def new_state(self) -> SequenceState: ...


class Engine:
    """Runs requests on one model.

    Args:
        model: makes the states of sequences.
        runner: runs steps of that model.
        device: decides where sampling runs.
        scheduler: an empty one.
        pacer: says how many prompt tokens of one sequence a step may take.
        prefix: keeps states of sequences for longer prompts; None for no such thing.
        check_source: raises if the model's files changed; asked after each step that read from
            them, before its tokens are given out. A few `stat` calls.
    """

    def __init__(
        self,
        *,
        model: _StateMaker,
        runner: StepRunner,
        device: Device,
        scheduler: Scheduler,
        pacer: ChunkPacer,
        counters: Counters,
        tracer: Tracer | None = None,
        check_source: Callable[[], None] | None = None,
        prefix: PrefixCache | None = None,
    ) -> None:
        self._model = model
        self._runner = runner
        self._device = device
        self._is_host = device.name != "cuda"  # the device's memory is the host's
        self._scheduler = scheduler
        self._pacer = pacer
        self._counters = counters
        self._tracer = tracer
        self._check_source = check_source
        self._prefix = prefix
        self._n_checked_bytes = 0
        self._heap = HeapTrimmer()
        self._wake = asyncio.Event()
        self._stopping = False
        self._closed: Callable[[], BaseException] | None = None

    @property
    def n_requests(self) -> int:
        """Requests that are not over."""
        return len(self._scheduler.all())

    def state_bytes(self) -> int:
        """Bytes held by the caches of requests that run."""
        states = (request.state for request in self._scheduler.all())
        return sum(state.n_bytes for state in states if state is not None)

    def requests(self) -> list[Request]:
        """Requests that are not over; those that run come first."""
        return self._scheduler.all()

    def submit(self, request: Request) -> None:
        """Take a request; it runs as soon as there is room.

        Raises:
            RuntimeStateError: the engine has stopped.
            QueueFullError: too many wait already.
            BudgetError: its caches would not fit even if it ran alone.
        """
        if self._closed is not None:
            raise self._closed()
        if self._stopping:
            raise RuntimeClosedError("the runtime is closing")
        if isinstance(request, GenerateRequest):
            request.feed.on_room = self._wake.set
        info = self._model.info
        growing = _GROWTH * info.state_bytes_per_token * request.max_state_tokens
        longest_chunk = min(self._pacer.chunk_tokens, request.n_prompt)
        chunk = info.state_bytes_per_chunk_token * longest_chunk
        request.reserved_bytes = info.state_bytes_fixed + growing + chunk
        self._scheduler.add(request)
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """Have a request ended as soon as no step uses it."""
        request.cancelled = True
        self._wake.set()

    def stop(self) -> None:
        """Have the loop end; requests that are not over get `RuntimeClosedError`."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """The loop. Ends after `stop`; raises only what breaks an invariant."""
        try:
            while not self._stopping:
                for request in self._scheduler.doomed():
                    self._end(request, request.verdict())
                for request in self._scheduler.admit():
                    await self._begin(request)
                self._wake.clear()
                n_decoding = self._scheduler.n_decoding()
                limit_tokens = self._pacer.limit_tokens(n_decoding)
                batch = self._scheduler.next_step(limit_tokens)
                if batch:
                    await self._step(batch, n_decoding, limit_tokens)
                    await asyncio.sleep(0)  # consumers' turn, even if nothing above had to wait
                else:
                    await self._idle()
        except Exception as error:
            log.error("the engine failed: %s", error)
            cause = error
            self._close(lambda: _failed(cause))
            raise
        finally:
            self._close(lambda: RuntimeClosedError("the runtime was closed"))

    async def _idle(self) -> None:
        """Until something changed, or a request that waits or is held up runs out of time."""
        if not self._scheduler.all():
            self._heap.when_idle()
        deadline_ns = self._scheduler.next_deadline_ns()
        if deadline_ns is None:
            await self._wake.wait()
            return
        seconds = max(0, deadline_ns - time.perf_counter_ns()) / 1e9
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _begin(self, request: Request) -> None:
        """Give a request its caches: empty ones, or a copy of those that were kept."""
        request.admitted_ns = time.perf_counter_ns()
        kept, request.kept = request.kept, None
        try:
            state = self._model.new_state()
            if kept is not None:
                found, device = kept, torch.device(self._device.name)
                await self._compute(kept.n_bytes, lambda: found.restore(state, device), waits=True)
                request.n_run = request.n_reused = kept.n_tokens
                self._counters.reused_tokens += kept.n_tokens
            request.state = state
        except AprefetchError as error:  # no memory for its caches
            self._end(request, error)

    async def _keep(self, request: GenerateRequest) -> None:
        """Keep a copy of the request's state as it is now."""
        ids, state = request.ids_run(), request.state
        prefix = self._prefix
        if prefix is None or not prefix.wants(len(ids)) or prefix.holds(ids):
            return
        assert state is not None
        copied = await self._compute(state.n_bytes, lambda: KeptState.copy(ids, state), waits=True)
        prefix.keep(copied)

    def _close(self, reason: Callable[[], BaseException]) -> None:
        if self._closed is None:
            self._closed = reason
        for request in self._scheduler.all():
            self._end(request, None if request.cancelled else self._closed())

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        self._scheduler.remove(request)
        request.finish(error)
        if self._tracer is not None:
            outcome = type(error).__name__ if error is not None else "cancelled"
            if isinstance(request, GenerateRequest) and error is None:
                outcome = str(request.finish_reason)
            elif isinstance(request, ScoreRequest) and not request.prefilling:
                outcome = "scored"
            now_ns = time.perf_counter_ns()
            self._tracer.request(request.number, request.arrived_ns, now_ns, outcome)

    async def _step(self, batch: Sequence[Request], n_decoding: int, limit_tokens: int) -> None:
        chunks = [request.next_chunk(limit_tokens) for request in batch]
        started_ns = time.perf_counter_ns()
        try:
            result = await self._runner.step(
                chunks, lambda: self._stopping or all(request.doomed for request in batch)
            )
            n_read = self._counters.bytes_read
            if self._check_source is not None and n_read != self._n_checked_bytes:
                self._check_source()
                self._n_checked_bytes = n_read
        except StepAbandoned:
            for request in batch:
                if request.doomed:
                    self._end(request, request.verdict())
            return
        except AprefetchError as error:  # not one chunk's fault: the states are half way
            for request in batch:
                self._end(request, None if request.cancelled else error)
            return
        n_rows = sum(len(chunk.token_ids) for chunk in chunks)
        elapsed_ns = time.perf_counter_ns() - started_ns
        n_prompt_tokens = n_rows - sum(not request.prefilling for request in batch)
        self._pacer.observe(n_prompt_tokens, n_decoding, elapsed_ns)
        sampled: list[int] = []
        for request, chunk, logits, failure in zip(
            batch, chunks, result.logits, result.errors, strict=True
        ):
            if request.cancelled or failure is not None:
                self._end(request, None if request.cancelled else failure)
                continue
            try:
                await self._advance(request, len(chunk.token_ids), logits, sampled)
            except AprefetchError as error:
                self._end(request, error)
        if sampled:
            self._runner.announce(np.asarray(sampled, dtype=np.int64))

    async def _advance(
        self, request: Request, n_tokens: int, logits: Tensor | None, sampled: list[int]
    ) -> None:
        """Take one chunk's result; adds a token that will be run next to `sampled`."""
        first = request.n_run
        if request.prefilling:
            request.n_run += n_tokens
            self._counters.prompt_tokens += n_tokens
            if request.n_run == request.keep_at and isinstance(request, GenerateRequest):
                await self._keep(request)
        if logits is None:
            return
        cost = logits.numel() * logits.element_size()
        if isinstance(request, ScoreRequest):
            scored = request
            await self._compute(
                cost * _SCORE_PASSES, lambda: scored.accept(first, logits), waits=True
            )
            if request.progress is not None:
                request.progress(request.n_run, request.n_prompt)
            if not request.prefilling:
                self._end(request)
            return
        assert isinstance(request, GenerateRequest)
        generating = request
        row = logits[-1] if self._is_host else await self._device.fetch(logits[-1])
        sample = await self._compute(cost * _SAMPLE_PASSES, lambda: generating.sampler.sample(row))
        if not request.output_ids and self._tracer is not None:
            self._tracer.event("first token", request.number)
        self._counters.output_tokens += 1
        token = request.accept(sample)
        if token is None:
            if request.keep_at:
                await self._keep(request)
            self._end(request)
        else:
            sampled.append(token)

    async def _compute(self, cost: int, fn: Callable[[], T], *, waits: bool = False) -> T:
        """Run work of the host. `waits`: on a GPU it waits for the device."""
        if self._is_host:
            is_inline = self._device.inline(cost)
        else:
            is_inline = not waits and cost <= INLINE_COMPUTE_COST
        return fn() if is_inline else await self._device.run(fn)


def _failed(cause: BaseException) -> RuntimeFailedError:
    error = RuntimeFailedError(
        f"the runtime failed and must be opened anew: {type(cause).__name__}: {cause}"
    )
    error.__cause__ = cause
    return error
