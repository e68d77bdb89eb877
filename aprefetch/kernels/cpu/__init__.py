"""CPU kernels: compiled ones where numba works, plain torch elsewhere."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Literal

from aprefetch.errors import ConfigError

if TYPE_CHECKING:
    from aprefetch.kernels.ops import Ops

__all__ = ["cpu_ops"]

_log = logging.getLogger(__name__)


@functools.cache
def _warn_once(reason: str) -> None:
    _log.warning("numba cannot be used (%s): slow plain torch kernels instead", reason)


@functools.cache
def _say_slow() -> None:
    _log.warning("compiling the CPU kernels on first use: once per machine, about half a minute")


def cpu_ops(
    kind: Literal["auto", "numba", "reference"] = "auto", n_threads: int | None = None
) -> Ops:
    """The operations for this machine's CPU.

    Args:
        kind: "auto" takes the compiled kernels and, where numba cannot be used, plain torch with
            one warning; the other two insist.
        n_threads: threads that share one large call; default is one per core.

    Raises:
        ConfigError: "numba" was asked for and cannot be used, or `kind` is unknown.
    """
    if kind not in ("auto", "numba", "reference"):
        raise ConfigError(f"CPU kernels {kind!r} are unknown; use auto, numba or reference")
    if kind != "reference":
        try:
            # Imported late: numba takes a third of a second and a GPU does without it.
            from aprefetch.kernels.cpu import jit
            from aprefetch.kernels.cpu.fast import NumbaOps

            if jit.is_cold():
                _say_slow()
            return NumbaOps(n_threads)
        except (ImportError, OSError) as error:
            if kind == "numba":
                raise ConfigError(
                    f"the compiled CPU kernels need numba, which cannot be used here ({error}); "
                    "install it, or use the kernels 'reference'"
                ) from error
            _warn_once(str(error))
    from aprefetch.kernels.cpu.reference import ReferenceOps

    return ReferenceOps()
