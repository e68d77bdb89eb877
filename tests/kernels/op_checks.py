"""Checks of an `Ops` implementation against the reference, for any device.

Tolerances: both sides compute in float32 and add up in different orders, so results of order one
differ by some 1e-6.
"""

from __future__ import annotations

import numpy as np
import torch
from kernel_cases import expert_case, quantised

from aprefetch.kernels.cpu.reference import ReferenceOps
from aprefetch.quant import dequantize
from aprefetch.quant.base import QuantTensor

REFERENCE = ReferenceOps()


def close(ours, theirs, tolerance=2e-5):
    torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def moved(w: QuantTensor, device) -> QuantTensor:
    return QuantTensor(w.data.to(device), w.ggml_type, w.n_out, w.n_in)


def check_linear(ops, name, n_rows, n_out, n_in, device="cpu"):
    rng = np.random.default_rng(5)
    w, x = quantised(rng, name, n_out, n_in), normal(1, n_rows, n_in)
    close(ops.linear(x.to(device), moved(w, device)), REFERENCE.linear(x, w))


def check_every_mxfp4_scale(ops, device="cpu"):
    """Exponents 0 to 192; larger ones are taken as infinite."""
    data = torch.randint(0, 256, (193, 17), dtype=torch.uint8)
    data[:, 0] = torch.arange(193, dtype=torch.uint8)
    w = QuantTensor(data, 39, 193, 32)
    x = torch.eye(32)[::9]
    got = ops.linear(x.to(device), moved(w, device)).cpu()
    assert torch.equal(got, dequantize(data, 39, 32).T[::9])


def check_grouped_linear(ops, name, device="cpu"):
    w, x = quantised(np.random.default_rng(2), name, 24, 256), normal(1, 3, 2, 256)
    close(ops.grouped_linear(x.to(device), moved(w, device)), REFERENCE.grouped_linear(x, w))


def check_experts(ops, types, d, f, device="cpu", limit=1.0, few=False):
    """With `few`, one row of one expert, and eight numbers of its result."""
    rng, n_out = np.random.default_rng(3), 8 if few else d
    arena, offsets, layout = expert_case(rng, types, d, f, 5, n_out)
    slots = [offsets[i] for i in (3, 0, 4)]
    starts, rows, to = [0, 1, 6, 8], [2, 0, 1, 2, 3, 4, 0, 5], [7, 0, 1, 2, 3, 4, 5, 6]
    if few:
        slots, starts, rows, to = slots[:1], [0, 1], [2], [0]
    x = normal(4, 6, d)
    pair_rows, out_rows = torch.tensor(rows), torch.tensor(to)
    want = torch.zeros(len(to), n_out)
    got = torch.full_like(want, float("nan"), device=device)
    REFERENCE.experts(x, arena, slots, layout, starts, pair_rows, limit, want, out_rows)
    arena = arena.to(device)
    args = (pair_rows.to(device), limit, got, out_rows.to(device))
    ops.experts(x.to(device), arena, slots, layout, starts, *args)
    close(got, want)
    # One by one and backwards: the same bits.
    again = torch.full_like(got, float("nan"))
    for e in reversed(range(len(slots))):
        span = slice(starts[e], starts[e + 1])
        ops.experts(
            x.to(device), arena, [slots[e]], layout, [0, starts[e + 1] - starts[e]],
            pair_rows[span].to(device), limit, again, out_rows[span].to(device),
        )  # fmt: skip
    assert torch.equal(got, again)


def check_rows(ops, device="cpu"):
    x, w, limit = normal(1, 3, 5, 96), normal(2, 96), 0.7
    close(ops.rms_norm(x.to(device), w.to(device), 1e-6), REFERENCE.rms_norm(x, w, 1e-6))
    close(ops.rms_norm(x.to(device), None, 1e-6), REFERENCE.rms_norm(x, None, 1e-6))
    angles = normal(3, 3, 16)
    cos, sin = angles.cos(), angles.sin()
    for inverse in (False, True):
        got = ops.rope_(x.to(device).clone(), cos.to(device), sin.to(device), inverse=inverse)
        close(got, REFERENCE.rope_(x.clone(), cos, sin, inverse=inverse))
    g, u = normal(4, 3, 1030), normal(5, 3, 1030)
    for bound in (limit, 0.0):
        close(ops.swiglu(g.to(device), u.to(device), bound), REFERENCE.swiglu(g, u, bound))
    parts, weights = normal(6, 2, 3, 1030), normal(7, 2, 3)
    close(
        ops.sum_experts(parts.to(device), weights.to(device)),
        REFERENCE.sum_experts(parts, weights),
    )


def check_hyper_connections(ops, name, device="cpu"):
    d, s = 320, 4
    fn = quantised(np.random.default_rng(1), name, s * (s + 2), s * d)
    x, y, norm = normal(2, 3, s, d), normal(3, 3, d), normal(4, d)
    scale, base = normal(5, 3), normal(6, s * (s + 2))
    eps = {"eps": 1e-6, "hc_eps": 1e-6}
    there = [t.to(device) for t in (x, y, norm, scale, base)]
    got = ops.hc_enter(
        there[0], moved(fn, device), there[3], there[4], there[2], n_iterations=5, **eps
    )
    want = REFERENCE.hc_enter(x, fn, scale, base, norm, n_iterations=5, **eps)
    for ours, theirs in zip(got, want, strict=True):
        close(ours, theirs)
    close(ops.hc_leave(there[1], there[0], *got[1:]), REFERENCE.hc_leave(y, x, *want[1:]))
    close(
        ops.hc_route_input(there[0], moved(fn, device), there[3], there[4], there[2], **eps),
        want[0],
    )
    head = QuantTensor(fn.data[:s].clone(), fn.ggml_type, s, fn.n_in)
    close(
        ops.hc_collapse(there[0], moved(head, device), there[3][:1], there[4][:s], **eps),
        REFERENCE.hc_collapse(x, head, scale[:1], base[:s], **eps),
    )


def check_attend(ops, device="cpu"):
    q, keys, rows, sinks = normal(1, 5, 6, 80), normal(2, 43, 80), normal(3, 70, 80), normal(4, 6)
    visible = torch.tensor([30, 31, 31, 70, 0], dtype=torch.int32)
    selected = torch.full((5, 40), -1, dtype=torch.int32)
    for t, n in enumerate((40, 3, 33, 0, 1)):
        selected[t, :n] = torch.randperm(70)[:n].sort().values.int()
    for extra in ((None, None, None), (rows, visible, None), (rows, visible, selected)):
        on_device = [None if e is None else e.to(device) for e in extra]
        got = ops.attend(
            q.to(device), keys.to(device), 7, 45, 35, *on_device, sinks.to(device), 0.11
        )
        close(got, REFERENCE.attend(q, keys, 7, 45, 35, *extra, sinks, 0.11))
    # Alone as in the chunk; a window that is not yet full.
    alone = ops.attend(
        q[2:3].to(device), keys.to(device), 7, 47, 35, rows.to(device), visible[2:3].to(device),
        selected[2:3].to(device), sinks.to(device), 0.11,
    )  # fmt: skip
    assert torch.equal(alone[0], got[2])
    short = ops.attend(
        q.to(device), keys[:9].to(device), 0, 4, 35, *[None] * 3, sinks.to(device), 1
    )
    close(short, REFERENCE.attend(q, keys[:9], 0, 4, 35, None, None, None, sinks, 1.0))


def check_compress(ops, device="cpu"):
    d, norm = 48, normal(9, 48)
    for ratio, c in ((4, 2), (8, 1)):
        kv, gate = normal(1, 40, c * d), 3 * normal(2, 40, c * d)
        for first, previous in ((0, False), (8, True)):
            cos, sin = normal(3, 3, 8).cos(), normal(3, 3, 8).sin()
            args = (first, 3, ratio, previous)
            got = ops.compress(
                kv.to(device), gate.to(device), *args, norm.to(device), cos.to(device),
                sin.to(device), 1e-6,
            )  # fmt: skip
            close(got, REFERENCE.compress(kv, gate, *args, norm, cos, sin, 1e-6))


def check_index(ops, device="cpu"):
    q, w, keys = normal(1, 4, 20, 32), normal(2, 4, 20), normal(3, 150, 32)
    keys[40:60] = keys[20:40]  # equal scores: the lower row wins
    visible = torch.tensor([150, 60, 12, 0], dtype=torch.int32)
    got = ops.index_topk(q.to(device), w.to(device), keys.to(device), visible.to(device), 24).cpu()
    assert torch.equal(got, REFERENCE.index_topk(q, w, keys, visible, 24))
    flat = ops.index_topk(
        q.to(device), 0 * w.to(device), keys.to(device), visible.to(device), 24
    ).cpu()
    assert flat[0].tolist() == list(range(24))


def check_route(ops, device="cpu"):
    scores, bias = 6 * normal(1, 4, 50), normal(2, 50)
    scores[0] = -30.0
    scores[1, 7:9] = 25.0
    chosen = torch.tensor([[7, 3, 49], [0, 2, 1], [5, 4, 3], [9, 8, 7]], dtype=torch.int32)
    for b, c in ((bias, None), (None, None), (None, chosen)):
        for normalise in (True, False):
            got = ops.route(
                scores.to(device), None if b is None else b.to(device),
                None if c is None else c.to(device), 3, normalise=normalise, scale=1.5,
            )  # fmt: skip
            want = REFERENCE.route(scores, b, c, 3, normalise=normalise, scale=1.5)
            assert torch.equal(got[0].cpu(), want[0])
            close(got[1], want[1])
