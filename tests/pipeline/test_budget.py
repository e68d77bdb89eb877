"""Division of budgets into pools, and the ledger."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprefetch.errors import BudgetError
from aprefetch.pipeline.budget import (
    Ledger,
    SizeClass,
    device_classes,
    divide,
    landing_classes,
    minimum_bytes,
    staging,
    total_bytes,
)

CLASSES = st.lists(
    st.builds(
        lambda units, n: SizeClass(slot_bytes=units * 256, n_objects=n, layers=()),
        st.integers(1, 5000),
        st.integers(1, 300),
    ),
    min_size=1,
    max_size=5,
).map(tuple)


@given(classes=CLASSES, extra=st.integers(0, 1 << 31))
def test_c1_any_legal_budget_is_divided_within_it(classes, extra) -> None:
    budget = minimum_bytes(classes) + extra
    pools = divide(classes, budget, option="vram_budget")
    assert sum(pool.n_bytes for pool in pools) <= budget
    for pool in pools:
        c = pool.size_class
        assert c.n_minimum <= pool.n_slots <= c.n_objects
    left = budget - sum(pool.n_bytes for pool in pools)
    for pool in pools:  # nothing is left lying about that would hold another object
        assert pool.n_slots == pool.size_class.n_objects or pool.size_class.slot_bytes > left


@given(classes=CLASSES)
def test_the_total_holds_everything_and_one_byte_below_the_minimum_is_refused(classes) -> None:
    pools = divide(classes, total_bytes(classes), option="vram_budget")
    assert all(pool.n_slots == pool.size_class.n_objects for pool in pools)
    with pytest.raises(BudgetError) as caught:
        divide(classes, minimum_bytes(classes) - 1, option="ram_budget")
    assert caught.value.option == "ram_budget"
    assert caught.value.minimum_bytes == minimum_bytes(classes)


def test_classes_of_a_model_with_layers_of_two_sizes(experts) -> None:
    device = device_classes(experts)
    assert [c.layers for c in device] == [(4,), (1, 2)]
    assert [c.slot_bytes for c in device] == [experts.layers[4].device_bytes, 8448]
    landing = landing_classes(experts)
    assert all(c.slot_bytes % experts.alignment == 0 for c in landing)
    for c in landing:
        assert all(experts.max_landing_bytes(layer) <= c.slot_bytes for layer in c.layers)
    assert all(pool.n_slots <= 4 for pool in staging(landing))


def test_a_ledger_refuses_to_go_over_its_limit() -> None:
    ledger = Ledger(100)
    ledger.take(60)
    ledger.take(40)
    with pytest.raises(AssertionError):
        ledger.take(1)
    ledger = Ledger(100)
    ledger.take(60)
    ledger.give(60)
    assert (ledger.used_bytes, ledger.peak_bytes) == (0, 60)
    with pytest.raises(AssertionError):
        ledger.give(1)
