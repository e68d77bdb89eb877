"""The CPU as a device: slots are plain aligned memory, an upload is a real copy.

Owns one copy thread and one compute thread, both started when first needed. Compute on a CPU is
finished when the call returns, so tickets are done from the start. Copies below `inline_copy_bytes`
are made at once on the loop thread; larger ones go to the copy thread, which gives up the GIL while
it copies. Both kinds report through one batched callback per loop turn.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from aprefetch.device.base import Copy, CopyDone, MemoryInfo, Ticket
from aprefetch.errors import DeviceError, OutOfDeviceMemoryError, RuntimeClosedError
from aprefetch.types import ALIGNMENT, align_up

if TYPE_CHECKING:
    from aprefetch.kernels.ops import Ops

__all__ = ["CpuDevice", "CpuHostArena"]

T = TypeVar("T")

INLINE_COPY_BYTES = 256 * 1024
"""A copy up to this size takes some 50 us: less than the way to another thread and back."""

INLINE_COMPUTE_COST = 3 * 512 * 1024
"""Weight bytes times rows that the slowest compiled kernel (4 bytes per ns) gets through in well
under a millisecond. The way to another thread and back takes 100 to 200 us."""


class CpuHostArena:
    """Anonymous memory from `mmap`, page-aligned, seen as a tensor and as a buffer."""

    def __init__(self, n_bytes: int, alignment: int = ALIGNMENT) -> None:
        self.n_bytes = n_bytes
        slack = alignment if alignment > mmap.PAGESIZE else 0
        size = max(align_up(n_bytes, mmap.PAGESIZE), mmap.PAGESIZE) + slack
        try:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise DeviceError(
                f"cannot get {n_bytes} bytes of host memory ({error}); lower ram_budget"
            ) from error
        whole = torch.frombuffer(block, dtype=torch.uint8)
        at = align_up(whole.data_ptr(), alignment) - whole.data_ptr()
        self._block: mmap.mmap | None = block
        self._tensor: Tensor | None = whole[at : at + n_bytes]
        self._view: memoryview | None = memoryview(block)[at : at + n_bytes]

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            raise RuntimeClosedError("the host arena was closed")
        return self._tensor

    @property
    def view(self) -> memoryview:
        if self._view is None:
            raise RuntimeClosedError("the host arena was closed")
        return self._view

    def close(self) -> None:
        """Forget the block; it is unmapped when the last view of it is gone, never before."""
        self._tensor = None
        self._view = None
        self._block = None


class _DoneTicket:
    __slots__ = ()

    def done(self) -> bool:
        return True


_DONE = _DoneTicket()


class CpuDevice:
    """The CPU device.

    Args:
        kernels: which CPU kernels to use: "auto", or a name that the kernels room knows.
        n_threads: threads that one kernel may use; None leaves the choice to the kernels.
        inline_copy_bytes: the largest copy made on the loop thread.
    """

    name = "cpu"

    def __init__(
        self,
        kernels: str = "auto",
        n_threads: int | None = None,
        *,
        inline_copy_bytes: int = INLINE_COPY_BYTES,
    ) -> None:
        self._kernels = kernels
        self._n_threads = n_threads
        self._ops: Ops | None = None
        self._inline_copy_bytes = inline_copy_bytes
        self._closed = False
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finished: list[tuple[CopyDone, Exception | None]] = []  # under _lock
        self._work: queue.SimpleQueue[tuple[Sequence[Copy], CopyDone] | None] = queue.SimpleQueue()
        self._copier: threading.Thread | None = None
        self._compute: ThreadPoolExecutor | None = None

    @property
    def ops(self) -> Ops:
        """The CPU operations; importing and compiling them waits for the first use."""
        if self._ops is None:
            from aprefetch.kernels.cpu import cpu_ops

            self._ops = cpu_ops(self._kernels, self._n_threads)  # type: ignore[arg-type]
        return self._ops

    # Memory

    def alloc_host(self, n_bytes: int, alignment: int = ALIGNMENT) -> CpuHostArena:
        return CpuHostArena(n_bytes, alignment)

    def alloc_slots(self, n_bytes: int) -> Tensor:
        try:
            return CpuHostArena(n_bytes).tensor
        except DeviceError as error:
            raise OutOfDeviceMemoryError(
                f"cannot get {n_bytes} bytes for the device cache; lower vram_budget"
            ) from error

    def memory_info(self) -> MemoryInfo:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total
        try:
            with open("/proc/meminfo", encoding="ascii") as lines:
                for line in lines:
                    if line.startswith("MemAvailable:"):
                        free = int(line.split()[1]) * 1024
                        break
        except (OSError, ValueError):
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return MemoryInfo(total, free)

    # Copies

    def copy_async(self, copies: Sequence[Copy], done: CopyDone) -> None:
        if self._closed:
            raise RuntimeClosedError("the device was closed")
        self._loop = asyncio.get_running_loop()
        if sum(dst.numel() for dst, _ in copies) <= self._inline_copy_bytes:
            self._finish(done, _copy(copies))
            return
        if self._copier is None:
            self._copier = threading.Thread(target=self._copy_forever, name="aprefetch-copy")
            self._copier.start()
        self._work.put((copies, done))

    def _copy_forever(self) -> None:
        while (work := self._work.get()) is not None:
            copies, done = work
            self._finish(done, _copy(copies))
            del work, copies, done  # no reference to the arena while waiting

    def _finish(self, done: CopyDone, error: Exception | None) -> None:
        """Note a finished copy; the first of a batch asks the loop to collect them."""
        with self._lock:
            self._finished.append((done, error))
            first = len(self._finished) == 1
        loop = self._loop
        if first and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        with self._lock:
            finished, self._finished = self._finished, []
        for done, error in finished:
            done(error)

    # Compute

    def record(self) -> Ticket:
        return _DONE

    def when_done(self, ticket: Ticket, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)

    async def wait(self, ticket: Ticket) -> None:
        await asyncio.sleep(0)

    async def fetch(self, tensor: Tensor) -> Tensor:
        return tensor

    def inline(self, cost: int) -> bool:
        return cost <= INLINE_COMPUTE_COST

    async def run(self, fn: Callable[[], T]) -> T:
        if self._closed:
            raise RuntimeClosedError("the device was closed")
        if self._compute is None:
            self._compute = ThreadPoolExecutor(1, thread_name_prefix="aprefetch-compute")
        future = asyncio.get_running_loop().run_in_executor(self._compute, fn)
        return await _uninterrupted(future)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._copier is not None:
            self._work.put(None)
            self._copier.join()
            self._copier = None
        if self._compute is not None:
            self._compute.shutdown(wait=True)
            self._compute = None
        close_ops = getattr(self._ops, "close", None)  # only kernels with threads have one
        if close_ops is not None:
            close_ops()


async def _uninterrupted(future: asyncio.Future[T]) -> T:
    """Await `future` to its end even when cancelled, then raise the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # taken, so that it is not reported as never retrieved
        raise cancelled
    return future.result()


def _copy(copies: Sequence[tuple[Any, Any]]) -> Exception | None:
    """Copy each pair. NumPy's copy is one memcpy without the GIL and starts no threads."""
    try:
        for dst, src in copies:
            np.copyto(dst.numpy(), src.numpy(), casting="no")
    except Exception as error:  # reported to whoever asked for the copy
        return error
    return None
