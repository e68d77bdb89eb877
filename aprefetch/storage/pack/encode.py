"""Writing GGUF headers: metadata values and tensor records as bytes.

Values that come from a model file are passed through as they are (`Raw`), so a copied tokenizer is
the model's own to the byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from gguf.constants import GGUFValueType
from numpy.typing import NDArray

__all__ = ["Raw", "encode_header", "encode_pair", "text", "texts", "u32", "u64"]

_GGUF_VERSION = 3
_ARRAY_TYPES = {"<u4": GGUFValueType.UINT32, "<u8": GGUFValueType.UINT64}


class Raw(NamedTuple):
    """A metadata value as it stands in a file: type id, and the bytes after it."""

    type_id: int
    body: bytes


def text(value: str) -> Raw:
    """A string."""
    return Raw(int(GGUFValueType.STRING), _string(value.encode()))


def texts(values: Sequence[str]) -> Raw:
    """An array of strings."""
    head = struct.pack("<IQ", int(GGUFValueType.STRING), len(values))
    body = b"".join(_string(v.encode()) for v in values)
    return Raw(int(GGUFValueType.ARRAY), head + body)


def u32(value: int | Sequence[int]) -> Raw:
    """A number of 32 bits, or an array of them."""
    if isinstance(value, int):
        return Raw(int(GGUFValueType.UINT32), struct.pack("<I", value))
    return _numbers(np.asarray(value, dtype="<u4"))


def u64(value: int | Sequence[int] | NDArray[np.uint64]) -> Raw:
    """A number of 64 bits, or an array of them."""
    if isinstance(value, int):
        return Raw(int(GGUFValueType.UINT64), struct.pack("<Q", value))
    return _numbers(np.asarray(value, dtype="<u8"))


def _numbers(values: NDArray[np.unsignedinteger]) -> Raw:
    kind = _ARRAY_TYPES[values.dtype.str]
    head = struct.pack("<IQ", int(kind), values.size)
    return Raw(int(GGUFValueType.ARRAY), head + values.tobytes())


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def encode_pair(key: str, value: Raw) -> bytes:
    """One metadata pair as it stands in a header."""
    return _string(key.encode()) + struct.pack("<I", value.type_id) + value.body


def encode_header(
    pairs: Iterable[tuple[str, Raw]], tensors: Iterable[tuple[str, Sequence[int], int, int]]
) -> bytes:
    """A header up to the end of its tensor table.

    Args:
        pairs: metadata, in order.
        tensors: name, ggml dims, type id, and offset from the start of the data section.
    """
    encoded = [encode_pair(key, value) for key, value in pairs]
    table = [
        _string(name.encode()) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        for name, dims, kind, offset in tensors
    ]
    counts = struct.pack("<IQQ", _GGUF_VERSION, len(table), len(encoded))
    return b"".join([b"GGUF", counts, *encoded, *table])
