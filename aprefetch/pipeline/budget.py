"""Byte budgets: how a tier's bytes are divided into slots, and the ledger of bytes in use.

Objects of a model may have several sizes (layers differ in block format). Each tier is divided
once, at start, into one pool of equal slots per size class: no fragmentation, and every operation
on slots is O(1). A pool gets bytes in proportion to the bytes of all objects of its class.

Invariant of `Ledger`: the bytes in use never exceed the limit, at any instant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aprefetch.errors import BudgetError
from aprefetch.storage.experts import ExpertSource
from aprefetch.types import align_up

__all__ = [
    "Ledger",
    "PoolPlan",
    "SizeClass",
    "device_classes",
    "divide",
    "landing_classes",
    "minimum_bytes",
    "staging",
    "total_bytes",
]

MINIMUM_SLOTS = 2
"""Slots a class needs: one object arrives while another is in use (or is copied on)."""

STAGING_SLOTS = 4
"""Landing slots of a class when the host-RAM tier is off: what keeps the SSD busy, no more."""

LANDING_SLACK = 8
"""Layers whose landing sizes differ by less than 1/8 share a class: ragged edges, not formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClass:
    """Objects that share a pool."""

    slot_bytes: int  # distance between slots
    n_objects: int
    layers: tuple[int, ...]

    @property
    def n_minimum(self) -> int:
        """Slots without which the pipeline makes no progress."""
        return min(MINIMUM_SLOTS, self.n_objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One size class and the slots it gets."""

    size_class: SizeClass
    n_slots: int

    @property
    def n_bytes(self) -> int:
        """Bytes of all slots of the pool."""
        return self.n_slots * self.size_class.slot_bytes


def device_classes(experts: ExpertSource) -> tuple[SizeClass, ...]:
    """Size classes of device slots, largest first: one per distinct object size."""
    sizes = {layer: layout.device_bytes for layer, layout in experts.layers.items()}
    return _classes(experts, sizes, slack=0, alignment=1)


def landing_classes(experts: ExpertSource) -> tuple[SizeClass, ...]:
    """Size classes of landing slots, largest first; nearly equal sizes are one class."""
    sizes = {layer: experts.max_landing_bytes(layer) for layer in experts.layers}
    return _classes(experts, sizes, slack=LANDING_SLACK, alignment=experts.alignment)


def _classes(
    experts: ExpertSource, sizes: dict[int, int], *, slack: int, alignment: int
) -> tuple[SizeClass, ...]:
    found: list[tuple[int, list[int]]] = []
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], layer)):
        size = sizes[layer]
        if found:
            largest = found[-1][0]
            if size >= largest - (largest // slack if slack else 0):
                found[-1][1].append(layer)
                continue
        found.append((size, [layer]))
    return tuple(
        SizeClass(
            slot_bytes=align_up(size, alignment),
            n_objects=sum(experts.layers[layer].n_experts for layer in layers),
            layers=tuple(sorted(layers)),
        )
        for size, layers in found
    )


def minimum_bytes(classes: Iterable[SizeClass]) -> int:
    """The smallest legal budget of a tier with these classes."""
    return sum(c.n_minimum * c.slot_bytes for c in classes)


def total_bytes(classes: Iterable[SizeClass]) -> int:
    """The budget that holds every object; more is of no use."""
    return sum(c.n_objects * c.slot_bytes for c in classes)


def divide(classes: tuple[SizeClass, ...], budget: int, *, option: str) -> tuple[PoolPlan, ...]:
    """Divide `budget` bytes into pools; the sum of their bytes is at most `budget`.

    Raises:
        BudgetError: below the minimum; `option` is the name of the budget to raise.
    """
    least = minimum_bytes(classes)
    if budget < least:
        raise BudgetError(
            f"{option} of {budget} bytes is too small: this model needs at least {least} bytes "
            f"({MINIMUM_SLOTS} objects of each size); raise {option}",
            minimum_bytes=least,
            option=option,
        )
    spare = min(budget, total_bytes(classes)) - least
    room = total_bytes(classes) - least
    counts = [
        c.n_minimum
        + (
            spare * (c.n_objects - c.n_minimum) * c.slot_bytes // room // c.slot_bytes
            if room
            else 0
        )
        for c in classes
    ]
    left = least + spare - sum(n * c.slot_bytes for n, c in zip(counts, classes, strict=True))
    for i, c in enumerate(classes):  # what rounding left, largest class first
        more = min(left // c.slot_bytes, c.n_objects - counts[i])
        counts[i] += more
        left -= more * c.slot_bytes
    return tuple(PoolPlan(size_class=c, n_slots=n) for c, n in zip(classes, counts, strict=True))


def staging(classes: tuple[SizeClass, ...]) -> tuple[PoolPlan, ...]:
    """Landing pools of a host-RAM tier that is off."""
    return tuple(PoolPlan(size_class=c, n_slots=min(STAGING_SLOTS, c.n_objects)) for c in classes)


class Ledger:
    """Counts bytes in use against a limit."""

    __slots__ = ("limit_bytes", "peak_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def take(self, n_bytes: int) -> None:
        """Account for a slot that comes into use."""
        self.used_bytes += n_bytes
        assert self.used_bytes <= self.limit_bytes, "a tier is over its byte budget"
        if self.used_bytes > self.peak_bytes:
            self.peak_bytes = self.used_bytes

    def give(self, n_bytes: int) -> None:
        """Account for a slot that is free again."""
        self.used_bytes -= n_bytes
        assert self.used_bytes >= 0, "a slot was given back twice"
