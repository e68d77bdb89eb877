"""Everything here needs a CUDA device and Triton's compiler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "kernels"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(missing)


@pytest.fixture(scope="session", autouse=True)
def _context() -> None:
    """The driver opens devices and threads once; they are not what a test leaves behind."""
    if torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()
        torch.cuda.Stream()
