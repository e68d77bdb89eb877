"""A pack as a source of experts: one aligned read per object.

`open_pack` finds the parts and checks that they belong together. `PackExperts` is immutable but for
the note of which objects were checked on first read. With the model's source at hand, an object
that does not match its digest is replaced in its landing buffer by the source's own bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from aprefetch.errors import AprefetchError, ConfigError, PackCorruptError, PackError
from aprefetch.storage.experts import GgufExperts
from aprefetch.storage.pack.format import DIGEST_BYTES, PackedSource, PartIndex, object_digest
from aprefetch.storage.pack.format import read_part as _read_part
from aprefetch.storage.pack.identity import noted_folders, pack_files, sibling_name
from aprefetch.storage.pack.shape import PackShape
from aprefetch.storage.source import ModelSource
from aprefetch.types import AlignedRead, ExpertKey, LayerLayout, Piece, ReadPlan

__all__ = ["PackExperts", "VerifyMode", "open_pack", "read_parts"]

VerifyMode = Literal["off", "sampled", "first_read", "full"]


class PackExperts:
    """An `ExpertSource` over the parts of a pack. Made by `open_pack`.

    Every object is one read of one range. `digest(key)` is what its payload must hash to.

    Coordinator's side of verification on first read: if `needs_check(key)`, hand the landed buffer
    to `check_or_restore` on a thread before the object is published.

    Args:
        parts: in order, from `read_parts`.
        verify: "first_read" makes `needs_check` true once for every object.
        source: the model, for `check_or_restore`; must stay open as long as this is used.
    """

    def __init__(
        self,
        parts: Sequence[PartIndex],
        *,
        verify: VerifyMode = "off",
        source: ModelSource | None = None,
    ) -> None:
        if verify not in get_args(VerifyMode):
            raise ConfigError(f"verify is {verify!r}; give one of {get_args(VerifyMode)}")
        self.parts = tuple(parts)
        self.paths: tuple[Path, ...] = tuple(part.path for part in parts)
        self.shape: PackShape = parts[0].shape
        self.id = parts[0].id
        self.content = parts[0].content
        self.source: PackedSource = parts[0].source
        self.alignment = self.shape.alignment
        self.verify: VerifyMode = verify
        self.layers: dict[int, LayerLayout] = {one.layer: one for one in self.shape.layers}
        self.tensor_names: frozenset[str] = frozenset(
            f"blk.{layer}.ffn_{role.role}_exps.weight"
            for layer, layout in self.layers.items()
            for role in layout.roles
        )
        self._pieces = {layer: _pieces(layout) for layer, layout in self.layers.items()}
        self._stored = {n: self.shape.stored_bytes(layout) for n, layout in self.layers.items()}
        self._starts = {
            layer: tuple(
                part.data_offset + stacks[layer].offset if layer in stacks else 0
                for part, stacks in zip(parts, self.shape.stacks, strict=True)
            )
            for layer in self.layers
        }
        self._source = source
        self._fallback: GgufExperts | None = None
        self._checked = np.zeros(self.shape.n_objects, dtype=np.bool_)
        self._lock = threading.Lock()

    def read_plan(self, key: ExpertKey) -> ReadPlan:
        """One aligned read; the roles lie one after the other from the landing buffer's start.

        Raises:
            KeyError: the layer has no routed experts, or not this one.
        """
        layer, expert = key
        if not 0 <= expert < self.layers[layer].n_experts:
            raise KeyError(key)
        n_parts, stored = self.shape.n_parts, self._stored[layer]
        part = expert % n_parts
        read = AlignedRead(
            file=part,
            offset=self._starts[layer][part] + expert // n_parts * stored,
            length=stored,
            needed=stored,
            landing_offset=0,
        )
        return ReadPlan(key=key, reads=(read,), pieces=self._pieces[layer], landing_bytes=stored)

    def max_landing_bytes(self, layer: int) -> int:
        """Bytes of a slot; the same for all experts of a layer."""
        return self._stored[layer]

    def digest(self, key: ExpertKey) -> bytes:
        """What the object's payload hashes to; see `object_digest`."""
        part, slot = key.expert % self.shape.n_parts, key.expert // self.shape.n_parts
        stack = self.shape.stacks[part][key.layer]
        return bytes(self.parts[part].digests[stack.first_row + slot])

    def digests(self) -> NDArray[np.uint8]:
        """Digests of all objects by number, `[n_objects, DIGEST_BYTES]`."""
        out = np.empty((self.shape.n_objects, DIGEST_BYTES), dtype=np.uint8)
        for number, part in enumerate(self.parts):
            out[self.shape.object_numbers(number)] = part.digests
        return out

    # -- verification on first read ---------------------------------------------------------

    def needs_check(self, key: ExpertKey) -> bool:
        """Must the object be checked when it lands? False once it was found good. Cheap."""
        if self.verify != "first_read":
            return False
        return not self._checked[self.shape.first_object[key.layer] + key.expert]

    def check(self, key: ExpertKey, buffer: memoryview) -> None:
        """Hash a landed object. Blocking, releases the GIL; call it on a thread.

        Args:
            key: which object.
            buffer: the landing buffer, as `read_plan(key)` filled it.

        Raises:
            PackCorruptError: the bytes do not match their digest.
        """
        payload = buffer[: self.layers[key.layer].payload_bytes]
        if object_digest(payload) != self.digest(key):
            path = self.paths[key.expert % self.shape.n_parts]
            raise PackCorruptError(
                f"{path}: expert {key.expert} of layer {key.layer} does not match its digest; "
                "run `aprefetch verify --repair` with the model file at hand",
                path=path,
                keys=(key,),
            )
        with self._lock:
            self._checked[self.shape.first_object[key.layer] + key.expert] = True

    def check_or_restore(self, key: ExpertKey, buffer: memoryview) -> bool:
        """As `check`, but a corrupt object is replaced by the source's own bytes if possible.

        Returns:
            True if the buffer now holds the source's bytes instead of the pack's (to be counted as
            a fallback); its layout is that of `read_plan` all the same.

        Raises:
            PackCorruptError: the object is corrupt, and the source is not there, cannot be read,
                or does not match either.
        """
        try:
            self.check(key, buffer)
        except PackCorruptError as corrupt:
            if self._source is None:
                raise
            try:
                self.restore(key, buffer)
            except AprefetchError as error:
                raise PackCorruptError(
                    f"{corrupt}; the model file could not stand in: {error}",
                    path=corrupt.path,
                    keys=corrupt.keys,
                ) from error
            return True
        return False

    def restore(self, key: ExpertKey, buffer: memoryview) -> None:
        """Fill a landing buffer with the object from the source. Blocking; reads through the cache.

        Raises:
            PackError: there is no source, or its bytes do not match the digest.
            ReadError: it could not be read.
        """
        if self._source is None:
            raise PackError("the pack was opened without its model; give the source")
        if self._fallback is None:
            self._fallback = GgufExperts(self._source, self.layers)
        layout = self.layers[key.layer]
        plan = self._fallback.read_plan(key)
        at = 0
        for role, read, piece in zip(layout.roles, plan.reads, plan.pieces, strict=True):
            start = read.offset + piece.landing_offset - read.landing_offset
            found = self._source.read_range(read.file, start, role.n_bytes)
            buffer[at : at + role.n_bytes] = found.data
            at += role.n_bytes
        if object_digest(buffer[:at]) != self.digest(key):
            raise PackCorruptError(
                f"{self._source.paths[0]}: expert {key.expert} of layer {key.layer} is not what "
                "the pack was built from",
                path=self._source.paths[0],
                keys=(key,),
            )


def _pieces(layout: LayerLayout) -> tuple[Piece, ...]:
    out, at = [], 0
    for role, device_offset in zip(layout.roles, layout.device_offsets, strict=True):
        out.append(Piece(landing_offset=at, device_offset=device_offset, n_bytes=role.n_bytes))
        at += role.n_bytes
    return tuple(out)


def open_pack(
    path: str | os.PathLike[str],
    *,
    folders: Iterable[str | os.PathLike[str]] = (),
    verify: VerifyMode = "off",
    source: ModelSource | None = None,
) -> PackExperts:
    """Open a pack from any one of its parts. Blocking; reads headers only.

    Whether it belongs to `source` is not looked at here (see `select_experts`), and "sampled" and
    "full" are for `verify_pack`.

    Args:
        path: of one part.
        folders: where else to look for the other parts, besides its own folder and where they were
            last seen.

    Raises:
        PackVersionError, PackCorruptError, PackError: see `read_part`; parts that are missing or of
            different builds.
    """
    return PackExperts(read_parts(Path(path), map(Path, folders)), verify=verify, source=source)


def read_parts(path: Path, folders: Iterable[Path] = ()) -> list[PartIndex]:
    """The headers of all parts, in order; see `open_pack`."""
    first = _read_part(path)
    n_parts = first.shape.n_parts
    found: dict[int, PartIndex] = {first.part: first}
    places = list(dict.fromkeys([path.parent, *folders, *noted_folders(first)]))
    for part in range(n_parts):
        if part in found:
            continue
        index = _find_part(first, part, places)
        if index is not None:
            found[part] = index
    missing = [part for part in range(n_parts) if part not in found]
    if missing:
        names = [sibling_name(path.name, p, n_parts) or f"part {p + 1}" for p in missing]
        raise PackError(
            f"{path}: {len(missing)} of {n_parts} parts of the pack are missing: "
            f"{', '.join(names)}; looked in {', '.join(str(p) for p in places)}; put them back, "
            "or name their folders"
        )
    for index in found.values():
        if index.content != first.content:
            raise PackCorruptError(
                f"{index.path}: this part and {path} are of different builds; build the pack again",
                path=index.path,
            )
    return [found[part] for part in range(n_parts)]


def _find_part(first: PartIndex, part: int, places: Sequence[Path]) -> PartIndex | None:
    name = sibling_name(first.path.name, part, first.shape.n_parts)
    if name is not None:
        for place in places:
            if (place / name).exists():
                index = _read_part(place / name)
                if (index.id, index.part) == (first.id, part):
                    return index
    for place in places:  # it may have been renamed
        for candidate in pack_files(place):
            if candidate.name == name or candidate == first.path:
                continue
            try:
                index = _read_part(candidate)
            except PackError:
                continue
            if (index.id, index.part) == (first.id, part):
                return index
    return None
