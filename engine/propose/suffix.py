"""Drafts from the text itself, weighed by counts: suffix decoding (Oliaro et al. 2024, arXiv 2411.04975). Costs no model.

Each suffix of the newest tokens that occurred before offers a draft: the token that followed it most often, then the one that
followed suffix and token most often, and so on. The share of all followers that each of these had is its probability; their
product is how likely the draft is accepted so far, and the sum of the products how many of its tokens are. A draft ends where
the product falls below `LEAST_PROBABILITY`, and at `DRAFT_PER_MATCH` times the length of the suffix: what matched little is
trusted little. The draft that promises most tokens wins, of equal ones that of the longest suffix. Of tokens that followed
equally often the one that did so last is taken.

A draft depends on committed text alone, so it is certain (q is one-hot) and exact under every rule. Outputs of finished
requests are used for others only where that is asked for, and only under rules whose text cannot depend on its draft: an
earlier request with the same seed has spent the noise that decides this one, so under the ratio test its text is no fair draft.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.propose.from_text import Followed, TextDraft, TextIndex, TextSource
from engine.propose.suffix_automaton import MAX_CONTEXT, SEPARATOR, SuffixAutomaton
from engine.types import ProposeReply, ProposeRequest, SequenceContext

DRAFT_PER_MATCH = 1.0
LEAST_PROBABILITY = 0.3
"""Of the draft as a whole. From 0.1 to 0.5 it made little difference (15 greedy texts of a small model, replayed)."""
WINDOW_TOKENS = 1 << 15
"""Most tokens of one request that are looked at, the newest: a bound on memory, some 400 bytes per token."""
INDEXED_PER_CALL = 1024
"""Tokens of a prompt that are read in one call, so that a long one takes a few rounds and holds none of them up."""
RULES_THAT_SHARE = frozenset({"greedy", "coupled"})
"""Under which the text is a function of request and seed alone, whatever the draft."""
SEGMENTS = 4


class Draft(NamedTuple):
    """A draft of one length of suffix."""

    promised: float
    """How many of its tokens are likely accepted."""
    tokens: tuple[int, ...]
    match: int = 0
    """Tokens of the suffix."""
    probability: float = 0.0
    """Of the draft as a whole."""


NOTHING = Draft(0.0, ())


class SuffixSource(TextSource):
    """Suffix decoding over prompt and output of each request and, if asked for, over outputs of finished ones."""

    def __init__(self, shared_tokens: int = 0, window_tokens: int = WINDOW_TOKENS):
        """``shared_tokens``: of finished outputs, the newest, that other requests may be drafted from; 0 = none.

        An output is what the source was told of: all but the tokens of the last round. ``window_tokens``: of one request, the
        newest. Both at least `SEGMENTS`.
        """
        super().__init__()
        self._window_tokens = window_tokens
        self._shared = RecentText(shared_tokens) if shared_tokens else None
        self._unread: deque[int] = deque(maxlen=shared_tokens)
        """Of finished outputs."""

    @property
    def name(self) -> str:
        """As in ``draft.source``."""
        return "suffix"

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of finished outputs that are held."""
        return len(self._unread) + (self._shared.size if self._shared is not None else 0)

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """Draft for every item; `DraftSource.propose`."""
        if self._shared is not None:
            for _ in range(min(len(self._unread), INDEXED_PER_CALL)):
                self._shared.append(self._unread.popleft())
        return super().propose(request)

    def _open(self, context: SequenceContext | None) -> TextIndex:
        may_share = context is not None and context.params.acceptance_rule in RULES_THAT_SHARE
        return _Suffixes(RecentText(self._window_tokens), self._shared if may_share else None)

    def _ended(self, sequence: Followed) -> None:
        if self._shared is not None and sequence.context is not None:
            output = sequence.ids[sequence.context.prompt_length :]
            self._unread.extend((*output, SEPARATOR) if output else ())


class _Suffixes:
    """One request's own text, and the others'."""

    def __init__(self, own: "RecentText", shared: "RecentText | None"):
        self._own = own
        self._shared = shared
        self._num_indexed = 0

    def draft(self, ids: Sequence[int], depth: int) -> TextDraft:
        end = min(len(ids), self._num_indexed + INDEXED_PER_CALL)
        for token in ids[self._num_indexed : end]:
            self._own.append(token)
        self._num_indexed = end
        return self._look_up(ids[-MAX_CONTEXT:], depth)

    def draft_after(self, ids: Sequence[int], drafted: Sequence[int], depth: int) -> TextDraft:
        return self._look_up([*ids[-MAX_CONTEXT:], *drafted][-MAX_CONTEXT:], depth)

    def _look_up(self, recent: Sequence[int], depth: int) -> TextDraft:
        best = self._own.draft(recent, depth)
        if self._shared is not None:
            best = better(best, self._shared.draft(recent, depth))
        share = best.probability ** (1 / len(best.tokens)) if best.tokens else 0.0
        return TextDraft(best.tokens, best.match, share)


class RecentText:
    """The newest tokens of a text, at most ``max_tokens``; the oldest part is forgotten, a quarter of that at a time.

    An automaton cannot forget, so the text is cut into segments with one each. What crosses a cut is not found.
    """

    def __init__(self, max_tokens: int):
        self._segment_tokens = max_tokens // SEGMENTS
        self._segments = deque([SuffixAutomaton()], maxlen=SEGMENTS)

    @property
    def size(self) -> int:
        """Tokens that are known."""
        return sum(segment.size for segment in self._segments)

    def append(self, token: int) -> None:
        """Add a token to the text."""
        if self._segments[-1].size >= self._segment_tokens:
            self._segments.append(SuffixAutomaton())
        self._segments[-1].append(token)

    def draft(self, recent: Sequence[int], depth: int) -> Draft:
        """The best draft of at most ``depth`` tokens after ``recent``, of equal ones that of the newest segment."""
        best = NOTHING
        for segment in reversed(self._segments):
            for state, length in segment.places(recent):
                longest = min(depth, int(DRAFT_PER_MATCH * length))
                if longest <= best.promised:
                    break
                best = better(best, grow(segment, state, length, longest))
        return best


def grow(segment: SuffixAutomaton, state: int, length: int, longest: int) -> Draft:
    """What most often followed a place, as long as that is likely enough."""
    probability, promised, match = 1.0, 0.0, length
    tokens: list[int] = []
    while len(tokens) < longest:
        found = segment.follow(state, length)
        if found is None:
            break
        token, share, state, length = found
        if token == SEPARATOR or probability * share < LEAST_PROBABILITY:
            break
        probability *= share
        promised += probability
        tokens.append(token)
    return Draft(promised, tuple(tokens), match, probability)


def better(first: Draft, second: Draft) -> Draft:
    """The draft that promises more tokens; of equal ones the first."""
    return second if second.promised > first.promised else first
