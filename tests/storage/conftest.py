"""Files that the storage tests share; made once, copied by tests that damage them."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_tiny_gguf import TinyConfig, write_tiny_deepseek4

SMALL = TinyConfig(
    n_layers=3,
    hidden=64,
    width=32,
    n_vocab=300,
    n_experts=5,
    n_used=2,
    hash_layers=1,
    ratios=(0, 4, 128),
    n_heads=2,
    head_dim=32,
    rope_dims=16,
    q_rank=32,
    out_groups=1,
    out_rank=32,
    indexer_heads=2,
)


@pytest.fixture(scope="session")
def small_config() -> TinyConfig:
    return SMALL


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound single-file model of some 300 kB. Read only."""
    return write_tiny_deepseek4(tmp_path_factory.mktemp("small") / "small.gguf", SMALL)[0]


@pytest.fixture(scope="session")
def small_shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same model in four shards. Read only."""
    path = tmp_path_factory.mktemp("shards") / "small.gguf"
    return write_tiny_deepseek4(path, SMALL, shards=4)


@pytest.fixture(scope="session")
def oracle_model(oracle_dir: Path) -> Path:
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"
