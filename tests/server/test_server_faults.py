"""Clients that go, stall, or send rubbish: the server stays right, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import openai
import pytest

MODEL = "tiny-deepseek4-mxfp4"
HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": 0}
LONG = {"max_tokens": 6000, "extra_body": {"ignore_eos": True}}


def request(port: int, data: bytes, *, timeout_s: float = 20) -> tuple[int, bytes]:
    """One raw request; the status and the body."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(data)
        answer = b""
        while block := connection.recv(65536):
            answer += block
            head, found, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            if found and length and len(body) >= int(length[1]):
                break
        return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


def post(port: int, body: bytes, path: str = "/v1/chat/completions", extra: str = "") -> Any:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{extra}\r\n"
    )
    return request(port, head.encode() + body)


def metric(port: int, name: str) -> float:
    _, text = request(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    found = re.search(rf"^{re.escape(name)} (\S+)$", text.decode(), re.MULTILINE)
    assert found, f"{name} is not in {text.decode()}"
    return float(found[1])


def running(port: int) -> int:
    return int(
        metric(port, 'aprefetch_requests{phase="running"}')
        + metric(port, 'aprefetch_requests{phase="waiting"}')
    )


def until_idle(port: int) -> None:
    deadline_s = time.monotonic() + 30
    while running(port):
        assert time.monotonic() < deadline_s, "requests go on without their clients"
        time.sleep(0.02)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_health_and_metrics(server, client) -> None:
    status, body = request(server.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    before = metric(server.port, 'aprefetch_tokens_total{kind="output"}')
    client.chat.completions.create(**ASK, max_tokens=5, extra_body={"ignore_eos": True})
    assert metric(server.port, 'aprefetch_tokens_total{kind="output"}') == before + 5
    for name in (
        'aprefetch_expert_lookups_total{result="hit",tier="device"}',
        "aprefetch_read_bytes_total",
        "aprefetch_stall_seconds_total",
        "aprefetch_time_to_first_token_seconds_count",
        "aprefetch_inter_token_seconds_count",
        'aprefetch_tokens_total{kind="prompt"}',
    ):
        assert metric(server.port, name) >= 0
    assert metric(server.port, "aprefetch_reads_in_flight") >= 0
    _, text = request(server.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b'aprefetch_memory_bytes{tier="' in text


def test_a_client_that_goes_ends_its_request(server, client) -> None:
    for stream in (True, False):
        body = json.dumps({**ASK, "max_tokens": 6000, "ignore_eos": True, "stream": stream})
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode())
            while not running(server.port):
                time.sleep(0.005)
        until_idle(server.port)
    events = client.chat.completions.create(**ASK, **LONG, stream=True)
    next(iter(events))
    events.close()
    until_idle(server.port)


async def test_fifty_streams_with_random_disconnects(server) -> None:
    rng = random.Random(1)
    async with server.async_client() as client:
        ask = {**ASK, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
        want = (await client.chat.completions.create(**ask)).choices[0].message.content

        async def one(i: int) -> str | None:
            leave_after = rng.randrange(8) if i % 2 else None
            text = ""
            async with await client.chat.completions.create(**ask, stream=True) as events:
                n = 0
                async for chunk in events:
                    if n == leave_after:
                        return None
                    text += chunk.choices[0].delta.content or ""
                    n += 1
            return text

        async def impatient() -> None:
            task = asyncio.create_task(client.chat.completions.create(**{**ask, **LONG}))
            await asyncio.sleep(rng.random() * 0.3)
            task.cancel()
            await asyncio.wait({task})

        texts = await asyncio.gather(*(one(i) for i in range(50)))
        held = resident_bytes(server.process.pid)
        await asyncio.gather(*(one(i) for i in range(50)), *(impatient() for _ in range(10)))
        assert all(text in (None, want) for text in texts)
        assert sum(text == want for text in texts) == 25
        assert (await client.chat.completions.create(**ask)).choices[0].message.content == want
    await asyncio.to_thread(until_idle, server.port)
    assert resident_bytes(server.process.pid) - held < 32 << 20


RUBBISH = {
    "nothing": b"",
    "no json": b"{",
    "not utf-8": b'{"model": "\xff"}',
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "nan": b'{"temperature": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "deep": b"[" * 100_000,
    "deep closed": b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "long number": b'{"n": ' + b"9" * 10_000 + b"}",
    "big float": b'{"model": "%s", "messages": [], "temperature": 1e999}' % MODEL.encode(),
    "half a surrogate": json.dumps({**ASK, "messages": [{"role": "user", "content": "\ud800"}]}),
    "trailing": b"{} {}",
}


@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_is_refused_in_openai_shape(server, name) -> None:
    body = RUBBISH[name]
    status, answer = post(server.port, body if isinstance(body, bytes) else body.encode())
    assert status == 400
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) <= 1000


def test_random_types_never_break_the_server(server, client) -> None:
    rng = random.Random(2)
    values: list[Any] = [
        None, True, 0, -1, 10**30, 1.5, 1e308, "", "x", [], [None], [[]], [{}], {}, {"a": None},
        {"type": None}, {"type": "function"}, [{"type": "function", "function": 3}],
        {"include_usage": 1}, "\u0000", [1, "a"], [-1], ["", ""], [{"role": 1, "content": 2}],
        [{"role": "user", "content": [3]}], [{"role": "assistant", "tool_calls": [3]}],
        [{"role": "tool", "content": {"x": 1}}],
        [{"role": "assistant", "content": "", "reasoning_content": 3}],
    ]  # fmt: skip
    names = [
        "model", "messages", "prompt", "n", "stream", "stream_options", "max_tokens", "tools",
        "max_completion_tokens", "temperature", "top_p", "seed", "stop", "logit_bias", "logprobs",
        "top_logprobs", "tool_choice", "response_format", "chat_template_kwargs", "min_tokens",
        "reasoning_effort", "stop_token_ids", "timeout_s", "echo", "best_of", "modalities",
        "repetition_penalty",
    ]  # fmt: skip
    for _ in range(300):
        path, body = rng.choice(
            [
                ("/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 1}),
                ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1}),
            ]
        )
        for name in rng.sample(names, rng.randrange(1, 4)):
            body[name] = rng.choice(values)
        if isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 1:
            body["max_tokens"] = 2
        body.pop("max_completion_tokens", None) if rng.random() < 0.9 else None
        body["timeout_s"] = body.get("timeout_s") or 5
        status, answer = post(server.port, json.dumps(body).encode(), path, "Connection: close\r\n")
        assert status in (200, 400, 404, 504), (body, answer)
    until_idle(server.port)
    assert client.chat.completions.create(**ASK, max_tokens=1).usage.completion_tokens == 1


def test_size_type_and_place(server) -> None:
    port = server.port
    huge = 9 << 20
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {huge}\r\n\r\n"  # noqa: E501
    status, answer = request(port, head.encode())  # refused before it is sent
    assert status == 413
    assert json.loads(answer)["error"]["code"] == "request_too_large"
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"  # noqa: E501
    block = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        answer = b""
        try:
            connection.sendall(chunked)
            for _ in range(10):
                connection.sendall(block)
        except OSError:
            pass  # the server has closed already
        with contextlib.suppress(ConnectionResetError):
            answer = connection.recv(65536)
        assert answer == b"" or b" 413 " in answer
    large = json.dumps({"model": MODEL, "prompt": "word " * 100_000}).encode()
    status, answer = post(port, large, "/v1/completions")
    assert (status, json.loads(answer)["error"]["code"]) == (400, "context_length_exceeded")
    plain = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}"  # noqa: E501
    assert request(port, plain)[0] == 415
    for line, want in (("GET /nowhere", 404), ("GET /v1/completions", 405), ("PUT /health", 405)):
        status, answer = request(port, f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert status == want
        assert json.loads(answer)["error"]["type"] == "invalid_request_error"


def test_api_keys(start, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n")
    with start("--api-key-file", str(keys), "--model-name", "mine") as server:
        for key in ("first", "second"):
            with server.client(key) as client:
                assert client.models.list().data[0].id == "mine"
                client.completions.create(model="mine", prompt="x", max_tokens=1)
        for key in ("", "firs", "firstt", "first second"):
            with server.client(key or "none") as client, pytest.raises(openai.AuthenticationError):
                client.models.list()
        assert request(server.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 401
        assert request(server.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 200
        assert server.stop(signal.SIGINT) == 0


def test_a_full_server_says_so(start) -> None:
    with start("--max-requests", "1", "--max-waiting", "0") as server, server.client() as client:
        events = client.chat.completions.create(**ASK, **LONG, stream=True)
        next(iter(events))
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**ASK, max_tokens=1)
        assert caught.value.response.headers["retry-after"] == "1"
        events.close()
        with server.client(max_retries=5) as patient:
            patient.chat.completions.create(**ASK, max_tokens=1)


def test_sigterm_finishes_what_runs(start) -> None:
    with start() as server, server.client() as client:
        events = client.chat.completions.create(
            **ASK, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = [next(events)]
        server.process.send_signal(signal.SIGTERM)
        chunks += events
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.wait() == 0
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


def test_sigterm_cancels_what_does_not_end_in_time(start) -> None:
    with start("--drain", "1") as server, server.client() as client:
        events = client.chat.completions.create(**ASK, **LONG, stream=True)
        iterator = iter(events)
        next(iterator)
        server.process.send_signal(signal.SIGTERM)
        came_to_an_end = False
        with contextlib.suppress(Exception):
            came_to_an_end = bool([None for _ in iterator])  # cut off in one of several ways
        assert not came_to_an_end
        assert server.wait() == 0
        assert not [line for line in server.log if "never retrieved" in line]


def test_a_reader_that_stalls_is_bounded_and_dropped(start) -> None:
    with start("--stall", "0.5") as server, server.client() as client:
        fields = {**ASK, "max_tokens": 8000, "ignore_eos": True, "stream": True}
        body = json.dumps({**fields, "logprobs": True, "top_logprobs": 20})
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with stalled:
            stalled.connect(("127.0.0.1", server.port))
            stalled.sendall(head.encode())
            time.sleep(0.2)
            assert client.chat.completions.create(**ASK, max_tokens=3).choices
            until_idle(server.port)  # dropped, long before its 8000 tokens
            assert metric(server.port, 'aprefetch_tokens_total{kind="output"}') < 4000
        assert server.stop() == 0


def test_a_silent_stream_has_a_heartbeat(model_path) -> None:
    """In this process, since the time of the heartbeat is no option of the command."""
    from aprefetch import Runtime
    from aprefetch.server.app import ServerOptions, create_app

    async def main() -> list[bytes]:
        sent: list[bytes] = []
        body = json.dumps({"model": MODEL, "prompt": [5] * 2000, "max_tokens": 1, "stream": True})
        messages = [{"type": "http.request", "body": body.encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "root_path": "", "scheme": "http",
        }  # fmt: skip
        async with Runtime.open(model_path, kernels="reference", chunk_tokens=64) as rt:
            app = create_app(rt, ServerOptions(heartbeat_s=0.02))
            await app(scope, receive, send)
        return sent

    sent = asyncio.run(main())
    assert sent.count(b": still working\n\n") >= 2
    assert sent[-2] == b"data: [DONE]\n\n"


def test_serve_refuses_wrong_options(capsys, tmp_path) -> None:
    from aprefetch.cli.main import main

    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        cases = [
            (["--port", str(taken.getsockname()[1])], "in use"),
            (["--port", "70000"], "--port"),
            (["--drain", "0"], "--drain"),
            (["--api-key", ""], "API key"),
            (["--api-key-file", str(tmp_path / "none")], "none"),
            (["--max-body", "much"], "not a size"),
        ]
        for args, words in cases:
            assert main(["serve", *args]) == 2
            assert words in capsys.readouterr().err
    assert main(["serve", "--port", "0", "-m", str(tmp_path / "none.gguf")]) == 1
