"""The header reader: what it reads, what it refuses, and what it leaves undecoded."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import synthetic_gguf as syn
from gguf.constants import GGUFValueType as Kind

from aprefetch.errors import AprefetchError, SourceError, UnsupportedModelError
from aprefetch.storage import GgufExperts, open_source, tensors
from aprefetch.storage.metadata import Metadata
from aprefetch.types import ExpertKey

ARCH = {"general.architecture": "synthetic"}
F32, Q8_0 = 0, 8


def put(path: Path, header: bytes, payload: int = 0) -> Path:
    path.write_bytes(header + bytes(payload))
    return path


def test_everything_equals_the_reference_reader(oracle_model: Path) -> None:
    reference = gguf.GGUFReader(oracle_model)
    with open_source(oracle_model) as source:
        assert list(source.tensors) == [t.name for t in reference.tensors]
        for theirs in reference.tensors:
            ours = source.tensors[theirs.name]
            assert ours.name == theirs.name
            assert ours.ggml_type == theirs.tensor_type
            assert ours.shape == tuple(int(n) for n in theirs.shape[::-1])
            assert (ours.n_bytes, ours.offset) == (theirs.n_bytes, theirs.data_offset)
            assert ours.file == 0
            data = theirs.data.reshape(-1).view(np.uint8)
            assert np.array_equal(source.read_tensor(theirs.name), data)
        keys = [k for k in reference.fields if not k.startswith("GGUF.")]
        assert list(source.metadata) == keys
        for key in keys:
            ours_value: Any = source.metadata[key]
            value = reference.fields[key].contents()
            if isinstance(ours_value, np.ndarray):
                ours_value = ours_value.tolist()
            assert ours_value == value
            assert type(ours_value) is type(value)


@pytest.mark.parametrize("version", [2, 3])
def test_all_value_types(tmp_path: Path, version: int) -> None:
    values: dict[str, Any] = {
        "u8": (Kind.UINT8, 200),
        "i8": (Kind.INT8, -100),
        "u16": (Kind.UINT16, 60_000),
        "i16": (Kind.INT16, -30_000),
        "u32": (Kind.UINT32, 4_000_000_000),
        "i32": (Kind.INT32, -2_000_000_000),
        "u64": (Kind.UINT64, 2**63),
        "i64": (Kind.INT64, -(2**62)),
        "f32": (Kind.FLOAT32, 0.5),
        "f64": (Kind.FLOAT64, 0.1),
        "yes": True,
        "text": "größe 深 🦀\n",
        "none": "",
        "f32s": (Kind.FLOAT32, [0.5, -1.0]),
        "i16s": (Kind.INT16, [-1, 2, 3]),
        "bools": [True, False],
        "texts": ["a", "", "ü"],
        "empty": (Kind.INT32, []),
        "nested": [(Kind.INT32, [1, 2]), (Kind.INT32, [3])],
        "last": 7,
    }
    path = put(tmp_path / "m.gguf", syn.encode_header(values, version=version))
    with open_source(path) as source:
        metadata = source.metadata
        assert len(source.tensors) == 0
        for key, value in values.items():
            plain = value[1] if isinstance(value, tuple) else value
            got = metadata[key]
            if key == "nested":
                assert [x.tolist() for x in got] == [[1, 2], [3]]
            elif isinstance(got, np.ndarray):
                assert got.tolist() == plain
            else:
                assert got == plain
                assert type(got) is type(plain)
        assert metadata["i16s"].dtype == np.int16
        assert metadata["bools"].dtype == np.bool_
        assert metadata.array_length("texts") == 3
        assert metadata.value_type("u64") is Kind.UINT64
        assert metadata.get("absent", 5) == 5
        with pytest.raises(KeyError):
            metadata["absent"]


def test_a_large_vocabulary_is_not_decoded(tmp_path: Path) -> None:
    path = syn.write_header_only(tmp_path / "big.gguf")
    with open_source(path) as source:
        assert len(source.tensors) == 1328
        assert source.architecture == "synthetic"
        assert source.metadata["general.name"] == "header only"
        assert source.metadata.array_length("tokenizer.ggml.tokens") == 130_000
        assert "tokenizer.ggml.tokens" in source.metadata
        assert source.metadata.decoded_keys == {"general.architecture", "general.name"}
        tokens = source.metadata["tokenizer.ggml.tokens"]
        assert (len(tokens), tokens[0], tokens[-1]) == (130_000, "token0", "token129999")
        assert source.metadata["tokenizer.ggml.tokens"] is tokens


def test_a_quarter_million_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening reads about the header and builds no object per tensor."""
    path = syn.write_header_only(tmp_path / "many.gguf", n_tensors=250_000, n_vocab=10)
    built, n_read = 0, 0
    pread = os.pread

    class Counted(tensors.TensorInfo):
        def __init__(self, **fields: Any) -> None:
            nonlocal built
            built += 1
            super().__init__(**fields)

    def counted_pread(fd: int, n: int, offset: int) -> bytes:
        nonlocal n_read
        got = pread(fd, n, offset)
        n_read += len(got)
        return got

    monkeypatch.setattr(tensors, "TensorInfo", Counted)
    monkeypatch.setattr(os, "pread", counted_pread)
    with open_source(path) as source:
        assert built == 0
        n_header = source.tensors["blk.0.part0.weight"].offset
        assert n_read <= 2 * n_header
        assert built == 1
        assert len(source.tensors) == 250_000
        last = source.tensors["blk.7812.part15.weight"]
        assert (last.shape, last.n_bytes) == ((4, 32), 512)
        assert last.offset == n_header + 249_999 * 512
        assert GgufExperts(source, range(8)).layers == {}
        assert built == 2


@pytest.mark.parametrize("alignment", [16, 32, 64, 4096])
def test_alignments(tmp_path: Path, alignment: int) -> None:
    first, second = bytes(range(136)), bytes(range(100, 168))
    gap = -len(first) % alignment
    payload = iter([first + bytes(gap) + second])
    path = syn.write_file(
        tmp_path / "a.gguf",
        ARCH,
        [("a", (32, 4), Q8_0), ("b", (32, 2), Q8_0)],
        payload,
        alignment=alignment,
    )
    with open_source(path) as source:
        assert source.tensors["b"].offset % alignment == 0
        assert source.read_tensor("a").tobytes() == first
        assert source.read_tensor("b").tobytes() == second


@pytest.mark.parametrize(
    "value",
    [0, 3, 1, 4, 33, 1 << 30, 0xFFFFFFFF, (Kind.INT32, -32), (Kind.UINT64, 32), 32.0, "32", [32]],
)
def test_bad_alignments_name_the_key(tmp_path: Path, value: Any) -> None:
    keys = {**ARCH, "general.alignment": value}
    path = put(tmp_path / "a.gguf", syn.encode_header(keys), 4096)
    with pytest.raises(SourceError, match=r"general\.alignment") as caught:
        open_source(path)
    assert caught.value.key == "general.alignment"


def row(name: str = "t", dims: tuple[int, ...] = (32, 2), kind: int = F32, at: int = 0) -> Any:
    return syn.Tensor(name=name, dims=dims, ggml_type=kind, offset=at)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row(), row(at=256)], "'t' appears twice"),
        ([row(dims=(32, 0))], "empty dimension"),
        ([row(dims=(2**33, 2**33))], "too large"),
        ([row(dims=(2**63, 2, 2, 2))], "too large"),
        ([row(dims=(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1))], "too large"),
        ([row(dims=(1, 1, 1, 1, 1))], "5 dimensions"),
        ([row(dims=(40, 2), kind=Q8_0)], "not whole blocks"),
        ([row(at=8)], "off the alignment"),
        ([row(at=1 << 20)], "beyond the end"),
        ([row(at=2**64 - 32)], "beyond the end"),
        ([row(dims=(32, 40))], "truncated"),
        ([row(name="")], "name of 0 bytes"),
        ([row("a", (32, 4)), row("b", at=256)], "'a' and 'b' overlap"),
        ([row("a", at=256), row("b", (32, 4))], "'b' and 'a' overlap"),
        ([row("a"), row("b")], "overlap"),
    ],
)
def test_bad_tensor_rows(tmp_path: Path, rows: list[Any], says: str) -> None:
    path = put(tmp_path / "t.gguf", syn.encode_header(ARCH, rows), 4096)
    with pytest.raises(SourceError, match=says):
        open_source(path)


@pytest.mark.parametrize("kind", [4, 31, 99, 2**32 - 1])
def test_an_unknown_tensor_type_is_unsupported(tmp_path: Path, kind: int) -> None:
    path = put(tmp_path / "t.gguf", syn.encode_header(ARCH, [row("odd", kind=kind)]), 4096)
    with pytest.raises(UnsupportedModelError, match=f"'odd' has the unknown type {kind}"):
        open_source(path)


def test_scalars_and_gaps_are_fine(tmp_path: Path) -> None:
    rows = [row("later", at=512), row("scalar", dims=(), at=0), row("one", dims=(5,), at=256)]
    with open_source(put(tmp_path / "t.gguf", syn.encode_header(ARCH, rows), 4096)) as source:
        assert source.tensors["scalar"].shape == ()
        assert source.tensors["scalar"].n_bytes == 4
        assert source.tensors["one"].shape == (5,)


def with_key(name: bytes, type_id: int, body: bytes) -> bytes:
    return (
        b"GGUF"
        + struct.pack("<IQQQ", 3, 0, 1, len(name))
        + name
        + struct.pack("<I", type_id)
        + body
    )


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF"),
        (b"GGUF", "ends inside its version"),
        (b"GGUF\x03\0\0\0", "ends inside its tensor count"),
        (b"GGUF\x01\0\0\0" + bytes(30), "version 1 is too old"),
        (b"GGUF\0\0\0\x03" + bytes(30), "big-endian"),
        (b"GGUF\x09\0\0\0" + bytes(30), "version 9 is unknown"),
        (b"GGUF\0\0\0\0" + bytes(30), "version 0 is unknown"),
        (struct.pack("<Q", 80) + b'{"__metadata__":', "safetensors"),
        (b"PK\x03\x04" + bytes(40), "zip"),
        (b"<!DOCTYPE html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\x7fELF" + bytes(40), "not a GGUF file"),
        (syn.encode_header(ARCH, n_keys=2**60), "claims .* metadata keys"),
        (syn.encode_header(ARCH, n_tensors=2**63), "claims .* tensors"),
        (syn.encode_header(ARCH, n_keys=2), "ends inside metadata key 2 of 2"),
        (syn.encode_header(ARCH, n_tensors=1), "ends inside its tensor table"),
        (syn.encode_header([("a", 1), ("a", 2)]), "'a' appears twice"),
        (with_key(b"", 4, bytes(4)), "name of 0 bytes"),
        (with_key(b"\xff\xfe", 4, bytes(4)), "not UTF-8"),
        (with_key(b"k", 77, bytes(4)), "unknown value type 77"),
        (with_key(b"k", 9, struct.pack("<IQ", 50, 1) + bytes(9)), "unknown element type 50"),
        (with_key(b"k", 8, struct.pack("<Q", 2**63)), "ends inside the value"),
        (with_key(b"k", 9, struct.pack("<IQ", 4, 2**62)), "ends inside the value"),
        (with_key(b"k", 9, struct.pack("<IQ", 8, 2**62)), "strings"),
        (with_key(b"k", 9, struct.pack("<IQQ", 8, 1, 2**64 - 1)), "ends inside the value"),
        (with_key(b"k", 9, struct.pack("<IQ", 9, 1) * 9), "nested too deeply"),
    ],
)
def test_bad_headers(tmp_path: Path, header: bytes, says: str) -> None:
    path = put(tmp_path / "h.gguf", header)
    with pytest.raises(SourceError, match=says) as caught:
        open_source(path)
    assert caught.value.path == path
    assert str(path) in str(caught.value)


def test_damaged_counts_in_a_huge_file_cost_little(tmp_path: Path) -> None:
    """A hole of 1 TiB behind the header: nothing may walk or allocate all of it."""
    cases = {
        "keys": syn.encode_header(ARCH, n_keys=2**32),
        "tensors": syn.encode_header(ARCH, n_tensors=2**32),
        "strings": with_key(b"k", 9, struct.pack("<IQ", 8, 2**33)),
        "string": with_key(b"k", 8, struct.pack("<Q", 2**39)),
        "numbers": with_key(b"k", 9, struct.pack("<IQ", 10, 2**36)),
        "nested": with_key(b"k", 9, struct.pack("<IQ", 9, 2**36)),
    }
    for name, header in cases.items():
        path = put(tmp_path / f"{name}.gguf", header)
        os.truncate(path, 1 << 40)
        with pytest.raises(SourceError):
            open_source(path)


def test_text_that_is_not_utf8_names_the_key(tmp_path: Path) -> None:
    keys = {"name": b"\xff\xfe", "tokens": [b"ok", b"\xe2\x82"], "fine": "x"}
    with open_source(put(tmp_path / "u.gguf", syn.encode_header(keys))) as source:
        assert source.metadata["fine"] == "x"
        with pytest.raises(SourceError, match="'name' is not valid UTF-8"):
            source.metadata["name"]
        with pytest.raises(SourceError, match="'tokens' is not valid UTF-8 in element 1") as caught:
            source.metadata["tokens"]
        assert caught.value.key == "tokens"
        assert source.metadata.raw_strings("tokens") == [b"ok", b"\xe2\x82"]
        with pytest.raises(SourceError, match="not an array"):
            source.metadata.array_length("fine")
        with pytest.raises(SourceError, match="not an array of strings"):
            source.metadata.raw_strings("fine")


def test_a_boolean_is_zero_or_one(tmp_path: Path) -> None:
    path = put(tmp_path / "b.gguf", with_key(b"flag", int(Kind.BOOL), b"\x02"))
    with open_source(path) as source, pytest.raises(SourceError, match="'flag'"):
        source.metadata["flag"]


def test_the_architecture_must_be_told(tmp_path: Path) -> None:
    source = open_source(put(tmp_path / "x.gguf", syn.encode_header({"a": 1})))
    with source, pytest.raises(SourceError, match=r"general\.architecture"):
        _ = source.architecture


def use(path: Path) -> None:
    """What a runtime does with a file before any math."""
    with open_source(path) as source:
        dict(source.metadata)
        _ = source.architecture
        experts = GgufExperts(source, range(8))
        for layer, layout in experts.layers.items():
            experts.read_plan(ExpertKey(layer, layout.n_experts - 1))
        for name in list(source.tensors)[:3]:
            source.read_tensor(name)
        source.identity()


def survives(path: Path, check: Callable[[Path], None] = use) -> bool:
    """Whether the file could be used; anything but our own errors fails the test."""
    try:
        check(path)
    except AprefetchError as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


def test_two_hundred_truncations(tmp_path: Path, oracle_model: Path) -> None:
    path = Path(shutil.copy(oracle_model, tmp_path / "cut.gguf"))
    size = path.stat().st_size
    rng = random.Random(1)
    cuts = {rng.randrange(size) for _ in range(150)} | {rng.randrange(60_000) for _ in range(60)}
    assert survives(path)
    for cut in sorted(cuts | {0, 1, 3, 4, 23, 24, size - 1}, reverse=True):
        os.truncate(path, cut)
        assert not survives(path), cut
    assert len(cuts) >= 200


def header_bytes(path: Path) -> int:
    with open_source(path) as source:
        return min(t.offset for t in source.tensors.values())


def test_hundreds_of_flipped_header_bytes(tmp_path: Path, oracle_model: Path) -> None:
    path = Path(shutil.copy(oracle_model, tmp_path / "flip.gguf"))
    end = header_bytes(path)
    rng = random.Random(2)
    # The vocabulary is most of the header, so the structure gets a share of its own.
    places = [rng.randrange(end) for _ in range(200)]
    places += [rng.randrange(2500) for _ in range(100)]
    places += [rng.randrange(end - 14_000, end) for _ in range(200)]
    refused = 0
    with path.open("r+b", buffering=0) as file:
        for place in places:
            right = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([right[0] ^ (1 << rng.randrange(8))]), place)
            refused += not survives(path)
            os.pwrite(file.fileno(), right, place)
    assert 0 < refused < len(places)
    assert survives(path)


def test_metadata_is_a_mapping(oracle_model: Path) -> None:
    with open_source(oracle_model) as source:
        assert isinstance(source.metadata, Metadata)
        assert len(source.metadata) == len(list(source.metadata))
        assert len(source.tensors) == len(list(source.tensors))
        assert "nothing" not in source.tensors
        with pytest.raises(KeyError):
            source.tensors["nothing"]
