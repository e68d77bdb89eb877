"""Where the bytes of every routed expert lie, and how to read them.

`ExpertSource` is what the pipeline knows; `GgufExperts` serves experts straight from the GGUF: a
layer's gate, up and down matrices are three stacked tensors and expert e is slice e of each, so one
object is three aligned reads whose ragged edges stay in the landing buffer. The Expert Pack will
be another `ExpertSource`, with one read per object. Plans are computed on demand and not kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from aprefetch.errors import ConfigError, SourceError, UnsupportedModelError
from aprefetch.storage.source import ModelSource
from aprefetch.storage.tensors import TensorInfo
from aprefetch.types import (
    ALIGNMENT,
    ROLES,
    AlignedRead,
    ExpertKey,
    LayerLayout,
    Piece,
    ReadPlan,
    Role,
    RoleLayout,
)

__all__ = ["ChecksObjects", "ExpertSource", "GgufExperts"]

_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.(ffn_\w*_exps\b.*)", re.DOTALL)
_NAMES: dict[str, Role] = {f"ffn_{role}_exps.weight": role for role in ROLES}


class ExpertSource(Protocol):
    """Routed experts as byte ranges of files. Immutable; every method is cheap and never blocks."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files; `AlignedRead.file` is an index into this."""
        ...

    @property
    def layers(self) -> Mapping[int, LayerLayout]:
        """Layers that have routed experts, in ascending order."""
        ...

    @property
    def alignment(self) -> int:
        """Bytes: every read's offset and length, and its place in the landing buffer."""
        ...

    @property
    def tensor_names(self) -> frozenset[str]:
        """Tensors of the model file that hold these experts, so are no dense weights."""
        ...

    def read_plan(self, key: ExpertKey) -> ReadPlan:
        """How to bring one object from disk to a device slot."""
        ...

    def max_landing_bytes(self, layer: int) -> int:
        """The largest `ReadPlan.landing_bytes` among the layer's experts."""
        ...


@dataclass(frozen=True, slots=True)
class _Slices:
    """One stacked tensor: expert e lies at `offset + e * n_bytes` of file `file`."""

    file: int
    offset: int
    n_bytes: int
    device_offset: int


@runtime_checkable
class ChecksObjects(Protocol):
    """A source that can tell whether an object's bytes are right when they have landed."""

    def needs_check(self, key: ExpertKey) -> bool:
        """Must the object be checked before it is published? Cheap."""
        ...

    def check_or_restore(self, key: ExpertKey, buffer: memoryview) -> bool:
        """Compare a landed object with its digest; true if it had to be replaced. Blocks.

        Raises:
            PackCorruptError: it is corrupt and could not be replaced.
        """
        ...


class GgufExperts:
    """An `ExpertSource` over a GGUF or a set of shards.

    Args:
        source: the open model.
        layers: the model's own layer numbers to serve; others (next-token blocks) are left unread.
            Layers without routed experts are allowed.
        alignment: bytes, a power of two from 512.

    Raises:
        UnsupportedModelError: experts with biases, scales or fused gate and up; lists all problems.
        SourceError: a role is missing or shapes contradict one another; lists all problems.
        ConfigError: `alignment` is no power of two or too small.
    """

    def __init__(
        self, source: ModelSource, layers: Iterable[int], *, alignment: int = ALIGNMENT
    ) -> None:
        if alignment < 512 or alignment & (alignment - 1):
            raise ConfigError(f"alignment is {alignment}; give a power of two from 512")
        self.paths: tuple[Path, ...] = source.paths
        self.alignment = alignment
        found, problems = _find_stacks(source, set(layers))
        if problems:
            raise UnsupportedModelError(problems)
        self.layers: dict[int, LayerLayout] = {}
        self._slices: dict[int, tuple[_Slices, ...]] = {}
        for layer in sorted(found):
            problem = _contradiction(layer, found[layer])
            if problem is not None:
                problems.append(problem)
                continue
            layout = _layout(layer, found[layer])
            self.layers[layer] = layout
            self._slices[layer] = tuple(
                _Slices(info.file, info.offset, role.n_bytes, at)
                for role, at in zip(layout.roles, layout.device_offsets, strict=True)
                for info in (found[layer][role.role],)
            )
        if problems:
            raise SourceError("; ".join(problems), path=source.paths[0])
        self.tensor_names: frozenset[str] = frozenset(
            info.name for stacks in found.values() for info in stacks.values()
        )
        self._max_landing = {
            layer: self._measure_landing(self.layers[layer].n_experts, slices)
            for layer, slices in self._slices.items()
        }

    def read_plan(self, key: ExpertKey) -> ReadPlan:
        """Three aligned reads, and where in the landing buffer each role then begins.

        Raises:
            KeyError: the layer has no routed experts, or not this one.
        """
        layer, expert = key
        if not 0 <= expert < self.layers[layer].n_experts:
            raise KeyError(key)
        alignment = self.alignment
        landing = 0
        reads, pieces = [], []
        for part in self._slices[layer]:
            start = part.offset + expert * part.n_bytes
            end = start + part.n_bytes
            edge = start % alignment
            needed = end - start + edge
            length = -(-needed // alignment) * alignment
            reads.append(
                AlignedRead(
                    file=part.file,
                    offset=start - edge,
                    length=length,
                    needed=needed,
                    landing_offset=landing,
                )
            )
            pieces.append(
                Piece(
                    landing_offset=landing + edge,
                    device_offset=part.device_offset,
                    n_bytes=part.n_bytes,
                )
            )
            landing += length
        return ReadPlan(key=key, reads=tuple(reads), pieces=tuple(pieces), landing_bytes=landing)

    def max_landing_bytes(self, layer: int) -> int:
        """The largest `ReadPlan.landing_bytes` among the layer's experts; `KeyError` if none."""
        return self._max_landing[layer]

    def _measure_landing(self, n_experts: int, slices: tuple[_Slices, ...]) -> int:
        total = np.zeros(n_experts, dtype=np.int64)
        for part in slices:
            edge = (part.offset + np.arange(n_experts, dtype=np.int64) * part.n_bytes) % (
                self.alignment
            )
            total += -(-(edge + part.n_bytes) // self.alignment) * self.alignment
        return int(total.max())


def _find_stacks(
    source: ModelSource, layers: set[int]
) -> tuple[dict[int, dict[Role, TensorInfo]], list[str]]:
    """Stacked tensors by layer and role, and what is said of experts but not understood."""
    found: dict[int, dict[Role, TensorInfo]] = {}
    problems: list[str] = []
    for name in source.tensors:
        if "_exps" not in name:
            continue
        match = _EXPERT_TENSOR.fullmatch(name)
        if match is None or int(match[1]) not in layers:
            continue
        role = _NAMES.get(match[2])
        if role is not None:
            found.setdefault(int(match[1]), {})[role] = source.tensors[name]
        elif "gate_up" in match[2]:
            problems.append(f"tensor {name!r} fuses gate and up, which is not supported")
        elif match[2].endswith(".bias"):
            problems.append(f"tensor {name!r} is a bias of experts, which is not supported")
        else:
            problems.append(f"tensor {name!r} is an unknown part of routed experts")
    return found, problems


def _contradiction(layer: int, stacks: dict[Role, TensorInfo]) -> str | None:
    missing = [role for role in ROLES if role not in stacks]
    if missing:
        return f"layer {layer} has routed experts but no tensor for {' and '.join(missing)}"
    for info in stacks.values():
        if len(info.shape) != 3:
            return f"tensor {info.name!r} should have 3 dimensions, has {len(info.shape)}"
    gate, up, down = (stacks[role] for role in ROLES)
    if not gate.shape[0] == up.shape[0] == down.shape[0]:
        counts = ", ".join(f"{role} {stacks[role].shape[0]}" for role in ROLES)
        return f"layer {layer}: the roles disagree on the number of experts ({counts})"
    if gate.shape != up.shape:
        return f"layer {layer}: gate {gate.shape} and up {up.shape} differ in shape"
    if down.shape[2] != gate.shape[1]:
        return (
            f"layer {layer}: down takes {down.shape[2]} values, but gate and up give "
            f"{gate.shape[1]}"
        )
    return None


def _layout(layer: int, stacks: dict[Role, TensorInfo]) -> LayerLayout:
    n_experts = stacks["gate"].shape[0]
    return LayerLayout(
        layer=layer,
        n_experts=n_experts,
        roles=tuple(
            RoleLayout(
                role=role,
                ggml_type=stacks[role].ggml_type,
                n_out=stacks[role].shape[1],
                n_in=stacks[role].shape[2],
                n_bytes=stacks[role].n_bytes // n_experts,
            )
            for role in ROLES
        ),
    )
