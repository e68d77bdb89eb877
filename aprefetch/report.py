"""The report of a run: what ran where, how fast, and how near to the ceiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aprefetch.engine.request import Usage
from aprefetch.plan import Plan
from aprefetch.stats import Stats

__all__ = ["RunReport"]

_SSD_GBPS = 7.0  # a common drive, for the ceiling; `aprefetch plan` takes any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Facts about one request. `stats` counts during that request only.

    `pack_state` says where experts are read from: "direct GGUF" without an Expert Pack.
    """

    model: str
    device: str
    plan: Plan
    pack_state: str
    usage: Usage
    stats: Stats

    @property
    def hit_rate_device(self) -> float:
        """Share of lookups that found the expert on the device."""
        return self.stats.hit_rate

    @property
    def hit_rate_ram(self) -> float:
        """Share of the other lookups that found it in host memory."""
        n = self.stats.hits_ram + self.stats.misses_ram
        return self.stats.hits_ram / n if n else 0.0

    @property
    def bytes_read_per_token(self) -> float:
        """Bytes that came from disk over prompt and answer tokens run."""
        n = self.stats.prompt_tokens + max(0, self.stats.output_tokens - 1)
        return self.stats.bytes_read / n if n else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "model": self.model,
            "device": self.device,
            "pack_state": self.pack_state,
            "plan": self.plan.to_dict(ssd_gbps=_SSD_GBPS),
            "usage": self.usage.to_dict(),
            "hit_rate_device": self.hit_rate_device,
            "hit_rate_ram": self.hit_rate_ram,
            "bytes_read_per_token": self.bytes_read_per_token,
            "stats": self.stats.to_dict(),
        }

    def lines(self) -> list[str]:
        """For people."""
        usage, stats, plan = self.usage, self.stats, self.plan
        first = usage.time_to_first_token_s
        found = stats.hits_device + stats.hits_ram
        lookups = stats.hits_device + stats.misses_device
        ceiling = plan.ceiling(_SSD_GBPS, found / lookups if lookups else 0.0)
        return [
            f"device     {self.device}",
            f"model      {self.model} ({plan.architecture})",
            (
                f"experts    {self.pack_state}, {plan.routed_bytes / 1e6:.1f} MB; dense "
                f"{plan.dense_bytes / 1e6:.1f} MB in memory"
            ),
            plan.device_line(),
            plan.ram_line(),
            f"tokens     {usage.prompt_tokens} prompt, {usage.completion_tokens} output",
            f"first      {first:.3f} s to the first token" if first else "first      no token",
            (
                f"speed      prefill {usage.prefill_tokens_per_s:.1f} tokens/s, "
                f"decode {usage.decode_tokens_per_s:.1f} tokens/s"
            ),
            (
                f"hit rate   device {self.hit_rate_device:.1%}, "
                f"RAM {self.hit_rate_ram:.1%} of the rest; "
                f"lookahead recall {stats.lookahead_recall:.1%}"
            ),
            (
                f"per token  {self.bytes_read_per_token / 1e6:.3f} MB read, "
                f"{plan.bytes_per_token / 1e6:.3f} MB used"
            ),
            f"ceiling    {ceiling:.1f} tokens/s on a drive of {_SSD_GBPS:g} GB/s at this hit rate",
            f"stalls     {stats.stalls} ({stats.stall_ns / 1e9:.3f} s)",
            (
                f"errors     {stats.io_errors} read errors, {stats.io_retries} retries, "
                f"{stats.fallback_count} files read buffered"
            ),
        ]
