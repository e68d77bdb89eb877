"""Building a pack: once, in one pass, safe against being stopped at any moment.

The order on the drive: objects are written into `.partial` files at their final places; every so
often these are synced, and then the journal notes what is safe. When all objects are there, the
headers (index and digests) are written and synced, the other parts are renamed and their folders
synced, and the first part last: where it stands without the suffix, the whole pack is there. Then
the journal goes. A build that finds a journal of its own goes on from it; any other journal is of
no use and is overwritten. A pack that is already there is replaced only if its bytes are proved to
differ from the source's, or on request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprefetch.errors import (
    ConfigError,
    NoSpaceError,
    PackBuildError,
    PackCorruptError,
    PackError,
    PackStaleError,
)
from aprefetch.storage.direct import direct_io_alignment
from aprefetch.storage.experts import GgufExperts
from aprefetch.storage.pack import format as pack_format
from aprefetch.storage.pack.compare import differs
from aprefetch.storage.pack.copy import Copier, Target
from aprefetch.storage.pack.copy import open_for_reading as _open_for_reading
from aprefetch.storage.pack.copy_phase import CopyPhase
from aprefetch.storage.pack.crew import Cancel, Progress, Reporter, default_workers
from aprefetch.storage.pack.files import AlignedBuffer, DirectFile, PackFiles, write_failure
from aprefetch.storage.pack.identity import (
    JOURNAL_SUFFIX,
    LOCK_SUFFIX,
    PARTIAL_SUFFIX,
    Match,
    compare,
    model_pairs,
    pack_names,
    packed_source,
    source_stamp,
    write_stamps,
)
from aprefetch.storage.pack.journal import Journal, JournalState, journal_facts, read_journal
from aprefetch.storage.pack.lock import pack_lock
from aprefetch.storage.pack.shape import MAX_PARTS, PackShape
from aprefetch.storage.pack.source import PackExperts, open_pack
from aprefetch.storage.shards import open_source
from aprefetch.storage.source import ModelSource, SourceIdentity

__all__ = [
    "BuildResult",
    "BuildState",
    "build_pack",
    "build_pack_async",
    "default_layers",
]

_log = logging.getLogger(__name__)

BuildState = Literal["pack reused", "pack built", "pack resumed"]

_BUILDER = 1  # a partial build of another number starts afresh
_SYNC_BYTES = 512 << 20
_SYNC_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build did. Bytes are of payload and headers; identity checks are not counted."""

    state: BuildState
    paths: tuple[Path, ...]
    bytes_read: int
    bytes_written: int
    n_objects: int
    payload_bytes: int


def default_layers(source: ModelSource) -> range:
    """The trunk's layers, as the metadata tells: all blocks but those that predict further tokens.

    Experts of other layers are not packed.
    """
    architecture = source.architecture
    n_blocks = source.metadata.get(f"{architecture}.block_count", 0)
    n_next = source.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    if not isinstance(n_blocks, int) or not isinstance(n_next, int):
        raise PackBuildError(
            f"{source.paths[0]}: the metadata does not tell the number of layers; name them",
            resumable=False,
        )
    return range(max(0, n_blocks - n_next))


def build_pack(
    source: str | os.PathLike[str] | ModelSource,
    out_dirs: Sequence[str | os.PathLike[str]] = (),
    *,
    layers: Sequence[int] | None = None,
    alignment: int | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    n_workers: int | None = None,
    files: PackFiles | None = None,
) -> BuildResult:
    """Build the Expert Pack of a model, or find that it is there. Blocking.

    Args:
        source: a GGUF file, any shard of a set, or the open model.
        out_dirs: folders of the parts; several spread every layer over them. None: beside the
            model.
        layers: which layers to pack; None is `default_layers`.
        alignment: bytes, a power of two from 4096; None is what the folders' drives need.
        rebuild: build again even if a pack is there, and replace it.
        progress: called on this thread with `PackProgress`.
        cancel: set it to stop; the next build goes on from there.
        n_workers: threads that read, hash and write.
        files: the system calls.

    Raises:
        NoSpaceError: before or during the build; it can be resumed.
        PackStaleError: a pack of something else has this pack's name.
        PackCorruptError: the pack is there, but damaged.
        PackBuildError: a folder or file cannot be written, or the build was cancelled.
        ModelError, ReadError: the model cannot be used or read.
    """
    if not isinstance(source, ModelSource):
        with open_source(source) as opened:
            return build_pack(
                opened,
                out_dirs,
                layers=layers,
                alignment=alignment,
                rebuild=rebuild,
                progress=progress,
                cancel=cancel,
                n_workers=n_workers,
                files=files,
            )
    folders = [Path(d) for d in out_dirs] or [source.paths[0].parent]
    wanted = default_layers(source) if layers is None else layers
    if not GgufExperts(source, wanted).layers:  # all that is wrong is told before a folder is made
        raise PackBuildError(
            f"{source.paths[0]}: the model has no routed experts to pack", resumable=False
        )
    _check_folders(folders)
    if alignment is None:
        alignment = max(direct_io_alignment(p) for p in (*folders, source.paths[0]))
    elif alignment < 4096 or alignment > 1 << 20 or alignment & (alignment - 1):
        raise ConfigError(f"alignment is {alignment}; give a power of two from 4096 to 1048576")
    experts = GgufExperts(source, wanted, alignment=alignment)
    shape = PackShape(
        layers=tuple(experts.layers.values()), n_parts=len(folders), alignment=alignment
    )
    build = _Build(
        source,
        experts,
        shape,
        folders,
        Reporter(progress, cancel),
        files or PackFiles(),
        n_workers or default_workers(),
    )
    if not rebuild:
        ready = build.reuse()
        if ready is not None:
            return ready
    with pack_lock(build.lock_path, build.wait):
        return build.run(rebuild=rebuild)


async def build_pack_async(
    source: str | os.PathLike[str] | ModelSource,
    out_dirs: Sequence[str | os.PathLike[str]] = (),
    *,
    progress: Progress | None = None,
    **options: Any,
) -> BuildResult:
    """`build_pack` on a thread; `progress` is called on the loop's thread.

    When the task is cancelled, the build stops soon, and this returns (raising `CancelledError`)
    once its files are closed; the next build goes on from there.
    """
    loop = asyncio.get_running_loop()
    cancel = threading.Event()
    if progress is not None:
        given: Progress = progress

        def report(event: Any) -> None:
            loop.call_soon_threadsafe(given, event)

        options["progress"] = report
    task = asyncio.ensure_future(
        asyncio.to_thread(build_pack, source, out_dirs, cancel=cancel, **options)
    )
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancel.set()
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue  # asked again; the first request is raised below
        if not task.cancelled():
            task.exception()
        raise


def _check_folders(folders: Sequence[Path]) -> None:
    problems = []
    if len(folders) > MAX_PARTS:
        problems.append(f"{len(folders)} folders were given, at most {MAX_PARTS} can be used")
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problems.append(f"{folder}: cannot be made: {error.strerror or error}")
    if problems:
        raise PackBuildError("; ".join(problems) + "; choose other folders with -o DIR")


class _Build:
    """One build; `run` needs the pack's lock."""

    def __init__(
        self,
        source: ModelSource,
        experts: GgufExperts,
        shape: PackShape,
        folders: Sequence[Path],
        reporter: Reporter,
        files: PackFiles,
        n_workers: int,
    ) -> None:
        self.source = source
        self.experts = experts
        self.shape = shape
        self.files = files
        self.reporter = reporter
        self.n_workers = n_workers
        self.identity: SourceIdentity = source.identity()
        self.packed = packed_source(source, self.identity)
        self.stamp = source_stamp(source)
        names = pack_names(source, self.identity, shape.n_parts)
        self.paths = [folder / name for folder, name in zip(folders, names, strict=True)]
        first = self.paths[0]
        self.lock_path = first.with_name(first.name + LOCK_SUFFIX)
        self.journal_path = first.with_name(first.name + JOURNAL_SUFFIX)
        self.partials = [p.with_name(p.name + PARTIAL_SUFFIX) for p in self.paths]
        self.facts: dict[str, Any] = {
            "builder": _BUILDER,
            "id": pack_format.pack_id(shape, self.packed),
            "stamp": self.stamp,
            "source": str(source.paths[0].resolve()),
            "paths": [str(p.resolve()) for p in self.paths],
        }
        zeros = np.zeros((shape.n_objects, pack_format.DIGEST_BYTES), dtype=np.uint8)
        self.digests: NDArray[np.uint8] = zeros
        self.pairs = model_pairs(source)
        self.data_offsets = [len(self._header(part)) for part in range(shape.n_parts)]
        self.sizes = [
            offset + shape.data_bytes(part) for part, offset in enumerate(self.data_offsets)
        ]
        self.bytes_read = self.bytes_written = 0
        reporter.begin("wait")

    def _header(self, part: int) -> bytes:
        return pack_format.encode_part_header(
            self.shape, part, self.packed, self.digests, self.pairs
        )

    def wait(self) -> None:
        """Another process builds this pack."""
        self.reporter.report(0, self.shape.payload_bytes)

    def reuse(self) -> BuildResult | None:
        """The pack, if it is there, good, and no build is under way; needs no lock."""
        try:
            if _exists(self.journal_path) or _exists(self.lock_path):
                return None
            pack = self._existing(is_resumable=False, deep=False)
        except PackError:
            return None  # under the lock it will be told
        return None if pack is None else self._reused(pack)

    def _reused(self, pack: PackExperts) -> BuildResult:
        write_stamps(pack.parts, self.stamp)
        return self._result("pack reused")

    def run(self, *, rebuild: bool) -> BuildResult:
        """Reuse, resume or build."""
        former = read_journal(self.journal_path, self.facts, self.shape.n_objects)
        if rebuild and not any(map(_exists, self.partials)):
            former = None
        if not rebuild:
            existing = self._existing(is_resumable=former is not None, deep=True)
            if existing is not None:
                self._clean_up()
                return self._reused(existing)
        committed = self._committed(former)
        if former is not None and not committed and not self._partials_are_whole():
            former = None
        self._drop_outdated()
        if not committed:
            self._check_space()
            self._copy(former)
        self._commit(committed)
        state: BuildState = "pack built"
        if former is not None and (former.n_records or committed):
            state = "pack resumed"
        write_stamps(open_pack(self.paths[0], folders=self._folders()).parts, self.stamp)
        return self._result(state)

    def _folders(self) -> list[Path]:
        return [path.parent for path in self.paths]

    def _result(self, state: BuildState) -> BuildResult:
        _log.info("%s: %s", state, self.paths[0])
        return BuildResult(
            state=state,
            paths=tuple(self.paths),
            bytes_read=self.bytes_read,
            bytes_written=self.bytes_written,
            n_objects=self.shape.n_objects,
            payload_bytes=self.shape.payload_bytes,
        )

    # -- what is there ----------------------------------------------------------------------

    def _existing(self, *, is_resumable: bool, deep: bool) -> PackExperts | None:
        """The pack that is there and good; None if it is to be built.

        Not `deep`: None also if only its bytes can tell.
        """
        present = [path for path in self.paths if _exists(path)]
        if not present or (is_resumable and len(present) < len(self.paths)):
            return None
        try:
            pack = open_pack(present[0], folders=self._folders())
        except PackCorruptError as error:
            if is_resumable:  # a mix of old and new parts: the build died while it renamed them
                return None
            raise PackCorruptError(
                f"{error} (`aprefetch pack --rebuild` replaces it)", path=error.path
            ) from error
        match = compare(pack.parts[0], self.packed, self.stamp)
        if match is Match.OTHER:
            raise PackStaleError(
                f"{present[0]}: this is the pack of another model; move it away, or replace it "
                "with `aprefetch pack --rebuild`"
            )
        if pack.shape != self.shape:
            raise PackStaleError(
                f"{present[0]}: this pack has other layers, parts or another alignment than asked "
                "for; replace it with `aprefetch pack --rebuild`"
            )
        if match is Match.UNSURE:
            if not deep:
                return None
            if differs(self.source, pack, self.reporter, self.files, self.n_workers):
                match = Match.CHANGED
        if match is Match.CHANGED:
            _log.warning("%s: the model has changed, the pack is built again", present[0])
            return None
        return pack

    def _partials_are_whole(self) -> bool:
        try:
            return [os.stat(p).st_size for p in self.partials] == self.sizes
        except OSError:
            return False

    def _committed(self, former: JournalState | None) -> frozenset[int]:
        """Parts that a killed build had renamed already; the others are still to be."""
        if former is None or not former.done.all():
            return frozenset()
        self.digests = former.digests
        content = pack_format.content_digest(former.digests)
        found = set()
        for part, (path, partial) in enumerate(zip(self.paths, self.partials, strict=True)):
            if _exists(partial):
                continue
            try:
                if pack_format.read_part(path).content != content:
                    return frozenset()
            except PackError:
                return frozenset()
            found.add(part)
        return frozenset(found)

    def _clean_up(self) -> None:
        """Remove what a build killed after its last rename left behind."""
        if _exists(self.journal_path):
            for path in self.partials:
                self.files.unlink(path)
            self.files.unlink(self.journal_path)

    def _drop_outdated(self) -> None:
        """Remove partial builds of former versions of this very model file."""
        folder = self.journal_path.parent
        for path in sorted(folder.glob("*" + JOURNAL_SUFFIX)):
            facts = journal_facts(path)
            if (
                path == self.journal_path
                or facts is None
                or facts.get("source") != self.facts["source"]
                or facts.get("id") == self.facts["id"]
                or not isinstance(facts.get("paths"), list)
            ):
                continue
            lock = path.with_name(path.name.removesuffix(JOURNAL_SUFFIX) + LOCK_SUFFIX)
            try:
                with pack_lock(lock, _give_up):
                    for name in facts["paths"]:
                        self.files.unlink(Path(f"{name}{PARTIAL_SUFFIX}"))
                    self.files.unlink(path)
            except (PackBuildError, OSError) as error:
                _log.debug("%s: left alone: %s", path, error)

    def _check_space(self) -> None:
        needed: dict[int, tuple[Path, int]] = {}
        for partial, size in zip(self.partials, self.sizes, strict=True):
            try:
                held = os.stat(partial).st_blocks * 512
            except OSError:
                held = 0
            device = os.stat(partial.parent).st_dev
            folder, total = needed.get(device, (partial.parent, 0))
            needed[device] = folder, total + max(0, size - held)
        for folder, total in needed.values():
            available = self.files.free_bytes(folder)
            if total > available:
                raise NoSpaceError(
                    f"{folder}: the pack needs {total} more bytes, {available} are free: "
                    f"{total - available} are missing; make room, or choose another folder with "
                    "-o DIR",
                    needed=total,
                    available=available,
                )

    # -- copying ----------------------------------------------------------------------------

    def _copy(self, former: JournalState | None) -> None:
        done = np.zeros(self.shape.n_objects, dtype=np.bool_)
        if former is not None:
            done, self.digests = former.done, former.digests
        journal = Journal(self.journal_path, self.facts, self.files, former)
        targets: list[Target] = []
        try:
            for path, size, offset in zip(
                self.partials, self.sizes, self.data_offsets, strict=True
            ):
                targets.append(Target(self._open_partial(path, size, former is None), offset))
            if former is None:
                for folder in set(self._folders()):
                    self.files.sync_folder(folder)
            self.reporter.begin("copy")
            with _open_for_reading(self.source.paths, self.files, self.shape.alignment) as opened:
                self.source.check_unchanged()
                copier = Copier(self.experts, self.shape, opened, targets)
                phase = CopyPhase(
                    self.shape, copier, journal, targets, done, self.digests, self.reporter
                )
                try:
                    phase.run(self.n_workers)
                finally:
                    self.bytes_read += phase.bytes_read
                    self.bytes_written += phase.bytes_written
                self.source.check_unchanged()
        finally:
            for target in targets:
                target.file.close()
            journal.close()

    def _open_partial(self, path: Path, size: int, fresh: bool) -> DirectFile:
        flags = os.O_RDWR | os.O_CREAT
        try:
            file = DirectFile(path, flags, self.files, self.shape.alignment)
            if fresh:
                try:
                    self.files.allocate(file.fd, size)
                except BaseException:
                    file.close()
                    raise
        except OSError as error:
            raise write_failure(path, error, size, self.files) from error
        return file

    # -- committing -------------------------------------------------------------------------

    def _commit(self, committed: frozenset[int]) -> None:
        """Headers, sync, renames (the first part last), folders, and the journal goes."""
        self.reporter.begin("commit")
        order = [p for p in range(1, self.shape.n_parts) if p not in committed]
        order += [0] if 0 not in committed else []
        for part in order:
            self._write_header(part)
        try:
            for part in order:
                if part == 0:
                    self._sync_folders()
                self.files.replace(self.partials[part], self.paths[part])
            self._sync_folders()
            self.files.unlink(self.journal_path)
            self.files.sync_folder(self.journal_path.parent)
        except OSError as error:
            raise write_failure(self.paths[0], error, 0, self.files) from error
        self.reporter.report(self.shape.payload_bytes, self.shape.payload_bytes)

    def _sync_folders(self) -> None:
        for folder in dict.fromkeys(self._folders()):
            self.files.sync_folder(folder)

    def _write_header(self, part: int) -> None:
        raw = self._header(part)
        buffer = AlignedBuffer(len(raw), self.shape.alignment)
        buffer.view[:] = raw
        file = self._open_partial(self.partials[part], self.sizes[part], False)
        try:
            file.write(buffer.view, 0)
            file.sync()
        finally:
            file.close()
        self.bytes_written += len(raw)


def _give_up() -> None:
    raise PackBuildError("it is being built")


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PackError(
            f"{path}: cannot be looked at: {error.strerror or error}; it was left as it is"
        ) from error
    return True
