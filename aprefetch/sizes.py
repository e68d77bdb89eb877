"""Values of options: sizes in bytes, and checks that report everything wrong at once."""

from __future__ import annotations

import math
import re
from typing import Any

from aprefetch.errors import ConfigError

__all__ = ["Checks", "Size", "parse_bytes"]

Size = int | str
"""Bytes, or text such as "20GiB", "512 MiB", "1.5GB"; where noted also "auto"."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: Size) -> int:
    """A size in bytes.

    Args:
        value: Bytes, or a number with a unit: B, kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB,
            TiB and the bare letters K, M, G, T are powers of 1024. Case does not matter.

    Raises:
        ConfigError: Not a size, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"{value} is negative; a size is at least 0 bytes")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(
            f"{value!r} is not a size; write bytes or e.g. '20GiB', '512MiB', '1.5GB'"
        )
    number, unit = match[1].replace("_", ""), _UNITS[match[2].lower()]
    return int(number) * unit if "." not in number else round(float(number) * unit)


class Checks:
    """Collects what is wrong with a group of options."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def whole(self, name: str, value: Any, low: int, high: int | None = None) -> None:
        """`value` must be an integer of `low` to `high`."""
        if type(value) is not int:
            self.problems.append(f"{name} must be a whole number, got {value!r}")
        elif value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            self.problems.append(f"{name} must be {wanted}, got {value}")

    def size(self, name: str, value: Any) -> Any:
        """`value` as bytes; "auto" and what cannot be parsed stay as they are."""
        if value == "auto":
            return value
        try:
            return parse_bytes(value)
        except ConfigError as error:
            self.problems.append(f"{name}: {error}")
            return value

    def seconds(self, name: str, value: Any) -> None:
        """`value` must be None or a number above 0."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < math.inf):
            self.problems.append(f"{name} must be a number of seconds above 0, got {value!r}")

    def flag(self, name: str, value: Any) -> None:
        """`value` must be a bool."""
        if not isinstance(value, bool):
            self.problems.append(f"{name} must be True or False, got {value!r}")

    def one_of(self, name: str, value: Any, choices: tuple[Any, ...]) -> None:
        """`value` must be one of `choices`."""
        if value not in choices:
            names = ", ".join(map(repr, choices))
            self.problems.append(f"{name} must be one of {names}, got {value!r}")

    def finish(self) -> None:
        """Raise what was collected."""
        if self.problems:
            raise ConfigError(self.problems)
