"""How far guesses are trusted: a running estimate of how many come true.

Guesses cost bandwidth and room. While most come true they may displace the coldest object of a
tier, as the demand they announce would do. When they don't, they get free room or room of objects
colder than themselves, and in the end are not issued at all but for a few that probe whether the
lookahead has become better.
"""

from __future__ import annotations

__all__ = ["GuessTrust"]

WEIGHT = 1 / 16  # of the newest outcome in the estimate
EVICTS_FROM = 0.4  # precision from which a guess may displace the coldest object
ISSUED_FROM = 0.15  # precision below which guesses only probe
PROBE_EVERY = 16


class GuessTrust:
    """Precision of recent guesses, and what follows from it."""

    __slots__ = ("_n_refused", "precision")

    def __init__(self) -> None:
        self.precision = 0.5
        self._n_refused = 0

    def resolved(self, came_true: bool) -> None:
        """Take in the outcome of one guess."""
        self.precision += (came_true - self.precision) * WEIGHT

    def admits(self) -> bool:
        """Whether the next guess may be issued."""
        if self.precision >= ISSUED_FROM:
            return True
        self._n_refused += 1
        return self._n_refused % PROBE_EVERY == 0

    def may_evict(self) -> bool:
        """Whether a guess may displace an object that is warmer than itself."""
        return self.precision >= EVICTS_FROM
