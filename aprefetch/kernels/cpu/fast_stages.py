"""Whole stages of a layer as one call of a compiled kernel, where the work is small.

Lists of steps are made once per set of weights and kept beside them. Work that is worth sharing
between threads is composed of the single operations, which share it; the bits are the same.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from aprefetch.kernels.cpu import layers, stages
from aprefetch.kernels.cpu.stages import LINEAR, NORM, ROPE, SWIGLU, WORDS
from aprefetch.kernels.cpu.tensors import flat, new, wrong
from aprefetch.kernels.fused import AttentionInputs, FusedOps, Queries, RouterAhead, StackedWeights
from aprefetch.quant import dequantize
from aprefetch.quant.base import QuantTensor

if TYPE_CHECKING:
    from aprefetch.kernels.ops import Ops

__all__ = ["CompiledStages"]

_run_steps = stages.run_steps


def _bits(x: float) -> int:
    """The bits of `x` in float32."""
    bits: int = struct.unpack("<i", struct.pack("<f", x))[0]
    return bits


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows in a register: from column `first` of rows of `width` numbers."""

    register: int
    width: int
    first: int = 0

    def at(self, first: int) -> _Rows:
        return _Rows(self.register, self.width, self.first + first)


class _Steps:
    """A list of steps under construction; afterwards its address, and what it needs alive."""

    def __init__(self, *owners: object) -> None:
        self._words = array("q")
        self.owners: list[object] = [*owners]  # ids and addresses stay theirs
        self.weight_bytes = 0
        self.key: tuple[float, ...] = ()
        self.address = self.n = 0

    def _add(self, kind: int, x: _Rows, out: _Rows, *operands: int) -> None:
        step = [kind]
        for rows in (x, out):
            step += rows.register, 4 * rows.first, 4 * rows.width
        step += operands
        self._words.extend(step + [0] * (WORDS - len(step)))
        self.address, self.n = self._words.buffer_info()[0], len(self._words) // WORDS

    def linear(self, x: _Rows, w: QuantTensor, out: _Rows, n_groups: int = 1) -> None:
        data = w.data
        if w.n_out % n_groups:
            raise wrong("groups", n_groups, f"a divisor of {w.n_out}")
        self.owners.append(data)
        self.weight_bytes += data.stride(0) * w.n_out
        self._add(
            LINEAR, x, out, w.ggml_type, data.data_ptr(), data.stride(0), w.n_in,
            w.n_out // n_groups, n_groups,
        )  # fmt: skip

    def norm(self, x: _Rows, n_heads: int, n: int, weight: Tensor | None, eps: float) -> None:
        weight = None if weight is None else flat(weight)
        self.owners.append(weight)
        self._add(NORM, x, x, n_heads, n, 0 if weight is None else weight.data_ptr(), _bits(eps))

    def rope(self, x: _Rows, n_heads: int, d: int, n_pairs: int, direction: int) -> None:
        self._add(ROPE, x, x, n_heads, d, n_pairs, direction)

    def swiglu(self, gate: _Rows, up: _Rows, n: int, limit: float) -> None:
        self._add(SWIGLU, gate, gate, 4 * (up.first - gate.first), n, _bits(limit))

    def stack(self, x: _Rows, weights: StackedWeights, out: _Rows) -> list[_Rows]:
        """All products beside each other in `out`; where each one's columns are."""
        starts, at = [], 0
        for w in weights.matrices:
            self.linear(x, w, out.at(at))
            starts.append(at)
            at += w.n_out
        return [out.at(starts[i] + first) for i, first, _ in weights.columns]


class CompiledStages(FusedOps):
    """See `FusedOps`."""

    _split_cost: float

    def __init__(self) -> None:
        # Both keep what they are keyed by alive, so an id is never met again with another object.
        self._steps: dict[int, _Steps] = {}
        self._floats: dict[int, tuple[Tensor, Tensor]] = {}
        self._ahead: dict[int, tuple[_Steps, tuple[float, ...]]] = {}

    def _float_matrix(self, w: QuantTensor) -> int:
        """Address of a small matrix in float32; other encodings are widened once and kept."""
        if w.ggml_type == 0 and w.data.is_contiguous():
            return w.data.data_ptr()
        found = self._floats.get(id(w.data))
        if found is None:
            wide = dequantize(w.data, w.ggml_type, w.n_in).contiguous()
            found = self._floats[id(w.data)] = (w.data, wide)
        return found[1].data_ptr()

    def attention_inputs(
        self, u: Tensor, weights: AttentionInputs, cos: Tensor, sin: Tensor
    ) -> Queries:
        u, cos, sin = flat(u), flat(cos), flat(sin)
        (n, width), n_pairs = u.shape, cos.size(1)
        steps = self._steps.get(id(weights))
        if steps is None or steps.key != (width, n_pairs):
            steps = self._steps[id(weights)] = _input_steps(weights, width, n_pairs)
        if steps.weight_bytes * n >= self._split_cost:
            return FusedOps.attention_inputs(cast("Ops", self), u, weights, cos, sin)
        q = new(n, weights.n_heads, weights.k_norm.size(0))
        sizes = weights.stack.sizes
        raw = new(n, weights.stack.n_out)
        _run_steps(
            steps.address, steps.n, n, u.data_ptr(), raw.data_ptr(), q.data_ptr(), 0,
            cos.data_ptr(), sin.data_ptr(),
        )  # fmt: skip
        parts = raw.split_with_sizes(sizes, 1)
        q_low, k, *extra = [parts[i] for i in weights.stack.places]
        return Queries(q, k, q_low, extra)

    def attention_output(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        w_low: QuantTensor,
        w_out: QuantTensor,
        n_groups: int,
    ) -> Tensor:
        heads, cos, sin = flat(heads), flat(cos), flat(sin)
        n, n_heads, d = heads.shape
        key = (n_heads, d, cos.size(1), n_groups, id(w_out))
        steps = self._steps.get(id(w_low))
        if steps is None or steps.key != key:
            steps = self._steps[id(w_low)] = _output_steps(w_low, w_out, key)
        if steps.weight_bytes * n >= self._split_cost:
            return FusedOps.attention_output(
                cast("Ops", self), heads, cos, sin, w_low, w_out, n_groups
            )
        out = new(n, w_out.n_out)
        _run_steps(
            steps.address, steps.n, n, heads.data_ptr(), 0, out.data_ptr(), w_low.n_out,
            cos.data_ptr(), sin.data_ptr(),
        )  # fmt: skip
        return out

    def gated_mlp(
        self, x: Tensor, gate_up: StackedWeights, down: QuantTensor, limit: float
    ) -> Tensor:
        x = flat(x)
        n, width = x.shape
        key = (width, limit, id(down))
        steps = self._steps.get(id(gate_up))
        if steps is None or steps.key != key:
            steps = self._steps[id(gate_up)] = _mlp_steps(gate_up, down, key)
        if steps.weight_bytes * n >= self._split_cost:
            return FusedOps.gated_mlp(cast("Ops", self), x, gate_up, down, limit)
        out = new(n, down.n_out)
        _run_steps(steps.address, steps.n, n, x.data_ptr(), 0, out.data_ptr(), gate_up.n_out, 0, 0)
        return out

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, streams, post, comb = flat(y), flat(streams), flat(post), flat(comb)
        n, s, d = streams.shape
        left, out = new(n, s, d), new(n, d)
        new_post, new_comb = new(n, s), new(n, s, s)
        stages.hc_pass(
            y.data_ptr(), streams.data_ptr(), post.data_ptr(), comb.data_ptr(), left.data_ptr(),
            self._float_matrix(fn), n, s, d, scale.data_ptr(), base.data_ptr(), norm.data_ptr(),
            eps, hc_eps, n_iterations, out.data_ptr(), new_post.data_ptr(), new_comb.data_ptr(),
        )  # fmt: skip
        return left, out, new_post, new_comb

    def sum_experts_and(self, parts: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
        parts, weights, shared = flat(parts), flat(weights), flat(shared)
        n, k, d = parts.shape
        out = new(n, d)
        layers.sum_experts(
            parts.data_ptr(), weights.data_ptr(), n, k, d, shared.data_ptr(), out.data_ptr()
        )
        return out

    def scores_ahead(
        self,
        ahead: RouterAhead,
        parts: Tensor | None,
        weights: Tensor | None,
        shared: Tensor,
        streams: Tensor,
        post: Tensor,
        comb: Tensor,
    ) -> Tensor:
        found = self._ahead.get(id(ahead))
        if found is None:
            found = self._ahead[id(ahead)] = self._ahead_steps(ahead)
        steps, fixed = found
        n, s, d = streams.shape
        if n != 1 or steps.key != (s * d, d) or steps.weight_bytes >= self._split_cost:
            return FusedOps.scores_ahead(
                cast("Ops", self), ahead, parts, weights, shared, streams, post, comb
            )
        # Held by name until the kernel is done: an address keeps nothing alive.
        shared, streams, post, comb = flat(shared), flat(streams), flat(post), flat(comb)
        out, k, first, by = new(1, ahead.router.n_out), 0, 0, 0
        if parts is not None and weights is not None:
            parts, weights = flat(parts), flat(weights)
            k, first, by = weights.size(1), parts.data_ptr(), weights.data_ptr()
        stages.scores_ahead(
            first, by, k, shared.data_ptr(), streams.data_ptr(), post.data_ptr(), comb.data_ptr(),
            s, d, *fixed, out.data_ptr(),
        )  # fmt: skip
        return out

    def _ahead_steps(self, ahead: RouterAhead) -> tuple[_Steps, tuple[float, ...]]:
        """The router's product, and the kernel's arguments that stay."""
        router, bias = ahead.router, None if ahead.bias is None else flat(ahead.bias)
        scale, base, norm = flat(ahead.scale), flat(ahead.base), flat(ahead.norm)
        steps = _Steps(ahead, bias, scale, base, norm)
        steps.linear(_Rows(0, router.n_in), router, _Rows(2, router.n_out))
        steps.key = (ahead.fn.n_in, router.n_in)
        fixed = (
            self._float_matrix(ahead.fn), scale.data_ptr(), base.data_ptr(), norm.data_ptr(),
            ahead.eps, ahead.hc_eps, steps.address, 0 if bias is None else bias.data_ptr(),
            router.n_out,
        )  # fmt: skip
        return steps, fixed


def _input_steps(weights: AttentionInputs, width: int, n_pairs: int) -> _Steps:
    steps, heads, d = _Steps(weights), weights.n_heads, weights.k_norm.size(0)
    if {w.n_in for w in weights.stack.matrices} != {width} or weights.q_up.n_out != heads * d:
        raise wrong("attention input", width, weights.stack.matrices[0].n_in)
    x, q = _Rows(0, width), _Rows(2, heads * d)
    q_low, k, *_ = steps.stack(x, weights.stack, _Rows(1, weights.stack.n_out))
    steps.norm(q_low, 1, weights.q_norm.size(0), weights.q_norm, weights.eps)
    steps.linear(q_low, weights.q_up, q)
    steps.norm(q, heads, d, None, weights.eps)
    steps.rope(q, heads, d, n_pairs, 1)
    steps.norm(k, 1, d, weights.k_norm, weights.eps)
    steps.rope(k, 1, d, n_pairs, 1)
    steps.key = (width, n_pairs)
    return steps


def _output_steps(w_low: QuantTensor, w_out: QuantTensor, key: tuple[int, ...]) -> _Steps:
    n_heads, d, n_pairs, n_groups, _ = key
    if n_groups * w_low.n_in != n_heads * d or w_out.n_in != w_low.n_out:
        raise wrong("attention output", (n_heads, d), (n_groups, w_low.n_in))
    steps = _Steps(w_low, w_out)
    heads, low = _Rows(0, n_heads * d), _Rows(1, w_low.n_out)
    steps.rope(heads, n_heads, d, n_pairs, -1)
    steps.linear(heads, w_low, low, n_groups)
    steps.linear(low, w_out, _Rows(2, w_out.n_out))
    steps.key = key
    return steps


def _mlp_steps(gate_up: StackedWeights, down: QuantTensor, key: tuple[float, ...]) -> _Steps:
    width, limit = int(key[0]), key[1]
    if {w.n_in for w in gate_up.matrices} != {width} or gate_up.n_out != 2 * down.n_in:
        raise wrong("gated MLP input", width, gate_up.matrices[0].n_in)
    steps = _Steps(gate_up, down)
    gate, up = steps.stack(_Rows(0, width), gate_up, _Rows(1, gate_up.n_out))
    steps.swiglu(gate, up, down.n_in, limit)
    steps.linear(gate, down, _Rows(2, down.n_out))
    steps.key = key
    return steps
