"""GGUF metadata as a mapping whose values are decoded when asked for.

Owns the header's bytes. Opening a file only notes where each value begins, so a vocabulary of
130,000 tokens costs nothing until the tokenizer wants it. Decoded values are kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType

from aprefetch.errors import SourceError

__all__ = ["SCALARS", "Metadata"]

SCALARS: dict[int, struct.Struct] = {
    int(GGUFValueType.UINT8): struct.Struct("<B"),
    int(GGUFValueType.INT8): struct.Struct("<b"),
    int(GGUFValueType.UINT16): struct.Struct("<H"),
    int(GGUFValueType.INT16): struct.Struct("<h"),
    int(GGUFValueType.UINT32): struct.Struct("<I"),
    int(GGUFValueType.INT32): struct.Struct("<i"),
    int(GGUFValueType.FLOAT32): struct.Struct("<f"),
    int(GGUFValueType.BOOL): struct.Struct("<B"),
    int(GGUFValueType.UINT64): struct.Struct("<Q"),
    int(GGUFValueType.INT64): struct.Struct("<q"),
    int(GGUFValueType.FLOAT64): struct.Struct("<d"),
}
"""Value types of fixed size, by type id; `BOOL` is one byte, 0 or 1."""

_BOOL = int(GGUFValueType.BOOL)
_STRING = int(GGUFValueType.STRING)
_ARRAY = int(GGUFValueType.ARRAY)
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Metadata(Mapping[str, Any]):
    """Key -> value. Scalars are int, float, bool or str.

    Arrays of strings are `list[str]`, arrays of numbers are 1-D numpy arrays, arrays of arrays are
    lists of these. Reading a value raises `SourceError`, naming the key, when a string is not UTF-8
    or a boolean is neither 0 nor 1. `raw_strings` gives strings as the bytes they are.

    Args:
        header: the file's first bytes, up to the end of the tensor table.
        entries: key -> (type id, offset of the value in `header`), already checked for bounds.
        path: named in errors.
    """

    def __init__(self, header: bytes, entries: dict[str, tuple[int, int]], path: Path) -> None:
        self._header = header
        self._entries = entries
        self._path = path
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key in self._values:
            return self._values[key]
        type_id, at = self._entries[key]
        value, _ = self._decode(key, type_id, at)
        self._values[key] = value
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def decoded_keys(self) -> frozenset[str]:
        """Keys whose values were asked for so far."""
        return frozenset(self._values)

    def value_type(self, key: str) -> GGUFValueType:
        """The stored type of a value, without decoding it."""
        return GGUFValueType(self._entries[key][0])

    def array_length(self, key: str) -> int:
        """Number of elements of an array, without decoding it; `SourceError` if it is none."""
        type_id, at = self._entries[key]
        if type_id != _ARRAY:
            raise self._error(key, f"is of type {GGUFValueType(type_id).name}, not an array")
        return int(_U64.unpack_from(self._header, at + 4)[0])

    def raw_strings(self, key: str) -> list[bytes]:
        """An array of strings as bytes, whatever their encoding; `SourceError` if it is none."""
        type_id, at = self._entries[key]
        if type_id != _ARRAY or _U32.unpack_from(self._header, at)[0] != _STRING:
            raise self._error(key, "is not an array of strings")
        return self._strings(at)[0]

    def encoded(self, key: str) -> tuple[int, bytes]:
        """Type id and bytes of a value as they stand in the file, without decoding it."""
        type_id, at = self._entries[key]
        return type_id, self._header[at : self._end(type_id, at)]

    def _end(self, type_id: int, at: int) -> int:
        """The offset just after a value."""
        if type_id in SCALARS:
            return at + SCALARS[type_id].size
        if type_id == _STRING:
            return at + 8 + int(_U64.unpack_from(self._header, at)[0])
        element, count = struct.unpack_from("<IQ", self._header, at)
        if element in SCALARS:
            return at + 12 + int(count) * SCALARS[element].size
        if element == _STRING:
            return self._strings(at)[1]
        at += 12
        for _ in range(count):
            at = self._end(_ARRAY, at)
        return at

    def _strings(self, at: int) -> tuple[list[bytes], int]:
        header, unpack = self._header, _U64.unpack_from
        count = unpack(header, at + 4)[0]
        at += 12
        out = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(header, at)[0]
            out.append(header[start:at])
        return out, at

    def _decode(self, key: str, type_id: int, at: int) -> tuple[Any, int]:
        if type_id == _ARRAY:
            return self._decode_array(key, at)
        if type_id == _STRING:
            start = at + 8
            end = start + _U64.unpack_from(self._header, at)[0]
            return self._text(key, self._header[start:end]), end
        value = SCALARS[type_id].unpack_from(self._header, at)[0]
        if type_id == _BOOL:
            if value > 1:
                raise self._error(key, f"is a boolean with the value {value}")
            value = bool(value)
        return value, at + SCALARS[type_id].size

    def _decode_array(self, key: str, at: int) -> tuple[Any, int]:
        element, count = struct.unpack_from("<IQ", self._header, at)
        if element == _STRING:
            raw, end = self._strings(at)
            try:
                return [s.decode() for s in raw], end
            except UnicodeDecodeError:
                return [self._text(key, s, i) for i, s in enumerate(raw)], end
        at += 12
        if element == _ARRAY:
            out = []
            for _ in range(count):
                value, at = self._decode_array(key, at)
                out.append(value)
            return out, at
        fmt = SCALARS[element]
        # A copy: the header is not aligned, and callers may hand the array to torch.
        values = np.frombuffer(self._header, np.dtype(fmt.format), count, at).copy()
        if element == _BOOL:
            if count and values.max() > 1:
                raise self._error(key, "holds booleans that are neither 0 nor 1")
            values = values.astype(np.bool_)
        return values, at + count * fmt.size

    def _text(self, key: str, raw: bytes, index: int | None = None) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            where = "" if index is None else f" in element {index}"
            raise self._error(key, f"is not valid UTF-8{where} ({error.reason})") from error

    def _error(self, key: str, what: str) -> SourceError:
        return SourceError(
            f"metadata key {key!r} {what}; the file is damaged or of another kind than expected",
            path=self._path,
            key=key,
        )
