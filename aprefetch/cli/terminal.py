"""Lines from a terminal or a pipe, read on a thread that nobody has to wait for at the end.

A thread that blocks on a terminal cannot be stopped, so it is a daemon and holds nothing that the
exit needs. On a terminal `input` gives line editing and a history; from a pipe, bytes are read
directly, since a thread that blocks in `sys.stdin` would hold its lock at the exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["Lines"]

_HISTORY_LINES = 1000


class Lines:
    """Lines that the user gives, one at a time.

    Args:
        history: a file that keeps what was typed from one session to the next; None for none.
    """

    def __init__(self, history: Path | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._history = history
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._terminal_state: Any = None
        read = self._read_pipe
        if self.is_terminal:
            self._prepare()
            read = self._read_terminal
        threading.Thread(target=read, name="aprefetch-stdin", daemon=True).start()

    def _prepare(self) -> None:
        with contextlib.suppress(ImportError, OSError):
            import termios

            self._terminal_state = termios.tcgetattr(sys.stdin.fileno())
        with contextlib.suppress(ImportError):
            import readline

            readline.set_auto_history(True)
            readline.set_history_length(_HISTORY_LINES)
            if self._history is not None:
                with contextlib.suppress(OSError):
                    readline.read_history_file(self._history)

    def _read_terminal(self) -> None:
        while True:
            prompt = self._asked.get()
            try:
                line = input(prompt)
            except (EOFError, OSError, ValueError):
                self._put(None)
                return
            except KeyboardInterrupt:  # the main thread has been told too
                line = ""
            self._put(line)

    def _read_pipe(self) -> None:
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
        if self.is_terminal:
            self._asked.put("> ")
        elif sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = await self._lines.get()
        return line.strip() if line is not None else None

    def close(self) -> None:
        """Write the history; give the terminal back as it was, if a line was still awaited."""
        if not self.is_terminal:
            return
        if self._history is not None:
            with contextlib.suppress(ImportError, OSError):
                import readline

                self._history.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(self._history)
        if self._terminal_state is not None:
            import termios

            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._terminal_state)
