import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.cost_model import OverlapCost, RoundCost
from autoscale.fan_out import guesses_worth, position_kinds, position_weights
from autoscale.hit_rate import HitLaws
from autoscale.overlap import LEAST_GAINS, ask_gains, best_overlap, overlap_price_table, worth_waiting_s
from autoscale.price import expected_tokens, price_table, throughput

FLAT = ((1, 1.0), (1000, 1.0))
CERTAIN = HitLaws(8.0, 8.0, 8.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)
CPU_TARGET = tuple(zip(SIZES, (0.022, 0.024, 0.025, 0.033, 0.044, 0.070, 0.120), strict=True))
CPU_DRAFT = ((1, 0.011), (2, 0.012), (4, 0.013), (8, 0.016), (16, 0.020))


def _ideal(draft_share, hop, depth):
    """Target step 1. The table of the notes has no forward for the tokens being verified: the draft is sped up by its share."""
    cost = RoundCost.measured(FLAT, ((1, draft_share), (1000, draft_share)), 2 * hop)
    return OverlapCost(cost, draft_slowdown=depth / (depth + 1))


def _hits_at(probability):
    """Laws by which eight guesses hit with this probability wherever the outcome falls."""
    return HitLaws(*(math.log(1 / (1 - probability)) / math.log(1 + 8 / scale) for scale in (2.0, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("alpha", "share", "hop", "sequential", "depth", "always", "mostly"),
    [
        (0.6, 0.05, 0.0, 1.92, 20, 2.50, 2.37),
        (0.6, 0.1, 0.05, 1.55, 9, 2.48, 2.25),
        (0.7, 0.2, 0.1, 1.41, 4, 2.77, 2.42),
        (0.8, 0.05, 0.05, 2.89, 18, 4.93, 4.38),
        (0.8, 0.1, 0.0, 2.47, 10, 4.57, 4.01),
        (0.8, 0.1, 0.05, 2.32, 9, 4.46, 3.86),
        (0.8, 0.1, 0.1, 2.20, 8, 4.33, 3.69),
        (0.8, 0.2, 0.05, 1.77, 4, 3.36, 2.89),
        (0.9, 0.1, 0.05, 3.27, 9, 6.51, 5.49),
        (0.9, 0.2, 0.1, 2.19, 4, 4.10, 3.48),
    ],
)
def test_the_closed_forms_of_the_notes(alpha, share, hop, sequential, depth, always, mostly):
    """Bug guarded: a model that disagrees with the notes (3.9: sequential, push with p = 1 and .8) on equal assumptions."""
    cost = _ideal(share, hop, depth)
    best = max(throughput(1, k, alpha, cost.alone) for k in range(40))
    assert best == pytest.approx(sequential, abs=0.006)
    assert depth == math.floor((1 - 2 * hop) / share + 1e-9)
    certain = best_overlap(1, alpha, cost, CERTAIN, (depth,), 8)
    assert certain.throughput == pytest.approx(always, abs=0.006)
    assert best_overlap(1, alpha, cost, _hits_at(0.8), (depth,), 8).throughput == pytest.approx(mostly, abs=0.01)


@st.composite
def costs(draw):
    seconds = st.lists(st.floats(1e-3, 0.2), min_size=len(SIZES), max_size=len(SIZES))
    target, drafted = (tuple(zip(SIZES, draw(seconds), strict=True)) for _ in range(2))
    slow = st.floats(1.0, 2.0)
    return OverlapCost(RoundCost.measured(target, drafted, draw(st.floats(0, 0.02))), draw(slow), draw(slow))


def _theta(batch, alpha, cost, laws, depth, fan_out_of):
    """Throughput from the two-state chain, iterated: an implementation of its own."""
    if depth == 0:
        return batch / cost.alone.target.time(batch)

    def hit(length):
        parts = zip(position_weights(alpha, length), position_kinds(length), fan_out_of(length), strict=True)
        return (1 - laws.lost) * sum(weight * (1 - laws.miss(kind, guesses)) for weight, kind, guesses in parts)

    share, after_draft, after_plain = 0.5, hit(depth), hit(0)
    for _ in range(2000):
        share = share * after_draft + (1 - share) * after_plain
    num_tokens = batch * (1 + share * depth)
    num_rows = batch * (share * sum(fan_out_of(depth)) + (1 - share) * sum(fan_out_of(0)))
    if num_rows == 0:
        return batch / cost.alone.target.time(batch)
    seconds = max(cost.verify_time(batch, num_tokens), cost.prepare_time(num_tokens, num_rows, depth))
    return batch * (share * expected_tokens(alpha, depth) + 1 - share) / seconds


@settings(max_examples=30, deadline=None)
@given(costs(), st.integers(17, 64), st.floats(0.2, 0.95), st.floats(0.3, 3.0), st.floats(0.3, 3.0), st.floats(0, 0.3))
def test_depth_and_fan_out_are_the_best_of_all(cost, batch, alpha, recovery, bonus, lost):
    """Bug guarded: a search that misses the best pair, or a formula that is not the long run of the chain it describes."""
    laws = HitLaws(recovery, bonus, bonus, lost)
    depths = (0, 1, 3, 5)
    best = max(
        _theta(batch, alpha, cost, laws, depth, lambda length, gain=gain: guesses_worth(alpha, length, laws, gain))
        for depth in depths
        for gain in LEAST_GAINS
    )
    chosen = best_overlap(batch, alpha, cost, laws, depths, None)
    assert best * 0.975 <= chosen.throughput <= best * (1 + 1e-6)
    fixed = best_overlap(batch, alpha, cost, laws, depths, 3)
    best = max(_theta(batch, alpha, cost, laws, depth, lambda length: (3,) * (length + 1)) for depth in depths)
    assert fixed.throughput == pytest.approx(best, rel=1e-6)
    assert fixed.guesses(alpha, 2, laws) == (3, 3, 3)


def test_a_round_is_as_long_as_the_longer_of_its_two_halves():
    """Bug guarded: adding up what happens at the same time, or forgetting what sticks out."""
    cost = OverlapCost(RoundCost.measured(CPU_TARGET, CPU_DRAFT, hop_s=0.002), target_slowdown=1.5, draft_slowdown=2.0)
    assert cost.verify_time(1, 4) == pytest.approx(1.5 * 0.025)
    assert cost.prepare_time(4, 8, 3) == pytest.approx(2.0 * (0.013 + 3 * 0.016) + 0.002)
    slow = best_overlap(17, 0.8, OverlapCost(RoundCost.measured(FLAT, ((1, 0.4), (2000, 0.4)))), CERTAIN, (4,), 1)
    assert slow.exposed_s == pytest.approx(5 * 0.4 - 1.0)
    assert slow.throughput == pytest.approx(17 * expected_tokens(0.8, 4) * slow.hit_rate / 2.0, rel=0.1)


def test_rows_far_beyond_the_profile_are_not_free():
    """Bug guarded: a profile that is flat up to 16 rows promising that 1000 outcomes cost no more."""
    cost = OverlapCost(RoundCost.measured(FLAT, ((1, 0.1), (16, 0.1))))
    assert cost.prepare_time(10, 64, 4) == pytest.approx(0.5)
    assert cost.prepare_time(10, 640, 4) == pytest.approx(5.0)


def test_fewer_outcomes_are_prepared_the_more_requests_share_the_draft():
    """Bug guarded: a fan-out that ignores what the draft can compute within the verify."""
    draft = tuple((rows, 0.1 * max(1.0, rows / 100)) for rows in (1, 64, 100, 200, 400, 800))
    cost = OverlapCost(RoundCost.measured(FLAT, draft))
    chosen = [best_overlap(batch, 0.8, cost, HitLaws(), tuple(range(11)), None) for batch in (1, 4, 16, 64)]
    rows = [overlap.num_rows for overlap in chosen]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > 4 * rows[-1] > 0
    assert all(batch * overlap.num_rows < 400 for batch, overlap in zip((1, 4, 16, 64), chosen, strict=True))


def test_no_request_drafts_deeper_than_the_verify_hides():
    """Bug guarded: one good request making all the others wait, its draft being the longest."""
    cost = OverlapCost(RoundCost.measured(FLAT, ((1, 0.1), (1000, 0.1)), hop_s=0.05))
    overlap = best_overlap(8, 0.8, cost, HitLaws(), tuple(range(20)), 3)
    assert overlap.depth == overlap.deepest == 8
    assert overlap.exposed_s == 0.0
    barely = OverlapCost(RoundCost.measured(FLAT, ((1, 0.1), (1000, 0.1)), hop_s=0.005))
    assert best_overlap(8, 0.8, barely, HitLaws(), tuple(range(20)), 3).depth == 9, "a wait of 0.005 for a whole position pays"


def test_bad_requests_are_not_cut_short_where_the_draft_sets_the_limit():
    """Bug guarded: a price made to keep better requests from more depth taking it from worse ones, for which it is free too."""
    cost = OverlapCost(RoundCost.measured(FLAT, ((1, 0.1), (1000, 0.1))))
    assert best_overlap(8, 0.8, cost, HitLaws(), tuple(range(20)), 3).price(0.8) < 0.5**9


def test_asking_pays_for_one_request_and_not_for_one_of_eight():
    """Bug guarded: a batch that stalls for one miss, and one user who gets a plain step where waiting is cheap."""
    cost = OverlapCost(RoundCost.measured(FLAT, ((1, 0.1), (1000, 0.1)), hop_s=0.01))
    survivals = [0.8**position for position in range(1, 9)]
    alone, crowd = (best_overlap(batch, 0.8, cost, HitLaws(), tuple(range(11)), 3) for batch in (1, 8))
    gains = ask_gains(survivals, 1, 1, alone, cost)
    assert gains[0] == 0.0
    assert max(gains) == max(gains[2:6]) > 0.2
    assert max(ask_gains(survivals, 1, 8, crowd, cost)) == 0.0
    assert max(ask_gains([8 * survival for survival in survivals], 8, 8, crowd, cost)) > 8 * 0.2


def test_the_gain_of_asking_is_tokens_less_the_throughput_of_the_wait():
    """Bug guarded: a gain in the wrong unit. Equal hits after either step: sum (E(k) - 1) - Theta (k T_draft + hop)."""
    cost = OverlapCost(RoundCost.measured(FLAT, ((1, 0.1), (1000, 0.1)), hop_s=0.02))
    overlap = best_overlap(3, 0.8, cost, _hits_at(0.8), (8,), 8)
    gains = ask_gains([2 * 0.8**position for position in range(1, 9)], 2, 3, overlap, cost)
    for depth in range(1, 9):
        wait = overlap.throughput * (depth * 0.1 + 0.02)
        assert gains[depth] == pytest.approx(2 * (expected_tokens(0.8, depth) - 1) - wait)


def test_waiting_is_worth_what_the_hits_are():
    """Bug guarded: as much patience for one of eight as for all of them."""
    cost = OverlapCost(RoundCost.measured(FLAT, ((1, 0.1), (1000, 0.1))))
    overlap = best_overlap(8, 0.8, cost, _hits_at(0.8), (9,), 8)
    value = expected_tokens(0.8, 9) - 1
    assert overlap.hit_value == pytest.approx(value)
    assert worth_waiting_s(8, overlap) == pytest.approx(2 * 8 * 0.8 * value / overlap.throughput)
    assert worth_waiting_s(1, overlap) == pytest.approx(worth_waiting_s(8, overlap) / 8)
    assert worth_waiting_s(0, overlap) == 0.0


def test_a_costly_draft_is_worth_more_depth_where_it_is_hidden():
    """Bug guarded: the table of sequential rounds, where every position pays for a draft step, given to overlapped lanes."""
    cost = OverlapCost(RoundCost.measured(FLAT, ((1, 0.1), (1000, 0.1))))
    overlapped, sequential = overlap_price_table(0.8, cost, HitLaws(), 10), price_table(0.8, cost.alone, 10)
    assert [row[0] for row in overlapped] == [row[0] for row in sequential]
    assert (sequential[0][2], overlapped[0][2]) == (6, 9)
    assert all(over[1] < plain[1] for over, plain in zip(overlapped, sequential, strict=True))


def test_nothing_pays_for_an_unmeasured_or_useless_pair():
    """Bug guarded: preparing outcomes with a draft as slow as the target, or for a target of which nothing is known."""
    depths = tuple(range(9))
    unmeasured = OverlapCost(RoundCost.measured((), CPU_DRAFT))
    assert best_overlap(4, 0.9, unmeasured, HitLaws(), depths, None).depth == 0
    useless = best_overlap(4, 0.0, OverlapCost(RoundCost.measured(CPU_TARGET, CPU_DRAFT)), HitLaws(), depths, None)
    assert (useless.depth, useless.num_rows, useless.hit_value, useless.price(0.0)) == (0, 0.0, 0.0, 1.0)
