"""The hand-over from engine to reader: text, bounds, endings, closing in every state."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import pytest

from aprefetch.engine.request import FinishReason, GenerateRequest, TokenEvent
from aprefetch.engine.sampler import Sample, Sampler, SamplingParams
from aprefetch.engine.stream import EventFeed, TokenStream
from aprefetch.errors import ReadError, RuntimeStateError


class Letters:
    """Text of a token is a letter; "x" stops and is held back together with what precedes it."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> tuple[str, bool]:
        letter = chr(ord("a") + token_id)
        if letter == "x":
            return "", True
        text, self.held = self.held, letter
        return text, False

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def push(feed: EventFeed, ids: Sequence[int], *, last: bool = False) -> FinishReason | None:
    reason = None
    for i, token in enumerate(ids):
        reason = feed.push(Sample(token), is_stop=token == 25, is_last=last and i == len(ids) - 1)
    return reason


async def drain(feed: EventFeed) -> list[TokenEvent]:
    events = []
    while True:
        try:
            events.append(await feed.get())
        except StopAsyncIteration:
            return events


@pytest.mark.parametrize(
    ("ids", "last", "reason", "text"),
    [
        ([0, 1, 2], True, "length", "abc"),
        ([0, 1, 25], False, "stop", "ab"),
        ([0, 1, 23], False, "stop", "a"),  # what the stop string swallowed stays swallowed
        ([0, 1, 25], True, "stop", "ab"),
    ],
)
async def test_endings(ids: list[int], last: bool, reason: str, text: str) -> None:
    feed = EventFeed(Letters())
    assert push(feed, ids, last=last) == reason
    feed.end()
    events = await drain(feed)
    assert [e.token_id for e in events] == ids
    assert [e.index for e in events] == list(range(len(ids)))
    assert [e.finish_reason for e in events] == [None] * (len(ids) - 1) + [reason]
    assert "".join(e.text for e in events) == text


async def test_an_error_comes_after_the_tokens_and_once() -> None:
    feed = EventFeed(None)
    push(feed, [3])
    feed.end(ReadError("gone", path="m", offset=0, length=1))
    assert (await feed.get()).token_id == 3
    with pytest.raises(ReadError):
        await feed.get()
    with pytest.raises(StopAsyncIteration):
        await feed.get()


async def test_the_feed_is_full_until_something_is_taken() -> None:
    feed, calls = EventFeed(None, capacity_events=2), []
    feed.on_room = lambda: calls.append(1)
    push(feed, [0])
    assert not feed.full
    push(feed, [1])
    assert feed.full
    await feed.get()
    assert not feed.full
    await feed.get()
    assert calls == [1]


class Desk:
    """Stands where the engine does: one request, moved by the test."""

    def __init__(self) -> None:
        self.submitted: list[GenerateRequest] = []
        self.cancelled: list[GenerateRequest] = []
        self.gate: asyncio.Event | None = None

    async def prepare(self) -> GenerateRequest:
        if self.gate is not None:
            await self.gate.wait()
        return GenerateRequest(
            [1, 2],
            sampler=Sampler(SamplingParams(temperature=0), 26),
            feed=EventFeed(Letters()),
            stop_ids=frozenset({25}),
            max_tokens=100,
        )

    def cancel(self, request: GenerateRequest) -> None:
        self.cancelled.append(request)
        asyncio.get_running_loop().call_soon(request.finish)

    def stream(self) -> TokenStream:
        return TokenStream(self.prepare, self.submitted.append, self.cancel)

    def sample(self, *ids: int) -> None:
        for i in ids:
            self.submitted[0].accept(Sample(i))


async def ticks(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def test_break_and_close_ends_the_request() -> None:
    desk = Desk()
    async with desk.stream() as stream:
        desk.sample(0, 1)
        async for event in stream:
            assert event.token_id == 0
            break
    assert desk.cancelled == desk.submitted
    assert stream.finish_reason == "cancelled"
    assert stream.usage.completion_tokens == 2
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    assert len(desk.cancelled) == 1


async def test_closing_while_another_task_waits_for_a_token() -> None:
    desk = Desk()
    stream = desk.stream()
    waiting = asyncio.create_task(anext(stream))
    await ticks()
    with pytest.raises(RuntimeStateError, match="another task"):
        await anext(stream)
    await stream.aclose()
    event = await waiting
    assert (event.finish_reason, event.token_id) == ("cancelled", -1)


async def test_a_cancelled_wait_loses_no_token() -> None:
    desk = Desk()
    async with desk.stream() as stream:
        waiting = asyncio.create_task(anext(stream))
        await ticks()
        waiting.cancel()
        desk.sample(0)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await anext(stream)).token_id == 0


async def test_closing_before_and_during_the_start() -> None:
    desk = Desk()
    unused = desk.stream()
    await unused.aclose()
    assert [event async for event in unused] == []
    desk.gate = asyncio.Event()
    stream = desk.stream()
    starting = asyncio.create_task(anext(stream))
    await ticks()
    await stream.aclose()
    desk.gate.set()
    with pytest.raises(StopAsyncIteration):
        await starting
    assert desk.submitted == []


async def test_a_dropped_stream_warns_and_ends_the_request() -> None:
    desk = Desk()
    stream = desk.stream()
    async with asyncio.timeout(10):
        desk.gate = None
        begin = asyncio.create_task(anext(stream))
        await ticks()
        desk.sample(0)
        await begin
    with pytest.warns(ResourceWarning, match="dropped"):
        del stream, begin
        gc.collect()
    await ticks()
    assert desk.cancelled == desk.submitted


async def test_finished_or_unstarted_streams_may_be_dropped() -> None:
    desk = Desk()
    stream = desk.stream()
    del stream
    stream = desk.stream()
    reading = asyncio.create_task(anext(stream))
    await ticks()
    desk.sample(25)
    desk.submitted[0].finish()
    assert (await reading).finish_reason == "stop"
    assert [event async for event in stream] == []
    del stream, reading
    gc.collect()
    assert desk.cancelled == []
