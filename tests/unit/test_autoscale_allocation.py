"""Depths of a sequential batch: against every possible vector of depths."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.allocation import allocate
from autoscale.cost_model import RoundCost
from autoscale.price import best_depth, throughput

DEEPEST = 4


def rate(depths, survivals, cost):
    """Tokens per second of a round with these depths."""
    tokens = len(depths) + sum(sum(own[:depth]) for own, depth in zip(survivals, depths, strict=True))
    levels = [sum(depth >= level for depth in depths) for level in range(1, max(depths) + 1)]
    seconds = cost.target.time(len(depths) + sum(depths)) + sum(map(cost.draft_time, levels))
    return tokens / seconds


def best_of_all(survivals, cost):
    return max(rate(depths, survivals, cost) for depths in itertools.product(range(DEEPEST + 1), repeat=len(survivals)))


def found(survivals, cost):
    """What `allocate` chooses when it is given the rate of its own choice (Dinkelbach)."""
    depths = [0] * len(survivals)
    for _ in range(30):
        depths = allocate(survivals, rate(depths, survivals, cost), cost, len(survivals))
    return rate(depths, survivals, cost)


def random_survivals(rng, batch):
    return [[alpha**j for j in range(1, DEEPEST + 1)] for alpha in (rng.uniform(0.2, 0.98) for _ in range(batch))]


@given(st.integers(0, 10_000), st.integers(1, 4), st.floats(0, 0.02), st.floats(0, 0.02), st.floats(0, 0.3), st.floats(0, 0.01))
def test_no_other_depths_are_better(seed, batch, fixed, row, draft_fixed, draft_row):
    """Bug guarded: a level that one request takes for itself at everybody's cost, or one that would pay together left out."""
    target = tuple((n, 0.03 + fixed + (0.001 + row) * n) for n in (1, 2, 64))
    draft = tuple((n, (0.1 * draft_fixed + 0.001) + draft_row * n) for n in (1, 2, 64))
    cost = RoundCost.measured(target, draft)
    survivals = random_survivals(random.Random(seed), batch)
    assert found(survivals, cost) == pytest.approx(best_of_all(survivals, cost), rel=1e-9)


@pytest.mark.parametrize(
    "target", [((1, 0.03), (8, 0.03), (64, 0.2)), ((1, 0.03), (7, 0.03), (8, 0.04), (15, 0.04), (16, 0.06))]
)
@pytest.mark.parametrize("seed", range(10))
def test_knees_and_stairs_of_the_target(target, seed):
    """Bug guarded: a price taken where the target's step is flat, for drafts that reach beyond its knee (30 % of the rate
    lost); or a stair that stops the search although what lies on it pays."""
    cost = RoundCost.measured(target, ((1, 0.002), (64, 0.004)))
    survivals = random_survivals(random.Random(seed), 4)
    assert found(survivals, cost) >= 0.98 * best_of_all(survivals, cost)


def at(alpha, room=16):
    return [alpha**j for j in range(1, room + 1)]


def test_one_good_request_does_not_draft_at_the_cost_of_all():
    """Bug guarded: each request judged by its share of a draft step that the others do not take. Of eight requests a few that
    look better than the others were drafted for 10 steps where 6 pay: a fifth of the rate lost."""
    cost = RoundCost.measured(((1, 0.03), (1000, 0.03)), ((1, 0.003), (1000, 0.003)))
    depth = best_depth(8, 0.8, cost, 16)
    theta = throughput(8, depth, 0.8, cost)
    assert allocate([at(0.8)] * 8, theta, cost, 8) == [depth] * 8
    assert max(allocate([at(0.8)] * 7 + [at(0.95)], theta, cost, 8)) <= depth + 1
    assert max(allocate([at(0.8)] * 2 + [at(0.95)] * 6, theta, cost, 8)) > depth + 1, "the control: together they pay"


def test_requests_that_are_expected_count():
    """Bug guarded: the few that are there draft as if nobody else came, or a request stands for nobody."""
    cost = RoundCost.measured(((1, 0.03), (40, 0.03), (400, 0.3)), None)
    theta = throughput(8, 1, 0.8, cost)
    few = allocate([at(0.8)] * 2, theta, cost, 2)
    many = allocate([at(0.8)] * 2, theta, cost, 36)
    assert min(few) > max(many)


def test_free_drafts_need_no_company():
    """Bug guarded: a division by the cost of a draft step that there is none of."""
    flat = RoundCost.measured(((1, 0.03), (1000, 0.03)), None)
    assert allocate([[0.9, 0.5], [0.1]], 60.0, flat, 2) == [2, 1]
    steep = RoundCost.measured(((1, 0.01), (100, 1.0)), None)
    assert allocate([[0.9, 0.5], [0.1]], 60.0, steep, 2) == [1, 0]
    assert allocate([], 60.0, steep, 2) == []
    assert allocate([[], [0.9]], 60.0, steep, 2) == [0, 1]


KNEE = RoundCost.measured(((1, 0.03), (64, 0.03), (128, 0.06)), None)


def test_drafts_beside_a_prompt_pay_for_what_they_add_to_the_forward():
    """Bug guarded: positions that cost nothing alone are verified beside a prompt that fills the step, where each costs its
    share: 0.78 of plain decoding at 256 requests with short answers."""
    survivals, plain_rate = [[0.8, 0.64, 0.5]] * 16, 16 / 0.03
    assert allocate(survivals, plain_rate, KNEE, 16) == [3] * 16
    assert sum(allocate(survivals, 4 * plain_rate, KNEE, 16, num_beside=32)) == 16, "up to the knee"
    assert allocate(survivals, 4 * plain_rate, KNEE, 16, num_beside=64) == [0] * 16


def test_drafts_may_be_told_how_long_they_may_take():
    """Bug guarded: first tokens that wait for others' drafts because these are worth it."""
    survivals, slack_s = [[0.8, 0.64]] * 16, 8.5 * 0.03 / 64
    assert sum(allocate(survivals, 500.0, KNEE, 16, num_beside=48)) > 8, "the control"
    assert sum(allocate(survivals, 500.0, KNEE, 16, num_beside=48, slack=slack_s)) == 8
