"""C9: a second run begins with what the first found worth its room; a bad list is harmless."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from pipeline_rig import BIG

from aprefetch.pipeline.coordinator import Coordinator
from aprefetch.pipeline.hotlist import load_hot_list, save_hot_list
from aprefetch.types import ExpertKey


async def test_c9_misses_of_the_first_token_fall(rig, experts, tmp_path):
    vram, ram = Coordinator.minimum_budgets(experts)
    first, second = (rig(vram=vram * 3, ram=ram * 3) for _ in range(2))
    token = {1: [0, 3], 2: [1, 4], 4: [2, 6]}
    for _ in range(3):
        for layer, picks in token.items():
            await first.use(layer, picks)
    path = tmp_path / "hot.json"
    save_hot_list(path, "m", first.coordinator.hottest())
    assert await second.coordinator.warm(load_hot_list(path, "m")) == 6
    second.assert_sound()
    for layer, picks in token.items():
        await second.use(layer, picks)
    assert second.counters.hits_device == 6 and second.counters.misses_device == 0
    assert second.counters.guesses_issued == 0


@pytest.mark.parametrize("ram", [0, None, BIG])
async def test_c9_a_list_larger_than_all_room_is_followed_as_far_as_there_is_room(rig, ram):
    r = rig(ram=ram)
    keys = [ExpertKey(layer, expert) for layer in (1, 2, 4) for expert in range(8)]
    await r.coordinator.warm(keys)
    r.assert_sound()
    assert r.coordinator.memory()["vram_used_bytes"] > 0
    for layer in (1, 2, 4):
        assert sorted(await r.use(layer, range(8))) == list(range(8))
    r.assert_sound()


async def test_c9_wrong_keys_are_passed_over(rig):
    r = rig(vram=BIG, ram=BIG)
    keys = [ExpertKey(99, 0), ExpertKey(1, 8), ExpertKey(1, -1), ExpertKey(1, 2), ExpertKey(1, 2)]
    assert await r.coordinator.warm(keys) == 1
    assert await r.use(1, [2]) == [2] and r.counters.hits_device == 1


async def test_a_demand_takes_up_a_warm_read(scripted):
    r = scripted(vram=BIG, ram=BIG)
    r.reader.fails = lambda job: job.key.expert == 3
    assert await r.coordinator.warm([ExpertKey(1, 3)]) == 1
    r.assert_sound()
    r.reader.fails = lambda job: False
    assert await r.use(1, [3]) == [3]
    r.assert_sound()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": "other"}',
        '{"format": "aprefetch-hot-list", "version": 2, "model": "m", "experts": []}',
        '{"format": "aprefetch-hot-list", "version": 1, "model": "n", "experts": []}',
        '{"format": "aprefetch-hot-list", "version": 1, "model": "m"}',
        '{"format": "aprefetch-hot-list", "version": 1, "model": "m", "experts": [[1]]}',
        '{"format": "aprefetch-hot-list", "version": 1, "model": "m", "experts": [["1", 2]]}',
        '{"format": "aprefetch-hot-list", "version": 1, "model": "m", "experts": 5}',
    ],
)
def test_c9_a_corrupt_list_is_ignored_with_a_note(tmp_path: Path, text, caplog):
    path = tmp_path / "hot.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_hot_list(path, "m") == []
    assert "is ignored" in caplog.text


def test_a_list_comes_back_as_it_was(tmp_path: Path):
    path = tmp_path / "hot.json"
    assert load_hot_list(path, "m") == []
    save_hot_list(path, "m", [ExpertKey(3, 1), ExpertKey(0, 7)])
    assert load_hot_list(path, "m") == [ExpertKey(3, 1), ExpertKey(0, 7)]
    assert [p.name for p in tmp_path.iterdir()] == ["hot.json"]
    assert json.loads(path.read_text())["experts"] == [[3, 1], [0, 7]]
