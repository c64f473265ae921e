"""A tiny language model with real logits, as target and as draft."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.testing.scripted import Held, model_info
from engine.types import (
    ModelInfo,
    Outcome,
    Prepared,
    PrepareItem,
    PrepareReply,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    SparseProbs,
    TokenLogprob,
    Verdict,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
)

if TYPE_CHECKING:
    from torch import Tensor

    from engine.sampling import Decision


class TableModel:
    """A language model over V tokens whose logits depend on the last token: row t of ``table`` (float32 [V, V]).

    Serves as target and as draft, through the real sampling and acceptance code, so that whole rounds can be compared with
    exact probabilities. As a draft that must report q it draws from its ``num_probs`` likeliest tokens, None = all.
    """

    def __init__(self, table: "Tensor", eos_token_ids: tuple[int, ...] = (), num_probs: int | None = None, **changes: object):
        self.table = table
        self._num_probs = num_probs or table.shape[1]
        self._info = model_info(name="table", vocab_size=table.shape[1], eos_token_ids=eos_token_ids, **changes)
        self._held: dict[str, Held] = {}

    extends = True
    """As `DraftModel.extends`."""

    @property
    def name(self) -> str:
        """As `DraftSource.name`."""
        return "table"

    @property
    def info(self) -> ModelInfo:
        """As `TargetModel.info`."""
        return self._info

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """As `TargetModel.verify`."""
        from engine.sampling import SampledSequence, decide

        verdicts: list[Verdict] = []
        sampled: list[tuple[int, Held, VerifyItem, SampledSequence]] = []
        for sequence_id in request.release:
            self._held.pop(sequence_id, None)
        for item in request.items:
            held = self._open(item)
            scores = self._score(held, item) if held is not None and item.scored else None
            verdicts.append(Verdict(sequence_id=item.sequence_id, need_context=held is None, prompt_logprobs=scores))
            if held is not None and held.context is not None and item.sample:
                sequence = SampledSequence(
                    held.context.params, held.context.prompt_length, [*held.ids, *item.draft], item.draft, item.draft_probs
                )
                sampled.append((len(verdicts) - 1, held, item, sequence))
        if sampled:
            rows = [row for *_, s in sampled for row in s.ids[len(s.ids) - s.num_rows :]]
            decisions = decide(self.table[rows], [s for *_, s in sampled], self._info.eos_token_ids)
            for (index, held, item, _), decision in zip(sampled, decisions, strict=True):
                held.ids += item.draft[: decision.accepted]
                verdicts[index] = _as_verdict(item, decision, verdicts[index].prompt_logprobs)
        return VerifyReply(round_id=request.round_id, verdicts=tuple(verdicts))

    def _score(self, held: Held, item: VerifyItem) -> tuple[TokenLogprob, ...]:
        from engine.sampling import token_logprobs

        first = item.base_length + item.first_scored
        num_top = (held.context.params.prompt_logprobs if held.context is not None else None) or 0
        return token_logprobs(self.table[held.ids[first : first + len(item.scored)]].float(), list(item.scored), num_top)

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`; all items advance together, one token a step."""
        for sequence_id in request.release:
            self._held.pop(sequence_id, None)
        drafting = [_Drafting(item, self._open(item)) for item in request.items]
        self._draw_all(drafting)
        return ProposeReply(round_id=request.round_id, proposals=tuple(draft.proposal() for draft in drafting), num_steps=1)

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        """As `OverlappedSource.prepare`; the forks of all items advance together."""
        for sequence_id in request.release:
            self._held.pop(sequence_id, None)
        opened = [(item, self._open(item)) for item in request.items]
        forks = self._forks([(item, held) for item, held in opened if held is not None and item.fan_out])
        self._draw_all([fork.drafting for own in forks.values() for fork in own])
        prepared = tuple(
            _no_context(item) if held is None else _as_prepared(item, forks.get(item.sequence_id, [])) for item, held in opened
        )
        return PrepareReply(round_id=request.round_id, prepared=prepared, num_steps=1)

    def _forks(self, opened: list[tuple[PrepareItem, Held]]) -> "dict[str, list[_Fork]]":
        """For every sequence a fork per guess at the outcome of verifying its item's draft."""
        from engine.sampling import SampledSequence, likeliest_next

        if not opened:
            return {}
        sequences = [
            SampledSequence(held.context.params, held.context.prompt_length, [*held.ids, *item.draft], item.draft)
            for item, held in opened
            if held.context is not None
        ]
        rows = self.table[[token for s in sequences for token in s.ids[len(s.ids) - s.num_rows :]]]
        count = 1 + max(max(item.fan_out) for item, _ in opened)  # one of them may be the draft's own token
        ranked = iter(likeliest_next(rows, sequences, self._info.eos_token_ids, count))
        return {item.sequence_id: _guessed(item, held, [next(ranked) for _ in item.fan_out]) for item, held in opened}

    def _draw_all(self, drafting: "list[_Drafting]") -> None:
        for step in range(max((draft.item.depth for draft in drafting), default=0)):
            self._draw([draft for draft in drafting if draft.held is not None and draft.item.depth > step])

    def _draw(self, drafting: "list[_Drafting]") -> None:
        from engine.sampling import SampledSequence, propose_tokens

        held = [draft.held for draft in drafting if draft.held is not None]
        sequences = [
            SampledSequence(h.context.params, h.context.prompt_length, h.ids, num_drawn=draft.num_ahead + len(draft.tokens))
            for draft, h in zip(drafting, held, strict=True)
            if h.context is not None
        ]
        rows = self.table[[h.ids[-1] for h in held]]
        drawn = propose_tokens(rows, sequences, self._info.eos_token_ids, self._num_probs)
        for draft, one, (token, q, _) in zip(drafting, held, drawn, strict=True):
            one.ids.append(token)
            draft.tokens.append(token)
            draft.probs += [q] if q is not None else []

    def _open(self, item: VerifyItem | ProposeItem | PrepareItem) -> Held | None:
        held = self._held.get(item.sequence_id)
        if item.context is not None and item.base_length == 0:
            held = self._held[item.sequence_id] = Held(context=item.context)
        if held is None or len(held.ids) < item.base_length:
            return None
        held.ids[item.base_length :] = item.tokens
        if isinstance(item, ProposeItem):
            held.ids += item.ahead
        return held


@dataclass(slots=True)
class _Drafting:
    item: ProposeItem | PrepareItem
    held: Held | None
    tokens: list[int] = field(default_factory=list)
    probs: list[SparseProbs] = field(default_factory=list)

    @property
    def num_ahead(self) -> int:
        return len(self.item.ahead) if isinstance(self.item, ProposeItem) else 0

    def proposal(self) -> Proposal:
        """What was drawn. Like a KV cache, the sequence keeps all of it but the last token, which was never fed back."""
        if self.held is None:
            return Proposal(sequence_id=self.item.sequence_id, reason="need_context")
        if self.tokens:
            self.held.ids.pop()
        return Proposal(
            sequence_id=self.item.sequence_id,
            tokens=tuple(self.tokens),
            probs=tuple(self.probs) if self.probs else None,
            known_length=self.item.base_length + len(self.item.tokens),
        )


@dataclass(slots=True)
class _Fork:
    """A sequence as it will be after ``accepted`` draft tokens and ``token``, and its draft from there."""

    accepted: int
    token: int
    drafting: _Drafting


def _guessed(item: PrepareItem, held: Held, ranked: list[list[int]]) -> list[_Fork]:
    """The forks after the likeliest tokens but the draft's own; ``ranked``: per number of accepted tokens, the best first."""
    forks: list[_Fork] = []
    for accepted, (tokens, count) in enumerate(zip(ranked, item.fan_out, strict=True)):
        others = [token for token in tokens if token not in item.draft[accepted : accepted + 1]]
        ids = [*held.ids, *item.draft[:accepted]]
        forks += [_Fork(accepted, token, _Drafting(item, Held([*ids, token], held.context))) for token in others[:count]]
    return forks


def _no_context(item: PrepareItem) -> Prepared:
    return Prepared(sequence_id=item.sequence_id, reason="need_context")


def _as_prepared(item: PrepareItem, forks: list[_Fork]) -> Prepared:
    outcomes = tuple(
        Outcome(
            accepted=fork.accepted,
            token=fork.token,
            tokens=tuple(fork.drafting.tokens),
            probs=tuple(fork.drafting.probs) or None,
        )
        for fork in forks
    )
    return Prepared(sequence_id=item.sequence_id, outcomes=outcomes, known_length=item.base_length + len(item.tokens))


def _as_verdict(item: VerifyItem, decision: "Decision", scores: tuple[TokenLogprob, ...] | None) -> Verdict:
    if decision.error is not None:
        return Verdict(sequence_id=item.sequence_id, error=decision.error)
    return Verdict(
        sequence_id=item.sequence_id,
        accepted=decision.accepted,
        tokens=(*item.draft[: decision.accepted], decision.token),
        logprobs=decision.logprobs,
        prompt_logprobs=scores,
    )
