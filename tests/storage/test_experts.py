"""Expert byte ranges: plans that give exactly the source's bytes, and files that are refused."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import synthetic_gguf as syn
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tiny_gguf import write_tiny_deepseek4

from aprefetch.errors import ConfigError, SourceError, UnsupportedModelError
from aprefetch.storage import ExpertSource, GgufExperts, direct_io_alignment, open_source
from aprefetch.storage.direct import widest_alignment
from aprefetch.types import ALIGNMENT, ROLES, ExpertKey, ReadPlan

F32 = int(GGMLQuantizationType.F32)
TYPES = ["F32", "F16", "MXFP4", "Q8_0", "Q2_K", "Q3_K", "Q6_K"]


def land(paths: tuple[Path, ...], plan: ReadPlan, alignment: int) -> bytes:
    """The device slot after the plan's reads (direct where the file system can) and pieces."""
    landing = mmap.mmap(-1, max(plan.landing_bytes, 1))
    view = memoryview(landing)
    for read in plan.reads:
        assert read.offset % alignment == read.length % alignment == 0
        assert read.landing_offset % alignment == 0
        assert 0 < read.needed <= read.length
        got = direct_read(paths[read.file], view, read.landing_offset, read.length, read.offset)
        assert got >= read.needed
    slot = bytearray(max(p.device_offset + p.n_bytes for p in plan.pieces))
    for piece in plan.pieces:
        end = piece.landing_offset + piece.n_bytes
        slot[piece.device_offset : piece.device_offset + piece.n_bytes] = view[
            piece.landing_offset : end
        ]
    view.release()
    landing.close()
    return bytes(slot)


def direct_read(path: Path, view: memoryview, at: int, length: int, offset: int) -> int:
    for flags in (os.O_RDONLY | getattr(os, "O_DIRECT", 0), os.O_RDONLY):
        try:
            fd = os.open(path, flags)
        except OSError:
            continue
        try:
            with view[at : at + length] as target:
                return os.preadv(fd, [target], offset)
        except OSError:
            continue
        finally:
            os.close(fd)
    raise AssertionError("neither direct nor buffered reads work")


def check_all(path: Path, experts: GgufExperts) -> None:
    """Every plan of every expert gives the bytes of its three slices."""
    with open_source(path) as source:
        for layer, layout in experts.layers.items():
            stacks = [source.read_tensor(f"blk.{layer}.ffn_{r}_exps.weight") for r in ROLES]
            largest = 0
            for expert in range(layout.n_experts):
                plan = experts.read_plan(ExpertKey(layer, expert))
                assert plan.key == (layer, expert)
                slot = land(experts.paths, plan, experts.alignment)
                for role, stack, at in zip(
                    layout.roles, stacks, layout.device_offsets, strict=True
                ):
                    right = stack[expert * role.n_bytes : (expert + 1) * role.n_bytes]
                    assert slot[at : at + role.n_bytes] == right.tobytes()
                ends = [r.landing_offset + r.length for r in plan.reads]
                starts = [r.landing_offset for r in plan.reads]
                assert starts == [0, *ends[:-1]]
                assert ends[-1] == plan.landing_bytes
                largest = max(largest, plan.landing_bytes)
            assert experts.max_landing_bytes(layer) == largest


def test_the_oracle_file(oracle_model: Path) -> None:
    with open_source(oracle_model) as source:
        experts = GgufExperts(source, range(8))
        view: ExpertSource = experts
        assert view.alignment == ALIGNMENT
        assert list(view.layers) == list(range(8))
        layout = view.layers[3]
        assert (layout.n_experts, layout.payload_bytes) == (16, 3 * 17_408)
        assert [r.role for r in layout.roles] == list(ROLES)
        assert [(r.n_out, r.n_in) for r in layout.roles] == [(128, 256), (128, 256), (256, 128)]
        assert len(view.tensor_names) == 24
        assert view.tensor_names <= set(source.tensors)
        assert view.paths == source.paths
    check_all(oracle_model, experts)


def test_experts_over_shards(small_shards: list[Path]) -> None:
    with open_source(small_shards[0]) as source:
        experts = GgufExperts(source, range(3))
    files = {r.file for i in range(3) for r in experts.read_plan(ExpertKey(i, 0)).reads}
    assert len(files) > 1
    check_all(small_shards[0], experts)


@settings(max_examples=30, deadline=None)
@given(
    types=st.tuples(*[st.sampled_from(TYPES)] * 3),
    hidden=st.integers(1, 9),
    width=st.integers(1, 9),
    n_experts=st.integers(1, 5),
    alignment=st.sampled_from([512, 4096, 65536]),
    file_alignment=st.sampled_from([16, 32, 4096]),
)
def test_odd_sizes(
    tmp_path_factory: pytest.TempPathFactory,
    types: tuple[str, str, str],
    hidden: int,
    width: int,
    n_experts: int,
    alignment: int,
    file_alignment: int,
) -> None:
    blocks = {t: GGML_QUANT_SIZES[GGMLQuantizationType[t]][0] for t in types}
    path = syn.write_experts_only(
        tmp_path_factory.mktemp("odd") / "e.gguf",
        n_layers=2,
        first_layer=1,
        n_experts=n_experts,
        hidden=hidden * max(blocks[types[0]], blocks[types[1]]),
        width=width * blocks[types[2]],
        types=dict(zip(ROLES, types, strict=True)),
        alignment=file_alignment,
    )
    # Nothing follows the last tensor, so its last sector ends inside the file's last sector.
    with open_source(path) as source:
        last = max(t.offset + t.n_bytes for t in source.tensors.values())
        os.truncate(path, last)
        experts = GgufExperts(source, range(3), alignment=alignment)
    assert list(experts.layers) == [1, 2]
    check_all(path, experts)
    path.unlink()


def test_types_by_role_and_layer(tmp_path: Path, small_config: Any) -> None:
    path = write_tiny_deepseek4(
        tmp_path / "mixed.gguf",
        small_config,
        hidden=256,
        width=256,
        expert_types=[{"gate": "Q2_K", "up": "Q4_K", "down": "Q3_K"}, "F16", {"down": "Q5_K"}],
    )[0]
    with open_source(path) as source:
        experts = GgufExperts(source, range(3))
    names = {
        layer: [GGMLQuantizationType(r.ggml_type).name for r in layout.roles]
        for layer, layout in experts.layers.items()
    }
    assert names == {
        0: ["Q2_K", "Q4_K", "Q3_K"],
        1: ["F16"] * 3,
        2: ["MXFP4", "MXFP4", "Q5_K"],
    }
    check_all(path, experts)


def test_layers_out_of_range_are_left_alone(tmp_path: Path, small_config: Any) -> None:
    path = write_tiny_deepseek4(tmp_path / "n.gguf", small_config, nextn=1)[0]
    with open_source(path) as source:
        assert "blk.3.nextn.eh_proj.weight" in source.tensors
        experts = GgufExperts(source, range(3))
        assert list(experts.layers) == [0, 1, 2]
        assert not any(name.startswith("blk.3.") for name in experts.tensor_names)
        assert GgufExperts(source, []).layers == {}
        with pytest.raises(KeyError):
            experts.read_plan(ExpertKey(3, 0))
        with pytest.raises(KeyError):
            experts.read_plan(ExpertKey(0, 5))
        with pytest.raises(KeyError):
            experts.read_plan(ExpertKey(0, -1))


def stacks(layer: int, **dims: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], int]]:
    sizes = {"gate": (4, 6, 3), "up": (4, 6, 3), "down": (6, 4, 3)} | dims
    return [(f"blk.{layer}.ffn_{r}_exps.weight", d, F32) for r, d in sizes.items()]


def experts_of(path: Path, tensors: list[tuple[str, tuple[int, ...], int]]) -> GgufExperts:
    syn.write_file(path, {"general.architecture": "x"}, tensors, None)
    with open_source(path) as source:
        return GgufExperts(source, range(4))


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ({"gate": (4, 6, 2)}, "disagree on the number of experts"),
        ({"gate": (4, 6), "up": (4, 6)}, "3 dimensions"),
        ({"gate": (4, 7, 3)}, "differ in shape"),
        ({"down": (5, 4, 3)}, "down takes 5"),
    ],
)
def test_contradictory_shapes(tmp_path: Path, dims: Any, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        experts_of(tmp_path / "e.gguf", stacks(0, **dims))


def test_all_contradictions_come_at_once(tmp_path: Path) -> None:
    rows = stacks(0, down=(5, 4, 3)) + stacks(1)[:2] + stacks(2)
    with pytest.raises(
        SourceError, match="layer 0: down takes 5.*layer 1 has .* no tensor for down"
    ):
        experts_of(tmp_path / "e.gguf", rows)


def test_unsupported_parts_come_at_once(tmp_path: Path) -> None:
    rows = [
        *stacks(0),
        ("blk.0.ffn_gate_exps.bias", (6, 3), F32),
        ("blk.1.ffn_gate_up_exps.weight", (4, 12, 3), F32),
        ("blk.1.ffn_down_exps.weight", (6, 4, 3), F32),
        ("blk.2.ffn_up_exps.scale", (3,), F32),
        ("blk.9.ffn_up_exps.bias", (3,), F32),
        ("blk.2.exp_probs_b.bias", (3,), F32),
        ("blk.2.ffn_gate_shexp.weight", (4, 6), F32),
    ]
    with pytest.raises(UnsupportedModelError) as caught:
        experts_of(tmp_path / "e.gguf", rows)
    assert len(caught.value.problems) == 3
    for part in ("bias of experts", "fuses gate and up", "ffn_up_exps.scale"):
        assert any(part in problem for problem in caught.value.problems)


def test_dense_layers_are_allowed(tmp_path: Path) -> None:
    rows = [("blk.0.ffn_up.weight", (4, 6), F32), *stacks(1), *stacks(3)]
    experts = experts_of(tmp_path / "e.gguf", rows)
    assert list(experts.layers) == [1, 3]
    assert len(experts.tensor_names) == 6


@pytest.mark.parametrize("alignment", [0, 256, 5000, -4096])
def test_bad_alignments(small_model: Path, alignment: int) -> None:
    with open_source(small_model) as source, pytest.raises(ConfigError, match="power of two"):
        GgufExperts(source, range(3), alignment=alignment)


def test_direct_io_alignment(small_model: Path, tmp_path: Path) -> None:
    found = direct_io_alignment(small_model)
    assert found >= ALIGNMENT
    assert found & (found - 1) == 0
    assert direct_io_alignment(tmp_path / "absent") == ALIGNMENT


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [((0, 0), 4096), ((512, 512), 4096), ((4, 65536), 65536), ((8192, 512), 8192), ((3, 5), 4096)],
)
def test_widening(reported: tuple[int, int], wanted: int) -> None:
    assert widest_alignment(*reported) == wanted
