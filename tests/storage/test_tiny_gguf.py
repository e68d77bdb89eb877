"""The maker of tiny models: it writes what the oracle file has, in every variant it offers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from make_tiny_gguf import TinyConfig, random_blocks, write_tiny_deepseek4

from aprefetch.storage import open_source

TOOL = Path(__file__).parents[2] / "tools" / "make_tiny_gguf.py"


def kinds(source: Any) -> set[tuple[str, int, int]]:
    """Tensor names without layer numbers, with types and ranks."""
    return {
        (re.sub(r"blk\.\d+", "blk", name), info.ggml_type, len(info.shape))
        for name, info in source.tensors.items()
    }


def test_same_structure_as_the_oracle(oracle_model: Path, tmp_path: Path) -> None:
    ours = write_tiny_deepseek4(tmp_path / "t.gguf", embedding_type="Q8_0")[0]
    with open_source(oracle_model) as theirs, open_source(ours) as source:
        assert kinds(source) == kinds(theirs)
        assert set(source.metadata) == set(theirs.metadata)
        for key in theirs.metadata:
            assert source.metadata.value_type(key) == theirs.metadata.value_type(key)
        assert source.metadata["deepseek4.attention.compress_ratios"].tolist() == [
            *(0, 0, 4, 128, 4, 128),
            0,
        ]
        n_vocab = source.metadata["deepseek4.vocab_size"]
        tokens = source.metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == len(set(tokens)) == n_vocab == 512
        for layer in range(3):
            table = source.tensors[f"blk.{layer}.ffn_gate_tid2eid.weight"]
            ids = source.read_tensor(table.name).view(np.int32).reshape(table.shape)
            assert all(len(set(row)) == 4 for row in ids.tolist())
            assert (ids.min(), ids.max()) == (0, 15)


def test_seeds(tmp_path: Path, small_config: TinyConfig) -> None:
    one, same, other = (
        write_tiny_deepseek4(tmp_path / f"{i}.gguf", small_config, seed=seed)[0].read_bytes()
        for i, seed in enumerate((1, 1, 2))
    )
    assert one == same != other


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4", "BF16"])
def test_weights_have_the_wanted_spread(kind: str) -> None:
    which = gguf.GGMLQuantizationType[kind]
    blocks = random_blocks(np.random.default_rng(0), (64, 512), which, 0.05)
    values = gguf.quants.dequantize(blocks, which)
    assert values.shape == (64, 512)
    assert np.isfinite(values).all()
    assert 0.04 < values.std() < 0.065
    assert abs(values.mean()) < 0.005


def test_impossible_sizes(tmp_path: Path, small_config: TinyConfig) -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        write_tiny_deepseek4(tmp_path / "a.gguf", small_config, expert_types="Q2_K")
    with pytest.raises(ValueError, match="vocabulary"):
        write_tiny_deepseek4(tmp_path / "b.gguf", small_config, n_vocab=100)
    with pytest.raises(ValueError, match="split evenly"):
        write_tiny_deepseek4(tmp_path / "c.gguf", small_config, shards=60)


def test_command_line(tmp_path: Path) -> None:
    path = tmp_path / "made.gguf"
    options = ["--layers", "2", "--experts", "4", "--used", "2", "--shards", "2", "--nextn", "1"]
    types = ["--expert-types", "F16", "--expert-types", "gate=Q8_0,down=F32"]
    command = [sys.executable, str(TOOL), str(path), *options, *types]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 2
    with open_source(tmp_path / "made-00002-of-00002.gguf") as source:
        assert source.metadata["deepseek4.nextn_predict_layers"] == 1
        found = [source.tensors[f"blk.1.ffn_{r}_exps.weight"].ggml_type for r in ("gate", "down")]
        assert found == [8, 0]
