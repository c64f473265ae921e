"""Rounds with two sources, a model and the text: whichever drafts, the target's text comes out, and each is counted apart."""

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drivers import DraftUnavailable, SyncDriver
from engine.propose.base import DraftSource
from engine.propose.beside import TextBeside
from engine.propose.from_text import TextDraft, TextSource
from engine.propose.ngram import LONGEST_COUNTED, NgramSource
from engine.propose.suffix import SuffixSource
from engine.scheduler import DepthPolicy, FixedDepth, Scheduler
from engine.testing import NextToken, ScriptedDraft, ScriptedTarget, model_info
from engine.types import (
    MODEL_SOURCE,
    GenerateRequest,
    PrepareReply,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    SamplingParams,
    SourceStep,
    TextChoice,
    TextOffer,
)

VOCAB = 51


def loop(ids: Sequence[int]) -> int:
    """A text in which looking things up is always right, once its loop was seen."""
    return len(ids) % 5 + 1


def wrong(ids: Sequence[int]) -> int:
    return loop(ids) + 10


def sometimes(ids: Sequence[int]) -> int:
    """Mostly a loop, with tokens in it that nobody foresees."""
    return 20 + len(ids) * len(ids) % 23 if len(ids) % 7 == 0 else loop(ids)


class AnyChoice(FixedDepth):
    """First, only where the model has nothing, extended by the model, or not at all, as `random.Random` decides."""

    def __init__(self, depth: int, fan_out: int = 0, asks: bool = True, seed: int = 0):
        super().__init__(depth, fan_out, asks)
        self._random = random.Random(seed)

    def choose(self, request_id: str) -> int:
        return self._random.randint(0, self._depth)

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        return [self._choice(offer) for offer in offers]

    def continuations(
        self,
        offers: Sequence[tuple[TextOffer, int]],
        num_prompt_tokens: int,
        num_drafted: int,
        batch_size: int,
        now_s: float,
    ) -> list[int]:
        return [self._random.randint(0, offer.length) for offer, _ in offers]

    def _choice(self, offer: TextOffer) -> TextChoice:
        extended = self._random.randint(1, offer.extendable) if offer.extendable and self._random.random() < 0.5 else 0
        return TextChoice(self._random.randint(0, offer.length), extended > 0 or self._random.random() < 0.5, extended)


class Hybrids(FixedDepth):
    """The text's first tokens, at most two, and then the model's; hears how that went."""

    def __init__(self, depth: int, fan_out: int = 0):
        super().__init__(depth, fan_out)
        self.heard: list[tuple[int, int, bool]] = []

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        return [TextChoice(offer.length, offer.length > 0, min(offer.extendable, 2)) for offer in offers]

    def observe(self, request_id: str, drafted: int, accepted: int, *, reached: bool = True) -> None:
        self.heard.append((drafted, accepted, reached))


class Continued(FixedDepth):
    """The model's draft, and after it all that the text offers there."""

    def __init__(self, depth: int, fan_out: int = 0):
        super().__init__(depth, fan_out)
        self.offers: list[tuple[TextOffer, int]] = []
        self.told: list[tuple[int, int]] = []
        self.sizes: list[tuple[int, int]] = []

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        return [TextChoice(0, is_first=False)] * len(offers)

    def continuations(
        self,
        offers: Sequence[tuple[TextOffer, int]],
        num_prompt_tokens: int,
        num_drafted: int,
        batch_size: int,
        now_s: float,
    ) -> list[int]:
        self.offers += offers
        self.sizes.append((num_prompt_tokens, num_drafted))
        return [offer.length for offer, _ in offers]

    def observe_text(self, request_id: str, offer: TextDraft, kept: int, tested: int) -> None:
        self.told.append((kept, tested))


class LastChoice(FixedDepth):
    """The text only where the model has drafted nothing; keeps what it was told."""

    def __init__(self, depth: int, fan_out: int = 0):
        super().__init__(depth, fan_out)
        self.told: list[tuple[TextDraft, int, int]] = []
        self.offers: list[TextOffer] = []

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        self.offers += offers
        return [TextChoice(offer.length, is_first=False) for offer in offers]

    def observe_text(self, request_id: str, offer: TextDraft, kept: int, tested: int) -> None:
        self.told.append((offer, kept, tested))


class Gone:
    """A draft that never answers."""

    name = "gone"

    def propose(self, request: ProposeRequest) -> ProposeReply:
        raise DraftUnavailable("gone")

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        raise DraftUnavailable("gone")


def driver(
    source: DraftSource | None,
    policy: DepthPolicy,
    rule: NextToken = loop,
    text: TextSource | None = None,
    **limits: int,
) -> SyncDriver:
    info = model_info(vocab_size=VOCAB, **{key: limits.pop(key) for key in ("kv_capacity_tokens",) if key in limits})
    options = {"max_batch": 8, "prefill_tokens": 16, "max_waiting": 100, **limits}
    beside = TextBeside(text or NgramSource(), 8)
    return SyncDriver(ScriptedTarget(rule, info), source, Scheduler(info, policy, text=beside, **options))


def request(name: str, prompt: Sequence[int], max_tokens: int = 24) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=tuple(prompt), params=params)


def play(lane: SyncDriver, requests: Sequence[GenerateRequest]) -> tuple[dict[str, list[int]], dict[str, SourceStep]]:
    """Outputs by request, and what each source came to."""
    outputs: dict[str, list[int]] = {one.request_id: [] for one in requests}
    sources: dict[str, SourceStep] = {}
    for one in requests:
        lane.add(one)
    while lane.scheduler.running or lane.scheduler.waiting:
        result = lane.step()
        report = result.report
        for name, step in report.sources.items():
            sources[name] = sources.get(name, SourceStep()) + step
        assert len(report.text_depths) == len(report.depths)
        assert sum(step.num_drafted for step in report.sources.values()) == report.num_drafted
        assert sum(step.num_accepted for step in report.sources.values()) == report.num_accepted
        assert all(0 <= text <= depth for text, depth in zip(report.text_depths, report.depths, strict=True))
        assert sum(report.text_depths) == sum(step.num_drafted for name, step in report.sources.items() if name != MODEL_SOURCE)
        for delta in result.deltas:
            outputs[delta.request_id] += delta.token_ids
    return outputs, sources


def expected(prompt: Sequence[int], max_tokens: int, rule: NextToken) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(rule(ids))
    return ids[len(prompt) :]


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["ngram", "suffix"]),
    st.sampled_from([loop, wrong, sometimes]),
)
@settings(max_examples=40, deadline=None)
def test_mixed_sources_do_not_change_the_text(
    prompts: list[tuple[list[int], int]], depth: int, fan_out: int, asks: bool, name: str, drafted: NextToken
) -> None:
    """Bug guarded: a text's draft shifts what the model is believed to hold, or what was prepared; books do not balance."""
    requests = [request(str(i), prompt, max_tokens) for i, (prompt, max_tokens) in enumerate(prompts)]
    source = ScriptedDraft(drafted, vocab_size=VOCAB)
    text = NgramSource() if name == "ngram" else SuffixSource(shared_tokens=64)
    lane = driver(source, AnyChoice(depth, fan_out, asks), sometimes, text)
    outputs, _ = play(lane, requests)
    assert outputs == {str(i): expected(prompt, count, sometimes) for i, (prompt, count) in enumerate(prompts)}


class Exacting(ScriptedDraft):
    """A draft that holds a KV cache of what it read, and finds out whether that is the text it is asked about."""

    def __init__(self, drafted: NextToken, said: NextToken):
        super().__init__(drafted, vocab_size=VOCAB)
        self._said = said
        self.num_rolled_back = 0

    def _proposal(self, item: ProposeItem) -> Proposal:
        held = self.sequences.get(item.sequence_id, [])
        self.num_rolled_back += len(held) > item.base_length
        proposal = super()._proposal(item)
        committed = self.sequences[item.sequence_id][: item.base_length + len(item.tokens)]
        assert proposal.known_length == len(committed), "tokens of the text are no committed ones"
        assert all(self._said(committed[:end]) == committed[end] for end in range(PROMPT_LENGTH, len(committed)))
        return proposal


PROMPT_LENGTH = 15


@pytest.mark.parametrize(("drafted", "rule"), [(loop, sometimes), (wrong, loop), (sometimes, sometimes)])
def test_a_draft_that_followed_the_text_is_rolled_back(drafted: NextToken, rule: NextToken) -> None:
    """Bug guarded: the draft's cache keeps tokens of the text that the target refused, or the round believes it does."""
    source = Exacting(drafted, rule)
    outputs, sources = play(driver(source, Hybrids(3), rule), [request("r", [1, 2, 3, 4, 5] * 3, 60)])
    assert outputs["r"] == expected([1, 2, 3, 4, 5] * 3, 60, rule)
    assert min(step.num_drafted for step in sources.values()) > 0
    assert source.num_rolled_back > 0
    ahead = [item.ahead for one in source.requests for item in one.items]
    assert {len(tokens) for tokens in ahead} >= {2}


def test_each_source_counts_its_part_of_a_hybrid() -> None:
    """Bug guarded: tokens of a hybrid are counted twice or for the wrong source, or the model learns from tokens of its own
    that the target never came to."""
    prompt = [1, 2, 3, 4, 5] * 3
    policy = Hybrids(3)
    lane = driver(ScriptedDraft(loop, vocab_size=VOCAB), policy)
    lane.add(request("r", prompt))
    lane.step()
    report = lane.step().report
    assert (report.depths, report.text_depths, report.model_depths, report.num_extended) == ((5,), (2,), (3,), 2)
    assert report.sources[MODEL_SOURCE].num_accepted == 3
    assert (report.sources["ngram"].num_requests, report.sources["ngram"].num_accepted) == (1, 2)
    assert policy.heard == [(3, 3, True)]

    policy = Hybrids(3)
    lane = driver(ScriptedDraft(loop, vocab_size=VOCAB), policy, lambda ids: (wrong if len(ids) == 17 else loop)(ids))
    lane.add(request("r", prompt))
    lane.step()
    report = lane.step().report
    made = [(step.num_requests, step.num_drafted, step.num_accepted) for step in report.sources.values()]
    assert made == [(1, 3, 0), (1, 2, 1)]
    assert policy.heard == [(3, 0, False)]


def test_a_hybrid_whose_model_gives_nothing_is_the_texts_draft() -> None:
    """Bug guarded: a request that waited for the model is left without the text's draft as well."""
    _, sources = play(driver(Gone(), Hybrids(4)), [request("r", [1, 2, 3, 4, 5] * 3)])
    assert (sources[MODEL_SOURCE].num_drafted, sources["ngram"].num_accepted) == (0, 20)


def test_nothing_goes_on_after_the_end_of_an_answer() -> None:
    """Bug guarded: the model drafts after a token that ends the answer; depth 0 makes it work, or a source that cannot go on is
    asked to."""

    class Deaf(ScriptedDraft):
        extends = False

    ending = [7, 8, 9, 99, 1, 2, 7, 8]
    params = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(9,))
    for source, policy in (
        (ScriptedDraft(loop, vocab_size=VOCAB), Hybrids(4)),
        (ScriptedDraft(loop, vocab_size=VOCAB), Hybrids(0)),
        (Deaf(loop, vocab_size=VOCAB), Hybrids(4)),
    ):
        lane = driver(source, policy, lambda ids: {8: 7, 7: 8}.get(ids[-1], 9) if len(ids) > 9 else 8)
        lane.add(GenerateRequest(request_id="r", prompt_ids=tuple(ending[:-1]), params=params))
        while lane.scheduler.running or lane.scheduler.waiting:
            lane.step()
        assert all(9 not in item.ahead for one in source.requests for item in one.items)
        if isinstance(source, Deaf) or policy._depth == 0:
            assert all(item.ahead == () for one in source.requests for item in one.items)
        if policy._depth == 0:
            assert not source.requests


# --- the text goes on after the model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fan_out", [0, 2])
def test_the_text_goes_on_after_the_model(fan_out: int) -> None:
    """Bug guarded: the text goes on after committed tokens in spite of the model's, its tokens count as the model's, or the
    draft is believed to hold them."""
    policy = Continued(3, fan_out)
    source = Exacting(loop, loop)
    outputs, sources = play(driver(source, policy), [request("r", [1, 2, 3, 4, 5] * 3, 60)])
    assert outputs["r"] == expected([1, 2, 3, 4, 5] * 3, 60, loop)
    assert {length for _, length in policy.offers} >= {3}
    assert max(offer.length for offer, _ in policy.offers) == 5, "together as deep as a text may draft"
    assert all(step.num_accepted == step.num_drafted > 0 for step in sources.values())
    assert sources["ngram"].num_drafted > sources[MODEL_SOURCE].num_drafted


@pytest.mark.parametrize(("wrong_from", "made"), [(17, [(1, 3, 1), (1, 5, 0)]), (21, [(1, 3, 3), (1, 5, 2)])])
def test_the_text_after_the_model_is_counted_for_the_text(wrong_from: int, made: list[tuple[int, int, int]]) -> None:
    """Bug guarded: what was kept of a draft of both is counted for the source that came first; an offer that was never tested
    teaches something."""
    policy = Continued(3)
    lane = driver(ScriptedDraft(loop, vocab_size=VOCAB), policy, lambda ids: (wrong if len(ids) == wrong_from else loop)(ids))
    lane.add(request("r", [1, 2, 3, 4, 5] * 3))
    lane.step()
    report = lane.step().report
    assert [(step.num_requests, step.num_drafted, step.num_accepted) for step in report.sources.values()] == made
    assert (report.depths, report.model_depths, report.num_extended) == ((8,), (3,), 0)
    assert policy.sizes == [(0, 3)]
    assert policy.told[1:] == ([(2, 3)] if wrong_from == 21 else [])


def test_what_goes_on_after_the_model_fits_the_cache() -> None:
    """Bug guarded: blocks are counted for what was planned, and the text that goes on after it overruns the target's cache."""
    lane = driver(ScriptedDraft(loop, vocab_size=VOCAB), Continued(3), kv_capacity_tokens=96)
    outputs, sources = play(lane, [request(str(i), [1, 2, 3, 4, 5] * 3, 16) for i in range(4)])
    assert all(output == expected([1, 2, 3, 4, 5] * 3, 16, loop) for output in outputs.values())
    assert sources["ngram"].num_drafted > 0


def test_no_text_goes_on_after_nothing_or_an_end() -> None:
    """Bug guarded: the text is looked up after an answer's end, or at depth 0, where nothing was drafted."""
    policy = Continued(0)
    play(driver(ScriptedDraft(loop, vocab_size=VOCAB), policy), [request("r", [1, 2, 3, 4, 5] * 3)])
    assert not policy.offers
    policy = Continued(5)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(3,))
    lane = driver(ScriptedDraft(loop, vocab_size=VOCAB), policy)
    lane.add(GenerateRequest(request_id="r", prompt_ids=(1, 2, 3, 4, 5) * 3, params=params))
    while lane.scheduler.running or lane.scheduler.waiting:
        lane.step()
    assert not policy.offers


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_looking_beyond_a_draft_teaches_the_text_nothing(name: str) -> None:
    """Bug guarded: drafted tokens that the target refused stay in the index of a sequence, and are drafted for ever."""
    ids = [1, 2, 3, 4, 5, 6] * 3
    sources: list[TextSource] = [NgramSource() if name == "ngram" else SuffixSource() for _ in range(2)]
    for source in sources:
        _look_up(source, ids)
    assert sources[0].look_after("s", (1, 2), 3).tokens == (3, 4, 5)
    assert sources[0].look_after("s", (40, 41), 3) == TextDraft()
    assert sources[0].look_after("s", (40, 41, 40), 3) == TextDraft()
    assert sources[0].look_after("nobody", (1, 2), 3) == TextDraft()
    more = ProposeItem(sequence_id="s", base_length=len(ids), tokens=(40,), depth=4)
    assert sources[0].look_up(more) == sources[1].look_up(more)


def test_what_goes_first_costs_the_model_nothing() -> None:
    """Bug guarded: the model is asked although its draft is not wanted, or the text's tokens count as the model's."""
    source = ScriptedDraft(wrong, vocab_size=VOCAB)
    outputs, sources = play(driver(source, FixedDepth(4)), [request("r", [1, 2, 3, 4, 5] * 3)])
    assert outputs["r"] == expected([1, 2, 3, 4, 5] * 3, 24, loop)
    assert not source.requests
    assert sources[MODEL_SOURCE] == SourceStep()
    assert sources["ngram"].num_accepted == sources["ngram"].num_drafted == 18, "one token a round is the target's own"
    assert sources["ngram"].time_s > 0


def test_the_text_is_used_where_the_model_has_nothing() -> None:
    """Bug guarded: a lost draft costs the text's drafts too, or they replace what the model has drafted."""
    prompt = [1, 2, 3, 4, 5] * 3
    _, sources = play(driver(Gone(), LastChoice(4)), [request("r", prompt)])
    assert (sources[MODEL_SOURCE].num_drafted, sources["ngram"].num_accepted) == (0, 20)
    _, sources = play(driver(None, LastChoice(4)), [request("r", prompt)])
    assert sources["ngram"].num_accepted > 0
    _, sources = play(driver(ScriptedDraft(loop, vocab_size=VOCAB), LastChoice(4)), [request("r", prompt)])
    assert (sources[MODEL_SOURCE].num_accepted, sources["ngram"].num_drafted) == (18, 0)


def test_the_model_prepares_after_the_texts_drafts() -> None:
    """Bug guarded: what is prepared beside a text's draft is for another draft, or is not taken when the model drafts next."""

    class InTurns(LastChoice):
        def text_choices(
            self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool
        ) -> list[TextChoice]:
            self.offers += offers
            return [TextChoice(offer.length, is_first=len(self.offers) % 2 == 1) for offer in offers]

    source = ScriptedDraft(loop, vocab_size=VOCAB)
    lane = driver(source, InTurns(4, fan_out=1))
    hits = 0
    lane.add(request("r", [1, 2, 3, 4, 5] * 3, 60))
    while lane.scheduler.running or lane.scheduler.waiting:
        hits += sum(lane.step().report.hits.values())
    drafts = [item.draft for one in source.prepare_requests for item in one.items if len(item.draft) == 8]
    assert drafts, "the text's draft of eight tokens is what outcomes are prepared for"
    assert hits >= len(drafts) - 1 > 0


def test_every_offer_is_compared_with_what_was_committed() -> None:
    """Bug guarded: an offer that was not used teaches nothing, or one that was cut off counts as wrong beyond its end."""
    policy = LastChoice(2)
    play(driver(ScriptedDraft(loop, vocab_size=VOCAB), policy, sometimes), [request("r", [1, 2, 3, 4, 5] * 3, 40)])
    assert policy.told
    assert {(kept, tested) for offer, kept, tested in policy.told if kept == tested} <= {(1, 1), (2, 2), (3, 3)}
    assert any(kept < tested for _, kept, tested in policy.told)
    assert all(kept <= tested <= len(offer.tokens) for offer, kept, tested in policy.told)


def test_the_policy_hears_how_far_behind_the_model_is() -> None:
    """Bug guarded: catching up after a streak of the text's drafts is free in the policy's books; a prompt that was never read
    counts as behind."""
    policy = LastChoice(0)
    policy._depth = 3
    lane = driver(ScriptedDraft(loop, vocab_size=VOCAB), policy)
    lane.add(request("r", [1, 2, 3, 4, 5] * 3))
    lane.step()
    lane.step()
    assert [offer.num_unread for offer in policy.offers] == [0]
    policy._depth = 0
    for _ in range(3):
        lane.step()
    unread = [offer.num_unread for offer in policy.offers]
    assert unread[1] <= 2 < unread[-1]


def test_drafts_of_the_text_fit_the_cache() -> None:
    """Bug guarded: blocks are counted for the model's drafts only, so that the target's cache is overrun."""
    lane = driver(None, FixedDepth(8), kv_capacity_tokens=64)
    outputs, sources = play(lane, [request(str(i), [1, 2, 3, 4, 5] * 3, 16) for i in range(3)])
    assert all(output == expected([1, 2, 3, 4, 5] * 3, 16, loop) for output in outputs.values())
    assert sources["ngram"].num_drafted > 0


def test_ended_requests_are_forgotten_and_names_may_come_again() -> None:
    """Bug guarded: memory grows with every request; a new text under an old name is drafted from the old one."""
    source = NgramSource()
    lane = driver(None, FixedDepth(4), text=source)
    play(lane, [request("r", [1, 2, 3, 4, 5] * 3)])
    assert not source._sequences
    outputs, _ = play(lane, [request("r", [9, 8, 7])])
    assert outputs["r"] == expected([9, 8, 7], 24, loop)


def test_prompts_are_read_chunk_by_chunk() -> None:
    """Bug guarded: the first round that decodes reads a whole prompt while everybody waits."""
    read: list[int] = []

    class Counting(NgramSource):
        def look_up(self, item: ProposeItem) -> TextDraft | None:
            read.append(len(item.tokens))
            return super().look_up(item)

    play(driver(None, FixedDepth(4), text=Counting()), [request("r", [1, 2, 3, 4, 5] * 20)])
    assert max(read) == 16
    assert sum(read) >= 100


# --- what speaks for a draft ------------------------------------------------------------------------------------------------


def _look_up(source: TextSource, ids: Sequence[int], depth: int = 4) -> TextDraft | None:
    return source.look_up(ProposeItem(sequence_id="s", base_length=0, tokens=tuple(ids), depth=depth))


@pytest.mark.parametrize("matched", [1, 3, 4, 9, 40])
def test_ngrams_tell_how_much_matched(matched: int) -> None:
    """Bug guarded: everything longer than the longest n-gram looks alike, so that copying cannot be told from chance."""
    copied = list(range(100, 100 + matched))
    found = _look_up(NgramSource(), [1, *copied, 7, 8, 9, 2, *copied])
    assert found == TextDraft((7, 8, 9, 2), min(matched, LONGEST_COUNTED))


def test_suffixes_tell_how_sure_the_counts_are() -> None:
    """Bug guarded: the share of a draft that was cut includes the token at which it was cut."""
    found = _look_up(SuffixSource(), [5, 1, 2, 7, 5, 1, 2, 8, 5, 1])
    assert found is not None
    assert (found.tokens, found.match) == ((2, 8), 2)
    assert found.share == pytest.approx(0.5**0.5)
    assert _look_up(SuffixSource(), [1, 2, 3]) == TextDraft()


def test_a_text_that_is_not_known_is_read_again() -> None:
    """Bug guarded: a source that has forgotten a sequence leaves it without drafts for good."""
    source = NgramSource()
    lane = driver(None, FixedDepth(4), text=source)
    lane.add(request("r", [1, 2, 3, 4, 5] * 3, 60))
    for _ in range(3):
        lane.step()
    source.release(("r",))
    drafted = [lane.step().report.num_drafted for _ in range(3)]
    assert drafted[0] == 0 < drafted[1]


def test_texts_are_trimmed_only_beside_prompts() -> None:
    """Bug guarded: a round without prompts is trimmed, or a hybrid keeps tokens of the text that were trimmed away."""
    told: list[tuple[dict[str, int], int]] = []

    class Trimming(Hybrids):
        def trim_texts(
            self, depths: Mapping[str, int], num_prompt_tokens: int, batch_size: int, now_s: float
        ) -> Mapping[str, int]:
            told.append((dict(depths), num_prompt_tokens))
            return dict.fromkeys(depths, 1)

    lane = driver(ScriptedDraft(loop, vocab_size=VOCAB), Trimming(4))
    lane.add(request("first", [1, 2, 3, 4, 5] * 3))
    lane.step()
    assert told == []
    (alone,) = lane.scheduler.plan(0.0, drafts=True, extends=True).items
    assert (alone.extended, alone.text_depth, told) == (2, 8, [])
    lane.add(request("second", range(1, 11)))
    beside, _ = lane.scheduler.plan(0.0, drafts=True, extends=True).items
    assert told == [({"first": 8}, 10)]
    assert (beside.extended, beside.depth, beside.text_depth) == (0, 0, 1)
