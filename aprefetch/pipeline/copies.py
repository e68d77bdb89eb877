"""One object's bytes between its landing slot and its device slot, in either direction.

The pieces of a read plan drop the ragged edges of direct reads on the way up, and reversed they
restore the layout that a later upload expects. Copies are started in the order in which they are
asked for and report in any order. Where the device orders compute behind copies they are enqueued
by address, and nobody waits for the report. Owns no memory and changes no state.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from torch import Tensor

from aprefetch.device.base import CopyDone, Device, OrdersCopies, Ticket
from aprefetch.errors import DeviceError
from aprefetch.types import Piece

__all__ = ["ArenaCopies"]


class ArenaCopies:
    """Copies between the two arenas of a coordinator.

    Args:
        landing, arena: host and device memory, uint8; allocated from `device` before.
    """

    def __init__(self, device: Device, landing: Tensor, arena: Tensor) -> None:
        self._device = device
        self._landing = landing
        self._arena = arena
        self._landing_address = landing.data_ptr()
        self._arena_address = arena.data_ptr()
        self.ordered: OrdersCopies | None = (
            device if isinstance(device, OrdersCopies) and device.orders_copies else None
        )
        """The device, if it orders compute behind copies from the memory that it has given out."""

    def start(
        self,
        pieces: Sequence[Piece],
        landing_offset: int,
        device_offset: int,
        done: CopyDone,
        *,
        back: bool = False,
    ) -> Ticket | None:
        """Copy to the device, or with `back` from it; both slots must stay as is until `done`.

        Returns what compute has to follow if the device sees to that; else None, and compute has to
        wait for `done`.
        """
        if self.ordered is None:
            copies = []
            for piece in pieces:
                at_host = landing_offset + piece.landing_offset
                at_device = device_offset + piece.device_offset
                host = self._landing[at_host : at_host + piece.n_bytes]
                device = self._arena[at_device : at_device + piece.n_bytes]
                copies.append((host, device) if back else (device, host))
            self._device.copy_async(copies, done)
            return None
        host_address = self._landing_address + landing_offset
        device_address = self._arena_address + device_offset
        try:
            if back:
                ticket = self.ordered.enqueue_copies_back(
                    [
                        (
                            host_address + p.landing_offset,
                            device_address + p.device_offset,
                            p.n_bytes,
                        )
                        for p in pieces
                    ]
                )
            else:
                ticket = self.ordered.enqueue_copies(
                    [
                        (
                            device_address + p.device_offset,
                            host_address + p.landing_offset,
                            p.n_bytes,
                        )
                        for p in pieces
                    ]
                )
        except DeviceError as error:
            asyncio.get_running_loop().call_soon(done, error)
            return None
        self._device.when_done(ticket, functools.partial(done, None))
        return ticket
