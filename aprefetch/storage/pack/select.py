"""Which source of experts to use: the pack, or the model file itself.

"gguf" never looks for a pack. "auto" uses a good pack if one is there, and never builds: anything
wrong with a pack is told once in the log, and the model file is read instead. "pack" builds what is
not there, and raises what is wrong.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from aprefetch.errors import AprefetchError, ConfigError, PackCorruptError, PackError
from aprefetch.storage.experts import ExpertSource, GgufExperts
from aprefetch.storage.pack.build import build_pack
from aprefetch.storage.pack.compare import differs
from aprefetch.storage.pack.crew import Cancel, Progress, Reporter
from aprefetch.storage.pack.format import read_part
from aprefetch.storage.pack.identity import (
    Match,
    compare,
    pack_files,
    packed_source,
    source_stamp,
    write_changed,
    write_stamps,
)
from aprefetch.storage.pack.source import PackExperts, VerifyMode, open_pack
from aprefetch.storage.pack.verify import verify_pack
from aprefetch.storage.source import ModelSource

__all__ = ["ExpertsMode", "PackState", "find_pack", "select_experts"]

_log = logging.getLogger(__name__)

ExpertsMode = Literal["auto", "pack", "gguf"]
PackState = Literal["direct GGUF", "pack reused", "pack built", "pack resumed"]
Folder = str | os.PathLike[str]


def find_pack(
    source: ModelSource,
    pack_dirs: Sequence[Folder] | None = None,
    *,
    layers: Iterable[int] | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> PackExperts | None:
    """The pack of this model, if there is a good one. Blocking; headers only, as a rule.

    Looks in `pack_dirs`, then beside the model; by content, so names do not matter (but they end in
    `.pack.gguf` or `.pack-0000i-of-0000n.gguf`). If times changed but fingerprints did not, all
    routed experts of the model are hashed once.

    Args:
        layers: the layers it must have; None takes any.

    Raises:
        PackError: a pack of this model is there, but damaged, incomplete or not readable.
        ReadError: the model cannot be read.
    """
    folders = [Path(d) for d in pack_dirs or ()]
    places = dict.fromkeys([*folders, source.paths[0].parent])
    candidates = [path for folder in places for path in pack_files(folder)]
    if not candidates:
        return None
    packed = packed_source(source, source.identity())
    stamp = source_stamp(source)
    wanted = None if layers is None else set(layers)
    problem: PackError | None = None
    for path in candidates:
        try:
            index = read_part(path)
        except PackError as error:
            # Whose pack it is cannot be told: it matters only if it has our name.
            if packed.digest[:12] in path.name:
                problem = problem or error
            continue
        match = compare(index, packed, stamp)
        if match is Match.OTHER or index.part != 0:
            continue
        if wanted is not None and not wanted <= {one.layer for one in index.shape.layers}:
            continue
        try:
            pack = open_pack(path, folders=folders, source=source)
        except PackError as error:
            problem = problem or error
            continue
        if match is Match.UNSURE and differs(source, pack, Reporter(progress, cancel)):
            write_changed(pack.parts, stamp)
            match = Match.CHANGED
        if match is Match.CHANGED:
            _log.warning("%s: the model has changed since this pack was built", path)
            continue
        write_stamps(pack.parts, stamp)
        return pack
    if problem is not None:
        raise problem
    return None


def select_experts(
    source: ModelSource,
    layers: Iterable[int],
    mode: ExpertsMode = "auto",
    pack_dirs: Sequence[Folder] | None = None,
    *,
    verify: VerifyMode = "off",
    alignment: int | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    **build_options: Any,
) -> tuple[ExpertSource, PackState]:
    """The experts of a model, and where they come from. Blocking; may build.

    Args:
        source: the open model; stays open as long as the experts are used.
        layers: the model's own numbers of the layers that are needed.
        mode: see the module's text.
        pack_dirs: where packs are looked for before the model's own folder, and where one is
            built (several: striped over all of them).
        verify: "sampled" and "full" look before returning; "first_read" leaves it to the reader.
        alignment: of reads from the model file; None is the least.
        build_options: for `build_pack`.

    Raises:
        ConfigError: unknown mode.
        ModelError: experts of an unsupported kind.
        PackError: "pack" only: it cannot be built or used.
        ReadError: the model cannot be read.
    """
    if mode not in get_args(ExpertsMode):
        raise ConfigError(f"experts is {mode!r}; give one of {', '.join(get_args(ExpertsMode))}")
    if verify not in get_args(VerifyMode):
        raise ConfigError(f"verify is {verify!r}; give one of {', '.join(get_args(VerifyMode))}")
    direct = (
        GgufExperts(source, layers)
        if alignment is None
        else GgufExperts(source, layers, alignment=alignment)
    )
    if mode == "gguf" or not direct.layers:
        return direct, "direct GGUF"
    if mode == "auto":
        return _if_good(source, direct, pack_dirs, verify, progress, cancel)
    state: PackState = "pack reused"
    pack = _found(source, direct, pack_dirs, progress, cancel)
    if pack is None:
        built = build_pack(
            source,
            pack_dirs or (),
            layers=list(direct.layers),
            progress=progress,
            cancel=cancel,
            **build_options,
        )
        state = built.state
        pack = open_pack(built.paths[0], folders=[p.parent for p in built.paths])
    return _checked(pack, source, verify, progress, cancel), state


def _found(
    source: ModelSource,
    direct: GgufExperts,
    pack_dirs: Sequence[Folder] | None,
    progress: Progress | None,
    cancel: Cancel | None,
) -> PackExperts | None:
    """A good pack; None also if `build_pack` is to look at what is there, and say what is wrong."""
    try:
        return find_pack(source, pack_dirs, layers=direct.layers, progress=progress, cancel=cancel)
    except PackError as error:
        if cancel is not None and cancel.is_set():
            raise
        _log.debug("%s", error)
        return None


def _if_good(
    source: ModelSource,
    direct: GgufExperts,
    pack_dirs: Sequence[Folder] | None,
    verify: VerifyMode,
    progress: Progress | None,
    cancel: Cancel | None,
) -> tuple[ExpertSource, PackState]:
    try:
        pack = find_pack(source, pack_dirs, layers=direct.layers, progress=progress, cancel=cancel)
        if pack is None:
            return direct, "direct GGUF"
        return _checked(pack, source, verify, progress, cancel), "pack reused"
    except AprefetchError as error:
        if cancel is not None and cancel.is_set():
            raise
        _log.warning("the pack is not used, experts are read from the model file: %s", error)
        return direct, "direct GGUF"


def _checked(
    pack: PackExperts,
    source: ModelSource,
    verify: VerifyMode,
    progress: Progress | None,
    cancel: Cancel | None,
) -> PackExperts:
    if verify in ("sampled", "full"):
        found = verify_pack(
            pack,
            "full" if verify == "full" else "sampled",
            progress=progress,
            cancel=cancel,
        )
        if found.corrupt:
            raise PackCorruptError(
                f"{pack.paths[0]}: {len(found.corrupt)} of {found.n_objects} objects looked at do "
                f"not match their digests (layer {found.corrupt[0].layer}, expert "
                f"{found.corrupt[0].expert} first); run `aprefetch verify --repair`",
                path=pack.paths[0],
                keys=found.corrupt,
            )
    return PackExperts(pack.parts, verify=verify, source=source)
