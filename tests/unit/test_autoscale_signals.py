import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.signals import ArrivalRate, expected_batch, update_arrival_rate

HALF_LIFE_S = 2.0


START = ArrivalRate(0.0, 0.0)


def _feed(counts_at, memory=START):
    for now_s, count in counts_at:
        memory = update_arrival_rate(memory, count, now_s, HALF_LIFE_S)
    return memory


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_steady_stream_gives_the_closed_form_however_it_is_cut(quarters):
    """Guards against a fixed smoothing factor per report, whose estimate depends on how often a lane reports."""
    times = [sum(quarters[: i + 1]) / 4 for i in range(len(quarters))]
    counts = [8 * quarter for quarter in quarters]  # 32 requests per second
    memory = _feed(zip(times, counts, strict=True))
    assert memory.per_s == pytest.approx(32 * (1 - 2 ** (-times[-1] / HALF_LIFE_S)))


def test_the_rate_follows_a_random_stream_by_the_sum_over_its_intervals():
    """Guards against weighting an interval by its count or its order instead of by its age."""
    source = random.Random(3)
    times = [0.0]
    for _ in range(25):
        times.append(times[-1] + source.uniform(0.05, 1.5))
    counts = [source.randrange(6) for _ in times[1:]]
    expected = sum(
        count / (end - begin) * (2 ** (-(times[-1] - end) / HALF_LIFE_S) - 2 ** (-(times[-1] - begin) / HALF_LIFE_S))
        for count, begin, end in zip(counts, times, times[1:], strict=False)
    )
    assert _feed(zip(times[1:], counts, strict=True)).per_s == pytest.approx(expected)


def test_the_rate_returns_to_zero_when_traffic_stops():
    """Guards against a load signal that stays high after the traffic is gone (P13)."""
    busy = _feed([(1.0, 50), (2.0, 50)])
    quiet = _feed([(2.0 + 0.25 * i, 0) for i in range(1, 161)], busy)
    assert quiet.per_s < 1e-4


def test_two_reports_at_the_same_time_lose_no_arrival():
    """Guards against dividing by a zero interval, and against dropping what arrived in it."""
    once = _feed([(1.0, 6)])
    split = _feed([(0.0, 2), (1.0, 4)])
    assert split.per_s == pytest.approx(once.per_s)


def test_a_nan_time_keeps_the_rate_and_the_arrivals():
    """Guards against one NaN timestamp turning the rate into NaN forever."""
    assert _feed([(math.nan, 2), (1.0, 4)]).per_s == pytest.approx(_feed([(1.0, 6)]).per_s)


def test_a_clock_that_jumps_backwards_keeps_the_rate_and_goes_on_from_there():
    """Guards against negative rates, or weights above 1, after a clock was set back."""
    before = _feed([(100.0, 200)])
    jumped = update_arrival_rate(before, 5, 1.0, HALF_LIFE_S)
    assert jumped.per_s == before.per_s
    assert update_arrival_rate(jumped, 0, 3.0, HALF_LIFE_S).per_s == pytest.approx(before.per_s / 2)


def test_the_first_report_has_no_interval_and_makes_no_spike():
    """Guards against counting what piled up while no controller listened as if it had arrived at once."""
    memory = _feed([(50.0, 1000), (50.25, 0)], ArrivalRate())
    assert memory.per_s == 0.0


def test_littles_law():
    """Guards against forgetting that the lanes share the traffic: 4/s * (100 tokens * 20 ms) over 2 lanes = 4 requests each."""
    assert expected_batch(4.0, 100.0, 0.02, 2) == pytest.approx(4.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_littles_law_is_zero_for_unknown_factors(bad):
    """Guards against a NaN or negative batch reaching the price table."""
    assert expected_batch(bad, 100.0, 0.02, 1) == 0.0
    assert expected_batch(4.0, bad, 0.02, 1) == 0.0
    assert expected_batch(4.0, 100.0, bad, 1) == 0.0
    assert expected_batch(4.0, 100.0, 0.02, 0) == 0.0
