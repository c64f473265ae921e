"""From an OpenAI request to the engine's requests, and from deltas of token ids back to OpenAI's answers. No I/O.

What users send is checked here, before any actor is called. Choices are prompt-major: prompt 0 has the first ``n`` indices.
"""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import jinja2
import msgspec

from deployments.origins import Origin, OriginText, OriginTexts
from deployments.schema import (
    ApiError,
    ChatCompletionRequest,
    ChatShape,
    CompletionRequest,
    CompletionShape,
    Head,
    Message,
    Part,
    SamplingFields,
    Shape,
    Speculation,
    TokenEntry,
    TokenText,
    Usage,
    chunk_body,
    parse,
    response_body,
    usage_chunk_body,
)
from engine.config import ApiConfig
from engine.errors import InvalidRequest
from engine.text import TextStream, TokenBytes, Tokenizer
from engine.types import Delta, FinishReason, GenerateRequest, SamplingParams, TokenLogprob

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's ``max_tokens`` of /v1/completions; a chat may fill the context."""
DRAWN_SEED_BITS = 53
"""Seeds are drawn small enough that a JavaScript client can send back exactly what it was told."""

_SAME_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)
_MASK_64 = (1 << 64) - 1


class ChatTokenizer(Tokenizer, Protocol):
    """A transformers tokenizer, as far as this API needs it."""

    chat_template: Any

    def __call__(
        self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool
    ) -> Mapping[str, list[tuple[int, int]]]:
        """``offset_mapping``: the characters of ``text`` that each token stands for, (0, 0) for tokens that were added.

        Raises NotImplementedError where the tokenizer cannot tell.
        """

    def apply_chat_template(self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool) -> str:
        """The prompt's text with its special tokens; raises `jinja2.TemplateError` for a chat that the template refuses."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model behind this API. Ids below ``vocab_size`` are valid; ``max_context`` counts prompt and output tokens."""

    name: str
    tokenizer: ChatTokenizer
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    rule: str = "coupled"
    """Acceptance rule of requests that name none (``speculation.rule`` of the configuration)."""
    fingerprint: str | None = None
    """Answered as ``system_fingerprint``: another one means that the same seed may give another text."""
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of single tokens, for logprobs."""
        return TokenBytes(self.tokenizer)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One HTTP request, checked and tokenised: a `GenerateRequest` per choice, and how to answer."""

    shape: Shape
    head: Head
    requests: tuple[GenerateRequest, ...]
    echo: tuple[str, ...]
    """Per choice, the text that is repeated before the answer; empty if not asked for."""
    echo_offsets: tuple[tuple[int, ...], ...]
    """Per choice, where each token of the prompt begins in that text; empty without logprobs."""
    num_prompt_tokens: int
    """Over all prompts, each once however many choices it has."""
    stream: bool
    include_usage: bool
    report_origins: bool


@dataclass(frozen=True, slots=True)
class _Prompt:
    field: str
    ids: Sequence[int]
    echo: str = ""
    echo_offsets: tuple[int, ...] = ()


def validate_chat(body: Mapping[str, Any], limits: ApiConfig, model: ServedModel) -> Job:
    """Check a body of /v1/chat/completions and tokenise it; raises `InvalidRequest`, or `ApiError` with a code of its own."""
    request = parse(ChatCompletionRequest, body)
    _check_scope(request, 1, limits, model)
    params = _sampling(request, (request.top_logprobs or 0) if request.logprobs else None, model)
    prompt = _chat_prompt(request.messages, model)
    wanted = request.max_completion_tokens or request.max_tokens
    return _job(ChatShape(), request, [prompt], _Length(wanted, limits.default_max_tokens, model.max_context), params, model)


def validate_completion(body: Mapping[str, Any], limits: ApiConfig, model: ServedModel) -> Job:
    """Check a body of /v1/completions and tokenise it; raises `InvalidRequest`, or `ApiError` with a code of its own."""
    request = parse(CompletionRequest, body)
    _check_scope(request, len(request.prompt), limits, model)
    params = _sampling(request, request.logprobs, model)
    if request.echo:
        params = msgspec.structs.replace(params, prompt_logprobs=request.logprobs)
    prompts = [_completion_prompt(prompt, request, model) for prompt in request.prompt]
    default = limits.default_max_tokens or DEFAULT_COMPLETION_TOKENS
    return _job(CompletionShape(), request, prompts, _Length(request.max_tokens, default, model.max_context), params, model)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of a choice: the request's own for choice 0, a mixed one for the others (unsigned, 64 bits).

    SplitMix64 (Steele, Lea, Flood 2014). Mixed, because the engine tells its own streams apart by adding the same constant.
    """
    if choice == 0:
        return seed & _MASK_64
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return mixed ^ (mixed >> 31)


@dataclass(frozen=True, slots=True)
class _Length:
    """How many tokens an answer may have."""

    wanted: int | None
    default: int | None
    """None fills the context."""
    max_context: int

    def max_tokens(self, prompt: _Prompt) -> int:
        num_prompt, room = len(prompt.ids), self.max_context - len(prompt.ids)
        limit = f"this model's context holds {self.max_context} tokens"
        if self.wanted is None:
            if room < 1:
                message = f"{limit}; the prompt has {num_prompt}, which leaves no room for an answer"
                raise ApiError(400, message, param=prompt.field, code="context_length_exceeded")
            return room if self.default is None else min(self.default, room)
        if self.wanted > room:
            message = (
                f"{limit}; the prompt has {num_prompt} and max_tokens asks for {self.wanted}, "
                f"together {num_prompt + self.wanted}"
            )
            param = "max_tokens" if room >= 1 else prompt.field
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return self.wanted


def _job(
    shape: Shape,
    request: SamplingFields,
    prompts: Sequence[_Prompt],
    length: _Length,
    params: SamplingParams,
    model: ServedModel,
) -> Job:
    head = Head(f"{shape.id_prefix}{secrets.token_hex(12)}", int(time.time()), model.name, model.fingerprint)
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        max_tokens = length.max_tokens(prompt)
        if params.min_tokens > max_tokens:
            raise InvalidRequest(f"min_tokens ({params.min_tokens}) is above max_tokens ({max_tokens})", "min_tokens")
        seed = secrets.randbits(DRAWN_SEED_BITS) if request.seed is None else request.seed
        for choice in range(request.n or 1):
            own = msgspec.structs.replace(params, max_tokens=max_tokens, seed=choice_seed(seed, choice))
            name = f"{head.id}-{len(requests)}"
            requests.append(GenerateRequest(request_id=name, prompt_ids=tuple(prompt.ids), params=own))
    return Job(
        shape=shape,
        head=head,
        requests=tuple(requests),
        echo=tuple(prompt.echo for prompt in prompts for _ in range(request.n or 1)),
        echo_offsets=tuple(prompt.echo_offsets for prompt in prompts for _ in range(request.n or 1)),
        num_prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        stream=bool(request.stream),
        include_usage=request.stream_options is not None and bool(request.stream_options.include_usage),
        report_origins=request.speculation is not None and bool(request.speculation.report_origins),
    )


def _check_scope(request: SamplingFields, num_prompts: int, limits: ApiConfig, model: ServedModel) -> None:
    if request.model != model.name:
        raise model_not_found(request.model, model)
    num_choices = num_prompts * (request.n or 1)
    if num_choices > limits.max_choices:
        message = f"n times the number of prompts is {num_choices}; this server makes at most {limits.max_choices} choices"
        raise InvalidRequest(message, "prompt" if num_prompts > limits.max_choices else "n")
    if len(request.stop) > limits.max_stop_strings:
        raise InvalidRequest(f"stop holds {len(request.stop)} strings; at most {limits.max_stop_strings} are allowed", "stop")


def model_not_found(name: str, model: ServedModel) -> ApiError:
    """The answer to a name that is not served here."""
    message = f"the model '{name}' does not exist here; this server has '{model.name}'"
    return ApiError(404, message, param="model", code="model_not_found")


def _sampling(request: SamplingFields, logprobs: int | None, model: ServedModel) -> SamplingParams:
    """All that the choices share; seed and max_tokens are set for each."""
    same = {name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None}
    speculation = request.speculation or Speculation()
    return SamplingParams(
        **same,
        top_k=min(max(request.top_k or 0, 0), model.vocab_size),
        logit_bias=_logit_bias(request.logit_bias or {}, model),
        stop=tuple(dict.fromkeys(request.stop)),
        stop_token_ids=tuple(dict.fromkeys(_in_vocabulary("stop_token_ids", request.stop_token_ids or [], model))),
        logprobs=logprobs,
        max_depth=speculation.max_depth,
        rule=speculation.rule or model.rule,
    )


def _logit_bias(bias: Mapping[str, float], model: ServedModel) -> dict[int, float]:
    wrong = next((key for key in bias if not re.fullmatch("-?[0-9]{1,12}", key)), None)
    if wrong is not None:
        raise InvalidRequest(f"logit_bias has the key '{wrong[:40]}': keys are token ids", "logit_bias")
    ids = _in_vocabulary("logit_bias", [int(key) for key in bias], model)
    biases = dict(zip(ids, bias.values(), strict=True))
    if len(biases) < len(bias):
        raise InvalidRequest("logit_bias names the same token twice, such as '7' and '07'", "logit_bias")
    return biases


def _in_vocabulary(name: str, ids: Sequence[int], model: ServedModel) -> Sequence[int]:
    outside = next((token_id for token_id in ids if not 0 <= token_id < model.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"{name} names token {outside}; this model's ids run from 0 to {model.vocab_size - 1}", name)
    return ids


def _chat_prompt(messages: Sequence[Message], model: ServedModel) -> _Prompt:
    if not model.tokenizer.chat_template:
        raise InvalidRequest(
            "this model has no chat template: send a prompt to /v1/completions, or add a chat_template to its tokenizer",
            "messages",
        )
    conversation = [_turn(message) for message in messages]
    try:
        text = model.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from None
    return _not_empty(_Prompt("messages", model.tokenizer.encode(text, add_special_tokens=False)))


def _turn(message: Message) -> dict[str, str]:
    """A message as templates know it: "developer" is OpenAI's newer word for "system"."""
    role = "system" if message.role == "developer" else message.role
    turn = {"role": role, "content": message.content or ""}
    return turn if message.name is None else {**turn, "name": message.name}


def _completion_prompt(prompt: str | list[int], request: CompletionRequest, model: ServedModel) -> _Prompt:
    scored = bool(request.echo) and request.logprobs is not None
    if isinstance(prompt, str):
        ids: Sequence[int] = model.tokenizer.encode(prompt, add_special_tokens=True)
        offsets = _offsets_in_text(prompt, model) if scored else ()
        return _not_empty(_Prompt("prompt", ids, prompt if request.echo else "", offsets))
    ids = _in_vocabulary("prompt", prompt, model)
    text = model.tokenizer.decode(ids, skip_special_tokens=True) if request.echo else ""
    return _not_empty(_Prompt("prompt", ids, text, _offsets_in_decoded(ids, model) if scored else ()))


def _offsets_in_text(text: str, model: ServedModel) -> tuple[int, ...]:
    """Where each token begins: its first character, or the white space before it that some tokenizers leave to nobody."""
    try:
        encoded = model.tokenizer(text, add_special_tokens=True, return_offsets_mapping=True)
    except NotImplementedError:
        message = "this model's tokenizer does not tell where its tokens begin: for echo with logprobs send token ids"
        raise InvalidRequest(message, "echo") from None
    offsets, reached, offset = [], 0, 0
    for start, end in encoded["offset_mapping"]:
        offset = max(offset, min(start, reached))
        offsets.append(offset)
        reached = max(reached, end)
    return tuple(offsets)


def _offsets_in_decoded(ids: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    stream = TextStream(model.tokenizer)
    offsets = []
    for token_id in ids:
        offsets.append(stream.num_characters)
        stream.push(token_id)
    return tuple(offsets)


def _not_empty(prompt: _Prompt) -> _Prompt:
    if not prompt.ids:
        raise InvalidRequest("the prompt has no tokens: send at least one", prompt.field)
    return prompt


class Answer:
    """Turns the deltas of a job's choices into parts of text, and keeps the totals."""

    def __init__(self, job: Job, model: ServedModel):
        self._job = job
        echoes = zip(job.requests, job.echo, job.echo_offsets, strict=True)
        self._choices = [_Choice(request, echo, offsets, model, job.report_origins) for request, echo, offsets in echoes]

    def feed(self, index: int, delta: Delta) -> Part:
        """What ``delta`` adds to choice ``index``; raises `ApiError` if the choice failed."""
        return self._choices[index].feed(delta)

    @property
    def usage(self) -> Usage:
        """Totals so far."""
        return Usage(
            prompt_tokens=self._job.num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            drafted=sum(choice.num_drafted for choice in self._choices),
            accepted=sum(choice.num_accepted for choice in self._choices),
        )

    def whole(self, parts: Sequence[Sequence[Part]]) -> dict[str, Any]:
        """The body of an answer that is not streamed, from all parts of every choice."""
        return response_body(self._job.shape, self._job.head, [_join(own) for own in parts], self.usage)

    def chunk(self, index: int, part: Part) -> dict[str, Any]:
        """One chunk of a stream."""
        return chunk_body(self._job.shape, self._job.head, index, part, self._job.include_usage)

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that asked for its usage."""
        return usage_chunk_body(self._job.shape, self._job.head, self.usage)


class _Choice:
    def __init__(
        self, request: GenerateRequest, echo: str, echo_offsets: Sequence[int], model: ServedModel, report_origins: bool
    ):
        self.num_tokens = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self._params = request.params
        self._prompt_ids = request.prompt_ids
        self._model = model
        self._text = TextStream.for_request(model.tokenizer, request)
        self._silent_ends = model.eos_token_ids.union(request.params.stop_token_ids)
        self._echo: str | None = echo
        """Until the first part has been made."""
        self._echo_offsets = echo_offsets
        self._start = len(echo)
        """Characters before the answer."""
        self._origins = OriginTexts() if report_origins else None

    def feed(self, delta: Delta) -> Part:
        _raise_failure(delta)
        logprobs = self._logprobs(delta)
        echo, text, entries = self._echo or "", "", self._echo_entries(delta)
        ends: list[int] = []
        for position, token_id in enumerate(delta.token_ids):
            if logprobs is not None:
                entries.append(self._entry(logprobs[position], self._start + self._text.num_characters))
            if not self._ends_silently(delta, position):
                text += self._text.push(token_id)
            ends.append(self._text.num_characters)
        if delta.finish_reason is not None:
            text += self._text.finish()
        self.num_tokens += len(delta.token_ids)
        self.num_drafted, self.num_accepted = delta.num_drafted, delta.num_accepted
        seed, self._echo = (None if self._echo is None else self._params.seed), None
        own = None if logprobs is None else tuple(entries)
        return Part(echo + text, own, delta.finish_reason, seed, self._origin_texts(delta, echo, text, ends))

    def _origin_texts(self, delta: Delta, echo: str, text: str, ends: Sequence[int]) -> tuple[OriginText, ...] | None:
        """``text``, after ``echo``, by token; ``ends``: characters decoded after each token of ``delta``."""
        if self._origins is None:
            return None
        self._origins.committed(zip(self._origins.of_round(delta), ends, strict=True))
        pieces = self._origins.shown(text, is_last=delta.finish_reason is not None)
        return (OriginText(echo, Origin.PROMPT), *pieces) if echo else tuple(pieces)

    def _ends_silently(self, delta: Delta, position: int) -> bool:
        """Whether this is the EOS or stop token that ended the answer: counted, but no text."""
        stopped = delta.finish_reason is FinishReason.STOP and delta.stop_string is None
        return stopped and position == len(delta.token_ids) - 1 and delta.token_ids[-1] in self._silent_ends

    def _logprobs(self, delta: Delta) -> tuple[TokenLogprob, ...] | None:
        if self._params.logprobs is None:
            return None
        logprobs = delta.logprobs or ()
        if len(logprobs) != len(delta.token_ids):
            raise RuntimeError(f"{len(delta.token_ids)} tokens came with {len(logprobs)} logprobs")
        return logprobs

    def _echo_entries(self, delta: Delta) -> list[TokenEntry]:
        """The tokens of the prompt, in the first part of a choice that wants them scored."""
        if self._echo is None or self._params.prompt_logprobs is None:
            return []
        scores = delta.prompt_logprobs or ()
        if len(scores) != len(self._prompt_ids) - 1:
            raise RuntimeError(f"a prompt of {len(self._prompt_ids)} tokens came with {len(scores)} logprobs")
        first = TokenText(self._model.token_bytes(self._prompt_ids[0]), 0.0)
        entries = [TokenEntry(first, (), self._echo_offsets[0], has_logprob=False)]
        return entries + [self._entry(score, at) for score, at in zip(scores, self._echo_offsets[1:], strict=True)]

    def _entry(self, logprob: TokenLogprob, offset: int) -> TokenEntry:
        token_bytes = self._model.token_bytes
        top = logprob.top[: self._params.logprobs]
        return TokenEntry(
            chosen=TokenText(token_bytes(logprob.token_id), logprob.logprob),
            top=tuple(TokenText(token_bytes(token_id), value) for token_id, value in top),
            offset=offset,
        )


def _raise_failure(delta: Delta) -> None:
    if delta.finish_reason is FinishReason.CANCELLED:
        message = "the server cancelled this request; try again"
        raise ApiError(503, message, kind="server_error", code="service_unavailable")
    if delta.finish_reason is FinishReason.ERROR:
        reason = (delta.error or "the model failed on this request").splitlines()[0]
        raise ApiError(500, reason, kind="server_error", code="generation_failed")


def _join(parts: Sequence[Part]) -> Part:
    entries = tuple(entry for part in parts for entry in part.entries or ())
    return Part(
        text="".join(part.text for part in parts),
        entries=None if parts[0].entries is None else entries,
        finish_reason=parts[-1].finish_reason,
        seed=parts[0].seed,
    )
