"""What a build has safely on the drive: a header line, then one record per finished object.

A record is appended only after its object's bytes were synced, so a build that was killed trusts
exactly what the journal says. Each record has a check sum; reading stops at the first that does not
fit (a torn write). The journal belongs to one build of one pack from one state of the source:
anything else, and the build starts afresh.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aprefetch.storage.pack.files import PackFiles, write_failure
from aprefetch.storage.pack.format import DIGEST_BYTES

__all__ = ["Journal", "JournalState", "journal_facts", "read_journal"]

_HEAD = struct.Struct("<I")
_RECORD = np.dtype([("number", "<u4"), ("digest", "u1", (DIGEST_BYTES,)), ("crc", "<u4")])


class JournalState(NamedTuple):
    """Which objects are done `[n_objects]`, the digests of all (zeros where not), good records."""

    done: NDArray[np.bool_]
    digests: NDArray[np.uint8]
    n_records: int


def read_journal(path: Path, facts: dict[str, Any], n_objects: int) -> JournalState | None:
    """What a former build left; None if it is of no use to this one.

    Args:
        path: of the journal.
        facts: what the build is about; must equal what the journal was begun with.
        n_objects: of the whole pack.
    """
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    line = _header(facts)
    if not raw.startswith(line):
        return None
    body = raw[len(line) :]
    records = np.frombuffer(body, _RECORD, len(body) // _RECORD.itemsize)
    done = np.zeros(n_objects, dtype=np.bool_)
    digests = np.zeros((n_objects, DIGEST_BYTES), dtype=np.uint8)
    stride, covered = _RECORD.itemsize, _RECORD.itemsize - 4
    n_records = 0
    for i, (number, crc) in enumerate(
        zip(records["number"].tolist(), records["crc"].tolist(), strict=True)
    ):
        if zlib.crc32(body[i * stride : i * stride + covered]) != crc or number >= n_objects:
            break
        done[number] = True
        digests[number] = records["digest"][i]
        n_records += 1
    return JournalState(done, digests, n_records)


def journal_facts(path: Path) -> dict[str, Any] | None:
    """What the build of a journal is about; None if it cannot be told."""
    try:
        with path.open("rb") as file:
            facts = json.loads(file.readline()[:-10])
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def _header(facts: dict[str, Any]) -> bytes:
    text = json.dumps(facts, sort_keys=True).encode()
    return text + b" %08x\n" % zlib.crc32(text)


class Journal:
    """The open journal of a running build. Owns its descriptor.

    Args:
        path: of the journal.
        facts: see `read_journal`; written if the journal is begun.
        former: what to go on from; None begins anew.

    Raises:
        PackBuildError: it cannot be written.
    """

    def __init__(
        self, path: Path, facts: dict[str, Any], files: PackFiles, former: JournalState | None
    ) -> None:
        self.path = path
        self._files = files
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if former is None else 0)
        try:
            self._fd = files.open(path, flags)
        except OSError as error:
            raise write_failure(path, error, 0, files) from error
        head = _header(facts)
        # Records are appended after the last good one: a torn one is overwritten.
        self._at = len(head) + (former.n_records if former else 0) * _RECORD.itemsize
        try:
            if former is None:
                self._write(head, 0)
                files.sync_folder(path.parent)
            else:
                os.ftruncate(self._fd, self._at)
        except BaseException:
            self.close()
            raise

    def append(self, objects: Iterable[tuple[int, bytes]]) -> None:
        """Note objects (number, digest) whose bytes are on the drive.

        Returns when the note is there too.
        """
        records = []
        for number, digest in objects:
            body = _HEAD.pack(number) + digest
            records.append(body + _HEAD.pack(zlib.crc32(body)))
        raw = b"".join(records)
        if raw:
            self._write(raw, self._at)
            self._at += len(raw)

    def _write(self, raw: bytes, at: int) -> None:
        try:
            done = 0
            while done < len(raw):
                done += self._files.pwrite(self._fd, raw[done:], at + done)
            self._files.fdatasync(self._fd)
        except OSError as error:
            raise write_failure(self.path, error, len(raw), self._files) from error

    def close(self) -> None:
        """Close the descriptor; the file stays."""
        self._files.close(self._fd)
