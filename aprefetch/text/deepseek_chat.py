"""The DeepSeek-V4 chat text, for files that carry no template.

BOS stands once at the start and the system text directly after it. A user turn joins consecutive
user and tool pieces under one marker. An assistant turn ends its reasoning with `</think>` even
when there is none, and ends with EOS. The wording around tool declarations is ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aprefetch.errors import InvalidRequestError

__all__ = ["MARKERS", "render_deepseek_chat"]

_USER = "<｜User｜>"
_ASSISTANT = "<｜Assistant｜>"
_THINK, _END_THINK = "<think>", "</think>"
_DSML = "｜DSML｜"

MARKERS = (_USER, _ASSISTANT, _THINK, _END_THINK)
"""Tokens without which a vocabulary cannot write this chat text."""


def render_deepseek_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = False,
    keep_reasoning: bool = False,
) -> str:
    """The prompt text of checked `messages`.

    Args:
        thinking: the answer begins with reasoning; otherwise reasoning is closed at once, and that
            of earlier turns is left out.
        keep_reasoning: in thinking mode, keep the reasoning of turns before the last user message
            too. With tools it is always kept.
    """
    in_play = bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    parts = [bos]
    pending_tools = _declare(tools) if tools else ""
    in_user_turn = False
    for i, message in enumerate(messages):
        role, text = message["role"], message.get("content") or ""
        if role in ("system", "developer"):
            in_user_turn = False
            parts.append(text)
            if pending_tools:
                parts.append(("\n\n" if text else "") + pending_tools)
                pending_tools = ""
            continue
        if pending_tools:
            parts.append(pending_tools)
            pending_tools = ""
        if role in ("user", "tool"):
            parts.append("\n\n" if in_user_turn else _USER)
            parts.append(f"<tool_result>{text}</tool_result>" if role == "tool" else text)
            in_user_turn = True
        else:
            in_user_turn = False
            kept = thinking and (keep_reasoning or in_play or i > last_user)
            parts.append(_ASSISTANT + _reasoning(message, kept) + text)
            parts.append(_calls(message.get("tool_calls"), bool(text)) + eos)
    if add_generation_prompt:
        parts.append(_ASSISTANT + (_THINK if thinking else _END_THINK))
    return "".join(parts)


def _reasoning(message: Mapping[str, Any], kept: bool) -> str:
    text = message.get("reasoning_content") or message.get("reasoning")
    if not (kept and text):
        return _END_THINK
    if not isinstance(text, str):
        raise InvalidRequestError("reasoning_content must be a string", param="messages")
    return _THINK + text + _END_THINK


def _calls(calls: Any, after_text: bool) -> str:
    if not calls:
        return ""
    lines = ["\n\n" if after_text else "", f"<{_DSML}tool_calls>\n"]
    for call in calls:
        name, arguments = _name_and_arguments(call)
        lines.append(f'<{_DSML}invoke name="{name}">\n')
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            flag = "true" if is_text else "false"
            lines.append(
                f'<{_DSML}parameter name="{key}" string="{flag}">{shown}</{_DSML}parameter>\n'
            )
        lines.append(f"</{_DSML}invoke>\n")
    lines.append(f"</{_DSML}tool_calls>")
    return "".join(lines)


def _name_and_arguments(call: Any) -> tuple[str, Mapping[str, Any]]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise InvalidRequestError(
            "a tool call needs a function name, and arguments that are a JSON object",
            param="messages",
        )
    return name, arguments


def _declare(tools: Sequence[Mapping[str, Any]]) -> str:
    try:
        lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(f"tools must be JSON objects: {error}", param="tools") from None
    listing = "\n".join(lines)
    return (
        "## Tools\n\nThese functions may be called, each given as JSON with its parameters:\n\n"
        f"{listing}\n\nTo call some, write one block of this form; string is true for text as it"
        " is and false for a JSON value:\n\n"
        f'<{_DSML}tool_calls>\n<{_DSML}invoke name="FUNCTION">\n'
        f'<{_DSML}parameter name="PARAMETER" string="true|false">VALUE</{_DSML}parameter>\n'
        f"</{_DSML}invoke>\n</{_DSML}tool_calls>"
    )
