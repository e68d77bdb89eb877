"""A small model with all three kinds of attention, and a prompt of 33,000 tokens through it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from make_tiny_gguf import write_tiny_deepseek4

from aprefetch import Runtime

N_PROMPT = 33_000
N_ANSWER = 16
HEAD_DIM = INDEX_DIM = 32
CONTEXT = 1 << 16
SEED = 11  # its answer is no near tie
ROPE_DIMS = 16
N_VOCAB = 300
INDEX_SCORES_BYTES = N_PROMPT * (N_PROMPT // 4) * 4  # of all tokens at once: what must not happen

_GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 2}


def write_model(path: Path) -> Path:
    """Window only, ratio 4 with indexer, ratio 128; 0.3 MB."""
    write_tiny_deepseek4(
        path, n_layers=3, ratios=(0, 4, 128), hidden=64, width=32, n_vocab=N_VOCAB, n_experts=8,
        n_used=2, hash_layers=1, n_heads=2, head_dim=HEAD_DIM, rope_dims=ROPE_DIMS, q_rank=32,
        out_groups=1, out_rank=32, window=16, indexer_heads=2, indexer_dim=INDEX_DIM,
        indexer_top_k=8, context=CONTEXT, seed=SEED,
    )  # fmt: skip
    return path


def prompt() -> list[int]:
    """The same ids each time."""
    rng = random.Random(1)
    return [rng.randrange(8, N_VOCAB) for _ in range(N_PROMPT)]


@dataclass
class Answer:
    """Greedy tokens after the prompt, and what the caches held on the way."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    least_gap: float = float("inf")  # between the best and the second token, over the answer
    states_bytes: int = 0


async def answer(rt: Runtime) -> Answer:
    """`N_ANSWER` tokens after the prompt."""
    got = Answer()
    async with rt.stream(prompt(), max_tokens=N_ANSWER, **_GREEDY) as stream:
        async for event in stream:
            got.token_ids.append(event.token_id)
            got.logprobs.append(event.logprob)
            first, second = (value for _, value in event.top_logprobs[:2])
            got.least_gap = min(got.least_gap, first - second)
            got.states_bytes = max(got.states_bytes, rt.stats().memory["states_bytes"])
    return got


@contextlib.asynccontextmanager
async def opened(path: Path, device: str, chunk_tokens: int, **options: Any) -> AsyncIterator[Any]:
    """A runtime whose prompts are cut into chunks of just this size."""
    sizes = {"chunk_tokens": chunk_tokens, "token_gap_s": None}
    async with Runtime.open(path, device=device, **sizes, **options) as rt:
        yield rt


def check_states(rt: Runtime, n_bytes: int) -> None:
    """Caches hold every compressed row, and not more than is laid aside for a request.

    Stores that grow double; a long chunk blows those that slide up for a while.
    """
    info = rt.model_info
    n_tokens = N_PROMPT + N_ANSWER
    assert info.state_bytes_per_token * N_PROMPT <= n_bytes
    chunks = rt.config.chunk_tokens * info.state_bytes_per_chunk_token
    assert n_bytes <= info.state_bytes_fixed + 2 * info.state_bytes_per_token * n_tokens + chunks
    assert rt.stats().memory["states_bytes"] == 0  # given back


async def alike(rt: Runtime, whole: Answer, n: int) -> None:
    """`n` such requests beside each other get the same bits."""
    for other in await asyncio.gather(*(answer(rt) for _ in range(n))):
        assert (other.token_ids, other.logprobs) == (whole.token_ids, whole.logprobs)


async def scored(rt: Runtime, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of prompt and answer, and the logits that the answer comes from."""
    result = await rt.score([*prompt(), *token_ids], logits=True)
    assert result.logits is not None
    return np.asarray(result.logprobs), result.logits[N_PROMPT - 1 : -1].copy()
