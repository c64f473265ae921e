from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.fan_out import guesses_worth, position_kinds, position_weights
from autoscale.hit_rate import MAX_FAN_OUT, SCALES, HitLaws

alphas = st.floats(0.05, 0.98)
rates = st.floats(0.1, 4.0)


@st.composite
def laws(draw):
    return HitLaws(recovery=draw(rates), bonus=draw(rates), plain=draw(rates))


def _hit_probability(alpha, fan_out, any_laws):
    depth = len(fan_out) - 1
    return sum(
        weight * (1 - any_laws.miss(kind, guesses))
        for weight, kind, guesses in zip(position_weights(alpha, depth), position_kinds(depth), fan_out, strict=True)
    )


@settings(max_examples=40, deadline=None)
@given(alphas, st.integers(0, 2), laws(), st.floats(0.02, 0.5))
def test_no_other_division_of_the_rows_hits_more(alpha, depth, any_laws, least_gain):
    """Bug guarded: positions that get too many of the rows and others too few: compared with every allocation of as many."""
    fan_out = guesses_worth(alpha, depth, any_laws, least_gain)
    others = product(range(MAX_FAN_OUT + 1), repeat=depth + 1)
    best = max(_hit_probability(alpha, other, any_laws) for other in others if sum(other) == sum(fan_out))
    assert _hit_probability(alpha, fan_out, any_laws) == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.5, 0.95), st.integers(1, 9), laws(), st.floats(0.003, 0.05))
def test_the_shape_is_the_power_law_of_the_weights(alpha, depth, any_laws, least_gain):
    """Bug guarded: a shape other than F_k + s ~ a^{k/(1+r)}, last times (1-a)^{-1/(1+r)}: where all last guesses gain the same.

    The continuous optimum is s ((w r / (s gain))^{1/(1+r)} - 1), up to rounding.
    """
    weights, kinds = position_weights(alpha, depth), position_kinds(depth)
    for weight, kind, guesses in zip(weights, kinds, guesses_worth(alpha, depth, any_laws, least_gain), strict=True):
        rate, scale = getattr(any_laws, kind), SCALES[kind]
        optimum = scale * ((weight * rate / (scale * least_gain)) ** (1 / (1 + rate)) - 1)
        assert guesses == pytest.approx(min(max(optimum, 0.0), MAX_FAN_OUT), abs=1.0)


def test_a_real_pair():
    """Guards the numbers of the emulated case: early positions and the bonus token get more, hopeless ones nothing."""
    assert guesses_worth(0.8, 8, HitLaws(), 0.01) == (4, 4, 3, 3, 2, 2, 1, 1, 3)
    assert guesses_worth(0.8, 0, HitLaws(), 0.01) == (6,)


@given(alphas, st.integers(0, 12))
def test_outcomes_are_all_there_is(alpha, depth):
    """Bug guarded: weights that do not add up to 1, or as many kinds as positions."""
    assert sum(position_weights(alpha, depth)) == pytest.approx(1.0)
    assert len(position_kinds(depth)) == depth + 1
    assert position_kinds(depth)[-1] == ("bonus" if depth else "plain")


def test_no_rows_no_guesses():
    """Bug guarded: one guess at least, when the draft has no time for any."""
    assert guesses_worth(0.8, 3, HitLaws(), 1.0) == (0, 0, 0, 0)
