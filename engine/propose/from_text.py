"""What sources that draft from text alone share: following the committed tokens of each sequence, as `DraftSource` asks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.types import Proposal, ProposeItem, ProposeReply, ProposeRequest, SequenceContext


class TextDraft(NamedTuple):
    """Tokens that may come next, and what speaks for them."""

    tokens: tuple[int, ...] = ()
    match: int = 0
    """Newest tokens that occurred before, where these followed."""
    share: float = 0.0
    """Of all that followed there, the share that these had: the geometric mean over the draft; 0 where nobody counts."""


NO_TEXT = TextDraft()


class TextIndex(Protocol):
    """What is known of one sequence's text."""

    def draft(self, ids: Sequence[int], depth: int) -> TextDraft:
        """Up to ``depth`` tokens that may follow ``ids``, which begin with those of the call before."""

    def draft_after(self, ids: Sequence[int], drafted: Sequence[int], depth: int) -> TextDraft:
        """The same after ``ids``, those of the last call, and tokens that are only ``drafted``: nothing is learned of these."""


@dataclass(slots=True)
class Followed:
    """One sequence."""

    index: TextIndex
    context: SequenceContext | None
    ids: list[int] = field(default_factory=list)
    """Committed tokens."""
    draft: tuple[int, ...] = ()
    """The last draft: those of its tokens that were accepted come back only as a larger ``base_length``."""


class TextSource(ABC):
    """Drafts are functions of committed text: certain (no q), and the same for the same text under every acceptance rule."""

    def __init__(self) -> None:
        self._sequences: dict[str, Followed] = {}

    @property
    @abstractmethod
    def name(self) -> str:
        """As in ``draft.source``."""

    @abstractmethod
    def _open(self, context: SequenceContext | None) -> TextIndex:
        """An index of a text that has not begun."""

    def _ended(self, sequence: Followed) -> None:  # noqa: B027 - most sources keep nothing of it
        """The sequence was released."""

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """Draft for every item; `DraftSource.propose`."""
        started_s = time.perf_counter()
        self.release(request.release)
        proposals = tuple(self._propose(item) for item in request.items)
        return ProposeReply(
            round_id=request.round_id, proposals=proposals, step_time_s=time.perf_counter() - started_s, num_steps=0
        )

    def release(self, sequence_ids: Sequence[str]) -> None:
        """These sequences ended."""
        for sequence_id in sequence_ids:
            ended = self._sequences.pop(sequence_id, None)
            if ended is not None:
                self._ended(ended)

    def _propose(self, item: ProposeItem) -> Proposal:
        found = self.look_up(item)
        if found is None:
            return Proposal(sequence_id=item.sequence_id, reason="need_context")
        return Proposal(
            sequence_id=item.sequence_id,
            tokens=found.tokens,
            known_length=len(self._sequences[item.sequence_id].ids),
            reason=None if found.tokens else "no_match",
        )

    def look_up(self, item: ProposeItem) -> TextDraft | None:
        """The draft for one item, with what speaks for it; None where the sequence is not known up to ``base_length``."""
        sequence = self._sequences.get(item.sequence_id)
        if sequence is None or item.base_length == 0:
            sequence = Followed(self._open(item.context), item.context)
        num_accepted = max(item.base_length - len(sequence.ids), 0)
        if num_accepted > len(sequence.draft):
            return None
        sequence.ids += sequence.draft[:num_accepted]
        self._catch_up(sequence, item)
        self._sequences[item.sequence_id] = sequence
        found = sequence.index.draft(sequence.ids, item.depth)
        sequence.draft = found.tokens
        return found

    def look_after(self, sequence_id: str, drafted: Sequence[int], depth: int) -> TextDraft:
        """What may follow the committed tokens of the last call and some that another source has drafted."""
        sequence = self._sequences.get(sequence_id)
        return NO_TEXT if sequence is None else sequence.index.draft_after(sequence.ids, drafted, depth)

    def _catch_up(self, sequence: Followed, item: ProposeItem) -> None:
        """Add the committed tokens. An index cannot forget, so one of another text is built anew: committed tokens are never
        taken back, so that happens only where an id names another text.
        """
        known = len(sequence.ids) - item.base_length
        if sequence.ids[item.base_length :] != list(item.tokens[:known]):
            sequence.index, known = self._open(sequence.context), 0
            del sequence.ids[item.base_length :]
        sequence.ids += item.tokens[known:]
