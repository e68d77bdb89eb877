"""Hyper-parameters of Kimi-K3 and Kimi-Linear, from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aprefetch.errors import SourceError
from aprefetch.kernels.ops import Situ
from aprefetch.models.loading import HyperParameters

__all__ = ["KIMI_K3", "KIMI_LINEAR", "KimiArgs", "n_main_layers"]

KIMI_K3 = "kimi-k3"
KIMI_LINEAR = "kimi-linear"

_SIGMOID = 2  # the GGUF id of the router's scoring function


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiArgs:
    """Hyper-parameters, all read from the file.

    `is_mla` tells for each layer whether it attends to a latent cache (else: delta attention).
    `gate_lower_bound` None means the unbounded decay gate, `latent_width` 0 experts of full width,
    `residual_block` 0 plain residuals, `activation` None SwiGLU.
    """

    architecture: str
    n_layers: int
    context_length: int
    hidden_size: int
    vocab_size: int
    dense_width: int
    n_heads: int
    is_mla: tuple[bool, ...]
    rms_eps: float
    nope_dim: int
    pe_dim: int
    value_dim: int
    q_lora_rank: int
    kv_lora_rank: int
    conv_taps: int
    kda_dim: int
    gate_lower_bound: float | None
    n_experts: int
    num_experts_per_tok: int
    expert_width: int
    n_shared_experts: int
    n_dense_layers: int
    routed_scale: float
    normalise_weights: bool
    n_groups: int
    n_used_groups: int
    latent_width: int
    residual_block: int
    activation: Situ | None

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        return tuple(range(self.n_dense_layers, self.n_layers))

    @property
    def expert_io(self) -> int:
        """What goes into an expert and comes out of it: the latent width or the model's."""
        return self.latent_width or self.hidden_size

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> KimiArgs:
        """Raises SourceError that lists every key that is missing or unusable."""
        architecture = str(metadata["general.architecture"])
        is_k3 = architecture == KIMI_K3
        h = HyperParameters(metadata, architecture)
        n_layers = h.integer("block_count", high=10_000)
        n_dense = h.integer("leading_dense_block_count", 0, low=0, high=n_layers)
        key = h.integer("attention.key_length_mla", high=2**16)
        pe = h.integer("rope.dimension_count", high=2**16)
        experts = h.integer("expert_count", high=2**20)
        args = cls(
            architecture=architecture,
            n_layers=n_layers,
            context_length=h.integer("context_length"),
            hidden_size=h.integer("embedding_length", high=2**20),
            vocab_size=_vocab_size(tensors),
            dense_width=h.integer("feed_forward_length", None if n_dense else 0, low=0),
            n_heads=h.integer("attention.head_count", high=2**16),
            is_mla=tuple(n > 0 for n in h.per_layer("attention.head_count_kv", n_layers)),
            rms_eps=h.number("attention.layer_norm_rms_epsilon", high=1.0),
            nope_dim=key - pe,
            pe_dim=pe,
            value_dim=h.integer("attention.value_length_mla", high=2**16),
            q_lora_rank=h.integer("attention.q_lora_rank", 0, low=0, high=2**20),
            kv_lora_rank=h.integer("attention.kv_lora_rank", high=2**20),
            conv_taps=h.integer("ssm.conv_kernel", low=2, high=1024),
            kda_dim=h.integer("kda.head_dim", high=2**16),
            gate_lower_bound=_lower_bound(h, metadata, architecture),
            n_experts=experts,
            num_experts_per_tok=_same(h, "expert_used_count", n_layers, n_dense, experts),
            expert_width=_same(h, "expert_feed_forward_length", n_layers, n_dense, 2**20),
            n_shared_experts=h.integer("expert_shared_count", low=0, high=2**10),
            n_dense_layers=n_dense,
            routed_scale=h.number("expert_weights_scale", 0.0) or 1.0,
            normalise_weights=_normalises(h, metadata) if is_k3 else True,
            n_groups=max(1, h.integer("expert_group_count", 1, low=0, high=experts)),
            n_used_groups=h.integer("expert_group_used_count", 1, high=2**20),
            latent_width=h.integer("expert_latent_length", 0, low=0, high=2**20) if is_k3 else 0,
            residual_block=h.integer("attn_res.block_size", low=0, high=2**20) if is_k3 else 0,
            activation=_situ(h) if is_k3 else None,
        )
        args._check(h)
        h.check()
        return args

    def _check(self, h: HyperParameters) -> None:
        if self.nope_dim < 1:
            h.problem("rope.dimension_count", "must be less than attention.key_length_mla")
        if h.integer("expert_gating_func") != _SIGMOID:
            h.problem("expert_gating_func", f"must be {_SIGMOID} (sigmoid)")
        if self.n_experts % self.n_groups:
            h.problem("expert_group_count", "must divide expert_count")
        elif self.n_groups > 1 and not (
            self.n_used_groups <= self.n_groups
            and self.num_experts_per_tok <= self.n_used_groups * self.n_experts // self.n_groups
        ):
            h.problem("expert_group_used_count", "must leave expert_used_count experts to choose")


def n_main_layers(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> int:
    """Blocks of the model. Raises SourceError if the key is missing or unusable."""
    h = HyperParameters(metadata, str(metadata["general.architecture"]))
    n_layers = h.integer("block_count", high=10_000)
    h.check()
    return n_layers


def _vocab_size(tensors: Mapping[str, Any]) -> int:
    """From the embedding: `vocab_size` is not always written, and tokens are slow to decode."""
    info = tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise SourceError(
            "tensor token_embd.weight is missing or no matrix; the file is incomplete",
            key="token_embd.weight",
        )
    return int(info.shape[0])


def _same(h: HyperParameters, key: str, n_layers: int, n_dense: int, high: int) -> int:
    """A positive integer that all routed layers share; what dense layers say has no meaning."""
    values = h.per_layer(key, n_layers)[n_dense:]
    if not values:
        return 1
    value = values[0]
    if len(set(values)) > 1:
        h.problem(key, "differs between layers")
    elif value != int(value) or not 1 <= value <= high:
        h.problem(key, f"is {value:g}; 1 to {high} can be used")
    return int(value)


def _lower_bound(
    h: HyperParameters, metadata: Mapping[str, Any], architecture: str
) -> float | None:
    """None if the key is absent or minus infinity, which both mean the unbounded gate."""
    value = metadata.get(f"{architecture}.kda.gate_lower_bound")
    if value is None or value == -math.inf:
        return None
    bound = h.number("kda.gate_lower_bound", low=-1e30)
    if bound >= 0:
        h.problem("kda.gate_lower_bound", f"is {bound:g}; it must be negative")
    return bound


def _normalises(h: HyperParameters, metadata: Mapping[str, Any]) -> bool:
    if f"{KIMI_K3}.expert_weights_norm" not in metadata:
        return False
    return h.boolean("expert_weights_norm")


def _situ(h: HyperParameters) -> Situ:
    return Situ(
        h.number("activation.situ_beta", low=1e-6),
        h.number("activation.situ_linear_beta", low=-1e30),
    )
