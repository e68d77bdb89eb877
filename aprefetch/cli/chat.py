"""`aprefetch chat`: a conversation on the terminal.

Ctrl-C stops the answer; at the prompt it takes two of them to end the program. Each turn continues
from the kept state of the turn before, so only what is new is run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprefetch.cli import options
from aprefetch.cli.terminal import Lines
from aprefetch.errors import RequestError

if TYPE_CHECKING:
    from aprefetch.runtime import Runtime

__all__ = ["add_parser"]

_HELP = (
    "/reset starts anew, /stats shows counters, /save [FILE] and /load FILE keep the conversation, "
    "/quit (or Ctrl-D) ends; Ctrl-C stops an answer"
)
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_PREFIX_BUDGET = "1GiB"


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description=f"Talk with a model on the terminal. {_HELP}.",
    )
    options.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--think", action="store_true", help="let the model reason first")
    parser.add_argument("--history", metavar="FILE", help="keep what is typed in this file")
    parser.add_argument(
        "--prefix-budget", metavar="SIZE", default=_PREFIX_BUDGET,
        help=f"memory for the states of earlier turns; 0 for none ({_PREFIX_BUDGET})",
    )  # fmt: skip
    options.add_sampling(parser)
    options.add_runtime(parser)
    parser.set_defaults(command=_chat)


def _chat(args: argparse.Namespace) -> int:
    return options.run_async(_converse(args))


async def _converse(args: argparse.Namespace) -> int:
    from aprefetch.runtime import Runtime

    runtime_options = options.runtime_options(args)
    runtime_options["prefix_budget"] = args.prefix_budget
    async with Runtime.open(args.model, **runtime_options) as runtime:
        print(f"{runtime.model_info.name}: {_HELP}", file=sys.stderr)
        lines = Lines(Path(args.history) if args.history else None)
        talk = _Conversation(runtime, args)
        try:
            with _interrupts(talk):
                while (line := await lines.ask()) is not None and line != "/quit":
                    talk.n_interrupts = 0
                    await talk.take(line)
        finally:
            lines.close()
        if args.trace:
            await runtime.export_trace(args.trace)
    return 0


@contextlib.contextmanager
def _interrupts(talk: _Conversation) -> Iterator[None]:
    """Let Ctrl-C stop the answer that is being written, and the program only the second time."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if talk.stop_answer():
            return
        talk.n_interrupts += 1
        if talk.n_interrupts > 1:
            interrupted = True
            main.cancel()
        else:
            print("\n(Ctrl-C once more, Ctrl-D or /quit ends)", file=sys.stderr, flush=True)

    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


class _Conversation:
    """Messages so far, and the commands that work on them."""

    def __init__(self, runtime: Runtime, args: argparse.Namespace) -> None:
        self._runtime = runtime
        self._sampling = options.sampling_options(args)
        self._chat_options = {"thinking": True} if args.think else None
        self._opening = [{"role": "system", "content": args.system}] if args.system else []
        self._messages: list[dict[str, Any]] = list(self._opening)
        self._answering: asyncio.Task[None] | None = None
        self._shows_dim = sys.stdout.isatty()
        self.n_interrupts = 0  # since the last line

    def stop_answer(self) -> bool:
        """Stop the answer that is being written; false if there is none."""
        if self._answering is None or self._answering.done():
            return False
        self._answering.cancel()
        return True

    async def take(self, line: str) -> None:
        """Do what a line says: a command, or something to be answered."""
        if not line:
            return
        if not line.startswith("/"):
            self._answering = asyncio.ensure_future(self._answer(line))
            try:
                await self._answering
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # the program is to end, not the answer
                    self._answering.cancel()
                    await asyncio.wait({self._answering})
                    raise
            finally:
                self._answering = None
            return
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
        }
        command = commands.get(name)
        if command is None:
            print(_HELP, file=sys.stderr)
        else:
            command(rest.strip())

    def _reset(self, _: str) -> None:
        self._messages = list(self._opening)

    def _stats(self, _: str) -> None:
        for name, value in self._runtime.stats().to_dict().items():
            print(f"{name}: {value}", file=sys.stderr)

    def _save(self, name: str) -> None:
        path = Path(name or time.strftime("chat-%Y%m%d-%H%M%S.json"))
        text = json.dumps({"messages": self._messages}, ensure_ascii=False, indent=2)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            print(f"error: {path}: {error.strerror or error}", file=sys.stderr)
        else:
            print(f"saved to {path}", file=sys.stderr)

    def _load(self, name: str) -> None:
        from aprefetch.text.chat_template import check_messages

        try:
            found = json.loads(Path(name).read_text(encoding="utf-8"))
            self._messages = check_messages(found["messages"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {name or '/load needs a file'}: {error}", file=sys.stderr)
        else:
            print(f"{len(self._messages)} messages", file=sys.stderr)

    async def _answer(self, line: str) -> None:
        """Stream one answer; what was written until it stopped stays in the conversation.

        A request that fails leaves the conversation as it was.
        """
        runtime, start = self._runtime, len(self._messages)
        self._messages.append({"role": "user", "content": line})
        texts = {"content": "", "reasoning": ""}
        keep = runtime.answer_format.marker_ids
        try:
            async with runtime.stream(
                self._messages,
                chat_options=self._chat_options,
                keep_special=keep,
                **self._sampling,
            ) as stream:
                parser = runtime.answer_format.parser(stream.prompt or "", with_calls=False)
                async for event in stream:
                    parts = parser.push(event.text)
                    if event.finish_reason is not None:
                        parts += parser.flush()
                    for part in parts:
                        texts[part.kind] += part.text
                        self._show(part.kind, part.text)
        except RequestError as error:
            del self._messages[start:]
            print(f"error: {error} (/reset starts anew)", file=sys.stderr)
            return
        except asyncio.CancelledError:
            self._finish(texts, start)
            raise
        self._finish(texts, start)

    def _show(self, kind: str, text: str) -> None:
        if kind == "reasoning":
            text = f"{_DIM}{text}{_PLAIN}" if self._shows_dim else ""
        sys.stdout.write(text)
        sys.stdout.flush()

    def _finish(self, texts: dict[str, str], start: int) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()
        if not (texts["content"] or texts["reasoning"]):
            del self._messages[start:]  # nothing was said: as if nothing had been asked
            return
        answer = {"role": "assistant", "content": texts["content"]}
        if texts["reasoning"]:
            answer["reasoning_content"] = texts["reasoning"]
        self._messages.append(answer)
