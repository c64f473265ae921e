"""A text source beside a model: asked first, in the process of the rounds, for every request.

It needs no device and no message, so a round simply looks up what it offers; `autoscale.choice` decides what becomes of it. It
reads prompts along with the target, chunk by chunk, so that no round has a whole one to read.
"""

import time
from collections.abc import Collection, Sequence
from typing import Protocol

from engine.propose.from_text import NO_TEXT, TextDraft, TextSource
from engine.types import ProposeItem, SequenceContext


class Followable(Protocol):
    """A request, as `engine.request.Request`."""

    id: str
    ids: list[int]
    text_length: int
    """Tokens that the source has read."""

    @property
    def context(self) -> SequenceContext:
        """What a source must know besides the tokens."""


class TextBeside:
    """Follows the requests of one lane with one source of drafts from text."""

    def __init__(self, source: TextSource, max_depth: int):
        """``max_depth``: tokens that are ever drafted."""
        self._source = source
        self._max_depth = max_depth
        self._time_s = 0.0

    @property
    def name(self) -> str:
        """As in ``draft.text``."""
        return self._source.name

    def read(self, request: Followable, end: int) -> None:
        """Take notice of a request's tokens up to ``end``."""
        self._look_up(request, end, 0)

    def draft(self, request: Followable, room: int) -> TextDraft:
        """What may follow all of a request's tokens, at most ``room`` tokens: a function of committed tokens alone."""
        return self._look_up(request, len(request.ids), min(room, self._max_depth))

    def draft_after(self, request: Followable, drafted: Sequence[int], room: int) -> TextDraft:
        """What may follow a request's tokens, which `draft` has read, and those that another source has ``drafted``."""
        started_s = time.perf_counter()
        found = self._source.look_after(request.id, drafted, min(room, self._max_depth - len(drafted)))
        self._time_s += time.perf_counter() - started_s
        return found

    def release(self, request_ids: Collection[str]) -> None:
        """These requests ended."""
        self._source.release(tuple(request_ids))

    def take_time_s(self) -> float:
        """Seconds spent since this was last asked."""
        spent_s, self._time_s = self._time_s, 0.0
        return spent_s

    def _look_up(self, request: Followable, end: int, depth: int) -> TextDraft:
        started_s, end = time.perf_counter(), max(end, request.text_length)
        item = ProposeItem(
            sequence_id=request.id,
            base_length=request.text_length,
            tokens=tuple(request.ids[request.text_length : end]),
            depth=depth,
            context=request.context if request.text_length == 0 else None,
        )
        found = self._source.look_up(item)
        request.text_length = end if found is not None else 0
        self._time_s += time.perf_counter() - started_s
        return found or NO_TEXT
