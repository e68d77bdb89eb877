"""From chat messages to prompt text.

The file's own template wins; else one that lies beside the tokenizer.json in use; else the built-in
encoder of the architecture. A model with none of them still runs on plain text: only `render`
fails. Nothing is compiled before the first `render`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from aprefetch.errors import InvalidRequestError
from aprefetch.text import deepseek_chat, kimi_chat
from aprefetch.text.template_sandbox import TemplateProblem, compile_template, render_template
from aprefetch.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["BUILTIN_ARCHITECTURES", "ChatTemplate", "check_messages", "load_chat_template"]

_KEY = "tokenizer.chat_template"
_RESERVED = frozenset({"messages", "bos_token", "eos_token"})

Messages = list[dict[str, Any]]


class ChatTemplate(Protocol):
    """Turns messages into the text of a prompt. `origin`: "file", "builtin:<name>" or "none"."""

    @property
    def origin(self) -> str: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The prompt text, to be encoded by `Tokenizer.encode_prompt`.

        Args:
            messages: dicts with `role` and `content` (text, or a list of text parts).
            options: further variables of the template, for instance `thinking=True`.

        Raises:
            InvalidRequestError: bad messages (param "messages") or the template gave up.
        """
        ...


def load_chat_template(
    metadata: Mapping[str, Any], architecture: str, tokenizer: Tokenizer
) -> ChatTemplate:
    """The template to use; never fails, since a model without one can still continue text."""
    source = metadata.get(_KEY) or tokenizer.chat_template
    if source:
        return _FileTemplate(source, tokenizer)
    builtin = _BUILTIN.get(architecture)
    if builtin is None:
        return _NoTemplate(f"the model has no chat template, and {architecture!r} no built-in one")
    markers, make = builtin
    missing = [m for m in markers if tokenizer.token_id(m) is None]
    if missing:
        return _NoTemplate(
            f"the model has no chat template, and the built-in one for {architecture!r} needs"
            f" tokens that the vocabulary lacks: {', '.join(missing)}"
        )
    return make(tokenizer)


def check_messages(messages: Any) -> Messages:
    """A checked copy: content is text (lists of text parts are joined), or None with tool calls.

    Raises:
        InvalidRequestError: param "messages".
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise _bad("messages must be a non-empty list of dicts with 'role' and 'content'")
    checked: Messages = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(f"messages[{i}] must be a dict, not {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _bad(f"messages[{i}] needs a 'role' (a string such as 'user')")
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, (list, tuple)):
            raise _bad(f"messages[{i}]['tool_calls'] must be a list")
        content = message.get("content")
        if content is None and not calls:
            raise _bad(f"messages[{i}] needs a 'content' (a string)")
        checked.append({**message, "content": _text_of(content, i)})
    return checked


def _text_of(content: Any, i: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _bad(f"messages[{i}]['content'] must be a string or a list of text parts")
    texts: list[str] = []
    for part in content:
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        )
        if not isinstance(text, str):
            raise _bad(f"messages[{i}]['content'] has a part that is not text; only text is read")
        texts.append(text)
    return "".join(texts)


def _check_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(t, Mapping) for t in tools):
        raise InvalidRequestError("tools must be a list of dicts", param="tools")
    return list(tools) or None


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")


class _FileTemplate:
    """A Jinja template that came with the model."""

    origin = "file"

    def __init__(self, source: Any, tokenizer: Tokenizer) -> None:
        self._source = source
        self._bos = _spelling(tokenizer, tokenizer.bos_id)
        self._eos = _spelling(tokenizer, tokenizer.eos_id)

    @cached_property
    def _template(self) -> Template:
        if not isinstance(self._source, str):
            raise TemplateProblem(f"{_KEY} is no string")
        return compile_template(self._source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        reserved = sorted(_RESERVED & set(options))
        if reserved:
            raise InvalidRequestError(
                f"{', '.join(reserved)} cannot be given as template options", param=reserved[0]
            )
        variables = {
            **options,
            "messages": check_messages(messages),
            "tools": _check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        try:
            return render_template(self._template, variables)
        except TemplateProblem as error:
            raise _bad(f"the model's chat template failed: {error}") from error


class _DeepseekTemplate:
    """The built-in encoder for DeepSeek-V4."""

    origin = "builtin:deepseek4"
    _roles = frozenset({"system", "developer", "user", "assistant", "tool"})
    _options = frozenset({"thinking", "enable_thinking", "keep_reasoning"})

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bos = _spelling(tokenizer, tokenizer.bos_id)
        self._eos = _spelling(tokenizer, tokenizer.eos_id)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        for name, value in options.items():
            if name not in self._options:
                known = ", ".join(sorted(self._options))
                raise InvalidRequestError(
                    f"unknown chat option {name!r}; this model's are {known}", param=name
                )
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be True or False", param=name)
        checked = check_messages(messages)
        _check_roles(checked, self._roles)
        return deepseek_chat.render_deepseek_chat(
            checked,
            bos=self._bos,
            eos=self._eos,
            add_generation_prompt=add_generation_prompt,
            tools=_check_tools(tools),
            thinking=options.get("thinking", options.get("enable_thinking", False)),
            keep_reasoning=options.get("keep_reasoning", False),
        )


class _KimiTemplate:
    """The built-in encoder for Kimi-K3."""

    origin = "builtin:kimi-k3"
    _roles = frozenset({"system", "user", "assistant", "tool"})

    def __init__(self, tokenizer: Tokenizer) -> None:
        pass  # BOS is not part of this chat text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        enabled = options.pop("enable_thinking", True)
        thinking = options.pop("thinking", enabled)
        effort = options.pop("thinking_effort", None)
        for name in options:
            raise InvalidRequestError(
                f"unknown chat option {name!r}; this model's are enable_thinking, thinking,"
                " thinking_effort",
                param=name,
            )
        if not isinstance(thinking, bool):
            raise InvalidRequestError("thinking must be True or False", param="thinking")
        if effort is not None and effort not in kimi_chat.EFFORTS:
            raise InvalidRequestError(
                f"thinking_effort must be one of {', '.join(kimi_chat.EFFORTS)}",
                param="thinking_effort",
            )
        checked = check_messages(messages)
        _check_roles(checked, self._roles)
        return kimi_chat.render_kimi_chat(
            checked,
            add_generation_prompt=add_generation_prompt,
            tools=_check_tools(tools),
            thinking=thinking,
            effort=effort,
        )


def _check_roles(messages: Messages, known: frozenset[str]) -> None:
    for i, message in enumerate(messages):
        if message["role"] not in known:
            raise _bad(
                f"messages[{i}] has the unknown role {message['role']!r};"
                f" known: {', '.join(sorted(known))}"
            )


class _NoTemplate:
    """Stands where there is no template, and says so when asked."""

    origin = "none"

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        raise _bad(f"{self._reason}; give the prompt as text or token ids")


def _spelling(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)


_BUILTIN: dict[str, tuple[tuple[str, ...], Callable[[Tokenizer], ChatTemplate]]] = {
    "deepseek4": (deepseek_chat.MARKERS, _DeepseekTemplate),
    "kimi-k3": (kimi_chat.MARKERS, _KimiTemplate),
}

BUILTIN_ARCHITECTURES = tuple(_BUILTIN)
"""Architectures whose chat text is known here."""
