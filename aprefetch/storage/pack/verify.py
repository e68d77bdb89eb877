"""Looking whether a pack's bytes are still what was written, and mending what is not.

A pack is verified from its own digests, without the model. Mending needs the model: an object is
written again only with bytes that match the digest in the index, so a wrong source cannot do harm.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from aprefetch.errors import PackBuildError, PackCorruptError
from aprefetch.storage.pack.copy import SPAN_BYTES, open_for_reading
from aprefetch.storage.pack.crew import Cancel, Progress, Reporter, default_workers, run_crew
from aprefetch.storage.pack.files import AlignedBuffer, DirectFile, PackFiles, write_failure
from aprefetch.storage.pack.format import object_digest
from aprefetch.storage.pack.source import PackExperts
from aprefetch.types import ExpertKey

__all__ = ["DEFAULT_SAMPLE", "Verification", "repair_pack", "sample_keys", "verify_pack"]

DEFAULT_SAMPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was looked at: objects, payload bytes, and the objects that do not match."""

    n_objects: int
    n_bytes: int
    corrupt: tuple[ExpertKey, ...]
    repaired: tuple[ExpertKey, ...] = ()


def sample_keys(pack: PackExperts, n: int = DEFAULT_SAMPLE, seed: int = 0) -> list[ExpertKey]:
    """`n` objects drawn over the whole pack, always the same for a pack and a seed; in order."""
    rng = np.random.default_rng([seed, int(pack.id[:8], 16)])
    total = pack.shape.n_objects
    numbers = rng.choice(total, size=min(n, total), replace=False)
    firsts = np.array(list(pack.shape.first_object.values()))
    layers = list(pack.shape.first_object)
    out = []
    for number in sorted(numbers.tolist()):
        i = int(np.searchsorted(firsts, number, side="right")) - 1
        out.append(ExpertKey(layers[i], int(number - firsts[i])))
    return out


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring slots of one layer in one part."""

    part: int
    layer: int
    slot: int
    n: int


def verify_pack(
    pack: PackExperts,
    mode: Literal["sampled", "full"] = "full",
    *,
    sample: int = DEFAULT_SAMPLE,
    seed: int = 0,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    n_workers: int | None = None,
    files: PackFiles | None = None,
) -> Verification:
    """Hash objects of the pack past the page cache, and compare with the index. Blocking.

    Args:
        mode: all objects, or `sample_keys(pack, sample, seed)`.

    Raises:
        ReadError: a part cannot be read. That says nothing about its bytes.
        PackBuildError: cancelled.
    """
    runs = list(_sampled_runs(pack, sample, seed) if mode == "sampled" else _all_runs(pack))
    total = sum(run.n * pack.layers[run.layer].payload_bytes for run in runs)
    reporter = Reporter(progress, cancel)
    reporter.begin("verify")
    corrupt: list[ExpertKey] = []
    lock = threading.Lock()
    done_bytes = 0
    largest = max((run.n * pack.max_landing_bytes(run.layer) for run in runs), default=0)
    with open_for_reading(pack.paths, files or PackFiles(), pack.alignment) as opened:

        def work(run: _Run, buffer: AlignedBuffer) -> None:
            nonlocal done_bytes
            found = _check_run(pack, opened[run.part], run, buffer.view)
            with lock:
                corrupt.extend(found)
                done_bytes += run.n * pack.layers[run.layer].payload_bytes

        run_crew(
            runs,
            work,
            lambda: AlignedBuffer(largest, pack.alignment),
            n_workers=n_workers or default_workers(),
            tick=lambda: reporter.report(done_bytes, total),
        )
    return Verification(
        n_objects=sum(run.n for run in runs), n_bytes=total, corrupt=tuple(sorted(corrupt))
    )


def _check_run(
    pack: PackExperts, file: DirectFile, run: _Run, buffer: memoryview
) -> list[ExpertKey]:
    stored, payload = pack.max_landing_bytes(run.layer), pack.layers[run.layer].payload_bytes
    first = _key(pack, run, 0)
    view = buffer[: run.n * stored]
    file.read(view, pack.read_plan(first).reads[0].offset, len(view))
    out = []
    for i in range(run.n):
        key = _key(pack, run, i)
        if object_digest(view[i * stored : i * stored + payload]) != pack.digest(key):
            out.append(key)
    return out


def _key(pack: PackExperts, run: _Run, i: int) -> ExpertKey:
    return ExpertKey(run.layer, (run.slot + i) * pack.shape.n_parts + run.part)


def _all_runs(pack: PackExperts) -> Iterator[_Run]:
    for layout in pack.shape.layers:
        step = max(1, SPAN_BYTES // pack.shape.stored_bytes(layout))
        for part, stacks in enumerate(pack.shape.stacks):
            if layout.layer not in stacks:
                continue
            n_slots = stacks[layout.layer].n_slots
            for slot in range(0, n_slots, step):
                yield _Run(part, layout.layer, slot, min(step, n_slots - slot))


def _sampled_runs(pack: PackExperts, sample: int, seed: int) -> Iterator[_Run]:
    n_parts = pack.shape.n_parts
    for key in sample_keys(pack, sample, seed):
        yield _Run(key.expert % n_parts, key.layer, key.expert // n_parts, 1)


def repair_pack(
    pack: PackExperts,
    keys: Sequence[ExpertKey],
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    files: PackFiles | None = None,
) -> tuple[ExpertKey, ...]:
    """Write objects again from the model that `pack` was opened with. Blocking.

    Runtimes that have the pack open will notice that its files changed, and must be opened anew.

    Returns:
        The objects that are good again.

    Raises:
        PackCorruptError: the model's bytes do not match the index; those objects were not written.
        PackError: the pack was opened without its model.
        ReadError: the model cannot be read.
        PackBuildError: a part cannot be written.
    """
    reporter = Reporter(progress, cancel)
    reporter.begin("repair")
    layer = files or PackFiles()
    done: list[ExpertKey] = []
    hopeless: list[ExpertKey] = []
    opened: dict[int, DirectFile] = {}
    try:
        for key in keys:
            reporter.report(len(done), len(keys))
            stored = pack.max_landing_bytes(key.layer)
            buffer = AlignedBuffer(stored, pack.alignment)
            try:
                pack.restore(key, buffer.view)
            except PackCorruptError:
                hopeless.append(key)
                continue
            read = pack.read_plan(key).reads[0]
            if read.file not in opened:
                opened[read.file] = _open_for_writing(pack, read.file, layer)
            opened[read.file].write(buffer.view, read.offset)
            done.append(key)
        for file in opened.values():
            file.sync()
    finally:
        for file in opened.values():
            file.close()
    if hopeless:
        raise PackCorruptError(
            f"{pack.paths[0]}: {len(hopeless)} objects are damaged, and this model file does not "
            "have what they were built from; build the pack again with `aprefetch pack --rebuild`",
            path=pack.paths[0],
            keys=hopeless,
        )
    reporter.report(len(keys), len(keys))
    return tuple(done)


def _open_for_writing(pack: PackExperts, part: int, files: PackFiles) -> DirectFile:
    path: Any = pack.paths[part]
    try:
        return DirectFile(path, os.O_RDWR, files, pack.alignment)
    except OSError as error:
        failure: PackBuildError = write_failure(path, error, 0, files)
        raise failure from error
