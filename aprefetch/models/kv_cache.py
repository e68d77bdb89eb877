"""Row stores that sequence states are made of. Rows are float32; positions are absolute.

Every store can be taken apart and put together again (`dump`, `load`), so that a state can be kept
and continued later. What is loaded is taken over: the caller gives tensors that nobody else writes.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GrowingRows", "SlidingRows", "StatePart", "check_part"]

StatePart = tuple[Tensor, int]
"""Values of one store, float32, and the position of the first row."""

_FIRST_CAPACITY_ROWS = 32


def check_part(part: StatePart, shape: tuple[int, ...], n_free: int = 0) -> Tensor:
    """The values, if they are float32 of `shape`, whose first `n_free` axes may have any length.

    Raises:
        ValueError: they are not: the part belongs to another model.
    """
    values = part[0]
    found = tuple(values.shape)
    if (
        values.dtype != torch.float32
        or len(found) != len(shape)
        or found[n_free:] != shape[n_free:]
    ):
        raise ValueError(f"a state of shape {found} where {shape} is wanted")
    return values


class GrowingRows:
    """Rows that are kept for the whole sequence; capacity doubles."""

    __slots__ = ("_buffer", "n_rows")

    def __init__(self, width: int, device: torch.device) -> None:
        self._buffer = torch.empty((0, width), device=device)
        self.n_rows = 0

    @property
    def n_bytes(self) -> int:
        """Bytes held, spare capacity included."""
        return self._buffer.numel() * 4

    def append(self, rows: Tensor) -> None:
        """Add `rows [n, width]` at the end."""
        stop = self.n_rows + rows.shape[0]
        if stop > self._buffer.shape[0]:
            capacity = max(_FIRST_CAPACITY_ROWS, stop, 2 * self._buffer.shape[0])
            grown = rows.new_empty((capacity, rows.shape[1]))
            grown[: self.n_rows] = self._buffer[: self.n_rows]
            self._buffer = grown
        self._buffer.narrow(0, self.n_rows, rows.shape[0]).copy_(rows)
        self.n_rows = stop

    def dump(self) -> list[StatePart]:
        """The rows, as views."""
        return [(self.view(), 0)]

    def load(self, part: StatePart) -> None:
        """Take over the rows of a dump.

        Raises:
            ValueError: they are of another width.
        """
        self._buffer = check_part(part, tuple(self._buffer.shape), 1)
        self.n_rows = self._buffer.shape[0]

    def view(self) -> Tensor:
        """All rows, `[n_rows, width]`, without a copy; valid until the next append."""
        return self._buffer[: self.n_rows]


class SlidingRows:
    """At least the last `keep` rows of a sequence, with the absolute position of the first.

    Rows older than `keep` before the newest may stay for a while; readers mask by position.
    """

    __slots__ = ("_buffer", "_keep", "_start", "_stop", "first_position")

    def __init__(self, width: int, keep: int, device: torch.device) -> None:
        self._keep = keep
        self._buffer = torch.empty((0, width), device=device)
        self._start = self._stop = 0
        self.first_position = 0

    @property
    def n_bytes(self) -> int:
        """Bytes held, spare capacity included."""
        return self._buffer.numel() * 4

    def append(self, rows: Tensor, bias: Tensor | None = None) -> None:
        """Add `rows [n, width]`, the next positions; older ones may be dropped before.

        What is kept is `rows + bias` if there is a `bias`.
        """
        n = rows.shape[0]
        if self._stop + n > self._buffer.shape[0]:
            self._make_room(n)
        to = self._buffer.narrow(0, self._stop, n)
        if bias is None:
            to.copy_(rows)
        else:
            torch.add(rows, bias, out=to)
        self._stop += n

    def _make_room(self, n: int) -> None:
        held = self._stop - self._start
        kept = min(held, self._keep)
        tail = self._buffer[self._stop - kept : self._stop]
        # Twice what is kept makes the moving of old rows rare in decode; a buffer that a long
        # prefill chunk blew up shrinks again.
        capacity = max(min(2 * self._keep, 2 * (kept + n)), kept + n)
        buffer = self._buffer
        if buffer.shape[0] < capacity or buffer.shape[0] > 4 * max(capacity, 2 * self._keep):
            buffer = tail.new_empty((capacity, tail.shape[1]))
        buffer[:kept] = tail.clone() if buffer is self._buffer else tail
        self.first_position += held - kept
        self._buffer, self._start, self._stop = buffer, 0, kept

    def dump(self) -> list[StatePart]:
        """The rows that later ones may need, as views."""
        n_old = max(0, self._stop - self._start - self._keep)
        return [(self.view()[n_old:], self.first_position + n_old)]

    def load(self, part: StatePart) -> None:
        """Take over the rows of a dump.

        Raises:
            ValueError: they are of another width.
        """
        self._buffer = check_part(part, tuple(self._buffer.shape), 1)
        self._start, self._stop, self.first_position = 0, self._buffer.shape[0], part[1]

    def view(self) -> Tensor:
        """The rows held, `[n, width]`, from `first_position` on; valid until the next append."""
        return self._buffer[self._start : self._stop]
