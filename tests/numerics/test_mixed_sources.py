"""A text source beside a model leaves the target's distribution, under every rule, as long as nothing drawn decides for one.

The same test, at the same level, as in test_distribution_table.py, whose cases these are counted with (`NUM_CASES`).
"""

import random
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace
from table_lane import BAD_DRAFT, DEPTH, GOOD_DRAFT, LEVEL, NUM_TEXTS, VOCAB, sample

from autoscale.lane_policy import LanePolicy
from engine import drafting
from engine.propose.ngram import NgramSource
from engine.scheduler import FixedDepth
from engine.testing import TableModel
from engine.types import MODEL_SOURCE, Proposal, ProposeItem, ProposeReply, ProposeRequest, TextChoice, TextOffer

RULES = ["coupled", "rejection", "block"]
Q = torch.softmax(BAD_DRAFT.double(), dim=1).tolist()
FLAT = ((1, 0.02), (100_000, 0.02))
CHEAP = ((1, 0.001), (100_000, 0.001))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


class AnyChoice(FixedDepth):
    """The text's draft first, in the model's absence, or not at all, some requests drafted in advance, as chance has it."""

    def __init__(self, fan_out: int = 0):
        super().__init__(DEPTH, fan_out, asks=False)
        self._random = random.Random(5)

    def asked_depth(self, missed: Sequence[tuple[str, int]], batch_size: int, now_s: float) -> int:
        return self._random.randint(0, DEPTH)

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        return [TextChoice(self._random.randint(0, min(offer.length, DEPTH)), self._random.random() < 0.4) for offer in offers]


class AnyHybrid(AnyChoice):
    """One or two tokens of the text and then the model's, or either alone."""

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        alone = super().text_choices(offers, batch_size, now_s, has_model=has_model)
        heads = (min(offer.extendable, self._random.randint(0, 2)) for offer in offers)
        return [
            choice._replace(is_first=choice.is_first or head > 0, extended=head)
            for choice, head in zip(alone, heads, strict=True)
        ]

    def asked_depth(self, missed: Sequence[tuple[str, int]], batch_size: int, now_s: float) -> int:
        return DEPTH


class Continued(FixedDepth):
    """The model's draft, and after it the text's, where an odd number of tokens matched: as what was drawn has it."""

    def __init__(self, depth: int, fan_out: int = 0) -> None:
        super().__init__(depth, fan_out)
        self.num_continued = 0

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
        depths = [min(offer.length, offer.match % 2) for offer, _ in offers]
        self.num_continued += sum(depth > 0 for depth in depths)
        return depths


class LastChoice(FixedDepth):
    """The text's draft where the model has none."""

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        return [TextChoice(min(offer.length, DEPTH), is_first=False) for offer in offers]


class Choosy(TableModel):
    """A model that keeps its draft to itself where it finds the first token that it drew unlikely."""

    def propose(self, request: ProposeRequest) -> ProposeReply:
        reply = super().propose(request)
        drawn = zip(request.items, reply.proposals, strict=True)
        return replace(
            reply,
            proposals=tuple(
                proposal
                if Q[item.tokens[-1]][proposal.tokens[0]] >= 0.3
                else Proposal(sequence_id=item.sequence_id, known_length=proposal.known_length, reason="no_match")
                for item, proposal in drawn
            ),
        )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fan_out", [0, 2])
def test_mixed_sources_leave_the_targets_distribution(rule: str, fan_out: int) -> None:
    """Bug guarded: noise of a draft that was not used decides the one that was, or what was prepared is used again."""
    sampled = sample(rule, {"plain": {}}, TableModel(GOOD_DRAFT), policy=AnyChoice(fan_out), text=NgramSource())["plain"]
    assert sampled.p > LEVEL
    assert min(sampled.by_source.values()) > NUM_TEXTS / 5


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_services_own_choice_leaves_the_targets_distribution(rule: str) -> None:
    """Bug guarded: the policy that serves looks at something that was drawn."""
    policy = LanePolicy(DEPTH, FLAT, CHEAP, prior_alpha=0.4)
    sampled = sample(rule, {"plain": {}}, TableModel(BAD_DRAFT), policy=policy, text=NgramSource())["plain"]
    assert sampled.p > LEVEL
    assert sampled.num_drafted > NUM_TEXTS


@pytest.mark.parametrize("rule", RULES)
def test_a_choice_by_what_was_drawn_is_found(rule: str) -> None:
    """Bug guarded: the tests above pass whatever decides between the sources. Under ``coupled`` it may be anything."""
    sampled = sample(rule, {"plain": {}}, Choosy(BAD_DRAFT), policy=LastChoice(DEPTH), text=NgramSource())
    assert min(sampled["plain"].by_source[name] for name in (MODEL_SOURCE, "ngram")) > NUM_TEXTS / 5
    assert (sampled["plain"].p > LEVEL) == (rule == "coupled")


# --- the text's tokens, and then the model's --------------------------------------------------------------------------------

HYBRID_LENGTH = 5
"""One token comes with the prefill, the round after it has room for three drafted ones."""


@pytest.mark.parametrize("rule", RULES)
def test_hybrid_drafts_leave_the_targets_distribution(rule: str) -> None:
    """Bug guarded: tokens of the text are tested as if the model had drawn them, or what the model draws after them has the
    noise of a later round."""
    source = TableModel(GOOD_DRAFT)
    sampled = sample(rule, {"plain": {}}, source, policy=AnyHybrid(), text=NgramSource(), length=HYBRID_LENGTH)["plain"]
    assert sampled.p > LEVEL
    assert min(sampled.by_source.values()) > NUM_TEXTS / 2
    assert sampled.num_accepted > NUM_TEXTS


@pytest.mark.parametrize(("rule", "fan_out"), [("coupled", 0), ("rejection", 0), ("block", 0), ("block", 2)])
def test_drafts_that_the_text_goes_on_with_leave_the_targets_distribution(rule: str, fan_out: int) -> None:
    """Bug guarded: a draft whose length follows from its own tokens is tested as if it had been drawn with that length, or the
    text's last tokens as if the model had drawn them."""
    policy = Continued(1, fan_out)
    sampled = sample(rule, {"plain": {}}, TableModel(BAD_DRAFT), policy=policy, text=NgramSource())["plain"]
    assert sampled.p > LEVEL
    assert policy.num_continued > NUM_TEXTS / 4


class Replacing(TableModel):
    """A model that draws any token and drops its last one where it is one of the first two: the text goes on in its place."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(VOCAB, VOCAB))

    def propose(self, request: ProposeRequest) -> ProposeReply:
        reply = super().propose(request)
        return replace(reply, proposals=tuple(map(self._shortened, reply.proposals)))

    @staticmethod
    def _shortened(proposal: Proposal) -> Proposal:
        if len(proposal.tokens) < 2 or proposal.tokens[-1] >= 2:
            return proposal
        return replace(proposal, tokens=proposal.tokens[:-1], probs=proposal.probs and proposal.probs[:-1])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_text_that_takes_the_place_of_what_was_drawn_is_found(rule: str) -> None:
    """Bug guarded: the test above would pass too if a drawn token were dropped for the text's."""
    policy = Continued(DEPTH)
    sampled = sample(rule, {"plain": {}}, Replacing(), policy=policy, text=NgramSource())["plain"]
    assert sampled.p < LEVEL
    assert policy.num_continued > NUM_TEXTS / 10


def _with_the_models_q(ahead: tuple[int, ...], proposal: Proposal) -> Proposal:
    probs = proposal.probs and (*(proposal.probs[0] for _ in ahead), *proposal.probs)
    return replace(proposal, tokens=(*ahead, *proposal.tokens), probs=probs)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_hybrid_with_the_wrong_q_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: the test above passes whatever q the text's tokens are said to have."""
    monkeypatch.setattr(drafting, "_after", _with_the_models_q)
    source = TableModel(GOOD_DRAFT)
    sampled = sample(rule, {"plain": {}}, source, policy=AnyHybrid(), text=NgramSource(), length=HYBRID_LENGTH)["plain"]
    assert sampled.p < LEVEL


class TokenByToken(TableModel):
    """Takes the text's token in place of one that the model drew and finds unlikely: of both, the one that promises more."""

    def __init__(self) -> None:
        super().__init__(BAD_DRAFT)
        self._text = NgramSource()

    def propose(self, request: ProposeRequest) -> ProposeReply:
        reply, text = super().propose(request), self._text.propose(request)
        drawn = zip(request.items, reply.proposals, text.proposals, strict=True)
        return replace(reply, proposals=tuple(self._better(*one) for one in drawn))

    @staticmethod
    def _better(item: ProposeItem, model: Proposal, text: Proposal) -> Proposal:
        if not text.tokens or Q[item.tokens[-1]][model.tokens[0]] >= 0.3:
            return model
        certain = tuple(((token,), (1.0,)) for token in text.tokens) if model.probs else None
        return replace(model, tokens=text.tokens, probs=certain)


@pytest.mark.parametrize("rule", RULES)
def test_mixing_token_by_token_is_found(rule: str) -> None:
    """Bug guarded: a token that was drawn gives way to the text's for what it is, which only ``coupled`` and ``greedy`` allow;
    or the test above could not tell."""
    sampled = sample(rule, {"plain": {}}, TokenByToken())["plain"]
    assert (sampled.p > LEVEL) == (rule == "coupled")
    assert sampled.num_accepted > 0
