"""The kernel that learns from routers and names the next layer's experts, against torch."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and the kernels are imported
if not pytest.importorskip("triton").__version__.startswith("3.6."):
    # The interpreter of 3.9 refuses some of the kernels.
    pytest.skip("Triton's interpreter is tested with 3.6", allow_module_level=True)

from aprefetch.kernels.triton.guess import guess_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WEIGHT = 0.25


def affinity(z):
    return torch.nn.functional.softplus(z.double(), threshold=20.0).sqrt().float()


@pytest.mark.parametrize(("learns", "guesses"), [(True, True), (True, False), (False, True)])
def test_learn_and_guess(learns, guesses):
    n_layers, n_experts, n_named, layer, stamp = 4, 20, 8, 1, 7
    g = torch.Generator().manual_seed(3)
    scores, early = 4 * torch.randn(2, n_experts, generator=g).to(DEVICE)
    bias, next_bias = 0.3 * torch.randn(2, n_experts, generator=g).to(DEVICE)
    predicted = torch.randn(n_layers, n_experts, generator=g).to(DEVICE)
    drift = torch.randn(n_layers, n_experts, generator=g).to(DEVICE)
    before, drift_before = predicted.clone(), drift.clone()
    mail = torch.zeros(n_named, dtype=torch.int64, device=DEVICE)
    guess_kernel[(1,)](
        scores, bias, early, next_bias, predicted, drift, mail,
        torch.tensor([stamp], device=DEVICE), n_experts, layer, WEIGHT,
        LEARN=learns, GUESS=guesses, M=n_named, B=32, num_warps=1,
    )  # fmt: skip
    if learns:
        short = affinity(scores) + bias - before[layer]
        drift_before[layer] += (short - drift_before[layer]) * WEIGHT
    assert torch.allclose(drift, drift_before, atol=1e-6)
    if guesses:
        before[layer + 1] = affinity(early) + next_bias
        ranked = before[layer + 1] + drift_before[layer + 1]
        assert (mail >> 32 == stamp).all()
        assert (mail & 0xFFFFFFFF).tolist() == ranked.argsort(descending=True)[:n_named].tolist()
    else:
        assert not mail.any()
    assert torch.allclose(predicted, before, atol=1e-6)
