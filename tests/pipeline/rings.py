"""Rings for tests: real ones, whose outcomes can be held back, changed, and written down."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest

from aprefetch.pipeline.io.uring import Ring, why_refused
from aprefetch.pipeline.io.wrappers import FaultFiles
from aprefetch.pipeline.reader import RingReader

REFUSED = why_refused()
needs_ring = pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))
BACKENDS = ["threads", pytest.param("io_uring", marks=needs_ring)]


class Request(NamedTuple):
    """One read, as the kernel was asked for it."""

    fd: int
    offset: int
    length: int
    address: int


class JudgedRing(Ring):
    """Reads may fail as `faults` has planned."""

    def __init__(self, *sizes: int, faults: FaultFiles | None = None) -> None:
        super().__init__(*sizes)
        self.requests: list[Request] = []
        self.open: dict[int, Request] = {}  # by tag
        self._faults = faults

    def read(self, tag: int, fd: int, address: int, length: int, offset: int, *more: Any) -> None:
        super().read(tag, fd, address, length, offset, *more)
        assert tag not in self.open
        self.open[tag] = Request(fd, offset, length, address)
        self.requests.append(self.open[tag])

    def reap(self) -> list[tuple[int, int]]:
        return [(tag, self._judged(self.open.pop(tag), n)) for tag, n in super().reap()]

    def _judged(self, request: Request, outcome: int) -> int:
        if self._faults is None:
            return outcome
        return self._faults.judge(request.fd, request.offset, request.length, outcome)


class GateRing(JudgedRing):
    """Nobody hears of outcomes before they pass a gate. It starts shut; reads do land."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.reader: RingReader | None = None
        self._held: list[tuple[int, int]] = []
        self._is_open = False

    def open_gate(self) -> None:
        """Let everything pass, now and later."""
        self._is_open = True
        assert self.reader is not None
        asyncio.get_running_loop().call_soon(self.reader._reap)

    def reap(self) -> list[tuple[int, int]]:
        self._held += super().reap()
        passed = self._held if self._is_open else []
        if self._is_open:
            self._held = []
        return passed
