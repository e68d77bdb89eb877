"""Configs of published checkpoints: the text section, and agreement with a GGUF."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aprefetch.errors import SourceError
from aprefetch.storage.hf_config import check_config_beside, read_text_config, text_config

TEXT = {"model_type": "kimi", "num_hidden_layers": 93, "hidden_size": 7168, "num_experts": 896}
VISION = {"hidden_size": 1152, "num_hidden_layers": 27}
METADATA = {
    "general.architecture": "kimi-k3",
    "kimi-k3.block_count": 93,
    "kimi-k3.embedding_length": 7168,
    "kimi-k3.expert_count": 896,
    "kimi-k3.expert_used_count": np.array([0, 16]),
}


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config"])
def test_the_text_section_is_lifted_out(name):
    assert text_config({name: TEXT, "vision_config": VISION, "hidden_size": 1}) == TEXT


def test_a_plain_config_stays_and_other_parts_are_ignored():
    assert text_config(TEXT) == TEXT
    assert text_config({**TEXT, "vision_config": VISION}) == TEXT
    assert text_config({**TEXT, "text_config": None}) == {**TEXT, "text_config": None}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"vision_config": VISION}, "text_config"),
        ({"text_config": TEXT, "llm_config": TEXT}, "llm_config"),
        ({"text_config": [1]}, "text_config"),
    ],
)
def test_configs_without_one_text_model_are_refused(config, key):
    with pytest.raises(SourceError) as caught:
        text_config(config)
    assert caught.value.key == key


@pytest.mark.parametrize("text", ["{", "[1]", '{"vision_config": {}}'])
def test_unusable_files_are_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SourceError) as caught:
        read_text_config(tmp_path)
    assert caught.value.path == tmp_path / "config.json"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SourceError, match="cannot be read"):
        read_text_config(tmp_path)


def test_a_config_beside_the_model_must_be_of_it(tmp_path):
    paths = [tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"]
    assert check_config_beside(METADATA, paths) is None
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"text_config": {**TEXT, "num_experts_per_token": 16}}))
    assert check_config_beside(METADATA, paths) == file
    file.write_text(json.dumps({"text_config": {**TEXT, "num_hidden_layers": 61}}))
    with pytest.raises(SourceError, match="says 61 where the model file beside it says 93") as e:
        check_config_beside(METADATA, paths)
    assert e.value.key == "kimi-k3.block_count"
