"""Shard sets: any shard opens the whole model, and each way of being wrong is told apart."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_gguf as syn
from make_tiny_gguf import TinyConfig, write_tiny_deepseek4

from aprefetch.errors import SourceError
from aprefetch.storage import GgufExperts, open_source


@pytest.fixture
def shards(small_shards: list[Path], tmp_path: Path) -> list[Path]:
    """Four shards that may be damaged."""
    return [Path(shutil.copy(p, tmp_path / p.name)) for p in small_shards]


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refused(path: Path, says: str) -> SourceError:
    before = n_descriptors()
    with pytest.raises(SourceError, match=says) as caught:
        open_source(path)
    assert n_descriptors() == before
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


@pytest.mark.parametrize("entry", [0, 1, 3])
def test_any_shard_opens_the_model(small_model: Path, small_shards: list[Path], entry: int) -> None:
    with open_source(small_model) as whole, open_source(small_shards[entry]) as source:
        assert source.paths == tuple(small_shards)
        assert list(source.tensors) == list(whole.tensors)
        assert {t.file for t in source.tensors.values()} == {0, 1, 2, 3}
        for name, info in whole.tensors.items():
            ours = source.tensors[name]
            assert (ours.shape, ours.ggml_type) == (info.shape, info.ggml_type)
            assert np.array_equal(source.read_tensor(name), whole.read_tensor(name))
        for key in whole.metadata:
            assert np.array_equal(source.metadata[key], whole.metadata[key])
        ours_layers = GgufExperts(source, range(3)).layers
        assert ours_layers == GgufExperts(whole, range(3)).layers


def test_files_may_be_renamed(small_model: Path, shards: list[Path], tmp_path: Path) -> None:
    other = Path(shutil.copy(small_model, tmp_path / "llama-7b.bin"))
    with open_source(other) as source:
        assert source.architecture == "deepseek4"
    for i, path in enumerate(shards):
        path.rename(tmp_path / f"another-{i + 1:05d}-of-00004.gguf")
    with open_source(tmp_path / "another-00003-of-00004.gguf") as source:
        assert len(source.paths) == 4
    # A single file under the name of a shard is still a single file.
    alone = Path(shutil.copy(small_model, tmp_path / "single-00002-of-00009.gguf"))
    with open_source(alone) as source:
        assert source.paths == (alone,)


@pytest.mark.parametrize(
    "folder", ["with space", "две 深い 🦀", "new\nline", "[x]*?", b"latin-\xe9".decode("latin1")]
)
def test_paths_of_any_script(small_shards: list[Path], tmp_path: Path, folder: str) -> None:
    place = tmp_path / folder
    place.mkdir()
    names = [p.name.replace("small", f"m {folder}") for p in small_shards]
    for path, name in zip(small_shards, names, strict=True):
        shutil.copy(path, place / name)
    with open_source(str(place / names[2])) as source:
        assert len(source.paths) == 4


def test_relative_paths(
    small_shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small_shards[0].parent)
    with open_source(small_shards[1].name) as source:
        assert len(source.paths) == 4


def test_strangers_in_the_folder_do_no_harm(
    small_model: Path, shards: list[Path], tmp_path: Path
) -> None:
    shutil.copy(small_model, tmp_path / "unrelated.gguf")
    shutil.copy(shards[0], tmp_path / "other-00001-of-00004.gguf")
    (tmp_path / "small-00005-of-00005.gguf").write_bytes(b"rubbish")
    (tmp_path / "small-00002-of-00004.gguf.part").write_bytes(b"rubbish")
    with open_source(shards[0]) as source:
        assert source.paths == tuple(shards)


def test_missing_shards_are_listed(shards: list[Path]) -> None:
    shards[1].unlink()
    shards[3].unlink()
    error = refused(shards[2], "2 of 4 shards are missing")
    assert shards[1].name in str(error)
    assert shards[3].name in str(error)


def test_a_duplicated_shard(shards: list[Path]) -> None:
    shutil.copy(shards[1], shards[2])
    error = refused(shards[0], "shard 2 of 4 is there twice")
    assert shards[1].name in str(error)
    assert shards[2].name in str(error)


def test_renumbered_shards(shards: list[Path], tmp_path: Path) -> None:
    shards[1].rename(tmp_path / "aside")
    shards[2].rename(shards[1])
    (tmp_path / "aside").rename(shards[2])
    refused(shards[0], "renumbered")
    refused(shards[1], "renumbered")


def test_a_shard_without_its_name(shards: list[Path], tmp_path: Path) -> None:
    shards[1].rename(tmp_path / "model.gguf")
    refused(tmp_path / "model.gguf", "this is shard 2 of 4")
    (tmp_path / "model.gguf").rename(tmp_path / "small-00002-of-00005.gguf")
    refused(tmp_path / "small-00002-of-00005.gguf", "the name says 5 shards, the header says 4")


def make_set(folder: Path, config: TinyConfig, **options: Any) -> list[Path]:
    folder.mkdir()
    return write_tiny_deepseek4(folder / "small.gguf", config, **options)


def test_mixed_sets(shards: list[Path], tmp_path: Path, small_config: TinyConfig) -> None:
    # Another model with as many shards, but another number of tensors.
    other = make_set(tmp_path / "other", small_config, n_layers=2, shards=4)
    shutil.copy(other[2], shards[2])
    error = refused(shards[0], "sets are mixed")
    assert error.key == "split.tensors.count"


def keys_of(number: int, count: int, total: int, **more: Any) -> dict[str, Any]:
    return {"split.no": number, "split.count": count, "split.tensors.count": total, **more}


def small_set(folder: Path, *heads: tuple[dict[str, Any], list[str]]) -> list[Path]:
    """Shards with the given keys and tensors of 32 floats."""
    paths = []
    for i, (keys, names) in enumerate(heads):
        path = folder / f"s-{i + 1:05d}-of-{len(heads):05d}.gguf"
        tensors = [(name, (32,), 0) for name in names]
        paths.append(syn.write_file(path, keys, tensors, iter([bytes(128 * len(names))])))
    return paths


ARCH = {"general.architecture": "one"}


def test_contradictory_sets(tmp_path: Path) -> None:
    cases: list[tuple[tuple[dict[str, Any], list[str]], str]] = [
        ((keys_of(1, 3, 2), ["b"]), "belongs to a set of 3"),
        ((keys_of(1, 2, 9), ["b"]), "tensors"),
        ((keys_of(1, 2, 2), ["a"]), "'a' of shard 2 is also in an earlier shard"),
        ((keys_of(1, 2, 2), ["b", "c"]), "hold 3 tensors, but 2 are announced"),
        ((keys_of(1, 2, 2), []), "hold 1 tensors, but 2 are announced"),
        ((keys_of(1, 2, 2, **{"general.architecture": "two"}), ["b"]), "architecture 'two'"),
        (({"split.count": 2}, ["b"]), r"'split\.no' is missing"),
        (({"split.count": 2, "split.no": "x"}, ["b"]), r"'split\.no' is not an integer"),
        (({"split.count": 2, "split.no": 1.0}, ["b"]), r"'split\.no' is not an integer"),
        (({"split.count": 2**31, "split.no": 1}, ["b"]), "claims 2147483648 shards"),
        ((ARCH, ["b"]), "belongs to a set of 1"),
        (({"split.count": 2, "split.no": 7}, ["b"]), "renumbered"),
    ]
    for i, (second, says) in enumerate(cases):
        folder = tmp_path / str(i)
        folder.mkdir()
        paths = small_set(folder, (keys_of(0, 2, 2, **ARCH), ["a"]), second)
        refused(paths[0], says)


def test_a_set_without_a_tensor_total(tmp_path: Path) -> None:
    paths = small_set(
        tmp_path,
        ({**ARCH, "split.count": 2, "split.no": 0}, ["a"]),
        ({"split.count": 2, "split.no": 1}, ["b"]),
    )
    with open_source(paths[1]) as source:
        assert list(source.tensors) == ["a", "b"]


def test_a_damaged_shard_is_named(shards: list[Path]) -> None:
    os.truncate(shards[2], shards[2].stat().st_size - 100)
    error = refused(shards[0], "truncated")
    assert error.path == shards[2]


def test_shards_with_a_large_alignment(tmp_path: Path, small_config: TinyConfig) -> None:
    paths = make_set(tmp_path / "set", small_config, shards=4, alignment=4096)
    whole = write_tiny_deepseek4(tmp_path / "whole.gguf", small_config)[0]
    with open_source(paths[3]) as source, open_source(whole) as other:
        for name in other.tensors:
            assert source.tensors[name].offset % 4096 == 0
            assert np.array_equal(source.read_tensor(name), other.read_tensor(name))


def test_a_shard_that_hides_its_alignment(tmp_path: Path) -> None:
    """Padded for 4096, but silent about it: read as 32 every tensor would be shifted."""
    keys = [keys_of(0, 2, 2, **ARCH), keys_of(1, 2, 2)]
    first = tmp_path / "s-00001-of-00002.gguf"
    second = tmp_path / "s-00002-of-00002.gguf"
    syn.write_file(first, keys[0], [("a", (32,), 0)], iter([b"a" * 4096]), alignment=4096)
    header = syn.encode_header(keys[1], [syn.Tensor(name="b", dims=(32,))])
    second.write_bytes(header.ljust(4096, b"\0") + b"b" * 128 + bytes(3968))
    error = refused(first, "does not say its alignment")
    assert (error.path, error.key) == (second, "general.alignment")
    # Padded for 32, as other writers do: sound.
    syn.write_file(second, keys[1], [("b", (32,), 0)], iter([b"b" * 128]))
    with open_source(first) as source:
        assert source.read_tensor("b").tobytes() == b"b" * 128


def test_no_file(tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "no such file")
    refused(tmp_path, "folder")
    refused(tmp_path / "x.gguf" / "y", "no such file")
    refused(Path("a\0b"), "cannot be opened")
    refused(tmp_path / ("x" * 300), "cannot be opened")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "not a regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(small_model: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(small_model, tmp_path / "m.gguf"))
    path.chmod(0)
    refused(path, "no permission")


def test_permission_error_is_told(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", deny)
    refused(small_model, "no permission")
