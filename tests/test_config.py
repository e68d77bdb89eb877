"""Options: sizes, precedence, and that every problem is reported at once."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from aprefetch.config import (
    LookaheadConfig,
    MemoryConfig,
    ReaderConfig,
    RuntimeConfig,
    TraceConfig,
    parse_bytes,
)
from aprefetch.errors import AprefetchError, ConfigError


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("20GiB", 20 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        (" 2 tib ", 2 * 2**40),
        ("3k", 3072),
        ("7kB", 7000),
        (".5GiB", 2**29),
        ("1_000", 1000),
        ("0", 0),
    ],
)
def test_sizes(text: int | str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    "text", [-1, "", "GiB", "1 gigabyte", "-5MB", "1e9", True, 1.5, None, "auto"]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)  # type: ignore[arg-type]


def test_sizes_become_bytes() -> None:
    memory = MemoryConfig(vram_budget="1GiB")
    assert memory.vram_budget == memory.vram_bytes == 2**30
    assert memory.ram_budget == "auto"
    assert memory.ram_bytes is None
    assert ReaderConfig(slice_bytes="1MiB").slice_bytes == 2**20


def test_a_group_reports_all_its_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        ReaderConfig(queue_depth=65, strict_direct=1, slice_bytes="x", alignment=3000, retries=-1)  # type: ignore[arg-type]
    text = str(caught.value)
    for name in ("queue_depth", "strict_direct", "slice_bytes", "alignment", "retries"):
        assert name in text
    assert len(caught.value.problems) == 5
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AprefetchError)


def test_build_reports_problems_of_all_groups_and_names() -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.build(
            env={"APREFETCH_RETRIES": "many"},
            queue_dept=4,
            queue_depth=0,
            vram_budget="lots",
            device="tpu",
            lookahead="maybe",
        )
    problems = caught.value.problems
    assert len(problems) == 6
    text = "\n".join(problems)
    assert "did you mean 'queue_depth'" in text
    assert "APREFETCH_RETRIES='many'" in text
    for name in ("vram_budget", "device", "lookahead"):
        assert name in text


def test_defaults_with_an_empty_environment() -> None:
    assert RuntimeConfig.build(env={}) == RuntimeConfig()


def test_precedence() -> None:
    env = {
        "APREFETCH_QUEUE_DEPTH": "2",
        "APREFETCH_RETRIES": "5",
        "APREFETCH_VRAM_BUDGET": "1GiB",
        "APREFETCH_LOOKAHEAD": "off",
        "APREFETCH_RAM_BUDGET": " ",
    }
    config = RuntimeConfig(reader=ReaderConfig(queue_depth=3), chunk_tokens=64)
    built = RuntimeConfig.build(config, env, vram_budget="2GiB")
    assert built.reader.queue_depth == 3  # object over environment
    assert built.reader.retries == 5  # environment over default
    assert built.memory.vram_bytes == 2 * 2**30  # keyword over environment
    assert built.memory.ram_bytes is None  # blank is unset
    assert built.chunk_tokens == 64
    assert not built.lookahead.is_on
    assert RuntimeConfig.build(config, env, queue_depth=9).reader.queue_depth == 9


def test_groups_as_keywords() -> None:
    built = RuntimeConfig.build(
        env={"APREFETCH_RAM_BUDGET": "7"},
        memory=MemoryConfig(vram_budget=5),
        queue_depth=4,
        reader=ReaderConfig(queue_depth=2, retries=0),
        lookahead=LookaheadConfig(depth=2),
        trace=True,
    )
    assert built.memory.vram_bytes == 5
    assert (built.reader.queue_depth, built.reader.retries) == (4, 0)
    assert built.lookahead.depth == 2
    assert built.trace == TraceConfig(enabled=True)
    assert not RuntimeConfig.build(env={}, lookahead=False).lookahead.is_on
    assert RuntimeConfig.build(env={}, lookahead=True).lookahead.is_on


def test_a_group_of_the_wrong_kind() -> None:
    with pytest.raises(ConfigError, match="memory must be a MemoryConfig"):
        RuntimeConfig.build(env={}, memory={"vram_budget": 1})
    with pytest.raises(ConfigError, match="reader must be a ReaderConfig"):
        RuntimeConfig(reader=MemoryConfig())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config must be a RuntimeConfig"):
        RuntimeConfig.build({"queue_depth": 1})  # type: ignore[arg-type]


def test_the_environment_is_read_when_building(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APREFETCH_CHUNK_TOKENS", "17")
    assert RuntimeConfig().chunk_tokens == 512
    assert RuntimeConfig.build().chunk_tokens == 17


def test_an_unknown_variable_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="aprefetch.config"):
        assert RuntimeConfig.build(env={"APREFETCH_QUEUE_DEPHT": "1"}) == RuntimeConfig()
    assert "did you mean 'queue_depth'" in caplog.text


@pytest.mark.parametrize("option", ["top_k_experts", "n_experts_used", "experts_per_token"])
def test_no_option_changes_how_many_experts_run(option: str) -> None:
    with pytest.raises(ConfigError, match="is no option"):
        RuntimeConfig.build(env={}, **{option: 1})


def test_every_field_has_a_flat_name() -> None:
    from aprefetch.config import _GROUPS, _OPTIONS

    reachable = {(option.group, option.field) for option in _OPTIONS.values()}
    wanted = {(g, f.name) for g, kind in _GROUPS.items() for f in dataclasses.fields(kind)}
    wanted |= {("", f.name) for f in dataclasses.fields(RuntimeConfig) if f.name not in _GROUPS}
    assert reachable == wanted


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RuntimeConfig().chunk_tokens = 1  # type: ignore[misc]
