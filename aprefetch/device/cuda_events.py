"""Callbacks after CUDA events, without a thread in the ordinary case.

A `Watch` belongs to one stream, whose events come true in order. Whoever passes by polls it: a
query takes a microsecond, while waking a thread and handing it the interpreter's lock costs tens to
hundreds of them, on the very path that decoding waits for. Where nobody passes by, a timer looks
every few milliseconds; where somebody is known to wait, `expedite` has a thread sleep on the oldest
event and wake the loop at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

import torch

__all__ = ["CudaTicket", "Watch", "new_event"]

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.002


def new_event() -> torch.cuda.Event:
    """An event on which a thread can sleep without spinning."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


class CudaTicket:
    """Stands for the work that was on a stream when it was made."""

    __slots__ = ("event", "watch")

    def __init__(self, event: torch.cuda.Event, watch: Watch | None = None) -> None:
        self.event = event
        self.watch = watch  # of the stream; None for that of compute

    def done(self) -> bool:
        """Whether that work has finished; never blocks."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class Watch:
    """Events of one stream in the order in which they were recorded, and what to call after each.

    All methods belong to the loop's thread; callbacks run there, never inside `add`. A failed GPU
    counts as done: its error is sticky and comes up in whatever asks the GPU next.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._waiting: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_hurried = False
        self._is_slept_on = False
        self._thread: threading.Thread | None = None
        self._orders: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()

    def add(self, event: torch.cuda.Event, callback: Callable[[], None]) -> None:
        """Call `callback()` some time after `event`."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # what the one before had planned will not come
            self._loop, self._timer, self._is_slept_on = loop, None, False
        self._waiting.append((event, callback))
        if self._is_hurried:
            self._sleep_on_oldest()
        elif self._timer is None:
            self._timer = loop.call_later(_LOOK_EVERY_S, self._look)

    def poll(self) -> None:
        """Make the calls that are due."""
        waiting = self._waiting
        while waiting and _is_over(waiting[0][0]):
            waiting.popleft()[1]()
        if not waiting:
            self._is_hurried = False

    def expedite(self) -> None:
        """Somebody waits: until nothing is watched any more, call at once."""
        self.poll()
        if self._waiting:
            self._is_hurried = True
            self._sleep_on_oldest()

    def _look(self) -> None:
        self._timer = None
        self.poll()
        if self._waiting and not self._is_hurried and self._loop is not None:
            self._timer = self._loop.call_later(_LOOK_EVERY_S, self._look)

    def _sleep_on_oldest(self) -> None:
        if self._is_slept_on or not self._waiting:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._sleep, name=self._name)
            self._thread.start()
        self._is_slept_on = True
        self._orders.put(self._waiting[0][0])

    def _sleep(self) -> None:
        torch.cuda.set_device(self._device)
        while (event := self._orders.get()) is not None:
            try:
                event.synchronize()
            except RuntimeError as failure:
                _log.error("the GPU reported an error: %s", failure)
            loop = self._loop
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # closed: it has nobody left to tell
                    loop.call_soon_threadsafe(self._awake)
            del event

    def _awake(self) -> None:
        self._is_slept_on = False
        self.poll()
        if self._is_hurried:
            self._sleep_on_oldest()

    def close(self) -> None:
        """End the thread after the event it sleeps on; blocks for that."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None


def _is_over(event: torch.cuda.Event) -> bool:
    try:
        return bool(event.query())  # type: ignore[no-untyped-call]
    except RuntimeError as failure:
        _log.error("the GPU reported an error: %s", failure)
        return True
