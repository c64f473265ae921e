"""Requests behind their latency objective."""

import math

import pytest

from autoscale.lane_policy import LanePolicy
from autoscale.pace import LEAST_TOKENS, MOST_WORTH, Paces
from engine.types import DepthRequest


def worth_after(paces, tokens, seconds, name="r"):
    paces.worth(DepthRequest(name, 8, 10), 100.0)
    return paces.worth(DepthRequest(name, 8, 10 + tokens), 100.0 + seconds)


@pytest.mark.parametrize(
    ("tokens", "seconds", "expected"),
    [
        (10, 0.5, 1.0),
        (10, 1.0, 1.0),
        (10, 2.0, 2.0),
        (10, 90.0, MOST_WORTH),
        (LEAST_TOKENS - 1, 90.0, 1.0),
        (10, -1.0, 1.0),
        (10, math.nan, 1.0),
    ],
)
def test_a_late_request_counts_for_more(tokens, seconds, expected):
    """Bug guarded: requests in time are slowed down for others, a late one is worth anything, or a clock that jumps decides."""
    assert worth_after(Paces(0.1), tokens, seconds) == pytest.approx(expected)


def test_without_an_objective_nobody_is_late():
    """Bug guarded: a pace is kept for ever of requests that nobody asks about."""
    paces = Paces(None)
    assert worth_after(paces, 10, 90.0) == 1.0
    paces = Paces(0.1)
    assert worth_after(paces, 10, 90.0) == MOST_WORTH
    paces.forget("r")
    assert paces.worth(DepthRequest("r", 8, 20), 300.0) == 1.0


def test_a_late_request_drafts_deeper_than_the_others():
    """Bug guarded: latency_objective_ms accepted and ignored."""
    target = ((1, 0.02), (8, 0.024), (64, 0.1))
    policy = LanePolicy(max_depth=8, target_step_times=target, draft_step_times=None, latency_objective_s=0.02)
    asked = [DepthRequest("late", 100, 10), DepthRequest("fine", 100, 10)]
    first = policy.depths(asked, 16, 0.0)
    assert first[0] == first[1] > 0
    asked = [DepthRequest("late", 100, 20), DepthRequest("fine", 100, 90)]
    late, fine = policy.depths(asked, 16, 1.0)
    assert late > fine == first[1]
