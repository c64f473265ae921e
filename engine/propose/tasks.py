"""One item of a call to a draft model: what it holds of the sequence, what is missing, and the drafts it grows."""

from dataclasses import dataclass, field

from engine.propose.branches import Branch, Fork
from engine.types import Prepared, PrepareItem, Proposal, ProposeItem, SequenceContext
from engine.verify.blocks import CachedSequence

Item = ProposeItem | PrepareItem


@dataclass(slots=True)
class Held:
    """What is known of one sequence. The cache may reach past the committed tokens, into earlier drafts."""

    context: SequenceContext
    cached: CachedSequence = field(default_factory=CachedSequence)


@dataclass(slots=True)
class Task:
    """One item on its way: first its pending tokens are computed, then its branches draft one token per step."""

    item: Item
    held: Held
    drafts: bool
    """Whether more than catching up is asked for and can be done."""
    pending: tuple[int, ...] = ()
    """Committed tokens that are not in the cache."""
    draft: tuple[int, ...] = ()
    """Of what the target verifies, the tokens that can be computed here; of a `ProposeItem`, those that its draft follows."""
    num_guesses: int = 0
    """Outcomes that were to be prepared."""
    branches: list[Branch] = field(default_factory=list)
    reason: str | None = None

    @property
    def committed(self) -> int:
        """Tokens of the sequence that are no drafts."""
        return committed_length(self.item)

    @property
    def cost(self) -> int:
        """Tokens of catching up; the last committed token is the first step of drafting."""
        return len(self.pending) - self.drafts

    @property
    def known_length(self) -> int:
        """Committed tokens that are in the cache."""
        return min(len(self.held.cached.ids), self.committed)

    def proposal(self) -> Proposal:
        """The answer to a `ProposeItem`, whose one branch is the sequence itself."""
        tokens = tuple(token for branch in self.branches for token in branch.tokens)
        probs = tuple(q for branch in self.branches for q in branch.probs)
        return Proposal(
            sequence_id=self.item.sequence_id,
            tokens=tokens,
            probs=probs or None,
            known_length=self.known_length,
            reason=self.reason,
        )

    def prepared(self) -> Prepared:
        """The answer to a `PrepareItem`: its forks, as far as anything follows them."""
        return Prepared(
            sequence_id=self.item.sequence_id,
            outcomes=tuple(branch.outcome() for branch in self.branches if isinstance(branch, Fork) and branch.tokens),
            known_length=self.known_length,
            reason=self.reason,
        )


def committed_length(item: Item) -> int:
    """Tokens of the sequence that are no drafts."""
    return item.base_length + len(item.tokens)


def asks_for_drafts(item: Item) -> bool:
    """Whether there is more to do than catching up."""
    return item.depth > 0 and (isinstance(item, ProposeItem) or any(item.fan_out))


def is_malformed(item: Item) -> bool:
    """Whether no meaning can be given to its numbers."""
    if item.base_length < 0 or item.depth < 0:
        return True
    fan_out, num_places = (item.fan_out, len(item.draft) + 1) if isinstance(item, PrepareItem) else ((), 0)
    return len(fan_out) not in (0, num_places) or min(fan_out, default=0) < 0
