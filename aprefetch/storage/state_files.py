"""Kept sequence states in files, within a byte budget.

One file per state, named by the digest of its tokens: an 8-byte magic, the length of a JSON header,
the header (format version, identity of the model, token count, shapes and positions of the
parts), the token ids (int64), the parts (float32), all little-endian, and a 16-byte BLAKE2b digest
of everything before it. Files appear by rename, so a name without `.partial` is complete. Files
that are damaged, or not ours, or of another model are left alone and not used; a damaged one is
noted once. Only files with our magic count against the budget, and only those are removed for it,
the longest unused first. Everything blocks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import threading
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

__all__ = ["SUFFIX", "StateFiles"]

log = logging.getLogger(__name__)

SUFFIX = ".apstate"
_MAGIC = b"APSTATE\x01"
_HEADER_LIMIT = 1 << 20
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 16

Ids = npt.NDArray[np.int64]
Values = list[tuple[npt.NDArray[np.float32], int]]


class StateFiles:
    """The states of one model in one folder, which other models may share.

    Args:
        folder: is made if it is not there.
        identity: of the model and of everything else that a state's values depend on.
        budget_bytes: for all state files of the folder.

    Raises:
        OSError: the folder cannot be made or listed.
    """

    def __init__(self, folder: Path, identity: str, budget_bytes: int) -> None:
        self._folder, self._identity, self._budget_bytes = folder, identity, budget_bytes
        self._lock = threading.Lock()  # one writer; the index is replaced as a whole
        self._index: dict[bytes, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*" + SUFFIX)):
            header = self._header(path)
            if header is not None and header.get("identity") == identity:
                self._index[bytes.fromhex(header["key"])] = header["n_tokens"]

    def lengths(self) -> dict[bytes, int]:
        """Token counts by the keys of what is stored. Does not block."""
        return self._index

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{self._identity[:16]}-{key.hex()}{SUFFIX}"

    def _header(self, path: Path) -> dict[str, Any] | None:
        """The header of a file of ours; None, with a note, for anything else."""
        try:
            with path.open("rb") as file:
                return _read_header(file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not used: %s", path, error)
            return None

    def read(self, key: bytes) -> tuple[Ids, Values] | None:
        """What was stored under `key`; None, with a note, if it is gone or damaged."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            found = _decode(data, self._identity)
            os.utime(path)  # used just now: it leaves last
            return found
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not used: %s", path, error)
            with self._lock:
                self._index = {k: n for k, n in self._index.items() if k != key}
            return None

    def write(self, key: bytes, ids: Ids, values: Values) -> None:
        """Store, and make room. What the disk refuses is noted and left out."""
        path = self._path(key)
        with self._lock:
            if key in self._index:
                return
            header = json.dumps(
                {
                    "version": 1,
                    "identity": self._identity,
                    "key": key.hex(),
                    "n_tokens": len(ids),
                    "parts": [[list(array.shape), first] for array, first in values],
                }
            ).encode()
            blocks = [_MAGIC, _LENGTH.pack(len(header)), header, ids.astype("<i8").tobytes()]
            n_bytes = sum(map(len, blocks)) + sum(a.nbytes for a, _ in values) + _DIGEST_BYTES
            try:
                if not self._make_room(n_bytes):
                    return
                _write(path, blocks, values)
            except OSError as error:
                log.warning("a state is not kept in %s: %s", path, error)
                return
            self._index = {**self._index, key: len(ids)}

    def _make_room(self, n_bytes: int) -> bool:
        """Remove the longest unused files until `n_bytes` fit; false if they never will."""
        if n_bytes > self._budget_bytes:
            return False
        files = []
        for path in self._folder.glob("*" + SUFFIX):
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) == _MAGIC:
                    stat = os.fstat(file.fileno())
                    files.append((stat.st_mtime_ns, stat.st_size, path))
        files.sort()
        held = sum(size for _, size, _ in files)
        gone = set()
        for _, size, path in files:
            if held + n_bytes <= self._budget_bytes:
                break
            path.unlink(missing_ok=True)
            held -= size
            gone.add(path)
        if gone:
            self._index = {k: n for k, n in self._index.items() if self._path(k) not in gone}
        return held + n_bytes <= self._budget_bytes


def _write(path: Path, blocks: list[bytes], values: Values) -> None:
    partial = path.with_suffix(".partial")
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    try:
        with partial.open("wb") as file:
            for block in (*blocks, *(_bytes(array) for array, _ in values)):
                digest.update(block)
                file.write(block)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _bytes(array: npt.NDArray[np.float32]) -> bytes:
    return np.ascontiguousarray(array, dtype="<f4").tobytes()


def _read_header(file: BinaryIO) -> dict[str, Any]:
    """The header, checked; the file stands behind it.

    Raises:
        ValueError: it is not a state file that we know.
    """
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is not a file of kept states, or of another version")
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))
    if length > _HEADER_LIMIT:
        raise ValueError("its header is damaged")
    header = json.loads(file.read(length))
    if not isinstance(header, dict) or header.get("version") != 1:
        raise ValueError("its header is of an unknown version")
    n_tokens, key = header["n_tokens"], bytes.fromhex(header["key"])
    if type(n_tokens) is not int or not 0 < n_tokens < 1 << 40 or len(key) != 16:
        raise ValueError("its header is damaged")
    return header


def _decode(data: bytes, identity: str) -> tuple[Ids, Values]:
    body, digest = memoryview(data)[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise ValueError("its bytes do not match their digest")
    file = BytesIO(data)
    header = _read_header(file)
    if header["identity"] != identity:
        raise ValueError("it belongs to another model")
    at = file.tell()
    n_tokens = header["n_tokens"]
    ids = np.frombuffer(body, dtype="<i8", count=n_tokens, offset=at).astype(np.int64)
    at += 8 * n_tokens
    values: Values = []
    for shape, first in header["parts"]:
        count = int(np.prod(shape))
        array = np.frombuffer(body, dtype="<f4", count=count, offset=at).reshape(shape)
        values.append((array.astype(np.float32), int(first)))  # a copy, which may be written
        at += 4 * count
    if at != len(body):
        raise ValueError("its length is not what its header says")
    return ids, values
