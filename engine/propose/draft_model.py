"""A smaller model as the source of drafts: one ragged forward per draft position, over its own KV cache."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Literal, TypeVar

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models import LoadedModel
from engine.propose.branches import Branch, Guess, Verifying, draw, guess, take_all
from engine.propose.captured import Wanted, captured_drafts, pick_rows
from engine.propose.sequences import Sequences
from engine.propose.tasks import Item, Task, asks_for_drafts
from engine.propose.translated import TranslatedModel
from engine.propose.vocabulary import SharedVocabulary
from engine.propose.window import ContextWindow
from engine.sampling import DRAFT_PROBS
from engine.types import (
    ModelInfo,
    Prepared,
    PrepareItem,
    PrepareReply,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
)
from engine.verify.attention import Chunk
from engine.verify.load import load_engine_model
from engine.verify.ragged import Weights

logger = logging.getLogger(__name__)

CATCH_UP_STEPS = 4
"""Steps of a single token that catching up may take while others wait for their outcomes: about a draft's worth."""
LEAST_TOKENS = 16
"""What is computed whatever the step times say: on a busy machine they may have been measured for a single token only."""

Result = TypeVar("Result")


class DraftModel:
    """A `DraftSource` over a loaded model, which it takes over; ``weights`` other than "exact" quantise its linear layers.

    ``catch_up_tokens`` bounds the committed tokens that one call computes over all items before it drafts: a request beyond it
    gets "catching_up" and goes on in the next call. While others have outcomes to prepare, ``shared_catch_up_tokens`` is the
    bound, by default `affordable_tokens`. When the KV cache is full, whole sequences that the call is not about are forgotten,
    the longest unused first; if that is not enough, fewer outcomes are prepared, the likeliest. Under rules that need q a token
    is drawn from the ``top_n`` likeliest.

    Other reasons for an empty answer: need_context, unknown_token (an id without an embedding here), out_of_context, kv_full,
    bad_logits, malformed, repeated (a sequence twice in one call), no_fork (see `prepares`), no_outcome (only the draft's own
    tokens and ends of the text can follow), failed.

    With ``prefix_cache`` committed tokens whose K and V are known from another sequence with the same beginning, or from a
    forgotten one, are not computed: whole blocks only. With ``vocabulary`` the model has another than the target, whose ids all
    these are (`TranslatedModel`).

    With ``window`` a forward sees only the first and the last tokens of each sequence, and the rest of its blocks is freed.
    What is found in the prefix cache may then have been computed with other windows: another draft, not another text.
    Raises `ModelError` as `load_engine_model`, and for a ``window`` on the stateful path, whose cache has no blocks, or with a
    ``vocabulary``, whose sequences have none of their own.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        weights: Weights = "exact",
        window: ContextWindow | None = None,
        kv_capacity_tokens: int | None = None,
        max_context: int | None = None,
        catch_up_tokens: int = 256,
        shared_catch_up_tokens: int | None = None,
        top_n: int = DRAFT_PROBS,
        prefix_cache: bool = True,
        kernels: Literal["auto", "torch"] = "auto",
        name: str = "model",
        vocabulary: SharedVocabulary | None = None,
    ):
        self.model = load_engine_model(
            loaded,
            weights=weights,
            kernels=kernels,
            kv_capacity_tokens=kv_capacity_tokens,
            max_context=max_context,
        )
        if vocabulary is not None:
            self.model = TranslatedModel(self.model, vocabulary)
        self._info = self.model.info
        self._name = name
        self._catch_up_tokens = catch_up_tokens
        few = affordable_tokens(self._info.step_times) if shared_catch_up_tokens is None else shared_catch_up_tokens
        self._shared_catch_up_tokens = min(few, catch_up_tokens)
        self._top_n = top_n
        self._prefix_cache = prefix_cache and self.model.shares_prefixes
        self._sequences = Sequences(self.model)
        if window is not None and vocabulary is not None:
            raise ModelError(f"{loaded.name}: draft.window_tokens needs a draft with the target's vocabulary: remove it")
        if window is not None and not self._sequences.can_fork:
            raise ModelError(f"{loaded.name}: draft.window_tokens needs a paged KV cache, but {self._info.path_reason}")
        self._window = window
        self._captured = captured_drafts(self.model) if window is None else None
        self._num_steps = 0

    @property
    def name(self) -> str:
        """As in ``draft.source``."""
        return self._name

    @property
    def info(self) -> ModelInfo:
        """Sizes, identity and step times, fixed after loading."""
        return self._info

    extends = True
    """It goes on after tokens that another source drafted: they are computed with the committed ones, and rolled back with what
    is refused."""

    @property
    def prepares(self) -> bool:
        """Whether sequences can be forked, without which `prepare` only catches up: not on the stateful path."""
        return self._sequences.can_fork

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`; a draft that is to follow an item's ``ahead`` does.

        Tokens that are in the cache at the right place are not computed again: the answer to an earlier call may have come too
        late for the caller, who then repeats what the draft already knows.
        """
        return self._run((request,), ())[0][0]

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        """As `OverlappedSource.prepare`: a forward over what is pending and the drafts at the target, then one per depth."""
        return self._run((), (request,))[1][0]

    def run(
        self, proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]
    ) -> tuple[list[ProposeReply], list[PrepareReply]]:
        """Answer several requests with one set of forwards, of which every reply tells the whole time and number.

        Their sequences need different ids: of two items with the same id the later one is refused. When a forward breaks off,
        what the call was about is forgotten and every request has a try of its own; one that fails then is answered "failed".
        """
        try:
            return self._run(proposes, prepares)
        except Exception as error:
            logger.warning("%d requests together failed: %s", len(proposes) + len(prepares), error)
        return (
            [_tried(partial(self.propose, request), _failed_propose(request)) for request in proposes],
            [_tried(partial(self.prepare, request), _failed_prepare(request)) for request in prepares],
        )

    @torch.inference_mode()
    def _run(
        self, proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]
    ) -> tuple[list[ProposeReply], list[PrepareReply]]:
        started = time.perf_counter()
        requests: tuple[ProposeRequest | PrepareRequest, ...] = (*proposes, *prepares)
        for sequence_id in chain.from_iterable(request.release for request in requests):
            self._sequences.release(sequence_id)
        opened = self._sequences.open(list(chain.from_iterable(request.items for request in requests)))
        tasks = [task for task in opened if isinstance(task, Task)]
        try:
            num_steps = self._draft(tasks)
        except BaseException:
            self._sequences.undo(tasks)
            raise
        elapsed, answers = time.perf_counter() - started, iter(opened)
        return (
            [
                ProposeReply(
                    round_id=request.round_id,
                    proposals=tuple(_proposal(item, next(answers)) for item in request.items),
                    step_time_s=elapsed,
                    num_steps=num_steps,
                )
                for request in proposes
            ],
            [
                PrepareReply(
                    round_id=request.round_id,
                    prepared=tuple(_prepared(item, next(answers)) for item in request.items),
                    step_time_s=elapsed,
                    num_steps=num_steps,
                )
                for request in prepares
            ],
        )

    def _draft(self, tasks: list[Task]) -> int:
        """Catch up and draft. Returns the number of forwards."""
        in_use = {task.item.sequence_id for task in tasks}
        try:
            ready, logits = self._catch_up(tasks, in_use)
            self._num_steps = int(logits is not None)
            branches = self._begin(ready, logits, in_use) if logits is not None else []
            while branches:
                logits = self._forward([Chunk(branch.cached, [branch.last], 1) for branch in branches])
                self._num_steps += 1
                branches = self._draw(branches, logits)
        finally:
            self._sequences.release_forks(tasks)
        for task in tasks:
            self._conclude(task)
        return self._num_steps

    def _conclude(self, task: Task) -> None:
        """Say why there is nothing, and let others find what is committed, unless it gave logits that are no numbers."""
        if task.reason is None and asks_for_drafts(task.item) and not any(branch.tokens for branch in task.branches):
            task.reason = self._reason(task)
        pool, cached = self.model.cache.pool, task.held.cached
        if self._prefix_cache and task.reason == "bad_logits":
            pool.forget(cached)
        elif self._prefix_cache:
            pool.register(cached, task.known_length)
        if self._window is not None:
            self._window.give_back(pool, cached, task.known_length)

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        """As `EngineModel.forward`, over what the window shows of every sequence."""
        if self._window is None:
            return self.model.forward(chunks)
        seen = [self._window.view(chunk, self.model.cache.pool.block_size) for chunk in chunks]
        logits = self.model.forward(seen)
        for chunk, view in zip(chunks, seen, strict=True):
            if view is not chunk:
                chunk.sequence.ids.extend(chunk.ids)
        return logits

    def _reason(self, task: Task) -> str:
        """Why nothing was drafted after a forward went well."""
        if not task.drafts:
            return "no_fork"
        if task.branches:
            return "bad_logits"
        if task.committed == self.model.max_context:
            return "out_of_context"
        return "kv_full" if task.num_guesses else "no_outcome"

    # --- the first forward --------------------------------------------------------------------------------------------------

    def _catch_up(self, tasks: list[Task], in_use: set[str]) -> tuple[list[Task], Tensor | None]:
        """Compute pending tokens, the shortest first, and the drafts at the target.

        Returns the tasks that can draft now, those that propose first, and the logits: one row for each of these, and one for
        the last committed token and each of the draft for the others.
        """
        budget = self._budget(tasks)
        chunks: list[tuple[Task, Chunk]] = []
        for task in sorted((task for task in tasks if task.reason is None), key=lambda task: task.cost):
            self._adopt(task)
            if task.cost > budget:
                task.reason = "catching_up"
            committed = task.pending if task.reason is None else task.pending[:budget]
            budget -= min(task.cost, budget)
            drafts = task.drafts and task.reason is None
            ahead = task.draft if drafts else ()
            steps = task.item.depth - 1 if drafts and isinstance(task.item, ProposeItem) else 0
            if not self._sequences.reserve(task, len(committed) + len(ahead) + steps, in_use):
                task.reason = "kv_full"
                continue
            if self._prefix_cache:
                self.model.cache.pool.announce(task.held.cached, committed)
            if committed:
                num_logits = len(ahead) + 1 if isinstance(task.item, PrepareItem) else 1
                chunks.append((task, Chunk(task.held.cached, (*committed, *ahead), num_logits if drafts else 0)))
        chunks.sort(key=lambda pair: isinstance(pair[0].item, PrepareItem))
        ready = [task for task, chunk in chunks if chunk.num_logits]
        return ready, self._forward([chunk for _, chunk in chunks]) if chunks else None

    def _budget(self, tasks: Sequence[Task]) -> int:
        """Tokens of catching up; few when an item waits for nothing but outcomes, which are wanted within a verify."""
        few = max(self._shared_catch_up_tokens, len(tasks))
        waiting = any(isinstance(t.item, PrepareItem) and t.drafts and t.reason is None and t.cost <= few for t in tasks)
        return few if waiting else self._catch_up_tokens

    def _adopt(self, task: Task) -> None:
        """Take from the prefix cache what it knows of the pending tokens; the first step of drafting needs the last one."""
        if self._prefix_cache:
            found = self.model.cache.pool.adopt(task.held.cached, task.pending, task.cost)
            task.pending = task.pending[found:]

    # --- drafting -----------------------------------------------------------------------------------------------------------

    def _begin(self, ready: Sequence[Task], logits: Tensor, in_use: set[str]) -> list[Branch]:
        """The first token of every proposal, and a fork for every outcome to prepare."""
        proposing = [task for task in ready if isinstance(task.item, ProposeItem)]
        for task in proposing:
            branch = Branch(task.held.context, task.held.cached, task.item.depth, num_ahead=len(task.draft))
            task.branches.append(branch)
        branches = self._draw([task.branches[0] for task in proposing], logits[: len(proposing)])
        return [*branches, *self._fork(ready[len(proposing) :], logits[len(proposing) :], in_use)]

    def _draw(self, branches: list[Branch], logits: Tensor) -> list[Branch]:
        """Draft one token per branch, or all where the steps are graphs. Returns the branches that go on."""
        branches, logits = self._draw_captured(branches, logits)
        return draw(branches, logits, self._info.eos_token_ids, self._top_n, self.model.max_context) if branches else []

    def _draw_captured(self, branches: list[Branch], logits: Tensor) -> tuple[list[Branch], Tensor]:
        """Draft by graphs what can be. Returns the other branches and their rows of the logits."""
        wanted = [Wanted(branch.cached, branch.context, branch.depth - len(branch.tokens)) for branch in branches]
        chosen = [i for i, one in enumerate(wanted) if one.is_simple]
        if self._captured is None or not chosen:
            return branches, logits
        drawn = self._captured.draft(pick_rows(logits, chosen), [wanted[i] for i in chosen])
        if drawn is None:
            return branches, logits
        self._num_steps += max(map(len, drawn)) - 1
        for i, tokens in zip(chosen, drawn, strict=True):
            take_all(branches[i], tokens, self._info.eos_token_ids)
        others = [i for i, one in enumerate(wanted) if not one.is_simple]
        return [branches[i] for i in others], pick_rows(logits, others)

    def _fork(self, tasks: Sequence[Task], logits: Tensor, in_use: set[str]) -> list[Branch]:
        """A branch for every outcome worth one, the best first while there is room."""
        if not tasks:
            return []
        found = guess([_verifying(task) for task in tasks], logits, self._info.eos_token_ids)
        wanted: list[tuple[Guess, Task]] = []
        for task, guesses in zip(tasks, found, strict=True):
            if guesses is None:
                task.reason = "bad_logits"
                continue
            task.num_guesses = len(guesses)
            wanted += [(one, task) for one in guesses]
        forks: list[Branch] = []
        for one, task in sorted(wanted, key=lambda pair: pair[0].order):
            fork = self._sequences.fork(task, one, in_use)
            if fork is not None:
                task.branches.append(fork)
                forks.append(fork)
        return forks


def affordable_tokens(step_times: Sequence[tuple[int, float]]) -> int:
    """The most tokens, of those measured (tokens, seconds), that take at most as long as `CATCH_UP_STEPS` steps of the fewest.

    Where memory is the bound that is all of them; the int8 copy of SmolLM2-135M computes 16 on one core.
    """
    limit_s = CATCH_UP_STEPS * step_times[0][1] if step_times else 0.0
    return max(LEAST_TOKENS, max((tokens for tokens, seconds in step_times if seconds <= limit_s), default=0))


def _verifying(task: Task) -> Verifying:
    fan_out = task.item.fan_out if isinstance(task.item, PrepareItem) else ()
    return Verifying(task.held.context, task.held.cached.ids, task.draft, fan_out[: len(task.draft) + 1])


def _proposal(item: Item, answer: Task | str) -> Proposal:
    return answer.proposal() if isinstance(answer, Task) else Proposal(sequence_id=item.sequence_id, reason=answer)


def _prepared(item: Item, answer: Task | str) -> Prepared:
    return answer.prepared() if isinstance(answer, Task) else Prepared(sequence_id=item.sequence_id, reason=answer)


def _failed_propose(request: ProposeRequest) -> ProposeReply:
    return ProposeReply(round_id=request.round_id, proposals=tuple(_proposal(item, "failed") for item in request.items))


def _failed_prepare(request: PrepareRequest) -> PrepareReply:
    return PrepareReply(round_id=request.round_id, prepared=tuple(_prepared(item, "failed") for item in request.items))


def _tried(call: Callable[[], Result], failed: Result) -> Result:
    try:
        return call()
    except Exception:
        logger.exception("a request failed")
        return failed
