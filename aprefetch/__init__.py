"""Run Mixture-of-Experts models larger than memory: experts stream from the SSD.

`Runtime.open` is the door; everything public is listed in `__all__`. Names other than the errors
are imported when they are first used, so `import aprefetch` costs next to nothing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from aprefetch._version import __version__
from aprefetch.errors import (
    AprefetchError,
    BudgetError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    DeviceError,
    InvalidRequestError,
    ModelError,
    NoSpaceError,
    OutOfDeviceMemoryError,
    PackBuildError,
    PackCorruptError,
    PackError,
    PackStaleError,
    PackVersionError,
    QueueFullError,
    ReadError,
    RequestError,
    RuntimeClosedError,
    RuntimeFailedError,
    RuntimeStateError,
    SourceError,
    TokenizerError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from aprefetch.config import RuntimeConfig
    from aprefetch.engine.request import Completion, FinishReason, ScoreResult, TokenEvent
    from aprefetch.engine.sampler import SamplingParams
    from aprefetch.engine.stream import TokenStream
    from aprefetch.inspection import inspect
    from aprefetch.runtime import Runtime
    from aprefetch.stats import Stats
    from aprefetch.storage.pack import build_pack, open_pack

__all__ = [
    "AprefetchError",
    "BudgetError",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "DeadlineError",
    "DeviceError",
    "FinishReason",
    "InvalidRequestError",
    "ModelError",
    "NoSpaceError",
    "OutOfDeviceMemoryError",
    "PackBuildError",
    "PackCorruptError",
    "PackError",
    "PackStaleError",
    "PackVersionError",
    "QueueFullError",
    "ReadError",
    "RequestError",
    "Runtime",
    "RuntimeClosedError",
    "RuntimeConfig",
    "RuntimeFailedError",
    "RuntimeStateError",
    "SamplingParams",
    "ScoreResult",
    "SourceError",
    "Stats",
    "TokenEvent",
    "TokenStream",
    "TokenizerError",
    "UnsupportedModelError",
    "__version__",
    "build_pack",
    "inspect",
    "open_pack",
]

_HOMES = {
    "Completion": "aprefetch.engine.request",
    "FinishReason": "aprefetch.engine.request",
    "Runtime": "aprefetch.runtime",
    "RuntimeConfig": "aprefetch.config",
    "SamplingParams": "aprefetch.engine.sampler",
    "ScoreResult": "aprefetch.engine.request",
    "Stats": "aprefetch.stats",
    "TokenEvent": "aprefetch.engine.request",
    "TokenStream": "aprefetch.engine.stream",
    "build_pack": "aprefetch.storage.pack",
    "inspect": "aprefetch.inspection",
    "open_pack": "aprefetch.storage.pack",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'aprefetch' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
