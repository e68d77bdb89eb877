"""`aprefetch verify`: are a pack's bytes what was written? Mends them, if asked."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprefetch.cli import options
from aprefetch.cli.pack import show_progress
from aprefetch.errors import ConfigError, PackStaleError

if TYPE_CHECKING:
    from aprefetch.storage import ModelSource
    from aprefetch.storage.pack import PackExperts
    from aprefetch.types import ExpertKey

__all__ = ["add_parser"]

_SHOWN = 20  # damaged objects that are listed


def add_parser(commands: options.Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "verify",
        help="check an Expert Pack",
        description=(
            "Check an Expert Pack against its own digests. Exit code 1 if an object is damaged."
        ),
    )
    parser.add_argument("pack", metavar="PACK", help="any one part of a pack")
    parser.add_argument(
        "--mode",
        choices=("off", "sampled", "full"),
        default="full",
        help="all objects (the default), some, or only the index",
    )
    parser.add_argument("--sample", type=int, default=64, metavar="N", help="objects of a sample")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draw another sample")
    parser.add_argument(
        "-o", "--output", action="append", metavar="DIR", help="folder of other parts"
    )
    parser.add_argument("--repair", action="store_true", help="write damaged objects again")
    parser.add_argument(
        "--source", metavar="FILE", help="the model, for --repair (default: beside the pack)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more")
    parser.set_defaults(command=_verify)


def _verify(args: argparse.Namespace) -> int:
    from aprefetch.storage import open_source
    from aprefetch.storage.pack import open_pack

    if args.sample < 1:
        raise ConfigError(f"--sample must be at least 1, not {args.sample}")
    if args.repair and args.mode != "full":
        raise ConfigError("--repair looks at every object; leave --mode out")
    pack = open_pack(args.pack, folders=args.output or ())
    if not args.repair and args.source is None:
        return _report(args, pack, None)
    with open_source(args.source or _find_source(pack)) as source:
        return _report(args, pack, source)


def _find_source(pack: PackExperts) -> Path:
    for path in pack.paths:
        candidate = path.parent / pack.source.names[0]
        if candidate.exists():
            return candidate
    raise ConfigError(
        f"the model {pack.source.names[0]!r} is not beside the pack; name it with --source FILE"
    )


def _report(args: argparse.Namespace, pack: PackExperts, source: ModelSource | None) -> int:
    from aprefetch.storage.pack import PackExperts, repair_pack, verify_pack

    if source is not None and source.identity().digest != pack.source.digest:
        raise PackStaleError(
            f"{pack.paths[0]}: the pack was built from another model than {source.paths[0]}; "
            "nothing was changed"
        )
    progress = show_progress()
    n_objects = n_bytes = 0
    corrupt: tuple[ExpertKey, ...] = ()
    repaired: tuple[ExpertKey, ...] = ()
    if args.mode != "off":
        found = verify_pack(pack, args.mode, sample=args.sample, seed=args.seed, progress=progress)
        n_objects, n_bytes, corrupt = found.n_objects, found.n_bytes, found.corrupt
    if args.repair and corrupt:
        repaired = repair_pack(PackExperts(pack.parts, source=source), corrupt, progress=progress)
    left = [key for key in corrupt if key not in set(repaired)]
    if args.json:
        out: dict[str, Any] = {
            "paths": [str(path) for path in pack.paths],
            "mode": args.mode,
            "n_objects": n_objects,
            "n_bytes": n_bytes,
            "corrupt": [list(key) for key in corrupt],
            "repaired": [list(key) for key in repaired],
            "is_good": not left,
        }
        print(json.dumps(out))
        return 1 if left else 0
    print(f"index      good ({pack.shape.n_objects} objects in {pack.shape.n_parts} parts)")
    if args.mode != "off":
        print(f"objects    {n_objects} looked at, {n_bytes} bytes, {len(corrupt)} damaged")
    for key in corrupt[:_SHOWN]:
        state = "repaired" if key in set(repaired) else "damaged"
        print(f"           layer {key.layer}, expert {key.expert}: {state}")
    if len(corrupt) > _SHOWN:
        print(f"           and {len(corrupt) - _SHOWN} more")
    if left:
        print("mend it with `aprefetch verify --repair`, with the model at hand (--source FILE)")
    return 1 if left else 0
