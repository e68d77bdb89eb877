"""Guesses from early routers: order, limits, counting, and the stand-in strategies."""

from __future__ import annotations

import torch
from torch import Tensor

from aprefetch.config import LookaheadConfig
from aprefetch.pipeline.lookahead import (
    BestScores,
    Lookahead,
    Misled,
    Recorder,
    Replay,
    RoutedLayer,
    Strategy,
)
from aprefetch.stats import Counters

LAYERS = {n: RoutedLayer(n_experts=8, top_k=2) for n in range(5)}


class Routers:
    """Routers that score as told, and note how often they are asked."""

    def __init__(self, layers: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        self.asked: list[tuple[int, int]] = []
        self.scores: dict[int, Tensor] = {}
        self.table = {n: lambda streams, n=n: self._score(n, streams) for n in layers}

    def _score(self, layer: int, streams: Tensor) -> Tensor:
        self.asked.append((layer, streams.shape[0]))
        if layer in self.scores:
            return self.scores[layer]
        return streams[:, 0, :8] + layer


def make(
    routers: Routers, strategy: Strategy | None = None, **options: object
) -> tuple[Lookahead, Counters]:
    counters = Counters()
    config = LookaheadConfig(**options)  # type: ignore[arg-type]
    return Lookahead(routers.table, LAYERS, config, counters, strategy=strategy), counters


def streams(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)[:, None, :].repeat(1, 4, 1)


ROW = [0.0, 5.0, 1.0, 4.0, 2.0, 3.0, -1.0, -2.0]


def test_the_best_of_one_row_in_order() -> None:
    routers = Routers()
    lookahead, _ = make(routers)
    assert lookahead.predict(0, streams(ROW)) == [(1, [1, 3])]
    assert lookahead.predict(4, streams(ROW)) == []


def test_depth_and_width() -> None:
    routers = Routers(layers=(1, 3, 4))
    lookahead, _ = make(routers, depth=3, width=4)
    assert lookahead.predict(0, streams(ROW)) == [(1, [1, 3, 5, 4]), (3, [1, 3, 5, 4])]
    assert routers.asked == [(1, 1), (3, 1)]


def test_off_evaluates_nothing() -> None:
    for options in ({"mode": "off"}, {"depth": 0}):
        routers = Routers()
        lookahead, counters = make(routers, **options)
        assert lookahead.predict(0, streams(ROW)) == []
        lookahead.observe(1, [1, 2])
        assert routers.asked == []
        assert (counters.predicted, counters.picked) == (0, 0)


def test_streams_are_only_made_where_something_is_guessed() -> None:
    made = []

    def ahead() -> Tensor:
        made.append(0)
        return streams(ROW)

    lookahead, _ = make(Routers())
    assert lookahead.look(4, ahead) == []
    assert not made
    ((target, scores),) = lookahead.look(0, ahead)
    assert (target, scores.shape, len(made)) == (1, (1, 8), 1)


def test_rows_are_merged_by_score_with_ties_to_the_lower_number() -> None:
    routers = Routers()
    routers.scores[1] = torch.tensor(
        [[0.0, 9.0, 0.0, 3.0, 0, 0, 0, 0], [7.0, 0.0, 0.0, 3.0, 0, 0, 0, 0]]
    )
    lookahead, _ = make(routers)
    assert lookahead.predict(0, streams(ROW, ROW)) == [(1, [1, 0, 3])]
    routers.scores[1] = torch.ones(1, 8)
    assert lookahead.predict(0, streams(ROW)) == [(1, [0, 1])]


def test_many_rows_vote() -> None:
    scores = torch.zeros(16, 8)
    scores[:, 6] = 1.0  # everybody's first
    scores[:10, 2] = 0.5
    scores[10:, 4] = 0.9
    assert BestScores(LAYERS).guess(1, scores) == [6, 2, 4]


def test_limits() -> None:
    routers = Routers()
    lookahead, _ = make(routers, width=5, max_experts=3)
    assert lookahead.predict(0, streams(ROW)) == [(1, [1, 3, 5])]
    long = torch.randn(1000, 4, 8)
    lookahead, _ = make(routers, max_rows=16)
    routers.asked.clear()
    (guess,) = lookahead.predict(0, long)
    assert routers.asked == [(1, 16)]
    assert len(set(guess[1])) == len(guess[1]) <= 8


def test_the_same_scores_give_the_same_guesses() -> None:
    long = torch.randn(100, 4, 8, generator=torch.Generator().manual_seed(1))
    first = make(Routers(), depth=2)[0].predict(0, long)
    assert first == make(Routers(), depth=2)[0].predict(0, long)
    assert len(first) == 2


def test_empty_steps_are_harmless() -> None:
    lookahead, _ = make(Routers())
    assert lookahead.predict(0, torch.empty(0, 4, 8)) == []


def test_recall_counts_only_layers_with_a_prediction() -> None:
    lookahead, counters = make(Routers(), depth=2)
    lookahead.observe(0, [0, 1])  # nothing was predicted for it
    lookahead.predict(0, streams(ROW))
    lookahead.observe(1, [3, 7])
    assert (counters.predicted, counters.predicted_right, counters.picked) == (2, 1, 2)
    lookahead.predict(1, streams([9.0, 8.0, 0, 0, 0, 0, 0, 0]))
    lookahead.observe(2, [0, 3])  # 1 and 3 were guessed from layer 0, 0 and 1 from layer 1
    assert (counters.predicted, counters.predicted_right, counters.picked) == (5, 3, 4)
    lookahead.observe(2, [0, 3])
    assert counters.picked == 4
    assert counters.snapshot().lookahead_recall == 0.75


def test_a_step_given_up_leaves_nothing_behind() -> None:
    lookahead, counters = make(Routers())
    lookahead.predict(0, streams(ROW))
    lookahead.forget()
    lookahead.observe(1, [1])
    assert counters.picked == 0


def run(lookahead: Lookahead, n_steps: int) -> list[list[int]]:
    """Layers whose routers turn with the steps; returns the guesses in order."""
    guessed = []
    for step in range(n_steps):
        for layer in range(5):
            lookahead.observe(layer, sorted({(step + layer) % 8, (step * 3) % 8}))
            guessed += [experts for _, experts in lookahead.predict(layer, streams(ROW))]
    return guessed


def test_replay_is_always_right_and_misled_never() -> None:
    recorder = Recorder(BestScores(LAYERS))
    run(make(Routers(), recorder, depth=2)[0], 6)
    assert len(recorder.picks) == 30

    lookahead, counters = make(Routers(), Replay(recorder.picks), depth=2)
    run(lookahead, 6)
    assert counters.predicted == counters.predicted_right == counters.picked > 0

    lookahead, counters = make(Routers(), Misled(recorder.picks, LAYERS), depth=2)
    guessed = run(lookahead, 6)
    assert all(len(experts) == 2 for experts in guessed)
    assert counters.predicted > 0
    assert counters.predicted_right == 0


def test_replay_past_its_end_guesses_nothing() -> None:
    lookahead, _ = make(Routers(), Replay([(1, [2])]))
    assert lookahead.predict(0, streams(ROW)) == [(1, [2])]
    lookahead.observe(1, [2])
    assert lookahead.predict(0, streams(ROW)) == []
