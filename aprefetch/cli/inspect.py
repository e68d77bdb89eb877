"""`aprefetch inspect`: what a model file or a pack holds, from its header alone."""

from __future__ import annotations

import argparse
import json

from aprefetch.cli import options

__all__ = ["add_parser"]


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "inspect", help="show what a GGUF holds", description="Show what a GGUF file holds."
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="GGUF file (default: built-in)")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more")
    parser.set_defaults(command=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    from aprefetch.inspection import inspect

    found = inspect(args.file)
    if found.architecture == "aprefetch-pack":
        return _inspect_pack(args)
    if args.json:
        print(json.dumps(found.to_dict(tensors=args.tensors), ensure_ascii=False))
    else:
        print("\n".join(found.lines(tensors=args.tensors)))
    return 0


def _inspect_pack(args: argparse.Namespace) -> int:
    from aprefetch.storage.pack import describe, open_pack

    pack = open_pack(args.file)
    if args.json:
        print(json.dumps(describe.facts(pack), ensure_ascii=False))
    else:
        print("\n".join(describe.lines(pack)))
    return 0
