"""A device whose compute can follow copies that have not ended, as on a GPU."""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Sequence

from aprefetch.device.base import AddressedCopy
from aprefetch.device.cpu import CpuDevice
from aprefetch.errors import DeviceError


class CopyTicket:
    def __init__(self, device: OrderedDevice, copies: Sequence[AddressedCopy]) -> None:
        self._device = device
        self.copies = list(copies)
        self.callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self not in self._device.under_way

    def end(self) -> None:
        for target, source, n_bytes in self.copies:
            ctypes.memmove(target, source, n_bytes)


class OrderedDevice(CpuDevice):
    """Copies end when the test says so, when compute follows them, or when somebody is in a hurry.

    What has ended is told only to those who poll.
    """

    def __init__(self) -> None:
        super().__init__()
        self.under_way: deque[CopyTicket] = deque()
        self.ended: list[CopyTicket] = []
        self.n_followed = 0
        self.n_back = 0
        self.is_broken = False
        self.is_deaf = False  # does not hurry

    orders_copies = True

    def enqueue_copies(self, copies: Sequence[AddressedCopy]) -> CopyTicket:
        if self.is_broken:
            raise DeviceError("bus error")
        self.under_way.append(CopyTicket(self, copies))
        return self.under_way[-1]

    def enqueue_copies_back(self, copies: Sequence[AddressedCopy]) -> CopyTicket:
        if self.is_broken:
            raise DeviceError("bus error")
        self.n_back += 1
        self.under_way.append(CopyTicket(self, copies))
        return self.under_way[-1]

    def follow(self, ticket: CopyTicket) -> None:
        self.n_followed += 1
        while ticket in self.under_way:
            self._end_oldest()

    def _end_oldest(self) -> None:
        ticket = self.under_way.popleft()
        ticket.end()
        self.ended.append(ticket)

    def when_done(self, ticket, callback) -> None:
        if isinstance(ticket, CopyTicket):
            ticket.callbacks.append(callback)
        else:
            super().when_done(ticket, callback)

    def poll(self) -> None:
        ended, self.ended = self.ended, []
        for ticket in ended:
            for callback in ticket.callbacks:
                callback()

    def expedite(self) -> None:
        if self.is_deaf:
            return
        self.poll()
        if self.under_way:
            while self.under_way:
                self._end_oldest()
            asyncio.get_running_loop().call_soon(self.poll)
