"""What the two launchers share: options, the streamed answer, a table and one JSON line last.

Decode rates, hit rates and bytes are those of the tokens after the first one; the ceiling is the
rate that a drive of `--gbps` allows at these hits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

import aprefetch


def launch(model: str, architectures: tuple[str, ...], prompt: str) -> int:
    """Run the command line of one model's launcher; returns the exit status."""
    args = _parser(model, prompt).parse_args()
    try:
        return asyncio.run(_run(args, model, architectures))
    except aprefetch.AprefetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(model: str, prompt: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Run {model} with its experts on the SSD.")
    parser.add_argument("--gguf", required=True, metavar="FILE", help="the file, or any shard")
    parser.add_argument("--prompt", default=prompt, metavar="TEXT", help=f"default: {prompt}")
    parser.add_argument("--chat", action="store_true", help="ask through the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")
    parser.add_argument("--tokenizer", metavar="PATH", help="in place of the file's own")
    parser.add_argument("--vram-budget", metavar="SIZE", help="experts on the device, e.g. 20GiB")
    parser.add_argument("--ram-budget", metavar="SIZE", help="experts in host memory, e.g. 32GiB")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where to compute")
    parser.add_argument("--lookahead", choices=("on", "off"), help="guess experts ahead")
    parser.add_argument("--gbps", type=float, default=7.0, metavar="X", help="the drive's 1e9 B/s")
    return parser


async def _run(args: argparse.Namespace, model: str, architectures: tuple[str, ...]) -> int:
    names = ("vram_budget", "ram_budget", "device", "lookahead")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    async with aprefetch.Runtime.open(args.gguf, tokenizer=args.tokenizer, **options) as rt:
        found = rt.model_info.architecture
        if found not in architectures:
            print(f"error: {args.gguf} is {found}, not {model}", file=sys.stderr)
            return 1
        prompt = [{"role": "user", "content": args.prompt}] if args.chat else args.prompt
        if not args.chat:
            print(prompt, end="", flush=True)
        sampling = {name: getattr(args, name) for name in ("temperature", "seed", "ignore_eos")}
        first = None
        async with rt.stream(prompt, max_new_tokens=args.max_new_tokens, **sampling) as stream:
            async for event in stream:
                print(event.text, end="", flush=True)
                first = first or rt.stats()
        facts = _facts(rt, stream, first, args.gbps)
    print("\n\n" + "\n".join(_table(facts)))
    print(json.dumps(facts))
    return 0


def _facts(rt: Any, stream: Any, first: Any, gbps: float) -> dict[str, Any]:
    """What the table and the JSON line tell."""
    whole, usage, plan = rt.stats(), stream.usage, rt.plan
    decoded = usage.completion_tokens - 1
    # An answer of one token has no decode: then everything counts.
    part = whole.since(first) if decoded > 0 else whole
    report, calls = rt.report(usage, part), whole.routed_calls.values()
    lookups = part.hits_device + part.misses_device
    hits = (part.hits_device + part.hits_ram) / lookups if lookups else 0.0
    return {
        "model": report.model,
        "architecture": plan.architecture,
        "device": report.device,
        "experts": report.pack_state,
        "finish_reason": stream.finish_reason,
        **usage.to_dict(),
        "hit_rate_device": report.hit_rate_device,
        "hit_rate_ram": report.hit_rate_ram,
        "bytes_per_token": plan.bytes_per_token,
        "bytes_read_per_token": part.bytes_read / max(1, decoded),
        "ssd_gbps": gbps,
        # JSON has no infinity: null where every expert was there already.
        "ceiling_tokens_per_s": plan.ceiling(gbps, hits) if hits < 1 else None,
        "routed_layers": len(calls),
        "routed_calls_per_layer": [min(calls, default=0), max(calls, default=0)],
        "fallback_count": whole.fallback_count,
        "io_errors": whole.io_errors,
    }


def _table(facts: dict[str, Any]) -> list[str]:
    """For people."""
    ceiling = facts["ceiling_tokens_per_s"]
    bound = "none" if ceiling is None else f"{ceiling:.2f} tokens/s"
    return [
        f"model      {facts['model']} ({facts['architecture']}), {facts['device']}",
        f"tokens     {facts['prompt_tokens']} prompt, {facts['completion_tokens']} output",
        f"prefill    {facts['prefill_tokens_per_s']:.2f} tokens/s",
        f"decode     {facts['decode_tokens_per_s']:.2f} tokens/s",
        (
            f"hit rate   device {facts['hit_rate_device']:.1%}, "
            f"RAM {facts['hit_rate_ram']:.1%} of the rest"
        ),
        (
            f"per token  {facts['bytes_per_token'] / 1e6:.3f} MB used, "
            f"{facts['bytes_read_per_token'] / 1e6:.3f} MB read"
        ),
        f"ceiling    {bound} on a drive of {facts['ssd_gbps']:g} GB/s at this hit rate",
    ]
