"""The system calls of building and verifying, and files read and written past the page cache.

`PackFiles` is the layer that tests stand in for: everything that changes a disk goes through it.
A `DirectFile` owns one descriptor. It uses direct I/O where the file system has it; elsewhere it
goes through the page cache and tells the kernel to forget the pages at once, so that a build of
hundreds of gigabytes does not push everything else out of memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

from aprefetch.errors import NoSpaceError, PackBuildError, ReadError
from aprefetch.types import align_down, align_up

__all__ = ["AlignedBuffer", "DirectFile", "PackFiles", "write_failure"]

_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_LARGEST_BYTES = 1 << 30


class PackFiles:
    """The real calls. Each raises OSError; all may be called from any thread."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor; files are created readable by all (less the umask)."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read into `buffer`; returns how many bytes came."""
        return os.preadv(fd, [buffer], offset)

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        """Write `data`; returns how many bytes went."""
        return os.pwrite(fd, data, offset)

    def fdatasync(self, fd: int) -> None:
        """Have everything written to `fd` on the drive."""
        os.fdatasync(fd)

    def allocate(self, fd: int, n_bytes: int) -> None:
        """Give the file its size, with space of its own where the file system can do that."""
        os.ftruncate(fd, n_bytes)
        _fallocate(fd, n_bytes)

    def replace(self, old: Path, new: Path) -> None:
        """Rename atomically."""
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there is fine."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Have the folder's entries on the drive."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _REFUSALS:  # some file systems cannot sync folders
                raise
        finally:
            os.close(fd)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that may still be written in this folder's file system."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        os.close(fd)


def _fallocate(fd: int, n_bytes: int) -> None:
    """Reserve blocks. Not `posix_fallocate`: that writes zeros where it is not supported."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, 0, 0, n_bytes) and (code := ctypes.get_errno()) in _FULL:
        raise OSError(code, os.strerror(code))


class AlignedBuffer:
    """Memory for direct I/O, aligned in memory; `view` is as large as was asked for."""

    def __init__(self, n_bytes: int, alignment: int) -> None:
        self._map = mmap.mmap(-1, n_bytes + alignment)
        whole = memoryview(self._map)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        start = align_up(address, alignment) - address
        self.view = whole[start : start + n_bytes]
        whole.release()


class DirectFile:
    """One open file.

    Args:
        path: of the file.
        flags: `os.O_RDONLY`, or those of writing.
        files: the system calls.
        alignment: bytes; offsets, lengths and addresses of direct calls are multiples of it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, flags: int, files: PackFiles, alignment: int) -> None:
        self.path = path
        self._files = files
        self._alignment = alignment
        self._lock = threading.Lock()
        self._flags = flags & ~os.O_TRUNC
        self._is_direct = hasattr(os, "O_DIRECT")
        self._old_fds: list[int] = []
        try:
            self.fd = files.open(path, flags | (os.O_DIRECT if self._is_direct else 0))
        except OSError as error:
            if not self._is_direct or error.errno not in _REFUSALS:
                raise
            self._is_direct = False
            self.fd = files.open(path, flags)

    @property
    def is_direct(self) -> bool:
        """Do calls go past the page cache?"""
        return self._is_direct

    def _fall_back(self) -> None:
        with self._lock:
            if self._is_direct:
                fd = self._files.open(self.path, self._flags)
                self._old_fds.append(self.fd)  # another thread may be using it
                self.fd = fd
                self._is_direct = False

    def read(self, view: memoryview, offset: int, needed: int) -> int:
        """Fill `view` from byte `offset`, at least its first `needed` bytes.

        Returns:
            Bytes asked of the drive.

        Raises:
            ReadError: they did not come.
        """
        done = asked = 0
        while done < needed:
            direct = self._is_direct
            at = align_down(done, self._alignment) if direct else done
            piece = view[at : at + _LARGEST_BYTES]
            try:
                got = self._files.preadv(self.fd, piece, offset + at)
            except InterruptedError:
                continue
            except OSError as error:
                if direct and error.errno in _REFUSALS:
                    self._fall_back()
                    continue
                raise self._read_error(error.strerror or str(error), offset, view, error) from error
            asked += got
            if at + got <= done:
                raise self._read_error(f"only {done} of {needed} bytes came", offset, view)
            done = at + got
        if not self._is_direct:
            os.posix_fadvise(self.fd, offset, len(view), os.POSIX_FADV_DONTNEED)
        return asked

    def _read_error(
        self, what: str, offset: int, view: memoryview, cause: OSError | None = None
    ) -> ReadError:
        return ReadError(
            f"read failed: {what}; check the drive",
            path=self.path,
            offset=offset,
            length=len(view),
            errno=cause.errno if cause is not None else None,
        )

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at byte `offset`.

        Raises:
            NoSpaceError: the file system is full.
            PackBuildError: another failure.
        """
        done = 0
        while done < len(data):
            direct = self._is_direct
            try:
                went = self._files.pwrite(
                    self.fd, data[done : done + _LARGEST_BYTES], offset + done
                )
            except InterruptedError:
                continue
            except OSError as error:
                if direct and error.errno in _REFUSALS:
                    self._fall_back()
                    continue
                raise write_failure(self.path, error, len(data) - done, self._files) from error
            done += went
            if direct and done < len(data):  # cut short off the alignment: that sector once more
                done = align_down(done, self._alignment)

    def sync(self) -> None:
        """Have all data on the drive, and out of the page cache."""
        try:
            self._files.fdatasync(self.fd)
        except OSError as error:
            raise write_failure(self.path, error, 0, self._files) from error
        if not self._is_direct:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptors."""
        for fd in [self.fd, *self._old_fds]:
            self._files.close(fd)
        self._old_fds = []


def write_failure(path: Path, error: OSError, n_bytes: int, files: PackFiles) -> PackBuildError:
    """What to raise when writing `n_bytes` more to `path` failed."""
    if error.errno in _FULL:
        available = 0
        with contextlib.suppress(OSError):
            available = files.free_bytes(path.parent)
        return NoSpaceError(
            f"{path}: the file system became full during the build; make room and start again, "
            "the build goes on where it stopped",
            needed=n_bytes,
            available=available,
        )
    return PackBuildError(
        f"{path}: writing the pack failed: {error.strerror or error}; check the drive and start "
        "again, the build goes on where it stopped"
    )
