"""Anything that guesses the next tokens of a sequence."""

from typing import Protocol

from engine.types import ProposeReply, ProposeRequest


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
