"""Emulated devices: a target and a draft whose steps take given times by waiting, so that the real stack can be measured.

Nothing is computed. The text is a script, a pure function of (seed, the request's seed, position), so it is the same at any
depth, fan-out and batch; how well the draft foresees it is chosen (`engine.testing.profiles.Emulation`). Sampling parameters
other than the seed have no effect on it, and it never ends by itself.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from engine.testing.profiles import PROFILE_CONTEXT, PROFILE_SIZES, Emulation, Timed
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

logger = logging.getLogger(__name__)
Clock = Callable[[], float]
WaitUntil = Callable[[float], None]
_Item = TypeVar("_Item", ProposeItem, PrepareItem, VerifyItem)
SPIN_S = 1e-4
"""A sleep ends late by about this much; the rest is spun, so that a step of 1 ms is one of 1 ms."""
MAX_RANK = 64
"""Guesses after which the target's token is not looked for any more."""
KV_BLOCK = 16
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def wait_until(deadline_s: float) -> None:
    """Return when `time.perf_counter` shows ``deadline_s``; other processes have the core until just before."""
    left_s = deadline_s - time.perf_counter() - SPIN_S
    if left_s > 0:
        time.sleep(left_s)
    while time.perf_counter() < deadline_s:
        pass


class Script:
    """What the target says and what the draft takes for likely, per (seed of the sequence, position of the token)."""

    def __init__(self, emulation: Emulation, vocab_size: int):
        self._seed = emulation.seed
        self._alpha = emulation.alpha
        self._recovered = [emulation.recovered(n) for n in range(1, MAX_RANK)]
        # The lowest ids are the control tokens and single bytes of most vocabularies: a script of them would be no text.
        self._first = vocab_size // 8
        self._count = vocab_size - self._first
        # Neighbouring rounds are about the same positions.
        self.token = lru_cache(maxsize=1 << 16)(self._token)
        self.rank = lru_cache(maxsize=1 << 16)(self._rank)
        self.drafted = lru_cache(maxsize=1 << 16)(self._drafted)

    def guesses(self, seed: int, position: int, count: int) -> list[int]:
        """The draft's ``count`` likeliest tokens, the one it drafts first; all different."""
        token, rank = self.token(seed, position), self.rank(seed, position)
        shift = self._bits(seed, position, 2)
        guesses = [self._other(token, shift + index) for index in range(count - (rank <= count))]
        if rank <= count:
            guesses.insert(rank - 1, token)
        return guesses

    def _token(self, seed: int, position: int) -> int:
        """The target's token."""
        return self._first + self._bits(seed, position, 0) % self._count

    def _rank(self, seed: int, position: int) -> int:
        """Which of the draft's guesses the target's token is; 1 = the one it drafts."""
        u = (self._bits(seed, position, 1) >> 11) * 2.0**-53
        if u < self._alpha:
            return 1
        u = (u - self._alpha) / (1 - self._alpha)
        return next((n + 1 for n, share in enumerate(self._recovered, start=1) if u < share), MAX_RANK + 1)

    def _drafted(self, seed: int, position: int) -> int:
        """The draft's token."""
        return self.guesses(seed, position, 1)[0]

    def _other(self, token: int, shift: int) -> int:
        """A token that is not the target's; shifts that follow each other give different ones."""
        return self._first + (token - self._first + 1 + shift % (self._count - 1)) % self._count

    def _bits(self, seed: int, position: int, stream: int) -> int:
        """64 random bits. Not `engine.noise`, which needs torch and works on whole rows."""
        return _mix(_mix(_mix(self._seed + _GOLDEN * (stream + 1)) ^ seed & _MASK) ^ position * _GOLDEN & _MASK)


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x + _GOLDEN) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


@dataclass(slots=True)
class _Held:
    context: SequenceContext
    length: int = 0
    """Tokens in the emulated KV cache, drafts included."""


class _PacedModel:
    """What both emulated models are: a script, step times, and the lengths of the sequences that they pretend to hold.

    ``follow`` gives the emulation of the moment (`engine.testing.profiles.follow_emulation`).
    """

    def __init__(
        self,
        follow: Callable[[], Emulation],
        info: ModelInfo,
        clock: Clock = time.perf_counter,
        wait_until: WaitUntil = wait_until,
    ):
        self._follow = follow
        self._emulation = follow()
        self._info = info
        self._script = Script(self._emulation, info.vocab_size)
        self._clock = clock
        self._wait_until = wait_until
        self._sequences: dict[str, _Held] = {}
        logger.warning("EMULATION, no model is loaded: %s plays %s", info.device, self._emulation.name)

    @property
    def info(self) -> ModelInfo:
        """Of the emulated model; name, device and path say that it is one."""
        return self._info

    def _begin(self, released: Sequence[str]) -> float:
        """Forget what ended and see whether the emulation is another one now. Returns the time."""
        started_s = self._clock()
        emulation = self._follow()
        if emulation != self._emulation:
            self._emulation, self._script = emulation, Script(emulation, self._info.vocab_size)
        for sequence_id in released:
            self._sequences.pop(sequence_id, None)
        return started_s

    def _open(self, item: _Item) -> _Held | None:
        """Roll back to ``base_length`` and take in the tokens; None when less is held than that."""
        held = self._sequences.get(item.sequence_id)
        if item.context is not None and item.base_length == 0:
            held = self._sequences[item.sequence_id] = _Held(item.context)
        if held is None or held.length < item.base_length:
            return None
        held.length = item.base_length + len(item.tokens)
        return held


class PacedTarget(_PacedModel):
    """A `TargetModel` that waits. A draft token is kept where it is the script's, under every rule: the script is certain."""

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """As `TargetModel.verify`. The logprobs of a prompt cannot be had: the script does not say how likely a prompt is."""
        started_s = self._begin(request.release)
        verdicts = tuple(self._verdict(item) for item in request.items)
        computed = [item for item, v in zip(request.items, verdicts, strict=True) if not v.need_context and v.error is None]
        if computed:
            num_tokens = sum(len(item.tokens) + len(item.draft) for item in computed)
            context = num_tokens + sum(item.base_length for item in computed)
            self._wait_until(started_s + self._emulation.target.step_s(num_tokens, context))
        return VerifyReply(round_id=request.round_id, verdicts=verdicts, step_time_s=self._clock() - started_s)

    def _verdict(self, item: VerifyItem) -> Verdict:
        if item.scored:
            return Verdict(sequence_id=item.sequence_id, error="an emulated target has no logprobs of a prompt")
        held = self._open(item)
        if held is None:
            return Verdict(sequence_id=item.sequence_id, need_context=True)
        if not item.sample:
            return Verdict(sequence_id=item.sequence_id)
        seed = held.context.params.seed
        first = held.length
        accepted = 0
        while accepted < len(item.draft) and item.draft[accepted] == self._script.token(seed, first + accepted):
            accepted += 1
        held.length += accepted
        tokens = (*item.draft[:accepted], self._script.token(seed, first + accepted))
        wants_logprobs = held.context.params.logprobs is not None
        return Verdict(
            sequence_id=item.sequence_id,
            accepted=accepted,
            tokens=tokens,
            logprobs=tuple(TokenLogprob(token, 0.0, ((token, 0.0),)) for token in tokens) if wants_logprobs else None,
        )


class PacedDraft(_PacedModel):
    """An `OverlappedSource` that waits: as `DraftModel`, a draft of K tokens takes K forwards, and preparing it K + 1.

    The answer to everything is late by twice the emulation's hop, which is not counted as the draft's own time.
    """

    name = "model"
    """As `DraftSource.name`."""
    prepares = True
    """As `DraftModel.prepares`."""
    extends = True
    """As `DraftModel.extends`."""

    def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`."""
        (reply,), _ = self.run((request,), ())
        return reply

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        """As `OverlappedSource.prepare`."""
        _, (reply,) = self.run((), (request,))
        return reply

    def run(
        self, proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]
    ) -> tuple[list[ProposeReply], list[PrepareReply]]:
        """Answer several requests with one set of forwards, of which every reply tells the whole time and number."""
        requests: tuple[ProposeRequest | PrepareRequest, ...] = (*proposes, *prepares)
        started_s = self._begin([sequence_id for request in requests for sequence_id in request.release])
        forwards = _Forwards(self._emulation.draft)
        proposals = [tuple(self._proposal(item, forwards) for item in request.items) for request in proposes]
        prepared = [tuple(self._prepared(item, forwards) for item in request.items) for request in prepares]
        hops_s = 2 * self._emulation.hop_s
        self._wait_until(started_s + forwards.seconds + hops_s)
        busy_s, count = self._clock() - started_s - hops_s, forwards.count
        return (
            [
                ProposeReply(round_id=request.round_id, proposals=own, step_time_s=busy_s, num_steps=count)
                for request, own in zip(proposes, proposals, strict=True)
            ],
            [
                PrepareReply(round_id=request.round_id, prepared=own, step_time_s=busy_s, num_steps=count)
                for request, own in zip(prepares, prepared, strict=True)
            ],
        )

    def _proposal(self, item: ProposeItem, forwards: "_Forwards") -> Proposal:
        held = self._open(item)
        if held is None:
            return Proposal(sequence_id=item.sequence_id, reason="need_context")
        committed = held.length
        begin = committed + len(item.ahead)
        forwards.add(0, len(item.tokens) + len(item.ahead), begin)
        for step in range(1, item.depth):
            forwards.add(step, 1, begin + step)
        held.length = begin + max(item.depth - 1, 0)
        return Proposal(
            sequence_id=item.sequence_id,
            tokens=self._drafted(held.context.params.seed, begin, item.depth),
            known_length=committed,
        )

    def _prepared(self, item: PrepareItem, forwards: "_Forwards") -> Prepared:
        held = self._open(item)
        if held is None:
            return Prepared(sequence_id=item.sequence_id, reason="need_context")
        seed, committed = held.context.params.seed, held.length
        held.length += len(item.draft)
        forwards.add(0, len(item.tokens) + len(item.draft), held.length)
        outcomes: list[Outcome] = []
        for a, count in enumerate(item.fan_out[: len(item.draft) + 1]):
            tokens = self._drafted(seed, committed + a + 1, item.depth)
            guesses = self._guesses(seed, committed + a, count, item.draft[a : a + 1])
            outcomes += [Outcome(accepted=a, token=guess, tokens=tokens) for guess in guesses]
            for step in range(1, item.depth + 1) if count else ():
                forwards.add(step, count, count * (committed + a + step))
        return Prepared(sequence_id=item.sequence_id, outcomes=tuple(outcomes), known_length=committed)

    def _guesses(self, seed: int, position: int, count: int, drafted: tuple[int, ...]) -> list[int]:
        """Where a token was drafted already, the guesses are what may come in its place."""
        return [guess for guess in self._script.guesses(seed, position, count + 1) if guess not in drafted][:count]

    def _drafted(self, seed: int, first: int, depth: int) -> tuple[int, ...]:
        return tuple(self._script.drafted(seed, position) for position in range(first, first + depth))


class _Forwards:
    """Forwards that follow each other, each over the rows of everybody who takes part in it."""

    def __init__(self, timed: Timed):
        self._timed = timed
        self._rows: dict[int, tuple[int, int]] = {}

    def add(self, step: int, num_tokens: int, context_tokens: int) -> None:
        """Rows of forward number ``step``, and the KV that they read."""
        tokens, context = self._rows.get(step, (0, 0))
        self._rows[step] = (tokens + num_tokens, context + context_tokens)

    @property
    def count(self) -> int:
        """Forwards with any row."""
        return sum(tokens > 0 for tokens, _ in self._rows.values())

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return sum(self._timed.step_s(tokens, context) for tokens, context in self._rows.values() if tokens > 0)


def paced_info(
    name: str,
    timed: Timed,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    fingerprint: str,
    max_context: int,
    kv_capacity_tokens: int | None = None,
) -> ModelInfo:
    """What an emulated model says of itself: everything that names it says that it is none."""
    return ModelInfo(
        name=name,
        vocab_size=vocab_size,
        max_context=max_context,
        kv_capacity_tokens=kv_capacity_tokens or timed.kv_capacity_tokens,
        kv_block_size=KV_BLOCK,
        eos_token_ids=eos_token_ids,
        fingerprint=fingerprint,
        device=timed.device,
        dtype="emulated bfloat16",
        dtype_reason="the step times are those of bfloat16; nothing is computed",
        step_times=tuple((size, timed.step_s(size, PROFILE_CONTEXT + size)) for size in PROFILE_SIZES),
        numerics="emulated",
        row_invariant=True,
        row_invariance="emulated: the text is a script, row-invariant by construction",
        path="emulated",
        path_reason=f"{timed.device}: step times by roofline or by choice, text by a script; nothing is computed",
    )
