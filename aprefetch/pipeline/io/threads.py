"""The system calls of readers, behind an object that wrappers can stand in for.

`PosixFiles` owns nothing: whoever opens a descriptor closes it. `preadv` releases the GIL, so
blocking threads do not hold up the event loop.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

__all__ = ["FileStatus", "Files", "PosixFiles", "is_transparent", "quick_status"]


class FileStatus(NamedTuple):
    """What tells whether an open file is still the one that was opened."""

    size: int
    mtime_ns: int


class Files(Protocol):
    """The four calls a reader makes. All block, and may be called from any thread."""

    def open(self, path: Path, *, direct: bool) -> int:
        """A descriptor for reading, past the page cache if `direct`. Raises OSError."""
        ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into `buffers` from byte `offset`; returns how many bytes came, 0 at the end."""
        ...

    def fstat(self, fd: int) -> FileStatus:
        """Size and time of change of the open file."""
        ...

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        ...


class PosixFiles:
    """The real calls."""

    is_transparent = True

    def open(self, path: Path, *, direct: bool) -> int:
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        if direct:
            flags |= getattr(os, "O_DIRECT", 0)  # absent on some systems: they read buffered
        return os.open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fstat(self, fd: int) -> FileStatus:
        status = os.fstat(fd)
        return FileStatus(status.st_size, status.st_mtime_ns)

    def close(self, fd: int) -> None:
        os.close(fd)


def is_transparent(files: Files) -> bool:
    """Does a read of its descriptors by other means do the same as its `preadv`?"""
    return bool(getattr(files, "is_transparent", False))


_AT_EMPTY_PATH = 0x1000
_SIZE_AND_MTIME = 0x200 | 0x40
_STATUS_BYTES = 256
_TIME = struct.Struct("<qI")


def _find_statx() -> Callable[..., int] | None:
    if sys.platform != "linux" or sys.byteorder != "little":
        return None
    try:
        statx = ctypes.PyDLL(None).statx
    except AttributeError:  # an old C library
        return None
    statx.argtypes = (
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int),
        *(ctypes.c_uint, ctypes.c_void_p),
    )
    return statx


_statx = _find_statx()


def quick_status(fd: int) -> FileStatus | None:
    """As `PosixFiles.fstat`, but keeps the interpreter's lock; None where that cannot be had.

    Getting the lock back may take longer than the call.
    """
    status = ctypes.create_string_buffer(_STATUS_BYTES)
    if _statx is None or _statx(fd, b"", _AT_EMPTY_PATH, _SIZE_AND_MTIME, status):
        return None
    raw = status.raw
    seconds, nanoseconds = _TIME.unpack_from(raw, 112)
    return FileStatus(int.from_bytes(raw[40:48], "little"), seconds * 1_000_000_000 + nanoseconds)
