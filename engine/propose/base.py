"""Anything that guesses the next tokens of a sequence."""

from typing import Protocol, TypeGuard

from engine.types import PrepareReply, PrepareRequest, ProposeReply, ProposeRequest


class DraftSource(Protocol):
    """A source of drafts. Keeps soft state per sequence: it may forget any of it at any time and say so.

    A source never raises for one sequence: it answers with an empty `Proposal` and a reason. What it proposes cannot change the
    text, only the speed, so it may also guess from stale or partial state.
    """

    @property
    def name(self) -> str:
        """Name in metrics and logs, as in ``draft.source``."""

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """Draft up to ``item.depth`` tokens for every item, after catching up with ``item.tokens``.

        ``item.base_length`` may be smaller than what the source holds (roll back) or larger (answer ``need_context``).
        """


class OverlappedSource(DraftSource, Protocol):
    """A source that can work while the target verifies: it prepares the next round for the likeliest outcomes of this one."""

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        """Catch up with every item's ``tokens``, then draft ``depth`` tokens after each of its likeliest outcomes.

        Under ``coupled`` and ``greedy`` an outcome's token is guessed by the same scores that draw it: the noise is shared.
        Drafted tokens, and q under rules that need it, are those that `propose` would give after that outcome. What is prepared
        may be fewer outcomes than asked for, never others than asked for: exactness does not depend on the choice of outcomes,
        as it is made before the verdict.
        """


def can_extend(source: DraftSource | None) -> bool:
    """Whether a source can go on after what another one drafted (`ProposeItem.ahead`): one that says so by ``extends``."""
    return bool(getattr(source, "extends", False))


def can_prepare(source: DraftSource | None) -> TypeGuard[OverlappedSource]:
    """Whether a source can work while the target verifies. One that has the method may say no by a false ``prepares``."""
    return hasattr(source, "prepare") and bool(getattr(source, "prepares", True))
