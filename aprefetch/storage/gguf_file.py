"""The header of one GGUF file: metadata and tensor table, checked before anything trusts them.

The header is read (not mapped: a file truncated later must not kill the process) in growing
chunks. Values are stepped over, not decoded; the tensor table is scanned once and checked as
arrays. Afterwards every tensor has a known type, whole blocks, an aligned start, bytes of its own
inside the file, and a unique name. Little-endian versions 2 and 3 are read.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)
from numpy.typing import NDArray

from aprefetch.errors import SourceError, UnsupportedModelError
from aprefetch.storage.metadata import SCALARS, Metadata
from aprefetch.storage.tensors import TensorTable
from aprefetch.types import align_up

__all__ = ["GgufHeader", "read_header"]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING = int(GGUFValueType.STRING)
_ARRAY = int(GGUFValueType.ARRAY)
_KNOWN_TYPES = frozenset(int(t) for t in GGUFValueType)

# Bounds far above any real file, so that a damaged count cannot cost minutes or gigabytes.
_MAX_HEADER_BYTES = 1 << 30
_MAX_VALUE_BYTES = 1 << 28
_MAX_NAME_BYTES = (1 << 16) - 1
_MAX_KEYS = 1 << 20
_MAX_TENSORS = 1 << 22
_MAX_STRINGS = 1 << 24
_MAX_INNER_ARRAYS = 1 << 20
_MAX_NESTING = 4
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_MIN_ALIGNMENT = 8  # the format wants multiples of 8

_FIRST_READ_BYTES = 1 << 18
_RECORD_BYTES = 4 + 8 * _MAX_DIMS + 4 + 8  # a tensor's record after its name, at most
_TABLE_ROWS_AT_ONCE = 1 << 14

_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"FUGG", "a big-endian GGUF file; convert it to little-endian"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint?); convert it to GGUF"),
    (b"\x1f\x8b", "gzip-compressed; unpack it"),
    (b"lmgg", "a GGML file from before GGUF; convert the model again"),
    (b"fmgg", "a GGML file from before GGUF; convert the model again"),
    (b"tjgg", "a GGML file from before GGUF; convert the model again"),
    (b"<", "a web page or XML (a failed download?); fetch the file again"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What one file says about itself. `raw` is the header up to the end of the tensor table."""

    version: int
    metadata: Metadata
    tensors: TensorTable
    alignment: int
    data_offset: int
    raw: bytes


class _Window:
    """The file's first bytes, as many as were needed so far."""

    def __init__(self, fd: int, size: int, path: Path) -> None:
        self.fd = fd
        self.size = size
        self.path = path
        self.buf = bytearray()

    def need(self, end: int, what: str) -> None:
        """Have at least `end` bytes, or raise `SourceError`: the header ends inside `what`."""
        have = len(self.buf)
        if end <= have:
            return
        if end > self.size:
            self.fail(
                f"the file ends inside {what}: it has {self.size} bytes and would need at least "
                f"{end}; it is truncated or damaged, fetch it again"
            )
        if end > have + _MAX_VALUE_BYTES or end > _MAX_HEADER_BYTES:
            self.fail(
                f"{what} would take the header beyond {end} bytes; the file is damaged, "
                "fetch it again"
            )
        target = min(self.size, max(end, _FIRST_READ_BYTES, 2 * have))
        while len(self.buf) < target:
            try:
                chunk = os.pread(self.fd, target - len(self.buf), len(self.buf))
            except OSError as error:
                raise SourceError(
                    f"reading the header failed: {error.strerror}; check the drive",
                    path=self.path,
                ) from error
            if not chunk:
                self.fail("the file became shorter while it was opened; try again when it is whole")
            self.buf += chunk

    def u32(self, at: int, what: str) -> int:
        self.need(at + 4, what)
        return int(_U32.unpack_from(self.buf, at)[0])

    def u64(self, at: int, what: str) -> int:
        self.need(at + 8, what)
        return int(_U64.unpack_from(self.buf, at)[0])

    def fail(self, message: str, key: str | None = None) -> NoReturn:
        raise SourceError(message, path=self.path, key=key)


def read_header(fd: int, path: Path) -> GgufHeader:
    """Read and check the header of an open GGUF file. Blocking.

    Raises:
        SourceError: not a GGUF file, truncated, damaged or contradictory.
        UnsupportedModelError: a tensor type that this version does not know.
    """
    window = _Window(fd, os.fstat(fd).st_size, path)
    version, n_tensors, n_keys = _read_preamble(window)
    entries, at = _scan_metadata(window, n_keys)
    rows, ends, at = _scan_tensor_names(window, n_tensors, at)
    raw = bytes(window.buf[:at])
    metadata = Metadata(raw, entries, path)
    alignment = _alignment(metadata, window)
    data_offset = align_up(at, alignment)
    tensors = _read_tensor_table(window, raw, rows, ends, alignment, data_offset)
    return GgufHeader(
        version=version,
        metadata=metadata,
        tensors=tensors,
        alignment=alignment,
        data_offset=data_offset,
        raw=raw,
    )


def _read_preamble(window: _Window) -> tuple[int, int, int]:
    if window.size == 0:
        window.fail("the file is empty; fetch it again")
    window.need(min(window.size, 32), "its first bytes")
    head = bytes(window.buf[:32])
    if head[:4] != b"GGUF":
        window.fail(f"this is {_guess_kind(head)}")
    version = window.u32(4, "its version")
    if version & 0xFFFF == 0 and version:
        window.fail("this is a big-endian GGUF file; convert it to little-endian")
    if version == 1:
        window.fail("GGUF version 1 is too old; convert the model again (version 2 or 3)")
    if version not in (2, 3):
        window.fail(
            f"GGUF version {version} is unknown (2 and 3 are read); the file is damaged or newer "
            "than this program"
        )
    n_tensors = window.u64(8, "its tensor count")
    n_keys = window.u64(16, "its key count")
    # The shortest possible record bounds a count by the file's size.
    for what, count, least, most in (
        ("metadata keys", n_keys, 13, _MAX_KEYS),
        ("tensors", n_tensors, 25, _MAX_TENSORS),
    ):
        if count > most or count * least > window.size:
            window.fail(
                f"the header claims {count} {what}, more than a file of {window.size} bytes can "
                "hold; it is truncated or damaged, fetch it again"
            )
    return version, n_tensors, n_keys


def _guess_kind(head: bytes) -> str:
    for magic, kind in _FOREIGN:
        if head.startswith(magic):
            return kind
    if len(head) > 8 and head[8:9] == b"{":
        return "not a GGUF file but looks like safetensors; convert the model to GGUF"
    return f"not a GGUF file (it begins with {head[:4]!r}); give a .gguf file"


def _scan_metadata(window: _Window, n_keys: int) -> tuple[dict[str, tuple[int, int]], int]:
    entries: dict[str, tuple[int, int]] = {}
    at = 24
    for number in range(n_keys):
        what = f"metadata key {number + 1} of {n_keys}"
        length = window.u64(at, what)
        if not 0 < length <= _MAX_NAME_BYTES:
            window.fail(f"{what} has a name of {length} bytes; the file is damaged")
        at += 8
        window.need(at + length, what)
        try:
            key = window.buf[at : at + length].decode()
        except UnicodeDecodeError:
            window.fail(f"{what} has a name that is not UTF-8; the file is damaged")
        if key in entries:
            window.fail(f"metadata key {key!r} appears twice; the file is damaged", key)
        type_id = window.u32(at + length, f"metadata key {key!r}")
        at += length + 4
        entries[key] = (type_id, at)
        at = _skip_value(window, type_id, at, key, 0)
    return entries, at


def _skip_value(window: _Window, type_id: int, at: int, key: str, depth: int) -> int:
    """The offset just after a value; it is in the window then."""
    what = f"the value of metadata key {key!r}"
    if type_id not in _KNOWN_TYPES:
        window.fail(f"metadata key {key!r} has the unknown value type {type_id}", key)
    if type_id in SCALARS:
        at += SCALARS[type_id].size
    elif type_id == _STRING:
        at += 8 + window.u64(at, what)
    else:
        element, count = window.u32(at, what), window.u64(at + 4, what)
        at += 12
        if element in SCALARS:
            at += count * SCALARS[element].size
        elif element == _STRING:
            return _skip_strings(window, count, at, key)
        elif element == _ARRAY:
            if depth == _MAX_NESTING or count > _MAX_INNER_ARRAYS:
                window.fail(f"metadata key {key!r} is nested too deeply or too large", key)
            for _ in range(count):
                at = _skip_value(window, _ARRAY, at, key, depth + 1)
        else:
            window.fail(f"metadata key {key!r} has the unknown element type {element}", key)
    window.need(at, what)
    return at


def _skip_strings(window: _Window, count: int, at: int, key: str) -> int:
    what = f"the value of metadata key {key!r}"
    if count > _MAX_STRINGS or count * 8 > window.size:
        window.fail(
            f"metadata key {key!r} claims {count} strings; the file is truncated or damaged", key
        )
    unpack, buf = _U64.unpack_from, window.buf
    last = len(buf) - 8
    for _ in range(count):  # the one loop over a vocabulary: about 0.1 us a string
        if at > last:
            window.need(at + 8, what)
            last = len(buf) - 8
        at += 8 + unpack(buf, at)[0]
    window.need(at, what)
    return at


def _alignment(metadata: Metadata, window: _Window) -> int:
    key = "general.alignment"
    if key not in metadata:
        return GGUF_DEFAULT_ALIGNMENT
    kind = metadata.value_type(key)
    if kind != GGUFValueType.UINT32:
        window.fail(f"metadata key {key!r} is of type {kind.name}, not UINT32", key)
    value = int(metadata[key])
    if not _MIN_ALIGNMENT <= value <= _MAX_ALIGNMENT or value & (value - 1):
        window.fail(
            f"metadata key {key!r} is {value}; a power of two from {_MIN_ALIGNMENT} to "
            f"{_MAX_ALIGNMENT} is needed, so the file is damaged or badly written",
            key,
        )
    return value


def _scan_tensor_names(
    window: _Window, n_tensors: int, at: int
) -> tuple[dict[str, int], NDArray[np.int64], int]:
    """Names -> row, and where the rest of each record begins; the rest is read as arrays."""
    rows: dict[str, int] = {}
    ends: list[int] = []
    u64, u32, buf = _U64.unpack_from, _U32.unpack_from, window.buf
    what = "its tensor table"
    for row in range(n_tensors):
        if at + 8 > len(buf):
            window.need(at + 8, what)
        length = u64(buf, at)[0]
        if not 0 < length <= _MAX_NAME_BYTES:
            window.fail(f"tensor {row + 1} of {n_tensors} has a name of {length} bytes; damaged")
        end = at + 8 + length
        if end + 4 > len(buf):
            window.need(end + 4, what)
        try:
            name = buf[at + 8 : end].decode()
        except UnicodeDecodeError:
            window.fail(f"tensor {row + 1} of {n_tensors} has a name that is not UTF-8; damaged")
        n_dims = u32(buf, end)[0]
        if n_dims > _MAX_DIMS:
            window.fail(f"tensor {name!r} has {n_dims} dimensions, at most {_MAX_DIMS} exist", name)
        if name in rows:
            window.fail(f"tensor {name!r} appears twice; the file is damaged", name)
        rows[name] = row
        ends.append(end)
        at = end + 16 + 8 * n_dims
    window.need(at, what)
    return rows, np.array(ends, dtype=np.int64), at


def _read_tensor_table(
    window: _Window,
    raw: bytes,
    rows: dict[str, int],
    ends: NDArray[np.int64],
    alignment: int,
    data_offset: int,
) -> TensorTable:
    n_dims, dims, types, offsets = _gather_records(raw, ends)
    names = _Names(rows)
    block_weights, block_bytes = _type_sizes()
    known = types < len(block_weights)
    known[known] = block_weights[types[known]] > 0
    if not known.all():
        row = int(np.argmin(known))
        raise UnsupportedModelError(
            f"{window.path}: tensor {names[row]!r} has the unknown type {types[row]}; the file is "
            "damaged or needs a newer version"
        )
    per_block = block_weights[types]
    # In float64 first: the exact product may not fit 64 bits.
    size = np.float64(window.size)
    weights = dims.astype(np.float64).prod(axis=1)
    _check(window, names, dims.min(axis=1, initial=1) == 0, "has an empty dimension")
    _check(
        window,
        names,
        (weights > 2.0**62) | (weights / per_block * block_bytes[types] > 2 * size + 4096),
        "has dimensions too large for the file",
    )
    exact = dims.astype(np.int64)
    _check(window, names, exact[:, 0] % per_block != 0, "has rows that are not whole blocks")
    n_bytes = exact.prod(axis=1) // per_block * block_bytes[types]
    _check(window, names, offsets % alignment != 0, f"starts off the alignment of {alignment}")
    _check(window, names, offsets > window.size, "starts beyond the end of the file")
    starts = offsets.astype(np.int64) + data_offset
    _check_ranges(window, names, starts, n_bytes)
    return TensorTable(
        rows,
        ggml_type=types.astype(np.int64),
        n_dims=n_dims,
        dims=exact,
        n_bytes=n_bytes,
        file=np.zeros(len(rows), dtype=np.int64),
        offset=starts,
    )


def _gather_records(
    raw: bytes, ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64], NDArray[np.uint64]]:
    """Columns n_dims `[n]`, dims `[n, 4]` (1 where absent), type `[n]`, offset `[n]`."""
    n = len(ends)
    n_dims = np.empty(n, dtype=np.int64)
    dims = np.ones((n, _MAX_DIMS), dtype=np.uint64)
    types = np.empty(n, dtype=np.int64)
    offsets = np.empty(n, dtype=np.uint64)
    padded = np.frombuffer(raw + bytes(_RECORD_BYTES), dtype=np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(padded, _RECORD_BYTES)
    for start in range(0, n, _TABLE_ROWS_AT_ONCE):
        rows = slice(start, start + _TABLE_ROWS_AT_ONCE)
        records = windows[ends[rows]]
        counts = records[:, :4].copy().view("<u4")[:, 0]
        n_dims[rows] = counts
        for count in np.unique(counts).tolist():
            which = np.flatnonzero(counts == count)
            body = records[which]
            tail = 4 + 8 * count
            if count:
                dims[start + which, :count] = body[:, 4:tail].copy().view("<u8")
            types[start + which] = body[:, tail : tail + 4].copy().view("<u4")[:, 0]
            offsets[start + which] = body[:, tail + 4 : tail + 12].copy().view("<u8")[:, 0]
    return n_dims, dims, types, offsets


def _type_sizes() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Weights and bytes of a block by type id; 0 where no such type exists."""
    n = max(int(t) for t in GGML_QUANT_SIZES) + 1
    weights, n_bytes = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    for kind, (block_weights, block_bytes) in GGML_QUANT_SIZES.items():
        weights[int(GGMLQuantizationType(kind))] = block_weights
        n_bytes[int(GGMLQuantizationType(kind))] = block_bytes
    return weights, n_bytes


class _Names:
    """Row -> name, looked up only when something is wrong."""

    def __init__(self, rows: dict[str, int]) -> None:
        self._rows = rows

    def __getitem__(self, row: int) -> str:
        return next(name for name, number in self._rows.items() if number == row)


def _check(window: _Window, names: _Names, bad: NDArray[np.bool_], what: str) -> None:
    if bad.any():
        name = names[int(np.argmax(bad))]
        window.fail(f"tensor {name!r} {what}; the file is damaged, fetch it again", name)


def _check_ranges(
    window: _Window, names: _Names, starts: NDArray[np.int64], n_bytes: NDArray[np.int64]
) -> None:
    if not len(starts):
        return
    ends = starts + n_bytes
    last = int(ends.max())
    if last > window.size:
        name = names[int(np.argmax(ends > window.size))]
        window.fail(
            f"the file is truncated: it has {window.size} bytes, its tensors need {last} "
            f"({last - window.size} are missing, tensor {name!r} is the first to be cut); "
            "fetch it again",
            name,
        )
    order = np.argsort(starts, kind="stable")
    clash = ends[order][:-1] > starts[order][1:]
    if clash.any():
        first = int(np.argmax(clash))
        one, other = names[int(order[first])], names[int(order[first + 1])]
        window.fail(f"tensors {one!r} and {other!r} overlap; the file is damaged", other)
