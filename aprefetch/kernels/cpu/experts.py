"""Top-level kernels around `matmul_rows`: linear, grouped, experts, embedding.

All take addresses and can be restricted to a range of output rows, so that several threads share
one call; no result depends on the ranges.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aprefetch.kernels.cpu.decode import decode_row
from aprefetch.kernels.cpu.jit import hold, inner, kernel
from aprefetch.kernels.cpu.matmul import matmul_rows
from aprefetch.kernels.cpu.simd import i64_at
from aprefetch.kernels.cpu.vmath import situ_span, swiglu_span

__all__ = ["embed", "experts", "linear"]

_single = np.float32


@kernel
def linear(
    kind: Any, w: Any, row_bytes: Any, n_in: Any, x: Any, n_tokens: Any, n_groups: Any,
    rows: Any, out: Any, r0: Any, r1: Any,
) -> None:  # fmt: skip
    """`x [T, G, n_in]` by group; group g has rows `g * rows ..`, of which `r0..r1` are computed."""
    for g in range(n_groups):
        matmul_rows(
            kind, w + g * rows * row_bytes, row_bytes, n_in,
            x + 4 * g * n_in, 4 * n_groups * n_in, 0, n_tokens,
            out + 4 * g * rows, 4 * n_groups * rows, 0, r0, r1,
        )  # fmt: skip


@inner
def _role(
    table: Any, role: Any, slot: Any, x: Any, x_stride: Any, x_idx: Any, n_tokens: Any,
    out: Any, out_stride: Any, out_idx: Any, r0: Any, r1: Any,
) -> None:  # fmt: skip
    """One matrix of the expert in `slot`; `table` has (type, offset, row bytes, n_in) per role."""
    entry = table + 32 * role
    matmul_rows(
        i64_at(entry), slot + i64_at(entry + 8), i64_at(entry + 16), i64_at(entry + 24),
        x, x_stride, x_idx, n_tokens, out, out_stride, out_idx, r0, r1,
    )  # fmt: skip


@inner
def _expert_range(
    table: Any, slots: Any, starts: Any, n_experts: Any, x: Any, x_idx: Any, limit: Any,
    beta: Any, linear_beta: Any, hidden: Any, n_hidden: Any, out: Any, n_out: Any, out_idx: Any,
    phase: Any, r0: Any, r1: Any,
) -> None:  # fmt: skip
    """Rows `r0..r1` of one phase for all experts: 0 is gate, up and activation, 1 is down."""
    n_pairs = i64_at(starts + 8 * n_experts)
    x_stride, stride = 4 * i64_at(table + 24), 4 * n_hidden
    up = hidden + n_pairs * stride
    for e in range(n_experts):
        first = i64_at(starts + 8 * e)
        n_tokens = i64_at(starts + 8 * e + 8) - first
        slot, rows = i64_at(slots + 8 * e), first * stride
        for role in range(2 * phase, 2 + phase):
            if role < 2:
                _role(table, role, slot, x, x_stride, x_idx + 8 * first, n_tokens,
                      hidden + rows if role == 0 else up + rows, stride, 0, r0, r1)  # fmt: skip
            else:
                _role(table, role, slot, hidden + rows, stride, 0, n_tokens,
                      out, 4 * n_out, out_idx + 8 * first, r0, r1)  # fmt: skip
        if phase == 0:
            for i in range(n_tokens):
                at, other = hidden + rows + i * stride + 4 * r0, up + rows + i * stride + 4 * r0
                if beta > _single(0.0):
                    situ_span(at, other, r1 - r0, beta, linear_beta, at)
                else:
                    swiglu_span(at, other, r1 - r0, limit, at)


@kernel
def experts(
    table: Any, slots: Any, starts: Any, n_experts: Any, x: Any, x_idx: Any, limit: Any,
    beta: Any, linear_beta: Any, hidden: Any, n_hidden: Any, out: Any, n_out: Any, out_idx: Any,
    phase: Any, r0: Any, r1: Any,
) -> None:  # fmt: skip
    """Expert MLPs; `phase` as in `_expert_range`, or -1 for both over all rows.

    The activation is `situ` with `beta` and `linear_beta` where `beta` is positive, else `swiglu`
    with `limit`. `slots` are absolute addresses, `hidden` is scratch of `2 * n_pairs * n_hidden`
    floats (0 to have it allocated here, for phase -1 only).
    """
    bound, curve, linear_curve = _single(limit), _single(beta), _single(linear_beta)
    if phase >= 0:
        _expert_range(table, slots, starts, n_experts, x, x_idx, bound, curve, linear_curve,
                      hidden, n_hidden, out, n_out, out_idx, phase, r0, r1)  # fmt: skip
    else:
        scratch = np.empty(2 * i64_at(starts + 8 * n_experts) * n_hidden, dtype=np.float32)
        for each in range(2):
            _expert_range(table, slots, starts, n_experts, x, x_idx, bound, curve,
                          linear_curve, scratch.ctypes.data, n_hidden, out, n_out, out_idx, each,
                          0, n_hidden if each == 0 else n_out)  # fmt: skip
        hold(scratch)


@kernel
def embed(
    kind: Any, w: Any, row_bytes: Any, n_in: Any, ids: Any, n_tokens: Any, n_rows: Any, out: Any
) -> Any:
    """Decode rows `ids`; returns where an id is outside `0..n_rows`, or -1."""
    for t in range(n_tokens):
        row = i64_at(ids + 8 * t)
        if row < 0 or row >= n_rows:
            return t
        decode_row(kind, w + row * row_bytes, n_in, out + 4 * t * n_in)
    return -1
