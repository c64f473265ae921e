"""One round: plan → propose → verify → accept → adapt. READ THIS FIRST.

The round is a generator that does no I/O: it yields what it wants to know (`Propose`, `Verify`) and is sent the answers. A
driver (`engine.drivers`) asks the models, in this process or over a network. No request gains or loses a token before the
target has answered, so a driver may abandon a round at any point and play another.
"""

import math
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass

from engine.request import Event, Request, State
from engine.scheduler import Plan, Planned, Scheduler
from engine.types import (
    Delta,
    FinishReason,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    StepReport,
    TokenLogprob,
    Verdict,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
)


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask the draft source; answered by a `ProposeReply`, or by `NoDrafts` when it cannot answer in time."""

    request: ProposeRequest


@dataclass(frozen=True, slots=True)
class NoDrafts:
    """The source gave no answer: the round goes on as plain decoding."""

    reason: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Ask the target; answered by a `VerifyReply`."""

    request: VerifyRequest


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round did."""

    deltas: tuple[Delta, ...]
    report: StepReport


Steps = Generator[Propose | Verify, ProposeReply | NoDrafts | VerifyReply, RoundResult]


def play_round(scheduler: Scheduler, round_id: int, now_s: float, *, drafts: bool) -> Steps:
    """Play one round over the requests of ``scheduler``. With ``drafts`` false nobody is asked for drafts."""
    plan = scheduler.plan(now_s, drafts=drafts)
    proposals: dict[str, Proposal] = {}
    fallbacks: Counter[str] = Counter()
    if drafts and scheduler.info.max_draft_depth == 0 and plan.batch_size:
        fallbacks["target_takes_no_drafts"] = plan.batch_size
    draft_time_s = 0.0

    asked = [item for item in plan.items if item.depth > 0]
    if asked:
        released = tuple(scheduler.draft_released)
        for item in asked:
            item.request.draft_opened = True
        reply = yield Propose(_propose_request(round_id, asked, released))
        if isinstance(reply, NoDrafts):
            fallbacks[reply.reason] += len(asked)
        elif isinstance(reply, ProposeReply) and reply.round_id != round_id:
            fallbacks["late"] += len(asked)
        elif isinstance(reply, ProposeReply):
            proposals = _usable_proposals(reply, asked, scheduler.info.vocab_size, fallbacks)
            draft_time_s = reply.step_time_s
            del scheduler.draft_released[: len(released)]

    released = tuple(scheduler.target_released)
    answer = yield Verify(_verify_request(round_id, plan, proposals, released))
    if not isinstance(answer, VerifyReply):
        raise TypeError(f"a Verify must be answered by a VerifyReply, got {type(answer).__name__}")
    if [verdict.sequence_id for verdict in answer.verdicts] != [item.request.id for item in plan.items]:
        raise ValueError(f"round {round_id}: the verdicts do not answer the items that were sent, one each and in their order")
    del scheduler.target_released[: len(released)]

    settled = [
        _settle(scheduler, item, proposals.get(item.request.id), verdict)
        for item, verdict in zip(plan.items, answer.verdicts, strict=True)
    ]
    report = _report(round_id, plan, scheduler, settled, fallbacks, answer, draft_time_s)
    return RoundResult(tuple(s.delta for s in settled if s.delta is not None), report)


# --- propose ----------------------------------------------------------------------------------------------------------------


def _propose_request(round_id: int, asked: list[Planned], released: tuple[str, ...]) -> ProposeRequest:
    return ProposeRequest(round_id=round_id, items=tuple(_propose_item(item) for item in asked), release=released)


def _propose_item(item: Planned) -> ProposeItem:
    request = item.request
    return ProposeItem(
        sequence_id=request.id,
        base_length=request.draft_length,
        tokens=tuple(request.ids[request.draft_length :]),
        depth=item.depth,
        context=request.context if request.draft_length == 0 else None,
    )


def _usable_proposals(
    reply: ProposeReply, asked: list[Planned], vocab_size: int, fallbacks: Counter[str]
) -> dict[str, Proposal]:
    """The proposals that answer this round's questions; what the draft knows is noted on the way."""
    by_id = {proposal.sequence_id: proposal for proposal in reply.proposals}
    usable: dict[str, Proposal] = {}
    for item in asked:
        request = item.request
        proposal = by_id.get(request.id)
        problem = _problem(proposal, item, vocab_size)
        if proposal is not None and problem != "invalid_draft":
            request.draft_length = min(max(proposal.known_length, 0), len(request.ids))
        if problem is None and proposal is not None:
            usable[request.id] = proposal
        elif problem is not None:
            fallbacks[problem] += 1
    return usable


def _problem(proposal: Proposal | None, item: Planned, vocab_size: int) -> str | None:
    """Why a proposal cannot be used. A draft may be anything: a stale replica, another model, a bug."""
    if proposal is None:
        return "no_answer"
    if not proposal.tokens:
        return proposal.reason or "empty"
    if len(proposal.tokens) > item.depth or not all(0 <= token < vocab_size for token in proposal.tokens):
        return "invalid_draft"
    if proposal.probs is not None and not _probs_fit(proposal, vocab_size):
        return "invalid_draft"
    return None


def _probs_fit(proposal: Proposal, vocab_size: int) -> bool:
    """Each token must have been possible under the q it claims to come from, or the ratio test would not be exact."""
    if proposal.probs is None or len(proposal.probs) != len(proposal.tokens):
        return False
    for token, (ids, probs) in zip(proposal.tokens, proposal.probs, strict=True):
        if len(ids) != len(probs) or len(set(ids)) != len(ids) or not all(0 <= other < vocab_size for other in ids):
            return False
        if not all(p >= 0 for p in probs) or not abs(sum(probs) - 1.0) <= 1e-6:
            return False
        if dict(zip(ids, probs, strict=True)).get(token, 0.0) <= 0.0:
            return False
    return True


# --- verify -----------------------------------------------------------------------------------------------------------------


def _verify_request(round_id: int, plan: Plan, proposals: dict[str, Proposal], released: tuple[str, ...]) -> VerifyRequest:
    items = tuple(_verify_item(item, proposals.get(item.request.id)) for item in plan.items)
    return VerifyRequest(round_id=round_id, items=items, release=released)


def _verify_item(item: Planned, proposal: Proposal | None) -> VerifyItem:
    request = item.request
    first_scored, scored = request.unscored(item.start, item.end)
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


@dataclass(frozen=True, slots=True)
class _Settled:
    delta: Delta | None = None
    drafted: int = 0
    accepted: int = 0
    decoded: bool = False
    prefilled: int = 0


def _settle(scheduler: Scheduler, item: Planned, proposal: Proposal | None, verdict: Verdict) -> _Settled:
    request = item.request
    if verdict.error is not None:
        return _fail(scheduler, request, verdict.error)
    if verdict.need_context:
        request.apply(Event.LOSE_CACHE)
        request.target_length = 0
        return _Settled()
    scores = verdict.prompt_logprobs or ()
    problem = _problem_of_scores(scores, request.unscored(item.start, item.end)[1])
    if problem is not None:
        return _fail(scheduler, request, problem)
    request.add_scores(scores)
    if not item.sample:
        return _prefill(scheduler, item)
    return _commit(scheduler, item, proposal, verdict)


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


def _commit(scheduler: Scheduler, item: Planned, proposal: Proposal | None, verdict: Verdict) -> _Settled:
    request = item.request
    was_decoding = request.state is State.DECODING
    if not was_decoding:
        request.apply(Event.CAUGHT_UP)
    drafted = len(proposal.tokens) if proposal else 0
    request.target_length = item.end + verdict.accepted
    if proposal is not None:
        if request.draft_length == item.end:
            # The last draft token is never fed back to the draft, so it holds at most drafted - 1 of them.
            request.draft_length += min(verdict.accepted, drafted - 1)
        scheduler.policy.observe(request.id, drafted, verdict.accepted)
    committed = request.commit(verdict.tokens, verdict.logprobs, frozenset(scheduler.info.eos_token_ids))
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
    return _Settled(delta, drafted, accepted, decoded=was_decoding, prefilled=0 if was_decoding else item.end - item.start)


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
    fallbacks: Counter[str],
    answer: VerifyReply,
    draft_time_s: float,
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
        drafted_per_position=tuple(sum(s.drafted > j for s in settled) for j in range(deepest)),
        accepted_per_position=tuple(sum(s.accepted > j for s in settled) for j in range(deepest)),
        depths=tuple(s.drafted for s in settled if s.decoded),
        verify_time_s=answer.step_time_s,
        draft_time_s=draft_time_s,
        num_finished=sum(s.delta is not None and s.delta.finish_reason is not None for s in settled),
        num_preempted=plan.num_preempted,
        num_cached_tokens=cached,
        fallbacks=dict(fallbacks),
    )
