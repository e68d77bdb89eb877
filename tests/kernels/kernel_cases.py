"""Inputs for tests of kernels: random blocks in every format, experts in an arena."""

from __future__ import annotations

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from make_tiny_gguf import random_blocks

from aprefetch.quant import row_bytes
from aprefetch.quant.base import QuantTensor
from aprefetch.types import LayerLayout, RoleLayout, align_up

FORMATS = ["F32", "F16", "BF16", "Q8_0", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def quantised(rng: np.random.Generator, name: str, n_out: int, n_in: int) -> QuantTensor:
    """Random weights of order one over the root of `n_in`, in blocks of `name`."""
    kind = GGMLQuantizationType[name]
    raw = random_blocks(rng, (n_out, n_in), kind, n_in**-0.5)
    raw = np.ascontiguousarray(raw).view(np.uint8).reshape(n_out, row_bytes(int(kind), n_in))
    return QuantTensor(torch.from_numpy(raw.copy()), int(kind), n_out, n_in)


def expert_case(
    rng: np.random.Generator,
    types: tuple[str, str, str],
    d: int,
    f: int,
    n_slots: int,
    n_out: int | None = None,
) -> tuple[torch.Tensor, list[int], LayerLayout]:
    """An arena of `n_slots` experts with random weights, their offsets, their layout.

    They give as many numbers as they take, unless `n_out` says otherwise.
    """
    roles, parts = [], []
    shapes = ((f, d), (f, d), (n_out or d, f))
    for role, name, (n_out, n_in) in zip(("gate", "up", "down"), types, shapes, strict=True):
        w = quantised(rng, name, n_out * n_slots, n_in)
        n_bytes = w.n_bytes // n_slots
        roles.append(
            RoleLayout(
                role=role, ggml_type=w.ggml_type, n_out=n_out, n_in=n_in, n_bytes=n_bytes
            )
        )  # fmt: skip
        parts.append(w.data.reshape(n_slots, n_bytes))
    layout = LayerLayout(layer=0, n_experts=n_slots, roles=tuple(roles))
    stride = align_up(layout.device_bytes, 256)
    arena = torch.randint(0, 256, (n_slots * stride,), dtype=torch.uint8)
    for slot in range(n_slots):
        for at, part in zip(layout.device_offsets, parts, strict=True):
            start = slot * stride + at
            arena[start : start + part.shape[1]] = part[slot]
    return arena, [slot * stride for slot in range(n_slots)], layout
