"""From sampled tokens to what a user iterates over.

`EventFeed` is the hand-over between the engine and one consumer: the engine pushes tokens, the feed
turns them into text and tells when a stop string ends the answer, the consumer takes events. It is
bounded: a consumer that falls behind holds up its own request and nobody else's. `TokenStream` is
the consumer's side. Both live on the loop's thread.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

from aprefetch.engine.request import FinishReason, GenerateRequest, Phase, TokenEvent, Usage
from aprefetch.engine.sampler import Sample
from aprefetch.errors import RuntimeStateError

__all__ = ["EventFeed", "TextSink", "TokenStream"]

CAPACITY_EVENTS = 16


class TextSink(Protocol):
    """What `text.Detokenizer` does: ids in, text out, stop strings noticed."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that became certain, and whether a stop string was found."""
        ...

    def flush(self) -> str:
        """What was held back; called once, at the end."""
        ...


class EventFeed:
    """A bounded queue of events with one writer and one reader.

    Args:
        text: turns ids to text; None for streams of ids only.
        capacity_events: how far the engine may be ahead of the reader.
    """

    def __init__(self, text: TextSink | None, capacity_events: int = CAPACITY_EVENTS) -> None:
        self._text = text
        self._capacity = capacity_events
        self._events: deque[TokenEvent] = deque()
        self._n_pushed = 0
        self._error: BaseException | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self.on_room: Callable[[], None] | None = None

    @property
    def full(self) -> bool:
        """Whether the reader must take something before more is pushed."""
        return len(self._events) >= self._capacity

    def push(self, sample: Sample, *, is_stop: bool, is_last: bool) -> FinishReason | None:
        """Add a token; returns why the answer ends with it, if it does."""
        text, reason = "", None
        if is_stop:
            reason = FinishReason.STOP
        elif self._text is not None:
            text, stopped = self._text.push(sample.token_id)
            if stopped:
                reason = FinishReason.STOP
        if reason is None and is_last:
            reason = FinishReason.LENGTH
        if self._text is not None and (is_stop or reason is FinishReason.LENGTH):
            text += self._text.flush()
        self._add(
            TokenEvent(
                index=self._n_pushed,
                token_id=sample.token_id,
                text=text,
                logprob=sample.logprob,
                top_logprobs=sample.top_logprobs,
                finish_reason=reason,
            )
        )
        return reason

    def cancel(self) -> None:
        """Add the last event of a cancelled answer, with the text that was held back."""
        text = self._text.flush() if self._text is not None else ""
        self._add(
            TokenEvent(
                index=self._n_pushed,
                token_id=-1,
                text=text,
                finish_reason=FinishReason.CANCELLED,
            )
        )

    def end(self, error: BaseException | None = None) -> None:
        """Nothing follows; the reader gets `error` after the events that are left."""
        self._ended = True
        self._error = error
        self._wake()

    async def get(self) -> TokenEvent:
        """The next event.

        Raises:
            StopAsyncIteration: there is none.
            AprefetchError: what ended the request; raised once.
        """
        while not self._events:
            if self._ended:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        was_full = self.full
        event = self._events.popleft()
        if was_full and self.on_room is not None:
            self.on_room()
        return event

    def _add(self, event: TokenEvent) -> None:
        self._n_pushed += 1
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TokenStream:
    """The tokens of one answer: an async iterator of `TokenEvent`, and a context manager.

    Nothing runs before the first step of the iteration (or the entry into the `async with`).
    Leaving the `async with`, or `aclose()`, ends the request if it still runs; a stream that is
    dropped while it runs warns and is ended too. One task iterates; any task may close.
    """

    def __init__(
        self,
        prepare: Callable[[], Awaitable[GenerateRequest]],
        submit: Callable[[GenerateRequest], None],
        cancel: Callable[[GenerateRequest], None],
    ) -> None:
        self._prepare = prepare
        self._submit = submit
        self._cancel = cancel
        self._request: GenerateRequest | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._busy = False
        self.prompt: str | None = None
        self.template: str | None = None

    @property
    def usage(self) -> Usage:
        """Tokens and times so far; zeros before the start."""
        if self._request is None:
            return Usage(prompt_tokens=0, completion_tokens=0)
        return self._request.usage()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; None while it has not."""
        return self._request.finish_reason if self._request is not None else None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the model got it; empty before the start."""
        return self._request.prompt_ids.tolist() if self._request is not None else []

    @property
    def token_ids(self) -> list[int]:
        """Tokens sampled so far; may be ahead of the events taken."""
        return list(self._request.output_ids) if self._request is not None else []

    async def __aenter__(self) -> Self:
        if not self._closed and self._request is None:
            await self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._busy:
            raise RuntimeStateError(
                "another task is waiting for this stream's next token; "
                "give each reader a stream of its own"
            )
        if self._closed:
            raise StopAsyncIteration
        self._busy = True
        try:
            if self._request is None:
                await self._begin()
            if self._request is None:  # closed meanwhile
                raise StopAsyncIteration
            return await self._request.feed.get()
        finally:
            self._busy = False

    async def _begin(self) -> None:
        request = await self._prepare()
        # From here on nothing awaits: the request is either submitted and ours, or was never seen.
        if self._closed or self._request is not None:
            return
        self._submit(request)
        self._loop = asyncio.get_running_loop()
        self._request = request

    async def aclose(self) -> None:
        """End the request and wait until nothing of it is left. May be called more than once."""
        self._closed = True
        request = self._request
        if request is None or request.phase is Phase.ENDED:
            return
        self._cancel(request)
        await request.ended.wait()

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is None or self._closed or request.phase is Phase.ENDED:
            return
        warnings.warn(
            "a TokenStream was dropped while its request was running; "
            "use `async with`, or await its aclose()",
            ResourceWarning,
            source=self,
            stacklevel=1,
        )
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, request)
