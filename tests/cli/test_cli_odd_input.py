"""The command line with input that nobody should give, but somebody will."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from make_tiny_gguf import write_tiny_deepseek4

from aprefetch.cli.main import main

FAST = ["--kernels", "reference"]


@pytest.fixture(scope="module")
def model(oracle_dir: Path) -> str:
    return str(oracle_dir / "tiny-deepseek4-mxfp4.gguf")


@pytest.fixture(scope="module")
def short(model) -> list[str]:
    return ["run", "-m", model, "-n", "2", "--temp", "0", "-q", *FAST]


def run(args: list[str], redirect: str = "", **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run through a shell, for its redirections."""
    command = ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "aprefetch"]
    return subprocess.run([*command, *args], capture_output=True, timeout=100, **options)


def line(error: bytes | str) -> str:
    """The one line of an error."""
    text = error.decode() if isinstance(error, bytes) else error
    assert text.startswith("aprefetch: error: ")
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"a": 1}', "list of integers"),
        (b"[true]", "list of integers"),
        (b"[1.0]", "list of integers"),
        (b"[]", "no tokens"),
        (b"[-1, 2]", "outside the vocabulary"),
        (b"[1, 10000000000000000000000000]", "outside the vocabulary"),
    ],
)
def test_token_id_files(model, content, words, tmp_path, capsys) -> None:
    file = tmp_path / "ids.json"
    file.write_bytes(content)
    for command in (["run"], ["score", "--json"]):
        assert main([*command, "-m", model, "--token-ids", str(file), *FAST]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert words in line(err)


@pytest.mark.parametrize("option", ["--trace", "--logits"])
@pytest.mark.parametrize("place", ["", "folder", "folder/none/file"])
def test_outputs_are_checked_before_the_work(option, place, model, tmp_path, capsys) -> None:
    (tmp_path / "folder").mkdir()
    text = tmp_path / "text.txt"
    text.write_text("Hello there")
    where = str(tmp_path / place) if place else ""
    args = ["score", "-m", "no such model", "--text", str(text), option, where]
    assert main(args) == 2
    assert option in line(capsys.readouterr().err)


def test_a_trace_never_replaces_a_device(short, tmp_path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "trace.json"
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    assert main([*short, "-p", "Hi", "--trace", str(pipe)]) == 0
    assert json.loads(reader.communicate()[0])["traceEvents"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert main([*short, "-p", "Hi", "--trace", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads(file.read_text())["traceEvents"]


def test_the_json_of_run_has_five_keys(short, capsys) -> None:
    assert main([*short, "-p", "Hi", "--json", "--chat"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "stats"}


def test_json_survives_a_narrow_encoding(short, capsys) -> None:
    args = [*short, "-p", "Hi", "--json", "-n", "8"]
    narrow = run(args, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert main(args) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert not text.isascii()
    assert json.loads(narrow.stdout.decode("ascii"))["text"] == text


def test_far_too_much_text_is_refused_at_once(short) -> None:
    done = run(short, input=b"a" * 20_000_000)
    assert done.returncode == 1
    assert "the context holds" in line(done.stderr)


def test_stdin_that_is_not_utf8(short) -> None:
    done = run(short, input=b"caf\xe9 au lait")
    assert done.returncode == 2
    assert "stdin: not UTF-8 text (byte 3 is 0xe9)" in line(done.stderr)


@pytest.mark.parametrize("redirect", ["2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(short, redirect) -> None:
    done = run([*short, "-p", "Hi"], redirect)
    assert done.returncode == 0
    assert done.stderr == b""
    assert bool(done.stdout) == (">&- 2" not in redirect)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(short) -> None:
    done = run([*short, "-p", "Hi"], ">/dev/full")
    assert done.returncode == 1
    assert "No space left" in line(done.stderr)


@pytest.mark.parametrize("limits", [["-n 9"], ["-v 700000", "-v 650000", "-v 600000"]])
def test_limits_of_the_system_give_an_error(limits, short) -> None:
    """Under the last limit at least; how much an earlier one leaves depends on the reader."""
    for limit in limits:
        command = ["/bin/sh", "-c", f'ulimit {limit}; exec "$@"', "sh", sys.executable]
        args = [*command, "-m", "aprefetch", *short, "-p", "Hi"]
        done = subprocess.run(args, capture_output=True, timeout=100)
        # What Python's own exit says when it finds no memory either may follow.
        said, _, rest = done.stderr.partition(b"aprefetch: error: ")
        assert bool(rest) == (done.returncode == 1) and b"Traceback" not in said
        assert done.returncode in (0, 1)
    assert done.returncode == 1


def test_paths_of_any_kind(model, tmp_path, capsys) -> None:
    for name in ("with space", "line\nbreak", "ünï 日本", os.fsdecode(b"byte\xff")):
        path = tmp_path / f"{name}.gguf"
        os.symlink(model, path)
        assert main(["inspect", str(path)]) == 0
        capsys.readouterr()
        if name.isprintable():  # what captures stderr here takes no lone surrogate
            assert main(["inspect", str(path) + "x"]) == 1
            line(capsys.readouterr().err)


@pytest.mark.parametrize("gbps", ["nan", "inf", "-1", "0", "1e300"])
def test_rates_that_are_none(model, gbps, capsys) -> None:
    assert main(["plan", model, "--gbps", gbps]) == 2
    assert "--gbps" in line(capsys.readouterr().err)


def test_more_hash_layers_than_layers(tmp_path, capsys) -> None:
    path = tmp_path / "two.gguf"
    write_tiny_deepseek4(path, n_layers=2, ratios=(4, 128), n_experts=4, n_used=2, hash_layers=3)
    assert main(["run", "-m", str(path), "-p", "Hi", "-n", "2", "-q", *FAST]) == 0
    assert capsys.readouterr().err == ""
