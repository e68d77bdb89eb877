"""Requests of OpenAI's API, turned into ours. Pure: no I/O, no model.

Every field is either understood, known to change nothing (`_WITHOUT_EFFECT`), or refused by name:
a field that would change the answer is never ignored. `null` counts as not given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from aprefetch import InvalidRequestError, SamplingParams

__all__ = ["Call", "Kind", "parse_chat", "parse_completion", "parse_json"]

Kind = Literal["chat", "completion"]

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
_COMPLETION_MAX_TOKENS = 16  # what the API documents for the older endpoint

_SAMPLING = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias",
    "top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids",
)  # fmt: skip
_COMMON = {"model", "n", "stream", "stream_options", "max_tokens", "timeout_s", *_SAMPLING}
_CHAT = _COMMON | {
    "messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "reasoning_effort", "response_format", "chat_template_kwargs",
    "modalities",
}  # fmt: skip
_COMPLETION = _COMMON | {"prompt", "logprobs", "echo", "best_of", "suffix"}
# Accounting, hints about speed, and wishes about storage that we fulfil by not storing.
_WITHOUT_EFFECT = {
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "service_tier",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. A chat has one prompt; `n` answers are wanted for each prompt."""

    kind: Kind
    prompts: tuple[Any, ...]
    params: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    with_tools: bool = False
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None

    @property
    def n_choices(self) -> int:
        """Answers in all."""
        return self.n * len(self.prompts)

    def params_of(self, answer: int) -> SamplingParams:
        """Parameters of a prompt's answer number `answer`: with a seed, each draws its own."""
        seed = self.params.seed
        if seed is None or not answer:
            return self.params
        seed += answer
        return SamplingParams.build(self.params, seed=seed if seed < 2**64 else seed - 2**64)


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        InvalidRequestError: it is none, or holds text that is not Unicode.
    """
    try:
        value = json.loads(body, parse_constant=_no_constant)
        if b"\\u" in body:  # an escape may have written half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError as error:  # UnicodeError is one
        raise InvalidRequestError(f"the body is not valid JSON: {error}"[:300]) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


class _Fields:
    """Typed access to a body; `null` counts as not given."""

    def __init__(self, body: Mapping[str, Any], known: set[str]) -> None:
        unknown = [name for name in body if name not in known | _WITHOUT_EFFECT and name != "store"]
        if unknown:
            name = unknown[0]
            near = get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError(f"{name[:80]!r} is not supported{hint}", param=name[:80])
        self._body = {name: value for name, value in body.items() if value is not None}
        if self.flag("store"):
            raise _refused("store", "nothing is stored here; leave it out or false")

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name, default)
        if not isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be true or false", param=name)
        return value

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self._body.get(name)
        if value is None:
            return None
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        legal = isinstance(value, int) and not isinstance(value, bool) and value >= low
        if not legal or (high is not None and value > high):
            raise InvalidRequestError(f"{name} must be a whole number {wanted}", param=name)
        return int(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._body.get(name, {})
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{name} must be an object", param=name)
        return value


def _refused(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {why}", param=name)


def _common(fields: _Fields, max_choices: int) -> dict[str, Any]:
    options = fields.mapping("stream_options")
    streams = fields.flag("stream")
    if options and not streams:
        raise _refused("stream_options", "only with stream=true")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or not isinstance(value, bool):
            raise _refused("stream_options", f"{name[:80]!r} is not supported or not true or false")
    stop = fields.get("stop")
    if isinstance(stop, list) and len(stop) > MAX_STOP_STRINGS:
        raise _refused("stop", f"at most {MAX_STOP_STRINGS} strings")
    timeout_s = fields.get("timeout_s")
    if timeout_s is not None and (
        not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or timeout_s <= 0
    ):
        raise _refused("timeout_s", "a number of seconds above 0")
    return {
        "n": fields.whole("n", 1, max_choices) or 1,
        "stream": streams,
        "include_usage": options.get("include_usage", False),
        "timeout_s": None if timeout_s is None else float(timeout_s),
    }


def _params(fields: _Fields, max_tokens: int, logprobs: int | None) -> SamplingParams:
    given = {name: value for name in _SAMPLING if (value := fields.get(name)) is not None}
    return SamplingParams.build(max_tokens=max_tokens, logprobs=logprobs, **given)


def parse_chat(body: Mapping[str, Any], *, context_tokens: int, max_choices: int) -> Call:
    """A body of `/v1/chat/completions`.

    Args:
        context_tokens: stands in for `max_tokens` where none is given.

    Raises:
        InvalidRequestError: `.param` names the field.
    """
    fields = _Fields(body, _CHAT)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages must be a list that is not empty", param="messages")
    if not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequestError("every message must be an object", param="messages")
    _check_format(fields)
    wants = fields.flag("logprobs")
    n_top = fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if n_top is not None and not wants:
        raise _refused("top_logprobs", "only with logprobs=true")
    old, new = fields.whole("max_tokens", 1), fields.whole("max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        raise _refused("max_tokens", "it is another name of max_completion_tokens; give one")
    options = _chat_options(fields)
    return Call(
        kind="chat",
        prompts=(messages,),
        params=_params(fields, new or old or context_tokens, (n_top or 0) if wants else None),
        logprobs=wants,
        with_tools="tools" in options,
        chat_options=options,
        **_common(fields, max_choices),
    )


def _check_format(fields: _Fields) -> None:
    form = fields.mapping("response_format")
    if form and form.get("type") != "text":
        raise _refused("response_format", "only text can be promised")
    if fields.get("modalities") not in (None, ["text"]):
        raise _refused("modalities", "only text is written")


def _chat_options(fields: _Fields) -> dict[str, Any]:
    options = dict(fields.mapping("chat_template_kwargs"))
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in options:
            raise _refused("chat_template_kwargs", f"{name} cannot be set here")
    effort = fields.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise _refused("reasoning_effort", "must be a string, such as 'none' or 'high'")
        options.setdefault("thinking", effort != "none")
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _refused("tool_choice", "only 'auto' and 'none'; a call cannot be forced")
    tools = fields.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(_is_function(tool) for tool in tools)
    ):
        raise _refused("tools", "a list of objects of type 'function' with a name")
    if not fields.flag("parallel_tool_calls", True):
        raise _refused("parallel_tool_calls", "the number of calls cannot be limited")
    if tools and choice != "none":
        options["tools"] = tools
    return options


def _is_function(tool: Any) -> bool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def parse_completion(body: Mapping[str, Any], *, max_choices: int) -> Call:
    """A body of `/v1/completions`.

    Raises:
        InvalidRequestError: `.param` names the field.
    """
    fields = _Fields(body, _COMPLETION)
    prompts = _prompts(fields.get("prompt"))
    for name in ("suffix", "echo"):
        if fields.get(name) not in (None, False, ""):
            raise _refused(name, "is not supported")
    common = _common(fields, max_choices)
    best_of = fields.whole("best_of", 1)
    if best_of is not None and best_of != common["n"]:
        raise _refused("best_of", "is not supported beyond n")
    if len(prompts) * common["n"] > max_choices:
        raise _refused("prompt", f"at most {max_choices} answers in one request")
    logprobs = fields.whole("logprobs", 0, MAX_TOP_LOGPROBS)
    return Call(
        kind="completion",
        prompts=prompts,
        params=_params(fields, fields.whole("max_tokens", 1) or _COMPLETION_MAX_TOKENS, logprobs),
        logprobs=logprobs is not None,
        **common,
    )


def _prompts(prompt: Any) -> tuple[Any, ...]:
    """Text, ids, a list of texts or a list of lists of ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, Sequence) and prompt:
        if all(type(i) is int for i in prompt):
            return (prompt,)
        if all(isinstance(p, str) for p in prompt):
            return tuple(prompt)
        if all(isinstance(p, list) and p and all(type(i) is int for i in p) for p in prompt):
            return tuple(prompt)
    raise InvalidRequestError(
        "prompt must be text, a list of token ids, or a list of one of these", param="prompt"
    )
