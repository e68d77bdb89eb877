"""What does the Expert Pack cost to build, and what does it give when read?

    python benchmarks/pack.py [--folder DIR] [--objects 320] [--reads 500] [--depth 8]

Makes a file of random MXFP4 experts of DeepSeek-V4-Flash's size (13,369,344 bytes each), and

- builds its pack, beside `dd` with direct I/O copying the same bytes: one process, and as many
  processes as the build has threads, each with a range of the file. The build also hashes;
- reads random objects from the pack and from the GGUF through the product's reader, and ranges of
  the same size with fio, all past the page cache and with the same number in flight.

Needs about three times the file's size (4.3 GB by default) of free space in the folder; everything
is removed at the end. Rounds are interleaved; the table has medians and the spread. The last line
is JSON.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from synthetic_gguf import write_experts_only

from aprefetch.pipeline.reader import Priority, ReadJob, ThreadReader
from aprefetch.stats import Counters
from aprefetch.storage import ExpertSource, GgufExperts, open_source
from aprefetch.storage.pack import build_pack, open_pack
from aprefetch.storage.pack.crew import default_workers
from aprefetch.types import ExpertKey

HIDDEN, WIDTH, N_LAYERS = 4096, 2048, 4
OBJECT_BYTES = 13_369_344
Row = tuple[float, float, float]  # seconds, bytes, CPU seconds


def cpu_s() -> float:
    """CPU time of this process and of the children it waited for."""
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in both)


def measured(work: Callable[[], float]) -> Row:
    """Run `work`, which returns the bytes it moved."""
    os.sync()
    cpu, started_ns = cpu_s(), time.perf_counter_ns()
    n_bytes = work()
    return (time.perf_counter_ns() - started_ns) / 1e9, n_bytes, cpu_s() - cpu


def copy_with_dd(source: Path, target: Path, n_processes: int) -> float:
    """Copy with direct I/O, then have it on the drive."""
    target.unlink(missing_ok=True)
    n_bytes = source.stat().st_size
    block = 8 << 20
    n_blocks = -(-n_bytes // block)
    share = -(-n_blocks // n_processes)
    children = []
    for i in range(n_processes):
        count = min(share, n_blocks - i * share)
        command = ["dd", f"if={source}", f"of={target}", f"bs={block}", f"count={count}"]
        command += [f"skip={i * share}", f"seek={i * share}", "iflag=direct", "oflag=direct"]
        command += ["conv=notrunc,fdatasync", "status=none"]
        children.append(subprocess.Popen(command))
    assert all(child.wait() == 0 for child in children)
    return float(n_bytes)


def build(source: Path, folder: Path) -> float:
    """Build the pack anew."""
    shutil.rmtree(folder, ignore_errors=True)
    return float(build_pack(source, [folder], layers=range(N_LAYERS)).payload_bytes)


def landing_buffers(n: int, n_bytes: int) -> list[memoryview]:
    """Memory that exists already, as a runtime's does."""
    buffers = [memoryview(mmap.mmap(-1, n_bytes)) for _ in range(n)]
    for buffer in buffers:
        buffer[:] = bytes(n_bytes)
    return buffers


async def read_objects(
    experts: ExpertSource, keys: list[ExpertKey], depth: int, buffers: list[memoryview]
) -> float:
    """Read objects through the reader, landing in `buffers` in turn."""
    reader = ThreadReader(
        experts.paths, counters=Counters(), queue_depth=depth, alignment=experts.alignment
    )
    free = list(buffers)
    wanted = iter(keys)
    left = len(keys)
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def submit() -> None:
        key = next(wanted, None)
        if key is not None:
            plan = experts.read_plan(key)
            reader.submit(ReadJob(key, plan.reads, free.pop(), Priority.DEMAND, done))

    def done(job: ReadJob, error: BaseException | None) -> None:
        nonlocal left
        assert error is None, error
        left -= 1
        free.append(job.buffer)
        submit()
        if not left:
            ended.set_result(None)

    for _ in range(len(buffers)):
        submit()
    await ended
    await reader.aclose()
    return float(OBJECT_BYTES * len(keys))


def read_with_fio(path: Path, n_reads: int, depth: int) -> float:
    """Random aligned ranges of an object's size."""
    per_job = -(-n_reads // depth)
    command = ["fio", "--name=reads", f"--filename={path}", "--rw=randread", "--direct=1"]
    command += [f"--bs={OBJECT_BYTES}", "--ioengine=psync", "--thread", f"--numjobs={depth}"]
    command += [f"--io_size={per_job * OBJECT_BYTES}", "--group_reporting", "--norandommap"]
    command += ["--randrepeat=0", "--output-format=json"]
    out = subprocess.run(command, check=True, capture_output=True)
    return float(json.loads(out.stdout)["jobs"][0]["read"]["io_bytes"])


def table(rows: dict[str, list[Row]]) -> dict[str, dict[str, float]]:
    """Print medians; returns them."""
    out = {}
    print(f"  {'':24}{'GB/s':>8}{'from':>8}{'to':>8}{'CPU s/GB':>10}")
    for name, runs in rows.items():
        rates = sorted(n / s / 1e9 for s, n, _ in runs)
        cpu = statistics.median(c / n * 1e9 for _, n, c in runs)
        rate = statistics.median(rates)
        print(f"  {name:24}{rate:8.2f}{rates[0]:8.2f}{rates[-1]:8.2f}{cpu:10.2f}")
        out[name] = {"gb_per_s": rate, "cpu_s_per_gb": cpu}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--objects", type=int, default=320)
    parser.add_argument("--reads", type=int, default=500)
    parser.add_argument("--depth", type=int, default=8, help="reads in flight")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.folder, prefix="aprefetch-bench-"))
    try:
        result = bench(work, args)
    finally:
        shutil.rmtree(work)
    print(json.dumps(result))


def bench(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    n_experts = -(-args.objects // N_LAYERS)
    model = write_experts_only(
        work / "experts.gguf", n_layers=N_LAYERS, n_experts=n_experts, hidden=HIDDEN, width=WIDTH
    )
    n_workers = default_workers()
    builds: dict[str, list[Row]] = {"dd, 1 process": [], f"dd, {n_workers} processes": []}
    builds["build"] = []
    print(f"{model.stat().st_size / 1e9:.2f} GB, {args.rounds} rounds, {os.cpu_count()} cores")
    for _ in range(args.rounds):
        builds["build"].append(measured(lambda: build(model, work / "pack")))
        for n, name in ((1, "dd, 1 process"), (n_workers, f"dd, {n_workers} processes")):
            copy = work / "copy"
            builds[name].append(measured(lambda n=n, copy=copy: copy_with_dd(model, copy, n)))
            copy.unlink()
    print("building against copying (both read and write these bytes)")
    built = table(builds)
    best_dd = max(row["gb_per_s"] for name, row in built.items() if name != "build")
    share = built["build"]["gb_per_s"] / best_dd
    print(f"  build reaches {share:.0%} of the faster dd")
    pack = open_pack(next((work / "pack").glob("*.gguf")))
    rng = random.Random(1)
    keys = [ExpertKey(rng.randrange(N_LAYERS), rng.randrange(n_experts)) for _ in range(args.reads)]
    reads: dict[str, list[Row]] = {"pack": [], "direct GGUF": [], "fio": []}
    with open_source(model) as source:
        direct = GgufExperts(source, range(N_LAYERS))
        largest = max(e.max_landing_bytes(0) for e in (pack, direct))
        buffers = landing_buffers(2 * args.depth, largest)
        for _ in range(args.rounds):
            for name, experts in (("pack", pack), ("direct GGUF", direct)):
                reads[name].append(
                    measured(
                        lambda experts=experts: asyncio.run(
                            read_objects(experts, keys, args.depth, buffers)
                        )
                    )
                )
            reads["fio"].append(
                measured(lambda: read_with_fio(pack.paths[0], args.reads, args.depth))
            )
    print(f"{args.reads} random objects of {OBJECT_BYTES} bytes, {args.depth} in flight")
    read = table(reads)
    return {
        "benchmark": "pack",
        "n_bytes": model.stat().st_size,
        "n_workers": n_workers,
        "depth": args.depth,
        "building": built,
        "build_share_of_dd": share,
        "reading": read,
    }


if __name__ == "__main__":
    main()
