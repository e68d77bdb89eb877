"""Guesses for the next layer, made on the GPU beside the router's own picks.

What an early router's scores fall short of is learned as it comes: the running mean of the
difference between a layer's true ranking and the one predicted a layer before, per expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aprefetch.kernels.triton.rows import affinity

__all__ = ["guess_kernel"]


@triton.jit
def guess_kernel(
    scores_ptr, bias_ptr, early_ptr, early_bias_ptr, predicted_ptr, drift_ptr, mail_ptr,
    counter_ptr, E, layer, weight,
    LEARN: tl.constexpr, GUESS: tl.constexpr, M: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Learn from layer `layer`, then name the `M` likeliest experts of `layer + 1`, best first.

    `scores [E]` are the layer's router scores, `early [E]` those of the next layer's router on
    this layer's streams; `predicted`, `drift` are `[layers, E]`. With `LEARN`, `predicted[layer]`
    was written in this step. With `GUESS` the ids go to `mail [M]`, stamped as in `route_kernel`.
    """
    i = tl.arange(0, B)
    inside = i < E
    if LEARN:
        truth = affinity(tl.load(scores_ptr + i, mask=inside, other=0.0))
        truth += tl.load(bias_ptr + i, mask=inside, other=0.0)
        at = layer * E + i
        short = truth - tl.load(predicted_ptr + at, mask=inside, other=0.0)
        drift = tl.load(drift_ptr + at, mask=inside, other=0.0)
        tl.store(drift_ptr + at, drift + (short - drift) * weight, mask=inside)
    if GUESS:
        ranked = affinity(tl.load(early_ptr + i, mask=inside, other=0.0))
        ranked += tl.load(early_bias_ptr + i, mask=inside, other=0.0)
        at = (layer + 1) * E + i
        tl.store(predicted_ptr + at, ranked, mask=inside)
        left = tl.where(inside, ranked + tl.load(drift_ptr + at, mask=inside, other=0.0),
                        float("-inf"))  # fmt: skip
        stamp = tl.load(counter_ptr) << 32
        for n in tl.static_range(M):
            best = tl.max(left, axis=0)
            expert = tl.min(tl.where(left == best, i, B), axis=0)
            tl.store(mail_ptr + n, stamp | expert.to(tl.int64))
            left = tl.where(i == expert, float("-inf"), left)
