"""The hot list: which objects were worth their room, for the next run to begin with.

A small JSON file beside nothing else: `{"format", "version", "model", "experts": [[layer, expert],
...]}`, the warmest first. It is advice and no more: a list that is missing, damaged, of another
model or out of range is passed over with a note in the log, and cannot change a token.
`Coordinator.hottest` makes the list, `Coordinator.warm` follows it. Both functions here block.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from aprefetch.types import ExpertKey

__all__ = ["load_hot_list", "save_hot_list"]

_log = logging.getLogger(__name__)

_FORMAT, _VERSION = "aprefetch-hot-list", 1
_MAX_BYTES = 64 << 20  # a list of a million objects is smaller


def save_hot_list(path: Path, model: str, keys: Sequence[ExpertKey]) -> None:
    """Write the list, whole or not at all. `model` tells models apart.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(
        {"format": _FORMAT, "version": _VERSION, "model": model, "experts": [list(k) for k in keys]}
    )
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def load_hot_list(path: Path, model: str) -> list[ExpertKey]:
    """The list, or an empty one if it is of no use. Never raises for what the file holds."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("the file is too large")
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError("not a hot list")
        if found.get("version") != _VERSION:
            raise ValueError(f"version {found.get('version')!r} is unknown")
        if found.get("model") != model:
            raise ValueError("it belongs to another model")
        keys = [ExpertKey(layer, expert) for layer, expert in found["experts"]]
        if not all(type(number) is int for key in keys for number in key):
            raise ValueError("experts are pairs of integers")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _log.warning("hot list %s is ignored: %s", path, error)
        return []
    return keys
