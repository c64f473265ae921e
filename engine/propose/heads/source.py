"""Drafts from a prediction head that lives with the target.

After each verify the target tells the source which tokens it holds and their hidden states. These wait until the next draft is
asked for: a target that nobody asks for drafts does nothing for the head but copy. The head keeps K and V of its own, one row
per token whose hidden state and successor are known; rows of drafted tokens are computed from the head's own hidden states and
are dropped when the draft is done, since the target's are better.
"""

import logging
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from engine.propose.branches import Branch, draw
from engine.sampling import DRAFT_PROBS
from engine.transfer import on_device
from engine.types import ModelInfo, Proposal, ProposeItem, ProposeReply, ProposeRequest, SamplingParams, SequenceContext
from engine.verify.attention import AttentionState, Chunk, Mask, cpu
from engine.verify.blocks import OutOfBlocks
from engine.verify.kv_cache import CachedSequence, KVCache
from engine.verify.ragged import STEP_CONTEXT, attention_for, median_step_times

logger = logging.getLogger(__name__)

MOST_PENDING = 1024
"""Tokens of one sequence whose hidden states wait for the head. Where more go by without a draft, the oldest are dropped, and
the head begins anew with those that are left: a draft may be worse then, never wrong.
"""
CATCH_UP_TOKENS = 2048
"""Most committed tokens that one call computes before it drafts; requests beyond it get "catching_up" and go on later."""


class Head(Protocol):
    """What a head computes, over packed rows of many sequences."""

    @property
    def name(self) -> str:
        """For logs."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads (`engine.verify.taps`)."""

    @property
    def device(self) -> torch.device:
        """Where it computes; the target's."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its hidden states."""

    @property
    def fused_size(self) -> int:
        """H': width of the hidden states that it computes with."""

    def fuse(self, hidden: Tensor) -> Tensor:
        """The target's hidden states [T, H * number of layers] -> what `run` takes for them [T, H']."""

    def run(self, hidden: Tensor, state: AttentionState) -> Tensor:
        """One step: hidden [T, H'] of the tokens *before* ``state.batch.tokens`` [T] -> hidden [T, H'] of these."""

    def logits(self, hidden: Tensor) -> Tensor:
        """What `run` gave [R, H'] -> logits of the token after [R, V], -inf where it cannot be drafted."""


@dataclass(slots=True)
class _Followed:
    """One sequence. The rows in ``cached`` and then those of ``pending`` are of the tokens from ``start`` on."""

    context: SequenceContext
    ids: list[int] = field(default_factory=list)
    """Committed tokens."""
    start: int = 0
    """The head knows nothing of the tokens before: the target found them in its prefix cache, or they were too many."""
    cached: CachedSequence = field(default_factory=CachedSequence)
    pending: list[Tensor] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return sum(len(rows) for rows in self.pending)

    @property
    def end(self) -> int:
        """Tokens whose hidden states were told."""
        return self.start + len(self.cached.ids) + self.num_pending


@dataclass(slots=True)
class _Draft(Branch):
    """A draft on its way; ``cached`` is the text alone, whose rows are those of the sequence."""

    sequence: _Followed = field(default_factory=lambda: _Followed(SequenceContext(params=SamplingParams(), prompt_length=0)))


class HeadSource:
    """A `HeadsBeside` over one head. ``target``: the model that it drafts for; its sequences are those of that one's verifies.

    An empty answer has a reason: need_context (the sequence was not told of), catching_up (more is committed than the target's
    last verify left hidden states of, or too much is waiting), out_of_context, kv_full, bad_logits, malformed.
    """

    name = "heads"

    def __init__(self, head: Head, target: ModelInfo, *, top_n: int = DRAFT_PROBS, kv_capacity_tokens: int | None = None):
        self.head = head
        self._top_n = top_n
        self._eos_token_ids, self._vocab_size = target.eos_token_ids, target.vocab_size
        self._max_context = target.max_context
        self._prepare_batch, self._block_size = attention_for(head.device)
        tokens = kv_capacity_tokens or target.kv_capacity_tokens
        self._cache = KVCache(max(tokens // self._block_size, 1), self._block_size)
        self._masks: dict[int, Mask] = {}
        self._followed: dict[str, _Followed] = {}  # the longest unused first
        step_times = median_step_times(self._time_step, self._cache.pool.num_blocks * self._block_size - STEP_CONTEXT)
        self._info = msgspec.structs.replace(target, name=head.name, step_times=step_times)

    @property
    def info(self) -> ModelInfo:
        """The target's, with the head's own step times."""
        return self._info

    # --- what the target tells ----------------------------------------------------------------------------------------------

    def committed(self, sequence_id: str, context: SequenceContext, ids: Sequence[int], hidden: Tensor) -> None:
        """As `HeadsBeside.committed`."""
        sequence = self._followed.setdefault(sequence_id, _Followed(context))
        sequence.context = context
        first = len(ids) - len(hidden)
        self._cut(sequence, first)
        del sequence.ids[first:]
        sequence.ids += ids[len(sequence.ids) :]
        sequence.pending.append(hidden.to(self.head.dtype, copy=True))
        if sequence.num_pending > MOST_PENDING:
            rows = torch.cat(sequence.pending)[-MOST_PENDING:].clone()
            self._begin(sequence, len(ids) - len(rows))
            sequence.pending = [rows]

    def forget(self, sequence_id: str) -> None:
        """As `HeadsBeside.forget`."""
        sequence = self._followed.pop(sequence_id, None)
        if sequence is not None:
            self._cache.truncate(sequence.cached, 0)

    def _cut(self, sequence: _Followed, end: int) -> None:
        """Keep the rows before token ``end``; begin anew there if that would leave a gap."""
        if not sequence.start <= end <= sequence.end:
            self._begin(sequence, end)
            return
        num_cached = len(sequence.cached.ids)
        num_kept = end - sequence.start
        if num_kept < num_cached:
            self._cache.truncate(sequence.cached, num_kept)
        if sequence.pending and num_kept < num_cached + sequence.num_pending:
            rows = torch.cat(sequence.pending)[: max(num_kept - num_cached, 0)]
            sequence.pending = [rows] if len(rows) else []

    def _begin(self, sequence: _Followed, start: int) -> None:
        """Know nothing of the tokens before ``start``."""
        self._cache.truncate(sequence.cached, 0)
        sequence.start, sequence.pending = start, []

    # --- drafting -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`."""
        started = time.perf_counter()
        for sequence_id in request.release:
            self.forget(sequence_id)
        proposals: list[Proposal] = []
        drafts: dict[str, _Draft] = {}
        budget = CATCH_UP_TOKENS
        for item in request.items:
            opened = self._open(item, budget)
            if isinstance(opened, Proposal):
                proposals.append(opened)
                continue
            budget -= opened.sequence.num_pending
            drafts[item.sequence_id] = opened
        try:
            num_steps = self._draft(drafts, proposals)
        except BaseException:
            for sequence_id in drafts:
                self.forget(sequence_id)
            raise
        return ProposeReply(
            round_id=request.round_id,
            proposals=tuple(proposals),
            step_time_s=time.perf_counter() - started,
            num_steps=num_steps,
        )

    def _open(self, item: ProposeItem, budget: int) -> _Draft | Proposal:
        """A draft to grow, or the answer that there is none."""
        total = item.base_length + len(item.tokens)
        sequence = self._followed.pop(item.sequence_id, None)
        if sequence is None:
            return _nothing(item, "need_context", 0)
        self._followed[item.sequence_id] = sequence  # now the most recently used
        if not 0 <= item.base_length <= len(sequence.ids):
            return _nothing(item, "need_context", 0)
        if total < 2 or item.depth < 0 or not all(0 <= token < self._vocab_size for token in item.tokens):
            return _nothing(item, "malformed", 0)
        sequence.ids[item.base_length :] = item.tokens
        sequence.context = item.context or sequence.context
        problem = self._problem(sequence, total, budget)
        if problem is not None or item.depth == 0:
            return _nothing(item, problem, total)
        return _Draft(sequence.context, CachedSequence(sequence.ids), item.depth, sequence=sequence)

    def _problem(self, sequence: _Followed, total: int, budget: int) -> str | None:
        """Why nothing can be drafted after ``total`` committed tokens, all but the last of which the target should hold."""
        if total >= self._max_context:
            return "out_of_context"
        if not sequence.start < total - 1 <= sequence.end:
            return "catching_up"
        self._cut(sequence, total - 1)
        # Without a row to compute there are no logits: a draft was asked for twice, and the hidden state is used up.
        return None if 0 < sequence.num_pending <= budget else "catching_up"

    def _draft(self, drafts: dict[str, _Draft], proposals: list[Proposal]) -> int:
        """Catch up and draft, one step per depth. Returns the number of steps."""
        lengths = {sequence_id: len(draft.cached.ids) for sequence_id, draft in drafts.items()}
        ready = {sequence_id: draft for sequence_id, draft in drafts.items() if self._reserve(draft, drafts)}
        num_steps = self._grow(list(ready.values())) if ready else 0
        for sequence_id, draft in drafts.items():
            length, sequence = lengths[sequence_id], draft.sequence
            reason = None if draft.tokens else "bad_logits" if sequence_id in ready else "kv_full"
            if sequence_id in ready:
                del sequence.ids[length:]
                self._cache.truncate(sequence.cached, length - 1 - sequence.start)
            proposals.append(
                Proposal(
                    sequence_id=sequence_id,
                    tokens=tuple(draft.tokens),
                    probs=tuple(draft.probs) or None,
                    known_length=length,
                    reason=reason,
                )
            )
        return num_steps

    def _grow(self, drafts: list[_Draft]) -> int:
        """Draw the tokens of all drafts; their texts grow with them. Returns the number of steps."""
        chunks = [_catch_up_chunk(draft.sequence) for draft in drafts]
        pending = [torch.cat(draft.sequence.pending) for draft in drafts]
        for draft in drafts:
            draft.sequence.pending = []
        hidden = self.head.fuse(torch.cat([pending[index] for index in cpu.plan_order(chunks)]))
        num_steps = 0
        while drafts:
            last = self._step(chunks, hidden)
            num_steps += 1
            logits = self.head.logits(last)[:, : self._vocab_size]
            going_on = {id(one) for one in draw(drafts, logits, self._eos_token_ids, self._top_n, self._max_context)}
            rows = [row for row, draft in enumerate(drafts) if id(draft) in going_on]
            drafts = [drafts[row] for row in rows]
            chunks = [Chunk(draft.sequence.cached, [draft.last], 1) for draft in drafts]
            for draft in drafts:
                draft.cached.ids.append(draft.last)
            if drafts:
                hidden = last[on_device([rows[index] for index in cpu.plan_order(chunks)], torch.int64, last.device)]
        return num_steps

    def _step(self, chunks: Sequence[Chunk], hidden: Tensor) -> Tensor:
        """Run the head over packed rows [T, H] and give the last row of every chunk, in their order [N, H]."""
        batch, backend = self._prepare_batch(chunks, self._block_size, self.head.device, "fast")
        out = self.head.run(hidden, AttentionState(batch, backend, self._cache, self._max_context, self._masks))
        for chunk in chunks:
            chunk.sequence.ids.extend(chunk.ids)
        return out[batch.logit_rows]

    def _reserve(self, draft: _Draft, in_use: Container[str]) -> bool:
        """Make room, at the cost of sequences that the call is not about; False where that is not enough."""
        while True:
            try:
                self._cache.reserve(draft.sequence.cached, draft.sequence.num_pending + draft.depth - 1)
                return True
            except OutOfBlocks:
                holders = (one for name, one in self._followed.items() if name not in in_use and one.cached.blocks)
                victim = next(holders, None)
                if victim is None:
                    return False
                self._begin(victim, victim.end)

    @torch.inference_mode()
    def _time_step(self, size: int) -> float:
        """Seconds of one step over ``size`` tokens of a sequence, logits of all of them included."""
        sequence = CachedSequence([0] * STEP_CONTEXT)
        self._cache.reserve(sequence, size)
        chunk = Chunk(sequence, [0] * size, size)
        hidden = torch.zeros(size, self.head.fused_size, dtype=self.head.dtype, device=self.head.device)
        started = time.perf_counter()
        float(self.head.logits(self._step([chunk], hidden))[0, 0])  # waits for the device
        elapsed = time.perf_counter() - started
        self._cache.truncate(sequence, 0)
        return elapsed


def _catch_up_chunk(sequence: _Followed) -> Chunk:
    """The rows that wait: each is of a token, and has the id of the one after it."""
    first = sequence.start + len(sequence.cached.ids)
    return Chunk(sequence.cached, sequence.ids[first + 1 :], 1)


def _nothing(item: ProposeItem, reason: str | None, known_length: int) -> Proposal:
    return Proposal(sequence_id=item.sequence_id, known_length=known_length, reason=reason)
