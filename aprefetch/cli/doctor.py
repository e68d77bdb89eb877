"""`aprefetch doctor`: what this machine can do, with advice."""

from __future__ import annotations

import argparse
import json

from aprefetch.cli import options

__all__ = ["add_parser"]


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor",
        help="look at this machine",
        description="Look at the device, pinned memory, direct I/O and kernels, with advice.",
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="models or folders to look at")
    parser.add_argument(
        "--measure", action="store_true", help="measure reading the PATHs and uploading"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from aprefetch.doctor import examine_machine

    examination = examine_machine(args.paths, measure=args.measure)
    if args.json:
        print(json.dumps(examination.to_dict()))
    else:
        print("\n".join(examination.lines()))
    return 0
