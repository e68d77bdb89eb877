"""A learned correction of early routers' scores: one small linear map per layer, from a file.

Attention often looks at the token before, which no early router sees. So what the target layer's
experts read for that token foretells a part of what scores will be short of.
`tools/fit_lookahead.py` fits the map to recorded states and stores it beside the model as
`NAME.lookahead.npz`: for each target layer for which that helps, `weight_L` `[D, E]`, `bias_L`
`[E]`, float32, and `meta` (JSON: format, and the layers). A file that is missing, stale or damaged
costs nothing but worse guesses: where shapes do not fit it is left out, with one warning.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["FORMAT", "Correction", "load_corrections", "path_beside"]

FORMAT = 2

log = logging.getLogger(__name__)


class Correction:
    """The map of one target layer.

    Args:
        weight: `[D, E]`.
        bias: `[E]`.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """What to add to the scores `[1, E]`.

        Args:
            x: `[1, D]` what the target layer's experts read for the token before.
        """
        return torch.addmm(self._bias, x, self._weight)

    def fits(self, n_inputs: int, n_experts: int) -> bool:
        """Whether it was made for these sizes."""
        return self._weight.shape == (n_inputs, n_experts)


def path_beside(model: Path) -> Path:
    """Where a model's corrections are looked for."""
    return model.with_name(model.name.removesuffix(".gguf") + ".lookahead.npz")


def load_corrections(path: Path, device: str) -> Mapping[int, Correction]:
    """Corrections by target layer; empty, with a warning, where the file is of no use. Blocks."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            meta = json.loads(str(file["meta"]))
            if meta["format"] != FORMAT:
                raise ValueError(f"format {meta['format']}")
            found = {}
            for layer in meta["layers"]:
                weight, bias = file[f"weight_{layer}"], file[f"bias_{layer}"]
                if weight.ndim != 2 or bias.shape != weight.shape[1:]:
                    raise ValueError(f"layer {layer} has shape {weight.shape}")
                if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                    raise ValueError(f"layer {layer} is not finite")
                found[int(layer)] = Correction(
                    torch.from_numpy(weight.astype(np.float32)).to(device),
                    torch.from_numpy(bias.astype(np.float32)).to(device),
                )
            return found
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile, EOFError) as error:
        log.warning("%s is left out: not usable as lookahead corrections (%s)", path, error)
        return {}
