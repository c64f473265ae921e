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
        if not item.sample:
            return Verdict(sequence_id=item.sequence_id)
        return self._accept(held, item)

    def _accept(self, held: _Held, item: VerifyItem) -> Verdict:
        accepted = 0
        for token in item.draft:
            if self.next_token(held.ids) != token:
                break
            held.ids.append(token)
            accepted += 1
        tokens = (*item.draft[:accepted], self.next_token(held.ids))
        params = held.context.params if held.context else None
        logprobs = tuple(TokenLogprob(t, 0.0) for t in tokens) if params and params.logprobs is not None else None
        return Verdict(sequence_id=item.sequence_id, accepted=accepted, tokens=tokens, logprobs=logprobs)

    def _check_capacity(self) -> None:
        size = self._info.kv_block_size
        used = sum(-(-len(held.ids) // size) for held in self.sequences.values())
        if used * size > self._info.kv_capacity_tokens:
            raise AssertionError(f"the scheduler overran the KV cache: {used} blocks of {size} in use")


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
    exact probabilities.
    """

    def __init__(self, table: "Tensor", eos_token_ids: tuple[int, ...] = (), **changes: object):
        self.table = table
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

        verdicts: list[Verdict | None] = []
        sampled: list[tuple[int, _Held, VerifyItem, SampledSequence]] = []
        for sequence_id in request.release:
            self._held.pop(sequence_id, None)
        for item in request.items:
            held = self._open(item)
            verdicts.append(Verdict(sequence_id=item.sequence_id, need_context=held is None))
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
                verdicts[index] = _as_verdict(item, decision.accepted, decision.token, decision.logprobs, decision.error)
        return VerifyReply(round_id=request.round_id, verdicts=tuple(v for v in verdicts if v is not None))

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
        sequences = [SampledSequence(h.context.params, h.context.prompt_length, h.ids) for h in held if h.context is not None]
        drawn = propose_tokens(self.table[[h.ids[-1] for h in held]], sequences, self._info.eos_token_ids)
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


def _as_verdict(
    item: VerifyItem, accepted: int, token: int, logprobs: "tuple[TokenLogprob, ...] | None", error: str | None
) -> Verdict:
    if error is not None:
        return Verdict(sequence_id=item.sequence_id, error=error)
    return Verdict(sequence_id=item.sequence_id, accepted=accepted, tokens=(*item.draft[:accepted], token), logprobs=logprobs)
