"""The compiled loop of one reader thread; see `workers`.

It calls the C library by name, and runs without the interpreter's lock from start to end.
"""

from __future__ import annotations

from typing import Any

import numba

from aprefetch.kernels.cpu.jit import kernel

__all__ = ["serve"]

types: Any = numba.types
carray: Any = getattr(numba, "carray")  # noqa: B009  # not in numba's stubs

_INTERRUPTED = 4
_QUIT, _READ = 0, 1
_MONOTONIC, _ABSOLUTE = 1, 1

_read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))
_pread = types.ExternalFunction(
    "pread64", types.int64(types.int32, types.int64, types.int64, types.int64)
)
_sleep_until = types.ExternalFunction(
    "clock_nanosleep", types.int32(types.int32, types.int32, types.int64, types.int64)
)
_errno = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())


@kernel
def serve(request_fd: int, reply_fd: int, number: int, request: Any, reply: Any) -> None:
    """Serve requests, int64 `[6]`, with replies, int64 `[3]`, until told to quit.

    `request_fd` and `reply_fd` are pipes; a record is shorter than what a pipe keeps in one piece.
    """
    while True:
        got = _read(request_fd, request.ctypes.data, 48)
        if got != 48:
            if got < 0 and carray(_errno(), 1)[0] == _INTERRUPTED:
                continue
            return
        if request[0] == _QUIT:
            return
        outcome = -_INTERRUPTED
        if request[0] == _READ:
            while outcome == -_INTERRUPTED:
                outcome = _pread(request[2], request[3], request[4], request[5])
                if outcome < 0:
                    outcome = -carray(_errno(), 1)[0]
        else:
            while _sleep_until(_MONOTONIC, _ABSOLUTE, request.ctypes.data + 16, 0) == _INTERRUPTED:
                pass
        reply[0], reply[1], reply[2] = request[1], outcome, number
        _write(reply_fd, reply.ctypes.data, 24)
