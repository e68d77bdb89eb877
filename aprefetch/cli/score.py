"""`aprefetch score`: log-probabilities of a given text."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from aprefetch.cli import options
from aprefetch.errors import ConfigError

if TYPE_CHECKING:
    from aprefetch.engine.request import ScoreResult

__all__ = ["add_parser"]


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "score",
        help="score a text",
        description="Teacher-forced log-probabilities of a text: mean NLL and perplexity.",
    )
    options.add_model(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", metavar="FILE", help="UTF-8 text; - reads stdin")
    text.add_argument("--token-ids", metavar="FILE", help="JSON list of ids, taken as it is")
    parser.add_argument(
        "--logits", metavar="OUT.npy", help="write all logits, float32 [tokens, vocab]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_runtime(parser)
    parser.set_defaults(command=_score)


def _score(args: argparse.Namespace) -> int:
    if args.logits is not None:
        options.check_output("--logits", args.logits)
    prompt: str | list[int]
    if args.token_ids is not None:
        prompt = options.read_token_ids(args.token_ids)
    else:
        prompt = options.read_text(args.text)
    return options.run_async(_measure(args, prompt))


async def _measure(args: argparse.Namespace, prompt: str | list[int]) -> int:
    import asyncio

    import numpy as np

    from aprefetch.runtime import Runtime

    def save(logits: Any) -> None:
        try:
            with open(args.logits, "wb") as file:
                np.save(file, logits)
        except OSError as error:
            raise ConfigError(f"--logits {args.logits}: {error.strerror or error}") from error

    runtime_options = options.runtime_options(args)
    async with Runtime.open(args.model, **runtime_options) as runtime:
        result = await runtime.score(
            prompt,
            logits=args.logits is not None,
            progress=options.progress_bar("score", " tokens"),
        )
        if result.logits is not None:
            await asyncio.to_thread(save, result.logits)
        if args.trace:
            await runtime.export_trace(args.trace)
    if args.json:
        options.print_json(_json(result))
    else:
        print(
            f"mean_nll {result.mean_nll:.6f}  perplexity {result.perplexity:.4f}  "
            f"n_tokens {result.n_tokens}"
        )
    return 0


def _json(result: ScoreResult) -> dict[str, Any]:
    """The result's own keys; JSON has no infinity, so a perplexity beyond floats is null."""
    found = result.to_dict()
    if not math.isfinite(found["perplexity"]):
        found["perplexity"] = None
    return found
