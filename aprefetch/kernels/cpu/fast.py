"""`Ops` compiled for the CPU at hand.

The classes here only check shapes, allocate results and pass addresses on; the work is in the
kernels. Every result row depends on its own input row alone, bit for bit: not on the batch, the
number of threads or the company of other experts. Calls may come from several threads at once.
Operations that only Kimi models use are inherited.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from aprefetch.errors import InvalidRequestError, ModelError
from aprefetch.kernels.cpu import attention, experts, layers
from aprefetch.kernels.cpu.fast_stages import CompiledStages
from aprefetch.kernels.cpu.kimi_ops import KimiNumbaOps
from aprefetch.kernels.cpu.reference import ReferenceOps
from aprefetch.kernels.cpu.tensors import flat as _flat
from aprefetch.kernels.cpu.tensors import ids as _ids
from aprefetch.kernels.cpu.tensors import new as _new
from aprefetch.kernels.cpu.tensors import wrong as _wrong
from aprefetch.kernels.ops import Situ
from aprefetch.quant import row_bytes
from aprefetch.quant.base import QuantTensor
from aprefetch.types import ROLES, LayerLayout

__all__ = ["NumbaOps"]

_f32 = torch.float32
_empty_like = torch.empty_like
_linear, _experts = experts.linear, experts.experts

_SPLIT_COST = 4 << 20
"""Weight bytes times rows above which a call is worth a hand-over to other threads (50 us)."""

_MAX_THREADS = 16
_NO_SITU = Situ(0.0, 0.0)


def _started_pool(n_threads: int) -> ThreadPoolExecutor:
    """A pool whose threads are all there, so that no token pays for starting one."""
    pool = ThreadPoolExecutor(n_threads, thread_name_prefix="aprefetch-kernel")
    everyone = Barrier(n_threads + 1)
    for _ in range(n_threads):
        pool.submit(everyone.wait)
    everyone.wait()
    return pool


class NumbaOps(CompiledStages, KimiNumbaOps):
    """See `aprefetch.kernels.ops.Ops` for shapes and meaning."""

    name = "numba"
    batch_invariant = True

    def __init__(self, n_threads: int | None = None) -> None:
        """Args: n_threads: threads that share one large call; default is one per core."""
        super().__init__()
        cores = os.cpu_count() or 1
        self.n_threads = max(1, min(n_threads or cores, _MAX_THREADS))
        self.device = torch.device("cpu")
        self._pool = _started_pool(self.n_threads - 1) if self.n_threads > 1 else None
        self._split_cost = float("inf") if self._pool is None else _SPLIT_COST
        self._plain = ReferenceOps()
        # Keeps the layouts alive, so an id is never met again with another object.
        self._tables: dict[int, tuple[LayerLayout, array[int], int, int]] = {}
        self._taps = {}

    def close(self) -> None:
        """End the threads; the ops go on serially."""
        pool, self._pool = self._pool, None
        self._split_cost = float("inf")
        if pool is not None:
            pool.shutdown()

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _new(*shape) if dtype is _f32 else torch.empty(shape, dtype=dtype)

    def _split(self, n: int, step: int, call: Callable[[int, int], object]) -> None:
        """`call(start, stop)` over `0..n`, in parts that are multiples of `step`."""
        pool = self._pool
        if pool is None:
            call(0, n)
            return
        part = -(-n // (self.n_threads * step)) * step
        futures: list[Future[object]] = []
        try:
            for start in range(part, n, part):
                futures.append(pool.submit(call, start, min(start + part, n)))  # noqa: PERF401
            call(0, min(part, n))
        finally:
            wait(futures)  # whatever happens here, nobody may still write into our tensors
        for future in futures:
            future.result()

    # ---- products -------------------------------------------------------------------------------

    def linear(self, x: Tensor, w: QuantTensor) -> Tensor:
        if x.dtype is not _f32 or not x.is_contiguous():
            x = _flat(x)
        n_out, n_in, data = w.n_out, w.n_in, w.data
        n, width = x.shape
        if width != n_in:
            raise _wrong("linear input width", width, n_in)
        out = _new(n, n_out)
        stride = data.stride(0)
        if stride * n_out * n < self._split_cost:
            _linear(
                w.ggml_type, data.data_ptr(), stride, n_in, x.data_ptr(), n, 1, n_out,
                out.data_ptr(), 0, n_out,
            )  # fmt: skip
        else:
            self._split_linear(w, x, n, 1, out)
        return out

    def grouped_linear(self, x: Tensor, w: QuantTensor) -> Tensor:
        x = _flat(x)
        n_out, n_in, data = w.n_out, w.n_in, w.data
        n, n_groups, width = x.shape
        if width != n_in or n_out % n_groups:
            raise _wrong("grouped input", tuple(x.shape), (n, f"a divisor of {n_out}", n_in))
        out = _new(n, n_out)
        stride, rows = data.stride(0), n_out // n_groups
        if stride * n_out * n < self._split_cost:
            _linear(
                w.ggml_type, data.data_ptr(), stride, n_in, x.data_ptr(), n, n_groups, rows,
                out.data_ptr(), 0, rows,
            )  # fmt: skip
        else:
            self._split_linear(w, x, n, n_groups, out)
        return out

    def _split_linear(self, w: QuantTensor, x: Tensor, n: int, n_groups: int, out: Tensor) -> None:
        data, rows = w.data, w.n_out // n_groups
        fixed = (
            w.ggml_type, data.data_ptr(), data.stride(0), w.n_in, x.data_ptr(), n, n_groups, rows,
            out.data_ptr(),
        )  # fmt: skip
        self._split(rows, 16, lambda r0, r1: _linear(*fixed, r0, r1))

    def embed(self, w: QuantTensor, token_ids: Tensor) -> Tensor:
        ids, data = _ids(token_ids, torch.int64), w.data
        n = ids.numel()
        out = _new(n, w.n_in)
        wrong = experts.embed(
            w.ggml_type, data.data_ptr(), data.stride(0), w.n_in,
            ids.data_ptr(), n, w.n_out, out.data_ptr(),
        )  # fmt: skip
        if wrong >= 0:
            raise InvalidRequestError(
                f"token id {int(ids.view(-1)[wrong])} is outside the vocabulary of {w.n_out}"
            )
        return out

    def _table(self, layout: LayerLayout) -> tuple[LayerLayout, array[int], int, int]:
        """Type, offset, row bytes and input width of gate, up and down, for the kernel."""
        found = self._tables.get(id(layout))
        if found is None:
            by_role = dict(zip((r.role for r in layout.roles), layout.device_offsets, strict=True))
            roles = {r.role: r for r in layout.roles}
            table = array("q")
            for name in ROLES:
                role = roles[name]
                stride = row_bytes(role.ggml_type, role.n_in)
                table.extend((role.ggml_type, by_role[name], stride, role.n_in))
            found = (layout, table, roles["gate"].n_out, roles["down"].n_out)
            self._tables[id(layout)] = found
        return found

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
        _, table, n_hidden, n_out = self._table(layout)
        x, pair_rows, out_rows = _flat(x), _ids(pair_rows, torch.int64), _ids(out_rows, torch.int64)
        if x.size(1) != table[3]:
            raise _wrong("expert input width", x.size(1), table[3])
        if out.dtype is not _f32 or not out.is_contiguous() or out.size(-1) != n_out:
            raise _wrong("expert output", (out.dtype, tuple(out.shape)), f"float32 [.., {n_out}]")
        base = arena.data_ptr()
        slots = array("q", [base + offset for offset in slot_offsets])
        starts = array("q", pair_starts)
        first = (
            table.buffer_info()[0], slots.buffer_info()[0], starts.buffer_info()[0], len(slots),
            x.data_ptr(), pair_rows.data_ptr(), limit, *(activation or _NO_SITU),
        )  # fmt: skip
        last = (n_hidden, out.data_ptr(), n_out, out_rows.data_ptr())
        n_pairs = starts[-1]
        if layout.payload_bytes * n_pairs < self._split_cost:
            _experts(*first, 0, *last, -1, 0, 0)
        else:
            hidden = _new(2, n_pairs, n_hidden)
            self._split_experts((*first, hidden.data_ptr(), *last), n_hidden, n_out)

    def _split_experts(self, fixed: tuple[float, ...], n_hidden: int, n_out: int) -> None:
        self._split(n_hidden, 16, lambda r0, r1: _experts(*fixed, 0, r0, r1))
        self._split(n_out, 16, lambda r0, r1: _experts(*fixed, 1, r0, r1))

    def sum_experts(self, parts: Tensor, weights: Tensor) -> Tensor:
        parts, weights = _flat(parts), _flat(weights)
        n, k, d = parts.shape
        out = _new(n, d)
        layers.sum_experts(parts.data_ptr(), weights.data_ptr(), n, k, d, 0, out.data_ptr())
        return out

    # ---- element by element ---------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        x = _flat(x)
        out = _empty_like(x)
        d = x.size(-1)
        weight = None if weight is None else _flat(weight)
        at = 0 if weight is None else weight.data_ptr()
        layers.rms_norm(x.data_ptr(), at, x.numel() // d, d, eps, out.data_ptr())
        return out

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        y, cos, sin = _flat(x), _flat(cos), _flat(sin)
        n, n_heads, d = y.shape
        layers.rope(
            y.data_ptr(), cos.data_ptr(), sin.data_ptr(), n, n_heads, d, cos.size(1),
            -1.0 if inverse else 1.0,
        )  # fmt: skip
        return x if y is x else x.copy_(y)

    def swiglu(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        gate, up = _flat(gate), _flat(up)
        out = _empty_like(gate)
        layers.swiglu(gate.data_ptr(), up.data_ptr(), gate.numel(), limit, out.data_ptr())
        return out

    # ---- hyper-connections ----------------------------------------------------------------------

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
        streams = _flat(streams)
        n, s, d = streams.shape
        out = _new(n, d)
        post, comb = _new(n, s), _new(n, s, s)
        layers.hc_enter(
            self._float_matrix(fn), s * (s + 2), streams.data_ptr(), n, s, d, scale.data_ptr(),
            base.data_ptr(), norm.data_ptr(), eps, hc_eps, n_iterations,
            out.data_ptr(), post.data_ptr(), comb.data_ptr(),
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
        streams = _flat(streams)
        n, s, d = streams.shape
        out = _new(n, d)
        layers.hc_enter(
            self._float_matrix(fn), s, streams.data_ptr(), n, s, d, scale.data_ptr(),
            base.data_ptr(), norm.data_ptr(), eps, hc_eps, 0, out.data_ptr(), 0, 0,
        )  # fmt: skip
        return out

    def hc_leave(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        # Held by name until the kernel is done: an address keeps nothing alive.
        y, streams, post, comb = _flat(y), _flat(streams), _flat(post), _flat(comb)
        n, s, d = streams.shape
        out = _new(n, s, d)
        layers.hc_leave(
            y.data_ptr(), streams.data_ptr(), post.data_ptr(), comb.data_ptr(),
            n, s, d, out.data_ptr(),
        )  # fmt: skip
        return out

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
        streams = _flat(streams)
        n, s, d = streams.shape
        out = _new(n, d)
        layers.hc_enter(
            self._float_matrix(fn), s, streams.data_ptr(), n, s, d, scale.data_ptr(),
            base.data_ptr(), 0, eps, hc_eps, 0, out.data_ptr(), 0, 0,
        )  # fmt: skip
        return out

    # ---- attention ------------------------------------------------------------------------------

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
        q, keys, sinks = _flat(q), _flat(window_keys), _flat(sinks)
        n, n_heads, d = q.shape
        if d % 16:
            return torch.cat(
                [
                    self._plain.attend(
                        q[t : t + 1], keys, window_first, first_position + t, window, rows,
                        None if n_visible is None else n_visible[t : t + 1],
                        None if selected is None else selected[t : t + 1], sinks, scale,
                    )
                    for t in range(n)
                ]
            )  # fmt: skip
        out = _empty_like(q)
        n_rows = row_at = visible_at = selected_at = k = 0
        if rows is not None and n_visible is not None:
            rows, n_visible = _flat(rows), _ids(n_visible, torch.int32)
            n_rows, row_at, visible_at = rows.size(0), rows.data_ptr(), n_visible.data_ptr()
            if selected is not None:
                selected = _ids(selected, torch.int32)
                k, selected_at = selected.size(1), selected.data_ptr()
        n_keys = keys.size(0)
        fixed = (
            q.data_ptr(), n_heads, d, keys.data_ptr(), window_first, n_keys, first_position,
            window, row_at, n_rows, visible_at, selected_at, k, sinks.data_ptr(), scale,
            out.data_ptr(),
        )  # fmt: skip
        cost = q.numel() * (min(window, n_keys) + (k or n_rows))
        if cost < self._split_cost or n == 1:
            attention.attend(*fixed, 0, n)
        else:
            self._split_queries(attention.attend, fixed, n)
        return out

    def _split_queries(self, kernel: Any, fixed: tuple[float, ...], n: int) -> None:
        self._split(n, 1, lambda t0, t1: kernel(*fixed, t0, t1))

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
        d = norm.size(0)
        if d % 16:
            return torch.cat(
                [
                    self._plain.compress(
                        kv, gate, first + b * ratio, 1, ratio, has_previous or b > 0, norm,
                        cos[b : b + 1], sin[b : b + 1], eps,
                    )
                    for b in range(n_blocks)
                ]
            )  # fmt: skip
        kv, gate, norm, cos, sin = _flat(kv), _flat(gate), _flat(norm), _flat(cos), _flat(sin)
        out = _new(n_blocks, d)
        attention.compress(
            kv.data_ptr(), gate.data_ptr(), kv.size(1), first, n_blocks, ratio, d,
            1 if has_previous else 0, norm.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            cos.size(1), eps, out.data_ptr(),
        )  # fmt: skip
        return out

    def index_topk(
        self, q: Tensor, head_weights: Tensor, keys: Tensor, n_visible: Tensor, k: int
    ) -> Tensor:
        q, keys, head_weights = _flat(q), _flat(keys), _flat(head_weights)
        n_visible = _ids(n_visible, torch.int32)
        n, n_heads, d = q.shape
        n_rows = keys.size(0)
        out = torch.empty((n, k), dtype=torch.int32)
        fixed = (
            q.data_ptr(), n_heads, d, head_weights.data_ptr(), keys.data_ptr(), n_rows,
            n_visible.data_ptr(), k, out.data_ptr(),
        )  # fmt: skip
        if q.numel() * n_rows < self._split_cost or n == 1:
            attention.index_topk(*fixed, 0, n)
        else:
            self._split_queries(attention.index_topk, fixed, n)
        return out

    # ---- routing --------------------------------------------------------------------------------

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
        scores = _flat(scores)
        n, n_experts = scores.shape
        chosen = None if chosen is None else _ids(chosen, torch.int32)
        bias = None if bias is None else _flat(bias)
        ids, weights = torch.empty((n, k), dtype=torch.int32), _new(n, k)
        wrong = layers.route(
            scores.data_ptr(), 0 if bias is None else bias.data_ptr(),
            0 if chosen is None else chosen.data_ptr(), n, n_experts, k,
            1 if normalise else 0, scale, ids.data_ptr(), weights.data_ptr(),
        )  # fmt: skip
        if wrong >= 0:
            raise ModelError(
                f"the routing table names experts {sorted(ids[wrong].tolist())}, "
                f"but there are {n_experts}; the file is damaged"
            )
        return ids, weights

    def early_scores(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        scores = _flat(scores)
        out = _empty_like(scores)
        n, n_experts = scores.shape
        bias = None if bias is None else _flat(bias)
        at = 0 if bias is None else bias.data_ptr()
        layers.early_scores(scores.data_ptr(), at, n, n_experts, out.data_ptr())
        return out
