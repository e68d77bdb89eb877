"""The header of one part of a pack: a GGUF header with the index as metadata.

docs/pack_format.md is the specification. A header's length does not depend on the digests in it,
so payload can be written before they are known. `read_part` checks every field before anything
trusts it: first what tells the version, then the digest over the whole header (and, if that does
not fit, which field was changed), then each value.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from aprefetch.errors import (
    PackCorruptError,
    PackError,
    PackVersionError,
    SourceError,
    UnsupportedModelError,
)
from aprefetch.storage.gguf_file import GgufHeader, read_header
from aprefetch.storage.metadata import Metadata
from aprefetch.storage.pack import encode
from aprefetch.storage.pack.encode import Raw
from aprefetch.storage.pack.shape import MAX_PARTS, PackShape
from aprefetch.types import ALIGNMENT, ROLES, LayerLayout, RoleLayout, align_up

__all__ = [
    "ARCHITECTURE",
    "DIGEST_BYTES",
    "DIGEST_TYPE",
    "VERSION",
    "PackedSource",
    "PartIndex",
    "content_digest",
    "encode_part_header",
    "object_digest",
    "pack_id",
    "read_part",
]

ARCHITECTURE = "aprefetch-pack"
VERSION = (1, 0)
DIGEST_TYPE = "sha256-128"
DIGEST_BYTES = 16
_PREFIX = "aprefetch.pack."
_CRCS = _PREFIX + "field_crcs"
_INDEX_DIGEST = _PREFIX + "index_digest"
_NO_DIGEST = "0" * 64
_KNOWN_FLAGS = 0
_I8 = int(GGMLQuantizationType.I8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSource:
    """What a pack was built from. Sequences have one element per shard, in shard order."""

    architecture: str
    digest: str
    config_digest: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    mtimes_ns: tuple[int, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartIndex:
    """One part of a pack, as its header tells.

    `digests` is uint8 `[objects of this part, DIGEST_BYTES]`, in stored order; `data_offset` and
    `n_bytes` (of the whole file) are bytes.
    """

    path: Path
    id: str
    part: int
    shape: PackShape
    source: PackedSource
    digests: NDArray[np.uint8]
    content: str
    data_offset: int
    n_bytes: int
    metadata: Metadata


def object_digest(payload: Any) -> bytes:
    """Digest of one object's payload (any buffer)."""
    return hashlib.sha256(payload).digest()[:DIGEST_BYTES]


def content_digest(digests: NDArray[np.uint8]) -> str:
    """Digest over the digests of all objects of a pack, `[n_objects, DIGEST_BYTES]`."""
    return hashlib.sha256(np.ascontiguousarray(digests).data).hexdigest()[: 2 * DIGEST_BYTES]


def pack_id(shape: PackShape, source: PackedSource) -> str:
    """Names the pack: the same for all its parts, and for each build from the same bytes."""
    facts = {
        "version": VERSION[0],
        "source": source.digest,
        "config": source.config_digest,
        "alignment": shape.alignment,
        "n_parts": shape.n_parts,
        "layers": [asdict(layout) for layout in shape.layers],
    }
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * DIGEST_BYTES]


# -- writing --------------------------------------------------------------------------------


def encode_part_header(
    shape: PackShape,
    part: int,
    source: PackedSource,
    digests: NDArray[np.uint8],
    model_pairs: Sequence[tuple[str, Raw]],
) -> bytes:
    """A part's header, padded to the start of its data.

    Args:
        digests: of all objects of the pack, `[n_objects, DIGEST_BYTES]`; zeros give a header of
            the right length.
        model_pairs: metadata of the model; goes into part 0.
    """
    own = digests[shape.object_numbers(part)]
    pairs = [
        *_pack_pairs(shape, part, source, own, content_digest(digests)),
        *(model_pairs if part == 0 else ()),
    ]
    crcs = [zlib.crc32(encode.encode_pair(*pair)) for pair in pairs]
    pairs.append((_CRCS, encode.u32(crcs)))
    last = (_INDEX_DIGEST, encode.text(_NO_DIGEST))
    tensors = [
        (_tensor_name(layer), (stack.stored_bytes, stack.n_slots), _I8, stack.offset)
        for layer, stack in shape.stacks[part].items()
    ]
    raw = encode.encode_header([*pairs, last], tensors)
    found = encode.text(hashlib.sha256(raw).hexdigest())
    raw = raw.replace(encode.encode_pair(*last), encode.encode_pair(_INDEX_DIGEST, found), 1)
    return raw.ljust(align_up(len(raw), shape.alignment), b"\0")


def _tensor_name(layer: int) -> str:
    return f"blk.{layer}.experts"


def _pack_pairs(
    shape: PackShape,
    part: int,
    source: PackedSource,
    digests: NDArray[np.uint8],
    content: str,
) -> list[tuple[str, Raw]]:
    layers = shape.layers
    roles = [role for layout in layers for role in layout.roles]
    sizes = [GGML_QUANT_SIZES[GGMLQuantizationType(role.ggml_type)] for role in roles]
    own = {
        "version_major": encode.u32(VERSION[0]),
        "version_minor": encode.u32(VERSION[1]),
        "required_flags": encode.u64(0),
        "id": encode.text(pack_id(shape, source)),
        "part": encode.u32(part),
        "n_parts": encode.u32(shape.n_parts),
        "n_objects": encode.u64(shape.n_objects),
        "transform": encode.text("none"),
        "source.architecture": encode.text(source.architecture),
        "source.digest": encode.text(source.digest),
        "source.config_digest": encode.text(source.config_digest),
        "source.names": encode.texts(source.names),
        "source.sizes": encode.u64(source.sizes),
        "source.mtimes_ns": encode.u64(source.mtimes_ns),
        "source.digests": encode.texts(source.digests),
        "layers": encode.u32([layout.layer for layout in layers]),
        "n_experts": encode.u32([layout.n_experts for layout in layers]),
        "payload_bytes": encode.u64([layout.payload_bytes for layout in layers]),
        "stored_bytes": encode.u64([shape.stored_bytes(layout) for layout in layers]),
        "roles": encode.texts(ROLES),
        "role_types": encode.u32([role.ggml_type for role in roles]),
        "role_rows": encode.u64([role.n_out for role in roles]),
        "role_columns": encode.u64([role.n_in for role in roles]),
        "role_bytes": encode.u64([role.n_bytes for role in roles]),
        "role_block_weights": encode.u32([weights for weights, _ in sizes]),
        "role_block_bytes": encode.u32([n_bytes for _, n_bytes in sizes]),
        "digest_type": encode.text(DIGEST_TYPE),
        "digest_bytes": encode.u32(DIGEST_BYTES),
        "digests": encode.u64(np.ascontiguousarray(digests).view("<u8").reshape(-1)),
        "content_digest": encode.text(content),
    }
    return [
        ("general.architecture", encode.text(ARCHITECTURE)),
        ("general.alignment", encode.u32(shape.alignment)),
        *((_PREFIX + key, value) for key, value in own.items()),
    ]


# -- reading --------------------------------------------------------------------------------


def read_part(path: Path) -> PartIndex:
    """Read and check one part's header. Blocking; the payload is not read.

    Raises:
        PackVersionError: written by a newer version, or with a feature that is not known here.
        PackCorruptError: a field or the size of the file is wrong; the message names it.
        PackError: there is no such file, no permission, a drive error, or this is no pack.
    """
    header, size = _open_header(path)
    fields = _Fields(header.metadata, path)
    if header.metadata.get("general.architecture") != ARCHITECTURE:
        raise PackError(
            f"{path}: this is a GGUF file, but field 'general.architecture' does not say that it "
            f"is an Expert Pack ({ARCHITECTURE!r}); make one with `aprefetch pack`"
        )
    _check_version(fields)
    _check_digest(fields, header)
    shape = _read_shape(fields, header)
    part = fields.number("part")
    if not 0 <= part < shape.n_parts:
        fields.fail("part", f"is {part}, of {shape.n_parts} parts")
    source = _read_source(fields)
    _check_tensors(fields, header, shape, part)
    if fields.number("digest_bytes") != DIGEST_BYTES:
        fields.fail("digest_bytes", f"is not {DIGEST_BYTES}")
    rows = len(shape.object_numbers(part))
    words = fields.numbers("digests", rows * DIGEST_BYTES // 8)
    index = PartIndex(
        path=path,
        id=fields.text("id"),
        part=part,
        shape=shape,
        source=source,
        digests=words.astype("<u8").view(np.uint8).reshape(rows, DIGEST_BYTES),
        content=fields.text("content_digest"),
        data_offset=header.data_offset,
        n_bytes=header.data_offset + shape.data_bytes(part),
        metadata=header.metadata,
    )
    if index.id != pack_id(shape, source):
        fields.fail("id", "does not go with the other fields")
    if size != index.n_bytes:
        raise PackCorruptError(
            f"{path}: the file has {size} bytes, the index says {index.n_bytes}; it is truncated "
            "or was changed, copy it again or build the pack again",
            path=path,
        )
    return index


def _open_header(path: Path) -> tuple[GgufHeader, int]:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise PackError(f"{path}: this is not a regular file; give a part of a pack")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PackError(
            f"{path}: the pack cannot be opened: {error.strerror or error}; it was left as it is"
        ) from error
    try:
        return read_header(fd, path), os.fstat(fd).st_size
    except UnsupportedModelError as error:
        raise PackCorruptError(f"the header is damaged: {error}", path=path) from error
    except SourceError as error:
        if isinstance(error.__cause__, OSError):
            raise PackError(f"{error}; the pack was left as it is") from error
        raise PackCorruptError(f"the header is damaged: {error}", path=path) from error
    finally:
        os.close(fd)


class _Fields:
    """Typed access to the pack's own fields; every complaint names the field."""

    def __init__(self, metadata: Metadata, path: Path) -> None:
        self._metadata = metadata
        self.path = path

    def fail(self, key: str, what: str) -> NoReturn:
        raise PackCorruptError(
            f"{self.path}: field {_PREFIX + key!r} {what}; the pack is damaged, build it again",
            path=self.path,
        )

    def _get(self, key: str) -> Any:
        if _PREFIX + key not in self._metadata:
            self.fail(key, "is missing")
        try:
            return self._metadata[_PREFIX + key]
        except SourceError as error:
            raise PackCorruptError(str(error), path=self.path) from error

    def number(self, key: str) -> int:
        value = self._get(key)
        if type(value) is not int:
            self.fail(key, "is not a number")
        return value

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            self.fail(key, "is not text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self.fail(key, "is not a list of texts")
        return tuple(value)

    def numbers(self, key: str, n: int | None = None) -> NDArray[np.uint64]:
        value = self._get(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind != "u":
            self.fail(key, "is not a list of numbers")
        if n is not None and len(value) != n:
            self.fail(key, f"has {len(value)} elements where {n} are due")
        wide: NDArray[np.uint64] = value.astype("<u8")
        return wide

    def sizes(self, key: str, n: int | None = None) -> list[int]:
        """Numbers that are counts or bytes, as Python integers."""
        return [int(v) for v in self.numbers(key, n).tolist()]


def _check_version(fields: _Fields) -> None:
    major = fields.number("version_major")
    if major != VERSION[0]:
        raise PackVersionError(
            f"{fields.path}: field '{_PREFIX}version_major' is {major}, this program reads "
            f"{VERSION[0]}; update aprefetch, or build the pack again"
        )
    unknown = fields.number("required_flags") & ~_KNOWN_FLAGS
    if unknown:
        raise PackVersionError(
            f"{fields.path}: field '{_PREFIX}required_flags' asks for features {unknown:#x} that "
            "this program does not know; update aprefetch, or build the pack again"
        )
    for key, known in (("digest_type", DIGEST_TYPE), ("transform", "none")):
        value = fields.text(key)
        if value != known:
            raise PackVersionError(
                f"{fields.path}: field '{_PREFIX}{key}' is {value!r}, this program knows "
                f"{known!r}; update aprefetch, or build the pack again"
            )


def _check_digest(fields: _Fields, header: GgufHeader) -> None:
    found = fields.text("index_digest")
    if header.version == 3 and _signs(header.raw, found):
        return
    raise PackCorruptError(
        f"{fields.path}: the index does not match its digest: {_what_changed(header, found)}; "
        "the pack is damaged, build it again",
        path=fields.path,
    )


def _signs(raw: bytes, found: str) -> bool:
    """Is `found` the digest of this header?"""
    pair = encode.encode_pair(_INDEX_DIGEST, encode.text(found))
    blank = encode.encode_pair(_INDEX_DIGEST, encode.text(_NO_DIGEST))
    return hashlib.sha256(raw.replace(pair, blank, 1)).hexdigest() == found


def _what_changed(header: GgufHeader, found: str) -> str:
    """Which fields do not match their own check sums."""
    metadata = header.metadata
    if header.version != 3:
        return f"the GGUF version is {header.version}, not 3"
    pairs = {
        key: encode.encode_pair(key, Raw(*metadata.encoded(key)))
        for key in metadata
        if key not in (_CRCS, _INDEX_DIGEST)
    }
    crcs = metadata.get(_CRCS)
    if not isinstance(crcs, np.ndarray) or len(crcs) != len(pairs):
        return f"field {_CRCS!r} or the number of fields was changed"
    right = [zlib.crc32(pair) for pair in pairs.values()]
    pair = encode.encode_pair(_CRCS, Raw(*metadata.encoded(_CRCS)))
    mended = header.raw.replace(pair, encode.encode_pair(_CRCS, encode.u32(right)), 1)
    if mended != header.raw and _signs(mended, found):
        return f"field {_CRCS!r} was changed"
    changed = [k for k, ours, crc in zip(pairs, right, crcs.tolist(), strict=True) if ours != crc]
    if changed:
        return "changed: " + ", ".join(map(repr, changed[:4]))
    return f"field {_INDEX_DIGEST!r} or the tensor table was changed"


def _read_shape(fields: _Fields, header: GgufHeader) -> PackShape:
    alignment = header.alignment
    if alignment < ALIGNMENT:
        raise PackCorruptError(
            f"{fields.path}: field 'general.alignment' is {alignment}, at least {ALIGNMENT} is "
            "due; the pack is damaged, build it again",
            path=fields.path,
        )
    n_parts = fields.number("n_parts")
    if not 1 <= n_parts <= MAX_PARTS:
        fields.fail("n_parts", f"is {n_parts}")
    if fields.texts("roles") != ROLES:
        fields.fail("roles", f"is not {', '.join(ROLES)}")
    layers = fields.sizes("layers")
    if layers != sorted(set(layers)):
        fields.fail("layers", "is not in ascending order")
    n_experts = fields.sizes("n_experts", len(layers))
    if not all(0 < n < 1 << 24 for n in n_experts):
        fields.fail("n_experts", "has an impossible count")
    roles = _read_roles(fields, len(layers))
    layouts = tuple(
        LayerLayout(layer=layer, n_experts=n, roles=tuple(roles[3 * i : 3 * i + 3]))
        for i, (layer, n) in enumerate(zip(layers, n_experts, strict=True))
    )
    shape = PackShape(layers=layouts, n_parts=n_parts, alignment=alignment)
    if fields.sizes("payload_bytes", len(layers)) != [one.payload_bytes for one in layouts]:
        fields.fail("payload_bytes", "is not the sum of the roles")
    if fields.sizes("stored_bytes", len(layers)) != [shape.stored_bytes(one) for one in layouts]:
        fields.fail("stored_bytes", "is not the aligned payload")
    if fields.number("n_objects") != shape.n_objects:
        fields.fail("n_objects", "is not the number of experts of all layers")
    return shape


def _read_roles(fields: _Fields, n_layers: int) -> list[RoleLayout]:
    n = n_layers * len(ROLES)
    columns = {
        key: fields.sizes(key, n)
        for key in ("role_types", "role_rows", "role_columns", "role_bytes")
    }
    blocks = list(
        zip(
            fields.sizes("role_block_weights", n),
            fields.sizes("role_block_bytes", n),
            strict=True,
        )
    )
    known = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    out = []
    for i, (kind, n_out, n_in, n_bytes) in enumerate(zip(*columns.values(), strict=True)):
        if kind not in known:
            fields.fail("role_types", f"has the unknown type {kind}")
        if blocks[i] != known[kind]:
            fields.fail("role_block_bytes", f"has {blocks[i]} for type {kind}, not {known[kind]}")
        weights, block_bytes = known[kind]
        if not n_out or not n_in or n_in % weights:
            fields.fail("role_columns", f"has {n_out} x {n_in} weights in blocks of {weights}")
        if n_bytes != n_out * n_in // weights * block_bytes:
            fields.fail("role_bytes", f"has {n_bytes} for {n_out} x {n_in} weights")
        out.append(
            RoleLayout(role=ROLES[i % 3], ggml_type=kind, n_out=n_out, n_in=n_in, n_bytes=n_bytes)
        )
    return out


def _read_source(fields: _Fields) -> PackedSource:
    names = fields.texts("source.names")
    if not names:
        fields.fail("source.names", "is empty")
    digests = fields.texts("source.digests")
    if len(digests) != len(names):
        fields.fail("source.digests", f"has {len(digests)} elements where {len(names)} are due")
    return PackedSource(
        architecture=fields.text("source.architecture"),
        digest=fields.text("source.digest"),
        config_digest=fields.text("source.config_digest"),
        names=names,
        sizes=tuple(fields.sizes("source.sizes", len(names))),
        mtimes_ns=tuple(fields.sizes("source.mtimes_ns", len(names))),
        digests=digests,
    )


def _check_tensors(fields: _Fields, header: GgufHeader, shape: PackShape, part: int) -> None:
    stacks: Mapping[int, Any] = shape.stacks[part]
    if len(header.tensors) != len(stacks):
        fields.fail("layers", f"does not go with {len(header.tensors)} tensors")
    for layer, stack in stacks.items():
        info = header.tensors.get(_tensor_name(layer))
        if (
            info is None
            or info.ggml_type != _I8
            or info.shape != (stack.n_slots, stack.stored_bytes)
            or info.offset != header.data_offset + stack.offset
        ):
            fields.fail("layers", f"does not go with the tensor of layer {layer}")
