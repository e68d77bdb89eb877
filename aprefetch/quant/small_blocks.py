"""Blocks of 32 weights with one half-precision scale: Q4_0, Q5_0, Q8_0, IQ4_NL.

Four-bit codes lie in two halves: byte j holds weight j in its low and weight j + 16 in its high
nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aprefetch.quant.base import BlockFormat, half_at, reinterpret

__all__ = ["FORMATS", "IQ4_NL_VALUES", "nibble_halves"]

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Code to value of IQ4_NL."""


def nibble_halves(packed: Tensor) -> Tensor:
    """uint8 `[..., n]` -> codes `[..., 2 * n]`: all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q8_0(blocks: Tensor) -> Tensor:
    return half_at(blocks, 0) * reinterpret(blocks[..., 2:], torch.int8).to(torch.float32)


def _q4_0(blocks: Tensor) -> Tensor:
    return half_at(blocks, 0) * (nibble_halves(blocks[..., 2:]).to(torch.float32) - 8)


def _q5_0(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = ((blocks[..., 2:6, None] >> shifts) & 1).flatten(-2)
    codes = nibble_halves(blocks[..., 6:]) + 16 * high
    return half_at(blocks, 0) * (codes.to(torch.float32) - 16)


def _iq4_nl(blocks: Tensor) -> Tensor:
    values = torch.tensor(IQ4_NL_VALUES, dtype=torch.float32, device=blocks.device)
    return half_at(blocks, 0) * values[nibble_halves(blocks[..., 2:]).to(torch.int32)]


FORMATS = (
    BlockFormat(name="Q4_0", ggml_type=2, block_weights=32, block_bytes=18, decode=_q4_0),
    BlockFormat(name="Q5_0", ggml_type=6, block_weights=32, block_bytes=22, decode=_q5_0),
    BlockFormat(name="Q8_0", ggml_type=8, block_weights=32, block_bytes=34, decode=_q8_0),
    BlockFormat(name="IQ4_NL", ggml_type=20, block_weights=32, block_bytes=18, decode=_iq4_nl),
)
