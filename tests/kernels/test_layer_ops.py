"""Everything but the products, against plain torch; and row by row against the batch."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import random_weight
from test_products import assert_close

from aprefetch.errors import ConfigError, ModelError
from aprefetch.kernels.cpu import cpu_ops
from aprefetch.kernels.cpu.fast import NumbaOps
from aprefetch.kernels.cpu.reference import ReferenceOps


def angles(n: int, n_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(n, n_pairs) * 3
    return a.cos(), a.sin()


@pytest.mark.parametrize("d", [1, 15, 64, 67, 320, 4096])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(fast: NumbaOps, plain: ReferenceOps, d: int, weighted: bool) -> None:
    x, weight = torch.randn(3, 5, d), torch.randn(d) if weighted else None
    got = fast.rms_norm(x, weight, 1e-6)
    assert_close(got, plain.rms_norm(x, weight, 1e-6))
    assert torch.equal(got[1, 2], fast.rms_norm(x[1, 2][None], weight, 1e-6)[0])
    zero = fast.rms_norm(torch.zeros(1, d), weight, 1e-20)
    assert torch.equal(zero.abs(), torch.zeros(1, d))


@pytest.mark.parametrize("inverse", [False, True])
def test_rope(fast: NumbaOps, plain: ReferenceOps, inverse: bool) -> None:
    cos, sin = angles(7, 16)
    x = torch.randn(7, 3, 48)
    y = x.clone()
    assert fast.rope_(y, cos, sin, inverse=inverse) is y
    assert_close(y, plain.rope_(x.clone(), cos, sin, inverse=inverse))
    strided = torch.empty(7, 6, 48)[:, ::2]
    strided.copy_(x)
    fast.rope_(strided, cos, sin, inverse=inverse)
    assert torch.equal(strided, y)
    fast.rope_(y, cos, sin, inverse=not inverse)
    assert_close(y, x)


@pytest.mark.parametrize("limit", [0.0, 0.5, 10.0])
def test_swiglu(fast: NumbaOps, plain: ReferenceOps, limit: float) -> None:
    gate, up = torch.randn(5, 67) * 8, torch.randn(5, 67) * 8
    gate[0, :4] = torch.tensor([-200.0, 200.0, -89.0, 0.0])
    got = fast.swiglu(gate, up, limit)
    assert_close(got, plain.swiglu(gate, up, limit))
    assert torch.equal(got[3], fast.swiglu(gate[3], up[3], limit))


def test_swiglu_keeps_nan(fast: NumbaOps) -> None:
    bad = torch.full((1, 20), float("nan"))
    assert fast.swiglu(bad, torch.ones(1, 20), 10.0).isnan().all()
    assert fast.swiglu(torch.ones(1, 20), bad, 10.0).isnan().all()


@pytest.mark.parametrize("ggml_type", [0, 1, 30, 8])
@pytest.mark.parametrize(("s", "d"), [(4, 64), (4, 320), (2, 48)])
def test_hyper_connections(
    fast: NumbaOps, plain: ReferenceOps, ggml_type: int, s: int, d: int
) -> None:
    fn = random_weight(ggml_type, s * (s + 2), s * d)
    streams, norm = torch.randn(9, s, d), torch.randn(d)
    scale, base = torch.randn(3), torch.randn(s * (s + 2))
    args = (fn, scale, base, norm)
    eps = {"eps": 1e-6, "hc_eps": 1e-6}
    got = fast.hc_enter(streams, *args, **eps, n_iterations=8)
    expected = plain.hc_enter(streams, *args, **eps, n_iterations=8)
    for ours, theirs in zip(got, expected, strict=True):
        # Random mixes are large, and an exponential magnifies their rounding.
        assert_close(ours, theirs, 3e-5)
    one = fast.hc_enter(streams[4:5], *args, **eps, n_iterations=8)
    assert all(torch.equal(a[4], b[0]) for a, b in zip(got, one, strict=True))
    assert torch.equal(fast.hc_route_input(streams, *args, **eps), got[0])

    y = torch.randn(9, d)
    left = fast.hc_leave(y, streams, got[1], got[2])
    assert_close(left, plain.hc_leave(y, streams, got[1], got[2]))
    assert torch.equal(left[4:5], fast.hc_leave(y[4:5], streams[4:5], got[1][4:5], got[2][4:5]))

    head = random_weight(ggml_type, s, s * d, seed=3)
    collapsed = fast.hc_collapse(streams, head, scale[:1], base[:s], **eps)
    assert_close(collapsed, plain.hc_collapse(streams, head, scale[:1], base[:s], **eps), 3e-5)
    assert torch.equal(
        collapsed[4:5], fast.hc_collapse(streams[4:5], head, scale[:1], base[:s], **eps)
    )


def test_sinkhorn_orientation(fast: NumbaOps) -> None:
    """The last step normalises columns: sums over the first index are 1."""
    fn = random_weight(0, 24, 4 * 32)
    _, _, comb = fast.hc_enter(
        torch.randn(3, 4, 32), fn, torch.full((3,), 0.05), torch.randn(24), torch.ones(32),
        eps=1e-6, hc_eps=1e-6, n_iterations=1,
    )  # fmt: skip
    torch.testing.assert_close(comb.sum(1), torch.ones(3, 4), rtol=0, atol=1e-5)
    assert (comb.sum(2) - 1).abs().max() > 1e-3


@pytest.mark.parametrize(("n_heads", "d"), [(8, 64), (3, 128), (5, 24)])
@pytest.mark.parametrize("case", ["window", "rows", "selected"])
def test_attend(fast: NumbaOps, plain: ReferenceOps, n_heads: int, d: int, case: str) -> None:
    n, window, first, window_first = 37, 16, 50, 35
    q, keys = torch.randn(n, n_heads, d), torch.randn(first + n - window_first, d)
    sinks = torch.randn(n_heads)
    rows = visible = selected = None
    if case != "window":
        rows = torch.randn(22, d)
        visible = (torch.arange(first, first + n, dtype=torch.int32) + 1) // 4
    if case == "selected":
        assert rows is not None
        assert visible is not None
        selected = fast.index_topk(
            torch.randn(n, 2, 32), torch.randn(n, 2), torch.randn(22, 32), visible, 8
        )
    scale = d**-0.5

    def run(ops: NumbaOps | ReferenceOps, a: int, b: int) -> torch.Tensor:
        return ops.attend(
            q[a:b], keys, window_first, first + a, window, rows,
            None if visible is None else visible[a:b],
            None if selected is None else selected[a:b], sinks, scale,
        )  # fmt: skip

    got = run(fast, 0, n)
    assert_close(got, run(plain, 0, n))
    assert torch.equal(got, torch.cat([run(fast, t, t + 1) for t in range(n)]))
    assert torch.equal(got, torch.cat([run(fast, 0, 5), run(fast, 5, n)]))


def test_attend_does_not_depend_on_keys_nobody_sees(fast: NumbaOps) -> None:
    """Decode keeps fewer old keys than prefill; the answer must be the same bits."""
    q, keys, sinks = torch.randn(1, 4, 64), torch.randn(60, 64), torch.randn(4)
    long = fast.attend(q, keys, 0, 59, 16, None, None, None, sinks, 0.1)
    short = fast.attend(q, keys[44:], 44, 59, 16, None, None, None, sinks, 0.1)
    assert torch.equal(long, short)


def test_attend_over_threads(fast: NumbaOps, serial: NumbaOps) -> None:
    q, keys, sinks = torch.randn(150, 4, 64), torch.randn(150, 64), torch.randn(4)
    args = (q, keys, 0, 0, 128, None, None, None, sinks, 0.125)
    assert torch.equal(fast.attend(*args), serial.attend(*args))


@pytest.mark.parametrize("d", [64, 128, 24])
@pytest.mark.parametrize(("ratio", "c"), [(4, 2), (128, 1), (4, 1)])
@pytest.mark.parametrize("has_previous", [True, False])
def test_compress(
    fast: NumbaOps, plain: ReferenceOps, d: int, ratio: int, c: int, has_previous: bool
) -> None:
    first = ratio if has_previous and c == 2 else 1
    kv, gate = torch.randn(first + 3 * ratio + 2, c * d), torch.randn(first + 3 * ratio + 2, c * d)
    cos, sin = angles(3, 8)
    norm = torch.randn(d)
    args = (first, 3, ratio, has_previous, norm, cos, sin, 1e-6)
    got = fast.compress(kv, gate, *args)
    assert_close(got, plain.compress(kv, gate, *args))
    later = fast.compress(kv, gate, first + 2 * ratio, 1, ratio, True, norm, cos[2:], sin[2:], 1e-6)
    assert torch.equal(got[2:], later)


def test_index_topk(fast: NumbaOps, serial: NumbaOps, plain: ReferenceOps) -> None:
    n, n_rows, k = 40, 90, 16
    q, weights, keys = torch.randn(n, 4, 64), torch.randn(n, 4), torch.randn(n_rows, 64)
    visible = torch.arange(n, dtype=torch.int32) * 2 + 12
    got = fast.index_topk(q, weights, keys, visible, k)
    assert torch.equal(got, plain.index_topk(q, weights, keys, visible, k))
    each = [fast.index_topk(q[t : t + 1], weights[t : t + 1], keys, visible[t : t + 1], k)
            for t in range(n)]  # fmt: skip
    assert torch.equal(got, torch.cat(each))
    q, weights, keys = torch.randn(99, 8, 64), torch.randn(99, 8), torch.randn(400, 64)
    visible = torch.full((99,), 399, dtype=torch.int32)
    assert torch.equal(
        fast.index_topk(q, weights, keys, visible, k),
        serial.index_topk(q, weights, keys, visible, k),
    )


def test_index_topk_ties_go_to_lower_rows(fast: NumbaOps, plain: ReferenceOps) -> None:
    keys = torch.ones(50, 32)
    keys[20:30] *= 2
    keys[40] *= -1
    q, weights = torch.ones(1, 1, 32), torch.ones(1, 1)
    visible = torch.tensor([45], dtype=torch.int32)
    for sign in (1.0, -1.0):
        got = fast.index_topk(q, sign * weights, keys, visible, 12)
        assert torch.equal(got, plain.index_topk(q, sign * weights, keys, visible, 12))
    assert got[0, -1] == 40  # the only row that is not negative


@pytest.mark.parametrize("n_experts", [5, 32, 256])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_route(
    fast: NumbaOps, plain: ReferenceOps, n_experts: int, normalise: bool, biased: bool
) -> None:
    scores = torch.randn(33, n_experts) * 4
    scores[0, 0], scores[1, 1] = 21.0, -90.0
    bias = torch.randn(n_experts) if biased else None
    options = {"normalise": normalise, "scale": 1.5}
    ids, weights = fast.route(scores, bias, None, 4, **options)
    expected_ids, expected = plain.route(scores, bias, None, 4, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-30)
    one = fast.route(scores[5:6], bias, None, 4, **options)
    assert torch.equal(one[0][0], ids[5])
    assert torch.equal(one[1][0], weights[5])
    assert_close(fast.early_scores(scores, bias), plain.early_scores(scores, bias))


def test_route_by_table(fast: NumbaOps, plain: ReferenceOps) -> None:
    scores = torch.randn(6, 16)
    chosen = torch.stack([torch.randperm(16)[:4] for _ in range(6)]).int()
    options = {"normalise": True, "scale": 1.5}
    ids, weights = fast.route(scores, None, chosen, 4, **options)
    expected_ids, expected = plain.route(scores, None, chosen, 4, **options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=2e-6, atol=0)
    chosen[3, 2] = 16
    with pytest.raises(ModelError, match="there are 16"):
        fast.route(scores, None, chosen, 4, **options)


def test_route_ties_and_tiny_sums(fast: NumbaOps) -> None:
    ids, weights = fast.route(torch.zeros(1, 9), None, None, 4, normalise=True, scale=1.0)
    assert ids.tolist() == [[0, 1, 2, 3]]
    torch.testing.assert_close(weights, torch.full((1, 4), 0.25), rtol=1e-6, atol=0)
    _, weights = fast.route(torch.full((1, 9), -60.0), None, None, 4, normalise=True, scale=1.0)
    assert weights.sum() < 1  # the sum is not blown up to 1 below 2 ** -14
    ids, _ = fast.route(torch.full((1, 9), float("nan")), None, None, 4, normalise=True, scale=1.0)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_sum_experts(fast: NumbaOps, plain: ReferenceOps) -> None:
    for d in (5, 64, 67):
        parts, weights = torch.randn(7, 4, d), torch.randn(7, 4)
        got = fast.sum_experts(parts, weights)
        assert_close(got, plain.sum_experts(parts, weights))
        assert torch.equal(got[3:4], fast.sum_experts(parts[3:4], weights[3:4]))


def test_choosing_the_kernels() -> None:
    assert cpu_ops().name == "numba"
    assert cpu_ops("reference").name == "reference"
    assert cpu_ops("numba", n_threads=1).batch_invariant
    with pytest.raises(ConfigError, match="unknown"):
        cpu_ops("fastest")  # type: ignore[arg-type]


def test_without_numba_there_is_plain_torch_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "aprefetch.kernels.cpu.fast", None)
    assert cpu_ops().name == "reference"
    assert cpu_ops().name == "reference"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    with pytest.raises(ConfigError, match="need numba"):
        cpu_ops("numba")
