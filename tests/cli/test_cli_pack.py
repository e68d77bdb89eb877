"""`pack`, `verify`, and `inspect` of a pack: text, JSON and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aprefetch.cli.main import main
from aprefetch.storage.pack.lock import pack_lock

NAME = "tiny-deepseek4-mxfp4"
ID = "671133f705cf"


@pytest.fixture
def model(oracle_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return Path(shutil.copy(oracle_dir / f"{NAME}.gguf", folder))


def run(capsys: Any, *args: str | Path) -> tuple[int, str, str]:
    code = main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out, err


def test_pack_then_reuse(model: Path, tmp_path: Path, capsys) -> None:
    out_dirs = [tmp_path / "a", tmp_path / "b"]
    args = ["pack", model, "-o", out_dirs[0], "-o", out_dirs[1]]
    paths = [out_dirs[i] / f"{NAME}-{ID}.pack-0000{i + 1}-of-00002.gguf" for i in range(2)]
    assert run(capsys, *args) == (
        0,
        f"pack built: 128 objects, 6684672 bytes\n{paths[0]}\n{paths[1]}\n",
        "",
    )
    code, out, err = run(capsys, *args, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "state": "pack reused",
        "paths": [str(p) for p in paths],
        "n_objects": 128,
        "payload_bytes": 6684672,
        "bytes_read": 0,
        "bytes_written": 0,
    }
    assert json.loads(run(capsys, *args, "--json", "--rebuild")[1])["state"] == "pack built"


def test_inspect_a_pack(model: Path, capsys) -> None:
    assert run(capsys, "pack", model)[0] == 0
    path = model.parent / f"{NAME}-{ID}.pack.gguf"
    code, out, err = run(capsys, "inspect", path)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    masked = [line[:18] + "..." if line[:4] in ("pack", "dige") else line for line in lines]
    assert masked == [
        f"part       {path}",
        lines[1][:18] + "...",
        f"bytes      {path.stat().st_size}",
        "payload    6684672, padding 131072",
        "objects    128 in 8 layers",
        "alignment  4096",
        "digests    sha256-...",
        f"model      deepseek4, fingerprint {ID}6d23695dcf978c6b5cab",
        f"                   12875424 bytes {NAME}.gguf",
        (
            "experts    layers 0-7: 16 x 52224 bytes, 53248 stored (gate 128 x 256 MXFP4, "
            "up 128 x 256 MXFP4, down 256 x 128 MXFP4)"
        ),
    ]
    facts = json.loads(run(capsys, "inspect", path, "--json")[1])
    assert facts["format_version"] == [1, 0]
    assert facts["n_objects"] == 128
    assert facts["layers"]["7"]["roles"][2] == {
        "role": "down",
        "type": "MXFP4",
        "rows": 256,
        "columns": 128,
        "n_bytes": 17408,
    }
    assert facts["source"]["names"] == [f"{NAME}.gguf"]


def test_verify_and_repair(model: Path, tmp_path: Path, capsys) -> None:
    assert run(capsys, "pack", model, "-o", tmp_path / "p")[0] == 0
    path = next((tmp_path / "p").glob("*.gguf"))
    good = "index      good (128 objects in 1 parts)\n"
    assert run(capsys, "verify", path) == (
        0,
        good + "objects    128 looked at, 6684672 bytes, 0 damaged\n",
        "",
    )
    assert run(capsys, "verify", path, "--mode", "off") == (0, good, "")
    out = run(capsys, "verify", path, "--mode", "sampled", "--sample", "5")[1]
    assert "5 looked at, 261120 bytes, 0 damaged" in out
    raw = bytearray(path.read_bytes())
    raw[-5000] ^= 0x40
    path.write_bytes(raw)
    code, out, err = run(capsys, "verify", path)
    assert (code, err) == (1, "")
    assert out.splitlines()[1:] == [
        "objects    128 looked at, 6684672 bytes, 1 damaged",
        "           layer 7, expert 15: damaged",
        "mend it with `aprefetch verify --repair`, with the model at hand (--source FILE)",
    ]
    found = json.loads(run(capsys, "verify", path, "--json")[1])
    assert (found["corrupt"], found["is_good"]) == ([[7, 15]], False)
    code, _, err = run(capsys, "verify", path, "--repair")
    assert code == 2
    assert "--source FILE" in err
    code, out, _ = run(capsys, "verify", path, "--repair", "--source", model)
    assert code == 0
    assert "layer 7, expert 15: repaired" in out
    assert run(capsys, "verify", path)[0] == 0


def test_the_wrong_model_repairs_nothing(model: Path, tmp_path: Path, capsys) -> None:
    from aprefetch import embedded

    assert run(capsys, "pack", model)[0] == 0
    path = next(model.parent.glob("*.pack.gguf"))
    before = path.read_bytes()
    code, _, err = run(capsys, "verify", path, "--repair", "--source", embedded.MODEL_PATH)
    assert code == 1
    assert "another model" in err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["pack", "absent.gguf"], 1, "no such file"),
        (["pack", "MODEL", "--alignment", "5000"], 2, "power of two"),
        (["pack", "MODEL", "--threads", "0"], 2, "--threads"),
        (["verify", "MODEL"], 1, "does not say that it is an Expert Pack"),
        (["verify", "absent"], 1, "cannot be opened"),
        (["verify", "MODEL", "--sample", "0"], 2, "--sample"),
        (["verify", "MODEL", "--repair", "--mode", "off"], 2, "--mode"),
    ],
)
def test_one_clear_line_per_error(model, args, code, text, capsys) -> None:
    args = [str(model) if a == "MODEL" else a for a in args]
    got, out, err = run(capsys, *args)
    assert (got, out) == (code, "")
    assert text in err
    assert err.count("\n") == 1
    assert len(list(model.parent.iterdir())) == 1


def test_models_that_cannot_be_run_are_refused_before_anything_is_written(
    tmp_path: Path, capsys
) -> None:
    from synthetic_gguf import write_experts_only

    path = write_experts_only(
        tmp_path / "x.gguf", n_layers=1, n_experts=2, hidden=64, width=32, seed=1
    )
    code, _, err = run(capsys, "pack", path)
    assert code == 1
    assert "not supported" in err
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def open_files(pid: int) -> list[str]:
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def test_ctrl_c_while_another_process_builds(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    lock = out / f"{NAME}-{ID}.pack.gguf.lock"
    with pack_lock(lock, lambda: None):
        command = [sys.executable, "-m", "aprefetch", "pack", str(model), "-o", str(out)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            while str(lock) not in open_files(child.pid):
                assert child.poll() is None
                time.sleep(0.01)
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert b"Traceback" not in err
    assert list(out.iterdir()) == []
