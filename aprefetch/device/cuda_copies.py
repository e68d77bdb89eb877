"""Copies between pinned host memory and the device on a stream of their own, by address.

The driver is called directly: a copy of an expert's pieces is three calls of about two microseconds
each, where tensors would be sliced and dispatched six times.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch

from aprefetch.device.base import AddressedCopy
from aprefetch.device.cuda_events import CudaTicket, Watch, new_event
from aprefetch.errors import DeviceError

__all__ = ["CopyStream"]


class CopyStream:
    """One stream for copies to the device, or for copies back. Belongs to the loop's thread.

    Args:
        watch: looks after this stream's events.
        is_back: from the device to the host.

    Raises:
        DeviceError: the driver's library cannot be called.
    """

    def __init__(self, device: torch.device, watch: Watch, *, is_back: bool = False) -> None:
        self._device, self.watch = device, watch
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle = ctypes.c_void_p(self.stream.cuda_stream)
        self._bound: int | None = None  # the thread that has the device's context
        try:
            # PyDLL: the interpreter's lock is kept. The calls are shorter than giving it up.
            driver = ctypes.PyDLL("libcuda.so.1")
            self._copy = driver.cuMemcpyDtoHAsync_v2 if is_back else driver.cuMemcpyHtoDAsync_v2
        except (OSError, AttributeError) as error:
            raise DeviceError(f"the CUDA driver's library cannot be used: {error}") from error
        # Addresses of either side are 64 bits wide here.
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._copy.restype = ctypes.c_int

    def enqueue(self, copies: Sequence[AddressedCopy]) -> CudaTicket:
        """Start copies from or to pinned memory; the ticket is done after the last.

        Raises:
            DeviceError: the driver refused.
        """
        thread = threading.get_ident()
        if self._bound != thread:
            torch.cuda.set_device(self._device)
            torch.cuda.current_stream(self._device).query()  # makes the context this thread's
            self._bound = thread
        for target, source, n_bytes in copies:
            code = self._copy(target, source, n_bytes, self._handle)
            if code:
                raise DeviceError(f"a copy of {n_bytes} bytes failed: CUDA error {code}")
        event = new_event()
        event.record(self.stream)
        return CudaTicket(event, self.watch)
