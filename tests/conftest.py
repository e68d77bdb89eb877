"""Fixtures of general use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "models"))  # helpers that several rooms' tests import
sys.path.insert(0, str(TESTS.parent / "tools"))


@pytest.fixture(scope="session")
def oracle_dir() -> Path:
    """The oracle files (tests/data/oracle/README.md says what they hold)."""
    return TESTS / "data" / "oracle"
