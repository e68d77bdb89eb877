"""What the tests of the pack share: model files of odd shapes, landing objects, forked builds."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType
from synthetic_gguf import write_file

from aprefetch.storage import ExpertSource, open_source
from aprefetch.storage.pack import PackFiles, build_pack, default_layers
from aprefetch.types import ExpertKey

Layer = tuple[int, int, int, Mapping[str, str]]  # experts, hidden, width, type by role


def write_model(
    path: Path,
    layers: Mapping[int, Layer],
    *,
    n_blocks: int = 0,
    alignment: int = 32,
    seed: int = 0,
) -> Path:
    """Routed experts and one dense tensor; layers may differ in everything."""
    tensors: list[tuple[str, tuple[int, ...], int]] = [("output.weight", (64, 8), 0)]
    for layer, (n_experts, hidden, width, types) in layers.items():
        for role in ("gate", "up", "down"):
            n_in, n_out = (width, hidden) if role == "down" else (hidden, width)
            kind = int(GGMLQuantizationType[types[role]])
            tensors.append((f"blk.{layer}.ffn_{role}_exps.weight", (n_in, n_out, n_experts), kind))
    keys = {
        "general.architecture": "odd",
        "general.name": "odd sizes",
        "odd.block_count": n_blocks or max(layers) + 1,
        "odd.expert_count": max(n for n, *_ in layers.values()),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "é"],
        "tokenizer.chat_template": "{{ messages }}",
    }
    rng = random.Random(seed)
    payload = iter(lambda: rng.randbytes(1 << 16), b"")
    return write_file(path, keys, tensors, payload, alignment=alignment)


MIXED = {"gate": "Q2_K", "up": "Q2_K", "down": "Q3_K"}
RAGGED: dict[int, Layer] = {
    1: (7, 256, 256, MIXED),
    2: (5, 64, 32, {"gate": "MXFP4", "up": "MXFP4", "down": "Q8_0"}),
    4: (9, 96, 33, {"gate": "F16", "up": "F16", "down": "F16"}),
    5: (1, 32, 1, {"gate": "F32", "up": "F32", "down": "F32"}),
}
"""Dense layers 0 and 3, four kinds of objects, odd sizes."""


def device_bytes(experts: ExpertSource, key: ExpertKey) -> bytes:
    """The device slot of an object: reads, landing buffer, pieces."""
    plan = experts.read_plan(key)
    landing = bytearray(plan.landing_bytes)
    assert plan.landing_bytes <= experts.max_landing_bytes(key.layer)
    for read in plan.reads:
        with experts.paths[read.file].open("rb") as file:
            file.seek(read.offset)
            got = file.read(read.length)
        assert len(got) >= read.needed
        landing[read.landing_offset : read.landing_offset + len(got)] = got
    slot = bytearray(experts.layers[key.layer].device_bytes)
    for piece in plan.pieces:
        end = piece.landing_offset + piece.n_bytes
        slot[piece.device_offset : piece.device_offset + piece.n_bytes] = landing[
            piece.landing_offset : end
        ]
    return bytes(slot)


def all_keys(experts: ExpertSource) -> list[ExpertKey]:
    return [ExpertKey(n, e) for n, one in experts.layers.items() for e in range(one.n_experts)]


def all_bytes(experts: ExpertSource) -> dict[ExpertKey, bytes]:
    return {key: device_bytes(experts, key) for key in all_keys(experts)}


def file_digests(paths: Sequence[Path]) -> list[str]:
    return [hashlib.sha256(p.read_bytes()).hexdigest() for p in paths]


def leftovers(folder: Path) -> list[str]:
    """What a finished build must not leave."""
    return [p.name for p in folder.iterdir() if p.suffix in (".partial", ".journal", ".lock")]


def built_cleanly(model: Path, folders: Sequence[Path]) -> list[str]:
    """Digests of an uninterrupted build, elsewhere."""
    result = build_pack(model, folders)
    return file_digests(result.paths)


def layers_of(model: Path) -> range:
    with open_source(model) as source:
        return default_layers(source)


def forked(work: Callable[[], Any]) -> int:
    """Run `work` in a child process; returns its id. The child ends with 0, or 1 on an error."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def ending(pid: int) -> int:
    """Wait for a child; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class CountedFiles(PackFiles):
    """Counts the calls that change a disk, and calls `at` before and after each."""

    def __init__(self, at: Callable[[int, str], None]) -> None:
        self.n = 0
        self._at = at

    def _call(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        self._at(self.n, name)
        self.n += 1
        result = call(*args)
        self._at(self.n, name)
        self.n += 1
        return result

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            return self._call("open", super().open, path, flags)
        return super().open(path, flags)

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        return self._call("pwrite", super().pwrite, fd, data, offset)

    def fdatasync(self, fd: int) -> None:
        self._call("fdatasync", super().fdatasync, fd)

    def allocate(self, fd: int, n_bytes: int) -> None:
        self._call("allocate", super().allocate, fd, n_bytes)

    def replace(self, old: Path, new: Path) -> None:
        self._call("replace", super().replace, old, new)

    def unlink(self, path: Path) -> None:
        self._call("unlink", super().unlink, path)

    def sync_folder(self, folder: Path) -> None:
        self._call("sync_folder", super().sync_folder, folder)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
