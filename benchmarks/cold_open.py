"""How long from starting Python to the first token, and what is read for it?

    python benchmarks/cold_open.py [--model FILE] [--repeats 5]

Each repeat is a new process. Before it, the kernel is told to drop the model file's pages, so the
file is cold; compiled kernels are warm (the first repeat, not counted, makes sure). Prints a table
and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from aprefetch import embedded

CHILD = """
import sys, time
started_ns = int(sys.argv[1])
import asyncio, json
import aprefetch
from aprefetch import embedded
imported_ns = time.perf_counter_ns()

def bytes_from_disk():
    for line in open("/proc/self/io"):
        if line.startswith("read_bytes"):
            return int(line.split()[1])

async def main():
    before = bytes_from_disk()
    async with aprefetch.Runtime.open(sys.argv[2], vram_budget="auto", ram_budget="auto") as rt:
        opened_ns = time.perf_counter_ns()
        async with rt.stream("Once upon a time", max_tokens=1, temperature=0) as stream:
            async for event in stream:
                break
        first_ns = time.perf_counter_ns()
        stats, info = rt.stats(), rt.model_info
    return {
        "import_s": (imported_ns - started_ns) / 1e9,
        "open_s": (opened_ns - imported_ns) / 1e9,
        "first_token_s": (first_ns - opened_ns) / 1e9,
        "total_s": (first_ns - started_ns) / 1e9,
        "expert_bytes_read": stats.bytes_read,
        "dense_bytes": info.dense_bytes,
        "disk_bytes": bytes_from_disk() - before,
    }

print(json.dumps(asyncio.run(main())))
"""


def drop_from_page_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def one_run(path: Path) -> dict[str, float]:
    drop_from_page_cache(path)
    started = str(time.perf_counter_ns())
    out = subprocess.run(
        [sys.executable, "-c", CHILD, started, str(path)], check=True, capture_output=True
    )
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=embedded.MODEL_PATH)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    one_run(args.model)
    runs = [one_run(args.model) for _ in range(args.repeats)]
    median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    print(f"{args.model.name}, median of {args.repeats} processes, file not in the page cache")
    for key, value in median.items():
        shown = f"{value:10.3f} s" if key.endswith("_s") else f"{value / 1e6:10.2f} MB"
        print(f"  {key:20}{shown}")
    print(json.dumps({"benchmark": "cold_open", "model": args.model.name, **median}))


if __name__ == "__main__":
    main()
