"""Reading into pinned memory beside the drive's ceiling; uploads while reads go on.

    python benchmarks/gpu_io.py /data/flash.gguf [--device cpu] [--depths 8,16] [--out FILE]

Reading: plain loops of direct `preadv` on 1 to 16 threads in blocks of 1, 4 and 16 MiB at random
offsets are tried once each; the two best then take turns with our reader, which reads experts as
the product does (a GGUF's own, in random order; of any other file three blocks of 4.25 MiB each).
All land in one pinned arena. The ceiling is the better of the two, by medians.

Upload: bandwidth from that arena to the device in pieces of 16 MiB, enqueued at once (the ceiling);
the product's copies of whole experts, some on their way at a time, first alone and then while the
reader reads into other slots of the arena as fast as it can; in turns. Aims: 95 % for reading, 90 %
for uploads beside reads. Prints a table and one JSON line. With `--device cpu` a copy in memory
stands in for the upload.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aprefetch.config import RuntimeConfig, parse_bytes
from aprefetch.errors import AprefetchError
from aprefetch.models import registry
from aprefetch.pipeline.reader import Priority, Reader, ReadJob, make_reader
from aprefetch.pipeline.uploader import ordered_copies
from aprefetch.plan import open_device
from aprefetch.stats import Counters
from aprefetch.storage import GgufExperts, direct_io_alignment, open_source
from aprefetch.types import AlignedRead, ExpertKey, Piece, align_up

MIB = 1 << 20
THREADS = (1, 2, 4, 8, 16)
BLOCKS = (1 * MIB, 4 * MIB, 16 * MIB)
UNDER_WAY_BYTES = 64 * MIB
_BLOCK_BYTES, _BLOCKS_PER_OBJECT = 4352 * 1024, 3


class Object(NamedTuple):
    """What one expert's way takes."""

    reads: tuple[AlignedRead, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Objects:
    """The experts of a file, or what stands in for them."""

    paths: tuple[Path, ...]
    alignment: int
    landing_bytes: int
    device_bytes: int
    payload_bytes: int
    all: list[Object]


def objects_of(path: Path) -> Objects:
    """A GGUF's routed experts; of another file blocks."""
    try:
        source = open_source(path)
    except AprefetchError:
        return _blocks_of(path)
    try:
        entry = registry.lookup(source.metadata)
        n_layers = entry.n_layers(source.metadata, source.tensors)
        alignment = max(direct_io_alignment(p) for p in source.paths)
        experts = GgufExperts(source, layers=range(n_layers), alignment=alignment)
        found = []
        for layer, layout in experts.layers.items():
            for expert in range(layout.n_experts):
                plan = experts.read_plan(ExpertKey(layer, expert))
                found.append(Object(plan.reads, plan.pieces))
        return Objects(
            experts.paths,
            alignment,
            align_up(max(map(experts.max_landing_bytes, experts.layers)), alignment),
            max(layout.device_bytes for layout in experts.layers.values()),
            max(layout.payload_bytes for layout in experts.layers.values()),
            found,
        )
    finally:
        source.close()


def _blocks_of(path: Path) -> Objects:
    n_bytes = _BLOCK_BYTES * _BLOCKS_PER_OBJECT
    found = []
    for start in range(0, path.stat().st_size - n_bytes + 1, n_bytes):
        at = range(0, n_bytes, _BLOCK_BYTES)
        reads = tuple(
            AlignedRead(
                file=0, offset=start + i, length=_BLOCK_BYTES, needed=_BLOCK_BYTES, landing_offset=i
            )
            for i in at
        )
        pieces = tuple(Piece(landing_offset=i, device_offset=i, n_bytes=_BLOCK_BYTES) for i in at)
        found.append(Object(reads, pieces))
    if not found:
        sys.exit(f"{path}: at least {n_bytes} bytes are needed")
    return Objects((path,), direct_io_alignment(path), n_bytes, n_bytes, n_bytes, found)


def plain_gbps(
    path: Path, view: memoryview, n_threads: int, block_bytes: int, seconds: float, seed: int
) -> float:
    """Loops of `preadv`, each thread into its own part of `view`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDONLY)
    try:
        n_blocks = max(1, os.fstat(fd).st_size // block_bytes)
        end_s = time.perf_counter() + seconds

        def work(i: int) -> int:
            rng, n_bytes = random.Random(seed * 64 + i), 0
            part = view[i * block_bytes : (i + 1) * block_bytes]
            while time.perf_counter() < end_s:
                n_bytes += os.preadv(fd, [part], rng.randrange(n_blocks) * block_bytes)
            return n_bytes

        begin_s = time.perf_counter()
        with ThreadPoolExecutor(n_threads) as pool:
            n_read = sum(pool.map(work, range(n_threads)))
        return n_read / (time.perf_counter() - begin_s) / 1e9
    finally:
        os.close(fd)


class Reading:
    """Our reader, kept full: every slot of `view` is read into again and again."""

    def __init__(
        self, reader: Reader, depth: int, objects: Objects, view: memoryview, seed: int
    ) -> None:
        self._reader, self._objects = reader, objects
        self._rng = random.Random(seed)
        size = objects.landing_bytes
        n_slots = min(len(view) // size, 2 * depth)
        self._slots = [view[i * size : (i + 1) * size] for i in range(n_slots)]
        self._n_open = 0
        self._idle: asyncio.Future[None] | None = None
        self._goes_on = False
        self.error: BaseException | None = None

    def begin(self) -> None:
        self._goes_on, self.error = True, None
        self._idle = asyncio.get_running_loop().create_future()
        for slot in self._slots:
            self._n_open += 1
            self._submit(slot)

    def _submit(self, slot: memoryview) -> None:
        reads = self._rng.choice(self._objects.all).reads
        self._reader.submit(ReadJob(None, reads, slot, Priority.DEMAND, self._done))

    def _done(self, job: ReadJob, error: BaseException | None) -> None:
        self.error = self.error or error
        if self._goes_on and self.error is None:
            self._submit(job.buffer)
            return
        self._n_open -= 1
        if not self._n_open and self._idle is not None:
            self._idle.set_result(None)

    async def end(self) -> None:
        self._goes_on = False
        assert self._idle is not None
        await self._idle
        if self.error is not None:
            raise self.error


class Uploading:
    """The product's copies of whole experts, some on their way at a time."""

    def __init__(self, device: Any, objects: Objects, landing: Tensor, slots: Tensor) -> None:
        self._device, self._objects = device, objects
        self._landing, self._slots = landing, slots
        self._n_landing = landing.numel() // objects.landing_bytes
        self._n_slots = slots.numel() // objects.device_bytes
        self._ordered = ordered_copies(device)
        self._n_under_way = max(4, min(32, UNDER_WAY_BYTES // objects.payload_bytes))

    def _start(self, i: int, done: Callable[[int, Exception | None], None]) -> None:
        # Any object's pieces: what lies in the slots does not matter here.
        source = i % self._n_landing * self._objects.landing_bytes
        target = i % self._n_slots * self._objects.device_bytes
        pieces = self._objects.all[i % len(self._objects.all)].pieces
        size = sum(p.n_bytes for p in pieces)
        if self._ordered is None:
            copies = [
                (
                    self._slots[target + p.device_offset : target + p.device_offset + p.n_bytes],
                    self._landing[
                        source + p.landing_offset : source + p.landing_offset + p.n_bytes
                    ],
                )
                for p in pieces
            ]
            self._device.copy_async(copies, functools.partial(done, size))
            return
        source, target = source + self._landing.data_ptr(), target + self._slots.data_ptr()
        ticket = self._ordered.enqueue_copies(
            [(target + p.device_offset, source + p.landing_offset, p.n_bytes) for p in pieces]
        )
        self._device.when_done(ticket, functools.partial(done, size, None))
        self._ordered.expedite()

    async def run(self, seconds: float) -> float:
        """GB/s over about so many seconds."""
        over = asyncio.get_running_loop().create_future()
        numbers = itertools.count()
        n_bytes, n_open = 0, self._n_under_way
        begin_s = time.perf_counter()

        def done(size: int, error: Exception | None) -> None:
            nonlocal n_bytes, n_open
            n_bytes += size
            if error is None and time.perf_counter() - begin_s < seconds:
                # Not from in here: the device may be calling several of these in a row.
                loop.call_soon(self._start, next(numbers), done)
                return
            n_open -= 1
            if over.done():
                return
            if error is not None:
                over.set_exception(error)
            elif not n_open:
                over.set_result(None)

        loop = asyncio.get_running_loop()
        for _ in range(self._n_under_way):
            self._start(next(numbers), done)
        await over
        return n_bytes / (time.perf_counter() - begin_s) / 1e9


def raw_gbps(device: Any, landing: Tensor, slots: Tensor, seconds: float) -> float:
    """The arena to the device in pieces of 16 MiB, all enqueued, then one wait; again and again."""
    n = min(landing.numel(), slots.numel(), 512 * MIB)
    is_cuda = device.name == "cuda"
    begin_s, n_bytes = time.perf_counter(), 0
    while time.perf_counter() - begin_s < seconds:
        for at in range(0, n, 16 * MIB):
            stop = min(at + 16 * MIB, n)
            if is_cuda:
                slots[at:stop].copy_(landing[at:stop], non_blocking=True)
            else:
                np.copyto(slots[at:stop].numpy(), landing[at:stop].numpy())
        if is_cuda:
            torch.cuda.synchronize()
        n_bytes += n
    return n_bytes / (time.perf_counter() - begin_s) / 1e9


@dataclass
class Bench:
    """One file, one device, one arena."""

    args: argparse.Namespace
    objects: Objects
    device: Any
    arena: Any
    slots: Tensor
    n_fallbacks: int = 0

    @property
    def view(self) -> memoryview:
        view: memoryview = self.arena.view
        return view

    def _reader(self, backend: str, depth: int, counters: Counters) -> Reader:
        """As the runtime makes it."""
        config = RuntimeConfig.build(queue_depth=depth, reader_backend=backend).reader
        slice_bytes = config.slice_bytes if isinstance(config.slice_bytes, int) else None
        return make_reader(
            self.objects.paths,
            backend=config.backend,
            counters=counters,
            queue_depth=config.queue_depth,
            strict_direct=config.strict_direct,
            slice_bytes=slice_bytes,
            alignment=self.objects.alignment,
            retries=config.retries,
        )

    async def ours_gbps(self, backend: str, depth: int, seconds: float, seed: int) -> float:
        """Our reader into the whole arena."""
        counters = Counters()
        reader = self._reader(backend, depth, counters)
        reading = Reading(reader, depth, self.objects, self.view, seed)
        begin_s = time.perf_counter()
        reading.begin()
        await asyncio.sleep(seconds)
        await reading.end()  # what is on its way counts, and so does its time
        elapsed_s = time.perf_counter() - begin_s
        await reader.aclose()
        self.n_fallbacks += counters.fallback_count
        return counters.bytes_read / elapsed_s / 1e9

    async def backends(self) -> list[str]:
        """Those that this machine has."""
        found = []
        for name in ("io_uring", "workers", "threads"):
            with contextlib.suppress(AprefetchError):
                await self._reader(name, 1, Counters()).aclose()
                found.append(name)
        return found

    async def reading(self) -> dict[str, Any]:
        """Plain loops and ours."""
        largest = max(self.objects.paths, key=lambda path: path.stat().st_size)
        seconds, rounds = self.args.seconds, self.args.rounds

        def plain(threads: int, block: int, seconds: float, seed: int) -> float:
            return plain_gbps(largest, self.view, threads, block, seconds, seed)

        fits = [(t, b) for b in BLOCKS for t in THREADS if t * b <= len(self.view)]
        scan = {(t, b): plain(t, b, seconds / 2, 1) for t, b in fits}
        print("plain loops, GB/s" + "".join(f"{t:>9}" for t in THREADS) + "  threads")
        for block in BLOCKS:
            cells = (f"{scan.get((t, block), float('nan')):>9.2f}" for t in THREADS)
            print(f"  {block // MIB:>2} MiB blocks  " + "".join(cells))
        best = sorted(scan, key=lambda shape: -scan[shape])[:2]
        turns: dict[Any, Callable[[int], Awaitable[float]]] = {}
        for shape in best:
            loops = functools.partial(plain, *shape, seconds)
            turns[shape] = functools.partial(asyncio.to_thread, loops)
        for name in self.args.backends or await self.backends():
            for depth in self.args.depths:
                turns[name, depth] = functools.partial(self.ours_gbps, name, depth, seconds)
        rates = await _in_turns(turns, rounds)
        ceiling = max(statistics.median(rates[shape]) for shape in best)
        rows = []
        for key, found in rates.items():
            is_ours = key not in best
            name = f"ours, {key[0]}, depth {key[1]}" if is_ours else _shape_name(*key)
            rows.append(_read_row(name, found, ceiling, is_ours))
        ours = max(row["of_ceiling"] for row in rows if row["ours"])
        return {"rows": rows, "ceiling_gbps": round(ceiling, 3), "best_of_ceiling": ours}

    async def upload(self) -> dict[str, Any]:
        """Plain copies, the product's, and the product's beside reads."""
        half = align_up(self.arena.n_bytes // 2, self.objects.landing_bytes)
        uploading = Uploading(self.device, self.objects, self.arena.tensor[:half], self.slots)
        beside: list[float] = []

        async def raw(_: int) -> float:
            landing = self.arena.tensor[:half]
            return raw_gbps(self.device, landing, self.slots, self.args.seconds)

        async def alone(_: int) -> float:
            return await uploading.run(self.args.seconds)

        async def with_reads(_: int) -> float:
            counters = Counters()
            depth = max(self.args.depths)
            backend = self.args.backends[0] if self.args.backends else "auto"
            reader = self._reader(backend, depth, counters)
            reading = Reading(reader, depth, self.objects, self.view[half:], 7)
            reading.begin()
            begin_s = time.perf_counter()
            try:
                await asyncio.sleep(0.2)
                rate = await uploading.run(self.args.seconds)
            finally:
                await reading.end()
                elapsed_s = time.perf_counter() - begin_s
                await reader.aclose()
            beside.append(counters.bytes_read / elapsed_s / 1e9)
            return rate

        turns = {"plain copies of 16 MiB": raw, "ours, alone": alone}
        turns["ours, beside reads"] = with_reads
        rates = await _in_turns(turns, self.args.rounds)
        ceiling = statistics.median(rates["plain copies of 16 MiB"])
        rows = [_read_row(name, found, ceiling, "ours" in name) for name, found in rates.items()]
        return {
            "rows": rows,
            "ceiling_gbps": round(ceiling, 3),
            "read_gbps_beside": round(statistics.median(beside), 3),
            "beside_reads_of_ceiling": rows[-1]["of_ceiling"],
        }


def _shape_name(n_threads: int, block_bytes: int) -> str:
    return f"plain, {n_threads} x {block_bytes // MIB} MiB"


async def _in_turns(
    turns: Mapping[Any, Callable[[int], Awaitable[float]]], rounds: int
) -> dict[Any, list[float]]:
    """Every measurement once per round, in an order that changes, after a round to warm up."""
    rates: dict[Any, list[float]] = {name: [] for name in turns}
    for seed in range(rounds + 1):
        order = list(turns)
        random.Random(seed).shuffle(order)
        for name in order:
            rates[name].append(await turns[name](seed))
    return {name: found[1:] for name, found in rates.items()}


def _read_row(name: str, rates: Sequence[float], ceiling: float, is_ours: bool) -> dict[str, Any]:
    median = statistics.median(rates)
    return {
        "name": name,
        "ours": is_ours,
        "gbps": round(median, 3),
        "slowest": round(min(rates), 3),
        "fastest": round(max(rates), 3),
        "of_ceiling": round(median / ceiling, 4),
    }


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title:<28}{'GB/s':>9}{'slowest':>10}{'fastest':>10}{'of ceiling':>12}")
    for row in rows:
        print(
            f"{row['name']:<28}{row['gbps']:>9.2f}{row['slowest']:>10.2f}{row['fastest']:>10.2f}"
            f"{row['of_ceiling']:>12.1%}",
            flush=True,
        )


async def _both(bench: Bench) -> tuple[dict[str, Any], dict[str, Any]]:
    reading = await bench.reading()
    _show("reading", reading["rows"])
    upload = await bench.upload()
    _show("upload", upload["rows"])
    print(f"reads beside the uploads: {upload['read_gbps_beside']:.2f} GB/s")
    return reading, upload


def main() -> int:
    """The command."""
    args = _arguments()
    objects = objects_of(args.path)
    device = open_device(RuntimeConfig.build(device=args.device))
    arena: Any = None
    try:
        n_landing = max(8, args.arena // objects.landing_bytes)
        largest = max(16 * 16 * MIB, n_landing * objects.landing_bytes)
        arena = device.alloc_host(align_up(largest, objects.landing_bytes), objects.alignment)
        arena.tensor.zero_()  # touched before the clock runs
        n_slots = max(8, min(n_landing, len(objects.all)))
        slots = device.alloc_slots(n_slots * objects.device_bytes)
        n_pageable = getattr(device, "n_pageable_bytes", 0)
        pinned = "pinned" if getattr(arena, "is_pinned", False) else "pageable"
        label = getattr(device, "label", device.name)
        print(
            f"{args.path.name}: {len(objects.all)} objects of {objects.payload_bytes / 1e6:.2f} MB"
            f"; arena {arena.n_bytes / 1e6:.0f} MB ({pinned}); {label}"
        )
        bench = Bench(args, objects, device, arena, slots)
        reading, upload = asyncio.run(_both(bench))
        result = {
            "benchmark": "gpu_io",
            "file": args.path.name,
            "device": label,
            "pinned": not n_pageable and pinned == "pinned",
            "direct": bench.n_fallbacks == 0,
            "object_bytes": objects.payload_bytes,
            "reading": reading,
            "upload": upload,
        }
        if bench.n_fallbacks:
            print("the file system refuses direct reads: these went through the page cache")
        text = json.dumps(result)
        if args.out is not None:
            args.out.write_text(text + "\n", encoding="utf-8")
        print(text)
    finally:
        if arena is not None:
            arena.close()
        device.close()
    return 0


def _names(text: str) -> list[str]:
    return text.split(",")


def _depths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a model, or any large file")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--depths", type=_depths, default=[8, 16], help="queue depths of ours")
    parser.add_argument("--backends", type=_names, help="of ours; default: all that there are")
    parser.add_argument("--seconds", type=float, default=1.2, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--arena", type=parse_bytes, default=1 << 30, help="landing memory")
    parser.add_argument("--out", type=Path, help="write the JSON there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
