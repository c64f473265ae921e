"""The speculation cache alone: what a source may answer, and which of it is used."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.propose.checks import REASONS, known_reason
from engine.propose.outcomes import MAX_ENDED, OutcomeCache, Stored
from engine.types import Outcome, Prepared, PrepareItem, PrepareReply

VOCAB = 50
COMMITTED = [3, 1, 4]
DRAFT = (10, 11)
ITEM = PrepareItem(sequence_id="r", base_length=1, tokens=(1, 4), draft=DRAFT, depth=3, fan_out=(2, 1, 2))


def outcome(accepted: int, token: int, tokens: tuple[int, ...] = (7, 8, 9), **fields: Any) -> Outcome:
    return Outcome(accepted=accepted, token=token, tokens=tokens, **fields)


RIGHT = (outcome(0, 20), outcome(0, 21), outcome(1, 22), outcome(2, 23), outcome(2, 24))


def reply(*outcomes: Outcome, round_id: int = 5, **fields: Any) -> PrepareReply:
    prepared = Prepared(**{"sequence_id": "r", "outcomes": outcomes, "known_length": 3, **fields})
    return PrepareReply(round_id=round_id, prepared=(prepared,))


def expecting(item: PrepareItem = ITEM, round_id: int = 5) -> OutcomeCache:
    cache = OutcomeCache(VOCAB)
    cache.expect(round_id, item)
    return cache


@pytest.mark.parametrize(
    ("new", "kind", "hit"),
    [
        ((20,), "recovery", True),
        ((21,), "recovery", True),
        ((22,), "recovery", False),
        ((10, 22), "recovery", True),
        ((10, 20), "recovery", False),
        ((10, 11, 24), "bonus", True),
        ((10, 11, 25), "bonus", False),
    ],
    ids=str,
)
def test_the_committed_tokens_choose_the_outcome(new: tuple[int, ...], kind: str, hit: bool) -> None:
    """Bug guarded: the draft of another outcome is used, or hits and misses are counted under the wrong kind."""
    cache = expecting()
    assert cache.awaits("r", [*COMMITTED, *new])
    cache.store(reply(*RIGHT))
    taken = cache.take("r", [*COMMITTED, *new])
    assert (taken.kind, taken.outcome is not None) == (kind, hit)
    if taken.outcome is not None:
        assert (taken.outcome.accepted, taken.outcome.token) == (len(new) - 1, new[-1])


def test_without_a_draft_the_outcome_is_plain() -> None:
    """Bug guarded: the token after a plain step, or the first one of a text, is counted as a bonus."""
    cache = expecting(PrepareItem(sequence_id="r", base_length=0, tokens=(3, 1, 4), depth=3, fan_out=(2,)))
    cache.store(reply(outcome(0, 20)))
    assert cache.take("r", [*COMMITTED, 20]).kind == "plain"


@pytest.mark.parametrize(
    "ids", [COMMITTED, COMMITTED[:2], [*COMMITTED, 11, 22], [*COMMITTED, 10, 11, 24, 5], [*COMMITTED, 10, 12, 24]], ids=str
)
def test_tokens_that_are_no_outcome_find_nothing(ids: list[int]) -> None:
    """Bug guarded: a round was given up, or played without asking the cache; its draft is then used for another text, or
    counted as a miss."""
    cache = expecting()
    assert not cache.awaits("r", ids)
    cache.store(reply(*RIGHT))
    assert (cache.take("r", ids).kind, cache.take("r", ids).outcome) == (None, None)


def test_a_draft_is_handed_out_once() -> None:
    """Bug guarded: a round that was given up gets the same draft again after the source's noise has moved on."""
    cache = expecting()
    cache.store(reply(*RIGHT))
    assert cache.take("r", [*COMMITTED, 20]).outcome is not None
    assert cache.take("r", [*COMMITTED, 20]).kind is None


Q = (((7, 30), (0.5, 0.5)),)


@pytest.mark.parametrize(
    "outcomes",
    [
        (outcome(0, 20), outcome(0, 20, (1, 2, 3))),
        (outcome(0, 20), outcome(0, 21), outcome(0, 22)),
        (outcome(0, 20, ()),),
        (outcome(0, 20, (7, 8, 9, 7)),),
        (outcome(0, 20, (7, VOCAB)),),
        (outcome(0, 20, (-1,)),),
        (outcome(0, 20, (1 << 62,)),),
        (outcome(0, 20, (7, 8), probs=Q),),
        (outcome(0, 20, (8,), probs=Q),),
        (outcome(0, 20, (7,), probs=(((7, 30), (0.5, 0.4)),)),),
        (outcome(0, 20, (7,), probs=(((7, VOCAB), (0.5, 0.5)),)),),
    ],
    ids=[
        "an outcome twice",
        "more than asked for",
        "no tokens",
        "too many tokens",
        "id beyond the vocabulary",
        "negative id",
        "huge id",
        "q of another length",
        "q lacks the token",
        "q does not add up",
        "q beyond the vocabulary",
    ],
)
def test_what_cannot_be_used_is_named(outcomes: tuple[Outcome, ...]) -> None:
    """Bug guarded: a broken prepared draft is verified, which fails the whole forward or, with a false q, is a bias."""
    cache = expecting()
    cache.store(reply(*outcomes))
    taken = cache.take("r", [*COMMITTED, 20])
    assert (taken.kind, taken.outcome, taken.reason) == ("unprepared", None, "invalid_draft")


def test_a_good_q_is_handed_on() -> None:
    """Bug guarded: a check that is too strict drops every prepared draft of the ratio rules."""
    cache = expecting()
    cache.store(reply(outcome(0, 20, (7,), probs=Q)))
    taken = cache.take("r", [*COMMITTED, 20])
    assert taken.outcome is not None
    assert taken.outcome.probs == Q


@pytest.mark.parametrize("accepted", [-1, 3, 99, 1 << 40])
def test_outcomes_that_cannot_be_are_not_found(accepted: int) -> None:
    """Bug guarded: an outcome beyond the draft raises, or is taken for the last one."""
    cache = expecting()
    cache.store(reply(outcome(accepted, 20)))
    assert cache.take("r", [*COMMITTED, 20]).outcome is None


@pytest.mark.parametrize(("reason", "named"), [("kv_full", "kv_full"), ("Robert'); DROP TABLE", "other"), ("", "empty")])
def test_a_source_that_prepared_nothing_says_why(reason: str, named: str) -> None:
    """Bug guarded: whatever a source sends becomes the name of a metric."""
    cache = expecting()
    cache.store(reply(reason=reason))
    assert (cache.take("r", [*COMMITTED, 20]).kind, cache.outstanding) == ("unprepared", False)
    assert known_reason(reason) == named
    assert named in {*REASONS, "other"}


# --- answers that are late, twice, or nobody's ------------------------------------------------------------------------------


def _told(stored: Stored) -> tuple[int, int]:
    return len(stored.believed), stored.num_unexpected


def test_an_answer_that_comes_too_late_tells_only_what_the_draft_holds() -> None:
    """Bug guarded: a late answer is used for another round; or what the draft has caught up with is forgotten, so that a long
    prompt is sent again for ever."""
    cache = expecting()
    ids = [*COMMITTED, 20]
    assert (cache.take("r", ids).kind, cache.outstanding) == ("late", True)
    assert not cache.awaits("r", ids)
    cache.expect(6, PrepareItem(sequence_id="r", base_length=1, tokens=(1, 4, 20), depth=3, fan_out=(1,)))
    assert _told(cache.store(reply(outcome(0, 33)))) == (1, 0)
    assert cache.awaits("r", [*ids, 33])
    assert cache.take("r", [*ids, 33]).kind == "late"


def test_an_answer_after_the_question_was_given_up_is_believed() -> None:
    """Bug guarded: as above, where no other question followed because the depth had become 0."""
    cache = expecting()
    cache.take("r", [*COMMITTED, 20])
    assert _told(cache.store(reply(*RIGHT))) == (1, 0)
    assert not cache.outstanding


def test_a_busy_source_does_not_take_back_what_it_has_caught_up() -> None:
    """Bug guarded: a long prompt takes several rounds to catch up with. Meanwhile every further question is answered at once as
    "busy", with the old length; read after the real answer it undoes all progress, and the draft never catches up."""
    cache = expecting(PrepareItem(sequence_id="r", base_length=0, tokens=(3, 1, 4), depth=3), round_id=5)
    cache.expect(6, PrepareItem(sequence_id="r", base_length=2, tokens=(4, 20), depth=3))
    assert _told(cache.store(reply(round_id=5, known_length=3))) == (1, 0)
    assert _told(cache.store(reply(round_id=6, known_length=2, reason="draft_busy"))) == (0, 0)
    cache.expect(7, PrepareItem(sequence_id="r", base_length=3, tokens=(20,), depth=3))
    assert _told(cache.store(reply(round_id=7, known_length=0, reason="need_context"))) == (1, 0)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (reply(*RIGHT), "twice"),
        (reply(*RIGHT, round_id=6), "of a round to come"),
        (reply(*RIGHT, round_id=4), "of a round before the request"),
        (reply(*RIGHT, sequence_id="nobody"), "of a request that is not"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_answers_that_nobody_asked_for_are_counted(answer: PrepareReply, what: str) -> None:
    """Bug guarded: a confused source overwrites a good answer, or is not noticed."""
    cache = expecting()
    assert _told(cache.store(reply(*RIGHT))) == (1, 0)
    assert _told(cache.store(answer)) == (0, 1)
    assert cache.take("r", [*COMMITTED, 20]).outcome == RIGHT[0]


def test_an_answer_for_a_request_that_ended_is_no_fault() -> None:
    """Bug guarded: every request that ends, by itself or cancelled, counts as a fault of the draft; or the cache grows with the
    requests that were ever served."""
    cache = expecting()
    cache.forget("r")
    assert cache.outstanding
    assert _told(cache.store(reply(*RIGHT))) == (0, 0)
    assert _told(cache.store(reply(*RIGHT))) == (0, 1)
    assert not cache.outstanding
    for i in range(MAX_ENDED + 5):
        cache.expect(7, PrepareItem(sequence_id=str(i), base_length=0, tokens=(1,), depth=1, fan_out=(1,)))
        cache.forget(str(i))
    assert (len(cache._ended), len(cache._expected)) == (MAX_ENDED, 0)


@pytest.mark.parametrize("lost", [None, {"r"}, {"other"}], ids=str)
def test_a_source_that_is_gone_answers_no_more(lost: set[str] | None) -> None:
    """Bug guarded: every round waits for an answer of a source that is gone, or drafts that came from it are thrown away."""
    cache = expecting()
    cache.lose_answers(lost)
    assert cache.outstanding == cache.awaits("r", [*COMMITTED, 20]) == (lost == {"other"})
    cache = expecting()
    cache.store(reply(*RIGHT))
    cache.lose_answers(lost)
    assert cache.take("r", [*COMMITTED, 20]).outcome == RIGHT[0]


@given(st.integers(0, 10_000))
@settings(max_examples=200)
def test_no_answer_breaks_the_cache(seed: int) -> None:
    """Bug guarded: some order of questions, answers and ends raises, or hands out a draft that does not follow the text."""
    chance = random.Random(seed)
    cache = OutcomeCache(VOCAB)
    texts: dict[str, list[int]] = {name: [1] for name in "abc"}
    drafts: dict[str, tuple[int, ...]] = {}
    pool = [tuple(chance.randrange(3) for _ in range(chance.randrange(3))) for _ in range(4)]
    for round_id in range(1, 15):
        for name, ids in texts.items():
            taken = cache.take(name, ids)
            if taken.outcome is not None:
                assert taken.outcome.tokens == (len(ids), taken.outcome.token, *ids[-1:])
            if chance.random() < 0.1:
                cache.forget(name)
            drafts[name] = chance.choice(pool)
            fan_out = chance.choice([(), (3,) * (len(drafts[name]) + 1)])
            if chance.random() < 0.8:
                tokens = tuple(ids)
                cache.expect(
                    round_id,
                    PrepareItem(sequence_id=name, base_length=0, tokens=tokens, draft=drafts[name], depth=3, fan_out=fan_out),
                )
            outcomes = tuple(
                outcome(accepted, token, (len(ids) + accepted + 1, token, token))
                for accepted in range(len(drafts[name]) + 1)
                for token in range(3)
            )
            prepared = Prepared(sequence_id=name, outcomes=outcomes, known_length=chance.randrange(-5, 50))
            for _ in range(chance.choice([0, 1, 1, 2])):
                cache.store(PrepareReply(round_id=round_id - chance.choice([0, 0, 0, 1, -1]), prepared=(prepared,)))
        for name, ids in texts.items():
            accepted = chance.randint(0, len(drafts[name]))
            ids += [*drafts[name][:accepted], chance.randrange(3)]
