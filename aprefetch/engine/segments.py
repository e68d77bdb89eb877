"""What the stretches of dense compute between two yields of a model's forward cost.

Costs are weight bytes that one row passes through, for `Device.inline`. The embedding is not among
them: a row of it is looked up. Layers are taken to be alike.
"""

from __future__ import annotations

from aprefetch.models.base import ModelInfo
from aprefetch.models.moe import RoutedCall

__all__ = ["SegmentCosts"]


class SegmentCosts:
    """Costs per row of a model's segments."""

    def __init__(self, info: ModelInfo) -> None:
        parts, n_layers = info.dense_bytes_by_part, max(1, info.n_layers)
        shared = parts.get("shared experts", 0)
        layers = info.dense_bytes - parts.get("embedding", 0) - parts.get("head", 0) - shared
        self.layer = max(1, layers // n_layers)
        """Up to a router: attention and what is around it."""
        self.shared = max(1, shared // n_layers)
        """Beside the routed experts: the shared one."""
        self.head = max(1, parts.get("head", 0))
        """Logits of one row."""
        self.guess = max(1, self.layer // 8)
        """The routers of the next layers."""
        self._last_layer = info.routed_layers[-1] if info.routed_layers else -1

    def after(self, call: RoutedCall | None) -> int:
        """The stretch that comes when `call` (None: nothing yet) has been yielded and is over."""
        if call is None:
            return self.layer
        if not call.finishing:
            return self.shared
        return self.head if call.layer == self._last_layer else self.layer
