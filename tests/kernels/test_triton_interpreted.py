"""Triton kernels in Triton's interpreter, on the CPU, against the reference.

Random blocks with every scale code; shapes that are no multiples of any tile.
"""

from __future__ import annotations

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("compiled kernels are tested in tests/gpu instead", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton and the kernels are imported
if not pytest.importorskip("triton").__version__.startswith("3.6."):
    # The interpreter of 3.9 refuses some of the kernels.
    pytest.skip("Triton's interpreter is tested with 3.6", allow_module_level=True)

import kimi_checks
import op_checks
import packed_checks
import triton.runtime.interpreter as interpreter
from kernel_cases import FORMATS

from aprefetch.kernels.triton.ops import TritonOps

# The interpreter computes with NumPy, which reports what hardware does silently: -inf minus -inf
# in rows that are masked, overflow in the exponential of a large gate.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def ops():
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor, scope):
        patch(tensor, scope)
        # Triton 3.6 counts loops by int(array of one element), which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index
    yield TritonOps("cpu")
    interpreter._patch_lang_tensor = patch


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n_rows", [1, 5])
def test_linear(ops, name, n_rows):
    op_checks.check_linear(ops, name, n_rows, 5, 512)


@pytest.mark.parametrize("name", ["MXFP4", "Q8_0", "BF16"])
def test_linear_with_rows_that_start_between_words(ops, name):
    op_checks.check_linear(ops, name, 2, 6, 96)


def test_every_mxfp4_scale(ops):
    op_checks.check_every_mxfp4_scale(ops)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_grouped_linear(ops, name):
    op_checks.check_grouped_linear(ops, name)


@pytest.mark.parametrize("types", [("F16",) * 3, ("MXFP4",) * 3, ("Q8_0", "MXFP4", "BF16")])
def test_experts(ops, types):
    size = 16 if "F16" in types else 32
    op_checks.check_experts(ops, types, size, size, few="F16" not in types)


def test_experts_in_k_quants(ops):
    op_checks.check_experts(ops, ("Q2_K", "Q3_K", "F32"), 256, 8, few=True)


@pytest.mark.parametrize("check", ["rows", "attend", "compress", "index", "route"])
def test_operation(ops, check):
    getattr(op_checks, f"check_{check}")(ops)


@pytest.mark.parametrize("name", ["F32", "F16"])
def test_hyper_connections(ops, name):
    op_checks.check_hyper_connections(ops, name)


@pytest.mark.parametrize("check", kimi_checks.CHECKS)
def test_kimi_operation(ops, check):
    getattr(kimi_checks, f"check_{check}")(ops)


@pytest.mark.parametrize("types", [("F16",) * 3, ("Q2_K", "Q2_K", "F32")])
def test_kimi_experts(ops, types):
    kimi_checks.check_experts(ops, types, 256 if "Q2_K" in types else 32, 8, few=True)


def test_inputs_in_fixed_point():
    packed_checks.check_split()


@pytest.mark.parametrize("name", packed_checks.PACKED)
def test_packed_product(name):
    packed_checks.check_product(name)


@pytest.mark.parametrize("name", packed_checks.PACKED)
def test_largest_sums_of_packed_products(name):
    packed_checks.check_largest_sums(name)


@pytest.mark.parametrize("name", packed_checks.PACKED)
def test_experts_in_fixed_point(ops, name):
    packed_checks.check_experts(ops, name)


def test_what_is_no_number(ops):
    packed_checks.check_what_is_no_number(ops)
