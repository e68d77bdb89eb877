"""One layer's call for routed experts.

The outputs of all (row, expert) pairs land in rows of their own and are summed afterwards in
ascending expert order. Which experts run first, in how many waves, or beside which others, cannot
change a bit of the result.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aprefetch.kernels.ops import Ops, Situ
from aprefetch.types import LayerLayout

__all__ = ["ExpertLease", "RoutedCall"]


class ExpertLease(Protocol):
    """An expert that may be used now: it lies at byte `offset` of the arena."""

    @property
    def expert(self) -> int: ...
    @property
    def offset(self) -> int: ...


@functools.cache
def _one_row(top_k: int, device: torch.device) -> tuple[list[int], Tensor, Tensor]:
    """Starts, order and rows of one row's pairs: shared by all calls, never written."""
    return (
        list(range(top_k + 1)),
        torch.arange(top_k, device=device),
        torch.zeros(top_k, dtype=torch.int64, device=device),
    )


_GROUPED = frozenset({"ids", "experts", "_starts", "_order", "_all_rows"})


def _fetched(ids: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """A copy of `ids` in pinned memory, and the event after which it is complete."""
    pinned = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    pinned.copy_(ids, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return pinned, event


class RoutedCall:
    """Experts wanted by one layer of one step, and the place where their outputs gather.

    Yielded twice by `Model.forward`: first with `finishing` false (place the demand, start reads,
    guess ahead), then with `finishing` true (every expert has to be run before resuming).

    On a GPU the ids are on their way to the host at first: `arrived()` tells whether they are
    there. Reading `ids` or `experts` before blocks until they are.
    """

    guesses_ahead = False
    """Whether `guess_next` will have an answer: the step itself evaluates the next router."""

    __slots__ = (
        "_all_rows",
        "_arriving",
        "_order",
        "_starts",
        "activation",
        "ahead",
        "experts",
        "finishing",
        "ids",
        "known_weights",
        "layer",
        "layout",
        "limit",
        "n_rows",
        "next_scores",
        "ops",
        "parts",
        "ranked",
        "streams",
        "top_k",
        "weights",
        "x",
    )

    def __init__(
        self,
        *,
        layer: int,
        layout: LayerLayout,
        ops: Ops,
        x: Tensor,
        ids: Tensor,
        limit: float,
        streams: Tensor,
        activation: Situ | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """`x [T, D]` inputs, `ids [T, K]` int32 ascending in rows, `streams` for the lookahead.

        `activation` stands in for SwiGLU with `limit`. With the `weights [T, K]` of `total` the
        call keeps account of what is `known` of a single row.
        """
        self.layer = layer
        self.layout = layout
        self.ops = ops
        self.x = x
        self.limit = limit
        self.activation = activation
        self.streams = streams
        self.ahead: Callable[[], Tensor] | None = None
        """Once finishing: the streams as they will be but for what is not known yet of the routed
        experts' part: of a single row on the host, that of experts that have yet to run; otherwise
        all of it. A better state to guess from than `streams`. None where there is none."""
        self.next_scores: Callable[[], Tensor] | None = None
        """Once finishing: what the router of the next layer says of the streams `ahead`, `[1, E]`,
        in one go. None where `ahead` and an early router have to be used."""
        self.ranked: Callable[[], Tensor] | None = None
        """What the router ranked by, `[T, E]`: the truth that guesses for this layer aimed at."""
        self.finishing = False
        self.n_rows, self.top_k = ids.shape
        n_out = layout.roles[-1].n_out
        self.parts: Tensor = ops.new(self.n_rows * self.top_k, n_out)
        self.weights = weights
        self.known_weights: Tensor | None = None
        """`[1, K]`: of a single row on the host, the weights of what has run, the others 0. None
        as long as nothing has."""
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None
        if ids.is_cuda:
            self._arriving = _fetched(ids)
        else:
            self._group(ids.numpy())

    def _group(self, ids: npt.NDArray[np.int32]) -> None:
        """Bring the pairs into the order of their experts."""
        self.ids: npt.NDArray[np.int32] = ids
        flat, device = ids.ravel(), self.x.device
        self.experts: list[int] = flat.tolist()
        if self.n_rows == 1 and all(map(operator.lt, self.experts, self.experts[1:])):
            self._starts, self._order, self._all_rows = _one_row(self.top_k, device)
        else:
            order = np.argsort(flat, kind="stable")
            experts, starts = np.unique(flat[order], return_index=True)
            self.experts = experts.tolist()
            self._starts = [*starts.tolist(), flat.size]
            # Small copies from pageable memory are staged: no wait for the GPU.
            self._order = torch.from_numpy(order).to(device, non_blocking=True)
            self._all_rows = self._order // self.top_k

    def arrived(self) -> bool:
        """Whether the ids are on the host; never blocks."""
        if self._arriving is not None:
            ids, event = self._arriving
            if not event.query():  # type: ignore[no-untyped-call]
                return False
            self._arriving = None
            self._group(ids.numpy())
        return True

    def guess_next(self) -> list[int]:
        """Experts that the next layer is likely to pick, if `guesses_ahead`; [] until known."""
        return []

    def __getattr__(self, name: str) -> Any:
        """Reached for what `_group` has yet to set: waits for the ids."""
        if name in _GROUPED and self._arriving is not None:
            self._arriving[1].synchronize()
            self.arrived()
            return getattr(self, name)
        raise AttributeError(name)

    @property
    def cost(self) -> int:
        """Weight bytes times rows of running all experts; for `Device.inline`."""
        return int(self.layout.payload_bytes * self.n_rows * self.top_k)

    def run(self, arena: Tensor, leases: Sequence[ExpertLease]) -> None:
        """Compute the leased experts for all their rows, into `parts`."""
        if not leases:
            return
        if [lease.expert for lease in leases] == self.experts:
            offsets = [lease.offset for lease in leases]
            starts, rows, order = self._starts, self._all_rows, self._order
        else:
            index = {expert: i for i, expert in enumerate(self.experts)}
            spans = [self._span(index[lease.expert]) for lease in leases]
            offsets = [lease.offset for lease in leases]
            starts = np.cumsum([0, *(stop - start for start, stop in spans)]).tolist()
            order = torch.cat([self._order[start:stop] for start, stop in spans])
            rows = order // self.top_k
        if self.weights is not None and self.n_rows == 1 and not self.x.is_cuda:
            self._note(order, self.weights)
        where = (self.x, arena, offsets, self.layout, starts, rows, self.limit, self.parts, order)
        if self.activation is None:
            self.ops.experts(*where)
        else:
            self.ops.experts(*where, activation=self.activation)

    def _note(self, order: Tensor, weights: Tensor) -> None:
        """These pairs of a single row are about to be known."""
        if self.known_weights is None:
            if len(order) == self.top_k:
                self.known_weights = weights
                return
            self.known_weights = torch.zeros_like(weights)
            self.parts.zero_()  # weights of 0 don't silence what happens to lie there
        pairs = order.numpy()
        self.known_weights.numpy()[0, pairs] = weights.numpy()[0, pairs]

    def known(self, shared: Tensor) -> Tensor:
        """`total` as far as it is known, if this is a single row on the host; else `shared`.

        For guesses only.
        """
        if self.known_weights is None:
            return shared
        return self.total(self.known_weights, shared)

    def _span(self, index: int) -> tuple[int, int]:
        return self._starts[index], self._starts[index + 1]

    def rows_of(self, expert: int) -> npt.NDArray[np.int64]:
        """Rows of the step that picked `expert`."""
        return np.flatnonzero((self.ids == expert).any(axis=1))

    def fail(self, expert: int) -> npt.NDArray[np.int64]:
        """Put zeros for an expert that cannot be read; returns the rows it spoils."""
        start, stop = self._span(self.experts.index(expert))
        self.parts[self._order[start:stop]] = 0.0
        return self.rows_of(expert)

    def total(self, weights: Tensor, shared: Tensor | None = None) -> Tensor:
        """The weighted sum over each row's experts, `[T, n_out]`, in ascending expert order.

        The `shared` expert's result, if there is one, is added last.
        """
        parts = self.parts.view(self.n_rows, self.top_k, -1)
        if shared is None:
            return self.ops.sum_experts(parts, weights)
        return self.ops.sum_experts_and(parts, weights, shared)
