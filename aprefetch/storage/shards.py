"""A model on disk: one GGUF, or all shards of a set found from any one of them.

`ModelSource` owns one descriptor per file from `open_source` to `close`, so a file that is renamed
or replaced meanwhile still gives the bytes it gave at first; `check_unchanged` tells that it was.
Shards are named `<prefix>-00001-of-00004.gguf`, counted from 1; the key `split.no` counts from 0.
Only the first shard's metadata is the model's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aprefetch.errors import ReadError, SourceError
from aprefetch.storage.gguf_file import GgufHeader, read_header
from aprefetch.storage.metadata import Metadata
from aprefetch.storage.tensors import TensorInfo, TensorTable

__all__ = ["ModelSource", "ShardIdentity", "SourceIdentity", "open_source"]

log = logging.getLogger(__name__)

_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.DOTALL | re.IGNORECASE)
_MAX_SHARDS = 99_999
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
class _OpenFile:
    path: Path
    fd: int
    stat: os.stat_result
    header: GgufHeader


class ModelSource:
    """Metadata, tensors and bytes of a model file. Made by `open_source`; a context manager.

    Reads are positional, so any number of threads may read at once.
    """

    def __init__(self, files: list[_OpenFile]) -> None:
        self._files = files
        self._finalizer = weakref.finalize(self, _close_all, [f.fd for f in files])
        self.paths: tuple[Path, ...] = tuple(f.path for f in files)
        self.metadata: Metadata = files[0].header.metadata
        self.tensors: TensorTable = TensorTable.concat([f.header.tensors for f in files])

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


def open_source(path: str | os.PathLike[str]) -> ModelSource:
    """Open a GGUF file, or the whole set that a shard belongs to. Blocking: reads headers only.

    Raises:
        SourceError: the file or one of its shards is missing, unreadable, not a GGUF, damaged, or
            the shards do not belong together.
        UnsupportedModelError: a tensor type that this version does not know.
    """
    files: list[_OpenFile] = []
    try:
        first = _open_file(Path(path))
        files.append(first)
        count = _split_value(first, "split.count", 1)
        if count > 1:
            files.extend(_open_siblings(first, count))
            _check_numbers(files, count)
            files.sort(key=_split_no)
            _check_set(files, count)
        source = ModelSource(files)
    except BaseException:
        _close_all([f.fd for f in files])
        raise
    log.debug("opened %s: %d files, %d tensors", path, len(files), len(source.tensors))
    return source


def _open_file(path: Path) -> _OpenFile:
    try:
        # Looked at before opening: opening a FIFO would wait for its writer.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise SourceError("this is a folder; give one .gguf file in it", path=path)
        if not stat.S_ISREG(mode):
            raise SourceError("this is not a regular file; give a .gguf file", path=path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SourceError("there is no such file; check the path", path=path) from error
    except PermissionError as error:
        raise SourceError("no permission to read the file", path=path) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SourceError(f"the file cannot be opened: {reason}", path=path) from error
    try:
        return _OpenFile(path, fd, os.fstat(fd), read_header(fd, path))
    except BaseException:
        os.close(fd)
        raise


def _split_value(file: _OpenFile, key: str, default: int | None = None) -> int:
    value: Any = file.header.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        what = "is missing" if value is None else "is not an integer"
        raise SourceError(
            f"metadata key {key!r} {what}; the shard is damaged", path=file.path, key=key
        )
    if key == "split.count" and not 0 <= value <= _MAX_SHARDS:
        raise SourceError(
            f"metadata key {key!r} claims {value} shards; the file is damaged",
            path=file.path,
            key=key,
        )
    return value


def _split_no(file: _OpenFile) -> int:
    return _split_value(file, "split.no")


def _open_siblings(first: _OpenFile, count: int) -> list[_OpenFile]:
    """Open the other files of the set by their names; the one given must be named rightly."""
    name = _SHARD_NAME.fullmatch(first.path.name)
    own = _split_no(first) + 1
    if name is None:
        raise SourceError(
            f"this is shard {own} of {count}, but its name does not say so and the others cannot "
            f"be found; name it like <prefix>-{own:05d}-of-{count:05d}.gguf, beside the others",
            path=first.path,
        )
    if int(name[3]) != count:
        raise SourceError(
            f"the name says {int(name[3])} shards, the header says {count}; the file was renamed, "
            "give it back its own name",
            path=first.path,
        )
    folder = first.path.parent
    paths = [folder / f"{name[1]}-{i:05d}-of-{count:05d}{name[4]}" for i in range(1, count + 1)]
    missing = [p for p in paths if not p.exists()]
    if missing:
        listed = ", ".join(repr(p.name) for p in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise SourceError(
            f"{len(missing)} of {count} shards are missing from {str(folder)!r}: {listed}{more}; "
            "fetch them",
            path=first.path,
        )
    files: list[_OpenFile] = []
    try:
        files.extend(_open_file(p) for p in paths if p.name != first.path.name)
    except BaseException:
        _close_all([f.fd for f in files])
        raise
    return files


def _check_numbers(files: list[_OpenFile], count: int) -> None:
    """Each file's header gives the same count, and the number that its name gives."""
    wrong = []
    by_number: dict[int, list[str]] = {}
    for file in files:
        theirs = _split_value(file, "split.count", 1)
        if theirs != count:
            raise SourceError(
                f"this file belongs to a set of {theirs}, the others to one of {count}; sets are "
                "mixed, fetch this shard again",
                path=file.path,
                key="split.count",
            )
        number = _split_no(file) + 1
        by_number.setdefault(number, []).append(file.path.name)
        name = _SHARD_NAME.fullmatch(file.path.name)
        if name is None or int(name[2]) != number:
            wrong.append((file, number))
    for number, names in by_number.items():
        if len(names) > 1:
            raise SourceError(
                f"shard {number} of {count} is there twice, as {' and '.join(map(repr, names))}; "
                "one is a copy under a wrong name, fetch that shard again",
                path=files[0].path,
                key="split.no",
            )
    if wrong:
        file, number = wrong[0]
        raise SourceError(
            f"the header says that this is shard {number} of {count}, the name says otherwise; "
            "shards were renumbered, give them back their own names",
            path=file.path,
            key="split.no",
        )


def _check_set(files: list[_OpenFile], count: int) -> None:
    """Architecture and tensor total agree; `files` are in shard order."""
    architecture = files[0].header.metadata.get("general.architecture")
    totals = {}
    for file in files:
        metadata = file.header.metadata
        theirs = metadata.get("general.architecture", architecture)
        if theirs != architecture:
            raise SourceError(
                f"this shard is of architecture {theirs!r}, the first one of {architecture!r}; "
                "sets are mixed, fetch this shard again",
                path=file.path,
                key="general.architecture",
            )
        if "split.tensors.count" in metadata:
            totals[file.path] = _split_value(file, "split.tensors.count")
    if not totals:
        return
    expected = next(iter(totals.values()))
    for path, total in totals.items():
        if total != expected:
            raise SourceError(
                f"this shard is of a model with {total} tensors, the others with {expected}; sets "
                "are mixed, fetch this shard again",
                path=path,
                key="split.tensors.count",
            )
    held = sum(len(f.header.tensors) for f in files)
    if held != expected:
        raise SourceError(
            f"the {count} shards hold {held} tensors, but {expected} are announced; sets are "
            "mixed or a shard is incomplete, fetch all of them again",
            path=files[0].path,
            key="split.tensors.count",
        )


def _fingerprint(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
