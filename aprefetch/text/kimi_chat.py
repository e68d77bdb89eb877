"""The Kimi-K3 chat text, for files that carry no template.

Parts are written like elements: `<|open|>` name and attributes `<|sep|>`, body, `<|close|>` name
`<|sep|>`; only these and the end of a message are control tokens. A file's own template is always
preferred: the wording around tool declarations is ours, and an effort message is written only when
asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aprefetch.errors import InvalidRequestError

__all__ = ["EFFORTS", "MARKERS", "render_kimi_chat"]

_OPEN, _CLOSE, _SEP, _END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

MARKERS = (_OPEN, _CLOSE, _SEP, _END)
"""Tokens without which a vocabulary cannot write this chat text."""

EFFORTS = ("low", "high", "max")
"""Levels of `thinking_effort`."""


def render_kimi_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    effort: str | None = None,
) -> str:
    """The prompt text of checked `messages`.

    Args:
        thinking: the answer begins with reasoning, and earlier reasoning is kept.
        effort: one of `EFFORTS`; without thinking it has no effect.

    Raises:
        InvalidRequestError: a call, a tool or reasoning that is not what it should be.
    """
    parts = []
    if tools:
        parts.append(_message(_declare(tools), role="system", type="tool-declare"))
    if thinking and effort is not None:
        parts.append(_message(effort, role="system", type="thinking-effort"))
    at = 0
    while at < len(messages):
        message = messages[at]
        if message["role"] == "tool":
            run = _run_of_results(messages, at)
            parts += _results(run, _calls_before(messages, at))
            at += len(run)
            continue
        named = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
        body = message.get("content") or ""
        if message["role"] == "assistant":
            body = _answer(message, thinking)
        parts.append(_message(body, role=message["role"], **named))
        at += 1
    if add_generation_prompt:
        parts.append(
            _open("message", role="assistant") + _open("think" if thinking else "response")
        )
    return "".join(parts)


def _open(name: str, /, **attributes: Any) -> str:
    shown = "".join(f' {key}="{_escaped(value)}"' for key, value in attributes.items())
    return f"{_OPEN}{name}{shown}{_SEP}"


def _escaped(value: Any) -> str:
    return str(value).replace("&", "&amp;").replace('"', "&quot;")


def _element(name: str, body: str, /, **attributes: Any) -> str:
    return f"{_open(name, **attributes)}{body}{_CLOSE}{name}{_SEP}"


def _message(body: str, /, **attributes: Any) -> str:
    return _element("message", body, **attributes) + _END


def _answer(message: Mapping[str, Any], thinking: bool) -> str:
    parts = []
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if not isinstance(reasoning, str):
            raise InvalidRequestError("reasoning_content must be a string", param="messages")
        parts.append(_element("think", reasoning))
    parts.append(_element("response", message.get("content") or ""))
    calls = message.get("tool_calls")
    if calls:
        written = "".join(_call(call, index) for index, call in enumerate(calls, start=1))
        parts.append(_element("tools", written))
    return "".join(parts)


def _call(call: Any, index: int) -> str:
    function = _function(call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        body = _element("json", arguments or "{}", type="object")
    elif isinstance(arguments, Mapping):
        body = "".join(
            _element("argument", _value(value), key=key, type=_type_name(value))
            for key, value in arguments.items()
        )
    else:
        raise InvalidRequestError(
            "a tool call's arguments must be an object or the text of one", param="messages"
        )
    return _element("call", body, tool=function["name"], index=index)


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError("a tool call needs a function name", param="messages")
    return function


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _run_of_results(
    messages: Sequence[Mapping[str, Any]], start: int
) -> Sequence[Mapping[str, Any]]:
    stop = start
    while stop < len(messages) and messages[stop]["role"] == "tool":
        stop += 1
    return messages[start:stop]


def _calls_before(messages: Sequence[Mapping[str, Any]], at: int) -> dict[Any, tuple[int, str]]:
    """Position and name of each call of the message before, by its id."""
    calls = messages[at - 1].get("tool_calls") if at else None
    return {
        call.get("id"): (position, str(_function(call)["name"]))
        for position, call in enumerate(calls or ())
        if isinstance(call, Mapping) and call.get("id") is not None
    }


def _results(
    run: Sequence[Mapping[str, Any]], calls: Mapping[Any, tuple[int, str]]
) -> Iterator[str]:
    """Tool results, in the order of the calls they answer if all of these are known."""
    ids = [message.get("tool_call_id") for message in run]
    if all(i in calls for i in ids):
        run = sorted(run, key=lambda message: calls[message["tool_call_id"]][0])
    for index, message in enumerate(run, start=1):
        known = calls.get(message.get("tool_call_id"))
        name = known[1] if known else message.get("name") or ""
        yield _message(message.get("content") or "", role="tool", tool=name, index=index)


def _declare(tools: Sequence[Mapping[str, Any]]) -> str:
    try:
        listing = json.dumps(list(tools), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"tools must be JSON objects: {error}", param="tools") from None
    return f"# Tools\n\nThese functions may be called:\n\n```json\n{listing}\n```"
