"""Parts of answers: reasoning, content, calls; however the text is cut."""

from __future__ import annotations

import json

import pytest

from aprefetch.text.answer import AnswerFormat, Part, ToolCall

DSML, XTML, PLAIN = AnswerFormat("dsml"), AnswerFormat("xtml"), AnswerFormat("plain")
D = "｜DSML｜"
CALLS = (
    f'<{D}tool_calls>\n<{D}invoke name="find">\n'
    f'<{D}parameter name="what" string="true">a "b" <c></{D}parameter>\n'
    f'<{D}parameter name="n" string="false">[1, 2]</{D}parameter>\n</{D}invoke>\n'
    f'<{D}invoke name="now">\n</{D}invoke>\n</{D}tool_calls>'
)
FIND = ToolCall("find", json.dumps({"what": 'a "b" <c>', "n": [1, 2]}))
NOW = ToolCall("now", "{}")


def opened(name: str, **attributes: str) -> str:
    shown = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<|open|>{name}{shown}<|sep|>"


def closed(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


def joined(parts: list[Part]) -> list[Part]:
    out: list[Part] = []
    for part in parts:
        if out and part.call is None and out[-1].call is None and out[-1].kind == part.kind:
            out[-1] = Part(part.kind, out[-1].text + part.text)
        else:
            out.append(part)
    return out


def parsed(form: AnswerFormat, prompt: str, text: str, step: int, calls: bool = True) -> list[Part]:
    parser = form.parser(prompt, with_calls=calls)
    parts: list[Part] = []
    for at in range(0, len(text), step):
        parts += parser.push(text[at : at + step])
    return joined([*parts, *parser.flush()])


CASES = {
    "plain": (PLAIN, "", "a</think>b", [Part("content", "a</think>b")]),
    "nothing": (DSML, "", "", []),
    "content": (DSML, "</think>", "Hi <b> <", [Part("content", "Hi <b> <")]),
    "reasoning": (
        DSML,
        "<think>",
        "so</think>Yes",
        [Part("reasoning", "so"), Part("content", "Yes")],
    ),
    "reasoning cut off": (DSML, "<think>", "so </thi", [Part("reasoning", "so </thi")]),
    "opens by itself": (
        DSML,
        "",
        "<think>so</think>Yes",
        [Part("reasoning", "so"), Part("content", "Yes")],
    ),
    "tag in the text": (DSML, "", "a <think>b", [Part("content", "a <think>b")]),
    "calls": (
        DSML,
        "<think>",
        f"so</think>Let me.\n\n{CALLS}",
        [
            Part("reasoning", "so"),
            Part("content", "Let me."),
            Part("call", "", FIND),
            Part("call", "", NOW),
        ],
    ),
    "damaged call": (
        DSML,
        "",
        f"<{D}tool_calls>what?</{D}tool_calls>!",
        [Part("content", f"<{D}tool_calls>what?</{D}tool_calls>!")],
    ),
    "unfinished call": (
        DSML,
        "",
        f"<{D}tool_calls>\n<{D}inv",
        [Part("content", f"<{D}tool_calls>\n<{D}inv")],
    ),
    "xtml": (
        XTML,
        opened("think"),
        (f"so{closed('think')}{opened('response')}Yes <i>{closed('response')}{closed('message')}"
        "<|end_of_msg|>"),
        [Part("reasoning", "so"), Part("content", "Yes <i>")],
    ),
    "xtml calls": (
        XTML,
        opened("response"),
        (f"Let me.{closed('response')}{opened('tools')}{opened('call', tool='find', index='1')}"
        f"{opened('argument', key='what', type='string')}a \"b\" <c>{closed('argument')}"
        f"{opened('argument', key='n', type='array')}[1, 2]{closed('argument')}{closed('call')}"
        f"{opened('call', tool='now', index='2')}{opened('json', type='object')}{{}}"
        f"{closed('json')}{closed('call')}{closed('tools')}"),
        [Part("content", "Let me."), Part("call", "", FIND), Part("call", "", NOW)],
    ),
    "xtml unfinished tag": (
        XTML,
        opened("response"),
        "a<|open|>too",
        [Part("content", "a<|open|>too")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_do_not_depend_on_the_cuts(name: str) -> None:
    form, prompt, text, want = CASES[name]
    for step in (1, 2, 3, 7, 1000):
        assert parsed(form, prompt, text, step) == want


def test_without_tools_a_call_is_content() -> None:
    assert parsed(DSML, "", CALLS, 5, calls=False) == [Part("content", CALLS)]


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = DSML.parser("<think>", with_calls=True)
    assert parser.push("one <") == [Part("reasoning", "one ")]
    assert parser.push("two") == [Part("reasoning", "<two")]
