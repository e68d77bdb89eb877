"""Exponentials and spans: what several kernels need beyond products.

`exp16` errs by at most 2 units in the last place on [-87, 88] and saturates outside, `tanh16` and
`softplus16` by a few anywhere, near zero as well; a NaN stays one. Spans are element by element,
and a tail shorter than a vector goes through the same lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aprefetch.kernels.cpu.jit import inner
from aprefetch.kernels.cpu.simd import (
    add16,
    bits_f32,
    div16,
    f32_at,
    f32_put,
    first,
    fma16,
    iadd,
    isplat,
    load16,
    max16,
    min16,
    mul16,
    round16,
    shl,
    splat,
    store16,
    sub16,
    to_i32,
)

__all__ = [
    "exp1",
    "exp16",
    "scale_span",
    "sigmoid16",
    "sigmoid1",
    "situ_span",
    "softplus16",
    "swiglu_span",
    "tanh16",
]

_single = np.float32

# (e ** r - 1 - r) / r ** 2 on [-ln 2 / 2, ln 2 / 2]: off by 1.3e-7 of itself.
_P0, _P1, _P2, _P3, _P4 = (
    _single(c) for c in (0.5, 0.16666577, 0.041666556, 0.008363179, 0.0013926184)
)
# (atanh(s) / s - 1) / s ** 2 over s ** 2 on [0, 1/9]: off by 4.1e-7 of itself.
_Q0, _Q1, _Q2, _Q3 = (_single(c) for c in (0.3333332, 0.2000378, 0.1411831, 0.1342575))


@inner
def exp16(x: Any) -> Any:
    """e ** x in each lane: 2 ** n times a polynomial on [-ln 2 / 2, ln 2 / 2]."""
    x = max16(splat(_single(-87.33)), min16(splat(_single(88.37)), x))
    n = round16(mul16(x, splat(_single(1.4426950408889634))))
    # ln 2 in two parts, the first with few enough bits that its product with n is exact.
    r = fma16(n, splat(_single(-0.693359375)), x)
    r = fma16(n, splat(_single(2.12194440e-4)), r)
    p = fma16(splat(_single(1.9875691500e-4)), r, splat(_single(1.3981999507e-3)))
    p = fma16(p, r, splat(_single(8.3334519073e-3)))
    p = fma16(p, r, splat(_single(4.1665795894e-2)))
    p = fma16(p, r, splat(_single(1.6666665459e-1)))
    p = fma16(p, r, splat(_single(5.0000001201e-1)))
    p = add16(fma16(p, mul16(r, r), r), splat(_single(1.0)))
    return mul16(p, bits_f32(shl(iadd(to_i32(n), isplat(127)), 23)))


@inner
def exp1(x: Any) -> Any:
    return first(exp16(splat(x)))


@inner
def sigmoid16(x: Any) -> Any:
    one = splat(_single(1.0))
    return div16(one, add16(one, exp16(sub16(splat(_single(0.0)), x))))


@inner
def sigmoid1(x: Any) -> Any:
    return first(sigmoid16(splat(x)))


@inner
def tanh16(x: Any) -> Any:
    """`m / (m + 2)` for `m = e ** 2x - 1`, which loses nothing near zero."""
    x = max16(splat(_single(-43.0)), min16(splat(_single(43.0)), x))
    x = add16(x, x)
    n = round16(mul16(x, splat(_single(1.4426950408889634))))
    r = fma16(n, splat(_single(-0.693359375)), x)
    r = fma16(n, splat(_single(2.12194440e-4)), r)
    p = fma16(splat(_P4), r, splat(_P3))
    p = fma16(p, r, splat(_P2))
    p = fma16(p, r, splat(_P1))
    p = fma16(p, r, splat(_P0))
    p = fma16(p, mul16(r, r), r)
    power = bits_f32(shl(iadd(to_i32(n), isplat(127)), 23))
    m = fma16(power, p, sub16(power, splat(_single(1.0))))
    return div16(m, add16(m, splat(_single(2.0))))


@inner
def softplus16(x: Any) -> Any:
    """`log(1 + e ** x)` as `max(x, 0) + log(1 + u)` with `u = e ** -|x|`, by the atanh series."""
    zero = splat(_single(0.0))
    negative = sub16(zero, x)
    u = exp16(min16(negative, x))
    s = div16(u, add16(u, splat(_single(2.0))))
    z = mul16(s, s)
    p = fma16(splat(_Q3), z, splat(_Q2))
    p = fma16(p, z, splat(_Q1))
    p = fma16(p, z, splat(_Q0))
    p = fma16(mul16(p, z), s, s)
    return add16(max16(zero, x), add16(p, p))


@inner
def _situ16(gate: Any, up: Any, beta: Any, linear: Any) -> Any:
    if linear > _single(0.0):
        up = mul16(splat(linear), tanh16(div16(up, splat(linear))))
    bounded = mul16(splat(beta), tanh16(div16(gate, splat(beta))))
    return mul16(mul16(bounded, sigmoid16(gate)), up)


@inner
def situ_span(gate: Any, up: Any, n: Any, beta: Any, linear: Any, out: Any) -> None:
    """`Ops.situ` for n numbers; `out` may be one of the inputs."""
    whole = n // 16 * 16
    for i in range(0, 4 * whole, 64):
        store16(out + i, _situ16(load16(gate + i), load16(up + i), beta, linear))
    for i in range(4 * whole, 4 * n, 4):
        value = _situ16(splat(f32_at(gate + i)), splat(f32_at(up + i)), beta, linear)
        f32_put(out + i, first(value))


@inner
def _swiglu16(gate: Any, up: Any, limit: Any) -> Any:
    if limit > _single(0.0):
        high, low = splat(limit), splat(-limit)
        gate = min16(high, gate)
        up = max16(low, min16(high, up))
    return mul16(mul16(gate, sigmoid16(gate)), up)


@inner
def swiglu_span(gate: Any, up: Any, n: Any, limit: Any, out: Any) -> None:
    """`silu(min(gate, limit)) * clamp(up)` for n numbers; `out` may be one of the inputs."""
    whole = n // 16 * 16
    for i in range(0, 4 * whole, 64):
        store16(out + i, _swiglu16(load16(gate + i), load16(up + i), limit))
    for i in range(4 * whole, 4 * n, 4):
        value = _swiglu16(splat(f32_at(gate + i)), splat(f32_at(up + i)), limit)
        f32_put(out + i, first(value))


@inner
def scale_span(x: Any, factor: Any, weight: Any, n: Any, out: Any) -> None:
    """`out = x * factor * weight`; a weight address of 0 means all ones."""
    whole = n // 16 * 16
    factors = splat(factor)
    if weight != 0:
        for i in range(0, 4 * whole, 64):
            store16(out + i, mul16(mul16(load16(x + i), factors), load16(weight + i)))
        for i in range(4 * whole, 4 * n, 4):
            f32_put(out + i, f32_at(x + i) * factor * f32_at(weight + i))
    else:
        for i in range(0, 4 * whole, 64):
            store16(out + i, mul16(load16(x + i), factors))
        for i in range(4 * whole, 4 * n, 4):
            f32_put(out + i, f32_at(x + i) * factor)
