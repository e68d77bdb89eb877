"""Counters of one runtime, and the frozen snapshot that users see.

`Counters` are plain integers written by the event loop's thread only. `Stats` is a snapshot; its
`to_dict()` is JSON-ready. Identities that always hold once a runtime is idle:
device hits + device misses = unique demand lookups; RAM hits + RAM misses = device misses;
guesses issued = useful + wasted (+ those still waiting for their layer).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["Counters", "Stats"]


@dataclass(slots=True)
class Counters:
    """Mutable; owned by the loop thread."""

    fallback_count: int = 0  # direct I/O refused, buffered reads used instead (per file)
    io_errors: int = 0  # reads that failed for good
    io_retries: int = 0  # reads tried again (EIO, interrupted)
    short_reads: int = 0  # reads that were continued
    reads: int = 0  # positional reads issued
    read_busy_ns: int = 0  # time with an object's read in flight, overlaps counted once
    bytes_read: int = 0  # bytes that arrived, alignment slack included
    max_in_flight: int = 0  # most reads in flight at one time
    duplicate_reads: int = 0  # an object read while it was already being read; must stay 0
    hits_device: int = 0
    misses_device: int = 0
    hits_ram: int = 0
    misses_ram: int = 0
    evictions_device: int = 0
    evictions_ram: int = 0
    uploads: int = 0
    bytes_uploaded: int = 0
    demotions: int = 0  # objects copied back to host RAM as they left the device
    bytes_demoted: int = 0
    demotions_skipped: int = 0  # left without a copy: nothing colder in RAM, or no time
    bytes_wasted: int = 0  # read for guesses that did not come true
    guesses_issued: int = 0
    guesses_useful: int = 0
    guesses_wasted: int = 0
    guesses_dropped: int = 0  # wishes refused before any byte moved (no room, already there)
    guesses_off: int = 0  # steps without a guess: none paid, or none was needed
    predicted: int = 0  # experts predicted by early routers
    predicted_right: int = 0  # of these, picked by the router
    picked: int = 0  # experts picked by routers in layers that had a prediction
    reads_before_turn: int = 0  # objects requested by token id before their layer's turn
    stalls: int = 0
    stall_ns: int = 0
    waves: int = 0  # layers that needed more than one wave
    steps: int = 0
    prompt_tokens: int = 0  # run through the model
    reused_tokens: int = 0  # of prompts, but taken from a kept state
    output_tokens: int = 0
    routed_calls: dict[int, int] = field(default_factory=dict)  # layer -> (token, expert) pairs
    stall_ns_by_layer: dict[int, int] = field(default_factory=dict)

    def snapshot(self, **memory: int) -> Stats:
        """A frozen copy, with the current sizes of the tiers in `memory`."""
        values = asdict(self)
        return Stats(**values, memory=dict(memory))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A snapshot of `Counters` (same names) and `memory`: bytes by tier and their budgets."""

    fallback_count: int
    io_errors: int
    io_retries: int
    short_reads: int
    reads: int
    read_busy_ns: int
    bytes_read: int
    max_in_flight: int
    duplicate_reads: int
    hits_device: int
    misses_device: int
    hits_ram: int
    misses_ram: int
    evictions_device: int
    evictions_ram: int
    uploads: int
    bytes_uploaded: int
    demotions: int
    bytes_demoted: int
    demotions_skipped: int
    bytes_wasted: int
    guesses_issued: int
    guesses_useful: int
    guesses_wasted: int
    guesses_dropped: int
    guesses_off: int
    predicted: int
    predicted_right: int
    picked: int
    reads_before_turn: int
    stalls: int
    stall_ns: int
    waves: int
    steps: int
    prompt_tokens: int
    reused_tokens: int
    output_tokens: int
    routed_calls: dict[int, int]
    stall_ns_by_layer: dict[int, int]
    memory: dict[str, int]

    @property
    def hit_rate(self) -> float:
        """Share of demand lookups that found the expert on the device."""
        n = self.hits_device + self.misses_device
        return self.hits_device / n if n else 0.0

    @property
    def lookahead_recall(self) -> float:
        """Share of the routers' picks that the early routers had named."""
        return self.predicted_right / self.picked if self.picked else 0.0

    def since(self, earlier: Stats) -> Stats:
        """What was counted after `earlier`; `max_in_flight` and `memory` stay as they are now."""
        values: dict[str, Any] = {}
        for f in fields(self):
            now, then = getattr(self, f.name), getattr(earlier, f.name)
            if f.name in ("max_in_flight", "memory"):
                values[f.name] = now
            elif isinstance(now, dict):
                values[f.name] = {k: n - then.get(k, 0) for k, n in now.items()}
            else:
                values[f.name] = now - then
        return Stats(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the derived rates included."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["hits"] = self.hits_device + self.hits_ram
        out["misses"] = self.misses_ram
        out["evictions"] = self.evictions_device + self.evictions_ram
        out["hit_rate"] = self.hit_rate
        out["lookahead_recall"] = self.lookahead_recall
        out["routed_calls"] = {str(k): v for k, v in self.routed_calls.items()}
        out["stall_ns_by_layer"] = {str(k): v for k, v in self.stall_ns_by_layer.items()}
        return out
