"""Parts for replaying a routing trace without a model, a drive or a clock.

The product's coordinator, caches, lookahead and step driver run as they are, on an event loop of
virtual time: it jumps to the next thing that happens. The drive, the copy engine and the math are
stood in for by how long they take. No byte is moved, so budgets of any size cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import selectors
import time as real_time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from aprefetch.models.base import Chunk, ModelInfo
from aprefetch.pipeline.reader import Priority, ReadCancelled, ReadJob
from aprefetch.routing_trace import RoutingTrace
from aprefetch.stats import Counters
from aprefetch.types import (
    ROLES,
    AlignedRead,
    ExpertKey,
    LayerLayout,
    Piece,
    ReadPlan,
    RoleLayout,
    align_up,
)

__all__ = ["Costs", "SimDevice", "SimDisk", "SimExperts", "SimModel", "virtual_time"]


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: time jumps ahead instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the replay is stuck: nothing is left to happen")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is virtual."""

    def __init__(self) -> None:
        self.clock = _JumpingSelector()
        super().__init__(self.clock)
        self._clock_resolution = 1e-12

    def time(self) -> float:
        return self.clock.now_s


class _VirtualClock:
    """Stands in for the module `time` where the product looks at the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def perf_counter_ns(self) -> int:
        return round(self._loop.clock.now_s * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_time, name)


@contextlib.contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """A loop, while whose context the product's clocks are its clock."""
    loop = VirtualLoop()
    clock = _VirtualClock(loop)
    modules = (
        "pipeline.demand",
        "pipeline.demotion",
        "pipeline.uploader",
        "engine.step",
        "trace",
        "routing_trace",
    )
    with contextlib.ExitStack() as stack:
        for name in modules:
            stack.enter_context(mock.patch(f"aprefetch.{name}.time", clock))
        try:
            yield loop
        finally:
            loop.close()


class SimExperts:
    """An `ExpertSource` with a trace's sizes and no file."""

    paths = ()
    tensor_names: frozenset[str] = frozenset()

    def __init__(
        self,
        role_bytes: dict[int, Sequence[int]],
        n_experts: int,
        *,
        landing_bytes: dict[int, int] | None = None,
        reads_per_object: int = 1,
        alignment: int = 4096,
    ) -> None:
        self.alignment = alignment
        self._n_reads = reads_per_object
        self._landing = landing_bytes or {}
        self.layers = {
            layer: LayerLayout(
                layer=layer,
                n_experts=n_experts,
                roles=tuple(
                    RoleLayout(role=role, ggml_type=0, n_out=1, n_in=n, n_bytes=n)
                    for role, n in zip(ROLES, sizes, strict=True)
                ),
            )
            for layer, sizes in sorted(role_bytes.items())
        }

    @classmethod
    def of(cls, trace: RoutingTrace) -> SimExperts:
        """The sizes of the traced model."""
        meta = trace.meta
        return cls(
            {int(layer): sizes for layer, sizes in meta["role_bytes"].items()},
            meta["n_experts"],
            landing_bytes={int(layer): n for layer, n in meta["landing_bytes"].items()},
            reads_per_object=meta["reads_per_object"],
            alignment=meta["alignment"],
        )

    def max_landing_bytes(self, layer: int) -> int:
        """See `ExpertSource`."""
        payload = self.layers[layer].payload_bytes
        return self._landing.get(layer, align_up(payload, self.alignment))

    def read_plan(self, key: ExpertKey) -> ReadPlan:
        """See `ExpertSource`."""
        total = self.max_landing_bytes(key.layer)
        size = align_up(-(-total // self._n_reads), self.alignment)
        reads = tuple(
            AlignedRead(file=0, offset=at, length=n, needed=n, landing_offset=at)
            for at in range(0, total, size)
            if (n := min(size, total - at))
        )
        payload = self.layers[key.layer].payload_bytes
        piece = Piece(landing_offset=0, device_offset=0, n_bytes=payload)
        return ReadPlan(key=key, reads=reads, pieces=(piece,), landing_bytes=total)


class _NoMemory:
    """Any part of it is itself."""

    def __getitem__(self, part: slice) -> _NoMemory:
        return self


class _NoArena:
    """A `HostArena` without memory."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.tensor = torch.empty(n_bytes, dtype=torch.uint8, device="meta")
        self.view: Any = _NoMemory()

    def close(self) -> None:
        """Nothing to give back."""


class _DoneTicket:
    def done(self) -> bool:
        return True


class SimDevice:
    """A `Device` on which compute takes what `spend` says, and copies go one after the other.

    Copies to the device and back do not hold each other up if the bus is duplex; if not, all
    report in the order in which they were asked for, as on the CPU.
    """

    name = "cpu"  # as there, compute is over when its call returns

    def __init__(self, upload_gbps: float, *, is_duplex: bool = True) -> None:
        self._is_duplex = is_duplex
        self._bytes_per_s = upload_gbps * 1e9
        self._slots: torch.Tensor | None = None
        self._copy_free_s = {True: 0.0, False: 0.0}  # by whether it is to the device
        self._due_s = 0.0

    def spend(self, ns: float) -> None:
        """The compute under way takes this long, besides."""
        self._due_s += ns / 1e9

    def alloc_host(self, n_bytes: int, alignment: int = 4096) -> Any:
        """See `Device`."""
        return _NoArena(n_bytes)

    def alloc_slots(self, n_bytes: int) -> torch.Tensor:
        """See `Device`."""
        self._slots = torch.empty(n_bytes, dtype=torch.uint8, device="meta")
        return self._slots

    def copy_async(self, copies: Sequence[Any], done: Callable[[Exception | None], None]) -> None:
        """See `Device`."""
        loop = asyncio.get_running_loop()
        n_bytes = sum(target.numel() for target, _ in copies)
        is_upload = not self._is_duplex or copies[0][0]._base is self._slots
        free_s = max(self._copy_free_s[is_upload], loop.time()) + n_bytes / self._bytes_per_s
        self._copy_free_s[is_upload] = free_s
        loop.call_at(free_s, done, None)

    def record(self) -> _DoneTicket:
        """See `Device`."""
        return _DoneTicket()

    def when_done(self, ticket: Any, callback: Callable[[], None]) -> None:
        """See `Device`."""
        asyncio.get_running_loop().call_soon(callback)

    def inline(self, cost: int) -> bool:
        """All compute takes its time."""
        return False

    async def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device`."""
        return tensor

    async def run(self, fn: Callable[[], Any]) -> Any:
        """See `Device`."""
        result = fn()
        due_s, self._due_s = self._due_s, 0.0
        await asyncio.sleep(due_s)
        return result

    def close(self) -> None:
        """Nothing to end."""


class SimDisk:
    """A `Reader` on a drive of stated bandwidth and latency, `queue_depth` reads at a time.

    As `PacedFiles`: reads share the bandwidth one after the other, latencies overlap.
    """

    def __init__(
        self, *, gbps: float, latency_s: float, queue_depth: int, counters: Counters
    ) -> None:
        self._counters = counters
        self._bytes_per_s, self._latency_s = gbps * 1e9, latency_s
        self._n_idle = queue_depth
        self._free_from_s = 0.0
        self._queue: list[tuple[int, int, ReadJob, int]] = []
        self._open: dict[ReadJob, int] = {}  # parts that are not over
        self._cancelled: set[ReadJob] = set()
        self._numbers = itertools.count()
        self.bytes_read = 0
        self.busy_s = 0.0

    def submit(self, job: ReadJob) -> None:
        """See `Reader`."""
        self._open[job] = len(job.reads)
        self._push(job, [read.length for read in job.reads])

    def _push(self, job: ReadJob, lengths: Sequence[int]) -> None:
        for n in lengths:
            heapq.heappush(self._queue, (int(job.priority), next(self._numbers), job, n))
        self._start()

    def promote(self, job: ReadJob, priority: Priority) -> None:
        """See `Reader`."""
        if priority < job.priority and job in self._open:
            job.priority = priority
            mine = [part for part in self._queue if part[2] is job]
            if mine:
                self._queue = [part for part in self._queue if part[2] is not job]
                heapq.heapify(self._queue)
                self._push(job, [part[3] for part in sorted(mine)])

    def cancel(self, job: ReadJob) -> None:
        """See `Reader`."""
        if job in self._open:
            mine = [part for part in self._queue if part[2] is job]
            self._queue = [part for part in self._queue if part[2] is not job]
            heapq.heapify(self._queue)
            self._cancelled.add(job)
            self._open[job] -= len(mine)
            if not self._open[job]:
                asyncio.get_running_loop().call_soon(self._finish, job)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._n_idle and self._queue:
            _, _, job, n_bytes = heapq.heappop(self._queue)
            self._n_idle -= 1
            now_s = loop.time()
            if not job.start_ns:
                job.start_ns = max(1, round(now_s * 1e9))
            self._free_from_s = max(self._free_from_s, now_s) + n_bytes / self._bytes_per_s
            self.busy_s += n_bytes / self._bytes_per_s
            self.bytes_read += n_bytes
            self._counters.bytes_read += n_bytes
            self._counters.reads += 1
            loop.call_at(self._free_from_s + self._latency_s, self._landed, job)

    def _landed(self, job: ReadJob) -> None:
        self._n_idle += 1
        self._open[job] -= 1
        if not self._open[job]:
            self._finish(job)
        self._start()

    def _finish(self, job: ReadJob) -> None:
        del self._open[job]
        job.end_ns = round(asyncio.get_running_loop().time() * 1e9)
        is_cancelled = job in self._cancelled
        self._cancelled.discard(job)
        job.done(job, ReadCancelled("cancelled") if is_cancelled else None)

    def statistics(self) -> Any:
        """Not needed."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Nanoseconds of compute. None: as long as the trace says."""

    dense_ns: float | None = None  # one layer up to its router
    guess_ns: float | None = None  # early routers of one layer's call
    shared_ns: float | None = None
    expert_ns: float | None = None  # one routed expert
    head_ns: float | None = None  # from the last layer to the next step


@dataclass(slots=True)
class _Call:
    """What the step driver needs of a `RoutedCall`."""

    layer: int
    experts: list[int]
    ids: np.ndarray
    top_k: int
    n_rows: int
    expert_ns: float
    spend: Callable[[float], None]
    cost: int = 0
    finishing: bool = False
    guesses_ahead: bool = False
    ahead: None = None
    next_scores: None = None
    ranked: None = None
    x: None = None
    streams: torch.Tensor = field(default_factory=lambda: torch.empty(1, 0))
    guesses_ahead: bool = False

    def arrived(self) -> bool:
        return True

    def run(self, arena: Any, leases: Sequence[Any]) -> None:
        self.spend(self.expert_ns * len(leases))


class SimModel:
    """Replays a trace's picks as a model would make them. `call` is the trace's row under way."""

    def __init__(self, trace: RoutingTrace, device: SimDevice, costs: Costs) -> None:
        meta = trace.meta
        self._trace, self._device, self._costs = trace, device, costs
        first = np.searchsorted(trace.calls["step"], np.arange(len(trace.steps) + 1))
        self._first_call: list[int] = first.tolist()
        self._row = (
            {(int(c["step"]), int(c["layer"])): i for i, c in enumerate(trace.calls)}
            if meta["token_routed_layers"]
            else {}
        )
        self.call = -1
        self.step = -1
        self.info = ModelInfo(
            architecture="replay",
            name=str(meta["model"]),
            n_layers=meta["n_layers"],
            n_vocab=len(trace.steps),
            context_length=len(trace.steps),
            hidden_size=1,
            n_experts=meta["n_experts"],
            num_experts_per_tok=meta["num_experts_per_tok"],
            routed_layers=tuple(trace.layers),
            token_routed_layers=tuple(meta["token_routed_layers"]),
        )

    def token_routed(self, layer: int, token_ids: np.ndarray) -> np.ndarray:
        """Token ids are numbers of steps."""
        return self._trace.picked(self._row[int(token_ids[0]), layer])["expert"].astype(np.int32)

    def forward(self, chunks: Sequence[Chunk]) -> Generator[_Call, None, list[None]]:
        """See `Model`."""
        trace, costs, spend = self._trace, self._costs, self._device.spend
        self.step = int(chunks[0].token_ids[0])
        rest_ns = float(trace.steps["end_ns"][self.step] - trace.steps["start_ns"][self.step])
        for i in range(self._first_call[self.step], self._first_call[self.step + 1]):
            self.call = i
            row, picked = trace.calls[i], trace.picked(i)
            rest_ns -= sum(
                float(row[f"{name}_ns"]) for name in ("dense", "guess", "shared", "experts", "wait")
            )
            spend(_or(costs.dense_ns, row["dense_ns"]))
            call = _Call(
                layer=int(row["layer"]),
                experts=picked["expert"].tolist(),
                ids=np.repeat(picked["expert"], picked["n_rows"]).astype(np.int32),
                top_k=self.info.num_experts_per_tok,
                n_rows=int(row["n_rows"]),
                expert_ns=_or(costs.expert_ns, float(row["experts_ns"]) / max(1, len(picked))),
                spend=spend,
            )
            call.streams = torch.empty(call.n_rows, 0)
            yield call
            spend(_or(costs.shared_ns, row["shared_ns"]))
            call.finishing = True
            yield call
        spend(_or(costs.head_ns, max(0.0, rest_ns)))
        return [None] * len(chunks)

    def guess_ns(self) -> float:
        """What the early routers of the call under way cost."""
        return _or(self._costs.guess_ns, self._trace.calls[self.call]["guess_ns"])


def _or(stated: float | None, traced: Any) -> float:
    return float(traced) if stated is None else stated
