"""Inputs for kernel tests: random weights in any encoding, random expert slots."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch

from aprefetch.kernels.cpu.fast import NumbaOps
from aprefetch.kernels.cpu.reference import ReferenceOps
from aprefetch.quant import block_format, row_bytes
from aprefetch.quant.base import QuantTensor
from aprefetch.types import LayerLayout, RoleLayout

_HALVES = {2: (0,), 6: (0,), 8: (0,), 20: (0,), 10: (80, 82), 11: (108,), 12: (0, 2)}
_HALVES |= {13: (0, 2), 14: (208,)}


@pytest.fixture(scope="session")
def fast() -> Iterator[NumbaOps]:
    ops = NumbaOps(n_threads=2)
    yield ops
    ops.close()


@pytest.fixture(scope="session")
def serial() -> NumbaOps:
    return NumbaOps(n_threads=1)


@pytest.fixture(scope="session")
def plain() -> ReferenceOps:
    return ReferenceOps()


def random_weight(ggml_type: int, n_out: int, n_in: int, seed: int = 0) -> QuantTensor:
    """Random codes under scales near 1/100, in the encoding of `ggml_type`."""
    form, rng = block_format(ggml_type), np.random.default_rng(seed)
    if form.block_weights == 1:
        values = rng.standard_normal((n_out, n_in)).astype(np.float32)
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(ggml_type)).view(np.uint8)
    else:
        n_blocks = n_in // form.block_weights
        raw = rng.integers(0, 256, (n_out, n_blocks, form.block_bytes), dtype=np.uint8)
        for at in _HALVES.get(ggml_type, ()):
            scale = (rng.standard_normal((n_out, n_blocks, 1)) / 100).astype("<f2")
            raw[..., at : at + 2] = scale.view(np.uint8)
        if ggml_type == 39:
            raw[..., 0] = rng.integers(118, 124, (n_out, n_blocks))
        if ggml_type == 40:
            raw[..., :4] = rng.integers(0, 64, (n_out, n_blocks, 4))
        raw = raw.reshape(n_out, -1)
    assert raw.shape == (n_out, row_bytes(ggml_type, n_in))
    return QuantTensor(torch.from_numpy(raw.copy()), ggml_type, n_out, n_in)


def layout_of(types: tuple[int, int, int], width: int, hidden: int) -> LayerLayout:
    """Gate, up and down of the given types: `width -> hidden -> width`."""
    shapes = (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden))
    return LayerLayout(
        layer=0,
        n_experts=8,
        roles=tuple(
            RoleLayout(role=role, ggml_type=t, n_out=o, n_in=i, n_bytes=o * row_bytes(t, i))  # type: ignore[arg-type]
            for t, (role, o, i) in zip(types, shapes, strict=True)
        ),
    )


def fill_slots(layout: LayerLayout, n_slots: int) -> tuple[torch.Tensor, list[int]]:
    """An arena of `n_slots` random experts and their offsets, not in order."""
    arena = torch.zeros(n_slots * layout.device_bytes, dtype=torch.uint8)
    offsets = [slot * layout.device_bytes for slot in reversed(range(n_slots))]
    for e, offset in enumerate(offsets):
        for i, role in enumerate(layout.roles):
            w = random_weight(role.ggml_type, role.n_out, role.n_in, seed=10 * e + i)
            start = offset + layout.device_offsets[i]
            arena[start : start + role.n_bytes] = w.data.flatten()
    return arena, offsets
