"""`aprefetch serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from aprefetch.cli import options
from aprefetch.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from aprefetch.server.app import ServerOptions

__all__ = ["add_parser"]

_SEND_BUFFER_BYTES = 1 << 18  # per connection: how much a slow reader can make the kernel hold


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "serve",
        help="serve OpenAI's API",
        description="Serve OpenAI's API over HTTP, with a live page at /. Extra: server.",
    )
    options.add_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to bind (127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port to bind; 0 takes any (8000)")
    group.add_argument("--model-name", metavar="NAME", help="name that clients ask for")
    group.add_argument("--api-key", metavar="KEY", action="append", help="ask for this key")
    group.add_argument("--api-key-file", metavar="FILE", help="ask for a key of this file's lines")
    group.add_argument("--max-body", metavar="SIZE", default="8MiB", help="largest request (8MiB)")
    group.add_argument(
        "--drain", type=float, default=30.0, metavar="S", help="time for answers at the end (30)"
    )
    group.add_argument(
        "--stall", type=float, default=60.0, metavar="S", help="drop a client that stalls (60)"
    )
    batch = parser.add_argument_group("many requests")
    batch.add_argument("--max-requests", type=int, metavar="N", help="requests that run (16)")
    batch.add_argument("--max-waiting", type=int, metavar="N", help="requests that wait (256)")
    batch.add_argument("--state-budget", metavar="SIZE", help="memory for their caches")
    batch.add_argument("--request-timeout", type=float, metavar="S", help="time of a request")
    batch.add_argument(
        "--prefix-budget", metavar="SIZE", default="1GiB",
        help="memory for states that longer prompts continue from; 0 for none (1GiB)",
    )  # fmt: skip
    batch.add_argument("--prefix-folder", metavar="DIR", help="keep states here too")
    batch.add_argument("--prefix-disk-budget", metavar="SIZE", help="for that folder (8GiB)")
    batch.add_argument("--token-gap", type=float, metavar="S", help="wished time between tokens")
    options.add_runtime(parser)
    parser.set_defaults(command=_serve)


_BATCH = {
    "max_requests": "max_requests",
    "max_waiting": "max_waiting",
    "state_budget": "state_budget",
    "request_timeout": "request_timeout_s",
    "token_gap": "token_gap_s",
    "prefix_budget": "prefix_budget",
    "prefix_folder": "prefix_folder",
    "prefix_disk_budget": "prefix_disk_budget",
}


def _serve(args: argparse.Namespace) -> int:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the server needs {error.name}; install it with: pip install 'aprefetch[server]'"
        ) from None
    server_options = _server_options(args)
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with (
        contextlib.closing(_bind(args.host, args.port)) as listener,
        asyncio.Runner(loop_factory=factory) as runner,
    ):
        return runner.run(_run(args, server_options, listener))


def _server_options(args: argparse.Namespace) -> ServerOptions:
    from aprefetch.config import parse_bytes
    from aprefetch.server.app import ServerOptions

    keys = list(args.api_key or ())
    if args.api_key_file is not None:
        try:
            text = Path(args.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{args.api_key_file}: {error}") from error
        keys += [line.strip() for line in text.splitlines() if line.strip()]
        if not keys:
            raise ConfigError(f"{args.api_key_file}: no key in it")
    problems = [
        f"--{name} must be a number of seconds above 0"
        for name in ("drain", "stall")
        if not getattr(args, name) > 0
    ]
    if not all(keys) or any(not key.isascii() for key in keys):
        problems.append("an API key must be of ASCII letters and not empty")
    if problems:
        raise ConfigError(problems)
    return ServerOptions(
        model_name=args.model_name,
        api_keys=tuple(keys),
        max_body_bytes=parse_bytes(args.max_body),
        stall_s=args.stall,
    )


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise ConfigError(f"--port must be from 0 to 65535, not {port}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            listener.bind(address)
            listener.listen(1024)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot bind {host}:{port}: {error.strerror or error}") from error
    return listener


async def _run(
    args: argparse.Namespace, server_options: ServerOptions, listener: socket.socket
) -> int:
    from aprefetch.runtime import Runtime
    from aprefetch.server.app import create_app

    runtime_options = options.runtime_options(args)
    runtime_options |= options.given(args, _BATCH)
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)  # while the model is loaded
    try:
        async with Runtime.open(args.model, **runtime_options) as runtime:
            loop.remove_signal_handler(signal.SIGTERM)
            app = create_app(runtime, server_options)
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            name = server_options.model_name or runtime.model_info.name
            print(f"serving {name} on http://{shown}:{port}", file=sys.stderr, flush=True)
            await _uvicorn(app, listener, args.drain)
            if args.trace:
                await runtime.export_trace(args.trace)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return 0


async def _uvicorn(app: ASGIApp, listener: socket.socket, drain_s: float) -> None:
    """Serve until SIGINT or SIGTERM; then no new connection, and time for answers to end."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals end the serving, not the process: the runtime is closed afterwards."""
            loop = asyncio.get_running_loop()

            def stop() -> None:
                self.force_exit = self.should_exit  # the second time: at once
                self.should_exit = True

            signals = (signal.SIGINT, signal.SIGTERM)
            for number in signals:
                loop.add_signal_handler(number, stop)
            try:
                yield
            finally:
                for number in signals:
                    loop.remove_signal_handler(number)

    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=max(1, round(drain_s)),
        timeout_keep_alive=30,
    )
    await Server(config).serve(sockets=[listener])
