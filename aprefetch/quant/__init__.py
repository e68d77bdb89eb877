"""Block formats: a registry by GGML type id, and dequantisation in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from aprefetch.errors import UnsupportedModelError
from aprefetch.quant import floats, fp4, k_quants, small_blocks
from aprefetch.quant.base import BlockFormat, QuantTensor, split_last

__all__ = [
    "SUPPORTED",
    "BlockFormat",
    "QuantTensor",
    "block_format",
    "dequantize",
    "row_bytes",
    "type_name",
]

SUPPORTED: Mapping[int, BlockFormat] = MappingProxyType(
    {
        f.ggml_type: f
        for f in (*floats.FORMATS, *small_blocks.FORMATS, *fp4.FORMATS, *k_quants.FORMATS)
    }
)
"""Every format that can be computed with, by GGML type id."""


def block_format(ggml_type: int) -> BlockFormat:
    """The format of a type id.

    Raises:
        UnsupportedModelError: the type is not one of `SUPPORTED`.
    """
    found = SUPPORTED.get(ggml_type)
    if found is None:
        known = ", ".join(f.name for f in SUPPORTED.values())
        raise UnsupportedModelError(
            f"tensor type {type_name(ggml_type)} is not supported; use a file with one of: {known}"
        )
    return found


def type_name(ggml_type: int) -> str:
    """The name of any GGML type id, supported or not; never raises."""
    found = SUPPORTED.get(ggml_type)
    if found is not None:
        return found.name
    # Only wanted for messages, so the package is not imported for it before.
    from gguf.constants import GGMLQuantizationType

    try:
        return f"{GGMLQuantizationType(ggml_type).name} (id {ggml_type})"
    except ValueError:
        return f"id {ggml_type}"


def row_bytes(ggml_type: int, n_in: int) -> int:
    """Bytes of a row of `n_in` weights.

    Raises:
        UnsupportedModelError: the type is unknown, or `n_in` is not a whole number of blocks.
    """
    form = block_format(ggml_type)
    if n_in % form.block_weights:
        raise UnsupportedModelError(
            f"a row of {n_in} weights is not a whole number of {form.name} blocks "
            f"({form.block_weights} weights each); the file was not written correctly"
        )
    return n_in // form.block_weights * form.block_bytes


def dequantize(data: Tensor, ggml_type: int, n_in: int) -> Tensor:
    """uint8 `data [..., row_bytes]` -> float32 `[..., n_in]`, on the device of `data`.

    Raises:
        UnsupportedModelError: the type is unknown, or the rows do not have `n_in` weights.
    """
    form = block_format(ggml_type)
    expected = row_bytes(ggml_type, n_in)
    if data.shape[-1] != expected:
        raise UnsupportedModelError(
            f"a {form.name} row of {n_in} weights has {expected} bytes, not {data.shape[-1]}"
        )
    blocks = split_last(data, n_in // form.block_weights, form.block_bytes)
    return form.decode(blocks).flatten(-2)
