"""Tiny models of many settings give llama.cpp's logits; see `tests/data/llama_cpp/README.md`."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from compare_llama_cpp import compare, float32_twin, our_logits, weights_digest
from make_tiny_gguf import write_tiny_deepseek4
from tiny_variants import VARIANTS

FROZEN = sorted((Path(__file__).parents[1] / "data" / "llama_cpp").glob("*.npz"))


def test_the_frozen_models_are_there() -> None:
    assert len(FROZEN) == 5
    assert all(file.stem in VARIANTS for file in FROZEN)


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda file: file.stem)
async def test_logits_and_greedy_tokens_are_llama_cpps(frozen: Path, tmp_path: Path) -> None:
    want = np.load(frozen)
    files = write_tiny_deepseek4(tmp_path / "tiny.gguf", VARIANTS[frozen.stem])
    assert weights_digest(files) == str(want["digest"]), (
        "the seed gives other weights than it did; freeze again as the README there says"
    )
    ids = want["ids"].tolist()
    logits, greedy = await our_logits(files[0], ids, len(want["greedy"]), chunk_tokens=150)
    found = compare(logits[want["positions"]], want["logits"])
    assert found.median <= 1e-4
    assert found.largest <= 1e-3
    assert greedy == want["greedy"].tolist()


async def test_a_float32_twin_is_the_same_model(tmp_path: Path) -> None:
    files = write_tiny_deepseek4(
        tmp_path / "tiny.gguf", VARIANTS["nextn-sharded"], n_layers=3, ratios=(0, 4, 128)
    )
    twin = tmp_path / "twin.gguf"
    float32_twin(files, twin)
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(twin).tensors}
    assert kinds == {"F32", "I32"}
    ids = list(range(40))
    ours, _ = await our_logits(files[0], ids)
    theirs, _ = await our_logits(twin, ids)
    assert compare(ours, theirs).largest <= 1e-4
