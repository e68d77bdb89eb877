"""The chat on a real terminal (a pseudo-terminal): editing, Ctrl-C, saving, reuse."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, *args: str, cwd: Path) -> None:
        self._master, child = pty.openpty()
        command = [sys.executable, "-m", "aprefetch", "chat", *args]
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, cwd=cwd,
            preexec_fn=lambda: os.login_tty(0),
            env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str, timeout_s: float = 60) -> str:
        """Read until `pattern` appears in what is new; returns it all and forgets it."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen)):
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{pattern!r} is not in {self.seen!r}"
            if select.select([self._master], [], [], left_s)[0]:
                try:
                    self.seen += os.read(self._master, 65536).decode("utf-8", "replace")
                except OSError:  # the other side is closed
                    raise AssertionError(f"ended with {self.seen!r}") from None
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def wait(self) -> int:
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(oracle_dir: Path, tmp_path: Path) -> Iterator[Terminal]:
    path = oracle_dir / "tiny-deepseek4-mxfp4.gguf"
    made = Terminal(
        "-m", str(path), "--temp", "0", "--ignore-eos", "-n", "4000", "--history", "lines",
        cwd=tmp_path,
    )  # fmt: skip
    try:
        made.until("/quit.*\n")
        made.until("> ")
        yield made
    finally:
        made.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal, tmp_path) -> None:
    terminal.type("Hello there, my friend\n")
    terminal.until("friend\r?\n.{40}")
    terminal.type("\x03")
    terminal.until("\n> ")
    terminal.type("/save one.json\n")
    terminal.until("saved to one.json")
    messages = json.loads((tmp_path / "one.json").read_text())["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"]
    assert 10 < len(messages[1]["content"]) < 40_000
    terminal.until("> ")
    terminal.type("/reset\n")
    terminal.until("> ")
    terminal.type("/load one.json\n")
    terminal.until("2 messages")
    terminal.until("> ")
    terminal.type("And?\n")
    terminal.until("And\\?\r?\n.{10}")
    terminal.type("\x03")
    terminal.until("\n> ")
    terminal.type("/stats\n")
    reused = terminal.until(r"reused_tokens: \d+\r").split()[-1]
    assert int(reused) > 0
    terminal.until("> ")
    terminal.type("\x03")
    terminal.until("once more")
    terminal.type("\x03")
    assert terminal.wait() == 130
    assert (tmp_path / "lines").read_text().splitlines()[:2] == [
        "Hello there, my friend",
        "/save one.json",
    ]


def test_lines_can_be_recalled(terminal) -> None:
    terminal.type("/what\n")
    terminal.until("/reset starts anew")
    terminal.until("> ")
    terminal.type("\x10\n")  # Ctrl-P: the line before
    terminal.until("/reset starts anew")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.wait() == 0
