"""Vocabularies for the tests of text: the two real files, and small ones made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from aprefetch.embedded import GOLDENS_PATH, MODEL_PATH
from aprefetch.text.byte_alphabet import CHAR_OF_BYTE
from aprefetch.text.tokenizer import Tokenizer
from aprefetch.text.vocab import load_tokenizer

ORACLE = Path(__file__).parents[1] / "data" / "oracle"
CONTROL, USER_DEFINED = 3, 4


@dataclass
class Source:
    """Stands for an open model file: only what `load_tokenizer` asks for."""

    metadata: Mapping[str, Any]
    paths: Sequence[Path] = ()


def read_metadata(path: Path) -> dict[str, Any]:
    fields = GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def byte_metadata(**changes: Any) -> dict[str, Any]:
    """256 byte tokens, one merge, a few markers. `changes`: keys without prefix; None removes."""
    markers = {"<s>": CONTROL, "</s>": CONTROL, "<think>": USER_DEFINED, "<|eot_id|>": CONTROL}
    tokens = [*CHAR_OF_BYTE, "ab", *markers]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": [1] * 257 + list(markers.values()),
        "merges": ["a b"],
        "bos_token_id": 257,
        "eos_token_id": 258,
        "add_bos_token": True,
    }
    values |= changes
    return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


@pytest.fixture(scope="session")
def oracle() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ORACLE / "tiny-deepseek4-mxfp4.json").read_text("utf-8"))
    return content


@pytest.fixture(scope="session")
def oracle_metadata() -> dict[str, Any]:
    return read_metadata(ORACLE / "tiny-deepseek4-mxfp4.gguf")


@pytest.fixture(scope="session")
def oracle_tokenizer(oracle_metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(Source(oracle_metadata), n_vocab=1024)


@pytest.fixture(scope="session")
def embedded_metadata() -> dict[str, Any]:
    return read_metadata(MODEL_PATH)


@pytest.fixture(scope="session")
def embedded_tokenizer(embedded_metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(Source(embedded_metadata))


@pytest.fixture(scope="session")
def goldens() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDENS_PATH.read_text("utf-8"))
    return content


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return load_tokenizer(Source(byte_metadata()))


@pytest.fixture
def make_metadata() -> Callable[..., dict[str, Any]]:
    return byte_metadata


@pytest.fixture
def make_source() -> type[Source]:
    return Source
