"""Decoding one token of one sequence of DeepSeek-V4 from CUDA graphs.

Between two calls for routed experts nothing depends on the host, so each layer's stretch (the end
of the layer before, attention, hyper-connections, router, shared expert) is one captured graph, and
the routed experts are another that all layers share. Position and what follows from it are read
from device memory. The caches have a fixed capacity and belong to the decoder: a sequence's rows
move in with its first single-token step and move back when anything else wants them (`settle`).

The router writes expert ids straight into pinned host memory, stamped with the step's number; the
host sees them as soon as the router's kernel has run, without an event and without a wait for the
work behind it. Slots go the other way through a ring of tables in pinned memory.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from aprefetch.errors import DeviceError
from aprefetch.kernels.triton import matvec
from aprefetch.kernels.triton.experts import expert_planes
from aprefetch.kernels.triton.guess import guess_kernel
from aprefetch.kernels.triton.ops import TritonOps
from aprefetch.models.deepseek_v4_args import N_STREAMS
from aprefetch.models.deepseek_v4_attention import Attention, DeepseekV4State, _Compressor
from aprefetch.models.deepseek_v4_decode import DecodeCall
from aprefetch.models.kv_cache import StatePart
from aprefetch.models.moe import ExpertLease, RoutedCall
from aprefetch.types import LayerLayout

if TYPE_CHECKING:
    from aprefetch.models.deepseek_v4 import DeepseekV4

__all__ = ["GraphDecoder"]

_log = logging.getLogger(__name__)

_FIRST_CAPACITY_TOKENS = 2048
_TABLES = 4096  # waves of experts that may be on their way; each layer waits for the GPU once
_PATIENCE_S = 30.0
_GUESSES_OF_TOP_K = 2
_DRIFT_WEIGHT = 1 / 16  # of the newest token


@dataclass
class _Pool:
    """Fixed caches of one compressor: rings of open blocks, and finished rows."""

    kv: Tensor
    gate: Tensor
    rows: Tensor


@dataclass
class _Caches:
    window: Tensor
    compressed: _Pool | None
    index: _Pool | None


class GraphDecoder:
    """Captured single-token steps of one model; one sequence at a time lives in its caches.

    Args:
        model: the loaded model, on a CUDA device with Triton operations.
        capacity_tokens: positions that the caches hold at first; they grow by doubling.
    """

    def __init__(
        self, model: DeepseekV4, ops: TritonOps, capacity_tokens: int = _FIRST_CAPACITY_TOKENS
    ) -> None:
        args = model.args
        self.model, self.ops = model, ops
        self.top_k = args.num_experts_per_tok
        d, n = args.hidden_size, args.n_layers

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=ops.device)

        self._inputs, self._token, self._position, self._stamp = (
            whole(3), whole(1), whole(1), whole(1),
        )  # fmt: skip
        self._host_inputs = torch.zeros(3, dtype=torch.int64).pin_memory()
        self._n_guesses = min(_GUESSES_OF_TOP_K * self.top_k, args.n_experts)
        self._mail = torch.zeros(2, n, self._n_guesses, dtype=torch.int64).pin_memory()
        self._n_words = (self.top_k, self._n_guesses)
        self._mail_view: npt.NDArray[np.int64] = self._mail.numpy()
        self.entry, self.middle = ops.new(1, N_STREAMS, d), ops.new(1, N_STREAMS, d)
        self._ahead = ops.new(1, N_STREAMS, d)
        self.v, self.shared = ops.new(1, d), ops.new(1, d)
        self._post, self._comb = ops.new(1, N_STREAMS), ops.new(1, N_STREAMS, N_STREAMS)
        self._ids, self._weights = ops.new(1, self.top_k, dtype=torch.int32), ops.new(1, self.top_k)
        # What early routers predicted in this step, and what predictions are short of on average.
        self._predicted, self._drift = (
            ops.new(n, args.n_experts),
            ops.new(n, args.n_experts).zero_(),
        )
        self._no_bias = ops.new(args.n_experts).zero_()
        self.parts = ops.new(self.top_k, d)
        self._hidden = ops.new(self.top_k, args.expert_width)
        # Not from the graphs' pool: what one graph keeps there, another would write over.
        self._planes = expert_planes(self.v, self._hidden)
        self._logits = ops.new(1, args.vocab_size)
        self._tables: list[Tensor | None] = [
            None if b.ffn.table is None else torch.from_numpy(b.ffn.table).to(ops.device)
            for b in model.blocks
        ]
        # Slot tables: a ring on the host, one row of it on the device, and how many were taken.
        self._ring = torch.full((_TABLES, self.top_k, 3), -1, dtype=torch.int64).pin_memory()
        self._ring_view: npt.NDArray[np.int64] = self._ring.numpy()
        self._table = torch.full((self.top_k, 3), -1, dtype=torch.int64, device=ops.device)
        self._taken, self._zero = whole(1), whole(1)
        self._n_taken = 0
        self._pair_rows = whole(self.top_k)
        self._pairs = torch.arange(self.top_k, device=ops.device)
        self._expert_graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream(ops.device)  # type: ignore[no-untyped-call]
        self._owner: weakref.ref[DeepseekV4State] | None = None
        self._n_steps = 0
        self._capacity = 0
        self._caches: list[_Caches] = []
        self._first_capacity = capacity_tokens
        self._graphs: dict[bool, list[torch.cuda.CUDAGraph]] = {}
        self._kept: list[Any] = []

    def warm_up(self, arena: Tensor) -> None:
        """Capture all there is to capture, with experts that lie in `arena`."""
        self._reserve(1)
        for indexed in (False, True):
            self._captured(indexed)
        for layer, block in enumerate(self.model.blocks):
            self._expert_graph(arena, block.ffn.layout, self.model.args.routed_limits[layer])

    # Which steps, whose caches

    @staticmethod
    def fits(model: DeepseekV4) -> bool:
        """Whether a model can be decoded this way: hash tables must name distinct experts."""
        return all(
            b.ffn.table is None or bool((np.diff(np.sort(b.ffn.table, axis=1), axis=1) > 0).all())
            for b in model.blocks
        )

    def settle(self, state: DeepseekV4State | None = None) -> None:
        """Give the sequence its caches back, if `state` (or, with None, anyone) lives here."""
        owner = self._owner() if self._owner is not None else None
        if owner is None or (state is not None and owner is not state):
            return
        self._owner = None
        if owner.lent is None:  # it was given other rows meanwhile
            return
        owner.lent = None
        owner.load(self._dump(owner.n_tokens), owner.n_tokens)

    def _dump(self, n: int) -> list[StatePart]:
        parts: list[StatePart] = []
        for caches in self._caches:
            parts.append(_from_ring(caches.window, n))
            for pool, ratio in ((caches.compressed, 0), (caches.index, 4)):
                if pool is None:
                    continue
                ratio = ratio or self._ratio_of(pool)
                parts += [_from_ring(pool.kv, n), _from_ring(pool.gate, n)]
                parts.append((pool.rows[: n // ratio].clone(), 0))
        return parts

    def _ratio_of(self, pool: _Pool) -> int:
        return 4 if pool.kv.shape[0] == 8 else pool.kv.shape[0]

    def _move_in(self, state: DeepseekV4State) -> None:
        self.settle()
        self._reserve(state.n_tokens + 1)
        parts = iter(state.dump())
        for caches in self._caches:
            _to_ring(caches.window, next(parts))
            for pool in (caches.compressed, caches.index):
                if pool is not None:
                    _to_ring(pool.kv, next(parts))
                    _to_ring(pool.gate, next(parts))
                    rows = next(parts)[0]
                    pool.rows[: rows.shape[0]] = rows
        self._owner = weakref.ref(state)
        state.lent = self.settle

    def _reserve(self, n_tokens: int) -> None:
        """Caches for at least so many positions; the present content is kept."""
        if n_tokens <= self._capacity:
            return
        old = self._caches
        capacity = self._capacity or self._first_capacity
        while capacity < n_tokens:
            capacity *= 2
        args = self.model.args
        self._capacity = capacity
        self._caches = [self._new_caches(block.attention) for block in self.model.blocks]
        for new, before in zip(self._caches, old, strict=False):
            new.window.copy_(before.window)
            for a, b in ((new.compressed, before.compressed), (new.index, before.index)):
                if a is not None and b is not None:
                    a.kv.copy_(b.kv)
                    a.gate.copy_(b.gate)
                    a.rows[: b.rows.shape[0]] = b.rows
        self._rope = {
            bool(ratio): self.model.rope(bool(ratio)).span(0, capacity) for ratio in args.ratios
        }
        self._graphs.clear()
        self._kept.clear()

    def _new_caches(self, attention: Attention) -> _Caches:
        args, ops = self.model.args, self.ops

        def pool(compressor: _Compressor | None) -> _Pool | None:
            if compressor is None:
                return None
            ring = compressor.factor * compressor.ratio
            wide = compressor.factor * compressor.width
            return _Pool(
                ops.new(ring, wide).zero_(),
                ops.new(ring, wide).zero_(),
                ops.new(max(1, self._capacity // compressor.ratio), compressor.width).zero_(),
            )

        return _Caches(
            ops.new(args.window, args.head_dim).zero_(),
            pool(attention.compressor),
            pool(attention.index_compressor),
        )

    # Steps

    def ready(self, state: DeepseekV4State) -> bool:
        """Whether a step of `state` can be decoded here; captures what it needs.

        False where a weight's encoding has no kernel that can be captured; then the ordinary
        forward has to do.
        """
        try:
            self._reserve(state.n_tokens + 1)
            self._captured(self._is_indexed(state))
        except RuntimeError as error:
            _log.warning("decoding without CUDA graphs: %s", error)
            self.settle()
            return False
        return True

    def _is_indexed(self, state: DeepseekV4State) -> bool:
        """The indexer has a say only once there are more rows than it may pick."""
        return (state.n_tokens + 1) // 4 > self.model.args.index_topk

    def forward(
        self, state: DeepseekV4State, token_id: int
    ) -> Generator[RoutedCall, None, list[Tensor | None]]:
        """One token of one sequence; as `DeepseekV4.forward`."""
        if self._owner is None or self._owner() is not state or state.lent is None:
            self._move_in(state)
        self._reserve(state.n_tokens + 1)
        graphs = self._captured(self._is_indexed(state))
        self._n_steps += 1
        stamp = self._n_steps
        self._host_inputs[0], self._host_inputs[1] = token_id, state.n_tokens
        self._host_inputs[2] = stamp
        self._inputs.copy_(self._host_inputs, non_blocking=True)
        # Not captured: decoding some formats takes constants from the host.
        x = self.ops.embed(self.model.embedding, self._inputs[0:1])
        self.entry.copy_(x[:, None, :].expand(-1, N_STREAMS, -1))
        done = False
        try:
            for layer in range(self.model.args.n_layers):
                graphs[layer].replay()
                call = DecodeCall(self, layer, stamp)
                yield call
                call.experts  # noqa: B018  # the host must not run ahead of the slot tables
                call.finishing = True
                yield call
            graphs[-1].replay()
            state.n_tokens += 1
            done = True
            return [self._logits.clone()]
        finally:
            if not done:  # the caches hold half a token: nobody's any more
                self._owner, state.lent = None, None

    def mail(self, layer: int, stamp: int) -> list[int] | None:
        """The ids that the router of `layer` sent in step `stamp`, or None."""
        return self._letter(0, layer, stamp)

    def guess(self, layer: int, stamp: int) -> list[int] | None:
        """The ids that the next layer's router would rank highest, best first, or None."""
        return self._letter(1, layer, stamp)

    def _letter(self, box: int, layer: int, stamp: int) -> list[int] | None:
        letter: list[int] = self._mail_view[box, layer, : self._n_words[box]].tolist()
        if any(word >> 32 != stamp for word in letter):
            return None
        return [word & 0xFFFFFFFF for word in letter]

    def wait(self, call: DecodeCall) -> None:
        """Spin until a call's ids are there.

        Raises:
            DeviceError: the GPU failed, or is silent for too long.
        """
        until = time.perf_counter_ns() + int(_PATIENCE_S * 1e9)
        while not call.arrived():
            if time.perf_counter_ns() > until:
                try:
                    torch.cuda.synchronize(self.ops.device)
                except RuntimeError as error:
                    raise DeviceError(f"the GPU failed in layer {call.layer}: {error}") from error
                if not call.arrived():
                    raise DeviceError(f"layer {call.layer} sent no expert ids to the host")

    def run_experts(self, call: DecodeCall, arena: Tensor, leases: Sequence[ExpertLease]) -> None:
        """Enqueue some of a call's experts."""
        row = self._ring_view[self._n_taken % _TABLES]
        row[:, 0] = -1
        experts = call.experts
        for lease in leases:
            k = experts.index(lease.expert)
            row[k] = (lease.offset, k, 1)
        graph = self._expert_graph(arena, call.layout, call.limit)
        self._n_taken += 1
        graph.replay()

    def _expert_graph(
        self, arena: Tensor, layout: LayerLayout, limit: float
    ) -> torch.cuda.CUDAGraph:
        roles = tuple((r.ggml_type, r.n_out, r.n_in) for r in layout.roles)
        key = (arena.data_ptr(), roles, limit)
        graph = self._expert_graphs.get(key)
        if graph is None:
            graph = self._expert_graphs[key] = self._capture_experts(arena, layout, limit)
        return graph

    # Capturing

    def _capture(self, work: Any, *, warm: bool = True) -> torch.cuda.CUDAGraph:
        """A graph of what `work()` enqueues; it is run once before, so that kernels are loaded."""
        if warm:
            work()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def _capture_experts(
        self, arena: Tensor, layout: LayerLayout, limit: float
    ) -> torch.cuda.CUDAGraph:
        n = self.top_k * 3

        def run() -> None:
            matvec.fetch_table_kernel[(1,)](
                self._ring, self._table, self._taken, _TABLES, N=n, B=max(32, 1 << n.bit_length()),
                num_warps=1,
            )  # fmt: skip
            self.ops.experts_from_table(
                self.v, arena, layout, self._table, self.top_k, 1, self._zero, self._pair_rows,
                limit, self._hidden, self._planes, self.parts, self._pairs, 1,
            )  # fmt: skip

        graph = self._capture(run)
        # The run before capturing took one table.
        self._taken.fill_(self._n_taken)
        return graph

    def _captured(self, indexed: bool) -> list[torch.cuda.CUDAGraph]:
        """One graph per layer and one for the head."""
        graphs = self._graphs.get(indexed)
        if graphs is not None:
            return graphs
        saved = [
            [None if t is None else t.clone() for t in _tensors(caches)] for caches in self._caches
        ]
        n = self.model.args.n_layers
        graphs = []
        for i in range(n):
            graphs.append(self._capture(functools.partial(self._layer, i, indexed)))
            if i == 0:
                graphs[0].replay()  # the runs before the other captures need its results
        graphs.append(self._capture(self._head))
        for caches, before in zip(self._caches, saved, strict=True):
            for now, was in zip(_tensors(caches), before, strict=True):
                if now is not None and was is not None:
                    now.copy_(was)
        self._graphs[indexed] = graphs
        self._drift.zero_()  # the runs before capturing have seen nothing real
        return graphs

    def _begin(self) -> None:
        """Token, position and what follows from them, once per step."""
        args = self.model.args
        self._token.copy_(self._inputs[0:1])
        self._position.copy_(self._inputs[1:2])
        self._stamp.copy_(self._inputs[2:3])
        self._angles = {
            scaled: tuple(table.index_select(0, self._position) for table in tables)
            for scaled, tables in self._rope.items()
        }
        self._places = {n: torch.remainder(self._position, n) for n in {args.window, 4, 8, 128}}
        self._kept.append((self._angles, self._places))

    def _leave(self) -> None:
        """The end of a layer: experts, shared expert, and back into the streams."""
        self.ops.hc_leave_into(
            self.shared, self.middle, self._post, self._comb, self.entry,
            self.parts[None], self._weights,
        )  # fmt: skip

    def _layer(self, i: int, indexed: bool) -> None:
        ops, block = self.ops, self.model.blocks[i]
        if i == 0:
            self._begin()
        else:
            self._leave()
        u, post, comb = block.hc_attn.enter(ops, self.entry)
        y = self._attention(i, block.attention, u, indexed)
        ops.hc_leave_into(y, self.entry, post, comb, self.middle)
        block.hc_ffn.enter_into(ops, self.middle, self.v, self._post, self._comb)
        scores = self._route(i)
        ops.linear_into(block.ffn.shared_hidden(ops, self.v), block.ffn.shared_down, self.shared)
        self._guess(i, scores)

    def _route(self, i: int) -> Tensor:
        """Send the layer's experts to the host; the router's scores."""
        args, ffn, table = self.model.args, self.model.blocks[i].ffn, self._tables[i]
        chosen = None if table is None else table.index_select(0, self._token)
        scores = self.ops.linear(self.v, ffn.router)
        self.ops.route_into(
            scores, ffn.bias, chosen, args.normalise_weights, args.routed_scale,
            self._ids, self._weights, self._mail[0, i], self._stamp, True,
        )  # fmt: skip
        return scores

    def _guess(self, i: int, scores: Tensor) -> None:
        """Learn from the layer's scores what guesses fall short of; send those for the next.

        They are made from the streams as they will be but for the routed experts' part.
        """
        args, blocks = self.model.args, self.model.blocks
        learns = i > 0 and self._tables[i] is None
        guesses = i + 1 < args.n_layers and self._tables[i + 1] is None
        early = scores
        if guesses:
            after = blocks[i + 1]
            self.ops.hc_leave_into(self.shared, self.middle, self._post, self._comb, self._ahead)
            early = self.ops.linear(
                after.hc_ffn.route_input(self.ops, self._ahead), after.ffn.router
            )
        if learns or guesses:
            bias, next_bias = (
                self._no_bias if b.ffn.bias is None else b.ffn.bias
                for b in (blocks[i], blocks[min(i + 1, args.n_layers - 1)])
            )
            guess_kernel[(1,)](
                scores, bias, early, next_bias, self._predicted, self._drift, self._mail[1, i],
                self._stamp, args.n_experts, i, _DRIFT_WEIGHT,
                LEARN=learns, GUESS=guesses, M=self._n_guesses,
                B=triton.next_power_of_2(args.n_experts), num_warps=1,
            )  # fmt: skip

    def _head(self) -> None:
        self._leave()
        model, ops = self.model, self.ops
        h = ops.hc_collapse(
            self.entry, model.head_fn, model.head_scale, model.head_base,
            eps=model.args.rms_eps, hc_eps=model.args.hc_eps,
        )  # fmt: skip
        h = ops.rms_norm(h, model.head_norm, model.args.rms_eps)
        ops.linear_into(h, model.head, self._logits)

    def _attention(self, i: int, a: Attention, u: Tensor, indexed: bool) -> Tensor:
        ops, args, caches = self.ops, self.model.args, self._caches[i]
        cos, sin = self._angles[bool(a.ratio)]
        q_low, k, *extra = a.inputs(ops, u)
        q_low = ops.rms_norm(q_low, a.q_a_norm, args.rms_eps)
        q = ops.linear(q_low, a.q_b).view(1, args.n_heads, args.head_dim)
        q = ops.rope_(ops.rms_norm(q, None, args.rms_eps), cos, sin)
        k = ops.rms_norm(k, a.kv_norm, args.rms_eps)
        k = ops.rope_(k.view(1, 1, -1), cos, sin).view(1, -1)
        caches.window.index_copy_(0, self._places[args.window], k)
        keys = selected = None
        if a.compressor is not None and caches.compressed is not None:
            self._compress(a.compressor, caches.compressed, extra[0], extra[1])
            keys = caches.compressed.rows
        if a.index_compressor is not None and caches.index is not None:
            self._compress(a.index_compressor, caches.index, extra[2], extra[3])
            if indexed:
                selected = self._select(a, caches.index.rows, u, q_low, cos, sin)
        out = torch.empty_like(q)
        n_keys = 0 if keys is None else keys.shape[0]
        if a.ratio == 4:
            n_keys = min(n_keys, args.index_topk)
        n_groups = ops.attend_groups(args.window, n_keys)
        ops.attend_into(
            q, caches.window, 0, args.window, 0, self._position, True, args.window,
            max(1, a.ratio), keys, None, selected, a.sinks, args.head_dim**-0.5, out, n_groups,
            *ops.attend_scratch(q, n_groups),
        )  # fmt: skip
        o = ops.rope_(out, cos, sin, inverse=True).view(1, args.o_groups, -1)
        return ops.linear(ops.grouped_linear(o, a.o_a), a.o_b)

    def _compress(self, c: _Compressor, pool: _Pool, kv: Tensor, gate: Tensor) -> None:
        place = self._places[c.factor * c.ratio]
        pool.kv.index_copy_(0, place, kv)
        ape = c.ape.index_select(0, self._places[c.ratio])
        pool.gate.index_copy_(0, place, gate + ape)
        cos, sin = self._rope[True]
        self.ops.compress_decode(
            pool.kv, pool.gate, c.ratio, c.norm, cos, sin, self.model.args.rms_eps, pool.rows,
            self._position,
        )  # fmt: skip

    def _select(
        self, a: Attention, keys: Tensor, u: Tensor, q_low: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        args, ops = self.model.args, self.ops
        q = ops.linear(q_low, a.index_q).view(1, args.index_heads, args.index_dim)
        ops.rope_(q, cos, sin)
        weights = ops.linear(u, a.index_weights) * (args.index_heads * args.index_dim) ** -0.5
        scores = ops.new(1, keys.shape[0])
        chosen = ops.new(1, args.index_topk, dtype=torch.int32)
        ops.index_into(
            q, weights, 1.0, keys, self._position, self._position, True, 4, scores, chosen
        )
        return chosen


def _tensors(caches: _Caches) -> list[Tensor | None]:
    found: list[Tensor | None] = [caches.window]
    for pool in (caches.compressed, caches.index):
        found += [None] * 3 if pool is None else [pool.kv, pool.gate, pool.rows]
    return found


def _from_ring(ring: Tensor, n: int) -> StatePart:
    """The newest rows of a ring that has seen positions below `n`, oldest first."""
    first = max(0, n - ring.shape[0])
    places = torch.arange(first, n, device=ring.device) % ring.shape[0]
    return ring[places], first


def _to_ring(ring: Tensor, part: StatePart) -> None:
    rows, first = part
    kept = min(rows.shape[0], ring.shape[0])
    if kept:
        stop = first + rows.shape[0]
        places = torch.arange(stop - kept, stop, device=ring.device) % ring.shape[0]
        ring[places] = rows[rows.shape[0] - kept :]
