"""What goes over HTTP: OpenAI's request and response shapes, and its errors. Knows no tokenizer, no Ray, no torch."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from deployments.origins import OriginText
from engine.errors import InvalidRequest, OutriderError, Overloaded
from engine.types import MAX_ALTERNATIVES, MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS, SamplingRule

MAX_STOP_CHARACTERS = 1000
"""Longest stop string; each costs a table of its length and a step per character of text."""
MIN_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot hold."""

HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Accepted without effect: they label or bill a request and could not change its text."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that others support and this server does not, with the values (besides null) that ask for nothing."""

_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


class ApiError(OutriderError):
    """An answer that is an error; ``kind`` is OpenAI's ``type``, ``param`` the field of the request body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """The answer for any failure. What is not written for the user becomes a 500 that tells nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, Overloaded):
        retry_after = {"Retry-After": str(max(1, round(error.retry_after_s)))}
        return ApiError(429, str(error), kind="rate_limit_error", code="overloaded", headers=retry_after)
    if isinstance(error, TimeoutError):
        return ApiError(408, "the request took longer than this server allows", kind="timeout_error", code="request_timeout")
    if isinstance(error, OutriderError):
        return ApiError(503, str(error), kind="server_error", code="service_unavailable")
    if isinstance(error, ConnectionError):
        message = "the model is not reachable at the moment; try again"
        return ApiError(503, message, kind="server_error", code="service_unavailable")
    return ApiError(500, "the server failed to process this request", kind="server_error", code="internal_error")


def _stop_strings(value: Any) -> list[str]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    for text in texts:
        if not text:
            raise ValueError("must not hold an empty string: it would end every answer at once")
        if len(text) > MAX_STOP_CHARACTERS:
            raise ValueError(f"must not hold a string of more than {MAX_STOP_CHARACTERS} characters")
    return texts


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt per element; a list of integers is one prompt."""
    prompts = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not prompts:
        raise ValueError("must hold at least one token")
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and (not prompt or _is_ids(prompt))):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if len({isinstance(prompt, str) for prompt in prompts}) > 1:
        raise ValueError("must not mix strings and token ids")
    return prompts


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)


def _content(value: Any) -> str | None:
    """Text of a message: a string, or the text parts of a list joined as they are."""
    if value is None:
        return None
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    return "".join(_text_of_part(part) for part in value)


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        raise ValueError('must hold parts such as {"type": "text", "text": "..."}')
    if kind != "text":
        raise ValueError(f"has a part of type '{kind}', which is not supported: this model reads text only")
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError("has a text part that is not exactly a 'type' and a 'text' string")
    return str(part["text"])


Unit = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)]


class _Fields(BaseModel):
    """Types are strict: "5", true and 1.5 are no integers. NaN and infinities are no numbers."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class _Closed(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class StreamOptions(_Closed):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Speculation(_Closed):
    """This server's own field: bounds how one request is drafted. It cannot change the text's distribution."""

    max_depth: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    rule: SamplingRule | None = None
    report_origins: bool | None = None
    """Chunks of a stream tell where each token came from (`deployments.origins`)."""


class SamplingFields(_Fields):
    """What both endpoints share: OpenAI's fields, and vLLM's names for what OpenAI lacks. Null is the same as absent."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: Annotated[list[str], PlainValidator(_stop_strings)] = []
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """0 and -1 both switch it off."""
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    speculation: Speculation | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true", "stream_options")
        if self.speculation is not None and self.speculation.report_origins and not self.stream:
            raise InvalidRequest("speculation.report_origins is only allowed when stream is true", "speculation")
        return self


class Message(_Fields):
    """One turn of a chat. ``content`` is the joined text of its parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, PlainValidator(_content)] = None
    name: str | None = None


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatCompletionRequest":
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1", "max_tokens")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens ({self.max_tokens}) disagree: send one",
                "max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed when logprobs is true", "top_logprobs")
        return self


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions. ``max_tokens`` 0 is for ``echo``: it returns the prompt, with ``logprobs`` scored."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: Alternatives | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1 (0 is for echo)", "max_tokens")
        return self


Body = TypeVar("Body", bound=SamplingFields)


def parse(model: type[Body], body: Mapping[str, Any]) -> Body:
    """Check a request body; raises `InvalidRequest` that names the first field that is wrong, unknown or not supported."""
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise _explain(error) from None
    extra = dict(request.model_extra or {})
    if extra.get("tool_choice") == "none":
        del extra["tool_choice"]
        extra.pop("tools", None)  # the model is told nothing of tools that it must not call
    _refuse(extra, "", _NEUTRAL, {*model.model_fields, *HARMLESS})
    if isinstance(request, ChatCompletionRequest):
        _check_messages(request.messages)
    return request


def _check_messages(messages: Sequence[Message]) -> None:
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        _refuse(message.model_extra or {}, f"{path}.", _NEUTRAL_IN_MESSAGE, set(Message.model_fields))
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(f"{path}.content is missing: only an assistant's message may have none", f"{path}.content")


def _refuse(extra: Mapping[str, Any], prefix: str, neutral: Mapping[str, tuple[Any, ...]], known: set[str]) -> None:
    for name, value in extra.items():
        path = f"{prefix}{name}"
        if name in known or (name in neutral and (value is None or _among(value, neutral[name]))):
            continue
        if name in neutral:
            raise InvalidRequest(f"{path} is not supported by this server", path)
        close = difflib.get_close_matches(name, known, n=1)
        raise InvalidRequest(f"unknown field '{path}'" + (f"; did you mean '{close[0]}'?" if close else ""), path)


def _among(value: Any, values: Iterable[Any]) -> bool:
    return any(type(value) is type(other) and value == other for other in values)


def _explain(error: ValidationError) -> InvalidRequest:
    """One mistake as one sentence. The field is the top-level name, or the path of a message."""
    item = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = item["msg"].removeprefix("Value error, ")
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).removeprefix(".")
    if item["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field '{path}'", str(item["loc"][0]))
    if item["type"] == "missing":
        return InvalidRequest(f"{path} is missing", path)
    named = f"{path} {message}" if message[0].islower() else f"{path}: {message}"
    return InvalidRequest(named, path if item["loc"][0] == "messages" else str(item["loc"][0]))


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as it is shown in logprobs."""

    raw: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The token as text; OpenAI's spelling ``bytes:\\xf0\\x9f`` where it is only a part of a character."""
        try:
            return self.raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + self.raw.decode(errors="backslashreplace")

    @property
    def shown_logprob(self) -> float:
        """The log-probability as JSON can hold it."""
        return max(self.logprob, MIN_LOGPROB)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with its alternatives. ``offset`` counts characters of the choice's text before it."""

    chosen: TokenText
    top: tuple[TokenText, ...]
    offset: int
    has_logprob: bool = True
    """False for the first token of an echoed prompt, which nothing precedes."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one delta adds to a choice, as text."""

    text: str
    entries: tuple[TokenEntry, ...] | None = None
    """None when the request asked for no logprobs."""
    finish_reason: str | None = None
    seed: int | None = None
    """Set in the first part of a choice."""
    origins: tuple[OriginText, ...] | None = None
    """The text by token; None when the request did not ask for it."""

    @property
    def is_first(self) -> bool:
        """Whether the choice begins here."""
        return self.seed is not None

    @property
    def is_silent(self) -> bool:
        """Whether a stream need not mention it."""
        return not (self.text or self.entries or self.origins or self.finish_reason or self.is_first)


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


@dataclass(slots=True)
class Usage:
    """Totals of one response; ``drafted`` and ``accepted`` count draft tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
        }


class ChatShape:
    """How /v1/chat/completions writes its answers."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def chunk_choice(self, index: int, part: Part) -> dict[str, Any]:
        """One choice of a chunk. The role comes once, with the first text."""
        delta: dict[str, Any] = {"role": "assistant"} if part.is_first else {}
        if part.text or part.is_first:
            delta["content"] = part.text
        return self._finish({"index": index, "delta": delta}, part)

    def choice(self, index: int, part: Part) -> dict[str, Any]:
        """One choice of a whole answer."""
        return self._finish({"index": index, "message": {"role": "assistant", "content": part.text, "refusal": None}}, part)

    def _finish(self, choice: dict[str, Any], part: Part) -> dict[str, Any]:
        entries = None if part.entries is None else [token_logprob(entry) for entry in part.entries]
        choice["logprobs"] = None if entries is None else {"content": entries, "refusal": None}
        return _with_end(choice, part)


class CompletionShape:
    """How /v1/completions writes its answers."""

    id_prefix: ClassVar[str] = "cmpl-"
    object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def chunk_choice(self, index: int, part: Part) -> dict[str, Any]:
        """One choice of a chunk."""
        return self.choice(index, part)

    def choice(self, index: int, part: Part) -> dict[str, Any]:
        """One choice of a whole answer."""
        logprobs = None if part.entries is None else _completion_logprobs(part.entries)
        return _with_end({"index": index, "text": part.text, "logprobs": logprobs}, part)


Shape = ChatShape | CompletionShape


def response_body(shape: Shape, head: Head, parts: Sequence[Part], usage: Usage) -> dict[str, Any]:
    """A whole answer; ``parts`` are the choices in order."""
    choices = [shape.choice(index, part) for index, part in enumerate(parts)]
    return {**_head(head, shape.object), "choices": choices, "usage": usage.as_dict()}


def chunk_body(shape: Shape, head: Head, index: int, part: Part, include_usage: bool) -> dict[str, Any]:
    """One chunk of a stream: what one round added to one choice."""
    chunk = {**_head(head, shape.chunk_object), "choices": [shape.chunk_choice(index, part)]}
    return {**chunk, "usage": None} if include_usage else chunk


def usage_chunk_body(shape: Shape, head: Head, usage: Usage) -> dict[str, Any]:
    """The chunk before the end that carries the totals."""
    return {**_head(head, shape.chunk_object), "choices": [], "usage": usage.as_dict()}


def model_card(name: str, created: int, max_context: int) -> dict[str, Any]:
    """One entry of /v1/models; ``max_model_len`` is vLLM's name for the context limit, in tokens."""
    return {"id": name, "object": "model", "created": created, "owned_by": "outrider", "max_model_len": max_context}


def _head(head: Head, kind: str) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
    }


def _with_end(choice: dict[str, Any], part: Part) -> dict[str, Any]:
    choice["finish_reason"] = part.finish_reason
    if part.origins is not None:
        choice["speculation"] = {"tokens": [piece.as_dict() for piece in part.origins]}
    if part.is_first:
        choice["seed"] = part.seed
    return choice


def _chat_token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.shown_logprob, "bytes": list(token.raw)}


def token_logprob(entry: TokenEntry) -> dict[str, Any]:
    """One token's logprob and its alternatives, as in OpenAI's chats."""
    return {**_chat_token(entry.chosen), "top_logprobs": [_chat_token(token) for token in entry.top]}


def _completion_logprobs(entries: Sequence[TokenEntry]) -> dict[str, Any]:
    return {
        "tokens": [entry.chosen.text for entry in entries],
        "token_logprobs": [entry.chosen.shown_logprob if entry.has_logprob else None for entry in entries],
        "top_logprobs": [_by_text((*entry.top, entry.chosen)) if entry.has_logprob else None for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _by_text(tokens: Iterable[TokenText]) -> dict[str, float]:
    """The alternatives and the chosen token; of two with the same text the likelier one."""
    found: dict[str, float] = {}
    for token in tokens:
        found[token.text] = max(token.shown_logprob, found.get(token.text, MIN_LOGPROB))
    return found
