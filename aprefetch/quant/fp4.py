"""MXFP4 and NVFP4: four-bit floats (E2M1) under a small scale.

The code table holds twice the E2M1 values, so that it is integer, and the scales are halved. In
MXFP4 the scale is a bare exponent byte e and means 2 ** (e - 128): e = 0 and 1 are float32
subnormals, and 255 is an ordinary exponent, not a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aprefetch.quant.base import BlockFormat, split_last
from aprefetch.quant.small_blocks import nibble_halves

__all__ = ["CODE_VALUES", "FORMATS", "half_scale"]

CODE_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Code to twice its E2M1 value; code 8 is a plain zero."""


def half_scale(exponents: Tensor) -> Tensor:
    """2 ** (e - 128) for uint8 `exponents`, exact for all 256 of them."""
    e = exponents.to(torch.int32)
    # Built from bits: no power function is trusted with subnormals.
    bits = torch.where(e >= 2, (e - 1) << 23, (1 << 21) << e.clamp(max=1))
    return bits.view(torch.float32)


def _values(codes: Tensor) -> Tensor:
    table = torch.tensor(CODE_VALUES, dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int32)]


def _mxfp4(blocks: Tensor) -> Tensor:
    return half_scale(blocks[..., 0:1]) * _values(nibble_halves(blocks[..., 1:]))


def _nvfp4(blocks: Tensor) -> Tensor:
    raw = blocks[..., 0:4].to(torch.int32)
    exponent, mantissa = (raw >> 3) & 15, (raw & 7).to(torch.float32)
    normal = (1 + mantissa / 8) * torch.exp2((exponent - 7).to(torch.float32))
    scale = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    scale = torch.where(raw == 0x7F, torch.zeros_like(scale), scale)
    codes = nibble_halves(split_last(blocks[..., 4:], 4, 8))
    return (0.5 * scale[..., None] * _values(codes)).flatten(-2)


FORMATS = (
    BlockFormat(name="MXFP4", ggml_type=39, block_weights=32, block_bytes=17, decode=_mxfp4),
    BlockFormat(name="NVFP4", ggml_type=40, block_weights=64, block_bytes=36, decode=_nvfp4),
)
