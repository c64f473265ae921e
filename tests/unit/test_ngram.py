"""Prompt lookup against a search written out by hand, and the protocol of a draft source."""

from hypothesis import given
from hypothesis import strategies as st

from engine.propose.ngram import NgramSource
from engine.types import Proposal, ProposeItem, ProposeRequest, SamplingParams, SequenceContext

CONTEXT = SequenceContext(params=SamplingParams(), prompt_length=1)


def _ask(
    source: NgramSource, tokens: list[int], base: int = 0, depth: int = 4, name: str = "s", release: tuple[str, ...] = ()
) -> Proposal:
    item = ProposeItem(
        sequence_id=name, base_length=base, tokens=tuple(tokens), depth=depth, context=CONTEXT if base == 0 else None
    )
    reply = source.propose(ProposeRequest(round_id=7, items=(item,), release=release))
    assert reply.round_id == 7
    (proposal,) = reply.proposals
    assert proposal.sequence_id == name
    return proposal


def _search(ids: list[int], max_ngram: int, min_ngram: int, depth: int, num_known: int | None = None) -> tuple[int, ...]:
    """What followed the most recent earlier occurrence of the longest suffix that has one; a match up to the end goes round.

    ``num_known``: occurrences among so many first tokens count; None = all.
    """
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range((len(ids) if num_known is None else num_known) - 1, n - 1, -1):
            if len(ids) >= n and ids[start - n : start] == ids[len(ids) - n :]:
                period = len(ids) - start
                return tuple(ids[start + j % period] for j in range(depth))
    return ()


words = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@given(words, st.lists(st.integers(1, 5), max_size=8), st.integers(1, 5), st.integers(1, 2), st.integers(0, 6))
def test_equals_a_plain_search(ids: list[int], cuts: list[int], max_ngram: int, min_ngram: int, depth: int) -> None:
    """Bug guarded: the table of n-grams falls behind, prefers an older or shorter match, or sees the suffix match itself."""
    source = NgramSource(max(max_ngram, min_ngram), min_ngram)
    base = 0
    for size in [*cuts, len(ids)]:
        end = min(base + size, len(ids))
        proposal = _ask(source, ids[base:end], base, depth)
        assert proposal.tokens == _search(ids[:end], max(max_ngram, min_ngram), min_ngram, depth)
        assert proposal.known_length == end
        assert (proposal.reason is None) == bool(proposal.tokens)
        base = end


@given(words, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 2), st.integers(0, 40))
def test_drafts_of_others_are_gone_on_after(ids: list[int], drafted: list[int], most: int, least: int, depth: int) -> None:
    """Bug guarded: what follows a draft is looked up as if it were committed, or a loop leaves the draft's tokens out."""
    source = NgramSource(max(most, least), least)
    _ask(source, ids, depth=0)
    found = source.look_after("s", drafted, depth)
    assert found.tokens == _search([*ids, *drafted], max(most, least), least, depth, num_known=len(ids))
    assert _ask(source, [], len(ids), depth).tokens == _search(ids, max(most, least), least, depth)


@given(words, words, st.data())
def test_rolling_back_forgets_what_came_after(ids: list[int], other: list[int], data: st.DataObject) -> None:
    """Bug guarded: after ``base_length`` shrank the source keeps the old tokens, so that it guesses from a text that is not
    there."""
    base = data.draw(st.integers(0, len(ids)))
    source, fresh = NgramSource(), NgramSource()
    _ask(source, ids)
    proposal, expected = _ask(source, other, base), _ask(fresh, ids[:base] + other)
    assert (proposal.tokens, proposal.known_length) == (expected.tokens, expected.known_length)


def test_a_new_request_under_an_old_name() -> None:
    """Bug guarded: a resumed or repeated id with a shorter prompt inherits the end of the text that had the name before."""
    source = NgramSource()
    _ask(source, [1, 2, 3, 1, 2])
    proposal = _ask(source, [1, 2])
    assert (proposal.tokens, proposal.known_length) == ((), 2)


def test_an_unknown_sequence_asks_for_its_context() -> None:
    """Bug guarded: after a restart the source takes the middle of a text for its beginning."""
    proposal = _ask(NgramSource(), [1, 1], base=3)
    assert (proposal.tokens, proposal.reason, proposal.known_length) == ((), "need_context", 0)


def test_a_gap_asks_for_the_context() -> None:
    """Bug guarded: tokens that were missed in between shift everything that follows."""
    source = NgramSource()
    _ask(source, [1, 2])
    assert _ask(source, [1], base=3).reason == "need_context"
    assert _ask(source, [1], base=2).tokens == (2, 1, 2, 1)


def test_accepted_drafts_are_known() -> None:
    """Bug guarded: the router counts accepted draft tokens as known to their source; one that dropped them needs the whole
    context again after every success, and every second round has no draft."""
    source = NgramSource()
    assert _ask(source, [1, 2, 3, 1, 2], depth=3).tokens == (3, 1, 2)
    proposal = _ask(source, [9, 1], base=7)  # (3, 1) accepted, then 9 instead of 2
    assert (proposal.known_length, proposal.tokens) == (9, (9, 1, 9, 1))
    assert _ask(source, [1], base=14).reason == "need_context"


def test_released_sequences_are_forgotten() -> None:
    """Bug guarded: memory grows with every request that ever ran; or a release in the message that reopens the id comes too
    late."""
    source = NgramSource()
    _ask(source, [1, 2])
    assert _ask(source, [1], base=2, release=("s", "never seen")).reason == "need_context"
    assert _ask(source, [5, 5], release=("s",)).tokens == (5, 5, 5, 5)
    assert _ask(source, [5], base=2).known_length == 3


def test_sequences_do_not_mix() -> None:
    """Bug guarded: one table for all requests leaks the text of one user into the drafts of another."""
    source = NgramSource()
    _ask(source, [1, 2, 3], name="a")
    assert _ask(source, [1], name="b").tokens == ()


def test_depth_zero_only_catches_up() -> None:
    """Bug guarded: a round without speculation leaves the source behind, so that it must be sent everything again."""
    source = NgramSource()
    assert _ask(source, [4, 4], depth=0).tokens == ()
    assert _ask(source, [4], base=2, depth=2).tokens == (4, 4)
