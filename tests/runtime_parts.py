"""A runtime with parts put in: files that fail or shuffle, lookaheads that know or mislead."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from aprefetch.pipeline.io.threads import Files
from aprefetch.pipeline.lookahead import Lookahead, Strategy
from aprefetch.pipeline.reader import make_reader
from aprefetch.plan import plan_model


@contextmanager
def parts(
    files: Files | None = None, strategy: Strategy | None = None, **reader: Any
) -> Iterator[None]:
    """Runtimes opened inside get these parts; everything else is as always."""
    if files is not None:
        reader["files"] = files
    with (
        mock.patch("aprefetch.runtime.make_reader", functools.partial(make_reader, **reader)),
        mock.patch("aprefetch.loading.Lookahead", functools.partial(Lookahead, strategy=strategy)),
    ):
        yield


def minimum_budgets(path: Any) -> dict[str, int]:
    """The smallest legal budgets, as options."""
    plan = plan_model(path)
    return {"vram_budget": plan.vram_minimum_bytes, "ram_budget": plan.ram_minimum_bytes}


def full_budgets(path: Any) -> dict[str, int]:
    """Budgets that hold every expert in both tiers, as options."""
    plan = plan_model(path)
    return {"vram_budget": plan.vram_full_bytes, "ram_budget": plan.ram_full_bytes}
