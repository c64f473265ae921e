"""One request to an OpenAI-compatible endpoint, timed while its answer streams."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from engine.errors import ConfigError, OutriderError

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 600.0
"""For a whole answer: signs of life of a server that says nothing else must not keep a benchmark for ever."""
DEFAULT_RETRY_AFTER_S = 1.0
LONGEST_RETRY_AFTER_S = 30.0
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")
"""Of a chat's delta: some servers stream what a model thinks under another name, and it is waited for like the rest."""


@dataclass(frozen=True)
class Endpoint:
    """Where requests go."""

    url: str
    """Without ``/v1``."""
    model: str
    api: str = "chat"
    """A key of `PATHS`."""
    is_outrider: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def client(self) -> httpx.AsyncClient:
        """For any number of requests at once; it waits for connections, never for a free place in a pool."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None)
        return httpx.AsyncClient(base_url=self.url, headers=dict(self.headers), limits=limits, timeout=timeout)

    def body(self, prompt: str, **params: Any) -> dict[str, Any]:
        """A streaming request that asks for its usage."""
        text = {"messages": [{"role": "user", "content": prompt}]} if self.api == "chat" else {"prompt": prompt}
        return {"model": self.model, **text, **params, "stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Arm:
    """What is compared: a way of answering, chosen by fields of each request or by a call before the load."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    enter: Callable[[], None] = lambda: None


def find_endpoint(
    url: str, *, model: str | None = None, api: str = "chat", headers: Mapping[str, str] | None = None
) -> Endpoint:
    """Ask ``/v1/models`` what is served; ``model`` None takes the only one there is.

    An Outrider server is known by the owner of its models. Raises `ConfigError` where a model must be named, `OutriderError`
    for a server that cannot be reached or wants a key.
    """
    base = url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(headers=dict(headers or {}), timeout=CONNECT_TIMEOUT_S) as client:
            response = client.get(f"{base}/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OutriderError(f"--url {url}: cannot be reached ({_reason(error)})") from None
    if response.status_code in (401, 403):
        raise OutriderError(f"--url {url}: answered {response.status_code}; give a key by --api-key-env or --api-key-file")
    cards = _models(response)
    if model is None:
        if len(cards) != 1:
            listed = f"serves {', '.join(cards)}" if cards else f"does not list its models ({response.status_code})"
            raise ConfigError(f"--url {url}: {listed}; name one by --model")
        (model,) = cards
    if cards and model not in cards:
        raise ConfigError(f"--model {model}: {url} serves {', '.join(cards)}")
    return Endpoint(base, model, api, cards.get(model) == "outrider", headers or {})


def _models(response: httpx.Response) -> dict[str, str]:
    """Owner by name; empty where the answer is not a list of models."""
    try:
        return {str(card["id"]): str(card.get("owned_by")) for card in response.json()["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


@dataclass
class Answer:
    """What one request saw. Times are those of `time.monotonic`."""

    intended_s: float
    """When it should have been sent: all latencies count from here, so that a late client hides nothing."""
    texts_s: list[float] = field(default_factory=list)
    """When chunks with text came."""
    ended_s: float = math.nan
    num_tokens: int = 0
    """As the server counts them (usage), else the number of chunks with text."""
    has_usage: bool = False
    num_accepted: int | None = None
    """Draft tokens that were kept, where the server says so."""
    is_finished: bool = False
    error: str | None = None
    """A status, or what happened to the connection or stream."""
    detail: str = ""
    retry_after_s: float = DEFAULT_RETRY_AFTER_S
    num_rejections: int = 0
    """Answers 429 that were waited out before this one."""

    @property
    def ttft_s(self) -> float | None:
        """From the intended moment to the first chunk with text."""
        return self.texts_s[0] - self.intended_s if self.texts_s and self.error is None else None

    @property
    def itl_s(self) -> float | None:
        """Mean time between two tokens of this request: ``(t_last - t_first) / (n - 1)``.

        One chunk of a speculating server carries every token that its round committed, and says not how many: the time between
        chunks is that of a round. So n is the server's count of tokens (usage), and the times are those of the first and the
        last chunk with text. Other benchmarks call this TPOT. None for an answer of one token, or in one chunk.
        """
        if self.error is not None or self.num_tokens < 2 or len(self.texts_s) < 2:
            return None
        return (self.texts_s[-1] - self.texts_s[0]) / (self.num_tokens - 1)

    def tokens_within(self, begin_s: float, end_s: float) -> float:
        """Tokens that came in this time, taking all chunks of the request to carry the same number of them."""
        inside = sum(begin_s <= at_s <= end_s for at_s in self.texts_s)
        return self.num_tokens * inside / len(self.texts_s) if inside else 0.0

    def feed(self, event: Mapping[str, Any], now_s: float) -> None:
        """Take one event of the stream."""
        if event.get("error"):
            self.fail("error in the stream", str(event["error"]))
        if usage := event.get("usage"):
            self.has_usage, self.num_tokens = True, int(usage["completion_tokens"])
            self.num_accepted = (usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens")
        for choice in event.get("choices") or ():
            if _text(choice):
                self.texts_s.append(now_s)
            self.is_finished |= choice.get("finish_reason") is not None

    def fail(self, error: str, detail: str = "") -> None:
        """Note the first thing that went wrong."""
        if self.error is None:
            self.error, self.detail = error, " ".join(detail.split())[:300]

    def end(self, now_s: float) -> None:
        """Nothing comes any more."""
        self.ended_s = now_s
        if not self.is_finished:
            self.fail("cut off", "the stream ended without a finish_reason")
        if not self.has_usage:
            self.num_tokens = len(self.texts_s)


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    return str(choice.get("text") or "") if delta is None else "".join(delta.get(name) or "" for name in TEXT_FIELDS)


async def ask(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any], intended_s: float, on_text: Callable[[], None]
) -> Answer:
    """Send one request and read its stream to the end. Whatever fails is noted in the answer, never raised.

    ``on_text`` is called with every chunk.
    """
    answer = Answer(intended_s)
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S), client.stream("POST", path, json=body) as response:
            if response.status_code == 200:
                await _read(response, answer, on_text)
            else:
                answer.retry_after_s = _retry_after_s(response.headers.get("retry-after", ""))
                answer.fail(str(response.status_code), (await response.aread()).decode(errors="replace"))
    except (httpx.TimeoutException, TimeoutError) as error:
        answer.fail("timeout", _reason(error))
    except httpx.HTTPError as error:
        answer.fail("connection", _reason(error))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        answer.fail("not an OpenAI stream", _reason(error))
    answer.end(time.monotonic())
    return answer


async def _read(response: httpx.Response, answer: Answer, on_text: Callable[[], None]) -> None:
    async for event in _events(response):
        answer.feed(event, time.monotonic())
        on_text()


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """What the ``data:`` lines hold. They end at newlines only: httpx's lines also end inside texts, at U+2028 or U+0085."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield msgspec.json.decode(data, type=dict[str, Any])


def _retry_after_s(header: str) -> float:
    """Seconds; a date, or nothing, is taken for the default."""
    try:
        seconds = float(header)
    except ValueError:
        return DEFAULT_RETRY_AFTER_S
    return min(seconds, LONGEST_RETRY_AFTER_S) if seconds >= 0 else DEFAULT_RETRY_AFTER_S


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
