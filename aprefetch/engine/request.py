"""One request: what it asks for, how far it is, and what it gives back.

A `Request` is token ids still to be run and a state (the sequence's caches) that exists from
admission until the end. The engine owns its life cycle: WAITING -> RUNNING -> ENDED, and moves it
on the loop's thread only. A `GenerateRequest` samples after its prompt; a `ScoreRequest` looks at
the logits of every position and never samples.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aprefetch.errors import DeadlineError, DeviceError, InvalidRequestError
from aprefetch.models.base import Chunk, LogitsWanted, SequenceState
from aprefetch.stats import Stats

if TYPE_CHECKING:
    from aprefetch.engine.prefix_cache import KeptState
    from aprefetch.engine.sampler import Sample, Sampler
    from aprefetch.engine.stream import EventFeed

__all__ = [
    "Completion",
    "FinishReason",
    "GenerateRequest",
    "Phase",
    "Request",
    "RequestInfo",
    "ScoreRequest",
    "ScoreResult",
    "TokenEvent",
    "Usage",
    "checked_timeout",
]

_SCORE_ROWS = 32  # rows of logits turned to float64 at a time
_numbers = itertools.count(1)


class FinishReason(StrEnum):
    """Why an answer ended. Equal to its plain string."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens and times of one request. Times are seconds; None or 0 while not known.

    `reused_tokens` of the prompt were not run, since the state of an earlier request held them.
    """

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int = 0
    time_to_first_token_s: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Prompt and answer."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens that were run over the time from admission to the first token."""
        n_run = self.prompt_tokens - self.reused_tokens
        return n_run / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first one over the time they took."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, derived values included."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "reused_tokens": self.reused_tokens,
            "time_to_first_token_s": self.time_to_first_token_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One token of an answer.

    `text` is "" while bytes of a character, or what could begin a stop string, are held back.
    `finish_reason` is set on the last event only; a cancelled answer's last event repeats no token
    (`token_id` is -1).
    """

    index: int
    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer.

    `token_ids` holds what was sampled, the token that ended the answer included; `text` does not
    hold that token or a stop string. `stats` counts what the runtime did during this request, for
    others too if they ran at that time. `template` tells where the chat template came from (None:
    none was used), `prompt` is the text that was encoded (None for token ids).
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    stats: Stats
    prompt: str | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    template: str | None = None
    logprobs: list[float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        out: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": str(self.finish_reason),
            "usage": self.usage.to_dict(),
            "stats": self.stats.to_dict(),
            "template": self.template,
        }
        if self.logprobs is not None:
            out["logprobs"] = self.logprobs
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """Teacher-forced log-probabilities of a text.

    `n_tokens` (N) counts all tokens of the input. `logprobs [N - 1]` (float64): entry i is the
    log-probability of token i + 1 given tokens 0..i. `logits [N, V]` (float32) if asked for.
    """

    token_ids: list[int]
    logprobs: npt.NDArray[np.float64]
    stats: Stats
    logits: npt.NDArray[np.float32] | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of the input."""
        return len(self.token_ids)

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood, nats per token, over all tokens but the first."""
        return float(-np.mean(self.logprobs))

    @property
    def perplexity(self) -> float:
        """`exp(mean_nll)`."""
        try:
            return math.exp(self.mean_nll)
        except OverflowError:
            return math.inf

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the arrays."""
        return {
            "mean_nll": self.mean_nll,
            "perplexity": self.perplexity,
            "n_tokens": self.n_tokens,
            "stats": self.stats.to_dict(),
        }


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """How far a request is. `kind` is "generate" or "score"; times are seconds."""

    number: int
    kind: str
    phase: str
    prompt_tokens: int
    prompt_tokens_run: int
    completion_tokens: int
    age_s: float
    state_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def checked_timeout(timeout_s: Any, default_s: float | None) -> float | None:
    """Seconds that a request may take, as asked for or by default.

    Raises:
        InvalidRequestError: no number above 0.
    """
    if timeout_s is None:
        return default_s
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not (is_number and 0 < timeout_s < math.inf):
        raise InvalidRequestError(
            f"timeout_s must be a number of seconds above 0, not {timeout_s!r}", param="timeout_s"
        )
    return float(timeout_s)


class Request:
    """Common part: a prompt that is run in chunks, and an end that can be waited for.

    Args:
        prompt_ids: at least one token id, checked by the caller.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.number = next(_numbers)
        self.prompt_ids = np.asarray(prompt_ids, dtype=np.int64)
        self.phase = Phase.WAITING
        self.state: SequenceState | None = None
        self.n_run = 0  # prompt tokens that went through the model, now or for a kept state
        self.n_reused = 0  # of these, for a kept state
        self.kept: KeptState | None = None  # where to begin; let go at admission
        self.keep_at = 0  # prompt tokens after which the state is to be kept; 0 for never
        self.cancelled = False
        self.ended = asyncio.Event()
        self.arrived_ns = time.perf_counter_ns()
        self.admitted_ns = 0
        self.reserved_bytes = 0  # the most that its caches may come to
        self.timeout_s: float | None = None
        self.deadline_ns: int | None = None

    def set_timeout(self, timeout_s: float | None) -> None:
        """Give it so many seconds from its arrival on."""
        self.timeout_s = timeout_s
        if timeout_s is not None:
            self.deadline_ns = self.arrived_ns + round(timeout_s * 1e9)

    @property
    def doomed(self) -> bool:
        """Whether it is to be ended: cancelled, or out of time."""
        return self.cancelled or (
            self.deadline_ns is not None and time.perf_counter_ns() >= self.deadline_ns
        )

    def verdict(self) -> DeadlineError | None:
        """What a doomed request is ended with."""
        if self.cancelled:
            return None
        assert self.timeout_s is not None
        return DeadlineError(
            f"the request was not over within {self.timeout_s:g} s; ask for fewer tokens, or raise "
            "timeout_s or request_timeout_s",
            timeout_s=self.timeout_s,
        )

    @property
    def max_state_tokens(self) -> int:
        """Most tokens that its caches will hold."""
        return self.n_prompt

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are still to be run."""
        return self.n_run < self.n_prompt

    @property
    def blocked(self) -> bool:
        """Whether the request cannot take a result now."""
        return False

    def _logits_wanted(self, n_after: int) -> LogitsWanted:
        return "none"

    def _decode_ids(self) -> npt.NDArray[np.int64]:
        raise AssertionError("this request does not decode")

    def next_chunk(self, limit_tokens: int) -> Chunk:
        """What to run next: at most `limit_tokens` of the prompt, or the last token sampled."""
        assert self.state is not None
        if not self.prefilling:
            return Chunk(self.state, self._decode_ids(), "last")
        end = self.keep_at if self.n_run < self.keep_at else self.n_prompt
        n_after = min(self.n_run + limit_tokens, end)
        ids = self.prompt_ids[self.n_run : n_after]
        return Chunk(self.state, ids, self._logits_wanted(n_after))

    def describe(self) -> RequestInfo:
        """How far it is."""
        return RequestInfo(
            number=self.number,
            kind="score" if isinstance(self, ScoreRequest) else "generate",
            phase=self.phase.value,
            prompt_tokens=self.n_prompt,
            prompt_tokens_run=self.n_run,
            completion_tokens=len(self.output_ids) if isinstance(self, GenerateRequest) else 0,
            age_s=(time.perf_counter_ns() - self.arrived_ns) / 1e9,
            state_bytes=self.state.n_bytes if self.state is not None else 0,
        )

    def finish(self, error: BaseException | None = None) -> None:
        """The end: caches go, waiters wake. Called once, by the engine."""
        self.phase = Phase.ENDED
        self.kept = None
        self.state = None
        self.ended.set()


class GenerateRequest(Request):
    """Samples tokens after a prompt and feeds them to a stream.

    Args:
        prompt_ids: at least one token id.
        sampler: the request's own.
        feed: takes the tokens; says when it is full.
        stop_ids: tokens that end the answer.
        max_tokens: most tokens to sample, the context's end taken into account.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        sampler: Sampler,
        feed: EventFeed,
        stop_ids: frozenset[int],
        max_tokens: int,
    ) -> None:
        super().__init__(prompt_ids)
        self.sampler = sampler
        self.feed = feed
        self.stop_ids = stop_ids
        self.max_tokens = max_tokens
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.first_token_ns = 0
        self.last_token_ns = 0

    @property
    def max_state_tokens(self) -> int:
        """Prompt and answer; the last token is never run."""
        return self.n_prompt + self.max_tokens - 1

    @property
    def blocked(self) -> bool:
        """The consumer is behind: nothing is sampled until it takes a token."""
        return self.feed.full

    def _logits_wanted(self, n_after: int) -> LogitsWanted:
        return "last" if n_after == self.n_prompt else "none"

    def _decode_ids(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.output_ids[-1:], dtype=np.int64)

    def ids_run(self) -> npt.NDArray[np.int64]:
        """The tokens that made the state; the last one sampled is not among them."""
        if self.prefilling or not self.output_ids:
            return self.prompt_ids[: self.n_run]
        answer = np.asarray(self.output_ids[:-1], dtype=np.int64)
        return np.concatenate([self.prompt_ids, answer])

    def accept(self, sample: Sample) -> int | None:
        """Take a sampled token; returns it if it is to be run, None if it was the last."""
        self.last_token_ns = time.perf_counter_ns()
        self.first_token_ns = self.first_token_ns or self.last_token_ns
        self.output_ids.append(sample.token_id)
        self.finish_reason = self.feed.push(
            sample,
            is_stop=sample.token_id in self.stop_ids,
            is_last=len(self.output_ids) >= self.max_tokens,
        )
        return sample.token_id if self.finish_reason is None else None

    def finish(self, error: BaseException | None = None) -> None:
        """Also tells the stream; without an error and a reason the request was cancelled."""
        if self.phase is Phase.ENDED:
            return
        if error is None and self.finish_reason is None:
            self.finish_reason = FinishReason.CANCELLED
            self.feed.cancel()
        self.feed.end(error)
        super().finish(error)

    def usage(self) -> Usage:
        """Tokens and times so far."""
        first = self.first_token_ns
        return Usage(
            prompt_tokens=self.n_prompt,
            completion_tokens=len(self.output_ids),
            reused_tokens=self.n_reused,
            time_to_first_token_s=(first - self.arrived_ns) / 1e9 if first else None,
            prefill_s=(first - self.admitted_ns) / 1e9 if first else 0.0,
            decode_s=(self.last_token_ns - first) / 1e9 if first else 0.0,
        )


class ScoreRequest(Request):
    """Takes the logits of every position of a given text.

    Args:
        prompt_ids: at least two token ids.
        n_vocab: length of a row of logits.
        keep_logits: keep them all, `[N, V]` float32.
        progress: called on the loop's thread with tokens done and tokens in all.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        *,
        n_vocab: int,
        keep_logits: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(prompt_ids)
        self.logprobs = np.zeros(self.n_prompt - 1, dtype=np.float64)
        self.logits = np.empty((self.n_prompt, n_vocab), np.float32) if keep_logits else None
        self.progress = progress
        self.error: BaseException | None = None

    def _logits_wanted(self, n_after: int) -> LogitsWanted:
        return "all"

    def accept(self, first: int, logits: Tensor) -> None:
        """Take the logits `[n, V]` of positions `first..first + n - 1`. Blocks; any thread.

        Raises:
            DeviceError: logits that are not finite.
        """
        targets = torch.from_numpy(self.prompt_ids[first + 1 : first + 1 + len(logits)])
        for at in range(0, len(logits), _SCORE_ROWS):
            rows = logits[at : at + _SCORE_ROWS].to("cpu")
            if not bool(torch.isfinite(rows).all()):
                raise DeviceError(
                    "the model produced logits that are not finite numbers; "
                    "the model file may be damaged"
                )
            if self.logits is not None:
                self.logits[first + at : first + at + len(rows)] = rows.numpy()
            wanted = targets[at : at + _SCORE_ROWS]  # the very last row has no target
            n = len(wanted)
            if n:
                exact = torch.log_softmax(rows[:n].to(torch.float64), dim=1)
                picked = exact.gather(1, wanted[:, None])[:, 0]
                self.logprobs[first + at : first + at + n] = picked.numpy()

    def finish(self, error: BaseException | None = None) -> None:
        """Keeps the error for the one who waits."""
        if self.phase is not Phase.ENDED:
            self.error = error
            super().finish(error)
