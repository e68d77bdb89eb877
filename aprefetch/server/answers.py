"""Runs the answers of one request and shapes them for the wire, streamed or whole.

An `Answers` owns the token streams of a request from `open` to `close`. The streams are bounded, so
a client that reads slowly holds up its own request only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from aprefetch import AprefetchError, FinishReason, Runtime, RuntimeClosedError, TokenEvent
from aprefetch.server import wire
from aprefetch.server.metrics import Metrics
from aprefetch.server.schema import Call
from aprefetch.server.sse import DONE, Write, encode

__all__ = ["Answers"]


class _Choice:
    """One answer: its stream, its parser, and what was said so far."""

    def __init__(self, answers: Answers, index: int, stream: Any) -> None:
        self.index, self.stream = index, stream
        call, runtime = answers.call, answers.runtime
        self._parser = None
        if call.kind == "chat":
            prompt = stream.prompt or ""
            self._parser = runtime.answer_format.parser(prompt, with_calls=call.with_tools)
        self._call, self._names, self._metrics = call, runtime.tokenizer, answers.metrics
        self.n_calls = 0
        self.n_text = 0  # characters given out, for text_offset
        self._last_ns = time.perf_counter_ns()
        self._n_events = 0

    def _observe(self) -> None:
        now_ns = time.perf_counter_ns()
        seconds = (now_ns - self._last_ns) / 1e9
        if self._n_events:
            self._metrics.inter_token.observe(seconds)
        else:
            self._metrics.first_token.observe(seconds)
        self._n_events += 1
        self._last_ns = now_ns

    def take(self, event: TokenEvent) -> list[dict[str, Any]]:
        """The choice objects of a streamed answer that an event gives rise to."""
        self._observe()
        if self._parser is None:
            return self._completion_pieces(event)
        deltas = self._deltas(event)
        entries = wire.chat_logprobs(self._names, event) if self._call.logprobs else []
        if entries and not deltas:
            deltas = [{"content": ""}]  # a chunk to carry them
        pieces: list[dict[str, Any]] = [
            {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if entries:
            pieces[0]["logprobs"] = {"content": entries}
        if event.finish_reason is not None:
            reason = self.reason(event.finish_reason)
            pieces.append(
                {"index": self.index, "delta": {}, "logprobs": None, "finish_reason": reason}
            )
        return pieces

    def _deltas(self, event: TokenEvent) -> list[dict[str, Any]]:
        assert self._parser is not None
        parts = self._parser.push(event.text)
        if event.finish_reason is not None:
            parts += self._parser.flush()
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if part.call is not None:
                made = wire.tool_call(self.n_calls, part.call.name, part.call.arguments)
                self.n_calls += 1
                deltas.append({"tool_calls": [made]})
            else:
                key = "content" if part.kind == "content" else "reasoning_content"
                deltas.append({key: part.text})
        return deltas

    def _completion_pieces(self, event: TokenEvent) -> list[dict[str, Any]]:
        if not (event.text or event.finish_reason or self._call.logprobs):
            return []
        piece: dict[str, Any] = {
            "index": self.index,
            "text": event.text,
            "logprobs": None,
            "finish_reason": None if event.finish_reason is None else str(event.finish_reason),
        }
        if self._call.logprobs:
            piece["logprobs"] = wire.completion_logprobs(self._names, [event], self.n_text)
        self.n_text += len(event.text)
        return [piece]

    def reason(self, reason: FinishReason) -> str:
        """The wire's word for why the answer ended."""
        return "tool_calls" if self.n_calls and reason == "stop" else str(reason)

    async def events(self) -> AsyncIterator[TokenEvent]:
        """All events; a request that was cancelled under us is an error."""
        async for event in self.stream:
            if event.finish_reason == FinishReason.CANCELLED:
                raise RuntimeClosedError("the request was cancelled: the server is stopping")
            yield event


class Answers:
    """The answers of one request.

    Args:
        model: the name to answer with.
        failed: turns an error into the wire's error object.
    """

    def __init__(
        self,
        runtime: Runtime,
        call: Call,
        metrics: Metrics,
        *,
        model: str,
        failed: Callable[[Exception], dict[str, Any]],
    ) -> None:
        self.runtime, self.call, self.metrics = runtime, call, metrics
        self._envelope = wire.Envelope(call.kind, model, int(time.time()))
        self._failed = failed
        self._streams: list[Any] = []
        self._choices: list[_Choice] = []

    async def open(self) -> None:
        """Check the request and place it, so that what is wrong with it still has a status.

        Raises:
            RequestError, RuntimeStateError: nothing of the request is left.
        """
        call = self.call
        keep = self.runtime.answer_format.marker_ids if call.kind == "chat" else frozenset()
        try:
            for prompt in call.prompts:
                for answer in range(call.n):
                    stream = self.runtime.stream(
                        prompt,
                        call.params_of(answer),
                        chat_options=call.chat_options or None,
                        keep_special=keep,
                        timeout_s=call.timeout_s,
                    )
                    self._streams.append(stream)
                    await stream.__aenter__()
                    self._choices.append(_Choice(self, len(self._choices), stream))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End what still runs."""
        for stream in self._streams:
            await stream.aclose()

    def usage(self) -> dict[str, Any]:
        """Counts over all answers; a prompt with several answers counts once."""
        usages = [stream.usage for stream in self._streams]
        firsts = usages[:: self.call.n]
        return wire.usage(
            sum(usage.prompt_tokens for usage in firsts),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.reused_tokens for usage in firsts),
        )

    async def whole(self) -> dict[str, Any]:
        """Run to the end.

        Raises:
            AprefetchError: what ended one of the answers.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._collect(choice)) for choice in self._choices]
        results = [task.result() for task in tasks]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return self._envelope.whole([r for r in results if isinstance(r, dict)], self.usage())

    async def _collect(self, choice: _Choice) -> dict[str, Any] | AprefetchError:
        """The whole answer, or what ended it; never raises our errors into the task group."""
        pieces: list[dict[str, Any]] = []
        try:
            async for event in choice.events():
                pieces += choice.take(event)
        except AprefetchError as error:
            return error
        if self.call.kind == "chat":
            return _whole_chat(choice.index, pieces, self.call.logprobs)
        return _whole_completion(choice.index, pieces, self.call.logprobs)

    async def produce(self, write: Write) -> None:
        """Write the events of a streamed answer."""
        call = self.call
        if call.kind == "chat":
            role = {"role": "assistant", "content": ""}
            for choice in self._choices:
                first = {"index": choice.index, "delta": role, "finish_reason": None}
                await write(self._chunk([first]))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._pump(choice, write)) for choice in self._choices]
        failure = next((error for task in tasks if (error := task.result()) is not None), None)
        if isinstance(failure, AprefetchError):
            await write(encode(self._failed(failure)))
            return
        if failure is not None:
            raise failure
        if call.include_usage:
            await write(encode(self._envelope.chunk([], self.usage(), True)))
        await write(DONE)

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return encode(self._envelope.chunk(choices, None, self.call.include_usage))

    async def _pump(self, choice: _Choice, write: Write) -> Exception | None:
        try:
            async for event in choice.events():
                for piece in choice.take(event):
                    await write(self._chunk([piece]))
        except Exception as error:  # told by `produce`: a task group would wrap it
            return error
        return None


def _whole_chat(index: int, pieces: list[dict[str, Any]], logprobs: bool) -> dict[str, Any]:
    deltas = [piece["delta"] for piece in pieces]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
    entries = [e for piece in pieces if piece["logprobs"] for e in piece["logprobs"]["content"]]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": entries} if logprobs else None,
        "finish_reason": pieces[-1]["finish_reason"],
    }


def _whole_completion(index: int, pieces: list[dict[str, Any]], logprobs: bool) -> dict[str, Any]:
    joined: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, values in (piece["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    return {
        "index": index,
        "text": "".join(piece["text"] for piece in pieces),
        "logprobs": joined if logprobs else None,
        "finish_reason": pieces[-1]["finish_reason"],
    }
