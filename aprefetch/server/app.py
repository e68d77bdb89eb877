"""The routes: OpenAI's API, health, metrics, and a live page, over one open runtime.

The app owns no model: whoever makes it opens the runtime before and closes it afterwards. What is
wrong with a request is answered in OpenAI's shape; a request ends when its client goes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from aprefetch import (
    AprefetchError,
    BudgetError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    QueueFullError,
    RequestError,
    Runtime,
    RuntimeClosedError,
)
from aprefetch.server.answers import Answers
from aprefetch.server.metrics import CONTENT_TYPE, Metrics
from aprefetch.server.schema import Call, parse_chat, parse_completion, parse_json
from aprefetch.server.sse import ClientGone, EventResponse, while_connected

__all__ = ["ServerOptions", "create_app"]

log = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({"/health", "/"})  # without a key: they tell nothing of any request
_LARGE_BODY = 1 << 16  # bytes; larger ones are parsed on a thread
_GONE = 499  # what proxies log for a client that went; nobody receives it
_MAX_MESSAGE = 1000
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to serve.

    Args:
        model_name: the name that clients ask for; None takes the model's own.
        api_keys: any of them opens the door; empty for an open door.
        max_body_bytes: larger requests are refused.
        max_choices: most answers of one request.
        heartbeat_s: a silent stream sends a comment after so long.
        stall_s: a client that takes nothing for so long is dropped.
        body_s: a request must have arrived within so long.
    """

    model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    max_choices: int = 16
    heartbeat_s: float = 10.0
    stall_s: float = 60.0
    body_s: float = 60.0


class _HttpError(Exception):
    """An answer in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, kind: str, *, code: str | None = None, param: Any = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param


def _as_http(error: Exception) -> _HttpError:
    """Which status and words an error of ours has on the wire."""
    text = str(error)
    bad, down = "invalid_request_error", "server_error"
    match error:
        case _HttpError():
            return error
        case ContextLengthError():
            code = "context_length_exceeded"
            return _HttpError(400, text, bad, code=code, param="messages")
        case QueueFullError():
            return _HttpError(429, text, "rate_limit_error", code="rate_limit_exceeded")
        case DeadlineError():
            return _HttpError(504, text, "timeout_error", code="timeout")
        case InvalidRequestError():
            return _HttpError(400, text, bad, code="invalid_value", param=error.param)
        case BudgetError() | RequestError():
            return _HttpError(400, text, bad)
        case RuntimeClosedError():
            return _HttpError(503, text, down, code="shutting_down")
        case _:
            return _HttpError(500, text, down)


def _error_object(error: _HttpError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error)[:_MAX_MESSAGE],
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def _failed(error: Exception) -> dict[str, Any]:
    return _error_object(_as_http(error))


async def _on_error(_: Request, error: Exception) -> Response:
    shown = _as_http(error)
    if shown.status >= 500:
        log.error("a request failed: %s", error)
    headers = {"retry-after": "1"} if shown.status in (429, 503) else None
    return JSONResponse(_error_object(shown), shown.status, headers=headers)


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this address", 405: "this method is not allowed here"}
    shown = _HttpError(
        error.status_code, words.get(error.status_code, error.detail), "invalid_request_error"
    )
    return JSONResponse(_error_object(shown), error.status_code, headers=error.headers)


async def _on_bug(_: Request, error: Exception) -> Response:
    """A fault of ours. What it says is for the log only."""
    shown = _HttpError(500, "the server failed on this request; its log says more", "server_error")
    return JSONResponse(_error_object(shown), 500)


class _KeyCheck:
    """Refuses requests without one of the keys. Plain ASGI, so bodies are not touched."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and not self._knows(scope):
            text = "an API key is needed: Authorization: Bearer KEY"
            error = _HttpError(401, text, "authentication_error", code="invalid_api_key")
            headers = {"www-authenticate": "Bearer"}
            await JSONResponse(_error_object(error), 401, headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
        # All are compared, each in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(given, key) for key in self._keys) > 0


class _Api:
    """The endpoints."""

    def __init__(self, runtime: Runtime, options: ServerOptions) -> None:
        self._runtime, self._options = runtime, options
        self._metrics = Metrics(runtime)
        self._created_s, self._opened_ns = int(time.time()), time.perf_counter_ns()
        self._page = (files("aprefetch.server") / "page.html").read_bytes()
        info = runtime.model_info
        self._model = options.model_name or info.name or runtime.plan.path.stem
        limit = runtime.config.memory.context_tokens or info.context_length
        self._context_tokens = min(limit, info.context_length)

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/", self.page),
            Route("/live", self.live),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    async def health(self, _: Request) -> Response:
        is_up = self._runtime.is_open
        return JSONResponse({"status": "ok" if is_up else "down"}, 200 if is_up else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)

    async def page(self, _: Request) -> Response:
        return Response(self._page, media_type="text/html", headers=_PAGE_HEADERS)

    async def live(self, _: Request) -> Response:
        """What the page shows; a snapshot that costs next to nothing."""
        runtime, step = self._runtime, self._runtime.last_step
        shown = {
            "model": self._model,
            "device": runtime.plan.device,
            "uptime_s": (time.perf_counter_ns() - self._opened_ns) / 1e9,
            "stats": runtime.stats().to_dict(),
            "requests": [request.to_dict() for request in runtime.requests()],
            "last_step": None if step is None else asdict(step),
        }
        return _Json(shown)

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "aprefetch",
            "context_length": self._context_tokens,
        }

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model_object())

    def _check_model(self, name: Any) -> None:
        if not isinstance(name, str):
            raise InvalidRequestError("model must be given, as a string", param="model")
        if name != self._model:
            text = f"the model {name[:100]!r} is not served here; {self._model!r} is"
            kind, code = "invalid_request_error", "model_not_found"
            raise _HttpError(404, text, kind, code=code, param="model")

    async def chat(self, request: Request) -> Response:
        limits = {
            "context_tokens": self._context_tokens,
            "max_choices": self._options.max_choices,
        }
        return await self._serve(request, lambda body: parse_chat(body, **limits))

    async def completions(self, request: Request) -> Response:
        n = self._options.max_choices
        return await self._serve(request, lambda body: parse_completion(body, max_choices=n))

    async def _serve(self, request: Request, parse: Callable[[dict[str, Any]], Call]) -> Response:
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        self._check_model(body.get("model"))
        call = parse(body)
        answers = Answers(self._runtime, call, self._metrics, model=self._model, failed=_failed)
        await answers.open()
        if call.stream:
            return EventResponse(
                answers.produce,
                answers.close,
                heartbeat_s=self._options.heartbeat_s,
                stall_s=self._options.stall_s,
            )
        try:
            whole = await while_connected(request.receive, answers.whole())
        except ClientGone:
            return Response(status_code=_GONE)
        finally:
            await answers.close()
        return _Json(whole)

    async def _body(self, request: Request) -> dict[str, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also keeps other sites' pages from asking in secret
            text = "the content type must be application/json"
            raise _HttpError(415, text, "invalid_request_error")
        limit = self._options.max_body_bytes
        declared = request.headers.get("content-length", "")
        data = bytearray()
        try:
            async with asyncio.timeout(self._options.body_s):
                if not (declared.isdecimal() and int(declared) > limit):
                    async for block in request.stream():
                        data += block
                        if len(data) > limit:
                            break
        except TimeoutError:
            raise _HttpError(
                408, "the request did not arrive in time", "invalid_request_error"
            ) from None
        if len(data) > limit or (declared.isdecimal() and int(declared) > limit):
            text = f"the request is larger than {limit} bytes"
            raise _HttpError(413, text, "invalid_request_error", code="request_too_large")
        if len(data) > _LARGE_BODY:
            return await asyncio.to_thread(parse_json, bytes(data))
        return parse_json(bytes(data))


class _Json(Response):
    """JSON in ASCII: text of the model may hold lone surrogates' replacements, never invalid."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def create_app(runtime: Runtime, options: ServerOptions | None = None) -> ASGIApp:
    """An ASGI app over an open runtime, to be run on the runtime's own loop."""
    options = options or ServerOptions()
    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        AprefetchError: _on_error,
        _HttpError: _on_error,
        HTTPException: _on_http_exception,
        Exception: _on_bug,
    }
    app: ASGIApp = Starlette(routes=_Api(runtime, options).routes(), exception_handlers=handlers)
    return _KeyCheck(app, options.api_keys) if options.api_keys else app
