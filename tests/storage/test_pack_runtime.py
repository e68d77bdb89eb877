"""Answers from a pack, a striped pack and the GGUF are the same to the last bit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprefetch
from aprefetch import plan
from aprefetch.storage.pack import select_experts


async def answer(model: Path, ids: list[int], **options: Any) -> tuple[np.ndarray, Any]:
    async with aprefetch.Runtime.open(model, kernels="reference", **options) as rt:
        scored = await rt.score(ids, logits=True)
        return scored.logits, rt.stats()


@pytest.mark.parametrize("n_parts", [1, 2])
async def test_logits_are_bit_equal(
    oracle_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_parts: int
) -> None:
    facts = json.loads(oracle_model.with_suffix(".json").read_text())
    ids = facts["prompts"]["p40"]["ids"][:24]
    budgets = {"vram_budget": "1MiB", "ram_budget": 0}
    direct, stats = await answer(oracle_model, ids, **budgets)
    assert stats.bytes_read > 0
    folders = [tmp_path / str(i) for i in range(n_parts)]
    states = []

    def packed(source: Any, layers: Any) -> Any:
        experts, state = select_experts(source, layers, "pack", folders)
        states.append(state)
        return experts

    monkeypatch.setattr(plan, "GgufExperts", packed)
    for _ in range(2):
        logits, stats = await answer(oracle_model, ids, **budgets)
        assert np.array_equal(logits, direct)
        assert stats.bytes_read > 0
        assert stats.bytes_read % 53_248 == 0, "whole objects are read, one read each"
    assert states == ["pack built", "pack reused"]
    await asyncio.sleep(0)
