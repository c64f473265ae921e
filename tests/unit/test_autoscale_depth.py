import math
import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoscale.depth import choose_depth
from autoscale.stabilise import CALM_S, DwellGate, GateMemory

DWELL_S = 1.0


@pytest.mark.parametrize(
    ("price", "room", "depth"),
    [
        (0.0, 8, 4),
        (0.5, 8, 2),
        (0.8, 8, 0),
        (0.79, 8, 1),
        (1.0, 8, 0),
        (0.0, 3, 3),
        (0.0, 0, 0),
        (0.0, -1, 0),
        (math.nan, 8, 0),
    ],
)
def test_depth_counts_the_positions_above_the_price(price, room, depth):
    """Guards against >= (a price of 1 must stop everything), a negative room and a NaN price."""
    assert choose_depth((0.8, 0.64, 0.5, 0.4), price, room) == depth


def test_a_position_behind_one_that_does_not_pay_does_not_count():
    """Guards against counting all positions above the price: a draft is a prefix."""
    assert choose_depth((0.9, 0.3, 0.8), 0.5, 8) == 1


def _changes(gate, prices, step_s, alpha=0.8):
    memory, decisions = GateMemory(), []
    for index, price in enumerate(prices):
        is_open, memory = gate.step(price, alpha, memory, index * step_s)
        decisions.append(is_open)
    return sum(before != after for before, after in pairwise(decisions))


def test_closing_is_immediate_and_opening_waits():
    """Guards against a dwell that keeps speculation on while it hurts."""
    gate, memory = DwellGate(DWELL_S), GateMemory()
    is_open, memory = gate.step(0.3, 0.8, memory, 10.0)
    assert is_open
    is_open, memory = gate.step(0.8, 0.8, memory, 10.01)
    assert not is_open
    is_open, memory = gate.step(0.1, 0.8, memory, 10.9)
    assert not is_open
    is_open, memory = gate.step(0.1, 0.8, memory, 11.01)
    assert is_open


def test_opening_needs_a_margin():
    """Guards against switching on for a gain that catching up the draft eats: 0.75 pays at 0.8 but not clearly."""
    gate, closed = DwellGate(DWELL_S), GateMemory(False, 0.0)
    assert not gate.step(0.75, 0.8, closed, 100.0)[0]
    assert gate.step(0.70, 0.8, closed, 100.0)[0]
    assert gate.step(0.75, 0.8, GateMemory(True, 0.0), 100.0)[0]


@pytest.mark.parametrize("half_period_s", [0.02, 0.3, 0.5, 1.0, 2.0])
def test_a_square_wave_changes_the_depth_a_bounded_number_of_times(half_period_s):
    """Guards against flapping every step at the switch point (P03)."""
    step_s, seconds = 0.02, 60
    prices = [1.0 if int(i * step_s / half_period_s + 1e-9) % 2 else 0.3 for i in range(int(seconds / step_s))]
    assert 0 < _changes(DwellGate(DWELL_S), prices, step_s) <= 2 * (seconds / DWELL_S + 1)
    if half_period_s < DWELL_S:
        ungated = sum(before != after for before, after in pairwise(prices))
        assert _changes(DwellGate(DWELL_S), prices, step_s) < ungated


def test_noise_within_the_margin_changes_nothing_after_closing():
    """Guards against a hysteresis that is only a delay: hovering inside the band must not reopen at all."""
    assert _changes(DwellGate(0.0), [0.75, 0.82, *[0.74, 0.85] * 100], 0.02) == 1


@example([(0.9, math.nan)])
@example([(0.9, math.inf)])
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(allow_nan=True, allow_infinity=True)), max_size=30))
def test_no_clock_leaves_the_gate_stuck(steps):
    """Guards against NaN or a future time stored as the last change, after which it would never open again."""
    gate, memory = DwellGate(DWELL_S), GateMemory()
    for price, now_s in steps:
        _, memory = gate.step(price, 0.8, memory, now_s)
    _, memory = gate.step(0.1, 0.8, memory, 0.0)
    assert gate.step(0.1, 0.8, memory, DWELL_S)[0]


def test_without_a_time_the_gate_closes_but_does_not_open():
    """Guards against a NaN time skipping the dwell."""
    gate = DwellGate(DWELL_S)
    assert not gate.step(0.9, 0.8, GateMemory(True, 5.0), math.nan)[0]
    assert not gate.step(0.1, 0.8, GateMemory(False, 5.0), math.nan)[0]


def _changes_at(gate, seconds, *, price_of):
    """Changes of a gate that is asked 20 times per second."""
    memory, changes = GateMemory(), []
    for tick in range(20 * seconds):
        before = memory.is_open
        _, memory = gate.step(price_of(tick), 0.7, memory, tick / 20)
        if memory.is_open != before:
            changes.append(tick / 20)
    return changes


def test_a_load_on_the_threshold_changes_little():
    """Bug guarded: at the load where speculation just stops paying the depth goes to 0 and back every dwell."""
    noise = random.Random(2)
    changes = _changes_at(DwellGate(DWELL_S), 600, price_of=lambda tick: noise.uniform(0.5, 0.75))
    late = [change for change in changes if change >= 10]
    assert max(sum(start <= change < start + 60 for change in late) for start in late) <= 2
    patient = _changes_at(DwellGate(DWELL_S), 600, price_of=lambda tick: noise.uniform(0.2, 0.75))
    assert len(patient) > 300, "the control: what pays greatly is not waited for"


def test_a_load_that_has_gone_is_not_waited_for():
    """Bug guarded: after some minutes on the threshold a lane stays without speculation for a minute although it is idle."""
    noise = random.Random(3)
    gate, memory = DwellGate(DWELL_S), GateMemory()
    for tick in range(20 * 300):
        _, memory = gate.step(noise.uniform(0.5, 0.75), 0.7, memory, tick / 20)
    _, memory = gate.step(0.9, 0.7, memory, 300.0)
    assert memory.is_wary
    waits = memory.changed_at_s + CALM_S - 1.0
    assert not gate.step(0.55, 0.7, memory, waits)[0], "the control: what pays clearly, not greatly, waits"
    assert gate.step(0.1, 0.7, memory, 300.0 + 1.1 * DWELL_S)[0]


@pytest.mark.parametrize("redeemed_s", [0.0, 3.0, 20.0])
def test_opening_waits_until_catching_up_is_worth_it(redeemed_s):
    """Bug guarded: a lane that decoded long texts plainly makes its draft read them all for a gain of some seconds."""
    gate, memory, opened_s = DwellGate(DWELL_S), GateMemory(False, 0.0), None
    for tick in range(1000):
        is_open, memory = gate.step(0.9 if tick < 500 else 0.1, 0.8, memory, tick / 20, redeemed_s)
        opened_s = tick / 20 if is_open and opened_s is None else opened_s
    assert opened_s == pytest.approx(25.0 + redeemed_s)


def test_a_gain_that_comes_and_goes_buys_no_catching_up():
    """Bug guarded: seconds in which speculation did not pay count towards what was forgone."""
    gate, memory = DwellGate(DWELL_S), GateMemory(False, 0.0)
    for tick in range(2000):
        is_open, memory = gate.step(0.9 if tick % 60 == 0 else 0.1, 0.8, memory, tick / 20, 4.0)
        assert not is_open
