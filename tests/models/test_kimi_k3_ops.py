"""Operations of the Kimi models: forms that must agree, bits that must not move, edge values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aprefetch.kernels.cpu import cpu_ops
from aprefetch.kernels.cpu.reference_kimi import delta_rule_by_chunks, delta_rule_by_tokens
from aprefetch.kernels.ops import Situ


@pytest.fixture(params=["numba", "reference"])
def ops(request):
    return cpu_ops(request.param, 1)


@pytest.fixture()
def draw():
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(*shape, generator=generator)


def delta_inputs(draw, n, heads=3, width=20, lower_bound=-5.0):
    q, k, v, decay = (draw(n, heads * width) for _ in range(4))
    beta, bias = draw(n, heads), draw(heads * width) - 2
    rate, memory = draw(heads).exp(), draw(heads, width, width)
    return (q, k, v, decay, beta, bias, rate, memory), {"lower_bound": lower_bound, "eps": 1e-5}


@pytest.mark.parametrize("n", [1, 15, 16, 17, 50])
def test_chunks_equal_the_recurrence_in_float64(draw, n):
    """Exact in real arithmetic: in float64 they differ by rounding only."""
    q, k, v = (torch.nn.functional.normalize(draw(n, 3, 20).double(), dim=-1) for _ in range(3))
    g, beta = -5 * torch.sigmoid(draw(n, 3, 20).double()), torch.sigmoid(draw(n, 3).double())
    memory = draw(3, 20, 20).double()
    other = memory.clone()
    by_tokens = delta_rule_by_tokens(q, k, v, g, beta, memory)
    by_chunks = delta_rule_by_chunks(q, k, v, g, beta, other)
    torch.testing.assert_close(by_chunks, by_tokens, rtol=0, atol=1e-13)
    torch.testing.assert_close(other, memory, rtol=0, atol=1e-13)


def test_chunks_survive_decays_that_no_product_of_exponentials_would(draw):
    """The unbounded gate can forget by e^-1000 in a chunk."""
    q, k, v = (torch.nn.functional.normalize(draw(40, 2, 8), dim=-1) for _ in range(3))
    g, beta = -60 * torch.rand(40, 2, 8), torch.sigmoid(draw(40, 2))
    memory = draw(2, 8, 8)
    other = memory.clone()
    by_tokens = delta_rule_by_tokens(q, k, v, g, beta, memory)
    by_chunks = delta_rule_by_chunks(q, k, v, g, beta, other)
    assert by_chunks.isfinite().all()
    torch.testing.assert_close(by_chunks, by_tokens, rtol=0, atol=1e-5)
    torch.testing.assert_close(other, memory, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_delta_rule_against_numpy(ops, draw, lower_bound):
    args, options = delta_inputs(draw, 40, lower_bound=lower_bound)
    q, k, v, decay, beta, bias, rate, memory = (x.numpy().astype(float) for x in args)
    shape = (40, 3, 20)
    q, k, v, f = (x.reshape(shape) for x in (q, k, v, decay + bias))
    q, k = (u / np.sqrt((u * u).sum(-1, keepdims=True) + 1e-5) for u in (q, k))
    a = rate[:, None]
    g = -a * np.log1p(np.exp(f)) if lower_bound is None else lower_bound / (1 + np.exp(-a * f))
    wanted = np.zeros(shape)
    for t in range(40):
        memory *= np.exp(g[t])[..., None]
        error = (v[t] - np.einsum("hk,hkv->hv", k[t], memory)) / (1 + np.exp(-beta[t]))[:, None]
        memory += k[t][..., None] * error[:, None]
        wanted[t] = np.einsum("hk,hkv->hv", q[t], memory) / np.sqrt(20)
    ours = ops.delta_rule(*args, **options)
    np.testing.assert_allclose(ours.numpy(), wanted, atol=2e-5)
    np.testing.assert_allclose(args[-1].numpy(), memory, atol=2e-5)


@pytest.mark.parametrize("value", [-1e4, -100.0, 20.0, 30.0, 100.0, 1e4])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_extreme_decays_give_no_nan(ops, draw, value, lower_bound):
    args, options = delta_inputs(draw, 3, lower_bound=lower_bound)
    args[3].fill_(value)
    assert ops.delta_rule(*args, **options).isfinite().all()
    assert args[-1].isfinite().all()


@pytest.mark.parametrize("cut", [1, 7, 16])
def test_bits_do_not_depend_on_the_cut(draw, cut):
    """Widths on purpose no multiples of a vector's length."""
    ops, n = cpu_ops("numba", 1), 50
    spans = [slice(i, min(i + cut, n)) for i in range(0, n, cut)]

    def same(whole, part):
        assert torch.equal(whole, torch.cat([part(s) for s in spans]))

    gate, up, activation = draw(n, 37), draw(n, 37), Situ(2.0, 3.0)
    same(ops.situ(gate, up, activation), lambda s: ops.situ(gate[s], up[s], activation))
    same(ops.sigmoid_gate(gate, up), lambda s: ops.sigmoid_gate(gate[s], up[s]))
    streams, score = draw(n, 5, 101), draw(101) / 10
    for n_streams in (1, 2, 4):
        part = streams[:, :n_streams]
        same(
            ops.residual_mix(part, score, 1e-5),
            lambda s, part=part: ops.residual_mix(part[s], score, 1e-5),
        )
    x, weight, first, second = draw(n, 37), draw(37, 4), torch.zeros(3, 37), torch.zeros(3, 37)
    same(ops.short_conv(x, first, weight), lambda s: ops.short_conv(x[s], second, weight))
    assert torch.equal(first, second)
    (*inputs, bias, rate, memory), options = delta_inputs(draw, n)
    other = memory.clone()
    same(
        ops.delta_rule(*inputs, bias, rate, memory, **options),
        lambda s: ops.delta_rule(*(i[s] for i in inputs), bias, rate, other, **options),
    )
    assert torch.equal(memory, other)
    q, rows = draw(n, 3, 30), draw(n, 30)
    same(
        ops.attend_latent(q, rows, 0, 22, 0.2),
        lambda s: ops.attend_latent(q[s], rows[: s.stop], s.start, 22, 0.2),
    )
    scores, bias = draw(n, 23), draw(23) / 10
    options = {"normalise": True, "scale": 1.5}
    same(
        ops.route_sigmoid(scores, bias, 5, **options)[1],
        lambda s: ops.route_sigmoid(scores[s], bias, 5, **options)[1],
    )


def test_short_conv_remembers_more_taps_than_tokens(ops, draw):
    x, weight = draw(3, 8), draw(8, 6)
    history = draw(5, 8)
    past = torch.cat([history, x])
    y = ops.short_conv(x, history, weight)
    wanted = torch.stack([(past[t : t + 6] * weight.T).sum(0) for t in range(3)])
    torch.testing.assert_close(y, torch.nn.functional.silu(wanted))
    assert torch.equal(history, past[-5:])


def test_routing_takes_the_lower_of_equal_experts(ops):
    ids, weights = ops.route_sigmoid(
        torch.zeros(2, 6), torch.zeros(6), 3, normalise=True, scale=2.0
    )
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 2 / 3))


def test_bias_picks_but_does_not_weigh(ops):
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    ids, weights = ops.route_sigmoid(scores, bias, 2, normalise=False, scale=1.0)
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, torch.sigmoid(scores[:, [0, 3]]))


def test_weights_that_are_all_tiny_are_not_blown_up(ops):
    """The sum is held at 2 ** -14 or more, as llama.cpp does."""
    _, weights = ops.route_sigmoid(
        torch.full((1, 4), -20.0), torch.zeros(4), 2, normalise=True, scale=1.0
    )
    torch.testing.assert_close(weights, torch.sigmoid(torch.full((1, 2), -20.0)) * 2**14)


def test_situ_without_a_bound_on_the_up_side(ops, draw):
    gate, up = draw(2, 9), 50 * draw(2, 9)
    wanted = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate)
    torch.testing.assert_close(ops.situ(gate, up, Situ(4.0, 0.0)), wanted * up)
    bound = 25 * torch.tanh(up / 25)
    torch.testing.assert_close(ops.situ(gate, up, Situ(4.0, 25.0)), wanted * bound)


def test_mix_of_one_stream_is_that_stream(ops, draw):
    streams = draw(4, 1, 33)
    assert torch.equal(ops.residual_mix(streams, draw(33), 1e-5), streams[:, 0])
