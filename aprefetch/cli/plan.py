"""`aprefetch plan`: what would live where, and how fast it can be at best."""

from __future__ import annotations

import argparse
import json

from aprefetch.cli import options
from aprefetch.errors import ConfigError

__all__ = ["add_parser"]


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "plan",
        help="show what would live where",
        description="Show what would live where, from the header alone: nothing is loaded.",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="GGUF file (default: built-in)")
    parser.add_argument("--gbps", type=float, default=7.0, metavar="G", help="SSD, GB/s (7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more")
    options.add_runtime(parser)
    parser.set_defaults(command=_plan)


def _plan(args: argparse.Namespace) -> int:
    from aprefetch.plan import plan_model

    if not 0 < args.gbps <= 1e6:
        raise ConfigError(f"--gbps must be above 0 and at most a million, not {args.gbps}")
    plan = plan_model(args.file, **options.runtime_options(args))
    if args.json:
        print(json.dumps(plan.to_dict(ssd_gbps=args.gbps)))
    else:
        print("\n".join(plan.lines(ssd_gbps=args.gbps)))
    return 0
