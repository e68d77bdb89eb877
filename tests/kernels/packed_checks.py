"""Checks of products in fixed point: inputs, every format, the interpreter's forms of instructions.

Tolerances as in `op_checks`: inputs keep 23 bits or more beside the largest of their column.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from kernel_cases import expert_case, quantised
from op_checks import close, normal

from aprefetch.kernels.triton import experts, matvec, packed
from aprefetch.quant import dequantize
from aprefetch.quant.base import QuantTensor

PACKED = ["Q8_0", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
HALVES = {"MXFP4"}


def split(x, halves):
    out = torch.zeros(x.shape, dtype=torch.int32, device=x.device)
    grid = (x.shape[0], triton.cdiv(x.shape[1] // 16, 32))
    packed.split_kernel[grid](x, out, N_IN=x.shape[1], HALVES=halves, C=32, num_warps=1)
    return out


def joined(parts):
    """`[T, n]` numbers in the order of their columns, from what `split_kernel` wrote."""
    words = parts.cpu().reshape(parts.shape[0], -1, 16).numpy()
    planes = np.ascontiguousarray(words[:, :, :12]).view(np.uint8).reshape(*words.shape[:2], 3, 16)
    high = planes[:, :, 2].astype(np.int64)
    n = (
        planes[:, :, 0]
        + 256 * planes[:, :, 1].astype(np.int64)
        + 65536 * (high - 256 * (high > 127))
    )
    power = np.ascontiguousarray(words[:, :, 12]).view(np.float32)
    assert ((n.sum(-1) == words[:, :, 13]) | np.isnan(power)).all()
    return torch.from_numpy((n * power[..., None].astype(np.float64)).reshape(parts.shape))


def check_split(device="cpu"):
    """Inputs come back to within half a unit of 2^-22 of the largest of their column."""
    x = normal(3, 2, 176) * torch.tensor(2.0) ** torch.arange(-88, 88)
    x[0, :16], x[1, 5], x[0, 100] = 0.0, -0.0, torch.nextafter(torch.tensor(4.0), torch.tensor(0.0))
    for halves in (False, True):
        wide = x[:, :160] if halves else x
        got = joined(split(wide.contiguous().to(device), halves))
        want = wide.double()
        if halves:
            want = want.reshape(2, -1, 2, 2, 8).transpose(2, 3).transpose(3, 4).reshape(2, -1)
        columns = want.reshape(2, -1, 16)
        bound = columns.abs().amax(-1, keepdim=True) * 2.0**-22
        assert ((got.reshape(2, -1, 16) - columns).abs() <= bound).all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = normal(3, 1, 64)
        x[0, 20] = bad
        assert joined(split(x.to(device), False)).isnan().nonzero()[:, 1].tolist() == list(
            range(16, 32)
        )


def product(w: QuantTensor, x, n_rows):
    """`x w^T` by the kernel of an expert's last product, on the device of `x`."""
    shape = experts.shape_of(w.ggml_type, w.n_in, w.n_out, True)
    tokens = x.shape[0]
    out = torch.full((tokens, w.n_out), float("nan"), device=x.device)
    at = torch.arange(tokens, device=x.device)
    table = torch.tensor([0, 0, tokens], device=x.device)
    matvec.expert_down_kernel[(1, triton.cdiv(w.n_out, n_rows))](
        split(x, shape.halves), w.data.to(x.device), table, at, out, at, 0, 1, 1, w.n_out,
        N_IN=w.n_in, ROW_BYTES=shape.row_bytes, FORMAT=w.ggml_type, HALVES=shape.halves,
        SCALED=True, OFFSET=shape.offset, PACKED=True, MASKED=True,
        T=tokens, R=n_rows, C=32, num_warps=1,
    )  # fmt: skip
    return out


def check_product(name, device="cpu", n_out=5, n_in=768):
    w, x = quantised(np.random.default_rng(5), name, n_out, n_in), normal(1, 2, n_in)
    got = product(w, x.to(device), 4)
    close(got, x @ dequantize(w.data, w.ggml_type, w.n_in).T)
    assert torch.equal(product(w, x[1:].to(device), 4)[0], got[1])


def check_largest_sums(name, device="cpu"):
    """Every byte of the codes alike and all inputs at the end of their range."""
    w = quantised(np.random.default_rng(6), name, 4, 256)
    if name == "MXFP4":
        w.data.view(4, -1, 17)[:, :, 1:] = torch.tensor([0xFF, 0x77, 0x70, 0x00])[:, None, None]
    elif name == "Q8_0":
        w.data.view(4, -1, 34)[:, :, 2:] = torch.tensor([0x80, 0x7F, 0xFF, 0x00])[:, None, None]
    else:
        first, last = {
            "Q2_K": (16, 80), "Q3_K": (0, 96), "Q4_K": (16, 144), "Q5_K": (16, 176),
            "Q6_K": (0, 192),
        }[name]  # fmt: skip
        w.data[:, first:last] = torch.tensor([0xFF, 0x00, 0xF0, 0x0F])[:, None]
    x = torch.full((2, 256), 1.9999999)
    x[1] *= -1
    want = (x.double() @ dequantize(w.data, w.ggml_type, 256).T.double()).float()
    close(product(w, x.to(device), 4), want, 2e-5 * max(1.0, float(want.abs().max())))


def check_every_scale(device="cpu"):
    """MXFP4's exponents 0 to 192, exactly."""
    data = torch.randint(0, 256, (193, 17), dtype=torch.uint8)
    data[:, 0] = torch.arange(193, dtype=torch.uint8)
    x = torch.eye(32)[[0, 21]]
    got = product(QuantTensor(data, 39, 193, 32), x.to(device), 4).cpu()
    assert torch.equal(got, dequantize(data, 39, 32).T[[0, 21]])


@triton.jit
def forms_kernel(a_ptr, x_ptr, out_ptr, PLAIN: tl.constexpr, B: tl.constexpr):
    """What each form of the instructions makes of words `a [5, B]` and `x [4, B]`."""
    i = tl.arange(0, B)
    a, x = (), ()
    for k in tl.static_range(5):
        a = a + (tl.load(a_ptr + k * B + i),)
    for k in tl.static_range(4):
        x = x + (tl.load(x_ptr + k * B + i),)
    for n in tl.static_range(4):
        dots = packed.byte_dots(a, x, a[4], 0, n // 2 == 1, n % 2 == 1, PLAIN)
        tl.store(out_ptr + n * B + i, dots)
    moved, values = packed.windows(a, x[0] & 31, 4, PLAIN), packed.doubled_values(a[0], PLAIN)
    for n in tl.static_range(4):
        tl.store(out_ptr + (4 + n) * B + i, moved[n])
    planes = packed.byte_planes(a[0], a[1], a[2], a[3], PLAIN)
    for n in tl.static_range(2):
        tl.store(out_ptr + (8 + n) * B + i, values[n])
    for n in tl.static_range(3):
        tl.store(out_ptr + (10 + n) * B + i, planes[n])
    # Numbers with halves and quarters, as large as inputs in fixed point.
    tl.store(out_ptr + 13 * B + i, packed.rounded((a[1] >> 6).to(tl.float32) * 0.25, PLAIN))


def forms(plain, device):
    rng = np.random.default_rng(9)
    a, x = (rng.integers(-(2**31), 2**31, (n, 4096), dtype=np.int64) for n in (5, 4))
    a, x = (torch.from_numpy(v.astype(np.int32)).to(device) for v in (a, x))
    out = torch.zeros(14, 4096, dtype=torch.int32, device=device)
    forms_kernel[(1,)](a, x, out, PLAIN=plain, B=4096)
    return out.cpu()


def check_experts(triton_ops, types, device, d=512, f=256):
    """Experts in fixed point and not, one after the other: close, whatever runs with them."""
    arena, offsets, layout = expert_case(np.random.default_rng(3), types, d, f, 2)
    arena, x = arena.to(device), normal(4, 41, d).to(device)
    at = torch.arange(41, device=device)
    results = []
    before = experts.EXPERT_PLAN
    try:
        for plan in ((0,), (1,), (2,), (2, 8, 8)):
            experts.EXPERT_PLAN = experts.ExpertPlan(*plan)
            many, one = (torch.empty(41, d, device=device) for _ in range(2))
            triton_ops.experts(x, arena, offsets[1:], layout, [0, 41], at, 10.0, many, at)
            for i in (0, 17, 40):
                only = at[i : i + 1]
                triton_ops.experts(x, arena, offsets[1:], layout, [0, 1], only, 10.0, one, only)
                assert torch.equal(one[i], many[i])
            results.append(many)
    finally:
        experts.EXPERT_PLAN = before
    assert torch.equal(results[1], results[2]) and torch.equal(results[2], results[3])
    close(results[1], results[0].cpu(), 2e-5 * max(1.0, float(results[0].abs().max())))
