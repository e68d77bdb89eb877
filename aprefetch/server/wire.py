"""What goes out: objects of OpenAI's API. Pure functions of tokens and counts."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from aprefetch import TokenEvent
from aprefetch.server.schema import Kind

__all__ = ["Envelope", "TokenNames", "chat_logprobs", "completion_logprobs", "tool_call", "usage"]

_LOWEST = -9999.0  # JSON has no infinity


class TokenNames(Protocol):
    """The part of a tokenizer that is needed here."""

    def token_bytes(self, token_id: int) -> bytes: ...


class Envelope:
    """What all chunks, or the one whole answer, of a request have in common."""

    def __init__(self, kind: Kind, model: str, created_s: int) -> None:
        self._kind = kind
        prefix = "chatcmpl-" if kind == "chat" else "cmpl-"
        self._common = {"id": prefix + uuid.uuid4().hex, "created": created_s, "model": model}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A whole answer."""
        name = "chat.completion" if self._kind == "chat" else "text_completion"
        return {**self._common, "object": name, "choices": choices, "usage": usage}

    def chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, with_usage: bool
    ) -> dict[str, Any]:
        """A piece of an answer; `usage` is there, if asked for, but null before the last piece."""
        name = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        out = {**self._common, "object": name, "choices": choices}
        if with_usage:
            out["usage"] = usage
        return out


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Counts of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def tool_call(index: int, name: str, arguments: str) -> dict[str, Any]:
    """A call of a function, as in a delta (with its index)."""
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    raw = names.token_bytes(token_id)
    text = raw.decode("utf-8", "replace")
    return {"token": text, "logprob": _number(logprob), "bytes": list(raw)}


def chat_logprobs(names: TokenNames, event: TokenEvent) -> list[dict[str, Any]]:
    """The entry of one token; none for the end of a cancelled answer."""
    if event.logprob is None:
        return []
    top = [_entry(names, i, value) for i, value in event.top_logprobs or ()]
    return [{**_entry(names, event.token_id, event.logprob), "top_logprobs": top}]


def completion_logprobs(
    names: TokenNames, events: Sequence[TokenEvent], offset: int
) -> dict[str, Any]:
    """Entries of the older endpoint. `offset`: characters of the answer before these events."""
    out: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for event in events:
        if event.logprob is None:
            continue
        entry = _entry(names, event.token_id, event.logprob)
        out["tokens"].append(entry["token"])
        out["token_logprobs"].append(entry["logprob"])
        top: dict[str, float] = {}
        for i, value in event.top_logprobs or ():
            top.setdefault(_entry(names, i, value)["token"], _number(value))
        out["top_logprobs"].append(top)
        out["text_offset"].append(offset)
        offset += len(event.text)
    return out
