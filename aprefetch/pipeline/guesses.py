"""How far guesses are trusted: a running estimate of how many come true.

Guesses cost bandwidth and room. While most come true they may displace the coldest object of a
tier, as the demand they announce would do. When they don't, they get free room or room of objects
colder than themselves, and in the end are not issued at all but for a few that probe whether the
lookahead has become better.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["GuessTrust", "Verdict"]

WEIGHT = 1 / 16  # of the newest outcome in the estimate
DISPLACES_FROM = 0.4  # precision from which a guess may displace the coldest object
ISSUED_FROM = 0.15  # precision below which guesses only probe
PROBE_EVERY = 16


class Verdict(Enum):
    """What a guess may do."""

    REFUSED = 0
    FREE_ROOM = 1  # take free room, or that of an object colder than itself
    DISPLACES = 2  # displace the coldest object, whatever it is


class GuessTrust:
    """Precision of recent guesses, and what follows from it."""

    __slots__ = ("_n_doubted", "precision")

    def __init__(self) -> None:
        self.precision = 0.5
        self._n_doubted = 0

    def resolved(self, came_true: bool) -> None:
        """Take in the outcome of one guess."""
        self.precision += (came_true - self.precision) * WEIGHT

    def may_displace(self) -> bool:
        """Whether guesses may displace objects that are warmer than themselves."""
        return self.precision >= DISPLACES_FROM

    def verdict(self) -> Verdict:
        """What the next guess may do. Every so often a doubted one may do all, as a probe."""
        if self.precision >= DISPLACES_FROM:
            return Verdict.DISPLACES
        self._n_doubted += 1
        if self._n_doubted % PROBE_EVERY == 0:
            return Verdict.DISPLACES
        return Verdict.FREE_ROOM if self.precision >= ISSUED_FROM else Verdict.REFUSED
