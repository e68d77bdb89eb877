"""Splits an answer's text into reasoning, content and tool calls, piece by piece.

Chat models write their parts between markers. Which markers a model uses is known from its
vocabulary; in which part an answer begins, from the end of its prompt. Two notations are known: the
DSML notation (`<think>`, `</think>`, `<｜DSML｜tool_calls>`) and the XTML notation (`<|open|>`,
`<|close|>`, `<|sep|>`). Elsewhere all text is content. A parser belongs to one answer. Text that
looks like a call but cannot be read is given out as content, never dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from aprefetch.text.tokenizer import Tokenizer

__all__ = ["AnswerFormat", "AnswerParser", "Part", "ToolCall", "answer_format"]

PartKind = Literal["reasoning", "content", "call"]

_THINK, _END_THINK = "<think>", "</think>"
_DSML = "｜DSML｜"
_OPEN, _CLOSE, _SEP, _END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


class ToolCall(NamedTuple):
    """A function to be called. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class Part(NamedTuple):
    """A piece of an answer: text, or one whole call."""

    kind: PartKind
    text: str
    call: ToolCall | None = None


class AnswerParser(Protocol):
    """Text in, parts out; `flush` once at the end gives what was held back."""

    def push(self, text: str) -> list[Part]: ...
    def flush(self) -> list[Part]: ...


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model marks the parts of its answers.

    `marker_ids` are the control tokens that a parser must see; they are left in an answer's text
    only when asked for (`Runtime.stream(keep_special=...)`).
    """

    notation: Literal["plain", "dsml", "xtml"]
    marker_ids: frozenset[int] = frozenset()

    def begins_with_reasoning(self, prompt: str) -> bool:
        """Whether the answer to `prompt` begins in the reasoning part."""
        if self.notation == "xtml":
            return prompt.endswith(f"{_OPEN}think{_SEP}")
        return self.notation == "dsml" and prompt.rstrip().endswith(_THINK)

    def parser(self, prompt: str, *, with_calls: bool) -> AnswerParser:
        """A parser for the answer to `prompt`.

        Args:
            prompt: the text that was given to the model; its end says which part comes first.
            with_calls: whether calls are looked for; without tools such text is content.
        """
        if self.notation == "dsml":
            return _DsmlParser(self.begins_with_reasoning(prompt), with_calls)
        if self.notation == "xtml":
            return _XtmlParser(prompt, with_calls)
        return _PlainParser()


def answer_format(tokenizer: Tokenizer) -> AnswerFormat:
    """The notation that the vocabulary speaks of."""
    xtml = [tokenizer.token_id(marker) for marker in (_OPEN, _CLOSE, _SEP)]
    if None not in xtml:
        ids = {*xtml, tokenizer.token_id(_END_OF_MESSAGE)}
        return AnswerFormat("xtml", frozenset(i for i in ids if i is not None))
    think = tokenizer.token_id(_THINK), tokenizer.token_id(_END_THINK)
    if None not in think:
        ids = {*think, tokenizer.token_id(_DSML)}
        return AnswerFormat("dsml", frozenset(i for i in ids if i is not None))
    return AnswerFormat("plain")


class _PlainParser:
    def push(self, text: str) -> list[Part]:
        return [Part("content", text)] if text else []

    def flush(self) -> list[Part]:
        return []


def _split_at(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first marker begins, and which; without one: where a marker could begin, ""."""
    found = min(((at, m) for m in markers if (at := text.find(m)) >= 0), default=None)
    if found is not None:
        return found
    longest = max(map(len, markers), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        tail = text[at:]
        if any(marker.startswith(tail) for marker in markers):
            return at, ""
    return len(text), ""


class _DsmlParser:
    """reasoning `</think>` content `<｜DSML｜tool_calls>` calls `</｜DSML｜tool_calls>`."""

    _begin = f"<{_DSML}tool_calls>"
    _end = f"</{_DSML}tool_calls>"
    _invoke = re.compile(rf'<{_DSML}invoke name="([^"<>]+)">(.*?)</{_DSML}invoke>\s*', re.DOTALL)
    _parameter = re.compile(
        rf'\s*<{_DSML}parameter name="([^"<>]+)" string="(true|false)">(.*?)</{_DSML}parameter>\s*',
        re.DOTALL,
    )

    def __init__(self, thinking: bool, with_calls: bool) -> None:
        self._state: PartKind = "reasoning" if thinking else "content"
        self._with_calls = with_calls
        self._held = ""
        self._at_start = not thinking

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held and self._advance(parts):
            pass
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Take one thing off the held text; false when more is needed."""
        if self._state == "call":
            end = self._held.find(self._end)
            if end < 0:
                return False
            block, self._held = self._held[:end], self._held[end + len(self._end) :]
            parts += self._calls(block)
            self._state = "content"
            return True
        markers = [_END_THINK] if self._state == "reasoning" else []
        if self._state == "content":
            # The break between text and calls belongs to neither.
            markers = ["\n\n" + self._begin, self._begin] if self._with_calls else []
            if self._at_start:
                markers.append(_THINK)
        at, marker = _split_at(self._held, markers)
        if marker == _THINK and self._held[:at].strip():
            at, marker = at + len(_THINK), ""  # in the midst of content it is just text
        before, self._held = self._held[:at], self._held[at + len(marker) :]
        if before and marker != _THINK:
            parts.append(Part(self._state, before))
        if before.strip():
            self._at_start = False
        if not marker:
            return at > 0
        self._at_start = False
        following: dict[str, PartKind] = {_THINK: "reasoning", _END_THINK: "content"}
        self._state = following.get(marker, "call")
        return True

    def _calls(self, block: str) -> list[Part]:
        calls, at = [], len(block) - len(block.lstrip())
        while at < len(block):
            match = self._invoke.match(block, at)
            arguments = self._arguments(match[2]) if match else None
            if match is None or arguments is None:
                return [Part("content", self._begin + block + self._end)]
            calls.append(Part("call", "", ToolCall(match[1], arguments)))
            at = match.end()
        return calls or [Part("content", self._begin + block + self._end)]

    def _arguments(self, body: str) -> str | None:
        values: dict[str, Any] = {}
        at = 0
        while at < len(body) and body[at:].strip():
            match = self._parameter.match(body, at)
            if match is None:
                return None
            name, is_text, value = match.groups()
            if is_text == "true":
                values[name] = value
            else:
                try:
                    values[name] = json.loads(value)
                except ValueError:
                    return None
            at = match.end()
        return json.dumps(values, ensure_ascii=False)

    def flush(self) -> list[Part]:
        text, self._held = self._held, ""
        if self._state == "call":
            return [Part("content", self._begin + text)]
        return [Part(self._state, text)] if text else []


class _XtmlParser:
    """Nested tags; text belongs to the innermost of think, response, argument and json."""

    _attribute = re.compile(r' ([\w-]+)="([^"]*)"')

    def __init__(self, prompt: str, with_calls: bool) -> None:
        thinking = prompt.endswith(f"{_OPEN}think{_SEP}")
        inside = thinking or prompt.endswith(f"{_OPEN}response{_SEP}")
        self._tags: list[str] = [("think" if thinking else "response")] if inside else []
        self._with_calls = with_calls
        self._held = ""
        self._raw = ""  # the calls as written, in case they cannot be read
        self._name = ""
        self._values: dict[str, Any] = {}
        self._argument: tuple[str, str] = ("", "")
        self._text = ""
        self._broken = False

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        for piece in self._pieces():
            self._take(piece, parts)
        return parts

    def _pieces(self) -> Iterator[str]:
        """Whole tags and the text between them."""
        while self._held:
            at, marker = _split_at(self._held, (_OPEN, _CLOSE, _END_OF_MESSAGE))
            if at:
                piece, self._held = self._held[:at], self._held[at:]
                yield piece
                continue
            if marker == _END_OF_MESSAGE:
                end = len(marker)
            elif marker and (end := self._held.find(_SEP)) >= 0:
                end += len(_SEP)
            else:
                return  # the tag is not complete
            piece, self._held = self._held[:end], self._held[end:]
            yield piece

    def _take(self, piece: str, parts: list[Part]) -> None:
        if piece.startswith(_OPEN) and piece.endswith(_SEP):
            self._enter(piece[len(_OPEN) : -len(_SEP)])
        elif piece.startswith(_CLOSE) and piece.endswith(_SEP):
            parts += self._leave(piece[len(_CLOSE) : -len(_SEP)])
        elif piece != _END_OF_MESSAGE:
            where = self._tags[-1] if self._tags else ""
            if where == "think":
                parts.append(Part("reasoning", piece))
            elif where in ("argument", "json"):
                self._text += piece
            elif where == "response" or piece.strip():
                parts.append(Part("content", piece))
        if "tools" in self._tags:
            self._raw += piece

    def _enter(self, tag: str) -> None:
        name, _, rest = tag.partition(" ")
        found = {k: _unescape(v) for k, v in self._attribute.findall(" " + rest)}
        self._tags.append(name)
        if name == "tools":
            self._raw = ""
        elif name == "call":
            self._name, self._values, self._broken = found.get("tool", ""), {}, False
        elif name in ("argument", "json"):
            self._argument = found.get("key", ""), found.get("type", "string")
            self._text = ""

    def _leave(self, name: str) -> list[Part]:
        if name in self._tags:
            while self._tags.pop() != name:
                pass
        if name == "argument":
            key, kind = self._argument
            self._values[key] = self._text if kind == "string" else self._json()
        elif name == "json":
            whole = self._json()
            if isinstance(whole, dict):
                self._values = whole
            else:
                self._broken = True
        elif name == "call":
            arguments = json.dumps(self._values, ensure_ascii=False)
            if self._with_calls and self._name and not self._broken:
                return [Part("call", "", ToolCall(self._name, arguments))]
            return [Part("content", f"{self._name}({arguments})")]
        return []

    def _json(self) -> Any:
        try:
            return json.loads(self._text)
        except ValueError:
            self._broken = True
            return self._text

    def flush(self) -> list[Part]:
        text, self._held = self._held, ""
        if "call" in self._tags and self._raw:
            return [Part("content", self._raw + text)]
        kind: PartKind = "reasoning" if self._tags[-1:] == ["think"] else "content"
        return [Part(kind, text)] if text else []


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
