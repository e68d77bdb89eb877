"""Kernels of the layers around the products: norms, rotation, hyper-connections, routing.

All work row by row, element by element or by `dot`'s fixed order, one row never reading another.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aprefetch.kernels.cpu.jit import hold, inner, kernel
from aprefetch.kernels.cpu.matmul import dot
from aprefetch.kernels.cpu.simd import (
    f32_at,
    f32_put,
    fma16,
    i32_at,
    i32_put,
    load16,
    mul16,
    splat,
    store16,
)
from aprefetch.kernels.cpu.vmath import exp1, scale_span, sigmoid1, swiglu_span

__all__ = [
    "choose",
    "early_scores",
    "hc_enter",
    "hc_leave",
    "inverse_rms",
    "rms_norm",
    "rope",
    "rope_row",
    "route",
    "sum_experts",
    "swiglu",
    "weighted_sum",
]

_single = np.float32


@inner
def inverse_rms(x: Any, n: Any, eps: Any) -> Any:
    return _single(1.0) / math.sqrt(dot(x, x, n) / _single(n) + eps)


@kernel
def rms_norm(x: Any, weight: Any, n_rows: Any, n: Any, eps: Any, out: Any) -> None:
    """`n_rows` rows of n numbers; a weight address of 0 means all ones."""
    for t in range(n_rows):
        at = 4 * t * n
        scale_span(x + at, inverse_rms(x + at, n, _single(eps)), weight, n, out + at)


@kernel
def swiglu(gate: Any, up: Any, n: Any, limit: Any, out: Any) -> None:
    swiglu_span(gate, up, n, _single(limit), out)


@inner
def rope_row(
    x: Any, cos: Any, sin: Any, n_heads: Any, d: Any, n_pairs: Any, direction: Any
) -> None:
    """One token's heads, by its own angles."""
    for h in range(n_heads):
        at = x + 4 * ((h + 1) * d - 2 * n_pairs)
        for j in range(n_pairs):
            c, s = f32_at(cos + 4 * j), f32_at(sin + 4 * j) * direction
            a, b = f32_at(at + 8 * j), f32_at(at + 8 * j + 4)
            f32_put(at + 8 * j, a * c - b * s)
            f32_put(at + 8 * j + 4, a * s + b * c)


@kernel
def rope(
    x: Any, cos: Any, sin: Any, n_tokens: Any, n_heads: Any, d: Any, n_pairs: Any, sign: Any
) -> None:
    """Rotate the last `2 * n_pairs` of d numbers in place; `sign` -1 rotates back."""
    direction = _single(sign)
    for t in range(n_tokens):
        angles = 4 * t * n_pairs
        rope_row(
            x + 4 * t * n_heads * d, cos + angles, sin + angles, n_heads, d, n_pairs, direction
        )


@inner
def weighted_sum(weights: Any, stride: Any, n: Any, x: Any, d: Any, out: Any) -> None:
    """`sum_s weights[s] * x[s]` over n rows of d numbers, in ascending s."""
    whole = d // 16 * 16
    for i in range(0, 4 * whole, 64):
        total = mul16(splat(f32_at(weights)), load16(x + i))
        for s in range(1, n):
            total = fma16(splat(f32_at(weights + s * stride)), load16(x + 4 * s * d + i), total)
        store16(out + i, total)
    for i in range(4 * whole, 4 * d, 4):
        rest = f32_at(weights) * f32_at(x + i)
        for s in range(1, n):
            rest += f32_at(weights + s * stride) * f32_at(x + 4 * s * d + i)
        f32_put(out + i, rest)


@kernel
def sum_experts(
    parts: Any, weights: Any, n_tokens: Any, k: Any, d: Any, plus: Any, out: Any
) -> None:
    """The weighted sums; with an address `plus`, those numbers are added last."""
    for t in range(n_tokens):
        to = out + 4 * t * d
        weighted_sum(weights + 4 * t * k, 4, k, parts + 4 * t * k * d, d, to)
        if plus != 0:
            for i in range(0, 4 * d, 4):
                f32_put(to + i, f32_at(to + i) + f32_at(plus + 4 * t * d + i))


@inner
def _sinkhorn(c: Any, n: Any, eps: Any, n_iterations: Any) -> None:
    """Row softmax, then columns and rows normalised by turns, columns first and last."""
    for a in range(n):
        row = c + 4 * a * n
        top = f32_at(row)
        for b in range(1, n):
            top = max(top, f32_at(row + 4 * b))
        total = _single(0.0)
        for b in range(n):
            value = exp1(f32_at(row + 4 * b) - top)
            f32_put(row + 4 * b, value)
            total += value
        for b in range(n):
            f32_put(row + 4 * b, f32_at(row + 4 * b) / total + eps)
    for i in range(n_iterations):
        if i > 0:
            for a in range(n):
                _normalise(c + 4 * a * n, 4, n, eps)
        for b in range(n):
            _normalise(c + 4 * b, 4 * n, n, eps)


@inner
def _normalise(x: Any, stride: Any, n: Any, eps: Any) -> None:
    total = _single(0.0)
    for i in range(n):
        total += f32_at(x + i * stride)
    total += eps
    for i in range(n):
        f32_put(x + i * stride, f32_at(x + i * stride) / total)


@inner
def _mixes(fn: Any, x: Any, n: Any, n_rows: Any, eps: Any, out: Any) -> None:
    """`fn` times the normed streams; the norm's factor is applied to the products."""
    factor = inverse_rms(x, n, eps)
    for r in range(n_rows):
        f32_put(out + 4 * r, dot(fn + 4 * r * n, x, n) * factor)


@kernel
def hc_enter(
    fn: Any, n_rows: Any, streams: Any, n_tokens: Any, n_streams: Any, d: Any, scale: Any,
    base: Any, norm: Any, eps: Any, hc_eps: Any, n_iterations: Any, out: Any, post: Any, comb: Any,
) -> None:  # fmt: skip
    """Collapse streams by a float32 `fn`; with `n_rows` above S also make `post` and `comb`.

    A norm address of 0 means that the result stays unnormed.
    """
    n, eps1, eps2 = n_streams * d, _single(eps), _single(hc_eps)
    mixes, collapsed = np.empty(n_rows, dtype=np.float32), np.empty(d, dtype=np.float32)
    m, h, size = mixes.ctypes.data, collapsed.ctypes.data, 4 * n_streams
    for t in range(n_tokens):
        x = streams + 4 * t * n
        _mixes(fn, x, n, n_rows, eps1, m)
        for s in range(0, size, 4):
            f32_put(m + s, sigmoid1(f32_at(m + s) * f32_at(scale) + f32_at(base + s)) + eps2)
        if norm != 0:
            weighted_sum(m, 4, n_streams, x, d, h)
            scale_span(h, inverse_rms(h, d, eps1), norm, d, out + 4 * t * d)
        else:
            weighted_sum(m, 4, n_streams, x, d, out + 4 * t * d)
        if n_rows > n_streams:
            for s in range(0, size, 4):
                mixed = f32_at(m + size + s) * f32_at(scale + 4) + f32_at(base + size + s)
                f32_put(post + t * size + s, _single(2.0) * sigmoid1(mixed))
            c = comb + t * size * n_streams
            for i in range(0, size * n_streams, 4):
                mixed = f32_at(m + 2 * size + i) * f32_at(scale + 8)
                f32_put(c + i, mixed + f32_at(base + 2 * size + i))
            _sinkhorn(c, n_streams, eps2, n_iterations)
    hold(mixes)
    hold(collapsed)


@kernel
def hc_leave(
    y: Any, streams: Any, post: Any, comb: Any, n_tokens: Any, n_streams: Any, d: Any, out: Any
) -> None:
    whole, size = d // 16 * 16, 4 * n_streams
    for t in range(n_tokens):
        y_row, x = y + 4 * t * d, streams + 4 * t * n_streams * d
        for b in range(n_streams):
            p, c = f32_at(post + t * size + 4 * b), comb + t * size * n_streams + 4 * b
            to = out + 4 * (t * n_streams + b) * d
            for i in range(0, 4 * whole, 64):
                total = mul16(splat(p), load16(y_row + i))
                for a in range(n_streams):
                    total = fma16(splat(f32_at(c + a * size)), load16(x + 4 * a * d + i), total)
                store16(to + i, total)
            for i in range(4 * whole, 4 * d, 4):
                rest = p * f32_at(y_row + i)
                for a in range(n_streams):
                    rest += f32_at(c + a * size) * f32_at(x + 4 * a * d + i)
                f32_put(to + i, rest)


@inner
def _score(x: Any) -> Any:
    """sqrt(softplus(x))."""
    if x > _single(20.0):
        return math.sqrt(x)
    return math.sqrt(_single(math.log1p(math.exp(x))))


@kernel
def early_scores(scores: Any, bias: Any, n_tokens: Any, n: Any, out: Any) -> None:
    for t in range(n_tokens):
        for e in range(n):
            value = _score(f32_at(scores + 4 * (t * n + e)))
            if bias != 0:
                value += f32_at(bias + 4 * e)
            f32_put(out + 4 * (t * n + e), value)


@inner
def choose(ranks: Any, k: Any, ids: Any) -> None:
    """The k largest of `ranks`, ties to the lower index, written to `ids` in ascending order."""
    taken = np.zeros(ranks.size, dtype=np.uint8)
    for _ in range(k):
        best = -1
        for e in range(ranks.size):
            # Not "greater" alone: a rank that is not a number must still let one be chosen.
            if taken[e] == 0 and (best < 0 or ranks[e] > ranks[best]):
                best = e
        taken[best] = 1
    at = 0
    for e in range(ranks.size):
        if taken[e] != 0:
            i32_put(ids + 4 * at, e)
            at += 1


@inner
def _sort_ids(ids: Any, k: Any, out: Any) -> None:
    for i in range(k):
        value = i32_at(ids + 4 * i)
        at = i
        while at > 0 and i32_at(out + 4 * at - 4) > value:
            i32_put(out + 4 * at, i32_at(out + 4 * at - 4))
            at -= 1
        i32_put(out + 4 * at, value)


@kernel
def route(
    scores: Any, bias: Any, chosen: Any, n_tokens: Any, n: Any, k: Any, normalise: Any, scale: Any,
    ids: Any, weights: Any,
) -> Any:  # fmt: skip
    """Ids ascending and their weights; returns a row whose chosen ids are out of range, or -1."""
    ranks, factor = np.empty(n, dtype=np.float32), _single(scale)
    for t in range(n_tokens):
        row, to, w = scores + 4 * t * n, ids + 4 * t * k, weights + 4 * t * k
        if chosen != 0:
            _sort_ids(chosen + 4 * t * k, k, to)
            if i32_at(to) < 0 or i32_at(to + 4 * k - 4) >= n:
                return t
        else:
            for e in range(n):
                ranks[e] = _score(f32_at(row + 4 * e))
                if bias != 0:
                    ranks[e] += f32_at(bias + 4 * e)
            choose(ranks, k, to)
        total = _single(0.0)
        for i in range(k):
            value = _score(f32_at(row + 4 * i32_at(to + 4 * i)))
            f32_put(w + 4 * i, value)
            total += value
        total = max(total, _single(2.0**-14)) if normalise else _single(1.0)
        for i in range(k):
            f32_put(w + 4 * i, f32_at(w + 4 * i) / total * factor)
    return -1
