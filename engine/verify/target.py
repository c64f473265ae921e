"""The target: one ragged forward per round, and a verdict on every draft."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.models import LoadedModel
from engine.sampling import Decision, SampledSequence, decide
from engine.types import ModelInfo, SequenceContext, Verdict, VerifyItem, VerifyReply, VerifyRequest
from engine.verify.attention import Chunk
from engine.verify.blocks import OutOfBlocks
from engine.verify.kv_cache import CachedSequence
from engine.verify.ragged import RaggedModel

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """What is known of one sequence."""

    context: SequenceContext
    cached: CachedSequence = field(default_factory=CachedSequence)


class Target:
    """A `TargetModel` over a loaded model, which it takes over.

    Raises `ModelError` when the architecture cannot be run packed, and when there is no memory for a KV cache.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        kv_capacity_tokens: int | None = None,
        max_context: int | None = None,
    ):
        self.model = RaggedModel(loaded, kv_capacity_tokens=kv_capacity_tokens, max_context=max_context)
        self.row_invariance = self.model.probe_row_invariance()
        """Whether text is the same to the last bit at any depth, batch and chunking."""
        logger.info("%s: %s", loaded.name, self.row_invariance.verdict)
        self._info = self.model.info
        self._sequences: dict[str, _Held] = {}

    @property
    def info(self) -> ModelInfo:
        """Sizes, identity and step times, fixed after loading."""
        return self._info

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
        verdicts = [self._open(item) for item in request.items]  # all roll back before any grows
        verdicts = [verdict or self._reserve(item) for item, verdict in zip(request.items, verdicts, strict=True)]
        decided = iter(self._step([item for item, verdict in zip(request.items, verdicts, strict=True) if verdict is None]))
        answers = tuple(verdict or next(decided) for verdict in verdicts)
        return VerifyReply(round_id=request.round_id, verdicts=answers, step_time_s=time.perf_counter() - started)

    def _release(self, sequence_id: str) -> None:
        held = self._sequences.pop(sequence_id, None)
        if held is not None:
            self.model.cache.truncate(held.cached, 0)

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

    def _reserve(self, item: VerifyItem) -> Verdict | None:
        try:
            self.model.cache.reserve(self._sequences[item.sequence_id].cached, len(item.tokens) + len(item.draft))
        except OutOfBlocks:
            return Verdict(sequence_id=item.sequence_id, error="kv_full")
        return None

    def _step(self, items: Sequence[VerifyItem]) -> list[Verdict]:
        """One forward over items whose blocks are reserved."""
        if not items:
            return []
        held = [self._sequences[item.sequence_id] for item in items]
        chunks = [
            Chunk(state.cached, item.tokens + item.draft, len(item.draft) + 1 if item.sample else 0)
            for item, state in zip(items, held, strict=True)
        ]
        logits = self.model.forward(chunks)
        sampled = [
            SampledSequence(state.context.params, state.context.prompt_length, state.cached.ids, item.draft, item.draft_probs)
            for item, state in zip(items, held, strict=True)
            if item.sample
        ]
        decisions = iter(decide(logits, sampled, self._info.eos_token_ids) if sampled else ())
        return [
            self._settle(item, state.cached, next(decisions)) if item.sample else Verdict(sequence_id=item.sequence_id)
            for item, state in zip(items, held, strict=True)
        ]

    def _settle(self, item: VerifyItem, cached: CachedSequence, decision: Decision) -> Verdict:
        """Forget the rejected part of the draft, or everything new when the logits were useless."""
        if decision.error is not None:
            self.model.cache.truncate(cached, item.base_length)
            return Verdict(sequence_id=item.sequence_id, error=decision.error)
        self.model.cache.truncate(cached, item.base_length + len(item.tokens) + decision.accepted)
        return Verdict(
            sequence_id=item.sequence_id,
            accepted=decision.accepted,
            tokens=(*item.draft[: decision.accepted], decision.token),
            logprobs=decision.logprobs,
        )
