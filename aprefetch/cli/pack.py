"""`aprefetch pack`: build a model's Expert Pack, or find that it is there."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aprefetch.cli import options

if TYPE_CHECKING:
    from aprefetch.storage.pack import BuildResult, PackProgress

__all__ = ["add_parser", "show_progress"]


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "pack",
        help="build a model's Expert Pack",
        description=(
            "Copy a model's routed experts into an Expert Pack: one aligned, checked object per "
            "expert. A build that was stopped goes on where it was."
        ),
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF file, or any one shard")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        metavar="DIR",
        help="folder (default: beside the model); again to spread it over several drives",
    )
    parser.add_argument("--rebuild", action="store_true", help="replace a pack that is there")
    parser.add_argument("--alignment", metavar="SIZE", help="of objects (what the drives need)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads that copy and hash")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more")
    parser.set_defaults(command=_pack)


def _pack(args: argparse.Namespace) -> int:
    result = options.run_async(_build(args))
    out = {
        "state": result.state,
        "paths": [str(path) for path in result.paths],
        "n_objects": result.n_objects,
        "payload_bytes": result.payload_bytes,
        "bytes_read": result.bytes_read,
        "bytes_written": result.bytes_written,
    }
    if args.json:
        print(json.dumps(out))
    else:
        print(f"{result.state}: {result.n_objects} objects, {result.payload_bytes} bytes")
        for path in result.paths:
            print(path)
    return 0


async def _build(args: argparse.Namespace) -> BuildResult:
    from aprefetch.config import parse_bytes
    from aprefetch.errors import ConfigError
    from aprefetch.models import registry
    from aprefetch.storage import open_source
    from aprefetch.storage.pack import build_pack_async

    if args.threads is not None and not 1 <= args.threads <= 64:
        raise ConfigError(f"--threads must be between 1 and 64, not {args.threads}")
    with open_source(args.model) as source:
        # A model that cannot be run is refused before anything is written.
        entry = registry.lookup(source.metadata)
        entry.check(source.metadata, source.tensors)
        return await build_pack_async(
            source,
            args.output or (),
            layers=range(entry.n_layers(source.metadata, source.tensors)),
            alignment=None if args.alignment is None else parse_bytes(args.alignment),
            rebuild=args.rebuild,
            progress=show_progress(),
            n_workers=args.threads,
        )


def show_progress() -> Callable[[PackProgress], None] | None:
    """A bar on stderr with rate and time left, one per phase; None where that is no terminal."""
    if not sys.stderr.isatty():
        return None
    from tqdm.auto import tqdm

    bar: Any = None
    phase = ""

    def show(event: PackProgress) -> None:
        nonlocal bar, phase
        if event.phase != phase:
            if bar is not None:
                bar.close()
            phase = event.phase
            bar = tqdm(
                total=event.total_bytes,
                initial=event.bytes_before,
                desc=phase,
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                leave=False,
            )
        bar.update(event.bytes_done - bar.n)
        if event.bytes_done >= event.total_bytes:
            bar.close()

    return show
