"""What a draft model holds of its callers' sequences, and the room for them and their forks."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.propose.branches import Fork, Guess
from engine.propose.tasks import Held, Item, Task, asks_for_drafts, committed_length, is_malformed
from engine.propose.translated import ForkingTranslatedCache
from engine.types import PrepareItem, ProposeItem
from engine.verify.blocks import ABSENT, CachedSequence, OutOfBlocks
from engine.verify.kv_cache import KVCache
from engine.verify.load import EngineModel

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Sequences:
    """Soft state by sequence id. When the cache is full, what the call is not about is forgotten, the longest unused first."""

    def __init__(self, model: EngineModel):
        self._model = model
        self._paged = model.cache if isinstance(model.cache, KVCache | ForkingTranslatedCache) else None
        self._said_no_fork = False
        self._held: dict[str, Held] = {}  # the longest unused first

    @property
    def can_fork(self) -> bool:
        """Whether the model's cache is one whose sequences can share their beginning."""
        return self._paged is not None

    def release(self, sequence_id: str) -> None:
        """Forget a sequence, if it is known."""
        held = self._held.pop(sequence_id, None)
        if held is not None:
            self._model.cache.truncate(held.cached, 0)

    def undo(self, tasks: Sequence[Task]) -> None:
        """A forward broke off: nobody may use what it was to write."""
        for task in tasks:
            self._model.cache.pool.forget(task.held.cached)
        for task in tasks:
            self.release(task.item.sequence_id)

    # --- what is there and what is missing ----------------------------------------------------------------------------------

    def open(self, items: Sequence[Item]) -> list[Task | str]:
        """A task per item, or the reason why there is none."""
        seen: set[str] = set()
        opened: list[Task | str] = []
        for item in items:
            opened.append("repeated" if item.sequence_id in seen else self._open(item))
            seen.add(item.sequence_id)
        return opened

    def _open(self, item: Item) -> Task | str:
        """Roll back to what both sides agree on and find what is missing."""
        if is_malformed(item):
            return "malformed"
        held = self._held.pop(item.sequence_id, None)
        if held is None and item.context is not None:
            held = Held(item.context)
        if held is None:
            return "need_context"
        self._held[item.sequence_id] = held  # now the most recently used
        held.context = item.context or held.context
        if item.base_length > len(held.cached.ids) or committed_length(item) == 0:
            return "need_context"
        task = Task(item, held, asks_for_drafts(item) and (isinstance(item, ProposeItem) or self._may_fork()))
        task.pending = self._roll_back(task)
        if not all(map(self._is_known, task.pending)):
            task.reason = "unknown_token"
        elif task.committed > self._model.max_context:
            task.reason = "out_of_context"
        elif task.drafts and isinstance(item, PrepareItem):
            task.draft = self._computable(item.draft, task.committed)
        elif task.drafts and isinstance(item, ProposeItem):
            task.draft, task.reason = item.ahead, self._problem_ahead(item.ahead, task.committed)
        return task

    def _may_fork(self) -> bool:
        if not self.can_fork and not self._said_no_fork:
            self._said_no_fork = True
            logger.warning("%s: sequences cannot be forked here, so no outcomes are prepared", self._model.loaded.name)
        return self.can_fork

    def _is_known(self, token: int) -> bool:
        return 0 <= token < self._model.num_ids

    def _computable(self, draft: tuple[int, ...], committed: int) -> tuple[int, ...]:
        """The draft up to an id without an embedding, or the end of the context."""
        draft = draft[: self._model.max_context - committed]
        unknown = (place for place, token in enumerate(draft) if not self._is_known(token))
        return draft[: next(unknown, None)]

    def _problem_ahead(self, ahead: tuple[int, ...], committed: int) -> str | None:
        """Why nothing can be drafted after these tokens."""
        if committed + len(ahead) > self._model.max_context:
            return "out_of_context"
        return None if all(map(self._is_known, ahead)) else "unknown_token"

    def _roll_back(self, task: Task) -> tuple[int, ...]:
        """Keep what is cached of the committed tokens, and return the rest of them."""
        item, cached = task.item, task.held.cached
        base, total = item.base_length, task.committed
        length = base
        while length < min(total, len(cached.ids)) and cached.ids[length] == item.tokens[length - base]:
            length += 1
        if task.drafts:  # the last committed token is computed again for its logits
            length = min(length, total - 1)
        length = self._whole(cached, length)
        pending = (*cached.ids[length:base], *item.tokens[max(length - base, 0) :])
        self._model.cache.truncate(cached, length)
        return pending

    def _whole(self, cached: CachedSequence, length: int) -> int:
        """``length``, or the tokens before the first absent block where the last of ``length`` tokens would lie in one.

        So far back goes only a caller who repeats an old message; the rest is computed again from its ids.
        """
        size = self._model.cache.pool.block_size
        if not cached.blocks or length == 0 or cached.blocks[(length - 1) // size] != ABSENT:  # of a translated draft: none
            return length
        return cached.blocks.index(ABSENT) * size

    # --- room ---------------------------------------------------------------------------------------------------------------

    def reserve(self, task: Task, num_tokens: int, in_use: set[str]) -> bool:
        """Make room for more tokens of a sequence, not at the cost of those ``in_use``; False where that is not enough."""

        def take() -> bool:
            self._model.cache.reserve(task.held.cached, num_tokens)
            return True

        return self._with_room(take, in_use) or False

    def fork(self, task: Task, outcome: Guess, in_use: set[str]) -> Fork | None:
        """A branch with a cache of its own that goes on after an outcome; None where there is no room, or no context left."""
        length = task.committed + outcome.accepted
        steps = min(task.item.depth, self._model.max_context - length)
        if self._paged is None or steps == 0:
            return None
        paged = self._paged

        def take() -> Fork:
            cached = paged.fork(task.held.cached, length)
            try:
                paged.reserve(cached, steps)
            except BaseException:
                paged.truncate(cached, 0)
                raise
            return Fork(
                task.held.context, cached, task.item.depth, outcome.token, accepted=outcome.accepted, token=outcome.token
            )

        return self._with_room(take, in_use)

    def release_forks(self, tasks: Sequence[Task]) -> None:
        """Give back what the forks of these tasks hold."""
        for branch in (branch for task in tasks for branch in task.branches):
            if isinstance(branch, Fork):
                self._model.cache.truncate(branch.cached, 0)

    def _with_room(self, take: Callable[[], Result], in_use: set[str]) -> Result | None:
        """What ``take`` makes of free blocks, of which more come free while there are sequences to forget."""
        while True:
            try:
                return take()
            except OutOfBlocks:
                victim = next((sequence_id for sequence_id in self._held if sequence_id not in in_use), None)
                if victim is None:
                    return None
                self.release(victim)
