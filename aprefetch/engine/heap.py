"""Gives memory that requests freed back to the system.

The C library keeps freed blocks for later; in pieces between blocks in use they add up, so that a
process that serves many requests of different lengths seems to grow without end. Trimming takes
milliseconds: it is done when no request runs, and only after the process has grown.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable

__all__ = ["HeapTrimmer"]

log = logging.getLogger(__name__)

_GROWTH_BYTES = 16 << 20


class HeapTrimmer:
    """Trims the C library's heap once resident memory is `growth_bytes` above the last time's.

    Does nothing where the C library is not glibc, or the system does not tell resident memory.
    """

    def __init__(self, growth_bytes: int = _GROWTH_BYTES) -> None:
        self._growth_bytes = growth_bytes
        self._trim = _find_trim()
        self._lowest_bytes = 0
        self.n_trims = 0

    def when_idle(self) -> None:
        """To be called whenever no request runs; a few microseconds if there is nothing to do."""
        if self._trim is None or resident_bytes() < self._lowest_bytes + self._growth_bytes:
            return
        self._trim(0)
        self.n_trims += 1
        self._lowest_bytes = resident_bytes()
        log.debug("trimmed the heap: %d bytes are resident", self._lowest_bytes)


def resident_bytes() -> int:
    """Physical memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _find_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
