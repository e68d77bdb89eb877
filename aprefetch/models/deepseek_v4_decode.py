"""What a captured step yields where a layer needs its routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aprefetch.models.moe import ExpertLease, RoutedCall

if TYPE_CHECKING:
    from aprefetch.models.deepseek_v4_graph import GraphDecoder

__all__ = ["DecodeCall"]


class DecodeCall(RoutedCall):
    """A call whose expert ids are still on their way from the GPU.

    `arrived()` tells whether they are there; reading `ids` or `experts` before waits for them.
    """

    __slots__ = ("_decoder", "_found", "_stamp")

    guesses_ahead = True

    def __init__(self, decoder: GraphDecoder, layer: int, stamp: int) -> None:
        self._decoder, self._stamp = decoder, stamp
        self._found: list[int] | None = None
        ffn = decoder.model.blocks[layer].ffn
        self.layer, self.layout, self.ops = layer, ffn.layout, decoder.ops
        self.x, self.streams = decoder.v, decoder.middle
        self.limit = decoder.model.args.routed_limits[layer]
        self.activation = None
        self.ahead = self.ranked = None
        self.finishing = False
        self.n_rows, self.top_k = 1, decoder.top_k
        self.parts = decoder.parts

    def arrived(self) -> bool:
        """Whether the ids have been written; never blocks."""
        if self._found is None:
            self._found = self._decoder.mail(self.layer, self._stamp)
        return self._found is not None

    @property
    def experts(self) -> list[int]:  # type: ignore[override]
        """Expert numbers, ascending."""
        if not self.arrived():
            self._decoder.wait(self)
        assert self._found is not None
        return self._found

    @property
    def ids(self) -> npt.NDArray[np.int32]:  # type: ignore[override]
        """`[1, K]`."""
        return np.array([self.experts], np.int32)

    def guess_next(self) -> list[int]:
        """What the next layer's router would rank highest now, best first; may be empty.

        Known a moment after `experts`; what has not arrived is not waited for.
        """
        return self._decoder.guess(self.layer, self._stamp) or []

    def run(self, arena: Tensor, leases: Sequence[ExpertLease]) -> None:
        """Compute the leased experts, into their rows of `parts`."""
        if leases:
            self._decoder.run_experts(self, arena, leases)

    def fail(self, expert: int) -> npt.NDArray[np.int64]:
        """Put zeros for an expert that cannot be read; returns the rows it spoils."""
        self.parts[self.experts.index(expert)] = 0.0
        return np.zeros(1, np.int64)
