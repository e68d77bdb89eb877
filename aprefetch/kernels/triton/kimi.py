"""The operations of Kimi-K3 and Kimi-Linear on CUDA.

Nothing here waits for the device, and all of it keeps the promise of `batch_invariant`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from aprefetch.kernels.cpu.reference import ReferenceOps
from aprefetch.kernels.ops import Situ
from aprefetch.kernels.triton import kimi_kernels as kernels

__all__ = ["KimiTritonOps"]

_SLICE = 1024  # elements per program of elementwise kernels
_CHANNELS = 128  # per program of the convolution
_VALUE_COLUMNS = 16  # of the delta rule's state per program
_SMALLEST_WEIGHT_SUM = 2.0**-14


class KimiTritonOps(ReferenceOps):
    """A part of `TritonOps`; see `aprefetch.kernels.ops.Ops` for shapes and meaning."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        self._no_sinks: dict[int, Tensor] = {}

    # Element by element

    def situ(self, gate: Tensor, up: Tensor, activation: Situ) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out, n = torch.empty_like(gate), gate.numel()
        kernels.situ_kernel[(triton.cdiv(n, _SLICE),)](
            gate, up, out, float(activation.beta), float(activation.linear_beta), n, B=_SLICE
        )
        return out

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        out, n = torch.empty_like(x), x.numel()
        kernels.gate_kernel[(triton.cdiv(n, _SLICE),)](x, gate, out, n, B=_SLICE)
        return out

    def residual_mix(self, streams: Tensor, score: Tensor, eps: float) -> Tensor:
        n_rows, n_streams, d = streams.shape
        if streams.stride()[1:] != (d, 1):
            streams = streams.contiguous()
        out = self.new(n_rows, d)
        block = max(16, int(triton.next_power_of_2(d)))
        kernels.residual_mix_kernel[(n_rows,)](
            streams, score, out, eps, n_streams, streams.stride(0), d,
            B=block, num_warps=min(8, max(1, block // 256)),
        )  # fmt: skip
        return out

    # Attention

    def short_conv(self, x: Tensor, history: Tensor, weight: Tensor) -> Tensor:
        if not history.is_contiguous():
            return super().short_conv(x, history, weight)
        x = x.contiguous()
        (n, n_channels), taps, out = x.shape, weight.shape[1], torch.empty_like(x)
        kernels.short_conv_kernel[(n, triton.cdiv(n_channels, _CHANNELS))](
            x, history, weight.contiguous(), out, n_channels,
            TAPS=taps, MOVES=n == 1, B=_CHANNELS,
        )  # fmt: skip
        if n > 1:
            last = x if n >= taps - 1 else torch.cat([history, x])
            history.copy_(last[last.shape[0] - (taps - 1) :])
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
        assert memory.is_contiguous()
        n, (n_heads, d) = q.shape[0], memory.shape[:2]
        q, k, v, decay, beta = (x.contiguous() for x in (q, k, v, decay, beta))
        out = self.new(n, n_heads, d)
        kernels.delta_rule_kernel[(n_heads, triton.cdiv(d, _VALUE_COLUMNS))](
            q, k, v, decay, beta, decay_bias, rate, memory, out, n, n_heads,
            0.0 if lower_bound is None else float(lower_bound), eps, d**-0.5,
            D=d, BOUNDED=lower_bound is not None, DB=max(16, int(triton.next_power_of_2(d))),
            VB=_VALUE_COLUMNS,
        )  # fmt: skip
        return out

    def attend_latent(
        self, q: Tensor, rows: Tensor, first_position: int, n_value: int, scale: float
    ) -> Tensor:
        """As attention over a window that holds all rows; the last columns of it are dropped."""
        n_heads, n_keys = q.shape[1], rows.shape[0]
        sinks = self._no_sinks.get(n_heads)
        if sinks is None:
            sinks = torch.full((n_heads,), float("-inf"), device=self.device)
            self._no_sinks[n_heads] = sinks
        out = self.attend(
            q.contiguous(), rows, 0, first_position, n_keys, None, None, None, sinks, scale
        )
        return out[..., :n_value].contiguous()

    # Routing

    def sigmoid_scores(self, scores: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid(scores) + bias

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
        scores = scores.contiguous()
        n_rows, n_experts = scores.shape
        ids, weights = self.new(n_rows, k, dtype=torch.int32), self.new(n_rows, k)
        kernels.route_sigmoid_kernel[(n_rows,)](
            scores, bias, ids, weights, n_experts, scale, _SMALLEST_WEIGHT_SUM,
            K=k, KB=max(2, int(triton.next_power_of_2(k))),
            B=max(16, int(triton.next_power_of_2(n_experts))),
            NORMALISE=normalise, GROUPS=max(1, n_groups), USED=n_used_groups, num_warps=1,
        )  # fmt: skip
        return ids, weights
