"""Stand-ins that are shipped: deterministic models over a few tokens, scripted drafts, a clock that is moved by hand.

`ScriptedTarget` needs no torch and knows only greedy; `TableModel` is a real (tiny) language model with logits that goes
through the same sampling and acceptance code as a real one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.types import (
    ModelInfo,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    SequenceContext,
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

NextToken = Callable[[Sequence[int]], int]


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self, now_s: float = 0.0):
        self.now_s = now_s

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move on (or back, to imitate a clock that jumps)."""
        self.now_s += seconds


def model_info(**changes: object) -> ModelInfo:
    """A small model's description; override what a test is about."""
    fields: dict[str, object] = {
        "name": "scripted",
        "vocab_size": 100,
        "max_context": 512,
        "kv_capacity_tokens": 4096,
        "kv_block_size": 16,
        "eos_token_ids": (0,),
        "fingerprint": "scripted",
        "device": "cpu",
        "dtype": "float32",
    }
    return ModelInfo(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass(slots=True)
class _Held:
    ids: list[int] = field(default_factory=list)
    context: SequenceContext | None = None


class ScriptedTarget:
    """A target whose next token is a function of the ids so far. Checks the caller's bookkeeping as a real KV cache would."""

    def __init__(self, next_token: NextToken, info: ModelInfo | None = None):
        self.next_token = next_token
        self._info = info or model_info()
        self.sequences: dict[str, _Held] = {}
        self.requests: list[VerifyRequest] = []
        self.failing: dict[str, str] = {}
        """Sequence id -> error to answer with."""

    @property
    def info(self) -> ModelInfo:
        """As `TargetModel.info`."""
        return self._info

    def lose_everything(self) -> None:
        """Forget all sequences, as after a restart."""
        self.sequences.clear()

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """As `TargetModel.verify`."""
        self.requests.append(request)
        for sequence_id in request.release:
            self.sequences.pop(sequence_id, None)
        verdicts = tuple(self._verdict(item) for item in request.items)
        self._check_capacity()
        return VerifyReply(round_id=request.round_id, verdicts=verdicts, step_time_s=0.01)

    def _verdict(self, item: VerifyItem) -> Verdict:
        if item.sequence_id in self.failing:
            return Verdict(sequence_id=item.sequence_id, error=self.failing[item.sequence_id])
        held = self.sequences.get(item.sequence_id)
        if item.context is not None and item.base_length == 0:
            held = self.sequences[item.sequence_id] = _Held(context=item.context)
        if held is None or len(held.ids) < item.base_length:
            return Verdict(sequence_id=item.sequence_id, need_context=True)
        held.ids[item.base_length :] = item.tokens
        scores = self._score(held.ids, item) if item.scored else None
        if not item.sample:
            return Verdict(sequence_id=item.sequence_id, prompt_logprobs=scores)
        return self._accept(held, item, scores)

    def _score(self, ids: list[int], item: VerifyItem) -> tuple[TokenLogprob, ...]:
        first = item.base_length + item.first_scored + 1
        known = ids[first : first + len(item.scored)]
        if first + len(item.scored) > len(ids) + 1 or known != list(item.scored[: len(known)]):
            raise AssertionError(f"{item.sequence_id}: the scored tokens are not those that follow")
        return tuple(_scripted_logprob(token, first + i) for i, token in enumerate(item.scored))

    def _accept(self, held: _Held, item: VerifyItem, scores: tuple[TokenLogprob, ...] | None) -> Verdict:
        accepted = 0
        for token in item.draft:
            if self.next_token(held.ids) != token:
                break
            held.ids.append(token)
            accepted += 1
        tokens = (*item.draft[:accepted], self.next_token(held.ids))
        params = held.context.params if held.context else None
        first = len(held.ids) - accepted
        logprobs = None
        if params and params.logprobs is not None:
            logprobs = tuple(_scripted_logprob(token, first + i) for i, token in enumerate(tokens))
        return Verdict(
            sequence_id=item.sequence_id, accepted=accepted, tokens=tokens, logprobs=logprobs, prompt_logprobs=scores
        )

    def _check_capacity(self) -> None:
        size = self._info.kv_block_size
        used = sum(-(-len(held.ids) // size) for held in self.sequences.values())
        if used * size > self._info.kv_capacity_tokens:
            raise AssertionError(f"the scheduler overran the KV cache: {used} blocks of {size} in use")


def _scripted_logprob(token: int, position: int) -> TokenLogprob:
    """A value that tells where the token stands, so that one too many or too few shows."""
    return TokenLogprob(token, -float(position))


class ScriptedDraft:
    """A draft whose next token is a function of the ids so far; with the target's own function every token is accepted."""

    def __init__(self, next_token: NextToken, name: str = "scripted"):
        self.next_token = next_token
        self._name = name
        self.sequences: dict[str, list[int]] = {}
        self.requests: list[ProposeRequest] = []

    @property
    def name(self) -> str:
        """As `DraftSource.name`."""
        return self._name

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`."""
        self.requests.append(request)
        for sequence_id in request.release:
            self.sequences.pop(sequence_id, None)
        proposals = tuple(self._proposal(item) for item in request.items)
        return ProposeReply(round_id=request.round_id, proposals=proposals, step_time_s=0.001, num_steps=1)

    def _proposal(self, item: ProposeItem) -> Proposal:
        known = self.sequences.setdefault(item.sequence_id, [])
        if len(known) < item.base_length:
            return Proposal(sequence_id=item.sequence_id, reason="need_context")
        known[item.base_length :] = item.tokens
        committed = len(known)
        for _ in range(item.depth):
            known.append(self.next_token(known))
        tokens = tuple(known[committed:])
        del known[committed + max(item.depth - 1, 0) :]
        return Proposal(sequence_id=item.sequence_id, tokens=tokens, known_length=committed)


class TableModel:
    """A language model over V tokens whose logits depend on the last token: row t of ``table`` (float32 [V, V]).

    Serves as target and as draft, through the real sampling and acceptance code, so that whole rounds can be compared with
    exact probabilities. As a draft that must report q it draws from its ``num_probs`` likeliest tokens, None = all.
    """

    def __init__(self, table: "Tensor", eos_token_ids: tuple[int, ...] = (), num_probs: int | None = None, **changes: object):
        self.table = table
        self._num_probs = num_probs or table.shape[1]
        self._info = model_info(name="table", vocab_size=table.shape[1], eos_token_ids=eos_token_ids, **changes)
        self._held: dict[str, _Held] = {}

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
        sampled: list[tuple[int, _Held, VerifyItem, SampledSequence]] = []
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

    def _score(self, held: _Held, item: VerifyItem) -> tuple[TokenLogprob, ...]:
        from engine.sampling import token_logprobs

        first = item.base_length + item.first_scored
        num_top = (held.context.params.prompt_logprobs if held.context is not None else None) or 0
        return token_logprobs(self.table[held.ids[first : first + len(item.scored)]].float(), list(item.scored), num_top)

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`; all items advance together, one token a step."""
        for sequence_id in request.release:
            self._held.pop(sequence_id, None)
        drafting = [_Drafting(item, self._open(item)) for item in request.items]
        for step in range(max((draft.item.depth for draft in drafting), default=0)):
            self._draw([draft for draft in drafting if draft.held is not None and draft.item.depth > step])
        return ProposeReply(round_id=request.round_id, proposals=tuple(draft.proposal() for draft in drafting), num_steps=1)

    def _draw(self, drafting: "list[_Drafting]") -> None:
        from engine.sampling import SampledSequence, propose_tokens

        held = [draft.held for draft in drafting if draft.held is not None]
        sequences = [
            SampledSequence(h.context.params, h.context.prompt_length, h.ids, num_drawn=len(draft.tokens))
            for draft, h in zip(drafting, held, strict=True)
            if h.context is not None
        ]
        rows = self.table[[h.ids[-1] for h in held]]
        drawn = propose_tokens(rows, sequences, self._info.eos_token_ids, self._num_probs)
        for draft, one, (token, q, _) in zip(drafting, held, drawn, strict=True):
            one.ids.append(token)
            draft.tokens.append(token)
            draft.probs += [q] if q is not None else []

    def _open(self, item: "VerifyItem | ProposeItem") -> _Held | None:
        held = self._held.get(item.sequence_id)
        if item.context is not None and item.base_length == 0:
            held = self._held[item.sequence_id] = _Held(context=item.context)
        if held is None or len(held.ids) < item.base_length:
            return None
        held.ids[item.base_length :] = item.tokens
        return held


@dataclass(slots=True)
class _Drafting:
    item: ProposeItem
    held: _Held | None
    tokens: list[int] = field(default_factory=list)
    probs: list[SparseProbs] = field(default_factory=list)

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
