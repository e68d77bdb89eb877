"""Routing traces: what routers picked, what was guessed, where it lay, and where the time went.

A `RoutingRecorder` is fed by the step driver, on the loop's thread; `RoutingTrace` is what it
becomes: NumPy arrays in one compressed `.npz` that `numpy.load` opens without this package.

| array | one row per | fields |
|---|---|---|
| `steps` | step of the engine | `n_rows` (tokens in the step), `start_ns`, `end_ns` |
| `calls` | step and routed layer | `step`, `layer`, `n_rows`, `first_pick`, `n_picks`, |
|         |                       | `first_guess`, `n_guesses`, and nanoseconds: `dense_ns` |
|         |                       | (up to the router), `guess_ns` (early routers), `shared_ns`, |
|         |                       | `experts_ns` (routed experts), `wait_ns` (stood still) |
| `picks` | expert of a call, ascending | `expert`, `n_rows` (rows that picked it), `tier` |
| `guesses` | guess, made during a call | `layer` it is for, `expert`, `rank` (0: likeliest) |
| `loads` | read or upload of an object | `layer`, `expert`, `what` (0 read, 1 upload), `kind` |
|         |                             | (0 demand, 1 exact, 2 guess), `n_bytes`, `start_ns`, |
|         |                             | `end_ns` |
| `meta` | trace | JSON text: format version, model, budgets, options, bytes of an object by layer |

`tier` is where the object was when its layer asked for it: 0 on the device, 1 in host RAM, 2 being
read, 3 on the SSD. A guess made during the call of layer n for layer m has depth m - n. Times count
from the making of the recorder.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aprefetch.errors import ConfigError

__all__ = ["TIERS", "RoutingRecorder", "RoutingTrace"]

FORMAT_VERSION = 1
TIERS = ("device", "RAM", "being read", "SSD")

STEP = np.dtype([("n_rows", "<u4"), ("start_ns", "<i8"), ("end_ns", "<i8")])
CALL = np.dtype(
    [
        ("step", "<u4"),
        ("layer", "<u2"),
        ("n_rows", "<u4"),
        ("first_pick", "<u4"),
        ("n_picks", "<u2"),
        ("first_guess", "<u4"),
        ("n_guesses", "<u2"),
        ("dense_ns", "<u4"),
        ("guess_ns", "<u4"),
        ("shared_ns", "<u4"),
        ("experts_ns", "<u4"),
        ("wait_ns", "<u4"),
    ]
)
PICK = np.dtype([("expert", "<u2"), ("n_rows", "<u2"), ("tier", "u1")])
GUESS = np.dtype([("layer", "<u2"), ("expert", "<u2"), ("rank", "<u2")])
LOAD = np.dtype(
    [
        ("layer", "<u2"),
        ("expert", "<u2"),
        ("what", "u1"),
        ("kind", "u1"),
        ("n_bytes", "<u4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)
_ARRAYS = {"steps": STEP, "calls": CALL, "picks": PICK, "guesses": GUESS, "loads": LOAD}
_KINDS = {"demand": 0, "exact": 1, "guess": 2}
_MOST_NS = 2**32 - 1  # a time field holds 4.29 s; longer ones stay at that
_MOST_ROWS = 2**16 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """See the module's text for the arrays."""

    meta: Mapping[str, Any]
    steps: npt.NDArray[Any]
    calls: npt.NDArray[Any]
    picks: npt.NDArray[Any]
    guesses: npt.NDArray[Any]
    loads: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, LOAD))

    @property
    def layers(self) -> list[int]:
        """Layers that were called, ascending."""
        return [int(layer) for layer in np.unique(self.calls["layer"])]

    def picked(self, call: int) -> npt.NDArray[Any]:
        """Rows of `picks` that belong to a call."""
        row = self.calls[call]
        return self.picks[int(row["first_pick"]) : int(row["first_pick"]) + int(row["n_picks"])]

    def guessed(self, call: int) -> npt.NDArray[Any]:
        """Rows of `guesses` that were made during a call."""
        row = self.calls[call]
        first = int(row["first_guess"])
        return self.guesses[first : first + int(row["n_guesses"])]

    def without_loads(self) -> RoutingTrace:
        """The same without `loads`: all that replaying needs, in a third of the bytes."""
        return RoutingTrace(
            meta=self.meta,
            steps=self.steps,
            calls=self.calls,
            picks=self.picks,
            guesses=self.guesses,
        )

    def save(self, path: str | Path) -> None:
        """Write the trace; the file appears whole or not at all. Blocks.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, meta=np.array(json.dumps(dict(self.meta))), **arrays)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> RoutingTrace:
        """Read a trace.

        Raises:
            ConfigError: not there, not a routing trace, damaged, or of another format version.
        """
        try:
            if not zipfile.is_zipfile(path):
                Path(path).stat()  # not there is an error of its own
                raise ConfigError(f"{path}: not a routing trace")
            with np.load(path, allow_pickle=False) as file:
                meta = json.loads(str(file["meta"]))
                arrays = {name: file[name] for name in _ARRAYS}
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path}: not a routing trace ({error})") from error
        if not isinstance(meta, dict) or meta.get("format") != FORMAT_VERSION:
            raise ConfigError(f"{path}: not a routing trace of format {FORMAT_VERSION}")
        for name, dtype in _ARRAYS.items():
            if arrays[name].dtype != dtype or arrays[name].ndim != 1:
                raise ConfigError(f"{path}: array {name!r} has fields this version does not know")
        trace = cls(meta=meta, **arrays)
        trace._check(path)
        return trace

    def _check(self, path: str | Path) -> None:
        for first, n, of in (
            ("first_pick", "n_picks", self.picks),
            ("first_guess", "n_guesses", self.guesses),
        ):
            ends = self.calls[first].astype(np.int64) + self.calls[n]
            if len(ends) and ends.max() > len(of):
                raise ConfigError(f"{path}: calls refer to rows that are not there ({n})")
        if len(self.calls) and int(self.calls["step"].max()) >= len(self.steps):
            raise ConfigError(f"{path}: calls refer to steps that are not there")


class RoutingRecorder:
    """Notes the calls of a run. Bounded: after `max_calls` calls nothing more is noted.

    All methods belong to the loop's thread. A step that breaks off leaves no trace.

    Args:
        meta: JSON-ready facts about the run.
        max_calls: most (step, layer) pairs kept.
    """

    def __init__(self, meta: Mapping[str, Any] | None = None, max_calls: int = 1_000_000) -> None:
        self.meta = dict(meta or {})
        self.n_dropped = 0
        self.origin_ns = time.perf_counter_ns()
        self._max_calls = max_calls
        self._steps: list[tuple[int, int, int]] = []
        self._calls: list[list[int]] = []
        self._picks: list[tuple[int, int, int]] = []
        self._guesses: list[tuple[int, int, int]] = []
        self._marks = (0, 0, 0)
        self._n_rows = 0
        self._start_ns = 0

    def begin_step(self, n_rows: int, start_ns: int) -> None:
        """A step over `n_rows` tokens begins."""
        self._marks = (len(self._calls), len(self._picks), len(self._guesses))
        self._n_rows, self._start_ns = n_rows, start_ns

    def call(
        self,
        layer: int,
        experts: Sequence[int],
        n_rows: Iterable[int],
        tiers: Iterable[int],
        dense_ns: int,
    ) -> None:
        """A layer asks for `experts`, ascending; `n_rows` and `tiers` belong to them."""
        first = len(self._picks)
        self._picks += zip(experts, n_rows, tiers, strict=True)
        row = [len(self._steps), layer, self._n_rows, first, len(experts)]
        self._calls.append([*row, len(self._guesses), 0, dense_ns, 0, 0, 0, 0])

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """The early router of `layer` named `experts`, the likeliest first."""
        self._guesses += [(layer, expert, rank) for rank, expert in enumerate(experts)]
        self._calls[-1][6] += len(experts)

    def times(
        self, *, guess_ns: int = 0, shared_ns: int = 0, experts_ns: int = 0, wait_ns: int = 0
    ) -> None:
        """Add times to the current call."""
        row = self._calls[-1]
        row[8] += guess_ns
        row[9] += shared_ns
        row[10] += experts_ns
        row[11] += wait_ns

    def end_step(self, end_ns: int) -> None:
        """The step is complete."""
        if len(self._calls) > self._max_calls:
            self.n_dropped += len(self._calls) - self._marks[0]
            self.abandon_step()
            return
        origin = self.origin_ns
        self._steps.append((self._n_rows, self._start_ns - origin, end_ns - origin))

    def abandon_step(self) -> None:
        """The step broke off: forget its calls."""
        n_calls, n_picks, n_guesses = self._marks
        del self._calls[n_calls:], self._picks[n_picks:], self._guesses[n_guesses:]

    def trace(
        self, loads: Iterable[tuple[Any, ...]] = (), meta: Mapping[str, Any] | None = None
    ) -> RoutingTrace:
        """What was recorded so far, complete steps only.

        Args:
            loads: `Tracer.loads()` of the same run.
            meta: more facts.
        """
        n_calls = len(self._calls)
        while n_calls and self._calls[n_calls - 1][0] >= len(self._steps):
            n_calls -= 1
        calls = self._calls[:n_calls]
        n_picks = calls[-1][3] + calls[-1][4] if calls else 0
        n_guesses = calls[-1][5] + calls[-1][6] if calls else 0
        return RoutingTrace(
            meta={
                "format": FORMAT_VERSION,
                "n_dropped": self.n_dropped,
                **self.meta,
                **(meta or {}),
            },
            steps=np.array(self._steps, STEP),
            calls=np.array(
                [(*row[:7], *(min(t, _MOST_NS) for t in row[7:])) for row in calls], CALL
            ),
            picks=np.array(
                [(e, min(n, _MOST_ROWS), tier) for e, n, tier in self._picks[:n_picks]], PICK
            ),
            guesses=np.array(self._guesses[:n_guesses], GUESS),
            loads=self._loads(loads),
        )

    def _loads(self, loads: Iterable[tuple[Any, ...]]) -> npt.NDArray[Any]:
        origin = self.origin_ns
        return np.array(
            [
                (*key, what == "upload", _KINDS[kind], n_bytes, start - origin, end - origin)
                for what, start, end, key, n_bytes, kind in loads
            ],
            LOAD,
        )
