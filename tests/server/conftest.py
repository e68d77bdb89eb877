"""Real servers: `aprefetch serve` in a process of its own, and an app inside the test."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest


class Server:
    """A running `aprefetch serve`."""

    def __init__(self, *args: str) -> None:
        command = [sys.executable, "-m", "aprefetch", "serve", "--port", "0", *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"on (http://\S+)", line):
                self.url = found[1]
                self.port = int(self.url.rpartition(":")[2])
                return
        self.wait()
        raise AssertionError(f"no server: {''.join(self.log)}")

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, **options}
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", **options)

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Ask it to end; returns its exit code."""
        self.process.send_signal(signum)
        return self.wait()

    def wait(self) -> int:
        assert self.process.stderr is not None
        self.log += self.process.stderr.readlines()
        self.process.stderr.close()
        return self.process.wait(30)


@contextmanager
def serving(*args: str) -> Iterator[Server]:
    """A server for the length of a `with`."""
    server = Server(*args)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.wait()


@pytest.fixture(autouse=True)
def nothing_left_over() -> None:
    """Clients keep connections open from test to test; what a server leaves, its own tests ask."""


@pytest.fixture(scope="session")
def model_path(oracle_dir: Path) -> Path:
    return oracle_dir / "tiny-deepseek4-mxfp4.gguf"


@pytest.fixture(scope="session")
def start(model_path: Path) -> Callable[..., Any]:
    """Starts a server of the tiny model."""
    return lambda *args: serving("-m", str(model_path), *args)


@pytest.fixture(scope="module")
def server(start: Callable[..., Any]) -> Iterator[Server]:
    with start("--max-requests", "8") as running:
        yield running
        assert running.stop() == 0, "".join(running.log)
        bad = [line for line in running.log if "Traceback" in line or "never retrieved" in line]
        assert bad == [], "".join(running.log)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
