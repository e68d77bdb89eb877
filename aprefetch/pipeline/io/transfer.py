"""One blocking read, with everything that can go wrong between a file and a buffer.

An `OpenFile` owns the descriptors of one file: direct where the file system allows it, and a
buffered one as soon as it is needed. `fetch` fills a buffer from it: continues short reads, retries
what may pass, falls back where direct reads are refused, and notices a file that changed under us.
It runs on reader threads, writes no counters, and reports what it did in a `Tally`. A backend that
reads by other means takes the descriptor, and leaves to `fetch` whatever did not come out well.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprefetch.errors import ReadError
from aprefetch.pipeline.io.threads import Files, FileStatus, is_transparent, quick_status
from aprefetch.types import ALIGNMENT, align_down

__all__ = ["LARGEST_TRANSFER_BYTES", "REFUSALS", "OpenFile", "Tally"]

_log = logging.getLogger(__name__)

LARGEST_TRANSFER_BYTES = 0x7FFFF000
"""Linux moves at most this much in one call."""

REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
"""How file systems refuse direct reads."""

_TRANSIENT = frozenset(
    {errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ENOMEM, errno.ENOBUFS, errno.ETIMEDOUT}
)
_MAX_INTERRUPTIONS = 1000


@dataclass(slots=True)
class Tally:
    """What a reader thread did since the loop last looked."""

    reads: int = 0
    bytes_read: int = 0
    io_errors: int = 0
    io_retries: int = 0
    short_reads: int = 0
    fallbacks: int = 0

    def add(self, other: Tally) -> None:
        """Sum `other` into this one."""
        self.reads += other.reads
        self.bytes_read += other.bytes_read
        self.io_errors += other.io_errors
        self.io_retries += other.io_retries
        self.short_reads += other.short_reads
        self.fallbacks += other.fallbacks


class OpenFile:
    """The descriptors of one file, opened once.

    Args:
        alignment: Bytes; offsets and lengths of direct reads are multiples of it.
        strict_direct: Raise where direct reads are refused, rather than read buffered.
        retries: How often a read that failed for a passing reason is tried again.
        backoff_s: Seconds before the first retry; doubles with each one.

    Raises:
        ReadError: The file cannot be opened, or not for direct reads in strict mode.
    """

    def __init__(
        self,
        path: str | Path,
        files: Files,
        *,
        alignment: int = ALIGNMENT,
        strict_direct: bool = False,
        retries: int = 2,
        backoff_s: float = 0.002,
        largest_transfer_bytes: int = LARGEST_TRANSFER_BYTES,
    ) -> None:
        self.path = Path(path)
        self.alignment = alignment
        self.fell_back = False
        self._files = files
        self._strict = strict_direct
        self._retries = retries
        self._backoff_s = backoff_s
        self._is_transparent = is_transparent(files)
        self.largest_bytes = max(alignment, align_down(largest_transfer_bytes, alignment))
        self._lock = threading.Lock()  # guards the descriptors
        self._buffered_fd: int | None = None
        self._direct_fd: int | None = None
        try:
            self._open()
            self._status = self._stat()
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Do reads go past the page cache?"""
        return self._direct_fd is not None and not self.fell_back

    @property
    def descriptor(self) -> int | None:
        """What reads go to at present; None if it must be opened first."""
        return self._direct_fd if self.is_direct else self._buffered_fd

    def is_unchanged(self) -> bool:
        """Is it still the file that was opened? One short call, for the loop's thread."""
        fd = self._direct_fd if self._direct_fd is not None else self._buffered_fd
        if fd is None:
            return False
        if self._is_transparent and (status := quick_status(fd)) is not None:
            return status == self._status
        try:
            return self._files.fstat(fd) == self._status
        except OSError:
            return False

    def _open(self) -> None:
        try:
            self._direct_fd = self._files.open(self.path, direct=True)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise self._error(f"cannot be opened: {error.strerror or error}", error) from error
            if self._strict:
                raise self._error(
                    "the file system refuses direct reads (strict_direct=False allows buffered "
                    "ones)",
                    error,
                ) from error
            self._fall_back(error)
            self._buffered()

    def _stat(self) -> FileStatus:
        fd = self._direct_fd if self._direct_fd is not None else self._buffered()
        try:
            return self._files.fstat(fd)
        except OSError as error:
            raise self._error(f"cannot be examined: {error.strerror or error}", error) from error

    def _error(
        self,
        message: str,
        cause: OSError | None = None,
        *,
        offset: int = 0,
        length: int = 0,
        key: Any = None,
    ) -> ReadError:
        return ReadError(
            message,
            path=self.path,
            offset=offset,
            length=length,
            errno=cause.errno if cause is not None else None,
            key=key,
        )

    def _fall_back(self, error: OSError) -> bool:
        """Use buffered reads from now on; false if that had been decided already."""
        with self._lock:
            if self.fell_back:
                return False
            self.fell_back = True
        _log.warning(
            "%s: the file system refuses direct reads (%s); reading it through the page cache",
            self.path,
            error.strerror or error,
        )
        return True

    def _buffered(self) -> int:
        with self._lock:
            if self._buffered_fd is None:
                try:
                    self._buffered_fd = self._files.open(self.path, direct=False)
                except OSError as error:
                    text = f"cannot be opened: {error.strerror or error}"
                    raise self._error(text, error) from error
            return self._buffered_fd

    def fetch(
        self,
        view: memoryview,
        offset: int,
        needed: int,
        tally: Tally,
        key: Any = None,
        first: int | None = None,
    ) -> None:
        """Fill `view` from byte `offset`; at least its first `needed` bytes arrive. Blocks.

        Args:
            first: What the first read, made elsewhere, has come to: bytes, or a negative errno.

        Raises:
            ReadError: They did not. Nothing writes to `view` any more.
        """
        try:
            self._fill(view, offset, needed, tally, key, first)
            self._check_unchanged(offset, len(view), key)
        except ReadError as error:
            tally.io_errors += 1
            if error.key is None:
                error.key = key
            raise

    def _fill(
        self,
        view: memoryview,
        offset: int,
        needed: int,
        tally: Tally,
        key: Any,
        first: int | None,
    ) -> None:
        arrived = 0
        unaligned = False  # the rest cannot be had with direct reads
        while arrived < needed:
            direct = self.is_direct and not unaligned
            # A direct read starts at a multiple of the alignment: it may fetch some bytes again.
            at = align_down(arrived, self.alignment) if direct else arrived
            wanted = min(len(view) - at, self.largest_bytes)
            n = self._read_once(view[at : at + wanted], offset + at, direct, tally, key, first)
            first = None
            if n is None:  # direct reads have just been given up
                continue
            if n < wanted and at + n < needed:
                tally.short_reads += 1
            if at + n > arrived:
                arrived = at + n
            elif direct:
                self._check_length(offset, len(view), needed, arrived, key)
                unaligned = True
            else:
                self._check_length(offset, len(view), needed, arrived, key)
                raise self._early_end(offset, len(view), needed, arrived, key)

    def _read_once(
        self,
        view: memoryview,
        offset: int,
        direct: bool,
        tally: Tally,
        key: Any,
        first: int | None,
    ) -> int | None:
        """One read, retried while that may help. None: the file has just turned buffered."""
        fd = self._direct_fd if direct else self._buffered()
        assert fd is not None
        n_failures = n_interruptions = 0
        while True:
            tally.reads += 1
            try:
                if first is None:
                    n = self._files.preadv(fd, [view], offset)
                else:
                    n, first = first, None
                    if n < 0:
                        raise OSError(-n, os.strerror(-n))
            except InterruptedError as error:
                n_interruptions += 1
                if n_interruptions > _MAX_INTERRUPTIONS:
                    text = "the read is interrupted again and again"
                    raise self._error(
                        text, error, offset=offset, length=len(view), key=key
                    ) from error
                tally.io_retries += 1
            except OSError as error:
                if direct and error.errno in REFUSALS:
                    self._refused(error, offset, len(view), tally, key)
                    return None
                if error.errno not in _TRANSIENT or n_failures >= self._retries:
                    text = f"read failed: {error.strerror or error}"
                    if n_failures:
                        text += f" (after {n_failures} retries)"
                    raise self._error(
                        text, error, offset=offset, length=len(view), key=key
                    ) from error
                time.sleep(self._backoff_s * 2**n_failures)
                n_failures += 1
                tally.io_retries += 1
            else:
                tally.bytes_read += n
                return n

    def _refused(self, error: OSError, offset: int, length: int, tally: Tally, key: Any) -> None:
        if self._strict:
            raise self._error(
                "direct reads are refused (strict_direct=False allows buffered ones): "
                f"{error.strerror or error}",
                error,
                offset=offset,
                length=length,
                key=key,
            ) from error
        tally.fallbacks += self._fall_back(error)

    def _check_length(self, offset: int, length: int, needed: int, arrived: int, key: Any) -> None:
        if self._stat().size < offset + needed:
            raise self._early_end(offset, length, needed, arrived, key)

    def _early_end(
        self, offset: int, length: int, needed: int, arrived: int, key: Any
    ) -> ReadError:
        self._check_unchanged(offset, length, key)
        text = f"the file ends early: {arrived} of {needed} bytes came; is it complete?"
        return self._error(text, offset=offset, length=length, key=key)

    def _check_unchanged(self, offset: int, length: int, key: Any) -> None:
        now = self._stat()
        if now != self._status:
            was = self._status
            what = f"size {was.size} -> {now.size}" if now.size != was.size else "modification time"
            text = f"the file changed while running ({what}); close the runtime and open it again"
            raise self._error(text, offset=offset, length=length, key=key)

    def close(self) -> None:
        """Close the descriptors; no read may be under way."""
        for fd in (self._direct_fd, self._buffered_fd):
            if fd is not None:
                self._files.close(fd)
        self._direct_fd = self._buffered_fd = None
