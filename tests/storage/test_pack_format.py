"""The pack's format: one aligned range per object, an index that is checked to the bit."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_parts import RAGGED, all_bytes, all_keys, layers_of, write_model

from aprefetch.errors import PackCorruptError, PackError, PackVersionError
from aprefetch.storage import GgufExperts, open_source
from aprefetch.storage.pack import build_pack, open_pack, read_part, verify_pack
from aprefetch.storage.pack import format as pack_format
from aprefetch.storage.pack.format import DIGEST_BYTES, PackedSource, encode_part_header
from aprefetch.storage.pack.shape import PackShape
from aprefetch.types import ExpertKey, LayerLayout, RoleLayout

SOURCE = PackedSource(
    architecture="odd",
    digest="d" * 32,
    config_digest="c" * 32,
    names=("odd.gguf",),
    sizes=(1,),
    mtimes_ns=(2,),
    digests=("e" * 32,),
)


def layout(layer: int, n_experts: int, n_bytes: tuple[int, int, int]) -> LayerLayout:
    """Roles of 8-bit weights, so any number of bytes can be had."""
    i8 = int(gguf.GGMLQuantizationType.I8)
    roles = tuple(
        RoleLayout(role=role, ggml_type=i8, n_out=1, n_in=n, n_bytes=n)  # type: ignore[arg-type]
        for role, n in zip(("gate", "up", "down"), n_bytes, strict=True)
    )
    return LayerLayout(layer=layer, n_experts=n_experts, roles=roles)


def write_empty_pack(path: Path, shape: PackShape, part: int = 0) -> Path:
    """A part whose payload is a hole and whose digests are zeros."""
    digests = np.zeros((shape.n_objects, DIGEST_BYTES), dtype=np.uint8)
    header = encode_part_header(shape, part, SOURCE, digests, [])
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + shape.data_bytes(part))
    return path


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ragged") / "ragged.gguf", RAGGED)


@pytest.fixture(scope="module")
def pack(ragged: Path) -> Path:
    """A sound pack of the ragged model. Read only."""
    return build_pack(ragged).paths[0]


sizes = st.integers(1, 9000)
layers_strategy = st.lists(
    st.tuples(st.integers(1, 9), st.tuples(sizes, sizes, sizes), st.integers(1, 3)), max_size=5
)


@settings(max_examples=60, deadline=None)
@given(
    layers=layers_strategy,
    n_parts=st.integers(1, 5),
    alignment=st.sampled_from([4096, 8192, 65536]),
)
def test_every_object_is_one_aligned_range_of_its_own(layers, n_parts, alignment) -> None:
    at, made = 0, []
    for n_experts, n_bytes, gap in layers:
        made.append(layout(at, n_experts, n_bytes))
        at += gap
    shape = PackShape(layers=tuple(made), n_parts=n_parts, alignment=alignment)
    numbers = [n for part in range(n_parts) for n in shape.object_numbers(part).tolist()]
    assert sorted(numbers) == list(range(shape.n_objects))
    for part in range(n_parts):
        end = 0
        for layer, stack in shape.stacks[part].items():
            assert stack.offset == end
            assert stack.stored_bytes % alignment == stack.offset % alignment == 0
            assert 0 <= stack.stored_bytes - stack.layout.payload_bytes < alignment
            assert stack.n_slots == len(range(part, stack.layout.n_experts, n_parts))
            assert layer == stack.layout.layer
            end += stack.n_slots * stack.stored_bytes
        assert end == shape.data_bytes(part)


@pytest.mark.parametrize("n_parts", [1, 2, 3])
@pytest.mark.parametrize("alignment", [4096, 65536])
def test_ragged_layers_and_mixed_types_keep_their_bytes(
    ragged: Path, tmp_path: Path, n_parts: int, alignment: int
) -> None:
    folders = [tmp_path / str(i) for i in range(n_parts)]
    result = build_pack(ragged, folders, alignment=alignment)
    with open_source(ragged) as source:
        direct = GgufExperts(source, layers_of(ragged))
        pack = open_pack(result.paths[0], folders=folders)
        assert pack.layers == direct.layers
        assert list(pack.layers) == [1, 2, 4, 5]
        assert pack.tensor_names == direct.tensor_names
        assert all_bytes(pack) == all_bytes(direct)
        for key in all_keys(pack):
            plan = pack.read_plan(key)
            assert len(plan.reads) == 1
            read = plan.reads[0]
            assert read.offset % alignment == read.length % alignment == read.landing_offset == 0
            assert read.file == key.expert % n_parts
            raw = pack.paths[read.file].read_bytes()[read.offset : read.offset + read.length]
            payload = pack.layers[key.layer].payload_bytes
            assert not any(raw[payload:]), "padding is zero"


def test_odd_payload_of_2764824_bytes(tmp_path: Path) -> None:
    f16 = {"gate": "F16", "up": "F16", "down": "F16"}
    model = write_model(tmp_path / "odd.gguf", {0: (3, 115_201, 4, f16)})
    pack = open_pack(build_pack(model).paths[0])
    assert pack.layers[0].payload_bytes == 2_764_824
    assert pack.read_plan(ExpertKey(0, 1)).reads[0].length == 676 * 4096
    with open_source(model) as source:
        assert all_bytes(pack) == all_bytes(GgufExperts(source, [0]))
    assert verify_pack(pack).corrupt == ()


def test_wrong_keys(pack: Path) -> None:
    experts = open_pack(pack)
    for key in (ExpertKey(0, 0), ExpertKey(1, 7), ExpertKey(1, -1)):
        with pytest.raises(KeyError):
            experts.read_plan(key)


def test_other_tools_can_look_into_it(pack: Path, ragged: Path) -> None:
    reader = gguf.GGUFReader(str(pack))
    tensors = {t.name: (t.tensor_type.name, t.shape.tolist()) for t in reader.tensors}
    assert tensors["blk.1.experts"] == ("I8", [73728, 7])
    assert tensors["blk.5.experts"] == ("I8", [4096, 1])
    assert reader.alignment == 4096
    for key in ("tokenizer.ggml.tokens", "tokenizer.chat_template", "odd.block_count"):
        assert key in reader.fields
    del reader
    gc.collect()  # it maps the file
    with open_source(ragged) as source, open_source(pack) as packed:
        for key in source.metadata:
            if key != "general.architecture":
                assert packed.metadata.encoded(key) == source.metadata.encoded(key)


def test_moved_and_renamed(pack: Path, ragged: Path, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere é"
    there.mkdir()
    moved = there / "other name.bin"
    shutil.copy(pack, moved)
    with open_source(ragged) as source:
        assert all_bytes(open_pack(moved)) == all_bytes(GgufExperts(source, layers_of(ragged)))
    assert str(ragged.parent).encode() not in pack.read_bytes()


def count_calls(work: Any) -> int:
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_the_index_loads_in_bulk(tmp_path: Path) -> None:
    calls = []
    for n_experts in (10, 25_000):
        layers = tuple(layout(i, n_experts, (10, 20, 30)) for i in range(10))
        shape = PackShape(layers=layers, n_parts=1, alignment=4096)
        path = write_empty_pack(tmp_path / f"{n_experts}.pack.gguf", shape)
        calls.append(count_calls(lambda path=path: open_pack(path)))
        assert open_pack(path).shape.n_objects == 10 * n_experts
    assert calls[1] <= calls[0] + 20


# -- refused by name ------------------------------------------------------------------------


def copy_of(pack: Path, folder: Path) -> Path:
    target = folder / "copy.pack.gguf"
    shutil.copy(pack, target)
    return target


def set_bytes(path: Path, at: int, raw: bytes) -> None:
    with path.open("rb+") as file:
        file.seek(at)
        file.write(raw)


def test_each_field_that_was_changed_is_named(pack: Path, tmp_path: Path) -> None:
    """One bit in each value of the header."""
    index = read_part(pack)
    raw = pack.read_bytes()[: index.data_offset]
    named = 0
    for key in index.metadata:
        _, body = index.metadata.encoded(key)
        at = raw.index(key.encode()) + len(key) + 4
        path = copy_of(pack, tmp_path)
        set_bytes(path, at + len(body) - 1, bytes([raw[at + len(body) - 1] ^ 1]))
        with pytest.raises(PackError) as caught:
            read_part(path)
        assert key in str(caught.value), str(caught.value)
        named += 1
    assert named > 35


def test_magic_counts_and_tensor_table(pack: Path, tmp_path: Path) -> None:
    raw = pack.read_bytes()
    table = raw.index(b"blk.1.experts")
    for at, what in ((0, "not a GGUF"), (4, "version"), (8, ""), (16, ""), (table, "table")):
        path = copy_of(pack, tmp_path)
        set_bytes(path, at, bytes([raw[at] ^ 1]))
        with pytest.raises(PackCorruptError) as caught:
            read_part(path)
        assert what in str(caught.value)


def test_a_newer_format_is_refused_with_advice(ragged: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pack_format, "VERSION", (2, 0))
    path = build_pack_as_it_is(ragged, tmp_path)
    monkeypatch.undo()
    with pytest.raises(PackVersionError, match=r"version_major' is 2.*update aprefetch"):
        open_pack(path)


def build_pack_as_it_is(model: Path, folder: Path) -> Path:
    return build_pack(model, [folder]).paths[0]


def test_a_newer_minor_version_is_read(ragged: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pack_format, "VERSION", (1, 7))
    path = build_pack_as_it_is(ragged, tmp_path)
    monkeypatch.undo()
    assert verify_pack(open_pack(path)).corrupt == ()


def test_an_unknown_required_flag_is_refused(pack: Path, tmp_path: Path) -> None:
    path = copy_of(pack, tmp_path)
    key = b"aprefetch.pack.required_flags"
    set_bytes(path, pack.read_bytes().index(key) + len(key) + 4, b"\x04")
    with pytest.raises(PackVersionError, match=r"required_flags.*0x4.*update aprefetch"):
        open_pack(path)


def test_no_pack_at_all(ragged: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="does not say that it is an Expert Pack"):
        open_pack(ragged)
    with pytest.raises(PackError, match="cannot be opened"):
        open_pack(tmp_path / "absent.pack.gguf")
    with pytest.raises(PackError, match="not a regular file"):
        open_pack(tmp_path)
    text = tmp_path / "text.pack.gguf"
    text.write_text("hello")
    with pytest.raises(PackCorruptError, match="not a GGUF"):
        open_pack(text)


@pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
def test_a_part_of_the_wrong_size_is_refused(pack: Path, tmp_path: Path, change: int) -> None:
    path = copy_of(pack, tmp_path)
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(PackCorruptError, match=r"truncated|damaged"):
        open_pack(path)


def test_indexes_that_lie_but_are_signed(tmp_path: Path, monkeypatch) -> None:
    """Whoever can sign an index can still not make it contradict itself."""
    shape = PackShape(layers=(layout(0, 4, (8, 8, 8)),), n_parts=1, alignment=4096)
    lies: dict[str, Any] = {
        "part": pack_format.encode.u32(3),
        "n_parts": pack_format.encode.u32(65),
        "n_objects": pack_format.encode.u64(5),
        "layers": pack_format.encode.u32([1]),
        "n_experts": pack_format.encode.u32([1 << 30]),
        "payload_bytes": pack_format.encode.u64([23]),
        "stored_bytes": pack_format.encode.u64([8192]),
        "roles": pack_format.encode.texts(["up", "gate", "down"]),
        "role_types": pack_format.encode.u32([999, 24, 24]),
        "role_rows": pack_format.encode.u64([1 << 63, 1, 1]),
        "role_columns": pack_format.encode.u64([0, 8, 8]),
        "role_bytes": pack_format.encode.u64([9, 8, 8]),
        "role_block_bytes": pack_format.encode.u32([2, 1, 1]),
        "digest_bytes": pack_format.encode.u32(32),
        "digests": pack_format.encode.u64([1, 2]),
        "id": pack_format.encode.text("0" * 32),
        "source.names": pack_format.encode.texts([]),
        "source.sizes": pack_format.encode.u64([1, 2]),
        "content_digest": pack_format.encode.u32(1),
    }
    honest = pack_format._pack_pairs
    for name, lie in lies.items():
        key = f"aprefetch.pack.{name}"

        def lying(*args: Any, key: str = key, lie: Any = lie) -> Any:
            return [(k, lie if k == key else v) for k, v in honest(*args)]

        monkeypatch.setattr(pack_format, "_pack_pairs", lying)
        path = write_empty_pack(tmp_path / "lie.pack.gguf", shape)
        monkeypatch.undo()
        with pytest.raises(PackCorruptError) as caught:
            read_part(path)
        assert f"aprefetch.pack.{name}"[:20] in str(caught.value), (name, str(caught.value))
