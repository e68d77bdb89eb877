"""Does a pack belong to a source? Names, identity, and the stamp beside a pack.

Three questions, from cheap to dear. Sizes and fingerprints (headers and sampled payload of every
shard) differ: the pack is of another model, that is proof. They agree, and so do the times: the
pack is good. They agree but a time does not: only the bytes can tell, so all routed experts are
hashed once (`compare.differs`). What was found good is noted in a *stamp*, a small file
beside the pack with times, inode and change time of the shards, so that the next opening is cheap
again; a stamp that cannot be written or read costs time, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from aprefetch.errors import SourceError
from aprefetch.storage.pack.encode import Raw, encode_pair
from aprefetch.storage.pack.format import PackedSource, PartIndex
from aprefetch.storage.source import ModelSource, SourceIdentity

__all__ = [
    "JOURNAL_SUFFIX",
    "LOCK_SUFFIX",
    "PARTIAL_SUFFIX",
    "STAMP_SUFFIX",
    "Match",
    "compare",
    "model_pairs",
    "noted_folders",
    "pack_files",
    "pack_names",
    "packed_source",
    "sibling_name",
    "source_stamp",
    "write_changed",
    "write_stamps",
]

_log = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".partial"
JOURNAL_SUFFIX = ".journal"
LOCK_SUFFIX = ".lock"
STAMP_SUFFIX = ".stamp"
_SHARD = re.compile(r"(.*)-\d{5}-of-\d{5}", re.DOTALL)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[^.]*)?", re.DOTALL)
_PACK_ENDING = re.compile(r".*\.pack(-\d{5}-of-\d{5})?\.gguf", re.DOTALL)
_MAX_STEM_BYTES = 150
_LEFT_OUT = frozenset({"general.architecture", "general.alignment"})


class Match(Enum):
    """What is known without reading all bytes."""

    SAME = "same"
    OTHER = "other"  # proof: another model, or another version of it
    UNSURE = "unsure"  # same samples, another time: only the bytes can tell
    CHANGED = "changed"  # the bytes were compared before, and differ


def packed_source(source: ModelSource, identity: SourceIdentity) -> PackedSource:
    """What a pack notes about its source."""
    architecture = source.architecture
    config = hashlib.sha256()
    for key in sorted(source.metadata):
        if key.startswith(f"{architecture}."):
            config.update(encode_pair(key, Raw(*source.metadata.encoded(key))))
    shards = identity.shards
    return PackedSource(
        architecture=architecture,
        digest=identity.digest,
        config_digest=config.hexdigest()[:32],
        names=tuple(os.fsencode(s.name).decode("utf-8", "replace") for s in shards),
        sizes=tuple(s.n_bytes for s in shards),
        mtimes_ns=tuple(max(0, s.mtime_ns) for s in shards),
        digests=tuple(s.digest for s in shards),
    )


def model_pairs(source: ModelSource) -> list[tuple[str, Raw]]:
    """The model's own metadata (config, tokenizer, chat template), byte for byte."""
    return [
        (key, Raw(*source.metadata.encoded(key)))
        for key in source.metadata
        if key not in _LEFT_OUT and not key.startswith(("split.", "aprefetch.pack."))
    ]


# -- names ----------------------------------------------------------------------------------


def pack_names(source: ModelSource, identity: SourceIdentity, n_parts: int) -> list[str]:
    """File names of a pack's parts: the model's name and 12 digits of its identity.

    Models that have the same name, and versions of one model, so get packs of their own.
    """
    stem = source.paths[0].name
    if stem.lower().endswith(".gguf"):
        stem = stem[:-5]
    shard = _SHARD.fullmatch(stem)
    stem = shard[1] if shard else stem
    stem = os.fsencode(stem)[:_MAX_STEM_BYTES].decode("utf-8", "ignore") or "model"
    base = f"{stem}-{identity.digest[:12]}.pack"
    if n_parts == 1:
        return [f"{base}.gguf"]
    return [f"{base}-{i:05d}-of-{n_parts:05d}.gguf" for i in range(1, n_parts + 1)]


def sibling_name(name: str, part: int, n_parts: int) -> str | None:
    """The name of another part, from the name of one; None if the name has no part number."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    return f"{match[1]}-{part + 1:05d}-of-{n_parts:05d}{match[4] or ''}"


def pack_files(folder: Path) -> Iterator[Path]:
    """Files in `folder` that are named like packs, in order of name."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        _log.debug("%s: cannot be listed: %s", folder, error)
        return
    for name in names:
        if _PACK_ENDING.fullmatch(name):
            yield folder / name


# -- stamps ---------------------------------------------------------------------------------


def source_stamp(source: ModelSource) -> list[list[int]]:
    """For each shard: size, time of modification, time of change, inode.

    Raises:
        SourceError: a shard was changed or went away since it was opened.
    """
    source.check_unchanged()
    out = []
    for path in source.paths:
        try:
            now = os.stat(path)
        except OSError as error:
            raise SourceError(f"the file went away: {error.strerror}", path=path) from error
        out.append([now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino])
    return out


def compare(index: PartIndex, source: PackedSource, stamp: list[list[int]]) -> Match:
    """Does the pack whose first part is `index` belong to this source?"""
    packed = index.source
    if (packed.digest, packed.sizes) != (source.digest, source.sizes):
        return Match.OTHER
    note = _read_stamp(index)
    if note.get("changed") == stamp:
        return Match.CHANGED
    noted = note.get("shards")
    if noted is not None:
        return Match.SAME if noted == stamp else Match.UNSURE
    return Match.SAME if packed.mtimes_ns == source.mtimes_ns else Match.UNSURE


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + STAMP_SUFFIX)


def _read_stamp(index: PartIndex) -> dict[str, Any]:
    """What was noted of this very pack; nothing if there is no note that can be used."""
    try:
        found = json.loads(_stamp_path(index.path).read_text(encoding="utf-8"))
        if found["id"] == index.id and found["content"] == index.content:
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {}


def noted_folders(index: PartIndex) -> list[Path]:
    """Where the other parts were when last seen: a hint, no more."""
    folders = _read_stamp(index).get("folders", [])
    return [Path(f) for f in folders if isinstance(f, str)] if isinstance(folders, list) else []


def write_stamps(parts: Sequence[PartIndex], stamp: list[list[int]]) -> None:
    """Note that a pack goes with a source in this state, and where its parts are. Never fails."""
    folders = [str(index.path.resolve().parent) for index in parts]
    for index in parts:
        _write_stamp(index, {"shards": stamp, "folders": folders})


def write_changed(parts: Sequence[PartIndex], stamp: list[list[int]]) -> None:
    """Note that a pack's bytes are proved to differ from a source in this state. Never fails."""
    for index in parts:
        _write_stamp(index, {**_read_stamp(index), "changed": stamp})


def _write_stamp(index: PartIndex, facts: dict[str, Any]) -> None:
    path = _stamp_path(index.path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    facts = {**facts, "id": index.id, "content": index.content}
    if _read_stamp(index) == facts:
        return
    try:
        temporary.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        _log.debug("%s: no stamp was written: %s", path, error)
        with contextlib.suppress(OSError):
            temporary.unlink()
