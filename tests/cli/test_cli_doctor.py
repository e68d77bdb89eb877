"""`aprefetch doctor` tells what is there, measures on request, and refuses a wrong path."""

from __future__ import annotations

import errno
import json

import pytest

from aprefetch import embedded
from aprefetch.cli.main import main


def test_it_looks_at_everything(tmp_path, capsys) -> None:
    assert main(["doctor", str(tmp_path), str(embedded.MODEL_PATH), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in out["findings"]]
    assert names[:6] == ["software", "host", "device", "pinning", "io_uring", "kernels"]
    assert names[6:] == ["direct I/O"] * 2
    assert out["findings"][7]["path"] == str(embedded.MODEL_PATH)
    assert list(tmp_path.iterdir()) == [], "the scratch file is gone"


def test_it_measures_on_request(capsys) -> None:
    assert main(["doctor", str(embedded.MODEL_PATH), "--measure", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    reading = next(one for one in findings if one["name"] == "reading")
    assert reading["bytes_per_s"] > 0
    assert reading["queue_depth"] in (1, 4, 8, 16)


def test_refused_direct_io_comes_with_advice(tmp_path, capsys, monkeypatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("aprefetch.doctor.os.preadv", refuse)
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no (Invalid argument)" in out
    assert "page cache" in out


def test_a_path_that_is_nothing(tmp_path, capsys) -> None:
    assert main(["doctor", str(tmp_path / "missing.gguf")]) == 1
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["doctor", "--nonsense"]])
def test_wrong_usage(args) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
