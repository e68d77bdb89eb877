"""`aprefetch chat`: a conversation on the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from aprefetch.cli import options
from aprefetch.errors import RequestError

if TYPE_CHECKING:
    from aprefetch.runtime import Runtime

__all__ = ["add_parser"]

_HELP = "/reset starts anew, /stats shows counters, /quit (or Ctrl-D) ends"


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description=f"Talk with a model on the terminal. {_HELP}.",
    )
    options.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    options.add_sampling(parser)
    options.add_runtime(parser)
    parser.set_defaults(command=_chat)


def _chat(args: argparse.Namespace) -> int:
    return options.run_async(_converse(args))


async def _converse(args: argparse.Namespace) -> int:
    from aprefetch.runtime import Runtime

    runtime_options = options.runtime_options(args)
    sampling = options.sampling_options(args)
    async with Runtime.open(args.model, **runtime_options) as runtime:
        print(f"{runtime.model_info.name}: {_HELP}", file=sys.stderr)
        opening = [{"role": "system", "content": args.system}] if args.system else []
        lines = _Lines()
        messages: list[dict[str, Any]] = list(opening)
        while (line := await lines.ask()) is not None:
            if line == "/quit":
                break
            if line == "/reset":
                messages = list(opening)
            elif line == "/stats":
                for name, value in runtime.stats().to_dict().items():
                    print(f"{name}: {value}", file=sys.stderr)
            elif line.startswith("/"):
                print(_HELP, file=sys.stderr)
            elif line:
                await _answer(runtime, messages, line, sampling)
        if args.trace:
            await runtime.export_trace(args.trace)
    return 0


class _Lines:
    """Lines of stdin, read on a thread that nobody has to wait for at the end.

    A thread that blocks on a terminal cannot be stopped: one of the loop's own would hold up the
    exit, and one that reads through `sys.stdin` would hold its lock.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        threading.Thread(target=self._read, name="aprefetch-stdin", daemon=True).start()

    def _read(self) -> None:
        pending = b""
        try:
            while block := os.read(sys.stdin.fileno(), 65536):
                *lines, pending = (pending + block).split(b"\n")
                for line in lines:
                    self._put(line.decode("utf-8", "replace"))
        except OSError:
            pass  # the terminal is gone: the end of input
        if pending:
            self._put(pending.decode("utf-8", "replace"))
        self._put(None)

    def _put(self, line: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._lines.put_nowait, line)

    async def ask(self) -> str | None:
        """A line from the user, or None at the end of input."""
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = await self._lines.get()
        return line.strip() if line is not None else None


async def _answer(
    runtime: Runtime, messages: list[dict[str, Any]], line: str, sampling: dict[str, Any]
) -> None:
    """Stream one answer; a request that fails leaves the conversation as it was."""
    messages.append({"role": "user", "content": line})
    parts = []
    try:
        async with runtime.stream(messages, **sampling) as stream:
            async for event in stream:
                parts.append(event.text)
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except RequestError as error:
        messages.pop()
        print(f"error: {error} (/reset starts anew)", file=sys.stderr)
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    messages.append({"role": "assistant", "content": "".join(parts)})
