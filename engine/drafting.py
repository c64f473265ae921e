"""The draft's side of a round: where the drafts come from, and what is prepared for the next round.

A draft is *prepared* or *asked for*. Prepared drafts were made while the target verified the round before, for its likeliest
outcomes: a hit costs no time. For a miss the policy decides whether the round asks the source and waits, or the request takes
a plain step. A source that cannot prepare, or a policy that wants nothing prepared, leaves sequential rounds: all drafts are
asked for.

Beside that source there may be a second one that needs nothing but the text (`engine.propose.beside`). What it offers was
looked up when the round was planned, and the policy has said of every request whether it goes *first*, so that the model's
draft is not even looked at, or is what is left where the model has drafted nothing, or is *extended*: the model is asked to go
on after the text's first tokens, and both are verified as one draft. All of this is decided before a token of this round's
model drafts is seen: under ``rejection`` and ``block`` a draft that is replaced for what it is would be a bias
(`autoscale.choice`). What was prepared follows committed tokens, not the text's, so a draft that begins with the text is always
asked for, in sequential rounds. And once the model's drafts are there, the text may go on after them (`_continue`).
"""

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.propose.beside import TextBeside
from engine.propose.checks import is_valid_draft, known_reason
from engine.propose.from_text import TextDraft
from engine.scheduler import Plan, Planned, Scheduler
from engine.types import (
    PrepareItem,
    PrepareReply,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    SparseProbs,
    TextOffer,
    VerifyReply,
)

CATCH_UP_SYNC = 32
"""A source that can work beside the target is not waited for when it lacks more committed tokens of a request than this."""


@dataclass(frozen=True, slots=True)
class Collect:
    """Fetch what the source has prepared, waiting ``patience_s`` at most; answered by `Collected`."""

    patience_s: float


@dataclass(frozen=True, slots=True)
class Collected:
    """All answers to `PrepareRequest` that have come since the last time, and how long the round waited for them."""

    replies: tuple[PrepareReply, ...] = ()
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask the draft source; answered by a `ProposeReply`, or by `NoDrafts` when it cannot answer in time."""

    request: ProposeRequest


@dataclass(frozen=True, slots=True)
class NoDrafts:
    """The source gave no answer: the round goes on as plain decoding."""

    reason: str


class Tail(NamedTuple):
    """What the text offers after the model's tokens of a draft."""

    offer: TextDraft
    depth: int
    """Tokens of it that are verified."""


@dataclass(slots=True)
class Drafts:
    """The drafts of one round, and how they were come by."""

    proposals: dict[str, Proposal] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    """By request, the leading tokens of its draft that are the text's; no entry where none is."""
    tails: dict[str, Tail] = field(default_factory=dict)
    """By request, what the text offered after the model's draft."""
    held: dict[str, int] = field(default_factory=dict)
    """Of asked requests, the tokens of the draft that the source holds after the committed ones: not its own last one, which
    was never fed back, and none after that."""
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    num_asked: int = 0
    draft_time_s: float = 0.0
    waited_s: float = 0.0


Answer = Collected | ProposeReply | NoDrafts | VerifyReply
Gathering = Generator[Collect | Propose, Answer, Drafts]


def gather_drafts(scheduler: Scheduler, plan: Plan, round_id: int, now_s: float, *, prepares: bool) -> Gathering:
    """Find a draft for every request that is to have one: prepared, or asked for. ``prepares``: the source can prepare.

    What is not found leaves the request's depth at 0. The depths were planned before any of this was looked at.
    """
    drafts = Drafts()
    _take_texts([item for item in plan.items if item.text_first and item.depth == 0], drafts)
    extending = [item for item in plan.items if item.extended > 0]
    speculating = [item for item in plan.items if item.depth > 0 and item.extended == 0]
    if scheduler.outcomes.outstanding:
        num_expected = sum(scheduler.outcomes.awaits(item.request.id, item.request.ids) for item in speculating)
        waits = num_expected and not _is_urgent(scheduler, plan)
        patience_s = scheduler.policy.patience_s(plan.batch_size, num_expected, now_s) if waits else 0.0
        collected = yield Collect(patience_s)
        if not isinstance(collected, Collected):
            raise TypeError(f"a Collect must be answered by Collected, got {type(collected).__name__}")
        _store(scheduler, collected, drafts)

    missed = _take_prepared(scheduler, speculating, drafts) + extending
    asked = _choose_asked(scheduler, plan, missed, drafts, now_s, prepares=prepares)
    if asked:
        released = tuple(scheduler.draft_released)
        reply = yield Propose(_propose_request(round_id, asked, released))
        drafts.num_asked = len(asked)
        if isinstance(reply, NoDrafts):
            drafts.fallbacks[reply.reason] += len(asked)
        elif isinstance(reply, ProposeReply) and reply.round_id != round_id:
            drafts.fallbacks["late"] += len(asked)
        elif isinstance(reply, ProposeReply):
            _use_proposals(reply, asked, scheduler.info.vocab_size, drafts)
            scheduler.draft_was_told(released)
    _take_texts([item for item in plan.items if item.request.id not in drafts.proposals], drafts)
    if scheduler.text is not None:
        _continue(scheduler, scheduler.text, plan, drafts, now_s)
    return drafts


# --- the text's -------------------------------------------------------------------------------------------------------------


def _take_texts(items: list[Planned], drafts: Drafts) -> None:
    for item in items:
        if item.text_depth > 0:
            tokens = item.text.tokens[: item.text_depth]
            drafts.proposals[item.request.id] = Proposal(sequence_id=item.request.id, tokens=tokens)
            drafts.heads[item.request.id] = len(tokens)


def _continue(scheduler: Scheduler, text: TextBeside, plan: Plan, drafts: Drafts, now_s: float) -> None:
    """Let the text go on after the model's drafts, under every rule: what it offers, and how much of that is verified, follows
    from the tokens before it, so it is a draft like any other, and certain of its tokens. Nothing that was drawn is dropped.
    """
    items = [item for item in plan.items if _may_be_continued(scheduler, item, drafts)]
    if not items:
        return
    offers, tails = [], []
    for item in items:
        drafted = drafts.proposals[item.request.id].tokens
        request = scheduler.depth_request(item.request, len(drafted))
        tail = text.draft_after(item.request, drafted, request.room)
        tails.append(tail)
        offers.append((TextOffer(request, len(tail.tokens), tail.match, tail.share), len(drafted)))
    num_drafted = sum(len(proposal.tokens) for proposal in drafts.proposals.values())
    depths = scheduler.policy.continuations(offers, plan.num_prompt_tokens, num_drafted, plan.batch_size, now_s)
    for item, tail, (_, length), depth in zip(items, tails, offers, depths, strict=True):
        fitting = scheduler.fit_tail(plan, item, length, min(depth, len(tail.tokens)))
        drafts.tails[item.request.id] = Tail(tail, fitting)
        if fitting:
            proposal = drafts.proposals[item.request.id]
            drafts.proposals[item.request.id] = _before(proposal, tail.tokens[:fitting])


def _may_be_continued(scheduler: Scheduler, item: Planned, drafts: Drafts) -> bool:
    """Whether the model has drafted for the request, and no end of the answer."""
    proposal = drafts.proposals.get(item.request.id)
    if proposal is None or drafts.heads.get(item.request.id, 0) == len(proposal.tokens):
        return False
    return scheduler.num_before_end(item.request, proposal.tokens) == len(proposal.tokens)


def _before(proposal: Proposal, tail: tuple[int, ...]) -> Proposal:
    """The model's tokens and, after them, the text's as one draft."""
    probs = None if proposal.probs is None else (*proposal.probs, *_certain(tail))
    return Proposal(sequence_id=proposal.sequence_id, tokens=(*proposal.tokens, *tail), probs=probs)


def _certain(tokens: tuple[int, ...]) -> tuple[SparseProbs, ...]:
    """The q of tokens of the text: one-hot."""
    return tuple(((token,), (1.0,)) for token in tokens)


def _after(ahead: tuple[int, ...], proposal: Proposal) -> Proposal:
    """The text's tokens and the model's as one draft."""
    probs = None if proposal.probs is None else (*_certain(ahead), *proposal.probs)
    return Proposal(sequence_id=proposal.sequence_id, tokens=(*ahead, *proposal.tokens), probs=probs)


# --- prepared ---------------------------------------------------------------------------------------------------------------


def _store(scheduler: Scheduler, collected: Collected, drafts: Drafts) -> None:
    """Keep what the source prepared, and note what it knows now."""
    live = {request.id: request for request in (*scheduler.running, *scheduler.waiting)}
    drafts.waited_s = collected.waited_s
    for reply in collected.replies:
        stored = scheduler.outcomes.store(reply)
        for prepared in stored.believed:
            request = live[prepared.sequence_id]
            request.draft_length = min(max(prepared.known_length, 0), len(request.ids))
        if stored.num_unexpected:
            drafts.fallbacks["unexpected_answer"] += stored.num_unexpected
        drafts.draft_time_s += reply.step_time_s
        scheduler.draft_has_answered(reply.round_id)


def _take_prepared(scheduler: Scheduler, speculating: list[Planned], drafts: Drafts) -> list[Planned]:
    """Use what was prepared for the outcomes that came true. Returns the requests for which there is nothing.

    A draft is cut to the planned depth, which nobody chose by looking at its tokens, and never dropped for what it is: under
    ``rejection`` and ``block`` anything else would be a bias.
    """
    missed = []
    for item in speculating:
        request = item.request
        taken = scheduler.outcomes.take(request.id, request.ids)
        if taken.kind is not None:
            (drafts.misses if taken.outcome is None else drafts.hits)[taken.kind] += 1
        if taken.outcome is None:
            missed.append(item)
            item.miss_reason = taken.reason
            continue
        tokens, probs = taken.outcome.tokens[: item.depth], taken.outcome.probs
        drafts.proposals[request.id] = Proposal(
            sequence_id=request.id, tokens=tokens, probs=probs[: item.depth] if probs is not None else None
        )
    return missed


# --- asked for --------------------------------------------------------------------------------------------------------------


def _choose_asked(
    scheduler: Scheduler, plan: Plan, missed: list[Planned], drafts: Drafts, now_s: float, *, prepares: bool
) -> list[Planned]:
    """Which of ``missed`` the round asks for and waits, and how deep; the others take a plain step."""
    behind = [item for item in missed if prepares and _num_lacking(item) > CATCH_UP_SYNC]
    for item in behind:
        item.depth = 0
        drafts.fallbacks["catching_up"] += 1
    near = [item for item in missed if item.depth > 0]
    if not near:
        return []
    if _is_urgent(scheduler, plan):
        for item in near:
            item.depth = 0
        drafts.fallbacks["first_token"] += len(near)
        return []
    pairs = [(item.request.id, item.depth) for item in near]
    depth = max(scheduler.policy.asked_depth(pairs, plan.batch_size, now_s), 0)
    for item in near:
        item.depth = min(item.depth, depth)
        if item.depth == 0 and item.miss_reason is not None:
            drafts.fallbacks[item.miss_reason] += 1
    return near if depth > 0 else []


def _is_urgent(scheduler: Scheduler, plan: Plan) -> bool:
    """Whether somebody waits for a first token, so that the round waits for nothing else."""
    return plan.makes_first_tokens and scheduler.policy.spares_first_tokens


def _num_lacking(item: Planned) -> int:
    """Committed tokens, as far as the target gets in this round, that the draft does not hold."""
    return item.end - item.request.draft_length


def _propose_request(round_id: int, asked: list[Planned], released: tuple[str, ...]) -> ProposeRequest:
    return ProposeRequest(round_id=round_id, items=tuple(_propose_item(item) for item in asked), release=released)


def _propose_item(item: Planned) -> ProposeItem:
    request = item.request
    request.draft_opened = True
    return ProposeItem(
        sequence_id=request.id,
        base_length=request.draft_length,
        tokens=tuple(request.ids[request.draft_length :]),
        depth=item.depth,
        context=request.context if request.draft_length == 0 else None,
        ahead=item.ahead,
    )


def _use_proposals(reply: ProposeReply, asked: list[Planned], vocab_size: int, drafts: Drafts) -> None:
    """Keep the proposals that answer this round's questions; what the draft knows is noted on the way."""
    drafts.draft_time_s += reply.step_time_s
    by_id = {proposal.sequence_id: proposal for proposal in reply.proposals}
    for item in asked:
        request = item.request
        proposal = by_id.get(request.id)
        problem = _problem(proposal, item, vocab_size)
        if proposal is not None and problem != "invalid_draft":
            request.draft_length = min(max(proposal.known_length, 0), len(request.ids))
        if problem is not None:
            drafts.fallbacks[problem] += 1
        elif proposal is not None:
            drafts.proposals[request.id] = _after(item.ahead, proposal) if item.extended else proposal
            if item.extended:
                drafts.heads[request.id] = item.extended
            drafts.held[request.id] = item.extended + len(proposal.tokens) - 1


def _problem(proposal: Proposal | None, item: Planned, vocab_size: int) -> str | None:
    """Why a proposal cannot be used."""
    if proposal is None:
        return "no_answer"
    if not proposal.tokens:
        return known_reason(proposal.reason)
    return None if is_valid_draft(proposal.tokens, proposal.probs, item.depth, vocab_size) else "invalid_draft"


# --- the next round ---------------------------------------------------------------------------------------------------------


def prepare_next(scheduler: Scheduler, plan: Plan, drafts: Drafts, round_id: int, now_s: float) -> PrepareRequest | None:
    """What the source is to do beside this round's verify: prepare the next round, and catch up with what it lacks.

    None where there is nothing to do, in particular for depth 0: then the draft does no work at all.
    """
    items = []
    batch_size = plan.batch_size
    for planned in plan.items:
        proposal = drafts.proposals.get(planned.request.id)
        item = _prepare_item(scheduler, planned, proposal.tokens if proposal is not None else (), batch_size, now_s)
        if item is not None:
            items.append(item)
            scheduler.outcomes.expect(round_id, item)
            drafts.held.pop(item.sequence_id, None)
            planned.request.draft_opened = True
    if not items:
        return None
    return PrepareRequest(round_id=round_id, items=tuple(items), release=scheduler.tell_draft(round_id))


def _prepare_item(
    scheduler: Scheduler, planned: Planned, draft: tuple[int, ...], batch_size: int, now_s: float
) -> PrepareItem | None:
    request = planned.request
    if planned.next_depth <= 0:
        return None
    fan_out: tuple[int, ...] = ()
    if planned.sample:
        room = scheduler.room(request)
        fan_out = scheduler.policy.fan_out(request.id, len(draft), batch_size, now_s)
        # No draft has room after an outcome that brings the request to its end.
        fan_out = tuple(count if room - accepted > 1 else 0 for accepted, count in enumerate(fan_out))
    if not any(fan_out):
        if _num_lacking(planned) <= CATCH_UP_SYNC:
            return None
        draft, fan_out = (), ()
    return PrepareItem(
        sequence_id=request.id,
        base_length=request.draft_length,
        tokens=tuple(request.ids[request.draft_length : planned.end]),
        draft=draft,
        depth=planned.next_depth if fan_out else 0,
        fan_out=fan_out,
        context=request.context if request.draft_length == 0 else None,
    )
