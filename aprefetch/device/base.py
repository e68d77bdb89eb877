"""What a device is to the rooms above it: memory, copies, tickets and a place to compute.

A device owns its arenas' memory, its copy queue and its compute thread or streams. It knows nothing
of experts, caches or eviction. Every callback it makes runs on the event loop's thread, and never
from inside the call that asked for it, so callers need not be re-entrant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from aprefetch.kernels.ops import Ops
from aprefetch.types import ALIGNMENT

__all__ = [
    "AddressedCopy",
    "Copy",
    "CopyDone",
    "Device",
    "HostArena",
    "MemoryInfo",
    "OrdersCopies",
    "Ticket",
]

T = TypeVar("T")

Copy = tuple[Tensor, Tensor]
"""(destination, source): uint8 tensors of one length."""

AddressedCopy = tuple[int, int, int]
"""(destination address, source address, bytes)."""

CopyDone = Callable[[Exception | None], None]


class MemoryInfo(NamedTuple):
    """Bytes of the device's own memory."""

    total_bytes: int
    free_bytes: int


class Ticket(Protocol):
    """Stands for all compute that was enqueued when it was made."""

    def done(self) -> bool:
        """Whether that compute has finished; never blocks."""
        ...


class HostArena(Protocol):
    """One aligned block of host memory that direct reads may land in."""

    @property
    def n_bytes(self) -> int:
        """Size of the block."""
        ...

    @property
    def tensor(self) -> Tensor:
        """The block as a uint8 tensor."""
        ...

    @property
    def view(self) -> memoryview:
        """The block as a writable buffer."""
        ...

    def close(self) -> None:
        """Give the memory back once nobody looks at it any more. Idempotent."""
        ...


class Device(Protocol):
    """Where slots live and compute runs."""

    name: str

    @property
    def ops(self) -> Ops:
        """The operations for tensors of this device."""
        ...

    def alloc_host(self, n_bytes: int, alignment: int = ALIGNMENT) -> HostArena:
        """One block of host memory (CUDA: pinned) that starts at a multiple of `alignment`.

        Raises:
            DeviceError: the memory is not to be had.
        """
        ...

    def alloc_slots(self, n_bytes: int) -> Tensor:
        """A uint8 tensor on the device, for slots; its start is a multiple of 256.

        Raises:
            OutOfDeviceMemoryError: the memory is not to be had.
        """
        ...

    def copy_async(self, copies: Sequence[Copy], done: CopyDone) -> None:
        """Start copies; `done(error | None)` follows on the loop thread, after this call returned.

        Must be called on the loop thread.
        """
        ...

    def record(self) -> Ticket:
        """A ticket for all compute enqueued so far."""
        ...

    def when_done(self, ticket: Ticket, callback: Callable[[], None]) -> None:
        """Call `callback()` on the loop thread, later, once the ticket is done."""
        ...

    async def wait(self, ticket: Ticket) -> None:
        """Return once the ticket is done."""
        ...

    async def fetch(self, tensor: Tensor) -> Tensor:
        """`tensor` on the host, as compute enqueued so far leaves it; the loop goes on meanwhile.

        Where it is there already it is not copied.
        """
        ...

    def inline(self, cost: int) -> bool:
        """May compute of `cost` (weight bytes touched times rows) run on the loop thread?"""
        ...

    async def run(self, fn: Callable[[], T]) -> T:
        """Run `fn` on the one compute thread while the loop goes on.

        When the caller is cancelled the cancellation is raised after `fn` has ended: a thread
        cannot be stopped, and `fn` may still read slots.
        """
        ...

    def memory_info(self) -> MemoryInfo:
        """Total and free bytes of the device's memory."""
        ...

    def close(self) -> None:
        """End the threads after the work they have. Idempotent; blocks for that work."""
        ...


@runtime_checkable
class OrdersCopies(Protocol):
    """What a device offers besides if compute can be put behind copies in its own order.

    Then nobody on the host has to learn that a copy has landed before compute that needs it is
    enqueued. All methods belong to the loop thread.
    """

    @property
    def orders_copies(self) -> bool:
        """Whether this holds for the host memory that was allocated so far."""
        ...

    def enqueue_copies(self, copies: Sequence[AddressedCopy]) -> Ticket:
        """Start copies to the device in the order of the calls.

        Raises:
            DeviceError: they could not be started.
        """
        ...

    def enqueue_copies_back(self, copies: Sequence[AddressedCopy]) -> Ticket:
        """The same from the device to host memory, beside copies to the device.

        In no order with anything else: whoever wrote the source must be known to have ended.

        Raises:
            DeviceError: they could not be started.
        """
        ...

    def follow(self, ticket: Ticket) -> None:
        """Compute enqueued from now on runs after the ticket's work."""
        ...

    def poll(self) -> None:
        """Make those calls of `when_done` that are due, now."""
        ...

    def expedite(self) -> None:
        """Somebody waits for what was given to `when_done`: call promptly from now on.

        Without it, calls may come some milliseconds late unless somebody polls.
        """
        ...
