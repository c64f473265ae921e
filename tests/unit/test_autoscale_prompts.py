"""What prompts in the same forward do to drafts."""

import pytest

from autoscale.cost_model import RoundCost
from autoscale.prompts import WEIGHT, PromptShare
from engine.types import StepReport

LINEAR = RoundCost.measured(((1, 0.001), (1000, 1.0)), None)


def _report(batch: int, drafted: int, committed: int, prompt_tokens: int) -> StepReport:
    num_target_tokens = batch + drafted + prompt_tokens
    return StepReport(
        round_id=0,
        batch_size=batch,
        num_waiting=0,
        num_target_tokens=num_target_tokens,
        num_prefill_tokens=prompt_tokens,
        num_committed=committed,
        num_drafted=drafted,
        num_accepted=committed - batch,
        depths=(),
        verify_time_s=0.001 * num_target_tokens,
    )


def test_the_rate_is_that_of_the_time_which_prompts_leave():
    """Bug guarded: a lane full of prompts has a low rate, by which every draft seems worth its time, although each delays the
    prompts behind it. Where all tokens cost the same, plain decoding makes one token in the time of one: the price is 1."""
    share = PromptShare()
    assert share.rate(7.0) == 7.0
    for _ in range(5):
        share.note(_report(100, 0, 100, 300), LINEAR)
    assert share.rate(7.0) == pytest.approx(1000.0)
    assert share.rate(7.0) * LINEAR.target.slope(400) == pytest.approx(1.0)


def test_the_share_follows_the_rounds():
    """Bug guarded: rounds counted by their tokens, so that one long prompt outweighs the many rounds without any."""
    share = PromptShare()
    share.note(_report(1, 0, 1, 500), LINEAR)
    assert share.share == pytest.approx(WEIGHT)
    for _ in range(200):
        share.note(_report(1, 0, 1, 0), LINEAR)
    assert share.share < 1e-4


def test_a_round_that_only_reads_prompts_says_nothing_about_the_rate():
    """Bug guarded: a rate of 0 after a burst of prompts, at which no draft costs anything."""
    share = PromptShare()
    share.note(_report(10, 0, 10, 0), LINEAR)
    before = share.rate(0.0)
    for _ in range(100):
        share.note(_report(0, 0, 0, 512), LINEAR)
    assert share.rate(0.0) == before
