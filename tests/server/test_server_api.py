"""Every endpoint and field, through the real client against a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

MODEL = "tiny-deepseek4-mxfp4"
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def facts(model_path: Path) -> dict[str, Any]:
    return json.loads(model_path.with_suffix(".json").read_text())


def joined(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_models(client) -> None:
    listed = client.models.list().data
    assert [(m.id, m.object) for m in listed] == [(MODEL, "model")]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_completion_of_token_ids_is_the_oracles(client, facts) -> None:
    ids = facts["prompts"]["p7"]["ids"]
    done = client.completions.create(model=MODEL, prompt=ids, max_tokens=8, logprobs=2, **GREEDY)
    assert done.object == "text_completion"
    assert done.id.startswith("cmpl-")
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 8, 15)
    choice = done.choices[0]
    assert choice.finish_reason == "length"
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8
    assert logprobs.text_offset[0] == 0
    assert all(value <= 0 for value in logprobs.token_logprobs)
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=ids, max_tokens=8, logprobs=2, stream=True, **GREEDY
        )
    )
    assert "".join(c.choices[0].text for c in chunks) == choice.text
    assert [t for c in chunks for t in c.choices[0].logprobs.tokens] == logprobs.tokens
    offsets = [o for c in chunks for o in c.choices[0].logprobs.text_offset]
    assert offsets == logprobs.text_offset
    assert chunks[-1].choices[0].finish_reason == "length"
    default = client.completions.create(model=MODEL, prompt=ids, **GREEDY)
    assert default.usage.completion_tokens == 16


def test_several_prompts_and_answers(client, facts) -> None:
    ids = facts["prompts"]["p7"]["ids"]
    many = client.completions.create(
        model=MODEL, prompt=["Hello", "Once"], n=2, seed=3, max_tokens=4
    )
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert many.usage.completion_tokens == 16
    same = client.completions.create(
        model=MODEL, prompt=["Hello", "Once"], n=2, seed=3, max_tokens=4
    )
    assert [c.text for c in many.choices] == [c.text for c in same.choices]
    assert many.choices[0].text != many.choices[1].text  # each draws its own
    lists = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=4, **GREEDY)
    assert lists.choices[0].text == lists.choices[1].text
    assert lists.usage.prompt_tokens == 14


def test_chat_whole(client) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY
    )
    assert done.object == "chat.completion"
    assert done.id.startswith("chatcmpl-")
    assert done.model == MODEL
    choice = done.choices[0]
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    entries = choice.logprobs.content
    assert len(entries) == done.usage.completion_tokens == 6
    for entry in entries:
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        assert [t.token for t in entry.top_logprobs][0] == entry.token  # greedy: the best
        assert len(entry.top_logprobs) == 3
    plain = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=6, **GREEDY
    )
    assert plain.choices[0].logprobs is None
    assert plain.choices[0].message.content == choice.message.content
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    again = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=6, **GREEDY)
    assert again.choices[0].message.content == choice.message.content


def test_chat_streamed(client) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=1,
            **GREEDY,
        )
    )
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert joined(chunks) == whole.choices[0].message.content
    *content, last = chunks
    assert content[-1].choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in content[:-1]] == [None] * (len(content) - 1)
    assert all(c.usage is None for c in content)
    assert last.choices == []
    assert last.usage.completion_tokens == 9
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    entries = [e for c in content if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert len(entries) == 9
    without = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=9, stream=True, **GREEDY
        )
    )
    assert joined(without) == joined(chunks)
    assert without[-1].choices[0].finish_reason == "length"


def test_several_streamed_answers(client) -> None:
    ask = {"model": MODEL, "messages": HELLO, "n": 3, "seed": 11, "max_tokens": 6}
    whole = client.chat.completions.create(**ask)
    texts = ["", "", ""]
    ends = [0, 0, 0]
    for chunk in client.chat.completions.create(stream=True, **ask):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason is not None
    assert texts == [c.message.content for c in whole.choices]
    assert ends == [1, 1, 1]
    assert len(set(texts)) > 1


def test_raw_stream_is_as_the_protocol_says(server) -> None:
    with server.client() as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, max_tokens=2, stream=True
        )
        assert raw.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in raw.http_response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert "\n" not in line
        assert json.loads(line[6:])["choices"]


def test_stop_seed_and_sampling_fields(client) -> None:
    ask = {"model": MODEL, "messages": HELLO, "max_tokens": 12}
    whole = client.chat.completions.create(**ask, **GREEDY).choices[0].message.content
    stop = whole[4:7]
    cut = client.chat.completions.create(**ask, stop=[stop, "zzzz"], **GREEDY).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole[: whole.index(stop)]
    sampling = {
        "temperature": 1.2,
        "top_p": 0.9,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"17": 3},
        "extra_body": {"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3},
    }
    one, two = (client.chat.completions.create(**ask, **sampling) for _ in range(2))
    assert one.choices[0].message.content == two.choices[0].message.content
    biased = client.chat.completions.create(
        **ask, temperature=0, logit_bias={str(facts_token(client)): 1000}
    )
    assert biased.usage.completion_tokens == 12


def facts_token(_: Any) -> int:
    return 300  # an ordinary token of the tiny vocabulary


def test_fields_without_effect_are_taken(client) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        response_format={"type": "text"},
        tool_choice="none",
        parallel_tool_calls=True,
        n=None,
        stop=None,
        extra_body={"modalities": ["text"]},
    )


TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {}}},
}


def test_tools_reach_the_prompt(client) -> None:
    ask = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
    bare = client.chat.completions.create(**ask).usage.prompt_tokens
    tools = client.chat.completions.create(**ask, tools=[TOOL]).usage.prompt_tokens
    none = client.chat.completions.create(**ask, tools=[TOOL], tool_choice="none").usage
    assert tools > bare == none.prompt_tokens
    turn = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "find", "arguments": '{"what": "x"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ]
    client.chat.completions.create(model=MODEL, messages=turn, tools=[TOOL], max_tokens=1)


def test_reasoning_is_told_apart(client) -> None:
    done = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=5, reasoning_effort="high", **GREEDY
    )
    message = done.choices[0].message
    assert message.content == ""  # five tokens do not end the reasoning
    assert message.reasoning_content
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=5,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True, "chat_template_kwargs": {"thinking": True}},
        )
    )
    deltas = [c.choices[0].delta for c in chunks]
    told = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert told == message.reasoning_content


BAD_CHAT = {
    "no messages": ({"messages": []}, "messages"),
    "messages no list": ({"messages": "hi"}, "messages"),
    "message no object": ({"messages": ["hi"]}, "messages"),
    "no role": ({"messages": [{"content": "x"}]}, "messages"),
    "unknown role": ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
    ),
    "temperature": ({"temperature": "hot"}, "temperature"),
    "top_p": ({"top_p": 2}, "top_p"),
    "n": ({"n": 0}, "n"),
    "many": ({"n": 1000}, "n"),
    "n true": ({"n": True}, "n"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "two max_tokens": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    "stop": ({"stop": [1]}, "stop"),
    "many stops": ({"stop": ["x"] * 100}, "stop"),
    "seed": ({"seed": 1.5}, "seed"),
    "stream": ({"stream": "yes"}, "stream"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "logprobs": ({"logprobs": 3}, "logprobs"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs"),
    "too many top": ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    "logit_bias": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias outside": ({"logit_bias": {"99999": 1}}, "logit_bias"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "tools": ({"tools": [{"type": "web"}]}, "tools"),
    "tool_choice": ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    "parallel": ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    "store": ({"store": True}, "store"),
    "unknown": ({"temprature": 1}, "temprature"),
    "audio": ({"audio": {}}, "audio"),
    "functions": ({"functions": []}, "functions"),
    "timeout_s": ({"timeout_s": -1}, "timeout_s"),
    "template option": ({"chat_template_kwargs": {"thinking": "yes"}}, "thinking"),
    "template messages": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
}


@pytest.mark.parametrize("name", BAD_CHAT)
def test_bad_chats_name_the_field(client, name) -> None:
    fields, param = BAD_CHAT[name]
    body = {"model": MODEL, "messages": HELLO, **fields}
    for path in ("/chat/completions",):
        with pytest.raises(openai.BadRequestError) as caught:
            client.post(path, body=body, cast_to=object)
    error = caught.value
    assert error.type == "invalid_request_error"
    assert error.param == param
    assert set(error.body) == {"message", "type", "param", "code"}


BAD_COMPLETION = {
    "no prompt": ({"prompt": None}, "prompt"),
    "empty": ({"prompt": []}, "prompt"),
    "mixed": ({"prompt": ["x", 1]}, "prompt"),
    "id outside": ({"prompt": [1, 5000]}, "prompt"),
    "negative": ({"prompt": [-1]}, "prompt"),
    "object": ({"prompt": {"a": 1}}, "prompt"),
    "many": ({"prompt": ["x"] * 100}, "prompt"),
    "echo": ({"echo": True}, "echo"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "best_of": ({"best_of": 3}, "best_of"),
    "logprobs": ({"logprobs": 100}, "logprobs"),
    "tools": ({"tools": []}, "tools"),
}


@pytest.mark.parametrize("name", BAD_COMPLETION)
def test_bad_completions_name_the_field(client, name) -> None:
    fields, param = BAD_COMPLETION[name]
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body={"model": MODEL, "prompt": "x", **fields}, cast_to=object)
    assert caught.value.param == param


def test_too_long_and_wrong_model(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 9000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[5] * 9000, stream=True)  # before headers
    for name in ("gpt-9", ""):
        with pytest.raises(openai.NotFoundError) as wrong:
            client.chat.completions.create(model=name, messages=HELLO)
        assert wrong.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.post("/chat/completions", body={"messages": HELLO}, cast_to=object)


def test_a_deadline_ends_a_request(client) -> None:
    ask = {"model": MODEL, "prompt": "Hello", "max_tokens": 8000}
    body = {"ignore_eos": True, "timeout_s": 0.1}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**ask, extra_body=body)
    assert caught.value.status_code == 504
    with pytest.raises(openai.APIError, match="0.1 s"):  # the headers are gone: an event tells
        for _ in client.completions.create(**ask, stream=True, extra_body=body):
            pass


def test_a_conversation_runs_only_what_is_new(client) -> None:
    messages: list[dict[str, str]] = []
    before = 0
    for turn in range(3):
        messages.append({"role": "user", "content": f"Hello, this is turn number {turn}."})
        done = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=3, **GREEDY
        )
        usage = done.usage
        if turn:  # at least all of the prompt before it is known
            assert usage.prompt_tokens_details.cached_tokens >= before
        before = usage.prompt_tokens
        messages.append({"role": "assistant", "content": done.choices[0].message.content})
