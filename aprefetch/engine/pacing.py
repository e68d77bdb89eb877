"""How many prompt tokens may join a step that others decode in.

Whoever decodes waits for the whole step, so a chunk of someone else's prompt lengthens the gap
between their tokens. The pacer learns what steps cost (a part that every step has, and a part per
prompt token) and cuts chunks so that a step keeps within the wished gap. It decides about sizes
only; what is computed does not depend on them.
"""

from __future__ import annotations

__all__ = ["ChunkPacer"]

_LEAST_TOKENS = 4  # progress, even where a single token takes longer than the gap
_FIRST_TOKENS = 32  # before anything was measured
_GROWTH = 2  # a chunk is at most so many times the last measured one: costs are not quite linear
_WEIGHT = 0.3  # of a new measurement


class ChunkPacer:
    """Sizes of prefill chunks in shared steps.

    Args:
        chunk_tokens: most tokens of a chunk, whoever shares the step.
        gap_s: longest step wished for while others decode; None for no such wish.
    """

    def __init__(self, chunk_tokens: int, gap_s: float | None) -> None:
        self.chunk_tokens = chunk_tokens
        self._gap_ns = None if gap_s is None else gap_s * 1e9
        self._base_ns = 0.0
        self._token_ns: float | None = None
        self._last_tokens = _FIRST_TOKENS // _GROWTH

    def limit_tokens(self, n_decoding: int) -> int:
        """Most prompt tokens of the next step, which `n_decoding` others decode in."""
        if self._gap_ns is None or not n_decoding:
            return self.chunk_tokens
        limit = self._last_tokens * _GROWTH
        if self._token_ns:
            limit = min(limit, int((self._gap_ns - self._base_ns) / self._token_ns))
        return max(1, min(self.chunk_tokens, max(_LEAST_TOKENS, limit)))

    def observe(self, n_prompt_tokens: int, n_decoding: int, duration_ns: int) -> None:
        """Learn from a step that is over."""
        if not n_prompt_tokens:
            self._base_ns += _WEIGHT * (duration_ns - self._base_ns)
            return
        if not n_decoding:
            return  # a prompt alone says nothing about shared steps, and may be far longer
        per_token = max(0.0, duration_ns - self._base_ns) / n_prompt_tokens
        if self._token_ns is None:
            self._token_ns = per_token
        else:
            self._token_ns += _WEIGHT * (per_token - self._token_ns)
        self._last_tokens = n_prompt_tokens
