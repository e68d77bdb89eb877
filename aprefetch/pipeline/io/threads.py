"""The system calls of the threaded reader, behind an object that wrappers can stand in for.

`PosixFiles` owns nothing: whoever opens a descriptor closes it. `preadv` releases the GIL, so
blocking threads do not hold up the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

__all__ = ["FileStatus", "Files", "PosixFiles"]


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
