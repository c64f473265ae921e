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
loops = st.builds(
    lambda start, loop, n: start + loop * n, words, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 20)
)


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


# --- the protocol -----------------------------------------------------------------------------------------------------------


@given(words, words, st.data())
def test_rolling_back_forgets_what_came_after(ids: list[int], other: list[int], data: st.DataObject) -> None:
    """Bug guarded: after ``base_length`` shrank, counts of tokens that are not there any more decide the draft."""
    base = data.draw(st.integers(0, len(ids)))
    source = SuffixSource()
    _ask(source, ids)
    proposal, expected = _ask(source, other, base), _ask(SuffixSource(), ids[:base] + other)
    assert (proposal.tokens, proposal.known_length) == (expected.tokens, expected.known_length)


def test_what_is_unknown_is_asked_for() -> None:
    """Bug guarded: after a restart or a gap the source takes the middle of a text for its beginning."""
    source = SuffixSource()
    assert _ask(source, [1, 1], base=3).reason == "need_context"
    _ask(source, [1, 2])
    assert _ask(source, [1], base=5).reason == "need_context"
    assert _ask(source, [1], base=2).tokens == (2,)


def test_accepted_drafts_are_known() -> None:
    """Bug guarded: draft tokens that were accepted are not counted, so that the text has a hole after every success."""
    source = SuffixSource()
    assert _ask(source, [1, 2, 3, 1, 2]).tokens == (3, 1)
    assert _ask(source, [9, 1], base=7).known_length == 9  # (3, 1) accepted, then 9 and 1
    assert _ask(source, [], base=9).tokens == _draft([1, 2, 3, 1, 2, 3, 1, 9, 1], [1, 2, 3, 1, 2, 3, 1, 9, 1], 4)


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: one long prompt holds up the rounds of all; or the rest of it is never read."""
    monkeypatch.setattr(suffix, "INDEXED_PER_CALL", 10)
    source = SuffixSource()
    text = [*range(100, 130), 7, 8, 9, 7]
    assert _ask(source, text) == Proposal(sequence_id="s", known_length=34, reason="no_match")
    assert [_ask(source, [], base=34).tokens for _ in range(3)] == [(), (), (8,)]


# --- what is remembered, and of whom ----------------------------------------------------------------------------------------

STORY = (11, 12, 13, 14, 15, 16)


def _finish(source: SuffixSource, name: str, output: Sequence[int], prompt: Sequence[int] = (1,), **params: object) -> None:
    _ask(source, [*prompt, *output], name=name, prompt_length=len(prompt), **params)
    source.propose(ProposeRequest(round_id=8, items=(), release=(name,)))
    source.propose(ProposeRequest(round_id=9, items=()))


def test_nobody_learns_of_others_unless_it_is_asked_for() -> None:
    """Bug guarded: the text of one user reaches the drafts of another, while both run or when one has finished."""
    source = SuffixSource()
    _ask(source, STORY, name="running")
    _finish(source, "finished", STORY)
    assert _ask(source, [11, 12], name="other").tokens == ()


def test_finished_outputs_are_shared_where_it_is_asked_for() -> None:
    """Bug guarded: prompts, or outputs that are not finished, are shared too; or drafts run from one output into the next."""
    source = SuffixSource(shared_tokens=1 << 10)
    _ask(source, [1, 31, 32, 33], name="running")
    _finish(source, "a", STORY, prompt=(21, 22, 23))
    _finish(source, "b", (41, 42))
    assert _ask(source, [11, 12], name="other").tokens == (13, 14)
    assert [_ask(source, [token], name="other").tokens for token in (21, 22, 31, 32, 16, 42)] == [()] * 6


def test_a_request_without_drafts_is_not_shared() -> None:
    """Bug guarded: a source that fails on, or invents, the text of a request that it was never asked about."""
    source = SuffixSource(shared_tokens=1 << 10)
    source.propose(ProposeRequest(round_id=1, items=(), release=("never seen",)))
    _finish(source, "no output", (), prompt=STORY)
    assert _ask(source, [11, 12], name="other").tokens == ()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_whose_text_depends_on_the_draft_see_their_own_text_only(rule: str) -> None:
    """Bug guarded: an answer with the same seed has spent the noise that accepts and replaces this one's tokens, so that under
    the ratio test a draft from it is a bias (tests/numerics/test_shared_suffixes.py measures it)."""
    source = SuffixSource(shared_tokens=1 << 10)
    _finish(source, "a", STORY, rule=rule)
    assert _ask(source, [11, 12], name="b", rule=rule).tokens == ()
    assert _ask(source, [11, 12, 11], name="c", rule=rule).tokens == (12,)
    assert _ask(source, [11, 12], name="d", rule=rule, temperature=0.0).tokens == (13, 14)
    assert _ask(source, [11, 12], name="e", rule="coupled").tokens == (13, 14)


def test_ones_own_text_comes_first() -> None:
    """Bug guarded: what others were answered replaces what the request itself says, where both promise the same."""
    source = SuffixSource(shared_tokens=1 << 10)
    _finish(source, "a", STORY)
    assert _ask(source, [11, 50, 11], name="b").tokens == (50,)
    assert _ask(source, [10, 12, 50, 11, 12], name="c").tokens == (13, 14)  # a longer match


@given(st.lists(st.integers(0, 4), max_size=200), st.integers(SEGMENTS, 40))
def test_memory_is_bounded(text: list[int], max_tokens: int) -> None:
    """Bug guarded: a text that grows for ever; or more of it is thrown away than one segment."""
    known = RecentText(max_tokens)
    for token in text:
        known.append(token)
    assert min(len(text), (SEGMENTS - 1) * (max_tokens // SEGMENTS)) <= known.size <= max_tokens


def test_the_oldest_output_is_forgotten() -> None:
    """Bug guarded: the memory that all requests share grows with every request, or stops learning when it is full."""
    source = SuffixSource(shared_tokens=80)
    for start in range(0, 1000, 10):
        _finish(source, f"r{start}", range(start + 1, start + 10))
        assert source.num_shared_tokens <= 80
    assert _ask(source, [991, 992], name="new").tokens == (993, 994)
    assert _ask(source, [501, 502], name="old").tokens == ()


def test_released_sequences_are_forgotten() -> None:
    """Bug guarded: memory grows with every request that ever ran."""
    source = SuffixSource()
    _ask(source, [1, 2])
    assert _ask(source, [1], base=2, release=("s", "never seen")).reason == "need_context"


@given(st.lists(st.tuples(st.integers(0, 2), words), min_size=1, max_size=12))
def test_only_tokens_that_were_seen_are_drafted(parts: list[tuple[int, list[int]]]) -> None:
    """Bug guarded: the mark between outputs, or an id that is in no text, is proposed: it may lie outside the vocabulary."""
    source, seen = SuffixSource(shared_tokens=1 << 10), set()
    for number, (name, tokens) in enumerate(parts):
        shifted = [token + 10 * name for token in tokens]
        seen |= {1, *shifted}
        _finish(source, f"{number}", shifted)
        assert set(_ask(source, shifted, name="asking", depth=8).tokens) <= seen
