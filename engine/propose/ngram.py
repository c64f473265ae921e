"""Drafts from the text itself: what followed the last occurrence of the newest n-gram (prompt lookup). Costs no model.

The longest n-gram that occurred before wins, and of its occurrences the most recent one. Each sequence keeps one table from
n-gram to the position after its last occurrence, so that a token costs ``max_ngram`` updates and a lookup at most that many.
"""

import time
from dataclasses import dataclass, field

from engine.types import Proposal, ProposeItem, ProposeReply, ProposeRequest


@dataclass(slots=True)
class _Sequence:
    ids: list[int] = field(default_factory=list)
    followers: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> index of the token after its last occurrence but one that ends the sequence."""
    draft: tuple[int, ...] = ()
    """The last draft: those of its tokens that were accepted come back only as a larger ``base_length``."""


class NgramSource:
    """Looks n-grams of ``min_ngram`` to ``max_ngram`` tokens up in prompt and output."""

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1):
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self._sequences: dict[str, _Sequence] = {}

    @property
    def name(self) -> str:
        """As in ``draft.source``."""
        return "ngram"

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """Draft for every item; `DraftSource.propose`."""
        started_s = time.perf_counter()
        for sequence_id in request.release:
            self._sequences.pop(sequence_id, None)
        proposals = tuple(self._propose(item) for item in request.items)
        return ProposeReply(
            round_id=request.round_id, proposals=proposals, step_time_s=time.perf_counter() - started_s, num_steps=0
        )

    def _propose(self, item: ProposeItem) -> Proposal:
        sequence = self._sequences.get(item.sequence_id, _Sequence())
        num_accepted = max(item.base_length - len(sequence.ids), 0)
        if num_accepted > len(sequence.draft):
            return Proposal(sequence_id=item.sequence_id, reason="need_context")
        for token in sequence.draft[:num_accepted]:
            self._append(sequence, token)
        known = len(sequence.ids) - item.base_length
        if sequence.ids[item.base_length :] != list(item.tokens[:known]):
            sequence, known = self._rebuilt(sequence.ids[: item.base_length]), 0
        for token in item.tokens[known:]:
            self._append(sequence, token)
        self._sequences[item.sequence_id] = sequence
        sequence.draft = self._lookup(sequence, item.depth)
        return Proposal(
            sequence_id=item.sequence_id,
            tokens=sequence.draft,
            known_length=len(sequence.ids),
            reason=None if sequence.draft else "no_match",
        )

    def _rebuilt(self, ids: list[int]) -> _Sequence:
        """A table of ``ids`` alone. Committed tokens are never taken back, so only a reused id rolls back to another text."""
        sequence = _Sequence()
        for token in ids:
            self._append(sequence, token)
        return sequence

    def _append(self, sequence: _Sequence, token: int) -> None:
        """Add a token; the n-grams that ended before it now have a follower."""
        end = len(sequence.ids)
        for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
            sequence.followers[tuple(sequence.ids[end - n :])] = end
        sequence.ids.append(token)

    def _lookup(self, sequence: _Sequence, depth: int) -> tuple[int, ...]:
        end = len(sequence.ids)
        for n in range(min(self.max_ngram, end), self.min_ngram - 1, -1):
            start = sequence.followers.get(tuple(sequence.ids[end - n :]))
            if start is not None:
                return self._continue(sequence.ids, start, depth)
        return ()

    @staticmethod
    def _continue(ids: list[int], start: int, depth: int) -> tuple[int, ...]:
        """``depth`` tokens from ``start`` on; a match that reaches the end repeats itself (a loop of period end - start)."""
        period = len(ids) - start
        return tuple(ids[start + j % period] for j in range(depth))
