"""A CUDA device: pinned host memory, slots in device memory, copies on a stream of their own.

Compute is enqueued on PyTorch's current stream by whoever calls the operations; uploads run on one
copy stream. The loop's thread never waits for a stream, and compute that needs an upload is made to
follow it on the GPU (`follow`), so that the host need not learn of it first. See `cuda_events` for
how the end of work is noticed.

Host memory is an anonymous mapping that is registered with the driver. Where that fails the arena
stays pageable: `n_pageable_bytes` counts it, and its copies go through a thread, since a copy from
pageable memory blocks its caller; copies are not ordered then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from aprefetch.device.base import AddressedCopy, Copy, CopyDone, MemoryInfo, Ticket
from aprefetch.device.cpu import CpuHostArena
from aprefetch.device.cuda_copies import CopyStream
from aprefetch.device.cuda_events import CudaTicket, Watch, new_event
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
        self._copy_watch = Watch("aprefetch-copy-watch", self.torch_device)
        self._back_watch = Watch("aprefetch-back-watch", self.torch_device)
        self._copies = CopyStream(self.torch_device, self._copy_watch)
        self._copies_back = CopyStream(self.torch_device, self._back_watch, is_back=True)
        self._compute_watch = Watch("aprefetch-compute-watch", self.torch_device)
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
        if self._pageable and any(self._is_pageable(side) for copy in copies for side in copy):
            self._copy_pageable(copies, done)
            return
        try:
            stream = self._stream_for(copies)
            event = self._enqueue(copies, stream)
        except RuntimeError as failure:
            error = DeviceError(f"a copy failed on the GPU: {failure}")
            asyncio.get_running_loop().call_soon(done, error)
            return
        stream.watch.add(event, lambda: done(None))
        stream.watch.expedite()

    def _stream_for(self, copies: Sequence[Copy]) -> CopyStream:
        return self._copies if copies and copies[0][0].is_cuda else self._copies_back

    def _enqueue(self, copies: Sequence[Copy], stream: CopyStream) -> torch.cuda.Event:
        event = new_event()
        with torch.cuda.stream(stream.stream):
            for dst, src in copies:
                dst.copy_(src, non_blocking=True)
            event.record(stream.stream)
        return event

    @property
    def orders_copies(self) -> bool:
        """Only copies from pinned memory are."""
        return not self._pageable

    def enqueue_copies(self, copies: Sequence[AddressedCopy]) -> CudaTicket:
        """See `OrdersCopies`; sources must be pinned."""
        if self._closed:
            raise RuntimeClosedError("the device was closed")
        return self._copies.enqueue(copies)

    def enqueue_copies_back(self, copies: Sequence[AddressedCopy]) -> CudaTicket:
        """See `OrdersCopies`; targets must be pinned."""
        if self._closed:
            raise RuntimeClosedError("the device was closed")
        return self._copies_back.enqueue(copies)

    def follow(self, ticket: Ticket) -> None:
        assert isinstance(ticket, CudaTicket)
        torch.cuda.current_stream(self.torch_device).wait_event(ticket.event)

    def poll(self) -> None:
        self._copy_watch.poll()
        self._back_watch.poll()
        self._compute_watch.poll()

    def expedite(self) -> None:
        self._copy_watch.expedite()
        self._back_watch.expedite()
        self._compute_watch.expedite()

    def _is_pageable(self, side: Tensor) -> bool:
        at = side.data_ptr()
        return any(start <= at < stop for start, stop in self._pageable)

    def _copy_pageable(self, copies: Sequence[Copy], done: CopyDone) -> None:
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, thread_name_prefix="aprefetch-copy")
        loop = asyncio.get_running_loop()

        def work() -> None:
            error: Exception | None = None
            try:
                torch.cuda.set_device(self.torch_device)
                self._enqueue(copies, self._stream_for(copies)).synchronize()
            except RuntimeError as failure:
                error = DeviceError(f"a copy failed on the GPU: {failure}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(done, error)

        self._copier.submit(work)

    # Compute

    def record(self) -> CudaTicket:
        event = new_event()
        event.record()
        return CudaTicket(event)

    def when_done(self, ticket: Ticket, callback: Callable[[], None]) -> None:
        if not isinstance(ticket, CudaTicket) or ticket.done():
            asyncio.get_running_loop().call_soon(callback)
        else:
            (ticket.watch or self._compute_watch).add(ticket.event, callback)

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
        self._compute_watch.expedite()
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
        self._copy_watch.close()
        self._back_watch.close()
        self._compute_watch.close()
        torch.cuda.synchronize(self.torch_device)
