"""What alignment direct reads of a file need."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

from aprefetch.types import ALIGNMENT

__all__ = ["direct_io_alignment", "widest_alignment"]

_STATX_DIOALIGN = 0x2000
_AT_FDCWD = -100
_STATX_BYTES = 256
_DIO_FIELDS = struct.Struct("=II")  # memory alignment, offset alignment
_DIO_OFFSET = 0x98


def widest_alignment(*reported: int) -> int:
    """The alignment that satisfies all reported ones and never less than `ALIGNMENT`, in bytes.

    Reports that are 0 (unknown) or no power of two are ignored.
    """
    return max([ALIGNMENT, *(n for n in reported if n > 0 and n & (n - 1) == 0)])


def direct_io_alignment(path: Path) -> int:
    """Bytes that address, offset and length of a direct read of `path` must be multiples of.

    Asks the file system where it can answer; otherwise `ALIGNMENT`. Never raises.
    """
    return widest_alignment(*_ask_statx(path))


def _ask_statx(path: Path) -> tuple[int, int]:
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError, TypeError):
        return 0, 0
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    failed = statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, answer)
    mask = int.from_bytes(answer.raw[:4], sys.byteorder)
    if failed or not mask & _STATX_DIOALIGN:
        return 0, 0
    memory, offset = _DIO_FIELDS.unpack_from(answer.raw, _DIO_OFFSET)
    return int(memory), int(offset)
