"""Every exception that aprefetch raises on purpose.

    AprefetchError
    |-- ConfigError (also ValueError)         .problems
    |-- ModelError                            a file that cannot be used as a model
    |   |-- UnsupportedModelError             a sound file of a kind we do not run
    |   |-- SourceError                       header, metadata, shards, tensors      .path, .key
    |   `-- TokenizerError                    vocabulary, pre-tokenizer, chat template
    |-- PackError                             the Expert Pack
    |   |-- PackCorruptError, PackStaleError, PackVersionError
    |   |-- PackBuildError                    .resumable
    |   `-- NoSpaceError                      .needed, .available
    |-- BudgetError                           .minimum_bytes, .option
    |-- ReadError (also OSError)              .path, .offset, .length, .errno, .key
    |-- DeviceError
    |   `-- OutOfDeviceMemoryError
    |-- RequestError                          one request is wrong; the runtime goes on
    |   |-- ContextLengthError
    |   |-- DeadlineError (also TimeoutError) .timeout_s
    |   |-- InvalidRequestError               .param
    |   `-- QueueFullError                    .limit
    `-- RuntimeStateError
        |-- RuntimeClosedError
        `-- RuntimeFailedError                an invariant broke; the cause is chained

Each message says what happened, to which object, and what to do. The facts are attributes too, so
that a program need not parse text. `asyncio.CancelledError` is never swallowed or converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "AprefetchError",
    "BudgetError",
    "ConfigError",
    "ContextLengthError",
    "DeadlineError",
    "DeviceError",
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
    "RuntimeClosedError",
    "RuntimeFailedError",
    "RuntimeStateError",
    "SourceError",
    "TokenizerError",
    "UnsupportedModelError",
]


class AprefetchError(Exception):
    """Base of all errors of this package."""


class ConfigError(AprefetchError, ValueError):
    """One or more options are wrong; all of them are reported at once."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        super().__init__("; ".join(self.problems))


class ModelError(AprefetchError):
    """A file cannot be used as a model."""


class UnsupportedModelError(ModelError):
    """The file is sound, but of an architecture or tensor type that is not supported."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        super().__init__("; ".join(self.problems))


class SourceError(ModelError):
    """A header, a metadata key, a shard set or a tensor is missing, wrong or contradictory."""

    def __init__(
        self, message: str, *, path: str | Path | None = None, key: str | None = None
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.key = key
        super().__init__(f"{self.path}: {message}" if self.path is not None else message)


class TokenizerError(ModelError):
    """The vocabulary, the pre-tokenizer or the chat template cannot be used."""


class PackError(AprefetchError):
    """Base of the Expert Pack's errors."""


class PackCorruptError(PackError):
    """Bytes of a pack do not match their digest; `keys` are the objects, none for the header."""

    def __init__(
        self, message: str, *, path: str | Path | None = None, keys: Sequence[Any] = ()
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.keys = tuple(keys)
        super().__init__(message)


class PackStaleError(PackError):
    """The pack was built from another source than the one at hand."""


class PackVersionError(PackError):
    """The pack's format version or a required flag is unknown."""


class PackBuildError(PackError):
    """A build stopped; `resumable` says whether the next one continues it."""

    def __init__(self, message: str, *, resumable: bool = True) -> None:
        self.resumable = resumable
        super().__init__(message)


class NoSpaceError(PackBuildError):
    """Not enough free space for a pack."""

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        self.needed = needed
        self.available = available
        super().__init__(message, resumable=True)


class BudgetError(AprefetchError):
    """A byte budget is below what the pipeline needs to make progress."""

    def __init__(self, message: str, *, minimum_bytes: int, option: str) -> None:
        self.minimum_bytes = minimum_bytes
        self.option = option
        super().__init__(message)


class ReadError(AprefetchError, OSError):
    """Bytes of the model could not be read."""

    def __init__(
        self,
        message: str,
        *,
        path: str | Path,
        offset: int,
        length: int,
        errno: int | None = None,
        key: Any = None,
    ) -> None:
        self.message = message
        super().__init__(errno, message)
        self.path = Path(path)
        self.offset = offset
        self.length = length
        self.errno = errno
        self.key = key

    def __str__(self) -> str:
        where = f" (expert {tuple(self.key)})" if self.key is not None else ""
        return f"{self.path}: {self.message} at byte {self.offset}, length {self.length}{where}"


class DeviceError(AprefetchError):
    """The compute device failed or lacks something."""


class OutOfDeviceMemoryError(DeviceError):
    """An allocation on the device failed."""


class RequestError(AprefetchError):
    """One request cannot be served; the runtime goes on."""


class ContextLengthError(RequestError):
    """Prompt and answer do not fit into the context."""

    def __init__(self, message: str, *, n_tokens: int, limit_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.limit_tokens = limit_tokens
        super().__init__(message)


class DeadlineError(RequestError, TimeoutError):
    """A request was not over within the time it was given."""

    def __init__(self, message: str, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(message)


class QueueFullError(RequestError):
    """As many requests run and wait as may; try again later."""

    def __init__(self, message: str, *, limit: int) -> None:
        self.limit = limit
        super().__init__(message)


class InvalidRequestError(RequestError, ValueError):
    """An argument of a request is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class RuntimeStateError(AprefetchError):
    """The runtime is not in a state that allows the call."""


class RuntimeClosedError(RuntimeStateError):
    """The runtime was closed."""


class RuntimeFailedError(RuntimeStateError):
    """An invariant broke inside; the runtime must be opened anew. The cause is chained."""
