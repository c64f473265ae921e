"""The number of lanes and drafts: pure decisions over scripted signals. No Ray, no clock."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.controller_policy import ControllerPolicy
from autoscale.cost_model import RoundCost
from autoscale.lane_policy import LanePolicy
from autoscale.replicas import ReplicaDecision, ReplicaLimits, ReplicaMemory, ReplicaPolicy, ReplicaSignals
from autoscale.signals import DepthTable, LaneReport
from engine.types import StepReport

TICK_S = 0.25
KNEE = 16
TARGET = tuple((float(n), 0.03 * max(1.0, n / KNEE)) for n in (1, 2, 4, 8, 16, 32, 64, 128))
"""Twice the step of one request at 32."""
DRAFT = tuple((float(n), 0.003) for n in (1, 64))
COST = RoundCost.measured(TARGET, DRAFT)
FULL = 32


def limits(**more: Any) -> ReplicaLimits:
    """Every hold different, so that mixing them up shows."""
    base = {
        "max_lanes": 4,
        "max_drafts": 2,
        "scale_up_s": 2.0,
        "scale_down_s": 8.0,
        "idle_s": 20.0,
        "dwell_s": 1.0,
        "settle_s": 0.0,
    }
    return ReplicaLimits(**{**base, **more})


class Cluster:
    """Replicas that come and go as they are told, after a delay; whatever is told is kept."""

    def __init__(self, policy: ReplicaPolicy, lanes: int = 1, drafts: int = 1, delay_ticks: int = 0):
        self.policy, self.memory, self.now_s = policy, ReplicaMemory(), 1000.0
        self.lanes, self.drafts = lanes, drafts
        self.told: list[tuple[int, int]] = []
        self.decision: ReplicaDecision | None = None
        self._delay_ticks = delay_ticks
        self._since_change = 0

    def run(self, seconds: float, requests: float, rows: float = 0.0, **signals: Any) -> "Cluster":
        """Live with this load for a while."""
        for _ in range(round(seconds / TICK_S)):
            self.tick(requests, rows, **signals)
        return self

    def tick(self, requests: float, rows: float, **signals: Any) -> None:
        given = {"num_lanes": self.lanes, "num_drafts": self.drafts, "num_running": requests, "cost": COST, "acceptance": 0.8}
        given |= {"wanted_rows": rows, "clearly_wanted_rows": rows, **signals}
        self.decision, self.memory = self.policy.step(ReplicaSignals(**given), self.memory, self.now_s)
        self.now_s += TICK_S
        if self.decision is not None:
            self.told.append((self.decision.lanes, self.decision.drafts))
            self._follow()

    def _follow(self) -> None:
        assert self.decision is not None
        self._since_change += 1
        if (self.lanes, self.drafts) != self.told[-1] and self._since_change > self._delay_ticks:
            self.lanes, self.drafts, self._since_change = *self.told[-1], 0

    @property
    def changes(self) -> int:
        return sum(before != after for before, after in pairwise(self.told))


def cluster(lanes: int = 1, drafts: int = 1, delay_ticks: int = 0, **more: Any) -> Cluster:
    return Cluster(ReplicaPolicy(limits(**more)), lanes, drafts, delay_ticks)


# --- lanes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("requests", "lanes"), [(0, 1), (1, 1), (FULL, 1), (FULL + 1, 2), (2 * FULL, 2), (90, 3), (1e6, 4)])
def test_as_many_lanes_as_the_requests_fill(requests: float, lanes: int) -> None:
    """Bug guarded: lanes by requests per lane of Serve's rule and not by the step time, one too many on a full lane, none for
    an idle service, or more than lanes.max."""
    assert cluster().run(5, requests).lanes == lanes


@pytest.mark.parametrize(
    ("changed", "lanes"),
    [
        ({"latency_objective_s": 0.033}, 3),
        ({"max_batch": 20}, 3),
        ({"min_lanes": 3, "max_lanes": 3}, 3),
    ],
)
def test_what_else_fills_a_lane(changed: dict[str, Any], lanes: int) -> None:
    """Bug guarded: a latency objective, lanes.max_batch or lanes.min that is read and ignored."""
    assert cluster(lanes=2, **changed).run(5, 44).lanes == lanes


def test_unmeasured_lanes_are_half_of_max_batch() -> None:
    """Bug guarded: the default cost of a target that nobody measured taken for a measurement: a lane per two requests."""
    assert cluster(max_batch=40).run(5, 41, cost=RoundCost.measured((), None)).lanes == 3


def test_requests_that_wait_fill_their_lanes() -> None:
    """Bug guarded: a lane whose KV cache is full at 8 requests never gets help, because its step is fast."""
    assert cluster().run(30, 8, num_waiting=8, most_running=8).lanes == 2
    assert cluster().run(5, 8, num_waiting=0.5, most_running=8).lanes == 1, "one that is just being taken in is no queue"


def test_expected_requests_count_like_running_ones() -> None:
    """Bug guarded: lanes that start when the queue is there, not when it is coming."""
    assert cluster().run(5, 1, expected_requests=50.0).lanes == 2


def test_a_change_is_held_for_its_time() -> None:
    """Bug guarded: a spike starts a lane, a pause ends one, or holds that are swapped."""
    one = cluster().run(1.75, 50)
    assert one.lanes == 1
    assert one.run(0.5, 1).run(1.75, 50).lanes == 1, "the hold goes on where it was interrupted"
    two = one.run(1, 50)
    assert two.lanes == 2
    assert two.run(7.5, 1).lanes == 2
    assert two.run(1, 1).lanes == 1


def test_the_least_that_was_asked_for_all_the_time_is_given() -> None:
    """Bug guarded: the last moment of a hold decides, be it a spike or a dip."""
    assert cluster().run(1.5, 50).run(0.5, 120).run(0.25, 50).lanes == 2
    assert cluster(lanes=4).run(4, 70).run(3.75, 1).run(0.5, 1).lanes == 3


def test_steady_load_slightly_over_one_lane_settles() -> None:
    """Bug guarded: user case P12, ten minutes of steady open-loop load over the threshold; two lanes are faster, so fewer
    requests are there, so one lane seems enough."""

    def play(given: Cluster, rate_known: bool) -> int:
        token_rate = 1.02 * FULL / 0.06
        for _ in range(2400):
            # Beyond the knee the step is proportional to the batch: one lane has just too much, two have few requests each.
            requests = 36.0 if given.lanes == 1 else 24.0
            given.tick(requests, 0.0, token_rate=token_rate if rate_known else 0.0)
        return given.changes

    assert play(cluster(drafts=0), rate_known=True) == 1
    assert play(cluster(drafts=0), rate_known=False) > 50, "the negative control: by the count alone it flaps"


def test_load_on_the_threshold_does_not_flap() -> None:
    """Bug guarded: one request more or less starts and ends lanes."""

    def play(given: Cluster) -> int:
        for tick in range(2400):
            given.tick(FULL + (-1) ** (tick // 40), 0.0)
        return given.changes

    def swing(given: Cluster) -> int:
        for tick in range(2400):
            given.tick(FULL + 16 * (-1) ** (tick // 4), 0.0)
        return given.changes

    assert play(cluster(drafts=0)) == 1
    assert play(cluster(drafts=0, scale_up_s=0.0, scale_down_s=0.0)) <= 1, "the margin alone is enough"
    assert swing(cluster(drafts=0)) == 0
    assert swing(cluster(drafts=0, scale_up_s=0.0, scale_down_s=0.0)) > 100, "the negative control: swings are followed"


# --- drafts -----------------------------------------------------------------------------------------------------------------


def test_drafts_go_after_the_hold_and_come_back_after_the_dwell() -> None:
    """Bug guarded: a draft that a short burst removes, that stays for ever, or whose return takes as long as its leaving."""
    one = cluster().run(19.5, 40, rows=0)
    assert one.drafts == 1
    assert one.run(1, 40, rows=0).drafts == 0
    assert one.run(0.75, 4, rows=4).drafts == 0
    assert one.run(0.75, 4, rows=4).drafts == 1


def test_what_is_wanted_a_little_keeps_a_draft_and_starts_none() -> None:
    """Bug guarded: at the break-even load the drafts come and go with the noise."""
    weak = {"wanted_rows": 4.0, "clearly_wanted_rows": 0.0}
    assert cluster(drafts=1).run(100, 4, **weak).drafts == 1
    assert cluster(drafts=0).run(100, 4, **weak).drafts == 0


def test_drafts_on_the_threshold_do_not_flap() -> None:
    """Bug guarded: the price crosses 1 at every other report, and a model is loaded each time."""

    def play(given: Cluster) -> int:
        for tick in range(2400):
            given.tick(8, 8.0 * (tick // 6 % 2))
        return given.changes

    assert play(cluster()) == 0
    assert play(cluster(idle_s=0.0, dwell_s=0.0)) > 300, "the negative control"


def test_the_drafts_of_an_idle_service_go_only_where_gpus_can_be_given_back() -> None:
    """Bug guarded: an idle service that pays for a draft's GPU, and one whose own GPUs idle while the next request waits."""
    assert cluster().run(30, 0, rows=1).drafts == 0
    assert cluster(lane_gpus=1, draft_gpus=1, num_gpus=2).run(30, 0, rows=1).drafts == 1


@pytest.mark.parametrize(("rows", "drafts"), [(1, 1), (60, 1), (200, 2), (1e6, 2)])
def test_as_many_drafts_as_the_rows_fill(rows: float, drafts: int) -> None:
    """Bug guarded: one draft for any demand, or more than drafts.max."""
    cost = RoundCost.measured(TARGET, ((1, 0.003), (32, 0.003), (128, 0.012)))
    assert cluster(drafts=0).run(5, 8, rows=rows, cost=cost).drafts == drafts


@pytest.mark.parametrize(("changed", "drafts"), [({"min_drafts": 1}, 1), ({"max_drafts": 0}, 0)])
def test_the_bounds_of_drafts_hold(changed: dict[str, Any], drafts: int) -> None:
    """Bug guarded: drafts.min that is ignored when nobody wants drafts, or a draft where none is configured."""
    assert cluster(drafts=drafts, **changed).run(30, 40, rows=0).run(5, 4, rows=4 * (1 - drafts)).drafts == drafts


# --- a fixed number of GPUs -------------------------------------------------------------------------------------------------

FIXED = {"max_lanes": 2, "max_drafts": 1, "lane_gpus": 1.0, "draft_gpus": 1.0, "num_gpus": 2.0}


def test_the_drafts_gpu_becomes_a_lane_and_a_draft_again() -> None:
    """Bug guarded: a second lane that is asked for while the draft has its GPU, or a draft while the lane that leaves has it:
    the one that waits for a GPU may take it from whom it was meant for."""
    two = cluster(delay_ticks=3, **FIXED).run(5, 1, rows=1)
    assert two.told == [(1, 1)] * 20
    two.run(10, 50, rows=50)
    assert [state for state, after in pairwise(two.told) if state != after] == [(1, 1), (1, 0)]
    assert two.told[-1] == (2, 0)
    two.run(20, 1, rows=1)
    assert [state for state, after in pairwise(two.told) if state != after] == [(1, 1), (1, 0), (2, 0), (1, 0)]
    assert two.told[-1] == (1, 1)


def test_drafts_that_bring_more_than_a_lane_keep_their_gpu() -> None:
    """Bug guarded: lanes win always, also where the target's step hardly grows and another lane makes no more tokens."""
    flat = RoundCost.measured(((1, 0.03), (256, 0.033)), DRAFT)
    two = cluster(**FIXED, max_batch=20).run(10, 30, rows=30, cost=flat)
    assert two.told[-1] == (1, 1)
    assert "drafts are worth more" in (two.decision.lanes_reason if two.decision else "")


def test_a_lane_that_leaves_still_has_its_gpu() -> None:
    """Bug guarded: GPUs counted as free when a lane is told to go, not when it has finished its streams."""
    two = cluster(lanes=2, drafts=0, **FIXED).run(1, 50)
    policy, memory = two.policy, two.memory
    signals = ReplicaSignals(
        num_lanes=2, num_leaving=1, num_running=1, cost=COST, acceptance=0.8, wanted_rows=1, clearly_wanted_rows=1
    )
    decision = None
    for tick in range(100):
        decision, memory = policy.step(signals, memory, two.now_s + tick * TICK_S)
    assert decision is not None
    assert (decision.lanes, decision.drafts) == (1, 0)
    assert "when a lane has left its GPU" in decision.drafts_reason


@settings(max_examples=60, deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(1, 60), st.floats(0, 200), st.floats(0, 200)), min_size=1, max_size=8),
    num_gpus=st.sampled_from([2.0, 3.0, 5.0, 8.0]),
    draft_gpus=st.sampled_from([0.5, 1.0, 2.0]),
    delay_ticks=st.integers(0, 8),
)
def test_never_more_than_fits(
    loads: list[tuple[int, float, float]], num_gpus: float, draft_gpus: float, delay_ticks: int
) -> None:
    """Bug guarded: at some moment replicas are asked for that need GPUs which others still have, or bounds are broken."""
    given_limits = {"max_lanes": 4, "max_drafts": 2, "lane_gpus": 1.0, "draft_gpus": draft_gpus, "num_gpus": num_gpus}
    one = cluster(lanes=1, drafts=0, delay_ticks=delay_ticks, **given_limits)
    for ticks, requests, rows in loads:
        for _ in range(ticks):
            lanes, drafts = one.lanes, one.drafts
            one.tick(requests, rows)
            assert one.decision is not None
            told = one.decision
            assert 1 <= told.lanes <= 4
            assert 0 <= told.drafts <= 2
            assert told.lanes + draft_gpus * told.drafts <= num_gpus
            if told.lanes > lanes:
                assert told.lanes + draft_gpus * drafts <= num_gpus
            if told.drafts > drafts:
                assert lanes + draft_gpus * told.drafts <= num_gpus


# --- bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", ["num_running", "expected_requests", "token_rate", "wanted_rows", "acceptance"])
def test_bad_signals_change_nothing_and_are_counted(name: str, bad: float) -> None:
    """Bug guarded: a NaN that compares as "fits in fewer lanes" and takes them all away."""
    one = cluster(lanes=2).run(5, 50, rows=4)
    before = one.decision
    one.run(60, 50, rows=4, **{name: bad})
    assert one.decision == before
    assert one.memory.num_bad_signals == 240


def test_without_lanes_and_before_all_have_reported_nothing_changes() -> None:
    """Bug guarded: a controller that has just restarted hears one of two lanes and ends the other."""
    one = cluster(settle_s=5.0)
    assert one.run(2, 0, num_lanes=0).decision is None
    assert one.run(5, 50).decision is None
    assert one.run(0.5, 50, num_lanes=2).decision is not None
    assert one.told[0][0] == 2
    before = one.decision
    assert one.run(60, 0, num_lanes=0).decision == before


def test_a_clock_that_jumps_restarts_the_holds() -> None:
    """Bug guarded: after a step back the holds last for as long as the step was; after a step to no number at all, for ever."""
    one = cluster().run(1, 50)
    one.now_s -= 500
    assert one.run(1.75, 50).lanes == 1
    assert one.run(1, 50).lanes == 2
    one.now_s, then_s = math.nan, one.now_s
    one.tick(1, 0)
    one.now_s = then_s
    assert one.run(9, 1).lanes == 1
    assert one.memory.num_clock_jumps == 2


# --- what the lanes ask for -------------------------------------------------------------------------------------------------


def lane(**more: Any) -> LanePolicy:
    base = {"max_depth": 8, "target_step_times": TARGET, "draft_step_times": DRAFT, "prior_alpha": 0.8}
    return LanePolicy(**{**base, **more})


def test_a_lane_without_a_draft_wants_one_where_it_would_pay() -> None:
    """Bug guarded: rows by what is drafted now: nothing, so that a draft at zero stays there for ever."""
    policy = lane()
    assert policy.draft_demand(0, False, 0.0) == (1, 1)
    assert policy.draft_demand(4, False, 0.0) == (4, 4)
    assert policy.draft_demand(4, True, 0.0)[0] > 4, "overlapped rounds prepare several outcomes"
    assert policy.draft_demand(40, True, 0.0) == (0, 0)
    policy.update_table(DepthTable(predicted_batch=40.0))
    assert policy.draft_demand(1, True, 0.0) == (0, 0), "by the batch that is about to come"


def test_the_costs_of_the_last_draft_decide() -> None:
    """Bug guarded: no draft means no cost, so one that never paid is started again and again."""
    slow = lane(draft_step_times=((1, 0.2), (64, 0.2)))
    slow.update_draft_cost(())
    assert slow.draft_demand(1, True, 0.0) == (0, 0)
    assert lane(draft_step_times=None).draft_demand(1, False, 0.0) == (1, 1), "one that nobody has seen is worth a try"


def test_a_gain_within_the_margin_is_not_wanted_clearly() -> None:
    """Bug guarded: no hysteresis between what keeps a draft and what starts one."""
    barely = lane(draft_step_times=((1, 0.022), (64, 0.022)))
    wanted, clearly = barely.draft_demand(1, False, 0.0)
    assert (wanted, clearly) == (1, 0)


@pytest.mark.parametrize(("depth", "rows"), [(0, 0.0), (3, 50.0)])
def test_a_fixed_depth_wants_drafts_at_any_load(depth: int, rows: float) -> None:
    """Bug guarded: a measurement at a fixed depth loses its draft in the middle, or depth 0 keeps one."""
    assert lane(fixed_depth=depth).draft_demand(50, True, 0.0) == (rows, rows)


def last_draft() -> StepReport:
    return StepReport(
        round_id=0,
        batch_size=1,
        num_waiting=0,
        num_target_tokens=2,
        num_prefill_tokens=0,
        num_committed=1,
        num_drafted=1,
        num_accepted=0,
        depths=(1,),
        verify_time_s=0.03,
        draft_time_s=0.02,
    )


def test_bad_drafts_are_forgiven_in_time() -> None:
    """Bug guarded: drafts that were bad for one kind of text and have left are never tried again."""
    policy = lane(draft_step_times=((1, 0.02), (64, 0.02)), prior_alpha=0.9)
    assert policy.draft_demand(1, False, 0.0)[0] == 1
    for _ in range(200):
        policy.observe("r", 1, 0)
    policy.report(last_draft(), 0.0)
    assert policy.draft_demand(1, False, 1.0) == (0, 0)
    assert policy.draft_demand(1, False, 1800.0)[0] == 1


def test_the_controller_adds_up_what_the_lanes_want() -> None:
    """Bug guarded: demand of one lane only, a NaN that reaches the decision, a lane that has ended and still counts, and a new
    lane that makes drafts look free."""
    controller = ControllerPolicy(max_depth=8)
    first = LaneReport(
        lane_id="a", now_s=0.0, num_running=3, target_step_times=TARGET, draft_step_times=DRAFT, wanted_draft_rows=3.0
    )
    controller.ingest(first, 0.0)
    controller.ingest(LaneReport(lane_id="b", now_s=0.0, num_running=2, num_waiting=1, wanted_draft_rows=math.nan), 0.0)
    signals = controller.replica_signals(0.0, num_leaving=1, num_drafts=2)
    assert (signals.num_lanes, signals.num_leaving, signals.num_drafts) == (2, 1, 2)
    assert (signals.num_running, signals.num_waiting, signals.wanted_rows) == (5, 1, 3.0)
    controller.forget("a")
    signals = controller.replica_signals(0.0, num_leaving=0, num_drafts=2)
    assert (signals.num_lanes, signals.wanted_rows) == (1, 0.0)
    assert signals.cost.draft_time(1) == DRAFT[0][1]
    assert controller.draft_step_times == DRAFT
