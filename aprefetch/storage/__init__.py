"""Files, headers, byte ranges."""

from __future__ import annotations

from aprefetch.storage.direct import direct_io_alignment
from aprefetch.storage.experts import ExpertSource, GgufExperts
from aprefetch.storage.shards import open_source
from aprefetch.storage.source import ModelSource, ShardIdentity, SourceIdentity
from aprefetch.storage.tensors import TensorInfo

__all__ = [
    "ExpertSource",
    "GgufExperts",
    "ModelSource",
    "ShardIdentity",
    "SourceIdentity",
    "TensorInfo",
    "direct_io_alignment",
    "open_source",
]
