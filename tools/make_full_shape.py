"""Write a `deepseek4` GGUF with the layers of V4-Flash in full size and random weights, fast.

    python tools/make_full_shape.py /data/flash-12.gguf --layers 12

A layer has 3.42 GB of experts (256 x 13.37 MB, MXFP4) and 0.16 GB of other weights. Numbers come
from pools of random blocks that are written again and again, each tensor and expert starting
elsewhere in its pool, so writing runs at the speed of the disk. The vocabulary is small unless
asked for; there is no tokenizer.

Scales are such that activations stay of order one and routing is like a trained model's: what
attention and experts add to the streams is small beside them, so that an early router finds about
as many of the next layer's experts as is published for trained models of 256 experts (0.77), and
router biases are small, so that tokens do not all pick alike.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from make_tiny_gguf import TinyConfig, _metadata, _Model, random_blocks
from synthetic_gguf import Tensor, encode_header, tensor_bytes

__all__ = ["flash_config", "write_full_shape"]

_POOL_BYTES = 1 << 24
_ALIGNMENT = 32
_WRITERS = 4
_ROUTER_BIAS_STD = 0.05
_OUTPUT_SCALE = 0.3


def flash_config(
    n_layers: int, n_vocab: int, n_experts: int = 256, n_hash_layers: int = 3
) -> TinyConfig:
    """V4-Flash, less layers: two window-only ones, then ratio 4 and 128 in turn."""
    ratios = (0, 0, *((4, 128) * n_layers))[:n_layers]
    return TinyConfig(
        n_layers=n_layers,
        hidden=4096,
        width=2048,
        n_vocab=n_vocab,
        n_experts=n_experts,
        n_used=6,
        hash_layers=min(n_hash_layers, n_layers),
        ratios=ratios,
        n_heads=64,
        head_dim=512,
        rope_dims=64,
        q_rank=1024,
        out_groups=8,
        out_rank=1024,
        window=128,
        indexer_heads=64,
        indexer_dim=128,
        indexer_top_k=512,
        context=1 << 20,
        tokenizer=False,
    )


def _is_brain(name: str) -> bool:
    """Whether published files keep this matrix in BF16."""
    return "compressor" in name or "indexer.proj" in name or name == "output.weight"


class _Plan(_Model):
    """Collects what a model is made of: small tensors with their numbers, large ones by shape."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(None, config)  # type: ignore[arg-type]  # nothing is added to a writer
        self.tensors: list[tuple[str, tuple[int, ...], GGMLQuantizationType]] = []
        self.values: dict[str, np.ndarray] = {}

    def matrix(self, name: str, *shape: int, kind: str | GGMLQuantizationType = "F32") -> None:
        kind = GGMLQuantizationType[kind] if isinstance(kind, str) else kind
        if _is_brain(name):
            kind = GGMLQuantizationType.BF16
        self.tensors.append((name, shape, kind))

    def vector(self, name: str, *shape: int, mean: float = 0.0, std: float = 0.1) -> None:
        # A trained router's bias evens the load out; a large random one makes tokens pick alike.
        std = _ROUTER_BIAS_STD if name.endswith("exp_probs_b.bias") else std
        super().vector(name, *shape, mean=mean, std=std)

    def raw(self, name: str, values: np.ndarray, kind: GGMLQuantizationType) -> None:
        self.values[name] = values
        self.tensors.append((name, values.shape, kind))


def _mxfp4_pool(rng: np.random.Generator, n_blocks: int, std: float) -> np.ndarray:
    """Random codes under exponents that make the standard deviation about `std`."""
    blocks = rng.integers(0, 256, (n_blocks, 17), dtype=np.uint8)
    middle = 127 + np.log2(std / 2.93)  # 2.93: of uniform codes under scale 1
    blocks[:, 0] = np.round(middle + rng.uniform(-1, 1, n_blocks)).astype(np.uint8)
    return blocks


def _pool(rng: np.random.Generator, kind: GGMLQuantizationType, std: float) -> np.ndarray:
    """About `_POOL_BYTES` of whole blocks, uint8 `[n, block bytes]`."""
    weights, n_bytes = GGML_QUANT_SIZES[kind]
    n_blocks = _POOL_BYTES // n_bytes
    if kind == GGMLQuantizationType.MXFP4:
        return _mxfp4_pool(rng, n_blocks, std)
    if kind == GGMLQuantizationType.Q8_0:
        blocks = rng.integers(0, 256, (n_blocks, n_bytes), dtype=np.uint8)
        scales = (std / 73.9 * rng.uniform(0.5, 1.5, n_blocks)).astype("<f2")
        blocks[:, :2] = scales[:, None].view(np.uint8)
        return blocks
    if kind == GGMLQuantizationType.BF16:
        values = (std * rng.standard_normal(n_blocks)).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
    raw = random_blocks(rng, (n_blocks * weights,), kind, std)
    return np.ascontiguousarray(raw).view(np.uint8).reshape(-1, n_bytes)


def _write_pooled(fd: int, offset: int, n_bytes: int, pool: np.ndarray, first: int) -> None:
    """`n_bytes` at `offset`: the pool from block `first` on, round and round."""
    flat = memoryview(pool.reshape(-1))
    at = first % len(pool) * pool.shape[1]
    stop = offset + n_bytes
    while offset < stop:
        n = os.pwrite(fd, flat[at : at + min(stop - offset, len(flat) - at)], offset)
        offset += n
        at = (at + n) % len(flat)


def write_full_shape(path: Path, config: TinyConfig) -> int:
    """Write the model; returns its bytes."""
    plan = _Plan(config)
    plan.matrix("token_embd.weight", config.n_vocab, config.hidden, kind=config.embedding_type)
    for layer in range(config.n_layers):
        plan.layer(layer)
    plan.ends()
    rows, at = [], 0
    for name, shape, kind in plan.tensors:
        dims = tuple(reversed(shape))
        rows.append(Tensor(name=name, dims=dims, ggml_type=int(kind), offset=at))
        at += -(-tensor_bytes(dims, int(kind)) // _ALIGNMENT) * _ALIGNMENT
    keys = {f"deepseek4.{key}": value for key, value in _metadata(config).items()}
    header = encode_header(
        {
            "general.architecture": "deepseek4",
            "general.name": f"full-shape-{config.n_layers}",
            "general.quantization_version": 2,
            "tokenizer.ggml.model": "none",
            **keys,
        },
        rows,
    )
    start = -(-len(header) // _ALIGNMENT) * _ALIGNMENT
    rng = np.random.default_rng(config.seed + 1)
    pools: dict[tuple[int, float], np.ndarray] = {}
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(fd, start + at)
        os.pwrite(fd, header, 0)
        with ThreadPoolExecutor(_WRITERS) as writers:
            jobs = []
            for row, (name, shape, kind) in zip(rows, plan.tensors, strict=True):
                offset = start + row.offset
                if name in plan.values:
                    os.pwrite(fd, plan.values[name].tobytes(), offset)
                    continue
                # Embeddings of order one: else tokens look alike, and so do their experts.
                std = 1.0 if name == "token_embd.weight" else shape[-1] ** -0.5
                if "attn_output_b" in name or "ffn_down" in name:
                    std *= _OUTPUT_SCALE
                key = (int(kind), std)
                if key not in pools:
                    pools[key] = _pool(rng, kind, std)
                n = tensor_bytes(row.dims, int(kind))
                first = int(rng.integers(len(pools[key])))
                jobs.append(writers.submit(_write_pooled, fd, offset, n, pools[key], first))
            for job in jobs:
                job.result()
    finally:
        os.close(fd)
    return start + at


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="Write a full-shape random V4-Flash GGUF.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=256, help="fewer, for a quick look")
    parser.add_argument("--hash-layers", type=int, default=3, help="layers routed by token id")
    args = parser.parse_args()
    began = time.perf_counter()
    config = flash_config(args.layers, args.vocab, args.experts, args.hash_layers)
    n = write_full_shape(args.path, config)
    seconds = time.perf_counter() - began
    print(f"{args.path}: {n / 1e9:.2f} GB in {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
