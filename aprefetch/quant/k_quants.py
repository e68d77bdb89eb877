"""Blocks of 256 weights in groups of 16 or 32 that have scales of their own: Q2_K to Q6_K.

All but Q6_K cut the block into halves of 128 and lay four weights 32 apart into one byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aprefetch.quant.base import BlockFormat, half_at, reinterpret, split_last

__all__ = ["FORMATS"]


def _shifts(device: torch.device, *amounts: int) -> Tensor:
    return torch.tensor(amounts, dtype=torch.uint8, device=device)[:, None]


def _two_bit_codes(packed: Tensor) -> Tensor:
    """uint8 `[..., 64]` -> codes `[..., 256]`."""
    halves = split_last(packed, 2, 1, 32)
    return ((halves >> _shifts(packed.device, 0, 2, 4, 6)) & 3).flatten(-3)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight mins in the 12 bytes that Q4_K and Q5_K share."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
    mins = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=-1)
    return scales.to(torch.float32), mins.to(torch.float32)


def _grouped(scale: Tensor, codes: Tensor, offset: Tensor | None = None) -> Tensor:
    """`scale [..., n]` times the n groups of `codes [..., 256]`, minus `offset [..., n]`."""
    n_groups = scale.shape[-1]
    values = scale[..., None] * split_last(codes.to(torch.float32), n_groups, 256 // n_groups)
    if offset is not None:
        values = values - offset[..., None]
    return values.flatten(-2)


def _q2_k(blocks: Tensor) -> Tensor:
    scale = half_at(blocks, 80) * (blocks[..., 0:16] & 15).to(torch.float32)
    offset = half_at(blocks, 82) * (blocks[..., 0:16] >> 4).to(torch.float32)
    return _grouped(scale, _two_bit_codes(blocks[..., 16:80]), offset)


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    low = torch.cat((low & 15, low >> 4), dim=-1)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scale = half_at(blocks, 108) * ((low | (high << 4)).to(torch.float32) - 32)
    # Bit 4n + j of mask byte w belongs to weight 128n + 32j + w; a set bit means "no minus 4".
    mask = (blocks[..., None, 0:32] >> _shifts(blocks.device, *range(8))) & 1
    codes = _two_bit_codes(blocks[..., 32:96]).to(torch.float32)
    return _grouped(scale, codes - 4 * (1 - mask.flatten(-2).to(torch.float32)))


def _four_bit_codes(packed: Tensor) -> Tensor:
    """uint8 `[..., 128]` -> codes `[..., 256]`: 32 low nibbles, then their 32 high ones."""
    groups = split_last(packed, 4, 1, 32)
    return ((groups >> _shifts(packed.device, 0, 4)) & 15).flatten(-3)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, mins = _six_bit_pairs(blocks[..., 4:16])
    codes = _four_bit_codes(blocks[..., 16:144])
    return _grouped(half_at(blocks, 0) * scales, codes, half_at(blocks, 2) * mins)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, mins = _six_bit_pairs(blocks[..., 4:16])
    fifth = (blocks[..., None, 16:48] >> _shifts(blocks.device, *range(8))) & 1
    codes = _four_bit_codes(blocks[..., 48:176]) + 16 * fifth.flatten(-2)
    return _grouped(half_at(blocks, 0) * scales, codes, half_at(blocks, 2) * mins)


def _q6_k(blocks: Tensor) -> Tensor:
    shifts = _shifts(blocks.device, 0, 4)
    low = ((split_last(blocks[..., 0:128], 2, 1, 64) >> shifts) & 15).flatten(-3)
    high = _two_bit_codes(blocks[..., 128:192])
    scale = half_at(blocks, 208) * reinterpret(blocks[..., 192:208], torch.int8).to(torch.float32)
    return _grouped(scale, (low + 16 * high).to(torch.float32) - 32)


FORMATS = (
    BlockFormat(name="Q2_K", ggml_type=10, block_weights=256, block_bytes=84, decode=_q2_k),
    BlockFormat(name="Q3_K", ggml_type=11, block_weights=256, block_bytes=110, decode=_q3_k),
    BlockFormat(name="Q4_K", ggml_type=12, block_weights=256, block_bytes=144, decode=_q4_k),
    BlockFormat(name="Q5_K", ggml_type=13, block_weights=256, block_bytes=176, decode=_q5_k),
    BlockFormat(name="Q6_K", ggml_type=14, block_weights=256, block_bytes=210, decode=_q6_k),
)
