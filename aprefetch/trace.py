"""Spans of one run, and their export as a Chrome trace.

A `Tracer` owns a bounded ring of plain tuples; when it is full the oldest go, and `n_dropped` says
how many. Recording is one append, safe from any thread; everything else (lanes, flows, JSON) is
done by `export`, which blocks and belongs on a thread. Where tracing is off there is no tracer:
callers hold `Tracer | None` and pay one `if`.

Times are `time.perf_counter_ns`. In the export `ts` and `dur` are microseconds since the tracer was
made. Spans of one kind that overlap get lanes (`tid`s) of their own, so that the spans of a lane
never overlap; flows lead from the read of an expert to its upload to the compute that used it.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from aprefetch._version import __version__
from aprefetch.errors import ConfigError
from aprefetch.types import ExpertKey

__all__ = ["Kind", "Tracer", "validate_trace"]

Kind = Literal["demand", "exact", "guess"]

_PID = 1
# Category -> (first lane, lane name). Lanes of a category are numbered upwards from the first one.
_LANES: dict[str, tuple[int, str]] = {
    "step": (1_000, "steps"),
    "router": (2_000, "router"),
    "wait": (3_000, "wait"),
    "compute": (4_000, "compute"),
    "upload": (5_000, "upload"),
    "read": (6_000, "read"),
    "request": (7_000, "request"),
    "demote": (8_000, "demote"),
}
_REQUEST_LANE = 1  # instants of requests
_REQUIRED_ARGS: dict[str, tuple[str, ...]] = {
    "step": ("rows",),
    "router": ("layer",),
    "wait": ("layer", "missing"),
    "compute": ("layer",),
    "upload": ("layer", "expert", "bytes", "kind"),
    "read": ("layer", "expert", "bytes", "kind"),
    "request": ("request",),
    "demote": ("layer", "expert", "bytes"),
}
_KINDS = ("demand", "exact", "guess")
_ROUNDING_US = 0.002  # nanoseconds turned to microseconds as floats may differ by this much


@dataclass(slots=True)
class _Span:
    """One span on its way to the export. `keys` are the experts that flows may lead to."""

    category: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]
    keys: tuple[ExpertKey, ...] = ()
    tid: int = 0


@dataclass(slots=True)
class _Chain:
    """The way of one load of one expert: some of read, upload, compute, in this order."""

    spans: list[_Span] = field(default_factory=list)


class Tracer:
    """Records spans, instants and counter samples; bounded.

    Args:
        max_events: Most events kept, at least 1; the oldest are dropped.
        metadata: JSON-ready facts about the run, exported under `otherData`.
    """

    def __init__(
        self, max_events: int = 1_000_000, metadata: Mapping[str, Any] | None = None
    ) -> None:
        if max_events < 1:
            raise ConfigError(f"trace.max_events must be at least 1, got {max_events}")
        self.max_events = max_events
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.n_dropped = 0
        self.origin_ns = time.perf_counter_ns()
        self._events: deque[tuple[Any, ...]] = deque(maxlen=max_events)

    def __len__(self) -> int:
        return len(self._events)

    def _append(self, event: tuple[Any, ...]) -> None:
        if len(self._events) == self.max_events:
            self.n_dropped += 1
        self._events.append(event)

    def read(self, key: ExpertKey, start_ns: int, end_ns: int, n_bytes: int, kind: Kind) -> None:
        """The bytes of one object came from disk."""
        self._append(("read", start_ns, end_ns, key, n_bytes, kind))

    def upload(self, key: ExpertKey, start_ns: int, end_ns: int, n_bytes: int, kind: Kind) -> None:
        """One object went from its landing slot to a device slot."""
        self._append(("upload", start_ns, end_ns, key, n_bytes, kind))

    def demote(self, key: ExpertKey, start_ns: int, end_ns: int, n_bytes: int) -> None:
        """One object that leaves the device was copied back to a landing slot."""
        self._append(("demote", start_ns, end_ns, key, n_bytes))

    def compute(
        self, layer: int, name: str, start_ns: int, end_ns: int, experts: Sequence[int] = ()
    ) -> None:
        """Math of one layer (-1: outside the layers); `experts` are the ones that it used."""
        self._append(("compute", start_ns, end_ns, layer, name, tuple(experts)))

    def wait(self, layer: int, start_ns: int, end_ns: int, n_missing: int) -> None:
        """A stall: compute stood still until the first of `n_missing` experts was there."""
        self._append(("wait", start_ns, end_ns, layer, n_missing))

    def router(self, layer: int, start_ns: int, end_ns: int) -> None:
        """Early routers were evaluated for `layer`."""
        self._append(("router", start_ns, end_ns, layer))

    def step(self, n_rows: int, start_ns: int, end_ns: int) -> None:
        """One step of the engine over `n_rows` tokens."""
        self._append(("step", start_ns, end_ns, n_rows))

    def request(self, request_id: int, start_ns: int, end_ns: int, outcome: str) -> None:
        """A whole request, from its arrival until it ended as `outcome` says."""
        self._append(("request", start_ns, end_ns, request_id, outcome))

    def event(self, name: str, request_id: int, at_ns: int | None = None) -> None:
        """An instant in the life of a request: arrived, first token, cancelled, ..."""
        self._append(("event", at_ns or time.perf_counter_ns(), 0, name, request_id))

    def sample(self, name: str, value: float, at_ns: int | None = None) -> None:
        """The value of a counter at an instant."""
        self._append(("sample", at_ns or time.perf_counter_ns(), 0, name, value))

    def loads(self) -> list[tuple[Any, ...]]:
        """(what, start_ns, end_ns, key, n_bytes, kind) of each read and upload that is kept."""
        return [event for event in self._snapshot() if event[0] in ("read", "upload")]

    def to_dict(self) -> dict[str, Any]:
        """The trace as a JSON-ready object. Blocks: seconds for a million events."""
        spans: list[_Span] = []
        points: list[dict[str, Any]] = []
        for event in self._snapshot():
            if event[0] == "event":
                points.append(self._instant(event))
            elif event[0] == "sample":
                points.append(self._counter(event))
            else:
                spans.append(_span(event))
        _assign_lanes(spans)
        out = _lane_names(spans, with_instants=any(p["ph"] == "i" for p in points))
        out += [self._complete(span) for span in spans]
        out += self._flows(_chains(spans))
        out += points
        return {
            "traceEvents": out,
            "displayTimeUnit": "ms",
            "otherData": {
                "program": "aprefetch",
                "version": __version__,
                "clock": "perf_counter_ns",
                "origin_ns": self.origin_ns,
                "dropped_events": self.n_dropped,
                **self.metadata,
            },
        }

    def export(self, path: str | Path) -> None:
        """Write the trace as JSON; the file appears whole or not at all. Blocks.

        What is no regular file (a pipe, a device) is written to, never replaced.

        Raises:
            OSError: The file cannot be written.
        """
        path = Path(path)
        if path.exists() and not path.is_file():
            with path.open("w", encoding="utf-8") as f:
                json.dump(self.to_dict(), f, separators=(",", ":"))
            return
        path = path.resolve()  # the file behind a link, not the link
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("w", encoding="utf-8") as f:
                json.dump(self.to_dict(), f, separators=(",", ":"))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _snapshot(self) -> list[tuple[Any, ...]]:
        while True:
            try:
                return list(self._events)
            except RuntimeError:  # appended to in the midst of copying; the next try is luckier
                continue

    def _us(self, at_ns: int) -> float:
        return (at_ns - self.origin_ns) / 1000

    def _complete(self, span: _Span) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": span.category,
            "name": span.name,
            "pid": _PID,
            "tid": span.tid,
            "ts": self._us(span.start_ns),
            "dur": (span.end_ns - span.start_ns) / 1000,
            "args": span.args,
        }

    def _instant(self, event: tuple[Any, ...]) -> dict[str, Any]:
        _, at_ns, _, name, request_id = event
        return {
            "ph": "i",
            "s": "t",
            "cat": "request",
            "name": name,
            "pid": _PID,
            "tid": _REQUEST_LANE,
            "ts": self._us(at_ns),
            "args": {"request": request_id},
        }

    def _counter(self, event: tuple[Any, ...]) -> dict[str, Any]:
        _, at_ns, _, name, value = event
        return {
            "ph": "C",
            "name": name,
            "pid": _PID,
            "tid": 0,
            "ts": self._us(at_ns),
            "args": {"value": value},
        }

    def _flows(self, chains: Iterable[_Chain]) -> list[dict[str, Any]]:
        out = []
        for flow_id, chain in enumerate(chains, start=1):
            last = len(chain.spans) - 1
            at_ns = 0
            for i, span in enumerate(chain.spans):
                # After the end of the span before, yet inside this one, so that it binds to it.
                at_ns = max(span.start_ns, at_ns)
                event: dict[str, Any] = {
                    "ph": "s" if i == 0 else "f" if i == last else "t",
                    "cat": "expert",
                    "name": "expert",
                    "id": flow_id,
                    "pid": _PID,
                    "tid": span.tid,
                    "ts": self._us(at_ns),
                }
                if i == last:
                    event["bp"] = "e"
                out.append(event)
                at_ns = span.end_ns
        return out


def _span(event: tuple[Any, ...]) -> _Span:
    category, start_ns, end_ns, *rest = event
    end_ns = max(start_ns, end_ns)
    if category in ("read", "upload"):
        key, n_bytes, kind = rest
        layer, expert = key
        args = {"layer": layer, "expert": expert, "bytes": n_bytes, "kind": kind}
        name = f"{category} {layer}.{expert}"
        return _Span(category, name, start_ns, end_ns, args, (ExpertKey(layer, expert),))
    if category == "demote":
        (layer, expert), n_bytes = rest
        args = {"layer": layer, "expert": expert, "bytes": n_bytes}
        return _Span(category, f"demote {layer}.{expert}", start_ns, end_ns, args)
    if category == "compute":
        layer, name, experts = rest
        args = {"layer": layer}
        if experts:
            args["experts"] = [int(e) for e in experts]
            if len(experts) == 1:
                args["expert"] = int(experts[0])
        keys = tuple(ExpertKey(layer, int(e)) for e in experts)
        return _Span(category, name, start_ns, end_ns, args, keys)
    if category == "wait":
        layer, n_missing = rest
        args = {"layer": layer, "missing": n_missing}
        return _Span(category, f"wait {layer}", start_ns, end_ns, args)
    if category == "router":
        return _Span(category, f"router {rest[0]}", start_ns, end_ns, {"layer": rest[0]})
    if category == "step":
        return _Span(category, "step", start_ns, end_ns, {"rows": rest[0]})
    request_id, outcome = rest
    args = {"request": request_id, "outcome": outcome}
    return _Span(category, f"request {request_id}", start_ns, end_ns, args)


def _assign_lanes(spans: list[_Span]) -> None:
    """Give each span the lowest lane of its category that is free when it starts."""
    spans.sort(key=lambda span: (span.start_ns, -span.end_ns))
    free_from: dict[str, list[int]] = {}
    for span in spans:
        ends = free_from.setdefault(span.category, [])
        free = (i for i, end_ns in enumerate(ends) if end_ns <= span.start_ns)
        lane = next(free, len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = span.end_ns
        span.tid = _LANES[span.category][0] + lane


def _lane_names(spans: Iterable[_Span], *, with_instants: bool) -> list[dict[str, Any]]:
    names = {_REQUEST_LANE: "requests"} if with_instants else {}
    for tid, category in sorted({(span.tid, span.category) for span in spans}):
        first, name = _LANES[category]
        names[tid] = name if tid == first else f"{name} {tid - first + 1}"
    out = [_meta("process_name", 0, {"name": "aprefetch"})]
    for tid, name in names.items():
        out.append(_meta("thread_name", tid, {"name": name}))
        out.append(_meta("thread_sort_index", tid, {"sort_index": tid}))
    return out


def _meta(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PID, "tid": tid, "ts": 0.0, "args": args}


def _chains(spans: Iterable[_Span]) -> list[_Chain]:
    """Join each upload to the read before it, and each compute to what brought its experts.

    By order of ends: what a span needs has ended before it does. One load feeds the first compute
    after it; later computes of the same expert are hits and have no flow.
    """
    order = {"read": 0, "upload": 1, "compute": 2}
    moving = [span for span in spans if span.category in order and span.keys]
    moving.sort(key=lambda span: (span.end_ns, order[span.category]))
    pending: dict[ExpertKey, _Chain] = {}
    chains: list[_Chain] = []
    for span in moving:
        for key in span.keys:
            before = pending.get(key)
            if span.category == "read" or before is None:
                if span.category == "compute":
                    continue  # a hit
                pending[key] = _Chain([span])
                chains.append(pending[key])
            elif span.category == "compute":
                before.spans.append(span)
                del pending[key]
            elif before.spans[-1].category == "read":
                before.spans.append(span)
            else:  # uploaded again, out of the RAM tier
                pending[key] = _Chain([span])
                chains.append(pending[key])
    return [chain for chain in chains if len(chain.spans) > 1]


def validate_trace(obj: Any) -> list[str]:
    """What is wrong with a trace: fields, nesting on each lane, matched flows. Empty when sound."""
    if not isinstance(obj, dict) or not isinstance(obj.get("traceEvents"), list):
        return ["the trace is not an object with a list 'traceEvents'"]
    problems: list[str] = []
    if obj.get("displayTimeUnit") not in ("ms", "ns"):
        problems.append("displayTimeUnit is neither 'ms' nor 'ns'")
    if not isinstance(obj.get("otherData"), dict):
        problems.append("otherData is not an object")
    sound = []
    for i, event in enumerate(obj["traceEvents"]):
        wrong = _field_problems(event)
        problems += [f"event {i}: {text}" for text in wrong]
        if not wrong:
            sound.append(event)
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in sound:
        if event["ph"] == "X":
            lane = (event["pid"], event["tid"])
            spans.setdefault(lane, []).append((event["ts"], event["ts"] + event["dur"]))
    problems += _lane_problems(sound, spans)
    problems += _flow_problems(sound, spans)
    return problems


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _field_problems(event: Any) -> list[str]:
    if not isinstance(event, dict):
        return ["not an object"]
    problems = []
    phase = event.get("ph")
    if phase not in ("X", "C", "i", "M", "s", "t", "f"):
        return [f"unknown phase {phase!r}"]
    if not isinstance(event.get("name"), str) or not event["name"]:
        problems.append("no name")
    problems += [f"{k} is not an integer" for k in ("pid", "tid") if type(event.get(k)) is not int]
    if phase != "M" and not _is_number(event.get("ts")):
        problems.append("ts is not a number")
    if phase in "XCiM" and not isinstance(event.get("args"), dict):
        problems.append("args is not an object")
    if phase == "X":
        if not _is_number(event.get("dur")) or event["dur"] < 0:
            problems.append("dur is not a number of at least 0")
        problems += _span_problems(event)
    if phase == "C" and not all(map(_is_number, dict(event.get("args") or {}).values())):
        problems.append("a counter's value is not a number")
    if phase == "i" and event.get("s") not in ("g", "p", "t"):
        problems.append("an instant without a scope")
    if phase in "stf" and not isinstance(event.get("id"), int | str):
        problems.append("a flow without an id")
    if phase == "f" and event.get("bp") != "e":
        problems.append("a flow's end that does not bind to the span around it")
    return problems


def _span_problems(event: dict[str, Any]) -> list[str]:
    category, args = event.get("cat"), event.get("args")
    if category not in _REQUIRED_ARGS:
        return [f"unknown category {category!r}"]
    if not isinstance(args, dict):
        return []
    problems = [
        f"args.{name} of a {category} span is not an integer"
        for name in _REQUIRED_ARGS[category]
        if name != "kind" and type(args.get(name)) is not int
    ]
    if "kind" in _REQUIRED_ARGS[category] and args.get("kind") not in _KINDS:
        problems.append(f"args.kind {args.get('kind')!r} is none of {', '.join(_KINDS)}")
    return problems


def _lane_problems(
    events: list[dict[str, Any]], spans: dict[tuple[int, int], list[tuple[float, float]]]
) -> list[str]:
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    problems = [f"lane {lane[1]} has no thread_name" for lane in spans if lane not in named]
    for lane, on_lane in spans.items():
        open_until: list[float] = []
        for start, end in sorted(on_lane, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + _ROUNDING_US:
                open_until.pop()
            if open_until and end > open_until[-1] + _ROUNDING_US:
                problems.append(f"lane {lane[1]}: spans overlap without nesting at {start} us")
            open_until.append(end)
    return problems


def _flow_problems(
    events: list[dict[str, Any]], spans: dict[tuple[int, int], list[tuple[float, float]]]
) -> list[str]:
    flows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault((event.get("cat"), event["name"], event["id"]), []).append(event)
    problems = []
    reach = {}
    for lane, on_lane in spans.items():
        on_lane = sorted(on_lane)
        ends = list(accumulate((end for _, end in on_lane), max))
        reach[lane] = ([start for start, _ in on_lane], ends)
    for (_, _, flow_id), steps in flows.items():
        steps.sort(key=lambda e: (e["ts"], "stf".index(e["ph"])))
        phases = "".join(e["ph"] for e in steps)
        if phases != "s" + "t" * (len(phases) - 2) + "f" or len(phases) < 2:
            problems.append(f"flow {flow_id}: steps {phases!r}, wanted one s, any t, one f")
        problems += [
            f"flow {flow_id}: {e['ph']} at {e['ts']} us lies in no span"
            for e in steps
            if not _covered(reach.get((e["pid"], e["tid"])), e["ts"])
        ]
    return problems


def _covered(reach: tuple[list[float], list[float]] | None, ts: float) -> bool:
    """Does a span that starts by `ts` reach to it? `reach`: starts, and the furthest end so far."""
    if reach is None:
        return False
    n_started = bisect_right(reach[0], ts + _ROUNDING_US)
    return n_started > 0 and reach[1][n_started - 1] + _ROUNDING_US >= ts
