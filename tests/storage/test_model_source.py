"""Reading an open model: bytes, faults, and noticing that the file changed."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from aprefetch.errors import ReadError, SourceError
from aprefetch.storage import ModelSource, open_source, source

NAME = "blk.1.ffn_up_exps.weight"


@pytest.fixture
def path(small_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(small_model, tmp_path / "m.gguf"))


def expected(path: Path, model: ModelSource, name: str = NAME) -> bytes:
    info = model.tensors[name]
    return path.read_bytes()[info.offset : info.offset + info.n_bytes]


def test_reads(path: Path) -> None:
    with open_source(path) as model:
        got = model.read_tensor(NAME)
        assert got.dtype == np.uint8
        assert got.flags.writeable
        assert got.tobytes() == expected(path, model)
        target = bytearray(len(got))
        model.read_tensor_into(NAME, memoryview(target))
        assert bytes(target) == got.tobytes()
        floats = np.empty(model.tensors["output_norm.weight"].shape, dtype=np.float32)
        model.read_tensor_into("output_norm.weight", memoryview(floats))
        assert floats.tobytes() == expected(path, model, "output_norm.weight")
        assert model.read_range(0, 0, 4).tobytes() == b"GGUF"
        assert model.n_bytes == path.stat().st_size
        with pytest.raises(ValueError, match="bytes"):
            model.read_tensor_into(NAME, memoryview(bytearray(5)))
        with pytest.raises(SourceError, match="no tensor 'absent'"):
            model.read_tensor("absent")


def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call gives at most 0x7ffff000 bytes, and may always give less."""
    preadv, sizes = os.preadv, []

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        sizes.append(len(buffers[0]))
        return preadv(fd, [buffers[0][:777]], offset)

    with open_source(path) as model:
        right = expected(path, model)
        monkeypatch.setattr(os, "preadv", short)
        monkeypatch.setattr(source, "_READ_BYTES", 5000)
        assert model.read_tensor(NAME).tobytes() == right
    assert len(sizes) == -(-len(right) // 777)
    assert max(sizes) == 5000


def test_a_failing_drive(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def fails(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with open_source(path) as model:
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(ReadError, match="Input/output error") as caught:
            model.read_tensor(NAME)
        info = model.tensors[NAME]
        assert caught.value.errno == errno.EIO
        assert caught.value.path == path
        assert (caught.value.offset, caught.value.length) == (info.offset, info.n_bytes)
        monkeypatch.setattr(os, "preadv", preadv)
        assert model.read_tensor(NAME).tobytes() == expected(path, model)


def test_truncated_while_open(path: Path) -> None:
    with open_source(path) as model:
        model.check_unchanged()
        info = model.tensors[NAME]
        os.truncate(path, info.offset + 100)
        with pytest.raises(ReadError, match="ended early") as caught:
            model.read_tensor(NAME)
        assert caught.value.offset == info.offset + 100
        with pytest.raises(SourceError, match="truncated while in use"):
            model.check_unchanged()
        with pytest.raises(ReadError):
            model.identity()


def test_replaced_while_open(path: Path, tmp_path: Path) -> None:
    with open_source(path) as model:
        right = expected(path, model)
        other = tmp_path / "other"
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
        with pytest.raises(SourceError, match="replaced or changed"):
            model.check_unchanged()
        # The held descriptor still gives what was opened.
        assert model.read_tensor(NAME).tobytes() == right


def test_written_or_removed_while_open(path: Path) -> None:
    with open_source(path) as model:
        times = path.stat().st_mtime_ns
        with path.open("r+b") as file:
            file.seek(model.tensors[NAME].offset)
            file.write(b"x")
        os.utime(path, ns=(times, times + 1))
        with pytest.raises(SourceError, match="changed while in use"):
            model.check_unchanged()
        path.unlink()
        with pytest.raises(SourceError, match="went away"):
            model.check_unchanged()


def test_identity(path: Path, tmp_path: Path, small_shards: list[Path]) -> None:
    with open_source(path) as model:
        first = model.identity()
        payload = model.tensors["token_embd.weight"].offset
    copy = Path(shutil.copy(path, tmp_path / "copy.gguf"))
    with open_source(copy) as model:
        other = model.identity()
    assert other.digest == first.digest
    assert other.shards[0].name == "copy.gguf"
    assert first.shards[0].n_bytes == path.stat().st_size
    assert first.shards[0].mtime_ns == path.stat().st_mtime_ns
    for at in (payload, 30):  # a sampled byte of the payload; a byte of the header
        shutil.copy(path, copy)
        with copy.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        try:
            with open_source(copy) as model:
                assert model.identity().digest != first.digest
        except SourceError:
            assert at == 30
    with open_source(small_shards[2]) as model:
        shards = model.identity()
    assert [s.name for s in shards.shards] == [p.name for p in small_shards]
    assert len({s.digest for s in shards.shards}) == 4


def test_closing(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    model = open_source(path)
    assert not model.closed
    model.close()
    model.close()
    assert model.closed
    assert model.metadata["deepseek4.block_count"] == 3
    assert NAME in model.tensors
    with pytest.raises(ReadError, match="closed"):
        model.read_tensor(NAME)
    with pytest.raises(SourceError, match="closed"):
        model.check_unchanged()
    dropped = open_source(path)
    del dropped
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_threads_read_at_once(path: Path) -> None:
    with open_source(path) as model:
        names = list(model.tensors)
        right = {name: expected(path, model, name) for name in names}
        wrong: list[str] = []

        def work() -> None:
            wrong.extend(n for n in names if model.read_tensor(n).tobytes() != right[n])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
