"""The examples run as they are, without arguments, and stay short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHERS = {"deepseek_v4_flash", "kimi_k3", "launcher"}  # they need a model: `test_launchers`
EXAMPLES = [
    path
    for path in sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
    if path.stem not in LAUNCHERS
]


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"stream", "gather"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 65
    done = subprocess.run(
        [sys.executable, "-W", "error", path], capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Once upon a time" in done.stdout
    assert len(done.stdout) > 100
