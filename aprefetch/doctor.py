"""What this machine can do for us, and what to do where it cannot.

Looks at the device, pinned memory, direct I/O of each path, io_uring and the compiled kernels.
Measuring read and upload bandwidth takes seconds and reads files, so it happens on request only.
"""

from __future__ import annotations

import mmap
import os
import platform
import random
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aprefetch._version import __version__
from aprefetch.errors import AprefetchError
from aprefetch.pipeline.io.uring import why_refused
from aprefetch.storage import direct_io_alignment, open_source

__all__ = ["Examination", "Finding", "examine_machine"]

_BLOCK_BYTES = 4 * 2**20
_UPLOAD_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at: what it is like, and advice where it could be better."""

    name: str
    is_good: bool
    text: str
    advice: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings."""

    findings: tuple[Finding, ...]

    def lines(self) -> list[str]:
        """For people."""
        out = []
        for one in self.findings:
            out.append(f"{'ok  ' if one.is_good else 'note'} {one.name:<12} {one.text}")
            if one.advice:
                out.append(f"{'':18}{one.advice}")
        return out

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "version": __version__,
            "findings": [
                {
                    "name": one.name,
                    "good": one.is_good,
                    "text": one.text,
                    "advice": one.advice,
                    **one.facts,
                }
                for one in self.findings
            ],
        }


def examine_machine(
    paths: Sequence[str | os.PathLike[str]] = (), *, measure: bool = False, seconds: float = 2.0
) -> Examination:
    """Look at this machine, and at the file systems of `paths` (models or folders). Blocks.

    Args:
        measure: read from the files among `paths` and upload to the GPU, `seconds` each.

    Raises:
        SourceError: one of `paths` is neither a folder nor a GGUF file.
    """
    findings = [_software(), _memory(), _device(), _pinning(), _io_uring(), _kernels()]
    for path in paths:
        place = Path(path)
        files = [place] if place.is_dir() else _files_of(place)
        findings += [_direct_io(one) for one in files]
        if measure:
            findings += [_read_rate(one, seconds) for one in files if one.is_file()]
    if measure and torch.cuda.is_available():
        findings.append(_upload_rate(seconds))
    return Examination(tuple(findings))


def _files_of(model: Path) -> list[Path]:
    with open_source(model) as source:
        return list(source.paths)


def _software() -> Finding:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    text = f"aprefetch {__version__}, " + ", ".join(f"{k} {v}" for k, v in versions.items())
    return Finding(name="software", is_good=True, text=f"{text}, {platform.system()}")


def _memory() -> Finding:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    return Finding(
        name="host",
        is_good=True,
        text=f"{total / 2**30:.1f} GiB of RAM ({available / 2**30:.1f} free), {cores} cores",
        facts={"ram_bytes": total, "free_bytes": available, "cores": cores},
    )


def _device() -> Finding:
    if not torch.cuda.is_available():
        return Finding(
            name="device",
            is_good=False,
            text="no CUDA device: the CPU computes",
            advice="with an NVIDIA GPU, install a CUDA build of PyTorch and check nvidia-smi",
        )
    facts = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    text = f"{facts.name}, {total / 2**30:.1f} GiB ({free / 2**30:.1f} free)"
    return Finding(
        name="device", is_good=True, text=text, facts={"vram_bytes": total, "free_bytes": free}
    )


def _pinning() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft / 2**20:.0f} MiB"
    if not torch.cuda.is_available():
        return Finding(name="pinning", is_good=True, text=f"not needed on the CPU ({limit})")
    from aprefetch.device.cuda import CudaHostArena

    arena = CudaHostArena(_UPLOAD_BYTES)
    is_pinned = arena.is_pinned
    arena.close()
    return Finding(
        name="pinning",
        is_good=is_pinned,
        text=f"host memory {'can' if is_pinned else 'cannot'} be pinned; locked memory: {limit}",
        advice="" if is_pinned else "raise the limit on locked memory (ulimit -l unlimited)",
        facts={"memlock_bytes": None if soft == resource.RLIM_INFINITY else soft},
    )


def _io_uring() -> Finding:
    reason = why_refused()
    return Finding(
        name="io_uring",
        is_good=True,
        text="available: the kernel reads" if reason is None else f"{reason}; threads read",
        facts={"available": reason is None},
    )


def _kernels() -> Finding:
    try:
        from aprefetch.kernels.cpu import jit
    except (ImportError, OSError) as error:
        return Finding(
            name="kernels",
            is_good=False,
            text=f"no compiled CPU kernels: {error}",
            advice="install numba; plain torch is many times slower",
        )
    is_cold = jit.is_cold()
    return Finding(
        name="kernels",
        is_good=True,
        text="CPU kernels "
        + ("are compiled on first use (half a minute)" if is_cold else "are compiled"),
        facts={"compiled": not is_cold},
    )


def _direct_io(path: Path) -> Finding:
    """Whether reads of a file (in a folder: of a scratch file) may pass by the page cache."""
    error = _refusal(path) if path.is_file() else _refusal_in(path)
    alignment = direct_io_alignment(path)
    return Finding(
        name="direct I/O",
        is_good=error is None,
        text=f"{path}: " + (f"yes, aligned to {alignment}" if error is None else f"no ({error})"),
        advice=""
        if error is None
        else "reads go through the page cache and cost more CPU; use a local ext4 or XFS volume",
        facts={"path": str(path), "alignment": alignment},
    )


def _refusal_in(folder: Path) -> str | None:
    scratch = folder / f".aprefetch-{os.getpid()}-{random.getrandbits(32):08x}"
    try:
        scratch.write_bytes(bytes(2 * mmap.PAGESIZE))
        return _refusal(scratch)
    except OSError as error:
        return f"cannot be tried: {error.strerror}"
    finally:
        scratch.unlink(missing_ok=True)


def _refusal(path: Path) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _BLOCK_BYTES) as block:
                os.preadv(fd, [block], 0)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror
    return None


def _read_rate(path: Path, seconds: float) -> Finding:
    """Best of some thread counts, direct reads of 4 MiB at random offsets."""
    best, best_threads = 0.0, 0
    try:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if _refusal(path) is None else 0))
    except OSError as error:
        raise AprefetchError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        n_blocks = max(1, os.fstat(fd).st_size // _BLOCK_BYTES)
        for n_threads in (1, 4, 8, 16):
            rate = _timed_reads(fd, n_blocks, n_threads, seconds / 4)
            if rate > best:
                best, best_threads = rate, n_threads
    finally:
        os.close(fd)
    return Finding(
        name="reading",
        is_good=True,
        text=f"{path.name}: {best / 1e9:.2f} GB/s with {best_threads} reads in flight",
        facts={"path": str(path), "bytes_per_s": best, "queue_depth": best_threads},
    )


def _timed_reads(fd: int, n_blocks: int, n_threads: int, seconds: float) -> float:
    deadline = time.perf_counter() + seconds

    def read(seed: int) -> int:
        order, n_bytes = random.Random(seed), 0
        with mmap.mmap(-1, _BLOCK_BYTES) as block:
            while time.perf_counter() < deadline:
                n_bytes += os.preadv(fd, [block], order.randrange(n_blocks) * _BLOCK_BYTES)
        return n_bytes

    start = time.perf_counter()
    with ThreadPoolExecutor(n_threads) as pool:
        total = sum(pool.map(read, range(n_threads)))
    return total / (time.perf_counter() - start)


def _upload_rate(seconds: float) -> Finding:
    from aprefetch.device.cuda import CudaHostArena

    arena = CudaHostArena(_UPLOAD_BYTES)
    try:
        target = torch.empty(_UPLOAD_BYTES, dtype=torch.uint8, device="cuda")
        target.copy_(arena.tensor)
        n, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            target.copy_(arena.tensor, non_blocking=True)
            torch.cuda.synchronize()
            n += 1
        rate = n * _UPLOAD_BYTES / (time.perf_counter() - start)
    finally:
        arena.close()
    return Finding(
        name="uploading", is_good=True, text=f"{rate / 1e9:.1f} GB/s", facts={"bytes_per_s": rate}
    )
