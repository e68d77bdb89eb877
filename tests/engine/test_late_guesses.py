"""When the step driver asks for guesses: once a layer, late enough to know most of it."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest

from aprefetch import Runtime, embedded
from aprefetch.engine.step import StepRunner
from aprefetch.models.moe import RoutedCall
from aprefetch.pipeline.demand import Demand
from aprefetch.pipeline.io.wrappers import PacedFiles
from aprefetch.pipeline.reader import make_reader
from aprefetch.plan import plan_model


class Watched(StepRunner):
    """Notes (rows, experts, have run, unread) at each guess."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.guesses: list[tuple[int, int, int, int]] = []
        self.n_calls = 0
        self._demand: Demand | None = None

    async def _finish(self, call: RoutedCall, demand: Demand, *, guesses: bool) -> None:
        self._demand, self.n_calls = demand, self.n_calls + 1
        await super()._finish(call, demand, guesses=guesses)

    async def _guess(self, call: RoutedCall) -> None:
        if call.n_rows == 1:
            assert self._demand is not None and self._demand.layer == call.layer
            weights = call.known_weights
            n_run = 0 if weights is None else int((weights != 0).sum())
            self.guesses.append((len(call.experts), n_run, self._demand.n_unread, call.layer))
        await super()._guess(call)


async def watched(share: float, **options: Any) -> tuple[Watched, Any]:
    made: list[Watched] = []

    def make(*args: Any, **kwargs: Any) -> Watched:
        made.append(Watched(*args, **kwargs))
        return made[0]

    plan = plan_model(embedded.MODEL_PATH)
    files = PacedFiles(None, bytes_per_s=2e8, latency_s=1e-4)
    reader = functools.partial(make_reader, files=files)
    budget = max(plan.vram_minimum_bytes, int(share * plan.vram_full_bytes))
    with (
        mock.patch("aprefetch.runtime.StepRunner", make),
        mock.patch("aprefetch.runtime.make_reader", reader),
    ):
        runtime = await Runtime.open(vram_budget=budget, ram_budget=0, **options)
    async with runtime:
        answer = await runtime.generate("Once upon", max_tokens=12, temperature=0, ignore_eos=True)
        return made[0], answer


@pytest.mark.parametrize("share", [0.0, 0.3])
async def test_a_single_row_is_guessed_from_once_a_layer_and_late(share) -> None:
    runner, _ = await watched(share, lookahead_width=4)
    n_layers = len(runner._model.info.routed_layers)
    assert len(runner.guesses) == runner.n_calls - n_layers > 0  # but for the prompt
    for n_experts, n_run, n_unread, _ in runner.guesses:
        assert n_unread <= 1
        assert n_unread == 0 or n_run >= n_experts - 1 - 2  # copies to the device may be under way
    assert sum(n_run > 0 for _, n_run, _, _ in runner.guesses) > len(runner.guesses) // 2


async def test_without_a_lookahead_nothing_changes() -> None:
    _, without = await watched(0.3, lookahead="off")
    _, with_it = await watched(0.3, lookahead_depth=3)
    assert without.token_ids == with_it.token_ids
