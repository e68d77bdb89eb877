"""`Runtime`: the only door. Opens a model, owns everything, runs requests, closes.

`open` starts one supervisor task that holds the engine's task group for the whole life of the
runtime, so any task may open and any other may close. Closing has one order: requests end, the
engine stops, reads drain, memory is freed, files close. That order is kept when the supervisor is
cancelled as well (a signal, the end of `asyncio.run`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aprefetch.config import RuntimeConfig
from aprefetch.engine.generate import Engine
from aprefetch.engine.pacing import ChunkPacer
from aprefetch.engine.request import (
    Completion,
    FinishReason,
    GenerateRequest,
    RequestInfo,
    ScoreRequest,
    ScoreResult,
    Usage,
    checked_timeout,
)
from aprefetch.engine.sampler import Sampler, SamplingParams
from aprefetch.engine.scheduler import Scheduler
from aprefetch.engine.step import StepRunner, StepTimeline
from aprefetch.engine.stream import EventFeed, TokenStream
from aprefetch.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    RuntimeClosedError,
    RuntimeFailedError,
    RuntimeStateError,
)
from aprefetch.loading import (
    in_thread,
    load,
    make_lookahead,
    open_prefix,
    routing_facts,
    state_budget_bytes,
    warm_from_list,
)
from aprefetch.models.base import ModelInfo, WarmsUp
from aprefetch.pipeline.coordinator import Coordinator
from aprefetch.pipeline.reader import make_reader
from aprefetch.plan import Examined, Plan, examine
from aprefetch.prompts import Encoded, Prompt, PromptEncoder
from aprefetch.report import RunReport
from aprefetch.routing_trace import RoutingRecorder, RoutingTrace
from aprefetch.stats import Counters, Stats
from aprefetch.storage.pack import PackState
from aprefetch.text.answer import AnswerFormat, answer_format
from aprefetch.text.detokenizer import Detokenizer
from aprefetch.text.tokenizer import Tokenizer
from aprefetch.trace import Tracer

__all__ = ["Runtime"]

log = logging.getLogger(__name__)

_SLOW_CLOSE_S = 10.0


class _Opening:
    """What `Runtime.open` returns: await it, or enter it with `async with`."""

    def __init__(self, make: Callable[[], Runtime]) -> None:
        self._make = make
        self._runtime: Runtime | None = None

    def __await__(self) -> Generator[Any, None, Runtime]:
        return self._open().__await__()

    async def _open(self) -> Runtime:
        if self._runtime is not None:
            raise RuntimeStateError("this runtime was opened already; call Runtime.open again")
        self._runtime = self._make()
        await self._runtime._start()
        return self._runtime

    async def __aenter__(self) -> Runtime:
        return await self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._runtime is not None:
            await self._runtime.aclose()


class Runtime:
    """An open model. Made by `Runtime.open`; all methods belong to the loop it was opened on."""

    model_info: ModelInfo
    """Facts about the loaded model."""
    plan: Plan
    """What lives where, and the budgets in force."""
    pack_state: PackState
    """Where experts are read from: the model file itself, or a pack, and how that came to be."""
    tokenizer: Tokenizer
    """The vocabulary in use."""
    answer_format: AnswerFormat
    """How the model marks reasoning and tool calls in its answers."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        config: RuntimeConfig | None,
        tokenizer_path: str | os.PathLike[str] | None,
        options: dict[str, Any],
    ) -> None:
        self._path = path
        self._given_config = config
        self._tokenizer_path = tokenizer_path
        self._options = options
        self._counters = Counters()
        self._tracer: Tracer | None = None
        self._recorder: RoutingRecorder | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._is_open = False
        self._failure: BaseException | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        config: RuntimeConfig | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> _Opening:
        """Open a model: `async with Runtime.open(path) as rt`, or `rt = await Runtime.open(path)`.

        Args:
            path: a GGUF file, or any shard of a set; None is the model that ships with the package.
            config: options as one object.
            tokenizer: a tokenizer.json (or its folder) to use instead of what is found.
            options: single options by name, over `config`; see `RuntimeConfig`.

        Raises (when awaited):
            ConfigError: wrong options, all of them in one error.
            ModelError: the file cannot be used.
            BudgetError: a budget below the minimum.
        """
        return _Opening(lambda: cls(path, config, tokenizer, options))

    # Life cycle

    async def _start(self) -> None:
        """Start the supervisor and wait until it is open, or raise what stopped it."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(opened), name="aprefetch-runtime")
        try:
            await asyncio.shield(opened)
        except BaseException:
            if not opened.done():
                self._supervisor.cancel()  # whoever waited has given up: open no further
            await self.aclose()
            raise

    async def _supervise(self, opened: asyncio.Future[None]) -> None:
        try:
            async with AsyncExitStack() as stack:
                engine = await self._build(stack)
                self._is_open = True
                if not opened.done():
                    opened.set_result(None)
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(engine.run(), name="aprefetch-engine")
                        await self._closing.wait()
                        engine.stop()
                except BaseExceptionGroup as failures:
                    self._failure = _first(failures)
                finally:
                    self._is_open = False
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                opened.cancel()
                raise
            if not opened.done():
                opened.set_exception(error)
            else:
                self._failure = self._failure or error
                log.error("closing failed: %s", error)

    async def _build(self, stack: AsyncExitStack) -> Engine:
        """Open every part, from the file up; `stack` closes what was opened, top first."""
        started_ns = time.perf_counter_ns()
        cancel = threading.Event()
        examined = await in_thread(lambda: self._examine(cancel), cancel)
        stack.callback(examined.source.close)
        stack.callback(examined.device.close)
        config, device = examined.config, examined.device
        self.plan, self.pack_state = examined.plan, examined.pack_state
        loaded = await in_thread(lambda: load(examined, self._tokenizer_path))
        self._source, self._device = examined.source, device
        self._model, self.tokenizer = loaded.model, loaded.tokenizer
        self.model_info = loaded.model.info
        self.config = config
        self._prompts = PromptEncoder(
            loaded.tokenizer, loaded.template, self.model_info.n_vocab, self._context_tokens
        )
        self.answer_format = answer_format(loaded.tokenizer)
        if config.trace.enabled:
            self._tracer = Tracer(config.trace.max_events, {"model": self.model_info.name})
        if config.trace.routing:
            self._recorder = RoutingRecorder(routing_facts(examined, self.model_info))
        reader = make_reader(
            examined.experts.paths,
            backend=config.reader.backend,
            counters=self._counters,
            queue_depth=config.reader.queue_depth,
            strict_direct=config.reader.strict_direct,
            slice_bytes=_bytes(config.reader.slice_bytes),
            alignment=examined.experts.alignment,
            retries=config.reader.retries,
        )
        self._reader = reader
        stack.push_async_callback(reader.aclose)
        self._coordinator = Coordinator(
            experts=examined.experts,
            device=device,
            reader=reader,
            vram_budget=self.plan.vram_budget_bytes,
            ram_budget=self.plan.ram_budget_bytes,
            ram_tier=self.config.memory.ram_tier_on(device.name),
            counters=self._counters,
            tracer=self._tracer,
            policy=config.cache_policy,
        )
        stack.push_async_callback(self._coordinator.aclose)
        if getattr(device, "n_pageable_bytes", 0):  # the driver refused to pin host memory
            self._counters.fallback_count += 1
        if isinstance(loaded.model, WarmsUp):
            await in_thread(functools.partial(loaded.model.warm_up, self._coordinator.arena))
        self._runner = StepRunner(
            loaded.model,
            self._coordinator,
            await asyncio.to_thread(
                make_lookahead, examined, config, loaded.model, device.name, self._counters
            ),
            device,
            self._counters,
            self._tracer,
            recorder=self._recorder,
            settled=config.trace.settled,
        )
        await warm_from_list(self._coordinator, examined, stack)
        self._prefix = await in_thread(lambda: open_prefix(examined))
        if self._prefix is not None:
            stack.push_async_callback(self._prefix.aclose)
        self._engine = Engine(
            model=loaded.model,
            runner=self._runner,
            device=device,
            scheduler=Scheduler(
                max_sequences=config.max_requests,
                batch_invariant=device.ops.batch_invariant,
                max_waiting=config.batch.max_waiting,
                state_budget_bytes=state_budget_bytes(examined, loaded.model.info),
            ),
            pacer=ChunkPacer(config.chunk_tokens, config.batch.token_gap_s),
            counters=self._counters,
            tracer=self._tracer,
            check_source=examined.source.check_unchanged,
            prefix=self._prefix,
        )
        log.info("opened %s in %.2f s", self.plan.path, (time.perf_counter_ns() - started_ns) / 1e9)
        return self._engine

    def _examine(self, cancel: threading.Event) -> Examined:
        wrong = [
            f"{name} must be a path or None, got {value!r:.60}"
            for name, value in (("path", self._path), ("tokenizer", self._tokenizer_path))
            if value is not None and not isinstance(value, str | os.PathLike)
        ]
        if wrong:
            raise ConfigError(wrong)
        return examine(self._path, self._given_config, cancel=cancel, **self._options)

    async def aclose(self) -> None:
        """End all requests, drain reads, free memory. Idempotent; any task may call it.

        Requests that still run get `RuntimeClosedError`.
        """
        self._closing.set()
        supervisor = self._supervisor
        if supervisor is None or supervisor.done():
            return
        if supervisor is asyncio.current_task():
            raise RuntimeStateError("a runtime cannot be closed from its own supervisor")
        while not supervisor.done():
            await asyncio.wait({supervisor}, timeout=_SLOW_CLOSE_S)
            if not supervisor.done():
                log.warning("closing %s takes long: waiting for reads", self._path)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False) and not self._closing.is_set():
            warnings.warn(
                "a Runtime was dropped while open; use `async with`, or await its aclose()",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RuntimeFailedError(
                f"the runtime failed and must be opened anew: {self._failure}"
            ) from self._failure
        if not self._is_open or self._closing.is_set():
            raise RuntimeClosedError("the runtime is closed; open it anew")

    # Requests

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_options: Mapping[str, Any] | None = None,
        keep_special: Collection[int] = (),
        timeout_s: float | None = None,
        **keywords: Any,
    ) -> TokenStream:
        """The tokens of an answer as they come.

        Args:
            prompt: text to continue, token ids, or chat messages (`role`, `content`).
            params, keywords: see `SamplingParams`; keywords override the object.
            chat_options: variables for the chat template, such as `thinking=True`.
            timeout_s: seconds that the request may take, waiting included; None is the
                option `request_timeout_s`.
            keep_special: control tokens whose text is given out too; others never are.

        Raises:
            InvalidRequestError: wrong parameters, at once; a wrong prompt when iteration begins.
            ContextLengthError: the prompt leaves no room for an answer (when iteration begins).
            QueueFullError: too many requests wait already (when iteration begins).
            BudgetError: its caches would not fit into `state_budget` (when iteration begins).
            DeadlineError: the time was up (from the iteration).
            RuntimeStateError: closed or failed.
        """
        self._check_open()
        chosen = SamplingParams.build(params, **keywords)
        timeout_s = checked_timeout(timeout_s, self.config.batch.request_timeout_s)

        async def prepare() -> GenerateRequest:
            encoded = await self._encode(prompt, chat_options)
            stream.prompt, stream.template = encoded.text, encoded.template
            request = self._request(encoded.ids, chosen, keep_special)
            request.set_timeout(timeout_s)
            await self._seek_kept(request, encoded, prompt, chat_options)
            return request

        stream = TokenStream(prepare, self._engine.submit, self._engine.cancel)
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat_options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **keywords: Any,
    ) -> Completion:
        """A whole answer; see `stream` for arguments and errors."""
        before = self.stats()
        texts: list[str] = []
        logprobs: list[float] = []
        async with self.stream(
            prompt, params, chat_options=chat_options, timeout_s=timeout_s, **keywords
        ) as stream:
            async for event in stream:
                texts.append(event.text)
                if event.logprob is not None:
                    logprobs.append(event.logprob)
        return Completion(
            text="".join(texts),
            token_ids=stream.token_ids,
            finish_reason=stream.finish_reason or FinishReason.CANCELLED,
            usage=stream.usage,
            stats=self.stats().since(before),
            prompt=stream.prompt,
            prompt_token_ids=stream.prompt_token_ids,
            template=stream.template,
            logprobs=logprobs or None,
        )

    async def score(
        self,
        prompt: Prompt,
        *,
        logits: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> ScoreResult:
        """Teacher-forced log-probabilities of a given text.

        Args:
            prompt: text (BOS is added where the model wants it), token ids as they are, or chat
                messages.
            logits: also return the logits `[N, V]`, float32.
            progress: called with (tokens done, tokens in all).

        Raises:
            InvalidRequestError: fewer than two tokens, or not a prompt.
            ContextLengthError: more tokens than the context holds.
        """
        self._check_open()
        before = self.stats()
        ids = (await self._encode(prompt, chat_options, for_answer=False)).ids
        if len(ids) < 2:
            raise InvalidRequestError("a text of at least two tokens is needed", param="prompt")
        if len(ids) > self._context_tokens:
            raise self._too_long(len(ids))
        request = ScoreRequest(
            ids, n_vocab=self.model_info.n_vocab, keep_logits=logits, progress=progress
        )
        request.set_timeout(self.config.batch.request_timeout_s)
        self._engine.submit(request)
        try:
            await request.ended.wait()
        finally:
            if not request.ended.is_set():
                self._engine.cancel(request)
                await request.ended.wait()
        if request.error is not None:
            raise request.error
        return ScoreResult(
            token_ids=ids,
            logprobs=request.logprobs,
            stats=self.stats().since(before),
            logits=request.logits,
        )

    async def _seek_kept(
        self,
        request: GenerateRequest,
        encoded: Encoded,
        prompt: Prompt,
        chat_options: Mapping[str, Any] | None,
    ) -> None:
        """Let a request begin where an earlier one was, and keep its state for later ones."""
        if self._prefix is None:
            return
        request.kept = await self._prefix.find(encoded.ids)
        request.keep_at = request.n_prompt
        is_chat = encoded.template is not None and encoded.text is not None
        if is_chat and self.answer_format.begins_with_reasoning(encoded.text or ""):
            request.keep_at = await asyncio.to_thread(
                self._prompts.n_lasting, encoded, prompt, chat_options or {}
            )

    @property
    def _context_tokens(self) -> int:
        own, chosen = self.model_info.context_length, self.config.memory.context_tokens
        return own if chosen is None else min(own, chosen)

    def _too_long(self, n_tokens: int) -> ContextLengthError:
        limit = self._context_tokens
        return ContextLengthError(
            f"the prompt has {n_tokens} tokens, the context holds {limit} with the answer; "
            "shorten the prompt",
            n_tokens=n_tokens,
            limit_tokens=limit,
        )

    def _request(
        self, ids: list[int], params: SamplingParams, keep_special: Collection[int]
    ) -> GenerateRequest:
        room = self._context_tokens - len(ids)
        if room < max(1, params.min_tokens):
            raise self._too_long(len(ids))
        ends = self.tokenizer.eog_ids
        return GenerateRequest(
            ids,
            sampler=Sampler(
                params,
                self.model_info.n_vocab,
                prompt_ids=ids,
                end_ids=() if params.ignore_eos else ends,
            ),
            feed=EventFeed(
                Detokenizer(self.tokenizer, tuple(params.stop), keep=frozenset(keep_special))
            ),
            stop_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else ends),
            max_tokens=min(params.max_tokens, room),
        )

    async def _encode(
        self,
        prompt: Prompt,
        chat_options: Mapping[str, Any] | None,
        *,
        for_answer: bool = True,
    ) -> Encoded:
        self._source.check_unchanged()
        return await self._prompts.encode(prompt, chat_options, for_answer=for_answer)

    # Looking in

    @property
    def is_open(self) -> bool:
        """Whether requests are taken; false once closing began, or after a failure."""
        return self._is_open and self._failure is None and not self._closing.is_set()

    def requests(self) -> list[RequestInfo]:
        """The requests that are not over: those that run, then those that wait."""
        engine = getattr(self, "_engine", None)
        return [request.describe() for request in engine.requests()] if engine is not None else []

    @property
    def last_step(self) -> StepTimeline | None:
        """Where the time of the last step went; None before the first."""
        runner = getattr(self, "_runner", None)
        return runner.last_step if runner is not None else None

    @property
    def reads_in_flight(self) -> int:
        """Reads that are in flight now."""
        reader = getattr(self, "_reader", None)
        return reader.statistics().in_flight if reader is not None else 0

    def stats(self) -> Stats:
        """Counters since the opening, and bytes by tier. Works while requests run."""
        coordinator = getattr(self, "_coordinator", None)
        memory = dict(coordinator.memory()) if coordinator is not None else {}
        engine = getattr(self, "_engine", None)
        if engine is not None:
            memory["states_bytes"] = engine.state_bytes()
            memory["kept_states_bytes"] = self._prefix.n_bytes if self._prefix is not None else 0
        return self._counters.snapshot(**memory)

    def report(self, usage: Usage, stats: Stats) -> RunReport:
        """The report of one request, from its usage and the stats that belong to it."""
        label = getattr(self._device, "label", self._device.name)
        return RunReport(
            model=self.model_info.name or self.plan.path.name,
            device=f"{label} ({self._device.ops.name} kernels)",
            plan=self.plan,
            pack_state=self.pack_state,
            usage=usage,
            stats=stats,
        )

    def routing_trace(self) -> RoutingTrace:
        """Picks, guesses, tiers and times of the steps so far, with the loads if spans are traced.

        Raises:
            ConfigError: the runtime was opened without `trace_routing=True`.
        """
        if self._recorder is None:
            raise ConfigError("no routing was recorded; open the runtime with trace_routing=True")
        loads = self._tracer.loads() if self._tracer is not None else ()
        return self._recorder.trace(loads, {"counters": self.stats().to_dict()})

    async def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded as a Chrome trace, for Perfetto and the like.

        Raises:
            ConfigError: the runtime was opened without `trace=True`, or the file cannot be written.
        """
        tracer = self._tracer
        if tracer is None:
            raise ConfigError("nothing was traced; open the runtime with trace=True")
        try:
            await asyncio.to_thread(tracer.export, Path(path))
        except OSError as error:
            raise ConfigError(f"trace {path}: {error.strerror or error}") from error


def _bytes(size: int | str | None) -> int | None:
    return size if isinstance(size, int) else None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception that is no group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
