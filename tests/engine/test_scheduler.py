"""Who steps with whom, and in what turn."""

from __future__ import annotations

import pytest

from aprefetch.engine.pacing import ChunkPacer
from aprefetch.engine.request import Phase, ScoreRequest
from aprefetch.engine.scheduler import Scheduler
from aprefetch.errors import BudgetError, QueueFullError


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
    assert scheduler.doomed() == [requests[3]]
    scheduler.remove(requests[3])
    scheduler.remove(requests[3])
    assert set(scheduler.all()) == set(requests[1:3])


async def test_the_queue_has_a_limit(make) -> None:
    scheduler = Scheduler(max_sequences=2, batch_invariant=True, max_waiting=1)
    requests = [await make(ScoreRequest) for _ in range(4)]
    for request in requests[:3]:
        scheduler.add(request)
    scheduler.admit()
    with pytest.raises(QueueFullError, match="max_waiting") as caught:
        scheduler.add(requests[3])
    assert caught.value.limit == 3
    scheduler.remove(requests[0])
    scheduler.add(requests[3])


async def test_admission_counts_bytes_and_nobody_overtakes(make) -> None:
    scheduler = Scheduler(max_sequences=8, batch_invariant=True, state_budget_bytes=100)
    requests = [await make(ScoreRequest) for _ in range(4)]
    for request, n_bytes in zip(requests, (60, 50, 10, 100), strict=True):
        request.reserved_bytes = n_bytes
        scheduler.add(request)
    assert scheduler.admit() == requests[:1]  # the third would fit, but it is not its turn
    scheduler.remove(requests[0])
    assert scheduler.admit() == requests[1:3]
    assert scheduler.reserved_bytes == 60
    scheduler.remove(requests[1])
    assert scheduler.admit() == []
    scheduler.remove(requests[2])
    assert scheduler.admit() == requests[3:]
    scheduler.remove(requests[3])
    scheduler.remove(requests[3])
    assert scheduler.reserved_bytes == 0
    large = await make(ScoreRequest)
    large.reserved_bytes = 101
    with pytest.raises(BudgetError, match="state_budget") as caught:
        scheduler.add(large)
    assert caught.value.minimum_bytes == 101


async def test_prompts_take_turns_chunk_by_chunk(make) -> None:
    scheduler = Scheduler(max_sequences=8, batch_invariant=True)
    prompts = [await make(ScoreRequest) for _ in range(3)]
    decoding = await make(Decoding)
    for request in (*prompts, decoding):
        scheduler.add(request)
    scheduler.admit()
    steps = [scheduler.next_step() for _ in range(6)]
    assert all(decoding in step for step in steps)
    assert [prompts.index(step[-1]) for step in steps] == [0, 1, 2, 0, 1, 2]


async def test_short_prompts_join_a_step_that_has_room(make) -> None:
    scheduler = Scheduler(max_sequences=8, batch_invariant=True)
    prompts = [await make(ScoreRequest) for _ in range(4)]  # of 3 tokens each
    for request in prompts:
        scheduler.add(request)
    scheduler.admit()
    assert scheduler.next_step(8) == prompts[:2]
    assert scheduler.next_step(2) == [prompts[2]]
    assert scheduler.next_step(100) == [prompts[3], *prompts[:3]]


async def test_time_runs_out(make) -> None:
    scheduler = Scheduler(max_sequences=1, batch_invariant=True)
    patient, hasty = await make(ScoreRequest), await make(ScoreRequest)
    scheduler.add(patient)
    scheduler.add(hasty)
    assert scheduler.next_deadline_ns() is None
    patient.set_timeout(1000)
    hasty.set_timeout(1e-9)
    assert scheduler.next_deadline_ns() == hasty.deadline_ns
    assert scheduler.doomed() == [hasty]
    assert hasty.verdict().timeout_s == 1e-9
    hasty.cancelled = True
    assert hasty.verdict() is None


class TestChunkPacer:
    def test_without_others_or_a_wish_chunks_are_whole(self) -> None:
        assert ChunkPacer(512, None).limit_tokens(7) == 512
        assert ChunkPacer(512, 0.1).limit_tokens(0) == 512

    def test_it_keeps_shared_steps_within_the_gap(self) -> None:
        pacer = ChunkPacer(512, 0.1)
        base_ns, token_ns, sizes = 10_000_000, 500_000, []
        for _ in range(60):
            pacer.observe(0, 3, base_ns)
            n = pacer.limit_tokens(3)
            sizes.append(n)
            pacer.observe(n, 3, base_ns + n * token_ns)
        assert max(sizes) * token_ns + base_ns <= 100_000_000 + 10 * token_ns
        assert 160 <= sizes[-1] <= 180  # (100 - 10) ms / 0.5 ms

    def test_it_grows_step_by_step(self) -> None:
        pacer = ChunkPacer(512, 10)
        first = pacer.limit_tokens(1)
        pacer.observe(first, 1, 1000)
        assert first < pacer.limit_tokens(1) <= 2 * first

    def test_there_is_always_progress(self) -> None:
        pacer = ChunkPacer(512, 0.001)
        for _ in range(20):
            pacer.observe(0, 1, 10**9)
        pacer.observe(4, 1, 9 * 10**9)
        assert 1 <= pacer.limit_tokens(1) <= 4
        assert ChunkPacer(2, 0.001).limit_tokens(1) == 2

    def test_a_prompt_alone_teaches_nothing_about_shared_steps(self) -> None:
        pacer = ChunkPacer(512, 0.1)
        pacer.observe(512, 0, 60 * 10**9)
        assert pacer.limit_tokens(1) == ChunkPacer(512, 0.1).limit_tokens(1)
