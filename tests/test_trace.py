"""Traces: the export is sound, flows follow the bytes, and the validator sees what is wrong."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprefetch.errors import ConfigError
from aprefetch.trace import Tracer, validate_trace
from aprefetch.types import ExpertKey

Trace = dict[str, Any]


def events(trace: Trace, phase: str, category: str | None = None) -> list[dict[str, Any]]:
    return [
        e
        for e in trace["traceEvents"]
        if e["ph"] == phase and (category is None or e.get("cat") == category)
    ]


@pytest.fixture
def tracer() -> Tracer:
    """One layer of one token: two misses, one of them guessed, and a hit."""
    tracer = Tracer(metadata={"model": "tiny"})
    t = tracer.origin_ns
    first, second = ExpertKey(3, 1), ExpertKey(3, 4)
    tracer.request(7, t, t + 90_000, "stop")
    tracer.step(1, t + 1_000, t + 80_000)
    tracer.router(4, t + 2_000, t + 2_500)
    tracer.read(first, t + 3_000, t + 20_000, 8192, "demand")
    tracer.read(second, t + 3_500, t + 19_000, 8192, "guess")
    tracer.wait(3, t + 4_000, t + 22_000, 2)
    tracer.upload(second, t + 19_500, t + 21_000, 8000, "guess")
    tracer.upload(first, t + 20_500, t + 22_000, 8000, "demand")
    tracer.compute(3, "experts", t + 22_000, t + 30_000, [1, 4])
    tracer.compute(3, "experts", t + 40_000, t + 50_000, [1, 4])  # hits
    tracer.compute(-1, "head", t + 60_000, t + 70_000)
    tracer.event("first token", 7, t + 75_000)
    tracer.sample("reads in flight", 2, t + 3_500)
    return tracer


def test_a_trace_is_sound(tracer: Tracer) -> None:
    trace = tracer.to_dict()
    assert validate_trace(trace) == []
    assert trace["displayTimeUnit"] == "ms"
    other = trace["otherData"]
    assert (other["model"], other["dropped_events"]) == ("tiny", 0)
    assert {e["cat"] for e in events(trace, "X")} == {
        "request",
        "step",
        "router",
        "read",
        "wait",
        "upload",
        "compute",
    }
    assert json.loads(json.dumps(trace)) == trace


def test_times_are_microseconds_and_arguments_name_the_expert(tracer: Tracer) -> None:
    first, second = events(tracer.to_dict(), "X", "read")
    assert (first["ts"], first["dur"]) == (3.0, 17.0)
    assert first["args"] == {"layer": 3, "expert": 1, "bytes": 8192, "kind": "demand"}
    assert second["args"]["kind"] == "guess"
    assert type(first["pid"]) is type(first["tid"]) is int


def test_overlapping_spans_have_lanes_of_their_own_with_names(tracer: Tracer) -> None:
    trace = tracer.to_dict()
    first, second = events(trace, "X", "read")
    assert first["tid"] != second["tid"]
    names = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert (names[first["tid"]], names[second["tid"]]) == ("read", "read 2")
    assert len({e["tid"] for e in events(trace, "X", "compute")}) == 1


def test_flows_lead_from_read_to_upload_to_the_first_compute(tracer: Tracer) -> None:
    trace = tracer.to_dict()
    flows: dict[int, list[dict[str, Any]]] = {}
    for e in trace["traceEvents"]:
        if e["ph"] in "stf":
            flows.setdefault(e["id"], []).append(e)
    assert len(flows) == 2
    compute = events(trace, "X", "compute")[0]
    for steps in flows.values():
        assert [e["ph"] for e in steps] == ["s", "t", "f"]
        assert [e["ts"] for e in steps] == sorted(e["ts"] for e in steps)
        assert steps[-1]["tid"] == compute["tid"]
        assert compute["ts"] <= steps[-1]["ts"] <= compute["ts"] + compute["dur"]


def test_an_upload_out_of_the_ram_tier_starts_a_flow_of_its_own() -> None:
    tracer, key = Tracer(), ExpertKey(0, 0)
    t = tracer.origin_ns
    tracer.read(key, t, t + 10, 1, "guess")
    tracer.upload(key, t + 10, t + 20, 1, "guess")  # evicted before anybody used it
    tracer.upload(key, t + 50, t + 60, 1, "demand")
    tracer.compute(0, "experts", t + 60, t + 70, [0])
    tracer.upload(key, t + 80, t + 90, 1, "demand")
    tracer.compute(0, "experts", t + 90, t + 95, [0])
    trace = tracer.to_dict()
    assert validate_trace(trace) == []
    phases: dict[int, str] = {}
    for e in trace["traceEvents"]:
        if e["ph"] in "stf":
            phases[e["id"]] = phases.get(e["id"], "") + e["ph"]
    assert sorted(phases.values()) == ["sf", "sf", "sf"]


def test_a_read_that_nobody_used_has_no_flow() -> None:
    tracer = Tracer()
    tracer.read(ExpertKey(0, 0), tracer.origin_ns, tracer.origin_ns + 5, 1, "guess")
    trace = tracer.to_dict()
    assert validate_trace(trace) == []
    assert not events(trace, "s")


def test_the_ring_is_bounded_and_says_what_it_lost() -> None:
    tracer = Tracer(max_events=10)
    for i in range(25):
        tracer.step(1, tracer.origin_ns + i * 10, tracer.origin_ns + i * 10 + 5)
    assert len(tracer) == 10
    trace = tracer.to_dict()
    assert trace["otherData"]["dropped_events"] == 15
    assert events(trace, "X")[0]["ts"] == 0.15
    with pytest.raises(ConfigError):
        Tracer(max_events=0)


def test_any_timing_gives_a_sound_trace() -> None:
    source = random.Random(1)
    tracer = Tracer()
    for _ in range(400):
        start = tracer.origin_ns + source.randrange(10**9)
        end = start + source.choice([0, 1, 999, 12_345, source.randrange(10**8)])
        key = ExpertKey(source.randrange(2), source.randrange(4))
        source.choice(
            [
                lambda k=key, a=start, b=end: tracer.read(k, a, b, 1, "demand"),
                lambda k=key, a=start, b=end: tracer.upload(k, a, b, 1, "exact"),
                lambda k=key, a=start, b=end: tracer.compute(k.layer, "x", a, b, [k.expert, 3]),
                lambda k=key, a=start, b=end: tracer.wait(k.layer, a, b, 1),
            ]
        )()
    trace = tracer.to_dict()
    assert validate_trace(trace) == []
    assert events(trace, "s")


def test_export_while_recording(tracer: Tracer, tmp_path: Path) -> None:
    stop = threading.Event()

    def record() -> None:
        while not stop.is_set():
            tracer.step(1, tracer.origin_ns, tracer.origin_ns + 1)

    thread = threading.Thread(target=record)
    small = Tracer(max_events=500)
    tracer._events = small._events
    tracer.max_events = 500
    thread.start()
    try:
        for _ in range(5):
            tracer.export(tmp_path / "run.json")
    finally:
        stop.set()
        thread.join()
    assert validate_trace(json.loads((tmp_path / "run.json").read_text())) == []
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_an_export_that_fails_leaves_nothing(tracer: Tracer, tmp_path: Path) -> None:
    tracer.metadata["bad"] = object()
    with pytest.raises(TypeError):
        tracer.export(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="nowhere"):
        tracer.export(tmp_path / "nowhere" / "run.json")


def _first(trace: Trace, phase: str, category: str | None = None) -> dict[str, Any]:
    return events(trace, phase, category)[0]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda t: t.pop("displayTimeUnit"), "displayTimeUnit"),
        (lambda t: t.pop("otherData"), "otherData"),
        (lambda t: t.update(traceEvents={}), "traceEvents"),
        (lambda t: t["traceEvents"].append(3), "not an object"),
        (lambda t: _first(t, "X").update(ph="Z"), "phase"),
        (lambda t: _first(t, "X").update(name=""), "no name"),
        (lambda t: _first(t, "X").update(tid="1"), "tid is not an integer"),
        (lambda t: _first(t, "X").update(ts=None), "ts is not a number"),
        (lambda t: _first(t, "X").update(dur=-1.0), "dur"),
        (lambda t: _first(t, "X").update(cat="nonsense"), "category"),
        (lambda t: _first(t, "X", "read").update(args=None), "args is not an object"),
        (lambda t: _first(t, "X", "read")["args"].pop("bytes"), "args.bytes"),
        (lambda t: _first(t, "X", "upload")["args"].update(kind="whim"), "args.kind"),
        (lambda t: _first(t, "X", "wait")["args"].pop("layer"), "args.layer"),
        (lambda t: _first(t, "C")["args"].update(value="2"), "counter"),
        (lambda t: _first(t, "i").pop("s"), "scope"),
        (
            lambda t: events(t, "X", "read")[1].update(tid=_first(t, "X", "read")["tid"], dur=99.0),
            "overlap",
        ),
        (lambda t: _first(t, "X", "read").update(tid=99), "thread_name"),
        (lambda t: t["traceEvents"].remove(_first(t, "s")), "wanted one s"),
        (lambda t: t["traceEvents"].remove(_first(t, "f")), "wanted one s"),
        (lambda t: _first(t, "f").update(ts=0.0), "wanted one s"),
        (lambda t: _first(t, "t").update(tid=1), "lies in no span"),
        (lambda t: _first(t, "f").pop("bp"), "bind"),
        (lambda t: _first(t, "s").pop("id"), "without an id"),
    ],
)
def test_the_validator_sees_it(tracer: Tracer, spoil: Callable[[Trace], Any], says: str) -> None:
    trace = copy.deepcopy(tracer.to_dict())
    spoil(trace)
    assert any(says in problem for problem in validate_trace(trace)), validate_trace(trace)


def test_nested_spans_on_one_lane_are_sound(tracer: Tracer) -> None:
    trace = tracer.to_dict()
    outer = copy.deepcopy(_first(trace, "X", "step"))
    outer.update(ts=outer["ts"] + 1, dur=outer["dur"] - 2)
    trace["traceEvents"].append(outer)
    assert validate_trace(trace) == []
