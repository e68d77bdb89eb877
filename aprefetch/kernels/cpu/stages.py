"""Whole stages of a layer in one kernel call: a list of steps over rows in scratch memory.

A step is `WORDS` 64-bit numbers: what to do, where its rows come from and go to, and the weights'
addresses. Places are (register, byte offset, bytes from row to row), so a list serves any number of
rows and is made once per layer. The steps are the same inner functions as those of the single
operations; the results have the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aprefetch.kernels.cpu.jit import hold, inner, kernel
from aprefetch.kernels.cpu.layers import (
    early_scores,
    hc_enter,
    hc_leave,
    inverse_rms,
    rope_row,
    sum_experts,
)
from aprefetch.kernels.cpu.matmul import matmul_rows
from aprefetch.kernels.cpu.simd import f32_at, i64_at
from aprefetch.kernels.cpu.vmath import scale_span, swiglu_span

__all__ = ["LINEAR", "NORM", "ROPE", "SWIGLU", "WORDS", "hc_pass", "run_steps", "scores_ahead"]

LINEAR, NORM, ROPE, SWIGLU = 0, 1, 2, 3
WORDS = 13
"""Kind; register, offset, stride of the source; the same of the result; six operands."""

_single = np.float32


@inner
def _place(step: Any, r0: Any, r1: Any, r2: Any) -> Any:
    register = i64_at(step)
    base = r0 if register == 0 else (r1 if register == 1 else r2)
    return base + i64_at(step + 8)


@inner
def _linear(step: Any, x: Any, x_stride: Any, n: Any, out: Any, stride: Any) -> None:
    """Operands: type, weights, bytes per row, inputs, rows per group, groups."""
    n_in, rows = i64_at(step + 80), i64_at(step + 88)
    row_bytes = i64_at(step + 72)
    for g in range(i64_at(step + 96)):
        matmul_rows(
            i64_at(step + 56), i64_at(step + 64) + g * rows * row_bytes, row_bytes, n_in,
            x + 4 * g * n_in, x_stride, 0, n, out + 4 * g * rows, stride, 0, 0, rows,
        )  # fmt: skip


@inner
def _norm(step: Any, x: Any, x_stride: Any, n: Any, out: Any, stride: Any) -> None:
    """Operands: heads, width of one, weight, epsilon's bits."""
    width, weight, eps = i64_at(step + 64), i64_at(step + 72), f32_at(step + 80)
    for t in range(n):
        for h in range(i64_at(step + 56)):
            at = x + t * x_stride + 4 * h * width
            to = out + t * stride + 4 * h * width
            scale_span(at, inverse_rms(at, width, eps), weight, width, to)


@kernel
def run_steps(
    steps: Any, n_steps: Any, n: Any, r0: Any, r1: Any, r2: Any, n_scratch: Any, cos: Any, sin: Any
) -> None:
    """Run the steps for n rows; `r0 .. r2` are the registers, `cos`, `sin [n, pairs]` for ROPE.

    With `n_scratch` numbers per row, register 1 is allocated here.
    """
    scratch = np.empty(n * n_scratch, dtype=np.float32)
    if n_scratch > 0:
        r1 = scratch.ctypes.data
    for i in range(n_steps):
        step = steps + 8 * WORDS * i
        what, x, out = i64_at(step), _place(step + 8, r0, r1, r2), _place(step + 32, r0, r1, r2)
        x_stride, stride = i64_at(step + 24), i64_at(step + 48)
        if what == LINEAR:
            _linear(step, x, x_stride, n, out, stride)
        elif what == NORM:
            _norm(step, x, x_stride, n, out, stride)
        elif what == ROPE:  # in place; operands: heads, width of one, pairs, direction
            n_pairs, direction = i64_at(step + 72), _single(i64_at(step + 80))
            for t in range(n):
                rope_row(
                    out + t * stride, cos + 4 * t * n_pairs, sin + 4 * t * n_pairs,
                    i64_at(step + 56), i64_at(step + 64), n_pairs, direction,
                )  # fmt: skip
        else:  # SWIGLU; operands: bytes from gate to up, width, limit's bits
            for t in range(n):
                gate = x + t * x_stride
                swiglu_span(
                    gate, gate + i64_at(step + 56), i64_at(step + 64), f32_at(step + 72),
                    out + t * stride,
                )  # fmt: skip
    hold(scratch)


@kernel
def hc_pass(
    y: Any, old: Any, old_post: Any, old_comb: Any, streams: Any, fn: Any, n_tokens: Any,
    n_streams: Any, d: Any, scale: Any, base: Any, norm: Any, eps: Any, hc_eps: Any,
    n_iterations: Any, out: Any, post: Any, comb: Any,
) -> None:  # fmt: skip
    """`hc_leave` into `streams`, then `hc_enter` from there."""
    hc_leave(y, old, old_post, old_comb, n_tokens, n_streams, d, streams)
    hc_enter(
        fn, n_streams * (n_streams + 2), streams, n_tokens, n_streams, d, scale, base, norm,
        eps, hc_eps, n_iterations, out, post, comb,
    )  # fmt: skip


@kernel
def scores_ahead(
    parts: Any, weights: Any, k: Any, shared: Any, streams: Any, post: Any, comb: Any,
    n_streams: Any, d: Any, fn: Any, scale: Any, base: Any, norm: Any, eps: Any, hc_eps: Any,
    product: Any, bias: Any, n_experts: Any, out: Any,
) -> None:  # fmt: skip
    """One row: a later router on the streams as they will be with k parts and the shared one.

    `product` is the step of the router's product.
    """
    total, x = np.empty(d, dtype=np.float32), np.empty(d, dtype=np.float32)
    left = np.empty(n_streams * d, dtype=np.float32)
    y, u, ahead = total.ctypes.data, x.ctypes.data, left.ctypes.data
    if k > 0:
        sum_experts(parts, weights, 1, k, d, shared, y)
        hc_leave(y, streams, post, comb, 1, n_streams, d, ahead)
    else:
        hc_leave(shared, streams, post, comb, 1, n_streams, d, ahead)
    hc_enter(fn, n_streams, ahead, 1, n_streams, d, scale, base, norm, eps, hc_eps, 0, u, 0, 0)
    run_steps(product, 1, 1, u, 0, out, 0, 0, 0)
    early_scores(out, bias, 1, n_experts, out)
    hold(total)
    hold(x)
    hold(left)
