"""Texts that grow by one drafted token per forward, and which outcomes of a verify are worth one of their own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engine.propose.captured import REFUSED
from engine.sampling import SampledSequence, likeliest_next, propose_tokens
from engine.types import Outcome, SamplingParams, SequenceContext, SparseProbs
from engine.verify.blocks import CachedSequence

MOST_GUESSES = 32
"""Outcomes per number accepted; what is asked for beyond it is not prepared."""


@dataclass(slots=True)
class Branch:
    """A draft on its way. ``cached`` holds all of the text but its last token, once that is drawn."""

    context: SequenceContext
    cached: CachedSequence
    depth: int
    last: int = -1
    """The token to compute next."""
    tokens: list[int] = field(default_factory=list)
    probs: list[SparseProbs] = field(default_factory=list)
    is_finite: bool = True
    num_ahead: int = 0
    """Tokens of another source between the committed ones and the first of ``tokens``."""


@dataclass(slots=True)
class Fork(Branch):
    """A draft after a guessed outcome of a verify, in a cache of its own."""

    accepted: int = 0
    token: int = -1

    def outcome(self) -> Outcome:
        """What is sent."""
        return Outcome(accepted=self.accepted, token=self.token, tokens=tuple(self.tokens), probs=tuple(self.probs) or None)


def draw(
    branches: Sequence[Branch], logits: Tensor, eos_token_ids: tuple[int, ...], top_n: int, max_context: int
) -> list[Branch]:
    """Draft one token per branch from logits [N, V]. Returns the branches that go on."""
    sequences = [
        SampledSequence(b.context.params, b.context.prompt_length, b.cached.ids, num_drawn=b.num_ahead + len(b.tokens))
        for b in branches
    ]
    drawn = propose_tokens(logits, sequences, eos_token_ids, top_n)
    going_on: list[Branch] = []
    for branch, (token, probs, is_finite) in zip(branches, drawn, strict=True):
        if not is_finite:
            branch.is_finite = False
            continue
        branch.tokens.append(token)
        branch.last = token
        if probs is not None:
            branch.probs.append(probs)
        ends = ends_text(token, branch.context.params, eos_token_ids)
        if not ends and len(branch.tokens) < branch.depth and len(branch.cached.ids) < max_context:
            going_on.append(branch)
    return going_on


def take_all(branch: Branch, tokens: Sequence[int], eos_token_ids: tuple[int, ...]) -> None:
    """Add drafted tokens, all but the last of which were computed, up to the first after which none may follow."""
    for index, token in enumerate(tokens):
        if token == REFUSED:
            branch.is_finite = False
            return
        if index > 0:
            branch.cached.ids.append(branch.last)
        branch.tokens.append(token)
        branch.last = token
        if ends_text(token, branch.context.params, eos_token_ids):
            return


@dataclass(frozen=True, slots=True)
class Verifying:
    """A draft at the target, with the logits' row after each of its tokens; one more guess is asked for at each of them."""

    context: SequenceContext
    ids: list[int]
    """Committed tokens and the draft."""
    draft: tuple[int, ...]
    fan_out: tuple[int, ...]
    """len(draft) + 1 numbers."""


@dataclass(frozen=True, slots=True)
class Guess:
    """An outcome of a verify. Of two the one with the lower ``order`` is worth more.

    A fan-out that is shaped for the most hits makes the last guesses of all positions worth the same (Kumar, Dao, May 2026,
    arXiv 2603.03251), so guesses compare by their rank as a share of their position's fan-out. Where those are alike, a draft
    that is accepted whole comes first, then fewer accepted tokens before more.
    """

    accepted: int
    token: int
    order: tuple[float, bool, int]


def guess(verifying: Sequence[Verifying], logits: Tensor, eos_token_ids: tuple[int, ...]) -> list[list[Guess] | None]:
    """Outcomes of every draft from logits [Σ(len(draft) + 1), V]; None where the first row of a draft has no token to draw.

    Not among them: the draft's own next token, which is another outcome, and what ends the text, after which nothing follows.
    """
    sequences = [SampledSequence(v.context.params, v.context.prompt_length, v.ids, v.draft) for v in verifying]
    most = min(max(max(v.fan_out) for v in verifying), MOST_GUESSES)
    num_ends = max(len(_ends(v.context.params, eos_token_ids)) for v in verifying)
    ranked = likeliest_next(logits, sequences, eos_token_ids, most + 1 + min(num_ends, 1))
    found: list[list[Guess] | None] = []
    start = 0
    for one in verifying:
        rows = ranked[start : start + len(one.draft) + 1]
        start += len(rows)
        found.append(list(_guesses(one, rows, eos_token_ids)) if rows[0] else None)
    return found


def _guesses(verifying: Verifying, rows: Sequence[list[int]], eos_token_ids: tuple[int, ...]) -> Iterator[Guess]:
    params, draft = verifying.context.params, verifying.draft
    for accepted, (tokens, wanted) in enumerate(zip(rows, verifying.fan_out, strict=True)):
        own = draft[accepted : accepted + 1]
        others = [token for token in tokens if token not in own and not ends_text(token, params, eos_token_ids)]
        for rank, token in enumerate(others[: min(wanted, MOST_GUESSES)]):
            yield Guess(accepted, token, ((rank + 1) / wanted, accepted < len(draft), accepted))
        if own and ends_text(own[0], params, eos_token_ids):
            return


def ends_text(token: int, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> bool:
    """Whether nothing is generated after this token."""
    return token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)


def _ends(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
