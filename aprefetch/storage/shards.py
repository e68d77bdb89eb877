"""Finding a model on disk: one GGUF, or all shards of a set from any one of them.

Shards are named `<prefix>-00001-of-00004.gguf`, counted from 1; the key `split.no` counts from 0.
Only the first shard's metadata is the model's. A file without `split.count` is a model by itself,
whatever its name, and other files in the folder are never looked at.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path
from typing import Any

from aprefetch.errors import SourceError
from aprefetch.storage.gguf_file import read_header
from aprefetch.storage.source import ModelSource, OpenFile, close_all
from aprefetch.types import align_up

__all__ = ["open_source"]

log = logging.getLogger(__name__)

_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.DOTALL | re.IGNORECASE)
_MAX_SHARDS = 99_999


def open_source(path: str | os.PathLike[str]) -> ModelSource:
    """Open a GGUF file, or the whole set that a shard belongs to. Blocking: reads headers only.

    Raises:
        SourceError: the file or one of its shards is missing, unreadable, not a GGUF, damaged, or
            the shards do not belong together.
        UnsupportedModelError: a tensor type that this version does not know.
    """
    files: list[OpenFile] = []
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
        close_all([f.fd for f in files])
        raise
    log.debug("opened %s: %d files, %d tensors", path, len(files), len(source.tensors))
    return source


def _open_file(path: Path) -> OpenFile:
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
        if hasattr(os, "posix_fadvise"):
            # Dense tensors lie between experts: readahead would fetch twice what is wanted.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return OpenFile(path, fd, os.fstat(fd), read_header(fd, path))
    except BaseException:
        os.close(fd)
        raise


def _split_value(file: OpenFile, key: str, default: int | None = None) -> int:
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


def _split_no(file: OpenFile) -> int:
    return _split_value(file, "split.no")


def _open_siblings(first: OpenFile, count: int) -> list[OpenFile]:
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
    files: list[OpenFile] = []
    try:
        files.extend(_open_file(p) for p in paths if p.name != first.path.name)
    except BaseException:
        close_all([f.fd for f in files])
        raise
    return files


def _check_numbers(files: list[OpenFile], count: int) -> None:
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


def _check_set(files: list[OpenFile], count: int) -> None:
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
        _check_alignment(file, files[0])
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


def _check_alignment(file: OpenFile, first: OpenFile) -> None:
    """Writers disagree on whether later shards repeat the alignment; a wrong guess shifts all."""
    header, alignment = file.header, first.header.alignment
    if "general.alignment" in header.metadata or alignment == header.alignment:
        return
    ends = [info.offset + info.n_bytes for info in header.tensors.values()]
    surplus = file.stat.st_size - align_up(max(ends, default=0), header.alignment)
    shifted = align_up(len(header.raw), alignment) != header.data_offset
    if ends and shifted and surplus > 0:
        raise SourceError(
            f"this shard does not say its alignment, the first one says {alignment}, and its size "
            "goes with that; write the shards again with 'general.alignment' in each",
            path=file.path,
            key="general.alignment",
        )
