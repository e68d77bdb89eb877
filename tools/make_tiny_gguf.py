"""Write a tiny random `deepseek4` GGUF that has every structural element of the real ones.

    python tools/make_tiny_gguf.py tiny.gguf --layers 6 --experts 16
    python tools/make_tiny_gguf.py tiny.gguf --expert-types gate=Q2_K,up=Q2_K,down=Q3_K --width 256

The weights are random and seeded, the tokenizer is a small byte-level BPE. Matrices are scaled so
that activations stay of order one. Options can make shards, types that differ by role and layer,
and a next-token block behind the main layers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

__all__ = ["TinyConfig", "random_blocks", "write_tiny_deepseek4"]

ROLES = ("gate", "up", "down")
STREAMS = 4


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Sizes and types. `ratios` is cut or repeated to `n_layers` by `for_layers`.

    `expert_types` is one type name, a mapping by role, or a sequence of these that layers take in
    turn. `matrix_type` is one type name, or several that the dense matrices take in turn; where a
    row is no multiple of the type's block, Q8_0 or F16 stands in. `nextn` appends that many
    next-token blocks behind the main layers, `extra_ratios` are spare entries behind the others in
    `compress_ratios`. `metadata` overrides keys below `deepseek4.`; None leaves a key out.
    """

    n_layers: int = 6
    hidden: int = 256
    width: int = 64
    n_vocab: int = 512
    n_experts: int = 16
    n_used: int = 4
    n_shared: int = 1
    hash_layers: int = 3
    ratios: tuple[int, ...] = (0, 0, 4, 128, 4, 128)
    n_heads: int = 8
    head_dim: int = 128
    rope_dims: int = 32
    q_rank: int = 64
    out_groups: int = 4
    out_rank: int = 32
    window: int = 16
    indexer_heads: int = 4
    indexer_dim: int = 64
    indexer_top_k: int = 8
    clamp: float = 10.0
    shared_clamp: float | None = None
    rms_eps: float = 1e-6
    hc_eps: float = 1e-6
    sinkhorn: int = 20
    weights_norm: bool = True
    weights_scale: float = 1.5
    rope_scaling: str = "yarn"
    rope_factor: float = 16.0
    rope_original: int = 65536
    context: int = 4096
    expert_types: str | Mapping[str, str] | Sequence[str | Mapping[str, str]] = "MXFP4"
    matrix_type: str | Sequence[str] = "Q8_0"
    embedding_type: str = "BF16"
    router_type: str = "BF16"
    image_bias: bool = False
    nextn: int = 0
    extra_ratios: tuple[int, ...] = (0,)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: bool = True
    seed: int = 0
    shards: int = 1
    alignment: int = 32

    def layer_ratio(self, layer: int) -> int:
        """The attention ratio of a main layer; 0 for next-token blocks."""
        return self.ratios[layer % len(self.ratios)] if layer < self.n_layers else 0

    def expert_type(self, layer: int, role: str) -> GGMLQuantizationType:
        """The block format of one role of one layer."""
        types = self.expert_types
        if not isinstance(types, str | Mapping):
            types = types[layer % len(types)]
        name = types if isinstance(types, str) else types.get(role, "MXFP4")
        return GGMLQuantizationType[name]


_SCALE_FIELDS: dict[GGMLQuantizationType, tuple[tuple[int, float], ...]] = {
    # Byte offsets of the half-precision scales of a block, and what makes the weights' standard
    # deviation about one and their mean about zero when all other bytes are random.
    GGMLQuantizationType.Q2_K: ((80, 1 / 14), (82, 1.5 / 14)),
    GGMLQuantizationType.Q3_K: ((108, 1 / 42),),
    GGMLQuantizationType.Q4_K: ((0, 1 / 250), (2, 7.5 / 250)),
    GGMLQuantizationType.Q5_K: ((0, 1 / 500), (2, 15.5 / 500)),
    GGMLQuantizationType.Q6_K: ((208, 1 / 1370),),
}


def random_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], kind: GGMLQuantizationType, std: float
) -> np.ndarray:
    """Random weights of torch shape `shape`, encoded: uint8 `[..., row bytes]`, or floats.

    K-quants are random blocks with sane scales; other types are a quantised normal distribution.
    """
    if kind in _SCALE_FIELDS:
        weights, n_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % weights:
            raise ValueError(f"{kind.name} needs rows of a multiple of {weights}, not {shape[-1]}")
        n_blocks = math.prod(shape) // weights
        blocks = rng.integers(0, 256, (n_blocks, n_bytes), dtype=np.uint8)
        for at, scale in _SCALE_FIELDS[kind]:
            values = (std * scale * rng.uniform(0.5, 1.5, n_blocks)).astype("<f2")
            blocks[:, at : at + 2] = values[:, None].view(np.uint8)
        return blocks.reshape(*shape[:-1], -1)
    values = (std * rng.standard_normal(shape)).astype(np.float32)
    if kind == GGMLQuantizationType.F32:
        return values
    if kind == GGMLQuantizationType.F16:
        return values.astype(np.float16)
    return gguf.quants.quantize(values, kind)


class _Writer(gguf.GGUFWriter):
    """Repeats the alignment in every shard, as each is padded by it."""

    def add_shard_kv_data(self) -> None:
        super().add_shard_kv_data()
        for keys in self.kv_data[1:]:
            if "general.alignment" in self.kv_data[0]:
                keys["general.alignment"] = self.kv_data[0]["general.alignment"]


class _Model:
    """Adds tensors to a writer; owns the random generator."""

    def __init__(self, writer: gguf.GGUFWriter, config: TinyConfig) -> None:
        self.writer = writer
        self.config = config
        self.rng = np.random.default_rng(config.seed)
        self.n_tensors = 0
        types = config.matrix_type
        self.types = cycle([types] if isinstance(types, str) else types)

    def dense(self, name: str, *shape: int) -> None:
        """A matrix of the next of the dense matrices' types that fits its rows."""
        for kind in (next(self.types), "Q8_0", "F16"):
            if shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 0:
                break
        self.matrix(name, *shape, kind=kind)

    def matrix(self, name: str, *shape: int, kind: str | GGMLQuantizationType = "F32") -> None:
        """A random matrix that keeps the size of what goes through it."""
        kind = GGMLQuantizationType[kind] if isinstance(kind, str) else kind
        self.raw(name, random_blocks(self.rng, shape, kind, shape[-1] ** -0.5), kind)

    def vector(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> None:
        values = (mean + std * self.rng.standard_normal(shape)).astype(np.float32)
        self.raw(name, values, GGMLQuantizationType.F32)

    def raw(self, name: str, values: np.ndarray, kind: GGMLQuantizationType) -> None:
        self.writer.add_tensor(name, values, raw_dtype=kind)
        self.n_tensors += 1

    def layer(self, layer: int) -> None:
        """One block, main or next-token."""
        c, p = self.config, f"blk.{layer}."
        self.vector(p + "attn_norm.weight", c.hidden, mean=1)
        self.vector(p + "attn_sinks.weight", c.n_heads, std=1)
        self.dense(p + "attn_q_a.weight", c.q_rank, c.hidden)
        self.vector(p + "attn_q_a_norm.weight", c.q_rank, mean=1)
        self.dense(p + "attn_q_b.weight", c.n_heads * c.head_dim, c.q_rank)
        self.dense(p + "attn_kv.weight", c.head_dim, c.hidden)
        self.vector(p + "attn_kv_a_norm.weight", c.head_dim, mean=1)
        out, group = c.out_rank * c.out_groups, c.n_heads * c.head_dim // c.out_groups
        self.dense(p + "attn_output_a.weight", out, group)
        self.dense(p + "attn_output_b.weight", c.hidden, out)
        for part in ("attn", "ffn"):
            mix = STREAMS * (STREAMS + 2)
            self.matrix(p + f"hc_{part}_fn.weight", mix, STREAMS * c.hidden)
            self.vector(p + f"hc_{part}_base.weight", mix, std=1)
            self.vector(p + f"hc_{part}_scale.weight", 3, mean=1)
        self.compressors(p, c.layer_ratio(layer))
        self.experts(layer)

    def compressors(self, p: str, ratio: int) -> None:
        """What a layer with compressed attention has beside the window."""
        c = self.config
        if not ratio:
            return
        wide = (2 if ratio == 4 else 1) * c.head_dim
        self.dense(p + "attn_compressor_kv.weight", wide, c.hidden)
        self.dense(p + "attn_compressor_gate.weight", wide, c.hidden)
        self.vector(p + "attn_compressor_ape.weight", ratio, wide, std=0.5)
        self.vector(p + "attn_compressor_norm.weight", c.head_dim, mean=1)
        if ratio != 4:
            return
        n = c.indexer_heads
        self.dense(p + "indexer.proj.weight", n, c.hidden)
        self.dense(p + "indexer.attn_q_b.weight", n * c.indexer_dim, c.q_rank)
        for part in ("kv", "gate"):
            name = p + f"indexer_compressor_{part}.weight"
            self.dense(name, 2 * c.indexer_dim, c.hidden)
        self.vector(p + "indexer_compressor_ape.weight", 4, 2 * c.indexer_dim, std=0.5)
        self.vector(p + "indexer_compressor_norm.weight", c.indexer_dim, mean=1)

    def experts(self, layer: int) -> None:
        """Router or table, routed experts, shared expert."""
        c, p = self.config, f"blk.{layer}."
        self.vector(p + "ffn_norm.weight", c.hidden, mean=1)
        self.matrix(p + "ffn_gate_inp.weight", c.n_experts, c.hidden, kind=c.router_type)
        if layer < c.hash_layers:
            order = self.rng.random((c.n_vocab, c.n_experts)).argsort(axis=1)
            table = order[:, : c.n_used].astype(np.int32)
            self.raw(p + "ffn_gate_tid2eid.weight", table, GGMLQuantizationType.I32)
        else:
            self.vector(p + "exp_probs_b.bias", c.n_experts, std=0.3)
        if c.image_bias:
            self.vector(p + "exp_probs_b_vl.bias", c.n_experts, std=2)
        for role in ROLES:
            shape = (c.hidden, c.width) if role == "down" else (c.width, c.hidden)
            kind = c.expert_type(layer, role)
            self.matrix(p + f"ffn_{role}_exps.weight", c.n_experts, *shape, kind=kind)
        shared = c.width * c.n_shared
        for role in ROLES:
            shape = (c.hidden, shared) if role == "down" else (shared, c.hidden)
            self.dense(p + f"ffn_{role}_shexp.weight", *shape)

    def nextn(self, layer: int) -> None:
        """A next-token block: a layer, and what joins the embedding to the state."""
        c, p = self.config, f"blk.{layer}.nextn."
        self.layer(layer)
        self.dense(p + "eh_proj.weight", c.hidden, 2 * c.hidden)
        self.vector(p + "enorm.weight", c.hidden, mean=1)
        self.vector(p + "hnorm.weight", c.hidden, mean=1)

    def ends(self) -> None:
        """Head."""
        c = self.config
        self.matrix("output_hc_fn.weight", STREAMS, STREAMS * c.hidden)
        self.vector("output_hc_base.weight", STREAMS, std=1)
        self.vector("output_hc_scale.weight", 1, mean=1)
        self.vector("output_norm.weight", c.hidden, mean=1)
        self.dense("output.weight", c.n_vocab, c.hidden)


def _metadata(c: TinyConfig) -> dict[str, Any]:
    """Keys below `deepseek4.`; floats, integers, booleans, strings and lists."""
    blocks = c.n_layers + c.nextn
    return {
        "block_count": blocks,
        "context_length": c.context,
        "embedding_length": c.hidden,
        "embedding_length_out": STREAMS * c.hidden,
        "attention.head_count": c.n_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_eps,
        "attention.q_lora_rank": c.q_rank,
        "attention.sliding_window": c.window,
        "attention.indexer.head_count": c.indexer_heads,
        "attention.indexer.key_length": c.indexer_dim,
        "attention.indexer.top_k": c.indexer_top_k,
        "attention.output_group_count": c.out_groups,
        "attention.output_lora_rank": c.out_rank,
        # More than there are blocks, as in published files.
        "attention.compress_ratios": [*map(c.layer_ratio, range(blocks)), *c.extra_ratios],
        "attention.compress_rope_freq_base": 160000.0,
        "rope.dimension_count": c.rope_dims,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": c.rope_scaling,
        "rope.scaling.factor": c.rope_factor,
        "rope.scaling.original_context_length": c.rope_original,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": c.sinkhorn,
        "hyper_connection.epsilon": c.hc_eps,
        "hash_layer_count": c.hash_layers,
        "expert_count": c.n_experts,
        "expert_used_count": c.n_used,
        "expert_feed_forward_length": c.width,
        "expert_shared_count": c.n_shared,
        "expert_weights_scale": c.weights_scale,
        "expert_weights_norm": c.weights_norm,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": [c.clamp] * blocks,
        "swiglu_clamp_shexp": [c.clamp if c.shared_clamp is None else c.shared_clamp] * blocks,
        "vocab_size": c.n_vocab,
        **({"nextn_predict_layers": c.nextn} if c.nextn else {}),
        **c.metadata,
    }


def _add_metadata(writer: gguf.GGUFWriter, c: TinyConfig) -> None:
    writer.add_name("tiny-deepseek4")
    writer.add_file_type(38)
    writer.add_quantization_version(2)
    if c.alignment != 32:
        writer.add_custom_alignment(c.alignment)
    for suffix, value in _metadata(c).items():
        key = f"deepseek4.{suffix}"
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if c.tokenizer:
        _add_tokenizer(writer, c.n_vocab)
    else:
        writer.add_tokenizer_model("none")


_SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)


def _add_tokenizer(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Byte-level BPE: special tokens, 256 byte tokens, then pairs of letters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    space = chr(256 + others.index(32))
    pairs = [(a, b) for a in space + letters for b in letters]
    n_pairs = n_vocab - len(_SPECIAL) - len(alphabet)
    if n_pairs < 0 or n_pairs > len(pairs):
        most = len(_SPECIAL) + len(alphabet) + len(pairs)
        raise ValueError(f"a vocabulary of {most - len(pairs)} to {most} tokens can be made")
    tokens = [*_SPECIAL, *alphabet, *(a + b for a, b in pairs[:n_pairs])]
    types = [3] * 5 + [4] * 2 + [1] * (n_vocab - len(_SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("joyai-llm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{a} {b}" for a, b in pairs[:n_pairs]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(True)


def write_tiny_deepseek4(
    path: Path, config: TinyConfig | None = None, **options: Any
) -> list[Path]:
    """Write the model; returns its files in shard order.

    With more than one shard, `path` gives the folder and the names' beginning
    (`<stem>-00001-of-0000N.gguf`).

    Args:
        path: where to.
        config: sizes and types; `options` override single fields of it.

    Raises:
        ValueError: the sizes do not go with the types.
    """
    c = replace(config or TinyConfig(), **options)
    plain = _build(path, replace(c, shards=1), 0)
    if c.shards == 1:
        return [path]
    # The writer splits by tensor count; how many there are is known once the model is built.
    per_shard = -(-plain // c.shards)
    if -(-plain // per_shard) != c.shards:
        raise ValueError(f"{plain} tensors do not split evenly into {c.shards} shards")
    path.unlink()
    _build(path, c, per_shard)
    return sorted(path.parent.glob(f"{_glob_escape(path.stem)}-?????-of-{c.shards:05d}.gguf"))


def _glob_escape(text: str) -> str:
    return "".join(f"[{ch}]" if ch in "*?[" else ch for ch in text)


def _build(path: Path, c: TinyConfig, tensors_per_shard: int) -> int:
    """Write the file or files; returns the number of tensors."""
    writer = _Writer(path, "deepseek4", split_max_tensors=tensors_per_shard)
    _add_metadata(writer, c)
    model = _Model(writer, c)
    model.matrix("token_embd.weight", c.n_vocab, c.hidden, kind=c.embedding_type)
    for layer in range(c.n_layers):
        model.layer(layer)
    for layer in range(c.n_layers, c.n_layers + c.nextn):
        model.nextn(layer)
    model.ends()
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.n_tensors


def _parse_types(text: str) -> str | dict[str, str]:
    if "=" not in text:
        return text
    return dict(part.split("=", 1) for part in text.split(","))


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="Write a tiny random deepseek4 GGUF.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--used", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--hash-layers", type=int, default=3)
    parser.add_argument("--ratios", default="0,0,4,128,4,128", help="layers take them in turn")
    parser.add_argument(
        "--expert-types",
        action="append",
        help="a type, or gate=T,up=T,down=T; give it again for the next layer",
    )
    parser.add_argument("--nextn", type=int, default=0, help="next-token blocks to append")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--alignment", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    files = write_tiny_deepseek4(
        args.path,
        n_layers=args.layers,
        n_experts=args.experts,
        n_used=args.used,
        hidden=args.hidden,
        width=args.width,
        n_vocab=args.vocab,
        hash_layers=args.hash_layers,
        ratios=tuple(int(r) for r in args.ratios.split(",")),
        expert_types=[_parse_types(t) for t in args.expert_types or ["MXFP4"]],
        nextn=args.nextn,
        shards=args.shards,
        alignment=args.alignment,
        seed=args.seed,
    )
    for file in files:
        print(f"{file}  {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
