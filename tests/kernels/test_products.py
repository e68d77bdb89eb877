"""linear, grouped_linear, embed and experts: values, and bits that depend on nothing else."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import fill_slots, layout_of, random_weight

from aprefetch.errors import InvalidRequestError
from aprefetch.kernels.cpu.fast import NumbaOps
from aprefetch.kernels.cpu.reference import ReferenceOps
from aprefetch.kernels.ops import Situ
from aprefetch.quant import SUPPORTED, dequantize

TYPES = sorted(SUPPORTED)
NAMES = [SUPPORTED[t].name for t in TYPES]


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    """Relative to the largest value: float32 sums of n terms in another order differ by about
    sqrt(n) half-units in the last place (6e-8) of the terms' scale."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    scale = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
    torch.testing.assert_close(got / scale, expected / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
@pytest.mark.parametrize(("n_out", "n_in"), [(1, 256), (67, 512), (130, 768)])
def test_linear_values(
    fast: NumbaOps, plain: ReferenceOps, ggml_type: int, n_out: int, n_in: int
) -> None:
    w = random_weight(ggml_type, n_out, n_in)
    torch.manual_seed(1)
    for n in (0, 1, 2, 5, 37):
        x = torch.randn(n, n_in)
        expected = (x.double() @ dequantize(w.data, w.ggml_type, n_in).double().T).float()
        assert_close(fast.linear(x, w), expected)
        if n:
            assert_close(fast.linear(x, w), plain.linear(x, w))


@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
def test_linear_rows_do_not_depend_on_the_batch(
    fast: NumbaOps, serial: NumbaOps, ggml_type: int
) -> None:
    w = random_weight(ggml_type, 77, 768)
    x = torch.randn(64, 768)
    whole = fast.linear(x, w)
    rows = torch.cat([fast.linear(x[i : i + 1], w) for i in range(64)])
    assert torch.equal(whole, rows)
    for n in (2, 3, 4, 5, 6, 7, 37, 63):
        assert torch.equal(fast.linear(x[:n], w), whole[:n])
        assert torch.equal(serial.linear(x[64 - n :], w), whole[64 - n :])


@pytest.mark.parametrize("ggml_type", [8, 39, 30])
def test_threads_do_not_change_bits(fast: NumbaOps, serial: NumbaOps, ggml_type: int) -> None:
    w = random_weight(ggml_type, 1037, 1024)
    three = NumbaOps(n_threads=3)
    for n in (1, 8, 13):
        x = torch.randn(n, 1024)
        once = serial.linear(x, w)
        assert torch.equal(fast.linear(x, w), once)
        assert torch.equal(three.linear(x, w), once)
    three.close()
    assert torch.equal(three.linear(x, w), once)


@pytest.mark.parametrize("ggml_type", [0, 1, 30])
@pytest.mark.parametrize("n_in", [1, 7, 16, 31, 33, 48, 95])
def test_float_rows_of_any_length(fast: NumbaOps, ggml_type: int, n_in: int) -> None:
    w = random_weight(ggml_type, 5, n_in)
    x = torch.randn(9, n_in)
    got = fast.linear(x, w)
    assert_close(got, x @ dequantize(w.data, ggml_type, n_in).T)
    assert torch.equal(got, torch.cat([fast.linear(row[None], w) for row in x]))


def test_linear_takes_strided_input_and_checks_width(fast: NumbaOps) -> None:
    w = random_weight(8, 16, 64)
    x = torch.randn(5, 128)[:, ::2]
    assert torch.equal(fast.linear(x, w), fast.linear(x.contiguous(), w))
    with pytest.raises(ValueError, match="width"):
        fast.linear(torch.randn(2, 63), w)


def test_mxfp4_extreme_exponents(fast: NumbaOps) -> None:
    """Subnormal and huge scales come through the fused kernel exactly."""
    w = random_weight(39, 256, 32)
    w.data[:, 0] = torch.arange(256)
    w.data[:, 1:] = 0x11
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 16] = 1.0, 0.5
    expected = dequantize(w.data, 39, 32)
    for got in (fast.linear(x, w), torch.cat([fast.linear(r[None], w) for r in x])):
        assert torch.equal(got[0], expected[:, 0])
        assert torch.equal(got[1], expected[:, 16] * 0.5)


@pytest.mark.parametrize("ggml_type", [8, 39, 0])
def test_grouped_linear(fast: NumbaOps, plain: ReferenceOps, ggml_type: int) -> None:
    w = random_weight(ggml_type, 4 * 24, 64)
    x = torch.randn(37, 4, 64)
    got = fast.grouped_linear(x, w)
    assert_close(got, plain.grouped_linear(x, w))
    assert torch.equal(got, torch.cat([fast.grouped_linear(x[i : i + 1], w) for i in range(37)]))
    with pytest.raises(ValueError, match="grouped"):
        fast.grouped_linear(x.view(37, 2, 128), w)


def test_grouped_linear_over_threads(fast: NumbaOps, serial: NumbaOps) -> None:
    w = random_weight(8, 2 * 300, 1024)
    x = torch.randn(9, 2, 1024)
    assert torch.equal(fast.grouped_linear(x, w), serial.grouped_linear(x, w))


@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
def test_embed_is_exact(fast: NumbaOps, ggml_type: int) -> None:
    w = random_weight(ggml_type, 50, 256)
    ids = torch.tensor([3, 49, 0, 3])
    expected = dequantize(w.data[ids], ggml_type, 256)
    # Formats with a minimum are fused here, so their one rounding may fall differently.
    torch.testing.assert_close(fast.embed(w, ids), expected, rtol=1e-6, atol=1e-8)
    assert fast.embed(w, ids[:0]).shape == (0, 256)


def test_embed_refuses_unknown_tokens(fast: NumbaOps) -> None:
    w = random_weight(8, 50, 64)
    for wrong in (50, -1):
        with pytest.raises(InvalidRequestError, match=f"token id {wrong} is outside"):
            fast.embed(w, torch.tensor([1, wrong]))


MIXES = [(39, 39, 39), (10, 10, 11), (8, 39, 12), (0, 30, 1)]


@pytest.mark.parametrize("types", MIXES, ids=str)
def test_experts(
    fast: NumbaOps, serial: NumbaOps, plain: ReferenceOps, types: tuple[int, int, int]
) -> None:
    layout = layout_of(types, width=512, hidden=256)
    arena, offsets = fill_slots(layout, 5)
    x = torch.randn(21, 512) / 4
    # Expert 3 has nothing to do; expert 0 has one row, the others several.
    starts = [0, 1, 12, 17, 17, 42]
    rows = torch.randint(0, 21, (42,))
    places = torch.randperm(42)
    out, expected = torch.full((44, 512), 7.0), torch.full((44, 512), 7.0)
    fast.experts(x, arena, offsets, layout, starts, rows, 1.0, out, places)
    plain.experts(x, arena, offsets, layout, starts, rows, 1.0, expected, places)
    assert_close(out, expected, 5e-6)  # two products deep
    assert (out[42:] == 7).all()

    alone = torch.full((44, 512), 7.0)
    for e in (4, 2, 0, 1):
        for i in range(starts[e], starts[e + 1]):
            fast.experts(
                x[rows[i] : rows[i] + 1], arena, [offsets[e]], layout, [0, 1],
                torch.zeros(1, dtype=torch.int64), 1.0, alone, places[i : i + 1],
            )  # fmt: skip
    assert torch.equal(out, alone)

    for ops in (serial, NumbaOps(n_threads=3)):
        again = torch.full((44, 512), 7.0)
        ops.experts(x, arena, offsets, layout, starts, rows, 1.0, again, places)
        assert torch.equal(out, again)
        ops.close()


def test_experts_with_the_other_activation(fast: NumbaOps, plain: ReferenceOps) -> None:
    layout = layout_of((39, 39, 8), width=64, hidden=96)
    arena, offsets = fill_slots(layout, 2)
    x = torch.randn(6, 64) / 4
    out, expected = torch.zeros(6, 64), torch.zeros(6, 64)
    args = (x, arena, offsets, layout, [0, 2, 6], torch.arange(6), 0.0)
    fast.experts(*args, out, torch.arange(6), Situ(2.0, 3.0))
    plain.experts(*args, expected, torch.arange(6), Situ(2.0, 3.0))
    assert_close(out, expected, 5e-6)


def test_experts_check_their_output(fast: NumbaOps) -> None:
    layout = layout_of((39, 39, 39), width=64, hidden=32)
    arena, offsets = fill_slots(layout, 1)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="output"):
        fast.experts(
            torch.zeros(1, 64), arena, offsets, layout, [0, 1], one, 0.0, torch.zeros(1, 63), one
        )
    with pytest.raises(ValueError, match="input"):
        fast.experts(
            torch.zeros(1, 32), arena, offsets, layout, [0, 1], one, 0.0, torch.zeros(1, 64), one
        )


def test_calls_from_two_threads_at_once(fast: NumbaOps) -> None:
    """Both large calls share the pool; neither may see the other's rows."""
    weights = [random_weight(8, 1024, 1024, seed) for seed in (1, 2)]
    x = torch.randn(4, 1024)
    expected = [fast.linear(x, w) for w in weights]
    wrong: list[int] = []

    def work(which: int) -> None:
        same = [torch.equal(fast.linear(x, weights[which]), expected[which]) for _ in range(20)]
        wrong.extend(which for ok in same if not ok)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
