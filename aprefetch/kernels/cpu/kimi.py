"""Kernels of the operations that only Kimi-K3 and Kimi-Linear use.

As everywhere, one element of a result is one fixed sequence of roundings: columns of the delta
rule's memory never mix, keys are summed in ascending order, and how many tokens, heads or columns
are taken together only changes what is in the cache at the time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aprefetch.kernels.cpu.attention import add_values, softmax_row
from aprefetch.kernels.cpu.jit import hold, inner, kernel
from aprefetch.kernels.cpu.layers import choose, inverse_rms, weighted_sum
from aprefetch.kernels.cpu.matmul import dot, float_rows
from aprefetch.kernels.cpu.simd import (
    add16,
    f32_at,
    f32_put,
    first,
    fma,
    fma16,
    i32_at,
    load16,
    mul16,
    splat,
    store16,
    sub16,
)
from aprefetch.kernels.cpu.vmath import (
    exp1,
    exp16,
    scale_span,
    sigmoid1,
    sigmoid16,
    situ_span,
    softplus16,
)

__all__ = [
    "attend_latent",
    "delta_rule",
    "residual_mix",
    "route_sigmoid",
    "short_conv",
    "sigmoid_gate",
    "sigmoid_scores",
    "situ",
]

_single = np.float32
_KEY_ROWS = 32
"""Latent rows that all heads meet before the next: with 576 columns 72 KiB, for the L2 cache."""
_DELTA_TOKENS = 8
_NO_SINK = _single(-3e38)

# ---- element by element --------------------------------------------------------------------------


@kernel
def situ(gate: Any, up: Any, n: Any, beta: Any, linear_beta: Any, out: Any) -> None:
    situ_span(gate, up, n, _single(beta), _single(linear_beta), out)


@kernel
def sigmoid_gate(x: Any, gate: Any, n: Any, out: Any) -> None:
    whole = n // 16 * 16
    for i in range(0, 4 * whole, 64):
        store16(out + i, mul16(load16(x + i), sigmoid16(load16(gate + i))))
    for i in range(4 * whole, 4 * n, 4):
        f32_put(out + i, f32_at(x + i) * sigmoid1(f32_at(gate + i)))


@kernel
def residual_mix(
    streams: Any, token_bytes: Any, n_tokens: Any, n_streams: Any, d: Any, score: Any, eps: Any,
    out: Any,
) -> None:  # fmt: skip
    """A token's streams lie together, those of the next are `token_bytes` further."""
    scratch = np.empty(n_streams, dtype=np.float32)
    weights, bound = scratch.ctypes.data, _single(eps)
    for t in range(n_tokens):
        x = streams + t * token_bytes
        top = _NO_SINK
        for s in range(n_streams):
            row = x + 4 * s * d
            factor = inverse_rms(row, d, bound)
            logit = dot(score, row, d) * factor
            f32_put(weights + 4 * s, logit)
            top = max(top, logit)
        total = _single(0.0)
        for s in range(0, 4 * n_streams, 4):
            value = exp1(f32_at(weights + s) - top)
            f32_put(weights + s, value)
            total += value
        for s in range(0, 4 * n_streams, 4):
            f32_put(weights + s, f32_at(weights + s) / total)
        weighted_sum(weights, 4, n_streams, x, d, out + 4 * t * d)
    hold(scratch)


# ---- delta attention -----------------------------------------------------------------------------


@inner
def _input_row(x: Any, history: Any, before: Any, row_bytes: Any, i: Any) -> Any:
    """Row i of the history followed by the new inputs."""
    return history + i * row_bytes if i < before else x + (i - before) * row_bytes


@kernel
def short_conv(
    x: Any, n_tokens: Any, n_channels: Any, history: Any, weight: Any, n_taps: Any, out: Any
) -> None:
    """`weight [taps, C]`, a tap's channels together."""
    whole, row, before = n_channels // 16 * 64, 4 * n_channels, n_taps - 1
    for t in range(n_tokens):
        to = out + t * row
        for c in range(0, whole, 64):
            total = splat(_single(0.0))
            for tap in range(n_taps):
                at = _input_row(x, history, before, row, t + tap)
                total = fma16(load16(weight + tap * row + c), load16(at + c), total)
            store16(to + c, mul16(total, sigmoid16(total)))
        for c in range(whole, row, 4):
            rest = _single(0.0)
            for tap in range(n_taps):
                at = _input_row(x, history, before, row, t + tap)
                rest = fma(f32_at(weight + tap * row + c), f32_at(at + c), rest)
            f32_put(to + c, rest * sigmoid1(rest))
    # Upwards: where tokens are fewer than taps, the history is moved on inside itself.
    for j in range(before):
        source, to = _input_row(x, history, before, row, n_tokens + j), history + j * row
        for c in range(0, row, 4):
            f32_put(to + c, f32_at(source + c))


@inner
def _unit(x: Any, d: Any, eps: Any, scale: Any, out: Any) -> None:
    """`x` at length `scale`."""
    scale_span(x, scale / math.sqrt(dot(x, x, d) + eps), 0, d, out)


@inner
def _kept(decay: Any, bias: Any, d: Any, rate: Any, bound: Any, out: Any) -> None:
    """What each row of the memory is multiplied by; a bound of 0 is none."""
    rates, bounds, zero = splat(rate), splat(bound), splat(_single(0.0))
    for c in range(0, 4 * d, 64):
        f = add16(load16(decay + c), load16(bias + c))
        if bound < _single(0.0):
            g = mul16(bounds, sigmoid16(mul16(rates, f)))
        else:
            g = sub16(zero, mul16(rates, softplus16(f)))
        store16(out + c, exp16(g))


@inner
def _one_column(
    memory: Any, row: Any, d: Any, key: Any, query: Any, kept: Any, strength: Any, v: Any, out: Any
) -> None:
    """One token's step of 16 columns of a head's memory, whose rows are `row` bytes apart."""
    found = result = splat(_single(0.0))
    for i in range(d):
        x = mul16(load16(memory + i * row), splat(f32_at(kept + 4 * i)))
        found = fma16(x, splat(f32_at(key + 4 * i)), found)
    error = mul16(splat(strength), sub16(load16(v), found))
    for i in range(d):
        x = mul16(load16(memory + i * row), splat(f32_at(kept + 4 * i)))
        x = fma16(splat(f32_at(key + 4 * i)), error, x)
        store16(memory + i * row, x)
        result = fma16(x, splat(f32_at(query + 4 * i)), result)
    store16(out, result)


@inner
def _two_columns(
    memory: Any, row: Any, d: Any, key: Any, query: Any, kept: Any, strength: Any, v: Any, out: Any
) -> None:
    """The same for 32 columns: two interleaved copies."""
    found0 = found1 = result0 = result1 = splat(_single(0.0))
    for i in range(d):
        at, factor = memory + i * row, splat(f32_at(kept + 4 * i))
        weight = splat(f32_at(key + 4 * i))
        found0 = fma16(mul16(load16(at), factor), weight, found0)
        found1 = fma16(mul16(load16(at + 64), factor), weight, found1)
    error0 = mul16(splat(strength), sub16(load16(v), found0))
    error1 = mul16(splat(strength), sub16(load16(v + 64), found1))
    for i in range(d):
        at, factor = memory + i * row, splat(f32_at(kept + 4 * i))
        weight = splat(f32_at(key + 4 * i))
        x0 = fma16(weight, error0, mul16(load16(at), factor))
        x1 = fma16(weight, error1, mul16(load16(at + 64), factor))
        store16(at, x0)
        store16(at + 64, x1)
        weight = splat(f32_at(query + 4 * i))
        result0, result1 = fma16(x0, weight, result0), fma16(x1, weight, result1)
    store16(out, result0)
    store16(out + 64, result1)


@inner
def _strips(
    memory: Any, row: Any, d: Any, keys: Any, queries: Any, kept: Any, strengths: Any, v: Any,
    token: Any, n_tokens: Any, out: Any,
) -> None:  # fmt: skip
    """One head's memory, strip by strip of 32 columns, the last one perhaps of 16."""
    for c in range(0, row, 128):
        for t in range(n_tokens):
            at, to, strength = t * token + c, t * row, f32_at(strengths + 4 * t)
            if c + 128 <= row:
                _two_columns(
                    memory + c, row, d, keys + to, queries + to, kept + to, strength, v + at,
                    out + at,
                )  # fmt: skip
            else:
                _one_column(
                    memory + c, row, d, keys + to, queries + to, kept + to, strength, v + at,
                    out + at,
                )  # fmt: skip


@kernel
def delta_rule(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, bias: Any, rate: Any, memory: Any, n_tokens: Any,
    n_heads: Any, d: Any, bound: Any, eps: Any, out: Any, h0: Any, h1: Any,
) -> None:  # fmt: skip
    """Heads `h0..h1`; d is a multiple of 16, a bound of 0 is none.

    A few tokens at a time go through all heads, so that their rows come from memory once, and in
    each head through one strip of columns before the next.
    """
    row, token = 4 * d, 4 * n_heads * d
    scratch = np.empty(_DELTA_TOKENS * (3 * d + 1), dtype=np.float32)
    keys = scratch.ctypes.data
    queries, kept = keys + _DELTA_TOKENS * row, keys + 2 * _DELTA_TOKENS * row
    strengths = keys + 3 * _DELTA_TOKENS * row
    small, lower, scale = _single(eps), _single(bound), _single(1.0) / math.sqrt(_single(d))
    for start in range(0, n_tokens, _DELTA_TOKENS):
        some = min(_DELTA_TOKENS, n_tokens - start)
        for h in range(h0, h1):
            head = 4 * h * d
            begin = start * token + head
            for t in range(some):
                at, to = begin + t * token, t * row
                _unit(k + at, d, small, _single(1.0), keys + to)
                _unit(q + at, d, small, scale, queries + to)
                _kept(decay + at, bias + head, d, f32_at(rate + 4 * h), lower, kept + to)
                strength = sigmoid1(f32_at(beta + 4 * ((start + t) * n_heads + h)))
                f32_put(strengths + 4 * t, strength)
            _strips(
                memory + head * d, row, d, keys, queries, kept, strengths, v + begin, token, some,
                out + begin,
            )  # fmt: skip
    hold(scratch)


# ---- latent attention ----------------------------------------------------------------------------


@kernel
def attend_latent(
    q: Any, n_heads: Any, width: Any, rows: Any, first_position: Any, n_value: Any, scale: Any,
    out: Any, t0: Any, t1: Any, h0: Any, h1: Any,
) -> None:  # fmt: skip
    """Queries `t0..t1`, heads `h0..h1`; `width` and `n_value` are multiples of 16.

    The columns that are no values are summed as well and dropped: a ninth of the work, and the
    sums are `attend`'s.
    """
    mine, factor = h1 - h0, _single(scale)
    logits = np.empty(mine * (first_position + t1), dtype=np.float32)
    sums = np.empty(mine * width, dtype=np.float32)
    weights, summed = logits.ctypes.data, sums.ctypes.data
    for t in range(t0, t1):
        n = first_position + t + 1
        query = q + 4 * (t * n_heads + h0) * width
        for j in range(0, n, _KEY_ROWS):
            some = min(_KEY_ROWS, n - j)
            float_rows(rows + 4 * j * width, width, query, mine, weights + 4 * j, 4 * n, some)
        for h in range(mine):
            softmax_row(weights + 4 * h * n, n, factor, _NO_SINK)
        for c in range(0, 4 * mine * width, 64):
            store16(summed + c, splat(_single(0.0)))
        for j in range(0, n, _KEY_ROWS):
            some = min(_KEY_ROWS, n - j)
            add_values(weights + 4 * j, 4 * n, rows + 4 * j * width, some, mine, width, summed)
        for h in range(mine):
            to = out + 4 * (t * n_heads + h0 + h) * n_value
            for c in range(0, 4 * n_value, 64):
                store16(to + c, load16(summed + 4 * h * width + c))
    hold(logits)
    hold(sums)


# ---- routing -------------------------------------------------------------------------------------


@inner
def _affinities(scores: Any, n: Any, out: Any) -> None:
    whole = n // 16 * 16
    for i in range(0, 4 * whole, 64):
        store16(out + i, sigmoid16(load16(scores + i)))
    for i in range(4 * whole, 4 * n, 4):
        f32_put(out + i, first(sigmoid16(splat(f32_at(scores + i)))))


@kernel
def sigmoid_scores(scores: Any, bias: Any, n_tokens: Any, n: Any, out: Any) -> None:
    for t in range(n_tokens):
        to = out + 4 * t * n
        _affinities(scores + 4 * t * n, n, to)
        for e in range(0, 4 * n, 4):
            f32_put(to + e, f32_at(to + e) + f32_at(bias + e))


@inner
def _drop_groups(ranks: Any, n_groups: Any, n_used: Any) -> None:
    """Minus infinity for all but the `n_used` groups whose two best have the largest sum."""
    size = ranks.size // n_groups
    sums, used = np.empty(n_groups, dtype=np.float32), np.empty(n_used, dtype=np.int32)
    for g in range(n_groups):
        best, second = ranks[g * size], _single(-np.inf)
        for e in range(g * size + 1, (g + 1) * size):
            if ranks[e] > best:
                best, second = ranks[e], best
            elif ranks[e] > second:
                second = ranks[e]
        sums[g] = best + second if size > 1 else best
    choose(sums, n_used, used.ctypes.data)
    at = 0
    for g in range(n_groups):
        if at < n_used and used[at] == g:
            at += 1
        else:
            ranks[g * size : (g + 1) * size] = _single(-np.inf)


@kernel
def route_sigmoid(
    scores: Any, bias: Any, n_tokens: Any, n: Any, k: Any, normalise: Any, scale: Any,
    n_groups: Any, n_used_groups: Any, ids: Any, weights: Any,
) -> None:  # fmt: skip
    """Ids ascending and their weights."""
    scratch, ranks = np.empty(n, dtype=np.float32), np.empty(n, dtype=np.float32)
    affinities, factor = scratch.ctypes.data, _single(scale)
    for t in range(n_tokens):
        to, w = ids + 4 * t * k, weights + 4 * t * k
        _affinities(scores + 4 * t * n, n, affinities)
        for e in range(n):
            ranks[e] = f32_at(affinities + 4 * e) + f32_at(bias + 4 * e)
        if n_groups > 1:
            _drop_groups(ranks, n_groups, n_used_groups)
        choose(ranks, k, to)
        total = _single(0.0)
        for i in range(k):
            value = f32_at(affinities + 4 * i32_at(to + 4 * i))
            f32_put(w + 4 * i, value)
            total += value
        total = max(total, _single(2.0**-14)) if normalise else _single(1.0)
        for i in range(0, 4 * k, 4):
            f32_put(w + i, f32_at(w + i) / total * factor)
    hold(scratch)
