"""Decode through the runtime on a GPU, beside the clairvoyant bound, with and without overlap.

    python tools/make_full_shape.py /dev/shm/flash.gguf --layers 5 --hash-layers 0
    python benchmarks/gpu_runtime.py /dev/shm/flash.gguf [--gbps 7,12] [--disk /data/flash.gguf]

Device cache and RAM tier hold 15 % of the experts each. Sources of the experts: a file on a RAM
file system read at the pace of a stated drive; a RAM tier that holds everything; a real drive.
Modes: `serial` (a layer's reads, wait, uploads, wait, compute: what loaders without overlap do),
`overlap` (no guesses), `lookahead`. Files on the RAM file system are read by the reader's compiled
threads: io_uring's workers would copy their bytes one read after the other. Time per token is
compared with max(bytes missed / bandwidth, compute with everything resident), where bytes missed
are those read less those that wrong guesses read. Tokens are sampled with one seed: all modes must
give the same. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import pstats
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from aprefetch import Runtime, embedded
from aprefetch.pipeline.io.wrappers import PacedFiles
from aprefetch.pipeline.reader import Reader, make_reader
from aprefetch.pipeline.uploader import Uploader
from aprefetch.plan import plan_model
from aprefetch.storage import open_source
from aprefetch.text.vocab import load_tokenizer
from aprefetch.types import ExpertKey

MODES = ("serial", "overlap", "lookahead")
LATENCY_S = 80e-6
_SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True}


class SerialUploader(Uploader):
    """Begins uploads only when nothing is being read any more; compute waits for their end.

    It looks for both ends whenever the loop turns: no timer and no thread makes it late.
    """

    reader: Any = None

    def start(self, *upload: Any) -> None:
        if self.reader.statistics().in_flight:
            asyncio.get_running_loop().call_soon(lambda: self.start(*upload))
        else:
            self._look(super().start(*upload))

    def _look(self, ticket: Any) -> None:
        if ticket is not None and self._copies.ordered is not None:
            has_ended = ticket.done()
            self._copies.ordered.poll()
            if not has_ended:
                asyncio.get_running_loop().call_soon(self._look, ticket)


@contextlib.contextmanager
def parts(files: Any, mode: str) -> Iterator[None]:
    """Runtimes opened inside read through `files`; tokens are written with the embedded model's."""
    words = load_tokenizer(open_source(embedded.MODEL_PATH))

    def reader(*args: Any, **options: Any) -> Reader:
        made = SerialUploader.reader = make_reader(*args, files=files, **options)
        return made

    with (
        mock.patch("aprefetch.runtime.make_reader", reader),
        mock.patch("aprefetch.loading.load_tokenizer", lambda *_, **__: words),
        contextlib.ExitStack() as stack,
    ):
        if mode == "serial":
            uploader = "aprefetch.pipeline.movement.Uploader"
            stack.enter_context(mock.patch(uploader, SerialUploader))
        yield


async def measure(rt: Runtime, n: int, prompt: list[int]) -> dict[str, Any]:
    """`n` decoded tokens after a prompt; numbers are per token."""
    ids: list[int] = []
    spans: Counter[str] = Counter()
    before, start_ns = rt.stats(), 0
    async with rt.stream(prompt, max_tokens=n + 1, **_SAMPLING) as stream:
        async for event in stream:
            ids.append(event.token_id)
            step = rt.last_step
            if start_ns and step is not None:
                spans["step"] += step.duration_ns
                for _, name, _, ns in step.spans:
                    spans[name] += ns
            if not start_ns:  # the prompt is over
                before, start_ns = rt.stats(), time.perf_counter_ns()
    ms = (time.perf_counter_ns() - start_ns) / 1e6 / n
    stats = rt.stats().since(before)
    looked_up = max(1, stats.hits_device + stats.misses_device)
    return {
        "ms": ms,
        "read": stats.bytes_read / n,
        "missed": (stats.bytes_read - stats.bytes_wasted) / n,
        "uploaded": stats.bytes_uploaded / n,
        "stall_ms": stats.stall_ns / 1e6 / n,
        "hits": stats.hits_device / looked_up,
        "recall": stats.predicted_right / max(1, stats.picked),
        "precision": stats.predicted_right / max(1, stats.predicted),
        "wasted": stats.bytes_wasted / n,
        "steps_without": stats.guesses_off,
        "busy": stats.read_busy_ns / 1e6 / n / ms,
        "spans_ms": {name: round(ns / 1e6 / n, 3) for name, ns in spans.items()},
        "ids": ids,
    }


async def settled_prefill(rt: Runtime, n: int) -> float:
    """Seconds of a prompt of `n` tokens."""
    prompt = torch.randint(4, 4000, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    began = time.perf_counter()
    await rt.generate(prompt, max_tokens=1, **_SAMPLING)
    return time.perf_counter() - began


async def opened(path: Path, mode: str, budgets: dict[str, int], **more: Any) -> Runtime:
    """A runtime in a mode."""
    options: dict[str, Any] = {"device": "cuda", "queue_depth": 16, **budgets, **more}
    if mode != "lookahead":
        options |= {"lookahead": "off", "trace_settled": mode == "serial"}
    return await Runtime.open(path, **options)


def every_expert(rt: Runtime) -> list[ExpertKey]:
    info = rt.model_info
    return [ExpertKey(n, e) for e in range(info.n_experts) for n in info.routed_layers]


async def resident(args: argparse.Namespace, plan: Any) -> dict[str, Any]:
    """Everything on the device: what compute alone takes, the runtime's own work included."""
    budgets = {"vram_budget": plan.vram_full_bytes, "ram_budget": 0}
    with parts(None, "overlap"):
        rt = await opened(args.path, "overlap", budgets)
    async with rt:
        while await rt._coordinator.warm(every_expert(rt)):
            pass  # as many at a time as can be on their way
        await measure(rt, 10, args.prompt)
        row = await measure(rt, args.tokens, args.prompt)
        if args.profile:
            with cProfile.Profile() as profile:
                await measure(rt, args.tokens, args.prompt)
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)
        for _ in range(2):
            row["prefill_s"] = await settled_prefill(rt, 512)
    return row


async def pinned(args: argparse.Namespace, plan: Any, mode: str) -> dict[str, Any]:
    """Everything in the pinned RAM tier, 15 % on the device."""
    budgets = {"vram_budget": share(plan.vram_full_bytes), "ram_budget": plan.ram_full_bytes}
    with parts(None, mode):
        rt = await opened(args.path, mode, budgets)
    async with rt:
        await rt._coordinator.warm(every_expert(rt))
        await measure(rt, args.warm_up, args.prompt)
        return await measure(rt, args.tokens, args.prompt)


async def streamed(
    args: argparse.Namespace, plan: Any, mode: str, path: Path, rate: float
) -> dict[str, Any]:
    """15 % on the device, 15 % in RAM, the rest from a drive; a rate of 0 leaves it as it is."""
    budgets = {
        "vram_budget": share(plan.vram_full_bytes),
        "ram_budget": share(plan.ram_full_bytes),
    }
    files = PacedFiles(None, bytes_per_s=rate * 1e9, latency_s=LATENCY_S) if rate else None
    with parts(files, mode):
        rt = await opened(path, mode, budgets, reader_backend="workers" if rate else "auto")
    async with rt:
        await measure(rt, args.warm_up, args.prompt)
        row = await measure(rt, args.tokens, args.prompt)
        if args.prefill and mode == "lookahead":
            row["prefill_s"] = await settled_prefill(rt, 512)
    return row


def upload_gbps() -> float:
    """Pinned host memory to the device, in pieces of an expert's size."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    best = 0.0
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for at in range(0, 1 << 30, 1 << 24):
            target[at : at + (1 << 24)].copy_(source[at : at + (1 << 24)], non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, (1 << 30) / (time.perf_counter() - began) / 1e9)
    return best


def share(n_bytes: int) -> int:
    """15 %."""
    return n_bytes * 15 // 100


def show(source: str, mode: str, row: dict[str, Any], gbps: float, compute_ms: float) -> None:
    """One line of the table."""
    moved = row["uploaded"] if source.startswith("RAM") else row["missed"]
    row["bound_ms"] = max(moved / gbps / 1e6, compute_ms) if gbps else compute_ms
    row |= {"source": source, "mode": mode, "gbps": gbps, "of_bound": row["ms"] / row["bound_ms"]}
    print(
        f"{source:<12}{mode:<10}{row['ms']:9.2f}{row['bound_ms']:9.2f}{row['of_bound']:8.2f}"
        f"{row['stall_ms']:9.2f}{row['hits']:8.1%}{row['read'] / 1e6:9.1f}"
        f"{row['uploaded'] / 1e6:9.1f}{row['recall']:8.1%}{row['busy']:7.0%}"
        + (f"  prefill 512: {row['prefill_s']:.2f} s" if "prefill_s" in row else ""),
        flush=True,
    )


def main() -> int:
    """The command."""
    args = _arguments()
    plan = plan_model(args.path, device="cpu")
    args.prompt = list(range(10, 18))
    h2d = upload_gbps()
    print(
        f"{args.path.name}: {plan.n_layers} layers, {plan.routed_bytes / 1e9:.2f} GB of experts; "
        f"upload {h2d:.1f} GB/s; {torch.cuda.get_device_name()}"
    )
    print(
        f"{'source':<12}{'mode':<10}{'ms/token':>9}{'bound':>9}{'ratio':>8}{'stall':>9}{'hits':>8}"
        f"{'MB read':>9}{'MB up':>9}{'recall':>8}{'busy':>7}"
    )
    rows = [asyncio.run(resident(args, plan))]
    compute_ms = rows[0]["ms"]
    show("resident", "", rows[0], 0, compute_ms)
    print(rows[0]["spans_ms"])
    rates = [float(rate) for rate in args.gbps.split(",") if rate]
    for rate in rates:
        for mode in args.modes.split(","):
            rows.append(asyncio.run(streamed(args, plan, mode, args.path, rate)))
            show(f"{rate:g} GB/s", mode, rows[-1], rate, compute_ms)
    for mode in args.modes.split(",") if not args.no_pinned else ():
        rows.append(asyncio.run(pinned(args, plan, mode)))
        show("RAM tier", mode, rows[-1], h2d, compute_ms)
    if args.disk:
        from decode import drive_gbps

        ceiling = drive_gbps(args.disk, 16, 1 << 31)
        for mode in args.modes.split(","):
            rows.append(asyncio.run(streamed(args, plan, mode, args.disk, 0.0)))
            show("disk", mode, rows[-1], ceiling, compute_ms)
    same = len({tuple(row.pop("ids")) for row in rows}) == 1
    print("tokens are the same in all modes" if same else "TOKENS DIFFER")
    for row in rows:
        row |= {name: round(value, 4) for name, value in row.items() if isinstance(value, float)}
    print(json.dumps({"h2d_gbps": round(h2d, 2), "same": same, "rows": rows}))
    return 0 if same else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--gbps", default="7,12", help="paces of the drive")
    parser.add_argument("--disk", type=Path, help="the same file on a real drive")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--warm-up", type=int, default=24)
    parser.add_argument("--no-pinned", action="store_true", help="leave the full RAM tier out")
    parser.add_argument("--profile", action="store_true", help="of the resident mode's Python")
    parser.add_argument("--prefill", action="store_true", help="512 tokens from the drive, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
