"""One build of a pack at a time, over all processes of the machine.

An exclusive `flock` on a file beside the pack: the kernel lets go of it when its holder dies, so a
killed build leaves nothing to clean up. Whoever waits looks again afterwards, and finds the pack.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from aprefetch.errors import PackBuildError

__all__ = ["pack_lock"]

_POLL_S = 0.05


@contextlib.contextmanager
def pack_lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock. Blocking; `waiting` is called now and then meanwhile, and may raise.

    Raises:
        PackBuildError: the folder cannot be written.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise PackBuildError(
                f"{path.parent}: a pack cannot be built here: {error.strerror}; choose another "
                "folder with -o DIR (pack_dirs=)"
            ) from error
        try:
            while not _try(fd, path):
                waiting()
                time.sleep(_POLL_S)
            # The holder before us removed the file: this lock is then of no use.
            if not _is_same(fd, path):
                continue
            try:
                yield
                return
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
        finally:
            os.close(fd)


def _try(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise PackBuildError(
            f"{path}: the file system does not lock files ({error.strerror}); choose another "
            "folder with -o DIR (pack_dirs=)"
        ) from error
    return True


def _is_same(fd: int, path: Path) -> bool:
    try:
        held, named = os.fstat(fd), os.stat(path)
    except OSError:
        return False
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)
