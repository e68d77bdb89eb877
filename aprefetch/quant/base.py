"""What a block format is, and a weight kept in one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["QuantTensor"]


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
