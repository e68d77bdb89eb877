"""Arguments that several commands share, and what they mean for the library."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from aprefetch.errors import ConfigError, InvalidRequestError

__all__ = [
    "add_model",
    "add_runtime",
    "add_sampling",
    "check_output",
    "given",
    "print_json",
    "progress_bar",
    "read_text",
    "read_token_ids",
    "run_async",
    "runtime_options",
    "sampling_options",
]

T = TypeVar("T")
Commands = Any  # argparse's own type of a group of subparsers is private

_RUNTIME = {
    "vram_budget": "vram_budget",
    "ram_budget": "ram_budget",
    "ctx_size": "context_tokens",
    "queue_depth": "queue_depth",
    "chunk": "chunk_tokens",
    "device": "device",
    "kernels": "kernels",
    "threads": "n_threads",
    "cache_policy": "cache_policy",
    "experts": "experts",
    "pack_folder": "pack_folders",
    "verify": "verify",
}
_SAMPLING = {
    "max_tokens": "max_tokens",
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
}


def add_model(parser: argparse.ArgumentParser) -> None:
    """`-m`, and `-v`."""
    parser.add_argument(
        "-m", "--model", metavar="FILE", help="GGUF file, or any one shard (default: built-in)"
    )
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more; twice: all")


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Budgets, reading, lookahead, device."""
    group = parser.add_argument_group("memory and reading")
    group.add_argument("--vram-budget", metavar="SIZE", help="experts on the device, e.g. 20GiB")
    group.add_argument("--ram-budget", metavar="SIZE", help="experts in host memory, e.g. 32GiB")
    group.add_argument("-c", "--ctx-size", type=int, metavar="N", help="most tokens of a sequence")
    group.add_argument("--chunk", type=int, metavar="N", help="prompt tokens per step")
    group.add_argument("--queue-depth", type=int, metavar="N", help="reads in flight")
    group.add_argument("--strict-direct", action="store_true", help="refuse buffered reads")
    group.add_argument(
        "--lookahead", metavar="off|N", help="guess the experts of the next N layers, or off"
    )
    group.add_argument(
        "--cache-policy", choices=("layered", "lfu", "lru"), help="what leaves a full cache"
    )
    group.add_argument(
        "--experts", choices=("auto", "pack", "gguf"), help="read a pack if there is one (auto)"
    )
    group.add_argument(
        "--pack-folder", action="append", metavar="DIR", help="where packs are; may be repeated"
    )
    group.add_argument(
        "--verify",
        choices=("off", "sampled", "first_read", "full"),
        help="compare a pack's objects with their digests",
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where to compute")
    group.add_argument("--kernels", choices=("auto", "fast", "reference"), help="CPU kernels")
    group.add_argument("--threads", type=int, metavar="N", help="compute threads")
    group.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the run")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen."""
    group = parser.add_argument_group("sampling")
    group.add_argument("-n", "--max-tokens", type=int, metavar="N", help="most tokens (256)")
    group.add_argument("--temp", type=float, metavar="T", help="temperature; 0 is greedy (1.0)")
    group.add_argument("--top-p", type=float, metavar="P", help="nucleus (1.0: off)")
    group.add_argument("--top-k", type=int, metavar="K", help="likeliest tokens kept (0: all)")
    group.add_argument("--min-p", type=float, metavar="P", help="least share of the best (0: off)")
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="(1.0: off)")
    group.add_argument("--seed", type=int, metavar="N", help="repeat the same draws")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer here")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end of text")


def runtime_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for `Runtime.open`; only what was given, so that defaults stay in one place.

    Raises:
        ConfigError: `--lookahead` is neither "off" nor a number, or the trace cannot be written.
    """
    options = given(args, _RUNTIME)
    if args.strict_direct:
        options["strict_direct"] = True
    if args.trace is not None:
        check_output("--trace", args.trace)
        options["trace"] = True
    if args.lookahead is not None:
        if args.lookahead == "off":
            options["lookahead"] = "off"
        elif args.lookahead.isdecimal():
            options["lookahead_depth"] = int(args.lookahead)
        else:
            raise ConfigError(f"--lookahead must be 'off' or a number, not {args.lookahead!r}")
    return options


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for `generate` and `stream`; only what was given."""
    options = given(args, _SAMPLING)
    if args.ignore_eos:
        options["ignore_eos"] = True
    return options


def given(args: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    """The arguments that were given, by the library's names."""
    found = ((keyword, getattr(args, name)) for name, keyword in names.items())
    return {keyword: value for keyword, value in found if value is not None}


def check_output(option: str, path: str) -> None:
    """Say now, and not after hours of work, that a file cannot be written.

    Raises:
        ConfigError: its folder does not exist, it is a folder, or writing is not allowed.
    """
    folder = os.path.dirname(path) or "."
    if not path or os.path.isdir(path):
        problem = "is a folder" if path else "names no file"
    elif not os.path.isdir(folder):
        problem = f"there is no folder {folder!r}"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        problem = "may not be written"
    else:
        return
    raise ConfigError(f"{option} {path!r}: {problem}")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout, in plain ASCII where stdout's encoding lacks characters."""
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    print(json.dumps(value, ensure_ascii=not is_unicode))


def read_token_ids(path: str) -> list[int]:
    """A JSON list of integers, as it is.

    Raises:
        InvalidRequestError: the file cannot be read, or holds something else.
    """
    try:
        ids = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path}: not JSON ({error})") from error
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise InvalidRequestError(f"{path}: a token-id file is a JSON list of integers")
    return ids


def read_text(path: str) -> str:
    """A text file in UTF-8; "-" is stdin.

    Raises:
        InvalidRequestError: it cannot be read or is not UTF-8.
    """
    name = "stdin" if path == "-" else path
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name}: not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})"
        ) from error
    except ValueError as error:  # such as a zero in the path
        raise InvalidRequestError(f"{path!r}: {error}") from error


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where there is one. SIGINT and SIGTERM cancel, so that everything is closed.

    Raises:
        KeyboardInterrupt: one of these signals came.
    """
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        pass
    terminated = False

    async def guarded() -> T:
        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await task
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            try:
                return runner.run(guarded())
            except asyncio.CancelledError:
                if terminated:
                    raise KeyboardInterrupt from None
                raise
    finally:
        main.close()  # where there was no loop to run it; does nothing after its end


def progress_bar(label: str, unit: str) -> Callable[[int, int], None] | None:
    """A callback `(done, total)` that draws a bar on stderr; None where that is no terminal."""
    if not sys.stderr.isatty():
        return None
    from tqdm.auto import tqdm

    bar: Any = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=total, desc=label, unit=unit, file=sys.stderr, leave=False)
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return show
