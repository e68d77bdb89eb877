"""What a model file holds, from its header alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aprefetch import embedded
from aprefetch.models.registry import known_architectures
from aprefetch.quant import SUPPORTED, type_name
from aprefetch.storage import GgufExperts, TensorInfo, open_source

__all__ = ["Inspection", "inspect"]

_SHOWN = 8  # elements of an array that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Facts about a model file. Large arrays of the metadata are described, not decoded."""

    paths: tuple[Path, ...]
    n_bytes: int
    architecture: str
    is_supported: bool
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]
    expert_layers: Mapping[int, str]

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """Bytes of tensors by type name."""
        total: Counter[str] = Counter()
        for info in self.tensors:
            total[type_name(info.ggml_type)] += info.n_bytes
        return dict(total.most_common())

    def to_dict(self, *, tensors: bool = False) -> dict[str, Any]:
        """JSON-ready; `tensors` adds one entry per tensor."""
        out: dict[str, Any] = {
            "paths": [str(path) for path in self.paths],
            "n_bytes": self.n_bytes,
            "architecture": self.architecture,
            "is_supported": self.is_supported,
            "n_tensors": len(self.tensors),
            "bytes_by_type": self.bytes_by_type,
            "unsupported_types": self.unsupported_types,
            "expert_layers": {str(k): v for k, v in self.expert_layers.items()},
            "metadata": dict(self.metadata),
        }
        if tensors:
            out["tensors"] = [
                {
                    "name": info.name,
                    "type": type_name(info.ggml_type),
                    "shape": list(info.shape),
                    "n_bytes": info.n_bytes,
                    "file": info.file,
                    "offset": info.offset,
                }
                for info in self.tensors
            ]
        return out

    @property
    def unsupported_types(self) -> list[str]:
        """Types of tensors that cannot be computed with (index tables are no weights)."""
        found = {info.ggml_type for info in self.tensors} - set(SUPPORTED)
        return sorted(name for i in found if not (name := type_name(i)).startswith(("I32", "I64")))

    def lines(self, *, tensors: bool = False) -> list[str]:
        """For people."""
        known = "supported" if self.is_supported else "NOT supported"
        out = [f"file       {path}" for path in self.paths]
        out += [
            f"bytes      {self.n_bytes}",
            f"arch       {self.architecture} ({known})",
            f"tensors    {len(self.tensors)}",
            *(f"           {n:>16} bytes {name}" for name, n in self.bytes_by_type.items()),
        ]
        groups: dict[str, list[int]] = {}
        for layer, text in self.expert_layers.items():
            groups.setdefault(text, []).append(layer)
        for text, layers in groups.items():
            out.append(f"experts    layers {_ranges(layers)}: {text}")
        out += [f"{key} = {value}" for key, value in self.metadata.items()]
        if tensors:
            for info in self.tensors:
                shape = " x ".join(map(str, info.shape))
                out.append(f"{info.name}  {type_name(info.ggml_type)}  {shape}")
        return out


def inspect(path: str | os.PathLike[str] | None = None) -> Inspection:
    """Look into a GGUF file or any shard of a set; None is the embedded model. Blocks.

    Raises:
        SourceError: the file is missing, or no sound GGUF.
    """
    with open_source(embedded.MODEL_PATH if path is None else path) as source:
        metadata = {key: _shown(source.metadata, key) for key in source.metadata}
        architecture = source.metadata.get("general.architecture")
        n_blocks = source.metadata.get(f"{architecture}.block_count", 0)
        layers: dict[int, str] = {}
        if isinstance(n_blocks, int) and 0 < n_blocks < 100_000:
            experts = GgufExperts(source, layers=range(n_blocks))
            for layer, layout in experts.layers.items():
                roles = ", ".join(
                    f"{r.role} {r.n_out} x {r.n_in} {type_name(r.ggml_type)}" for r in layout.roles
                )
                layers[layer] = f"{layout.n_experts} x {layout.payload_bytes} bytes ({roles})"
        return Inspection(
            paths=source.paths,
            n_bytes=source.n_bytes,
            architecture=str(architecture),
            is_supported=architecture in known_architectures(),
            metadata=metadata,
            tensors=tuple(source.tensors.values()),
            expert_layers=layers,
        )


def _shown(metadata: Any, key: str) -> Any:
    """A value as JSON can hold it; long arrays as text that tells their length."""
    if metadata.value_type(key).name == "ARRAY":
        n = metadata.array_length(key)
        if n > _SHOWN:
            return f"[{n} values]"
    value = metadata[key]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, str) and len(value) > 400:
        return f"{value[:400]}... ({len(value)} characters)"
    return value


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2, 5`."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
