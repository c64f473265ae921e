"""What long contexts cost, learned from rounds."""

import math
import random

import pytest

from autoscale.context import ContextFit
from autoscale.cost_model import RoundCost, StepCost
from autoscale.lane_policy import LanePolicy
from autoscale.price import best_depth
from engine.types import DepthRequest, StepReport

KAPPA_S = 2e-7
"""Seconds per KV token: 70B with 8 KV heads on two H100 read 320 KB of it at 6.7 TB/s in about a quarter of that."""
TARGET = ((1, 0.02), (64, 0.02), (512, 0.16))


def play(policy, contexts, *, rounds=200, batch=16, noise=0.02, slow=1.0, seed=2):
    """Rounds of a target whose steps take ``T0(n) + kappa C``; ``contexts(round)`` is the mean context."""
    rng, cost = random.Random(seed), StepCost.measured(TARGET)
    for number in range(rounds):
        depths = policy.depths([DepthRequest(f"r{i}", 100) for i in range(batch)], batch, float(number))
        num_tokens, num_context = batch + sum(depths), int(batch * contexts(number))
        policy.report(
            StepReport(
                round_id=number,
                batch_size=batch,
                num_waiting=0,
                num_target_tokens=num_tokens,
                num_prefill_tokens=0,
                num_committed=batch,
                num_drafted=sum(depths),
                num_accepted=0,
                num_context_tokens=num_context,
                depths=tuple(depths),
                verify_time_s=slow * (cost.time(num_tokens) + KAPPA_S * num_context) * rng.uniform(1 - noise, 1 + noise),
            ),
            float(number),
        )


def make_policy(**options):
    return LanePolicy(max_depth=8, target_step_times=TARGET, draft_step_times=None, prior_alpha=0.8, **options)


def test_the_cost_of_contexts_is_learned():
    """Bug guarded: the time that long contexts take is put down to the tokens: every draft token looks dearer than it is."""
    policy = make_policy(fixed_depth=2)
    play(policy, lambda number: 2000 + 50 * (number % 100))
    mean = 2000 + 50 * 49.5
    assert policy.context_s == pytest.approx(KAPPA_S * mean, rel=0.3)
    assert policy.target_step_times[0][1] == pytest.approx(0.02, rel=0.1), "the profile was right"


def test_contexts_that_cost_nothing_are_not_charged():
    """Bug guarded: noise taken for a cost, so that drafting goes on where it does not pay."""
    policy = make_policy(fixed_depth=2)
    play(policy, lambda number: 10 + number % 10, noise=0.05)
    assert policy.context_s < 0.03 * 0.02


def test_contexts_that_are_all_alike_are_charged_too():
    """Bug guarded: in a steady load, where nothing varies, the time that contexts take is put down to the tokens, and a lane
    that is bound by its KV cache stops drafting."""
    policy = make_policy(fixed_depth=2)
    play(policy, lambda number: 4000)
    assert policy.context_s == pytest.approx(4000 * KAPPA_S, rel=0.2)
    assert policy.target_step_times[0][1] == pytest.approx(0.02, rel=0.1)


def test_a_slow_machine_is_not_taken_for_long_contexts():
    """Bug guarded: the time that a busy machine takes is put down to a few tokens of context, without a bound."""
    policy = make_policy(fixed_depth=2)
    play(policy, lambda number: 20 + number % 3, slow=2.0)
    assert policy.target_step_times[0][1] == pytest.approx(0.04, rel=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_times_that_are_no_times_teach_nothing(bad):
    """Bug guarded: one broken report spoils every decision after it."""
    fit = ContextFit().learned(1000, 4, 0.03, 0.02, 0.02)
    assert fit.learned(1000, 4, bad, 0.02, 0.02) == fit
    assert fit.learned(1000, 4, 0.03, bad, 0.02) == fit
    assert fit.learned(1000, 0, 0.03, 0.02, 0.02) == fit


def test_long_contexts_keep_speculation_profitable():
    """Bug guarded: the depth falls with the batch alone. 128 requests of 30,000 tokens are bound by their KV cache."""
    short = RoundCost.measured(TARGET, ((1, 0.002), (64, 0.004)))
    long = RoundCost(short.target, short.draft, 0.0, 30_000 * KAPPA_S)
    assert best_depth(128, 0.8, short, 8) == 0
    assert best_depth(128, 0.8, long, 8) >= 3
