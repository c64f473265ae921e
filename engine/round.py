"""One round: plan → propose → verify → accept → adapt. READ THIS FIRST.

The round is a generator that does no I/O: it yields what it wants to know (`Collect`, `Propose`, `Verify`) and is sent the
answers. A driver (`engine.drivers`) asks the models, in this process or over a network. No request gains or loses a token
before the target has answered, so a driver may abandon a round at any point and play another.

While the target verifies, the draft prepares the next round for the likeliest outcomes of this one. When the next round begins
the outcome is known, and often its draft is there already: see `engine.drafting`, the draft's side of the round.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass

from engine.drafting import Answer, Collect, Collected, Drafts, NoDrafts, Propose, Tail, gather_drafts, prepare_next
from engine.request import Event, Request, State
from engine.scheduler import Plan, Planned, Scheduler
from engine.types import (
    MODEL_SOURCE,
    Delta,
    FinishReason,
    PrepareRequest,
    Proposal,
    SourceStep,
    StepReport,
    TokenLogprob,
    Verdict,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
)

__all__ = ["Collect", "Collected", "NoDrafts", "Propose", "RoundResult", "Steps", "Verify", "make_delta", "play_round"]


@dataclass(frozen=True, slots=True)
class Verify:
    """Ask the target; answered by a `VerifyReply`. ``prepare`` goes to the draft at the same time; its answer is collected."""

    request: VerifyRequest
    prepare: PrepareRequest | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round did."""

    deltas: tuple[Delta, ...]
    report: StepReport


Steps = Generator[Collect | Propose | Verify, Answer, RoundResult]


def play_round(
    scheduler: Scheduler, round_id: int, now_s: float, *, drafts: bool, prepares: bool = False, extends: bool = False
) -> Steps:
    """Play one round over the requests of ``scheduler``. With ``drafts`` false nobody is asked for drafts.

    ``prepares``: the source can work while the target verifies. ``extends``: it can go on after tokens of the text.
    """
    prepares = drafts and prepares
    plan = scheduler.plan(now_s, drafts=drafts, prepares=prepares, extends=extends)
    found = yield from gather_drafts(scheduler, plan, round_id, now_s, prepares=prepares)
    decoding = sum(item.request.state is State.DECODING for item in plan.items)
    if drafts and scheduler.info.max_draft_depth == 0 and decoding:
        found.fallbacks["target_takes_no_drafts"] = decoding

    prepare = prepare_next(scheduler, plan, found, round_id, now_s) if prepares else None
    released = tuple(scheduler.target_released)
    answer = yield Verify(_verify_request(round_id, plan, found.proposals, released), prepare)
    if not isinstance(answer, VerifyReply):
        raise TypeError(f"a Verify must be answered by a VerifyReply, got {type(answer).__name__}")
    if [verdict.sequence_id for verdict in answer.verdicts] != [item.request.id for item in plan.items]:
        raise ValueError(f"round {round_id}: the verdicts do not answer the items that were sent, one each and in their order")
    del scheduler.target_released[: len(released)]

    settled = [_settle(scheduler, item, found, verdict) for item, verdict in zip(plan.items, answer.verdicts, strict=True)]
    report = _report(round_id, plan, scheduler, settled, found, answer)
    return RoundResult(tuple(s.delta for s in settled if s.delta is not None), report)


# --- verify -----------------------------------------------------------------------------------------------------------------


def _verify_request(round_id: int, plan: Plan, proposals: dict[str, Proposal], released: tuple[str, ...]) -> VerifyRequest:
    items = tuple(_verify_item(item, proposals.get(item.request.id)) for item in plan.items)
    return VerifyRequest(round_id=round_id, items=items, release=released)


def _verify_item(item: Planned, proposal: Proposal | None) -> VerifyItem:
    request = item.request
    first_scored, scored = request.unscored(item.start, item.end) if request.is_scored else (0, ())
    return VerifyItem(
        sequence_id=request.id,
        base_length=item.start,
        tokens=tuple(request.ids[item.start : item.end]),
        draft=proposal.tokens if proposal else (),
        draft_probs=proposal.probs if proposal else None,
        context=request.context if item.start == 0 else None,
        sample=item.sample,
        scored=scored,
        first_scored=first_scored,
    )


# --- accept -----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Settled:
    delta: Delta | None = None
    drafted: int = 0
    accepted: int = 0
    decoded: bool = False
    prefilled: int = 0
    head: int = 0
    """Tokens of the text that the draft began with."""
    model: int = 0
    """Tokens of the model after these; what is left of the draft is the text's again."""

    @property
    def accepted_model(self) -> int:
        return min(max(self.accepted - self.head, 0), self.model)

    @property
    def from_text(self) -> int:
        return self.drafted - self.model


def _settle(scheduler: Scheduler, item: Planned, found: Drafts, verdict: Verdict) -> _Settled:
    request = item.request
    if verdict.error is not None:
        return _fail(scheduler, request, verdict.error)
    if verdict.need_context:
        request.apply(Event.LOSE_CACHE)
        request.target_length = 0
        return _Settled()
    if request.is_scored or verdict.prompt_logprobs:
        scores = verdict.prompt_logprobs or ()
        problem = _problem_of_scores(scores, request.unscored(item.start, item.end)[1])
        if problem is not None:
            return _fail(scheduler, request, problem)
        request.add_scores(scores)
    if not item.sample:
        return _prefill(scheduler, item)
    return _commit(scheduler, item, found, verdict)


def _problem_of_scores(scores: tuple[TokenLogprob, ...], wanted: tuple[int, ...]) -> str | None:
    if len(scores) != len(wanted):
        return f"the target scored {len(scores)} of {len(wanted)} tokens of the prompt"
    if any(math.isnan(score.logprob) for score in scores):
        return "the prompt cannot be scored: the logits are not finite numbers"
    return None


def _fail(scheduler: Scheduler, request: Request, error: str) -> _Settled:
    scheduler.remove(request, Event.FAIL)
    return _Settled(make_delta(request, FinishReason.ERROR, error=error))


def _prefill(scheduler: Scheduler, item: Planned) -> _Settled:
    request, prefilled = item.request, item.end - item.start
    request.target_length = item.end
    if item.end < len(request.ids):
        return _Settled(prefilled=prefilled)
    # Nothing is left to process and nothing is to be sampled: max_tokens is 0, the request wants its prompt scored.
    request.apply(Event.CAUGHT_UP)
    scheduler.remove(request, Event.FINISH)
    delta = make_delta(request, FinishReason.LENGTH, prompt_logprobs=request.take_scores())
    return _Settled(delta, prefilled=prefilled)


def _commit(scheduler: Scheduler, item: Planned, found: Drafts, verdict: Verdict) -> _Settled:
    request, proposal = item.request, found.proposals.get(item.request.id)
    was_decoding = request.state is State.DECODING
    if not was_decoding:
        request.apply(Event.CAUGHT_UP)
    drafted = len(proposal.tokens) if proposal else 0
    head, tail = found.heads.get(request.id, 0), found.tails.get(request.id)
    model = drafted - head - (tail.depth if tail is not None else 0)
    request.target_length = item.end + verdict.accepted
    if proposal is not None:
        if request.id in found.held and request.draft_length == item.end:
            request.draft_length += min(verdict.accepted, found.held[request.id])
        if model > 0:
            kept = min(max(verdict.accepted - head, 0), model)
            scheduler.policy.observe(request.id, model, kept, reached=verdict.accepted >= head)
    _compare_texts(scheduler, item, verdict, head + model, tail)
    committed = request.commit(verdict.tokens, verdict.logprobs, scheduler.eos_token_ids)
    accepted = min(verdict.accepted, len(committed.tokens))
    request.num_rounds += 1
    request.num_drafted += drafted
    request.num_accepted += accepted
    if committed.finish_reason is not None:
        scheduler.remove(request, Event.FINISH)
    delta = make_delta(
        request,
        committed.finish_reason,
        tokens=committed.tokens,
        logprobs=committed.logprobs,
        prompt_logprobs=request.take_scores(),
        stop_string=committed.stop_string,
        depth=drafted,
    )
    prefilled = 0 if was_decoding else item.end - item.start
    return _Settled(delta, drafted, accepted, decoded=was_decoding, prefilled=prefilled, head=head, model=model)


def _compare_texts(scheduler: Scheduler, item: Planned, verdict: Verdict, before: int, tail: Tail | None) -> None:
    """Tell the policy what the text's offers were worth; that after the first ``before`` tokens only where these were kept."""
    if item.text.tokens:
        scheduler.policy.observe_text(item.request.id, item.text, *_compare(item.text.tokens, verdict.tokens))
    if tail is not None and tail.offer.tokens and verdict.accepted >= before:
        compared = _compare(tail.offer.tokens, verdict.tokens[before:])
        scheduler.policy.observe_text(item.request.id, tail.offer, *compared)


def _compare(offered: tuple[int, ...], committed: tuple[int, ...]) -> tuple[int, int]:
    """(tokens offered that agree with committed ones, those that could be compared): nothing is known beyond a difference."""
    tested = min(len(offered), len(committed))
    kept = next((place for place in range(tested) if offered[place] != committed[place]), tested)
    return kept, min(kept + 1, tested)


def make_delta(request: Request, reason: FinishReason | None, *, tokens: tuple[int, ...] = (), **more: object) -> Delta:
    """What a request gained, with its totals so far; ``more`` are further fields of `Delta`."""
    return Delta(
        request_id=request.id,
        token_ids=tokens,
        finish_reason=reason,
        num_prompt_tokens=request.prompt_length,
        num_output_tokens=request.num_output,
        num_drafted=request.num_drafted,
        num_accepted=request.num_accepted,
        num_rounds=request.num_rounds,
        **more,  # type: ignore[arg-type]
    )


# --- adapt ------------------------------------------------------------------------------------------------------------------


def _report(
    round_id: int,
    plan: Plan,
    scheduler: Scheduler,
    settled: list[_Settled],
    found: Drafts,
    answer: VerifyReply,
) -> StepReport:
    cached = answer.cached_tokens
    deepest = max((s.drafted for s in settled), default=0)
    return StepReport(
        round_id=round_id,
        batch_size=sum(s.decoded for s in settled),
        num_waiting=len(scheduler.waiting),
        num_target_tokens=sum(item.end - item.start for item in plan.items) + sum(s.drafted for s in settled) - cached,
        num_prefill_tokens=sum(s.prefilled for s in settled) - cached,
        num_committed=sum(len(s.delta.token_ids) for s in settled if s.delta is not None),
        num_drafted=sum(s.drafted for s in settled),
        num_accepted=sum(s.accepted for s in settled),
        num_context_tokens=sum(item.start for item in plan.items),
        drafted_per_position=tuple(sum(s.drafted > j for s in settled) for j in range(deepest)),
        accepted_per_position=tuple(sum(s.accepted > j for s in settled) for j in range(deepest)),
        depths=tuple(s.drafted for s in settled if s.decoded),
        text_depths=tuple(s.from_text for s in settled if s.decoded) if scheduler.text is not None else (),
        num_extended=sum(s.head for s in settled if s.model),
        sources=_sources(scheduler, settled, found),
        verify_time_s=answer.step_time_s,
        draft_time_s=found.draft_time_s,
        exposed_time_s=found.waited_s,
        hits=dict(found.hits),
        misses=dict(found.misses),
        num_asked=found.num_asked,
        num_finished=sum(s.delta is not None and s.delta.finish_reason is not None for s in settled),
        num_preempted=plan.num_preempted,
        num_cached_tokens=cached,
        fallbacks=dict(found.fallbacks),
        queue_times_s=scheduler.take_queue_times(),
    )


def _sources(scheduler: Scheduler, settled: list[_Settled], found: Drafts) -> dict[str, SourceStep]:
    """Each source counts the tokens that it made, of a draft that both made too."""
    model = [(s.model, s.accepted_model) for s in settled]
    sources = {MODEL_SOURCE: _source(model, found.draft_time_s)}
    if scheduler.text is not None:
        text = [(s.from_text, s.accepted - s.accepted_model) for s in settled]
        sources[scheduler.text.name] = _source(text, scheduler.text.take_time_s())
    return sources


def _source(counts: list[tuple[int, int]], time_s: float) -> SourceStep:
    """Of (drafted, accepted) by request."""
    drafted, accepted = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return SourceStep(sum(count > 0 for count, _ in counts), drafted, accepted, time_s)
