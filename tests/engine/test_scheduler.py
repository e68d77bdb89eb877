"""Who steps with whom, and in what turn."""

from __future__ import annotations

import pytest

from aprefetch.engine.request import Phase, ScoreRequest
from aprefetch.engine.scheduler import Scheduler


class Decoding(ScoreRequest):
    """A request whose prompt is done."""

    @property
    def prefilling(self) -> bool:
        return False


class Stuck(Decoding):
    """A request whose consumer is behind."""

    @property
    def blocked(self) -> bool:
        return True


@pytest.fixture
def make():
    async def build(kind: type[ScoreRequest]) -> ScoreRequest:
        return kind([1, 2, 3], n_vocab=4)

    return build


async def test_all_that_decode_step_with_one_prompt_in_turn(make) -> None:
    scheduler = Scheduler(max_sequences=8, batch_invariant=True)
    d1, p1, d2, p2 = [await make(kind) for kind in (Decoding, ScoreRequest) * 2]
    for request in (d1, p1, d2, p2):
        scheduler.add(request)
    assert scheduler.admit() == [d1, p1, d2, p2]
    assert [set(scheduler.next_step()) for _ in range(3)] == [{d1, d2, p1}, {d1, d2, p2}] + [
        {d1, d2, p1}
    ]


async def test_one_at_a_time_where_batches_change_results(make) -> None:
    scheduler = Scheduler(max_sequences=8, batch_invariant=False)
    requests = [await make(kind) for kind in (Decoding, ScoreRequest, Decoding)]
    for request in requests:
        scheduler.add(request)
    scheduler.admit()
    assert [scheduler.next_step() for _ in range(4)] == [[r] for r in [*requests, requests[0]]]


async def test_those_whose_reader_is_behind_are_passed_over(make) -> None:
    for invariant in (True, False):
        scheduler = Scheduler(max_sequences=8, batch_invariant=invariant)
        stuck, other = await make(Stuck), await make(Decoding)
        scheduler.add(stuck)
        scheduler.add(other)
        scheduler.admit()
        assert [scheduler.next_step() for _ in range(2)] == [[other], [other]]
        scheduler.remove(other)
        assert scheduler.next_step() == []


async def test_no_more_than_the_limit_run_and_order_is_kept(make) -> None:
    scheduler = Scheduler(max_sequences=2, batch_invariant=True)
    requests = [await make(Decoding) for _ in range(4)]
    for request in requests:
        scheduler.add(request)
    assert scheduler.admit() == requests[:2]
    assert scheduler.admit() == []
    assert requests[2].phase is Phase.WAITING
    scheduler.remove(requests[0])
    assert scheduler.admit() == [requests[2]]
    requests[3].cancelled = True
    assert scheduler.cancelled() == [requests[3]]
    scheduler.remove(requests[3])
    scheduler.remove(requests[3])
    assert set(scheduler.all()) == set(requests[1:3])
