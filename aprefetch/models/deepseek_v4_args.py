"""Hyper-parameters of DeepSeek-V4, from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aprefetch.errors import SourceError
from aprefetch.models.loading import HyperParameters

__all__ = ["ARCHITECTURE", "N_STREAMS", "DeepseekV4Args", "n_main_layers"]

ARCHITECTURE = "deepseek4"
N_STREAMS = 4

_SQRT_SOFTPLUS = 4  # the GGUF id of the router's scoring function


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Args:
    """Hyper-parameters, all read from the file. Names as in the released config."""

    n_layers: int
    context_length: int
    hidden_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    rotary_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    ratios: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    rms_eps: float
    rope_base: float
    compress_rope_base: float
    rope_scaling: str
    rope_factor: float
    rope_original_context: int
    rope_beta_fast: float
    rope_beta_slow: float
    rope_ext_factor: float
    n_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    expert_width: int
    routed_scale: float
    normalise_weights: bool
    routed_limits: tuple[float, ...]
    shared_limits: tuple[float, ...]
    n_hash_layers: int
    sinkhorn_iterations: int
    hc_eps: float

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tensor_names: Mapping[str, Any]
    ) -> DeepseekV4Args:
        """Raises SourceError that lists every key that is missing or unusable."""
        h = HyperParameters(metadata, ARCHITECTURE)
        n_layers = n_main_layers(metadata, tensor_names)
        n_blocks = h.integer("block_count", high=10_000)
        n_layers = min(n_layers, n_blocks)
        context = h.integer("context_length")
        scaling = h.string("rope.scaling.type", "linear")
        if scaling not in ("none", "linear", "yarn"):
            h.problem("rope.scaling.type", f"is {scaling!r}; none, linear and yarn are known")
        vocab = metadata.get("tokenizer.ggml.tokens")
        routed = h.per_layer("swiglu_clamp_exp", n_blocks)
        widths = set(h.per_layer("expert_feed_forward_length", n_blocks)[:n_layers])
        if len(widths) != 1:
            h.problem("expert_feed_forward_length", "differs between layers")
        topk = set(h.per_layer("expert_used_count", n_blocks)[:n_layers])
        if len(topk) != 1:
            h.problem("expert_used_count", "differs between layers")
        args = cls(
            n_layers=n_layers,
            context_length=context,
            hidden_size=h.integer("embedding_length", high=2**20),
            vocab_size=h.integer("vocab_size", len(vocab) if vocab is not None else None),
            n_heads=h.integer("attention.head_count", high=2**16),
            head_dim=h.integer("attention.key_length", high=2**16),
            rotary_dim=h.integer("rope.dimension_count", low=2, high=2**16),
            q_lora_rank=h.integer("attention.q_lora_rank", high=2**20),
            o_groups=h.integer("attention.output_group_count", high=2**16),
            o_lora_rank=h.integer("attention.output_lora_rank", high=2**20),
            window=h.integer("attention.sliding_window"),
            ratios=tuple(h.integers("attention.compress_ratios", n_layers)),
            index_heads=h.integer("attention.indexer.head_count", high=2**16),
            index_dim=h.integer("attention.indexer.key_length", high=2**16),
            index_topk=h.integer("attention.indexer.top_k"),
            rms_eps=h.number("attention.layer_norm_rms_epsilon", high=1.0),
            rope_base=h.number("rope.freq_base", 10000.0, low=1.001),
            compress_rope_base=h.number("attention.compress_rope_freq_base", low=1.001),
            rope_scaling=scaling,
            rope_factor=h.number("rope.scaling.factor", 1.0, low=1e-3),
            rope_original_context=h.integer("rope.scaling.original_context_length", context),
            rope_beta_fast=h.number("rope.scaling.yarn_beta_fast", 32.0, low=1e-3),
            rope_beta_slow=h.number("rope.scaling.yarn_beta_slow", 1.0, low=1e-3),
            rope_ext_factor=h.number(
                "rope.scaling.yarn_ext_factor", 1.0 if scaling == "yarn" else 0.0
            ),
            n_experts=h.integer("expert_count", high=2**20),
            num_experts_per_tok=int(max(topk)),
            n_shared_experts=h.integer("expert_shared_count", high=2**10),
            expert_width=int(max(widths)),
            routed_scale=h.number("expert_weights_scale") or 1.0,
            normalise_weights=h.boolean("expert_weights_norm"),
            routed_limits=tuple(routed),
            shared_limits=tuple(h.per_layer("swiglu_clamp_shexp", n_blocks, routed)),
            n_hash_layers=h.integer("hash_layer_count", low=0),
            sinkhorn_iterations=h.integer("hyper_connection.sinkhorn_iterations", high=1000),
            hc_eps=h.number("hyper_connection.epsilon", high=1.0),
        )
        args._check(h)
        h.check()
        return args

    def _check(self, h: HyperParameters) -> None:
        if h.integer("attention.head_count_kv", 1) != 1:
            h.problem("attention.head_count_kv", "must be 1")
        if h.integer("attention.value_length", self.head_dim) != self.head_dim:
            h.problem("attention.value_length", "must equal attention.key_length")
        if h.integer("hyper_connection.count") != N_STREAMS:
            h.problem("hyper_connection.count", f"must be {N_STREAMS}")
        if h.integer("expert_gating_func") != _SQRT_SOFTPLUS:
            h.problem("expert_gating_func", f"must be {_SQRT_SOFTPLUS} (sqrt-softplus)")
        if self.rotary_dim % 2 or self.rotary_dim > min(self.head_dim, self.index_dim):
            h.problem("rope.dimension_count", "must be even and fit into a head")
        if any(ratio not in (0, 4, 128) for ratio in self.ratios):
            h.problem("attention.compress_ratios", "may hold 0, 4 and 128 only")
        if (self.n_heads * self.head_dim) % self.o_groups or self.n_heads % self.o_groups:
            h.problem("attention.output_group_count", "must divide the number of heads")
        if not 1 <= self.num_experts_per_tok <= self.n_experts:
            h.problem("expert_used_count", f"must be 1 to expert_count ({self.n_experts})")


def n_main_layers(metadata: Mapping[str, Any], tensor_names: Mapping[str, Any]) -> int:
    """Blocks of the trunk: `block_count` less the next-token blocks at the end.

    As in llama.cpp, `nextn_predict_layers` counts only if the file holds such a block's
    `nextn.eh_proj`. Raises SourceError where the file holds no trunk at all.
    """
    h = HyperParameters(metadata, ARCHITECTURE)
    n_blocks = h.integer("block_count", high=10_000)
    n_next = h.integer("nextn_predict_layers", 0, low=0, high=n_blocks)
    h.check()
    if f"blk.{n_blocks - n_next}.nextn.eh_proj.weight" not in tensor_names:
        n_next = 0
    n_main = n_blocks - n_next
    if n_main < 1 or "blk.0.attn_norm.weight" not in tensor_names:
        raise SourceError(
            "holds only next-token (MTP) blocks and cannot run alone; open the main model's file",
            key="blk.0.attn_norm.weight",
        )
    return n_main
