"""io_uring by raw system calls: a ring of read requests and one of their outcomes.

`Ring` owns its descriptor and mappings, and knows nothing of jobs: a caller queues requests with
numbers of its own (tags), submits all of them with one system call, and reaps (tag, outcome) pairs
once the ring's descriptor is readable. It belongs to one thread.

Requests never run inside the call that submits them: pinning the pages of a long read, and copying
the bytes where a file system has no direct I/O, are left to the kernel's own workers.

Order of memory accesses: the submitting side writes requests and index before it enters the kernel
on the same thread, which is in program order. The reaping side reads the kernel's index before the
outcomes it covers: x86 keeps the order of loads, and elsewhere a system call between the two does.
The index given back to the kernel only says which outcomes may be overwritten, and there is room
for twice as many as can be open.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import struct
import sys
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Requests", "Ring", "RingRefused", "why_refused"]

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same on every architecture
_OFF_RINGS, _OFF_REQUESTS = 0, 0x10000000
_SETUP_CLAMP = 1 << 4
_SETUP_COOP_TASKRUN = 1 << 8  # outcomes need not interrupt the thread while it computes
_FEAT_SINGLE_MMAP = 1 << 0
_FEAT_NODROP = 1 << 1
_FEAT_RW_CUR_POS = 1 << 3  # of no use to us, but as old as the request to read
_REGISTER_WORKERS = 19
_OP_TIMEOUT, _OP_READ = 11, 22
_ASYNC = 1 << 4
_TIMEOUT_ABS = 1

_PARAMS_BYTES, _REQUEST_BYTES, _OUTCOME_BYTES = 120, 64, 16
# opcode, flags, ioprio, fd, offset, address, length, operation's flags, tag, the rest is zero
_REQUEST = struct.Struct("<BBHiQQIIQQQQ")
_OUTCOME = struct.Struct("<QiI")  # tag, outcome, flags
_TIME = struct.Struct("<qq")
_LOADS_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")


class RingRefused(OSError):
    """The kernel does not give us a ring; the text says why."""


class Requests(Protocol):
    """What `Ring` and its stand-ins do; see there."""

    fd: int  # readable while outcomes wait

    def read(self, tag: int, fd: int, address: int, length: int, offset: int) -> None:
        """Queue a read."""
        ...

    def wake(self, tag: int, due_ns: int) -> None:
        """Queue an outcome that comes at a time."""
        ...

    def submit(self) -> Sequence[int]:
        """Hand over all that is queued; returns the tags that were not taken."""
        ...

    def reap(self) -> list[tuple[int, int]]:
        """(tag, outcome) of what has ended."""
        ...

    def close(self) -> None:
        """No request may be open. Idempotent."""
        ...


class Ring:
    """Requests and outcomes shared with the kernel.

    Args:
        n_requests: The most requests that are queued or open at a time.
        n_workers: How many of the kernel's workers may run at a time; None leaves its default.

    Raises:
        RingRefused: There is no io_uring here, it is forbidden, or too old.
    """

    def __init__(self, n_requests: int, n_workers: int | None = None) -> None:
        if sys.platform != "linux" or sys.byteorder != "little":
            raise RingRefused(errno.ENOSYS, "io_uring is for Linux on little-endian machines")
        # PyDLL keeps the GIL: the calls are short, and getting it back may take far longer.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = (
            *(ctypes.c_long, ctypes.c_long, ctypes.c_ulong),
            *(ctypes.c_ulong, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong),
        )
        self.fd = -1
        params = self._set_up(n_requests)
        try:
            self._map(params)
            if n_workers is not None:
                self._set_workers(n_workers)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, RingRefused):
                raise RingRefused(error.errno, f"io_uring: {error.strerror}") from error
            raise
        self._tail = self._head = 0  # ours: requests written, outcomes read
        self._n_queued = 0

    def _set_up(self, n_requests: int) -> bytearray:
        for flags in (_SETUP_CLAMP | _SETUP_COOP_TASKRUN, _SETUP_CLAMP):
            params = bytearray(_PARAMS_BYTES)
            struct.pack_into("<I", params, 8, flags)
            address = ctypes.addressof(ctypes.c_char.from_buffer(params))
            self.fd = self._syscall(_SETUP, n_requests, address, 0, 0, None, 0)
            if self.fd >= 0:
                break
            number = ctypes.get_errno()
            if number != errno.EINVAL:
                raise RingRefused(number, _refusal(number))
        if self.fd < 0:
            raise RingRefused(errno.EINVAL, _refusal(errno.EINVAL))
        os.set_inheritable(self.fd, False)
        return params

    def _map(self, params: bytearray) -> None:
        fields = struct.unpack("<10I", params[:40])
        n_requests, n_outcomes, features = fields[0], fields[1], fields[5]
        needed = _FEAT_SINGLE_MMAP | _FEAT_NODROP | _FEAT_RW_CUR_POS
        if features & needed != needed:
            raise RingRefused(errno.ENOSYS, "io_uring: the kernel is too old (5.6 is needed)")
        sq = struct.unpack("<8I", params[40:72])  # head, tail, mask, entries, flags, dropped, array
        cq = struct.unpack("<8I", params[80:112])  # head, tail, mask, entries, overflow, outcomes
        n_bytes = max(sq[6] + 4 * n_requests, cq[5] + _OUTCOME_BYTES * n_outcomes)
        shared = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._rings = mmap.mmap(self.fd, n_bytes, flags=shared, offset=_OFF_RINGS)
        self._requests = mmap.mmap(
            self.fd, n_requests * _REQUEST_BYTES, flags=shared, offset=_OFF_REQUESTS
        )
        self._words = memoryview(self._rings)[: n_bytes // 4 * 4].cast("I")
        words = self._words
        self._sq_head, self._sq_tail = sq[0] // 4, sq[1] // 4
        self._cq_head, self._cq_tail = cq[0] // 4, cq[1] // 4
        self._request_mask, self._outcome_mask = words[sq[2] // 4], words[cq[2] // 4]
        self._outcomes_at = cq[5]
        self.n_requests = n_requests
        for i in range(n_requests):
            words[sq[6] // 4 + i] = i  # request i is always in place i
        self._times = bytearray(_TIME.size * n_requests)
        self._times_address = ctypes.addressof(ctypes.c_char.from_buffer(self._times))

    def _set_workers(self, n_workers: int) -> None:
        limits = struct.pack("<II", n_workers, 0)  # those for files; others as they are
        address = ctypes.addressof(held := ctypes.create_string_buffer(limits, 8))
        # Kernels before 5.15 have no such limit to set: theirs is at least 4 per processor.
        self._syscall(_REGISTER, self.fd, _REGISTER_WORKERS, address, 2, None, 0)
        del held

    def read(
        self, tag: int, fd: int, address: int, length: int, offset: int, flags: int = _ASYNC
    ) -> None:
        """Queue a read of `length` bytes at `offset` into memory at `address`."""
        at = (self._tail + self._n_queued) & self._request_mask
        self._n_queued += 1
        _REQUEST.pack_into(
            self._requests,
            at * _REQUEST_BYTES,
            *(_OP_READ, flags, 0, fd, offset, address, length, 0, tag, 0, 0, 0),
        )

    def wake(self, tag: int, due_ns: int) -> None:
        """Queue an outcome that comes at `due_ns` of `time.perf_counter_ns`."""
        at = (self._tail + self._n_queued) & self._request_mask
        self._n_queued += 1
        _TIME.pack_into(self._times, at * _TIME.size, *divmod(due_ns, 1_000_000_000))
        address = self._times_address + at * _TIME.size  # the kernel copies it when we submit
        _REQUEST.pack_into(
            self._requests,
            at * _REQUEST_BYTES,
            *(_OP_TIMEOUT, 0, 0, -1, 0, address, 1, _TIMEOUT_ABS, tag, 0, 0, 0),
        )

    def submit(self) -> Sequence[int]:
        """Hand over all that is queued; returns the tags that the kernel did not take."""
        n_queued, self._n_queued = self._n_queued, 0
        first = self._tail
        words = self._words
        words[self._sq_tail] = self._tail = (first + n_queued) & 0xFFFFFFFF
        n_taken = self._syscall(_ENTER, self.fd, n_queued, 0, 0, None, 0)
        if n_taken == n_queued:
            return ()
        # It stops where it lacks memory. Take the rest back: they can be read in another way.
        head = words[self._sq_head]
        n_left = (self._tail - head) & 0xFFFFFFFF
        words[self._sq_tail] = self._tail = head
        left = [(head + i) & self._request_mask for i in range(n_left)]
        return [_REQUEST.unpack_from(self._requests, i * _REQUEST_BYTES)[8] for i in left]

    def reap(self) -> list[tuple[int, int]]:
        """(tag, bytes read or a negative errno) of what has ended."""
        words, mask, base = self._words, self._outcome_mask, self._outcomes_at
        head, tail = self._head, words[self._cq_tail]
        if head == tail:
            return []
        if not _LOADS_IN_ORDER:
            self._syscall(_ENTER, self.fd, 0, 0, 0, None, 0)
        unpack, rings = _OUTCOME.unpack_from, self._rings
        ended = []
        while head != tail:
            tag, outcome, _ = unpack(rings, base + (head & mask) * _OUTCOME_BYTES)
            ended.append((tag, outcome))
            head = (head + 1) & 0xFFFFFFFF
        words[self._cq_head] = self._head = head
        return ended

    def close(self) -> None:
        """Unmap and close; no request may be open. Idempotent."""
        words = getattr(self, "_words", None)
        if words is not None:
            words.release()
        for name in ("_rings", "_requests"):
            mapping = getattr(self, name, None)
            if mapping is not None:
                mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _refusal(number: int) -> str:
    if number == errno.ENOSYS:
        return "the kernel has no io_uring, or a sandbox hides it"
    if number in (errno.EPERM, errno.EACCES):
        return (
            "io_uring is forbidden here (sysctl kernel.io_uring_disabled, or the container's "
            "seccomp rules)"
        )
    return f"io_uring cannot be set up: {os.strerror(number)}"


def why_refused() -> str | None:
    """Why a ring cannot be had on this machine; None if it can."""
    try:
        ring = Ring(8)
    except RingRefused as error:
        return error.strerror or str(error)
    with contextlib.closing(ring):
        return None
