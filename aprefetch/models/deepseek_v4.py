"""DeepSeek-V4 (GGUF architecture `deepseek4`).

Residual state is S parallel streams, mixed by hyper-connections around every sublayer. Attention
has one key/value head whose key and value are the same vector, a sliding window, and in most
layers rows compressed from 4 or 128 tokens; ratio-4 layers pick rows by an indexer. The first
layers choose experts by token id, the others by a biased sqrt-softplus router. The formulas follow
llama.cpp's evaluation in float32 (no rounding of activations or caches).

Next-token (MTP) blocks are recognised by `nextn_predict_layers` and left unread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aprefetch.errors import SourceError
from aprefetch.kernels.fused import RouterAhead
from aprefetch.kernels.ops import Ops
from aprefetch.models.base import Chunk, EarlyRouter, ModelInfo, logits_of
from aprefetch.models.deepseek_v4_args import (
    ARCHITECTURE,
    N_STREAMS,
    DeepseekV4Args,
    n_main_layers,
)
from aprefetch.models.deepseek_v4_attention import Attention, DeepseekV4State, Span
from aprefetch.models.layers import FusedLinear, RotaryTable, yarn_frequencies
from aprefetch.models.loading import DenseLoader, DenseSource
from aprefetch.models.moe import RoutedCall
from aprefetch.types import LayerLayout

if TYPE_CHECKING:
    from aprefetch.kernels.triton.ops import TritonOps
    from aprefetch.models.deepseek_v4_graph import GraphDecoder

__all__ = ["ARCHITECTURE", "DeepseekV4", "DeepseekV4Args", "n_main_layers"]

log = logging.getLogger(__name__)

_WARM_UP_ROWS = 8


class _AnyBytes(NamedTuple):
    """A lease on whatever lies there."""

    expert: int
    offset: int


class _HyperConnection:
    """The weights of one hyper-connection wrapper and the norm of its sublayer."""

    def __init__(self, load: DenseLoader, prefix: str, norm: str, args: DeepseekV4Args) -> None:
        n_mix = N_STREAMS * (N_STREAMS + 2)
        width = N_STREAMS * args.hidden_size
        self.fn = load.matrix(f"{prefix}_fn.weight", n_mix, width, "hyper-connections")
        self.base = load.values(f"{prefix}_base.weight", (n_mix,), "hyper-connections")
        self.scale = load.values(f"{prefix}_scale.weight", (3,), "hyper-connections")
        self.norm = load.values(norm, (args.hidden_size,), "norms")
        self._eps, self._hc_eps = args.rms_eps, args.hc_eps
        self._n_iterations = args.sinkhorn_iterations

    def enter(self, ops: Ops, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ops.hc_enter(
            streams,
            self.fn,
            self.scale,
            self.base,
            self.norm,
            eps=self._eps,
            hc_eps=self._hc_eps,
            n_iterations=self._n_iterations,
        )

    def enter_into(
        self, ops: TritonOps, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor
    ) -> None:
        """`enter` into memory of the caller's; on CUDA."""
        n_rows, s, d = streams.shape
        ops.hc_into(
            streams, self.fn, self.scale, self.base, self.norm, s * (s + 2), self._eps,
            self._hc_eps, self._n_iterations, out, post, comb, ops.hc_part(n_rows, s, d),
        )  # fmt: skip

    def follow(
        self, ops: Ops, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take the previous sublayer's result `y` into the streams, then enter: streams first."""
        return ops.hc_pass(
            y,
            streams,
            post,
            comb,
            self.fn,
            self.scale,
            self.base,
            self.norm,
            eps=self._eps,
            hc_eps=self._hc_eps,
            n_iterations=self._n_iterations,
        )

    def route_input(self, ops: Ops, streams: Tensor) -> Tensor:
        return ops.hc_route_input(
            streams, self.fn, self.scale, self.base, self.norm, eps=self._eps, hc_eps=self._hc_eps
        )

    def router_ahead(self, ffn: _FeedForward) -> RouterAhead:
        """The router that this is before, for questions ahead of its turn."""
        return RouterAhead(
            self.fn, self.scale, self.base, self.norm, ffn.router, ffn.bias, self._eps, self._hc_eps
        )


class _FeedForward:
    """Router, shared expert, and the call for routed experts of one layer."""

    def __init__(
        self, load: DenseLoader, layer: int, args: DeepseekV4Args, layout: LayerLayout
    ) -> None:
        self._args, self.layer, self.layout = args, layer, layout
        p, d = f"blk.{layer}.", args.hidden_size
        self.router = load.matrix(p + "ffn_gate_inp.weight", args.n_experts, d, "routers")
        self.bias: Tensor | None = None
        self.table: npt.NDArray[np.int32] | None = None
        if layer < args.n_hash_layers:
            name = p + "ffn_gate_tid2eid.weight"
            self.table = load.integers(
                name, (args.vocab_size, args.num_experts_per_tok), "hash tables"
            )
            if self.table.min() < 0 or self.table.max() >= args.n_experts:
                raise SourceError(f"tensor {name} names experts that do not exist", key=name)
        else:
            self.bias = load.values(p + "exp_probs_b.bias", (args.n_experts,), "routers")
        width = args.expert_width * args.n_shared_experts
        gate, up = (
            load.matrix(f"{p}ffn_{role}_shexp.weight", width, d, "shared experts")
            for role in ("gate", "up")
        )
        self.shared_inputs = FusedLinear([gate, up])
        self.shared_down = load.matrix(p + "ffn_down_shexp.weight", d, width, "shared experts")

    def scores(self, ops: Ops, v: Tensor) -> Tensor:
        """What the router ranks experts by, `[T, E]`."""
        return ops.early_scores(ops.linear(v, self.router), self.bias)

    def route(
        self, ops: Ops, v: Tensor, token_ids: npt.NDArray[np.int64]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids `[T, K]`, weights `[T, K]`, and the router's scores `[T, E]`."""
        args, chosen = self._args, None
        if self.table is not None:
            chosen = torch.from_numpy(self.table[token_ids]).to(v.device, non_blocking=True)
        scores = ops.linear(v, self.router)
        ids, weights = ops.route(
            scores,
            self.bias,
            chosen,
            args.num_experts_per_tok,
            normalise=args.normalise_weights,
            scale=args.routed_scale,
        )
        return ids, weights, scores

    def call(
        self, ops: Ops, v: Tensor, ids: Tensor, streams: Tensor, weights: Tensor
    ) -> RoutedCall:
        return RoutedCall(
            layer=self.layer,
            layout=self.layout,
            ops=ops,
            x=v,
            ids=ids,
            limit=self._args.routed_limits[self.layer],
            streams=streams,
            weights=weights,
        )

    def shared_hidden(self, ops: Ops, v: Tensor) -> Tensor:
        gate, up = self.shared_inputs(ops, v)
        return ops.swiglu(gate, up, self._args.shared_limits[self.layer])

    def shared(self, ops: Ops, v: Tensor) -> Tensor:
        limit = self._args.shared_limits[self.layer]
        return ops.gated_mlp(v, self.shared_inputs.weights, self.shared_down, limit)


class _Block:
    def __init__(
        self,
        load: DenseLoader,
        layer: int,
        args: DeepseekV4Args,
        layout: LayerLayout,
        rope: RotaryTable,
    ) -> None:
        p = f"blk.{layer}."
        self.hc_attn = _HyperConnection(load, p + "hc_attn", p + "attn_norm.weight", args)
        self.attention = Attention(load, layer, args, rope)
        self.hc_ffn = _HyperConnection(load, p + "hc_ffn", p + "ffn_norm.weight", args)
        self.ffn = _FeedForward(load, layer, args, layout)


class DeepseekV4:
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
        args = DeepseekV4Args.from_metadata(source.metadata, source.tensors)
        self.args, self._ops, self._device = args, ops, device
        self._check_layouts(layouts)
        unread = {name for name in source.tensors if _left_unread(name, args.n_layers)}
        load = DenseLoader(source, device, unread | set(expert_tensors))
        d, v = args.hidden_size, args.vocab_size
        self.embedding = load.matrix("token_embd.weight", v, d, "embedding")
        plain = RotaryTable(yarn_frequencies(args.rotary_dim, args.rope_base), device)
        scaled = RotaryTable(
            yarn_frequencies(
                args.rotary_dim,
                args.compress_rope_base,
                factor=1.0 if args.rope_scaling == "none" else args.rope_factor,
                original_context=args.rope_original_context,
                beta_fast=args.rope_beta_fast,
                beta_slow=args.rope_beta_slow,
                ext_factor=args.rope_ext_factor,
            ),
            device,
        )
        self._plain_rope, self._scaled_rope = plain, scaled
        self.blocks = [
            _Block(load, i, args, layouts[i], scaled if args.ratios[i] else plain)
            for i in range(args.n_layers)
        ]
        part, width = "head", N_STREAMS * d
        self.head_fn = load.matrix("output_hc_fn.weight", N_STREAMS, width, part)
        self.head_base = load.values("output_hc_base.weight", (N_STREAMS,), part)
        self.head_scale = load.values("output_hc_scale.weight", (1,), part)
        self.head_norm = load.values("output_norm.weight", (d,), "norms")
        self.head = load.matrix("output.weight", v, d, part)
        load.finish()
        self.early_routers: Mapping[int, EarlyRouter] = {
            i: self._early_router(block)
            for i, block in enumerate(self.blocks)
            if block.ffn.table is None
        }
        self._routers_ahead = {
            i: self.blocks[i].hc_ffn.router_ahead(self.blocks[i].ffn) for i in self.early_routers
        }
        self.info = self._info(source, load)
        self._decoder = _decoder(self, ops)

    def _check_layouts(self, layouts: Mapping[int, LayerLayout]) -> None:
        args = self.args
        for i in range(args.n_layers):
            if i not in layouts:
                raise SourceError(f"layer {i} has no routed experts", key=f"blk.{i}")
            layout = layouts[i]
            shapes = [(role.n_out, role.n_in) for role in layout.roles]
            d, f = args.hidden_size, args.expert_width
            if layout.n_experts != args.n_experts or shapes != [(f, d), (f, d), (d, f)]:
                raise SourceError(
                    f"experts of layer {i} are {layout.n_experts} x {shapes}, but the metadata "
                    f"ask for {args.n_experts} x {[(f, d), (f, d), (d, f)]}",
                    key=f"blk.{i}.ffn_gate_exps.weight",
                )

    def _info(self, source: DenseSource, load: DenseLoader) -> ModelInfo:
        args = self.args
        per_token = per_chunk_token = fixed = 0
        for ratio in args.ratios:
            width = args.head_dim + (args.index_dim if ratio == 4 else 0)
            fixed += 2 * min(args.window, args.context_length) * args.head_dim * 4
            per_chunk_token += args.head_dim * 4
            if ratio:
                factor = 2 if ratio == 4 else 1
                per_token += width * 4 // ratio
                per_chunk_token += 2 * factor * width * 4
                fixed += 4 * ratio * factor**2 * width * 4
        return ModelInfo(
            architecture=ARCHITECTURE,
            name=str(source.metadata.get("general.name", "")),
            n_layers=args.n_layers,
            n_vocab=args.vocab_size,
            context_length=args.context_length,
            hidden_size=args.hidden_size,
            n_experts=args.n_experts,
            num_experts_per_tok=args.num_experts_per_tok,
            routed_layers=tuple(range(args.n_layers)),
            token_routed_layers=tuple(range(min(args.n_hash_layers, args.n_layers))),
            dense_bytes=sum(load.bytes_by_part.values()),
            dense_bytes_by_part=dict(load.bytes_by_part),
            state_bytes_per_token=per_token,
            state_bytes_fixed=fixed,
            state_bytes_per_chunk_token=per_chunk_token,
        )

    def _early_router(self, block: _Block) -> Callable[[Tensor], Tensor]:
        ops = self._ops
        return lambda streams: block.ffn.scores(ops, block.hc_ffn.route_input(ops, streams))

    def rope(self, scaled: bool) -> RotaryTable:
        """The rotary table of layers with (or without) compressed rows."""
        return self._scaled_rope if scaled else self._plain_rope

    def new_state(self) -> DeepseekV4State:
        """Empty caches for a new sequence."""
        return DeepseekV4State([block.attention.new_state(self._device) for block in self.blocks])

    def token_routed(
        self, layer: int, token_ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32] | None:
        """Experts `[T, K]` of a hash-routed layer; None for layers with a router."""
        table = self.blocks[layer].ffn.table
        return None if table is None else table[token_ids]

    def warm_up(self, arena: Tensor) -> None:
        """On a GPU: capture the graphs of decoding, and compile what a short prompt needs."""
        decoder = self._decoder
        if decoder is None:
            return
        try:
            decoder.warm_up(arena)
        except RuntimeError as error:
            log.warning("decoding without CUDA graphs: %s", error)
            self._decoder = None
        ids = np.arange(_WARM_UP_ROWS, dtype=np.int64) % self.args.vocab_size
        for call in self.forward([Chunk(self.new_state(), ids)]):
            if call.finishing:  # any bytes will do: nobody looks at the result
                call.run(arena, [_AnyBytes(expert, 0) for expert in call.experts])
        torch.cuda.synchronize(self._device)

    def forward(self, chunks: Sequence[Chunk]) -> Generator[RoutedCall, None, list[Tensor | None]]:
        """One step over a ragged batch; see `aprefetch.models.base.Model.forward`."""
        chunk = chunks[0]
        if self._decoder and len(chunks) == 1 == len(chunk.token_ids) and chunk.logits == "last":
            assert isinstance(chunk.state, DeepseekV4State)
            if self._decoder.ready(chunk.state):
                return (yield from self._decoder.forward(chunk.state, int(chunk.token_ids[0])))
            self._decoder = None
        ops, args = self._ops, self.args
        token_ids = np.concatenate([chunk.token_ids for chunk in chunks])
        spans, start = [], 0
        for chunk in chunks:
            assert isinstance(chunk.state, DeepseekV4State)
            chunk.state.come_back()
            n = len(chunk.token_ids)
            spans.append(Span(chunk.state, start, n, chunk.state.n_tokens))
            start += n
        runs = [(span.position, span.n) for span in spans]
        plain, scaled = self._plain_rope.spans(runs), self._scaled_rope.spans(runs)
        on_device = torch.from_numpy(token_ids).to(self._device, non_blocking=True)
        x = ops.embed(self.embedding, on_device)
        streams = x[:, None, :].expand(-1, N_STREAMS, -1).contiguous()
        u, post, comb = self.blocks[0].hc_attn.enter(ops, streams)
        for i, block in enumerate(self.blocks):
            y = block.attention(ops, u, spans, *(scaled if args.ratios[i] else plain))
            streams, v, post, comb = block.hc_ffn.follow(ops, y, streams, post, comb)
            ids, weights, scores = block.ffn.route(ops, v, token_ids)
            call = block.ffn.call(ops, v, ids, streams, weights)
            if block.ffn.table is None:
                call.ranked = functools.partial(ops.early_scores, scores, block.ffn.bias)
            yield call
            shared = block.ffn.shared(ops, v)
            state = (ops, call, shared, streams, post, comb)
            call.ahead = functools.partial(_ahead, *state)
            following = self._routers_ahead.get(i + 1)
            if following is not None and call.n_rows == 1:
                call.next_scores = functools.partial(_next_scores, following, *state)
            call.finishing = True
            yield call
            call.ahead = call.next_scores = None  # they hold the call in turn
            y = call.total(weights, shared)
            if i + 1 < len(self.blocks):
                entry = self.blocks[i + 1].hc_attn
                streams, u, post, comb = entry.follow(ops, y, streams, post, comb)
        streams = ops.hc_leave(y, streams, post, comb)
        for span in spans:
            span.state.n_tokens += span.n
        return logits_of(streams, chunks, self._head)

    def _head(self, streams: Tensor) -> Tensor:
        """Logits `[n, V]` of streams `[n, S, D]` after the last block."""
        ops, args = self._ops, self.args
        h = ops.hc_collapse(
            streams, self.head_fn, self.head_scale, self.head_base,
            eps=args.rms_eps, hc_eps=args.hc_eps,
        )  # fmt: skip
        return ops.linear(ops.rms_norm(h, self.head_norm, args.rms_eps), self.head)


def _ahead(
    ops: Ops, call: RoutedCall, shared: Tensor, streams: Tensor, post: Tensor, comb: Tensor
) -> Tensor:
    """The streams after a layer, as far as they are known."""
    return ops.hc_leave(call.known(shared), streams, post, comb)


def _next_scores(
    following: RouterAhead,
    ops: Ops,
    call: RoutedCall,
    shared: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
) -> Tensor:
    """What the next layer's router says of them."""
    weights = call.known_weights
    parts = None if weights is None else call.parts[None]
    return ops.scores_ahead(following, parts, weights, shared, streams, post, comb)


def _decoder(model: DeepseekV4, ops: Ops) -> GraphDecoder | None:
    """Captured single-token steps, where there is a GPU to capture them on."""
    if ops.name != "triton" or not torch.cuda.is_available():
        return None
    from aprefetch.kernels.triton.ops import TritonOps
    from aprefetch.models.deepseek_v4_graph import GraphDecoder

    if not isinstance(ops, TritonOps) or not GraphDecoder.fits(model):
        return None
    return GraphDecoder(model, ops)


def _left_unread(name: str, n_layers: int) -> bool:
    """Known tensors that a text model has no use for: next-token blocks, image-token biases."""
    if not name.startswith("blk."):
        return False
    index, _, rest = name[4:].partition(".")
    return (index.isdigit() and int(index) >= n_layers) or rest == "exp_probs_b_vl.bias"
