"""The soak: a short one is flat and leaves nothing over; what grows is seen."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import soak
from make_tiny_gguf import write_tiny_deepseek4

from aprefetch import Runtime

MIB = 1 << 20


def test_mixed_requests_with_cancels_leave_nothing_over(tmp_path, capsys) -> None:
    out = tmp_path / "soak.json"
    code = soak.main(
        ["--device", "cpu", "--requests", "40", "--rests", "10", "--most-tokens", "80",
         "--seed", "3", "--out", str(out)]
    )  # fmt: skip
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert json.loads(printed.splitlines()[-1]) == result
    assert result["wrong"] == []
    assert result["requests"] >= 40
    assert result["probes"] >= 9  # one before, one at each rest
    assert result["outcomes"].get("cancel: cancelled", 0) >= 3
    assert result["duplicate_reads"] == 0
    # So few requests fill no heap and start a thread late: what has no excuse is asked for.
    assert result["verdicts"]["n_descriptors"]["is_flat"]
    assert all(sample["n_tasks"] == 0 for sample in result["samples"])
    assert code == (0 if result["is_flat"] else 1)


def test_a_model_without_vocabulary(tmp_path) -> None:
    model = tmp_path / "model.gguf"
    write_tiny_deepseek4(model, n_layers=4, hidden=64, width=32, tokenizer=False)
    code = soak.main(
        ["-m", str(model), "--device", "cpu", "--requests", "10", "--rests", "2", "--no-trace",
         "--most-tokens", "40", "--gbps", "5", "--prefix-budget", "0"]
    )  # fmt: skip
    assert code == 1  # two rests are too few to judge


@pytest.mark.parametrize(
    ("values", "is_flat"),
    [
        ([0, 50, 90, 100, 100, 100, 100, 100, 100, 100, 100, 100], True),  # warm-up
        ([100 + 16 * (i % 3) for i in range(40)], True),  # a heap that is trimmed
        ([100 + 2 * i for i in range(40)], False),
        ([100.0] * 35 + [140.0] * 5, False),  # a late step
        ([200 - i for i in range(40)], True),
    ],
)
def test_judging(values, is_flat) -> None:
    assert soak.judge(values, soak.Tolerance(24)).is_flat == is_flat


def test_what_has_no_tolerance() -> None:
    assert not soak.judge([10] * 11 + [11], soak.Tolerance(0)).is_flat
    assert soak.judge([9, 10, 10] + [10] * 9, soak.Tolerance(0)).is_flat


async def test_a_slot_that_stays_leased_is_told() -> None:
    args = soak._arguments(["--requests", "1"])
    async with Runtime.open(device="cpu") as rt:
        load = soak.Load(rt, random.Random(0), args.most_tokens)
        watch = soak.Watch(rt, load, 0.0, 0)
        await watch.rest()
        assert load.wrong == []
        demand = rt._coordinator.demand(0, [0])
        leases = await demand.wait()
        await watch.rest()
        assert len(load.wrong) == 1 and "1 slots leased" in load.wrong[0]
        demand.release(leases)
        demand.close()
