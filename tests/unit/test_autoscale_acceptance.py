import math
import random
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.acceptance import MAX_ALPHA, AcceptanceEstimator, Calibration, survival


def _play(estimator, request_id, alpha, rounds, depth, source):
    for _ in range(rounds):
        accepted = 0
        while accepted < depth and source.random() < alpha:
            accepted += 1
        estimator.observe(request_id, depth, accepted)


def test_only_tested_tokens_count():
    """Guards against accepted / drafted, which calls a draft bad because it was deep: 1 of 8 kept means 1 of 2 tested."""
    estimator = AcceptanceEstimator(0.5)
    for _ in range(400):
        estimator.observe("r", 8, 1)
    assert estimator.alpha("r") == pytest.approx(0.5, abs=1e-3)
    assert estimator.prior == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_the_estimate_does_not_depend_on_the_depth(alpha):
    """Guards against censoring bias: the average over time must be the true acceptance at depth 1 as at depth 8.

    An average of 3000 correlated estimates has a standard error below 0.015: 0.05 is more than three of them.
    """
    for depth in (1, 8):
        estimator, source, seen = AcceptanceEstimator(0.7), random.Random(7), []
        for _ in range(3000):
            _play(estimator, "r", alpha, 1, depth, source)
            seen.append(estimator.prior)
        assert sum(seen[500:]) / len(seen[500:]) == pytest.approx(alpha, abs=0.05)


def test_requests_differ_in_one_batch():
    """Guards against one acceptance for all: code wins and prose loses with the same draft (P08)."""
    estimator, source = AcceptanceEstimator(), random.Random(1)
    for _ in range(60):
        _play(estimator, "code", 0.95, 1, 4, source)
        _play(estimator, "prose", 0.2, 1, 4, source)
    assert estimator.alpha("code") > 0.8
    assert estimator.alpha("prose") < 0.5


def test_a_new_request_is_expected_to_be_like_its_class():
    """Guards against starting every request at the configured prior long after it was proven wrong."""
    estimator = AcceptanceEstimator(0.9)
    _play(estimator, "old", 0.0, 100, 4, random.Random(0))
    assert estimator.alpha("new") == estimator.prior < 0.2


def test_shrinkage_formula():
    """Guards against an estimate of 0 or 1 from a single token: (a + m prior) / (n + m) with the updated prior."""
    estimator = AcceptanceEstimator(0.7)
    estimator.observe("r", 1, 1)
    prior = (0.7 * 16 + 1) / (16 + 1)
    assert estimator.prior == pytest.approx(prior)
    assert estimator.alpha("r") == pytest.approx((1 + 8 * prior) / 9)


def test_the_class_forgets():
    """Guards against a draft that went bad being trusted for as long as it was good (P09)."""
    estimator = AcceptanceEstimator()
    for _ in range(2000):
        estimator.observe("r", 4, 4)
        estimator.end_round()
    for _ in range(150):
        estimator.observe("r", 4, 0)
        estimator.end_round()
    assert estimator.prior < 0.1
    assert estimator.alpha("r") < 0.1


def test_forget_drops_the_request_and_keeps_the_class():
    """Guards against a leak per request, and against losing what a finished request taught."""
    estimator = AcceptanceEstimator(0.7)
    estimator.observe("r", 4, 0)
    own, prior = estimator.alpha("r"), estimator.prior
    estimator.forget("r")
    assert own < prior < 0.7
    assert estimator.alpha("r") == estimator.prior == prior


def test_survival_falls_with_the_position_and_is_never_certain():
    """Guards against survival 1, at which no price can limit the depth."""
    estimator = AcceptanceEstimator(1.0)
    values = estimator.survival("r", 4)
    assert values == pytest.approx([MAX_ALPHA**j for j in (1, 2, 3, 4)])
    assert survival(0.5, 0) == ()


def test_position_table_counts_each_position_once_it_was_reached():
    """Guards against counting positions behind the first rejection."""
    estimator = AcceptanceEstimator()
    estimator.observe("r", 4, 2)
    assert estimator.position_table() == ((1, 1), (1, 1), (1, 0))
    estimator.observe("r", 4, 0)
    assert estimator.position_table() == ((2, 1), (1, 1), (1, 0))


def test_a_large_batch_does_not_forget_within_a_round():
    """Bug guarded: memory by tokens: of a round of 200 requests only the last are remembered, and their luck decides."""
    estimator, source, seen = AcceptanceEstimator(), random.Random(6), []
    for _ in range(100):
        for index in range(200):
            estimator.observe(f"r{index}", 1, int(source.random() < 0.7))
        estimator.end_round()
        seen.append(estimator.prior)
    assert max(abs(prior - 0.7) for prior in seen[20:]) < 0.03


def test_rounds_without_drafts_age_nothing():
    """Bug guarded: while nobody speculates what is known fades to nothing, and the next token decides alone."""
    estimator = AcceptanceEstimator()
    for _ in range(50):
        estimator.observe("r", 4, 3)
        estimator.end_round()
    known = estimator.position_table()
    for _ in range(1000):
        estimator.end_round()
    assert estimator.position_table() == known


@given(st.lists(st.tuples(st.integers(-2, 8), st.integers(-3, 12)), max_size=40))
def test_any_observation_leaves_probabilities(observations):
    """Guards against impossible counts (accepted > drafted, negative) leading out of [0, 1]."""
    estimator = AcceptanceEstimator(0.7)
    for drafted, accepted in observations:
        estimator.observe("r", drafted, accepted)
    assert 0 <= estimator.alpha("r") <= MAX_ALPHA
    assert 0 <= estimator.prior <= MAX_ALPHA
    assert all(0 <= accepted <= tested for tested, accepted in estimator.position_table())


def _fade(estimator, rates, num_drafts, depth=6, name="r", seed=1):
    """Drafts of a request whose acceptance by position is ``rates``."""
    rng = random.Random(seed)
    for _ in range(num_drafts):
        accepted = next((j for j in range(depth) if rng.random() >= rates[j]), depth)
        estimator.observe(name, depth, accepted)
        estimator.end_round()


FADING = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
"""A draft that is worse the further it is from what the target has said."""


def test_survival_follows_the_positions():
    """Bug guarded: one rate for all positions: the first ones look worse than they are, the last ones better."""
    estimator, seen, alphas = AcceptanceEstimator(), [], []
    for turn in range(600):
        _fade(estimator, FADING, 1, seed=turn)
        seen.append(estimator.survival("r", 6))
        alphas.append(estimator.alpha("r"))
    means = [fmean(position) for position in zip(*seen[100:], strict=True)]
    expected = [math.prod(FADING[: j + 1]) for j in range(6)]
    assert means == pytest.approx(expected, abs=0.06)
    assert expected[0] - fmean(alphas[100:]) > 0.06, "the control: one rate would not do"


def test_a_better_request_is_better_at_every_position():
    """Bug guarded: what the class knows of the positions drowns what is known of the request."""
    estimator = AcceptanceEstimator()
    for turn in range(60):
        _fade(estimator, FADING, 2, seed=turn)
        _fade(estimator, (0.98,) * 6, 2, name="good", seed=turn)
    typical, good = estimator.survival("r", 6), estimator.survival("good", 6)
    assert all(one < other for one, other in zip(typical, good, strict=True))


def test_survival_beyond_what_was_tested_goes_on_falling():
    """Bug guarded: positions that no draft has reached yet are certain, or impossible: depth could never grow again."""
    estimator = AcceptanceEstimator()
    _fade(estimator, FADING, 50, depth=2)
    survivals = estimator.survival("r", 8)
    assert len(survivals) == 8
    assert all(0 < later < earlier for earlier, later in pairwise(survivals))


@pytest.mark.parametrize("rates", [FADING, (0.8,) * 6, (0.3, 0.5, 0.7, 0.7, 0.7, 0.7)], ids=["fading", "alike", "rising"])
def test_what_is_predicted_comes_true(rates):
    """Bug guarded: survival that is off by more than 5 points, so that the price admits what does not pay."""
    estimator = AcceptanceEstimator()
    for turn in range(400):
        for name in range(4):
            _fade(estimator, rates, 1, name=f"r{name}", seed=10 * turn + name)
    assert estimator.calibration.error < 0.05
    assert sum(count for *_, count in estimator.calibration.table()) > 500


def test_the_check_of_predictions_finds_a_wrong_one():
    """The control of the test before: predictions that are 20 points off are told from good ones."""
    calibration, rng = Calibration(), random.Random(4)
    assert calibration.error is None
    for _ in range(2000):
        calibration.add(0.7, rng.random() < 0.5)
    assert calibration.error == pytest.approx(0.2, abs=0.04)
    ((predicted, survived, _),) = calibration.table()
    assert (predicted, survived) == pytest.approx((0.7, 0.5), abs=0.04)
