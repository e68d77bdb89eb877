"""Kimi-K3 (GGUF architecture `kimi-k3`) and its smaller sibling Kimi-Linear (`kimi-linear`).

Most layers are delta attention (KDA), the others latent attention (MLA); which is which, and every
size, is in the metadata. K3 adds attention over residual streams: every `residual_block` layers the
running sum is banked and restarted from the layer's attention output, and what a sublayer reads is
a weighted mix of the banked streams and the running one. Its experts work in a narrower latent
space. Formulas follow llama.cpp's evaluation in float32 (no rounding of activations or caches).
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aprefetch.errors import SourceError
from aprefetch.kernels.ops import Ops
from aprefetch.models.base import Chunk, EarlyRouter, ModelInfo, logits_of
from aprefetch.models.kimi_k3_args import KIMI_K3, KIMI_LINEAR, KimiArgs, n_main_layers
from aprefetch.models.kimi_k3_attention import DeltaAttention, KimiState, LatentAttention, Span
from aprefetch.models.layers import FusedLinear
from aprefetch.models.loading import DenseLoader, DenseSource
from aprefetch.models.moe import RoutedCall
from aprefetch.quant.base import QuantTensor
from aprefetch.types import LayerLayout

__all__ = ["KIMI_K3", "KIMI_LINEAR", "Kimi", "KimiArgs", "n_main_layers"]


class _Mlp:
    """A gated MLP that every token goes through: a dense layer's, or the shared expert."""

    def __init__(
        self, load: DenseLoader, prefix: str, suffix: str, width: int, part: str, args: KimiArgs
    ) -> None:
        d = args.hidden_size
        gate, up = (
            load.matrix(f"{prefix}ffn_{role}{suffix}.weight", width, d, part)
            for role in ("gate", "up")
        )
        self.inputs = FusedLinear([gate, up])
        self.down = load.matrix(f"{prefix}ffn_down{suffix}.weight", d, width, part)
        self._activation = args.activation

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        gate, up = self.inputs(ops, x)
        if self._activation is None:
            return ops.linear(ops.swiglu(gate, up, 0.0), self.down)
        return ops.linear(ops.situ(gate, up, self._activation), self.down)


class _Experts:
    """Router, latent projections, shared expert, and the call for routed experts of one layer."""

    def __init__(self, load: DenseLoader, layer: int, args: KimiArgs, layout: LayerLayout) -> None:
        self._args, self.layer, self._layout = args, layer, layout
        p, d, width = f"blk.{layer}.", args.hidden_size, args.latent_width
        self.router = load.matrix(p + "ffn_gate_inp.weight", args.n_experts, d, "routers")
        self.bias = load.values(p + "exp_probs_b.bias", (args.n_experts,), "routers")
        self.enter: QuantTensor | None = None
        self.norm: Tensor | None = None
        if width:
            self.enter = load.matrix(p + "ffn_routed_down.weight", width, d, "latent projections")
            self.leave = load.matrix(p + "ffn_routed_up.weight", d, width, "latent projections")
        if args.architecture == KIMI_K3 and p + "ffn_routed_norm.weight" in load:
            self.norm = load.values(p + "ffn_routed_norm.weight", (args.expert_io,), "norms")
        self.shared: _Mlp | None = None
        if p + "ffn_gate_shexp.weight" in load:
            shared_width = args.expert_width * args.n_shared_experts
            self.shared = _Mlp(load, p, "_shexp", shared_width, "shared experts", args)

    def scores(self, ops: Ops, x: Tensor) -> Tensor:
        """What the router ranks experts by, `[T, E]`."""
        return ops.sigmoid_scores(ops.linear(x, self.router), self.bias)

    def __call__(self, ops: Ops, x: Tensor, streams: Tensor) -> Generator[RoutedCall, None, Tensor]:
        args = self._args
        scores = ops.linear(x, self.router)
        ids, weights = ops.route_sigmoid(
            scores,
            self.bias,
            args.num_experts_per_tok,
            normalise=args.normalise_weights,
            scale=args.routed_scale,
            n_groups=args.n_groups,
            n_used_groups=args.n_used_groups,
        )
        call = RoutedCall(
            layer=self.layer,
            layout=self._layout,
            ops=ops,
            x=x if self.enter is None else ops.linear(x, self.enter),
            ids=ids,
            limit=0.0,
            streams=streams,
            activation=args.activation,
        )
        call.ranked = functools.partial(ops.sigmoid_scores, scores, self.bias)
        yield call
        shared = None if self.shared is None else self.shared(ops, x)
        call.finishing = True
        yield call
        y = call.total(weights)
        if self.norm is not None:
            y = ops.rms_norm(y, self.norm, args.rms_eps)
        if self.enter is not None:
            y = ops.linear(y, self.leave)
        return y if shared is None else y + shared


class _Block:
    def __init__(
        self, load: DenseLoader, layer: int, args: KimiArgs, layout: LayerLayout | None
    ) -> None:
        p, d = f"blk.{layer}.", args.hidden_size
        self.attn_norm = load.values(p + "attn_norm.weight", (d,), "norms")
        self.ffn_norm = load.values(p + "ffn_norm.weight", (d,), "norms")
        self.attn_score = self.ffn_score = None
        if args.residual_block:
            self.attn_score = load.values(p + "attn_res_score.weight", (d,), "residual scores")
            self.ffn_score = load.values(p + "ffn_res_score.weight", (d,), "residual scores")
        kind = LatentAttention if args.is_mla[layer] else DeltaAttention
        self.attention: LatentAttention | DeltaAttention = kind(load, layer, args)
        self.experts: _Experts | None = None
        self.dense: _Mlp | None = None
        if layout is None:
            self.dense = _Mlp(load, p, "", args.dense_width, "dense feed-forward", args)
        else:
            self.experts = _Experts(load, layer, args, layout)


class _Streams:
    """Residual streams of a step's tokens: the banked ones, then the running sum.

    One buffer `[T, S, D]`; banking the running sum is moving on to the next stream.
    """

    def __init__(self, x: Tensor, args: KimiArgs) -> None:
        self._block, self._eps = args.residual_block, args.rms_eps
        n_banked = len(range(0, args.n_layers, self._block)) if self._block else 0
        self._buffer = x.new_empty((x.shape[0], n_banked + 1, x.shape[1]))
        self._buffer[:, 0] = x
        self._last = 0

    def view(self) -> Tensor:
        """All streams so far; valid until the next `add`."""
        return self._buffer[:, : self._last + 1]

    def add(self, y: Tensor) -> None:
        self._buffer[:, self._last] += y

    def add_attention(self, layer: int, y: Tensor) -> None:
        """Add a layer's attention output, or bank the sum and restart it from this output."""
        if self._block and layer % self._block == 0:
            self._last += 1
            self._buffer[:, self._last] = y
        else:
            self.add(y)


class Kimi:
    """The loaded model; implements `aprefetch.models.base.Model`."""

    def __init__(
        self,
        source: DenseSource,
        layouts: Mapping[int, LayerLayout],
        expert_tensors: frozenset[str],
        ops: Ops,
        device: torch.device,
    ) -> None:
        """Reads all dense tensors.

        Raises:
            SourceError: a key or tensor is missing, extra, or of another shape.
            UnsupportedModelError: a tensor's type is not supported.
            ReadError: the file could not be read.
        """
        args = KimiArgs.from_metadata(source.metadata, source.tensors)
        self.args, self._ops, self._device = args, ops, device
        self._check_layouts(layouts)
        load = DenseLoader(source, device, set(expert_tensors))
        d, v = args.hidden_size, args.vocab_size
        self.embedding = load.matrix("token_embd.weight", v, d, "embedding")
        self.blocks = [_Block(load, i, args, layouts.get(i)) for i in range(args.n_layers)]
        self.head_score: Tensor | None = None
        if args.residual_block:
            self.head_score = load.values("output_res_score.weight", (d,), "residual scores")
        self.head_norm = load.values("output_norm.weight", (d,), "norms")
        self.head = load.matrix("output.weight", v, d, "head")
        load.finish()
        self.early_routers: Mapping[int, EarlyRouter] = {
            layer: self._early_router(block, block.experts)
            for layer, block in enumerate(self.blocks)
            if block.experts is not None
        }
        self.info = self._info(source, load)

    def _check_layouts(self, layouts: Mapping[int, LayerLayout]) -> None:
        args = self.args
        if tuple(sorted(layouts)) != args.routed_layers:
            raise SourceError(
                f"layers {sorted(layouts)} have routed experts, but the metadata ask for "
                f"{list(args.routed_layers)}",
                key=f"{args.architecture}.leading_dense_block_count",
            )
        wide, narrow = args.expert_io, args.expert_width
        wanted = [(narrow, wide), (narrow, wide), (wide, narrow)]
        for layer, layout in layouts.items():
            shapes = [(role.n_out, role.n_in) for role in layout.roles]
            if layout.n_experts != args.n_experts or shapes != wanted:
                raise SourceError(
                    f"experts of layer {layer} are {layout.n_experts} x {shapes}, but the "
                    f"metadata ask for {args.n_experts} x {wanted}",
                    key=f"blk.{layer}.ffn_gate_exps.weight",
                )

    def _info(self, source: DenseSource, load: DenseLoader) -> ModelInfo:
        args = self.args
        n_mla = sum(args.is_mla)
        memory = args.n_heads * args.kda_dim * (args.kda_dim + 3 * (args.conv_taps - 1))
        return ModelInfo(
            architecture=args.architecture,
            name=str(source.metadata.get("general.name", "")),
            n_layers=args.n_layers,
            n_vocab=args.vocab_size,
            context_length=args.context_length,
            hidden_size=args.hidden_size,
            n_experts=args.n_experts,
            num_experts_per_tok=args.num_experts_per_tok,
            routed_layers=args.routed_layers,
            token_routed_layers=(),
            dense_bytes=sum(load.bytes_by_part.values()),
            dense_bytes_by_part=dict(load.bytes_by_part),
            state_bytes_per_token=n_mla * (args.kv_lora_rank + args.pe_dim) * 4,
            state_bytes_fixed=(args.n_layers - n_mla) * memory * 4,
        )

    def _early_router(self, block: _Block, experts: _Experts) -> EarlyRouter:
        """Guesses a later layer's choice from the streams as they are.

        Whether the running sum will be banked on the way makes no difference here: it is one of the
        streams either way, and the one that would restart is not known yet.
        """

        def scores(streams: Tensor) -> Tensor:
            x = self._mix(streams, block.ffn_score)
            return experts.scores(self._ops, self._norm(x, block.ffn_norm))

        return scores

    def _mix(self, streams: Tensor, score: Tensor | None) -> Tensor:
        if score is None or streams.shape[1] == 1:
            return streams[:, -1].contiguous()
        return self._ops.residual_mix(streams, score, self.args.rms_eps)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(x, weight, self.args.rms_eps)

    def new_state(self) -> KimiState:
        """Empty caches for a new sequence."""
        return KimiState([block.attention.new_state(self._device) for block in self.blocks])

    def token_routed(
        self, layer: int, token_ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32] | None:
        """None: every routed layer has a router."""
        return None

    def forward(self, chunks: Sequence[Chunk]) -> Generator[RoutedCall, None, list[Tensor | None]]:
        """One step over a ragged batch; see `aprefetch.models.base.Model.forward`."""
        ops = self._ops
        token_ids = np.concatenate([chunk.token_ids for chunk in chunks])
        spans, start = [], 0
        for chunk in chunks:
            assert isinstance(chunk.state, KimiState)
            n = len(chunk.token_ids)
            spans.append(Span(chunk.state, start, n, chunk.state.n_tokens))
            start += n
        x = ops.embed(self.embedding, torch.from_numpy(token_ids).to(self._device))
        streams = _Streams(x, self.args)
        for layer, block in enumerate(self.blocks):
            x = self._norm(self._mix(streams.view(), block.attn_score), block.attn_norm)
            streams.add_attention(layer, block.attention(ops, x, spans))
            x = self._norm(self._mix(streams.view(), block.ffn_score), block.ffn_norm)
            if block.experts is not None:
                y = yield from block.experts(ops, x, streams.view())
            else:
                assert block.dense is not None
                y = block.dense(ops, x)
            streams.add(y)
        for span in spans:
            span.state.n_tokens += span.n
        return logits_of(streams.view(), chunks, self._head)

    def _head(self, rows: Tensor) -> Tensor:
        """Logits `[n, V]` of what the last block leaves."""
        x = self._norm(self._mix(rows, self.head_score), self.head_norm)
        return self._ops.linear(x, self.head)
