"""The HTTP endpoint: routes, bodies, server-sent events, disconnects and errors. Everything about texts is in `openai`.

A plain ASGI application that needs no Ray; what serves the tokens is behind `Lanes`.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import msgspec
import pydantic_core
from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.dashboard.latency import LatencyWindow
from deployments.dashboard.page import page
from deployments.keys import Keys
from deployments.logs import request_id
from deployments.openai import Answer, Job, ServedModel, model_not_found, validate_chat, validate_completion
from deployments.schema import ApiError, Part, as_api_error, model_card
from engine.config import ApiConfig
from engine.types import Delta, FinishReason, GenerateRequest

HEARTBEAT_S = 15.0
"""Longest silence of a stream: proxies close connections that say nothing."""
STATUS_TIMEOUT_S = 5.0
OPEN_PATHS = frozenset({"/health", "/livez", "/dashboard"})
"""For probes, and the page without any data. `/health` tells those without a key `PROBED` alone."""
PROBED = ("ready", "reason")
_HAS_KEY = "outrider.has_key"
"""In the scope of a connection: whether it may know everything."""
"""What answers without a key; every other route, also a new one, needs one. The page holds no data and asks for the key."""

LONGEST_REQUEST_ID = 128

_INLINE_BODY_BYTES = 4096
"""Larger bodies are parsed and tokenised in a thread: about a microsecond per character."""
_MAX_QUEUED_DELTAS = 64
"""A client that does not read holds its lanes back rather than filling this process."""
_CLIENT_GONE = 499
_STATUS_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed"}
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"

log = logging.getLogger(__name__)
T = TypeVar("T")


class Lanes(Protocol):
    """Where tokens come from."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """The deltas of one request; the last one has a finish reason. Closing the iterator cancels the request.

        Raises `Overloaded`, `InvalidRequest` or anything else, at once or later.
        """


@dataclass(frozen=True, kw_only=True)
class ApiState:
    """What the endpoint works with."""

    lanes: Lanes
    model: ServedModel
    config: ApiConfig
    status: Callable[[], Awaitable[Mapping[str, Any]]]
    """``ready`` (bool) and ``reason`` (why not, or why degraded), and whatever else describes the deployment."""
    metrics: Callable[[], Awaitable[str]]
    """Prometheus text."""
    controller: Callable[[], Awaitable[Mapping[str, Any]]]
    """What the controller decided last, and from what."""
    dashboard: Callable[[], Awaitable[Mapping[str, Any]]]
    """The cluster as the live page shows it (`deployments.dashboard.data`)."""
    latencies: LatencyWindow = field(default_factory=LatencyWindow)
    """Filled by the requests that this application serves."""
    api_keys: Keys | None = None
    """Accepted bearer tokens; None means that no key is asked for."""
    request_timeout_s: float | None = None
    """Longest time for an answer, for a stream the longest time without a token; then 408, or an error in the stream."""
    heartbeat_s: float = HEARTBEAT_S
    answers_request_id: bool = True
    """Whether the header ``x-request-id`` is ours to send; false under Ray Serve, which adds it to every answer itself."""
    trace_parent: Callable[[], str] = lambda: ""
    """The current span, for `GenerateRequest.trace_parent`."""


def build_http_app(state: ApiState) -> FastAPI:
    """The application with all its routes."""
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Envelope, keys=state.api_keys, answers_request_id=state.answers_request_id)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_generation_routes(app, state)
    _add_model_routes(app, state)
    _add_operations_routes(app, state)
    _add_dashboard_routes(app, state)
    return app


def _add_generation_routes(app: FastAPI, state: ApiState) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(request, state, validate_chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(request, state, validate_completion)


def _add_model_routes(app: FastAPI, state: ApiState) -> None:
    card = model_card(state.model.name, state.model.created, state.model.max_context)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != state.model.name:
            raise model_not_found(name, state.model)
        return _json(card)


def _add_operations_routes(app: FastAPI, state: ApiState) -> None:
    @app.get("/livez")
    async def livez() -> Response:
        return _json({"alive": True})

    @app.get("/health")
    async def health(request: Request) -> Response:
        status = await _status(state)
        told = status if request.scope[_HAS_KEY] else {name: status[name] for name in PROBED if name in status}
        return _json(told, 200 if status.get("ready") else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await state.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/controller")
    async def controller() -> Response:
        return _json(await state.controller())


def _add_dashboard_routes(app: FastAPI, state: ApiState) -> None:
    @app.get("/dashboard")
    async def dashboard() -> Response:
        document, headers = page()
        return Response(document, headers=headers, media_type="text/html; charset=utf-8")

    @app.get("/dashboard/data")
    async def dashboard_data() -> Response:
        model = {"name": state.model.name, "has_chat": bool(state.model.tokenizer.chat_template)}
        return _json({"model": model, "latency": state.latencies.summary(), **await state.dashboard()})


async def _status(state: ApiState) -> Mapping[str, Any]:
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await state.status()
    except Exception:
        log.exception("the status could not be read")
        return {"ready": False, "reason": "the status of the deployment could not be read"}


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _error_response(error: ApiError) -> Response:
    return _json(error.body, error.status, error.headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such route, or the wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    answer = ApiError(error.status_code, message, code=_STATUS_CODES.get(error.status_code), headers=error.headers)
    return _error_response(answer)


# Validates a parsed body: (body, limits, model) -> Job.
_Validate = Callable[[Mapping[str, Any], ApiConfig, ServedModel], Job]


async def _generate(request: Request, state: ApiState, validate: _Validate) -> Response:
    """Read the body, then work on it for as long as the client is there."""
    try:
        body = await _read_body(request, state.config.max_body_bytes)
        return await _while_connected(request.receive, _answer(state, validate, body))
    except ClientDisconnect:
        return Response(status_code=_CLIENT_GONE)


async def _answer(state: ApiState, validate: _Validate, body: bytes) -> Response:
    if len(body) > _INLINE_BODY_BYTES:
        job = await asyncio.to_thread(_prepare, state, validate, body)
    else:
        job = _prepare(state, validate, body)
    job = _traceable(job, state.trace_parent())
    if not job.stream:
        return _json(await _complete(state, job))
    frames = _frames(state, job)
    return _EventStream(await anext(frames), frames)  # errors until the first frame are plain JSON


def _prepare(state: ApiState, validate: _Validate, body: bytes) -> Job:
    try:
        parsed = pydantic_core.from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return validate(parsed, state.config, state.model)


def _traceable(job: Job, trace_parent: str) -> Job:
    """With what lets logs and traces of other processes be joined with this HTTP request."""
    told = {"log_id": request_id.get(), "trace_parent": trace_parent}
    return replace(job, requests=tuple(msgspec.structs.replace(request, **told) for request in job.requests))


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; counts while reading, because a chunked body does not say its length."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, f"the content type must be application/json, got '{media_type}'", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not supported", code="unsupported_media_type")
    too_large = ApiError(413, f"the body is larger than the {max_bytes} bytes allowed", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; if the client leaves first, cancel it, wait for its end and raise `ClientDisconnect`."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _complete(state: ApiState, job: Job) -> dict[str, Any]:
    """The answer in one piece."""
    answer = Answer(job, state.model)
    parts: list[list[Part]] = [[] for _ in job.requests]
    async with asyncio.timeout(state.request_timeout_s), _Deltas(state, job.requests) as deltas:
        while (item := await deltas.next()) is not None:
            index, delta = item
            parts[index].append(answer.feed(index, delta))
    return answer.whole(parts)


async def _frames(state: ApiState, job: Job) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. An error before the first frame is raised, a later one is the last frame."""
    answer = Answer(job, state.model)
    started = False
    try:
        async with _Deltas(state, job.requests) as deltas, aclosing(_paced(deltas, state)) as items:
            async for item in items:
                frame = _KEEP_ALIVE if item is None else _chunk(answer, *item)
                if frame:
                    yield frame
                    started = True
    except Exception as error:
        if not started:
            raise
        yield _event(_logged(error).body)
        return
    if job.include_usage:
        yield _event(answer.usage_chunk())
    yield _DONE


async def _paced(deltas: "_Deltas", state: ApiState) -> AsyncGenerator[tuple[int, Delta] | None, None]:
    """The deltas, and None whenever it is time for a sign of life; raises `TimeoutError` after too long a silence."""
    limit_s = state.request_timeout_s or float("inf")
    silent_s = 0.0
    while True:
        wait_s = min(state.heartbeat_s, limit_s - silent_s)
        try:
            item = await deltas.next(wait_s)
        except _NothingYet:
            silent_s += wait_s
            if silent_s >= limit_s:
                raise TimeoutError from None
            yield None
            continue
        if item is None:
            return
        silent_s = 0.0
        yield item


def _chunk(answer: Answer, index: int, delta: Delta) -> bytes:
    """One round of one choice is one chunk; nothing when it made no text yet (a character or a stop string is open)."""
    part = answer.feed(index, delta)
    return b"" if part.is_silent else _event(answer.chunk(index, part))


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _logged(error: Exception) -> ApiError:
    """The answer to ``error``; the log gets what the client must not see."""
    answer = as_api_error(error)
    if answer.status == 500:
        log.error("a request failed", exc_info=error)
    return answer


class _NothingYet(Exception):
    """No delta came in the time that was allowed."""


class _Deltas:
    """Runs the requests of one job side by side and hands out their deltas as they come.

    Leaving the context closes every request that is still running, and waits until it is closed.
    """

    def __init__(self, state: ApiState, requests: Iterable[GenerateRequest]):
        self._lanes = state.lanes
        self._latencies = state.latencies
        self._requests = tuple(requests)
        self._queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(_MAX_QUEUED_DELTAS)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(index, request)) for index, request in enumerate(self._requests)]
        self._num_running = len(self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, timeout_s: float | None = None) -> tuple[int, Delta] | None:
        """The next delta with the index of its request, None at the end; raises the first failure, or `_NothingYet`."""
        while self._num_running:
            item = await self._get(timeout_s)
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._num_running -= 1
        return None

    async def _get(self, timeout_s: float | None) -> tuple[int, Delta] | Exception | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        except TimeoutError:
            raise _NothingYet from None

    async def _run(self, index: int, request: GenerateRequest) -> None:
        try:
            await self._forward(index, request)
            await self._queue.put(None)
        except Exception as error:
            await self._queue.put(error)

    async def _forward(self, index: int, request: GenerateRequest) -> None:
        if request.params.max_tokens == 0 and request.params.prompt_logprobs is None:  # nothing but the prompt's text
            await self._queue.put(
                (index, Delta(request_id=request.request_id, token_ids=(), finish_reason=FinishReason.LENGTH))
            )
            return
        deltas, times = self._lanes.generate(request), self._latencies.stream()
        try:
            async for delta in deltas:
                times.arrived(len(delta.token_ids))
                await self._queue.put((index, delta))
                if delta.finish_reason is not None:
                    await anext(deltas, None)  # lets it end by itself: closing a finished request would look like a cancel
                    return
            raise ConnectionError("a lane ended a request without a finish reason")
        finally:
            if (close := getattr(deltas, "aclose", None)) is not None:
                await close()


class _EventStream(Response):
    """A stream whose source is closed as soon as the client leaves, even while nothing is being sent."""

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None]):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end; a client that is gone is nobody's error."""
        try:
            await _while_connected(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            return
        finally:
            await self._frames.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Envelope:
    """Around every route: the request id, the key, and errors in OpenAI's shape."""

    def __init__(self, app: ASGIApp, keys: Keys | None, answers_request_id: bool):
        self._app = app
        self._keys = keys
        self._answers_request_id = answers_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = _request_id(headers.get("x-request-id", ""))
        reply = _Reply(send, name if self._answers_request_id else None)
        named = request_id.set(name)
        try:
            scope[_HAS_KEY] = self._keys is None or self._has_key(self._keys, headers.get("authorization", ""))
            if not scope[_HAS_KEY] and scope["path"] not in OPEN_PATHS:
                raise _key_needed()
            await self._app(scope, receive, reply)
        except Exception as error:
            answer = _logged(error)
            if reply.started:
                raise
            await _error_response(answer)(scope, receive, reply)
        finally:
            request_id.reset(named)

    @staticmethod
    def _has_key(keys: Keys, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        return scheme.lower() == "bearer" and keys.accepts(key.strip())


def _key_needed() -> ApiError:
    message = "a valid API key is needed: send the header 'Authorization: Bearer <key>'"
    return ApiError(401, message, code=_STATUS_CODES[401], headers={"WWW-Authenticate": "Bearer"})


class _Reply:
    """``send`` with the request id, if any, in the headers; remembers whether an answer has begun."""

    def __init__(self, send: Send, name: str | None):
        self.started = False
        self._send = send
        self._name = name

    async def __call__(self, message: Message) -> None:
        """Pass one message on."""
        if message["type"] == "http.response.start":
            self.started = True
            if self._name is not None:
                MutableHeaders(scope=message)["x-request-id"] = self._name
        await self._send(message)


def _request_id(given: str) -> str:
    """The caller's own id, so that logs can be joined, with ``_`` for what could forge a line of them; or a new one."""
    return re.sub(r"[^\w.:-]", "_", given, flags=re.ASCII)[:LONGEST_REQUEST_ID] or f"req_{secrets.token_hex(12)}"
