"""Shapes and launches of the kernels that multiply by quantised weights.

Experts of most block formats run in fixed point (see `packed`), the others in float32 (see
`blocks`). Which of the two depends on a layer's formats alone, and neither rows per program nor
registers change a result, so a row's results do not depend on what is computed with it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from aprefetch.kernels.ops import Situ
from aprefetch.kernels.triton import matvec
from aprefetch.kernels.triton.blocks import HAS_OFFSET, NIBBLE_HALVES, UNSCALED
from aprefetch.kernels.triton.packed import PACKED_TYPES, split_kernel
from aprefetch.quant import row_bytes
from aprefetch.types import LayerLayout, RoleLayout

__all__ = ["Shape", "expert_planes", "run_experts", "shape_of"]

_MANY_ROWS = 16384
_SPLIT_COLUMNS = 32  # wide columns per program of `split_kernel`


class _Tiling(NamedTuple):
    """Rows per program, a multiple of 4 so that blocks of any size start at whole words."""

    rows: int = 4
    max_registers: int | None = None


_USUAL = _Tiling()
# By GGML type, what was fastest for one token on an H200 (`benchmarks/gpu_kernels.py`); the usual
# tiling where a type is missing. More tokens per program leave no registers to save.
_GATE_UP_TILINGS = {
    10: _Tiling(4, 80),
    12: _Tiling(4, 80),
    13: _Tiling(4, 80),
    14: _Tiling(8),
    39: _Tiling(4, 80),
}
_DOWN_TILINGS = {
    8: _Tiling(8),
    10: _Tiling(8, 80),
    11: _Tiling(8, 80),
    12: _Tiling(8),
    13: _Tiling(8, 80),
    14: _Tiling(8),
    39: _Tiling(8, 80),
}


class Shape:
    """What the kernels must know of a weight, from its encoding and its shape alone."""

    __slots__ = ("columns", "masked", "n_tile", "offset", "halves", "row_bytes", "scaled")

    def __init__(self, ggml_type: int, n_in: int, n_out: int, n_tile: int, many_rows: bool) -> None:
        self.row_bytes = row_bytes(ggml_type, n_in)
        self.halves = ggml_type in NIBBLE_HALVES
        self.scaled = ggml_type not in UNSCALED
        self.offset = ggml_type in HAS_OFFSET
        self.columns = matvec.columns_of(n_in, many_rows=many_rows)
        self.n_tile = matvec.rows_of(self.row_bytes, n_tile)
        self.masked = bool(n_in // 8 % self.columns or n_out % self.n_tile)


@functools.cache
def shape_of(ggml_type: int, n_in: int, n_out: int, expert: bool = False) -> Shape:
    """The shape of a weight, or of a role of an expert."""
    n_tile = 4 if expert or n_out >= 2048 else 1
    return Shape(ggml_type, n_in, n_out, n_tile, expert or n_out >= _MANY_ROWS)


def expert_planes(x: Tensor, hidden: Tensor) -> Tensor:
    """Scratch memory for `run_experts`: inputs in fixed point, first `x`, then `hidden`."""
    return torch.empty(max(x.numel(), hidden.numel()), dtype=torch.int32, device=x.device)


def run_experts(
    x: Tensor,
    arena: Tensor,
    layout: LayerLayout,
    table: Tensor,
    n_tiles: int,
    table_rows: int,
    counter: Tensor,
    pair_rows: Tensor,
    limit: float,
    hidden: Tensor,
    planes: Tensor,
    out: Tensor,
    out_rows: Tensor,
    tokens: int,
    activation: Situ | None = None,
) -> None:
    """Experts by a table that the kernels read: see `matvec.expert_gate_up_kernel`.

    `table` is int64 `[table_rows, n_tiles, 3]`; row `counter % table_rows` is used, at the time
    when the kernels run. `hidden [pairs, F]` and `planes` (see `expert_planes`) are scratch memory;
    nothing is allocated here, so that what a graph has captured owns no memory of its own.
    """
    gate, up, down = layout.roles
    gate_at, up_at, down_at = layout.device_offsets
    bounds = (limit, 0.0) if activation is None else activation
    g = shape_of(gate.ggml_type, gate.n_in, gate.n_out, True)
    u = shape_of(up.ggml_type, up.n_in, up.n_out, True)
    packed = {gate.ggml_type, up.ggml_type} <= PACKED_TYPES and g.halves == u.halves
    tiling = _USUAL
    if tokens == 1 and gate.ggml_type == up.ggml_type:
        tiling = _GATE_UP_TILINGS.get(gate.ggml_type, _USUAL)
    matvec.expert_gate_up_kernel[(n_tiles, triton.cdiv(gate.n_out, tiling.rows))](
        _split(x, planes, g.halves) if packed else x,
        arena, table, pair_rows, hidden, counter, *map(float, bounds), gate_at, up_at,
        n_tiles, table_rows, gate.n_out,
        N_IN=gate.n_in, GATE_BYTES=g.row_bytes, UP_BYTES=u.row_bytes,
        GATE=gate.ggml_type, UP=up.ggml_type, GATE_HALVES=g.halves, UP_HALVES=u.halves,
        GATE_SCALED=g.scaled, UP_SCALED=u.scaled,
        MASKED=_masked(gate, g.columns, packed, tiling.rows),
        GATE_OFFSET=g.offset, UP_OFFSET=u.offset, SITU=activation is not None, PACKED=packed,
        T=tokens, R=tiling.rows, C=g.columns, num_warps=g.columns // 32,
        maxnreg=tiling.max_registers,
    )  # fmt: skip
    d = shape_of(down.ggml_type, down.n_in, down.n_out, True)
    packed = down.ggml_type in PACKED_TYPES
    tiling = _DOWN_TILINGS.get(down.ggml_type, _USUAL) if tokens == 1 else _USUAL
    matvec.expert_down_kernel[(n_tiles, triton.cdiv(down.n_out, tiling.rows))](
        _split(hidden, planes, d.halves) if packed else hidden,
        arena, table, out_rows, out, counter, down_at, n_tiles, table_rows, down.n_out,
        N_IN=down.n_in, ROW_BYTES=d.row_bytes, FORMAT=down.ggml_type, HALVES=d.halves,
        SCALED=d.scaled, OFFSET=d.offset, PACKED=packed,
        MASKED=_masked(down, d.columns, packed, tiling.rows),
        T=tokens, R=tiling.rows, C=d.columns, num_warps=d.columns // 32,
        maxnreg=tiling.max_registers,
    )  # fmt: skip


def _masked(role: RoleLayout, columns: int, packed: bool, n_rows: int) -> bool:
    """Whether tiles of so many columns and rows reach beyond a role's weight."""
    return bool(role.n_in // (16 if packed else 8) % columns or role.n_out % n_rows)


def _split(x: Tensor, planes: Tensor, halves: bool) -> Tensor:
    """Rows of inputs in fixed point, 16 words for 16 inputs: see `packed`."""
    n_rows, n_in = x.shape
    grid = (n_rows, triton.cdiv(n_in // 16, _SPLIT_COLUMNS))
    split_kernel[grid](x, planes, N_IN=n_in, HALVES=halves, C=_SPLIT_COLUMNS, num_warps=1)
    return planes
