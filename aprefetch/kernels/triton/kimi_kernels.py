"""Kernels of Kimi-K3 and Kimi-Linear: gates, residual mixing, delta attention, routing.

As in `rows`, a program owns what no sum runs across, so a row's result cannot depend on its
neighbours. Numbers that change from call to call (tokens, streams, strides) are not specialised on:
one compiled kernel, and so one order of additions, serves them all. The delta rule keeps its state
in float32 between tokens of a call as between calls; any cut of a sequence gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "delta_rule_kernel",
    "gate_kernel",
    "residual_mix_kernel",
    "route_sigmoid_kernel",
    "short_conv_kernel",
    "situ",
    "situ_kernel",
]


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """Right in relative terms: by its series near zero, where the quotient would cancel."""
    y = x * x
    series = tl.fma(y, 62.0 / 2835.0, -17.0 / 315.0)
    series = tl.fma(y, series, 2.0 / 15.0)
    series = tl.fma(y, series, -1.0 / 3.0)
    series = tl.fma(x * y, series, x)
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -far, far))


@triton.jit
def _softplus(x):
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e  # log1p(e), exact also where adding 1 rounds e away
    soft = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + soft


@triton.jit
def situ(g, u, beta, linear_beta):
    """See `aprefetch.kernels.ops.Situ`."""
    if linear_beta > 0:
        u = linear_beta * _tanh(u / linear_beta)
    return beta * _tanh(g / beta) * _sigmoid(g) * u


@triton.jit
def situ_kernel(gate_ptr, up_ptr, out_ptr, beta, linear_beta, n, B: tl.constexpr):
    """Elementwise `situ`; grid (slices)."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    g = tl.load(gate_ptr + i, mask=i < n, other=0.0)
    u = tl.load(up_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, situ(g, u, beta, linear_beta), mask=i < n)


@triton.jit
def gate_kernel(x_ptr, gate_ptr, out_ptr, n, B: tl.constexpr):
    """Elementwise `x sigmoid(gate)`; grid (slices)."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    g = tl.load(gate_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, x * _sigmoid(g), mask=i < n)


@triton.jit
def _stream(at, score_ptr, eps, D, B: tl.constexpr):
    """One residual stream and its logit."""
    i = tl.arange(0, B)
    s = tl.load(at + i, mask=i < D, other=0.0)
    score = tl.load(score_ptr + i, mask=i < D, other=0.0)
    logit = tl.sum(s * score, axis=0) / tl.sqrt_rn(tl.sum(s * s, axis=0) / D + eps)
    return s, logit


@triton.jit(do_not_specialize=["n_streams", "token_stride"])
def residual_mix_kernel(
    streams_ptr, score_ptr, out_ptr, eps, n_streams, token_stride, D, B: tl.constexpr
):
    """Streams of row `program_id(0)`, weighted by a softmax that is worked off one by one."""
    t = tl.program_id(0).to(tl.int64)
    at = streams_ptr + t * token_stride
    mixed, top = _stream(at, score_ptr, eps, D, B)
    total = tl.exp(top - top)
    for n in range(1, n_streams):
        s, logit = _stream(at + n * D, score_ptr, eps, D, B)
        largest = tl.maximum(top, logit)
        old, new = tl.exp(top - largest), tl.exp(logit - largest)
        mixed = mixed * old + new * s
        total = total * old + new
        top = largest
    i = tl.arange(0, B)
    tl.store(out_ptr + t * D + i, mixed / total, mask=i < D)


@triton.jit
def short_conv_kernel(
    x_ptr, history_ptr, weight_ptr, out_ptr, C,
    TAPS: tl.constexpr, MOVES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One token of a slice of channels; grid (T, slices). `MOVES`, for T = 1: history as well."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    inside = c < C
    y = tl.zeros((B,), tl.float32)
    inputs = ()
    for tap in tl.static_range(TAPS):
        at = t + tap - (TAPS - 1)
        old = tl.load(history_ptr + (t + tap) * C + c, mask=inside & (at < 0), other=0.0)
        new = tl.load(x_ptr + at * C + c, mask=inside & (at >= 0), other=0.0)
        value = tl.where(at < 0, old, new)
        w = tl.load(weight_ptr + c * TAPS + tap, mask=inside, other=0.0)
        y = tl.fma(w, value, y)
        inputs = inputs + (value,)
    tl.store(out_ptr + t * C + c, y * _sigmoid(y), mask=inside)
    if MOVES:
        tl.debug_barrier()  # no thread may overwrite what another has yet to read
        for tap in tl.static_range(1, TAPS):
            tl.store(history_ptr + (tap - 1) * C + c, inputs[tap], mask=inside)


@triton.jit(do_not_specialize=["n"])
def delta_rule_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, bias_ptr, rate_ptr, memory_ptr, out_ptr,
    n, H, bound, eps, scale,
    D: tl.constexpr, BOUNDED: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr,
):  # fmt: skip
    """All tokens of head `program_id(0)` and VB of its value columns; grid (H, slices of D).

    The state `[key, value]` of these columns stays in registers; columns do not meet each other.
    """
    h = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, DB), tl.program_id(1) * VB + tl.arange(0, VB)
    memory = memory_ptr + h * D * D + i[:, None] * D + j[None, :]
    inside = (i < D)[:, None] & (j < D)[None, :]
    state = tl.load(memory, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + h * D + i, mask=i < D, other=0.0)
    rate = tl.load(rate_ptr + h)
    at, beta_at = h * D, beta_ptr + h
    for _ in range(0, n):
        q = tl.load(q_ptr + at + i, mask=i < D, other=0.0)
        k = tl.load(k_ptr + at + i, mask=i < D, other=0.0)
        v = tl.load(v_ptr + at + j, mask=j < D, other=0.0)
        f = tl.load(decay_ptr + at + i, mask=i < D, other=0.0) + bias
        q = q / tl.sqrt_rn(tl.sum(q * q, axis=0) + eps) * scale
        k = k / tl.sqrt_rn(tl.sum(k * k, axis=0) + eps)
        g = bound * _sigmoid(rate * f) if BOUNDED else -rate * _softplus(f)
        state = state * tl.exp(g)[:, None]
        error = _sigmoid(tl.load(beta_at)) * (v - tl.sum(state * k[:, None], axis=0))
        state = state + k[:, None] * error[None, :]
        tl.store(out_ptr + at + j, tl.sum(state * q[:, None], axis=0), mask=j < D)
        at += H * D
        beta_at += H
    tl.store(memory, state, mask=inside)


@triton.jit
def _groups_only(ranked, i, size, N: tl.constexpr, USED: tl.constexpr, B: tl.constexpr):
    """`ranked`, -inf outside the USED of N groups whose two best values have the largest sums."""
    group = i // size
    sums = ranked
    for n in tl.static_range(N):
        mine = tl.where(group == n, ranked, float("-inf"))
        best = tl.max(mine, axis=0)
        at = tl.min(tl.where(mine == best, i, B), axis=0)
        second = tl.max(tl.where(i == at, float("-inf"), mine), axis=0)
        total = best + tl.where(second == float("-inf"), 0.0, second)  # a group may be of one
        sums = tl.where(group == n, total, sums)
    kept = i < 0
    for _ in tl.static_range(USED):
        best = tl.max(sums, axis=0)
        first = tl.min(tl.where(sums == best, group, B), axis=0)
        kept = kept | (group == first)
        sums = tl.where(group == first, float("-inf"), sums)
    return tl.where(kept, ranked, float("-inf"))


@triton.jit
def route_sigmoid_kernel(
    scores_ptr, bias_ptr, ids_ptr, weights_ptr, E, scale, smallest,
    K: tl.constexpr, KB: tl.constexpr, B: tl.constexpr, NORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, USED: tl.constexpr,
):  # fmt: skip
    """Experts of row `program_id(0)`; see `Ops.route_sigmoid`. Ids come out ascending."""
    t = tl.program_id(0).to(tl.int64)
    i, k = tl.arange(0, B), tl.arange(0, KB)
    affinity = _sigmoid(tl.load(scores_ptr + t * E + i, mask=i < E, other=0.0))
    ranked = affinity + tl.load(bias_ptr + i, mask=i < E, other=0.0)
    left = tl.where(i < E, ranked, float("-inf"))
    if GROUPS > 1:
        left = _groups_only(left, i, E // GROUPS, GROUPS, USED, B)
    picked = i < 0
    for _ in tl.static_range(K):
        best = tl.max(left, axis=0)
        at = tl.min(tl.where(left == best, i, B), axis=0)
        picked = picked | (i == at)
        left = tl.where(i == at, float("-inf"), left)
    place = tl.cumsum(picked.to(tl.int32), axis=0) - 1
    here = picked[None, :] & (place[None, :] == k[:, None])
    ids = tl.sum(tl.where(here, i[None, :], 0), axis=1)
    weight = tl.sum(tl.where(here, affinity[None, :], 0.0), axis=1)
    if NORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, axis=0), smallest)
    tl.store(ids_ptr + t * K + k, ids, mask=k < K)
    tl.store(weights_ptr + t * K + k, weight * scale, mask=k < K)
