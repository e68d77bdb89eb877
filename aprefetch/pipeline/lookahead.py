"""Stage 1: guesses about the experts of the next layers, from the routers themselves.

After the streams of layer n are known (but for its routed experts' part), the routers of layers
n+1..n+depth are evaluated on them. Two things mend the scores: what they were short of on average
over the last tokens (`drift`, learned while running, from what each router said in the end), and,
where there is a file of them, fitted corrections. How many guesses are issued is the `Pace`'s
choice unless a width is given. What a guess names can only move bytes; the math never sees it. The
lookahead owns the predictions until their layer is observed, and counts how many were right.

`predict` and `learn` may run on the compute thread and write no counter; everything else belongs to
the loop's thread. The two never run at the same time for one lookahead.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from aprefetch.config import LookaheadConfig
from aprefetch.pipeline.correction import Correction
from aprefetch.pipeline.pace import Pace
from aprefetch.stats import Counters

log = logging.getLogger(__name__)

RANKS = 3
"""Experts ranked of a single row, in top-k."""

DRIFT_WEIGHT = 0.1  # of the newest token in what predictions are short of

__all__ = [
    "BestScores",
    "Lookahead",
    "Misled",
    "Recorder",
    "Replay",
    "RoutedLayer",
    "Strategy",
]


class RoutedLayer(NamedTuple):
    """Sizes of one layer's router."""

    n_experts: int
    top_k: int
    object_bytes: int = 0


class Strategy(Protocol):
    """Turns scores into guesses. Others than `BestScores` serve tests and studies."""

    def guess(self, layer: int, scores: Tensor) -> list[int]:
        """Experts of `layer`, the likeliest first, from scores `[T, E]`."""
        ...

    def saw(self, layer: int, picked: Sequence[int]) -> None:
        """What the router of `layer` picked in the end."""
        ...


class BestScores:
    """The best `width` experts of each row, merged.

    Few rows are merged by score, many by how often an expert was picked, ties by score and then by
    number: the same scores give the same guesses.
    """

    def __init__(
        self,
        layers: Mapping[int, RoutedLayer],
        width: int | None = None,
        many_rows: int = 8,
        *,
        one_row_factor: int = 1,
    ) -> None:
        self._layers = layers
        self._width = width
        self._many_rows = many_rows
        self._one_row_factor = one_row_factor  # ranks of a single row, over its width

    def guess(self, layer: int, scores: Tensor) -> list[int]:
        """See `Strategy`."""
        n_rows, n_experts = scores.shape
        width = min(self._width or self._layers[layer].top_k, n_experts)
        # Stable sorts: which of equal scores `topk` takes is not specified. For one row numpy's is
        # the quicker one.
        if n_rows == 1:
            row = scores.numpy()[0]
            first: list[int] = (
                (-row).argsort(kind="stable")[: width * self._one_row_factor].tolist()
            )
            return first
        values, ids = scores.sort(dim=1, descending=True, stable=True)
        best: dict[int, float] = {}
        votes: Counter[int] = Counter()
        for row_values, row_ids in zip(
            values[:, :width].tolist(), ids[:, :width].tolist(), strict=True
        ):
            votes.update(row_ids)
            for value, expert in zip(row_values, row_ids, strict=True):
                if value > best.get(expert, float("-inf")):
                    best[expert] = value
        by_votes = n_rows > self._many_rows
        return sorted(
            votes,
            key=lambda e: (-votes[e] if by_votes else 0, -best.get(e, float("-inf")), e),
        )

    def saw(self, layer: int, picked: Sequence[int]) -> None:
        """Nothing to learn."""


_NO_SCORES = torch.empty(0, 0)


class Recorder:
    """Guesses like `inner` and notes what the routers picked, for a later `Replay`."""

    def __init__(self, inner: Strategy) -> None:
        self.picks: list[tuple[int, tuple[int, ...]]] = []
        self._inner = inner

    def guess(self, layer: int, scores: Tensor) -> list[int]:
        """See `Strategy`."""
        return self._inner.guess(layer, scores)

    def saw(self, layer: int, picked: Sequence[int]) -> None:
        """Note it."""
        self.picks.append((layer, tuple(picked)))
        self._inner.saw(layer, picked)


class Replay:
    """Knows the future: guesses what a recorded run of the same requests picked.

    Args:
        picks: `Recorder.picks`. Where they end, nothing is guessed.
    """

    def __init__(self, picks: Iterable[tuple[int, Sequence[int]]]) -> None:
        self._coming: dict[int, deque[list[int]]] = {}
        for layer, picked in picks:
            self._coming.setdefault(layer, deque()).append(list(picked))

    def guess(self, layer: int, scores: Tensor) -> list[int]:
        """See `Strategy`."""
        coming = self._coming.get(layer)
        return list(coming[0]) if coming else []

    def saw(self, layer: int, picked: Sequence[int]) -> None:
        """Go on to the layer's next entry."""
        coming = self._coming.get(layer)
        if coming:
            coming.popleft()


class Misled:
    """Always wrong: guesses only experts that a recorded run did not pick.

    Args:
        picks: `Recorder.picks`.
        layers: Sizes by layer; as many experts are guessed as the layer's top-k.
    """

    def __init__(
        self, picks: Iterable[tuple[int, Sequence[int]]], layers: Mapping[int, RoutedLayer]
    ) -> None:
        self._right = Replay(picks)
        self._layers = layers

    def guess(self, layer: int, scores: Tensor) -> list[int]:
        """See `Strategy`."""
        right = set(self._right.guess(layer, scores))
        if not right:
            return []
        wrong = (e for e in range(self._layers[layer].n_experts) if e not in right)
        return [e for e, _ in zip(wrong, range(self._layers[layer].top_k), strict=False)]

    def saw(self, layer: int, picked: Sequence[int]) -> None:
        """Go on to the layer's next entry."""
        self._right.saw(layer, picked)


class Lookahead:
    """Predicts experts of the next layers.

    Args:
        routers: By layer: streams `[T, S, D]` -> ranking scores `[T, E]`, float32. Layers without
            one (dense, or routed by token id) are never predicted.
        layers: Sizes by layer, for at least the layers of `routers`.
        options: Depth, width, limits, off switch.
        counters: `predicted`, `predicted_right`, `picked` are written here.
        strategy: Stands in for `BestScores`.
        corrections: By target layer, see `aprefetch.pipeline.correction`.
    """

    def __init__(
        self,
        routers: Mapping[int, Callable[[Tensor], Tensor]],
        layers: Mapping[int, RoutedLayer],
        options: LookaheadConfig,
        counters: Counters,
        *,
        strategy: Strategy | None = None,
        corrections: Mapping[int, Correction] | None = None,
    ) -> None:
        self._routers = routers
        self._layers = layers
        self._options = options
        self._counters = counters
        self.pace: Pace | None = None
        """Chooses widths; None where a width is given."""
        if options.width is None and options.max_experts is None:
            self.pace = Pace(counters, len(layers))
        self._strategy = strategy or BestScores(
            layers, options.width, one_row_factor=RANKS if self.pace else 1
        )
        self._corrections = dict(corrections or {})
        # layer -> the layer whose streams were looked at -> experts issued, all that were ranked
        self._pending: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
        self._scored: dict[int, dict[int, Tensor]] = {}  # likewise: scores `[T, E]`
        # By layer with a correction: `[1, D]`, what its experts read for the latest token.
        self._inputs: dict[int, Tensor] = {}
        self._drift: dict[tuple[int, int], Tensor] = {}  # (looked at, layer) -> `[1, E]`
        self._n_learned: dict[tuple[int, int], int] = {}
        self._n_issued = 0

    def predict(
        self,
        layer: int,
        streams: Tensor,
        x: Tensor | None = None,
    ) -> list[tuple[int, list[int]]]:
        """Guesses for layers `layer + 1 .. layer + depth`, the nearest first, likeliest first.

        Args:
            layer: The layer that `streams` enter.
            streams: `[T, S, D]`, or what the routers take; rows first.
            x: `[T, D]` what the layer's experts read, for corrections.

        With the lookahead off no router is evaluated and the list is empty.
        """
        scored = self.look(layer, streams, x)
        return self.choose(
            layer, streams.shape[0], [(target, scores.cpu()) for target, scores in scored]
        )

    def look(
        self,
        layer: int,
        streams: Tensor | Callable[[], Tensor],
        x: Tensor | None = None,
        next_scores: Callable[[], Tensor] | None = None,
    ) -> list[tuple[int, Tensor]]:
        """The first half of `predict`: scores by target layer, on the device of `streams`.

        A call in place of the streams is only made where they are needed. `next_scores` stands in
        for the router of the next layer, over a single row.
        """
        options = self._options
        if x is not None and len(x) and layer in self._corrections:
            self._inputs[layer] = x if len(x) == 1 else x[-1:].clone()
        targets = [n for n in range(layer + 1, layer + options.depth + 1) if self.wants(n)]
        if not targets:
            return []
        n_rows, looked_at = 1, None
        if next_scores is None or len(targets) > 1 or targets[0] > layer + 1:
            looked_at = streams if isinstance(streams, Tensor) else streams()
            n_rows = len(looked_at)
            if not n_rows:
                return []
            if n_rows > options.max_rows:  # most experts will be wanted anyway: a sample will do
                looked_at = looked_at[_spread(n_rows, options.max_rows).to(looked_at.device)]
        out = []
        for target in targets:
            if target == layer + 1 and next_scores is not None:
                scores = next_scores()
            else:
                assert looked_at is not None
                scores = self._routers[target](looked_at)
            if n_rows == 1 and target == layer + 1 and target in self._inputs:
                scores = self._corrected(scores, target)
            if scores.shape[1]:
                self._scored.setdefault(target, {})[layer] = scores
            drift = self._drift.get((layer, target))
            if drift is not None:
                scores = scores + drift
            out.append((target, scores))
        return out

    def choose(
        self, layer: int, n_rows: int, scored: Sequence[tuple[int, Tensor]]
    ) -> list[tuple[int, list[int]]]:
        """The second half of `predict`, from scores in host memory."""
        out = []
        for target, scores in scored:
            experts = self.accept(layer, target, n_rows, self._strategy.guess(target, scores))
            if experts:
                out.append((target, experts))
        return out

    def wants(self, target: int) -> bool:
        """Whether guesses for this layer are of use at present."""
        is_asleep = self.pace is not None and self.pace.is_asleep
        return self._options.is_on and target in self._routers and not is_asleep

    def named(self, target: int, ranked: list[int]) -> list[int]:
        """Experts of `target` by strategy, where `ranked` is what its early router ranks first."""
        if isinstance(self._strategy, BestScores):
            return ranked
        return self._strategy.guess(target, _NO_SCORES)

    def accept(self, layer: int, target: int, n_rows: int, ranked: list[int]) -> list[int]:
        """Note what was predicted for `target` on the streams of `layer`; what of it to issue."""
        experts = ranked[: self._width(layer, target, n_rows, len(ranked))]
        self._pending.setdefault(target, {})[layer] = (experts, ranked if n_rows == 1 else [])
        self._n_issued += len(experts)
        return experts

    def _corrected(self, scores: Tensor, target: int) -> Tensor:
        correct, x = self._corrections[target], self._inputs[target]
        if not correct.fits(x.shape[1], scores.shape[1]):
            log.warning("the lookahead correction of layer %d is left out: other sizes", target)
            del self._corrections[target], self._inputs[target]
            return scores
        return scores + correct(x)

    def learn(self, layer: int, ranked: Callable[[], Tensor] | None) -> None:
        """Compare what was predicted for `layer` with what its router ranks by, `[T, E]`."""
        seen = self._scored.pop(layer, None)
        if seen is None or ranked is None:
            return
        truth = ranked()
        if truth.shape[0] > self._options.max_rows:
            rows = _spread(truth.shape[0], self._options.max_rows).to(truth.device)
            truth = truth[rows]
        for source, scores in seen.items():
            if scores.shape != truth.shape:
                continue
            short = truth - scores
            if len(short) > 1:
                short = short.mean(0, keepdim=True)
            key = (source, layer)
            n = self._n_learned[key] = self._n_learned.get(key, 0) + 1
            old = self._drift.get(key)
            if old is None:
                self._drift[key] = short
            else:  # a plain mean at first
                old.lerp_(short, max(DRIFT_WEIGHT, 1 / n))

    def end_step(self, wall_ns: int, n_rows: int) -> None:
        """A step over `n_rows` is complete."""
        if self.pace is not None and self._options.is_on:
            self.pace.end_step(wall_ns, self._n_issued, n_rows)
        self._n_issued = 0

    def observe(self, layer: int, picked: Sequence[int]) -> None:
        """The router of `layer` picked these experts (unique, all rows together)."""
        if not self._options.is_on:
            return
        self._strategy.saw(layer, picked)
        predictions = self._pending.pop(layer, None)
        if predictions is None:
            return
        predicted = {expert for experts, _ in predictions.values() for expert in experts}
        if self.pace is not None:
            chosen = set(picked)
            for source, (_, ranked) in predictions.items():
                self.pace.saw(layer, layer - source, ranked, chosen, self._layers[layer].top_k)
        self._counters.predicted += len(predicted)
        self._counters.predicted_right += len(predicted.intersection(picked))
        self._counters.picked += len(picked)

    def forget(self) -> None:
        """Drop predictions whose layers will not be observed: the step was given up."""
        self._pending.clear()
        self._scored.clear()

    def _width(self, source: int, target: int, n_rows: int, n_ranked: int) -> int:
        """How many of the ranked experts to name."""
        limit = self._limit(target, n_rows)
        if self.pace is None or n_rows > 1:
            return limit
        sizes = self._layers[target]
        width = self.pace.width(target, target - source, n_ranked, sizes.top_k)
        if sizes.object_bytes and self.pace.bytes_per_layer is not None:
            most = (target - source) * self.pace.bytes_per_layer / sizes.object_bytes
            width = min(width, max(1, int(most)))
        return width

    def _limit(self, layer: int, n_rows: int) -> int:
        sizes, options = self._layers[layer], self._options
        if options.max_experts is not None:
            return options.max_experts
        return min(sizes.n_experts, (options.width or sizes.top_k) * (n_rows + 1))


def _spread(n_rows: int, n_wanted: int) -> Tensor:
    """`n_wanted` row numbers from first to last, evenly."""
    return torch.linspace(0, n_rows - 1, n_wanted).round().to(torch.int64)
