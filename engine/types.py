"""What crosses between the parts: plain frozen data, no torch, no Ray.

Lengths say what they measure. ``base_length`` is the number of tokens of a sequence that both sides agree are already in the
worker's KV cache; rolling back is sending a smaller ``base_length`` than before.
"""

from enum import StrEnum
from typing import Literal, NamedTuple, get_args

import msgspec

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature a request is greedy: dividing float32 logits by less overflows and leaves one token anyway."""
SamplingRule = Literal["coupled", "rejection", "block"]
SAMPLING_RULES: tuple[str, ...] = get_args(SamplingRule)
"""Acceptance rules that a request may choose from; temperature 0 is always ``greedy``."""
MAX_ALTERNATIVES = 20
"""Most alternatives beside a token in logprobs."""
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 64


class FinishReason(StrEnum):
    """Why a request ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled and when it stops. Validated where it enters (`engine.request.check_params`)."""

    temperature: float = 1.0
    top_k: int = 0
    """0 = off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides (multiplies, when negative) the logits of every token in prompt and output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: dict[int, float] = {}
    seed: int = 0
    """64 bits, unsigned. The router draws one for a request that brings none."""
    max_tokens: int = 16
    """0 only with ``prompt_logprobs``: the prompt is scored and nothing is sampled."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives to report beside the chosen token; None = no logprobs at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from its second one on (echo)."""
    max_depth: int | None = None
    """The request's own bound on the depth; 0 switches speculation off for it."""
    rule: str = "coupled"
    """Acceptance rule for temperature > 0; greedy requests always use ``greedy``."""

    @property
    def greedy(self) -> bool:
        """Whether the request takes the most likely token at every position."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def acceptance_rule(self) -> str:
        """Name of the rule in `engine.accept.RULES` that decides this request's drafts."""
        return "greedy" if self.greedy else self.rule


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of tokens to make. ``prompt_ids`` is not empty; a choice of ``n`` > 1 is a request of its own."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...] = ()
    """Tokens already committed elsewhere: the request resumes after them (they are not sent again)."""
    log_id: str = ""
    """By which logs and traces know it, as the client does: the id of its HTTP request. Empty: ``request_id``."""
    trace_parent: str = ""
    """The span that it belongs to, as in the W3C header ``traceparent``; empty while tracing is off."""


class SequenceContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must know of a sequence besides its tokens. Sent when the sequence is opened, kept as soft state."""

    params: SamplingParams
    prompt_length: int
    """Tokens before the first generated one; penalties and ``min_tokens`` count from here."""
    log_id: str = ""
    """As in `GenerateRequest`."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log) of the model's own distribution, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), most likely first."""


# A sparse distribution: (token ids, probabilities), what a remote draft actually sampled from.
SparseProbs = tuple[tuple[int, ...], tuple[float, ...]]


class ProposeItem(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for up to ``depth`` draft tokens after ``base_length + len(tokens)`` committed ones. ``depth`` 0 only catches up."""

    sequence_id: str
    base_length: int
    tokens: tuple[int, ...]
    depth: int
    context: SequenceContext | None = None
    ahead: tuple[int, ...] = ()
    """Tokens that another source has drafted: the draft follows these. They are not committed, and the noise of what is drawn
    after them is that of a draft which drew them itself. Sent only to a source that can go on after them
    (`engine.propose.base.can_extend`)."""


class ProposeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One message per round for the whole batch."""

    round_id: int
    items: tuple[ProposeItem, ...]
    release: tuple[str, ...] = ()
    """Sequences that ended: the worker forgets them."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A draft. Empty ``tokens`` with ``reason`` set says why there is none."""

    sequence_id: str
    tokens: tuple[int, ...] = ()
    probs: tuple[SparseProbs, ...] | None = None
    """One per token, for rules that need q; None from a source that is certain (q is one-hot)."""
    known_length: int = 0
    """Committed tokens that the draft now holds."""
    reason: str | None = None
    """need_context | catching_up | out_of_context | no_match | bad_logits | ..."""


class ProposeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answers a `ProposeRequest`; proposals may be missing or in any order."""

    round_id: int
    proposals: tuple[Proposal, ...]
    step_time_s: float = 0.0
    num_steps: int = 0
    """Draft forwards that were run: the longest depth in the batch, plus catching up."""


class PrepareItem(msgspec.Struct, frozen=True, kw_only=True):
    """Prepare the next round of a sequence while the target works on this one.

    The target has ``base_length + len(tokens)`` committed tokens and verifies ``draft`` after them. Its answer is an *outcome*:
    the number of accepted draft tokens and the token that comes next. For each number ``a`` the source guesses the
    ``fan_out[a]`` likeliest next tokens and drafts ``depth`` tokens after every one of them, from a fork of the sequence.
    Without ``fan_out`` the source only catches up with the committed tokens.
    """

    sequence_id: str
    base_length: int
    tokens: tuple[int, ...]
    draft: tuple[int, ...] = ()
    depth: int = 0
    fan_out: tuple[int, ...] = ()
    """Guesses for 0, 1, ..., len(draft) accepted tokens; empty, or len(draft) + 1 numbers."""
    context: SequenceContext | None = None


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One message per round for the whole batch, sent when the verify of ``round_id`` is."""

    round_id: int
    items: tuple[PrepareItem, ...]
    release: tuple[str, ...] = ()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A guess at what the target answers, and the draft for the round after it."""

    accepted: int
    """Draft tokens that the target keeps."""
    token: int
    """The recovery or bonus token after them."""
    tokens: tuple[int, ...]
    """The draft that follows; drawn exactly as `ProposeRequest` would have it drawn after this outcome."""
    probs: tuple[SparseProbs, ...] | None = None
    """As in `Proposal`."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes prepared for one sequence, no two alike. None, with ``reason`` set, where it could not be done."""

    sequence_id: str
    outcomes: tuple[Outcome, ...] = ()
    known_length: int = 0
    """Committed tokens that the draft now holds."""
    reason: str | None = None
    """As in `Proposal`."""


class PrepareReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answers a `PrepareRequest`; sequences may be missing or in any order."""

    round_id: int
    prepared: tuple[Prepared, ...]
    step_time_s: float = 0.0
    num_steps: int = 0


class VerifyItem(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens`` (committed, not yet in the KV cache, at least one) followed by ``draft``.

    With ``sample`` false the tokens are only a chunk of a prefill: nothing is sampled and ``draft`` is empty.
    """

    sequence_id: str
    base_length: int
    tokens: tuple[int, ...]
    draft: tuple[int, ...] = ()
    draft_probs: tuple[SparseProbs, ...] | None = None
    context: SequenceContext | None = None
    sample: bool = True
    scored: tuple[int, ...] = ()
    """Tokens of the prompt whose logprobs are wanted (echo): ``scored[i]`` follows ``tokens[first_scored + i]``."""
    first_scored: int = 0


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One ragged forward of the target."""

    round_id: int
    items: tuple[VerifyItem, ...]
    release: tuple[str, ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the target committed: the ``accepted`` first draft tokens and then its own recovery or bonus token.

    ``tokens`` is empty for a prefill chunk, when the worker needs context, and on an error.
    """

    sequence_id: str
    accepted: int = 0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of ``VerifyItem.scored``, where there are any."""
    need_context: bool = False
    """The worker does not hold ``base_length`` tokens of this sequence: send it again from 0, with its context."""
    error: str | None = None
    """This sequence cannot go on (for example NaN logits); the others are not affected."""


class VerifyReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answers a `VerifyRequest`, one verdict per item, in the same order."""

    round_id: int
    verdicts: tuple[Verdict, ...]
    step_time_s: float = 0.0
    cached_tokens: int = 0
    """Of the items' tokens, those that were found in the prefix cache and not computed."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself when a router connects."""

    name: str
    vocab_size: int
    """Ids below this can be sampled; padding of the head beyond the tokenizer is not."""
    max_context: int
    kv_capacity_tokens: int
    """Tokens of KV cache over all sequences."""
    kv_block_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """Hash of the tokenizer's vocabulary: draft and target must agree on what an id means."""
    device: str
    dtype: str
    dtype_reason: str = ""
    step_times: tuple[tuple[int, float], ...] = ()
    """Measured when the worker started: (tokens in one forward, seconds)."""
    numerics: str = "fast"
    """Kernels in use: ``invariant`` (asked for, and chosen for it) or ``fast``."""
    row_invariant: bool | None = None
    """Whether a row's logits had the same bits in every batch that was probed on the loaded weights; None = not probed."""
    row_invariance: str = "not probed"
    """The probe's verdict in words."""
    path: str = ""
    """How the model runs: ``dense`` (a lean forward of its family), ``generic`` (transformers' layers over packed sequences) or
    ``stateful`` (one transformers cache per sequence, one after another)."""
    path_reason: str = ""
    max_draft_depth: int | None = None
    """Most draft tokens that are of use to this target; 0 where it can compute only one token after another."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one round added to one request. The last one carries a finish reason and the request's totals."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """In the first delta of a request that asked for them: one per token of the prompt but the first."""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_drafted: int = 0
    """Draft tokens verified for this request so far."""
    num_accepted: int = 0
    """Those among them that were committed and shown."""
    num_rounds: int = 0
    depth: int = 0
    """Depth of the round that made this delta."""


class DepthRequest(NamedTuple):
    """A request that may speculate in the coming round, as a depth policy sees it."""

    request_id: str
    room: int
    """Most draft tokens that can be of use."""
    num_output: int = 0
    """Tokens it has generated so far."""


class TextOffer(NamedTuple):
    """What the text itself offers to draft for a request, beside a model, as a depth policy sees it."""

    request: DepthRequest
    length: int
    """Tokens of the draft; 0 = nothing was found."""
    match: int = 0
    """Newest tokens that occurred before, where the draft comes from."""
    share: float = 0.0
    """Of all that followed there, the share that the drafted tokens had: their geometric mean; 0 where nobody counts."""
    num_unread: int = 0
    """Committed tokens that the model's draft has not read, if it has read any."""
    extendable: int = 0
    """Leading tokens that the model could go on after, in this round; 0 = it cannot be told of them."""


class TextChoice(NamedTuple):
    """What a depth policy does with a `TextOffer`."""

    depth: int
    """Leading tokens that are worth verifying."""
    is_first: bool
    """Whether they are used whatever the model has drafted; if not, only where it has drafted nothing."""
    extended: int = 0
    """Leading tokens after which the model is asked to go on: a hybrid draft, of so many of the text's and then the model's. If
    the model gives nothing, the text's ``depth`` tokens are used."""


class SourceStep(msgspec.Struct, frozen=True):
    """What drafts of one source came to, in one round or since a lane started."""

    num_requests: int = 0
    """Requests (times rounds) whose draft it was, or a part of it: each source counts its own tokens of a hybrid draft."""
    num_drafted: int = 0
    num_accepted: int = 0
    time_s: float = 0.0
    """Its own time; that of a model includes what was prepared and not used."""

    def __add__(self, other: "SourceStep") -> "SourceStep":
        return SourceStep(
            self.num_requests + other.num_requests,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
            self.time_s + other.time_s,
        )


MODEL_SOURCE = "draft"
"""Key of `StepReport.sources` for the one source that ``draft.source`` names."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one round did, for the acceptance estimate, the cost model and the metrics."""

    round_id: int
    batch_size: int
    """Requests that decoded (a prefill chunk does not count)."""
    num_waiting: int
    num_target_tokens: int
    """Tokens put through the target."""
    num_prefill_tokens: int
    """Those among them that prefilled."""
    num_committed: int
    """Tokens shown to users."""
    num_drafted: int
    num_accepted: int
    num_context_tokens: int = 0
    """Tokens in the KV cache of the sequences that took part, before the round."""
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    """Depth of each decoding request."""
    text_depths: tuple[int, ...] = ()
    """The part of ``depths`` that came from the text beside a model; empty where there is no such source."""
    num_extended: int = 0
    """Tokens of the text that the model read and went on after."""
    sources: dict[str, SourceStep] = {}
    """By source: the text's under its own name, `MODEL_SOURCE` for the other."""
    verify_time_s: float = 0.0
    draft_time_s: float = 0.0
    """The draft's own time for the drafts of this round, prepared or asked for."""
    exposed_time_s: float = 0.0
    """Time that the round waited for drafts, hops included."""
    hits: dict[str, int] = {}
    """Requests whose outcome was prepared, by kind: recovery (the target corrected the draft), bonus (it accepted all of it)
    or plain (there was no draft).
    """
    misses: dict[str, int] = {}
    """Requests whose outcome was not, by kind as above, or late (no answer yet), unprepared (the source had a reason)."""
    num_asked: int = 0
    """Requests that the round asked the source for and waited."""
    round_time_s: float = 0.0
    num_finished: int = 0
    num_preempted: int = 0
    num_cached_tokens: int = 0
    """Tokens that were to be prefilled and that the target found in its prefix cache instead."""
    fallbacks: dict[str, int] = {}
    """Requests that ran without the draft they asked for, by reason."""
    queue_times_s: tuple[float, ...] = ()
    """Of each request that was admitted for the first time: from its arrival to its first round."""

    @property
    def model_depths(self) -> tuple[int, ...]:
        """``depths`` without what came from the text beside a model."""
        if not self.text_depths:
            return self.depths
        return tuple(depth - text for depth, text in zip(self.depths, self.text_depths, strict=True))
