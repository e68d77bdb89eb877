"""F32, F16 and BF16: a block is one number."""

from __future__ import annotations

import torch
from torch import Tensor

from aprefetch.quant.base import BlockFormat, reinterpret

__all__ = ["FORMATS"]


def _f32(blocks: Tensor) -> Tensor:
    return reinterpret(blocks, torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return reinterpret(blocks, torch.float16).to(torch.float32)


def _bf16(blocks: Tensor) -> Tensor:
    # By shifting, not by conversion: a signalling NaN stays what it is.
    bits = reinterpret(blocks, torch.int16).to(torch.int32) << 16
    return bits.view(torch.float32)


FORMATS = (
    BlockFormat(name="F32", ggml_type=0, block_weights=1, block_bytes=4, decode=_f32),
    BlockFormat(name="F16", ggml_type=1, block_weights=1, block_bytes=2, decode=_f16),
    BlockFormat(name="BF16", ggml_type=30, block_weights=1, block_bytes=2, decode=_bf16),
)
