"""Every dense tensor lands in exactly one parameter, and unusable metadata are all reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from make_tiny_gguf import write_tiny_deepseek4
from resident import Resident

from aprefetch.errors import SourceError, UnsupportedModelError
from aprefetch.kernels.cpu.reference import ReferenceOps
from aprefetch.models import registry
from aprefetch.models.deepseek_v4 import DeepseekV4Args
from aprefetch.storage import open_source


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_deepseek4(path, n_layers=4, ratios=(0, 4, 128, 4), n_experts=8)
    return path


def rewrite(
    source: Path,
    target: Path,
    keep: Callable[[str], bool] = lambda name: True,
    extra: dict[str, np.ndarray] | None = None,
    override: dict[str, Any] | None = None,
) -> Path:
    """Copy a GGUF with tensors left out or added, and keys given other values (None: left out)."""
    override = override or {}
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "deepseek4")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = override.get(key, field.contents())
        if value is None:
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type)
    for t in reader.tensors:
        if keep(t.name):
            writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "blk.1.attn_sinks.weight", "blk.3.indexer_compressor_ape.weight",
     "blk.0.ffn_gate_tid2eid.weight", "output_hc_scale.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_named(tiny, tmp_path, name):
    broken = rewrite(tiny, tmp_path / "m.gguf", keep=lambda n: n != name)
    with pytest.raises(SourceError, match="is missing") as caught:
        Resident(broken, ReferenceOps())
    assert caught.value.key == name


def test_an_unknown_tensor_is_named(tiny, tmp_path):
    broken = rewrite(tiny, tmp_path / "m.gguf", extra={"blk.1.extra.weight": np.zeros((2, 4))})
    with pytest.raises(SourceError, match=r"no place in this architecture: blk\.1\.extra") as e:
        Resident(broken, ReferenceOps())
    assert e.value.key == "blk.1.extra.weight"


def test_a_tensor_of_another_shape_is_named(tiny, tmp_path):
    broken = rewrite(
        tiny, tmp_path / "m.gguf", keep=lambda n: n != "output_norm.weight",
        extra={"output_norm.weight": np.zeros(100, np.float32)},
    )  # fmt: skip
    with pytest.raises(SourceError, match=r"output_norm\.weight has shape \[100\]"):
        Resident(broken, ReferenceOps())


def test_hash_tables_must_name_existing_experts(tiny, tmp_path):
    name = "blk.0.ffn_gate_tid2eid.weight"
    broken = rewrite(
        tiny, tmp_path / "m.gguf", keep=lambda n: n != name,
        extra={name: np.full((512, 4), 8, np.int32)},
    )  # fmt: skip
    with pytest.raises(SourceError, match="experts that do not exist"):
        Resident(broken, ReferenceOps())


def test_next_token_blocks_are_left_unread(tmp_path):
    extended = tmp_path / "nextn.gguf"
    write_tiny_deepseek4(extended, n_layers=3, ratios=(0, 4, 128), n_experts=8, nextn=1)
    with_block = Resident(extended, ReferenceOps())
    assert with_block.model.info.n_layers == 3
    assert set(with_block.experts.layers) == {0, 1, 2}
    plain = rewrite(
        extended,
        tmp_path / "plain.gguf",
        keep=lambda name: not name.startswith("blk.3."),
        override={"deepseek4.block_count": 3, "deepseek4.nextn_predict_layers": 0}
        | {f"deepseek4.swiglu_clamp_{kind}": [10.0] * 3 for kind in ("exp", "shexp")},
    )
    ids = list(range(1, 40))
    assert torch.equal(with_block.logits(ids), Resident(plain, ReferenceOps()).logits(ids))


@pytest.mark.parametrize(
    "types",
    ["Q8_0", "F16", {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"},
     {"gate": "Q2_K", "up": "Q2_K", "down": "Q3_K"}, ["MXFP4", "Q8_0", "Q5_K"]],
)  # fmt: skip
def test_expert_types_may_be_mixed(tmp_path, types):
    path = tmp_path / "mixed.gguf"
    write_tiny_deepseek4(
        path, n_layers=3, ratios=(0, 4, 128), n_experts=8, width=256, expert_types=types
    )
    assert Resident(path, ReferenceOps()).logits(list(range(20))).isfinite().all()


def test_state_grows_as_declared(tiny):
    resident = Resident(tiny, ReferenceOps())
    info, state = resident.model.info, resident.model.new_state()
    assert info.state_bytes_per_token > 0
    from aprefetch.models.base import Chunk

    resident.step([Chunk(state, np.arange(300) % 512)])
    small = state.n_bytes
    resident.step([Chunk(state, np.arange(300) % 512)])
    assert state.n_tokens == 600
    assert 0 < state.n_bytes - small <= 2 * 600 * info.state_bytes_per_token + 300_000


class TestMetadata:
    """Keys of `DeepseekV4Args`; the tensors don't matter here."""

    tensors = {"blk.0.attn_norm.weight": None}

    @pytest.fixture()
    def metadata(self, tiny) -> dict[str, Any]:
        return dict(open_source(tiny).metadata.items())

    def test_all_problems_at_once(self, metadata):
        del metadata["deepseek4.attention.q_lora_rank"]
        metadata["deepseek4.hyper_connection.count"] = 3
        metadata["deepseek4.expert_gating_func"] = 1
        with pytest.raises(SourceError) as caught:
            DeepseekV4Args.from_metadata(metadata, self.tensors)
        for part in ("q_lora_rank is missing", "count must be 4", "expert_gating_func must be 4"):
            assert part in str(caught.value)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("attention.compress_ratios", np.array([0, 4, 5, 4])),
            ("attention.compress_ratios", np.array([0, 4])),
            ("attention.head_count_kv", 2),
            ("attention.layer_norm_rms_epsilon", float("nan")),
            ("attention.value_length", 64),
            ("block_count", 0),
            ("block_count", "four"),
            ("expert_used_count", 9),
            ("expert_weights_norm", 1),
            ("hyper_connection.sinkhorn_iterations", 2**31),
            ("rope.dimension_count", 33),
            ("rope.scaling.type", "longrope"),
            ("swiglu_clamp_exp", [1.0, 2.0]),
            ("attention.output_group_count", 3),
        ],
    )
    def test_unusable_values_are_named(self, metadata, key, value):
        metadata["deepseek4." + key] = value
        with pytest.raises(SourceError, match=key.replace(".", r"\.")):
            DeepseekV4Args.from_metadata(metadata, self.tensors)

    def test_only_next_token_blocks(self, metadata):
        with pytest.raises(SourceError, match="open the main model's file"):
            DeepseekV4Args.from_metadata(metadata, {"blk.4.nextn.eh_proj.weight": None})


def test_registry_names_what_it_knows():
    with pytest.raises(UnsupportedModelError, match=r"'llama' is not supported; known: deepseek4"):
        registry.lookup({"general.architecture": "llama"})
    with pytest.raises(SourceError, match=r"general\.architecture"):
        registry.lookup({})


def test_rope_tables_differ_by_layer_kind(tiny):
    model = Resident(tiny, ReferenceOps()).model
    plain, scaled = (block.attention.rope for block in model.blocks[:2])
    assert not torch.equal(plain.span(9, 1)[0], scaled.span(9, 1)[0])
