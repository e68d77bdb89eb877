"""Tiny `deepseek4` models that differ in every setting the architecture has, by name.

`VARIANTS` maps a name to a `TinyConfig`; each exercises what the others and the oracle's file do
not: clamps, epsilons, orders of attention kinds, routing, rotary scaling, block formats, layouts.
All have layers of ratio 4 and of ratio 128, without which llama.cpp crashes, and many indexer
heads: a score is a sum of ReLUs, so with few heads scores tie at exactly zero, and which of tied
rows are kept is nobody's promise.
"""

from __future__ import annotations

from typing import Any

from make_tiny_gguf import TinyConfig

__all__ = ["VARIANTS"]


def _tiny(**options: Any) -> TinyConfig:
    return TinyConfig(**{"indexer_heads": 24, **options})


_K_QUANTS = (
    {"gate": "Q2_K", "up": "Q3_K", "down": "Q4_K"},
    {"gate": "Q5_K", "up": "Q6_K", "down": "Q2_K"},
    "MXFP4",
    {"gate": "Q8_0", "up": "MXFP4", "down": "F16"},
)

VARIANTS: dict[str, TinyConfig] = {
    "clamp-small": _tiny(seed=1, clamp=0.5, shared_clamp=0.3),
    "clamp-off-eps-tiny": _tiny(seed=2, clamp=0.0, rms_eps=1e-20, hc_eps=1e-4),
    "ratio-128-first": _tiny(
        seed=3, ratios=(128, 4, 0, 128, 4, 0), hash_layers=0, extra_ratios=(0, 4, 128)
    ),
    "windows-mostly": _tiny(seed=4, ratios=(0, 0, 0, 4, 128, 0), hash_layers=6, window=8),
    "indexers-mostly": _tiny(
        seed=5, ratios=(4, 4, 4, 128, 4), n_layers=5, hash_layers=1, window=8, indexer_top_k=5,
    ),
    "ratio-128-mostly": _tiny(
        seed=6, ratios=(128, 128, 4, 128), n_layers=4, hash_layers=0, extra_ratios=(), window=33
    ),
    "window-wide": _tiny(seed=7, window=200, indexer_top_k=6),
    "heads-small": _tiny(
        seed=8, head_dim=64, rope_dims=16, out_groups=8, q_rank=96, indexer_dim=128,
        out_rank=64,
    ),
    "heads-large": _tiny(
        seed=9, head_dim=256, rope_dims=64, out_groups=1, n_heads=4, q_rank=256, out_rank=256,
        matrix_type="Q4_K",
    ),
    "two-shared-top-1": _tiny(
        seed=10, n_shared=2, n_used=1, n_experts=8, weights_scale=1.0, hash_layers=2
    ),
    "top-8-of-64-unnormalised": _tiny(
        seed=11, n_used=8, n_experts=64, weights_norm=False, weights_scale=2.5, n_layers=4,
        ratios=(0, 4, 128, 4),
    ),
    "one-sinkhorn": _tiny(seed=12, sinkhorn=1, hc_eps=1e-3, n_used=6),
    "yarn-1": _tiny(seed=13, rope_factor=1.0, sinkhorn=3, n_used=2),
    "yarn-4-short": _tiny(
        seed=14, rope_factor=4.0, rope_original=256,
        metadata={"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
    ),
    "linear-4": _tiny(seed=15, rope_scaling="linear", rope_factor=4.0),
    "unscaled-4": _tiny(seed=16, rope_scaling="none", rope_factor=4.0),
    "defaults-missing": _tiny(
        seed=17,
        metadata={
            "rope.freq_base": None, "rope.scaling.type": None, "rope.scaling.factor": None,
            "rope.scaling.original_context_length": None, "rope.scaling.yarn_beta_fast": None,
            "rope.scaling.yarn_beta_slow": None, "swiglu_clamp_shexp": None,
            "swiglu_clamp_exp": 0.7,
        },
    ),
    "yarn-partial": _tiny(
        seed=18, rope_factor=8.0,
        metadata={
            "rope.scaling.yarn_ext_factor": 0.5, "rope.freq_base": 500000.0,
            "rope.scaling.attn_factor": 1.7, "rope.scaling.original_context_length": None,
        },
    ),
    "k-quants": _tiny(
        seed=19, hidden=512, width=256, q_rank=256, out_rank=64, expert_types=_K_QUANTS,
        matrix_type=("Q4_K", "Q6_K", "Q8_0", "F16", "Q5_K"), embedding_type="Q4_K", n_experts=8,
        n_layers=4, ratios=(0, 4, 128, 4), hash_layers=1,
    ),
    "f16": _tiny(
        seed=20, matrix_type="F16", expert_types="F16", embedding_type="F16", router_type="F32"
    ),
    "f32-q8": _tiny(
        seed=21, matrix_type="F32", expert_types="Q8_0", embedding_type="F32", router_type="F16"
    ),
    "bf16-image-bias": _tiny(
        seed=22, matrix_type="BF16", expert_types=("MXFP4", "Q8_0"), image_bias=True
    ),
    "nextn-sharded": _tiny(seed=23, nextn=1, shards=3, alignment=64, n_layers=5),
    "odd-sizes": _tiny(
        seed=24, hidden=320, n_heads=6, out_groups=3, n_experts=12, n_used=2, n_vocab=401,
        width=96, window=17,  indexer_top_k=3,
    ),
    "same-head-dims": _tiny(
        seed=25, head_dim=64, indexer_dim=64, rope_dims=64, hash_layers=0
    ),
}  # fmt: skip
"""Configurations by name."""
