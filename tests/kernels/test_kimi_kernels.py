"""The compiled operations of Kimi models against plain torch, and over threads and waves.

Both sides compute in float32 and add up in different orders, fused or not: results of order one
differ by some 1e-6, those that went through a recurrence of many tokens by some 1e-5. That bits do
not depend on the company of rows is `test_kimi_bits`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import fill_slots, layout_of
from torch import Tensor

from aprefetch.kernels.cpu.fast import NumbaOps
from aprefetch.kernels.cpu.reference import ReferenceOps
from aprefetch.kernels.ops import Situ


def close(ours: Tensor, theirs: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def splitting() -> Iterator[NumbaOps]:
    """Shares even the smallest call among threads."""
    ops = NumbaOps(n_threads=3)
    ops._split_cost = 0
    yield ops
    ops.close()


def test_situ_is_right_near_zero_and_far_away(fast: NumbaOps) -> None:
    """In relative terms, from denormal-small to where everything has saturated."""
    size = torch.logspace(-30, 3, 400, dtype=torch.float64)
    gate, up = (torch.cat([-size, size]).roll(shift) for shift in (0, 170))
    for beta, linear in ((4.0, 25.0), (3.0, 0.0)):
        bound = linear * torch.tanh(up / linear) if linear else up
        wanted = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bound
        ours = fast.situ(gate.float(), up.float(), Situ(beta, linear))
        seen = (gate > -80) & (wanted.abs() > 1e-37)  # beyond, the exponential saturates
        torch.testing.assert_close(ours[seen].double(), wanted[seen], rtol=2e-6, atol=0)
        assert (ours[~seen].abs() < 1e-30).all()


def test_not_a_number_stays_one(fast: NumbaOps) -> None:
    nan, one = torch.tensor([float("nan")] * 17), torch.ones(17)
    for gate, up in ((nan, one), (one, nan)):
        assert fast.situ(gate, up, Situ(4.0, 25.0)).isnan().all()
        assert fast.sigmoid_gate(gate, up).isnan().all()


@pytest.mark.parametrize("width", [16, 100, 257])
def test_gate_and_mix(fast: NumbaOps, plain: ReferenceOps, width: int) -> None:
    x, gate = torch.randn(5, 3, width), torch.randn(5, 3 * width) * 4
    close(fast.sigmoid_gate(x, gate), plain.sigmoid_gate(x, gate))
    buffer, score = torch.randn(5, 6, width), torch.randn(width)
    for streams in (buffer, buffer[:, :4], buffer[:, ::2], buffer[1:3, 1:2]):
        close(
            fast.residual_mix(streams, score, 1e-5), plain.residual_mix(streams, score, 1e-5), 1e-5
        )


@pytest.mark.parametrize(("n", "taps"), [(1, 4), (2, 6), (9, 3), (9, 1)])
def test_short_conv(fast: NumbaOps, plain: ReferenceOps, n: int, taps: int) -> None:
    x, weight, history = torch.randn(n, 70), torch.randn(70, taps), torch.randn(taps - 1, 70)
    other = history.clone()
    close(fast.short_conv(x, history, weight), plain.short_conv(x, other, weight))
    assert torch.equal(history, other)
    # A column of a wider tensor, as a fused product leaves it.
    wide = torch.cat([x, x], dim=1)[:, 70:]
    again, last = fast.short_conv(wide, history, weight), plain.short_conv(x, other, weight)
    close(again, last)


@pytest.mark.parametrize("d", [16, 48, 128, 20])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_delta_rule(
    fast: NumbaOps, splitting: NumbaOps, plain: ReferenceOps, d: int, bound: float | None
) -> None:
    n, h = 19, 5
    inputs = [torch.randn(n, h * d) for _ in range(4)] + [torch.randn(n, h)]
    bias, rate, memory = torch.randn(h * d), torch.rand(h) + 0.1, torch.randn(h, d, d)
    after, outputs = [], []
    for ops in (fast, splitting, plain):
        own = memory.clone()
        outputs.append(ops.delta_rule(*inputs, bias, rate, own, lower_bound=bound, eps=1e-6))
        after.append(own)
    close(outputs[0], outputs[2], 2e-5)
    close(after[0], after[2], 2e-5)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(after[0], after[1])


@pytest.mark.parametrize(("width", "n_value", "n_heads"), [(80, 64, 4), (48, 48, 7), (30, 22, 3)])
def test_latent_attention(
    fast: NumbaOps, splitting: NumbaOps, plain: ReferenceOps, width: int, n_value: int, n_heads: int
) -> None:
    rows = torch.randn(90, width)
    for first, n in ((0, 1), (0, 7), (40, 50), (89, 1)):
        q = torch.randn(n, n_heads, width)
        args = (q, rows[: first + n], first, n_value, 0.2)
        ours = fast.attend_latent(*args)
        close(ours, plain.attend_latent(*args), 1e-5)
        assert torch.equal(ours, splitting.attend_latent(*args))


def test_latent_rows_must_be_there(fast: NumbaOps) -> None:
    with pytest.raises(ValueError, match="latent rows"):
        fast.attend_latent(torch.zeros(2, 4, 32), torch.zeros(5, 32), 4, 16, 1.0)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (24, 9), (8, 8)])
@pytest.mark.parametrize("normalise", [True, False])
def test_routing(
    fast: NumbaOps, plain: ReferenceOps, groups: tuple[int, int], normalise: bool
) -> None:
    scores, bias = torch.randn(50, 24) * 2, torch.randn(24) / 3
    scores[0] = 0.0
    args = {"normalise": normalise, "scale": 2.5, "n_groups": groups[0], "n_used_groups": groups[1]}
    ids, weights = fast.route_sigmoid(scores, bias, 6, **args)
    wanted_ids, wanted = plain.route_sigmoid(scores, bias, 6, **args)
    assert torch.equal(ids, wanted_ids)
    close(weights, wanted)
    close(fast.sigmoid_scores(scores, bias), plain.sigmoid_scores(scores, bias))


def test_experts_in_any_company(fast: NumbaOps, splitting: NumbaOps, plain: ReferenceOps) -> None:
    layout = layout_of((10, 10, 11), width=512, hidden=256)
    arena, offsets = fill_slots(layout, 4)
    x, situ = torch.randn(9, 512) / 4, Situ(4.0, 25.0)
    starts, rows, places = [0, 1, 8, 8, 20], torch.randint(0, 9, (20,)), torch.randperm(20)
    out, wanted, again, alone = (torch.zeros(20, 512) for _ in range(4))
    args = (x, arena, offsets, layout, starts, rows, 0.0)
    fast.experts(*args, out, places, situ)
    plain.experts(*args, wanted, places, situ)
    splitting.experts(*args, again, places, situ)
    for e in range(4):
        for i in range(starts[e], starts[e + 1]):
            fast.experts(
                x, arena, offsets[e : e + 1], layout, [0, 1], rows[i : i + 1], 0.0, alone,
                places[i : i + 1], situ,
            )  # fmt: skip
    size = wanted.std()  # about ten: two products deep
    close(out / size, wanted / size, 1e-5)
    assert torch.equal(out, again)
    assert torch.equal(out, alone)
