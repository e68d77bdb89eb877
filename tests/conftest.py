"""Fixtures of general use."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from aprefetch.pipeline import reader as reader_module
from aprefetch.pipeline.io.uring import why_refused

try:
    import uvloop
except ImportError:  # not on Windows
    uvloop = None

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "models"))  # helpers that several rooms' tests import
sys.path.insert(0, str(TESTS.parent / "tools"))


# APREFETCH_TEST_READER=threads, =workers or =io_uring: what readers are made of, where a test does
# not say.
# (Wrappers that must see every read take threads in any case.)
READER = os.environ.pop("APREFETCH_TEST_READER", "")
if READER in ("threads", "workers"):
    reader_module.AUTO = (READER, "threads")
elif READER == "io_uring":
    assert (refusal := why_refused()) is None, refusal
elif READER:
    raise ValueError(f"APREFETCH_TEST_READER={READER!r}: not 'threads', 'workers' or 'io_uring'")

# Tensors are tiny here: torch's own threads would only get in each other's way.
torch.set_num_threads(1)

if uvloop is not None:
    # uvloop keeps one pipe for the whole process; open it before tests count descriptors.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The pipeline's and the runtime's own tests run on both event loops."""
    both = item.path.parent.name == "pipeline" or item.path.name.startswith("test_runtime")
    if both and uvloop is not None:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    """The oracle files (tests/data/oracle/README.md says what they hold)."""
    return TESTS / "data" / "oracle"


def _our_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("aprefetch")}


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.fixture(autouse=True)
def nothing_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread of ours and no descriptor outlives a test."""
    threads, n_descriptors = _our_threads(), _descriptors()
    yield
    deadline_s = time.monotonic() + 2
    while (_our_threads() - threads or _descriptors() > n_descriptors) and (
        time.monotonic() < deadline_s
    ):
        gc.collect()  # sources that tests left open close when they are collected
        time.sleep(0.01)
    left = sorted(t.name for t in _our_threads() - threads)
    assert not left, f"threads left over: {left}"
    assert _descriptors() <= n_descriptors, "descriptors left over"
