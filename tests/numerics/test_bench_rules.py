"""The benchmarks of sampling and acceptance measure what they say, on models of a few tokens."""

import math
from typing import Any

import msgspec
import pytest
import torch

from deployments.bench.acceptance import DEPTH, Context, Rounds, standard_error
from deployments.bench.sampling import SETTINGS, TILE_DROP, _measure_setting, tiled
from engine.errors import OutriderError
from engine.testing import TableModel
from engine.types import Proposal, ProposeReply, ProposeRequest, SamplingParams

VOCAB = 12
TABLE = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
DRAFT = TABLE + 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
CONTEXTS = [Context(str(token), (3, token), 1) for token in range(VOCAB)]
NUM_SEEDS = 250


class Model(TableModel):
    """Takes a new context at any length, as the real models do."""

    def _open(self, item: Any) -> Any:
        held = super()._open(item)
        if held is not None:
            held.context = item.context or held.context
        return held


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


def rounds() -> Rounds:
    return Rounds(Model(TABLE), Model(DRAFT), CONTEXTS)


def expected_first(rule: str) -> float:
    """Exact acceptance of the first draft token, mean over the contexts."""
    p, q = torch.softmax(TABLE.double(), dim=1), torch.softmax(DRAFT.double(), dim=1)
    if rule == "rejection":
        return float(torch.minimum(p, q).sum(dim=1).mean())
    if rule == "greedy":
        return float((p.argmax(dim=1) == q.argmax(dim=1)).double().mean())
    ratios = torch.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
    return float((1 / ratios.sum(dim=2)).sum(dim=1).mean())


@pytest.mark.parametrize("rule", ["coupled", "rejection", "greedy"])
def test_measured_acceptance_is_the_closed_form(rule: str) -> None:
    """Bug guarded: rounds that verify another context than they drafted for, seeds that repeat, q that does not arrive. A
    correct bench is off by more than 5 standard errors once in a million choices of seeds."""
    tally = rounds().tally(rule, 0.0 if rule == "greedy" else 1.0, NUM_SEEDS)
    found = tally.as_object()
    first = found["accepted_by_position"][0]
    error = 0.5 / math.sqrt(VOCAB * NUM_SEEDS)
    assert abs(first - expected_first(rule)) <= (1e-12 if rule == "greedy" else 5 * error)
    assert found["num_drafted"] == VOCAB * NUM_SEEDS * DEPTH
    assert found["mean_accepted"] == pytest.approx(sum(found["accepted_by_position"]))
    wrong = expected_first("greedy" if rule == "coupled" else "coupled")
    assert abs(first - wrong) > 5 * error  # the rules are told apart


class OneAtATime(Model):
    """Drafts for one context per call and has no budget left for the others, as a draft model may. ``stuck``: for none."""

    stuck = False

    def propose(self, request: ProposeRequest) -> ProposeReply:
        served = () if self.stuck else request.items[:1]
        reply = super().propose(msgspec.structs.replace(request, items=served))
        waiting = tuple(
            Proposal(sequence_id=item.sequence_id, reason="catching_up", known_length=item.base_length)
            for item in request.items[len(served) :]
        )
        return msgspec.structs.replace(reply, proposals=(*reply.proposals, *waiting))


def test_a_draft_that_serves_some_contexts_first_is_waited_for() -> None:
    """Bug guarded: `outrider calibrate` gave up ("does not catch up") when a call's budget went to other contexts whole."""
    source = OneAtATime(DRAFT)
    tally = Rounds(Model(TABLE), source, CONTEXTS).tally("greedy", 0.0, 1)
    assert tally.as_object() == rounds().tally("greedy", 0.0, 1).as_object()
    source.stuck = True
    with pytest.raises(OutriderError, match="does not catch up"):
        Rounds(Model(TABLE), source, CONTEXTS).tally("greedy", 0.0, 1)


def test_block_keeps_no_fewer_and_is_compared_on_the_same_contexts() -> None:
    """Bug guarded: differences between rules that are differences between contexts."""
    bench = rounds()
    block, rejection = (bench.tally(rule, 1.0, NUM_SEEDS) for rule in ("block", "rejection"))
    difference, error = block.minus(rejection)
    assert difference > -5 * error
    assert rejection.minus(rejection) == (0.0, 0.0)


def test_standard_error() -> None:
    """Bug guarded: an error of single values reported as that of their mean; certainty from one context."""
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)
    assert standard_error([1.0]) == math.inf


def test_tiled_rows_are_a_tail_behind_the_real_ones() -> None:
    """Bug guarded: copies that compete with the real tokens would make the large vocabulary flatter than any model's."""
    wide = tiled(TABLE, 30)
    assert wide.shape == (VOCAB, 30)
    assert torch.equal(wide[:, :VOCAB], TABLE)
    assert torch.equal(wide[:, VOCAB : 2 * VOCAB], TABLE.roll(1, dims=1) - TILE_DROP)
    assert torch.softmax(wide, dim=1)[:, :VOCAB].sum(dim=1).min() > 0.99
    assert torch.equal(tiled(TABLE, VOCAB), TABLE)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_timed_on_both_sides(setting: str) -> None:
    """Bug guarded: a setting that fails, or times nothing."""
    logits = TABLE.repeat(5, 1)
    target, draft = _measure_setting(setting, SamplingParams(**SETTINGS[setting]), logits, 2, 3)
    assert (target.side, target.num_rows, draft.side, draft.num_rows) == ("target", 2 * (DEPTH + 1), "draft", 2)
    assert target.ratio_q1 <= target.ratio <= target.ratio_q3
    assert min(target.call_ms, target.softmax_ms, draft.call_ms) > 0
