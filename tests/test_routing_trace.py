"""Routing traces: recorded from a real run, saved, loaded, summed up."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aprefetch import Runtime
from aprefetch.cli.main import main
from aprefetch.errors import ConfigError
from aprefetch.routing_trace import RoutingRecorder, RoutingTrace
from aprefetch.trace_summary import of_routing, summarize

OPTIONS = {
    "trace": True,
    "trace_routing": True,
    "vram_budget": "4MB",
    "ram_budget": "2MB",
    "lookahead_depth": 2,
}


async def record(**options) -> tuple[RoutingTrace, dict]:
    async with Runtime.open(**{**OPTIONS, **options}) as runtime:
        await runtime.generate("Once upon a time", max_tokens=6, temperature=0.0)
        return runtime.routing_trace(), runtime.stats().to_dict()


async def test_k1_the_trace_agrees_with_the_counters(tmp_path) -> None:
    trace, stats = await record()
    trace.save(tmp_path / "a.npz")
    loaded = RoutingTrace.load(tmp_path / "a.npz")
    for name in ("steps", "calls", "picks", "guesses", "loads"):
        assert np.array_equal(getattr(trace, name), getattr(loaded, name))
    assert loaded.meta == json.loads(json.dumps(trace.meta))
    tiers = np.bincount(trace.picks["tier"], minlength=4)
    assert tiers[0] == stats["hits_device"]
    assert tiers[1:].sum() == stats["misses_device"]
    assert tiers[1] == stats["hits_ram"]
    assert len(trace.steps) == stats["steps"]
    assert len(trace.calls) == stats["steps"] * 8
    reads = trace.loads[trace.loads["what"] == 0]
    assert len(reads) > 0 and (reads["end_ns"] >= reads["start_ns"]).all()
    assert trace.calls["wait_ns"].sum() <= stats["stall_ns"] * 1.2 + 1e7
    assert stats["picked"] > 0


async def test_picks_and_guesses_belong_to_their_calls() -> None:
    trace, _ = await record()
    for i, row in enumerate(trace.calls):
        picked, guessed = trace.picked(i), trace.guessed(i)
        assert (np.diff(picked["expert"].astype(int)) > 0).all()
        assert int(picked["n_rows"].sum()) == 4 * int(row["n_rows"])
        ahead = guessed["layer"].astype(int) - int(row["layer"])
        assert ((ahead >= 1) & (ahead <= 2)).all()
    assert len(trace.guesses) > 0


async def test_settled_runs_repeat_exactly() -> None:
    first, _ = await record(trace_settled=True, queue_depth=1)
    second, _ = await record(trace_settled=True, queue_depth=1)
    assert np.array_equal(first.picks, second.picks)
    assert np.array_equal(first.guesses, second.guesses)


async def test_without_recording_there_is_no_trace() -> None:
    async with Runtime.open(vram_budget="4MB") as runtime:
        with pytest.raises(ConfigError, match="trace_routing=True"):
            runtime.routing_trace()


def test_a_step_that_breaks_off_leaves_no_trace_and_the_recorder_is_bounded() -> None:
    recorder = RoutingRecorder(max_calls=2)
    for n in range(4):
        recorder.begin_step(1, n)
        recorder.call(0, [1, 2], [1, 1], [0, 3], 10)
        recorder.guess(1, [5, 6, 7])
        recorder.times(wait_ns=2**33)
        if n == 1:
            recorder.abandon_step()
        else:
            recorder.end_step(n + 1)
    trace = recorder.trace()
    assert len(trace.steps) == 2 == len(trace.calls)
    assert recorder.n_dropped == 1 == trace.meta["n_dropped"]
    assert trace.guessed(1)["expert"].tolist() == [5, 6, 7]
    assert trace.calls["wait_ns"].tolist() == [2**32 - 1] * 2
    recorder.begin_step(1, 9)
    recorder.call(0, [1], [1], [0], 10)  # half a step
    assert len(recorder.trace().calls) == 2


@pytest.mark.parametrize("content", [b"", b"PK nonsense", b"{}", b'{"traceEvents": 3}'])
def test_other_files_are_refused(tmp_path, content) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        RoutingTrace.load(path)
    with pytest.raises(ConfigError):
        summarize(path)


def test_a_missing_file_and_damaged_references_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        summarize(tmp_path / "none")
    recorder = RoutingRecorder()
    recorder.begin_step(1, 0)
    recorder.call(0, [1, 2], [1, 1], [0, 3], 10)
    recorder.end_step(1)
    trace = recorder.trace()
    trace.calls["n_picks"] = 7
    trace.save(tmp_path / "a.npz")
    with pytest.raises(ConfigError, match="rows that are not there"):
        RoutingTrace.load(tmp_path / "a.npz")


def test_record_and_summary_commands(tmp_path, capsys) -> None:
    path, chrome = str(tmp_path / "a.npz"), str(tmp_path / "a.json")
    args = ["-p", "Once", "-n", "3", "--temp", "0", "--trace", chrome, "--json"]
    assert main(["trace", "record", "-o", path, *args]) == 0
    recorded = json.loads(capsys.readouterr().out)
    assert recorded["n_steps"] == 3
    assert main(["trace", "summary", path]) == 0
    assert "us per step" in capsys.readouterr().out
    assert main(["trace", "summary", chrome, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["n_steps"] == 3 and summary["n_reads"] == recorded["n_reads"]
    assert summary["read_bytes"] == recorded["read_bytes"]
    assert summary["verdict"] and summary["stages_ns"]["head"] > 0
    named = sum(summary["stages_ns"].values())
    assert named <= summary["step_ns"] * 1.001


def test_the_verdict_names_the_bottleneck() -> None:
    def verdict(**times: int) -> str:
        recorder = RoutingRecorder()
        recorder.begin_step(1, recorder.origin_ns)
        recorder.call(3, [1], [1], [3], times.pop("dense_ns", 0))
        recorder.times(**times)
        recorder.end_step(recorder.origin_ns + 1000)
        return of_routing(recorder.trace()).verdict()

    assert "Waiting for experts" in verdict(wait_ns=600)
    assert "layer 3" in verdict(wait_ns=600)
    assert "reads start too late" in verdict(wait_ns=600)
    assert "routed experts" in verdict(experts_ns=700, dense_ns=100)
    assert "attention" in verdict(dense_ns=900)
    assert "early routers" in verdict(guess_ns=500)
    assert "No stage dominates" in verdict(dense_ns=100)
