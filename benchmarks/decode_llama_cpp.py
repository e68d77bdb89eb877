"""Decode rate with every expert resident, beside llama.cpp's CPU back end on the same file.

    pip install llama-cpp-python        # compiles llama.cpp
    python benchmarks/decode_llama_cpp.py [--model FILE] [--tokens 200] [--threads 2]

Both decode greedily after the same prompt and alternate in one process; the ratio of the medians
is what counts. llama.cpp rounds activations to 8 bits before each product, our kernels keep
float32. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import aprefetch
from aprefetch import embedded

PROMPT = "Once upon a time"


def llama_rate(llama: object, ids: list[int], n_tokens: int) -> float:
    """Tokens per second of decoding, the first token not counted."""
    llama.reset()
    stream = llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
    next(stream)
    start = time.perf_counter()
    for _ in range(n_tokens):
        next(stream)
    return n_tokens / (time.perf_counter() - start)


async def our_rate(runtime: aprefetch.Runtime, ids: list[int], n_tokens: int) -> float:
    """The same for us."""
    options = {"max_tokens": n_tokens + 1, "temperature": 0, "ignore_eos": True}
    async with runtime.stream(ids, **options) as stream:
        await anext(stream)
        start = time.perf_counter()
        n = 0
        async for _ in stream:
            n += 1
        return n / (time.perf_counter() - start)


async def run(args: argparse.Namespace) -> None:
    from llama_cpp import Llama

    llama = Llama(
        str(args.model), n_ctx=2048, n_threads=args.threads, n_threads_batch=args.threads,
        verbose=False,
    )  # fmt: skip
    ids = llama.tokenize(PROMPT.encode(), add_bos=True)
    async with aprefetch.Runtime.open(
        args.model, vram_budget="auto", ram_budget="auto", n_threads=args.threads
    ) as runtime:
        await our_rate(runtime, ids, args.tokens)  # loads every expert it needs
        llama_rate(llama, ids, args.tokens)
        ours, theirs = [], []
        for _ in range(args.repeats):
            ours.append(await our_rate(runtime, ids, args.tokens))
            theirs.append(llama_rate(llama, ids, args.tokens))
        hit_rate = runtime.stats().hit_rate
    us, them = statistics.median(ours), statistics.median(theirs)
    print(f"{args.model.name}: decode, {args.tokens} tokens, {args.threads} threads, batch 1")
    print(f"  llama.cpp  {them:8.1f} token/s   (activations rounded to 8 bits)")
    print(f"  aprefetch  {us:8.1f} token/s   (float32; device hit rate {hit_rate:.3f})")
    print(f"  ratio      {us / them:8.2f}")
    print(
        json.dumps(
            {
                "benchmark": "decode_llama_cpp", "model": args.model.name, "ours": us,
                "llama_cpp": them, "ratio": us / them, "threads": args.threads,
            }
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=embedded.MODEL_PATH)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
