"""Shapes and launches of the kernels that multiply by quantised weights.

Experts of most block formats run in fixed point (see `packed`), the others in float32 (see
`blocks`). Which of the two depends on a layer's formats alone, so a row's results do not depend on
what is computed with it.
"""

from __future__ import annotations

import functools
import os
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

__all__ = ["ExpertPlan", "Shape", "run_experts", "shape_of"]

_MANY_ROWS = 16384
_SPLIT_COLUMNS = 32  # wide columns per program of `split_kernel`


class ExpertPlan(NamedTuple):
    """How experts run: in fixed point or not, rows per program (multiples of 4), registers."""

    packed: int  # 0: no; 1: inputs split beforehand; 2: inputs split by every program
    gate_up_rows: int = 4  # a multiple of 4, so that blocks of any size start at whole words
    down_rows: int = 4
    max_registers: int | None = None


EXPERT_PLAN = ExpertPlan(
    {"packed": 1, "fused": 2}.get(os.environ.get("APREFETCH_KERNEL_VARIANT", ""), 0)
)
"""Read at every call; results depend on `packed` alone."""


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


def _masked(role: RoleLayout, columns: int, packed: int, n_rows: int) -> bool:
    """Whether tiles of so many columns and rows reach beyond a role's weight."""
    return bool(role.n_in // (16 if packed else 8) % columns or role.n_out % n_rows)


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
    out: Tensor,
    out_rows: Tensor,
    tokens: int,
    activation: Situ | None = None,
) -> None:
    """Experts by a table that the kernels read: see `matvec.expert_gate_up_kernel`.

    `table` is int64 `[table_rows, n_tiles, 3]`; row `counter % table_rows` is used, at the time
    when the kernels run. `hidden [pairs, F]` is scratch memory.
    """
    gate, up, down = layout.roles
    gate_at, up_at, down_at = layout.device_offsets
    plan = EXPERT_PLAN
    bounds = (limit, 0.0) if activation is None else activation
    g = shape_of(gate.ggml_type, gate.n_in, gate.n_out, True)
    u = shape_of(up.ggml_type, up.n_in, up.n_out, True)
    both = {gate.ggml_type, up.ggml_type} <= PACKED_TYPES and g.halves == u.halves
    packed = plan.packed if both else 0
    n_rows = plan.gate_up_rows
    matvec.expert_gate_up_kernel[(n_tiles, triton.cdiv(gate.n_out, n_rows))](
        _split(x, g.halves) if packed == 1 else x,
        arena, table, pair_rows, hidden, counter, *map(float, bounds), gate_at, up_at,
        n_tiles, table_rows, gate.n_out,
        N_IN=gate.n_in, GATE_BYTES=g.row_bytes, UP_BYTES=u.row_bytes,
        GATE=gate.ggml_type, UP=up.ggml_type, GATE_HALVES=g.halves, UP_HALVES=u.halves,
        GATE_SCALED=g.scaled, UP_SCALED=u.scaled,
        MASKED=_masked(gate, g.columns, packed, n_rows),
        GATE_OFFSET=g.offset, UP_OFFSET=u.offset, SITU=activation is not None, PACKED=packed,
        T=tokens, R=n_rows, C=g.columns, num_warps=g.columns // 32,
        maxnreg=plan.max_registers,
    )  # fmt: skip
    d = shape_of(down.ggml_type, down.n_in, down.n_out, True)
    packed = plan.packed if down.ggml_type in PACKED_TYPES else 0
    n_rows = plan.down_rows
    matvec.expert_down_kernel[(n_tiles, triton.cdiv(down.n_out, n_rows))](
        _split(hidden, d.halves) if packed == 1 else hidden,
        arena, table, out_rows, out, counter, down_at, n_tiles, table_rows, down.n_out,
        N_IN=down.n_in, ROW_BYTES=d.row_bytes, FORMAT=down.ggml_type, HALVES=d.halves,
        SCALED=d.scaled, OFFSET=d.offset, PACKED=packed,
        MASKED=_masked(down, d.columns, packed, n_rows),
        T=tokens, R=n_rows, C=d.columns, num_warps=d.columns // 32,
        maxnreg=plan.max_registers,
    )  # fmt: skip


def _split(x: Tensor, halves: bool) -> Tensor:
    """Rows of inputs in fixed point, 16 words for 16 inputs: see `packed`."""
    n_rows, n_in = x.shape
    out = torch.empty(n_rows, n_in, dtype=torch.int32, device=x.device)
    grid = (n_rows, triton.cdiv(n_in // 16, _SPLIT_COLUMNS))
    split_kernel[grid](x, out, N_IN=n_in, HALVES=halves, C=_SPLIT_COLUMNS, num_warps=1)
    return out
