"""`Ops` in plain torch: the readable truth that every other implementation is compared to.

It dequantises a weight on each use, so it is slow, but needs nothing beyond torch and runs on any
torch device. Matrix products of different row counts may differ in the last bit here, hence
`batch_invariant` is false: the scheduler then steps sequences one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from aprefetch.kernels.cpu.reference_kimi import KimiReferenceOps, experts_one_by_one
from aprefetch.kernels.ops import Situ
from aprefetch.quant import dequantize
from aprefetch.quant.base import QuantTensor
from aprefetch.types import LayerLayout

__all__ = ["ReferenceOps"]

_SMALLEST_WEIGHT_SUM = 2.0**-14  # llama.cpp's guard for the sum of selected weights


class ReferenceOps(KimiReferenceOps):
    """See `aprefetch.kernels.ops.Ops` for shapes and meaning."""

    name = "reference"
    batch_invariant = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def linear(self, x: Tensor, w: QuantTensor) -> Tensor:
        return x @ dequantize(w.data, w.ggml_type, w.n_in).T

    def grouped_linear(self, x: Tensor, w: QuantTensor) -> Tensor:
        n_groups = x.shape[1]
        weight = dequantize(w.data, w.ggml_type, w.n_in).view(n_groups, -1, w.n_in)
        return torch.einsum("tgi,gri->tgr", x, weight).reshape(x.shape[0], -1)

    def embed(self, w: QuantTensor, token_ids: Tensor) -> Tensor:
        return dequantize(w.data[token_ids], w.ggml_type, w.n_in)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return y if weight is None else y * weight

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        n_rotary = 2 * cos.shape[1]
        tail = x[..., x.shape[-1] - n_rotary :]
        a, b = tail[..., 0::2].clone(), tail[..., 1::2].clone()
        c, s = cos[:, None, :], sin[:, None, :]
        if inverse:
            s = -s
        tail[..., 0::2] = a * c - b * s
        tail[..., 1::2] = a * s + b * c
        return x

    def swiglu(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return F.silu(gate) * up

    def _hc_mixes(
        self, streams: Tensor, fn: QuantTensor, eps: float, n_rows: int | None = None
    ) -> Tensor:
        flat = streams.flatten(1)
        weight = dequantize(fn.data[:n_rows], fn.ggml_type, fn.n_in)
        return self.rms_norm(flat, None, eps) @ weight.T

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
        n = streams.shape[1]
        mixes = self._hc_mixes(streams, fn, eps, n)
        pre = torch.sigmoid(mixes * scale[0] + base[:n]) + hc_eps
        return self.rms_norm((pre[..., None] * streams).sum(1), norm, eps)

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
        n = streams.shape[1]
        mixes = self._hc_mixes(streams, fn, eps)
        pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + hc_eps
        post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
        comb = torch.softmax(comb, dim=2) + hc_eps
        comb = comb / (hc_eps + comb.sum(1, keepdim=True))
        for _ in range(n_iterations - 1):
            comb = comb / (hc_eps + comb.sum(2, keepdim=True))
            comb = comb / (hc_eps + comb.sum(1, keepdim=True))
        h = (pre[..., None] * streams).sum(1)
        return self.rms_norm(h, norm, eps), post, comb

    def hc_leave(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return post[..., None] * y[:, None, :] + torch.einsum("tab,tad->tbd", comb, streams)

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
        mixes = self._hc_mixes(streams, fn, eps)
        pre = torch.sigmoid(mixes * scale + base) + hc_eps
        return (pre[..., None] * streams).sum(1)

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
        n_queries, n_heads, _ = q.shape
        p = torch.arange(first_position, first_position + n_queries, device=q.device)[:, None]
        j = torch.arange(window_first, window_first + window_keys.shape[0], device=q.device)[None]
        keys, seen = window_keys, (j <= p) & (j > p - window)
        if rows is not None and n_visible is not None:
            i = torch.arange(rows.shape[0], device=q.device)[None]
            seen_rows = i < n_visible[:, None]
            if selected is not None:
                picked = torch.zeros(
                    n_queries, rows.shape[0] + 1, dtype=torch.bool, device=q.device
                )
                picked.scatter_(1, selected.long() % (rows.shape[0] + 1), True)
                seen_rows = picked[:, :-1]
            keys, seen = torch.cat([keys, rows]), torch.cat([seen, seen_rows], dim=1)
        logits = torch.einsum("thd,md->thm", q, keys) * scale
        logits = logits.masked_fill(~seen[:, None, :], float("-inf"))
        sink = sinks[None, :, None].expand(n_queries, n_heads, 1)
        weights = torch.softmax(torch.cat([logits, sink], dim=2), dim=2)[..., :-1]
        return torch.einsum("thm,md->thd", weights, keys)

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
        width = norm.shape[0]
        stop = first + n_blocks * ratio
        values = kv[first:stop, -width:].view(n_blocks, ratio, width)
        gates = gate[first:stop, -width:].view(n_blocks, ratio, width)
        if kv.shape[1] == 2 * width:
            if has_previous:
                old_kv, old_gate = kv[first - ratio : first], gate[first - ratio : first]
            else:
                old_kv = torch.zeros_like(kv[:ratio])
                old_gate = torch.full_like(gate[:ratio], float("-inf"))
            a = torch.cat([old_kv, kv[first : stop - ratio]])[:, :width]
            b = torch.cat([old_gate, gate[first : stop - ratio]])[:, :width]
            values = torch.cat([a.view(n_blocks, ratio, width), values], dim=1)
            gates = torch.cat([b.view(n_blocks, ratio, width), gates], dim=1)
        pooled = (torch.softmax(gates, dim=1) * values).sum(1)
        pooled = self.rms_norm(pooled, norm, eps)
        return self.rope_(pooled[:, None, :], cos, sin)[:, 0, :].contiguous()

    def index_topk(
        self, q: Tensor, head_weights: Tensor, keys: Tensor, n_visible: Tensor, k: int
    ) -> Tensor:
        n_rows = keys.shape[0]
        scores = torch.einsum("thd,md->thm", q, keys).clamp(min=0)
        scores = torch.einsum("thm,th->tm", scores, head_weights)
        i = torch.arange(n_rows, device=q.device)[None]
        visible = i < n_visible[:, None]
        scores = scores.masked_fill(~visible, float("-inf"))
        order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :k]
        order = torch.where(torch.gather(visible, 1, order), order, n_rows)
        order = order.sort(dim=1).values
        chosen = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
        chosen[:, : order.shape[1]] = torch.where(order < n_rows, order, -1).int()
        return chosen

    def early_scores(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        ranked = torch.sqrt(F.softplus(scores))
        return ranked if bias is None else ranked + bias

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
        affinity = torch.sqrt(F.softplus(scores))
        if chosen is None:
            ranked = affinity if bias is None else affinity + bias
            order = torch.argsort(ranked, dim=1, descending=True, stable=True)
            ids = order[:, :k].sort(dim=1).values
        else:
            ids = chosen.long().sort(dim=1).values
        weights = torch.gather(affinity, 1, ids)
        if normalise:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=_SMALLEST_WEIGHT_SUM)
        return ids.int(), weights * scale

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
        experts_one_by_one(
            self, x, arena, slot_offsets, layout, pair_starts, pair_rows, limit, out, out_rows,
            activation,
        )  # fmt: skip

    def sum_experts(self, parts: Tensor, weights: Tensor) -> Tensor:
        total = weights[:, 0, None] * parts[:, 0]
        for k in range(1, parts.shape[1]):
            total = total + weights[:, k, None] * parts[:, k]
        return total
