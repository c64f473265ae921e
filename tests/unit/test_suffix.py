"""Suffix decoding against counting by hand, and what it may remember of whom."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.propose import suffix
from engine.propose.suffix import DRAFT_PER_MATCH, LEAST_PROBABILITY, SEGMENTS, RecentText, SuffixSource
from engine.propose.suffix_automaton import MAX_CONTEXT, SEPARATOR, SuffixAutomaton
from engine.types import Proposal, ProposeItem, ProposeRequest, SamplingParams, SequenceContext

Tokens = tuple[int, ...]


def _ask(
    source: SuffixSource,
    tokens: Sequence[int],
    base: int = 0,
    depth: int = 4,
    name: str = "s",
    release: tuple[str, ...] = (),
    prompt_length: int = 1,
    **params: object,
) -> Proposal:
    context = SequenceContext(params=SamplingParams(**params), prompt_length=prompt_length)  # type: ignore[arg-type]
    item = ProposeItem(
        sequence_id=name, base_length=base, tokens=tuple(tokens), depth=depth, context=context if base == 0 else None
    )
    reply = source.propose(ProposeRequest(round_id=7, items=(item,), release=release))
    assert reply.round_id == 7
    (proposal,) = reply.proposals
    assert (proposal.sequence_id, proposal.probs) == (name, None)
    return proposal


# --- counting by hand -------------------------------------------------------------------------------------------------------


def _followers(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """What followed each occurrence of ``context``, in order."""
    n = len(context)
    return [text[end] for end in range(n, len(text)) if list(text[end - n : end]) == list(context)]


def _likeliest(text: Sequence[int], context: Sequence[int]) -> tuple[int, float, list[int]] | None:
    """The most frequent follower, its share, and the context that was used: the longest suffix that has any."""
    for start in range(len(context)):
        followers = _followers(text, context[start:])
        if followers:
            # The last of equals: later places in the list win.
            token = max(followers, key=lambda t: (followers.count(t), max(i for i, f in enumerate(followers) if f == t)))
            return token, followers.count(token) / len(followers), list(context[start:])
    return None


def _draft(text: Sequence[int], recent: Sequence[int], depth: int) -> Tokens:
    """The rule of `engine.propose.suffix`, for every length of match."""
    best: tuple[float, Tokens] = (0.0, ())
    for length in range(min(len(recent), MAX_CONTEXT), 0, -1):
        context = list(recent[len(recent) - length :])
        if not _followers(text, context):
            continue
        tokens: list[int] = []
        probability = promised = 0.0
        probability = 1.0
        while len(tokens) < min(depth, int(DRAFT_PER_MATCH * length)):
            found = _likeliest(text, context)
            if found is None:
                break
            token, share, used = found
            probability *= share
            if token == SEPARATOR or probability < LEAST_PROBABILITY:
                break
            promised += probability
            tokens.append(token)
            context = [*used, token][-MAX_CONTEXT:]
        if promised > best[0]:
            best = promised, tuple(tokens)
    return best[1]


words = st.lists(st.integers(0, 2), min_size=1, max_size=40)
loops = st.builds(lambda start, loop, n: (start + loop * n), words, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 20))


@given(words | loops, st.lists(st.integers(1, 5), max_size=8), st.integers(0, 9))
def test_equals_counting_by_hand(ids: list[int], cuts: list[int], depth: int) -> None:
    """Bug guarded: counts that a split state loses, followers of the newest token counted before they exist, contexts that are
    too long to be counted, ties decided by the order of a dictionary."""
    source = SuffixSource()
    base = 0
    for size in [*cuts, len(ids)]:
        end = min(base + size, len(ids))
        proposal = _ask(source, ids[base:end], base, depth)
        assert proposal.tokens == _draft(ids[:end], ids[:end], depth)
        assert proposal.known_length == end
        assert (proposal.reason is None) == bool(proposal.tokens)
        base = end


@given(words | loops, words | loops, st.integers(0, 9))
def test_another_text_is_matched_like_ones_own(text: list[int], recent: list[int], depth: int) -> None:
    """Bug guarded: a context that does not occur in the text is taken for one that does, or for its end."""
    known = RecentText(1 << 12)
    for token in text:
        known.append(token)
    assert known.draft(recent[-MAX_CONTEXT:], depth)[1] == _draft(text, recent, depth)


@given(st.integers(MAX_CONTEXT - 2, MAX_CONTEXT + 3), st.lists(st.integers(0, 1), min_size=1, max_size=12))
def test_contexts_around_the_longest_one(length: int, ends: list[int]) -> None:
    """Bug guarded: one off at the longest context that is counted: the counts of one token more are stale."""
    text = [token for end in ends for token in (*range(10, 10 + length), end)]
    recent = [*text, *range(10, 10 + length)]
    source = SuffixSource()
    assert _ask(source, recent, depth=3).tokens == _draft(recent, recent, 3)


@given(words | loops)
def test_the_automaton_is_small(text: list[int]) -> None:
    """Bug guarded: states or transitions that are made twice: at most 2n and 3n are possible."""
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    assert automaton.num_states <= 2 * len(text) + 1
    assert automaton.num_transitions <= 3 * len(text) + 1
