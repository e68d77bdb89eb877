"""Operations made of others: one name for a whole stage of a layer.

A stage of a few small products is bounded by the calls, not by the numbers, so an implementation
may do it in one go. It must give the very bits that the composition here gives with its own
primitives. Implementations inherit `FusedOps` and override what pays on their device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from aprefetch.quant.base import QuantTensor

if TYPE_CHECKING:
    from aprefetch.kernels.ops import Ops

__all__ = ["AttentionInputs", "FusedOps", "Queries", "RouterAhead", "StackedWeights"]


class StackedWeights:
    """Several weights that read the same input, stacked by encoding.

    Rows of equal encoding lie together, so that one product serves them all; each output element
    is still the same dot product of the same bytes. Immutable.
    """

    __slots__ = ("columns", "matrices", "n_out", "places", "sizes")

    def __init__(self, weights: Sequence[QuantTensor]) -> None:
        self.matrices: list[QuantTensor] = []
        self.columns: list[tuple[int, int, int]] = [(0, 0, 0)] * len(weights)
        """Of each weight: matrix, first output column there, number of columns."""
        by_type: dict[int, list[int]] = {}
        for i, w in enumerate(weights):
            by_type.setdefault(w.ggml_type, []).append(i)
        for members in by_type.values():
            group, start = [weights[i] for i in members], 0
            stacked = group[0]
            if len(group) > 1:
                data = torch.cat([w.data for w in group])
                stacked = QuantTensor(data, stacked.ggml_type, data.shape[0], stacked.n_in)
            for i, w in zip(members, group, strict=True):
                self.columns[i] = len(self.matrices), start, w.n_out
                start += w.n_out
            self.matrices.append(stacked)
        order = sorted(range(len(weights)), key=self.columns.__getitem__)
        self.n_out = sum(w.n_out for w in weights)
        self.sizes = [weights[i].n_out for i in order]
        """Numbers of columns in the order in which they lie, all matrices beside each other."""
        self.places = [order.index(i) for i in range(len(weights))]
        """Of each weight: where in `sizes` it is."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """Weights between a sublayer's input and its queries and keys.

    `stack` makes the low-rank query, the key and whatever else reads the input, in this order.
    """

    stack: StackedWeights
    q_norm: Tensor
    q_up: QuantTensor
    k_norm: Tensor
    n_heads: int
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class RouterAhead:
    """A router that is asked early, with the hyper-connection and the norm before it."""

    fn: QuantTensor
    scale: Tensor
    base: Tensor
    norm: Tensor
    router: QuantTensor
    bias: Tensor | None
    eps: float
    hc_eps: float


class Queries(NamedTuple):
    """Results of `attention_inputs`: `q [T, H, d]`, `k [T, d]`, `q_low [T, r]`, and the others."""

    q: Tensor
    k: Tensor
    q_low: Tensor
    extra: list[Tensor]


class FusedOps:
    """Stages in terms of the primitive operations; see the module."""

    def stacked_linear(self: Ops, x: Tensor, stack: StackedWeights) -> list[Tensor]:
        """`x [T, n_in]` times every weight: contiguous `[T, n_out]` in the order of the weights."""
        products = [self.linear(x, w) for w in stack.matrices]
        return [
            products[i]
            if n == products[i].shape[1]
            else products[i].narrow(1, start, n).contiguous()
            for i, start, n in stack.columns
        ]

    def attention_inputs(
        self: Ops, u: Tensor, weights: AttentionInputs, cos: Tensor, sin: Tensor
    ) -> Queries:
        """Queries and keys of `u [T, D]`: stacked products, norms, the second query product, rope.

        The norm over each query head has no weight. `extra` holds the raw products of the other
        stacked weights; its tensors and `q_low` need not be contiguous.
        """
        n_rows, eps = u.shape[0], weights.eps
        q_low, k, *extra = self.stacked_linear(u, weights.stack)
        q_low = self.rms_norm(q_low, weights.q_norm, eps)
        q = self.linear(q_low, weights.q_up).view(n_rows, weights.n_heads, -1)
        q = self.rope_(self.rms_norm(q, None, eps), cos, sin)
        k = self.rms_norm(k, weights.k_norm, eps)
        k = self.rope_(k.view(n_rows, 1, -1), cos, sin).view(n_rows, -1)
        return Queries(q, k, q_low, extra)

    def attention_output(
        self: Ops,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        w_low: QuantTensor,
        w_out: QuantTensor,
        n_groups: int,
    ) -> Tensor:
        """`heads [T, H, d]` (may be overwritten) rotated back, then a grouped product and one more.

        `w_low [G * R, H * d / G]`, `w_out [D, G * R]` -> `[T, D]`.
        """
        heads = self.rope_(heads, cos, sin, inverse=True)
        low = self.grouped_linear(heads.view(heads.shape[0], n_groups, -1), w_low)
        return self.linear(low, w_out)

    def gated_mlp(
        self: Ops, x: Tensor, gate_up: StackedWeights, down: QuantTensor, limit: float
    ) -> Tensor:
        """`swiglu` of the two products of `x [T, D]`, times `down` -> `[T, D]`."""
        gate, up = self.stacked_linear(x, gate_up)
        return self.linear(self.swiglu(gate, up, limit), down)

    def hc_pass(
        self: Ops,
        y: Tensor,
        streams: Tensor,
        post: Tensor,
        comb: Tensor,
        fn: QuantTensor,
        scale: Tensor,
        base: Tensor,
        norm: Tensor,
        *,
        eps: float,
        hc_eps: float,
        n_iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`hc_leave` of one sublayer, `hc_enter` of the next: streams, and the latter's three."""
        streams = self.hc_leave(y, streams, post, comb)
        entered = self.hc_enter(
            streams, fn, scale, base, norm, eps=eps, hc_eps=hc_eps, n_iterations=n_iterations
        )
        return streams, *entered

    def sum_experts_and(self: Ops, parts: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
        """`sum_experts` plus `shared [T, D]`."""
        return self.sum_experts(parts, weights) + shared

    def scores_ahead(
        self: Ops,
        ahead: RouterAhead,
        parts: Tensor | None,
        weights: Tensor | None,
        shared: Tensor,
        streams: Tensor,
        post: Tensor,
        comb: Tensor,
    ) -> Tensor:
        """What a later layer's router would rank by, `[T, E]`, after a sublayer's `hc_leave`.

        The sublayer's result is the sum of `parts [T, K, D]` by `weights [T, K]`, if there are
        any, and of `shared [T, D]`.
        """
        y = shared
        if parts is not None and weights is not None:
            y = self.sum_experts_and(parts, weights, shared)
        streams = self.hc_leave(y, streams, post, comb)
        x = self.hc_route_input(
            streams, ahead.fn, ahead.scale, ahead.base, ahead.norm,
            eps=ahead.eps, hc_eps=ahead.hc_eps,
        )  # fmt: skip
        return self.early_scores(self.linear(x, ahead.router), ahead.bias)
