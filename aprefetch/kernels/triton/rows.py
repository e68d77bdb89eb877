"""Row-wise kernels: norms, rotary embedding, gates, hyper-connections, routing, pooling.

One program owns one row (or a slice of one that no sum runs across), so a row's result cannot
depend on its neighbours. Where a sum of products could be fused in more than one way, it is written
as `fma`: variants of a kernel must agree to the last bit, and compilers choose as they like.
Kernels that need a position take it from device memory when they are part of a captured graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "compress_kernel",
    "hc_leave_kernel",
    "hc_mix_kernel",
    "hc_weigh_kernel",
    "norm_kernel",
    "rope_kernel",
    "route_kernel",
    "sum_experts_kernel",
    "swiglu_kernel",
]


@triton.jit
def norm_kernel(x_ptr, weight_ptr, out_ptr, eps, N, WEIGHTED: tl.constexpr, B: tl.constexpr):
    """RMS norm of row `program_id(0)`; N is at most B."""
    row = tl.program_id(0).to(tl.int64) * N
    i = tl.arange(0, B)
    inside = i < N
    x = tl.load(x_ptr + row + i, mask=inside, other=0.0)
    y = x / tl.sqrt_rn(tl.sum(x * x, axis=0) / N + eps)
    if WEIGHTED:
        y *= tl.load(weight_ptr + i, mask=inside, other=0.0)
    tl.store(out_ptr + row + i, y, mask=inside)


@triton.jit
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, H, D, PAIRS, sign, step, B: tl.constexpr
):  # fmt: skip
    """Rotate the trailing pairs of head `program_id(1)` of row `program_id(0)` in place."""
    t, h = tl.program_id(0), tl.program_id(1)
    j = tl.arange(0, B)
    inside = j < PAIRS
    at = x_ptr + (t.to(tl.int64) * H + h) * D + (D - 2 * PAIRS) + 2 * j
    a = tl.load(at, mask=inside, other=0.0)
    b = tl.load(at + 1, mask=inside, other=0.0)
    c = tl.load(cos_ptr + t * step + j, mask=inside, other=0.0)
    s = tl.load(sin_ptr + t * step + j, mask=inside, other=0.0) * sign
    tl.store(at, tl.fma(a, c, -(b * s)), mask=inside)
    tl.store(at + 1, tl.fma(a, s, b * c), mask=inside)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, limit, n, B: tl.constexpr):
    """Elementwise `silu(min(gate, limit)) * clamp(up, -limit, limit)`."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = i < n
    g = tl.load(gate_ptr + i, mask=inside, other=0.0)
    u = tl.load(up_ptr + i, mask=inside, other=0.0)
    if limit > 0:
        g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_ptr + i, g / (1.0 + tl.exp(-g)) * u, mask=inside)


@triton.jit
def sum_experts_kernel(parts_ptr, weights_ptr, out_ptr, K, D, B: tl.constexpr):
    """`out[t] = sum_k weights[t, k] parts[t, k]`, k ascending; grid (T, slices of D)."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * B + tl.arange(0, B)
    inside = i < D
    total = tl.load(weights_ptr + t * K) * tl.load(
        parts_ptr + t * K * D + i, mask=inside, other=0.0
    )
    for k in range(1, K):
        w = tl.load(weights_ptr + t * K + k)
        p = tl.load(parts_ptr + (t * K + k) * D + i, mask=inside, other=0.0)
        total = tl.fma(w, p, total)
    tl.store(out_ptr + t * D + i, total, mask=inside)


# Hyper-connections


@triton.jit
def hc_mix_kernel(
    x_ptr, fn_ptr, part_ptr, N, M, N_PARTS: tl.constexpr, B: tl.constexpr, MB: tl.constexpr
):
    """Slice `program_id(1)` of `fn [M, N]` times row `program_id(0)`, and of its square sum.

    `part [T, N_PARTS, MB]`: M products, then the sum of squares at M.
    """
    t, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = p * B + tl.arange(0, B)
    x = tl.load(x_ptr + t * N + i, mask=i < N, other=0.0)
    to = part_ptr + (t * N_PARTS + p) * MB
    tl.store(to + M, tl.sum(x * x, axis=0))
    for m in range(0, M):
        w = tl.load(fn_ptr + m * N + i, mask=i < N, other=0.0)
        tl.store(to + m, tl.sum(x * w, axis=0))


@triton.jit
def _hc_sums(part, N, eps, N_PARTS: tl.constexpr, PB: tl.constexpr, MB: tl.constexpr):
    """The mixes of one row: products over the root mean square, `[MB]`."""
    p = tl.arange(0, PB)[:, None]
    m = tl.arange(0, MB)[None, :]
    table = tl.load(part + p * MB + m, mask=p < N_PARTS, other=0.0)
    return tl.sum(table, axis=0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def hc_weigh_kernel(
    x_ptr, part_ptr, scale_ptr, base_ptr, norm_ptr, out_ptr, post_ptr, comb_ptr,
    D, M, eps, hc_eps, n_iterations,
    S: tl.constexpr, MIXES: tl.constexpr, NORMED: tl.constexpr, N_PARTS: tl.constexpr,
    PB: tl.constexpr, MB: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Collapse row `program_id(0)` of `x [T, S, D]` by its mixes; see `Ops.hc_enter`.

    `MIXES`: also write `post [T, S]` and `comb [T, S, S]`. `NORMED`: RMS norm of the result.
    """
    t = tl.program_id(0).to(tl.int64)
    part = part_ptr + t * N_PARTS * MB
    sums = _hc_sums(part, S * D, eps, N_PARTS, PB, MB)
    m = tl.arange(0, MB)
    squares = tl.sum(tl.where(m == M, sums, 0.0), axis=0)
    mixes = sums / tl.sqrt_rn(squares / (S * D) + eps)
    base = tl.load(base_ptr + m, mask=m < M, other=0.0)
    scale0 = tl.load(scale_ptr)
    pre = _sigmoid(mixes * scale0 + base) + hc_eps
    if MIXES:
        post = 2 * _sigmoid(mixes * tl.load(scale_ptr + 1) + base)
        tl.store(post_ptr + t * S + m - S, post, mask=(m >= S) & (m < 2 * S))
        raw = mixes * tl.load(scale_ptr + 2) + base
        # The square matrix as [source, destination], gathered by comparison.
        a = tl.arange(0, S)[:, None]
        b = tl.arange(0, S)[None, :]
        index = 2 * S + a * S + b
        hit = index[:, :, None] == m[None, None, :]
        c = tl.sum(tl.where(hit, raw[None, None, :], 0.0), axis=2)
        c = tl.exp(c - tl.max(c, axis=1)[:, None])
        c = c / tl.sum(c, axis=1)[:, None] + hc_eps
        c = c / (hc_eps + tl.sum(c, axis=0)[None, :])
        for _ in range(n_iterations - 1):
            c = c / (hc_eps + tl.sum(c, axis=1)[:, None])
            c = c / (hc_eps + tl.sum(c, axis=0)[None, :])
        tl.store(comb_ptr + t * S * S + a * S + b, c)
    i = tl.arange(0, B)
    inside = i < D
    h = tl.zeros((B,), tl.float32)
    for s in tl.static_range(S):
        weight = tl.sum(tl.where(m == s, pre, 0.0), axis=0)
        h += weight * tl.load(x_ptr + (t * S + s) * D + i, mask=inside, other=0.0)
    if NORMED:
        h = h / tl.sqrt_rn(tl.sum(h * h, axis=0) / D + eps)
        h *= tl.load(norm_ptr + i, mask=inside, other=0.0)
    tl.store(out_ptr + t * D + i, h, mask=inside)


@triton.jit
def hc_leave_kernel(
    y_ptr, x_ptr, post_ptr, comb_ptr, out_ptr, parts_ptr, weights_ptr, D,
    S: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """`out[t, b] = post[t, b] y[t] + sum_a comb[t, a, b] x[t, a]`; grid (T, slices of D).

    With `K > 0` the weighted sum of `parts [T, K, D]` is added to y first.
    """
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * B + tl.arange(0, B)
    inside = i < D
    y = tl.load(y_ptr + t * D + i, mask=inside, other=0.0)
    if K > 0:
        total = tl.load(weights_ptr + t * K) * tl.load(
            parts_ptr + t * K * D + i, mask=inside, other=0.0
        )
        for k in range(1, K):
            w = tl.load(weights_ptr + t * K + k)
            p = tl.load(parts_ptr + (t * K + k) * D + i, mask=inside, other=0.0)
            total = tl.fma(w, p, total)
        y = total + y
    for b in tl.static_range(S):
        total = tl.load(post_ptr + t * S + b) * y
        for a in tl.static_range(S):
            c = tl.load(comb_ptr + t * S * S + a * S + b)
            x = tl.load(x_ptr + (t * S + a) * D + i, mask=inside, other=0.0)
            total = tl.fma(c, x, total)
        tl.store(out_ptr + (t * S + b) * D + i, total, mask=inside)


# Routing


@triton.jit
def affinity(z):
    """sqrt(softplus(z)): what the router ranks and weighs by."""
    e = tl.exp(tl.minimum(z, 20.0))
    u = 1.0 + e  # log1p(e), exact also where adding 1 rounds e away
    soft = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.sqrt_rn(tl.where(z > 20.0, z, soft))


@triton.jit
def route_kernel(
    scores_ptr, bias_ptr, chosen_ptr, ids_ptr, weights_ptr, mail_ptr, counter_ptr, E, scale,
    smallest,
    K: tl.constexpr, KB: tl.constexpr, B: tl.constexpr, BIASED: tl.constexpr,
    GIVEN: tl.constexpr, NORMALISE: tl.constexpr, MAIL: tl.constexpr,
):  # fmt: skip
    """Experts of row `program_id(0)`; see `Ops.route`. Ids come out ascending.

    With `MAIL` the ids also go to `mail [K]` (int64, readable by the host), each with the step
    counter in its upper half, so that the host knows a new number from an old one.
    """
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, B)
    k = tl.arange(0, KB)
    z = tl.load(scores_ptr + t * E + i, mask=i < E, other=0.0)
    affinities = affinity(z)
    picked = i < 0
    if GIVEN:
        for n in tl.static_range(K):
            picked = picked | (i == tl.load(chosen_ptr + t * K + n))
    else:
        ranked = affinities
        if BIASED:
            ranked += tl.load(bias_ptr + i, mask=i < E, other=0.0)
        left = tl.where(i < E, ranked, float("-inf"))
        for _ in tl.static_range(K):
            best = tl.max(left, axis=0)
            at = tl.min(tl.where(left == best, i, B), axis=0)
            picked = picked | (i == at)
            left = tl.where(i == at, float("-inf"), left)
    place = tl.cumsum(picked.to(tl.int32), axis=0) - 1
    ids = tl.sum(tl.where(picked[None, :] & (place[None, :] == k[:, None]), i[None, :], 0), axis=1)
    weight = tl.sum(
        tl.where(picked[None, :] & (place[None, :] == k[:, None]), affinities[None, :], 0.0), axis=1
    )
    if NORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, axis=0), smallest)
    tl.store(ids_ptr + t * K + k, ids, mask=k < K)
    tl.store(weights_ptr + t * K + k, weight * scale, mask=k < K)
    if MAIL:
        stamp = tl.load(counter_ptr) << 32
        tl.store(mail_ptr + k, stamp | ids.to(tl.int64), mask=k < K)


# Compressed rows


@triton.jit
def compress_kernel(
    kv_ptr, gate_ptr, norm_ptr, cos_ptr, sin_ptr, out_ptr, position_ptr,
    first, has_previous, modulo, stride, out_first, eps, D, PAIRS,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, DECODE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Pool one block of tokens into a row, norm and rotate it; see `Ops.compress`.

    Token n of the caches lies at row `n % modulo`. With `DECODE` the position is read from
    memory, `first` is ignored and nothing happens unless it ends a block; `cos`, `sin` are then
    whole tables.
    """
    block = tl.program_id(0)
    if DECODE:
        position = tl.load(position_ptr)
        if (position + 1) % RATIO != 0:
            return
        block = (position // RATIO).to(tl.int32)
        start = position + 1 - RATIO
        previous = block > 0
        angle = start * PAIRS
        row = block
    else:
        start = (first + block * RATIO).to(tl.int64)
        previous = (block > 0) | (has_previous != 0)
        angle = (block * PAIRS).to(tl.int64)
        row = block + out_first
    i = tl.arange(0, B)
    inside = i < D
    wide = 0
    if OVERLAP:
        wide = D
    top = tl.full((B,), float("-inf"), tl.float32)
    for n in range(0, RATIO):
        at = ((start + n) % modulo) * stride + wide + i
        top = tl.maximum(top, tl.load(gate_ptr + at, mask=inside, other=0.0))
    if OVERLAP:
        for n in range(0, RATIO):
            at = ((start - RATIO + n + modulo) % modulo) * stride + i
            g = tl.load(gate_ptr + at, mask=inside & previous, other=float("-inf"))
            top = tl.maximum(top, g)
    total = tl.zeros((B,), tl.float32)
    pooled = tl.zeros((B,), tl.float32)
    if OVERLAP:
        for n in range(0, RATIO):
            at = ((start - RATIO + n + modulo) % modulo) * stride + i
            g = tl.load(gate_ptr + at, mask=inside & previous, other=float("-inf"))
            w = tl.exp(g - top)
            total += w
            value = tl.load(kv_ptr + at, mask=inside & previous, other=0.0)
            pooled = tl.fma(w, value, pooled)
    for n in range(0, RATIO):
        at = ((start + n) % modulo) * stride + wide + i
        w = tl.exp(tl.load(gate_ptr + at, mask=inside, other=0.0) - top)
        total += w
        pooled = tl.fma(w, tl.load(kv_ptr + at, mask=inside, other=0.0), pooled)
    pooled = tl.where(inside, pooled / total, 0.0)
    r = 1.0 / tl.sqrt_rn(tl.sum(pooled * pooled, axis=0) / D + eps)
    out = out_ptr + row.to(tl.int64) * D
    plain = D - 2 * PAIRS
    normed = pooled * r * tl.load(norm_ptr + i, mask=inside, other=0.0)
    # Rotation pairs neighbours: each half of a pair is rebuilt from both.
    even, odd = tl.split(tl.reshape(normed, (B // 2, 2)))
    j = tl.arange(0, B // 2)
    rotated = (2 * j >= plain) & (2 * j < D)
    pair = angle + (j - plain // 2)
    c = tl.load(cos_ptr + pair, mask=rotated, other=1.0)
    s = tl.load(sin_ptr + pair, mask=rotated, other=0.0)
    tl.store(out + 2 * j, tl.fma(even, c, -(odd * s)), mask=2 * j < D)
    tl.store(out + 2 * j + 1, tl.fma(even, s, odd * c), mask=2 * j < D)
