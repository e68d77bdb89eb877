"""`Ops` on CUDA: Triton kernels on float32 activations and the file's own bytes.

Nothing here waits for the device. Results of a row do not depend on the rows beside it, to the last
bit, for the block formats of `blocks.BLOCK_TYPES`; other formats are dequantised and multiplied as
the reference does it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from aprefetch.kernels.ops import Situ
from aprefetch.kernels.triton import attention, matvec, rows
from aprefetch.kernels.triton.blocks import BLOCK_TYPES
from aprefetch.kernels.triton.experts import expert_planes, run_experts, shape_of
from aprefetch.kernels.triton.kimi import KimiTritonOps
from aprefetch.quant import dequantize
from aprefetch.quant.base import QuantTensor
from aprefetch.types import LayerLayout

__all__ = ["MAX_TILE_TOKENS", "TritonOps"]

MAX_TILE_TOKENS = 4
"""Tokens that share one decoding of a weight; more would not fit into the registers."""

_MAX_PART_BYTES = 256 * 2**20  # partial results of attention kept at a time
_GROUP_KEYS = 32  # keys per partial result of attention
_SLICE = 1024  # elements per program of elementwise kernels
_LEAVE_SLICE = 128
_HC_SLICE = 1024  # elements of the flattened streams per partial product
_SMALLEST_WEIGHT_SUM = 2.0**-14


def _tile_tokens(n: int) -> int:
    return 1 if n == 1 else 2 if n == 2 else MAX_TILE_TOKENS


def _block(n: int) -> int:
    return max(16, int(triton.next_power_of_2(n)))


def _warps(n: int) -> int:
    return min(8, max(1, n // 256))


class TritonOps(KimiTritonOps):
    """See `aprefetch.kernels.ops.Ops` for shapes and meaning.

    Args:
        device: where the tensors are. "cpu" works in Triton's interpreter only.
    """

    name = "triton"
    batch_invariant = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        super().__init__(device)
        self._zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._plain: dict[int, tuple[Tensor, Tensor]] = {}

    # Products

    def linear(self, x: Tensor, w: QuantTensor) -> Tensor:
        if not self._knows(w):
            return self._exact_rows(x, w)
        return self.linear_into(x.contiguous(), w, self.new(x.shape[0], w.n_out))

    @staticmethod
    def _knows(w: QuantTensor) -> bool:
        aligned = w.data.data_ptr() % 4 == 0 and w.data.is_contiguous()
        return w.ggml_type in BLOCK_TYPES and w.n_in % 8 == 0 and aligned

    @staticmethod
    def _exact_rows(x: Tensor, w: QuantTensor) -> Tensor:
        """The slow way that still treats every row alike."""
        weight = dequantize(w.data, w.ggml_type, w.n_in)
        return torch.cat([(row[None] * weight).sum(-1)[None] for row in x])

    def linear_into(self, x: Tensor, w: QuantTensor, out: Tensor, n_groups: int = 1) -> Tensor:
        """`x [T, n_groups * n_in]` into `out [T, n_out]`; both contiguous."""
        n_rows = x.shape[0]
        shape = shape_of(w.ggml_type, w.n_in, w.n_out)
        tokens = _tile_tokens(n_rows)
        grid = (triton.cdiv(n_rows, tokens), triton.cdiv(w.n_out, shape.n_tile))
        matvec.linear_kernel[grid](
            x, w.data, out, n_rows, w.n_out, w.n_out // n_groups, n_groups * w.n_in, w.n_out,
            N_IN=w.n_in, ROW_BYTES=shape.row_bytes, FORMAT=w.ggml_type, HALVES=shape.halves,
            SCALED=shape.scaled, OFFSET=shape.offset, MASKED=shape.masked, GROUPED=n_groups > 1,
            T=tokens, R=shape.n_tile, C=shape.columns, num_warps=shape.columns // 32,
        )  # fmt: skip
        return out

    def grouped_linear(self, x: Tensor, w: QuantTensor) -> Tensor:
        n_groups = x.shape[1]
        n_tile = shape_of(w.ggml_type, w.n_in, w.n_out).n_tile
        if self._knows(w) and (w.n_out // n_groups) % n_tile == 0:
            x = x.contiguous()
            return self.linear_into(x, w, self.new(x.shape[0], w.n_out), n_groups)
        size = w.n_out // n_groups
        parts = [
            QuantTensor(w.data[g * size : (g + 1) * size].clone(), w.ggml_type, size, w.n_in)
            for g in range(n_groups)
        ]
        return torch.cat(
            [self.linear(x[:, g].contiguous(), part) for g, part in enumerate(parts)], dim=1
        )

    def experts(
        self,
        x: Tensor,
        arena: Tensor,
        slot_offsets: Sequence[int],
        layout: LayerLayout,
        pair_starts: Sequence[int],
        pair_rows: Tensor,
        limit: float,
        out: Tensor,
        out_rows: Tensor,
        activation: Situ | None = None,
    ) -> None:
        gate, up, down = layout.roles
        if not all(r.ggml_type in BLOCK_TYPES and r.n_in % 8 == 0 for r in layout.roles):
            super().experts(
                x, arena, slot_offsets, layout, pair_starts, pair_rows, limit, out, out_rows,
                activation,
            )  # fmt: skip
            return
        counts = np.diff(pair_starts)
        tokens = _tile_tokens(int(counts.max()))
        table = [
            (offset, first, min(tokens, stop - first))
            for offset, start, stop in zip(slot_offsets, pair_starts, pair_starts[1:], strict=False)
            for first in range(start, stop, tokens)
        ]
        entries = torch.tensor(table, dtype=torch.int64).to(self.device, non_blocking=True)
        hidden = self.new(pair_rows.shape[0], gate.n_out)
        self.experts_from_table(
            x, arena, layout, entries, len(table), 1, self._zero, pair_rows, limit, hidden,
            expert_planes(x, hidden), out, out_rows, tokens, activation,
        )  # fmt: skip

    def experts_from_table(
        self,
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
        """See `experts.run_experts`."""
        run_experts(
            x, arena, layout, table, n_tiles, table_rows, counter, pair_rows, limit, hidden,
            planes, out, out_rows, tokens, activation,
        )  # fmt: skip

    def sum_experts(self, parts: Tensor, weights: Tensor) -> Tensor:
        n_rows, k, d = parts.shape
        out = self.new(n_rows, d)
        grid = (n_rows, triton.cdiv(d, _SLICE))
        rows.sum_experts_kernel[grid](parts, weights.contiguous(), out, k, d, B=_SLICE)
        return out

    # Rows

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        n = x.shape[-1]
        out = torch.empty_like(x)
        rows.norm_kernel[(x.numel() // n,)](
            x, x if weight is None else weight, out, eps, n,
            WEIGHTED=weight is not None, B=_block(n), num_warps=_warps(n),
        )  # fmt: skip
        return out

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        assert x.is_contiguous() and cos.stride(1) == 1 and cos.stride() == sin.stride()
        n_rows, n_heads, d = x.shape
        rows.rope_kernel[(n_rows, n_heads)](
            x, cos, sin, n_heads, d, cos.shape[1], -1.0 if inverse else 1.0, cos.stride(0),
            B=_block(cos.shape[1]), num_warps=1,
        )  # fmt: skip
        return x

    def swiglu(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        n = gate.numel()
        rows.swiglu_kernel[(triton.cdiv(n, _SLICE),)](gate, up, out, float(limit), n, B=_SLICE)
        return out

    # Hyper-connections

    def _floats(self, w: QuantTensor) -> Tensor:
        """The float32 numbers of a small weight, decoded once."""
        if w.ggml_type == 0:
            return w.data.view(torch.float32)
        key = w.data.data_ptr()
        if key not in self._plain:
            self._plain[key] = (w.data, dequantize(w.data, w.ggml_type, w.n_in))
        return self._plain[key][1]

    def hc_into(
        self,
        streams: Tensor,
        fn: QuantTensor,
        scale: Tensor,
        base: Tensor,
        norm: Tensor | None,
        n_mixes: int,
        eps: float,
        hc_eps: float,
        n_iterations: int,
        out: Tensor,
        post: Tensor,
        comb: Tensor,
        part: Tensor,
    ) -> None:
        """The kernels of `hc_enter`, `hc_route_input` and `hc_collapse` over given memory.

        The first `n_mixes` rows of `fn` are used; `post`, `comb` are written if that is all of
        `S * (S + 2)`. `part` is `hc_part(T, S, D)`.
        """
        n_rows, s, d = streams.shape
        n, n_parts = s * d, part.shape[1]
        mixes = n_mixes == s * (s + 2)
        rows.hc_mix_kernel[(n_rows, n_parts)](
            streams, self._floats(fn), part, n, n_mixes, N_PARTS=n_parts, B=_HC_SLICE,
            MB=part.shape[2],
        )  # fmt: skip
        rows.hc_weigh_kernel[(n_rows,)](
            streams, part, scale, base, base if norm is None else norm, out, post, comb,
            d, n_mixes, eps, hc_eps, n_iterations,
            S=s, MIXES=mixes, NORMED=norm is not None, N_PARTS=n_parts, PB=_block(n_parts),
            MB=part.shape[2], B=_block(d), num_warps=_warps(2 * d),
        )  # fmt: skip

    def hc_part(self, n_rows: int, s: int, d: int) -> Tensor:
        """Scratch memory for `hc_into`."""
        return self.new(n_rows, triton.cdiv(s * d, _HC_SLICE), _block(s * (s + 2) + 1))

    def hc_enter(
        self,
        streams: Tensor,
        fn: QuantTensor,
        scale: Tensor,
        base: Tensor,
        norm: Tensor,
        *,
        eps: float,
        hc_eps: float,
        n_iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        streams = streams.contiguous()
        n_rows, s, d = streams.shape
        out, post, comb = self.new(n_rows, d), self.new(n_rows, s), self.new(n_rows, s, s)
        self.hc_into(
            streams, fn, scale, base, norm, s * (s + 2), eps, hc_eps, n_iterations, out, post,
            comb, self.hc_part(n_rows, s, d),
        )  # fmt: skip
        return out, post, comb

    def hc_route_input(
        self,
        streams: Tensor,
        fn: QuantTensor,
        scale: Tensor,
        base: Tensor,
        norm: Tensor,
        *,
        eps: float,
        hc_eps: float,
    ) -> Tensor:
        return self._collapse(streams, fn, scale, base, norm, eps, hc_eps)

    def hc_collapse(
        self,
        streams: Tensor,
        fn: QuantTensor,
        scale: Tensor,
        base: Tensor,
        *,
        eps: float,
        hc_eps: float,
    ) -> Tensor:
        return self._collapse(streams, fn, scale, base, None, eps, hc_eps)

    def _collapse(
        self,
        streams: Tensor,
        fn: QuantTensor,
        scale: Tensor,
        base: Tensor,
        norm: Tensor | None,
        eps: float,
        hc_eps: float,
    ) -> Tensor:
        streams = streams.contiguous()
        n_rows, s, d = streams.shape
        out = self.new(n_rows, d)
        self.hc_into(
            streams, fn, scale, base, norm, s, eps, hc_eps, 0, out, out, out,
            self.hc_part(n_rows, s, d),
        )  # fmt: skip
        return out

    def hc_leave(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        streams = streams.contiguous()
        out = torch.empty_like(streams)
        self.hc_leave_into(y.contiguous(), streams, post, comb, out)
        return out

    def hc_leave_into(
        self,
        y: Tensor,
        streams: Tensor,
        post: Tensor,
        comb: Tensor,
        out: Tensor,
        parts: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """`hc_leave`; with `parts [T, K, D]` and `weights [T, K]` their sum joins y first."""
        n_rows, s, d = streams.shape
        rows.hc_leave_kernel[(n_rows, triton.cdiv(d, _LEAVE_SLICE))](
            y, streams, post, comb, out, y if parts is None else parts,
            y if weights is None else weights, d,
            S=s, K=0 if weights is None else weights.shape[1], B=_LEAVE_SLICE,
        )  # fmt: skip

    # Attention

    def attend(
        self,
        q: Tensor,
        window_keys: Tensor,
        window_first: int,
        first_position: int,
        window: int,
        rows: Tensor | None,
        n_visible: Tensor | None,
        selected: Tensor | None,
        sinks: Tensor,
        scale: float,
    ) -> Tensor:
        out = torch.empty_like(q)
        n_keys = 0
        if rows is not None:
            n_keys = rows.shape[0] if selected is None else selected.shape[1]
        n_groups = self.attend_groups(window, n_keys)
        step = max(1, _MAX_PART_BYTES // (q.shape[1] * n_groups * q.shape[2] * 4))
        for t in range(0, q.shape[0], step):
            part = slice(t, t + step)
            self.attend_into(
                q[part], window_keys, window_first, window_keys.shape[0], first_position + t,
                self._zero, False, window, 1, rows,
                None if n_visible is None else n_visible[part],
                None if selected is None else selected[part],
                sinks, scale, out[part], n_groups, *self.attend_scratch(q[part], n_groups),
            )  # fmt: skip
        return out

    @staticmethod
    def attend_groups(window: int, n_keys: int) -> int:
        """Partial results per head for a window and so many other keys."""
        groups: int = triton.cdiv(window, _GROUP_KEYS) + triton.cdiv(n_keys, _GROUP_KEYS)
        return groups

    def attend_scratch(self, q: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
        """Memory for the partial results of `attend_into`."""
        n_rows, n_heads, d = q.shape
        return self.new(n_rows, n_heads, n_groups, d), self.new(n_rows, n_heads, n_groups, 2)

    def attend_into(
        self,
        q: Tensor,
        window_keys: Tensor,
        window_first: int,
        modulo: int,
        first_position: int,
        position: Tensor,
        decode: bool,
        window: int,
        ratio: int,
        keys: Tensor | None,
        n_visible: Tensor | None,
        selected: Tensor | None,
        sinks: Tensor,
        scale: float,
        out: Tensor,
        n_groups: int,
        part: Tensor,
        stat: Tensor,
    ) -> None:
        """The kernels of `attend`; with `decode` the position comes from device memory."""
        n_rows, n_heads, d = q.shape
        use_rows = keys is not None and (decode or n_visible is not None)
        n_selected = 0 if selected is None else selected.shape[1]
        visible = n_visible if n_visible is not None else position
        chosen = selected if selected is not None else position
        attention.attend_kernel[(n_rows, triton.cdiv(n_heads, 16), n_groups)](
            q, window_keys, keys if keys is not None else q, visible, chosen, position, part, stat,
            first_position, window_first, modulo, window, ratio, n_heads, d, n_selected, n_groups,
            scale,
            ROWS=use_rows, SELECTED=selected is not None, DECODE=decode,
            HB=16, KB=_GROUP_KEYS, DB=_block(d), DS=min(64, _block(d)),
        )  # fmt: skip
        attention.combine_kernel[(n_rows, n_heads)](
            part, stat, sinks, visible, position, out, n_heads, d, n_groups,
            triton.cdiv(window, _GROUP_KEYS), n_selected, ratio,
            ROWS=use_rows, SELECTED=selected is not None, DECODE=decode, KB=_GROUP_KEYS,
            B=_block(d), num_warps=_warps(2 * d),
        )  # fmt: skip

    def compress(
        self,
        kv: Tensor,
        gate: Tensor,
        first: int,
        n_blocks: int,
        ratio: int,
        has_previous: bool,
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
    ) -> Tensor:
        d = norm.shape[0]
        out = self.new(n_blocks, d)
        rows.compress_kernel[(n_blocks,)](
            kv, gate, norm, cos, sin, out, self._zero, first, int(has_previous), 2**30,
            kv.shape[1], 0, eps, d, cos.shape[1],
            RATIO=ratio, OVERLAP=kv.shape[1] == 2 * d, DECODE=False, B=_block(d),
            num_warps=_warps(2 * d),
        )  # fmt: skip
        return out

    def compress_decode(
        self,
        kv: Tensor,
        gate: Tensor,
        ratio: int,
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        out: Tensor,
        position: Tensor,
    ) -> None:
        """`compress` of the block that ends at `position` (on the device), if one does.

        `kv`, `gate` are rings by position, `cos`, `sin` whole tables, `out` all rows.
        """
        d = norm.shape[0]
        rows.compress_kernel[(1,)](
            kv, gate, norm, cos, sin, out, position, 0, 0, kv.shape[0], kv.shape[1], 0, eps, d,
            cos.shape[1], RATIO=ratio, OVERLAP=kv.shape[1] == 2 * d, DECODE=True, B=_block(d),
            num_warps=_warps(2 * d),
        )  # fmt: skip

    def index_topk(
        self, q: Tensor, head_weights: Tensor, keys: Tensor, n_visible: Tensor, k: int
    ) -> Tensor:
        n_rows, n_keys = q.shape[0], keys.shape[0]
        chosen = self.new(n_rows, k, dtype=torch.int32)
        step = max(1, _MAX_PART_BYTES // (4 * n_keys))
        for t in range(0, n_rows, step):
            part = slice(t, t + step)
            scores = self.new(min(step, n_rows - t), n_keys)
            self.index_into(
                q[part], head_weights[part].contiguous(), 1.0, keys, n_visible[part], self._zero,
                False, 1, scores, chosen[part],
            )  # fmt: skip
        return chosen

    def index_into(
        self,
        q: Tensor,
        head_weights: Tensor,
        head_scale: float,
        keys: Tensor,
        n_visible: Tensor,
        position: Tensor,
        decode: bool,
        ratio: int,
        scores: Tensor,
        chosen: Tensor,
    ) -> None:
        """The kernels of `index_topk` over given memory."""
        n_rows, n_heads, d = q.shape
        n_keys = keys.shape[0]
        attention.index_scores_kernel[(n_rows, triton.cdiv(n_keys, 64))](
            q, head_weights, keys, n_visible, position, scores, ratio, n_keys, n_heads, d,
            head_scale, DECODE=decode, HB=16, KB=64, DB=_block(d),
        )  # fmt: skip
        attention.select_kernel[(n_rows,)](
            scores, n_visible, position, chosen, ratio, n_keys, chosen.shape[1],
            DECODE=decode, B=4096 if n_keys > 1024 else 1024, num_warps=8,
        )  # fmt: skip

    # Routing

    def route(
        self,
        scores: Tensor,
        bias: Tensor | None,
        chosen: Tensor | None,
        k: int,
        *,
        normalise: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        n_rows, n_experts = scores.shape
        ids = self.new(n_rows, k, dtype=torch.int32)
        weights = self.new(n_rows, k)
        self.route_into(
            scores, bias, chosen, normalise, scale, ids, weights, self._zero, self._zero, False
        )
        return ids, weights

    def route_into(
        self,
        scores: Tensor,
        bias: Tensor | None,
        chosen: Tensor | None,
        normalise: bool,
        scale: float,
        ids: Tensor,
        weights: Tensor,
        mail: Tensor,
        counter: Tensor,
        post: bool,
    ) -> None:
        """The kernel of `route` over given memory; `post` also sends the ids by mail."""
        n_rows, n_experts = scores.shape
        k = ids.shape[1]
        rows.route_kernel[(n_rows,)](
            scores, scores if bias is None else bias, ids if chosen is None else chosen, ids,
            weights, mail, counter, n_experts, scale, _SMALLEST_WEIGHT_SUM,
            K=k, KB=max(2, triton.next_power_of_2(k)), B=_block(n_experts),
            BIASED=bias is not None and chosen is None, GIVEN=chosen is not None,
            NORMALISE=normalise, MAIL=post, num_warps=1,
        )  # fmt: skip
