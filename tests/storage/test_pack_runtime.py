"""Packs under a runtime: the same bits as from the GGUF, and corrupt objects are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprefetch
from aprefetch.errors import PackCorruptError, ReadError
from aprefetch.storage import open_source
from aprefetch.storage.pack import PackExperts, build_pack, open_pack
from aprefetch.types import ExpertKey

SMALL = {"vram_budget": "1MiB", "ram_budget": 0}
OBJECT_BYTES = 53_248  # 3 roles of 17,408 bytes, up to the next 4 KiB


@pytest.fixture
def ids(oracle_model: Path) -> list[int]:
    facts = json.loads(oracle_model.with_suffix(".json").read_text())
    return facts["prompts"]["p40"]["ids"][:24]


async def answer(
    model: Path, ids: list[int], **options: Any
) -> tuple[np.ndarray, aprefetch.Stats, str]:
    async with aprefetch.Runtime.open(model, **SMALL, **options) as rt:
        scored = await rt.score(ids, logits=True)
        return scored.logits, rt.stats(), rt.pack_state


def flip(pack: Path, key: ExpertKey) -> None:
    """Change one byte of an object in a pack."""
    plan = open_pack(pack).read_plan(key)
    with pack.open("r+b") as file:
        file.seek(plan.reads[0].offset + 100)
        byte = file.read(1)[0]
        file.seek(plan.reads[0].offset + 100)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("n_parts", [1, 2])
async def test_logits_are_bit_equal(oracle_model, tmp_path, ids, n_parts) -> None:
    direct, stats, state = await answer(oracle_model, ids, experts="gguf")
    assert (state, stats.fallback_count) == ("direct GGUF", 0)
    folders = tuple(str(tmp_path / str(i)) for i in range(n_parts))
    for wanted, mode in (("pack built", "pack"), ("pack reused", "pack"), ("pack reused", "auto")):
        logits, stats, state = await answer(
            oracle_model, ids, experts=mode, pack_folders=folders, verify="first_read"
        )
        assert state == wanted
        assert np.array_equal(logits, direct)
        assert stats.bytes_read > 0
        assert stats.bytes_read % OBJECT_BYTES == 0, "whole objects are read, one read each"
        assert stats.fallback_count == stats.io_errors == 0


async def test_a_corrupt_object_is_replaced_on_first_read(oracle_model, tmp_path, ids) -> None:
    direct, _, _ = await answer(oracle_model, ids, experts="gguf")
    with open_source(oracle_model) as source:
        pack = build_pack(source, [tmp_path]).paths[0]
    for layer in range(8):
        for expert in range(16):
            flip(pack, ExpertKey(layer, expert))
    logits, stats, state = await answer(
        oracle_model, ids, pack_folders=str(tmp_path), verify="first_read"
    )
    assert state == "pack reused"
    assert stats.fallback_count > 0
    assert np.array_equal(logits, direct)


async def test_what_cannot_be_replaced_ends_the_request(
    oracle_model, tmp_path, ids, monkeypatch
) -> None:
    """The model's file fails as well: a typed error; when it is back, so are the right bits."""
    direct, _, _ = await answer(oracle_model, ids, experts="gguf")
    with open_source(oracle_model) as source:
        pack = build_pack(source, [tmp_path]).paths[0]
    for expert in range(16):
        flip(pack, ExpertKey(5, expert))

    def fail(self: PackExperts, key: ExpertKey, buffer: memoryview) -> None:
        raise ReadError("is gone", path=oracle_model, offset=0, length=1, key=key)

    async with aprefetch.Runtime.open(
        oracle_model, pack_folders=str(tmp_path), verify="first_read", **SMALL
    ) as rt:
        with monkeypatch.context() as patch:
            patch.setattr(PackExperts, "restore", fail)
            with pytest.raises(PackCorruptError, match="could not stand in") as caught:
                await rt.score(ids)
            assert caught.value.keys[0].layer == 5
        again = await rt.score(ids, logits=True)
    assert np.array_equal(again.logits, direct)


async def test_gguf_never_looks_for_a_pack(oracle_model, tmp_path, ids, monkeypatch) -> None:
    with open_source(oracle_model) as source:
        build_pack(source, [tmp_path])

    def trap(*args: Any, **keywords: Any) -> None:
        raise AssertionError("looked for a pack")

    monkeypatch.setattr("aprefetch.storage.pack.select.find_pack", trap)
    _, _, state = await answer(oracle_model, ids, experts="gguf", pack_folders=str(tmp_path))
    assert state == "direct GGUF"
