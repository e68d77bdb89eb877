"""The last word on whether a pack is stale: all routed experts of the model, hashed once more."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from aprefetch.storage.experts import GgufExperts
from aprefetch.storage.pack.copy import Copier, CopyScratch, Span, open_for_reading
from aprefetch.storage.pack.crew import Reporter, default_workers, run_crew
from aprefetch.storage.pack.files import PackFiles
from aprefetch.storage.pack.source import PackExperts
from aprefetch.storage.source import ModelSource

__all__ = ["differs"]


def differs(
    source: ModelSource,
    pack: PackExperts,
    reporter: Reporter,
    files: PackFiles | None = None,
    n_workers: int | None = None,
) -> bool:
    """Do any bytes of the pack's objects differ from the source's? Reads all routed experts.

    Raises:
        ReadError: the source cannot be read.
    """
    experts = GgufExperts(source, pack.layers, alignment=pack.alignment)
    if experts.layers != pack.layers:
        return True
    shape, expected = pack.shape, pack.digests()
    lock = threading.Lock()
    done_bytes = 0
    found = threading.Event()
    reporter.begin("compare")

    def spans() -> Iterator[Span]:
        for span in copier.spans():
            if found.is_set():
                return
            yield span

    with open_for_reading(source.paths, files or PackFiles(), pack.alignment) as opened:
        source.check_unchanged()
        copier = Copier(experts, shape, opened, None)

        def work(span: Span, scratch: CopyScratch) -> None:
            nonlocal done_bytes
            numbers, digests, _ = copier.copy(span, scratch)
            same = all(expected[n].tobytes() == d for n, d in zip(numbers, digests, strict=True))
            if not same:
                found.set()
            with lock:
                done_bytes += len(numbers) * span[0].payload_bytes

        run_crew(
            spans(),
            work,
            copier.scratch,
            n_workers=n_workers or default_workers(),
            tick=lambda: reporter.report(done_bytes, shape.payload_bytes),
        )
        source.check_unchanged()
    return found.is_set()
