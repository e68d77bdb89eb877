"""Every dense tensor lands in one parameter, all bad keys are reported, large headers open."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny_kimi import KIMI_K3, TINY_LINEAR, KimiConfig, write_kimi

from aprefetch.errors import SourceError, UnsupportedModelError
from aprefetch.inspection import inspect
from aprefetch.kernels.cpu import cpu_ops
from aprefetch.models import registry
from aprefetch.models.kimi_k3 import Kimi, KimiArgs
from aprefetch.plan import plan_model
from aprefetch.storage import GgufExperts, open_source


@dataclass
class Opened:
    """A model file whose metadata and tensors can be tampered with before it is loaded."""

    source: Any
    metadata: dict[str, Any]
    tensors: dict[str, Any]
    experts: GgufExperts

    def read_tensor(self, name: str) -> np.ndarray:
        if name in self.source.tensors:
            return self.source.read_tensor(name)
        return np.zeros(self.tensors[name].n_bytes, np.uint8)

    def load(self) -> Kimi:
        return registry.lookup(self.metadata).load(
            self, self.experts.layers, self.experts.tensor_names, cpu_ops("reference"),
            torch.device("cpu"),
        )  # fmt: skip

    def args(self) -> KimiArgs:
        return registry.lookup(self.metadata).check(self.metadata, self.tensors)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    return {
        "k3": write_kimi(folder / "k3.gguf", n_layers=4, n_experts=4, n_used=2)[0],
        "linear": write_kimi(folder / "linear.gguf", TINY_LINEAR, n_layers=4, n_experts=4)[0],
    }


@pytest.fixture()
def opened(paths):
    sources = []

    def open_(name: str) -> Opened:
        source = open_source(paths[name])
        sources.append(source)
        experts = GgufExperts(source, layers=range(4))
        return Opened(source, dict(source.metadata.items()), dict(source.tensors), experts)

    yield open_
    for source in sources:
        source.close()


@pytest.mark.parametrize("name", ["k3", "linear"])
def test_all_dense_tensors_are_counted_once(opened, name):
    model = opened(name)
    info = model.load().info
    dense = sum(t.n_bytes for n, t in model.tensors.items() if n not in model.experts.tensor_names)
    assert info.dense_bytes == dense == sum(info.dense_bytes_by_part.values())
    assert info.architecture == {"k3": "kimi-k3", "linear": "kimi-linear"}[name]
    assert (info.n_layers, info.routed_layers) == (4, (1, 2, 3))
    assert (info.n_experts, info.num_experts_per_tok) == (4, model.args().num_experts_per_tok)
    assert info.n_vocab == 512


NEEDED = {
    "k3": ["token_embd.weight", "output.weight", "output_norm.weight", "output_res_score.weight",
           "blk.0.attn_norm.weight", "blk.0.attn_res_score.weight", "blk.1.ffn_res_score.weight",
           "blk.0.attn_k.weight", "blk.0.ssm_conv1d_v.weight", "blk.0.ssm_a", "blk.0.ssm_dt.bias",
           "blk.0.ssm_beta.weight", "blk.0.ssm_f_b.weight", "blk.0.ssm_g.weight",
           "blk.0.ssm_norm.weight", "blk.0.attn_output.weight", "blk.0.ffn_down.weight",
           "blk.1.ffn_gate_inp.weight", "blk.1.exp_probs_b.bias", "blk.1.ffn_routed_down.weight",
           "blk.1.ffn_routed_up.weight", "blk.1.ffn_up_shexp.weight", "blk.3.attn_q_b.weight",
           "blk.3.attn_kv_a_mqa.weight", "blk.3.attn_kv_a_norm.weight", "blk.3.attn_k_b.weight",
           "blk.3.attn_v_b.weight"],
    "linear": ["blk.1.ssm_g_a.weight", "blk.1.ssm_g_b.weight", "blk.3.attn_q.weight"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tensor"), [(name, tensor) for name, tensors in NEEDED.items() for tensor in tensors]
)
def test_a_missing_tensor_is_named(opened, name, tensor):
    model = opened(name)
    del model.tensors[tensor]
    with pytest.raises(SourceError, match="is missing") as caught:
        model.load()
    assert caught.value.key == tensor


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("k3", "blk.0.extra.weight"),
        ("k3", "blk.1.ffn_latent_norm.weight"),  # a name that early forks used
        ("k3", "blk.4.attn_norm.weight"),
        ("k3", "blk.0.ssm_g_a.weight"),  # the sibling's
        ("linear", "blk.3.attn_q_a.weight"),
        ("linear", "blk.1.ffn_routed_norm.weight"),
    ],
)
def test_an_unknown_tensor_is_named(opened, name, tensor):
    model = opened(name)
    model.tensors[tensor] = SimpleNamespace(ggml_type=0, shape=(4,), n_bytes=16)
    with pytest.raises(SourceError, match="no place in this architecture") as caught:
        model.load()
    assert caught.value.key == tensor


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("output.weight", (512, 96)),
        ("blk.0.ssm_a", (3,)),
        ("blk.0.ssm_conv1d_q.weight", (1, 128, 1, 3)),
        ("blk.3.attn_k_b.weight", (4, 32, 64)),
    ],
)
def test_a_tensor_of_another_shape_is_named(opened, tensor, shape):
    model = opened("k3")
    facts = model.tensors[tensor]
    model.tensors[tensor] = SimpleNamespace(ggml_type=0, shape=shape, n_bytes=facts.n_bytes)
    with pytest.raises(SourceError, match="has shape") as caught:
        model.load()
    assert caught.value.key == tensor


def test_a_tensor_of_an_unsupported_type_is_named(opened):
    model = opened("k3")
    facts = model.tensors["blk.0.attn_q.weight"]
    model.tensors["blk.0.attn_q.weight"] = SimpleNamespace(
        ggml_type=16, shape=facts.shape, n_bytes=facts.n_bytes
    )
    with pytest.raises(UnsupportedModelError, match=r"attn_q\.weight has type IQ2_XXS"):
        model.load()


def test_decay_rates_of_another_convention_are_refused(opened, monkeypatch):
    model = opened("k3")
    inner = model.source.read_tensor
    monkeypatch.setattr(
        model.source,
        "read_tensor",
        lambda name: np.zeros(16, np.uint8) if name == "blk.0.ssm_a" else inner(name),
    )
    with pytest.raises(SourceError, match=r"ssm_a should be negative"):
        model.load()


def test_routed_layers_must_be_those_of_the_metadata(opened):
    model = opened("k3")
    model.metadata["kimi-k3.leading_dense_block_count"] = 2
    with pytest.raises(SourceError, match="have routed experts, but the metadata ask for"):
        model.load()


def test_experts_of_another_size_are_refused(opened):
    model = opened("k3")
    model.metadata["kimi-k3.expert_latent_length"] = 0
    with pytest.raises(SourceError, match="experts of layer 1 are 4 x"):
        model.load()


def test_all_problems_at_once(opened):
    model = opened("k3")
    del model.metadata["kimi-k3.attention.kv_lora_rank"], model.metadata["kimi-k3.kda.head_dim"]
    model.metadata["kimi-k3.expert_gating_func"] = 1
    with pytest.raises(SourceError) as caught:
        model.args()
    for part in ("kv_lora_rank is missing", "head_dim is missing", "gating_func must be 2"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count_kv", [0, 1]),
        ("attention.head_count", 0),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.key_length_mla", None),
        ("activation.situ_beta", None),
        ("activation.situ_beta", 0.0),
        ("attn_res.block_size", None),
        ("block_count", 0),
        ("block_count", "four"),
        ("expert_feed_forward_length", [1, 256, 128, 256]),
        ("expert_group_count", 3),
        ("expert_used_count", 5),
        ("expert_used_count", [0, 2, 2, 1]),
        ("expert_weights_norm", 1),
        ("feed_forward_length", None),
        ("kda.gate_lower_bound", 0.0),
        ("kda.gate_lower_bound", "low"),
        ("leading_dense_block_count", 5),
        ("rope.dimension_count", 48),
        ("ssm.conv_kernel", 1),
    ],
)
def test_unusable_values_are_named(opened, key, value):
    model = opened("k3")
    model.metadata["kimi-k3." + key] = value
    if value is None:
        del model.metadata["kimi-k3." + key]
    with pytest.raises(SourceError, match=key.replace(".", r"\.")):
        model.args()


def test_optional_keys(opened):
    model = opened("k3")
    for key in ("expert_weights_norm", "expert_weights_scale", "kda.gate_lower_bound"):
        del model.metadata["kimi-k3." + key]
    args = model.args()
    assert (args.normalise_weights, args.routed_scale, args.gate_lower_bound) == (False, 1.0, None)
    model.metadata["kimi-k3.expert_used_count"] = [0, 2, 2, 2]  # what dense layers say is ignored
    model.metadata["kimi-k3.expert_group_count"] = 0
    model.metadata["kimi-k3.kda.gate_lower_bound"] = float("-inf")
    args = model.args()
    assert (args.num_experts_per_tok, args.n_groups, args.gate_lower_bound) == (2, 1, None)


def test_the_sibling_always_normalises(opened):
    model = opened("linear")
    assert "kimi-linear.expert_weights_norm" not in model.metadata
    args = model.args()
    assert args.normalise_weights
    assert args.activation is None
    assert (args.residual_block, args.latent_width, args.gate_lower_bound) == (0, 0, None)


def test_a_file_of_the_real_size_plans_and_inspects(tmp_path):
    """93 layers, 92 x 896 experts in 38 shards: only headers are read."""
    shards = write_kimi(tmp_path / "k3.gguf", KIMI_K3, shards=38, is_sparse=True)
    plan = plan_model(shards[17], ram_budget=0, vram_budget="1GiB")
    assert (plan.n_routed_layers, plan.n_experts, plan.num_experts_per_tok) == (92, 896, 16)
    assert plan.routed_bytes == 985_575_456_768
    assert plan.bytes_per_token == 17_599_561_728
    assert plan.n_layers == 93
    found = inspect(shards[30])
    assert found.is_supported
    assert sorted(found.expert_layers) == list(range(1, 93))
    with open_source(shards[0]) as source:
        args = KimiArgs.from_metadata(source.metadata, source.tensors)
    assert sum(args.is_mla) == 24
    assert args.is_mla[91]
    assert args.is_mla[92]
    assert (args.n_heads * args.kda_dim, args.expert_io) == (12288, 3584)


def test_the_number_of_used_experts_may_be_told_for_each_layer(tmp_path):
    plans = [
        plan_model(write_kimi(tmp_path / f"{n}.gguf", KimiConfig(used_by_layer=n))[0])
        for n in (False, True)
    ]
    assert plans[0].num_experts_per_tok == plans[1].num_experts_per_tok == 4
    assert plans[0].bytes_per_token == plans[1].bytes_per_token > 0


def test_a_config_of_another_model_beside_the_file_is_refused(tmp_path):
    """A multimodal config: its text section counts, its vision section does not."""
    path = write_kimi(tmp_path / "m.gguf", shards=3)[1]
    text = {"num_hidden_layers": 7, "hidden_size": 320, "num_experts": 16}
    config = {"text_config": text, "vision_config": {"num_hidden_layers": 27, "hidden_size": 99}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert plan_model(path).n_layers == 7
    file.write_text(json.dumps({**config, "text_config": {**text, "hidden_size": 7168}}))
    with pytest.raises(SourceError, match="says 7168 where the model file beside it says 320") as e:
        plan_model(path)
    assert e.value.path == file


def test_the_tiny_default_has_every_part():
    config = KimiConfig()
    assert {layer % config.residual_block == 0 for layer in config.mla} == {True, False}
    assert (config.n_layers - 1) % config.residual_block == 0
