import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.cost_model import FACTOR_RANGE, RoundCost, StepCost

CPU_TARGET = tuple(zip((1, 2, 4, 8, 16, 32, 64), (0.022, 0.024, 0.025, 0.033, 0.044, 0.070, 0.120), strict=True))


def test_measured_points_are_met_and_lines_run_between_them():
    """Guards against off-by-one in the interpolation."""
    cost = StepCost.measured(CPU_TARGET)
    assert [cost.time(n) for n, _ in CPU_TARGET] == pytest.approx([seconds for _, seconds in CPU_TARGET])
    assert cost.time(12) == pytest.approx((0.033 + 0.044) / 2)
    assert cost.slope(12) == pytest.approx(0.011 / 8)
    assert cost.slope(16) == pytest.approx(0.026 / 16)


def test_beyond_the_profile_the_last_slope_goes_on():
    """Guards against large batches that cost no more than the largest measured one."""
    cost = StepCost.measured(CPU_TARGET)
    assert cost.time(128) == pytest.approx(0.120 + 64 * 0.050 / 32)
    assert cost.slope(500) == pytest.approx(0.050 / 32)


def test_a_noisy_last_point_does_not_make_large_batches_free():
    """Guards against a flat extrapolation after the running maximum levelled a last point that came out too fast."""
    cost = StepCost.measured([*CPU_TARGET, (128, 0.110)])
    assert cost.time(128) == pytest.approx(0.120)
    assert cost.slope(200) == pytest.approx((0.120 - 0.022) / 127)


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=12))
def test_any_profile_gives_a_finite_monotone_cost(points):
    """Guards against NaN, infinities, zeros, negative or unordered measurements reaching a decision."""
    bounded = [(n, s) for n, s in points if not (1e6 < n < math.inf or 1e6 < s < math.inf or 0 < n < 1e-3 or 0 < s < 1e-9)]
    cost = StepCost.measured(bounded)
    times = [cost.time(n) for n in (0, 1, 3, 10, 100, 1e4)]
    assert all(math.isfinite(time) and time > 0 for time in times)
    assert times == sorted(times)
    assert cost.slope(5) >= 0


def test_nothing_measured_is_flagged_and_proportional():
    """Guards against an unmeasured model being taken for one on which everything is free."""
    cost = StepCost.measured([(math.nan, 1.0), (4, math.nan), (0, 1.0)])
    assert cost.is_default
    assert cost.points == ()
    assert cost.time(10) == pytest.approx(10 * cost.time(1))


def test_one_point_is_taken_as_compute_bound():
    """Guards against a flat cost, the most daring guess, from a profile of one point."""
    assert StepCost.measured([(4, 0.02)]).time(8) == pytest.approx(0.04)


def test_equal_sizes_are_averaged():
    """Guards against one lane's measurement hiding another's."""
    assert StepCost.measured([(4, 0.02), (4, 0.04), (8, 0.05)]).time(4) == pytest.approx(0.03)


def test_the_correction_converges_to_the_measured_ratio():
    """Guards against a correction that compounds: the prediction already contains the factor."""
    cost = StepCost.measured(CPU_TARGET)
    for _ in range(400):
        cost = cost.corrected(2 * 0.033, cost.time(8))
    assert cost.time(8) == pytest.approx(2 * 0.033, rel=1e-6)
    assert cost.slope(8) == pytest.approx(2 * 0.011 / 8)
    assert cost.points[0] == (1.0, pytest.approx(0.044))


def test_the_correction_is_clipped():
    """Guards against a stalled process, or a clock with coarse ticks, making a step look 1000 times slower or free."""
    slow = fast = StepCost.measured(CPU_TARGET)
    for _ in range(400):
        slow, fast = slow.corrected(1e3, slow.time(8)), fast.corrected(1e-9, fast.time(8))
    assert slow.factor == FACTOR_RANGE[1]
    assert fast.factor == FACTOR_RANGE[0]
    assert StepCost.measured(CPU_TARGET).corrected(1e3, 0.022).factor == pytest.approx(1.15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_invalid_times_correct_nothing(bad):
    """Guards against NaN entering the running factor, from which it never leaves."""
    cost = StepCost.measured(CPU_TARGET)
    assert cost.corrected(bad, 0.02) == cost
    assert cost.corrected(0.02, bad) == cost


def test_what_was_learned_fades_without_measurements():
    """Guards against a draft that was slow once being slow forever, since it is no longer asked."""
    cost = StepCost.measured(CPU_TARGET)
    for _ in range(400):
        cost = cost.corrected(4 * 0.033, cost.time(8))
    for _ in range(346):
        cost = cost.relaxed()
    assert cost.factor == pytest.approx(2.0, abs=0.02)


def test_round_time():
    """Guards against paying the hop or a draft step in a round without drafts, and against forgetting the bonus row."""
    cost = RoundCost.measured(CPU_TARGET, ((1, 0.011), (4, 0.013)), hop_s=0.002)
    assert cost.time(4, 0) == pytest.approx(0.025)
    assert cost.time(4, 3) == pytest.approx(0.044 + 3 * 0.013 + 0.002)


def test_a_free_draft_and_an_unmeasurable_draft_are_opposites():
    """Guards against a profile full of NaN being read as a source that costs nothing."""
    assert RoundCost.measured(CPU_TARGET, ()).draft_time(4) == RoundCost.measured(CPU_TARGET, None).draft_time(4) == 0.0
    assert RoundCost.measured(CPU_TARGET, ((1, math.nan),)).draft_time(4) == pytest.approx(0.025)
