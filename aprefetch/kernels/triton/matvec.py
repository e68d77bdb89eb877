"""Linear layers and routed experts straight from quantised blocks.

One program computes R rows of a weight for up to T tokens; its threads divide a row's columns. What
a (token, row) pair adds up, and in which order, is a function of the row's length only, so results
are equal to the last bit whatever shares the call (see `blocks`).

Experts run from tables of 64-bit numbers on the device: one entry per tile of at most T pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aprefetch.kernels.triton.blocks import add_columns, decode_columns, load_columns
from aprefetch.kernels.triton.kimi_kernels import situ
from aprefetch.kernels.triton.packed import add_packed, decode_packed, load_split, unbias

__all__ = [
    "columns_of",
    "expert_down_kernel",
    "expert_gate_up_kernel",
    "fetch_table_kernel",
    "linear_kernel",
    "rows_of",
]


def columns_of(n_in: int, *, many_rows: bool) -> int:
    """Columns that a program works on at a time: a power of two from 32 to 128.

    With many rows one warp per program saves sums across warps; few rows need more threads each.
    """
    return 32 if many_rows else min(128, max(32, triton.next_power_of_2(-(-n_in // 8))))


def rows_of(row_bytes: int, wanted: int) -> int:
    """Rows per program, 1 to 4, such that each program's first row starts at a whole word."""
    least = 4 if row_bytes % 2 else 2 if row_bytes % 4 else 1
    return max(least, wanted)


@triton.jit
def _zeros(N: tl.constexpr, C: tl.constexpr):
    acc = ()
    for _ in tl.static_range(N):
        acc = acc + (tl.zeros((C,), tl.float32),)
    return acc


@triton.jit
def _sums(acc, FORMAT: tl.constexpr, PACKED: tl.constexpr, N: tl.constexpr):
    sums = ()
    for i in tl.static_range(N):
        total = tl.sum(acc[i], axis=0)
        if PACKED:
            total = unbias(total, FORMAT)
        sums = sums + (total,)
    return sums


@triton.jit
def _load_tokens(
    x_rows, c, inside,
    HALVES: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    x = ()
    for t in tl.static_range(T):
        if PACKED:
            x = x + (load_split(x_rows[t], c, inside, MASKED, C),)
        else:
            x = x + (load_columns(x_rows[t], c, inside, HALVES, MASKED, C),)
    return x


@triton.jit
def _decode(
    base, row, c, mask,
    FORMAT: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    if PACKED:
        return decode_packed(base, row, c, mask, FORMAT, MASKED, C)
    else:
        return decode_columns(base, row, c, mask, FORMAT, MASKED, C)


@triton.jit
def _add_rows(
    acc, x, base, first, n_out, c, inside,
    ROW_BYTES: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One step of the dot products of rows `first .. first + R`, which start at `base`."""
    new = ()
    for r in tl.static_range(R):
        mask = inside & (first + r < n_out)
        if ROW_BYTES % 4 == 0:  # then all rows' columns lie alike in their words
            at = base + r * ROW_BYTES
            q, scale, offset = _decode(at, 0, c, mask, FORMAT, PACKED, MASKED, C)
        else:
            q, scale, offset = _decode(base, r * ROW_BYTES, c, mask, FORMAT, PACKED, MASKED, C)
        for t in tl.static_range(T):
            a = acc[r * T + t]
            if PACKED:
                new = new + (add_packed(a, q, scale, offset, x[t], FORMAT, C),)
            else:
                new = new + (add_columns(a, q, scale, offset, x[t], SCALED, OFFSET),)
    return new


@triton.jit
def _rows_dot(
    x_rows, base, first, n_out,
    N_IN: tl.constexpr, ROW_BYTES: tl.constexpr, FORMAT: tl.constexpr, HALVES: tl.constexpr,
    SCALED: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Dot products of rows `first .. first + R`, which start at `base`, with T inputs.

    `x_rows` is a tuple of T pointers. Returns R * T scalars, row by row.
    """
    n_columns: tl.constexpr = N_IN // (16 if PACKED else 8)
    acc = _zeros(T * R, C)
    for c0 in range(0, n_columns, C):
        c = c0 + tl.arange(0, C)
        inside = c < n_columns
        x = _load_tokens(x_rows, c, inside, HALVES, PACKED, MASKED, T, C)
        acc = _add_rows(
            acc, x, base, first, n_out, c, inside,
            ROW_BYTES, FORMAT, SCALED, OFFSET, PACKED, MASKED, T, R, C,
        )  # fmt: skip
    return _sums(acc, FORMAT, PACKED, T * R)


@triton.jit
def _store_rows(at, alive, first, n_out, sums, T: tl.constexpr, R: tl.constexpr):
    """`at[t]` points at element 0 of token t's output row."""
    for r in tl.static_range(R):
        for t in tl.static_range(T):
            tl.store(at[t] + first + r, sums[r * T + t], mask=alive[t] & (first + r < n_out))


@triton.jit
def linear_kernel(
    x_ptr, w_ptr, out_ptr, n_rows, n_out, rows_per_group, x_stride, out_stride,
    N_IN: tl.constexpr, ROW_BYTES: tl.constexpr, FORMAT: tl.constexpr, HALVES: tl.constexpr,
    SCALED: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr, GROUPED: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`out[t, r] = sum_k x[t, group(r), k] w[r, k]`; grid (token tiles, row tiles)."""
    first = tl.program_id(1) * R
    group = 0
    if GROUPED:  # R divides rows_per_group, so a program stays in one group
        group = (first // rows_per_group) * N_IN
    x_rows, at, alive = (), (), ()
    for i in tl.static_range(T):
        t = tl.program_id(0) * T + i
        # A token beyond the last is the last once more; it is not stored.
        x_rows = x_rows + (x_ptr + tl.minimum(t, n_rows - 1).to(tl.int64) * x_stride + group,)
        at = at + (out_ptr + t.to(tl.int64) * out_stride,)
        alive = alive + (t < n_rows,)
    base = w_ptr + first.to(tl.int64) * ROW_BYTES
    sums = _rows_dot(
        x_rows, base, first, n_out,
        N_IN, ROW_BYTES, FORMAT, HALVES, SCALED, OFFSET, False, MASKED, T, R, C,
    )  # fmt: skip
    _store_rows(at, alive, first, n_out, sums, T, R)


@triton.jit
def _activate(g, u, limit):
    """`silu(min(g, limit)) * clamp(u, -limit, limit)`; no clamp where `limit <= 0`.

    What is no number stays none.
    """
    if limit > 0:
        g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(u, limit, propagate_nan=tl.PropagateNan.ALL)
    return g / (1.0 + tl.exp(-g)) * u


@triton.jit(do_not_specialize=["n_tiles"])  # one compiled kernel for any number
def expert_gate_up_kernel(
    x_ptr, arena_ptr, table_ptr, pair_rows_ptr, hidden_ptr, counter_ptr, limit, linear_beta,
    gate_at, up_at, n_tiles, table_rows, F,
    N_IN: tl.constexpr, GATE_BYTES: tl.constexpr, UP_BYTES: tl.constexpr,
    GATE: tl.constexpr, UP: tl.constexpr, GATE_HALVES: tl.constexpr, UP_HALVES: tl.constexpr,
    GATE_SCALED: tl.constexpr, UP_SCALED: tl.constexpr, MASKED: tl.constexpr,
    GATE_OFFSET: tl.constexpr, UP_OFFSET: tl.constexpr, SITU: tl.constexpr, PACKED: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`hidden[pair] = silu(min(gate x, limit)) * clamp(up x)`; grid (tiles, row tiles of F).

    With `SITU` it is `situ(gate x, up x)`, its beta given as `limit`.
    Entry i of the table is (slot byte offset, first pair, pairs); an offset below 0 is skipped.
    The table starts `counter % table_rows` rows of `n_tiles` entries on.
    """
    entry = table_ptr + ((tl.load(counter_ptr) % table_rows) * n_tiles + tl.program_id(0)) * 3
    slot, begin, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if slot < 0:
        return
    slot = tl.multiple_of(slot, 256)
    first = tl.program_id(1) * R
    x_rows, at, alive = (), (), ()
    for t in tl.static_range(T):
        x_row = tl.load(pair_rows_ptr + begin + tl.minimum(t, n - 1))
        x_rows = x_rows + (x_ptr + x_row * N_IN,)
        at = at + (hidden_ptr + (begin + t) * F,)
        alive = alive + (t < n,)
    gate = arena_ptr + (slot + gate_at + first.to(tl.int64) * GATE_BYTES)
    up = arena_ptr + (slot + up_at + first.to(tl.int64) * UP_BYTES)
    n_columns: tl.constexpr = N_IN // (16 if PACKED else 8)
    g, u = _zeros(T * R, C), _zeros(T * R, C)
    for c0 in range(0, n_columns, C):
        c = c0 + tl.arange(0, C)
        inside = c < n_columns
        x = _load_tokens(x_rows, c, inside, GATE_HALVES, PACKED, MASKED, T, C)
        g = _add_rows(
            g, x, gate, first, F, c, inside,
            GATE_BYTES, GATE, GATE_SCALED, GATE_OFFSET, PACKED, MASKED, T, R, C,
        )  # fmt: skip
        if UP_HALVES != GATE_HALVES:
            x = _load_tokens(x_rows, c, inside, UP_HALVES, PACKED, MASKED, T, C)
        u = _add_rows(
            u, x, up, first, F, c, inside,
            UP_BYTES, UP, UP_SCALED, UP_OFFSET, PACKED, MASKED, T, R, C,
        )  # fmt: skip
    g, u = _sums(g, GATE, PACKED, T * R), _sums(u, UP, PACKED, T * R)
    hidden = ()
    for i in tl.static_range(T * R):
        if SITU:
            hidden = hidden + (situ(g[i], u[i], limit, linear_beta),)
        else:
            hidden = hidden + (_activate(g[i], u[i], limit),)
    _store_rows(at, alive, first, F, hidden, T, R)


@triton.jit(do_not_specialize=["n_tiles"])  # one compiled kernel for any number
def expert_down_kernel(
    hidden_ptr, arena_ptr, table_ptr, out_rows_ptr, out_ptr, counter_ptr,
    down_at, n_tiles, table_rows, D,
    N_IN: tl.constexpr, ROW_BYTES: tl.constexpr, FORMAT: tl.constexpr, HALVES: tl.constexpr,
    SCALED: tl.constexpr, OFFSET: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`out[out_rows[pair]] = down hidden[pair]`; grid (tiles, row tiles of D)."""
    entry = table_ptr + ((tl.load(counter_ptr) % table_rows) * n_tiles + tl.program_id(0)) * 3
    slot, begin, n = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if slot < 0:
        return
    slot = tl.multiple_of(slot, 256)
    first = tl.program_id(1) * R
    rows, at, alive = (), (), ()
    for t in tl.static_range(T):
        rows = rows + (hidden_ptr + (begin + tl.minimum(t, n - 1)) * N_IN,)
        to = tl.load(out_rows_ptr + begin + tl.minimum(t, n - 1))
        at = at + (out_ptr + to * D,)
        alive = alive + (t < n,)
    base = arena_ptr + (slot + down_at + first.to(tl.int64) * ROW_BYTES)
    sums = _rows_dot(
        rows, base, first, D,
        N_IN, ROW_BYTES, FORMAT, HALVES, SCALED, OFFSET, PACKED, MASKED, T, R, C,
    )  # fmt: skip
    _store_rows(at, alive, first, D, sums, T, R)


@triton.jit
def fetch_table_kernel(host_ptr, table_ptr, counter_ptr, n_rows, N: tl.constexpr, B: tl.constexpr):
    """Row `counter % n_rows` of a table in pinned host memory to the device; then count one on."""
    n = tl.load(counter_ptr)
    i = tl.arange(0, B)
    values = tl.load(host_ptr + (n % n_rows) * N + i, mask=i < N, other=-1)
    tl.store(table_ptr + i, values, mask=i < N)
    tl.store(counter_ptr, n + 1)
