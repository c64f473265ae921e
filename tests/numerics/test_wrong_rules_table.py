"""The chi-square test of test_distribution_table.py must reject rules that are wrong in the ways in which engines have been.

Same texts, same seeds, same level: every wrong rule here has a p-value below `LEVEL`, the odds of a false alarm there.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from msgspec.structs import replace
from table_lane import BAD_DRAFT, DEPTH, LEVEL, NUM_TEXTS, SETTINGS, VOCAB, sample
from torch import Tensor

from engine import noise, sampling
from engine.accept import DraftProbs, Drafts, Draw, TargetProbs, Verdicts
from engine.accept.base import match_own_tokens
from engine.noise import Stream
from engine.processing import SampledSequence, first_rows
from engine.propose.base import DraftSource
from engine.scheduler import FixedDepth
from engine.testing import TableModel
from engine.types import Outcome, Prepared, PrepareReply, PrepareRequest, Proposal, ProposeItem, ProposeReply, ProposeRequest

Patch = pytest.MonkeyPatch
RatioRule = Callable[[Drafts, TargetProbs, DraftProbs, Tensor, Draw], Verdicts]
Q = torch.softmax(BAD_DRAFT.double(), dim=1).tolist()
"""The draft's distribution after each token at temperature 1 without options."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


class Tampered:
    """A draft, whose proposals are changed on their way."""

    name = "tampered"

    def __init__(self, change: Callable[[ProposeItem, Proposal], Proposal]):
        self._model = TableModel(BAD_DRAFT)
        self._change = change

    def propose(self, request: ProposeRequest) -> ProposeReply:
        reply = self._model.propose(request)
        changed = (self._change(item, proposal) for item, proposal in zip(request.items, reply.proposals, strict=True))
        return replace(reply, proposals=tuple(changed))


def _rows_of_q(item: ProposeItem, proposal: Proposal) -> list[list[float]]:
    return [Q[token] for token in (item.tokens[-1], *proposal.tokens[:-1])]


def _with_untempered_q(item: ProposeItem, proposal: Proposal) -> Proposal:
    probs = tuple((tuple(range(len(row))), tuple(row)) for row in _rows_of_q(item, proposal))
    return replace(proposal, probs=probs)


def _without_unlikely_tokens(item: ProposeItem, proposal: Proposal) -> Proposal:
    """Drop the first drawn token that the draft finds rather unlikely, and all after it."""
    rows = _rows_of_q(item, proposal)
    likely = [row[token] >= 0.3 for row, token in zip(rows, proposal.tokens, strict=True)]
    count = likely.index(False) if False in likely else len(likely)
    probs = proposal.probs[:count] if proposal.probs is not None else None
    return replace(proposal, tokens=proposal.tokens[:count], probs=probs, reason=None if count else "low_confidence")


# --- wrong rules ------------------------------------------------------------------------------------------------------------


def _q_before_temperature(rule: str, patch: Patch) -> DraftSource:
    """The draft draws at the request's temperature and reports the q of temperature 1."""
    return Tampered(_with_untempered_q)


def _drop_unlikely_tokens(rule: str, patch: Patch) -> DraftSource:
    """A drawn token is dropped for its low confidence (the trap of DSpark, appendix A)."""
    return Tampered(_without_unlikely_tokens)


def _share_noise(rule: str, patch: Patch) -> DraftSource:
    """The ratio test decides with the noise that the draft drew with (the public bug of design section 4)."""
    keys = sampling._round_keys

    def shared(sequences: Sequence[SampledSequence], stream: Stream, device: torch.device) -> Tensor:
        return keys(sequences, Stream.DRAFT if stream is Stream.ACCEPT else stream, device)

    patch.setattr(sampling, "_round_keys", shared)
    return TableModel(BAD_DRAFT)


def _noise_by_position(rule: str, patch: Patch) -> DraftSource:
    """A position that was refused in one round is drafted and tested with the same noise in the next."""
    good: RatioRule = getattr(sampling, rule)
    round_keys = sampling._round_keys
    latest: list[SampledSequence] = []

    def remember(sequences: Sequence[SampledSequence], stream: Stream, device: torch.device) -> Tensor:
        latest[:] = sequences
        return round_keys(sequences, stream, device)

    def wrong(drafts: Drafts, p: TargetProbs, q: DraftProbs, uniforms: Tensor, draw: Draw) -> Verdicts:
        keys = sampling._keys(latest, Stream.ACCEPT, uniforms.device)
        by_position = noise.uniform(keys, torch.zeros(1, dtype=torch.int64)).squeeze(1)
        return good(drafts, p, q, by_position[drafts.position_rows()], draw)

    patch.setattr(sampling, "_round_keys", remember)
    patch.setattr(sampling, rule, wrong)
    _draft_by_position(rule, patch)
    return TableModel(BAD_DRAFT, num_probs=1)


def _draft_by_position(rule: str, patch: Patch) -> None:
    """Key the draft's own draws by position alone, not by round."""
    propose = sampling._PROPOSE[rule]

    def wrong(logits: Tensor, sequences: Sequence[SampledSequence], num_probs: int) -> sampling.Drawn:
        return propose(logits, [dataclasses.replace(s, num_drawn=0) for s in sequences], num_probs)

    patch.setitem(sampling._PROPOSE, rule, wrong)


def _resample_with_draft_noise(rule: str, patch: Patch) -> None:
    """The token after a refusal is drawn with the noise that drew the refused one."""
    keys = sampling._keys

    def shared(sequences: Sequence[SampledSequence], stream: Stream, device: torch.device) -> Tensor:
        return keys(sequences, Stream.DRAFT if stream is Stream.RESAMPLE else stream, device)

    patch.setattr(sampling, "_keys", shared)
    _draft_by_position(rule, patch)


def _bonus_from_q(rule: str, patch: Patch) -> DraftSource:
    """After a full acceptance the next token is drawn from the draft's last distribution."""
    good: RatioRule = getattr(sampling, rule)

    def wrong(drafts: Drafts, p: TargetProbs, q: DraftProbs, uniforms: Tensor, draw: Draw) -> Verdicts:
        def from_q(weights: Tensor, rows: Tensor) -> Tensor:
            if not q.ids.shape[1]:
                return draw(weights, rows)
            own, last = torch.arange(len(rows)), (drafts.lengths - 1).clamp_min(0)
            log_q = torch.zeros_like(weights).scatter_add(1, q.ids[own, last], q.probs[own, last]).log()
            is_bonus = (rows == drafts.first_row + drafts.lengths) & (drafts.lengths > 0)
            return draw(torch.where(is_bonus[:, None], log_q, weights), rows)

        return good(drafts, p, q, uniforms, from_q)

    patch.setattr(sampling, rule, wrong)
    return TableModel(BAD_DRAFT)


def _resample_from_p(rule: str, patch: Patch) -> DraftSource:
    """After a refusal the next token is drawn from p."""
    good: RatioRule = getattr(sampling, rule)

    def wrong(drafts: Drafts, p: TargetProbs, q: DraftProbs, uniforms: Tensor, draw: Draw) -> Verdicts:
        return good(drafts, p, q, uniforms, lambda weights, rows: draw(p.of_rows(rows).log(), rows))

    patch.setattr(sampling, rule, wrong)
    return TableModel(BAD_DRAFT)


def _noise_by_round(rule: str, patch: Patch) -> DraftSource:
    """Every position of a round has the same noise."""
    keys = sampling._keys

    def same(sequences: Sequence[SampledSequence], stream: Stream, device: torch.device) -> Tensor:
        first = [row for row, s in zip(first_rows(sequences), sequences, strict=True) for _ in range(s.num_rows)]
        return keys(sequences, stream, device)[torch.tensor(first)]

    patch.setattr(sampling, "_keys", same)
    return TableModel(BAD_DRAFT)


def _keep_likely_tokens(rule: str, patch: Patch) -> DraftSource:
    """A draft token is kept when the target finds it rather likely ("typical acceptance")."""

    def wrong(drafts: Drafts, logits: Tensor, draw: Draw) -> Verdicts:
        own = draw(logits, torch.arange(len(logits)))
        rows = drafts.position_rows()
        likely = (torch.softmax(logits, dim=1)[rows, drafts.tokens.clamp_min(0)] > 0.3) & drafts.real
        return match_own_tokens(drafts, own.index_put((rows[likely],), drafts.tokens[likely]))

    patch.setattr(sampling, rule, wrong)
    return TableModel(BAD_DRAFT)


WRONG: list[tuple[str, Callable[[str, Patch], DraftSource]]] = [
    *itertools.product(
        ["rejection", "block"], [_share_noise, _q_before_temperature, _drop_unlikely_tokens, _bonus_from_q, _resample_from_p]
    ),
    ("block", _noise_by_position),
    ("coupled", _noise_by_round),
    ("coupled", _keep_likely_tokens),
]


@pytest.mark.parametrize(("rule", "wrong"), WRONG)
def test_the_chi_square_test_finds_wrong_rules(
    rule: str, wrong: Callable[[str, Patch], DraftSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a statistical test without the power to see the errors that engines have really had."""
    settings = {"temperature": 0.6} if wrong is _q_before_temperature else {}
    assert sample(rule, {"texts": settings}, wrong(rule, monkeypatch))["texts"].p < LEVEL


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("shares", [False, True], ids=["own noise", "shared noise"])
def test_a_residual_drawn_with_the_drafts_noise_is_found(rule: str, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: the token after a refusal is drawn with the noise that drew the refused one, as vLLM did (its pull request
    54282), on the example of that bug; it moves 4 % of the mass, which takes more texts to see than the other errors."""
    target = torch.tensor([0.1, 0.6, 0.29, 0.01]).log().expand(4, 4)
    draft = TableModel(torch.tensor([0.6, 0.2, 0.19, 0.01]).log().expand(4, 4))
    if shares:
        _resample_with_draft_noise(rule, monkeypatch)
    sampled = sample(rule, {"plain": {}}, draft, target, 5 * NUM_TEXTS)["plain"]
    assert (sampled.p < LEVEL) == shares


def test_coupled_drafts_may_be_cut_by_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: the rule that is free of the trap of `_drop_unlikely_tokens` falls into it after all."""
    sampled = sample("coupled", SETTINGS, _drop_unlikely_tokens("coupled", monkeypatch))
    uncut = sample("coupled", SETTINGS, TableModel(BAD_DRAFT))
    for name, result in sampled.items():
        assert result.p > LEVEL
        assert result.num_accepted > 0
        assert result.num_drafted < uncut[name].num_drafted


# --- wrong caches -----------------------------------------------------------------------------------------------------------


class OneNoise(TableModel):
    """Draws every prepared draft of a sequence with the same noise: that of the first outcome it ever prepared for."""

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        keys = sampling._round_keys

        def first(sequences: Sequence[SampledSequence], stream: Stream, device: torch.device) -> Tensor:
            if stream is not Stream.DRAFT:
                return keys(sequences, stream, device)
            shortened = [dataclasses.replace(s, ids=s.ids[: s.prompt_length], num_drawn=0) for s in sequences]
            return keys(shortened, stream, device)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_round_keys", first)
            return super().prepare(request)


class ChangedOutcomes(TableModel):
    """Prepares as it should, but some of what it prepared is dropped, or another of several drafts is taken."""

    def __init__(self, change: Callable[[Prepared], Prepared]):
        super().__init__(BAD_DRAFT)
        self._change = change

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        reply = super().prepare(request)
        return replace(reply, prepared=tuple(map(self._change, reply.prepared)))


def _without_unlikely_outcomes(prepared: Prepared) -> Prepared:
    """Drop the drafts whose first token the draft finds rather unlikely: the request then takes a plain step."""
    return replace(prepared, outcomes=tuple(o for o in prepared.outcomes if Q[o.token][o.tokens[0]] >= 0.3))


def _cut_before_unlikely(prepared: Prepared) -> Prepared:
    """Cut the drafts before the first token that the draft finds rather unlikely, but for the first."""
    return replace(prepared, outcomes=tuple(map(_cut, prepared.outcomes)))


def _cut(outcome: Outcome) -> Outcome:
    likely = [Q[before][token] >= 0.3 for before, token in itertools.pairwise(outcome.tokens)]
    count = 1 + (likely.index(False) if False in likely else len(likely))
    return replace(outcome, tokens=outcome.tokens[:count], probs=outcome.probs and outcome.probs[:count])


WRONG_CACHES: dict[str, Callable[[], DraftSource]] = {
    "the noise of another outcome": lambda: OneNoise(BAD_DRAFT),
    "unlikely drafts dropped": lambda: ChangedOutcomes(_without_unlikely_outcomes),
    "unlikely tokens cut": lambda: ChangedOutcomes(_cut_before_unlikely),
}
EVERYTHING_PREPARED = FixedDepth(DEPTH, fan_out=VOCAB, asks=False)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("wrong", WRONG_CACHES)
def test_the_chi_square_test_finds_wrong_caches(rule: str, wrong: str) -> None:
    """Bug guarded: a statistical test of prepared drafts without the power to see what can go wrong with them. Noise that is
    used again takes more texts to see than the other errors."""
    num_texts = (5 if wrong == "the noise of another outcome" else 3) * NUM_TEXTS
    sampled = sample(rule, {"texts": {}}, WRONG_CACHES[wrong](), policy=EVERYTHING_PREPARED, num_texts=num_texts)
    assert sampled["texts"].p < LEVEL
    assert sum(sampled["texts"].hits.values()) > NUM_TEXTS


@pytest.mark.parametrize("wrong", WRONG_CACHES)
def test_under_coupled_no_cache_is_wrong(wrong: str) -> None:
    """Bug guarded: the rule that is free of these traps falls into them after all."""
    sampled = sample("coupled", {"texts": {}}, WRONG_CACHES[wrong](), policy=EVERYTHING_PREPARED)
    assert sampled["texts"].p > LEVEL
    assert sampled["texts"].num_accepted > 0
