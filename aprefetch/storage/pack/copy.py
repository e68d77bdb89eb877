"""Objects out of the model file: read role by role, put together, hashed, and perhaps written.

A span is some neighbouring experts of one layer. Their gate matrices are one contiguous range of
the file, so are up and down: three large reads per span, each byte read once. In the object buffer
the span's objects are grouped by part, so each part takes one write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aprefetch.errors import ReadError
from aprefetch.storage.experts import GgufExperts
from aprefetch.storage.pack.files import AlignedBuffer, DirectFile, PackFiles
from aprefetch.storage.pack.format import object_digest
from aprefetch.storage.pack.shape import PackShape
from aprefetch.types import ExpertKey, LayerLayout, align_up

__all__ = ["SPAN_BYTES", "Copier", "Span", "Target", "open_for_reading"]

SPAN_BYTES = 8 << 20
"""About how much is read, hashed and written at a time."""

Span = tuple[LayerLayout, int, int]
"""Layer, first expert, number of experts."""


@dataclass(slots=True)
class CopyScratch:
    """What one thread needs: a landing buffer for one role, and a span's objects."""

    landing: AlignedBuffer
    objects: AlignedBuffer


@dataclass(frozen=True, slots=True)
class Target:
    """Where a part's objects go."""

    file: DirectFile
    data_offset: int


@contextmanager
def open_for_reading(
    paths: Sequence[Path], files: PackFiles, alignment: int
) -> Iterator[list[DirectFile]]:
    """The files, open for large direct reads; `ReadError` if one cannot be opened."""
    with ExitStack() as stack:
        opened = []
        for path in paths:
            try:
                file = DirectFile(path, os.O_RDONLY, files, alignment)
            except OSError as error:
                raise ReadError(
                    f"cannot be opened: {error.strerror or error}",
                    path=path,
                    offset=0,
                    length=0,
                    errno=error.errno,
                ) from error
            stack.callback(file.close)
            opened.append(file)
        yield opened


class Copier:
    """Reads, hashes and writes spans; any number of threads may call it at once.

    Args:
        experts: where the source's bytes lie.
        shape: the pack's shape.
        sources: the source's files.
        targets: the parts; None only hashes.
    """

    def __init__(
        self,
        experts: GgufExperts,
        shape: PackShape,
        sources: Sequence[DirectFile],
        targets: Sequence[Target] | None,
    ) -> None:
        self._experts = experts
        self._shape = shape
        self._sources = sources
        self._targets = targets

    def spans(self) -> Iterator[Span]:
        """All objects, in pieces that the buffers of `scratch` can hold."""
        return self._shape.spans(SPAN_BYTES)

    def scratch(self) -> CopyScratch:
        """Buffers for one thread."""
        alignment = self._shape.alignment
        landing = objects = 0
        for layout, _, n in self.spans():
            largest = max(role.n_bytes for role in layout.roles)
            landing = max(landing, align_up(n * largest, alignment) + 2 * alignment)
            objects = max(objects, n * self._shape.stored_bytes(layout))
        return CopyScratch(AlignedBuffer(landing, alignment), AlignedBuffer(objects, alignment))

    def copy(self, span: Span, scratch: CopyScratch) -> tuple[list[int], list[bytes], int]:
        """Take one span over.

        Returns:
            Numbers of the objects, their digests, and bytes read.

        Raises:
            ReadError: the source could not be read.
            PackBuildError: the pack could not be written.
        """
        layout, first, n = span
        stored = self._shape.stored_bytes(layout)
        rows = np.frombuffer(scratch.objects.view, np.uint8, n * stored).reshape(n, stored)
        n_read = self._gather(span, rows, scratch.landing.view)
        rows[:, layout.payload_bytes :] = 0
        numbers: list[int] = []
        digests: list[bytes] = []
        row = 0
        number = self._shape.first_object[layout.layer]
        for part in range(self._shape.n_parts):
            experts = self._of_part(first, n, part)
            if not experts:
                continue
            start = row
            for expert in experts:
                numbers.append(number + expert)
                digests.append(object_digest(rows[row, : layout.payload_bytes]))
                row += 1
            if self._targets is not None:
                stack = self._shape.stacks[part][layout.layer]
                slot = experts[0] // self._shape.n_parts
                target = self._targets[part]
                target.file.write(
                    scratch.objects.view[start * stored : row * stored],
                    target.data_offset + stack.offset + slot * stored,
                )
        return numbers, digests, n_read

    def _of_part(self, first: int, n: int, part: int) -> range:
        n_parts = self._shape.n_parts
        return range(first + (part - first) % n_parts, first + n, n_parts)

    def _gather(self, span: Span, rows: np.ndarray, landing: memoryview) -> int:
        """Fill `rows`, grouped by part, with payload; returns bytes read."""
        layout, first, n = span
        plan = self._experts.read_plan(ExpertKey(layout.layer, first))
        alignment = self._shape.alignment
        n_read = at = 0
        for role, read, piece in zip(layout.roles, plan.reads, plan.pieces, strict=True):
            start = read.offset + piece.landing_offset - read.landing_offset
            edge = start % alignment
            needed = edge + n * role.n_bytes
            view = landing[: align_up(needed, alignment)]
            n_read += self._sources[read.file].read(view, start - edge, needed)
            found = np.frombuffer(view, np.uint8, n * role.n_bytes, edge).reshape(n, -1)
            row = 0
            for part in range(self._shape.n_parts):
                experts = self._of_part(first, n, part)
                taken = found[experts.start - first :: self._shape.n_parts]
                rows[row : row + len(experts), at : at + role.n_bytes] = taken
                row += len(experts)
            at += role.n_bytes
        return n_read
