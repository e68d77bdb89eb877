"""Checks of the Kimi operations of an `Ops` against the reference, for any device.

Tolerances as in `op_checks`; what went through a recurrence of many tokens gets 5e-5. Each check
also cuts its rows into calls of other sizes: the same bits have to come out.
"""

from __future__ import annotations

import numpy as np
import torch
from kernel_cases import expert_case
from op_checks import REFERENCE, close, normal

from aprefetch.kernels.ops import Situ

CHECKS = ["gates", "mix", "convolution", "delta", "latent", "routing"]


def check_gates(ops, device="cpu"):
    """In relative terms as well: near zero, and where everything has saturated."""
    size = torch.logspace(-30, 3, 150)
    gate, up = (torch.cat([-size, size]).roll(shift)[None] for shift in (0, 70))
    for activation in (Situ(4.0, 25.0), Situ(3.0, 0.0)):
        got = ops.situ(gate.to(device), up.to(device), activation).cpu().double()
        bound, linear = up.double(), activation.linear_beta
        if linear > 0:
            bound = linear * torch.tanh(bound / linear)
        g = gate.double()
        want = activation.beta * torch.tanh(g / activation.beta) * torch.sigmoid(g) * bound
        seen = (gate > -60) & (want.abs() > 1e-36)
        # The exponential of a large argument has the argument's own rounding error, 60 * 2^-24.
        torch.testing.assert_close(got[seen], want[seen], rtol=1e-5, atol=0)
        assert (got[~seen].abs() < 1e-20).all()
    nan = torch.full((3,), float("nan"))
    assert ops.situ(nan.to(device), torch.ones(3).to(device), Situ(4.0, 25.0)).isnan().all()
    x, g = normal(1, 3, 2, 520), 4 * normal(2, 3, 1040)
    close(ops.sigmoid_gate(x.to(device), g.to(device)), REFERENCE.sigmoid_gate(x, g))


def check_mix(ops, device="cpu"):
    for d in (96, 130):
        buffer, score = normal(1, 5, 6, d), normal(2, d)
        there = buffer.to(device)
        for streams in (np.s_[:, :4], np.s_[:, ::2], np.s_[1:3, 1:3], np.s_[:]):
            got = ops.residual_mix(there[streams], score.to(device), 1e-5)
            close(got, REFERENCE.residual_mix(buffer[streams], score, 1e-5))
        alone = [ops.residual_mix(there[t : t + 1].clone(), score.to(device), 1e-5) for t in (0, 3)]
        assert torch.equal(torch.cat(alone), got[[0, 3]])


def check_convolution(ops, device="cpu"):
    for n, taps in ((9, 4), (2, 6), (1, 3), (5, 1)):
        x, weight, history = normal(1, n, 150), normal(2, 150, taps), normal(3, taps - 1, 150)
        own, by_tokens = (history.to(device, copy=True) for _ in range(2))
        there = x.to(device), weight.to(device)
        got = ops.short_conv(there[0], own, there[1])
        single = [ops.short_conv(row[None], by_tokens, there[1]) for row in there[0]]
        close(got, REFERENCE.short_conv(x, history, weight))
        assert torch.equal(own.cpu(), history) and torch.equal(by_tokens, own)
        assert torch.equal(torch.cat(single), got)


def check_delta(ops, device="cpu"):
    n, h = 7, 3
    for d, bound in ((32, -5.0), (48, None), (20, -5.0)):
        inputs = [normal(i, n, h * d) for i in range(4)] + [normal(4, n, h)]
        fixed = normal(5, h * d), normal(6, h).exp()
        memory = normal(7, h, d, d)
        on_device = [x.to(device) for x in inputs]
        fixed_there = [x.to(device) for x in fixed]
        options = {"lower_bound": bound, "eps": 1e-5}
        whole, cut = memory.to(device, copy=True), memory.to(device, copy=True)
        got = ops.delta_rule(*on_device, *fixed_there, whole, **options)
        parts = [
            ops.delta_rule(*(x[a:b] for x in on_device), *fixed_there, cut, **options)
            for a, b in ((0, 1), (1, 4), (4, 5), (5, n))
        ]
        close(got, REFERENCE.delta_rule(*inputs, *fixed, memory, **options), 5e-5)
        close(whole, memory, 5e-5)
        assert torch.equal(torch.cat(parts), got) and torch.equal(cut, whole)


def check_latent(ops, device="cpu"):
    rows = normal(1, 70, 80)
    there = rows.to(device)
    for first, n in ((0, 1), (0, 7), (40, 5), (69, 1)):
        q = normal(2, n, 5, 80)
        got = ops.attend_latent(q.to(device), there[: first + n], first, 64, 0.2)
        assert got.is_contiguous()
        close(got, REFERENCE.attend_latent(q, rows[: first + n], first, 64, 0.2))
        for t in (0, n - 1):
            alone = ops.attend_latent(
                q[t : t + 1].to(device), there[: first + t + 1], first + t, 64, 0.2
            )
            assert torch.equal(alone[0], got[t])


def check_routing(ops, device="cpu"):
    scores, bias = 2 * normal(1, 12, 24), normal(2, 24) / 3
    scores[0], scores[1] = 0.0, 40.0  # equal affinities: the bias alone decides
    scores[2], bias[5:9] = -90.0, 0.25
    close(
        ops.sigmoid_scores(scores.to(device), bias.to(device)),
        REFERENCE.sigmoid_scores(scores, bias),
    )
    for groups, used in ((0, 1), (1, 1), (4, 2), (24, 9), (8, 8)):
        for normalise in (True, False):
            options = {"scale": 2.5, "n_groups": groups, "n_used_groups": used}
            options["normalise"] = normalise
            ids, weights = ops.route_sigmoid(scores.to(device), bias.to(device), 6, **options)
            wanted_ids, wanted = REFERENCE.route_sigmoid(scores, bias, 6, **options)
            assert torch.equal(ids.cpu(), wanted_ids), (groups, used)
            close(weights, wanted)


def check_experts(ops, types, d, f, device="cpu", few=False):
    """With SiTU, straight from their blocks; `few` as in `op_checks.check_experts`."""
    n_out = 8 if few else d
    arena, offsets, layout = expert_case(np.random.default_rng(3), types, d, f, 4, n_out)
    slots = [offsets[i] for i in (3, 0, 2)]
    starts, rows, to = [0, 1, 6, 8], [2, 0, 1, 2, 3, 4, 0, 5], [7, 0, 1, 2, 3, 4, 5, 6]
    if few:
        slots, starts, rows, to = slots[:1], [0, 1], [2], [0]
    x, situ = normal(4, 6, d), Situ(4.0, 25.0)
    want = torch.zeros(len(to), n_out)
    got = torch.full_like(want, float("nan"), device=device)
    pair_rows, out_rows = torch.tensor(rows), torch.tensor(to)
    REFERENCE.experts(x, arena, slots, layout, starts, pair_rows, 0.0, want, out_rows, situ)
    there = x.to(device), arena.to(device)
    pair_rows, out_rows = pair_rows.to(device), out_rows.to(device)
    ops.experts(*there, slots, layout, starts, pair_rows, 0.0, got, out_rows, situ)
    close(got, want)
    alone = torch.full_like(got, float("nan"))
    for e, slot in enumerate(slots):
        for i in range(starts[e], starts[e + 1]):
            ops.experts(
                *there, [slot], layout, [0, 1], pair_rows[i : i + 1], 0.0, alone,
                out_rows[i : i + 1], situ,
            )  # fmt: skip
    assert torch.equal(alone, got)
