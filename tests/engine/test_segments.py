"""What stretches of dense compute are said to cost."""

from __future__ import annotations

from types import SimpleNamespace

from aprefetch.engine.segments import SegmentCosts
from aprefetch.models.base import ModelInfo


def info(**parts: int) -> ModelInfo:
    return ModelInfo(
        architecture="x", name="x", n_layers=4, n_vocab=8, context_length=8, hidden_size=8,
        n_experts=4, num_experts_per_tok=2, routed_layers=(1, 2, 3), token_routed_layers=(),
        dense_bytes=1000, dense_bytes_by_part=parts,
    )  # fmt: skip


def test_the_embedding_costs_nothing_and_the_head_only_once():
    costs = SegmentCosts(info(embedding=300, head=200, **{"shared experts": 100}))
    call = SimpleNamespace(layer=1, finishing=False)
    assert costs.after(None) == costs.layer == 100
    assert costs.after(call) == costs.shared == 25
    call.finishing = True
    assert costs.after(call) == 100
    call.layer = 3
    assert costs.after(call) == costs.head == 200


def test_a_model_that_does_not_say_where_its_bytes_are():
    costs = SegmentCosts(info())
    assert (costs.layer, costs.shared, costs.head) == (250, 1, 1)
