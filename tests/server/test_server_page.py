"""The live page: its data, and the page itself in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = "tiny-deepseek4-mxfp4"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


@pytest.fixture
def asked(client):
    client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=8, extra_body={"ignore_eos": True}
    )


def test_the_data_of_the_page(server, client, asked) -> None:
    live = client._client.get(server.url + "/live").json()
    assert live["model"] == MODEL
    assert live["stats"]["output_tokens"] >= 8
    assert {"vram_used_bytes", "states_bytes", "kept_states_bytes"} <= set(live["stats"]["memory"])
    step = live["last_step"]
    assert step["n_rows"] == 1
    names = {name for _, name, _, _ in step["spans"]}
    assert {"attention", "shared", "experts", "head"} <= names
    for _, _, start, duration in step["spans"]:
        assert 0 <= start <= start + duration <= step["duration_ns"]
    assert live["requests"] == []


def test_nothing_comes_from_elsewhere(server, client) -> None:
    answer = client._client.get(server.url + "/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    urls = re.findall(r"https?://[^\"'\s)]+", answer.text)
    assert urls in ([], ["http://www.w3.org/2000/svg"])  # a name, not an address
    assert len(answer.content) < 32 << 10


def browse(url: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", f"--user-data-dir={folder}", "--enable-logging=stderr",
        "--virtual-time-budget=4000", *options, url,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_in_a_browser(server, client, asked, tmp_path) -> None:
    events = client.completions.create(
        model=MODEL,
        prompt="Hello",
        max_tokens=7000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(events))  # it is held up, since nobody reads on: there is a request to show
    done = browse(server.url + "/", tmp_path, "--dump-dom")
    events.close()
    page = done.stdout
    assert re.search(rf'id="model"[^>]*>{MODEL}<', page)
    assert page.count("<rect") > 8
    assert re.search(r'id="step-about"[^>]*>1 token in [\d.]+ ms<', page)
    assert re.search(r'id="vram"[^>]*>[\d.]+ \wB / [\d.]+ \wB<', page)
    assert re.search(r"<td>generate</td><td>running</td>", page)
    assert re.search(r'id="problem" role="alert"( style="display: none;")?></div>', page)
    assert "CONSOLE" not in done.stderr, done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_with_a_key(start, tmp_path) -> None:
    with start("--api-key", "secret") as server:
        refused = browse(server.url + "/", tmp_path / "a", "--dump-dom").stdout
        assert "asks for an API key" in refused
        shown = browse(server.url + "/#key=secret", tmp_path / "b", "--dump-dom").stdout
        assert f">{MODEL}<" in shown
