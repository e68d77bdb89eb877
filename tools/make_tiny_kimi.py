"""Write a random `kimi-k3` or `kimi-linear` GGUF with every structural element of the real ones.

    python tools/make_tiny_kimi.py tiny.gguf
    python tools/make_tiny_kimi.py tiny.gguf --shards 4 --expert-type MXFP4
    python tools/make_tiny_kimi.py linear.gguf --linear
    python tools/make_tiny_kimi.py k3.gguf --full-size --shards 38

The weights are random and seeded; matrices keep the size of what goes through them. `--full-size`
writes Kimi-K3's real shapes as sparse files: headers and holes, for everything that needs no
payload (opening, planning, inspecting). They look like a terabyte and take a few megabytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from make_tiny_gguf import random_blocks
from synthetic_gguf import write_file

__all__ = ["KIMI_K3", "TINY_LINEAR", "KimiConfig", "write_kimi"]

Init = Literal["matrix", "norm", "bias", "rate", "decay", "score", "conv"]
Shape = tuple[int, ...]
_ALIGNMENT = 32


@dataclass(frozen=True, kw_only=True)
class KimiConfig:
    """Sizes, types and which optional parts there are.

    `mla` lists the layers with latent attention, the others have delta attention. Matrices whose
    rows are no whole number of `matrix_type`'s blocks have `narrow_type`. `has_kv_b` writes the one
    matrix of old files instead of `attn_k_b` and `attn_v_b`, `has_qkv` one matrix for q, k and v.
    `used_by_layer` writes how many experts a token uses as an array, with 0 for dense layers.
    """

    architecture: str = "kimi-k3"
    n_layers: int = 7
    mla: tuple[int, ...] = (3, 5, 6)
    hidden: int = 320
    dense_width: int = 384
    n_dense: int = 1
    n_vocab: int = 512
    n_heads: int = 4
    kda_dim: int = 32
    taps: int = 4
    lower_bound: float | None = -5.0
    q_rank: int = 96
    kv_rank: int = 64
    nope: int = 32
    pe: int = 16
    value: int = 48
    n_experts: int = 16
    n_used: int = 4
    n_shared: int = 2
    width: int = 256
    latent: int = 256
    scale: float = 2.5
    normalise: bool = True
    n_groups: int = 0
    n_used_groups: int = 1
    residual_block: int = 3
    situ: tuple[float, float] = (4.0, 25.0)
    rms_eps: float = 1e-5
    context: int = 4096
    gate_type: str = "Q2_K"
    down_type: str = "Q3_K"
    matrix_type: str = "Q8_0"
    narrow_type: str = "F16"
    router_type: str = "F32"
    has_gate: bool = True
    has_routed_norm: bool = True
    has_kv_b: bool = False
    has_qkv: bool = False
    used_by_layer: bool = False
    seed: int = 0

    @property
    def is_k3(self) -> bool:
        """Whether it is the large sibling's architecture."""
        return self.architecture == "kimi-k3"


TINY_LINEAR = KimiConfig(
    architecture="kimi-linear",
    mla=(3, 6),
    lower_bound=None,
    q_rank=0,
    n_shared=1,
    latent=0,
    hidden=256,
    scale=2.446,
    residual_block=0,
    has_gate=False,
    has_routed_norm=False,
)
"""A small `kimi-linear`."""

KIMI_K3 = KimiConfig(
    n_layers=93,
    mla=(*range(3, 93, 4), 92),
    hidden=7168,
    dense_width=33792,
    n_vocab=163840,
    n_heads=96,
    kda_dim=128,
    q_rank=1536,
    kv_rank=512,
    nope=128,
    pe=64,
    value=128,
    n_experts=896,
    n_used=16,
    width=3072,
    latent=3584,
    scale=1.0,
    residual_block=12,
    context=1048576,
    matrix_type="Q2_K",
    narrow_type="Q4_0",
)
"""The real sizes of Kimi-K3, with the types of a Q2_K file (less a few exceptions)."""


class _Spec(NamedTuple):
    name: str
    shape: Shape
    kind: GGMLQuantizationType
    init: Init

    @property
    def n_bytes(self) -> int:
        weights, n_bytes = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape, dtype=np.int64)) // weights * n_bytes


class _Table:
    """All tensors of a model, in file order."""

    def __init__(self, config: KimiConfig) -> None:
        self.config = config
        self.specs: list[_Spec] = []
        c = config
        self.matrix("token_embd.weight", c.n_vocab, c.hidden)
        for layer in range(c.n_layers):
            self._layer(layer)
        self.vector("output_norm.weight", c.hidden)
        if c.residual_block:
            self.vector("output_res_score.weight", c.hidden, init="score")
        self.matrix("output.weight", c.n_vocab, c.hidden)

    def matrix(self, name: str, *shape: int, kind: str | None = None) -> None:
        c = self.config
        found = GGMLQuantizationType[kind or c.matrix_type]
        if shape[-1] % GGML_QUANT_SIZES[found][0]:
            found = GGMLQuantizationType[c.narrow_type]
        self.specs.append(_Spec(name, shape, found, "matrix"))

    def vector(self, name: str, *shape: int, init: Init = "norm") -> None:
        self.specs.append(_Spec(name, shape, GGMLQuantizationType.F32, init))

    def _layer(self, layer: int) -> None:
        c, p = self.config, f"blk.{layer}."
        for part in ("attn", "ffn"):
            self.vector(f"{p}{part}_norm.weight", c.hidden)
            if c.residual_block:
                self.vector(f"{p}{part}_res_score.weight", c.hidden, init="score")
        if layer in c.mla:
            self._latent_attention(p)
        else:
            self._delta_attention(p)
        if layer < c.n_dense:
            self._mlp(p, "", c.dense_width)
            return
        self.matrix(p + "ffn_gate_inp.weight", c.n_experts, c.hidden, kind=c.router_type)
        self.vector(p + "exp_probs_b.bias", c.n_experts, init="bias")
        io = c.latent or c.hidden
        for role in ("gate", "up"):
            self.matrix(f"{p}ffn_{role}_exps.weight", c.n_experts, c.width, io, kind=c.gate_type)
        self.matrix(p + "ffn_down_exps.weight", c.n_experts, io, c.width, kind=c.down_type)
        if c.latent:
            self.matrix(p + "ffn_routed_down.weight", c.latent, c.hidden)
            self.matrix(p + "ffn_routed_up.weight", c.hidden, c.latent)
        if c.has_routed_norm:
            self.vector(p + "ffn_routed_norm.weight", io)
        if c.n_shared:
            self._mlp(p, "_shexp", c.width * c.n_shared)

    def _mlp(self, p: str, suffix: str, width: int) -> None:
        for role in ("gate", "up"):
            self.matrix(f"{p}ffn_{role}{suffix}.weight", width, self.config.hidden)
        self.matrix(f"{p}ffn_down{suffix}.weight", self.config.hidden, width)

    def _delta_attention(self, p: str) -> None:
        c = self.config
        inner = c.n_heads * c.kda_dim
        if c.has_qkv:
            self.matrix(p + "attn_qkv.weight", 3 * inner, c.hidden)
        for role in "qkv":
            if not c.has_qkv:
                self.matrix(f"{p}attn_{role}.weight", inner, c.hidden)
            # The two siblings' converters disagree on axes of length one.
            shape = (1, inner, 1, c.taps) if c.is_k3 else (inner, 1, c.taps)
            self.vector(f"{p}ssm_conv1d_{role}.weight", *shape, init="conv")
        self.matrix(p + "ssm_f_a.weight", c.kda_dim, c.hidden)
        self.matrix(p + "ssm_f_b.weight", inner, c.kda_dim)
        self.vector(p + "ssm_dt.bias", inner, init="decay")
        self.vector(p + "ssm_a", *((c.n_heads,) if c.is_k3 else (1, 1, c.n_heads, 1)), init="rate")
        self.matrix(p + "ssm_beta.weight", c.n_heads, c.hidden)
        if c.is_k3:
            self.matrix(p + "ssm_g.weight", inner, c.hidden)
        else:
            self.matrix(p + "ssm_g_a.weight", c.kda_dim, c.hidden)
            self.matrix(p + "ssm_g_b.weight", inner, c.kda_dim)
        self.vector(p + "ssm_norm.weight", c.kda_dim)
        self.matrix(p + "attn_output.weight", c.hidden, inner)

    def _latent_attention(self, p: str) -> None:
        c = self.config
        queries = c.n_heads * (c.nope + c.pe)
        if c.q_rank:
            self.matrix(p + "attn_q_a.weight", c.q_rank, c.hidden)
            self.vector(p + "attn_q_a_norm.weight", c.q_rank)
            self.matrix(p + "attn_q_b.weight", queries, c.q_rank)
        else:
            self.matrix(p + "attn_q.weight", queries, c.hidden)
        self.matrix(p + "attn_kv_a_mqa.weight", c.kv_rank + c.pe, c.hidden)
        self.vector(p + "attn_kv_a_norm.weight", c.kv_rank)
        if c.has_kv_b:
            self.matrix(p + "attn_kv_b.weight", c.n_heads * (c.nope + c.value), c.kv_rank)
        else:
            self.matrix(p + "attn_k_b.weight", c.n_heads, c.kv_rank, c.nope)
            self.matrix(p + "attn_v_b.weight", c.n_heads, c.value, c.kv_rank)
        if c.has_gate:
            self.matrix(p + "attn_gate.weight", c.n_heads * c.value, c.hidden)
        self.matrix(p + "attn_output.weight", c.hidden, c.n_heads * c.value)


def _values(rng: np.random.Generator, spec: _Spec) -> bytes:
    shape = spec.shape
    if spec.init == "matrix":
        return random_blocks(rng, shape, spec.kind, shape[-1] ** -0.5).tobytes()
    if spec.init == "rate":
        values = -np.exp(rng.uniform(0, 2.7, shape))
    elif spec.init == "decay":
        values = rng.uniform(-4, 0, shape)
    else:
        mean, std = {
            "norm": (1.0, 0.1),
            "bias": (0.0, 0.1),
            "conv": (0.0, 0.5),
            # Mixing logits of order one, so that mixes are far from uniform.
            "score": (0.0, shape[-1] ** -0.5),
        }[spec.init]
        values = mean + std * rng.standard_normal(shape)
    return values.astype("<f4").tobytes()


def _payload(rng: np.random.Generator, specs: list[_Spec]) -> Iterator[bytes]:
    for spec in specs:
        raw = _values(rng, spec)
        yield raw + bytes(-len(raw) % _ALIGNMENT)


def _metadata(c: KimiConfig) -> dict[str, Any]:
    a = c.architecture
    keys: dict[str, Any] = {
        "block_count": c.n_layers,
        "context_length": c.context,
        "embedding_length": c.hidden,
        "feed_forward_length": c.dense_width,
        "attention.head_count": c.n_heads,
        "attention.head_count_kv": [int(i in c.mla) for i in range(c.n_layers)],
        "attention.layer_norm_rms_epsilon": c.rms_eps,
        "attention.key_length": c.kv_rank + c.pe,
        "attention.value_length": c.kv_rank,
        "attention.key_length_mla": c.nope + c.pe,
        "attention.value_length_mla": c.value,
        "attention.kv_lora_rank": c.kv_rank,
        "rope.dimension_count": c.pe,
        "rope.freq_base": 10000.0,
        "ssm.conv_kernel": c.taps,
        "kda.head_dim": c.kda_dim,
        "expert_count": c.n_experts,
        "expert_used_count": c.n_used,
        "expert_feed_forward_length": c.width,
        "expert_shared_count": c.n_shared,
        "expert_weights_scale": c.scale,
        "expert_gating_func": 2,
        "leading_dense_block_count": c.n_dense,
        "vocab_size": c.n_vocab,
    }
    if c.used_by_layer:
        keys["expert_used_count"] = [0 if i < c.n_dense else c.n_used for i in range(c.n_layers)]
    if c.lower_bound is not None:
        keys["kda.gate_lower_bound"] = c.lower_bound
    if c.n_groups:
        keys |= {"expert_group_count": c.n_groups, "expert_group_used_count": c.n_used_groups}
    if c.is_k3:
        keys |= {
            "expert_weights_norm": c.normalise,
            "attn_res.block_size": c.residual_block,
            "activation.situ_beta": c.situ[0],
            "activation.situ_linear_beta": c.situ[1],
        }
    if c.q_rank:
        keys["attention.q_lora_rank"] = c.q_rank
    if c.latent:
        keys["expert_latent_length"] = c.latent
    return {f"{a}.{key}": value for key, value in keys.items()}


_SPECIAL = (
    "[BOS]",
    "[EOS]",
    "<|end_of_msg|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "[EOT]",
    "[PAD]",
)


def _tokenizer(n_vocab: int) -> dict[str, Any]:
    """Bytes in the published alphabet, pairs and triples of letters, special tokens at the end."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = [(a, b) for a in alphabet[32] + letters for b in letters]
    triples = [(a + b, c) for a, b in pairs for c in letters]
    n_merges = n_vocab - 256 - len(_SPECIAL)
    if n_merges < 0:
        raise ValueError(f"a vocabulary has at least {256 + len(_SPECIAL)} tokens")
    merges = [*pairs, *triples][:n_merges]
    n_unused = n_merges - len(merges)
    first = n_vocab - len(_SPECIAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "kimi-k2",
        "tokenizer.ggml.tokens": [
            *(alphabet[b] for b in range(256)),
            *(a + b for a, b in merges),
            *(f"[PAD{i}]" for i in range(256 + len(merges), first)),
            *_SPECIAL,
        ],
        "tokenizer.ggml.token_type": (
            GGUFValueType.INT32,
            [1] * (256 + len(merges)) + [5] * n_unused + [3] * len(_SPECIAL),
        ),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 2,
        "tokenizer.ggml.padding_token_id": n_vocab - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def write_kimi(
    path: Path,
    config: KimiConfig | None = None,
    *,
    shards: int = 1,
    is_sparse: bool = False,
    **options: Any,
) -> list[Path]:
    """Write the model; returns its files in shard order.

    Args:
        path: where to; with several shards, the folder and the names' beginning
            (`<stem>-00001-of-0000N.gguf`). Metadata are in the first shard only.
        config: sizes and types; `options` override single fields of it.
        is_sparse: no payload, only holes.

    Raises:
        ValueError: the sizes do not go with the types, or there are fewer tensors than shards.
    """
    c = replace(config or KimiConfig(), **options)
    specs = _Table(c).specs
    rng = np.random.default_rng(c.seed)
    keys: dict[str, Any] = {
        "general.architecture": c.architecture,
        "general.name": f"random-{c.architecture}",
        **_metadata(c),
        **_tokenizer(c.n_vocab),
    }
    if len(specs) < shards:
        raise ValueError(f"{len(specs)} tensors do not fill {shards} shards")
    files = []
    for number in range(shards):
        part = specs[len(specs) * number // shards : len(specs) * (number + 1) // shards]
        target, shard_keys = path, keys if number == 0 else {}
        if shards > 1:
            target = path.with_name(f"{path.stem}-{number + 1:05d}-of-{shards:05d}.gguf")
            shard_keys = shard_keys | {
                "split.no": (GGUFValueType.UINT16, number),
                "split.count": (GGUFValueType.UINT16, shards),
                "split.tensors.count": (GGUFValueType.INT32, len(specs)),
            }
        rows = [(s.name, s.shape[::-1], int(s.kind)) for s in part]
        payload = None if is_sparse else _payload(rng, part)
        files.append(write_file(target, shard_keys, rows, payload, alignment=_ALIGNMENT))
    return files


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="Write a random kimi-k3 or kimi-linear GGUF.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--linear", action="store_true", help="kimi-linear instead of kimi-k3")
    parser.add_argument("--full-size", action="store_true", help="sparse files of the real sizes")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--used", type=int)
    parser.add_argument("--expert-type", help="one type for all three roles")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    if args.linear and args.full_size:
        parser.error("--full-size is there for kimi-k3 only")
    config = TINY_LINEAR if args.linear else KIMI_K3 if args.full_size else KimiConfig()
    wanted = {
        "n_layers": args.layers,
        "n_experts": args.experts,
        "n_used": args.used,
        "gate_type": args.expert_type,
        "down_type": args.expert_type,
        "seed": args.seed,
    }
    config = replace(config, **{name: v for name, v in wanted.items() if v is not None})
    for file in write_kimi(args.path, config, shards=args.shards, is_sparse=args.full_size):
        print(f"{file}  {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
