"""`aprefetch trace`: record routing traces, and say where the time of a traced run went."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from aprefetch.cli import options
from aprefetch.errors import ConfigError, InvalidRequestError

__all__ = ["add_parser"]

PROMPTS: tuple[str | list[dict[str, str]], ...] = (
    "Once upon a time",
    [{"role": "user", "content": "What is a whale?"}],
    "One day, a girl named",
    [{"role": "user", "content": "How do I make a list in Python?"}],
    "def read(path):\n    with open(path) as f:\n        for line in f:\n            ",
    "It is a truth universally acknowledged, that a single man in possession of",
    "The class has the following methods:\n\n* append(x)\n* extend(iterable)\n* insert(i, x)\n",
    "It was early morning and the sea was quiet. " * 24 + "Then",
    "Gentlemen of the Senate and of the House of Representatives: the state of the treasury",
)
"""Stories, questions, old prose, code-like text, a long context."""


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "trace",
        help="record routing, or sum up a trace",
        description="Record which experts a model uses, or say where a traced run's time went.",
    )
    kinds = parser.add_subparsers(dest="trace_command", metavar="COMMAND", required=True)
    record = kinds.add_parser(
        "record",
        help="generate, and write picks, guesses, tiers and times",
        description="Generate answers and write a routing trace (.npz, see numpy.load).",
    )
    options.add_model(record)
    record.add_argument("-o", "--output", metavar="FILE.npz", required=True, help="the trace")
    record.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; repeatable (default: a built-in set of varied prompts)",
    )
    record.add_argument(
        "--prompts", metavar="FILE", help="JSON list of prompts: texts, token ids or chats"
    )
    record.add_argument(
        "--settled",
        action="store_true",
        help="let every load end before a layer looks for its experts: hits repeat exactly",
    )
    record.add_argument("--no-loads", action="store_true", help="leave out single reads, uploads")
    record.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_sampling(record)
    options.add_runtime(record)
    record.set_defaults(command=_record)
    summary = kinds.add_parser(
        "summary",
        help="where the time went",
        description="Time by layer and stage of a Chrome trace or a routing trace, and a verdict.",
    )
    summary.add_argument("file", metavar="FILE", help="from --trace FILE, or from trace record")
    summary.add_argument("--json", action="store_true", help="print one JSON object")
    summary.set_defaults(command=_summary)


def _prompts(args: argparse.Namespace) -> list[Any]:
    chosen: list[Any] = list(args.prompt or ())
    if args.prompts is not None:
        text = options.read_text(args.prompts)
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InvalidRequestError(f"{args.prompts}: not JSON ({error})") from error
        if not isinstance(found, list):
            raise InvalidRequestError(f"{args.prompts}: a prompts file is a JSON list")
        chosen += found
    return chosen or list(PROMPTS)


def _record(args: argparse.Namespace) -> int:
    return options.run_async(_generate(args, _prompts(args)))


async def _generate(args: argparse.Namespace, prompts: list[Any]) -> int:
    import asyncio

    from aprefetch.runtime import Runtime
    from aprefetch.trace_summary import of_routing

    chosen = options.runtime_options(args)
    chosen |= {"trace": True, "trace_routing": True, "trace_settled": args.settled}
    sampling = {"max_tokens": 64, **options.sampling_options(args)}
    bar = options.progress_bar("record", " prompts")
    async with Runtime.open(args.model, **chosen) as runtime:
        for n, prompt in enumerate(prompts, start=1):
            await runtime.generate(prompt, **sampling)
            if bar is not None:
                bar(n, len(prompts))
        trace = runtime.routing_trace()
        if args.trace:
            await runtime.export_trace(args.trace)
    kept = trace.without_loads() if args.no_loads else trace
    try:
        await asyncio.to_thread(kept.save, args.output)
    except OSError as error:
        raise ConfigError(f"--output {args.output}: {error.strerror or error}") from error
    table = of_routing(trace)
    if args.json:
        print(json.dumps({"output": str(Path(args.output)), **table.to_dict()}))
    else:
        print(f"{args.output}: {len(trace.steps)} steps, {len(trace.picks)} picks")
        print("\n".join(table.lines()))
    return 0


def _summary(args: argparse.Namespace) -> int:
    from aprefetch.trace_summary import summarize

    table = summarize(args.file)
    print(json.dumps(table.to_dict()) if args.json else "\n".join(table.lines()))
    return 0
