"""Parts that several architectures share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aprefetch.kernels.fused import StackedWeights
from aprefetch.kernels.ops import Ops
from aprefetch.quant.base import QuantTensor

__all__ = ["FusedLinear", "RotaryTable", "yarn_frequencies"]


class FusedLinear:
    """Several weights that read the same input, in as few products as their types allow.

    Rows of equal encoding are stacked when the model is loaded; each output element is still the
    same dot product of the same bytes.
    """

    def __init__(self, weights: Sequence[QuantTensor]) -> None:
        self.weights = StackedWeights(weights)

    def __call__(self, ops: Ops, x: Tensor) -> list[Tensor]:
        """Outputs `[T, n_out]`, contiguous, in the order of the weights."""
        return ops.stacked_linear(x, self.weights)


def yarn_frequencies(
    n_rotary: int,
    base: float,
    *,
    factor: float = 1.0,
    original_context: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    ext_factor: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Radians per position of each rotary pair, `[n_rotary / 2]`.

    Plain rotary embedding for `factor` 1; linear interpolation with `ext_factor` 0; YaRN (Peng et
    al. 2023, section 3.2, "NTK-by-parts") with `ext_factor` 1. No magnitude scaling.
    """
    j = np.arange(n_rotary // 2, dtype=np.float64)
    plain = base ** (-2.0 * j / n_rotary)
    if factor == 1.0:
        return plain

    def pair_of(n_turns: float) -> float:
        """The (fractional) pair index whose wave makes `n_turns` turns in the original context."""
        turns = original_context / (n_turns * 2 * math.pi)
        return n_rotary * math.log(turns) / (2 * math.log(base))

    kept = np.zeros_like(plain)
    if ext_factor:
        low = max(0.0, math.floor(pair_of(beta_fast)))
        high = min(n_rotary - 1.0, math.ceil(pair_of(beta_slow)))
        kept = 1 - np.clip((j - low) / max(0.001, high - low), 0, 1)
        kept *= ext_factor
    return plain * kept + plain / factor * (1 - kept)


class RotaryTable:
    """cos and sin of every (position, pair), computed in float64 and kept as float32.

    The table grows by doubling as positions are asked for.
    """

    def __init__(self, frequencies: npt.NDArray[np.float64], device: torch.device) -> None:
        self._frequencies = frequencies
        self._device = device
        self._cos = self._sin = torch.empty((0, len(frequencies)), device=device)

    def _grow(self, n_positions: int) -> None:
        have = self._cos.shape[0]
        if n_positions <= have:
            return
        positions = np.arange(have, max(n_positions, 2 * have, 512), dtype=np.float64)
        angles = positions[:, None] * self._frequencies[None]
        self._cos, self._sin = (
            torch.cat([old, torch.from_numpy(new.astype(np.float32)).to(self._device)])
            for old, new in ((self._cos, np.cos(angles)), (self._sin, np.sin(angles)))
        )

    def span(self, first: int, n: int, step: int = 1) -> tuple[Tensor, Tensor]:
        """cos, sin `[n, pairs]` of positions `first, first + step, ...`."""
        stop = first + n * step
        self._grow(stop)
        cos, sin = self._cos[first:stop:step], self._sin[first:stop:step]
        return (cos, sin) if step == 1 else (cos.contiguous(), sin.contiguous())

    def spans(self, runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The same for several runs `(first, n)` after each other."""
        if len(runs) == 1:
            return self.span(*runs[0])
        tables = [self.span(first, n) for first, n in runs]
        return torch.cat([t[0] for t in tables]), torch.cat([t[1] for t in tables])
