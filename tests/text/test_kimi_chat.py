"""The built-in chat text of Kimi-K3."""

from __future__ import annotations

from typing import Any

import pytest

from aprefetch.errors import InvalidRequestError
from aprefetch.text.chat_template import ChatTemplate, load_chat_template
from aprefetch.text.vocab import load_tokenizer

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def template(make_metadata: Any, make_source: Any) -> ChatTemplate:
    plain = make_metadata()
    tokens = [*plain["tokenizer.ggml.tokens"], *MARKERS]
    kinds = [*plain["tokenizer.ggml.token_type"], 3, 3, 3, 3]
    tokenizer = load_tokenizer(make_source(make_metadata(tokens=tokens, token_type=kinds)))
    return load_chat_template({}, "kimi-k3", tokenizer)


def short(text: str) -> str:
    """Markers as [ ] / ; for reading."""
    for marker, sign in zip(MARKERS, ("[", "/", "]", ";\n"), strict=True):
        text = text.replace(marker, sign)
    return text


def test_generation_prompts(template):
    assert template.origin == "builtin:kimi-k3"
    user = '[message role="user"]Hello/message];\n[message role="assistant"]'
    assert short(template.render(HELLO)) == user + "[think]"
    assert short(template.render(HELLO, thinking=False)) == user + "[response]"
    assert short(template.render(HELLO, enable_thinking=False)) == user + "[response]"
    assert short(template.render(HELLO, add_generation_prompt=False)).endswith("/message];\n")


def test_effort_comes_first_and_only_when_asked_for(template):
    said = short(template.render(HELLO, thinking_effort="low"))
    assert said.startswith('[message role="system" type="thinking-effort"]low/message];\n[message')
    assert "effort" not in template.render(HELLO, thinking_effort="low", thinking=False)


def test_a_conversation(template):
    messages = [
        {"role": "system", "content": "Be brief.", "name": 'a "b" & c'},
        *HELLO,
        {"role": "assistant", "content": "Hi.", "reasoning_content": "greet"},
        {"role": "user", "content": "Bye"},
    ]
    wanted = (
        '[message role="system" name="a &quot;b&quot; &amp; c"]Be brief./message];\n'
        '[message role="user"]Hello/message];\n'
        '[message role="assistant"][think]greet/think][response]Hi./response]/message];\n'
        '[message role="user"]Bye/message];\n[message role="assistant"]'
    )
    assert short(template.render(messages)) == wanted + "[think]"
    quiet = wanted.replace("[think]greet/think]", "")
    assert short(template.render(messages, thinking=False)) == quiet + "[response]"


def test_tools(template):
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "function": {"name": "add", "arguments": {"a": 2, "b": "x", "c": None}},
                },
                {"id": "2", "function": {"name": "now", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "2"},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "a": 1}}]
    text = short(template.render(messages, tools=tools, thinking=False))
    head, _, rest = text.partition("```json\n")
    assert head.startswith('[message role="system" type="tool-declare"]')
    assert rest.startswith('[{"function":{"a":1,"name":"add"},"type":"function"}]\n```/message];\n')
    assert (
        '[response]/response][tools][call tool="add" index="1"]'
        '[argument key="a" type="number"]2/argument][argument key="b" type="string"]x/argument]'
        '[argument key="c" type="null"]null/argument]/call]'
        '[call tool="now" index="2"][json type="object"]{}/json]/call]/tools]/message];\n'
    ) in text
    assert text.endswith(
        '[message role="tool" tool="add" index="1"]3/message];\n'
        '[message role="tool" tool="now" index="2"]noon/message];\n'
        '[message role="assistant"][response]'
    )


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        (HELLO, {"thinking": "yes"}, "thinking"),
        (HELLO, {"thinking_effort": "medium"}, "thinking_effort"),
        (HELLO, {"temperature": 1}, "temperature"),
        ([{"role": "critic", "content": "no"}], {}, "messages"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], {}, "messages"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": 3}]}], {}, "messages"),
        ([{"role": "assistant", "content": "", "reasoning": 3}], {}, "messages"),
        (HELLO, {"tools": [{"name": {1, 2}}]}, "tools"),
    ],
)
def test_wrong_requests(template, messages, options, param):
    with pytest.raises(InvalidRequestError) as caught:
        template.render(messages, **options)
    assert caught.value.param == param
