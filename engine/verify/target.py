"""The target: one ragged forward per round, and a verdict on every draft."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from engine.models import LoadedModel
from engine.sampling import Decision, SampledSequence, decide, token_logprobs
from engine.transfer import on_device
from engine.types import ModelInfo, SequenceContext, TokenLogprob, Verdict, VerifyItem, VerifyReply, VerifyRequest
from engine.verify.attention import Chunk, Kernels
from engine.verify.blocks import OutOfBlocks
from engine.verify.kv_cache import CachedSequence
from engine.verify.load import load_engine_model
from engine.verify.ragged import NEAR_TIE, Weights
from engine.verify.taps import HeadsBeside

logger = logging.getLogger(__name__)
Scores = tuple[TokenLogprob, ...]


@dataclass(slots=True)
class _Held:
    """What is known of one sequence."""

    context: SequenceContext
    cached: CachedSequence = field(default_factory=CachedSequence)


@dataclass(slots=True)
class _Part:
    """An item whose sequence has room for it."""

    item: VerifyItem
    held: _Held
    num_cached: int
    """Tokens of the item that were found in the prefix cache."""
    pending: tuple[int, ...]
    """The rest of its tokens and its draft: what a forward must compute."""


class Target:
    """A `TargetModel` over a loaded model, which it takes over.

    With ``weights`` "int8" its quantised copy is the target, and the promise is about that one.

    With ``prefix_cache`` tokens are not computed whose K and V are known from another sequence with the same beginning, or from
    this one before it was released: whole blocks only, and not on the stateful path, which has none. The text is the same to
    the last bit where `row_invariance` holds.

    With ``hidden_layers`` its forwards leave hidden states (`engine.verify.taps`), of which `heads` are told.

    Raises `ModelError` when no path reproduces the architecture's plain forward, and when there is no memory for a KV cache.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        weights: Weights = "exact",
        numerics: Kernels = "invariant",
        kernels: Literal["auto", "torch"] = "auto",
        kv_capacity_tokens: int | None = None,
        max_context: int | None = None,
        prefix_cache: bool = True,
        hidden_layers: Sequence[int] = (),
    ):
        self.model = load_engine_model(
            loaded,
            weights=weights,
            numerics=numerics,
            kernels=kernels,
            kv_capacity_tokens=kv_capacity_tokens,
            max_context=max_context,
            hidden_layers=hidden_layers,
        )
        self.heads: HeadsBeside | None = None
        """Prediction heads that draft beside this target."""
        self.row_invariance = self.model.row_invariance
        """Whether text is the same to the last bit at any depth, batch and chunking."""
        level = logging.INFO if self.row_invariance.holds else logging.WARNING
        logger.log(level, "%s: numerics %s, %s", loaded.name, self.model.numerics, self.row_invariance.verdict)
        self._info = self.model.info
        self._prefix_cache = prefix_cache and self.model.shares_prefixes
        self._sequences: dict[str, _Held] = {}

    @property
    def info(self) -> ModelInfo:
        """Sizes, identity and step times, fixed after loading."""
        return self._info

    @property
    def near_tie_tolerance(self) -> float:
        """Margin between the two largest processed logits below which another batch may choose the other; 0 = never."""
        return 0.0 if self.row_invariance.holds else NEAR_TIE[self.model.loaded.dtype]

    def listen(self, heads: HeadsBeside) -> None:
        """From now on ``heads`` are told what is committed, and its hidden states."""
        self.heads = heads

    @torch.inference_mode()
    def verify(self, request: VerifyRequest) -> VerifyReply:
        """As `TargetModel.verify`.

        Errors of one item, which leave the others alone: no tokens, ids without an embedding, a draft on a chunk that is not
        sampled, more tokens than the context holds, logits that are not finite, and ``kv_full`` when the caller handed out more
        blocks than there are.
        """
        started = time.perf_counter()
        for sequence_id in request.release:
            self._release(sequence_id)
        try:
            parts, verdicts = self._play(request.items)
        except BaseException:
            self._undo(request.items)
            raise
        return VerifyReply(
            round_id=request.round_id,
            verdicts=verdicts,
            step_time_s=time.perf_counter() - started,
            cached_tokens=sum(
                part.num_cached
                for part, verdict in zip(parts, verdicts, strict=True)
                if isinstance(part, _Part) and verdict.error is None
            ),
        )

    def _play(self, items: Sequence[VerifyItem]) -> tuple[list[_Part | Verdict], tuple[Verdict, ...]]:
        """What became of each item before the forward, and its verdict."""
        opened = [self._open(item) for item in items]  # all roll back before any grows
        parts = [answer or self._admit(item) for item, answer in zip(items, opened, strict=True)]
        decided = iter(self._step([part for part in parts if isinstance(part, _Part) and part.pending]))
        return parts, tuple(self._verdict(part, decided) for part in parts)

    def _verdict(self, part: _Part | Verdict, decided: Iterator[Verdict]) -> Verdict:
        if isinstance(part, Verdict):
            return part
        return next(decided) if part.pending else Verdict(sequence_id=part.item.sequence_id)

    def _undo(self, items: Sequence[VerifyItem]) -> None:
        """The forward broke off: nobody may use what it was to write."""
        for item in items:
            held = self._sequences.get(item.sequence_id)
            if held is not None:
                self.model.cache.pool.forget(held.cached, item.base_length)
                self.model.cache.truncate(held.cached, item.base_length)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; sequences that are held stay. For checks and measurements that want to compute everything."""
        self.model.cache.pool.forget_everything()
        for held in self._sequences.values():
            held.cached.keys.clear()

    def _release(self, sequence_id: str) -> None:
        held = self._sequences.pop(sequence_id, None)
        if held is not None:
            self.model.cache.truncate(held.cached, 0)
        self._forget(sequence_id)

    def _forget(self, sequence_id: str) -> None:
        if self.heads is not None:
            self.heads.forget(sequence_id)

    def _open(self, item: VerifyItem) -> Verdict | None:
        """Roll the sequence back to what both sides agree on; a verdict when that, or the item itself, is impossible."""
        problem = self._problem(item)
        if problem is not None:
            return Verdict(sequence_id=item.sequence_id, error=problem)
        held = self._sequences.get(item.sequence_id)
        if held is None and item.context is not None:
            held = self._sequences[item.sequence_id] = _Held(item.context)
        if held is None or item.base_length > len(held.cached.ids):
            return Verdict(sequence_id=item.sequence_id, need_context=True)
        held.context = item.context or held.context
        if item.base_length == 0:
            self._forget(item.sequence_id)
        if item.base_length == 0 or item.base_length < len(held.cached.ids):
            self.model.cache.truncate(held.cached, item.base_length)
        return None

    def _problem(self, item: VerifyItem) -> str | None:
        if not item.tokens:
            return "no tokens to process"
        if item.draft and not item.sample:
            return "a chunk that is not sampled has no draft"
        ids = item.tokens + item.draft
        if min(ids) < 0 or max(ids) >= self.model.num_ids:
            return f"token ids lie between 0 and {self.model.num_ids - 1}, got {min(ids) if min(ids) < 0 else max(ids)}"
        length = item.base_length + len(ids)
        if length > self.model.max_context:
            return f"{length} tokens, but the context holds {self.model.max_context}"
        return None

    def _admit(self, item: VerifyItem) -> _Part | Verdict:
        """Take from the prefix cache what is known of the tokens, and room for the others."""
        held, cache = self._sequences[item.sequence_id], self.model.cache
        fills_blocks = self._prefix_cache and cache.pool.fills_blocks(held.cached, len(item.tokens))
        num_cached = self._adopt(item, held.cached) if fills_blocks else 0
        tokens = item.tokens[num_cached:]
        try:
            cache.reserve(held.cached, len(tokens) + len(item.draft))
        except OutOfBlocks:
            return Verdict(sequence_id=item.sequence_id, error="kv_full")
        if fills_blocks:
            cache.pool.announce(held.cached, tokens)
        return _Part(item, held, num_cached, tokens + item.draft)

    def _adopt(self, item: VerifyItem, cached: CachedSequence) -> int:
        """Tokens found in the prefix cache; not the last one if its logits are wanted, and none if all of theirs are."""
        if item.scored:
            return 0
        return self.model.cache.pool.adopt(cached, item.tokens, len(item.tokens) - int(item.sample))

    def _step(self, parts: Sequence[_Part]) -> list[Verdict]:
        """One forward over items whose blocks are reserved."""
        if not parts:
            return []
        items, held = [part.item for part in parts], [part.held for part in parts]
        logits = self.model.forward([Chunk(part.held.cached, part.pending, _num_logits(part.item)) for part in parts])
        hidden = self.model.hidden
        scores: Sequence[Scores | None] = [None] * len(items)
        if any(item.scored for item in items):
            scores, logits = _score(items, held, logits)
        sampled = [
            SampledSequence(state.context.params, state.context.prompt_length, state.cached.ids, item.draft, item.draft_probs)
            for item, state in zip(items, held, strict=True)
            if item.sample
        ]
        decisions = iter(decide(logits, sampled, self._info.eos_token_ids) if sampled else ())
        verdicts = [
            self._settle(item, state.cached, next(decisions) if item.sample else None, own)
            for item, state, own in zip(items, held, scores, strict=True)
        ]
        if self.heads is not None:
            for part, verdict, rows in zip(parts, verdicts, hidden, strict=True):
                self._tell(self.heads, part, verdict, rows)
        return verdicts

    @staticmethod
    def _tell(heads: HeadsBeside, part: _Part, verdict: Verdict, hidden: Tensor) -> None:
        """Pass on the hidden states [n, ...] of what a forward over ``part.pending`` committed."""
        if verdict.error is not None:
            heads.forget(part.item.sequence_id)
            return
        num_refused = len(part.item.draft) - verdict.accepted
        heads.committed(part.item.sequence_id, part.held.context, part.held.cached.ids, hidden[: len(hidden) - num_refused])

    def _settle(self, item: VerifyItem, cached: CachedSequence, decision: Decision | None, scores: Scores | None) -> Verdict:
        """Forget the rejected part of the draft, or everything new when the logits were useless.

        What stays is committed, so its full blocks go to the prefix cache.
        """
        pool = self.model.cache.pool
        if decision is not None and decision.error is not None:
            pool.forget(cached)
            pool.truncate(cached, item.base_length)
            return Verdict(sequence_id=item.sequence_id, error=decision.error)
        if decision is not None and decision.accepted < len(item.draft):
            pool.truncate(cached, item.base_length + len(item.tokens) + decision.accepted)
        if scores and any(math.isnan(score.logprob) for score in scores):
            pool.forget(cached)
        elif self._prefix_cache:
            pool.register(cached, len(cached.ids))
        if decision is None:
            return Verdict(sequence_id=item.sequence_id, prompt_logprobs=scores)
        return Verdict(
            sequence_id=item.sequence_id,
            accepted=decision.accepted,
            tokens=(*item.draft[: decision.accepted], decision.token),
            logprobs=decision.logprobs,
            prompt_logprobs=scores,
        )


def _num_logits(item: VerifyItem) -> int:
    """Rows at the end of a chunk that are sampled or, where some are scored, all from the first of these on."""
    if item.scored:
        return len(item.tokens) - item.first_scored + len(item.draft)
    return len(item.draft) + 1 if item.sample else 0


def _score(items: Sequence[VerifyItem], held: Sequence[_Held], logits: Tensor) -> tuple[list[Scores | None], Tensor]:
    """Score the prompts' rows of logits [Σ `_num_logits`, V]; returns the scores per item, and the rows that are sampled."""
    scores: list[Scores | None] = []
    sampled: list[int] = []
    row = 0
    for item, state in zip(items, held, strict=True):
        num_top, end = state.context.params.prompt_logprobs or 0, row + _num_logits(item)
        rows = logits[row : row + len(item.scored)].float()
        scores.append(token_logprobs(rows, list(item.scored), num_top) if item.scored else None)
        sampled += range(end - len(item.draft) - 1, end) if item.sample else ()
        row = end
    return scores, logits[on_device(sampled, torch.int64, logits.device)]
