"""An open model: its metadata, its tensors, and their bytes.

`ModelSource` owns one descriptor per file until `close`, so a file that is renamed or replaced
meanwhile still gives the bytes it gave at first; `check_unchanged` tells that it was.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from aprefetch.errors import ReadError, SourceError
from aprefetch.storage.gguf_file import GgufHeader
from aprefetch.storage.metadata import Metadata
from aprefetch.storage.tensors import TensorInfo, TensorTable

__all__ = ["ModelSource", "OpenFile", "ShardIdentity", "SourceIdentity", "close_all"]

_READ_BYTES = 1 << 30  # one system call never gives more than 0x7ffff000
_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIdentity:
    """One file as it was opened. `digest` covers the header and sampled payload."""

    name: str
    n_bytes: int
    mtime_ns: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdentity:
    """All files of a model; `digest` depends on contents and sizes, not on names or times."""

    shards: tuple[ShardIdentity, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class OpenFile:
    """One file with its checked header; whoever holds it closes `fd`."""

    path: Path
    fd: int
    stat: os.stat_result
    header: GgufHeader


class ModelSource:
    """Metadata, tensors and bytes of a model file. Made by `open_source`; a context manager.

    Reads are positional, so any number of threads may read at once.
    """

    def __init__(self, files: list[OpenFile]) -> None:
        self._files = files
        self.paths: tuple[Path, ...] = tuple(f.path for f in files)
        self.metadata: Metadata = files[0].header.metadata
        self.tensors: TensorTable = TensorTable.concat([f.header.tensors for f in files])
        # Last: until nothing can fail any more, the descriptors are the caller's to close.
        self._finalizer = weakref.finalize(self, close_all, [f.fd for f in files])

    @property
    def architecture(self) -> str:
        """`general.architecture`; `SourceError` if the file does not say."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise SourceError(
                "metadata key 'general.architecture' is missing or no text; this file does not "
                "say which model it is",
                path=self.paths[0],
                key="general.architecture",
            )
        return value

    @property
    def n_bytes(self) -> int:
        """Bytes of all files together, as they were at opening."""
        return sum(f.stat.st_size for f in self._files)

    def read_tensor(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, 1-D and writable. Blocking.

        Raises:
            SourceError: there is no such tensor.
            ReadError: the drive failed, or the file has become shorter.
        """
        info = self._info(name)
        out = np.empty(info.n_bytes, dtype=np.uint8)
        self._read(info.file, info.offset, out.data)
        return out

    def read_tensor_into(self, name: str, target: memoryview) -> None:
        """As `read_tensor`, into a writable contiguous buffer of exactly the tensor's size."""
        info = self._info(name)
        flat = target.cast("B") if target.format != "B" or target.ndim != 1 else target
        if flat.nbytes != info.n_bytes:
            raise ValueError(f"{name!r} has {info.n_bytes} bytes, the buffer {flat.nbytes}")
        self._read(info.file, info.offset, flat)

    def read_range(self, file: int, offset: int, n_bytes: int) -> NDArray[np.uint8]:
        """Bytes `[offset, offset + n_bytes)` of file number `file`. Blocking; `ReadError`."""
        out = np.empty(n_bytes, dtype=np.uint8)
        self._read(file, offset, out.data)
        return out

    def identity(self) -> SourceIdentity:
        """Sizes, times and digests of all files. Blocking: a few dozen small reads per file.

        Raises:
            ReadError: a sampled block could not be read.
        """
        shards = tuple(self._shard_identity(i) for i in range(len(self._files)))
        total = hashlib.blake2b(digest_size=16)
        for shard in shards:
            total.update(f"{shard.n_bytes}:{shard.digest};".encode())
        return SourceIdentity(shards=shards, digest=total.hexdigest())

    def check_unchanged(self) -> None:
        """Raise `SourceError` if a file was replaced, removed or written since it was opened."""
        for file in self._files:
            if not self._finalizer.alive:
                raise SourceError("the model file is closed", path=file.path)
            try:
                now, held = os.stat(file.path), os.fstat(file.fd)
            except OSError as error:
                raise SourceError(
                    f"the file went away while in use ({error.strerror}); open the model again "
                    "once it is back",
                    path=file.path,
                ) from error
            was = file.stat
            if held.st_size < was.st_size:
                raise SourceError(
                    f"the file was truncated while in use, from {was.st_size} to {held.st_size} "
                    "bytes; fetch it again",
                    path=file.path,
                )
            if _fingerprint(now) != _fingerprint(was) or _fingerprint(held) != _fingerprint(was):
                raise SourceError(
                    "the file was replaced or changed while in use; open the model again",
                    path=file.path,
                )

    def close(self) -> None:
        """Close all descriptors. Idempotent; metadata and tensor table stay usable."""
        self._finalizer()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise SourceError(f"there is no tensor {name!r}", path=self.paths[0], key=name)
        return self.tensors[name]

    def _read(self, file: int, offset: int, target: memoryview) -> None:
        path, done = self._files[file].path, 0
        fd = self._files[file].fd

        def failed(message: str, errno: int | None = None) -> ReadError:
            return ReadError(
                message, path=path, offset=offset + done, length=len(target) - done, errno=errno
            )

        if not self._finalizer.alive:
            raise failed("the model file is closed, open it again")
        while done < len(target):
            try:
                got = os.preadv(fd, [target[done : done + _READ_BYTES]], offset + done)
            except OSError as error:
                raise failed(f"{error.strerror}; check the drive", error.errno) from error
            if got == 0:
                raise failed("the file ended early, it was truncated while in use; fetch it again")
            done += got

    def _shard_identity(self, number: int) -> ShardIdentity:
        file = self._files[number]
        digest = hashlib.blake2b(file.header.raw, digest_size=16)
        size, start = file.stat.st_size, len(file.header.raw)
        last = max(start, size - _SAMPLE_BYTES)
        for i in range(_SAMPLES):
            at = start + (last - start) * i // (_SAMPLES - 1)
            digest.update(self.read_range(number, at, min(_SAMPLE_BYTES, size - at)).data)
        return ShardIdentity(
            name=file.path.name,
            n_bytes=size,
            mtime_ns=file.stat.st_mtime_ns,
            digest=digest.hexdigest(),
        )


def _fingerprint(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def close_all(fds: list[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
