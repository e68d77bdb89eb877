"""A CPU device whose copies wait, or fail, as told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from torch import Tensor

from aprefetch.device.base import Copy, CopyDone
from aprefetch.device.cpu import CpuDevice

NEVER: Callable[[bool], bool] = lambda is_back: False  # noqa: E731


class ScriptedDevice(CpuDevice):
    """`holds` and `fails` are asked with whether a copy goes back to host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Sequence[Copy], CopyDone]] = []
        self.holds = NEVER
        self.fails = NEVER
        self.n_back = 0
        self._slots = range(0)

    def alloc_slots(self, n_bytes: int) -> Tensor:
        slots = super().alloc_slots(n_bytes)
        self._slots = range(slots.data_ptr(), slots.data_ptr() + n_bytes)
        return slots

    def copy_async(self, copies: Sequence[Copy], done: CopyDone) -> None:
        is_back = copies[0][0].data_ptr() not in self._slots
        self.n_back += is_back
        if self.fails(is_back):
            asyncio.get_running_loop().call_soon(done, RuntimeError("bus error"))
        elif self.holds(is_back):
            self.held.append((copies, done))
        else:
            super().copy_async(copies, done)

    def let_go(self) -> None:
        """Make the copies that were held, the last first."""
        while self.held:
            super().copy_async(*self.held.pop())
