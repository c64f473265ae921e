"""Under the coupled and the greedy rule the text is *identical* for every draft, depth, batch, chunking and fault.

Whole rounds against a language model of a few tokens, compared with each request alone without drafts: ids, logprobs, reasons.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from typing import Any, ClassVar

import pytest
import torch
from msgspec.structs import replace
from table_lane import lane, table
from torch import Tensor

from engine.drivers import AsyncDriver, DraftUnavailable
from engine.propose.base import DraftSource, can_extend
from engine.propose.from_text import TextSource
from engine.propose.ngram import NgramSource
from engine.propose.outcomes import OutcomeCache, Taken
from engine.propose.suffix import SuffixSource
from engine.scheduler import DepthPolicy, FixedDepth, Scheduler
from engine.testing import TableModel
from engine.types import (
    Delta,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    Prepared,
    PrepareReply,
    PrepareRequest,
    Proposal,
    ProposeReply,
    ProposeRequest,
    SamplingParams,
    StepReport,
    TextChoice,
    TextOffer,
    TokenLogprob,
    VerifyReply,
    VerifyRequest,
)
from engine.verify.base import TargetModel


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


Text = tuple[tuple[int, ...], tuple[TokenLogprob, ...], FinishReason | None]
"""What a request said: ids, logprobs, why it ended."""

LARGE = 32
MODEL = table(LARGE, 11, 2.0)
LAST_ID = LARGE - 1


def mixed_requests(rule: str) -> list[GenerateRequest]:
    """Requests of many kinds: short and long prompts, every option, ends by EOS, by stop id and by length."""
    greedy: dict[str, object] = {"temperature": 0.0} if rule == "greedy" else {}
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 4, "min_tokens": 12},
        {"min_p": 0.1, "stop_token_ids": (5, 6)},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"presence_penalty": 0.8, "logit_bias": {3: 2.0, LAST_ID: -5.0}},
        {"ignore_eos": True, "max_tokens": 23},
        {"max_tokens": 1},
        {"temperature": 1.5, "max_depth": 2},
        {"temperature": 0.0},
    ]
    choose = random.Random(3)
    requests = []
    for i, kind in enumerate(kinds + kinds[:5]):
        prompt = tuple(choose.randrange(1, LARGE) for _ in range(choose.choice([1, 2, 9, 40])))
        params = SamplingParams(**{"max_tokens": 30, "seed": 7919 * i, "logprobs": i % 2 or None, **kind, **greedy})  # type: ignore[arg-type]
        requests.append(GenerateRequest(request_id=str(i), prompt_ids=prompt, params=params))
    return requests


class RandomDepth(FixedDepth):
    """Any depth up to 20, small ones more often, drawn anew for every request and round."""

    def __init__(self) -> None:
        super().__init__(0)
        self._random = random.Random(4)

    def choose(self, request_id: str) -> int:
        return min(self._random.randint(0, 20), self._random.randint(0, 20))


class RandomOverlap(RandomDepth):
    """Besides, any number of guesses and any choice between asking and a plain step."""

    def fan_out(self, request_id: str, draft_length: int, batch_size: int, now_s: float) -> tuple[int, ...]:
        return tuple(self._random.randint(0, 4) for _ in range(draft_length + 1))

    def asked_depth(self, missed: Sequence[tuple[str, int]], batch_size: int, now_s: float) -> int:
        return self._random.randint(0, 8)


class RandomChoice(RandomOverlap):
    """Besides, any part of what the text offers: before the model's draft, in its absence, or around it."""

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        return [self._choice(offer) for offer in offers]

    def _choice(self, offer: TextOffer) -> TextChoice:
        extended = self._random.randint(0, min(offer.extendable, 3)) if self._random.random() < 0.4 else 0
        return TextChoice(self._random.randint(0, offer.length), extended > 0 or self._random.random() < 0.4, extended)

    def continuations(
        self,
        offers: Sequence[tuple[TextOffer, int]],
        num_prompt_tokens: int,
        num_drafted: int,
        batch_size: int,
        now_s: float,
    ) -> list[int]:
        return [self._random.randint(0, offer.length) for offer, _ in offers]


class Recorded:
    """Remembers every delta of a lane, with its logprobs."""

    def __init__(
        self,
        target: TargetModel,
        source: DraftSource | None,
        policy: DepthPolicy,
        text: TextSource | None = None,
        **limits: int,
    ):
        self.driver = lane(target, source, policy, text, **limits)
        self.by_source: Counter[str] = Counter()
        self.fallbacks: set[str] = set()
        self.num_accepted = 0
        self.num_hybrids = 0
        self.num_preempted = 0
        self.hits: Counter[str] = Counter()

    def play(self, requests: Sequence[GenerateRequest]) -> dict[str, Text]:
        """Request id -> (ids, logprobs, reason)."""
        for request in requests:
            self.driver.add(request)
        deltas: dict[str, list[Delta]] = {request.request_id: [] for request in requests}
        while self.driver.scheduler.running or self.driver.scheduler.waiting:
            result = self.driver.step()
            self.fallbacks |= set(result.report.fallbacks)
            self.num_accepted += result.report.num_accepted
            self.num_preempted += result.report.num_preempted
            self.hits.update(result.report.hits)
            self.by_source.update({name: step.num_accepted for name, step in result.report.sources.items()})
            self.num_hybrids += result.report.num_extended > 0
            for delta in result.deltas:
                deltas[delta.request_id].append(delta)
        return {name: _joined(parts) for name, parts in deltas.items()}


def _joined(deltas: Sequence[Delta]) -> Text:
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    assert not logprobs or [entry.token_id for entry in logprobs] == list(tokens)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return tokens, logprobs, deltas[-1].finish_reason


def model(logits: Tensor = MODEL, **info: int) -> TableModel:
    return TableModel(logits, eos_token_ids=(0,), **info)


@pytest.fixture(scope="module", params=["coupled", "greedy"])
def plain(request: pytest.FixtureRequest) -> tuple[list[GenerateRequest], dict[str, Text]]:
    """Requests, and what each of them says alone, without drafts, with its prompt in one piece."""
    requests = mixed_requests(request.param)
    texts: dict[str, Text] = {}
    for one in requests:
        texts |= Recorded(model(), None, FixedDepth(0)).play([one])
    reasons = {text[2] for text in texts.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    return requests, texts


Plain = tuple[list[GenerateRequest], dict[str, Text]]
SOURCES: dict[str, Callable[[], DraftSource | None]] = {
    "none": lambda: None,
    "perfect": lambda: model(),
    "good": lambda: model(MODEL + table(LARGE, 12, 0.5)),
    "random": lambda: model(table(LARGE, 13)),
    "adversarial": lambda: model(-MODEL),
    "n-grams": lambda: NgramSource(),
    "suffixes": lambda: SuffixSource(shared_tokens=1 << 12),
}


EVERY_DEPTH = ["good", "n-grams", "suffixes"]


@pytest.mark.parametrize(
    ("source", "depth"),
    [
        ("none", 0),
        *itertools.product(["perfect", "random", "adversarial"], [1, 2, 3, 5, 8, 20]),
        *itertools.product(EVERY_DEPTH, range(21)),
    ],
)
def test_the_text_does_not_depend_on_draft_or_depth(plain: Plain, source: str, depth: int) -> None:
    """Bug guarded: anything by which a draft, good or bad, could reach the text: ids, logprobs and reasons are identical to
    those of each request alone without drafts (cases L01 to L03, L14, L17)."""
    requests, texts = plain
    recorded = Recorded(model(), SOURCES[source](), FixedDepth(depth))
    assert recorded.play(requests) == texts
    assert "need_context" not in recorded.fallbacks
    if source in ("perfect", *EVERY_DEPTH):
        assert (recorded.num_accepted > 0) == (depth > 0)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "limits",
    [{"max_batch": 1}, {"max_batch": 3, "prefill_tokens": 16}, {"max_batch": 20, "prefill_tokens": 7}, {"max_batch": 7}],
    ids=str,
)
def test_the_text_does_not_depend_on_batch_chunks_or_policy(plain: Plain, source: str, limits: dict[str, int]) -> None:
    """Bug guarded: neighbours, chunked prefill or a depth that changes every round reach the text (case L37)."""
    requests, texts = plain
    assert Recorded(model(), SOURCES[source](), RandomDepth(), **limits).play(requests) == texts


@pytest.mark.parametrize("policy", [RandomDepth, RandomOverlap])
def test_the_text_does_not_depend_on_preemption(plain: Plain, policy: type[RandomDepth]) -> None:
    """Bug guarded: a request that was prefilled again draws other noise, counts its penalties from another place, or is given
    a draft that was prepared for another text."""
    requests, texts = plain
    recorded = Recorded(
        model(kv_capacity_tokens=96, kv_block_size=4), SOURCES["good"](), policy(), max_batch=20, prefill_tokens=32
    )
    assert recorded.play(requests) == texts
    assert recorded.num_preempted > 0


@pytest.mark.parametrize("fan_out", [1, 2, 3, 4])
@pytest.mark.parametrize("source", ["perfect", "good", "random", "adversarial"])
def test_the_text_does_not_depend_on_what_is_prepared(plain: Plain, source: str, fan_out: int) -> None:
    """Bug guarded: anything by which a prepared draft, hit or missed, could reach the text."""
    requests, texts = plain
    recorded = Recorded(model(), SOURCES[source](), FixedDepth(fan_out + 1, fan_out, asks=fan_out % 2 == 0), max_batch=8)
    assert recorded.play(requests) == texts
    assert not recorded.fallbacks & {"need_context", "unexpected_answer"}
    if source in ("perfect", "good"):
        assert recorded.num_accepted > 0
        assert min(recorded.hits[kind] for kind in ("plain", "bonus")) > 0
    if source == "good":
        assert recorded.hits["recovery"] > 0


@pytest.mark.parametrize("limits", [{"max_batch": 3, "prefill_tokens": 16}, {"max_batch": 20, "prefill_tokens": 7}], ids=str)
def test_the_text_does_not_depend_on_depths_that_change_after_preparing(plain: Plain, limits: dict[str, int]) -> None:
    """Bug guarded: a prepared draft is used although it is deeper than the round, or belongs to an outcome of an older one."""
    requests, texts = plain
    recorded = Recorded(model(), SOURCES["good"](), RandomOverlap(), **limits)
    assert recorded.play(requests) == texts
    assert min(recorded.hits[kind] for kind in ("plain", "recovery", "bonus")) > 0


@pytest.mark.parametrize("text", [NgramSource, lambda: SuffixSource(shared_tokens=1 << 12)], ids=["n-grams", "suffixes"])
@pytest.mark.parametrize("source", ["good", "random"])
@pytest.mark.parametrize("limits", [{"max_batch": 3, "prefill_tokens": 16}, {"max_batch": 20, "prefill_tokens": 7}], ids=str)
def test_the_text_does_not_depend_on_which_source_drafts(
    plain: Plain, source: str, text: Callable[[], TextSource], limits: dict[str, int]
) -> None:
    """Bug guarded: two sources for one request, in turns, shift what either is believed to hold, or what was prepared."""
    requests, texts = plain
    recorded = Recorded(model(), SOURCES[source](), RandomChoice(), text(), **limits)
    assert recorded.play(requests) == texts
    assert not recorded.fallbacks & {"need_context", "unexpected_answer"}
    assert min(recorded.by_source.values()) > 0 or source == "random"
    assert recorded.hits["recovery"] > 0 or source == "random"
    assert recorded.num_hybrids > 0


def test_a_cache_that_confuses_outcomes_changes_nothing(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a wrong entry of the speculation cache reaches the text: under ``coupled`` it may only cost acceptance."""
    requests, texts = plain
    right = Recorded(model(), SOURCES["good"](), FixedDepth(3, 3))
    assert right.play(requests) == texts
    found, chance = OutcomeCache._found, random.Random(9)

    def confused(self: OutcomeCache, expected: Any, answer: Prepared, accepted: int, token: int) -> Taken:
        taken = found(self, expected, answer, accepted, token)
        return taken if taken.outcome is None else changed(taken, outcome=chance.choice(answer.outcomes))

    monkeypatch.setattr(OutcomeCache, "_found", confused)
    wrong = Recorded(model(), SOURCES["good"](), FixedDepth(3, 3))
    assert wrong.play(requests) == texts
    assert wrong.hits
    assert wrong.num_accepted < right.num_accepted


def test_a_request_resumed_elsewhere_says_the_same(plain: Plain) -> None:
    """Bug guarded: after a router died, noise, penalties or min_tokens start again at the resumed token; every request is cut
    after every one of its tokens."""
    requests, texts = plain
    cut = {
        f"{request.request_id} after {count}": (request, count)
        for request in requests
        for count in range(1, len(_tokens(texts, request)))
    }
    resumed = [
        replace(request, request_id=name, output_ids=_tokens(texts, request)[:count]) for name, (request, count) in cut.items()
    ]
    played = Recorded(model(kv_capacity_tokens=1 << 20), SOURCES["good"](), RandomDepth(), prefill_tokens=500).play(resumed)
    for name, (request, count) in cut.items():
        tokens, logprobs, reason = texts[request.request_id]
        wanted = logprobs[count:] if logprobs else ()
        assert played[name] == (tokens[count:], wanted, reason)


def _tokens(texts: dict[str, Text], request: GenerateRequest) -> tuple[int, ...]:
    return texts[request.request_id][0]


class Forgetful:
    """A target that loses the cache of some sequences, chosen anew every round, as a worker may that was restarted."""

    def __init__(self) -> None:
        self._model = model()
        self._random = random.Random(6)
        self.num_lost = 0

    @property
    def info(self) -> ModelInfo:
        return self._model.info

    def verify(self, request: VerifyRequest) -> VerifyReply:
        held = [item.sequence_id for item in request.items if item.base_length > 0]
        lost = [sequence_id for sequence_id in held if self._random.random() < 0.3]
        self.num_lost += len(lost)
        return self._model.verify(replace(request, release=(*request.release, *lost)))


@pytest.mark.parametrize("policy", [RandomDepth, RandomOverlap])
@pytest.mark.parametrize("source", ["none", "perfect", "good", "n-grams"])
@pytest.mark.parametrize("prefill_tokens", [7, 1 << 20])
def test_the_text_does_not_depend_on_a_target_that_forgets(
    plain: Plain, source: str, prefill_tokens: int, policy: type[RandomDepth]
) -> None:
    """Bug guarded: a request that was sent again from its ids draws other noise, commits a draft that was never decided, or
    counts its penalties from another place; a prefill that is lost half way."""
    requests, texts = plain
    target = Forgetful()
    recorded = Recorded(target, SOURCES[source](), policy(), prefill_tokens=prefill_tokens)
    assert recorded.play(requests) == texts
    assert target.num_lost > 10


def test_neighbours_under_other_rules_change_nothing(plain: Plain) -> None:
    """Bug guarded: rows, noise or verdicts of requests under different rules are mixed up within a batch."""
    requests, texts = plain
    mixed = []
    for request in requests:
        for rule in ("block", "rejection"):
            params = replace(request.params, rule=rule, temperature=request.params.temperature or 1.0)
            mixed.append(replace(request, request_id=f"{rule}/{request.request_id}", params=params))
        mixed.append(request)
    played = Recorded(model(), SOURCES["good"](), RandomOverlap(), max_batch=20).play(mixed)
    assert {name: played[name] for name in texts} == texts


# --- drafts that fail -------------------------------------------------------------------------------------------------------


class Crashing:
    """A draft behind a bad link: each call it answers well, badly or not at all, as `random.Random` chooses."""

    available = True

    def __init__(self, source: DraftSource, seed: int):
        self._source = source
        self._random = random.Random(seed)
        self._answers: list[PrepareReply] = []
        self.prepares = hasattr(source, "prepare")
        self.extends = can_extend(source)
        self.seen: set[str] = set()

    def prepare(self, request: PrepareRequest) -> None:
        """Answers are lost, come twice, rounds later, in another order, under other names or round ids, or are garbage."""
        fault = self._random.choice(["none", "none", "none", "breaks", *self._PREPARED_FAULTS])
        self.seen.add(f"prepare: {fault}")
        if fault == "breaks":
            raise RuntimeError("a bug in the draft")
        reply = self._source.prepare(request)  # type: ignore[attr-defined]
        change = self._PREPARED_FAULTS.get(fault)
        self._answers += [reply] if change is None else change(self, reply)

    async def collect(self, patience_s: float) -> tuple[PrepareReply, ...]:
        if self._random.random() < 0.1:
            raise RuntimeError("a bug in the connection")
        self._random.shuffle(self._answers)
        kept = self._random.choice([0, 0, 0, 1, 2])
        answers, self._answers = self._answers[kept:], self._answers[:kept]
        return tuple(answers)

    def _loses(self, reply: PrepareReply) -> list[PrepareReply]:
        return []

    def _says_it_twice(self, reply: PrepareReply) -> list[PrepareReply]:
        return [reply, reply]

    def _names_another_round(self, reply: PrepareReply) -> list[PrepareReply]:
        return [replace(reply, round_id=reply.round_id + self._random.choice([-1, 1]))]

    def _swaps_prepared(self, reply: PrepareReply) -> list[PrepareReply]:
        names = [prepared.sequence_id for prepared in reply.prepared]
        rotated = zip(["nobody", *names[1:]], reply.prepared[::-1], strict=True)
        return [replace(reply, prepared=tuple(replace(prepared, sequence_id=name) for name, prepared in rotated))]

    def _repeats_outcomes(self, reply: PrepareReply) -> list[PrepareReply]:
        return self._with_outcomes(reply, lambda outcomes: outcomes * 2)

    def _moves_outcomes(self, reply: PrepareReply) -> list[PrepareReply]:
        return self._with_outcomes(reply, lambda outcomes: tuple(replace(o, accepted=o.accepted + 1) for o in outcomes))

    def _swaps_drafts(self, reply: PrepareReply) -> list[PrepareReply]:
        return self._with_outcomes(
            reply, lambda outcomes: tuple(replace(o, tokens=other.tokens) for o, other in itertools.pairwise(outcomes))
        )

    def _spoils_drafts(self, reply: PrepareReply) -> list[PrepareReply]:
        spoilt = self._random.choice([(), (-1,), (LARGE,), (1 << 62,), (1,) * 99])
        return self._with_outcomes(reply, lambda outcomes: tuple(replace(o, tokens=spoilt) for o in outcomes))

    def _counts_prepared_wrongly(self, reply: PrepareReply) -> list[PrepareReply]:
        wrong = tuple(replace(prepared, known_length=self._random.randrange(-3, 100)) for prepared in reply.prepared)
        return [replace(reply, prepared=wrong)]

    @staticmethod
    def _with_outcomes(reply: PrepareReply, change: Callable[[Any], Any]) -> list[PrepareReply]:
        return [replace(reply, prepared=tuple(replace(p, outcomes=change(p.outcomes)) for p in reply.prepared))]

    _PREPARED_FAULTS: ClassVar[dict[str, Callable[["Crashing", PrepareReply], list[PrepareReply]]]] = {
        "loses": _loses,
        "says it twice": _says_it_twice,
        "names another round": _names_another_round,
        "swaps prepared": _swaps_prepared,
        "repeats outcomes": _repeats_outcomes,
        "moves outcomes": _moves_outcomes,
        "swaps drafts": _swaps_drafts,
        "spoils drafts": _spoils_drafts,
        "counts wrongly": _counts_prepared_wrongly,
    }

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        fault = self._random.choice(["none", "none", "none", *self._FAULTS])
        self.seen.add(fault)
        if fault == "restarted":
            self._source.propose(ProposeRequest(round_id=0, items=(), release=tuple(i.sequence_id for i in request.items)))
        reply = self._source.propose(request)
        change = self._FAULTS.get(fault)
        return reply if change is None else change(self, reply)

    def _refuses(self, reply: ProposeReply) -> ProposeReply:
        raise DraftUnavailable("deadline")

    def _breaks(self, reply: ProposeReply) -> ProposeReply:
        raise RuntimeError("a bug in the draft")

    def _says_nothing(self, reply: ProposeReply) -> ProposeReply:
        return replace(reply, proposals=())

    def _answers_another_round(self, reply: ProposeReply) -> ProposeReply:
        return replace(reply, round_id=reply.round_id - 1)

    def _sends_garbage(self, reply: ProposeReply) -> ProposeReply:
        return self._changed(reply, lambda p: replace(p, tokens=(*p.tokens[:-1], self._random.choice([-1, LARGE, 1 << 62]))))

    def _sends_too_many(self, reply: ProposeReply) -> ProposeReply:
        return self._changed(reply, lambda p: replace(p, tokens=p.tokens * 9))

    def _sends_random_ids(self, reply: ProposeReply) -> ProposeReply:
        return self._changed(reply, lambda p: replace(p, tokens=tuple(self._random.choices(range(LARGE), k=len(p.tokens)))))

    def _counts_wrongly(self, reply: ProposeReply) -> ProposeReply:
        return self._changed(reply, lambda p: replace(p, known_length=self._random.randrange(-3, 100)))

    def _swaps_sequences(self, reply: ProposeReply) -> ProposeReply:
        """Every sequence gets its neighbour's proposal, whose length and count fit as they may."""
        names = [proposal.sequence_id for proposal in reply.proposals]
        rotated = zip([*names[1:], *names[:1]], reply.proposals, strict=True)
        return replace(reply, proposals=tuple(replace(proposal, sequence_id=name) for name, proposal in rotated))

    @staticmethod
    def _changed(reply: ProposeReply, change: Callable[[Proposal], Proposal]) -> ProposeReply:
        return replace(reply, proposals=tuple(change(p) if p.tokens else p for p in reply.proposals))

    _FAULTS: ClassVar[dict[str, Callable[["Crashing", ProposeReply], ProposeReply] | None]] = {
        "restarted": None,
        "refuses": _refuses,
        "breaks": _breaks,
        "says nothing": _says_nothing,
        "answers another round": _answers_another_round,
        "sends garbage": _sends_garbage,
        "sends too many": _sends_too_many,
        "sends random ids": _sends_random_ids,
        "counts wrongly": _counts_wrongly,
        "swaps sequences": _swaps_sequences,
    }


class Near:
    """A target in this process, for the asynchronous driver."""

    def __init__(self, target: TableModel):
        self._target = target

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        return self._target.verify(request)


@pytest.mark.parametrize("policy", [RandomDepth, RandomOverlap])
@pytest.mark.parametrize("source", ["perfect", "good", "n-grams"])
@pytest.mark.parametrize("seed", range(4))
async def test_the_text_does_not_depend_on_a_draft_that_crashes(
    plain: Plain, source: str, seed: int, policy: type[RandomDepth]
) -> None:
    """Bug guarded: a draft that dies, restarts, answers late, lies about what it knows, or sends ids that do not exist, are too
    many or belong to another request reaches the text, or fails a request (cases L01, L31)."""
    requests, texts = plain
    draft = SOURCES[source]()
    assert draft is not None
    crashing = Crashing(draft, seed)
    reports: list[StepReport] = []
    scheduler = Scheduler(model().info, policy(), max_batch=6, prefill_tokens=32, max_waiting=100)
    driver = AsyncDriver(Near(model()), crashing, scheduler, on_report=reports.append)

    async def stream(request: GenerateRequest) -> Text:
        return _joined([delta async for delta in driver.generate(request)])

    rounds = asyncio.create_task(driver.run())
    played = await asyncio.gather(*(stream(request) for request in requests))
    rounds.cancel()
    assert dict(zip([request.request_id for request in requests], played, strict=True)) == texts
    assert len(crashing.seen) > 5
    assert {"invalid_draft", "draft_error"} & {reason for report in reports for reason in report.fallbacks}
    assert sum(report.num_accepted for report in reports) > 0
    if policy is RandomOverlap and crashing.prepares:
        assert sum("prepare" in fault for fault in crashing.seen) > 5
        assert sum(sum(report.hits.values()) for report in reports) > 0


def test_a_draft_with_broken_numbers_changes_nothing(plain: Plain) -> None:
    """Bug guarded: NaN in the draft's logits becomes a draft token, or stops the drafts of the whole batch (case L31)."""
    requests, texts = plain
    logits = MODEL.clone()
    logits[::3] = torch.nan
    recorded = Recorded(model(), model(logits), FixedDepth(4))
    assert recorded.play(requests) == texts
    assert "invalid_draft" in recorded.fallbacks
    assert recorded.num_accepted > 0


def test_a_target_with_broken_numbers_fails_the_request_alone(plain: Plain) -> None:
    """Bug guarded: NaN in the target's logits becomes a token or ends the neighbours (case L31)."""
    requests, texts = plain
    seen = {r.request_id: {r.prompt_ids[-1], *texts[r.request_id][0][:-1]} for r in requests}
    broken = next(token for token in range(LARGE) if 2 <= sum(token in tokens for tokens in seen.values()) < len(requests) - 1)
    logits = MODEL.clone()
    logits[broken] = torch.nan
    played = Recorded(model(logits), model(), FixedDepth(4)).play(requests)
    for name, (tokens, _, reason) in played.items():
        if broken in seen[name]:
            assert reason is FinishReason.ERROR
            assert tokens == texts[name][0][: len(tokens)]
        else:
            assert played[name] == texts[name]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_seed_decides(rule: str) -> None:
    """Bug guarded: unseeded neighbours share one stream, or a seed means something else after a restart (cases L10, L11)."""

    def text(seed: int, beside: int) -> object:
        requests = [
            GenerateRequest(request_id=str(i), prompt_ids=(1,), params=SamplingParams(seed=s, max_tokens=20, rule=rule))
            for i, s in enumerate([seed, *range(1000, 1000 + beside)])
        ]
        return Recorded(TableModel(MODEL), SOURCES["good"](), FixedDepth(3)).play(requests)["0"]

    assert text(5, 0) == text(5, 0) == text(5, 9)
    assert len({str(text(seed, 0)) for seed in (0, 1, 5, 1 << 32, (1 << 63) + 5, (1 << 64) - 1)}) == 6
