"""Target and draft whose next token is a function of the ids so far (greedy only, no torch), and a clock moved by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    SequenceContext,
    TokenLogprob,
    Verdict,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
)

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
class Held:
    """What a stand-in holds of one sequence."""

    ids: list[int] = field(default_factory=list)
    context: SequenceContext | None = None


class ScriptedTarget:
    """A target whose next token is a function of the ids so far. Checks the caller's bookkeeping as a real KV cache would."""

    def __init__(self, next_token: NextToken, info: ModelInfo | None = None):
        self.next_token = next_token
        self._info = info or model_info()
        self.sequences: dict[str, Held] = {}
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
            held = self.sequences[item.sequence_id] = Held(context=item.context)
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

    def _accept(self, held: Held, item: VerifyItem, scores: tuple[TokenLogprob, ...] | None) -> Verdict:
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
    """A draft whose next token is a function of the ids so far; with the target's own function every token is accepted.

    It guesses that function's value first and then the tokens after it, in a vocabulary of ``vocab_size``.
    """

    def __init__(self, next_token: NextToken, name: str = "scripted", vocab_size: int = 100):
        self.next_token = next_token
        self._name = name
        self._vocab_size = vocab_size
        self.sequences: dict[str, list[int]] = {}
        self.requests: list[ProposeRequest] = []
        self.prepare_requests: list[PrepareRequest] = []

    extends = True
    """As `DraftModel.extends`."""

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
        known += item.ahead
        tokens = self._continued(known, item.depth)
        del known[len(known) - min(item.depth, 1) :]
        return Proposal(sequence_id=item.sequence_id, tokens=tokens, known_length=committed)

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        """As `OverlappedSource.prepare`."""
        self.prepare_requests.append(request)
        for sequence_id in request.release:
            self.sequences.pop(sequence_id, None)
        prepared = tuple(self._prepared(item) for item in request.items)
        return PrepareReply(round_id=request.round_id, prepared=prepared, step_time_s=0.001, num_steps=1)

    def _prepared(self, item: PrepareItem) -> Prepared:
        known = self.sequences.setdefault(item.sequence_id, [])
        if len(known) < item.base_length:
            return Prepared(sequence_id=item.sequence_id, reason="need_context")
        known[item.base_length :] = item.tokens
        outcomes = tuple(
            Outcome(accepted=accepted, token=token, tokens=self._continued([*known, *item.draft[:accepted], token], item.depth))
            for accepted, count in enumerate(item.fan_out)
            for token in self._guesses(known, item.draft, accepted, count)
        )
        return Prepared(sequence_id=item.sequence_id, outcomes=outcomes, known_length=len(known))

    def _guesses(self, known: list[int], draft: tuple[int, ...], accepted: int, count: int) -> list[int]:
        likeliest = self.next_token([*known, *draft[:accepted]])
        ranked = [(likeliest + rank) % self._vocab_size for rank in range(min(count + 1, self._vocab_size))]
        return [token for token in ranked if token not in draft[accepted : accepted + 1]][:count]

    def _continued(self, ids: list[int], depth: int) -> tuple[int, ...]:
        for _ in range(depth):
            ids.append(self.next_token(ids))
        return tuple(ids[len(ids) - depth :])
