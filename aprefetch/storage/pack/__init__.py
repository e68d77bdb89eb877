"""The Expert Pack: a model's routed experts, one aligned object each, verified, built once.

docs/pack_format.md specifies the format, and says where packs are kept and when they are rebuilt.
"""

from __future__ import annotations

from aprefetch.storage.pack.build import (
    BuildResult,
    BuildState,
    build_pack,
    build_pack_async,
    default_layers,
)
from aprefetch.storage.pack.crew import PackProgress
from aprefetch.storage.pack.files import PackFiles
from aprefetch.storage.pack.format import ARCHITECTURE, PartIndex, read_part
from aprefetch.storage.pack.select import ExpertsMode, PackState, find_pack, select_experts
from aprefetch.storage.pack.source import PackExperts, VerifyMode, open_pack
from aprefetch.storage.pack.verify import Verification, repair_pack, sample_keys, verify_pack

__all__ = [
    "ARCHITECTURE",
    "BuildResult",
    "BuildState",
    "ExpertsMode",
    "PackExperts",
    "PackFiles",
    "PackProgress",
    "PackState",
    "PartIndex",
    "Verification",
    "VerifyMode",
    "build_pack",
    "build_pack_async",
    "default_layers",
    "find_pack",
    "open_pack",
    "read_part",
    "repair_pack",
    "sample_keys",
    "select_experts",
    "verify_pack",
]
