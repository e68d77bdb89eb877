"""Server-sent events over ASGI, and work that ends when its client goes.

A response here owns its work: whatever way it ends (done, client gone, client too slow, server
stopping), the work is cancelled and awaited before the response returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "ClientGone", "EventResponse", "Write", "encode", "while_connected"]

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]

DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": still working\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect events
]


class ClientGone(Exception):
    """The connection was closed by the client, or it took nothing for too long."""


def encode(value: Any) -> bytes:
    """One event. JSON in ASCII: no line break of any kind can be in it."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        ClientGone: it went.
    """
    main = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({main, gone}, return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            return main.result()
        raise ClientGone
    finally:
        await _end(main, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen: it is not "never retrieved"


class EventResponse(Response):
    """Runs `produce(write)` and sends what it writes.

    Args:
        produce: writes whole events; backpressure of the connection holds it up.
        close: called at the end, whatever happened.
        heartbeat_s: a comment is sent after so long without an event, for proxies that cut silent
            connections.
        stall_s: a client that takes nothing for so long is dropped.
    """

    def __init__(
        self,
        produce: Callable[[Write], Coroutine[Any, Any, None]],
        close: Callable[[], Awaitable[None]],
        *,
        heartbeat_s: float,
        stall_s: float,
    ) -> None:
        super().__init__()
        self._produce = produce
        self._close = close
        self._heartbeat_s = heartbeat_s
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._run(send))
        finally:
            await self._close()

    async def _run(self, send: Send) -> None:
        lock = asyncio.Lock()
        loop = asyncio.get_running_loop()
        last_s = loop.time()

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal last_s
            async with lock:
                try:
                    async with asyncio.timeout(self._stall_s):
                        await send({"type": "http.response.body", "body": data, "more_body": more})
                except TimeoutError:
                    raise ClientGone from None
                last_s = loop.time()

        async def beat() -> None:
            while True:
                await asyncio.sleep(max(0.01, last_s + self._heartbeat_s - loop.time()))
                if loop.time() >= last_s + self._heartbeat_s:
                    await write(_HEARTBEAT)

        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        work = asyncio.ensure_future(self._produce(write))
        heart = asyncio.ensure_future(beat())
        try:
            await asyncio.wait({work, heart}, return_when=asyncio.FIRST_COMPLETED)
            (work if work.done() else heart).result()
        finally:
            await _end(work, heart)
        await write(b"", more=False)
