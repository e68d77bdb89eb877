"""What a pack says about itself, for people and for programs."""

from __future__ import annotations

from typing import Any

from aprefetch.quant import type_name
from aprefetch.storage.pack.format import DIGEST_TYPE
from aprefetch.storage.pack.source import PackExperts

__all__ = ["facts", "lines"]


def facts(pack: PackExperts) -> dict[str, Any]:
    """JSON-ready."""
    shape, source = pack.shape, pack.source
    return {
        "format_version": list(_version(pack)),
        "id": pack.id,
        "paths": [str(path) for path in pack.paths],
        "n_bytes": sum(part.n_bytes for part in pack.parts),
        "payload_bytes": shape.payload_bytes,
        "alignment": shape.alignment,
        "n_parts": shape.n_parts,
        "n_objects": shape.n_objects,
        "digest_type": DIGEST_TYPE,
        "content_digest": pack.content,
        "source": {
            "architecture": source.architecture,
            "digest": source.digest,
            "config_digest": source.config_digest,
            "names": list(source.names),
            "sizes": list(source.sizes),
        },
        "layers": {
            str(layout.layer): {
                "n_experts": layout.n_experts,
                "payload_bytes": layout.payload_bytes,
                "stored_bytes": shape.stored_bytes(layout),
                "roles": [
                    {
                        "role": role.role,
                        "type": type_name(role.ggml_type),
                        "rows": role.n_out,
                        "columns": role.n_in,
                        "n_bytes": role.n_bytes,
                    }
                    for role in layout.roles
                ],
            }
            for layout in shape.layers
        },
    }


def lines(pack: PackExperts) -> list[str]:
    """For people."""
    shape, source = pack.shape, pack.source
    major, minor = _version(pack)
    stored = sum(shape.data_bytes(part) for part in range(shape.n_parts))
    out = [f"part       {path}" for path in pack.paths]
    out += [
        f"pack       {pack.id}, format {major}.{minor}",
        f"bytes      {sum(part.n_bytes for part in pack.parts)}",
        f"payload    {shape.payload_bytes}, padding {stored - shape.payload_bytes}",
        f"objects    {shape.n_objects} in {len(shape.layers)} layers",
        f"alignment  {shape.alignment}",
        f"digests    {DIGEST_TYPE}, content {pack.content}",
        f"model      {source.architecture}, fingerprint {source.digest}",
    ]
    out += [
        f"           {size:>16} bytes {name}"
        for name, size in zip(source.names, source.sizes, strict=True)
    ]
    groups: dict[str, list[int]] = {}
    for layout in shape.layers:
        roles = ", ".join(
            f"{role.role} {role.n_out} x {role.n_in} {type_name(role.ggml_type)}"
            for role in layout.roles
        )
        text = (
            f"{layout.n_experts} x {layout.payload_bytes} bytes, {shape.stored_bytes(layout)} "
            f"stored ({roles})"
        )
        groups.setdefault(text, []).append(layout.layer)
    for text, layers in groups.items():
        out.append(f"experts    layers {_ranges(layers)}: {text}")
    return out


def _version(pack: PackExperts) -> tuple[int, int]:
    metadata = pack.parts[0].metadata
    minor = metadata.get("aprefetch.pack.version_minor", 0)
    return int(metadata["aprefetch.pack.version_major"]), minor if isinstance(minor, int) else 0


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2, 5`."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
