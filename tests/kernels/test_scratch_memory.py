"""Scratch memory of a kernel stays its own while other threads allocate."""

from __future__ import annotations

import torch

from aprefetch.kernels.cpu import cpu_ops
from aprefetch.kernels.cpu.reference import ReferenceOps


def test_many_threads_select_at_once() -> None:
    """numba frees an array after its last use by name, though its address is still in use."""
    ops, reference = cpu_ops("numba", 4), ReferenceOps()
    make = torch.Generator().manual_seed(1)
    q = torch.randn(243, 16, 64, generator=make)
    weights = torch.randn(243, 16, generator=make)
    keys = torch.randn(60, 64, generator=make)
    n_visible = ((torch.arange(243) + 1) // 4).clamp(max=60).int()
    want = reference.index_topk(q, weights, keys, n_visible, 16)
    for _ in range(20):
        assert torch.equal(ops.index_topk(q, weights, keys, n_visible, 16), want)
