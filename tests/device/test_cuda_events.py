"""When the ends of GPU work are noticed: polled, in a while, or promptly. Events are stand-ins."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from aprefetch.device.cuda_events import Watch


class Event:
    def __init__(self, error: str = "") -> None:
        self.happened = threading.Event()
        self.error = error
        self.n_sleeps = 0

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.happened.is_set()

    def synchronize(self) -> None:
        self.n_sleeps += 1
        self.happened.wait(10)


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    made = Watch("aprefetch-test-watch", torch.device("cpu"))
    yield made
    made.close()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)


async def test_polling_calls_in_order_what_is_over(watch):
    events, told = [Event() for _ in range(3)], []
    for i, event in enumerate(events):
        watch.add(event, lambda i=i: told.append(i))
    events[2].happened.set()
    watch.poll()
    assert told == []  # one stream: the third is not over before the first
    events[0].happened.set()
    watch.poll()
    assert told == [0]
    events[1].happened.set()
    watch.poll()
    assert told == [0, 1, 2]
    assert not any(event.n_sleeps for event in events)


async def test_it_is_noticed_in_a_while_though_nobody_polls(watch):
    event, told = Event(), []
    watch.add(event, lambda: told.append(0))
    await asyncio.sleep(0.01)
    assert told == []
    event.happened.set()
    await until(lambda: told)
    assert event.n_sleeps == 0 and watch._thread is None


async def test_in_a_hurry_a_thread_sleeps_on_one_event_after_the_other(watch):
    events, told = [Event() for _ in range(3)], []
    for i, event in enumerate(events[:2]):
        watch.add(event, lambda i=i: told.append((i, threading.get_ident())))
    watch.expedite()
    watch.add(events[2], lambda: told.append((2, threading.get_ident())))
    for n, event in enumerate(events, 1):
        await until(lambda event=event: event.n_sleeps)
        event.happened.set()
        await until(lambda n=n: len(told) == n)
    assert told == [(i, threading.get_ident()) for i in range(3)]
    late = Event()  # no hurry any more
    watch.add(late, lambda: told.append(late))
    late.happened.set()
    await until(lambda: told[-1] is late)
    assert late.n_sleeps == 0


async def test_a_callback_may_watch_something_else(watch):
    first, second, told = Event(), Event(), []
    watch.add(first, lambda: watch.add(second, lambda: told.append(0)))
    first.happened.set()
    second.happened.set()
    watch.poll()
    assert told == [0]


async def test_a_failed_gpu_counts_as_done(watch, caplog):
    told = []
    watch.add(Event("an illegal memory access"), lambda: told.append(0))
    watch.poll()
    assert told == [0] and "illegal memory access" in caplog.text


def test_a_second_loop_does_not_wait_for_the_firsts_plans(watch):
    told = []

    async def leave(event):
        watch.add(event, lambda: told.append("first"))
        watch.expedite()

    async def come(event):
        watch.add(event, lambda: told.append("second"))
        await until(lambda: len(told) == 2)

    first, second = Event(), Event()
    asyncio.run(leave(first))
    first.happened.set()
    second.happened.set()
    asyncio.run(come(second))
    assert told == ["first", "second"]
