"""Attention of Kimi-K3 and Kimi-Linear: delta attention (KDA), latent attention (MLA), their state.

Neither rotates anything: order comes from the recurrence alone. A KDA layer keeps a state of fixed
size per sequence, an MLA layer one row per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aprefetch.errors import SourceError
from aprefetch.kernels.ops import Ops
from aprefetch.models.kimi_k3_args import KIMI_LINEAR, KimiArgs
from aprefetch.models.kv_cache import GrowingRows, StatePart, check_part
from aprefetch.models.layers import FusedLinear
from aprefetch.models.loading import DenseLoader
from aprefetch.quant import dequantize
from aprefetch.quant.base import QuantTensor

__all__ = ["DeltaAttention", "KimiState", "LatentAttention", "Span"]

_F32 = 0
_PART = "attention"


class DeltaState:
    """Convolution inputs `[3, taps - 1, H * d]` (q, k, v) and memory `[H, d, d]` of one layer."""

    __slots__ = ("history", "memory")

    def __init__(self, args: KimiArgs, device: torch.device) -> None:
        width = args.n_heads * args.kda_dim
        self.history = torch.zeros((3, args.conv_taps - 1, width), device=device)
        self.memory = torch.zeros((args.n_heads, args.kda_dim, args.kda_dim), device=device)

    @property
    def n_bytes(self) -> int:
        return 4 * (self.history.numel() + self.memory.numel())

    def dump(self) -> list[StatePart]:
        return [(self.history, 0), (self.memory, 0)]

    def load(self, parts: Sequence[StatePart]) -> None:
        history, memory = parts
        self.history = check_part(history, tuple(self.history.shape))
        self.memory = check_part(memory, tuple(self.memory.shape))


class KimiState:
    """One sequence: per layer a `DeltaState`, or the latent rows of all its tokens.

    A step that is given up half-way leaves a state that must not be used again.
    """

    __slots__ = ("layers", "n_tokens")

    def __init__(self, layers: list[DeltaState | GrowingRows]) -> None:
        self.layers = layers
        self.n_tokens = 0

    @property
    def n_bytes(self) -> int:
        """Bytes held by the caches."""
        return sum(layer.n_bytes for layer in self.layers)

    def dump(self) -> list[StatePart]:
        """All stores, as views."""
        return [part for layer in self.layers for part in layer.dump()]

    def load(self, parts: Sequence[StatePart], n_tokens: int) -> None:
        """Take over the parts of a dump.

        Raises:
            ValueError: they are of another model.
        """
        left = list(parts)
        for layer in self.layers:
            n = 2 if isinstance(layer, DeltaState) else 1
            if len(left) < n:
                raise ValueError(f"a state of {len(parts)} parts, which is too few")
            if isinstance(layer, DeltaState):
                layer.load(left[:n])
            else:
                layer.load(left[0])
            del left[:n]
        if left:
            raise ValueError(f"a state of {len(parts)} parts, which is too many")
        self.n_tokens = n_tokens


@dataclass(slots=True)
class Span:
    """Rows `start .. start + n` of a step belong to one sequence, from `position` on."""

    state: KimiState
    start: int
    n: int
    position: int


class DeltaAttention:
    """Kimi delta attention: short convolutions, a decay per channel, the delta rule, a gate."""

    def __init__(self, load: DenseLoader, layer: int, args: KimiArgs) -> None:
        self._args, self.layer = args, layer
        p, d, heads, dim = f"blk.{layer}.", args.hidden_size, args.n_heads, args.kda_dim
        width = heads * dim
        inputs = [
            *_qkv(load, p, width, d),
            load.matrix(p + "ssm_f_a.weight", dim, d, _PART),
            load.matrix(p + "ssm_beta.weight", heads, d, _PART),
        ]
        self.gate_b: QuantTensor | None = None
        if args.architecture == KIMI_LINEAR:
            inputs.append(load.matrix(p + "ssm_g_a.weight", dim, d, _PART))
            self.gate_b = load.matrix(p + "ssm_g_b.weight", width, dim, _PART)
        else:
            inputs.append(load.matrix(p + "ssm_g.weight", width, d, _PART))
        self.inputs = FusedLinear(inputs)
        self.decay_b = load.matrix(p + "ssm_f_b.weight", width, dim, _PART)
        self.convolutions = [
            _any_shape(load, f"{p}ssm_conv1d_{role}.weight", (width, args.conv_taps))
            for role in "qkv"
        ]
        self.decay_bias = load.values(p + "ssm_dt.bias", (width,), _PART)
        # The file holds -exp(A_log).
        self.rate = -_any_shape(load, p + "ssm_a", (heads,))
        if not bool((self.rate > 0).all()):
            raise SourceError(
                f"tensor {p}ssm_a should be negative throughout (it holds -exp(A_log)); the file "
                "was converted by other rules",
                key=p + "ssm_a",
            )
        self.norm = load.values(p + "ssm_norm.weight", (dim,), "norms")
        self.output = load.matrix(p + "attn_output.weight", d, width, _PART)

    def new_state(self, device: torch.device) -> DeltaState:
        return DeltaState(self._args, device)

    def __call__(self, ops: Ops, x: Tensor, spans: Sequence[Span]) -> Tensor:
        """`x [T, D]` normed inputs -> `[T, D]`; sequences' states take the new tokens."""
        args = self._args
        q, k, v, decay, beta, gate = self.inputs(ops, x)
        decay = ops.linear(decay, self.decay_b)
        outputs = []
        for span in spans:
            rows = slice(span.start, span.start + span.n)
            state = span.state.layers[self.layer]
            assert isinstance(state, DeltaState)
            q_in, k_in, v_in = (
                ops.short_conv(part[rows], history, taps)
                for part, history, taps in zip(
                    (q, k, v), state.history, self.convolutions, strict=True
                )
            )
            out = ops.delta_rule(
                q_in,
                k_in,
                v_in,
                decay[rows],
                beta[rows],
                self.decay_bias,
                self.rate,
                state.memory,
                lower_bound=args.gate_lower_bound,
                eps=args.rms_eps,
            )
            outputs.append(out)
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.gate_b is not None:
            gate = ops.linear(gate, self.gate_b)
        o = ops.sigmoid_gate(ops.rms_norm(o, self.norm, args.rms_eps), gate)
        return ops.linear(o.view(x.shape[0], -1), self.output)


class LatentAttention:
    """Multi-head latent attention in absorbed form: queries and outputs live in latent space."""

    def __init__(self, load: DenseLoader, layer: int, args: KimiArgs) -> None:
        self._args, self.layer = args, layer
        p, d, heads = f"blk.{layer}.", args.hidden_size, args.n_heads
        key, rank = args.nope_dim + args.pe_dim, args.kv_lora_rank
        inputs = [load.matrix(p + "attn_kv_a_mqa.weight", rank + args.pe_dim, d, _PART)]
        self.q_b: QuantTensor | None = None
        if p + "attn_q_a_norm.weight" in load and args.architecture != KIMI_LINEAR:
            low = args.q_lora_rank
            inputs.append(load.matrix(p + "attn_q_a.weight", low, d, _PART))
            self.q_norm = load.values(p + "attn_q_a_norm.weight", (low,), "norms")
            self.q_b = load.matrix(p + "attn_q_b.weight", heads * key, low, _PART)
        else:
            inputs.append(load.matrix(p + "attn_q.weight", heads * key, d, _PART))
        self.is_gated = p + "attn_gate.weight" in load
        if self.is_gated:
            inputs.append(load.matrix(p + "attn_gate.weight", heads * args.value_dim, d, _PART))
        self.inputs = FusedLinear(inputs)
        self.kv_norm = load.values(p + "attn_kv_a_norm.weight", (rank,), "norms")
        self.k_b, self.v_b = _absorbed(load, p, args)
        self.output = load.matrix(p + "attn_output.weight", d, heads * args.value_dim, _PART)
        self._scale = key**-0.5

    def new_state(self, device: torch.device) -> GrowingRows:
        return GrowingRows(self._args.kv_lora_rank + self._args.pe_dim, device)

    def __call__(self, ops: Ops, x: Tensor, spans: Sequence[Span]) -> Tensor:
        """`x [T, D]` normed inputs -> `[T, D]`; sequences' states take the new tokens."""
        args, n_rows, rank = self._args, x.shape[0], self._args.kv_lora_rank
        kv, q, *gate = self.inputs(ops, x)
        if self.q_b is not None:
            q = ops.linear(ops.rms_norm(q, self.q_norm, args.rms_eps), self.q_b)
        q = q.view(n_rows, args.n_heads, -1)
        absorbed = ops.grouped_linear(q[..., : args.nope_dim].contiguous(), self.k_b)
        absorbed = absorbed.view(n_rows, args.n_heads, rank)
        q = torch.cat([absorbed, q[..., args.nope_dim :]], dim=2)
        latent = ops.rms_norm(kv[:, :rank].contiguous(), self.kv_norm, args.rms_eps)
        rows = torch.cat([latent, kv[:, rank:]], dim=1)
        outputs = []
        for span in spans:
            part = slice(span.start, span.start + span.n)
            cache = span.state.layers[self.layer]
            assert isinstance(cache, GrowingRows)
            cache.append(rows[part])
            outputs.append(
                ops.attend_latent(q[part], cache.view(), span.position, rank, self._scale)
            )
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        o = ops.grouped_linear(o, self.v_b)
        if self.is_gated:
            o = ops.sigmoid_gate(o, gate[0])
        return ops.linear(o, self.output)


def _any_shape(load: DenseLoader, name: str, shape: tuple[int, ...]) -> Tensor:
    """Values in a shape that converters write with or without axes of length one."""
    found = load.shape(name)
    if [n for n in found if n > 1] == [n for n in shape if n > 1] and found:
        return load.values(name, found, _PART).reshape(shape)
    return load.values(name, shape, _PART)


def _rows(w: QuantTensor, start: int, n: int) -> QuantTensor:
    return QuantTensor(w.data[start : start + n], w.ggml_type, n, w.n_in)


def _qkv(load: DenseLoader, p: str, width: int, d: int) -> list[QuantTensor]:
    if p + "attn_qkv.weight" in load:
        fused = load.matrix(p + "attn_qkv.weight", 3 * width, d, _PART)
        return [_rows(fused, i * width, width) for i in range(3)]
    return [load.matrix(f"{p}attn_{role}.weight", width, d, _PART) for role in "qkv"]


def _absorbed(load: DenseLoader, p: str, args: KimiArgs) -> tuple[QuantTensor, QuantTensor]:
    """`k_b [H * c, n]` and `v_b [H * v, c]`; old files hold one matrix, its keys untransposed."""
    heads, rank, nope, value = args.n_heads, args.kv_lora_rank, args.nope_dim, args.value_dim
    if p + "attn_kv_b.weight" not in load:
        return (
            load.matrix(p + "attn_k_b.weight", rank, nope, _PART, n_stacked=heads),
            load.matrix(p + "attn_v_b.weight", value, rank, _PART, n_stacked=heads),
        )
    both = load.matrix(p + "attn_kv_b.weight", heads * (nope + value), rank, _PART)
    by_head = both.data.view(heads, nope + value, -1)
    keys = dequantize(by_head[:, :nope], both.ggml_type, rank).transpose(1, 2).contiguous()
    values = by_head[:, nope:].reshape(heads * value, -1)
    return (
        QuantTensor(keys.view(heads * rank, nope).view(torch.uint8), _F32, heads * rank, nope),
        QuantTensor(values, both.ggml_type, heads * value, rank),
    )
