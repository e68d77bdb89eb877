"""Rows of the Kimi operations depend on themselves alone: on no batch and no cut into calls."""

from __future__ import annotations

import torch
from torch import Tensor

from aprefetch.kernels.cpu.fast import NumbaOps
from aprefetch.kernels.ops import Situ

T = 37


def rows_alone(whole: Tensor, one: list[Tensor]) -> None:
    assert torch.equal(whole, torch.cat(one))


def test_activations_row_by_row(fast: NumbaOps) -> None:
    for width in (5, 33, 160, 768):
        g, u = torch.randn(T, width) * 3, torch.randn(T, width) * 3
        for situ in (Situ(4.0, 2.0), Situ(3.0, 0.0)):
            rows_alone(
                fast.situ(g, u, situ),
                [fast.situ(g[t : t + 1], u[t : t + 1], situ) for t in range(T)],
            )
        rows_alone(
            fast.sigmoid_gate(u, g),
            [fast.sigmoid_gate(u[t : t + 1], g[t : t + 1]) for t in range(T)],
        )


def test_residual_mix_row_by_row(fast: NumbaOps) -> None:
    for n_streams, width in ((2, 48), (5, 384), (3, 1000)):
        streams, score = torch.randn(T, n_streams, width), torch.randn(width)
        rows_alone(
            fast.residual_mix(streams, score, 1e-6),
            [fast.residual_mix(streams[t : t + 1], score, 1e-6) for t in range(T)],
        )


def test_routing_row_by_row(fast: NumbaOps) -> None:
    for n in (24, 33, 384):
        scores, bias = torch.randn(T, n) * 3, torch.randn(n)
        ids, weights = fast.route_sigmoid(scores, bias, 8, normalise=True, scale=2.5)
        each = [
            fast.route_sigmoid(scores[t : t + 1], bias, 8, normalise=True, scale=2.5)
            for t in range(T)
        ]
        rows_alone(ids, [i for i, _ in each])
        rows_alone(weights, [w for _, w in each])
        rows_alone(
            fast.sigmoid_scores(scores, bias),
            [fast.sigmoid_scores(scores[t : t + 1], bias) for t in range(T)],
        )


def test_short_conv_in_any_cut(fast: NumbaOps) -> None:
    x, weight = torch.randn(T, 100), torch.randn(100, 4)
    history = torch.randn(3, 100)
    whole = fast.short_conv(x, history.clone(), weight)
    for cut in (1, 2, 7):
        state = history.clone()
        parts = [fast.short_conv(x[t : t + cut], state, weight) for t in range(0, T, cut)]
        assert torch.equal(whole, torch.cat(parts))


def test_delta_rule_and_latent_attention_in_any_cut(fast: NumbaOps) -> None:
    h, d = 3, 32
    q, k, v, decay = (torch.randn(T, h * d) for _ in range(4))
    beta, bias, rate = torch.randn(T, h), torch.randn(h * d), torch.rand(h) + 0.1
    latent_q, rows = torch.randn(T, 4, 80), torch.randn(T, 80)
    for bound in (None, -5.0):
        results = []
        for cut in (T, 1, 7):
            memory = torch.zeros(h, d, d)
            results.append(
                torch.cat(
                    [
                        fast.delta_rule(
                            *(x[t : t + cut] for x in (q, k, v, decay, beta)), bias, rate, memory,
                            lower_bound=bound, eps=1e-6,
                        )
                        for t in range(0, T, cut)
                    ]
                )
            )  # fmt: skip
        assert all(torch.equal(results[0], r) for r in results[1:])
    whole = fast.attend_latent(latent_q, rows, 0, 64, 0.1)
    for cut in (1, 7):
        parts = [
            fast.attend_latent(latent_q[t : t + cut], rows[: min(t + cut, T)], t, 64, 0.1)
            for t in range(0, T, cut)
        ]
        assert torch.equal(whole, torch.cat(parts))
