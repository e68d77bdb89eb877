"""Attention over a window and compressed rows, and the indexer that picks such rows.

Keys of a query are numbered: first its window (oldest first), then its rows. They are worked off in
fixed groups of that numbering; each group's partial result is kept and combined in order. A query's
arithmetic is therefore the same in a chunk and alone.

Window keys lie at row `position % modulo` of their store; a plain list has a modulo of its length.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_kernel", "combine_kernel", "index_scores_kernel", "select_kernel"]


@triton.jit
def attend_kernel(
    q_ptr, window_ptr, rows_ptr, visible_ptr, selected_ptr, position_ptr, part_ptr, stat_ptr,
    first_position, window_first, modulo, window, ratio, H, D, n_selected, n_groups, scale,
    ROWS: tl.constexpr, SELECTED: tl.constexpr, DECODE: tl.constexpr,
    HB: tl.constexpr, KB: tl.constexpr, DB: tl.constexpr, DS: tl.constexpr,
):  # fmt: skip
    """Group `program_id(2)` of KB keys, HB heads, one query; grid (T, head tiles, groups).

    Writes `part [T, H, groups, D]` (unnormalised values) and `stat [T, H, groups, 2]` (largest
    logit, sum of exponentials).
    """
    t, g = tl.program_id(0), tl.program_id(2)
    h = tl.program_id(1) * HB + tl.arange(0, HB)
    p = first_position + t
    if DECODE:
        p = (tl.load(position_ptr) + t).to(tl.int32)
    n_window = tl.minimum(window, p + 1)
    n_rows = 0
    if ROWS:
        if SELECTED:
            n_rows = n_selected
        elif DECODE:
            n_rows = (p + 1) // ratio
        else:
            n_rows = tl.load(visible_ptr + t)
    # Groups of rows come after the groups that hold a whole window.
    n_window_groups = (window + KB - 1) // KB
    n = tl.arange(0, KB)
    at_h = t.to(tl.int64) * H + h
    stat = stat_ptr + (at_h * n_groups + g) * 2
    heads = h < H
    if g < n_window_groups:
        w = g * KB + n
        alive = w < n_window
        key = window_ptr + ((p - n_window + 1 + w - window_first) % modulo).to(tl.int64) * D
        begin, count = g * KB, n_window
    else:
        r = (g - n_window_groups) * KB + n
        alive = r < n_rows
        begin, count = (g - n_window_groups) * KB, n_rows
        key = rows_ptr + r.to(tl.int64) * D
        if SELECTED:
            picked = tl.load(selected_ptr + t * n_selected + r, mask=alive, other=-1)
            alive = alive & (picked >= 0)
            key = rows_ptr + tl.maximum(picked, 0).to(tl.int64) * D
    if begin >= count:
        tl.store(stat, tl.full((HB,), float("-inf"), tl.float32), mask=heads)
        tl.store(stat + 1, tl.zeros((HB,), tl.float32), mask=heads)
        return
    d = tl.arange(0, DS)
    logits = tl.zeros((HB, KB), tl.float32)
    for d0 in range(0, D, DS):
        inside = d0 + d < D
        q = tl.load(
            q_ptr + at_h[:, None] * D + d0 + d[None, :],
            mask=heads[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        k = tl.load(
            key[None, :] + d0 + d[:, None], mask=alive[None, :] & inside[:, None], other=0.0
        )
        logits += tl.dot(q, k, input_precision="ieee")
    logits = tl.where(alive[None, :], logits * scale, float("-inf"))
    top = tl.max(logits, axis=1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(logits - safe[:, None])
    tl.store(stat, top, mask=heads)
    tl.store(stat + 1, tl.sum(weights, axis=1), mask=heads)
    for d0 in range(0, D, DS):
        inside = d0 + d < D
        k = tl.load(
            key[:, None] + d0 + d[None, :], mask=alive[:, None] & inside[None, :], other=0.0
        )
        value = tl.dot(weights, k, input_precision="ieee")
        to = part_ptr + (at_h * n_groups + g)[:, None] * D + d0 + d[None, :]
        tl.store(to, value, mask=heads[:, None] & inside[None, :])


@triton.jit
def combine_kernel(
    part_ptr, stat_ptr, sinks_ptr, visible_ptr, position_ptr, out_ptr, H, D, n_groups,
    n_window_groups, n_selected, ratio, ROWS: tl.constexpr, SELECTED: tl.constexpr,
    DECODE: tl.constexpr, KB: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Joins the groups of one query and head, in order, with the head's sink."""
    t, h = tl.program_id(0), tl.program_id(1)
    n_rows = 0
    if ROWS:
        if SELECTED:
            n_rows = n_selected
        elif DECODE:
            n_rows = ((tl.load(position_ptr) + t + 1) // ratio).to(tl.int32)
        else:
            n_rows = tl.load(visible_ptr + t)
    used = tl.minimum(n_window_groups + (n_rows + KB - 1) // KB, n_groups)
    at = (t.to(tl.int64) * H + h) * n_groups
    sink = tl.load(sinks_ptr + h)
    top = sink
    for g in range(0, used):
        top = tl.maximum(top, tl.load(stat_ptr + (at + g) * 2))
    total = tl.exp(sink - top)
    i = tl.arange(0, B)
    value = tl.zeros((B,), tl.float32)
    for g in range(0, used):
        largest = tl.load(stat_ptr + (at + g) * 2)
        factor = tl.exp(largest - top)
        total = tl.fma(factor, tl.load(stat_ptr + (at + g) * 2 + 1), total)
        partial = tl.load(part_ptr + (at + g) * D + i, mask=i < D, other=0.0)
        value += tl.where(factor > 0.0, factor * partial, 0.0)  # an empty group wrote no partial
    tl.store(out_ptr + (t.to(tl.int64) * H + h) * D + i, value / total, mask=i < D)


@triton.jit
def index_scores_kernel(
    q_ptr, weights_ptr, keys_ptr, visible_ptr, position_ptr, out_ptr, ratio, n_rows, H, D,
    head_scale, DECODE: tl.constexpr, HB: tl.constexpr, KB: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    """`out[t, i] = sum_h weights[t, h] relu(q[t, h] . keys[i])`; -inf where not visible."""
    t = tl.program_id(0)
    r = tl.program_id(1) * KB + tl.arange(0, KB)
    n = tl.load(visible_ptr + t) if not DECODE else (
        (tl.load(position_ptr) + t + 1) // ratio
    ).to(tl.int32)  # fmt: skip
    if tl.program_id(1) * KB >= n:
        tl.store(
            out_ptr + t.to(tl.int64) * n_rows + r,
            tl.full((KB,), float("-inf"), tl.float32), mask=r < n_rows,
        )  # fmt: skip
        return
    alive = r < n
    d = tl.arange(0, DB)
    k = tl.load(
        keys_ptr + r.to(tl.int64)[None, :] * D + d[:, None],
        mask=alive[None, :] & (d < D)[:, None], other=0.0,
    )  # fmt: skip
    total = tl.zeros((KB,), tl.float32)
    for h0 in range(0, H, HB):
        h = h0 + tl.arange(0, HB)
        q = tl.load(
            q_ptr + (t.to(tl.int64) * H + h)[:, None] * D + d[None, :],
            mask=(h < H)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(weights_ptr + t.to(tl.int64) * H + h, mask=h < H, other=0.0) * head_scale
        s = tl.maximum(tl.dot(q, k, input_precision="ieee"), 0.0)
        total += tl.sum(w[:, None] * s, axis=0)
    score = tl.where(alive, total, float("-inf"))
    tl.store(out_ptr + t.to(tl.int64) * n_rows + r, score, mask=r < n_rows)


@triton.jit
def _ordered(x):
    """Floats as signed integers of the same order; both zeros are one number."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def select_kernel(
    scores_ptr, visible_ptr, position_ptr, out_ptr, ratio, n_rows, k,
    DECODE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The best k of the visible scores of row `program_id(0)`, ascending, padded with -1.

    The k-th largest value is found bit by bit; of equal ones the lower rows are taken.
    """
    t = tl.program_id(0)
    row = scores_ptr + t.to(tl.int64) * n_rows
    out = out_ptr + t.to(tl.int64) * k
    n = tl.load(visible_ptr + t) if not DECODE else (
        (tl.load(position_ptr) + t + 1) // ratio
    ).to(tl.int32)  # fmt: skip
    i = tl.arange(0, B)
    # The threshold: the largest number that at least k scores reach.
    low, high = tl.full((), -2147483647, tl.int64), tl.full((), 2147483647, tl.int64)
    if n <= k:
        high = low
    while low < high:
        middle = (low + high + 1) >> 1
        count = 0
        for c in range(0, n, B):
            value = _ordered(tl.load(row + c + i, mask=c + i < n, other=float("-inf")))
            count += tl.sum(((value >= middle) & (c + i < n)).to(tl.int32), axis=0)
        if count >= k:
            low = middle
        else:
            high = middle - 1
    above = 0
    for c in range(0, n, B):
        value = _ordered(tl.load(row + c + i, mask=c + i < n, other=float("-inf")))
        above += tl.sum(((value > low) & (c + i < n)).to(tl.int32), axis=0)
    spare = k - above
    if n <= k:
        spare = n
    written, equal = 0, 0
    for c in range(0, n, B):
        value = _ordered(tl.load(row + c + i, mask=c + i < n, other=float("-inf")))
        same = (value == low) & (c + i < n)
        if n <= k:
            same = c + i < n
        rank = equal + tl.cumsum(same.to(tl.int32), axis=0)
        take = ((value > low) & (c + i < n) & (n > k)) | (same & (rank <= spare))
        place = written + tl.cumsum(take.to(tl.int32), axis=0) - 1
        tl.store(out + place, c + i, mask=take)
        equal += tl.sum(same.to(tl.int32), axis=0)
        written += tl.sum(take.to(tl.int32), axis=0)
    for c in range(0, k, B):
        tl.store(out + c + i, tl.full((B,), -1, tl.int32), mask=(c + i < k) & (c + i >= written))
