"""GGUF files without a model in them: hand-made headers, huge tables, experts only.

For tests of the header reader (any header can be written, also a wrong one), of opening speed, and
for benchmarks of the reader and the pipeline, which need experts but no math.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

__all__ = [
    "Tensor",
    "encode_header",
    "encode_value",
    "tensor_bytes",
    "write_experts_only",
    "write_file",
    "write_header_only",
]

_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A row of a tensor table: `dims` in ggml order, `offset` from the start of the data."""

    name: str
    dims: tuple[int, ...]
    ggml_type: int = int(GGMLQuantizationType.F32)
    offset: int = 0


def tensor_bytes(dims: Sequence[int], ggml_type: int) -> int:
    """Bytes of a tensor of these ggml dims."""
    weights, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    return int(np.prod(dims, dtype=np.int64)) // weights * n_bytes


def encode_value(value: Any, kind: GGUFValueType | None = None) -> tuple[int, bytes]:
    """Type id and bytes of a metadata value. `(kind, value)` pairs choose the type themselves."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], GGUFValueType):
        kind, value = value
    if isinstance(value, list):
        elements = [encode_value(v, kind) for v in value]
        element = elements[0][0] if elements else int(kind or GGUFValueType.UINT32)
        head = struct.pack("<IQ", element, len(value))
        return int(GGUFValueType.ARRAY), head + b"".join(raw for _, raw in elements)
    if isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        return int(GGUFValueType.STRING), struct.pack("<Q", len(raw)) + raw
    if kind is None:
        if isinstance(value, bool):
            kind = GGUFValueType.BOOL
        else:
            kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
    return int(kind), struct.pack("<" + _FORMATS[kind], value)


def encode_header(
    keys: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A header's bytes, as they are told: nothing is checked, counts can be made to lie."""
    pairs = list(keys.items()) if isinstance(keys, Mapping) else list(keys)
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_keys is None else n_keys,
    )
    out = [b"GGUF", struct.pack("<IQQ", version, *counts)]
    for key, value in pairs:
        raw = key.encode()
        type_id, body = encode_value(value)
        out.append(struct.pack("<Q", len(raw)) + raw + struct.pack("<I", type_id) + body)
    for tensor in tensors:
        raw, n = tensor.name.encode(), len(tensor.dims)
        out.append(struct.pack("<Q", len(raw)) + raw)
        tail = struct.pack(f"<I{n}QIQ", n, *tensor.dims, tensor.ggml_type, tensor.offset)
        out.append(tail)
    return b"".join(out)


def write_file(
    path: Path,
    keys: Mapping[str, Any],
    tensors: Sequence[tuple[str, tuple[int, ...], int]],
    payload: Iterable[bytes] | None,
    *,
    alignment: int = 32,
) -> Path:
    """Write a sound file: tensors `(name, ggml dims, type)` one after the other, aligned.

    `payload` gives the data section's bytes in pieces of any size; what it leaves out is a hole.
    """
    placed, at = [], 0
    for name, dims, ggml_type in tensors:
        placed.append(Tensor(name=name, dims=dims, ggml_type=ggml_type, offset=at))
        at += -(-tensor_bytes(dims, ggml_type) // alignment) * alignment
    if alignment != 32:
        keys = {**keys, "general.alignment": alignment}
    header = encode_header(keys, placed)
    start = -(-len(header) // alignment) * alignment
    with path.open("wb") as file:
        file.write(header)
        file.seek(start)
        left = at
        for piece in payload or ():
            file.write(piece[:left])
            left -= len(piece)
            if left <= 0:
                break
        file.truncate(start + at)
    return path


def write_header_only(path: Path, *, n_tensors: int = 1328, n_vocab: int = 130_000) -> Path:
    """A sparse file with many small tensors and a large vocabulary; its payload is a hole."""
    keys = {
        "general.architecture": "synthetic",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(n_vocab)],
        "tokenizer.ggml.token_type": (GGUFValueType.INT32, [1] * n_vocab),
        "tokenizer.ggml.merges": [f"t{i} u{i}" for i in range(n_vocab)],
        "general.name": "header only",
    }
    f32 = int(GGMLQuantizationType.F32)
    tensors = [(f"blk.{i // 32}.part{i % 32}.weight", (32, 4), f32) for i in range(n_tensors)]
    return write_file(path, keys, tensors, None)


def write_experts_only(
    path: Path,
    *,
    n_layers: int,
    n_experts: int,
    hidden: int,
    width: int,
    types: Mapping[str, str] | str = "MXFP4",
    first_layer: int = 0,
    alignment: int = 32,
    seed: int | None = 0,
) -> Path:
    """Routed experts and nothing else.

    Args:
        hidden, width: gate and up are `[width, hidden]`, down is `[hidden, width]`.
        types: type name for all roles, or by role.
        seed: of the random payload; None leaves a hole, which reads as zeros without a disk.
    """
    kinds = {r: types if isinstance(types, str) else types[r] for r in ("gate", "up", "down")}
    tensors = []
    for layer in range(first_layer, first_layer + n_layers):
        for role, kind in kinds.items():
            n_in, n_out = (width, hidden) if role == "down" else (hidden, width)
            name = f"blk.{layer}.ffn_{role}_exps.weight"
            tensors.append((name, (n_in, n_out, n_experts), int(GGMLQuantizationType[kind])))
    keys = {
        "general.architecture": "experts-only",
        "experts-only.block_count": first_layer + n_layers,
        "experts-only.expert_count": n_experts,
    }
    payload = None if seed is None else _random_payload(seed)
    write_file(path, keys, tensors, payload, alignment=alignment)
    if seed is not None:
        # A benchmark that reads directly must find the bytes on the drive.
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    return path


def _random_payload(seed: int) -> Iterator[bytes]:
    rng = np.random.default_rng(seed)
    while True:
        yield rng.bytes(_CHUNK_BYTES)
