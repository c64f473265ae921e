import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.hit_rate import KINDS, MAX_FAN_OUT, SCALES, HitEstimator, HitLaws

MEASURED = [
    ("recovery", (0.61, 0.89, 0.96)),
    ("recovery", (0.40, 0.69, 0.81)),
    ("recovery", (0.23, 0.46, 0.54)),
    ("recovery", (0.23, 0.42, 0.50)),
    ("bonus", (0.81, 0.96, 0.99)),
    ("bonus", (0.64, 0.85, 0.91)),
    ("bonus", (0.49, 0.67, 0.73)),
    ("bonus", (0.43, 0.61, 0.67)),
]
"""Hits with 1, 3 and 5 guesses, measured on two drafts: coupled, coupled, rejection, rejection."""


@pytest.mark.parametrize(("kind", "hits"), MEASURED)
def test_one_rate_per_kind_meets_the_measured_hits(kind, hits):
    """Bug guarded: a law that fits one fan-out and is far off at the others sends the fan-out the wrong way."""
    rate = -math.log(1 - hits[1]) / math.log(1 + 3 / SCALES[kind])
    laws = HitLaws(**{kind: rate})
    assert 1 - laws.miss(kind, 1) == pytest.approx(hits[0], abs=0.07)
    assert 1 - laws.miss(kind, 5) == pytest.approx(hits[2], abs=0.07)


def test_the_prior_is_that_of_a_real_pair():
    """Bug guarded: a first choice of mode and fan-out from hit rates that nobody measured."""
    assert 1 - HitLaws().miss("recovery", 3) == pytest.approx(0.70, abs=0.01)
    assert 1 - HitLaws().miss("bonus", 3) == pytest.approx(0.90, abs=0.01)
    assert 1 - HitLaws().miss("plain", 3) == pytest.approx(0.90, abs=0.01)


@given(st.sampled_from(KINDS), st.floats(0, 8))
def test_every_guess_brings_less_than_the_one_before(kind, rate):
    """Bug guarded: gains that rise somewhere make taking the largest gain first a bad choice."""
    hits = HitLaws(**{kind: rate}).hits(kind)
    gains = [after - before for before, after in pairwise(hits)]
    assert hits[0] == 0.0
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(gains))


def _play(estimator, truth, rounds, shares, source):
    for _ in range(rounds):
        hits, misses = {}, {}
        for kind in KINDS:
            for guesses in source.choices(list(shares[kind]), weights=list(shares[kind].values()), k=4):
                counts = misses if source.random() < truth.miss(kind, guesses) else hits
                counts[kind] = counts.get(kind, 0) + 1
        estimator.observe(hits, misses, shares)


def test_the_rate_is_found_whatever_the_mixture_of_guesses():
    """Bug guarded: positions without a guess, which always miss, taken for a source that guesses badly.

    The mean of 400 correlated estimates from 200 outcomes each has a standard error below 0.05: 0.2 is four of them.
    """
    truth = HitLaws(recovery=0.8, bonus=2.5, plain=1.2)
    shares = {"recovery": {0: 0.4, 1: 0.3, 3: 0.3}, "bonus": {1: 1.0}, "plain": {5: 0.5, 2: 0.5}}
    estimator, source, seen = HitEstimator(HitLaws()), random.Random(3), []
    _play(estimator, truth, 300, shares, source)
    for _ in range(400):
        _play(estimator, truth, 1, shares, source)
        seen.append(estimator.laws)
    for kind in KINDS:
        assert sum(getattr(laws, kind) for laws in seen) / len(seen) == pytest.approx(getattr(truth, kind), abs=0.2)


def test_late_answers_say_nothing_about_guessing():
    """Bug guarded: a slow draft looking like a bad guesser, so that more outcomes are asked of it, which makes it slower."""
    estimator = HitEstimator(HitLaws())
    for _ in range(300):
        estimator.observe({"recovery": 2}, {"late": 1, "unprepared": 1}, {"recovery": {8: 1.0}})
    assert estimator.laws.lost == pytest.approx(0.5, abs=0.01)
    assert estimator.laws.recovery > HitLaws().recovery
    assert estimator.hit_rate == pytest.approx(0.5, abs=0.01)


def test_without_outcomes_what_was_learned_fades():
    """Bug guarded: overlap that was left for its misses never tried again, since without it nothing is learned."""
    estimator = HitEstimator(HitLaws())
    for _ in range(300):
        estimator.observe({}, {"recovery": 4, "late": 1}, {"recovery": {3: 1.0}})
    worst = estimator.laws
    for _ in range(3000):
        estimator.observe({}, {}, {})
    assert worst.recovery < 0.1
    assert worst.lost > 0.15
    assert estimator.laws.recovery == pytest.approx(HitLaws().recovery, rel=0.05)
    assert estimator.laws.lost < 0.02


def test_an_outcome_of_which_the_fan_out_is_unknown_teaches_nothing():
    """Bug guarded: hits of a kind that the round before prepared nothing for (a request that came back) moving its law."""
    estimator = HitEstimator(HitLaws())
    estimator.observe({"bonus": 3}, {"bonus": 1}, {"recovery": {3: 1.0}})
    assert estimator.laws == HitLaws(*(pytest.approx(getattr(HitLaws(), kind), abs=1e-6) for kind in KINDS))


@given(
    st.lists(
        st.tuples(st.sampled_from((*KINDS, "late")), st.integers(0, 9), st.integers(0, 9), st.integers(0, MAX_FAN_OUT)),
        max_size=30,
    )
)
def test_any_history_leaves_sound_laws(history):
    """Bug guarded: only hits, only misses or no guesses at all leading to NaN, or to a rate that runs away."""
    estimator = HitEstimator(HitLaws())
    for kind, hits, misses, guesses in history:
        estimator.observe({kind: hits} if kind in KINDS else {}, {kind: misses}, {kind: {guesses: 1.0}})
    laws = estimator.laws
    assert all(0 <= getattr(laws, kind) <= 8 for kind in KINDS)
    assert 0 <= laws.lost <= 1
    assert 0 <= estimator.hit_rate <= 1


def test_close_laws_are_one_key():
    """Bug guarded: a search for the best rounds in every round, because no two estimates are ever equal."""
    assert HitLaws(1.31, 1.66, 1.66, 0.001).rounded() == HitLaws(1.36, 1.68, 1.62, 0.004).rounded()
    assert HitLaws(1.31).rounded() != HitLaws(1.71).rounded()
