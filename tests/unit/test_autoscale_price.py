from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.acceptance import survival
from autoscale.cost_model import RoundCost
from autoscale.depth import choose_depth
from autoscale.price import (
    PRICE_OFF,
    TABLE_BATCHES,
    best_depth,
    break_even_batch,
    expected_tokens,
    price,
    price_at,
    price_table,
    throughput,
)

SIZES = (1, 2, 4, 8, 16, 32, 64)
CPU_TARGET = tuple(zip(SIZES, (0.022, 0.024, 0.025, 0.033, 0.044, 0.070, 0.120), strict=True))
CPU_DRAFT = ((1, 0.011), (2, 0.012), (4, 0.013), (8, 0.016), (16, 0.020))
MAX_DEPTH = 8

alphas = st.floats(0, 0.995)
batches = st.integers(1, 256)


@st.composite
def costs(draw):
    """Any measured cost, convex or not, with or without a draft and a hop."""
    seconds = st.lists(st.floats(1e-4, 0.2), min_size=len(SIZES), max_size=len(SIZES))
    target = tuple(zip(SIZES, draw(seconds), strict=True))
    draft = draw(st.none() | seconds)
    return RoundCost.measured(target, draft and tuple(zip(SIZES, draft, strict=True)), draw(st.floats(0, 0.02)))


def _linear(fixed_s, token_s, draft=None):
    return RoundCost.measured(((1, fixed_s + token_s), (10_000, fixed_s + 10_000 * token_s)), draft)


@given(costs(), batches, alphas)
def test_the_depth_is_the_best_of_all_depths(cost, batch, alpha):
    """Guards against a search that stops at the first local maximum: compared with every depth, from the formulas."""
    tokens = [1.0 if depth == 0 else (1 - alpha ** (depth + 1)) / (1 - alpha) for depth in range(MAX_DEPTH + 1)]
    draft_s = 0.0 if cost.draft is None else cost.draft.time(batch)
    times = [cost.target.time(batch * (k + 1)) + k * draft_s + (cost.hop_s if k else 0.0) for k in range(MAX_DEPTH + 1)]
    rates = [batch * made / time for made, time in zip(tokens, times, strict=True)]
    chosen = best_depth(batch, alpha, cost, MAX_DEPTH)
    assert rates[chosen] == pytest.approx(max(rates))


@given(costs(), batches, alphas)
def test_the_price_gives_an_average_request_exactly_the_best_depth(cost, batch, alpha):
    """Guards against a price that disagrees with the depth it was derived from, at kinks and fixed costs above all."""
    current, depth = price(batch, alpha, cost, MAX_DEPTH)
    assert 0 <= current <= PRICE_OFF
    assert choose_depth(survival(alpha, MAX_DEPTH), current, MAX_DEPTH) == depth


@given(costs(), batches, alphas)
def test_a_request_never_gets_deeper_by_being_worse(cost, batch, alpha):
    """Guards against an inverted comparison of survival and price."""
    current, _ = price(batch, alpha, cost, MAX_DEPTH)
    depths = [choose_depth(survival(own, MAX_DEPTH), current, MAX_DEPTH) for own in (0.0, 0.3, 0.6, 0.8, 0.9, 0.99)]
    assert depths == sorted(depths)


@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), batches, st.floats(0.01, 0.99))
def test_the_price_is_throughput_times_the_time_of_one_more_token(fixed_s, token_s, batch, alpha):
    """Guards against a price in the wrong unit: for T = a + b n and a free draft the raw price needs no clipping."""
    cost = _linear(fixed_s, token_s)
    current, depth = price(batch, alpha, cost, MAX_DEPTH)
    if depth > 0:
        expected = throughput(batch, depth, alpha, cost) * token_s
        assert current == pytest.approx(expected, rel=1e-6)


@given(st.floats(1e-3, 0.1), st.floats(1e-6, 1e-3), st.floats(0.05, 0.99))
def test_the_price_rises_and_the_depth_falls_with_the_batch(fixed_s, token_s, alpha):
    """Guards against speculating more under load, for a linear cost and for one that is flat up to a corner."""
    corner = fixed_s / token_s
    roofline = RoundCost.measured(((1, fixed_s), (max(corner, 2.0), fixed_s), (4 * max(corner, 2.0), 4 * fixed_s)), None)
    for cost in (_linear(fixed_s, token_s), roofline):
        rows = price_table(alpha, cost, MAX_DEPTH)
        prices, depths = [row[1] for row in rows], [row[2] for row in rows]
        assert all(later >= earlier - 1e-7 for earlier, later in pairwise(prices))
        assert depths == sorted(depths, reverse=True)


def test_compute_bound_ends_at_depth_zero():
    """Guards against speculation that never backs off (P02): at T = a + b n with b n >> a every token costs its share."""
    rows = price_table(0.7, _linear(0.020, 0.001), MAX_DEPTH)
    assert rows[0][2] >= 3
    assert rows[-1][1:] == (PRICE_OFF, 0)
    assert break_even_batch(rows) in TABLE_BATCHES


def test_memory_bound_stays_at_the_deepest():
    """Guards against a policy that goes by the batch alone: where tokens are free the price is 0 at any load."""
    rows = price_table(0.7, RoundCost.measured(((1, 0.02), (100_000, 0.02)), None), MAX_DEPTH)
    assert all(row[1:] == (0.0, MAX_DEPTH) for row in rows)
    assert break_even_batch(rows) is None


def test_a_draft_as_costly_as_the_target_is_never_used():
    """Guards against speculation slower than plain decoding even for one user (P01)."""
    rows = price_table(0.95, RoundCost.measured(CPU_TARGET, CPU_TARGET), MAX_DEPTH)
    assert all(row[1:] == (PRICE_OFF, 0) for row in rows)
    assert break_even_batch(rows) == 1


def test_the_hop_alone_can_make_drafts_useless():
    """Guards against leaving the hop out of the round: 4 tokens in 20 ms lose to 1 in 4 ms."""
    flat = ((1, 0.004), (1000, 0.004))
    assert best_depth(1, 0.8, RoundCost.measured(flat, None), MAX_DEPTH) == MAX_DEPTH
    assert best_depth(1, 0.8, RoundCost.measured(flat, None, hop_s=0.016), MAX_DEPTH) == 0


def test_measured_cpu_figures():
    """Guards the numbers of a real machine: a draft at half the target's cost pays for few requests, free drafts for many."""
    drafted = price_table(0.85, RoundCost.measured(CPU_TARGET, CPU_DRAFT), MAX_DEPTH)
    free = price_table(0.85, RoundCost.measured(CPU_TARGET, None), MAX_DEPTH)
    assert [row[2] for row in drafted] == [2, 1, 1, 1, 0, 0, 0, 0, 0]
    assert [row[2] for row in free] == [8, 7, 4, 3, 2, 1, 1, 0, 0]
    assert break_even_batch(drafted) == 16
    assert break_even_batch(free) == 128


def test_prices_between_the_rows():
    """Guards against a jump at each row, and against reading beyond the table."""
    rows = ((1, 0.2, 4), (4, 0.4, 2), (16, 1.0, 0))
    assert [price_at(rows, batch) for batch in (0.5, 1, 2, 4, 8, 16, 999)] == pytest.approx([0.2, 0.2, 0.3, 0.4, 0.7, 1.0, 1.0])


def test_certain_drafts_are_no_division_by_zero():
    """Guards the closed form of E(K) at alpha = 1."""
    assert expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.0, 4) == 1.0


def test_certain_drafts_are_not_shut_out():
    """Guards against a price of 1 for a draft that is always accepted: every position survives, none would be above it."""
    current, depth = price(1, 1.0, RoundCost.measured(((1, 0.02), (2, 0.02), (3, 0.08)), None), MAX_DEPTH)
    assert depth == 1
    assert choose_depth(survival(1.0, MAX_DEPTH), current, MAX_DEPTH) >= depth
