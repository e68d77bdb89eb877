"""Where the time of a traced run went, by layer and stage, and what held it up, in words.

Reads both kinds of trace: the Chrome trace of `export_trace` and the `.npz` of a routing trace.
Stages of the step's own time line: `dense` (attention and router), `guess` (early routers),
`shared` (shared expert), `experts` (routed experts), `wait` (stood still for experts), `head`, and
`other` (what no span names). Reads and uploads run beside it; their times are the union over all
that were in flight, so that they compare with the time of the steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aprefetch.errors import ConfigError
from aprefetch.routing_trace import RoutingTrace
from aprefetch.trace import validate_trace

__all__ = ["STAGES", "TimeTable", "summarize"]

STAGES = ("dense", "guess", "shared", "experts", "wait", "head")
_NAMES = {"attention": "dense", "shared": "shared", "experts": "experts", "head": "head"}


@dataclass(slots=True, kw_only=True)
class TimeTable:
    """Nanoseconds by layer and stage; `head` belongs to no layer and has layer -1."""

    n_steps: int = 0
    n_rows: int = 0
    step_ns: int = 0
    by_layer: dict[int, dict[str, int]] = field(default_factory=dict)
    read_ns: int = 0  # at least one read in flight
    read_bytes: int = 0
    n_reads: int = 0
    guessed_bytes: int = 0
    upload_ns: int = 0
    upload_bytes: int = 0
    n_dropped: int = 0

    def add(self, layer: int, stage: str, ns: int) -> None:
        """Count time."""
        row = self.by_layer.setdefault(layer, dict.fromkeys(STAGES, 0))
        row[stage] += ns

    def total(self, stage: str) -> int:
        """Nanoseconds of a stage over all layers."""
        return sum(row[stage] for row in self.by_layer.values())

    @property
    def other_ns(self) -> int:
        """Time of steps that no span names."""
        return max(0, self.step_ns - sum(map(self.total, STAGES)))

    @property
    def read_gbps(self) -> float:
        """1e9 bytes/s while at least one read was in flight."""
        return self.read_bytes / self.read_ns if self.read_ns else 0.0

    def verdict(self) -> str:
        """What held the run up, in words."""
        if not self.step_ns:
            return "No complete step was recorded."
        share = {stage: self.total(stage) / self.step_ns for stage in STAGES}
        busy = self.read_ns / self.step_ns
        if share["wait"] >= 0.25:
            worst = max(self.by_layer, key=lambda n: self.by_layer[n]["wait"])
            text = f"Waiting for experts is the bottleneck ({share['wait']:.0%} of the time"
            text += f", most in layer {worst}). "
            if busy >= 0.8:
                return text + (
                    f"The drive was busy {busy:.0%} of the time at {self.read_gbps:.2f} GB/s: "
                    "fewer bytes help (a larger cache, fewer wasted guesses), or a faster drive."
                )
            return text + (
                f"The drive was busy only {busy:.0%} of the time: reads start too late; "
                "a deeper or wider lookahead, or more reads in flight, can hide them."
            )
        compute = {s: share[s] for s in ("dense", "shared", "experts", "head")}
        first = max(compute, key=lambda stage: compute[stage])
        if sum(compute.values()) >= 0.6:
            words = {
                "dense": "attention and dense matrices",
                "shared": "the shared experts",
                "experts": "the routed experts",
                "head": "the output head",
            }
            return (
                f"Compute is the bottleneck ({sum(compute.values()):.0%} of the time), most of it "
                f"{words[first]} ({compute[first]:.0%}); waiting for experts takes "
                f"{share['wait']:.0%}."
            )
        if share["guess"] >= 0.2:
            return (
                f"Evaluating early routers takes {share['guess']:.0%}: lower the lookahead depth."
            )
        other = self.other_ns / self.step_ns
        return (
            f"No stage dominates: compute {sum(compute.values()):.0%}, waiting "
            f"{share['wait']:.0%}, early routers {share['guess']:.0%}, between spans {other:.0%}."
        )

    def lines(self) -> list[str]:
        """For people."""
        n = max(1, self.n_steps)
        out = [
            (
                f"steps      {self.n_steps} ({self.n_rows} tokens), "
                f"{self.step_ns / n / 1e6:.3f} ms each"
            ),
            "",
            "layer   " + "".join(f"{stage:>9}" for stage in STAGES) + "   (us per step)",
        ]
        for layer in sorted(n for n in self.by_layer if n >= 0):
            row = self.by_layer[layer]
            out.append(f"{layer:>5}   " + "".join(f"{row[s] / n / 1e3:9.1f}" for s in STAGES))
        totals = {stage: self.total(stage) for stage in STAGES}
        out.append("all     " + "".join(f"{totals[s] / n / 1e3:9.1f}" for s in STAGES))
        if self.step_ns:
            out.append("share   " + "".join(f"{totals[s] / self.step_ns:9.1%}" for s in STAGES))
            out.append(f"other   {self.other_ns / n / 1e3:9.1f} us per step, in no span")
        out += [
            "",
            (
                f"reads      {self.n_reads}, {self.read_bytes / 1e6:.2f} MB "
                f"({self.guessed_bytes / 1e6:.2f} MB ahead of demand), {self.read_gbps:.3f} GB/s "
                "while any was in flight"
            ),
            f"uploads    {self.upload_bytes / 1e6:.2f} MB in {self.upload_ns / 1e6:.2f} ms",
        ]
        if self.n_dropped:
            out.append(f"dropped    {self.n_dropped} events did not fit in the trace")
        return [*out, "", self.verdict()]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "n_steps": self.n_steps,
            "n_rows": self.n_rows,
            "step_ns": self.step_ns,
            "stages_ns": {stage: self.total(stage) for stage in STAGES},
            "other_ns": self.other_ns,
            "by_layer_ns": {str(layer): row for layer, row in sorted(self.by_layer.items())},
            "n_reads": self.n_reads,
            "read_bytes": self.read_bytes,
            "read_ns": self.read_ns,
            "read_gbps": self.read_gbps,
            "guessed_bytes": self.guessed_bytes,
            "upload_bytes": self.upload_bytes,
            "upload_ns": self.upload_ns,
            "n_dropped": self.n_dropped,
            "verdict": self.verdict(),
        }


def summarize(path: str | Path) -> TimeTable:
    """The table of a trace file of either kind. Blocks.

    Raises:
        ConfigError: the file cannot be read or is no trace.
    """
    try:
        with Path(path).open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if is_zip:
            return of_routing(RoutingTrace.load(path))
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: neither a Chrome trace nor a routing trace") from error
    problems = validate_trace(trace)
    if problems:
        raise ConfigError(f"{path}: not a sound trace: {problems[0]} ({len(problems)} problems)")
    return of_events(trace)


def of_routing(trace: RoutingTrace) -> TimeTable:
    """The table of a routing trace; it has no head, which counts as other."""
    steps, calls, loads = trace.steps, trace.calls, trace.loads
    table = TimeTable(
        n_steps=len(steps),
        n_rows=int(steps["n_rows"].sum()),
        step_ns=int((steps["end_ns"] - steps["start_ns"]).sum()),
        n_dropped=int(trace.meta.get("n_dropped", 0)),
    )
    for layer in trace.layers:
        mine = calls[calls["layer"] == layer]
        for stage in ("dense", "guess", "shared", "experts", "wait"):
            table.add(layer, stage, int(mine[f"{stage}_ns"].sum(dtype=np.int64)))
    reads, uploads = loads[loads["what"] == 0], loads[loads["what"] == 1]
    table.n_reads = len(reads)
    table.read_bytes = int(reads["n_bytes"].sum(dtype=np.int64))
    table.guessed_bytes = int(reads["n_bytes"][reads["kind"] != 0].sum(dtype=np.int64))
    table.upload_bytes = int(uploads["n_bytes"].sum(dtype=np.int64))
    table.read_ns = _union(zip(reads["start_ns"].tolist(), reads["end_ns"].tolist(), strict=True))
    table.upload_ns = _union(
        zip(uploads["start_ns"].tolist(), uploads["end_ns"].tolist(), strict=True)
    )
    return table


def of_events(trace: Mapping[str, Any]) -> TimeTable:
    """The table of a sound Chrome trace."""
    table = TimeTable(n_dropped=int(trace["otherData"].get("dropped_events", 0)))
    moving: dict[str, list[tuple[int, int]]] = {"read": [], "upload": []}
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        category, args = event["cat"], event["args"]
        start_ns, ns = round(event["ts"] * 1000), round(event["dur"] * 1000)
        if category == "step":
            table.n_steps += 1
            table.n_rows += args["rows"]
            table.step_ns += ns
        elif category == "compute":
            stage = _NAMES.get(event["name"], "dense")
            table.add(-1 if stage == "head" else args["layer"], stage, ns)
        elif category == "router":
            table.add(args["layer"], "guess", ns)
        elif category == "wait":
            table.add(args["layer"], "wait", ns)
        elif category in moving:
            moving[category].append((start_ns, start_ns + ns))
            if category == "read":
                table.n_reads += 1
                table.read_bytes += args["bytes"]
                table.guessed_bytes += args["bytes"] * (args["kind"] != "demand")
            else:
                table.upload_bytes += args["bytes"]
    table.read_ns, table.upload_ns = _union(moving["read"]), _union(moving["upload"])
    return table


def _union(spans: Iterable[tuple[int, int]]) -> int:
    """Time covered by at least one span."""
    covered, until = 0, -1
    for start, end in sorted(spans):
        if end > until:
            covered += end - max(start, until)
            until = end
    return covered
