"""How near does our reader come to fio on the same file, at the same depth and block size?

    python benchmarks/reader.py [--file F | --size 1GiB --dir D] [--depth 8] [--repeats 5]

Both read the whole file once per run, directly, at random offsets, in two shapes: blocks of 4 MiB
one by one, and objects of three blocks of 4.25 MiB as the pipeline reads them. Runs of our backends
and of fio's engines alternate, so that a drive whose speed drifts hurts all. Where fio is not
installed only ours are measured. Prints a table, and one JSON line last. CPU seconds are of the
whole process, the kernel's workers for it included; fio's include its start and the filling of its
buffers, ours only the reading.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from aprefetch.config import parse_bytes
from aprefetch.pipeline.io.uring import why_refused
from aprefetch.pipeline.reader import Priority, ReadJob, make_reader
from aprefetch.stats import Counters
from aprefetch.types import AlignedRead, ExpertKey

MIB = 2**20


class Shape(NamedTuple):
    """How the file is cut."""

    name: str
    block_bytes: int
    blocks_per_job: int


SHAPES = (Shape("4 MiB blocks", 4 * MIB, 1), Shape("3 x 4.25 MiB objects", 4352 * 1024, 3))


class Run(NamedTuple):
    """One run: GB/s, and CPU seconds per GB."""

    rate: float
    cpu: float


@contextmanager
def sample_file(path: Path | None, folder: Path | None, n_bytes: int) -> Iterator[Path]:
    """The given file, or one of random bytes that is removed afterwards."""
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="aprefetch-reader-", dir=folder) as made:
        path = Path(made) / "sample.bin"
        block = os.urandom(16 * MIB)
        with path.open("wb") as f:
            for start in range(0, n_bytes, len(block)):
                f.write(block[: n_bytes - start])
            f.flush()
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield path


def _cpu_s(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def jobs_of(path: Path, shape: Shape, seed: int) -> list[tuple[AlignedRead, ...]]:
    """Every block of the file once, in random order, grouped into jobs."""
    blocks = list(range(path.stat().st_size // shape.block_bytes))
    random.Random(seed).shuffle(blocks)
    jobs = []
    for first in range(0, len(blocks), shape.blocks_per_job):
        numbers = blocks[first : first + shape.blocks_per_job]
        jobs.append(
            tuple(
                AlignedRead(
                    file=0,
                    offset=number * shape.block_bytes,
                    length=shape.block_bytes,
                    needed=shape.block_bytes,
                    landing_offset=i * shape.block_bytes,
                )
                for i, number in enumerate(numbers)
            )
        )
    return jobs


async def run_ours(path: Path, shape: Shape, depth: int, seed: int, backend: str) -> Run:
    """Read the file with our reader; as many landing slots as keep the queue filled."""
    counters = Counters()
    reader = make_reader([path], backend=backend, counters=counters, queue_depth=depth)
    job_bytes = shape.block_bytes * shape.blocks_per_job
    n_slots = 2 * depth
    memory = mmap.mmap(-1, n_slots * job_bytes)
    whole = memoryview(memory)
    whole[:: mmap.PAGESIZE] = bytes(len(whole[:: mmap.PAGESIZE]))  # touched before the clock runs
    slots = [whole[i * job_bytes : (i + 1) * job_bytes] for i in range(n_slots)]
    waiting = jobs_of(path, shape, seed)
    n_left = len(waiting)
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def submit(slot: memoryview) -> None:
        if waiting:
            key = ExpertKey(0, len(waiting))
            reader.submit(ReadJob(key, waiting.pop(), slot, Priority.DEMAND, done))

    def done(job: ReadJob, error: BaseException | None) -> None:
        nonlocal n_left
        n_left -= 1
        if error is not None and not finished.done():
            finished.set_exception(error)
        elif n_left == 0 and not finished.done():
            finished.set_result(None)
        else:
            submit(job.buffer)

    cpu_s, start_ns = _cpu_s(resource.RUSAGE_SELF), time.perf_counter_ns()
    for slot in slots:
        submit(slot)
    await finished
    wall_s = (time.perf_counter_ns() - start_ns) / 1e9
    cpu_s = _cpu_s(resource.RUSAGE_SELF) - cpu_s
    await reader.aclose()
    if counters.fallback_count:
        sys.exit(f"{path}: the file system refuses direct reads; choose another with --dir")
    gigabytes = counters.bytes_read / 1e9
    return Run(gigabytes / wall_s, cpu_s / gigabytes)


def run_fio(path: Path, shape: Shape, depth: int, seed: int, engine: str) -> Run:
    """Read as many bytes with fio. `psync` uses threads as ours does, others one queue."""
    n_bytes = path.stat().st_size // shape.block_bytes * shape.block_bytes
    n_jobs = depth if engine == "psync" else 1
    command = [
        "fio",
        "--name=read",
        f"--filename={path}",
        "--rw=randread",
        "--direct=1",
        "--readonly",
        "--thread",
        "--group_reporting",
        "--output-format=json",
        f"--ioengine={engine}",
        f"--iodepth={depth if n_jobs == 1 else 1}",
        f"--numjobs={n_jobs}",
        f"--bs={shape.block_bytes}",
        f"--size={n_bytes}",
        f"--io_size={n_bytes // n_jobs}",
        f"--randseed={seed + 1}",
    ]
    cpu_s = _cpu_s(resource.RUSAGE_CHILDREN)
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    cpu_s = _cpu_s(resource.RUSAGE_CHILDREN) - cpu_s
    read = json.loads(answer.stdout)["jobs"][0]["read"]
    rate = read["io_bytes"] / (read["runtime"] / 1e3) / 1e9
    return Run(rate, cpu_s / (read["io_bytes"] / 1e9))


def measure(
    path: Path, depth: int, repeats: int, backends: list[str], engines: list[str]
) -> list[dict[str, object]]:
    """All shapes, our backends and fio's engines in turn; medians."""
    rows = []
    ours = [f"aprefetch {backend}" for backend in backends]
    for shape in SHAPES:
        names = (*ours, *(f"fio {engine}" for engine in engines))
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for seed in range(repeats):
            order = list(runs)
            random.Random(seed).shuffle(order)
            for name in order:
                who, how = name.split()
                if who == "aprefetch":
                    runs[name].append(asyncio.run(run_ours(path, shape, depth, seed, how)))
                else:
                    runs[name].append(run_fio(path, shape, depth, seed, how))
        for name, of_name in runs.items():
            rates = [run.rate for run in of_name]
            rows.append(
                {
                    "shape": shape.name,
                    "reader": name,
                    "gb_per_s": round(statistics.median(rates), 3),
                    "slowest": round(min(rates), 3),
                    "fastest": round(max(rates), 3),
                    "cpu_s_per_gb": round(statistics.median(run.cpu for run in of_name), 3),
                    # per repeat, since the drive drifts between repeats
                    "ours_to_this": round(
                        statistics.median(
                            one.rate / other.rate
                            for one, other in zip(runs[ours[-1]], of_name, strict=True)
                        ),
                        3,
                    ),
                }
            )
    return rows


def overhead_us(path: Path, backend: str, n_jobs: int = 2000) -> float:
    """CPU microseconds of the loop's thread per job of one 4 KiB read, submit to done."""

    async def run() -> float:
        reader = make_reader([path], backend=backend, counters=Counters())
        memory = memoryview(mmap.mmap(-1, 4096))
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        n_left = n_jobs
        read = AlignedRead(file=0, offset=0, length=4096, needed=4096, landing_offset=0)

        def done(job: ReadJob, error: BaseException | None) -> None:
            nonlocal n_left
            n_left -= 1
            if n_left == 0:
                finished.set_result(None)

        start_ns = time.thread_time_ns()
        for _ in range(n_jobs):
            reader.submit(ReadJob(None, (read,), memory, Priority.DEMAND, done))
        await finished
        spent_ns = time.thread_time_ns() - start_ns
        await reader.aclose()
        return spent_ns / n_jobs / 1e3

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="read this file (it is not changed)")
    parser.add_argument("--dir", type=Path, help="where to make the file; default: temporary")
    parser.add_argument("--size", default="1GiB", help="size of the made file")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    backends = ["threads", "workers"]
    if refused := why_refused():
        print(f"not measured: io_uring ({refused})", file=sys.stderr)
    else:
        backends.append("io_uring")
    engines = [*backends[2:], "libaio", "psync"] if shutil.which("fio") else []
    if not engines:
        print("fio is not installed: measuring aprefetch alone", file=sys.stderr)
    with sample_file(options.file, options.dir, parse_bytes(options.size)) as path:
        rows = measure(path, options.depth, options.repeats, backends, engines)
        loop_us = {backend: round(overhead_us(path, backend), 1) for backend in backends}
        n_bytes = path.stat().st_size
    heads = ("shape", "reader", "gb_per_s", "slowest", "fastest", "cpu_s_per_gb", "ours_to_this")
    print("".join(f"{head:<22}" if i < 2 else f"{head:>14}" for i, head in enumerate(heads)))
    for row in rows:
        cells = [row[head] for head in heads]
        print(
            "".join(f"{cell!s:<22}" if i < 2 else f"{cell!s:>14}" for i, cell in enumerate(cells))
        )
    texts = (f"{name} {us}" for name, us in loop_us.items())
    print(f"\nloop thread: us CPU per job of one 4 KiB read: {', '.join(texts)}")
    summary = {
        "benchmark": "reader",
        "file_bytes": n_bytes,
        "depth": options.depth,
        "repeats": options.repeats,
        "loop_us_per_job": loop_us,
        "rows": rows,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
