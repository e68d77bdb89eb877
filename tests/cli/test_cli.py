"""The command line: what goes to stdout and stderr, and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprefetch.cli.main import main

FAST = ["--kernels", "reference"]


@pytest.fixture(scope="module")
def model(oracle_dir: Path) -> str:
    return str(oracle_dir / "tiny-deepseek4-mxfp4.gguf")


@pytest.fixture(scope="module")
def facts(oracle_dir: Path) -> dict[str, Any]:
    return json.loads((oracle_dir / "tiny-deepseek4-mxfp4.json").read_text())


@pytest.fixture
def ids_file(tmp_path: Path, facts: dict[str, Any]) -> str:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(facts["prompts"]["p7"]["ids"]))
    return str(path)


def start(*args: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "aprefetch", *args]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **{**pipes, **options})


def test_run_streams_text_and_reports(model, ids_file, capsys) -> None:
    args = ["run", "-m", model, "--token-ids", ids_file, "-n", "6", "--temp", "0", *FAST]
    assert main([*args, "--ignore-eos", "--vram-budget", "2MiB"]) == 0
    out, err = capsys.readouterr()
    assert main([*args, "--ignore-eos", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert out == answer["text"] + "\n"
    report = re.sub(r"\d+(\.\d+)?", "N", err)
    names = [line.split()[0] for line in report.splitlines() if line.strip()]
    assert names == [
        "device", "model", "experts", "device", "RAM", "tokens", "first", "speed", "hit",
        "per", "ceiling", "stalls", "errors",
    ]  # fmt: skip
    assert "direct GGUF" in report
    assert "N prompt, N output" in report
    assert "prefill N tokens/s, decode N tokens/s" in report


def test_run_json_is_one_object(model, ids_file, facts, capsys) -> None:
    args = ["run", "-m", model, "--token-ids", ids_file, "-n", "6", "--temp", "0", *FAST]
    assert main([*args, "--ignore-eos", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert {"text", "token_ids", "finish_reason", "usage", "stats"} <= set(answer)
    assert answer["token_ids"] == facts["greedy"]["p7"][:6]
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 13
    assert answer["stats"]["fallback_count"] >= 0
    assert err == ""


def test_run_takes_options(model, tmp_path, capsys) -> None:
    trace = tmp_path / "trace.json"
    args = ["run", "-m", model, "-p", "Hello", "-n", "3", "--seed", "1", "--top-p", "0.9", "-q"]
    args += ["--lookahead", "off", "--chunk", "2", "--ram-budget", "1MiB", "--queue-depth", "2"]
    assert main([*args, "--trace", str(trace), "--stop", "zzz", *FAST]) == 0
    first = capsys.readouterr()
    assert first.err == ""
    assert json.loads(trace.read_text())["traceEvents"]
    assert main([*args, "--chat", *FAST]) == 0
    assert main([*args, "--lookahead", "2", *FAST]) == 0


def test_score(model, facts, oracle_dir, tmp_path, capsys) -> None:
    text, logits = tmp_path / "text.txt", tmp_path / "logits.npy"
    text.write_text(facts["nll_text"], encoding="utf-8")
    assert main(["score", "-m", model, "--text", str(text), "--json", *FAST]) == 0
    by_text = json.loads(capsys.readouterr().out)
    assert by_text["mean_nll"] == pytest.approx(facts["nll"]["exact"], abs=1e-4)
    assert by_text["n_tokens"] == len(facts["nll_ids"])
    assert by_text["perplexity"] == pytest.approx(np.exp(by_text["mean_nll"]))
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(facts["nll_ids"]))
    args = ["score", "-m", model, "--token-ids", str(ids), "--logits", str(logits), "--chunk", "50"]
    assert main([*args, *FAST]) == 0
    assert "mean_nll" in capsys.readouterr().out
    found = np.load(logits)
    assert (found.dtype, found.shape) == (np.float32, (by_text["n_tokens"], facts["n_vocab"]))
    want = np.load(oracle_dir / "tiny-deepseek4-mxfp4.logits.npz")["exact/all_nll"]
    assert np.median(np.abs(found - want).max(axis=1)) <= 1e-4


def test_inspect_and_plan(model, capsys) -> None:
    for command in ("inspect", "plan"):
        assert main([command, model]) == 0
        assert "deepseek4" in capsys.readouterr().out
        assert main([command]) == 0
        assert "ember" in capsys.readouterr().out
    assert main(["inspect", model, "--json", "--tensors"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "deepseek4"
    assert len(facts["tensors"]) == facts["n_tensors"]
    assert main(["plan", model, "--json", "--gbps", "7", "--vram-budget", "2MiB"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["vram_budget_bytes"] == 2 << 20
    assert plan["bytes_per_token"] * 16 == plan["routed_bytes"] * 4  # 4 of 16 experts
    ceiling = plan["ceiling_tokens_per_s"]
    assert ceiling["0.0"] == pytest.approx(7e9 / plan["bytes_per_token"])
    assert ceiling["0.6"] == pytest.approx(7e9 / plan["bytes_per_token"] / 0.4)
    assert 0 < plan["vram_minimum_bytes"] < plan["vram_full_bytes"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["run", "-m", "none.gguf", "-p", "x"], 1, "none.gguf"),
        (["run", "-m", __file__, "-p", "x"], 1, "GGUF"),
        (["run", "-m", "MODEL", "-p", "x", "--vram-budget", "1"], 1, "vram_budget"),
        (["run", "-m", "MODEL", "-p", "x", "--vram-budget", "many"], 2, "vram_budget"),
        (["run", "-m", "MODEL", "-p", "x", "--lookahead", "some"], 2, "lookahead"),
        (["run", "-m", "MODEL", "-p", "x", "--temp", "-1"], 2, "temperature"),
        (["run", "-m", "MODEL", "-p", "x x x x", "-c", "2"], 1, "context"),
        (["run", "-m", "MODEL", "--token-ids", "none.json"], 2, "none.json"),
        (["run", "-m", "MODEL", "--token-ids", __file__], 2, "JSON"),
        (["run", "-m", "MODEL", "-p", "x", "--device", "cuda"], 1, "cuda"),
        (["score", "-m", "MODEL", "--text", "none.txt"], 2, "none.txt"),
        (["plan", "none.gguf"], 1, "none.gguf"),
        (["plan", "MODEL", "--gbps", "0"], 2, "gbps"),
        (["inspect", "none.gguf"], 1, "none.gguf"),
    ],
)
def test_errors_are_one_line_with_a_code(args, code, words, model, capsys) -> None:
    args = [model if arg == "MODEL" else arg for arg in args]
    assert main(args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aprefetch: error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("args", [[], ["nonsense"], ["run", "--top-p"], ["score"], ["run", "--x"]])
def test_wrong_usage_is_2(args, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["plan", "--help"], ["--version"]])
def test_help(args, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 0
    assert "aprefetch" in capsys.readouterr().out


def test_the_prompt_may_come_through_a_pipe(model) -> None:
    common = ["run", "-m", model, "-n", "4", "--temp", "0", "--ignore-eos", "-q", *FAST]
    given = start(*common, "-p", "Hello")
    piped = start(*common)
    dash = start(*common, "-p", "-")
    want = given.communicate()
    assert given.returncode == 0
    assert piped.communicate(b"Hello\n") == want
    assert dash.communicate(b"Hello") == want


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_cleanly(model, number) -> None:
    run = start("run", "-m", model, "-p", "Hello", "-n", "900", "--ignore-eos", *FAST)
    assert run.stdout is not None
    os.read(run.stdout.fileno(), 1)  # it is in the midst of an answer
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert b"Traceback" not in err
    assert b"never" not in err


def test_a_reader_that_leaves_is_no_crash(model) -> None:
    run = start("run", "-m", model, "-p", "Hello", "-n", "900", "--ignore-eos", *FAST)
    assert run.stdout is not None
    assert run.stderr is not None
    os.read(run.stdout.fileno(), 1)
    run.stdout.close()
    err = run.stderr.read()
    run.wait(timeout=60)
    run.stderr.close()
    run.stdin.close()
    assert run.returncode == 1
    assert err == b""


def test_chat(model) -> None:
    chat = start(
        "chat", "-m", model, "-n", "3", "--temp", "0", "--system", "Be brief", "-c", "200", *FAST
    )
    lines = b"Hello\n/stats\n/what\nAnd now?\n/reset\nHello\n" + b"x " * 3000 + b"\n/quit\n"
    out, err = chat.communicate(lines, timeout=100)
    assert chat.returncode == 0
    answers = out.split(b"\n")
    assert len(answers) == 4  # three answers, and the end
    assert answers[0] == answers[2]
    assert b"output_tokens: " in err
    assert b"error: the prompt has" in err
    assert b"Traceback" not in err
