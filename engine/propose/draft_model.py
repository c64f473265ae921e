"""A smaller model as the source of drafts: one ragged forward per draft position, over its own KV cache."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from engine.models import LoadedModel
from engine.propose.captured import REFUSED, CapturedDrafts, Wanted, captured_drafts, pick_rows
from engine.sampling import DRAFT_PROBS, SampledSequence, propose_tokens
from engine.types import ModelInfo, Proposal, ProposeItem, ProposeReply, ProposeRequest, SequenceContext, SparseProbs
from engine.verify.attention import Chunk
from engine.verify.blocks import OutOfBlocks
from engine.verify.kv_cache import CachedSequence
from engine.verify.load import load_engine_model


@dataclass(slots=True)
class _Held:
    """What is known of one sequence. The cache may reach past the committed tokens, into earlier drafts."""

    context: SequenceContext
    cached: CachedSequence = field(default_factory=CachedSequence)


@dataclass(slots=True)
class _Task:
    """One item on its way: first its pending tokens are computed, then one token is drafted per step."""

    item: ProposeItem
    held: _Held
    pending: tuple[int, ...]
    """Committed tokens that are not in the cache."""
    tokens: list[int] = field(default_factory=list)
    probs: list[SparseProbs] = field(default_factory=list)
    reason: str | None = None

    @property
    def committed(self) -> int:
        """Tokens of the sequence that are no drafts."""
        return self.item.base_length + len(self.item.tokens)

    @property
    def cost(self) -> int:
        """Tokens of catching up; the last committed token is the first step of drafting."""
        return len(self.pending) - (self.item.depth > 0)

    def proposal(self) -> Proposal:
        return Proposal(
            sequence_id=self.item.sequence_id,
            tokens=tuple(self.tokens),
            probs=tuple(self.probs) or None,
            known_length=min(len(self.held.cached.ids), self.committed),
            reason=self.reason,
        )


class DraftModel:
    """A `DraftSource` over a loaded model, which it takes over; with ``int8`` its linear layers are quantised.

    ``catch_up_tokens`` bounds the committed tokens that one call computes over all items before it drafts: a request beyond it
    gets "catching_up" and goes on in the next call. Other reasons for an empty draft: need_context, unknown_token (an id
    without an embedding here), out_of_context, kv_full, bad_logits. When the KV cache is full, whole sequences that the call is
    not about are forgotten, the longest unused first. Under rules that need q a token is drawn from the ``top_n`` likeliest.
    With ``prefix_cache`` committed tokens whose K and V are known from another sequence with the same beginning, or from a
    forgotten one, are not computed: whole blocks only.
    Raises `ModelError` as `load_engine_model`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        int8: bool = False,
        kv_capacity_tokens: int | None = None,
        max_context: int | None = None,
        catch_up_tokens: int = 256,
        top_n: int = DRAFT_PROBS,
        prefix_cache: bool = True,
        kernels: Literal["auto", "torch"] = "auto",
        name: str = "model",
    ):
        self.model = load_engine_model(
            loaded,
            weights="int8" if int8 else "exact",
            kernels=kernels,
            kv_capacity_tokens=kv_capacity_tokens,
            max_context=max_context,
        )
        self._info = self.model.info
        self._name = name
        self._catch_up_tokens = catch_up_tokens
        self._top_n = top_n
        self._prefix_cache = prefix_cache and self.model.shares_prefixes
        self._sequences: dict[str, _Held] = {}  # the longest unused first
        self._captured = captured_drafts(self.model)

    @property
    def name(self) -> str:
        """As in ``draft.source``."""
        return self._name

    @property
    def info(self) -> ModelInfo:
        """Sizes, identity and step times, fixed after loading."""
        return self._info

    @torch.inference_mode()
    def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`.

        Tokens that are in the cache at the right place are not computed again: the answer to an earlier call may have come too
        late for the caller, who then repeats what the draft already knows.
        """
        started = time.perf_counter()
        for sequence_id in request.release:
            self._release(sequence_id)
        opened = [self._open(item) for item in request.items]
        try:
            num_steps = self._draft([task for task in opened if isinstance(task, _Task)])
        except BaseException:
            self._undo(request.items)
            raise
        return ProposeReply(
            round_id=request.round_id,
            proposals=tuple(task.proposal() if isinstance(task, _Task) else task for task in opened),
            step_time_s=time.perf_counter() - started,
            num_steps=num_steps,
        )

    def _draft(self, opened: list[_Task]) -> int:
        """Catch up and draft. Returns the number of forwards."""
        tasks, logits = self._catch_up(opened)
        num_steps = int(logits is not None)
        if self._captured is not None and logits is not None:
            tasks, logits, num_captured = self._draft_captured(self._captured, tasks, logits)
            num_steps += num_captured
        while tasks and logits is not None:
            tasks = self._draw(tasks, logits)
            if tasks:
                logits = self.model.forward([Chunk(task.held.cached, task.tokens[-1:], 1) for task in tasks])
                num_steps += 1
        if self._prefix_cache:
            for task in opened:
                self._register(task)
        return num_steps

    def _draft_captured(self, captured: CapturedDrafts, tasks: list[_Task], logits: Tensor) -> tuple[list[_Task], Tensor, int]:
        """Draft by graphs what can be. Returns the other tasks, their rows of the logits, and the number of forwards."""
        wanted = [Wanted(task.held.cached, task.held.context, task.item.depth) for task in tasks]
        chosen = [i for i, one in enumerate(wanted) if one.is_simple]
        others = [i for i, one in enumerate(wanted) if not one.is_simple]
        drawn = captured.draft(pick_rows(logits, chosen), [wanted[i] for i in chosen]) if chosen else None
        if drawn is None:
            return tasks, logits, 0
        for i, tokens in zip(chosen, drawn, strict=True):
            self._take_all(tasks[i], tokens)
        return [tasks[i] for i in others], pick_rows(logits, others), max(map(len, drawn)) - 1

    def _take_all(self, task: _Task, tokens: list[int]) -> None:
        """Add drafted tokens, all but the last of which were fed back, up to the first after which none may follow."""
        for index, token in enumerate(tokens):
            if not self._take(task, token, None, token != REFUSED) or index == len(tokens) - 1:
                return
            task.held.cached.ids.append(token)

    def _register(self, task: _Task) -> None:
        """Let others find what is committed, unless it gave logits that are no numbers."""
        pool, cached = self.model.cache.pool, task.held.cached
        if task.reason == "bad_logits":
            pool.forget(cached)
        else:
            pool.register(cached, min(len(cached.ids), task.committed))

    def _undo(self, items: Sequence[ProposeItem]) -> None:
        """A forward broke off: nobody may use what it was to write."""
        for item in items:
            held = self._sequences.get(item.sequence_id)
            if held is not None:
                self.model.cache.pool.forget(held.cached)
                self._release(item.sequence_id)

    def _release(self, sequence_id: str) -> None:
        held = self._sequences.pop(sequence_id, None)
        if held is not None:
            self.model.cache.truncate(held.cached, 0)

    def _open(self, item: ProposeItem) -> "_Task | Proposal":
        """Roll back to what both sides agree on and find what is missing."""
        held = self._sequences.pop(item.sequence_id, None)
        if held is None and item.context is not None:
            held = _Held(item.context)
        if held is None:
            return Proposal(sequence_id=item.sequence_id, reason="need_context")
        self._sequences[item.sequence_id] = held  # now the most recently used
        held.context = item.context or held.context
        if item.base_length > len(held.cached.ids) or item.base_length + len(item.tokens) == 0:
            return Proposal(sequence_id=item.sequence_id, reason="need_context")
        task = _Task(item, held, self._roll_back(item, held.cached))
        if any(not 0 <= token < self.model.num_ids for token in task.pending):
            task.reason = "unknown_token"
        elif task.committed > self.model.max_context:
            task.reason = "out_of_context"
        return task

    def _roll_back(self, item: ProposeItem, cached: CachedSequence) -> tuple[int, ...]:
        """Keep what is cached of the committed tokens, and return the rest of them."""
        base, total = item.base_length, item.base_length + len(item.tokens)
        length = base
        while length < min(total, len(cached.ids)) and cached.ids[length] == item.tokens[length - base]:
            length += 1
        if item.depth > 0:  # the last committed token is computed again for its logits
            length = min(length, total - 1)
        pending = (*cached.ids[length:base], *item.tokens[max(length - base, 0) :])
        self.model.cache.truncate(cached, length)
        return pending

    def _catch_up(self, tasks: list[_Task]) -> tuple[list[_Task], Tensor | None]:
        """Compute pending tokens, the shortest first. Returns the tasks that can draft now and their logits, one row each."""
        budget = self._catch_up_tokens
        chunks: list[Chunk] = []
        drafting: list[_Task] = []
        in_use = {task.item.sequence_id for task in tasks}
        for task in sorted((task for task in tasks if task.reason is None), key=lambda task: task.cost):
            self._adopt(task)
            complete = task.cost <= budget
            chunk = task.pending if complete else task.pending[:budget]
            budget -= min(task.cost, budget)
            drafts = complete and task.item.depth > 0
            if not self._reserve(task, len(chunk) + (task.item.depth - 1 if drafts else 0), in_use):
                task.reason = "kv_full"
                continue
            if self._prefix_cache:
                self.model.cache.pool.announce(task.held.cached, chunk)
            if not complete:
                task.reason = "catching_up"
            if chunk:
                chunks.append(Chunk(task.held.cached, chunk, int(drafts)))
            if drafts:
                drafting.append(task)
        return drafting, self.model.forward(chunks) if chunks else None

    def _adopt(self, task: _Task) -> None:
        """Take from the prefix cache what it knows of the pending tokens; the first step of drafting needs the last one."""
        if self._prefix_cache:
            found = self.model.cache.pool.adopt(task.held.cached, task.pending, task.cost)
            task.pending = task.pending[found:]

    def _reserve(self, task: _Task, num_tokens: int, in_use: set[str]) -> bool:
        """Make room, at the cost of sequences that this call is not about."""
        while True:
            try:
                self.model.cache.reserve(task.held.cached, num_tokens)
            except OutOfBlocks:
                victim = next((sequence_id for sequence_id in self._sequences if sequence_id not in in_use), None)
                if victim is None:
                    return False
                self._release(victim)
            else:
                return True

    def _draw(self, tasks: list[_Task], logits: Tensor) -> list[_Task]:
        """Draft one token per task. Returns the tasks that go on."""
        sequences = [
            SampledSequence(context.params, context.prompt_length, task.held.cached.ids, num_drawn=len(task.tokens))
            for task, context in ((task, task.held.context) for task in tasks)
        ]
        drawn = propose_tokens(logits, sequences, self._info.eos_token_ids, self._top_n)
        return [task for task, result in zip(tasks, drawn, strict=True) if self._take(task, *result)]

    def _take(self, task: _Task, token: int, probs: SparseProbs | None, finite: bool) -> bool:
        """Add a drafted token. Returns whether another may follow: not after the end of the text, which ends the draft too."""
        if not finite:
            task.reason = None if task.tokens else "bad_logits"
            return False
        task.tokens.append(token)
        if probs is not None:
            task.probs.append(probs)
        params = task.held.context.params
        ends = token in params.stop_token_ids or (token in self._info.eos_token_ids and not params.ignore_eos)
        return not ends and len(task.tokens) < task.item.depth and len(task.held.cached.ids) < self.model.max_context
