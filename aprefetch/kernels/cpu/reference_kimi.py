"""The operations of Kimi-K3 and Kimi-Linear in plain torch.

A mixin: whoever inherits it says by `batch_invariant` what is promised. With the promise, tokens
are taken one at a time wherever several at once could round differently, so that any cut of a
sequence into calls gives the same bits; without it, long spans use faster forms.

On a CPU, torch computes the last few elements of a buffer by another routine than the others, which
differs from it in the last bit; numpy does not, so exponentials and the like are numpy's here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from aprefetch.kernels.fused import FusedOps
from aprefetch.kernels.ops import Ops, Situ
from aprefetch.quant.base import QuantTensor
from aprefetch.types import LayerLayout

__all__ = ["KimiReferenceOps", "delta_rule_by_chunks", "delta_rule_by_tokens", "experts_one_by_one"]

_SMALLEST_WEIGHT_SUM = 2.0**-14  # llama.cpp's guard for the sum of selected weights
_DELTA_CHUNK = 16
_FEWEST_FOR_CHUNKS = 2 * _DELTA_CHUNK
_SOFTPLUS_IS_IDENTITY = 20.0


def _exp(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return torch.exp(x)
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.exp(x.contiguous().numpy()))


def _tanh(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return torch.tanh(x)
    return torch.from_numpy(np.tanh(x.contiguous().numpy()))


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + _exp(-x))


def _softplus(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return F.softplus(x)
    # Not log1p(exp(x)): that overflows.
    small = np.log1p(_exp(x.clamp(max=_SOFTPLUS_IS_IDENTITY)).numpy())
    return torch.where(x > _SOFTPLUS_IS_IDENTITY, x, torch.from_numpy(small))


class KimiReferenceOps(FusedOps):
    """See `aprefetch.kernels.ops.Ops` for shapes and meaning."""

    batch_invariant: bool

    def situ(self, gate: Tensor, up: Tensor, activation: Situ) -> Tensor:
        beta, linear_beta = activation
        if linear_beta > 0:
            up = linear_beta * _tanh(up / linear_beta)
        return beta * _tanh(gate / beta) * _sigmoid(gate) * up

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * _sigmoid(gate).view(x.shape)

    def residual_mix(self, streams: Tensor, score: Tensor, eps: float) -> Tensor:
        logits = (streams * score).sum(-1) * torch.rsqrt(streams.square().mean(-1) + eps)
        weights = torch.softmax(logits, dim=1)
        # Added up stream by stream: a reduction may order its terms by the number of rows.
        mixed = weights[:, 0, None] * streams[:, 0]
        for i in range(1, streams.shape[1]):
            mixed += weights[:, i, None] * streams[:, i]
        return mixed

    def short_conv(self, x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
        n, taps = x.shape[0], weight.shape[1]
        inputs = torch.cat([history, x])
        y = inputs[:n] * weight[:, 0]
        for tap in range(1, taps):
            y += inputs[tap : tap + n] * weight[:, tap]
        history.copy_(inputs[n:])
        return y * _sigmoid(y)

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        decay_bias: Tensor,
        rate: Tensor,
        memory: Tensor,
        *,
        lower_bound: float | None,
        eps: float,
    ) -> Tensor:
        n_heads, width = memory.shape[:2]
        q, k, v, f = (x.view(-1, n_heads, width) for x in (q, k, v, decay + decay_bias))
        q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + eps) * width**-0.5)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + eps)
        if lower_bound is None:
            g = -rate[:, None] * _softplus(f)
        else:
            g = lower_bound * _sigmoid(rate[:, None] * f)
        beta = _sigmoid(beta)
        if self.batch_invariant or q.shape[0] < _FEWEST_FOR_CHUNKS:
            return delta_rule_by_tokens(q, k, v, g, beta, memory)
        return delta_rule_by_chunks(q, k, v, g, beta, memory)

    def attend_latent(
        self, q: Tensor, rows: Tensor, first_position: int, n_value: int, scale: float
    ) -> Tensor:
        n_queries = q.shape[0]
        if self.batch_invariant and n_queries > 1:
            outputs = [
                self.attend_latent(
                    q[t : t + 1], rows[: first_position + t + 1], first_position + t, n_value, scale
                )
                for t in range(n_queries)
            ]
            return torch.cat(outputs)
        p = torch.arange(first_position, first_position + n_queries, device=q.device)[:, None]
        seen = torch.arange(rows.shape[0], device=q.device)[None] <= p
        logits = torch.einsum("thw,mw->thm", q, rows) * scale
        weights = torch.softmax(logits.masked_fill(~seen[:, None], float("-inf")), dim=2)
        return torch.einsum("thm,mv->thv", weights, rows[:, :n_value])

    def sigmoid_scores(self, scores: Tensor, bias: Tensor) -> Tensor:
        return _sigmoid(scores) + bias

    def route_sigmoid(
        self,
        scores: Tensor,
        bias: Tensor,
        k: int,
        *,
        normalise: bool,
        scale: float,
        n_groups: int = 1,
        n_used_groups: int = 1,
    ) -> tuple[Tensor, Tensor]:
        affinity = _sigmoid(scores)
        ranked = affinity + bias
        if n_groups > 1:
            groups = ranked.view(ranked.shape[0], n_groups, -1)
            best_two = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2)
            order = torch.argsort(best_two, dim=1, descending=True, stable=True)
            dropped = torch.zeros_like(best_two, dtype=torch.bool)
            dropped.scatter_(1, order[:, n_used_groups:], True)
            ranked = groups.masked_fill(dropped[..., None], float("-inf")).flatten(1)
        order = torch.argsort(ranked, dim=1, descending=True, stable=True)
        ids = order[:, :k].sort(dim=1).values
        weights = torch.gather(affinity, 1, ids)
        if normalise:
            total = weights[:, :1].clone()
            for i in range(1, k):  # a reduction of few columns may depend on the number of rows
                total += weights[:, i, None]
            weights = weights / total.clamp(min=_SMALLEST_WEIGHT_SUM)
        return ids.int(), weights * scale


def delta_rule_by_tokens(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor
) -> Tensor:
    """The recurrence: `q`, `k` normalised, `q` scaled, `g` log decay, `[T, H, d]`; `beta [T, H]`.

    Moves `memory [H, d, d]` on in place; returns `[T, H, d]`.
    """
    out = torch.empty_like(v)
    kept = _exp(g)
    for t in range(q.shape[0]):
        key = k[t, :, :, None]
        memory *= kept[t, :, :, None]
        error = beta[t, :, None] * (v[t] - (memory * key).sum(1))
        memory += key * error[:, None, :]
        out[t] = (memory * q[t, :, :, None]).sum(1)
    return out


def delta_rule_by_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor
) -> Tensor:
    """The same in blocks of tokens: equal in exact arithmetic, not to the last bit.

    Inside a block the errors of all tokens follow from one unit triangular system (the WY form of
    Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"), with decays taken
    as exponentials of differences: split into two factors they would overflow.
    """
    out = torch.empty_like(v)
    for start in range(0, q.shape[0], _DELTA_CHUNK):
        part = slice(start, start + _DELTA_CHUNK)
        # Heads first: [H, C, d] and [H, C, 1].
        heads_first = (x[part].transpose(0, 1) for x in (q, k, v, g))
        queries, keys, values, log_decay = heads_first
        out[part] = _delta_chunk(
            queries, keys, values, log_decay.cumsum(1), beta[part].T[..., None], memory
        ).transpose(0, 1)
    return out


def _delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor
) -> Tensor:
    """One block, heads first; `decay [H, C, d]` sums the log decays from the block's start."""
    n = q.shape[1]
    earlier = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()[..., None]
    between = decay[:, :, None] - decay[:, None]
    between = _exp(between.masked_fill(~earlier, float("-inf")))  # [H, C, C, d]
    weighted = k[:, None] * between
    system = (beta * (k[:, :, None] * weighted).sum(-1)).tril(-1)
    sides = torch.cat([beta * v, beta * k * _exp(decay)], dim=2)
    solved: Tensor = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new_values, new_keys = solved.chunk(2, dim=2)
    errors = new_values - new_keys @ memory
    out: Tensor = (q * _exp(decay)) @ memory + (q[:, :, None] * weighted).sum(-1) @ errors
    last = decay[:, -1:]
    memory *= _exp(last).transpose(1, 2)
    memory += (k * _exp(last - decay)).transpose(1, 2) @ errors
    return out


def experts_one_by_one(
    ops: Ops,
    x: Tensor,
    arena: Tensor,
    slot_offsets: Sequence[int],
    layout: LayerLayout,
    pair_starts: Sequence[int],
    pair_rows: Tensor,
    limit: float,
    out: Tensor,
    out_rows: Tensor,
    activation: Situ | None,
) -> None:
    """`Ops.experts` by products of whole matrices, for any implementation of `linear`."""
    for e, offset in enumerate(slot_offsets):
        pairs = slice(pair_starts[e], pair_starts[e + 1])
        gate, up, down = (_role(arena, offset, layout, i) for i in range(len(layout.roles)))
        rows = x[pair_rows[pairs]]
        sides = ops.linear(rows, gate), ops.linear(rows, up)
        hidden = ops.swiglu(*sides, limit) if activation is None else ops.situ(*sides, activation)
        out[out_rows[pairs]] = ops.linear(hidden, down)


def _role(arena: Tensor, offset: int, layout: LayerLayout, index: int) -> QuantTensor:
    role = layout.roles[index]
    start = offset + layout.device_offsets[index]
    raw = arena[start : start + role.n_bytes].view(role.n_out, -1)
    return QuantTensor(raw, role.ggml_type, role.n_out, role.n_in)
