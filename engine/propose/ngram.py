"""Drafts from the text itself: what followed the last occurrence of the newest n-gram (prompt lookup). Costs no model.

The longest n-gram that occurred before wins, and of its occurrences the most recent one. Each sequence keeps one table from
n-gram to the position after its last occurrence, so that a token costs ``max_ngram`` updates and a lookup at most that many.
"""

from collections.abc import Sequence

from engine.propose.from_text import NO_TEXT, TextDraft, TextIndex, TextSource
from engine.types import SequenceContext

LONGEST_COUNTED = 32
"""A longer match is no better known: what is copied is copied."""


class NgramSource(TextSource):
    """Looks n-grams of ``min_ngram`` to ``max_ngram`` tokens up in prompt and output."""

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1):
        super().__init__()
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    @property
    def name(self) -> str:
        """As in ``draft.source``."""
        return "ngram"

    def _open(self, context: SequenceContext | None) -> TextIndex:
        return _Ngrams(self.max_ngram, self.min_ngram)


class _Ngrams:
    def __init__(self, max_ngram: int, min_ngram: int):
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._num_indexed = 0
        self._followers: dict[tuple[int, ...], int] = {}
        """n-gram -> index of the token after its last occurrence but one that ends the sequence."""

    def draft(self, ids: Sequence[int], depth: int) -> TextDraft:
        for end in range(self._num_indexed, len(ids)):
            for n in range(self._min_ngram, min(self._max_ngram, end) + 1):
                self._followers[tuple(ids[end - n : end])] = end
        self._num_indexed = len(ids)
        return self._look_up(ids, (), depth)

    def draft_after(self, ids: Sequence[int], drafted: Sequence[int], depth: int) -> TextDraft:
        return self._look_up(ids, drafted, depth)

    def _look_up(self, ids: Sequence[int], drafted: Sequence[int], depth: int) -> TextDraft:
        """What followed the last tokens of ``ids`` and ``drafted``; only ``ids`` are indexed, and never copied whole."""
        newest = (*ids[max(len(ids) - LONGEST_COUNTED, 0) :], *drafted)
        for n in range(min(self._max_ngram, len(newest)), self._min_ngram - 1, -1):
            start = self._followers.get(newest[len(newest) - n :])
            if start is not None:
                return TextDraft(self._continue(ids, drafted, start, depth), _match_length(ids, newest, start, n))
        return NO_TEXT

    @staticmethod
    def _continue(ids: Sequence[int], drafted: Sequence[int], start: int, depth: int) -> tuple[int, ...]:
        """``depth`` tokens from ``start`` on; a match that reaches the end repeats itself (a loop of all from ``start`` on)."""
        followed = tuple(ids[start : start + depth])
        if len(followed) == depth:
            return followed
        loop = (*followed, *drafted)
        return tuple(loop[j % len(loop)] for j in range(depth))


def _match_length(ids: Sequence[int], newest: Sequence[int], start: int, known: int) -> int:
    """How many tokens before ``start`` are the ``newest``, of which ``known`` are known to be, as far as that is counted."""
    length, most = known, min(start, len(newest), LONGEST_COUNTED)
    while length < most and ids[start - 1 - length] == newest[len(newest) - 1 - length]:
        length += 1
    return length
