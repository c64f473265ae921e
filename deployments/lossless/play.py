"""What `outrider verify-lossless` plays with: the router's own rounds in this process, and drafts of every kind."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import cast

from msgspec.structs import replace

from engine.drivers import AsyncDriver, DraftUnavailable
from engine.propose.base import DraftSource, OverlappedSource, can_extend, can_prepare
from engine.propose.beside import TextBeside
from engine.propose.from_text import TextSource
from engine.scheduler import DepthPolicy, FixedDepth, Scheduler
from engine.types import (
    Delta,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    Outcome,
    Prepared,
    PrepareItem,
    PrepareReply,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    SparseProbs,
    StepReport,
    TextChoice,
    TextOffer,
    TokenLogprob,
    VerifyReply,
    VerifyRequest,
)
from engine.verify.base import TargetModel

WHOLE_PREFILL = 1 << 30
MOST_TEXT = 20
"""Tokens that a text drafts beside another source."""
MOST_EXTENDED = 2
"""Tokens of the text that the other source goes on after."""


@dataclass(slots=True)
class Text:
    """What one request said."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None

    def add(self, delta: Delta) -> None:
        """Append what a round committed."""
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.finish_reason, self.error = delta.finish_reason, delta.error


@dataclass(slots=True)
class Played:
    """Texts by request id, and what the rounds did."""

    texts: dict[str, Text]
    drafted: Counter[int] = field(default_factory=Counter)
    """By draft position, those whose predecessors were all accepted: the others say nothing about the draft."""
    accepted: Counter[int] = field(default_factory=Counter)
    num_drafted: int = 0
    num_preempted: int = 0
    num_cached: int = 0
    """Tokens that the target took from its prefix cache."""
    num_hits: int = 0
    """Drafts that had been prepared while the target verified."""
    fallbacks: Counter[str] = field(default_factory=Counter)

    def report(self, report: StepReport) -> None:
        """Count a round."""
        drafted, accepted = report.drafted_per_position, report.accepted_per_position
        self.drafted.update({j: min(drafted[j], accepted[j - 1]) if j else drafted[0] for j in range(len(drafted))})
        self.accepted.update(dict(enumerate(accepted)))
        self.num_drafted += report.num_drafted
        self.num_preempted += report.num_preempted
        self.num_cached += report.num_cached_tokens
        self.num_hits += sum(report.hits.values())
        self.fallbacks.update(report.fallbacks)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch."""

    max_batch: int = 64
    prefill_tokens: int = WHOLE_PREFILL
    kv_capacity_tokens: int | None = None
    """The scheduler's belief; None = what the target says."""


NO_LIMITS = Limits()


def play(
    target: TargetModel,
    source: DraftSource | None,
    requests: Sequence[GenerateRequest],
    policy: DepthPolicy,
    limits: Limits = NO_LIMITS,
    text: TextSource | None = None,
) -> Played:
    """Run requests to their ends through the router's driver; afterwards target and source have forgotten them.

    ``text`` drafts beside ``source``.
    """
    played = Played({request.request_id: Text() for request in requests})
    scheduler = _scheduler(target.info, policy, limits, len(requests), text)
    try:
        asyncio.run(_play(AsyncDriver(_Here(target), _DraftHere(source), scheduler, on_report=played.report), requests, played))
    finally:
        names = tuple(played.texts)
        target.verify(VerifyRequest(round_id=0, items=(), release=names))
        if source is not None:
            source.propose(ProposeRequest(round_id=0, items=(), release=names))
    return played


def play_alone(target: TargetModel, requests: Sequence[GenerateRequest]) -> dict[str, Text]:
    """The reference: one request after the other, without drafts, every prompt in one piece."""
    return {r.request_id: play(target, None, [r], FixedDepth(0)).texts[r.request_id] for r in requests}


def _scheduler(info: ModelInfo, policy: DepthPolicy, limits: Limits, num_requests: int, text: TextSource | None) -> Scheduler:
    capacity = limits.kv_capacity_tokens
    # Counted in single tokens, so that the first token beyond it tells, where the target's coarser blocks surely suffice.
    if capacity is not None and capacity + num_requests * info.kv_block_size <= info.kv_capacity_tokens:
        info = replace(info, kv_capacity_tokens=capacity, kv_block_size=1)
    return Scheduler(
        info,
        policy,
        max_batch=limits.max_batch,
        prefill_tokens=limits.prefill_tokens,
        max_waiting=num_requests,
        text=None if text is None else TextBeside(text, MOST_TEXT),
    )


async def _play(driver: AsyncDriver, requests: Sequence[GenerateRequest], played: Played) -> None:
    rounds = asyncio.create_task(driver.run())
    try:
        await asyncio.gather(*(_stream(driver, request, played.texts[request.request_id]) for request in requests))
    finally:
        rounds.cancel()
        await asyncio.gather(rounds, return_exceptions=True)


async def _stream(driver: AsyncDriver, request: GenerateRequest, text: Text) -> None:
    async for delta in driver.generate(request):
        text.add(delta)


@dataclass(frozen=True, slots=True)
class _Here:
    target: TargetModel

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        return self.target.verify(request)


class _DraftHere:
    def __init__(self, source: DraftSource | None):
        self._source = source
        self._prepared: list[PrepareReply] = []
        self.prepares = can_prepare(source)
        self.extends = can_extend(source)

    @property
    def available(self) -> bool:
        return self._source is not None

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        if self._source is None:
            raise DraftUnavailable("no_draft")
        return self._source.propose(request)

    def prepare(self, request: PrepareRequest) -> None:
        with suppress(DraftUnavailable):  # an answer that never comes
            self._prepared.append(cast(OverlappedSource, self._source).prepare(request))

    async def collect(self, patience_s: float) -> tuple[PrepareReply, ...]:
        replies, self._prepared = tuple(self._prepared), []
        return replies


# --- depths -----------------------------------------------------------------------------------------------------------------


class ChosenDepth(FixedDepth):
    """A depth per request and round from a function of the request's id.

    Beside a text source, where the model can go on after the text's tokens, it does after up to `MOST_EXTENDED` of them, and
    the text goes on after the model's.
    """

    def __init__(self, choose: Callable[[str], int], fan_out: int = 0):
        super().__init__(0, fan_out)
        self._choose = choose

    def choose(self, request_id: str) -> int:
        """As the function says."""
        return self._choose(request_id)

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        """As `FixedDepth`, and hybrid drafts."""
        alone = super().text_choices(offers, batch_size, now_s, has_model=has_model)
        return [choice._replace(extended=self._extended(offer)) for offer, choice in zip(offers, alone, strict=True)]

    def continuations(
        self,
        offers: Sequence[tuple[TextOffer, int]],
        num_prompt_tokens: int,
        num_drafted: int,
        batch_size: int,
        now_s: float,
    ) -> list[int]:
        """As many tokens as the function says once more."""
        return [min(self.choose(offer.request.request_id), offer.length) for offer, _ in offers]

    def _extended(self, offer: TextOffer) -> int:
        return min(self.choose(offer.request.request_id) % (MOST_EXTENDED + 1), offer.extendable)


def random_depth(seed: int, most: int = 20, fan_out: int = 0) -> ChosenDepth:
    """Any depth, drawn anew for every request and round. With ``fan_out`` drafts are prepared while the target verifies."""
    chance = random.Random(seed)
    return ChosenDepth(lambda _: chance.randint(0, most), fan_out)


# --- drafts -----------------------------------------------------------------------------------------------------------------


class _Stateless:
    """A source that keeps nothing, so that every round brings it the whole sequence."""

    def __init__(self, name: str, seed: int):
        self._name = name
        self._chance = random.Random(seed)

    @property
    def name(self) -> str:
        """As `DraftSource.name`."""
        return self._name

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`."""
        return ProposeReply(round_id=request.round_id, proposals=tuple(map(self._propose, request.items)))

    def _propose(self, item: ProposeItem) -> Proposal:
        raise NotImplementedError


class RandomSource(_Stateless):
    """Any token of the vocabulary: nearly all are refused."""

    def __init__(self, vocab_size: int, seed: int = 1):
        super().__init__("random", seed)
        self._vocab_size = vocab_size

    def _propose(self, item: ProposeItem) -> Proposal:
        tokens = tuple(self._chance.randrange(self._vocab_size) for _ in range(item.depth))
        return Proposal(sequence_id=item.sequence_id, tokens=tokens)


class ReplaySource(_Stateless):
    """An adversary that knows the text and errs now and then, so that drafts are accepted up to any position."""

    def __init__(self, texts: Mapping[str, tuple[int, ...]], vocab_size: int, error_rate: float, seed: int = 2):
        """``texts``: prompt and output of every sequence; ``error_rate``: share of tokens replaced by random ones."""
        super().__init__("half-right", seed)
        self._texts = texts
        self._vocab_size = vocab_size
        self._error_rate = error_rate

    def _propose(self, item: ProposeItem) -> Proposal:
        length = item.base_length + len(item.tokens)
        tokens = self._texts[item.sequence_id][length : length + item.depth]
        drafted = tuple(self._err() if self._chance.random() < self._error_rate else token for token in tokens)
        return Proposal(sequence_id=item.sequence_id, tokens=drafted, reason=None if drafted else "no_match")

    def _err(self) -> int:
        return self._chance.randrange(self._vocab_size)


FAULTS = ("none", "away", "none", "garbage", "none", "forgets", "none")


class CrashingSource:
    """Passes another source's answers on, half of the time: it is away, forgets all it knew, or answers with garbage."""

    def __init__(self, source: DraftSource, vocab_size: int, seed: int = 3):
        self._source = source
        self._vocab_size = vocab_size
        self._chance = random.Random(seed)
        self._known: set[str] = set()
        self._faults = cycle(FAULTS)

    @property
    def name(self) -> str:
        """As `DraftSource.name`."""
        return "crashing"

    @property
    def prepares(self) -> bool:
        """As the other source."""
        return can_prepare(self._source)

    @property
    def extends(self) -> bool:
        """As the other source."""
        return can_extend(self._source)

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`; raises `DraftUnavailable` in some rounds."""
        is_garbage = self._misbehave(request)
        reply = self._source.propose(request)
        if not is_garbage:
            return reply
        garbage = tuple(map(self._spoil, request.items[: len(request.items) // 2 + 1]))
        return ProposeReply(round_id=request.round_id - self._chance.randrange(2), proposals=garbage)

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        """As `OverlappedSource.prepare`, with the same faults."""
        is_garbage = self._misbehave(request)
        reply = cast(OverlappedSource, self._source).prepare(request)
        if not is_garbage:
            return reply
        garbage = tuple(map(self._spoil_outcomes, request.items[: len(request.items) // 2 + 1]))
        return PrepareReply(round_id=request.round_id - self._chance.randrange(2), prepared=garbage)

    def _misbehave(self, request: ProposeRequest | PrepareRequest) -> bool:
        """The next fault; whether the answer is to be garbage."""
        fault = next(self._faults) if request.items else "none"
        if fault == "away":
            raise DraftUnavailable("crashed")
        if fault == "forgets":
            self._source.propose(ProposeRequest(round_id=0, items=(), release=tuple(self._known)))
            self._known.clear()
        self._known.update(item.sequence_id for item in request.items)
        return fault == "garbage"

    def _spoil_outcomes(self, item: PrepareItem) -> Prepared:
        """Outcomes that nobody asked for, with drafts that cannot be."""
        outcomes = tuple(
            Outcome(accepted=accepted, token=token, tokens=self._chance.choice([(self._vocab_size,), (-1,), ()]))
            for accepted in range(len(item.draft) + 2)
            for token in (0, 1)
        )
        return Prepared(sequence_id=item.sequence_id, outcomes=outcomes, known_length=self._chance.randrange(10_000))

    def _spoil(self, item: ProposeItem) -> Proposal:
        tokens = self._chance.choice([(self._vocab_size,), (-1,), (0,) * (item.depth + 1), ()])
        return Proposal(sequence_id=item.sequence_id, tokens=tokens, known_length=self._chance.randrange(10_000))


class UniformSource(_Stateless):
    """Draws every token from the uniform distribution over a few, and says so: a q that is far from any p, and exact.

    With ``pick`` another choice than a fair one is made while the same q is reported, which no ratio test survives.
    """

    def __init__(self, tokens: Sequence[int], pick: Callable[[Sequence[int]], int] | None = None, seed: int = 4):
        super().__init__("uniform", seed)
        self._tokens = tuple(tokens)
        self._pick = pick or self._chance.choice
        self._probs: SparseProbs = (self._tokens, (1.0 / len(self._tokens),) * len(self._tokens))

    def _propose(self, item: ProposeItem) -> Proposal:
        tokens = tuple(self._pick(self._tokens) for _ in range(item.depth))
        return Proposal(sequence_id=item.sequence_id, tokens=tokens, probs=(self._probs,) * len(tokens))
