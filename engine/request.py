"""One request: its tokens, its state, and the single place where committed tokens are walked one by one."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from engine.errors import InvalidRequest
from engine.text import TextStream, TokenDecoder
from engine.types import (
    MAX_ALTERNATIVES,
    MAX_BIASED_TOKENS,
    MAX_STOP_TOKEN_IDS,
    SAMPLING_RULES,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
    SequenceContext,
    TokenLogprob,
)


class State(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Event(StrEnum):
    """What can happen to a request."""

    ADMIT = "admit"
    CAUGHT_UP = "caught_up"
    LOSE_CACHE = "lose_cache"
    PREEMPT = "preempt"
    REQUEUE = "requeue"
    FINISH = "finish"
    CANCEL = "cancel"
    FAIL = "fail"


LIVE = frozenset({State.WAITING, State.PREFILLING, State.DECODING, State.PREEMPTED})

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.PREFILLING,
    (State.PREFILLING, Event.CAUGHT_UP): State.DECODING,
    (State.PREFILLING, Event.LOSE_CACHE): State.PREFILLING,
    (State.DECODING, Event.LOSE_CACHE): State.PREFILLING,
    (State.PREFILLING, Event.PREEMPT): State.PREEMPTED,
    (State.DECODING, Event.PREEMPT): State.PREEMPTED,
    (State.PREEMPTED, Event.REQUEUE): State.WAITING,
    (State.DECODING, Event.FINISH): State.FINISHED,
    **{(state, Event.CANCEL): State.CANCELLED for state in LIVE},
    **{(state, Event.FAIL): State.FAILED for state in LIVE},
}


class InvalidTransitionError(RuntimeError):
    """A bug in the scheduler: an event arrived in a state that does not know it."""


@dataclass(slots=True)
class Committed:
    """What of a run of tokens is shown: everything after the first stop is gone, from ids and logprobs alike."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None = None
    stop_string: str | None = None


class Request:
    """A request in a lane. Lengths count tokens from the start of the prompt."""

    def __init__(self, request: GenerateRequest, decoder: TokenDecoder | None, arrived_s: float):
        """``decoder`` is needed for stop strings only; ids already committed elsewhere are walked through it first."""
        self.id = request.request_id
        self.log_id = request.log_id
        self.params: SamplingParams = request.params
        self.prompt_length = len(request.prompt_ids)
        self.ids: list[int] = [*request.prompt_ids, *request.output_ids]
        self.state = State.WAITING
        self.arrived_s = arrived_s
        self.was_admitted = False
        """Whether it has left the queue before: a preempted request waits again."""
        self.target_length = 0
        """Tokens in the target's KV cache; 0 also means that the target must be told the context again."""
        self.draft_length = 0
        """Committed tokens that the draft is believed to hold."""
        self.draft_opened = False
        """Whether the draft was ever asked, so that it may hold the sequence even if its answer never came."""
        self.text_length = 0
        """Tokens that the text source beside a model has read."""
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_rounds = 0
        asked = self.params.prompt_logprobs is not None and not request.output_ids
        self._scores: list[TokenLogprob] | None = [] if asked else None
        """Of the prompt, from its second token on, until they are handed out. Output made elsewhere means that they were."""
        self._text: TextStream | None = None
        if self.params.stop:
            if decoder is None:
                raise InvalidRequest("stop strings need a tokenizer on the router", "stop")
            self._text = TextStream.for_request(decoder, request)

    @property
    def num_output(self) -> int:
        """Generated tokens so far."""
        return len(self.ids) - self.prompt_length

    @property
    def num_pending(self) -> int:
        """Committed tokens that the target has not seen; 1 while decoding."""
        return len(self.ids) - self.target_length

    @property
    def is_scored(self) -> bool:
        """Whether logprobs of the prompt are still to be made or handed out."""
        return self._scores is not None

    @property
    def context(self) -> SequenceContext:
        """What a worker needs to sample for this request."""
        return SequenceContext(params=self.params, prompt_length=self.prompt_length, log_id=self.log_id)

    def apply(self, event: Event) -> None:
        """Move to the next state; raises `InvalidTransitionError` where the table has no entry."""
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise InvalidTransitionError(f"request {self.id}: no '{event}' in state '{self.state}'") from None

    def unscored(self, start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Tokens of the prompt that are still to be scored and whose rows lie in [start, end).

        The row of position i scores the token at i + 1. Returns the first such row, counted from ``start``, and the tokens.
        """
        if self._scores is None:
            return 0, ()
        first = max(len(self._scores), start)
        tokens = tuple(self.ids[first + 1 : end + 1])  # nothing but the prompt until the scores are handed out
        return (first - start, tokens) if tokens else (0, ())

    def add_scores(self, scores: tuple[TokenLogprob, ...]) -> None:
        """Keep the logprobs of the tokens that `unscored` named."""
        if self._scores is not None:
            self._scores += scores

    def take_scores(self) -> tuple[TokenLogprob, ...] | None:
        """The logprobs of the prompt, once, for the first delta; None where nobody asked for them."""
        scores, self._scores = self._scores, None
        return None if scores is None else tuple(scores)

    def commit(
        self, run: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None, eos_token_ids: frozenset[int]
    ) -> Committed:
        """Walk a committed run token by token; the first rule to fire wins and everything after it is cut.

        Order at one token: EOS or a stop id, a stop string, then ``max_tokens``.
        """
        for count, token in enumerate(run, start=1):
            self.ids.append(token)
            reason, stop_string = self._check(token, eos_token_ids)
            if reason is not None:
                return Committed(run[:count], logprobs[:count] if logprobs is not None else None, reason, stop_string)
        return Committed(run, logprobs)

    def _check(self, token: int, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, str | None]:
        if (token in eos_token_ids and not self.params.ignore_eos) or token in self.params.stop_token_ids:
            return FinishReason.STOP, None
        if self._text is not None:
            self._text.push(token)
            if self._text.matched is not None:
                return FinishReason.STOP, self._text.matched
        if self.num_output >= self.params.max_tokens:
            return FinishReason.LENGTH, None
        return None, None


class _Bounds(Protocol):
    def __call__(self, value: float) -> bool: ...


_RANGES: dict[str, tuple[_Bounds, str]] = {
    "temperature": (lambda v: 0 <= v <= 100, "a number from 0 to 100"),
    "top_p": (lambda v: 0 < v <= 1, "a number above 0 and at most 1"),
    "min_p": (lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "top_k": (lambda v: 0 <= v < 1 << 31, "0 (off) or more"),
    "repetition_penalty": (lambda v: 0.01 <= v <= 100, "a number from 0.01 to 100"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "a number from -2 to 2"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "a number from -2 to 2"),
    "seed": (lambda v: 0 <= v < 1 << 64, "an integer of 64 bits"),
    "max_tokens": (lambda v: v >= 0, "0 or more"),
    "min_tokens": (lambda v: v >= 0, "0 or more"),
    "logprobs": (lambda v: 0 <= v <= MAX_ALTERNATIVES, f"a number from 0 to {MAX_ALTERNATIVES}"),
    "prompt_logprobs": (lambda v: 0 <= v <= MAX_ALTERNATIVES, f"a number from 0 to {MAX_ALTERNATIVES}"),
    "max_depth": (lambda v: 0 <= v < 1 << 31, "0 (off) or more"),
}
_MOST = {"logit_bias": MAX_BIASED_TOKENS, "stop_token_ids": MAX_STOP_TOKEN_IDS}


def check_params(params: SamplingParams) -> None:
    """Refuse what means nothing whatever the model is; raises `InvalidRequest` naming the field."""
    for field, (inside, meaning) in _RANGES.items():
        value = getattr(params, field)
        if value is not None and not inside(value):
            raise InvalidRequest(f"{field} must be {meaning}, got {value}", field)
    for field, most in _MOST.items():
        if (count := len(getattr(params, field))) > most:
            raise InvalidRequest(f"{field} holds {count} entries; at most {most} are allowed", field)
    if params.rule not in SAMPLING_RULES:
        names = ", ".join(SAMPLING_RULES)
        raise InvalidRequest(f"speculation.rule must be one of {names}, got '{params.rule}'", "speculation")
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        raise InvalidRequest("max_tokens must be at least 1 (0 is for the logprobs of the prompt)", "max_tokens")
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(f"min_tokens ({params.min_tokens}) is above max_tokens ({params.max_tokens})", "min_tokens")
    if any(not text for text in params.stop):
        raise InvalidRequest("stop must not hold an empty string: it would end every answer at once", "stop")
    if not all(-100 <= bias <= 100 for bias in params.logit_bias.values()):
        raise InvalidRequest("logit_bias values must be numbers from -100 to 100", "logit_bias")


def check_request(request: GenerateRequest, info: ModelInfo) -> None:
    """Refuse what no model should see; raises `InvalidRequest` naming the field."""
    params = request.params
    check_params(params)
    _check_ids("logit_bias", params.logit_bias, info.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    _check_ids("prompt", (*request.prompt_ids, *request.output_ids), info.vocab_size)
    if not request.prompt_ids:
        raise InvalidRequest("the prompt has no tokens: send at least one", "prompt")
    _check_room(request, info)


def fit_to_cache(request: GenerateRequest, info: ModelInfo) -> GenerateRequest:
    """Lower ``max_tokens`` to what the KV cache can hold: a chat that fills its context asks for more than a small server has.

    Raises `InvalidRequest` when not even the prompt and one token fit.
    """
    num_prompt, capacity = len(request.prompt_ids), info.kv_capacity_tokens // info.kv_block_size * info.kv_block_size
    if num_prompt >= capacity:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens; this server's KV cache holds {capacity} (target.kv_cache_tokens)", "prompt"
        )
    if num_prompt + request.params.max_tokens <= capacity:
        return request
    params = msgspec.structs.replace(request.params, max_tokens=capacity - num_prompt)
    return msgspec.structs.replace(request, params=params)


def _check_ids(field: str, ids: "dict[int, float] | tuple[int, ...]", vocab_size: int) -> None:
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"{field} names token {outside}; this model's ids run from 0 to {vocab_size - 1}", field)


def _check_room(request: GenerateRequest, info: ModelInfo) -> None:
    num_prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
    if request.output_ids and len(request.output_ids) >= max_tokens:
        raise InvalidRequest(f"all {max_tokens} tokens that max_tokens asks for were made already", "max_tokens")
    wanted = num_prompt + max_tokens
    if wanted > info.max_context:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens and max_tokens asks for {max_tokens}, together {wanted}; "
            f"this model's context holds {info.max_context}",
            "max_tokens" if num_prompt < info.max_context else "prompt",
        )
