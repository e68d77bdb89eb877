"""`aprefetch run`: continue a prompt and stream the text."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from aprefetch.cli import options
from aprefetch.errors import InvalidRequestError

if TYPE_CHECKING:
    from aprefetch.runtime import Runtime

__all__ = ["add_parser"]

_DEFAULT_PROMPT = "Once upon a time"
_JSON_KEYS = ("text", "token_ids", "finish_reason", "usage", "stats")


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "run",
        help="continue a prompt",
        description="Continue a prompt, streaming text to stdout and a report to stderr.",
    )
    options.add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads stdin")
    prompt.add_argument("--token-ids", metavar="FILE", help="JSON list of ids, taken as it is")
    parser.add_argument(
        "--chat", action="store_true", help="ask through the chat template, not plain continuation"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("-q", "--quiet", action="store_true", help="no report")
    options.add_sampling(parser)
    options.add_runtime(parser)
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    prompt = _prompt(args)
    return options.run_async(_generate(args, prompt))


def _prompt(args: argparse.Namespace) -> Any:
    if args.token_ids is not None:
        if args.chat:
            raise InvalidRequestError("--chat needs a text prompt, not --token-ids")
        return options.read_token_ids(args.token_ids)
    text = args.prompt
    if text == "-" or (text is None and not sys.stdin.isatty()):
        text = options.read_text("-")
        # What a shell pipes in ends with a line break that nobody means as part of the prompt.
        text = text.removesuffix("\n") or (_DEFAULT_PROMPT if args.prompt is None else "")
    elif text is None:
        text = _DEFAULT_PROMPT
    return [{"role": "user", "content": text}] if args.chat else text


async def _generate(args: argparse.Namespace, prompt: Any) -> int:
    from aprefetch.runtime import Runtime

    runtime_options = options.runtime_options(args)
    sampling = options.sampling_options(args)
    async with Runtime.open(args.model, **runtime_options) as runtime:
        if args.json:
            completion = await runtime.generate(prompt, **sampling)
            found = completion.to_dict()
            options.print_json({key: found[key] for key in _JSON_KEYS})
        else:
            await _stream(args, runtime, prompt, sampling)
        if args.trace:
            await runtime.export_trace(args.trace)
    return 0


async def _stream(
    args: argparse.Namespace, runtime: Runtime, prompt: Any, sampling: dict[str, Any]
) -> None:
    before = runtime.stats()
    if isinstance(prompt, str) and sys.stdout.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)  # stdout holds the answer alone
    async with runtime.stream(prompt, **sampling) as stream:
        async for event in stream:
            if event.text:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if not args.quiet:
        report = runtime.report(stream.usage, runtime.stats().since(before))
        print("\n".join(["", *report.lines()]), file=sys.stderr)
