"""Where oracle files that are too large for the repository may lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def oracle_file(name: str) -> Path:
    """`tests/data/oracle`, the folder named by ORACLE_DIR, or `../shared/oracle`; or skip."""
    named = os.environ.get("ORACLE_DIR")
    folders = [ROOT / "tests" / "data" / "oracle", ROOT.parent / "shared" / "oracle"]
    if named:
        folders.insert(1, Path(named))
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    pytest.skip(f"{name} is not there; name its folder in ORACLE_DIR")
