"""What an architecture offers to the engine.

A model is math over dense weights plus calls for routed experts. `forward` is a plain generator: it
yields a `RoutedCall` twice per routed layer (to announce it, and to have it finished) and knows
nothing of files, slots, threads or asyncio. Sequences keep their state in a `SequenceState`; a step
takes chunks of any number of sequences, a batch of one included.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aprefetch.models.kv_cache import StatePart
from aprefetch.models.moe import RoutedCall

__all__ = [
    "Chunk",
    "EarlyRouter",
    "LogitsWanted",
    "Model",
    "ModelInfo",
    "SequenceState",
    "WarmsUp",
    "logits_of",
]

LogitsWanted = Literal["last", "all", "none"]

EarlyRouter = Callable[[Tensor], Tensor]
"""Streams `[T, S, D]` before some layer -> that layer's ranking scores `[T, E]`, as a guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded model. `dense_bytes` are what stays in memory all the time."""

    architecture: str
    name: str
    n_layers: int
    n_vocab: int
    context_length: int
    hidden_size: int
    n_experts: int
    num_experts_per_tok: int
    routed_layers: tuple[int, ...]
    token_routed_layers: tuple[int, ...]
    dense_bytes: int = 0
    dense_bytes_by_part: Mapping[str, int] = field(default_factory=dict)
    state_bytes_per_token: int = 0
    state_bytes_fixed: int = 0
    state_bytes_per_chunk_token: int = 0  # of the longest chunk a sequence has run, besides


class SequenceState(Protocol):
    """Caches of one sequence. `n_tokens` is the next position."""

    n_tokens: int

    @property
    def n_bytes(self) -> int:
        """Bytes held by the caches."""
        ...

    def dump(self) -> list[StatePart]:
        """Everything that the sequence's continuation depends on, in a fixed order, as views."""
        ...

    def load(self, parts: Sequence[StatePart], n_tokens: int) -> None:
        """Continue a sequence of `n_tokens` from its dump; this state must be new.

        What is given is taken over: nobody else may write it.

        Raises:
            ValueError: the parts are of another model.
        """
        ...


@dataclass(slots=True)
class Chunk:
    """The next tokens of one sequence; at least one. Positions follow from the state."""

    state: SequenceState
    token_ids: npt.NDArray[np.int64]
    logits: LogitsWanted = "last"


class Model(Protocol):
    """A loaded architecture."""

    info: ModelInfo
    early_routers: Mapping[int, EarlyRouter]

    def new_state(self) -> SequenceState:
        """Empty caches for a new sequence."""
        ...

    def forward(self, chunks: Sequence[Chunk]) -> Generator[RoutedCall, None, list[Tensor | None]]:
        """One step. Returns logits per chunk: `[1, V]`, `[n, V]` or None, as the chunk wants."""
        ...

    def token_routed(
        self, layer: int, token_ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32] | None:
        """Experts `[T, K]` of a layer that is routed by token id; None for other layers."""
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """A model that has something to prepare before the first request, such as CUDA graphs."""

    def warm_up(self, arena: Tensor) -> None:
        """Prepare for experts that lie in `arena`, whose content does not matter. Blocks."""
        ...


def logits_of(
    rows: Tensor, chunks: Sequence[Chunk], head: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """What `Model.forward` returns: `head` of the rows that each chunk wants logits for.

    `rows` are the chunks' states after the last layer, one chunk after the other; `head` turns
    some of them into logits `[n, V]` and is called at most once.
    """
    pieces, stop = [], 0
    for chunk in chunks:
        start, stop = stop, stop + len(chunk.token_ids)
        first = {"all": start, "last": stop - 1, "none": stop}[chunk.logits]
        pieces.append(slice(first, stop))
    wanted = torch.cat([rows[piece] for piece in pieces])
    if not wanted.shape[0]:
        return [None] * len(chunks)
    sizes = [piece.stop - piece.start for piece in pieces]
    return [part if part.shape[0] else None for part in torch.split(head(wanted), sizes)]
