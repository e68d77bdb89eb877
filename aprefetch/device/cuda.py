"""A CUDA device: pinned host memory, slots in device memory, copies on a stream of their own.

Compute is enqueued on PyTorch's current stream by whoever calls the operations; uploads run on one
copy stream. The loop's thread never waits for a stream: two threads, one per kind of work, sleep on
blocking events and report in batches, through one callback per loop turn. The one for uploads also
enqueues them: a large copy may keep its caller for as long as it takes. A copy's `done`
comes after its bytes have landed, so compute that is enqueued later needs no stream-side wait.

Host memory is an anonymous mapping that is registered with the driver. Where that fails the arena
stays pageable: `n_pageable_bytes` counts it, and its copies go through the copy thread, since a
copy from pageable memory blocks its caller.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from aprefetch.device.base import Copy, CopyDone, MemoryInfo, Ticket
from aprefetch.device.cpu import CpuHostArena
from aprefetch.errors import DeviceError, OutOfDeviceMemoryError, RuntimeClosedError
from aprefetch.types import ALIGNMENT

if TYPE_CHECKING:
    from aprefetch.kernels.ops import Ops

__all__ = ["CudaDevice", "CudaHostArena", "CudaTicket"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_RESERVE_BYTES = 512 * 2**20
"""Device memory that slots leave free: activations, caches, compiled kernels."""

_POLLS_BEFORE_SLEEP = 2000


class CudaHostArena(CpuHostArena):
    """A page-aligned block, pinned if the driver allows it."""

    def __init__(self, n_bytes: int, alignment: int = ALIGNMENT) -> None:
        super().__init__(n_bytes, alignment)
        self.is_pinned = False
        self._address = self.tensor.data_ptr()
        if n_bytes == 0:
            return
        try:
            code = int(self._runtime().cudaHostRegister(self._address, n_bytes, 0))
        except RuntimeError:
            code = -1
        self.is_pinned = code == 0
        if not self.is_pinned:
            _absorb_error()
            _log.warning(
                "could not pin %d bytes of host memory (CUDA error %d); uploads will be slower. "
                "Lower ram_budget, or raise the limit on locked memory (ulimit -l)",
                n_bytes,
                code,
            )

    @staticmethod
    def _runtime() -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Unpin and forget the block; no copy may be under way. Idempotent."""
        if self.is_pinned:
            self.is_pinned = False
            if int(self._runtime().cudaHostUnregister(self._address)) != 0:
                _absorb_error()
        super().close()


def _absorb_error() -> None:
    """A failed runtime call leaves an error behind that the next launch would report as its own."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        _log.debug("an error of an earlier CUDA call was taken back")


class CudaTicket:
    """Stands for the compute that was on the stream when it was made."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether that compute has finished; never blocks."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


_Waiting = tuple[torch.cuda.Event, Callable[[Exception | None], None]]


def _awaited(event: torch.cuda.Event) -> Exception | None:
    """Sleep until the event; the error that the GPU reported, if it did."""
    try:
        event.synchronize()
    except RuntimeError as failure:
        return DeviceError(f"the GPU reported an error: {failure}")
    return None


class _Waiter:
    """One thread that sleeps on events in the order given and reports on the loop's thread."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._work: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._finished: list[tuple[Callable[[Exception | None], None], Exception | None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, event: torch.cuda.Event, done: Callable[[Exception | None], None]) -> None:
        """Call `done(error | None)` on the running loop's thread after `event`."""
        self._loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name)
            self._thread.start()
        self._work.put((event, done))

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while (work := self._work.get()) is not None:
            event, done = work
            self.report(done, _awaited(event))
            del work, event, done

    def report(self, done: Callable[[Exception | None], None], error: Exception | None) -> None:
        """Have `done` called on the loop's thread, with others of the same moment."""
        with self._lock:
            self._finished.append((done, error))
            first = len(self._finished) == 1
        loop = self._loop
        if first and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            finished, self._finished = self._finished, []
        for done, error in finished:
            done(error)

    def close(self) -> None:
        """End the thread after the events it has."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None


_Upload = tuple[Sequence[Copy], CopyDone]


class _Copier(_Waiter):
    """A waiter that enqueues copies itself: all it has, before it sleeps on the oldest.

    Args:
        enqueue: starts copies and returns the event after them; called on this thread.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        enqueue: Callable[[Sequence[Copy]], torch.cuda.Event],
    ) -> None:
        super().__init__(name, device)
        self._enqueue = enqueue
        self._uploads: queue.SimpleQueue[_Upload | None] = queue.SimpleQueue()

    def copy(self, copies: Sequence[Copy], done: CopyDone) -> None:
        """Call `done(error | None)` on the running loop's thread after the copies."""
        self._loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name)
            self._thread.start()
        self._uploads.put((copies, done))

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        under_way: deque[_Waiting] = deque()
        goes_on = True
        while goes_on or under_way:
            while goes_on and not (under_way and self._uploads.empty()):
                upload = self._uploads.get()
                if upload is None:
                    goes_on = False
                else:
                    self._begin(upload, under_way)
                del upload  # no reference to the arena while waiting
            if under_way:
                event, done = under_way.popleft()
                self.report(done, _awaited(event))
                del event, done

    def _begin(self, upload: _Upload, under_way: deque[_Waiting]) -> None:
        copies, done = upload
        try:
            under_way.append((self._enqueue(copies), done))
        except RuntimeError as failure:
            self.report(done, DeviceError(f"a copy to the GPU failed: {failure}"))

    def close(self) -> None:
        """End the thread after the copies it has."""
        if self._thread is not None:
            self._uploads.put(None)
            self._thread.join()
            self._thread = None


class CudaDevice:
    """One NVIDIA GPU.

    Args:
        index: which one, as PyTorch counts them.
        reserve_bytes: device memory that `alloc_slots` leaves free.

    Raises:
        DeviceError: there is no such device, or Triton is missing.
    """

    name = "cuda"

    def __init__(self, index: int = 0, *, reserve_bytes: int = DEFAULT_RESERVE_BYTES) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                "device cuda: no CUDA device can be used; install a CUDA build of PyTorch, check "
                "nvidia-smi, or choose the device 'cpu'"
            )
        if index >= torch.cuda.device_count():
            raise DeviceError(
                f"CUDA device {index} does not exist; there are {torch.cuda.device_count()}"
            )
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._reserve_bytes = reserve_bytes
        self._ops: Ops | None = None
        self._closed = False
        self._copies = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._copy_thread = _Copier("aprefetch-uploads", self.torch_device, self._enqueue)
        self._compute_waiter = _Waiter("aprefetch-compute-waiter", self.torch_device)
        self._copier: ThreadPoolExecutor | None = None
        self._compute: ThreadPoolExecutor | None = None
        self._pageable: list[tuple[int, int]] = []
        self.n_pinned_bytes = 0
        self.n_pageable_bytes = 0

    @property
    def ops(self) -> Ops:
        """The CUDA operations; Triton compiles each kernel on its first use."""
        if self._ops is None:
            try:
                from aprefetch.kernels.triton.ops import TritonOps
            except ImportError as error:
                raise DeviceError("the CUDA kernels need Triton: pip install triton") from error

            self._ops = TritonOps(self.torch_device)
        return self._ops

    # Memory

    def alloc_host(self, n_bytes: int, alignment: int = ALIGNMENT) -> CudaHostArena:
        arena = CudaHostArena(n_bytes, alignment)
        if arena.is_pinned:
            self.n_pinned_bytes += n_bytes
        elif n_bytes:
            self.n_pageable_bytes += n_bytes
            start = arena.tensor.data_ptr()
            self._pageable.append((start, start + n_bytes))
        return arena

    def alloc_slots(self, n_bytes: int) -> Tensor:
        free = self.memory_info().free_bytes
        if n_bytes > free - self._reserve_bytes:
            raise OutOfDeviceMemoryError(
                f"{n_bytes} bytes of slots do not fit: {free} bytes of device memory are free and "
                f"{self._reserve_bytes} of them are kept back; lower vram_budget to at most "
                f"{max(0, free - self._reserve_bytes)}"
            )
        try:
            return torch.empty(n_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemoryError(
                f"cannot get {n_bytes} bytes of device memory for slots; lower vram_budget"
            ) from error

    def memory_info(self) -> MemoryInfo:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        # What PyTorch holds without using it can be had as well.
        held = torch.cuda.memory_reserved(self.torch_device)
        return MemoryInfo(total, free + held - torch.cuda.memory_allocated(self.torch_device))

    # Copies

    def copy_async(self, copies: Sequence[Copy], done: CopyDone) -> None:
        if self._closed:
            raise RuntimeClosedError("the device was closed")
        if self._pageable and any(self._is_pageable(src) for _, src in copies):
            self._copy_pageable(copies, done)
            return
        self._copy_thread.copy(copies, done)

    def _enqueue(self, copies: Sequence[Copy]) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            for dst, src in copies:
                dst.copy_(src, non_blocking=True)
            event.record(self._copies)
        return event

    def _is_pageable(self, source: Tensor) -> bool:
        at = source.data_ptr()
        return any(start <= at < stop for start, stop in self._pageable)

    def _copy_pageable(self, copies: Sequence[Copy], done: CopyDone) -> None:
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, thread_name_prefix="aprefetch-copy")
        loop = asyncio.get_running_loop()

        def work() -> None:
            error: Exception | None = None
            try:
                torch.cuda.set_device(self.torch_device)
                self._enqueue(copies).synchronize()
            except RuntimeError as failure:
                error = DeviceError(f"a copy to the GPU failed: {failure}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(done, error)

        self._copier.submit(work)

    # Compute

    def record(self) -> CudaTicket:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return CudaTicket(event)

    def when_done(self, ticket: Ticket, callback: Callable[[], None]) -> None:
        if not isinstance(ticket, CudaTicket) or ticket.done():
            asyncio.get_running_loop().call_soon(callback)
        else:
            self._compute_waiter.add(ticket.event, lambda _: callback())

    async def wait(self, ticket: Ticket) -> None:
        for _ in range(_POLLS_BEFORE_SLEEP):  # short waits are not worth a trip to a thread
            if ticket.done():
                return
            await asyncio.sleep(0)
        arrived = asyncio.get_running_loop().create_future()

        def finish() -> None:
            if not arrived.done():
                arrived.set_result(None)

        self.when_done(ticket, finish)
        await arrived

    async def fetch(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        await self.wait(self.record())
        return pinned

    @property
    def label(self) -> str:
        """For people: what kind of device, and which."""
        return f"cuda, {torch.cuda.get_device_name(self.torch_device)}"

    def inline(self, cost: int) -> bool:
        """Always: on a GPU, compute is only enqueued."""
        return True

    async def run(self, fn: Callable[[], T]) -> T:
        if self._closed:
            raise RuntimeClosedError("the device was closed")
        if self._compute is None:
            self._compute = ThreadPoolExecutor(1, thread_name_prefix="aprefetch-compute")
        from aprefetch.device.cpu import _uninterrupted

        return await _uninterrupted(asyncio.get_running_loop().run_in_executor(self._compute, fn))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for pool in (self._copier, self._compute):
            if pool is not None:
                pool.shutdown(wait=True)
        self._copy_thread.close()
        self._compute_waiter.close()
        torch.cuda.synchronize(self.torch_device)
