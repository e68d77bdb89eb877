from __future__ import annotations

import math

import numpy as np
import torch

from aprefetch.kernels.cpu.reference import ReferenceOps
from aprefetch.models.layers import FusedLinear, RotaryTable, yarn_frequencies
from aprefetch.quant.base import QuantTensor

CPU = torch.device("cpu")
GGML_F32, GGML_F16 = 0, 1


def weight(n_out: int, n_in: int, dtype: torch.dtype) -> QuantTensor:
    data = torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(n_out)).to(dtype)
    kind = GGML_F32 if dtype == torch.float32 else GGML_F16
    return QuantTensor(data.view(torch.uint8), kind, n_out, n_in)


def test_fused_linear_keeps_order_over_mixed_types():
    weights = [
        weight(n, 16, dtype)
        for n, dtype in [(3, torch.float32), (5, torch.float16), (7, torch.float32)]
    ]
    x, ops = torch.randn(4, 16), ReferenceOps()
    fused = FusedLinear(weights)(ops, x)
    for ours, w in zip(fused, weights, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, ops.linear(x, w))


def test_plain_frequencies():
    np.testing.assert_allclose(yarn_frequencies(8, 10000.0), [1, 0.1, 0.01, 0.001])


def test_linear_scaling_divides():
    np.testing.assert_allclose(
        yarn_frequencies(8, 10000.0, factor=4.0), np.array([1, 0.1, 0.01, 0.001]) / 4
    )


def test_yarn_ramp_of_the_released_model():
    """DeepSeek-V4-Flash: pairs up to 15 are kept, from 25 on divided by 16."""
    plain = yarn_frequencies(64, 160000.0)
    scaled = yarn_frequencies(64, 160000.0, factor=16.0, original_context=65536, ext_factor=1.0)
    np.testing.assert_allclose(scaled[:16], plain[:16])
    np.testing.assert_allclose(scaled[25:], plain[25:] / 16)
    assert (scaled[16:25] < plain[16:25]).all() and (scaled[16:25] > plain[16:25] / 16).all()


def test_rotary_table_spans():
    table = RotaryTable(yarn_frequencies(8, 10000.0), CPU)
    cos, sin = table.span(700, 3, 4)
    assert cos.shape == (3, 4)
    assert sin[1, 1].item() == np.float32(math.sin(704 * 0.1))
    cos, _ = table.spans([(5, 2), (900, 1)])
    assert cos[2, 2].item() == np.float32(math.cos(900 * 0.01))
