"""Eviction policies against a reference that keeps the whole history."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprefetch.errors import ConfigError
from aprefetch.pipeline.cache import (
    PHASE,
    LayeredPolicy,
    LfuPolicy,
    LruPolicy,
    Policy,
    new_policy,
)

HALF_LIFE = 10.0


class Reference:
    """Weights straight from the definition, victims by looking at everything."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.uses: list[int] = []
        self.admitted: set[int] = set()

    def weight(self, item: int) -> float:
        at = [i for i, used in enumerate(self.uses) if used == item]
        if self.name == "lru":
            return max(at, default=-1)
        return sum(2.0 ** ((i - len(self.uses)) / HALF_LIFE) for i in at)

    def is_coldest(self, item: int) -> bool:
        least = min(map(self.weight, self.admitted))
        return item in self.admitted and math.isclose(self.weight(item), least, rel_tol=1e-9)


MOVES = st.lists(
    st.tuples(st.sampled_from(["touch", "touch", "admit", "hold", "evict"]), st.integers(0, 7)),
    max_size=80,
)


@pytest.mark.parametrize("name", ["lfu", "lru"])
@given(moves=MOVES)
@settings(max_examples=150, deadline=None)
def test_c3_c4_policy_agrees_with_the_reference(name: str, moves: list[tuple[str, int]]) -> None:
    policy, reference = new_policy(name, half_life=HALF_LIFE), Reference(name)
    for what, item in moves:
        if what == "touch":
            policy.touch(item)
            reference.uses.append(item)
        elif what == "admit":
            policy.admit(item)
            reference.admitted.add(item)
        elif what == "hold":
            policy.hold(item)
            reference.admitted.discard(item)
        victim = policy.coldest()
        if not reference.admitted:
            assert victim is None
            continue
        assert victim is not None and reference.is_coldest(victim)
        if what == "evict":
            policy.hold(victim)
            reference.admitted.discard(victim)


def fill(policy: Policy, items: range) -> None:
    for item in items:
        policy.touch(item)
        policy.admit(item)


def test_c3_frequency_first() -> None:
    policy = LfuPolicy(1000.0)
    fill(policy, range(3))
    for _ in range(5):
        policy.touch(0)
    policy.touch(2)
    policy.touch(1)
    policy.touch(2)
    assert policy.coldest() == 1


def test_c3_recency_breaks_ties() -> None:
    policy = LfuPolicy(1000.0)
    fill(policy, range(3))
    for item in (1, 2, 0):
        policy.touch(item)
    assert policy.coldest() == 1


def test_c3_a_once_hot_expert_leaves_after_the_workload_shifts() -> None:
    policy = LfuPolicy(20.0)
    fill(policy, range(4))
    for _ in range(200):
        policy.touch(0)
    for _ in range(60):
        for item in (1, 2, 3):
            policy.touch(item)
    assert policy.coldest() == 0


@pytest.mark.parametrize("make", [lambda: LfuPolicy(500.0), LruPolicy])
def test_c3_work_per_miss_does_not_grow_with_the_capacity(make) -> None:
    per_miss = []
    for capacity in (64, 4096):
        policy, rng = make(), random.Random(1)
        fill(policy, range(capacity))
        policy.n_steps = 0
        n_misses, n_touches = 500, 0
        for new in range(capacity, capacity + n_misses):
            for _ in range(6):
                policy.touch(rng.randrange(capacity))
                n_touches += 1
            victim = policy.coldest()
            policy.hold(victim)
            policy.touch(new)
            policy.admit(new)
        per_miss.append(policy.n_steps / n_misses)
        # Each use puts an entry back at most once, each eviction and admission is one step.
        assert policy.n_steps <= n_touches + 3 * n_misses + capacity
    assert per_miss[1] <= 2 * per_miss[0] + 2


def test_scores_stay_exact_over_a_long_run() -> None:
    policy = LfuPolicy(2.0)
    policy.admit(0)
    policy.admit(1)
    for _ in range(200_000):
        policy.touch(0)
    policy.touch(1)
    assert math.isfinite(policy.score(0)) and policy.coldest() == 1


def test_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="'arc'"):
        new_policy("arc", half_life=1.0)


class LayeredReference(Reference):
    """Items 0-2, 3-5 and 6-8 are three layers that take turns."""

    def __init__(self) -> None:
        super().__init__("lfu")
        self.token, self.last = 0, 3
        self.turns = [0, 0, 0]

    def begin(self, layer: int) -> None:
        if layer <= self.last:
            self.token += 1
        self.last = layer
        self.turns = [max(turn, self.token - 1) for turn in self.turns]
        self.turns[layer] = self.token

    def weight(self, item: int) -> float:
        layer = item // 3
        return super().weight(item) * 2.0 ** (-PHASE * (self.turns[layer] + layer / 3))


LAYERED_MOVES = st.lists(
    st.tuples(
        st.sampled_from(["begin", "touch", "touch", "admit", "hold", "evict"]), st.integers(0, 8)
    ),
    max_size=100,
)


@given(moves=LAYERED_MOVES)
@settings(max_examples=300, deadline=None)
def test_c3_layered_policy_agrees_with_the_reference(moves: list[tuple[str, int]]) -> None:
    policy = new_policy("layered", half_life=HALF_LIFE, layer_of=[i // 3 for i in range(9)])
    reference = LayeredReference()
    for what, item in moves:
        if what == "begin":
            policy.begin(item)
            reference.begin(item // 3)
        elif what == "touch":
            policy.touch(item)
            reference.uses.append(item)
        elif what == "admit":
            policy.admit(item)
            reference.admitted.add(item)
        elif what == "hold":
            policy.hold(item)
            reference.admitted.discard(item)
        victim = policy.coldest()
        if not reference.admitted:
            assert victim is None
            continue
        assert victim is not None and reference.is_coldest(victim)
        if what == "evict":
            policy.hold(victim)
            reference.admitted.discard(victim)


def test_c3_of_equals_the_layer_whose_turn_is_over_gives_way() -> None:
    policy = LayeredPolicy(1000.0, [0, 0, 1, 1, 2, 2])
    fill(policy, range(6))
    victims = []
    for item in (0, 2, 4, 0):
        policy.begin(item)
        victims.append(policy.coldest() // 2)
    assert victims == [0, 1, 2, 0]


def test_c3_layered_work_does_not_grow_with_the_capacity_or_with_time() -> None:
    per_miss = []
    for n_layers, n_experts in ((8, 16), (8, 1024)):
        policy, rng = (
            LayeredPolicy(500.0, [i // n_experts for i in range(n_layers * n_experts)]),
            random.Random(1),
        )
        half = [i for i in range(n_layers * n_experts) if i % 2]
        for item in half:
            policy.touch(item)
            policy.admit(item)
        policy.n_steps = 0
        cached, n_misses = set(half), 0
        for turn in range(2000):
            first = turn % n_layers * n_experts
            policy.begin(first)
            item = first + rng.randrange(n_experts)
            policy.touch(item)
            if item not in cached:
                n_misses += 1
                victim = policy.coldest()
                policy.hold(victim)
                cached.remove(victim)
                cached.add(item)
                policy.admit(item)
        assert len(policy._top) <= 4 * n_layers + 1
        per_miss.append(policy.n_steps / n_misses)
    assert per_miss[1] <= 2 * per_miss[0] + 2
