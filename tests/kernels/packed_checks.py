"""Checks of products in fixed point: inputs, every format, the interpreter's forms of instructions.

Against float64, with bounds that follow from what `packed` promises: an input is off by at most
2^-23 of the largest of its sixteen (or 2^-126), and each product is rounded to float32 a few times.
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
    """Inputs come back to within what is promised, for sizes from 2^-149 to 2^88."""
    x = normal(3, 2, 256) * torch.tensor(2.0) ** torch.arange(-167, 89)
    assert x.abs().min() == 0 and (x.abs() < 2.0**-126).sum() > 32  # subnormal numbers as well
    x[0, :16], x[1, 5], x[0, 100] = 0.0, -0.0, torch.nextafter(torch.tensor(4.0), torch.tensor(0.0))
    x[1, 240] = 3e38
    for halves in (False, True):
        got = joined(split(x.to(device), halves))
        columns = wide_columns(x.double(), halves)
        bound = input_error(columns.abs().amax(-1, keepdim=True))
        assert ((got.reshape(2, -1, 16) - columns).abs() <= bound).all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = normal(3, 1, 64)
        x[0, 20] = bad
        assert joined(split(x.to(device), False)).isnan().nonzero()[:, 1].tolist() == list(
            range(16, 32)
        )


def wide_columns(x, halves):
    """`[T, n]` as `[T, columns, 16]`, in the order in which a column holds its inputs."""
    if halves:
        x = x.reshape(x.shape[0], -1, 2, 2, 8).transpose(2, 3).transpose(3, 4)
    return x.reshape(x.shape[0], -1, 16)


def input_error(largest):
    """By how much an input may be off in a column whose largest size is given.

    Where rounding carries the largest to the next power of two, 2^-23 of what it was carried to.
    """
    return (largest * (2.0**-23 * (1 + 2.0**-23))).clamp(min=2.0**-126)


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
    """Ordinary inputs; inputs whose columns hold a huge one, zeros, or all sizes; tiny ones.

    A product passes through at most 16 float32 roundings (scales, sums within a thread, a tree of
    32 threads), each of a size that the code's part and the offset's part of a weight bound: up to
    6 times the largest weight of its column.
    """
    w, x = quantised(np.random.default_rng(5), name, n_out, n_in), normal(1, 3, n_in)
    x[1] *= torch.tensor(2.0) ** (torch.arange(n_in) % 29 - 14)
    x[1, 37], x[1, 64:96] = 3e6, 0.0
    x[2] *= 2.0**-124
    x[2, 64:80] *= 2.0**-16  # all below the smallest normal number
    weight = dequantize(w.data, w.ggml_type, n_in).double()
    got = product(w, x.to(device), 4).cpu()
    inputs, halves = wide_columns(x.double(), name in HALVES), name in HALVES
    weights = wide_columns(weight, halves).abs()
    off = input_error(inputs.abs().amax(-1)) @ weights.sum(-1).T
    rounded = 16 * 2.0**-24 * inputs.abs().sum(-1) @ (6 * weights.amax(-1)).T
    error = (got.double() - x.double() @ weight.T).abs()
    assert (error <= off + rounded + 2.0**-149).all(), (error / (off + rounded)).max()
    # The same bits alone, by programs of another size.
    assert torch.equal(product(w, x[1:2].to(device), 8).cpu()[0], got[1])


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
    """MXFP4's exponents from 0 to the last under which every code is finite, exactly."""
    n = 251
    data = torch.randint(0, 256, (n, 17), generator=torch.Generator().manual_seed(7)).to(
        torch.uint8
    )
    data[:, 0] = torch.arange(n, dtype=torch.uint8)
    data[-3:, 1] = torch.tensor([0x77, 0xFF, 0x7F], dtype=torch.uint8)  # the largest codes
    x = torch.eye(32)[[0, 21]]
    got = product(QuantTensor(data, 39, n, 32), x.to(device), 4).cpu()
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


def check_experts(triton_ops, name, device="cpu", d=256, f=8, n_rows=2, few=True):
    """Experts in `name`, with `few` but for the last product; alone as beside each other.

    The activation keeps errors within a few times their size; what float32 itself gives is some
    1e-6 of the largest result, and 1e-5 is allowed.
    """
    types = (name, name, "F32" if few else name)
    n_out = 8 if few else d
    arena, offsets, layout = expert_case(np.random.default_rng(3), types, d, f, 2, n_out)
    x, at = normal(4, n_rows, d), torch.arange(n_rows, device=device)
    there = x.to(device), arena.to(device), offsets[1:], layout
    many, one = (torch.empty(n_rows, n_out, device=device) for _ in range(2))
    triton_ops.experts(*there, [0, n_rows], at, 10.0, many, at)
    for i in sorted({n_rows // 2, n_rows - 1}):
        triton_ops.experts(*there, [0, 1], at[i : i + 1], 10.0, one, at[i : i + 1])
        assert torch.equal(one[i], many[i])
    want = expert_result(arena, offsets[1], layout, x)
    assert (many.cpu() - want).abs().max() <= 1e-5 * want.abs().max()


def expert_result(arena, offset, layout, x, limit=10.0):
    """What an expert gives, in float64."""
    gate, up, down = (
        dequantize(
            arena[offset + at : offset + at + role.n_bytes].reshape(role.n_out, -1),
            role.ggml_type,
            role.n_in,
        ).double()
        for at, role in zip(layout.device_offsets, layout.roles, strict=True)
    )
    g, u = (x.double() @ gate.T).clamp(max=limit), (x.double() @ up.T).clamp(-limit, limit)
    return (torch.nn.functional.silu(g) * u) @ down.T


def check_what_is_no_number(triton_ops, device="cpu", types=("MXFP4", "MXFP4", "F32"), f=8):
    """Never turns into a number, and stays in its row: not in products, nor by a limit.

    In fixed point an infinity is no number either; elsewhere a limit bounds it.
    """
    arena, offsets, layout = expert_case(np.random.default_rng(3), types, 32, f, 1, 8)
    x, at = normal(4, 4, 32), torch.arange(4, device=device)
    spoilt = [0]
    x[0, 3] = float("nan")
    if types[0] in PACKED:
        x[2, 30], x[3, 0] = float("inf"), -float("inf")
        spoilt += [2, 3]
    x, arena, out = x.to(device), arena.to(device), torch.zeros(4, 8, device=device)
    triton_ops.experts(x, arena, offsets, layout, [0, 4], at, 1.0, out, at)
    assert out[spoilt].isnan().all()
    assert out.isfinite().all(dim=1).sum() == 4 - len(spoilt)
    nan = torch.full((1, 8), float("nan"), device=device)
    one = torch.ones(1, 8, device=device)
    assert triton_ops.swiglu(nan, one, 1.0).isnan().all()
    assert triton_ops.swiglu(one, nan, 1.0).isnan().all()
