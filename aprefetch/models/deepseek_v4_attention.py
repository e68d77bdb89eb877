"""Attention of DeepSeek-V4: sliding window, compressed rows, indexer, and their caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aprefetch.kernels.fused import AttentionInputs
from aprefetch.kernels.ops import Ops
from aprefetch.models.deepseek_v4_args import DeepseekV4Args
from aprefetch.models.kv_cache import GrowingRows, SlidingRows, StatePart
from aprefetch.models.layers import FusedLinear, RotaryTable
from aprefetch.models.loading import DenseLoader
from aprefetch.quant.base import QuantTensor

__all__ = ["Attention", "AttentionState", "DeepseekV4State", "Span"]


class _CompressorState:
    """Open and previous blocks of one sequence's compressor, and its finished rows."""

    __slots__ = ("gate", "kv", "rows")

    def __init__(self, ratio: int, factor: int, width: int, device: torch.device) -> None:
        self.kv = SlidingRows(factor * width, factor * ratio, device)
        self.gate = SlidingRows(factor * width, factor * ratio, device)
        self.rows = GrowingRows(width, device)

    @property
    def n_bytes(self) -> int:
        return self.kv.n_bytes + self.gate.n_bytes + self.rows.n_bytes


class _Compressor:
    """Pools `ratio` tokens (ratio 4: overlapping pairs of blocks) into one row."""

    def __init__(
        self, load: DenseLoader, prefix: str, ratio: int, width: int, args: DeepseekV4Args
    ) -> None:
        self.ratio, self.width = ratio, width
        self.factor = 2 if ratio == 4 else 1
        n = self.factor * width
        part = "compressors"
        self.inputs = [
            load.matrix(f"{prefix}_{role}.weight", n, args.hidden_size, part)
            for role in ("kv", "gate")
        ]
        self.ape = load.values(f"{prefix}_ape.weight", (ratio, n), part)
        self.norm = load.values(f"{prefix}_norm.weight", (width,), part)
        self._eps = args.rms_eps

    def take_inputs(self) -> list[QuantTensor]:
        """The weights that make kv and gate of the layer's input; the caller keeps them."""
        taken, self.inputs = self.inputs, []
        return taken

    def new_state(self, device: torch.device) -> _CompressorState:
        return _CompressorState(self.ratio, self.factor, self.width, device)

    def append(
        self,
        ops: Ops,
        state: _CompressorState,
        kv: Tensor,
        gate: Tensor,
        position: int,
        rope: RotaryTable,
    ) -> None:
        """Take tokens `position ...`; rows whose last token is among them are finished."""
        n, ratio = kv.shape[0], self.ratio
        at = position % ratio
        if at + n > ratio:
            bias = self.ape[torch.arange(position, position + n) % ratio]
        else:
            bias = self.ape.narrow(0, at, n)
        state.kv.append(kv)
        state.gate.append(gate, bias)
        done = state.rows.n_rows
        n_new = (position + n) // ratio - done
        if n_new == 0:
            return
        cos, sin = rope.span(done * ratio, n_new, ratio)
        rows = ops.compress(
            state.kv.view(),
            state.gate.view(),
            done * ratio - state.kv.first_position,
            n_new,
            ratio,
            done > 0,
            self.norm,
            cos,
            sin,
            self._eps,
        )
        state.rows.append(rows)


class AttentionState:
    __slots__ = ("compressed", "index", "window")

    def __init__(
        self,
        window: SlidingRows,
        compressed: _CompressorState | None,
        index: _CompressorState | None,
    ) -> None:
        self.window, self.compressed, self.index = window, compressed, index

    @property
    def n_bytes(self) -> int:
        parts = (self.window, self.compressed, self.index)
        return sum(part.n_bytes for part in parts if part is not None)

    def stores(self) -> list[SlidingRows | GrowingRows]:
        found: list[SlidingRows | GrowingRows] = [self.window]
        for part in (self.compressed, self.index):
            if part is not None:
                found += [part.kv, part.gate, part.rows]
        return found


class DeepseekV4State:
    """Caches of one sequence: per layer a window, compressor blocks, finished rows."""

    __slots__ = ("__weakref__", "layers", "lent", "n_tokens")

    def __init__(self, layers: list[AttentionState]) -> None:
        self.layers = layers
        self.n_tokens = 0
        self.lent: Callable[[DeepseekV4State], None] | None = None
        """Set while a decoder holds the rows in caches of its own; brings them back."""

    def come_back(self) -> None:
        """Make the stores here hold all rows."""
        if self.lent is not None:
            self.lent(self)

    @property
    def n_bytes(self) -> int:
        """Bytes held by the caches."""
        return sum(layer.n_bytes for layer in self.layers)

    def _stores(self) -> list[SlidingRows | GrowingRows]:
        return [store for layer in self.layers for store in layer.stores()]

    def dump(self) -> list[StatePart]:
        """All stores, as views."""
        self.come_back()
        return [part for store in self._stores() for part in store.dump()]

    def load(self, parts: Sequence[StatePart], n_tokens: int) -> None:
        """Take over the parts of a dump.

        Raises:
            ValueError: they are of another model.
        """
        self.lent = None
        stores = self._stores()
        if len(parts) != len(stores):
            raise ValueError(f"a state of {len(parts)} parts where {len(stores)} are wanted")
        for store, part in zip(stores, parts, strict=True):
            store.load(part)
        self.n_tokens = n_tokens


@dataclass(slots=True)
class Span:
    """Rows `start .. start + n` of a step belong to one sequence, from `position` on."""

    state: DeepseekV4State
    start: int
    n: int
    position: int
    _visible: dict[int, Tensor] = field(default_factory=dict)

    def n_visible(self, ratio: int, device: torch.device) -> Tensor:
        """How many rows compressed from `ratio` tokens each token sees, int32 `[n]`."""
        found = self._visible.get(ratio)
        if found is None:
            ends = torch.arange(self.position + 1, self.position + self.n + 1)
            found = (ends // ratio).to(dtype=torch.int32, device=device)
            self._visible[ratio] = found
        return found


class Attention:
    """Window, compressed rows and indexer of one layer."""

    def __init__(
        self, load: DenseLoader, layer: int, args: DeepseekV4Args, rope: RotaryTable
    ) -> None:
        self._args, self.layer, self.ratio = args, layer, args.ratios[layer]
        self.rope = rope
        p, d, part = f"blk.{layer}.", args.hidden_size, "attention"
        width = args.n_heads * args.head_dim
        q_a = load.matrix(p + "attn_q_a.weight", args.q_lora_rank, d, part)
        kv = load.matrix(p + "attn_kv.weight", args.head_dim, d, part)
        self.q_a_norm = load.values(p + "attn_q_a_norm.weight", (args.q_lora_rank,), "norms")
        self.kv_norm = load.values(p + "attn_kv_a_norm.weight", (args.head_dim,), "norms")
        q_b = load.matrix(p + "attn_q_b.weight", width, args.q_lora_rank, part)
        o_rank = args.o_groups * args.o_lora_rank
        self.o_a = load.matrix(p + "attn_output_a.weight", o_rank, width // args.o_groups, part)
        self.o_b = load.matrix(p + "attn_output_b.weight", d, o_rank, part)
        self.sinks = load.values(p + "attn_sinks.weight", (args.n_heads,), part)
        self.compressor = self.index_compressor = None
        # Everything that reads the sublayer's input; stacked below, so only there kept.
        inputs = [q_a, kv]
        if self.ratio:
            self.compressor = _Compressor(
                load, p + "attn_compressor", self.ratio, args.head_dim, args
            )
            inputs += self.compressor.take_inputs()
        if self.ratio == 4:
            self.index_compressor = _Compressor(
                load, p + "indexer_compressor", 4, args.index_dim, args
            )
            inputs += self.index_compressor.take_inputs()
            self.index_q = load.matrix(
                p + "indexer.attn_q_b.weight",
                args.index_heads * args.index_dim,
                args.q_lora_rank,
                "indexer",
            )
            self.index_weights = load.matrix(
                p + "indexer.proj.weight", args.index_heads, d, "indexer"
            )
        self.inputs = FusedLinear(inputs)
        self.q_b = q_b
        self._input_weights = AttentionInputs(
            self.inputs.weights, self.q_a_norm, q_b, self.kv_norm, args.n_heads, args.rms_eps
        )
        self._scale = args.head_dim**-0.5

    def new_state(self, device: torch.device) -> AttentionState:
        keep = min(self._args.window, self._args.context_length)
        return AttentionState(
            SlidingRows(self._args.head_dim, keep, device),
            self.compressor.new_state(device) if self.compressor else None,
            self.index_compressor.new_state(device) if self.index_compressor else None,
        )

    def __call__(
        self, ops: Ops, u: Tensor, spans: Sequence[Span], cos: Tensor, sin: Tensor
    ) -> Tensor:
        """`u [T, D]` normed inputs -> `[T, D]`; sequences' states take the new tokens."""
        q, k, q_low, extra = ops.attention_inputs(u, self._input_weights, cos, sin)
        if len(spans) == 1:
            heads = self._attend(ops, spans[0], q, k, extra, u, q_low)
        else:
            outputs = []
            for span in spans:
                q1, k1, u1, low1, *extra1 = (
                    x.narrow(0, span.start, span.n) for x in (q, k, u, q_low, *extra)
                )
                outputs.append(self._attend(ops, span, q1, k1, extra1, u1, low1))
            heads = torch.cat(outputs)
        return ops.attention_output(heads, cos, sin, self.o_a, self.o_b, self._args.o_groups)

    def _attend(
        self,
        ops: Ops,
        span: Span,
        q: Tensor,
        k: Tensor,
        extra: list[Tensor],
        u: Tensor,
        q_low: Tensor,
    ) -> Tensor:
        """One sequence's heads `[n, H, d]`; its state takes the new tokens."""
        state = span.state.layers[self.layer]
        state.window.append(k)
        rows = n_visible = selected = None
        if self.compressor is not None and state.compressed is not None:
            self.compressor.append(
                ops, state.compressed, extra[0], extra[1], span.position, self.rope
            )
            if state.compressed.rows.n_rows:
                rows = state.compressed.rows.view()
                n_visible = span.n_visible(self.ratio, q.device)
        if self.index_compressor is not None and state.index is not None:
            self.index_compressor.append(
                ops, state.index, extra[2], extra[3], span.position, self.rope
            )
            # With few rows the indexer keeps them all, so its scores are not needed.
            if state.index.rows.n_rows > self._args.index_topk and n_visible is not None:
                selected = self._select(ops, span, state.index, u, q_low, n_visible)
        return ops.attend(
            q,
            state.window.view(),
            state.window.first_position,
            span.position,
            self._args.window,
            rows,
            n_visible,
            selected,
            self.sinks,
            self._scale,
        )

    def _select(
        self,
        ops: Ops,
        span: Span,
        index: _CompressorState,
        u: Tensor,
        q_low: Tensor,
        n_visible: Tensor,
    ) -> Tensor:
        args = self._args
        q = ops.linear(q_low, self.index_q).view(-1, args.index_heads, args.index_dim)
        ops.rope_(q, *self.rope.span(span.position, span.n))
        weights = ops.linear(u, self.index_weights) * (args.index_heads * args.index_dim) ** -0.5
        return ops.index_topk(q, weights, index.rows.view(), n_visible, args.index_topk)
