"""Formats against the `gguf` package's own decoder, which is the truth here."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from aprefetch.errors import UnsupportedModelError
from aprefetch.quant import SUPPORTED, block_format, dequantize, row_bytes, type_name

HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "IQ4_NL": (0,), "Q2_K": (80, 82)}
HALVES |= {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
TYPES = sorted(SUPPORTED)
NAMES = [SUPPORTED[t].name for t in TYPES]


def random_blocks(ggml_type: int, n_rows: int, n_in: int, seed: int = 0) -> np.ndarray:
    """Rows of random codes; scales are finite halves of both signs, subnormal ones included."""
    form = block_format(ggml_type)
    rng = np.random.default_rng(seed)
    if form.block_weights == 1:
        values = rng.standard_normal((n_rows, n_in)).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType(ggml_type)).view(np.uint8)
    blocks = rng.integers(
        0, 256, (n_rows, n_in // form.block_weights, form.block_bytes), dtype=np.uint8
    )
    for at in HALVES.get(form.name, ()):
        scale = (rng.standard_normal(blocks.shape[:2]) * 10.0 ** rng.integers(-7, 1)).astype("<f2")
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(n_rows, -1)


@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
def test_random_blocks_agree_exactly(ggml_type: int) -> None:
    for seed in range(8):
        data = random_blocks(ggml_type, 5, 512, seed)
        with np.errstate(over="ignore"):  # the largest MXFP4 scales reach infinity
            expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(ggml_type))
        got = dequantize(torch.from_numpy(data), ggml_type, 512)
        assert got.dtype == torch.float32
        assert got.shape == (5, 512)
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
def test_any_leading_shape_and_odd_addresses(ggml_type: int) -> None:
    data = torch.from_numpy(random_blocks(ggml_type, 6, 256))
    expected = dequantize(data, ggml_type, 256)
    assert torch.equal(
        dequantize(data.reshape(2, 3, -1), ggml_type, 256), expected.reshape(2, 3, 256)
    )
    assert torch.equal(dequantize(data[0], ggml_type, 256), expected[0])
    assert dequantize(data[:0], ggml_type, 256).shape == (0, 256)
    shifted = torch.empty(data.numel() + 1, dtype=torch.uint8)
    shifted[1:] = data.flatten()
    assert torch.equal(dequantize(shifted[1:].view(data.shape), ggml_type, 256), expected)


def test_mxfp4_every_scale_and_code() -> None:
    """All 256 exponents: subnormals kept, 255 an ordinary number."""
    blocks = np.zeros((256, 17), dtype=np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) | (np.arange(16)[::-1] << 4)
    got = dequantize(torch.from_numpy(blocks), 39, 32).numpy()
    table = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float64)
    with np.errstate(over="ignore"):  # 12 * 2 ** 127 is beyond float32: infinite, as in float32
        expected = np.ldexp(np.concatenate((table, table[::-1])), np.arange(256)[:, None] - 128)
        expected = expected.astype(np.float32)
    np.testing.assert_array_equal(got, expected)
    assert got[0, 1] == 2.0**-128
    assert got[1, 1] == 2.0**-127
    assert got[255, 1] == 2.0**127


def test_nvfp4_every_scale() -> None:
    blocks = np.zeros((64, 36), dtype=np.uint8)
    blocks[:, :4] = np.arange(256).reshape(64, 4)
    blocks[:, 4:] = np.arange(32)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(dequantize(torch.from_numpy(blocks), 40, 64).numpy(), expected)


def test_k_quant_every_packed_scale() -> None:
    """Each scale byte takes all its values, so that no bit of the packing is mixed up."""
    places = {10: (0, 16), 11: (96, 108), 12: (4, 16), 13: (4, 16), 14: (192, 208)}
    for ggml_type, (start, stop) in places.items():
        data = random_blocks(ggml_type, 256 * (stop - start), 256)
        rows = data.reshape(stop - start, 256, -1)
        for at in range(stop - start):
            rows[at, :, start + at] = np.arange(256)
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(ggml_type))
        got = dequantize(torch.from_numpy(data), ggml_type, 256)
        np.testing.assert_array_equal(got.numpy(), expected)


def test_sizes_agree_with_the_constants() -> None:
    for ggml_type, form in SUPPORTED.items():
        known = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)]
        assert (form.block_weights, form.block_bytes) == known
        assert form.name == gguf.GGMLQuantizationType(ggml_type).name
        assert row_bytes(ggml_type, 512) == 512 // known[0] * known[1]


def test_unknown_types_and_ragged_rows_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="IQ2_XXS.*use a file with"):
        row_bytes(16, 256)
    with pytest.raises(UnsupportedModelError, match="id 999"):
        block_format(999)
    with pytest.raises(UnsupportedModelError, match="33 weights"):
        row_bytes(8, 33)
    with pytest.raises(UnsupportedModelError, match="34 bytes, not 35"):
        dequantize(torch.zeros(2, 35, dtype=torch.uint8), 8, 32)
    assert type_name(8) == "Q8_0"
    assert type_name(999) == "id 999"
