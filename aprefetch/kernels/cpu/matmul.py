"""Products of float32 rows with encoded weight rows.

One dot product is one fixed sequence of roundings: chunks of 16 go alternately to two vector
accumulators, these are added and folded by a fixed tree, and what is left over is summed alone and
added last. The single-token kernels fuse decoding into that sequence; the others decode rows into
a buffer and run it for several rows and tokens at once. The sequence is the same, so are the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aprefetch.kernels.cpu.decode import (
    BF16,
    F16,
    F32,
    MXFP4,
    Q8_0,
    decode_row,
    fp4_values,
    mxfp4_scale,
)
from aprefetch.kernels.cpu.jit import hold, inner
from aprefetch.kernels.cpu.simd import (
    add16,
    bf16_16,
    bf16_at,
    f16_16,
    f16_at,
    f32_at,
    f32_put,
    fma,
    fma16,
    hsum,
    i8_16,
    i64_at,
    load16,
    mul16,
    shr,
    splat,
    to_f32,
    u8_16,
    u8_at,
)

__all__ = ["dot", "float_rows", "matmul_rows"]

_single = np.float32
_BLOCK_ROWS = 16
"""Rows decoded at a time: with 4096 inputs 256 KiB, which a second-level cache holds."""


@inner
def _finish(a: Any, b: Any, w: Any, x: Any, done: Any, n: Any) -> Any:
    """What follows the last whole pair of chunks of a float32 dot product."""
    if n - done >= 16:
        a = fma16(load16(w + 4 * done), load16(x + 4 * done), a)
        done += 16
    rest = _single(0.0)
    for i in range(done, n):
        rest = fma(f32_at(w + 4 * i), f32_at(x + 4 * i), rest)
    return hsum(add16(a, b)) + rest


@inner
def dot(w: Any, x: Any, n: Any) -> Any:
    """The dot product of two float32 rows."""
    a = b = splat(_single(0.0))
    whole = n // 32 * 32
    for i in range(0, whole, 32):
        a = fma16(load16(w + 4 * i), load16(x + 4 * i), a)
        b = fma16(load16(w + 4 * i + 64), load16(x + 4 * i + 64), b)
    return _finish(a, b, w, x, whole, n)


@inner
def _dot_mxfp4(w: Any, x: Any, n: Any) -> Any:
    a = b = splat(_single(0.0))
    for _ in range(n // 32):
        scale = splat(mxfp4_scale(u8_at(w)))
        codes = u8_16(w + 1)
        a = fma16(mul16(scale, fp4_values(codes)), load16(x), a)
        b = fma16(mul16(scale, fp4_values(shr(codes, 4))), load16(x + 64), b)
        w += 17
        x += 128
    return hsum(add16(a, b)) + _single(0.0)


@inner
def _dot_q8_0(w: Any, x: Any, n: Any) -> Any:
    a = b = splat(_single(0.0))
    for _ in range(n // 32):
        scale = splat(f16_at(w))
        a = fma16(mul16(scale, to_f32(i8_16(w + 2))), load16(x), a)
        b = fma16(mul16(scale, to_f32(i8_16(w + 18))), load16(x + 64), b)
        w += 34
        x += 128
    return hsum(add16(a, b)) + _single(0.0)


@inner
def _dot_bf16(w: Any, x: Any, n: Any) -> Any:
    a = b = splat(_single(0.0))
    done = n // 32 * 32
    for i in range(0, done, 32):
        a = fma16(bf16_16(w + 2 * i), load16(x + 4 * i), a)
        b = fma16(bf16_16(w + 2 * i + 32), load16(x + 4 * i + 64), b)
    if n - done >= 16:
        a = fma16(bf16_16(w + 2 * done), load16(x + 4 * done), a)
        done += 16
    rest = _single(0.0)
    for i in range(done, n):
        rest = fma(bf16_at(w + 2 * i), f32_at(x + 4 * i), rest)
    return hsum(add16(a, b)) + rest


@inner
def _dot_f16(w: Any, x: Any, n: Any) -> Any:
    a = b = splat(_single(0.0))
    done = n // 32 * 32
    for i in range(0, done, 32):
        a = fma16(f16_16(w + 2 * i), load16(x + 4 * i), a)
        b = fma16(f16_16(w + 2 * i + 32), load16(x + 4 * i + 64), b)
    if n - done >= 16:
        a = fma16(f16_16(w + 2 * done), load16(x + 4 * done), a)
        done += 16
    rest = _single(0.0)
    for i in range(done, n):
        rest = fma(f16_at(w + 2 * i), f32_at(x + 4 * i), rest)
    return hsum(add16(a, b)) + rest


@inner
def _one_token(
    kind: Any, w: Any, row_bytes: Any, n: Any, x: Any, out: Any, r0: Any, r1: Any
) -> None:
    """Rows `r0..r1` times one input row, decoded on the way."""
    if kind == MXFP4:
        for r in range(r0, r1):
            f32_put(out + 4 * r, _dot_mxfp4(w + r * row_bytes, x, n))
    elif kind == Q8_0:
        for r in range(r0, r1):
            f32_put(out + 4 * r, _dot_q8_0(w + r * row_bytes, x, n))
    elif kind == BF16:
        for r in range(r0, r1):
            f32_put(out + 4 * r, _dot_bf16(w + r * row_bytes, x, n))
    elif kind == F16:
        for r in range(r0, r1):
            f32_put(out + 4 * r, _dot_f16(w + r * row_bytes, x, n))
    elif kind == F32:
        for r in range(r0, r1):
            f32_put(out + 4 * r, dot(w + r * row_bytes, x, n))
    else:
        row = np.empty(n, dtype=np.float32)
        buffer = row.ctypes.data
        for r in range(r0, r1):
            decode_row(kind, w + r * row_bytes, n, buffer)
            f32_put(out + 4 * r, dot(buffer, x, n))
        hold(row)


@inner
def _two_by_four(
    w: Any, w_stride: Any, n: Any, x0: Any, x1: Any, x2: Any, x3: Any,
    o0: Any, o1: Any, o2: Any, o3: Any,
) -> None:  # fmt: skip
    """Two float32 weight rows times four tokens: eight interleaved copies of `dot`."""
    v = w + w_stride
    zero = splat(_single(0.0))
    a00 = a01 = a02 = a03 = b00 = b01 = b02 = b03 = zero
    a10 = a11 = a12 = a13 = b10 = b11 = b12 = b13 = zero
    whole = n // 32 * 32
    for i in range(0, whole, 32):
        at = 4 * i
        p, q = load16(w + at), load16(v + at)
        x = load16(x0 + at)
        a00, a10 = fma16(p, x, a00), fma16(q, x, a10)
        x = load16(x1 + at)
        a01, a11 = fma16(p, x, a01), fma16(q, x, a11)
        x = load16(x2 + at)
        a02, a12 = fma16(p, x, a02), fma16(q, x, a12)
        x = load16(x3 + at)
        a03, a13 = fma16(p, x, a03), fma16(q, x, a13)
        at += 64
        p, q = load16(w + at), load16(v + at)
        x = load16(x0 + at)
        b00, b10 = fma16(p, x, b00), fma16(q, x, b10)
        x = load16(x1 + at)
        b01, b11 = fma16(p, x, b01), fma16(q, x, b11)
        x = load16(x2 + at)
        b02, b12 = fma16(p, x, b02), fma16(q, x, b12)
        x = load16(x3 + at)
        b03, b13 = fma16(p, x, b03), fma16(q, x, b13)
    f32_put(o0, _finish(a00, b00, w, x0, whole, n))
    f32_put(o1, _finish(a01, b01, w, x1, whole, n))
    f32_put(o2, _finish(a02, b02, w, x2, whole, n))
    f32_put(o3, _finish(a03, b03, w, x3, whole, n))
    f32_put(o0 + 4, _finish(a10, b10, v, x0, whole, n))
    f32_put(o1 + 4, _finish(a11, b11, v, x1, whole, n))
    f32_put(o2 + 4, _finish(a12, b12, v, x2, whole, n))
    f32_put(o3 + 4, _finish(a13, b13, v, x3, whole, n))


@inner
def _pick(idx: Any, i: Any) -> Any:
    """Row number i of an optional int64 list."""
    return i64_at(idx + 8 * i) if idx != 0 else i


@inner
def _tokens_by_rows(
    w: Any, w_stride: Any, n: Any, x: Any, x_stride: Any, x_idx: Any, n_tokens: Any,
    out: Any, out_stride: Any, out_idx: Any, n_rows: Any,
) -> None:  # fmt: skip
    """All tokens times `n_rows` float32 weight rows; `out` points at the first row's column."""
    quads = n_tokens // 4 * 4
    for t in range(0, quads, 4):
        x0, o0 = x + _pick(x_idx, t) * x_stride, out + _pick(out_idx, t) * out_stride
        x1, o1 = x + _pick(x_idx, t + 1) * x_stride, out + _pick(out_idx, t + 1) * out_stride
        x2, o2 = x + _pick(x_idx, t + 2) * x_stride, out + _pick(out_idx, t + 2) * out_stride
        x3, o3 = x + _pick(x_idx, t + 3) * x_stride, out + _pick(out_idx, t + 3) * out_stride
        for r in range(0, n_rows - 1, 2):
            at = 4 * r
            _two_by_four(
                w + r * w_stride, w_stride, n, x0, x1, x2, x3, o0 + at, o1 + at, o2 + at, o3 + at
            )
        if n_rows & 1:
            last, at = w + (n_rows - 1) * w_stride, 4 * (n_rows - 1)
            f32_put(o0 + at, dot(last, x0, n))
            f32_put(o1 + at, dot(last, x1, n))
            f32_put(o2 + at, dot(last, x2, n))
            f32_put(o3 + at, dot(last, x3, n))
    for t in range(quads, n_tokens):
        x0, o0 = x + _pick(x_idx, t) * x_stride, out + _pick(out_idx, t) * out_stride
        for r in range(n_rows):
            f32_put(o0 + 4 * r, dot(w + r * w_stride, x0, n))


@inner
def float_rows(
    w: Any, n: Any, x: Any, n_tokens: Any, out: Any, out_stride: Any, n_rows: Any
) -> None:
    """`x [n_tokens, n]` times contiguous float32 `w [n_rows, n]`, without any decoding."""
    _tokens_by_rows(w, 4 * n, n, x, 4 * n, 0, n_tokens, out, out_stride, 0, n_rows)


@inner
def matmul_rows(
    kind: Any, w: Any, row_bytes: Any, n: Any, x: Any, x_stride: Any, x_idx: Any, n_tokens: Any,
    out: Any, out_stride: Any, out_idx: Any, r0: Any, r1: Any,
) -> None:  # fmt: skip
    """Weight rows `r0..r1` (of those at `w`) times `n_tokens` float32 rows of `n` numbers.

    Token i is row `x_idx[i]` of `x` and goes to row `out_idx[i]` of `out`; an address of 0 stands
    for the identity. Strides are bytes. The result for row r goes to column r.
    """
    if n_tokens == 1:
        x_row, out_row = x + _pick(x_idx, 0) * x_stride, out + _pick(out_idx, 0) * out_stride
        _one_token(kind, w, row_bytes, n, x_row, out_row, r0, r1)
    elif n_tokens > 1:
        # Float32 rows need no decoding, and then the buffer is a token one.
        buffer = np.empty(1 if kind == F32 else _BLOCK_ROWS * n, dtype=np.float32)
        rows, stride = buffer.ctypes.data, 4 * n
        for r in range(r0, r1, _BLOCK_ROWS):
            n_rows = min(_BLOCK_ROWS, r1 - r)
            if kind == F32:
                rows, stride = w + r * row_bytes, row_bytes
            else:
                for i in range(n_rows):
                    decode_row(kind, w + (r + i) * row_bytes, n, rows + i * stride)
            _tokens_by_rows(
                rows, stride, n, x, x_stride, x_idx, n_tokens,
                out + 4 * r, out_stride, out_idx, n_rows,
            )  # fmt: skip
        hold(buffer)
