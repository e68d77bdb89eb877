"""Objects in a real file, for tests of the pipeline: layers may differ in size.

Byte i of a role is a function of (layer, expert, role, i), so any slot can be checked against the
source without opening it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from aprefetch.types import (
    ALIGNMENT,
    ROLES,
    AlignedRead,
    ExpertKey,
    LayerLayout,
    Piece,
    ReadPlan,
    RoleLayout,
    align_down,
    align_up,
)


def role_bytes(key: ExpertKey, role: int, n_bytes: int) -> np.ndarray:
    """The bytes of one role of one object."""
    seed = (key.layer * 1009 + key.expert * 31 + role * 7) % 65521
    mixed = np.arange(n_bytes, dtype=np.uint64) * 2654435761 + seed * 40503
    return (mixed >> 13).astype(np.uint8)


class FileExperts:
    """An `ExpertSource`: `sizes` gives each layer's bytes per role."""

    alignment = ALIGNMENT
    tensor_names: frozenset[str] = frozenset()

    def __init__(
        self, path: Path, sizes: Mapping[int, tuple[int, int, int]], n_experts: int = 8
    ) -> None:
        self.paths = (path,)
        self.layers = {
            layer: LayerLayout(
                layer=layer,
                n_experts=n_experts,
                roles=tuple(
                    RoleLayout(role=role, ggml_type=0, n_out=1, n_in=n, n_bytes=n)
                    for role, n in zip(ROLES, roles, strict=True)
                ),
            )
            for layer, roles in sizes.items()
        }
        self._starts: dict[tuple[int, int, int], int] = {}
        at = 96
        with path.open("wb") as file:
            file.write(b"\xaa" * at)
            for layer, roles in sizes.items():
                for role, n in enumerate(roles):
                    for expert in range(n_experts):
                        self._starts[layer, expert, role] = at
                        file.write(role_bytes(ExpertKey(layer, expert), role, n).tobytes())
                        at += n

    def read_plan(self, key: ExpertKey) -> ReadPlan:
        layout = self.layers[key.layer]
        landing, reads, pieces = 0, [], []
        for role, (part, device_offset) in enumerate(
            zip(layout.roles, layout.device_offsets, strict=True)
        ):
            start = self._starts[key.layer, key.expert, role]
            first = align_down(start)
            needed = start + part.n_bytes - first
            length = align_up(needed)
            reads.append(
                AlignedRead(
                    file=0, offset=first, length=length, needed=needed, landing_offset=landing
                )
            )
            pieces.append(
                Piece(
                    landing_offset=landing + start - first,
                    device_offset=device_offset,
                    n_bytes=part.n_bytes,
                )
            )
            landing += length
        return ReadPlan(key=key, reads=tuple(reads), pieces=tuple(pieces), landing_bytes=landing)

    def max_landing_bytes(self, layer: int) -> int:
        n_experts = self.layers[layer].n_experts
        return max(self.read_plan(ExpertKey(layer, e)).landing_bytes for e in range(n_experts))

    def expected(self, key: ExpertKey) -> list[tuple[int, np.ndarray]]:
        """(offset in a device slot, bytes) of each role."""
        layout = self.layers[key.layer]
        return [
            (offset, role_bytes(key, role, part.n_bytes))
            for role, (part, offset) in enumerate(
                zip(layout.roles, layout.device_offsets, strict=True)
            )
        ]
