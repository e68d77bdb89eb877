"""Tool calls and reasoning on the wire, from texts that a model might write."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from aprefetch import FinishReason, TokenEvent
from aprefetch.server.answers import _Choice, _whole_chat
from aprefetch.server.schema import parse_chat
from aprefetch.text.answer import AnswerFormat

D = "｜DSML｜"
TEXT = (
    f'I think</think>Look.\n\n<{D}tool_calls>\n<{D}invoke name="find">\n'
    f'<{D}parameter name="what" string="true">x</{D}parameter>\n</{D}invoke>\n'
    f'<{D}invoke name="now">\n</{D}invoke>\n</{D}tool_calls>'
)
TOOL = {"type": "function", "function": {"name": "find"}}


class Times:
    def observe(self, seconds: float) -> None:
        assert seconds >= 0


def pieces(text: str, tools: list[Any]) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    call = parse_chat(body, context_tokens=100, max_choices=1)
    runtime = SimpleNamespace(answer_format=AnswerFormat("dsml"), tokenizer=None)
    metrics = SimpleNamespace(first_token=Times(), inter_token=Times())
    answers = SimpleNamespace(call=call, runtime=runtime, metrics=metrics)
    choice = _Choice(answers, 0, SimpleNamespace(prompt="<think>"))
    out = []
    for i in range(0, len(text), 3):
        out += choice.take(TokenEvent(index=i, token_id=1, text=text[i : i + 3]))
    out += choice.take(TokenEvent(index=9, token_id=1, text="", finish_reason=FinishReason.STOP))
    return out


def test_calls_and_reasoning() -> None:
    streamed = pieces(TEXT, [TOOL])
    calls = [c for p in streamed for c in p["delta"].get("tool_calls", ())]
    assert [c["index"] for c in calls] == [0, 1]
    assert len({c["id"] for c in calls}) == 2
    assert streamed[-1]["finish_reason"] == "tool_calls"
    message = _whole_chat(0, streamed, False)["message"]
    assert message["reasoning_content"] == "I think"
    assert message["content"] == "Look."
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["find", "now"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"what": "x"}
    assert "index" not in message["tool_calls"][0]


def test_a_call_alone_has_no_content() -> None:
    message = _whole_chat(0, pieces(TEXT.replace("Look.", ""), [TOOL]), False)["message"]
    assert message["content"] is None


def test_without_tools_the_text_is_content() -> None:
    streamed = pieces(TEXT, [])
    whole = _whole_chat(0, streamed, False)
    assert whole["finish_reason"] == "stop"
    assert "tool_calls" not in whole["message"]
    assert whole["message"]["content"].startswith("Look.\n\n<")
