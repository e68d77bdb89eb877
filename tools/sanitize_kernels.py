"""Run the quantised kernels at odd shapes, each tensor in an allocation of just its size.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        python tools/sanitize_kernels.py [--types MXFP4,Q2_K] [--plant]

Meant for compute-sanitizer's memcheck and racecheck, which see an access beside an allocation, so
PyTorch's caching is off and the slots end where their allocation ends (dense weights: at the next
whole word, since words are what kernels read). Every role of an expert is the last in its slot
once. All types take every role, in mixed experts; rows are 1, 3, 7 and 33. Results are compared
with the CPU reference. `--plant` cuts bytes off the arena: then the sanitizer has to complain.
There are some 70 kernels to compile; runs of `--part 0/8` to `7/8` beside each other, without the
sanitizer, fill Triton's cache of them fast.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from make_tiny_gguf import random_blocks
from torch import Tensor

from aprefetch.kernels.cpu.reference import ReferenceOps
from aprefetch.kernels.ops import Situ
from aprefetch.quant import row_bytes
from aprefetch.quant.base import QuantTensor
from aprefetch.types import ROLES, LayerLayout, RoleLayout, align_up

TYPES = ("MXFP4", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16")
SMALL_BLOCKS = ("MXFP4", "Q8_0", "BF16", "F16")  # of at most 32 weights
ROWS = (1, 3, 7, 33)
TOLERANCE = 5e-5  # float32 sums of order one in another order
_PLANTED_BYTES = 64


@dataclass(frozen=True)
class Case:
    """Experts of `hidden -> width -> hidden`, with a type for gate, up and down."""

    types: tuple[str, str, str]
    hidden: int
    width: int
    last: int  # the role that ends where the slot ends
    activation: Situ | None = None


def cases(types: tuple[str, ...]) -> Iterator[Case]:
    """Each type in each role; types of small blocks also at widths that no tile divides."""
    for i in range(len(types)):
        mixed = tuple(types[(i + k) % len(types)] for k in range(3))
        yield Case(mixed, 768, 256, last=i % 3)  # type: ignore[arg-type]
    small = tuple(name for name in types if name in SMALL_BLOCKS)
    for i in range(len(small)):
        mixed = tuple(small[(i + k) % len(small)] for k in range(3))
        yield Case(mixed, 1312, 96, last=i % 3)  # type: ignore[arg-type]
    for name in small[:1]:
        yield Case((name,) * 3, 96, 32, last=2, activation=Situ(2.0, 3.0))


def weight(rng: np.random.Generator, name: str, n_out: int, n_in: int) -> QuantTensor:
    """Random blocks; results stay of order one."""
    kind = GGMLQuantizationType[name]
    raw = np.ascontiguousarray(random_blocks(rng, (n_out, n_in), kind, n_in**-0.5))
    raw = raw.view(np.uint8).reshape(n_out, row_bytes(int(kind), n_in))
    return QuantTensor(torch.from_numpy(raw.copy()), int(kind), n_out, n_in)


def layout_of(case: Case) -> tuple[LayerLayout, int]:
    """A layout whose role `case.last` comes last, and the bytes up to that role's end."""
    d, f = case.hidden, case.width
    roles = []
    for role, name, (n_out, n_in) in zip(ROLES, case.types, ((f, d), (f, d), (d, f)), strict=True):
        kind = int(GGMLQuantizationType[name])
        n_bytes = n_out * row_bytes(kind, n_in)
        roles.append(RoleLayout(role=role, ggml_type=kind, n_out=n_out, n_in=n_in, n_bytes=n_bytes))
    layout = LayerLayout(layer=0, n_experts=3, roles=tuple(roles))
    offsets, at = [0, 0, 0], 0
    for i in ((case.last + 1) % 3, (case.last + 2) % 3, case.last):
        offsets[i] = at
        end = at + roles[i].n_bytes
        at = align_up(end, 256)
    vars(layout)["device_offsets"] = tuple(offsets)  # stands in for the usual order
    return layout, end


def fill(case: Case, rng: np.random.Generator) -> tuple[Tensor, list[int], LayerLayout]:
    """An arena of three slots that ends with the last byte of the last slot's last role."""
    layout, used = layout_of(case)
    stride = align_up(used, 256)
    arena = torch.randint(0, 256, (2 * stride + used,), dtype=torch.uint8)
    for slot in range(3):
        for name, role, at in zip(case.types, layout.roles, layout.device_offsets, strict=True):
            w = weight(rng, name, role.n_out, role.n_in)
            start = slot * stride + at
            arena[start : start + role.n_bytes] = w.data.flatten()
    return arena, [slot * stride for slot in range(3)], layout


def worst(got: Tensor, want: Tensor) -> float:
    """The largest difference; infinite where something was not written."""
    off = (got.cpu() - want).abs()
    return float("inf") if not bool(torch.isfinite(off).all()) else float(off.max())


def check_experts(ops: Any, case: Case, device: str, plant: bool) -> float:
    """The last slot's expert alone for each number of rows, then all three at a time."""
    rng = np.random.default_rng(7)
    arena, offsets, layout = fill(case, rng)
    reference = ReferenceOps()
    there = arena.to(device)
    if plant:
        there = there[:-_PLANTED_BYTES].clone()
    most = 0.0
    plans = [([offsets[2]], [0, n]) for n in ROWS]
    plans.append(([offsets[2], offsets[0], offsets[1]], [0, 1, 8, 11]))
    for slots, starts in plans:
        n = starts[-1]
        x = torch.from_numpy(rng.standard_normal((n, case.hidden)).astype(np.float32))
        rows = torch.from_numpy(rng.permutation(n))
        to = torch.from_numpy(rng.permutation(n))
        want, got = torch.empty(n, case.hidden), torch.full((n, case.hidden), float("nan"))
        got = got.to(device)
        more = {} if case.activation is None else {"activation": case.activation}
        reference.experts(x, arena, slots, layout, starts, rows, 1.0, want, to, **more)
        ops.experts(
            x.to(device), there, slots, layout, starts, rows.to(device), 1.0, got, to.to(device),
            **more,
        )  # fmt: skip
        most = max(most, worst(got, want))
    return most


def check_linear(ops: Any, name: str, device: str) -> float:
    """An odd number of outputs; rows that no tile divides."""
    rng, most = np.random.default_rng(5), 0.0
    w = weight(rng, name, 37, 1312 if name in SMALL_BLOCKS else 768)
    n_bytes = w.data.numel()
    data = torch.empty(align_up(n_bytes, 4), dtype=torch.uint8, device=device)[:n_bytes]
    data.copy_(w.data.flatten())
    there = QuantTensor(data.view(w.data.shape), w.ggml_type, w.n_out, w.n_in)
    for n in ROWS:
        x = torch.from_numpy(rng.standard_normal((n, w.n_in)).astype(np.float32))
        most = max(most, worst(ops.linear(x.to(device), there), ReferenceOps().linear(x, w)))
    return most


def main() -> int:
    """The command."""
    args = _arguments()
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at the first allocation
    from aprefetch.kernels.triton.ops import TritonOps

    ops, begin_s, n_bad = TritonOps(args.device), time.perf_counter(), 0
    names = tuple(args.types.split(","))
    if unknown := set(names) - set(TYPES):
        sys.exit(f"unknown types {sorted(unknown)}; known: {', '.join(TYPES)}")
    part, n_parts = map(int, args.part.split("/"))
    found = [
        (f"linear {name}", check_linear(ops, name, args.device)) for name in names[part::n_parts]
    ]
    for case in list(cases(names))[part::n_parts]:
        label = f"experts {'/'.join(case.types)} {case.hidden}x{case.width}"
        label += f", {ROLES[case.last]} last" + (", situ" if case.activation else "")
        found.append((label, check_experts(ops, case, args.device, args.plant)))
        print(f"{time.perf_counter() - begin_s:7.1f} s  {label}", flush=True)
    if args.device == "cuda":
        torch.cuda.synchronize()
    for label, off in found:
        if not off <= TOLERANCE:
            n_bad += 1
            print(f"WRONG: {label}: off by {off:.2e}")
    largest = max((off for _, off in found), default=0.0)
    print(
        f"{len(found)} cases, rows {ROWS}, largest difference {largest:.1e}, {n_bad} wrong, "
        f"{time.perf_counter() - begin_s:.1f} s"
    )
    return 1 if n_bad and not args.plant else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default=",".join(TYPES), help="comma-separated")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: interpret")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth case, from the Ith on")
    parser.add_argument("--plant", action="store_true", help="an overrun that must be found")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
