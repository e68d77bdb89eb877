"""Which pack is used, which is stale, and that a good one is never lost."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from make_tiny_gguf import write_tiny_deepseek4
from pack_parts import RAGGED, all_bytes, file_digests, leftovers, write_model

from aprefetch.errors import (
    ConfigError,
    PackCorruptError,
    PackError,
    PackStaleError,
    PackVersionError,
)
from aprefetch.storage import GgufExperts, open_source
from aprefetch.storage.pack import (
    PackExperts,
    build_pack,
    find_pack,
    select_experts,
)
from aprefetch.storage.pack import build as pack_build
from aprefetch.storage.pack import format as pack_format
from aprefetch.storage.pack import select as pack_select
from aprefetch.types import ExpertKey

SHARDED = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return write_model(folder / "m.gguf", RAGGED)


@pytest.fixture
def shards(tmp_path: Path, small_config: Any) -> list[Path]:
    folder = tmp_path / "shards"
    folder.mkdir()
    return write_tiny_deepseek4(folder / "tiny.gguf", small_config, shards=SHARDED)


def choose(model: Path, mode: str = "auto", pack_dirs: list[Path] | None = None, **options: Any):
    """State, and the bytes of every object."""
    with open_source(model) as source:
        layers = pack_build.default_layers(source)
        experts, state = select_experts(source, layers, mode, pack_dirs, **options)
        direct = GgufExperts(source, layers)
        assert all_bytes(experts) == all_bytes(direct)
        assert isinstance(experts, PackExperts) == (state != "direct GGUF")
        return state


def test_modes(model: Path) -> None:
    assert choose(model, "gguf") == "direct GGUF"
    assert choose(model, "auto") == "direct GGUF"
    assert [p.name for p in model.parent.iterdir()] == ["m.gguf"]
    assert choose(model, "pack") == "pack built"
    assert choose(model, "pack") == "pack reused"
    assert choose(model, "auto") == "pack reused"
    assert choose(model, "gguf") == "direct GGUF"
    with pytest.raises(ConfigError, match="experts is 'maybe'"):
        choose(model, "maybe")
    with pytest.raises(ConfigError, match="verify is"):
        choose(model, "auto", verify="maybe")


def test_gguf_never_looks_for_a_pack(model: Path, monkeypatch) -> None:
    build_pack(model)

    def trap(*args: Any) -> Any:
        raise AssertionError("a pack was looked for")

    monkeypatch.setattr(pack_select, "pack_files", trap)
    monkeypatch.setattr(pack_select, "read_part", trap)
    assert choose(model, "gguf") == "direct GGUF"


def test_striped_single_and_direct_are_bit_equal(oracle_model: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    assert choose(oracle_model, "pack", folders) == "pack built"
    assert choose(oracle_model, "auto", folders) == "pack reused"
    assert choose(oracle_model, "pack", [tmp_path / "one"]) == "pack built"
    endings = {p.name.split(".", 1)[1] for p in tmp_path.rglob("*.gguf")}
    assert endings == {"pack.gguf", "pack-00001-of-00002.gguf", "pack-00002-of-00002.gguf"}


def test_killed_build_is_resumed(model: Path) -> None:
    class Stop(Exception):
        pass

    class Stopping(pack_build.PackFiles):
        def replace(self, old: Path, new: Path) -> None:
            raise Stop

    with pytest.raises(Stop):
        build_pack(model, files=Stopping())
    assert choose(model, "auto") == "direct GGUF"
    assert choose(model, "pack") == "pack resumed"
    assert choose(model, "pack") == "pack reused"
    assert leftovers(model.parent) == []


# -- staleness --------------------------------------------------------------------------------


def change_byte(path: Path, at: int, keep_time: bool = False) -> None:
    was = path.stat()
    with path.open("rb+") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    if keep_time:
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.parametrize("keep_time", [False, True])
@pytest.mark.parametrize("role", ["gate", "down"])
def test_one_changed_byte_in_a_middle_shard_is_found(
    shards: list[Path], tmp_path: Path, role: str, keep_time: bool
) -> None:
    out = tmp_path / "packs"
    assert choose(shards[0], "pack", [out]) == "pack built"
    with open_source(shards[0]) as source:
        found = [
            t
            for t in source.tensors.values()
            if t.file == 1 and t.name.endswith(f"ffn_{role}_exps.weight")
        ]
    assert found, "the middle shard holds experts"
    change_byte(shards[1], found[0].offset + found[0].n_bytes // 2 + 77, keep_time)
    assert choose(shards[0], "auto", [out]) == "direct GGUF"
    assert choose(shards[0], "pack", [out]) == "pack built"
    assert choose(shards[2], "auto", [out]) == "pack reused"


def counted_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each time that all bytes are compared."""
    compared: list[int] = []
    real = pack_build.differs

    def counted(*args: Any) -> bool:
        compared.append(1)
        return real(*args)

    monkeypatch.setattr(pack_select, "differs", counted)
    monkeypatch.setattr(pack_build, "differs", counted)
    return compared


def test_every_byte_of_a_big_payload_counts(tmp_path: Path, monkeypatch) -> None:
    """Also those between the samples of the fingerprint: then all bytes are compared."""
    types = {"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"}
    model = write_model(tmp_path / "m.gguf", {0: (8, 512, 512, types)})
    assert choose(model, "pack") == "pack built"
    with open_source(model) as source:
        before = source.identity().digest
        offset = source.tensors["blk.0.ffn_up_exps.weight"].offset
    for at in range(offset, offset + 100_000, 5_000):
        change_byte(model, at)
        with open_source(model) as source:
            if source.identity().digest == before:
                break
        change_byte(model, at)
    else:
        pytest.fail("every byte was sampled")
    compared = counted_comparisons(monkeypatch)
    assert choose(model, "auto") == "direct GGUF"
    assert choose(model, "auto") == "direct GGUF"
    (pack,) = model.parent.glob("*.pack.gguf")
    old = file_digests([pack])
    assert choose(model, "pack") == "pack built"
    assert list(model.parent.glob("*.pack.gguf")) == [pack]
    assert file_digests([pack]) != old
    assert compared == [1], "the proof is remembered"
    assert choose(model, "auto") == "pack reused"


@pytest.mark.parametrize("stamped", [True, False])
def test_touched_only_it_is_reused(shards: list[Path], stamped: bool, monkeypatch) -> None:
    assert choose(shards[0], "pack") == "pack built"
    pack = next(shards[0].parent.glob("*.pack.gguf"))
    clean = file_digests([pack])
    if not stamped:
        pack.with_name(pack.name + ".stamp").unlink()
    for shard in shards:
        os.utime(shard, (1, 1))
    compared = counted_comparisons(monkeypatch)
    assert choose(shards[0], "pack") == "pack reused"
    assert compared == [1]
    assert choose(shards[0], "auto") == "pack reused"
    assert compared == [1], "the comparison is remembered"
    assert file_digests([pack]) == clean


def test_damaged_stamps_cost_nothing_but_time(model: Path) -> None:
    assert choose(model, "pack") == "pack built"
    stamp = next(model.parent.glob("*.stamp"))
    for text in ("", "{", "[]", '{"id": 1}', '{"id": null, "content": null, "shards": 3}'):
        stamp.write_text(text)
        assert choose(model, "auto") == "pack reused"


def test_moved_and_renamed_models_and_packs(model: Path, tmp_path: Path) -> None:
    assert choose(model, "pack") == "pack built"
    folder = tmp_path / "moved è"
    shutil.move(model.parent, folder)
    (folder / "m.gguf").rename(folder / "n.gguf")
    assert choose(folder / "n.gguf", "pack") == "pack reused"
    pack = next(folder.glob("*.pack.gguf"))
    away = tmp_path / "away"
    away.mkdir()
    pack.rename(away / "any name.pack.gguf")
    assert choose(folder / "n.gguf", "auto") == "direct GGUF"
    assert choose(folder / "n.gguf", "pack", [away]) == "pack reused"


# -- folders ----------------------------------------------------------------------------------


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    models = []
    for seed in (1, 2):  # of the same name
        folder = tmp_path / str(seed)
        folder.mkdir()
        models.append(write_model(folder / "model.gguf", RAGGED, seed=seed))
    out = tmp_path / "packs"
    assert [choose(m, "pack", [out]) for m in models] == ["pack built"] * 2
    kept = file_digests(sorted(out.glob("*.gguf")))
    assert len(kept) == 2
    assert [choose(m, "pack", [out]) for m in models] == ["pack reused"] * 2
    change_byte(models[0], 2000)
    choose(models[0], "pack", [out])
    assert choose(models[1], "auto", [out]) == "pack reused"
    assert set(kept) <= set(file_digests(list(out.glob("*.gguf"))))


def test_a_pack_elsewhere_leaves_the_models_folder_alone(model: Path, tmp_path: Path) -> None:
    assert choose(model, "pack", [tmp_path / "a", tmp_path / "b"]) == "pack built"
    assert [p.name for p in model.parent.iterdir()] == ["m.gguf"]


def test_another_models_pack_under_our_name(model: Path, tmp_path: Path) -> None:
    path = build_pack(model).paths[0]
    other = write_model(tmp_path / "other.gguf", RAGGED, seed=8)
    shutil.copy(build_pack(other).paths[0], path)
    path.with_name(path.name + ".stamp").unlink()
    kept = file_digests([path])
    assert choose(model, "auto") == "direct GGUF"
    with pytest.raises(PackStaleError, match="another model.*--rebuild"):
        choose(model, "pack")
    assert file_digests([path]) == kept
    with open_source(model) as source:
        assert build_pack(source, rebuild=True).state == "pack built"
    assert choose(model, "auto") == "pack reused"


def test_a_pack_with_other_layers_is_not_mixed_up(model: Path) -> None:
    build_pack(model, layers=[1, 2])
    assert choose(model, "auto") == "direct GGUF"
    with pytest.raises(PackStaleError, match="other layers"):
        choose(model, "pack")
    build_pack(model, rebuild=True)
    with open_source(model) as source:
        experts, state = select_experts(source, [1, 2], "auto")
        assert state == "pack reused"
        assert {1, 2} <= set(experts.layers)


# -- broken packs -----------------------------------------------------------------------------


def test_auto_goes_on_without_a_broken_pack_and_pack_refuses(model: Path, caplog) -> None:
    path = build_pack(model).paths[0]
    change_byte(path, 900)
    broken = file_digests([path])
    assert choose(model, "auto") == "direct GGUF"
    assert "is not used" in caplog.text
    with pytest.raises(PackCorruptError, match="--rebuild"):
        choose(model, "pack")
    assert file_digests([path]) == broken


def test_versions_that_are_not_known(model: Path, monkeypatch) -> None:
    monkeypatch.setattr(pack_format, "VERSION", (9, 0))
    build_pack(model)
    monkeypatch.undo()
    assert choose(model, "auto") == "direct GGUF"
    with pytest.raises(PackVersionError, match="update aprefetch"):
        choose(model, "pack")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_unreadable_packs_stay(model: Path, code: int, monkeypatch) -> None:
    path = build_pack(model).paths[0]
    clean = file_digests([path])
    real = os.open

    def opening(name: Any, *args: Any, **keywords: Any) -> int:
        if str(name) == str(path):
            raise OSError(code, os.strerror(code))
        return real(name, *args, **keywords)

    monkeypatch.setattr(os, "open", opening)
    assert choose(model, "auto") == "direct GGUF"
    with pytest.raises(PackError, match="left as it is"):
        choose(model, "pack")
    monkeypatch.undo()
    assert file_digests([path]) == clean
    assert choose(model, "auto") == "pack reused"


def test_a_missing_part(model: Path, tmp_path: Path, caplog) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    assert choose(model, "pack", folders) == "pack built"
    lost = next(folders[1].glob("*.gguf"))
    lost.unlink()
    assert choose(model, "auto", folders) == "direct GGUF"
    assert "00002-of-00002" in caplog.text
    with pytest.raises(PackError, match="1 of 2 parts of the pack are missing"):
        choose(model, "pack", folders)


@pytest.mark.parametrize("verify", ["sampled", "full"])
def test_verification_before_use(model: Path, verify: str) -> None:
    path = build_pack(model).paths[0]
    assert choose(model, "auto", verify=verify) == "pack reused"
    change_byte(path, path.stat().st_size - 4096)
    with pytest.raises(PackCorruptError, match="aprefetch verify --repair"):
        choose(model, "pack", verify=verify)
    assert choose(model, "auto", verify=verify) == "direct GGUF"


def test_find_pack_gives_the_source_along(model: Path) -> None:
    build_pack(model)
    with open_source(model) as source:
        pack = find_pack(source)
        assert pack is not None
        assert set(pack.layers) == {1, 2, 4, 5}
        assert find_pack(source, layers=[1, 4]) is not None
        assert find_pack(source, layers=[7]) is None
        key = ExpertKey(1, 3)
        buffer = memoryview(bytearray(pack.max_landing_bytes(1)))
        pack.restore(key, buffer)
        pack.check(key, buffer)
