"""The launchers of the two large models, as a user runs them, on tiny files of the same kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from make_tiny_gguf import write_tiny_deepseek4
from make_tiny_kimi import TINY_LINEAR, KimiConfig, write_kimi

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMPT, N_TOKENS = "hello there", 6


def launched(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


def checked(name: str, path: Path, *args: object) -> dict[str, object]:
    """The JSON line of a run that went well, after what every run must show."""
    fixed = ("--prompt", PROMPT, "--max-new-tokens", N_TOKENS, "--ignore-eos")
    done = launched(name, "--gguf", path, *fixed, *args)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(PROMPT)
    for row in ("prefill", "decode", "hit rate", "per token", "ceiling"):
        assert f"\n{row} " in done.stdout
    facts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert facts["completion_tokens"] == N_TOKENS
    assert facts["finish_reason"] == "length"
    assert facts["fallback_count"] == facts["io_errors"] == 0
    return facts


def test_deepseek_v4_flash(tmp_path: Path) -> None:
    files = write_tiny_deepseek4(tmp_path / "m.gguf", shards=3)
    facts = checked("deepseek_v4_flash", files[1], "--gbps", "3.5")
    assert facts["architecture"] == "deepseek4"
    assert facts["ssd_gbps"] == 3.5


def test_kimi_k3_with_small_budgets(tmp_path: Path) -> None:
    """From the last of four shards; every token picks all of its experts in every routed layer."""
    path = write_kimi(tmp_path / "m.gguf", KimiConfig(n_layers=5), shards=4)[3]
    facts = checked("kimi_k3", path, "--vram-budget", "2MiB", "--ram-budget", "0")
    n_run = facts["prompt_tokens"] + N_TOKENS - 1  # type: ignore[operator]
    assert facts["routed_layers"] == 4
    assert facts["routed_calls_per_layer"] == [4 * n_run] * 2
    assert facts["bytes_read_per_token"] > 0  # type: ignore[operator]
    assert facts["ceiling_tokens_per_s"] > 0  # type: ignore[operator]


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    done = launched("kimi_k3", "--gguf", tmp_path / "none.gguf")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = write_kimi(tmp_path / "m.gguf", TINY_LINEAR)[0]
    done = launched("deepseek_v4_flash", "--gguf", path)
    assert done.returncode == 1
    assert "is kimi-linear, not DeepSeek-V4-Flash" in done.stderr
