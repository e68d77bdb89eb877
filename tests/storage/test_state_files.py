"""Kept states in files: what is written is read; damage, strangers and full budgets do no harm."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from aprefetch.storage.state_files import SUFFIX, StateFiles

IDENTITY = "ab" * 16


def state(n: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, n)
    values = [
        (rng.random((n, 3), np.float32), seed),
        (rng.random((2, 4, 4), np.float32), 0),
        (np.empty((0, 5), np.float32), 7),
    ]
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest(), ids, values


def equal(found, ids, values) -> bool:
    same = [
        np.array_equal(a, b) and i == j for (a, i), (b, j) in zip(found[1], values, strict=True)
    ]
    return np.array_equal(found[0], ids) and all(same)


def test_what_is_written_is_read_by_later_ones(tmp_path) -> None:
    folder = tmp_path / "a" / "b c"
    files = StateFiles(folder, IDENTITY, 1 << 20)
    key, ids, values = state(10)
    files.write(key, ids, values)
    files.write(key, ids, values)
    for reader in (files, StateFiles(folder, IDENTITY, 1 << 20)):
        assert reader.lengths() == {key: 10}
        found = reader.read(key)
        assert equal(found, ids, values)
        assert all(array.flags.writeable for array, _ in found[1])
    assert len(list(folder.iterdir())) == 1
    assert StateFiles(folder, "cd" * 16, 1 << 20).lengths() == {}  # another model's


def test_damage_is_noted_and_not_used(tmp_path, caplog) -> None:
    files = StateFiles(tmp_path, IDENTITY, 1 << 20)
    key, ids, values = state(10)
    files.write(key, ids, values)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    damaged = [b"", data[:5], data[:-1], data[:40], data + b"x", b"GGUF" + data[4:]]
    for at in rng.integers(0, len(data), 60):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(flipped))
    for wrong in damaged:
        path.write_bytes(wrong)
        caplog.clear()
        fresh = StateFiles(tmp_path, IDENTITY, 1 << 20)
        for known in list(fresh.lengths()):
            assert fresh.read(known) is None
            assert fresh.lengths() == {}
        assert len(caplog.records) <= 1
        assert path.read_bytes() == wrong  # left alone
    path.write_bytes(data)
    assert equal(StateFiles(tmp_path, IDENTITY, 1 << 20).read(key), ids, values)
    path.unlink()
    assert files.read(key) is None
    assert "not used" in caplog.text


@pytest.mark.parametrize(
    "header",
    [[], {"version": 2}, {"version": 1}, {"version": 1, "key": "zz", "n_tokens": 1},
     {"version": 1, "key": "00" * 16, "n_tokens": -1},
     {"version": 1, "key": "00" * 16, "n_tokens": 1 << 60, "identity": IDENTITY},
     {"version": 1, "key": "00" * 16, "n_tokens": 10, "identity": IDENTITY, "parts": [[[9, 9], 0]]},
     {"version": 1, "key": "00" * 16, "n_tokens": 10, "identity": IDENTITY, "parts": 3}],
)  # fmt: skip
def test_headers_that_lie(tmp_path, header, caplog) -> None:
    text = json.dumps(header).encode()
    body = b"APSTATE\x01" + len(text).to_bytes(4, "little") + text + bytes(80)
    path = tmp_path / f"{IDENTITY[:16]}-{'00' * 16}{SUFFIX}"
    path.write_bytes(body + hashlib.blake2b(body, digest_size=16).digest())
    files = StateFiles(tmp_path, IDENTITY, 1 << 20)
    assert files.read(b"\0" * 16) is None
    assert "not used" in caplog.text


def test_the_budget_counts_all_of_ours_and_nothing_else(tmp_path) -> None:
    stranger = tmp_path / f"mine{SUFFIX}"
    stranger.write_bytes(bytes(100_000))
    other = StateFiles(tmp_path, "cd" * 16, 1 << 20)
    other.write(*state(10, 99))
    one = next(p for p in tmp_path.iterdir() if p != stranger).stat().st_size
    os.utime(next(p for p in tmp_path.iterdir() if p != stranger), (1, 1))
    files = StateFiles(tmp_path, IDENTITY, 3 * one + 50)
    keys = []
    for seed in range(3):
        key, ids, values = state(10, seed)
        files.write(key, ids, values)
        keys.append(key)
        path = files._path(key)
        os.utime(path, (10 + seed, 10 + seed))
    assert list(files.lengths()) == keys  # the other model's file left
    assert files.read(keys[0]) is not None  # used: it leaves last
    key, ids, values = state(10, 5)
    files.write(key, ids, values)
    assert set(files.lengths()) == {keys[0], keys[2], key}
    large = state(10_000, 7)
    files.write(*large)
    assert large[0] not in files.lengths()
    assert stranger.exists()
    held = sum(p.stat().st_size for p in tmp_path.iterdir() if p != stranger)
    assert held <= 3 * one + 50


def test_a_disk_that_refuses_is_noted(tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "states"
    files = StateFiles(folder, IDENTITY, 1 << 20)
    folder.rmdir()
    key, ids, values = state(10)
    files.write(key, ids, values)
    assert files.lengths() == {}
    assert "not kept" in caplog.text
    with pytest.raises(OSError):
        StateFiles(Path("/proc/nowhere/x"), IDENTITY, 1)
