"""Chat text: the file's template, the built-in encoder, and templates that misbehave."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from aprefetch.errors import InvalidRequestError
from aprefetch.text.chat_template import ChatTemplate, check_messages, load_chat_template
from aprefetch.text.tokenizer import Tokenizer
from aprefetch.text.vocab import load_tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
NESTED = "{%% for i in range(99999) %%}{%% for j in range(99999) %%}%s{%% endfor %%}{%% endfor %%}"
DOUBLING = (
    "{%% set n = namespace(x='ab') %%}{%% for i in range(99) %%}{%% set n.x = n.x %s n.x %%}"
    "{%% endfor %%}{{ n.x }}"
)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def builtin(oracle_metadata: dict[str, Any], oracle_tokenizer: Tokenizer) -> ChatTemplate:
    return load_chat_template(oracle_metadata, "deepseek4", oracle_tokenizer)


def of(source: Any, tokenizer: Tokenizer) -> ChatTemplate:
    return load_chat_template({"tokenizer.chat_template": source}, "deepseek4", tokenizer)


# ---- which one


def test_the_files_own_template_wins(
    embedded_metadata: dict[str, Any], embedded_tokenizer: Tokenizer
) -> None:
    template = load_chat_template(embedded_metadata, "deepseek4", embedded_tokenizer)
    assert template.origin == "file"
    text = template.render([{"role": "system", "content": "Be kind."}, *HELLO])
    assert text == f"{BOS}Be kind.{USER}Hello{ASSISTANT}</think>"
    ids = embedded_tokenizer.encode_prompt(text)
    assert ids[0] == 0 and ids.count(0) == 1
    assert ids[-2:] == [4091, 4093]


def test_builtin_where_the_file_has_none(
    builtin: ChatTemplate, oracle_tokenizer: Tokenizer
) -> None:
    assert builtin.origin == "builtin:deepseek4"
    ids = oracle_tokenizer.encode_prompt(builtin.render(HELLO))
    assert ids[:2] == [0, 979] and ids.count(0) == 1
    assert ids[-2:] == [980, 982]


def test_none_fails_only_when_rendering(
    byte_tokenizer: Tokenizer, oracle_tokenizer: Tokenizer
) -> None:
    unknown = load_chat_template({}, "nonsense", oracle_tokenizer)
    lacking = load_chat_template({}, "deepseek4", byte_tokenizer)
    for template in (unknown, lacking):
        assert template.origin == "none"
        with pytest.raises(InvalidRequestError, match="text or token ids"):
            template.render(HELLO)


def test_template_beside_the_tokenizer(make_metadata: Any, make_source: Any) -> None:
    tokenizer = load_tokenizer(make_source(make_metadata()))
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert load_chat_template({}, "x", tokenizer).render(HELLO) == "<s>Hello</s>"


# ---- the built-in encoder


def test_turns(builtin: ChatTemplate) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d", "reasoning_content": "why"},
        {"role": "user", "content": "e"},
    ]
    start = f"{BOS}S{USER}a\n\nbc{ASSISTANT}</think>d{EOS}{USER}e"
    assert builtin.render(messages) == f"{start}{ASSISTANT}</think>"
    assert builtin.render(messages, add_generation_prompt=False) == start
    assert builtin.render(messages, thinking=True) == f"{start}{ASSISTANT}<think>"
    kept = builtin.render(messages, thinking=True, keep_reasoning=True)
    assert f"{ASSISTANT}<think>why</think>d{EOS}" in kept


def test_reasoning_after_the_last_user_message_is_kept(builtin: ChatTemplate) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "d", "reasoning_content": "why"}]
    text = builtin.render(messages, add_generation_prompt=False, thinking=True)
    assert text == f"{BOS}{USER}Hello{ASSISTANT}<think>why</think>d{EOS}"
    assert "why" not in builtin.render(messages)


def test_tools(builtin: ChatTemplate) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"function": {"name": "add", "arguments": '{"a": 1, "note": "x<y"}'}}
    messages = [
        {"role": "system", "content": "S"},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why"},
        {"role": "tool", "content": "3"},
        {"role": "user", "content": "and?"},
    ]
    text = builtin.render(messages, tools=tools, thinking=True)
    assert text.startswith(f"{BOS}S\n\n## Tools")
    assert '{"name": "add", "parameters": {"type": "object"}}' in text
    assert (
        f"{USER}Hello{ASSISTANT}<think>why</think><｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="note" string="true">x<y</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜tool_calls>{EOS}"
        f"{USER}<tool_result>3</tool_result>\n\nand?{ASSISTANT}<think>"
    ) in text
    assert builtin.render(HELLO, tools=tools).startswith(f"{BOS}## Tools")


@pytest.mark.parametrize(
    ("options", "param"),
    [({"temperature": 1}, "temperature"), ({"thinking": "yes"}, "thinking")],
)
def test_unknown_options(builtin: ChatTemplate, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        builtin.render(HELLO, **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "call",
    [3, {}, {"function": {"name": 3}}, {"function": {"name": "f", "arguments": "{"}},
     {"function": {"name": "f", "arguments": "[1]"}}],
)  # fmt: skip
def test_bad_tool_calls(builtin: ChatTemplate, call: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(InvalidRequestError, match="tool call"):
        builtin.render(messages)


# ---- messages


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "Hello",
        {"role": "user", "content": "x"},
        ["Hello"],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "assistant", "content": "", "tool_calls": "f()"}],
    ],
)
def test_bad_messages(messages: Any, builtin: ChatTemplate, oracle_tokenizer: Tokenizer) -> None:
    for template in (builtin, of("x", oracle_tokenizer)):
        with pytest.raises(InvalidRequestError) as caught:
            template.render(messages)
        assert caught.value.param == "messages"


def test_an_unknown_role(builtin: ChatTemplate) -> None:
    with pytest.raises(InvalidRequestError, match="'narrator'"):
        builtin.render([{"role": "narrator", "content": "x"}])


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "extra": 1}]
    assert check_messages(messages) == [{"role": "user", "content": "a", "extra": 1}]
    assert isinstance(messages[0]["content"], list)


def test_bad_tools(builtin: ChatTemplate) -> None:
    for tools in ("f", [3], {"name": "f"}):
        with pytest.raises(InvalidRequestError) as caught:
            builtin.render(HELLO, tools=tools)  # type: ignore[arg-type]
        assert caught.value.param == "tools"


# ---- Jinja


def test_conveniences(oracle_tokenizer: Tokenizer) -> None:
    template = of(
        "{% for m in messages %}\n  {% if loop.last %}{% continue %}{% endif %}\n"
        "  {{ m | tojson }}|{{ strftime_now('%Y') }}|{{ 'on' if thinking else 'off' }}\n"
        "{% endfor %}{{ tools is none }}",
        oracle_tokenizer,
    )
    text = template.render([{"role": "user", "content": "<é>'"}, *HELLO], thinking=True)
    year = datetime.now().astimezone().year
    assert text == f'  {{"role": "user", "content": "<é>\'"}}|{year}|on\nTrue'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if", "line 1"),
        ("{{ raise_exception('only two roles') }}", "only two roles"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ nothing.here }}", "undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'x' %}", "loader"),
        (3, "no string"),
        ("a" * (1 << 20) + "b", "longer"),
        (NESTED % "", "steps"),
        (NESTED % "x", "steps"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        (DOUBLING % "~", "more than"),
        (DOUBLING % "+", "more than"),
        ("{{ 'a' * 10**12 }}", "more than"),
        ("{{ 9 ** 9 ** 99999 }}", "power"),
        ("{{ '%0999999999d' % 1 }}", "field width"),
        ("{{ '%*d' | format(999999999, 1) }}", "field width"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "longer than"),
    ],
)  # fmt: skip
def test_templates_that_fail(source: Any, words: str, oracle_tokenizer: Tokenizer) -> None:
    template = of(source, oracle_tokenizer)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            template.render(HELLO)
        assert caught.value.param == "messages"


def test_loops_and_recursion_still_work(oracle_tokenizer: Tokenizer) -> None:
    template = of(
        "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{{ loop.length }}{% endfor %}"
        "{% for c in 'abc' if c != 'b' %}{{ c }}{% else %}none{% endfor %}"
        "{% for x in [[1, [2]], 3] recursive %}"
        "{{ loop(x) if x is iterable else x }}{% endfor %}",
        oracle_tokenizer,
    )
    assert template.render(HELLO) == "a12b22ac123"


def test_variables_cannot_be_replaced(oracle_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="bos_token"):
        of("x", oracle_tokenizer).render(HELLO, bos_token="y")
