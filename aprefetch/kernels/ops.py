"""The operations that models are written in, and what every implementation must keep.

Notation: T rows (tokens), D hidden, S residual streams, H heads, d head dim, E experts, K experts
per token. All activations are contiguous float32 tensors on the device; weights are `QuantTensor`s
holding the file's own bytes. Nothing is re-quantised and no activation is rounded below float32.

Every row of a result depends only on the same row of the input, to the last bit, when
`batch_invariant` is true: chunking and batching then cannot change a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from aprefetch.kernels.fused import AttentionInputs, Queries, RouterAhead, StackedWeights
from aprefetch.quant.base import QuantTensor
from aprefetch.types import LayerLayout

__all__ = ["Ops", "Situ"]


class Situ(NamedTuple):
    """The gated activation `beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)`.

    With `linear_beta <= 0` the up side stays as it is.
    """

    beta: float
    linear_beta: float


class Ops(Protocol):
    """One implementation per device; chosen by the device, never by flags inside models."""

    name: str
    batch_invariant: bool

    def linear(self, x: Tensor, w: QuantTensor) -> Tensor:
        """`x [T, n_in]` times `w [n_out, n_in]` transposed -> `[T, n_out]`."""
        ...

    def grouped_linear(self, x: Tensor, w: QuantTensor) -> Tensor:
        """`x [T, G, n_in]`, `w [G * R, n_in]`: group g uses rows g*R..(g+1)*R -> `[T, G * R]`."""
        ...

    def embed(self, w: QuantTensor, token_ids: Tensor) -> Tensor:
        """Rows `token_ids [T]` (int64) of `w [V, D]`, dequantised -> `[T, D]`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; any leading shape."""
        ...

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate the trailing `2 * cos.shape[1]` dims of `x [T, H, d]` in place, interleaved pairs.

        `cos`, `sin` are `[T, dr / 2]`. `inverse` rotates back. Returns `x`.
        """
        ...

    def swiglu(self, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        """`silu(min(gate, limit)) * clamp(up, -limit, limit)`; `limit <= 0` means no clamp."""
        ...

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
        """Collapse `streams [T, S, D]` for a sublayer and norm the result (hyper-connections).

        Returns the normed sublayer input `[T, D]`, `post [T, S]` and the mixing matrix
        `comb [T, S, S]` (source, destination) after Sinkhorn.
        """
        ...

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
        """Only the first result of `hc_enter`: the normed sublayer input `[T, D]`."""
        ...

    def hc_leave(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """`out[t, b] = post[t, b] * y[t] + sum_a comb[t, a, b] * streams[t, a]` -> `[T, S, D]`."""
        ...

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
        """The head's collapse of `streams [T, S, D]` -> `[T, D]`; `fn [S, S * D]`, `scale [1]`."""
        ...

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
        """Attention of one sequence's chunk over its window and its compressed rows; K equals V.

        `q [T, H, d]`, query t stands at position `first_position + t`. `window_keys [M, d]` holds
        raw keys of positions `window_first..window_first + M - 1`; query p sees those in
        `p - window < j <= p`. `rows [R, d]` are compressed rows: the first `n_visible[t]` (int32)
        of them, or, where `selected [T, k]` (int32, ascending, padded with -1) is given, those.
        `sinks [H]` join the softmax and add no value. Returns `[T, H, d]`.
        """
        ...

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
        """Pool tokens into compressed rows `[n_blocks, d]`, normed and rotated.

        `kv`, `gate` are `[M, c * d]` (gate includes the position bias); block b covers tokens
        `first + b * ratio ..` of them. `c` is 1 (plain) or 2 (overlapping: the previous block's
        first halves and this block's second halves). `has_previous` is false when block 0 is the
        sequence's first: its previous half has weight 0. `cos`, `sin [n_blocks, dr / 2]`.
        """
        ...

    def index_topk(
        self, q: Tensor, head_weights: Tensor, keys: Tensor, n_visible: Tensor, k: int
    ) -> Tensor:
        """The indexer: best `k` of the visible rows per query, as `selected` for `attend`.

        `q [T, n, di]`, `head_weights [T, n]`, `keys [R, di]`, `n_visible [T]` int32. Score of row i
        is `sum_h head_weights[h] * relu(q_h . key_i)`; ties go to the lower row. `[T, k]` int32.
        """
        ...

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
        """Pick experts by `sqrt(softplus(scores)) + bias`, or take `chosen [T, K]` (int32).

        `scores [T, E]` are raw router outputs. Returns ids `[T, K]` int32 **ascending in each row**
        and their unbiased weights `[T, K]`, normalised to sum 1 if asked, times `scale`. Ties go
        to the lower id.
        """
        ...

    def early_scores(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """What `route` ranks by: `sqrt(softplus(scores)) + bias` -> `[T, E]`."""
        ...

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
        """Run several experts of one layer straight from their device slots (gated MLP).

        Expert e lies in `arena` (uint8) at byte `slot_offsets[e]`, its roles at
        `layout.device_offsets`. Its input rows are `x[pair_rows[i]]` for i in
        `pair_starts[e]..pair_starts[e + 1]`, and the result of pair i goes to `out[out_rows[i]]`
        (`out [T * K, n_out of down]`). `pair_rows`, `out_rows` are int64. Without `activation` it
        is `swiglu` with `limit`, else `situ`, and `limit` has no meaning.
        """
        ...

    def sum_experts(self, parts: Tensor, weights: Tensor) -> Tensor:
        """`sum_k weights[t, k] * parts[t, k]`, in ascending k -> `[T, D]`; `parts [T, K, D]`."""
        ...

    def situ(self, gate: Tensor, up: Tensor, activation: Situ) -> Tensor:
        """The activation of `gate` and `up`, element by element; any equal shapes."""
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x * sigmoid(gate)`; equal numbers of elements, the result has the shape of `x`."""
        ...

    def residual_mix(self, streams: Tensor, score: Tensor, eps: float) -> Tensor:
        """Attention over the residual streams of each token, `[T, S, D]` -> `[T, D]`.

        Stream i is weighted by `softmax_i(sum(score * s_i) / sqrt(mean(s_i^2) + eps))`; what is
        summed are the raw streams. Rows of D are contiguous, other strides may be any.
        """
        ...

    def short_conv(self, x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
        """`silu` of a causal convolution per channel over one sequence's tokens, `[T, C]`.

        `weight [C, taps]`, its last tap meets the current token. `history [taps - 1, C]` holds the
        inputs before `x [T, C]`, the oldest first, and is moved on in place.
        """
        ...

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
        """Kimi delta attention over one sequence's tokens, `[T, H * d]` -> `[T, H, d]`.

        `q`, `k`, `v`, `decay` are `[T, H * d]`, `beta [T, H]`; all raw. Per head:

            q, k    normalised: u / sqrt(sum(u^2) + eps)
            f       = decay + decay_bias [H * d], rate [H] > 0
            g       = lower_bound * sigmoid(rate * f), or -rate * softplus(f) without a bound
            S       = exp(g) * S, along the key axis
            S       = S + k (sigmoid(beta) * (v - S^T k))^T
            out     = S^T q / sqrt(d)

        `memory [H, d, d]` (key axis, value axis) is S and is moved on in place. An implementation
        that is `batch_invariant` gives the same bits however the tokens are cut into calls.
        """
        ...

    def attend_latent(
        self, q: Tensor, rows: Tensor, first_position: int, n_value: int, scale: float
    ) -> Tensor:
        """Causal attention of one sequence's chunk over its latent rows.

        `q [T, H, w]`; query t stands at `first_position + t` and sees `rows [M, w]` up to that
        position, `M = first_position + T`. Values are the first `n_value` columns of the rows.
        Returns `[T, H, n_value]`.
        """
        ...

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
        """As `route`, by `sigmoid(scores) + bias`.

        With several groups of neighbouring experts, only the `n_used_groups` whose two best biased
        values have the largest sum take part.
        """
        ...

    def sigmoid_scores(self, scores: Tensor, bias: Tensor) -> Tensor:
        """What `route_sigmoid` ranks by: `sigmoid(scores) + bias` -> `[T, E]`."""
        ...

    # Stages of several operations; `aprefetch.kernels.fused.FusedOps` composes and describes them.

    def stacked_linear(self, x: Tensor, stack: StackedWeights) -> list[Tensor]: ...

    def attention_inputs(
        self, u: Tensor, weights: AttentionInputs, cos: Tensor, sin: Tensor
    ) -> Queries: ...

    def attention_output(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        w_low: QuantTensor,
        w_out: QuantTensor,
        n_groups: int,
    ) -> Tensor: ...

    def gated_mlp(
        self, x: Tensor, gate_up: StackedWeights, down: QuantTensor, limit: float
    ) -> Tensor: ...

    def hc_pass(
        self,
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def sum_experts_and(self, parts: Tensor, weights: Tensor, shared: Tensor) -> Tensor: ...

    def scores_ahead(
        self,
        ahead: RouterAhead,
        parts: Tensor | None,
        weights: Tensor | None,
        shared: Tensor,
        streams: Tensor,
        post: Tensor,
        comb: Tensor,
    ) -> Tensor: ...

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor on the ops' device."""
        ...
