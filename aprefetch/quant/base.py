"""What a block format is, and a weight kept in one.

A format is data plus one function in plain torch that turns whole blocks into float32. It is the
readable truth; the compiled kernels have decoders of their own and are tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BlockFormat", "QuantTensor", "half_at", "reinterpret", "split_last"]


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A matrix in a file's own encoding.

    `data` is uint8 `[n_out, row_bytes]` on any device; `ggml_type` the numeric GGML type id;
    a row of `n_in` weights is a whole number of blocks.
    """

    data: Tensor
    ggml_type: int
    n_out: int
    n_in: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the encoded matrix."""
        return self.data.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """One encoding: `block_weights` weights in `block_bytes` bytes, blocks along the row.

    `decode` maps uint8 `[..., block_bytes]` to float32 `[..., block_weights]`, on any device.
    """

    name: str
    ggml_type: int
    block_weights: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]


def reinterpret(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of uint8 `data [..., n]` as `dtype`, whatever their address."""
    # A view needs an aligned start, and a slice of one block counts as contiguous at any offset.
    return data.clone(memory_format=torch.contiguous_format).view(dtype)


def half_at(blocks: Tensor, offset: int) -> Tensor:
    """The half-precision number at byte `offset` of each block, as float32 `[..., 1]`."""
    return reinterpret(blocks[..., offset : offset + 2], torch.float16).to(torch.float32)


def split_last(data: Tensor, *sizes: int) -> Tensor:
    """The last axis cut into several, outermost first."""
    return data.reshape(*data.shape[:-1], *sizes)
