"""How objects lie in the parts of a pack: pure arithmetic, no bytes.

Objects are numbered layer by layer, expert by expert. Expert e of every layer lies in part
`e % n_parts`, in slot `e // n_parts` of that layer's tensor, so the misses of one layer load from
all parts at once. Each slot begins at a multiple of the alignment and is one object: gate, up and
down one after the other without a gap, then zeros up to the next multiple.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from aprefetch.types import LayerLayout, align_up

__all__ = ["MAX_PARTS", "PackShape", "Stack"]

MAX_PARTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One layer's objects in one part: a tensor of `n_slots` times `stored_bytes`.

    `offset` counts from the start of the part's data; `first_row` numbers the first object among
    the part's own.
    """

    layout: LayerLayout
    offset: int
    stored_bytes: int
    n_slots: int
    first_row: int


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """Layers in ascending order, number of parts, and the alignment in bytes."""

    layers: tuple[LayerLayout, ...]
    n_parts: int
    alignment: int

    @cached_property
    def n_objects(self) -> int:
        """Objects of all layers."""
        return sum(layout.n_experts for layout in self.layers)

    @cached_property
    def first_object(self) -> Mapping[int, int]:
        """Layer -> number of its expert 0."""
        out, at = {}, 0
        for layout in self.layers:
            out[layout.layer] = at
            at += layout.n_experts
        return out

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of all objects without padding."""
        return sum(layout.n_experts * layout.payload_bytes for layout in self.layers)

    def stored_bytes(self, layout: LayerLayout) -> int:
        """Bytes of one slot of a layer."""
        return align_up(layout.payload_bytes, self.alignment)

    @cached_property
    def stacks(self) -> tuple[Mapping[int, Stack], ...]:
        """For each part: layer -> its stack. A part without objects of a layer lacks the layer."""
        parts = []
        for part in range(self.n_parts):
            stacks, offset, row = {}, 0, 0
            for layout in self.layers:
                n_slots = len(range(part, layout.n_experts, self.n_parts))
                if not n_slots:
                    continue
                stack = Stack(
                    layout=layout,
                    offset=offset,
                    stored_bytes=self.stored_bytes(layout),
                    n_slots=n_slots,
                    first_row=row,
                )
                stacks[layout.layer] = stack
                offset += n_slots * stack.stored_bytes
                row += n_slots
            parts.append(stacks)
        return tuple(parts)

    def data_bytes(self, part: int) -> int:
        """Bytes of a part's data section."""
        return sum(stack.n_slots * stack.stored_bytes for stack in self.stacks[part].values())

    def object_numbers(self, part: int) -> NDArray[np.int64]:
        """The numbers of a part's objects, in the order in which they are stored."""
        spans = [
            self.first_object[layer] + np.arange(part, stack.layout.n_experts, self.n_parts)
            for layer, stack in self.stacks[part].items()
        ]
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)

    def spans(self, target_bytes: int) -> Iterator[tuple[LayerLayout, int, int]]:
        """Runs of neighbouring experts `(layout, first, n)` of some `target_bytes`, in order."""
        for layout in self.layers:
            step = max(1, target_bytes // self.stored_bytes(layout))
            for first in range(0, layout.n_experts, step):
                yield layout, first, min(step, layout.n_experts - first)
