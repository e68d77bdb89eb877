"""Sampling: `SamplingParams`, checked at the door, and the `Sampler` of one request.

Order of operations on a row of logits: bias, bans (`min_tokens`), penalties, temperature, `min_p`,
`top_k`, `top_p`, one draw. Repetition penalty looks at prompt and answer, presence and frequency
penalties at the answer alone. Log-probabilities are those of the model's own logits, before all of
that. Each sampler owns its generator and draws one uniform number per token, so what a seed gives
does not depend on other requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aprefetch.errors import DeviceError, InvalidRequestError

__all__ = ["Sample", "Sampler", "SamplingParams"]

_ALIASES = {"max_new_tokens": "max_tokens"}
_NUCLEUS_FIRST = 512  # candidates looked at before a whole vocabulary is sorted


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


_Check = Callable[[Any], bool]
_NUMBERS: tuple[tuple[str, _Check, _Check, str], ...] = (
    ("max_tokens", _is_int, lambda v: v >= 1, "an integer of at least 1"),
    ("min_tokens", _is_int, lambda v: v >= 0, "an integer of at least 0"),
    ("temperature", _is_real, lambda v: 0 <= v < math.inf, "a number of at least 0"),
    ("top_p", _is_real, lambda v: 0 < v <= 1, "a number above 0 and at most 1"),
    ("top_k", _is_int, lambda v: v >= -1, "0 or -1 (off) or a positive integer"),
    ("min_p", _is_real, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    ("repetition_penalty", _is_real, lambda v: 0 < v < math.inf, "a number above 0"),
    ("presence_penalty", _is_real, lambda v: -2 <= v <= 2, "a number from -2 to 2"),
    ("frequency_penalty", _is_real, lambda v: -2 <= v <= 2, "a number from -2 to 2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Immutable; wrong values raise at once.

    Args:
        max_tokens: most tokens to generate, at least 1.
        min_tokens: end-of-text and stop tokens are banned until so many tokens exist.
        temperature: divides the logits; 0 is greedy (ties go to the lowest id).
        top_p: keep the likeliest tokens up to this share of probability.
        top_k: keep this many of the likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen so far.
        presence_penalty: subtracted once from tokens of the answer, -2 to 2.
        frequency_penalty: subtracted for each occurrence in the answer, -2 to 2.
        seed: makes draws repeatable, whatever else is running. None draws a fresh one.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: tokens that end the answer, besides the model's own.
        ignore_eos: go on past the model's end-of-text tokens.
        logit_bias: added to the logits, by token id; -inf bans a token.
        logprobs: report the chosen token's log-probability and this many of the likeliest.

    Raises:
        InvalidRequestError: naming every wrong value; `.param` is the first of them.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        problems = [*self._number_problems(), *self._list_problems()]
        _raise(problems)

    def _number_problems(self) -> Iterable[tuple[str, str]]:
        for name, kind, legal, wanted in _NUMBERS:
            value = getattr(self, name)
            if not (kind(value) and legal(value)):
                yield name, f"{name} must be {wanted}, not {value!r}"
        if (
            _is_int(self.min_tokens)
            and _is_int(self.max_tokens)
            and 1 <= self.max_tokens < self.min_tokens
        ):
            yield "min_tokens", f"min_tokens ({self.min_tokens}) is above max_tokens"
        seed = self.seed
        if seed is not None and not (_is_int(seed) and -(2**63) <= seed < 2**64):
            yield "seed", f"seed must be None or an integer of 64 bits, not {seed!r}"
        if not isinstance(self.ignore_eos, bool):
            yield "ignore_eos", f"ignore_eos must be True or False, not {self.ignore_eos!r}"
        logprobs = self.logprobs
        if logprobs is not None and not (_is_int(logprobs) and logprobs >= 0):
            yield "logprobs", f"logprobs must be None or an integer of at least 0, not {logprobs!r}"

    def _list_problems(self) -> Iterable[tuple[str, str]]:
        """Checks the collections and stores them in their plain, immutable form."""
        put = object.__setattr__
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if isinstance(stop, Sequence) and all(isinstance(s, str) and s for s in stop):
            put(self, "stop", tuple(stop))
        else:
            yield "stop", f"stop must be a list of strings that are not empty, not {self.stop!r}"
        ids = self.stop_token_ids
        if isinstance(ids, Sequence) and all(_is_int(i) and i >= 0 for i in ids):
            put(self, "stop_token_ids", tuple(ids))
        else:
            yield "stop_token_ids", f"stop_token_ids must be a list of token ids, not {ids!r}"
        if self.logit_bias is None:
            return
        bias: dict[int, float] = {}
        try:
            for key, value in self.logit_bias.items():
                if isinstance(key, bool) or not _is_real(value) or value == math.inf:
                    raise ValueError
                bias[int(key)] = float(value)  # JSON has string keys
            if any(i < 0 for i in bias):
                raise ValueError
        except (AttributeError, TypeError, ValueError):
            yield (
                "logit_bias",
                f"logit_bias must map token ids to numbers, not {self.logit_bias!r}",
            )
            return
        put(self, "logit_bias", bias)

    @classmethod
    def build(cls, params: SamplingParams | None = None, **keywords: Any) -> SamplingParams:
        """`params` (or the defaults) with `keywords` on top; `max_new_tokens` is an alias.

        Raises:
            InvalidRequestError: an unknown name (with the nearest one), an alias given beside its
                name, or a wrong value.
        """
        if params is not None and not isinstance(params, cls):
            raise InvalidRequestError(
                f"params must be a SamplingParams, not {type(params).__name__}; "
                "single values go in as keywords",
                param="params",
            )
        names = [f.name for f in fields(cls)]
        problems: list[tuple[str, str]] = []
        values: dict[str, Any] = {}
        for given, value in keywords.items():
            name = _ALIASES.get(given, given)
            if name not in names:
                near = get_close_matches(given, [*names, *_ALIASES], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                problems.append((given, f"unknown sampling parameter {given!r}{hint}"))
            elif name != given and name in keywords:
                problems.append((given, f"{given!r} is another name of {name!r}: give one of them"))
            else:
                values[name] = value
        _raise(problems)
        return replace(params, **values) if params is not None else cls(**values)


def _raise(problems: Iterable[tuple[str, str]]) -> None:
    found = list(problems)
    if found:
        raise InvalidRequestError("; ".join(text for _, text in found), param=found[0][0])


class Sample(NamedTuple):
    """A chosen token; the log-probabilities only if they were asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


class Sampler:
    """Chooses the tokens of one request.

    Args:
        params: the request's parameters.
        n_vocab: length of a row of logits.
        prompt_ids: the prompt, for the repetition penalty.
        end_ids: the model's end-of-text tokens, banned during `min_tokens`.

    Raises:
        InvalidRequestError: `params` name a token outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        n_vocab: int,
        *,
        prompt_ids: Sequence[int] = (),
        end_ids: Iterable[int] = (),
    ) -> None:
        self.params = params
        self._n_vocab = n_vocab
        self._check_ids()
        self._n_chosen = 0
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
            self._bias = ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._banned: Tensor | None = None
        banned = sorted({*end_ids, *params.stop_token_ids})
        if params.min_tokens and banned:
            self._banned = torch.tensor(banned, dtype=torch.int64)
        self._counts: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(n_vocab)
        self._seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(n_vocab, dtype=torch.bool)
            self._seen[torch.as_tensor(prompt_ids, dtype=torch.int64)] = True
        # Nothing to do but argmax: the logits are not even copied.
        self._plain = (
            params.temperature == 0
            and self._bias is None
            and self._banned is None
            and self._counts is None
            and self._seen is None
            and params.logprobs is None
        )

    def _check_ids(self) -> None:
        for name in ("stop_token_ids", "logit_bias"):
            for i in getattr(self.params, name) or ():
                if i >= self._n_vocab:
                    raise InvalidRequestError(
                        f"{name}: token {i} is not in the vocabulary of {self._n_vocab} tokens",
                        param=name,
                    )

    def sample(self, logits: Tensor) -> Sample:
        """Choose from one row of logits `[V]` (float32, left as it is).

        Raises:
            DeviceError: the logits hold NaN or infinity: the model's output is unusable.
            InvalidRequestError: `logit_bias` leaves no token.
        """
        logits = logits.detach().to("cpu")
        low, high = torch.aminmax(logits)  # both are NaN if any entry is
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            raise DeviceError(
                "the model produced logits that are not finite numbers; "
                "the model file may be damaged"
            )
        if self._plain:
            return Sample(int(torch.argmax(logits)))
        row = self._adjust(logits)
        temperature = self.params.temperature
        token = int(torch.argmax(row)) if temperature == 0 else self._draw(row / temperature)
        if row[token] == -math.inf:
            raise InvalidRequestError("logit_bias leaves no token to choose", param="logit_bias")
        self._n_chosen += 1
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True
        return self._with_logprobs(token, logits)

    def _adjust(self, logits: Tensor) -> Tensor:
        """A copy of `logits` with bias, bans and penalties applied."""
        params = self.params
        row = logits.to(torch.float32, copy=True)
        if self._bias is not None:
            row[self._bias[0]] += self._bias[1]
        if self._banned is not None and self._n_chosen < params.min_tokens:
            row[self._banned] = -math.inf
        if self._seen is not None:
            scaled = torch.where(
                row > 0, row / params.repetition_penalty, row * params.repetition_penalty
            )
            row = torch.where(self._seen, scaled, row)
        if self._counts is not None:
            row -= params.frequency_penalty * self._counts
            row -= params.presence_penalty * (self._counts > 0)
        return row

    def _draw(self, row: Tensor) -> int:
        """One draw from the softmax of `row` after `min_p`, `top_k` and `top_p`."""
        params = self.params
        assert self._generator is not None
        weights = torch.exp((row - row.max()).to(torch.float64))  # the likeliest has weight 1
        uniform = torch.rand((), dtype=torch.float64, generator=self._generator).item()
        if not math.isfinite(weights.sum().item()):  # every token is banned
            return 0
        if params.min_p > 0:
            weights[weights < params.min_p] = 0.0
        ids: Tensor | None = None
        if 0 < params.top_k < self._n_vocab:
            weights, ids = torch.topk(weights, params.top_k)
        if params.top_p < 1:
            weights, ids = _nucleus(weights, ids, params.top_p)
        cumulative = torch.cumsum(weights, 0)
        target = uniform * cumulative[-1]
        at = int(torch.searchsorted(cumulative, target, right=True))
        at = min(at, int(torch.count_nonzero(cumulative < cumulative[-1])))  # rounding at the end
        return at if ids is None else int(ids[at])

    def _with_logprobs(self, token: int, logits: Tensor) -> Sample:
        n_top = self.params.logprobs
        if n_top is None:
            return Sample(token)
        logprobs = torch.log_softmax(logits.to(torch.float64), 0)
        top: tuple[tuple[int, float], ...] = ()
        if n_top:
            values, ids = torch.topk(logprobs, min(n_top, self._n_vocab))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Sample(token, logprobs[token].item(), top)


def _nucleus(weights: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest entries that together reach `top_p` of the total weight, and their ids."""
    wanted = top_p * weights.sum()
    n = weights.numel()
    first = min(n, _NUCLEUS_FIRST)
    best, order = torch.topk(weights, first)
    cumulative = torch.cumsum(best, 0)
    if first < n and cumulative[-1] < wanted:  # flat distribution: rank them all
        best, order = torch.sort(weights, descending=True, stable=True)
        cumulative = torch.cumsum(best, 0)
    keep = min(int(torch.searchsorted(cumulative, wanted)) + 1, best.numel())
    order = order[:keep]
    return best[:keep], order if ids is None else ids[order]
