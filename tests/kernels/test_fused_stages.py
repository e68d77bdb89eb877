"""Stages done in one go give the bits of the operations that they are made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import FORMATS, quantised

from aprefetch.kernels.fused import AttentionInputs, FusedOps, RouterAhead, StackedWeights
from aprefetch.quant.base import QuantTensor

ROWS = (1, 2, 3, 4)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def equal(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, b)


def attention_case(name: str, other: str) -> AttentionInputs:
    rng = np.random.default_rng(1)
    # Encodings alternate, so the stacked matrices are not in the order of the weights.
    kinds = ((name, 256), (name, 64), (other, 24), (name, 24), (other, 8))
    stack = StackedWeights([quantised(rng, kind, n, 256) for kind, n in kinds])
    return AttentionInputs(
        stack, normal(1, 256), quantised(rng, name, 3 * 64, 256), normal(2, 64), 3, 1e-6
    )


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("name", FORMATS)
def test_attention_inputs(serial, name, n):
    weights = attention_case(name, "F16" if name != "F16" else "F32")
    u, cos, sin = normal(3, n, 256), normal(4, n, 16), normal(5, n, 16)
    ours = serial.attention_inputs(u, weights, cos, sin)
    theirs = FusedOps.attention_inputs(serial, u, weights, cos, sin)
    equal((*ours[:3], *ours.extra), (*theirs[:3], *theirs.extra))


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("name", FORMATS)
def test_attention_output(serial, name, n):
    rng = np.random.default_rng(2)
    w_low, w_out = quantised(rng, name, 256, 256), quantised(rng, name, 40, 256)
    heads, cos, sin = normal(6, n, 8, 64), normal(4, n, 16), normal(5, n, 16)
    ours = serial.attention_output(heads.clone(), cos, sin, w_low, w_out, 2)
    equal([ours], [FusedOps.attention_output(serial, heads.clone(), cos, sin, w_low, w_out, 2)])


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("name", FORMATS)
def test_gated_mlp(serial, name, limit, n):
    rng = np.random.default_rng(3)
    for up in (name, "BF16"):
        stack = StackedWeights([quantised(rng, name, 256, 256), quantised(rng, up, 256, 256)])
        down, x = quantised(rng, name, 50, 256), normal(7, n, 256)
        ours = serial.gated_mlp(x, stack, down, limit)
        equal([ours], [FusedOps.gated_mlp(serial, x, stack, down, limit)])


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("d", [20, 64])
def test_hyper_connections(serial, n, d):
    fn = QuantTensor(normal(1, 24, 4 * d).view(torch.uint8), 0, 24, 4 * d)
    arguments = (
        normal(2, n, d), normal(3, n, 4, d), normal(4, n, 4), normal(5, n, 4, 4), fn,
        normal(6, 3), normal(7, 24), normal(8, d),
    )  # fmt: skip
    options = {"eps": 1e-6, "hc_eps": 1e-6, "n_iterations": 8}
    ours = serial.hc_pass(*arguments, **options)
    equal(ours, FusedOps.hc_pass(serial, *arguments, **options))


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("d", [20, 64])
def test_the_sum_over_experts_and_the_shared_one(serial, n, d):
    parts, weights, shared = normal(1, n, 6, d), normal(2, n, 6), normal(3, n, d)
    ours = serial.sum_experts_and(parts, weights, shared)
    equal([ours], [serial.sum_experts(parts, weights) + shared])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_a_router_asked_ahead(serial, name, n):
    d, rng = 256, np.random.default_rng(4)
    fn = QuantTensor(normal(1, 24, 4 * d).view(torch.uint8), 0, 24, 4 * d)
    router = quantised(rng, name, 20, d)
    state = normal(5, n, d), normal(6, n, 4, d), normal(7, n, 4), normal(8, n, 4, 4)
    for bias in (None, normal(9, 20)):
        ahead = RouterAhead(fn, normal(2, 3), normal(3, 24), normal(4, d), router, bias, 1e-6, 1e-6)
        for parts, weights in ((None, None), (normal(10, n, 6, d), normal(11, n, 6))):
            ours = serial.scores_ahead(ahead, parts, weights, *state)
            equal([ours], [FusedOps.scores_ahead(serial, ahead, parts, weights, *state)])


def test_work_for_several_threads_is_composed_to_the_same_bits(serial, fast):
    weights = attention_case("Q8_0", "F32")
    u, cos, sin = normal(3, 60, 256), normal(4, 60, 16), normal(5, 60, 16)
    ours, theirs = (ops.attention_inputs(u, weights, cos, sin) for ops in (fast, serial))
    equal((*ours[:3], *ours.extra), (*theirs[:3], *theirs.extra))


def test_weights_of_another_width_are_refused(serial):
    weights = attention_case("Q8_0", "F32")
    with pytest.raises(ValueError, match="attention input"):
        serial.attention_inputs(normal(3, 1, 128), weights, normal(4, 1, 16), normal(5, 1, 16))
    rng = np.random.default_rng(3)
    stack = StackedWeights([quantised(rng, "F32", 32, 64), quantised(rng, "F32", 32, 64)])
    with pytest.raises(ValueError, match="gated MLP"):
        serial.gated_mlp(normal(1, 1, 64), stack, quantised(rng, "F32", 8, 64), 0.0)
