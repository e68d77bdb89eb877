"""Words that more than one room uses: keys, layouts, alignment arithmetic.

An *object* is all weights of one routed expert of one layer. Its *roles* are the matrices gate, up
and down. A `LayerLayout` says how the roles of one layer's objects lie in a device slot; it is the
same for all experts of the layer, so a kernel needs one slot offset per expert and nothing else.
Where the same bytes lie on disk and in a landing buffer is `ReadPlan`'s matter: ragged edges of
direct reads differ from expert to expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

__all__ = [
    "ALIGNMENT",
    "DEVICE_ALIGNMENT",
    "ROLES",
    "AlignedRead",
    "ExpertKey",
    "LayerLayout",
    "Piece",
    "ReadPlan",
    "Role",
    "RoleLayout",
    "align_down",
    "align_up",
]

ALIGNMENT = 4096
"""Bytes. Offset, length and address of a direct read are multiples of this (or of more)."""

DEVICE_ALIGNMENT = 256
"""Bytes. Roles inside a device slot, and device slots, start at multiples of this."""

Role = Literal["gate", "up", "down"]
ROLES: tuple[Role, ...] = ("gate", "up", "down")


def align_down(n: int, alignment: int = ALIGNMENT) -> int:
    """The largest multiple of `alignment` that is not above `n`."""
    return n - n % alignment


def align_up(n: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is not below `n`."""
    return -(-n // alignment) * alignment


class ExpertKey(NamedTuple):
    """Names one object. Layers are numbered as in the model, dense layers included."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLayout:
    """One matrix of an expert: `n_out` rows of `n_in` weights, in blocks of `ggml_type`."""

    role: Role
    ggml_type: int
    n_out: int
    n_in: int
    n_bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """How every object of one layer lies in a device slot."""

    layer: int
    n_experts: int
    roles: tuple[RoleLayout, ...]

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one object, without padding."""
        return sum(role.n_bytes for role in self.roles)

    @cached_property
    def device_offsets(self) -> tuple[int, ...]:
        """Where each role starts in a device slot, in the order of `roles`."""
        offsets, at = [], 0
        for role in self.roles:
            offsets.append(at)
            at = align_up(at + role.n_bytes, DEVICE_ALIGNMENT)
        return tuple(offsets)

    @cached_property
    def device_bytes(self) -> int:
        """Bytes of a device slot for one object, padding included."""
        last = self.device_offsets[-1] + self.roles[-1].n_bytes
        return align_up(last, DEVICE_ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedRead:
    """One direct read. `offset`, `length` and `landing_offset` are multiples of the alignment.

    `needed` is how many of the `length` bytes must arrive: a file may end inside the last
    aligned sector, so a read that stops early is complete once it has `needed` bytes.
    """

    file: int
    offset: int
    length: int
    needed: int
    landing_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One role's bytes: from a landing buffer to a device slot."""

    landing_offset: int
    device_offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """Everything needed to bring one object from disk to a device slot."""

    key: ExpertKey
    reads: tuple[AlignedRead, ...]
    pieces: tuple[Piece, ...]
    landing_bytes: int
