"""From a GGUF's metadata and tensors to a model's numbers and parameters, with nothing left over.

`HyperParameters` reads metadata keys and gathers all problems before it raises. `DenseLoader` gives
out tensors by name; `finish` fails if the file holds one that nobody asked for, so every dense
tensor lands in exactly one parameter and none is ignored silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aprefetch.errors import SourceError, UnsupportedModelError
from aprefetch.quant import SUPPORTED, dequantize, type_name
from aprefetch.quant.base import QuantTensor

__all__ = ["DenseLoader", "DenseSource", "HyperParameters", "TensorFacts"]

_GGML_I32 = 26


class TensorFacts(Protocol):
    """What a loader must know of a tensor before it reads it."""

    @property
    def ggml_type(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def n_bytes(self) -> int: ...


class DenseSource(Protocol):
    """The part of a model source that loading needs."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, TensorFacts]: ...
    def read_tensor(self, name: str) -> npt.NDArray[np.uint8]: ...


class HyperParameters:
    """Typed access to `<architecture>.*` keys; problems are gathered, `check()` raises them."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = architecture + "."
        self.problems: list[str] = []

    def _get(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)

    def problem(self, key: str, text: str) -> None:
        """Note that a key's value is not usable."""
        self.problems.append(f"{self._prefix}{key} {text}")

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**31
    ) -> int:
        """An integer in `low..high`; a missing key without a default is a problem."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.problem(key, "is missing")
            return low
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            self.problem(key, f"should be an integer, not {value!r:.40}")
            return low
        if not low <= value <= high:
            self.problem(key, f"is {value}; {low} to {high} can be used")
            return low
        return int(value)

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e30
    ) -> float:
        """A finite float in `low..high`."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        return self._number(key, value, low, high)

    def _number(self, key: str, value: Any, low: float, high: float) -> float:
        if value is None:
            self.problem(key, "is missing")
        elif isinstance(value, bool) or not isinstance(value, int | float | np.number):
            self.problem(key, f"should be a number, not {value!r:.40}")
        elif not (math.isfinite(value) and low <= value <= high):
            self.problem(key, f"is {value}; {low:g} to {high:g} can be used")
        else:
            return float(value)
        return max(low, 1.0)

    def boolean(self, key: str) -> bool:
        """A required boolean."""
        value = self._get(key)
        if not isinstance(value, bool | np.bool_):
            self.problem(
                key, "is missing" if value is None else f"should be true or false, not {value!r}"
            )
            return False
        return bool(value)

    def string(self, key: str, default: str) -> str:
        """A string or the default."""
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.problem(key, f"should be a string, not {value!r:.40}")
            return default
        return value

    def integers(self, key: str, at_least: int) -> list[int]:
        """An array of at least so many integers; longer ones are cut."""
        value = self._get(key)
        if not isinstance(value, np.ndarray | list | tuple):
            self.problem(key, "is missing" if value is None else "should be an array")
            return [0] * at_least
        if len(value) < at_least or (len(value) and not isinstance(value[0], int | np.integer)):
            self.problem(key, f"should hold at least {at_least} integers")
            return [0] * at_least
        return [int(v) for v in value[:at_least]]

    def per_layer(self, key: str, n: int, default: Sequence[float] | None = None) -> list[float]:
        """A number for all layers, or an array of exactly one number per layer."""
        value = self._get(key)
        if value is None and default is not None:
            return list(default)
        if isinstance(value, np.ndarray | list | tuple):
            if len(value) != n or any(not isinstance(v, int | float | np.number) for v in value):
                self.problem(key, f"should hold {n} numbers, one per layer")
                return [0.0] * n
            return [self._number(key, v, -1e30, 1e30) for v in value]
        return [self._number(key, value, -1e30, 1e30)] * n

    def check(self) -> None:
        """Raises SourceError with all problems found so far."""
        if self.problems:
            raise SourceError(
                "metadata cannot be used: " + "; ".join(self.problems),
                key=self.problems[0].split(" ")[0],
            )


class DenseLoader:
    """Reads dense tensors to a device and remembers which ones were taken."""

    def __init__(self, source: DenseSource, device: torch.device, left_unread: set[str]) -> None:
        """`left_unread` are names that are known and on purpose not read (routed experts, ...)."""
        self._source = source
        self._device = device
        self._taken: set[str] = set(left_unread)
        self.bytes_by_part: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._source.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in the file, without taking the tensor; empty if there is none."""
        facts = self._source.tensors.get(name)
        return () if facts is None else tuple(facts.shape)

    def _facts(self, name: str, shape: tuple[int, ...]) -> TensorFacts:
        facts = self._source.tensors.get(name)
        if facts is None:
            raise SourceError(
                f"tensor {name} is missing; the file is incomplete or of another "
                "architecture than its metadata says",
                key=name,
            )
        if name in self._taken:
            raise SourceError(f"tensor {name} is used twice", key=name)
        if tuple(facts.shape) != shape:
            raise SourceError(
                f"tensor {name} has shape {list(facts.shape)}, but the metadata ask for "
                f"{list(shape)}",
                key=name,
            )
        self._taken.add(name)
        return facts

    def _read(self, name: str, facts: TensorFacts, part: str) -> Tensor:
        raw = torch.from_numpy(self._source.read_tensor(name)).to(self._device)
        self.bytes_by_part[part] = self.bytes_by_part.get(part, 0) + facts.n_bytes
        return raw

    def _check_type(self, name: str, facts: TensorFacts) -> None:
        if facts.ggml_type not in SUPPORTED:
            raise UnsupportedModelError(
                f"tensor {name} has type {type_name(facts.ggml_type)}, which is not supported; "
                "convert it to one of " + ", ".join(sorted(type_name(t) for t in SUPPORTED))
            )

    def matrix(
        self, name: str, n_out: int, n_in: int, part: str, *, n_stacked: int | None = None
    ) -> QuantTensor:
        """A weight `[n_out, n_in]`, kept in the file's encoding.

        With `n_stacked` the file holds `[n_stacked, n_out, n_in]` and the result has the matrices
        below each other, `[n_stacked * n_out, n_in]`.
        """
        facts = self._facts(name, (n_out, n_in) if n_stacked is None else (n_stacked, n_out, n_in))
        n_out *= n_stacked or 1
        self._check_type(name, facts)
        raw = self._read(name, facts, part).view(n_out, -1)
        return QuantTensor(raw, facts.ggml_type, n_out, n_in)

    def values(self, name: str, shape: tuple[int, ...], part: str) -> Tensor:
        """A small tensor as float32 (norms, biases, scales)."""
        facts = self._facts(name, shape)
        self._check_type(name, facts)
        raw = self._read(name, facts, part)
        rows = raw.view(math.prod(shape[:-1]), -1)
        return dequantize(rows, facts.ggml_type, shape[-1]).reshape(shape).contiguous()

    def integers(self, name: str, shape: tuple[int, ...], part: str) -> npt.NDArray[np.int32]:
        """An I32 table, kept in host memory."""
        facts = self._facts(name, shape)
        if facts.ggml_type != _GGML_I32:
            raise UnsupportedModelError(
                f"tensor {name} has type {type_name(facts.ggml_type)}; I32 is needed"
            )
        table = self._source.read_tensor(name).view(np.int32).reshape(shape)
        self.bytes_by_part[part] = self.bytes_by_part.get(part, 0) + facts.n_bytes
        return table

    def finish(self) -> None:
        """Raises SourceError if the file holds dense tensors that no parameter took."""
        left = sorted(name for name in self._source.tensors if name not in self._taken)
        if left:
            shown = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            raise SourceError(
                f"{len(left)} tensors have no place in this architecture: {shown}", key=left[0]
            )
