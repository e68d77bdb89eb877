"""SamplingParams at the door, and what the sampler chooses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aprefetch.engine.sampler import Sampler, SamplingParams
from aprefetch.errors import DeviceError, InvalidRequestError

V = 50


def logits(seed: int = 0, n: int = V) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 3


def draw(params: SamplingParams, n: int, row: torch.Tensor | None = None) -> list[int]:
    sampler = Sampler(params, V)
    return [sampler.sample(logits(i) if row is None else row).token_id for i in range(n)]


def test_defaults_are_the_documented_ones() -> None:
    p = SamplingParams()
    assert (p.max_tokens, p.min_tokens, p.temperature, p.top_p, p.top_k) == (256, 0, 1.0, 1.0, 0)
    assert (p.min_p, p.repetition_penalty, p.presence_penalty) == (0.0, 1.0, 0.0)
    assert (p.frequency_penalty, p.seed, p.stop, p.stop_token_ids) == (0.0, None, (), ())
    assert (p.ignore_eos, p.logit_bias, p.logprobs) == (False, None, None)
    assert hash(p) == hash(SamplingParams())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", "3"),
        ("min_tokens", -1),
        ("min_tokens", 300),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("seed", "x"),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", [1]),
        ("logprobs", -1),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams.build(**{name: value})
    assert caught.value.param == name


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(max_tokens=0, top_p=7, stop_token_ids=(-1,))
    for name in ("max_tokens", "top_p", "stop_token_ids"):
        assert name in str(caught.value)
    assert caught.value.param == "max_tokens"


def test_keywords_override_the_object_and_aliases_work() -> None:
    base = SamplingParams(max_tokens=5, top_k=3)
    built = SamplingParams.build(base, max_new_tokens=9, stop="END", logit_bias={"4": 1})
    assert (built.max_tokens, built.top_k, built.stop, built.logit_bias) == (9, 3, ("END",), {4: 1})
    assert base.max_tokens == 5
    with pytest.raises(InvalidRequestError, match="give one of them"):
        SamplingParams.build(max_tokens=1, max_new_tokens=2)
    with pytest.raises(InvalidRequestError, match="did you mean 'temperature'"):
        SamplingParams.build(temprature=1)
    with pytest.raises(InvalidRequestError, match="num_experts_per_tok"):
        SamplingParams.build(num_experts_per_tok=1)
    with pytest.raises(InvalidRequestError, match="must be a SamplingParams"):
        SamplingParams.build({"top_k": 1})  # type: ignore[arg-type]


def test_greedy_takes_the_lowest_of_equals_and_leaves_the_logits() -> None:
    row = logits()
    row[7] = row[31] = 100.0
    before = row.clone()
    assert draw(SamplingParams(temperature=0), 3, row) == [7, 7, 7]
    assert draw(SamplingParams(temperature=0, logprobs=1), 1, row) == [7]
    assert torch.equal(row, before)


def test_a_seed_repeats_itself_whatever_runs_beside_it() -> None:
    params = SamplingParams(seed=11, top_p=0.95)
    alone = draw(params, 30)
    a, b = Sampler(params, V), Sampler(SamplingParams(seed=12), V)
    mixed = []
    for i in range(30):
        torch.rand(3)  # the global generator is not ours
        b.sample(logits(i))
        mixed.append(a.sample(logits(i)).token_id)
    assert mixed == alone
    assert draw(SamplingParams(seed=12, top_p=0.95), 30) != alone
    assert len({tuple(draw(SamplingParams(), 10)) for _ in range(3)}) > 1


def test_draws_follow_the_distribution() -> None:
    row = torch.full((V,), -1e4)
    row[3], row[9] = math.log(0.75), math.log(0.25)
    drawn = draw(SamplingParams(seed=5), 2000, row)
    assert set(drawn) == {3, 9}
    assert abs(drawn.count(3) / 2000 - 0.75) < 0.04
    hot = draw(SamplingParams(seed=5, temperature=2.0), 2000, row)
    assert abs(hot.count(3) / 2000 - math.sqrt(3) / (1 + math.sqrt(3))) < 0.04


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(-1, 60),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_filters_keep_what_the_plain_definition_keeps(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    row = logits(seed)
    params = SamplingParams(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = torch.softmax(row.double(), 0)
    kept = [i for i in range(V) if probs[i] >= min_p * probs.max() * (1 - 1e-9)]
    kept.sort(key=lambda i: -probs[i].item())
    kept = kept[:top_k] if top_k > 0 else kept
    total, nucleus, mass = sum(probs[i].item() for i in kept), [], 0.0
    for i in kept:
        nucleus.append(i)
        mass += probs[i].item()
        if mass >= top_p * total * (1 + 1e-9):
            break
    assert set(draw(params, 20, row)) <= set(nucleus)


def test_a_nucleus_wider_than_the_first_look_is_right() -> None:
    n = 5000
    sampler = Sampler(SamplingParams(seed=1, top_p=0.9), n)
    row = torch.linspace(0.001, 0.0, n)
    drawn = [sampler.sample(row).token_id for _ in range(300)]
    assert max(drawn) < 4600
    assert max(drawn) > 2000


def test_top_k_one_is_greedy() -> None:
    greedy = draw(SamplingParams(temperature=0), 20)
    assert draw(SamplingParams(top_k=1), 20) == greedy
    assert draw(SamplingParams(top_p=1e-9), 20) == greedy
    assert draw(SamplingParams(min_p=1.0), 20) == greedy


def test_bias_and_bans() -> None:
    row = logits()
    best = int(row.argmax())
    assert draw(SamplingParams(temperature=0, logit_bias={best: -math.inf}), 1, row) != [best]
    assert draw(SamplingParams(temperature=0, logit_bias={4: 1000}), 1, row) == [4]
    everything = dict.fromkeys(range(V), -math.inf)
    for temperature in (0, 1):
        sampler = Sampler(SamplingParams(temperature=temperature, logit_bias=everything), V)
        with pytest.raises(InvalidRequestError, match="leaves no token"):
            sampler.sample(row)
    for name, value in (("logit_bias", {V: 1}), ("stop_token_ids", [V])):
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            Sampler(SamplingParams.build(**{name: value}), V)


def test_min_tokens_bans_the_end() -> None:
    row = logits()
    row[2], row[5] = 50.0, 49.0
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(5,))
    sampler = Sampler(params, V, end_ids=(2,))
    drawn = [sampler.sample(row).token_id for _ in range(3)]
    assert drawn[2] == 2
    assert not {2, 5} & set(drawn[:2])


def test_penalties() -> None:
    row = torch.zeros(V)
    row[0], row[1] = 1.0, 0.6
    repeated = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), V, prompt_ids=[0])
    assert [repeated.sample(row).token_id for _ in range(3)] == [1, 0, 0]
    frequency = Sampler(SamplingParams(temperature=0, frequency_penalty=0.3), V, prompt_ids=[0])
    assert [frequency.sample(row).token_id for _ in range(4)] == [0, 0, 1, 0]
    presence = Sampler(SamplingParams(temperature=0, presence_penalty=0.5), V)
    assert [presence.sample(row).token_id for _ in range(4)] == [0, 1, 0, 0]


def test_logprobs_are_those_of_the_model() -> None:
    row = logits()
    want = torch.log_softmax(row.double(), 0)
    sample = Sampler(SamplingParams(temperature=0.3, seed=1, logprobs=3), V).sample(row)
    assert sample.logprob == pytest.approx(want[sample.token_id].item())
    assert sample.top_logprobs is not None
    assert [i for i, _ in sample.top_logprobs] == want.topk(3).indices.tolist()
    zero = Sampler(SamplingParams(temperature=0, logprobs=0), V).sample(row)
    assert zero.top_logprobs == ()
    assert zero.logprob is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    row = logits()
    row[13] = bad
    for params in (SamplingParams(temperature=0), SamplingParams()):
        with pytest.raises(DeviceError, match="not finite"):
            Sampler(params, V).sample(row)
