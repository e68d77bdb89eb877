"""The operations of Kimi-K3 and Kimi-Linear, compiled: shapes and addresses for `kimi`'s kernels.

Head widths that are no multiple of 16 (no published model has them) go through plain torch, token
by token where it matters, so the promise of `batch_invariant` holds for them as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aprefetch.kernels.cpu import kimi
from aprefetch.kernels.cpu.reference_kimi import KimiReferenceOps
from aprefetch.kernels.cpu.tensors import flat, new, wrong
from aprefetch.kernels.ops import Situ

__all__ = ["KimiNumbaOps"]

_empty_like = torch.empty_like


class KimiNumbaOps(KimiReferenceOps):
    """A part of `NumbaOps`; see `aprefetch.kernels.ops.Ops` for shapes and meaning."""

    _split_cost: float
    _taps: dict[int, tuple[Tensor, Tensor]]
    """Convolution weights by the id of the tensor they were turned from, which is kept alive."""

    def _split(self, n: int, step: int, call: Callable[[int, int], object]) -> None:
        raise NotImplementedError

    # ---- element by element ---------------------------------------------------------------------

    def situ(self, gate: Tensor, up: Tensor, activation: Situ) -> Tensor:
        gate, up = flat(gate), flat(up)
        out = _empty_like(gate)
        kimi.situ(gate.data_ptr(), up.data_ptr(), gate.numel(), *activation, out.data_ptr())
        return out

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = flat(x), flat(gate)
        n = x.numel()
        if gate.numel() != n:
            raise wrong("gate", gate.numel(), n)
        out = _empty_like(x)
        kimi.sigmoid_gate(x.data_ptr(), gate.data_ptr(), n, out.data_ptr())
        return out

    def residual_mix(self, streams: Tensor, score: Tensor, eps: float) -> Tensor:
        n, n_streams, d = streams.shape
        token, stream, element = streams.stride()
        if element != 1 or stream != d or streams.dtype is not torch.float32:
            streams, token = flat(streams), n_streams * d
        score, out = flat(score), new(n, d)
        kimi.residual_mix(
            streams.data_ptr(), 4 * token, n, n_streams, d, score.data_ptr(), eps, out.data_ptr()
        )
        return out

    # ---- attention ------------------------------------------------------------------------------

    def short_conv(self, x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
        x = flat(x)
        n, n_channels = x.shape
        if not history.is_contiguous() or history.dtype is not torch.float32:
            return super().short_conv(x, history, weight)
        found = self._taps.get(id(weight))
        if found is None:
            found = self._taps[id(weight)] = (weight, flat(weight.t()))
        taps, out = found[1], _empty_like(x)
        kimi.short_conv(
            x.data_ptr(), n, n_channels, history.data_ptr(), taps.data_ptr(), taps.size(0),
            out.data_ptr(),
        )  # fmt: skip
        return out

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
        n_heads, d = memory.size(0), memory.size(1)
        if d % 16 or not memory.is_contiguous() or memory.dtype is not torch.float32:
            return super().delta_rule(
                q, k, v, decay, beta, decay_bias, rate, memory, lower_bound=lower_bound, eps=eps
            )
        # Held by name until the kernel is done: an address keeps nothing alive.
        q, k, v, decay, beta = flat(q), flat(k), flat(v), flat(decay), flat(beta)
        decay_bias, rate = flat(decay_bias), flat(rate)
        n = q.size(0)
        out = new(n, n_heads, d)
        fixed = (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), beta.data_ptr(),
            decay_bias.data_ptr(), rate.data_ptr(), memory.data_ptr(), n, n_heads, d,
            0.0 if lower_bound is None else lower_bound, eps, out.data_ptr(),
        )  # fmt: skip
        if 4 * memory.numel() * n < self._split_cost:
            kimi.delta_rule(*fixed, 0, n_heads)
        else:
            self._split(n_heads, 1, lambda h0, h1: kimi.delta_rule(*fixed, h0, h1))
        return out

    def attend_latent(
        self, q: Tensor, rows: Tensor, first_position: int, n_value: int, scale: float
    ) -> Tensor:
        n, n_heads, width = q.shape
        if width % 16 or n_value % 16:
            return super().attend_latent(q, rows, first_position, n_value, scale)
        q, rows = flat(q), flat(rows)
        if rows.size(0) < first_position + n:
            raise wrong("latent rows", rows.size(0), first_position + n)
        out = new(n, n_heads, n_value)
        fixed = (
            q.data_ptr(), n_heads, width, rows.data_ptr(), first_position, n_value, scale,
            out.data_ptr(),
        )  # fmt: skip
        if q.numel() * (first_position + n) < self._split_cost:
            kimi.attend_latent(*fixed, 0, n, 0, n_heads)
        elif n == 1:
            self._split(n_heads, 4, lambda h0, h1: kimi.attend_latent(*fixed, 0, 1, h0, h1))
        else:
            self._split(n, 1, lambda t0, t1: kimi.attend_latent(*fixed, t0, t1, 0, n_heads))
        return out

    # ---- routing --------------------------------------------------------------------------------

    def sigmoid_scores(self, scores: Tensor, bias: Tensor) -> Tensor:
        scores, bias = flat(scores), flat(bias)
        out = _empty_like(scores)
        n, n_experts = scores.shape
        kimi.sigmoid_scores(scores.data_ptr(), bias.data_ptr(), n, n_experts, out.data_ptr())
        return out

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
        scores, bias = flat(scores), flat(bias)
        n, n_experts = scores.shape
        ids, weights = torch.empty((n, k), dtype=torch.int32), new(n, k)
        kimi.route_sigmoid(
            scores.data_ptr(), bias.data_ptr(), n, n_experts, k, 1 if normalise else 0, scale,
            n_groups, n_used_groups, ids.data_ptr(), weights.data_ptr(),
        )  # fmt: skip
        return ids, weights
