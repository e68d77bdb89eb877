"""Eight requests at a time beside one at a time, with room for a quarter of the experts.

    python benchmarks/concurrency.py [--model FILE] [--requests 8] [--tokens 64] [--budget 0.25]

Each round runs the same prompts one after the other and then all together, on one runtime, with
greedy decoding, so both make the same tokens; the ratio of the medians is what counts. The device
cache and the RAM tier together hold the given share of the routed experts' bytes. Experts are read
from an Expert Pack, built in a folder that is removed afterwards, or from the GGUF. The ceiling is
what the reads per token would allow on a drive of `--ssd-gbps`, with compute for free. Prints a
table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aprefetch
from aprefetch.plan import plan_model

BEGINNINGS = (
    "Once upon a time", "In the workshop, Tom", "The farmer and his wife", "A word is",
    "It was early morning and", "One day, a girl named", "At the end of a quiet street",
    "More than anything else, he",
)  # fmt: skip


@dataclass
class Round:
    """One way of running all prompts."""

    tokens_per_s: float
    bytes_per_token: float
    read_bytes_per_s: float
    cpu_ms_per_token: float
    answers: list[list[int]]


async def measure(
    rt: aprefetch.Runtime, prompts: list[str], n_tokens: int, *, together: bool
) -> Round:
    options = {"max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    before, start_ns, cpu_ns = rt.stats(), time.perf_counter_ns(), time.process_time_ns()
    if together:
        done = await asyncio.gather(*(rt.generate(prompt, **options) for prompt in prompts))
    else:
        done = [await rt.generate(prompt, **options) for prompt in prompts]
    seconds = (time.perf_counter_ns() - start_ns) / 1e9
    stats = rt.stats().since(before)
    return Round(
        tokens_per_s=stats.output_tokens / seconds,
        bytes_per_token=stats.bytes_read / stats.output_tokens,
        read_bytes_per_s=stats.bytes_read / seconds,
        cpu_ms_per_token=(time.process_time_ns() - cpu_ns) / stats.output_tokens / 1e6,
        answers=[answer.token_ids for answer in done],
    )


async def run(args: argparse.Namespace, folder: Path) -> None:
    plan = plan_model(args.model)
    total = int(args.budget * plan.routed_bytes)
    ram = max(plan.ram_minimum_bytes, total // 3)
    vram = max(plan.vram_minimum_bytes, total - ram)
    prompts = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(args.requests)]
    options = {
        "vram_budget": vram,
        "ram_budget": ram,
        "max_requests": args.requests,
        "experts": args.experts,
        "pack_folders": [str(folder)],
    }
    async with aprefetch.Runtime.open(args.model, **options) as rt:
        for together in (False, True):  # compiles
            await measure(rt, prompts, 4, together=together)
        solo, batch = [], []
        for _ in range(args.rounds):
            solo.append(await measure(rt, prompts, args.tokens, together=False))
            batch.append(await measure(rt, prompts, args.tokens, together=True))
        assert solo[0].answers == batch[0].answers, "a batch changed tokens"
        device = rt.plan.device
    row = {
        "benchmark": "concurrency",
        "model": plan.path.name,
        "device": device,
        "experts": args.experts,
        "requests": args.requests,
        "tokens": args.tokens,
        "budget_share": (vram + ram) / plan.routed_bytes,
    }
    print(f"{'':14}{'tokens/s':>10}{'MB/token':>10}{'MB/s':>10}{'ceiling':>10}{'CPU ms':>10}")
    for name, rounds in (("one by one", solo), ("together", batch)):
        middle = {
            field: statistics.median(getattr(r, field) for r in rounds)
            for field in ("tokens_per_s", "bytes_per_token", "read_bytes_per_s", "cpu_ms_per_token")
        }
        ceiling = middle["ceiling_tokens_per_s"] = args.ssd_gbps * 1e9 / middle["bytes_per_token"]
        print(
            f"{name:14}{middle['tokens_per_s']:10.1f}{middle['bytes_per_token'] / 1e6:10.3f}"
            f"{middle['read_bytes_per_s'] / 1e6:10.1f}{ceiling:10.1f}"
            f"{middle['cpu_ms_per_token']:10.2f}"
        )
        row[name.replace(" ", "_")] = middle
    row["ratio"] = statistics.median(
        b.tokens_per_s / s.tokens_per_s for s, b in zip(solo, batch, strict=True)
    )
    row["bytes_ratio"] = row["together"]["bytes_per_token"] / row["one_by_one"]["bytes_per_token"]
    print(f"ratio of rates {row['ratio']:.2f}, of bytes per token {row['bytes_ratio']:.2f}")
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="GGUF (default: the built-in one)")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.25, help="share of the experts' bytes")
    parser.add_argument("--ssd-gbps", type=float, default=2.0, help="of the drive, for the ceiling")
    parser.add_argument("--experts", choices=("pack", "gguf"), default="pack")
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        asyncio.run(run(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
