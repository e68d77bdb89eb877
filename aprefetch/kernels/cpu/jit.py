"""How kernels are compiled and where the machine code is kept.

numba keys its cache by the file a kernel stands in, yet kernels inline functions of other files.
So the cache directory carries a digest of all kernel sources: changing any of them starts afresh
instead of running stale code. Kernels are compiled on first use, one specialisation each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit

__all__ = ["hold", "inner", "kernel"]

_config: Any = numba.config
_HERE = Path(__file__).parent
_SOURCES = ("simd", "jit", "decode", "matmul", "vmath", "experts", "layers", "attention")


def _cache_directory() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((_HERE / f"{name}.py").read_bytes())
    base = Path(_config.CACHE_DIR or _HERE / "__pycache__")
    return str(base / f"kernels-{digest.hexdigest()[:16]}")


_CACHE_DIRECTORY = _cache_directory()


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
