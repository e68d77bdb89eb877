"""Compiled Triton kernels against the reference: every format, odd shapes, exact bits."""

from __future__ import annotations

import numpy as np
import op_checks
import pytest
import torch
from kernel_cases import FORMATS, expert_case, quantised

if not torch.cuda.is_available():
    # Without a GPU Triton must not be imported before the interpreter's tests say so.
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

import packed_checks


@pytest.fixture(scope="module")
def ops():
    from aprefetch.kernels.triton.ops import TritonOps

    return TritonOps("cuda")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n_rows", "n_out", "n_in"), [(1, 37, 768), (9, 37, 768), (3, 2051, 2048)])
def test_linear(ops, name, n_rows, n_out, n_in):
    op_checks.check_linear(ops, name, n_rows, n_out, n_in, "cuda")


@pytest.mark.parametrize("name", ["MXFP4", "Q8_0", "BF16"])
def test_linear_with_rows_that_start_between_words(ops, name):
    op_checks.check_linear(ops, name, 2, 6, 96, "cuda")


def test_every_mxfp4_scale(ops):
    op_checks.check_every_mxfp4_scale(ops, "cuda")


@pytest.mark.parametrize("name", FORMATS)
def test_grouped_linear(ops, name):
    op_checks.check_grouped_linear(ops, name, "cuda")


@pytest.mark.parametrize("name", FORMATS)
def test_experts(ops, name):
    op_checks.check_experts(ops, (name,) * 3, 512, 256, "cuda")


@pytest.mark.parametrize(
    "types", [("MXFP4", "MXFP4", "MXFP4"), ("Q8_0", "MXFP4", "BF16"), ("Q2_K", "Q3_K", "MXFP4")]
)
def test_experts_at_odd_shapes(ops, types):
    d = 256 if "Q2_K" in types else 96
    op_checks.check_experts(ops, types, d, 32, "cuda")


@pytest.mark.parametrize("check", ["rows", "attend", "compress", "index", "route"])
def test_operation(ops, check):
    getattr(op_checks, f"check_{check}")(ops, "cuda")


@pytest.mark.parametrize("name", ["F32", "F16"])
def test_hyper_connections(ops, name):
    op_checks.check_hyper_connections(ops, name, "cuda")


@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_depend_on_their_number(ops, name):
    """One row alone, in twos, threes and in a batch: the same bits."""
    w = op_checks.moved(quantised(np.random.default_rng(1), name, 516, 1280), "cuda")
    x = op_checks.normal(2, 70, 1280).cuda()
    whole = ops.linear(x, w)
    for n in (1, 2, 3, 64):
        assert torch.equal(ops.linear(x[:n], w), whole[:n]), n


@pytest.mark.parametrize("name", FORMATS)
def test_experts_do_not_depend_on_their_rows(ops, name):
    """An expert's result for a row is the same alone and with 40 other rows."""
    arena, offsets, layout = expert_case(np.random.default_rng(3), (name,) * 3, 512, 256, 2)
    arena, x = arena.cuda(), op_checks.normal(4, 41, 512).cuda()
    many, one = torch.empty(41, 512, device="cuda"), torch.empty(41, 512, device="cuda")
    at = torch.arange(41, device="cuda")
    ops.experts(x, arena, offsets[1:], layout, [0, 41], at, 10.0, many, at)
    for i in (0, 17, 40):
        ops.experts(x, arena, offsets[1:], layout, [0, 1], at[i : i + 1], 10.0, one, at[i : i + 1])
        assert torch.equal(one[i], many[i])


def test_inputs_in_fixed_point():
    packed_checks.check_split("cuda")


@pytest.mark.parametrize("name", packed_checks.PACKED)
def test_packed_product(name):
    packed_checks.check_product(name, "cuda")
    packed_checks.check_product(name, "cuda", 2051, 2048)
    packed_checks.check_largest_sums(name, "cuda")


def test_every_mxfp4_scale_in_fixed_point():
    packed_checks.check_every_scale("cuda")


@pytest.mark.parametrize("name", packed_checks.PACKED)
def test_experts_in_fixed_point(ops, name):
    packed_checks.check_experts(ops, name, "cuda", 512, 256, n_rows=41, few=False)


def test_what_is_no_number(ops):
    packed_checks.check_what_is_no_number(ops, "cuda")
    for name in ("MXFP4", "F16"):
        packed_checks.check_what_is_no_number(ops, "cuda", (name,) * 3, 32)


def test_instructions_and_their_plain_forms():
    """What the interpreter computes is what the machine computes."""
    assert torch.equal(packed_checks.forms(True, "cuda"), packed_checks.forms(False, "cuda"))
