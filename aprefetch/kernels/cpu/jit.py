"""How kernels are compiled and where the machine code is kept.

numba keys its cache by the file a kernel stands in, yet kernels inline functions of other files.
So the cache directory carries a digest of all kernel sources: changing any of them starts afresh
instead of running stale code. Kernels are compiled on first use, one specialisation each. The code
is kept beside the sources or, where that folder cannot be written to, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit

__all__ = ["hold", "inner", "is_cold", "kernel"]

_config: Any = numba.config
_HERE = Path(__file__).parent
_SOURCES = (
    *("simd", "jit", "decode", "matmul", "vmath"),
    *("experts", "layers", "attention", "stages", "kimi"),
)


def _cache_directory() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((_HERE / f"{name}.py").read_bytes())
    base = Path(_config.CACHE_DIR) if _config.CACHE_DIR else _writable(_HERE / "__pycache__")
    return str(base / f"kernels-{digest.hexdigest()[:16]}")


def _writable(preferred: Path) -> Path:
    try:
        preferred.mkdir(exist_ok=True)
        if os.access(preferred, os.W_OK):
            return preferred
    except OSError:
        pass
    try:
        return Path.home() / ".cache" / "aprefetch"
    except RuntimeError:  # no home folder
        return preferred


_CACHE_DIRECTORY = _cache_directory()


def is_cold() -> bool:
    """Whether no kernel has been compiled on this machine yet, so that the first use is slow."""
    return not any(Path(_CACHE_DIRECTORY).rglob("*.nbc"))


def kernel(function: Callable[..., Any]) -> Any:
    """A function that Python calls: compiled once, cached on disk, runs without the GIL."""
    previous = _config.CACHE_DIR
    _config.CACHE_DIR = _CACHE_DIRECTORY
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # no directory can be written to: compiled anew in every process
        return njit(nogil=True, error_model="numpy")(function)
    finally:
        _config.CACHE_DIR = previous


def inner(function: Callable[..., Any]) -> Any:
    """A function that only kernels call; it becomes part of their code."""
    return njit(nogil=True, error_model="numpy")(function)


@inner
def hold(array: Any) -> Any:
    """Keeps scratch memory up to this call. An address taken from an array does not: numba frees
    an array after its last use by name, and another thread may get that memory at once.
    """
    return array.size
