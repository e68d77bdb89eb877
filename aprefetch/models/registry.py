"""The architectures that are known, by GGUF name. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aprefetch.errors import SourceError, UnsupportedModelError
from aprefetch.kernels.ops import Ops
from aprefetch.models import deepseek_v4, kimi_k3
from aprefetch.models.base import Model
from aprefetch.models.loading import DenseSource
from aprefetch.types import LayerLayout

__all__ = ["Architecture", "known_architectures", "lookup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How to open a model of one kind.

    `n_layers(metadata, tensors)` tells how many blocks belong to the trunk: experts of later ones
    are not needed. `check(metadata, tensors)` raises if the metadata cannot be used, before any
    large read. `load(source, layouts, expert_tensors, ops, device)` reads the dense tensors.
    """

    name: str
    n_layers: Callable[[Mapping[str, Any], Mapping[str, Any]], int]
    check: Callable[[Mapping[str, Any], Mapping[str, Any]], object]
    load: Callable[
        [DenseSource, Mapping[int, LayerLayout], frozenset[str], Ops, torch.device], Model
    ]


_KNOWN = {
    deepseek_v4.ARCHITECTURE: Architecture(
        name=deepseek_v4.ARCHITECTURE,
        n_layers=deepseek_v4.n_main_layers,
        check=deepseek_v4.DeepseekV4Args.from_metadata,
        load=deepseek_v4.DeepseekV4,
    ),
    **{
        name: Architecture(
            name=name,
            n_layers=kimi_k3.n_main_layers,
            check=kimi_k3.KimiArgs.from_metadata,
            load=kimi_k3.Kimi,
        )
        for name in (kimi_k3.KIMI_K3, kimi_k3.KIMI_LINEAR)
    },
}


def known_architectures() -> tuple[str, ...]:
    """GGUF names of the architectures that can be run."""
    return tuple(_KNOWN)


def lookup(metadata: Mapping[str, Any]) -> Architecture:
    """The entry for `general.architecture`.

    Raises:
        SourceError: the key is missing or no string.
        UnsupportedModelError: the architecture is not known.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise SourceError(
            "metadata key general.architecture is missing or no string; is this a language model?",
            key="general.architecture",
        )
    if name not in _KNOWN:
        raise UnsupportedModelError(
            f"architecture {name!r} is not supported; known: {', '.join(known_architectures())}"
        )
    return _KNOWN[name]
