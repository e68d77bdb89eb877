"""Kernels of the attention part: softmax over window and compressed rows, pooling, the indexer.

Keys are float32, so their products are `matmul`'s for float32 rows; sums over keys run in ascending
order, window first. The head dimension is a multiple of 16 (the caller looks after others).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aprefetch.kernels.cpu.jit import hold, inner, kernel
from aprefetch.kernels.cpu.matmul import dot, float_rows
from aprefetch.kernels.cpu.simd import (
    add16,
    div16,
    f32_at,
    f32_put,
    fma16,
    hmax,
    hsum,
    i32_at,
    i32_put,
    load16,
    max16,
    mul16,
    splat,
    store16,
    sub16,
)
from aprefetch.kernels.cpu.vmath import exp1, exp16, scale_span

__all__ = ["add_values", "attend", "compress", "index_topk", "softmax_row"]

_single = np.float32


@inner
def softmax_row(logits: Any, n: Any, scale: Any, sink: Any) -> None:
    """`logits` (n of them) to weights in place; the sink takes part and is dropped."""
    whole = n // 16 * 16
    top = sink
    if whole > 0:
        highest = splat(sink)
        for i in range(0, 4 * whole, 64):
            scaled = mul16(load16(logits + i), splat(scale))
            store16(logits + i, scaled)
            highest = max16(scaled, highest)
        top = hmax(highest)
    for i in range(4 * whole, 4 * n, 4):
        scaled_one = f32_at(logits + i) * scale
        f32_put(logits + i, scaled_one)
        top = max(scaled_one, top)
    total, rest, tops = splat(_single(0.0)), exp1(sink - top), splat(top)
    for i in range(0, 4 * whole, 64):
        e = exp16(sub16(load16(logits + i), tops))
        store16(logits + i, e)
        total = add16(total, e)
    for i in range(4 * whole, 4 * n, 4):
        e1 = exp1(f32_at(logits + i) - top)
        f32_put(logits + i, e1)
        rest += e1
    factor = _single(1.0) / (hsum(total) + rest)
    scale_span(logits, factor, 0, n, logits)


@inner
def _add_one_head(weights: Any, keys: Any, n: Any, d: Any, out: Any, done: Any) -> None:
    """The same for one head, from byte `done` of its row on."""
    for c in range(done, 4 * d, 64):
        a = load16(out + c)
        for j in range(n):
            a = fma16(splat(f32_at(weights + 4 * j)), load16(keys + 4 * j * d + c), a)
        store16(out + c, a)


@inner
def _add_four_heads(weights: Any, stride: Any, keys: Any, n: Any, d: Any, out: Any) -> None:
    """`out [4, d] += weights [4, n] @ keys [n, d]`, keys in ascending order."""
    w1, w2, w3 = weights + stride, weights + 2 * stride, weights + 3 * stride
    pairs = d // 32 * 128
    for c in range(0, pairs, 128):
        o0, o1, o2, o3 = out + c, out + 4 * d + c, out + 8 * d + c, out + 12 * d + c
        a0, a1, a2, a3 = load16(o0), load16(o1), load16(o2), load16(o3)
        b0, b1, b2, b3 = load16(o0 + 64), load16(o1 + 64), load16(o2 + 64), load16(o3 + 64)
        for j in range(n):
            at = keys + 4 * j * d + c
            p, q = load16(at), load16(at + 64)
            w = splat(f32_at(weights + 4 * j))
            a0, b0 = fma16(w, p, a0), fma16(w, q, b0)
            w = splat(f32_at(w1 + 4 * j))
            a1, b1 = fma16(w, p, a1), fma16(w, q, b1)
            w = splat(f32_at(w2 + 4 * j))
            a2, b2 = fma16(w, p, a2), fma16(w, q, b2)
            w = splat(f32_at(w3 + 4 * j))
            a3, b3 = fma16(w, p, a3), fma16(w, q, b3)
        store16(o0, a0)
        store16(o1, a1)
        store16(o2, a2)
        store16(o3, a3)
        store16(o0 + 64, b0)
        store16(o1 + 64, b1)
        store16(o2 + 64, b2)
        store16(o3 + 64, b3)
    for h in range(4):
        _add_one_head(weights + h * stride, keys, n, d, out + 4 * h * d, pairs)


@inner
def add_values(
    weights: Any, stride: Any, keys: Any, n: Any, n_heads: Any, d: Any, out: Any
) -> None:
    """`out [H, d] += weights [H, n] @ keys [n, d]`; per element the same order either way."""
    fours = n_heads // 4 * 4
    for h in range(0, fours, 4):
        _add_four_heads(weights + h * stride, stride, keys, n, d, out + 4 * h * d)
    for h in range(fours, n_heads):
        _add_one_head(weights + h * stride, keys, n, d, out + 4 * h * d, 0)


@inner
def _gather(rows: Any, selected: Any, k: Any, d: Any, to: Any) -> Any:
    """Copy the selected rows together; returns how many there are before the first -1."""
    for i in range(k):
        row = i32_at(selected + 4 * i)
        if row < 0:
            return i
        for c in range(0, 4 * d, 64):
            store16(to + 4 * i * d + c, load16(rows + 4 * row * d + c))
    return k


@kernel
def attend(
    q: Any, n_heads: Any, d: Any, keys: Any, window_first: Any, n_keys: Any, first_position: Any,
    window: Any, rows: Any, n_rows: Any, n_visible: Any, selected: Any, k: Any, sinks: Any,
    scale: Any, out: Any, t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Queries `t0..t1`; absent `rows`, `n_visible` and `selected` are 0."""
    factor = _single(scale)
    most = min(window, n_keys) + (k if selected != 0 else n_rows)
    logits = np.empty(n_heads * most, dtype=np.float32)
    picked = np.empty(k * d if selected != 0 else 1, dtype=np.float32)
    weights = logits.ctypes.data
    for t in range(t0, t1):
        query, to = q + 4 * t * n_heads * d, out + 4 * t * n_heads * d
        p = first_position + t - window_first
        low = max(0, p - window + 1)
        n_window = max(0, min(p + 1, n_keys) - low)
        extra, n_extra = rows, 0
        if selected != 0:
            extra = picked.ctypes.data
            n_extra = _gather(rows, selected + 4 * t * k, k, d, extra)
        elif rows != 0:
            n_extra = min(n_rows, i32_at(n_visible + 4 * t))
        n = n_window + n_extra
        float_rows(keys + 4 * low * d, d, query, n_heads, weights, 4 * n, n_window)
        float_rows(extra, d, query, n_heads, weights + 4 * n_window, 4 * n, n_extra)
        zero = splat(_single(0.0))
        for h in range(n_heads):
            softmax_row(weights + 4 * h * n, n, factor, f32_at(sinks + 4 * h))
            for c in range(0, 4 * d, 64):
                store16(to + 4 * h * d + c, zero)
        add_values(weights, 4 * n, keys + 4 * low * d, n_window, n_heads, d, to)
        add_values(weights + 4 * n_window, 4 * n, extra, n_extra, n_heads, d, to)
    hold(logits)
    hold(picked)


@kernel
def compress(
    kv: Any, gate: Any, width: Any, first: Any, n_blocks: Any, ratio: Any, d: Any,
    has_previous: Any, norm: Any, cos: Any, sin: Any, n_pairs: Any, eps: Any, out: Any,
) -> None:  # fmt: skip
    """Pool, norm and rotate; `width` is d, or 2 * d where blocks overlap."""
    bound = _single(eps)
    for b in range(n_blocks):
        row = out + 4 * b * d
        start = first + b * ratio
        overlaps = width > d and (b > 0 or has_previous != 0)
        n_before = ratio if overlaps else 0
        own = 4 * (width - d)
        for c in range(0, 4 * d, 64):
            # Candidate i is token start + i; those before the block show their first half.
            top = load16(gate + 4 * start * width + own + c)
            for i in range(-n_before, ratio):
                at = 4 * (start + i) * width + c + (0 if i < 0 else own)
                top = max16(load16(gate + at), top)
            total = pooled = splat(_single(0.0))
            for i in range(-n_before, ratio):
                at = 4 * (start + i) * width + c + (0 if i < 0 else own)
                e = exp16(sub16(load16(gate + at), top))
                total = add16(total, e)
                pooled = fma16(e, load16(kv + at), pooled)
            store16(row + c, div16(pooled, total))
        inverse = _single(1.0) / math.sqrt(dot(row, row, d) / _single(d) + bound)
        scale_span(row, inverse, norm, d, row)
        tail = row + 4 * (d - 2 * n_pairs)
        for j in range(n_pairs):
            c1, s1 = f32_at(cos + 4 * (b * n_pairs + j)), f32_at(sin + 4 * (b * n_pairs + j))
            x, y = f32_at(tail + 8 * j), f32_at(tail + 8 * j + 4)
            f32_put(tail + 8 * j, x * c1 - y * s1)
            f32_put(tail + 8 * j + 4, x * s1 + y * c1)


@inner
def _ordered(bits: Any) -> Any:
    """float32 bits to an integer that sorts as the numbers do; both zeros are one."""
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


@inner
def _select(scores: Any, n: Any, k: Any, out: Any) -> None:
    """The k best of n scores, ascending, ties to the lower index; bisection on the key."""
    keys = np.empty(n, dtype=np.int32)
    for i in range(n):
        keys[i] = _ordered(i32_at(scores + 4 * i))
    low, high = -0x7F800001, 0x7FC00001  # at least k keys are >= low, fewer are >= high
    while high - low > 1:
        middle = (low + high) >> 1
        count = 0
        for i in range(n):
            count += 1 if keys[i] >= middle else 0
        if count >= k:
            low = middle
        else:
            high = middle
    above = 0
    for i in range(n):
        above += 1 if keys[i] > low else 0
    ties, at = k - above, 0
    for i in range(n):
        if at == k:
            break
        if keys[i] > low:
            i32_put(out + 4 * at, i)
            at += 1
        elif keys[i] == low and ties > 0:
            i32_put(out + 4 * at, i)
            at += 1
            ties -= 1
    for i in range(at, k):
        i32_put(out + 4 * i, -1)


@kernel
def index_topk(
    q: Any, n_heads: Any, d: Any, head_weights: Any, keys: Any, n_rows: Any, n_visible: Any, k: Any,
    out: Any, t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Queries `t0..t1`: rows by their weighted positive products."""
    products = np.empty(n_heads * n_rows, dtype=np.float32)
    zero = splat(_single(0.0))
    p = products.ctypes.data
    for t in range(t0, t1):
        n, to = min(n_rows, i32_at(n_visible + 4 * t)), out + 4 * t * k
        if n <= k:
            for i in range(k):
                i32_put(to + 4 * i, i if i < n else -1)
            continue
        float_rows(keys, d, q + 4 * t * n_heads * d, n_heads, p, 4 * n, n)
        whole, w = n // 16 * 16, head_weights + 4 * t * n_heads
        for i in range(0, 4 * whole, 64):
            total = zero
            for h in range(n_heads):
                positive = max16(load16(p + 4 * h * n + i), zero)
                total = fma16(splat(f32_at(w + 4 * h)), positive, total)
            store16(p + i, total)
        for i in range(4 * whole, 4 * n, 4):
            total = zero
            for h in range(n_heads):
                positive = max16(splat(f32_at(p + 4 * h * n + i)), zero)
                total = fma16(splat(f32_at(w + 4 * h)), positive, total)
            f32_put(p + i, hmax(total))
        _select(p, n, k, to)
    hold(products)
