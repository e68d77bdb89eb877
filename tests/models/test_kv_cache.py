from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from aprefetch.models.kv_cache import GrowingRows, SlidingRows

CPU = torch.device("cpu")
chunks = st.lists(st.integers(1, 70), min_size=1, max_size=30)


def numbered(first: int, n: int) -> torch.Tensor:
    """Rows whose values are their positions."""
    return torch.arange(first, first + n, dtype=torch.float32)[:, None].expand(-1, 3).clone()


@given(sizes=chunks, keep=st.integers(1, 40))
def test_sliding_rows_hold_the_last_rows_at_their_positions(sizes, keep):
    rows, n = SlidingRows(3, keep, CPU), 0
    for size in sizes:
        held_before = rows.view().shape[0]
        rows.append(numbered(n, size))
        n += size
        view = rows.view()
        assert torch.equal(view, numbered(rows.first_position, n - rows.first_position))
        # What a chunk's first query may look back at is still there.
        assert view.shape[0] >= min(n, size + min(keep, held_before))
        assert rows.n_bytes >= view.numel() * 4


def test_sliding_rows_shrink_again_after_a_long_chunk():
    rows = SlidingRows(3, 8, CPU)
    rows.append(numbered(0, 5000))
    for i in range(40):
        rows.append(numbered(5000 + i, 1))
    assert rows.n_bytes < 100 * 3 * 4


def test_sliding_rows_move_rarely_in_decode():
    rows, moves, last = SlidingRows(3, 64, CPU), 0, 0
    for i in range(1000):
        rows.append(numbered(i, 1))
        moves += rows.first_position != last
        last = rows.first_position
    assert moves <= 1000 / 32


@given(sizes=chunks)
def test_growing_rows_keep_everything(sizes):
    rows, n = GrowingRows(3, CPU), 0
    for size in sizes:
        rows.append(numbered(n, size))
        n += size
        assert torch.equal(rows.view(), numbered(0, n))
        assert rows.n_bytes <= max(32, 2 * n) * 3 * 4


def test_sliding_rows_keep_the_sum_with_a_bias():
    rows = SlidingRows(3, 8, CPU)
    for i in range(0, 60, 3):
        rows.append(numbered(i, 3), torch.full((3, 3), 0.5))
    view = rows.view()
    assert torch.equal(view, numbered(rows.first_position, view.shape[0]) + 0.5)
