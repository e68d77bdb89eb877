"""The `aprefetch` command: arguments, exit codes, and one clear line for each error.

Exit codes: 0 good, 1 an error of ours (missing file, budget, read error, ...), 2 wrong usage or
options, 130 interrupted. Text goes to stdout, everything else to stderr. Nothing heavy is imported
before a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence

from aprefetch._version import __version__
from aprefetch.cli import chat, doctor, inspect, pack, plan, run, score, serve, trace, verify
from aprefetch.errors import AprefetchError, ConfigError, InvalidRequestError

__all__ = ["build_parser", "main"]

_DESCRIPTION = (
    "Run Mixture-of-Experts models larger than memory: experts stream from the SSD. "
    "Without -m the small model that ships with the package is used."
)


_OUT_OF_MEMORY = ("bad_alloc", "failed to map segment")
"""What libraries say that find no memory while they are loaded."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="aprefetch", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"aprefetch {__version__}")
    commands = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True)
    for module in (run, chat, serve, inspect, plan, score, trace, pack, verify, doctor):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    _fill_standard_streams()
    args = build_parser().parse_args(argv)
    _set_up_logging(getattr(args, "verbose", 0))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # text that the terminal's encoding lacks
    try:
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return 1
    except MemoryError as error:
        detail = f" ({error})" if str(error) else ""
        return _complain(AprefetchError(f"out of memory{detail}; give smaller budgets"), 1)
    except (RuntimeError, ImportError) as error:
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            return _complain(AprefetchError("out of memory; raise the limit on it"), 1)
        if "thread" not in str(error):  # Python's words for a system that gives no more of them
            raise
        return _complain(AprefetchError(f"{error}; raise the limits on memory and threads"), 1)
    except OSError as error:
        # Files are read and written under names of their own errors; this is stdout or the system.
        _drop_stdout()
        return _complain(AprefetchError(str(error.strerror or error)), 1)
    except (ConfigError, InvalidRequestError) as error:
        return _complain(error, 2)
    except AprefetchError as error:
        return _complain(error, 1)


def _fill_standard_streams() -> None:
    """Put the null device where stdin, stdout or stderr is closed.

    Otherwise the next file that is opened gets its number, and libraries write into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        mode = "r" if name == "stdin" else "w"
        stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def _drop_stdout() -> None:
    """The reader went away: Python flushes stdout at exit, and would complain once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: AprefetchError, code: int) -> int:
    text = " ".join(str(error).split())
    print(f"aprefetch: error: {text}", file=sys.stderr)
    return code


def _set_up_logging(verbose: int) -> None:
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(level=level, format="%(name)s: %(message)s", stream=sys.stderr)
