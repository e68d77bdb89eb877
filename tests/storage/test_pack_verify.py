"""Digests: what they catch, which mode sees it, and how objects are mended."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
from pack_parts import RAGGED, all_bytes, all_keys, file_digests, layers_of, write_model

from aprefetch.errors import ConfigError, PackBuildError, PackCorruptError, PackError, ReadError
from aprefetch.storage import GgufExperts, open_source
from aprefetch.storage.pack import (
    PackExperts,
    PackFiles,
    build_pack,
    open_pack,
    repair_pack,
    sample_keys,
    verify_pack,
)
from aprefetch.types import ExpertKey


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("verify") / "m.gguf", RAGGED)


@pytest.fixture
def pack_path(model: Path, tmp_path: Path) -> Path:
    return build_pack(model, [tmp_path / "pack"]).paths[0]


def flip(path: Path, at: int, bit: int = 1) -> None:
    with path.open("rb+") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def damage(pack: PackExperts, key: ExpertKey, at: int = 5) -> None:
    read = pack.read_plan(key).reads[0]
    flip(pack.paths[read.file], read.offset + at)


def landed(pack: PackExperts, key: ExpertKey) -> bytearray:
    read = pack.read_plan(key).reads[0]
    with pack.paths[read.file].open("rb") as file:
        file.seek(read.offset)
        return bytearray(file.read(read.length))


@pytest.mark.parametrize("oracle", [False, True], ids=["ragged", "oracle"])
def test_300_flips_are_refused_caught_or_harmless(
    model: Path, oracle_model: Path, tmp_path: Path, oracle: bool
) -> None:
    """Half of them in the header."""
    source_path = oracle_model if oracle else model
    path = build_pack(source_path, [tmp_path / "pack"]).paths[0]
    sound = open_pack(path)
    truth = all_bytes(sound)
    keys = all_keys(sound)
    data_offset, size = sound.parts[0].data_offset, path.stat().st_size
    rng = random.Random(3)
    outcomes = {"refused": 0, "caught": 0, "harmless": 0}
    n_flips = 60 if oracle else 300
    for i in range(n_flips):
        at = rng.randrange(data_offset) if i % 2 else rng.randrange(size)
        bit = 1 << rng.randrange(8)
        flip(path, at, bit)
        try:
            pack = open_pack(path, verify="first_read")
            corrupt = verify_pack(pack, n_workers=2).corrupt
        except PackError:
            outcomes["refused"] += 1
        else:
            caught = []
            for key in corrupt or keys:
                try:
                    pack.check(key, memoryview(landed(pack, key)))
                except PackCorruptError as error:
                    caught += error.keys
            assert tuple(caught) == corrupt  # on first read: the same
            if corrupt:
                outcomes["caught"] += 1
                assert len(corrupt) == 1
            else:
                outcomes["harmless"] += 1
                assert all_bytes(pack) == truth
        flip(path, at, bit)
    assert all(n > 0 for n in outcomes.values()), outcomes
    assert verify_pack(open_pack(path)).corrupt == ()


def test_modes_see_what_they_cover(pack_path: Path) -> None:
    pack = open_pack(pack_path, verify="first_read")
    bad = ExpertKey(2, 3)
    damage(pack, bad)
    assert verify_pack(pack, "full").corrupt == (bad,)
    seen = []
    for seed in range(40):
        keys = sample_keys(pack, 4, seed)
        assert keys == sample_keys(pack, 4, seed)
        assert len(set(keys)) == 4
        found = verify_pack(pack, "sampled", sample=4, seed=seed)
        assert found.n_objects == 4
        assert found.corrupt == ((bad,) if bad in keys else ())
        seen.append(bad in keys)
    assert any(seen)
    assert not all(seen)
    assert len(sample_keys(pack, 1000)) == 22


def test_on_first_read_only_once(pack_path: Path) -> None:
    pack = open_pack(pack_path, verify="first_read")
    good, bad = ExpertKey(1, 6), ExpertKey(4, 8)
    damage(pack, bad)
    assert pack.needs_check(good)
    assert pack.needs_check(bad)
    pack.check(good, memoryview(landed(pack, good)))
    assert not pack.needs_check(good)
    with pytest.raises(PackCorruptError, match="expert 8 of layer 4") as caught:
        pack.check(bad, memoryview(landed(pack, bad)))
    assert caught.value.keys == (bad,)
    assert caught.value.path == pack_path
    assert pack.needs_check(bad)
    assert not open_pack(pack_path).needs_check(good)
    with pytest.raises(ConfigError, match="verify"):
        open_pack(pack_path, verify="sometimes")  # type: ignore[arg-type]


def test_padding_is_not_payload(pack_path: Path) -> None:
    pack = open_pack(pack_path)
    key = ExpertKey(5, 0)
    damage(pack, key, at=pack.layers[5].payload_bytes)
    assert verify_pack(pack).corrupt == ()


def test_the_source_stands_in_for_a_corrupt_object(model: Path, pack_path: Path) -> None:
    bad = ExpertKey(1, 2)
    with open_source(model) as source:
        pack = open_pack(pack_path, verify="first_read", source=source)
        good = landed(pack, bad)
        damage(pack, bad)
        buffer = landed(pack, bad)
        assert buffer != good
        assert pack.check_or_restore(bad, memoryview(buffer)) is True
        payload = pack.layers[1].payload_bytes
        assert buffer[:payload] == good[:payload]
        sound = ExpertKey(1, 3)
        assert pack.check_or_restore(sound, memoryview(landed(pack, sound))) is False
    alone = open_pack(pack_path, verify="first_read")
    with pytest.raises(PackCorruptError):
        alone.check_or_restore(bad, memoryview(landed(alone, bad)))
    with pytest.raises(PackError, match="without its model"):
        alone.restore(bad, memoryview(landed(alone, bad)))


def test_a_wrong_source_cannot_stand_in(model: Path, pack_path: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", RAGGED, seed=1)
    bad = ExpertKey(1, 2)
    damage(open_pack(pack_path), bad)
    damaged = file_digests([pack_path])
    with open_source(other) as source:
        pack = open_pack(pack_path, source=source)
        with pytest.raises(PackCorruptError, match="could not stand in"):
            pack.check_or_restore(bad, memoryview(landed(pack, bad)))
        with pytest.raises(PackCorruptError, match="--rebuild") as caught:
            repair_pack(pack, [bad])
        assert caught.value.keys == (bad,)
    assert file_digests([pack_path]) == damaged


@pytest.mark.parametrize("n_parts", [1, 3])
def test_repair(model: Path, tmp_path: Path, n_parts: int) -> None:
    folders = [tmp_path / f"{i}" for i in range(n_parts)]
    paths = build_pack(model, folders).paths
    clean = file_digests(paths)
    with open_source(model) as source:
        pack = open_pack(paths[0], folders=folders, source=source)
        bad = (ExpertKey(1, 0), ExpertKey(2, 4), ExpertKey(4, 8), ExpertKey(5, 0))
        for key in bad:
            damage(pack, key)
        found = verify_pack(pack)
        assert found.corrupt == bad
        assert found.n_objects == 22
        assert repair_pack(pack, found.corrupt) == bad
        assert verify_pack(pack).corrupt == ()
        assert all_bytes(pack) == all_bytes(GgufExperts(source, layers_of(model)))
    assert file_digests(paths) == clean


def test_drive_errors_are_not_corruption(pack_path: Path) -> None:
    class Failing(PackFiles):
        def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
            raise OSError(errno.EIO, "I/O error")

    with pytest.raises(ReadError, match="check the drive"):
        verify_pack(open_pack(pack_path), files=Failing())


def test_cancel(pack_path: Path) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(PackBuildError, match="cancelled"):
        verify_pack(open_pack(pack_path), cancel=cancel)


def test_truncated_under_way(pack_path: Path) -> None:
    pack = open_pack(pack_path)
    os.truncate(pack_path, pack.parts[0].data_offset + 8192)
    with pytest.raises(ReadError, match="bytes came"):
        verify_pack(pack)
