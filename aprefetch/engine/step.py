"""The step driver: moves one step of the model through its layers while experts come and go.

The model's generator computes; the driver, on the loop thread, places demands and guesses, waits
for experts, runs them as they arrive and hands control back. Compute that takes long runs on the
device's compute thread. The driver owns no slots: a demand is closed on every path out of a layer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aprefetch.device.base import Device, OrdersCopies
from aprefetch.engine.segments import SegmentCosts
from aprefetch.errors import AprefetchError, DeviceError
from aprefetch.models.base import Chunk, Model
from aprefetch.models.moe import RoutedCall
from aprefetch.pipeline.coordinator import Coordinator, Demand, Lease
from aprefetch.pipeline.lookahead import Lookahead
from aprefetch.routing_trace import RoutingRecorder
from aprefetch.stats import Counters
from aprefetch.trace import Tracer

__all__ = ["StepAbandoned", "StepResult", "StepRunner", "StepTimeline"]

T = TypeVar("T")

_YIELD_AFTER_NS = 1_000_000  # longest stretch of inline compute before the loop gets its turn
_ARRIVAL_PATIENCE_NS = 60_000_000_000  # for expert ids; the first call compiles kernels
_GUESS_PATIENCE_NS = 300_000


class StepAbandoned(Exception):
    """The step was given up between two layers since all of its sequences were cancelled."""


@dataclass(slots=True)
class StepResult:
    """Per chunk: logits (float32 `[n, V]`, or None if not wanted) and what went wrong, if it did.

    A chunk with an error has meaningless logits and its sequence's state must be dropped; the other
    chunks are right.
    """

    logits: list[Tensor | None]
    errors: list[AprefetchError | None]


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Where the time of one step went.

    `spans` are (layer, name, start, duration), times in nanoseconds from the step's start; names
    are attention (up to the router), lookahead, shared (expert), experts, wait (for experts) and
    head.
    """

    n_rows: int
    duration_ns: int
    spans: tuple[tuple[int, str, int, int], ...]


class StepRunner:
    """Runs steps, one at a time.

    Args:
        recorder: notes picks, guesses and times; None for none.
        settled: wait until nothing moves before every demand and every wave, so that hits and
            misses do not depend on time. For studies: no load hides behind compute.
    """

    def __init__(
        self,
        model: Model,
        coordinator: Coordinator,
        lookahead: Lookahead | None,
        device: Device,
        counters: Counters,
        tracer: Tracer | None,
        *,
        recorder: RoutingRecorder | None = None,
        settled: bool = False,
    ) -> None:
        self._model = model
        self._coordinator = coordinator
        self._lookahead = lookahead
        self._device = device
        self._counters = counters
        self._tracer = tracer
        self._recorder = recorder
        self._settled = coordinator.is_orderly = settled
        self._ordered = device if isinstance(device, OrdersCopies) else None
        info = model.info
        self._costs = SegmentCosts(info)
        self._announced: dict[int, set[int]] = {layer: set() for layer in info.token_routed_layers}
        self._yielded_ns = 0
        self._spans: list[tuple[int, str, int, int]] = []  # of the step at hand; clock times
        self.last_step: StepTimeline | None = None

    def announce(self, token_ids: npt.NDArray[np.int64]) -> None:
        """Ask for the experts of layers that are routed by token id, as soon as ids are known."""
        for layer, known in self._announced.items():
            table = self._model.token_routed(layer, token_ids)
            assert table is not None
            fresh = sorted(set(table.ravel().tolist()) - known)
            if fresh:
                known.update(fresh)
                self._coordinator.guess(layer, fresh, exact=True)

    async def step(
        self, chunks: Sequence[Chunk], abandoned: Callable[[], bool] | None = None
    ) -> StepResult:
        """Run the chunks through all layers.

        `abandoned` is asked between layers; when it says true the step stops with `StepAbandoned`
        and the chunks' sequences must be dropped.
        """
        n_rows = sum(len(chunk.token_ids) for chunk in chunks)
        for chunk in chunks:
            self.announce(chunk.token_ids)
        errors: list[AprefetchError | None] = [None] * len(chunks)
        owner = np.repeat(np.arange(len(chunks)), [len(chunk.token_ids) for chunk in chunks])
        forward = self._model.forward(chunks)
        costs, advance = self._costs, lambda: _advance(forward)
        call: RoutedCall | None = None
        start_ns = self._yielded_ns = time.perf_counter_ns()
        demand: Demand | None = None
        spans = self._spans = []
        if self._recorder is not None:
            self._recorder.begin_step(n_rows, start_ns)
        try:
            while True:
                segment_ns = time.perf_counter_ns()
                call, logits = await self._compute(costs.after(call) * n_rows, advance)
                if call is not None and not call.finishing and not call.arrived():
                    await self._arrival(call)
                self._note_segment(call, segment_ns)
                if call is None:
                    break
                if not call.finishing:
                    if abandoned is not None and abandoned():
                        raise StepAbandoned
                    dense_ns = time.perf_counter_ns() - segment_ns
                    if self._settled:
                        await self._coordinator.settled()
                    if self._recorder is not None:
                        self._record(self._recorder, call, dense_ns)
                    demand = self._coordinator.demand(call.layer, call.experts)
                    continue
                assert demand is not None
                if self._recorder is not None:
                    self._recorder.times(shared_ns=time.perf_counter_ns() - segment_ns)
                leases: list[Lease] = []
                if call.guesses_ahead and not self._settled:
                    # Hits need not wait for guesses. What follows a copy comes after them.
                    hits, leases = _by_copies(demand.take())
                    await self._run(call, demand, hits)
                is_late = self._guesses_late(call)
                if not is_late:
                    await self._guess(call)
                await self._run(call, demand, leases)
                await self._finish(call, demand, guesses=is_late)
                for expert, error in demand.failed.items():
                    for row in call.fail(expert):
                        errors[owner[row]] = error
                demand.close()
                self._end_layer(call)
        finally:
            if demand is not None:
                demand.close()
            forward.close()
            if self._lookahead is not None:
                self._lookahead.forget()  # what a step that broke off had predicted
            for layer, known in self._announced.items():
                if known:
                    known.clear()
                    self._coordinator.end_layer(layer)
        self._counters.steps += 1
        end_ns = time.perf_counter_ns()
        if self._lookahead is not None:
            self._lookahead.end_step(end_ns - start_ns, n_rows)
        else:
            self._counters.guesses_off += 1
        self.last_step = StepTimeline(
            n_rows,
            end_ns - start_ns,
            tuple((layer, name, at - start_ns, end - at) for layer, name, at, end in spans),
        )
        if self._recorder is not None:
            self._recorder.end_step(time.perf_counter_ns())
        if self._tracer is not None:
            self._tracer.step(n_rows, start_ns, time.perf_counter_ns())
        return StepResult(logits, errors)

    def _note_segment(self, call: RoutedCall | None, start_ns: int) -> None:
        """One stretch of dense compute: up to a router, the shared expert, or the head."""
        if call is None:
            layer, name = self._model.info.n_layers, "head"
        else:
            layer, name = call.layer, "shared" if call.finishing else "attention"
        end_ns = time.perf_counter_ns()
        self._spans.append((layer, name, start_ns, end_ns))
        if self._tracer is not None:
            self._tracer.compute(layer, name, start_ns, end_ns, ())

    def _record(self, recorder: RoutingRecorder, call: RoutedCall, dense_ns: int) -> None:
        n_rows = np.bincount(call.ids.ravel())[call.experts].tolist()
        tiers = self._coordinator.where(call.layer, call.experts)
        recorder.call(call.layer, call.experts, n_rows, tiers, dense_ns)

    async def _guess(self, call: RoutedCall) -> None:
        if self._lookahead is None:
            return
        self._lookahead.observe(call.layer, call.experts)
        start_ns = time.perf_counter_ns()
        if call.guesses_ahead:
            guesses = await self._sent_guesses(self._lookahead, call)
        else:
            guesses = await self._predicted(self._lookahead, call)
        layer = call.layer
        self._spans.append((layer, "lookahead", start_ns, time.perf_counter_ns()))
        if self._settled:
            await self._coordinator.settled()
        for target, experts in guesses:
            self._coordinator.guess(target, experts)
        if self._recorder is not None:
            for target, experts in guesses:
                self._recorder.guess(target, experts)
            self._recorder.times(guess_ns=time.perf_counter_ns() - start_ns)
        if self._tracer is not None:
            self._tracer.router(layer, start_ns, time.perf_counter_ns())

    async def _predicted(
        self, lookahead: Lookahead, call: RoutedCall
    ) -> list[tuple[int, list[int]]]:
        """Guesses from the routers of the next layers."""

        def look() -> list[tuple[int, Tensor]]:
            lookahead.learn(call.layer, call.ranked)
            streams = call.ahead or call.streams
            return lookahead.look(call.layer, streams, call.x, call.next_scores)

        def predict() -> list[tuple[int, list[int]]]:
            return lookahead.choose(call.layer, call.n_rows, look())

        if self._device.name != "cuda":
            return await self._compute(self._costs.guess * call.n_rows, predict)
        scored = [(target, await self._device.fetch(scores)) for target, scores in look()]
        return lookahead.choose(call.layer, call.n_rows, scored)

    async def _sent_guesses(
        self, lookahead: Lookahead, call: RoutedCall
    ) -> list[tuple[int, list[int]]]:
        """Guesses that the step itself makes; they follow the ids within some microseconds."""
        target = call.layer + 1
        if not lookahead.wants(target):
            return []
        until_ns = time.perf_counter_ns() + _GUESS_PATIENCE_NS
        while not (named := call.guess_next()):
            if time.perf_counter_ns() > until_ns:
                return []
            await asyncio.sleep(0)
        named = lookahead.named(target, named)
        experts = lookahead.accept(call.layer, target, call.n_rows, named)
        return [(target, experts)] if experts else []

    async def _arrival(self, call: RoutedCall) -> None:
        """Let the loop turn until the call's expert ids have come from the device."""
        until_ns = time.perf_counter_ns() + _ARRIVAL_PATIENCE_NS
        while not call.arrived():
            if self._ordered is not None:
                self._ordered.poll()
            if time.perf_counter_ns() > until_ns:
                raise DeviceError(f"layer {call.layer}: no expert ids have come from the device")
            await asyncio.sleep(0)
        self._yielded_ns = time.perf_counter_ns()

    async def _finish(self, call: RoutedCall, demand: Demand, *, guesses: bool) -> None:
        """Run every expert of the call: those that are resident first, the others as they come.

        With `guesses` also guess, once at most one read is left.
        """
        while True:
            if guesses and not demand.ready and demand.n_unread <= 1:
                guesses = False
                await self._guess(call)
            leases = await self._take(demand)
            if guesses and not demand.n_unread:  # the drive has nothing to do
                guesses = False
                await self._guess(call)
            if not leases:
                break
            await self._run(call, demand, leases)

    def _guesses_late(self, call: RoutedCall) -> bool:
        """Whether to guess while experts run and arrive, not before.

        Reads of guesses come after those of demands anyway, and what has run by then makes the
        guess a better one. Guesses that come from the GPU are on their way already.
        """
        return call.n_rows == 1 and not self._settled and self._device.name != "cuda"

    async def _run(self, call: RoutedCall, demand: Demand, leases: list[Lease]) -> None:
        """Run some experts of the call and give them back."""
        if not leases:
            return
        arena = self._coordinator.arena
        cost = call.cost // max(1, len(call.experts))
        start_ns = time.perf_counter_ns()
        if self._ordered is not None:
            for lease in leases:
                if lease.copy is not None:
                    self._ordered.follow(lease.copy)
        await self._compute(cost * len(leases), lambda: call.run(arena, leases))
        end_ns = time.perf_counter_ns()
        self._spans.append((call.layer, "experts", start_ns, end_ns))
        if self._tracer is not None:
            experts = [lease.expert for lease in leases]
            self._tracer.compute(call.layer, "experts", start_ns, end_ns, experts)
        if self._recorder is not None:
            self._recorder.times(experts_ns=end_ns - start_ns)
        demand.release(leases)

    async def _take(self, demand: Demand) -> list[Lease]:
        """What is there; else what comes first; [] when nothing is left."""
        if self._settled:
            await self._coordinator.settled()
        leases = demand.take()
        if leases or not demand.missing:
            return leases
        start_ns = time.perf_counter_ns()
        leases = await demand.wait()
        self._spans.append((demand.layer, "wait", start_ns, time.perf_counter_ns()))
        if self._recorder is not None:
            self._recorder.times(wait_ns=time.perf_counter_ns() - start_ns)
        return leases

    def _end_layer(self, call: RoutedCall) -> None:
        layer = call.layer
        routed = self._counters.routed_calls
        routed[layer] = routed.get(layer, 0) + call.n_rows * call.top_k
        if layer in self._announced:
            self._announced[layer].clear()
        self._coordinator.end_layer(layer)

    async def _compute(self, cost: int, fn: Callable[[], T]) -> T:
        """Run `fn` here if it is short, else on the compute thread; let the loop turn at times."""
        if not self._device.inline(cost):
            result = await self._device.run(fn)
            self._yielded_ns = time.perf_counter_ns()
            return result
        if time.perf_counter_ns() - self._yielded_ns > _YIELD_AFTER_NS:
            await asyncio.sleep(0)
            self._yielded_ns = time.perf_counter_ns()
        return fn()


def _by_copies(leases: list[Lease]) -> tuple[list[Lease], list[Lease]]:
    """Those that compute can use at once, and those that it has to follow a copy for."""
    at_once = [lease for lease in leases if lease.copy is None]
    return at_once, [lease for lease in leases if lease.copy is not None]


def _advance(
    forward: Generator[RoutedCall, None, list[Tensor | None]],
) -> tuple[RoutedCall | None, list[Tensor | None]]:
    """The next call, or None and the logits. (StopIteration must not cross a future.)"""
    try:
        return next(forward), []
    except StopIteration as stop:
        return None, stop.value
