import math

import msgspec
import pytest

from autoscale.controller_policy import ControllerPolicy
from autoscale.cost_model import OverlapCost, RoundCost
from autoscale.hit_rate import HitLaws
from autoscale.overlap import overlap_price_table
from autoscale.price import TABLE_BATCHES, price_table
from autoscale.signals import DepthTable, LaneReport, OverlapReport

SIZES = (1, 2, 4, 8, 16, 32, 64)
CPU_TARGET = tuple(zip(SIZES, (0.022, 0.024, 0.025, 0.033, 0.044, 0.070, 0.120), strict=True))
CPU_DRAFT = ((1, 0.011), (2, 0.012), (4, 0.013), (8, 0.016), (16, 0.020))


def _lane(name="a", now_s=0.0, **fields):
    usual = {
        "num_running": 2,
        "mean_output_tokens": 100.0,
        "tokens_per_s": 100.0,
        "acceptance": 0.85,
        "target_step_times": CPU_TARGET,
        "draft_step_times": CPU_DRAFT,
    }
    return LaneReport(lane_id=name, now_s=now_s, **{**usual, **fields})


def _load(policy, seconds, arrivals_per_report, names=("a",), start_s=0.0, **fields):
    """Report every 0.25 s; returns the time of the last report."""
    now_s = start_s
    for _ in range(int(seconds * 4)):
        now_s += 0.25
        for name in names:
            policy.ingest(_lane(name, now_s, num_arrivals=arrivals_per_report, **fields), now_s)
    return now_s


def test_the_cluster_rate_becomes_a_batch_per_lane():
    """Guards against a prediction per cluster: 2 lanes * 8/s * 100 tokens * 20 ms = 32 requests, 16 each."""
    policy = ControllerPolicy(max_depth=8)
    now_s = _load(policy, 30, 2, names=("a", "b"))
    state = policy.state(now_s)
    assert state.arrival_rate == pytest.approx(16.0, rel=0.01)
    assert state.predicted_batch == pytest.approx(16.0, rel=0.01)
    assert state.actual_batch == 2


def test_an_idle_lane_does_not_look_slow_per_token():
    """Guards against tokens/s over an idle window: 1 running at 2 tokens/s is not 500 ms per token, a step takes 22 ms."""
    policy = ControllerPolicy(max_depth=8)
    now_s = _load(policy, 30, 1, num_running=1, tokens_per_s=2.0)
    assert policy.state(now_s).predicted_batch == pytest.approx(4 * 100 * 0.022, rel=0.01)


def test_the_table_is_the_price_of_the_measured_costs():
    """Guards against a table of anything else than the lanes' own acceptance and step times."""
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_lane(), 0.0)
    table = policy.table(0.0)
    assert table.prices == price_table(0.85, RoundCost.measured(CPU_TARGET, CPU_DRAFT), 8)
    assert [row[0] for row in table.prices] == list(TABLE_BATCHES)


def test_depth_falls_to_zero_under_load_and_comes_back():
    """Guards against a controller that follows the load in one direction only (P02, P13)."""
    policy = ControllerPolicy(max_depth=8)
    now_s = _load(policy, 5, 0)
    assert policy.snapshot(now_s)["depth"] == 1
    now_s = _load(policy, 20, 5, start_s=now_s)
    crowded = policy.snapshot(now_s)
    assert crowded["depth"] == 0
    assert crowded["predicted_batch"] > crowded["break_even_batch"] == 16
    now_s = _load(policy, 60, 0, start_s=now_s)
    assert policy.snapshot(now_s)["depth"] == 1


def test_silent_lanes_are_dropped():
    """Guards against traffic of a dead lane counting forever, and against its share of the lanes."""
    policy = ControllerPolicy(max_depth=8)
    now_s = _load(policy, 30, 2, names=("a", "b"))
    now_s = _load(policy, 5.5, 4, names=("a",), start_s=now_s)
    assert policy.snapshot(now_s)["lanes"] == ["a"]
    assert policy.snapshot(now_s)["anomalies"]["lanes_dropped"] == 1
    assert policy.snapshot(now_s + 60)["lanes"] == []


def test_no_lane_and_no_profile_are_answered_without_rows():
    """Guards against a crash at start-up, and against prices made up from nothing."""
    policy = ControllerPolicy(max_depth=8)
    assert policy.table(0.0) == DepthTable(reason="no lane is reporting")
    assert policy.snapshot(0.0)["price"] is None
    policy.ingest(_lane(target_step_times=((1, math.nan),)), 1.0)
    assert policy.table(1.0).prices == ()
    assert "no lane has reported step times" in policy.table(1.0).reason


@pytest.mark.parametrize(
    "field", ["num_arrivals", "num_running", "num_waiting", "mean_output_tokens", "tokens_per_s", "acceptance"]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -3.0])
def test_broken_fields_are_replaced_and_counted(field, bad):
    """Guards against one NaN from one lane reaching the table of all."""
    policy = ControllerPolicy(max_depth=8)
    _load(policy, 5, 1)
    before = policy.table(5.0)
    policy.ingest(msgspec.structs.replace(_lane(now_s=5.0), **{field: bad}), 5.0)
    after = policy.table(5.0)
    assert after.prices == before.prices
    assert after.predicted_batch == pytest.approx(before.predicted_batch)
    assert policy.snapshot(5.0)["anomalies"]["bad_fields"] == 1


def test_arrivals_that_are_no_number_count_as_none():
    """Guards against counting the previous report's arrivals twice."""
    policy = ControllerPolicy(max_depth=8)
    now_s = _load(policy, 30, 1)
    policy.ingest(_lane(now_s=now_s + 2, num_arrivals=-1), now_s + 2)
    assert policy.state(now_s + 2).arrival_rate == pytest.approx(2.0, rel=0.01)


def test_a_first_report_of_nothing_but_nan_is_survived():
    """Guards against needing a previous good value."""
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_lane(now_s=math.nan, acceptance=math.nan, tokens_per_s=math.nan, mean_output_tokens=math.nan), math.nan)
    shot = policy.snapshot(math.nan)
    assert shot["predicted_batch"] == 0.0
    assert shot["depth"] == 0
    assert shot["anomalies"]["bad_fields"] == 3


def test_the_controllers_clock_may_jump_backwards():
    """Guards against lanes that never expire after the clock was set back, and against dropping them all at the jump."""
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_lane("a", 1000.0), 1000.0)
    policy.ingest(_lane("b", 1000.0), 10.0)
    assert policy.snapshot(10.0)["lanes"] == ["a", "b"]
    assert policy.snapshot(10.0)["anomalies"]["clock_jumps"] == 1
    assert policy.snapshot(16.0)["lanes"] == []


def test_a_lanes_clock_may_jump_backwards():
    """Guards against a restarted lane (its clock starts anew) giving a negative or huge rate."""
    policy = ControllerPolicy(max_depth=8)
    now_s = _load(policy, 20, 1, start_s=1000.0)
    policy.ingest(_lane("a", 0.1, num_arrivals=50), now_s)
    assert policy.state(now_s).arrival_rate == pytest.approx(4.0, rel=0.01)
    assert policy.snapshot(now_s)["anomalies"]["clock_jumps"] == 1


def test_unknown_and_unnamed_lanes():
    """Guards against refusing a lane that scaled up, and against adding one without a name."""
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_lane(""), 0.0)
    policy.ingest(_lane("new"), 0.0)
    shot = policy.snapshot(0.0)
    assert shot["lanes"] == ["new"]
    assert (shot["anomalies"]["unnamed_lanes"], shot["anomalies"]["lanes_joined"]) == (1, 1)


def test_busy_lanes_decide_the_acceptance():
    """Guards against idle lanes, which report their prior, diluting what busy ones measure."""
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_lane("busy", num_running=10, acceptance=0.9), 0.0)
    policy.ingest(_lane("idle", num_running=0, acceptance=0.1), 0.0)
    assert policy.state(0.0).acceptance == pytest.approx(0.9)


def test_the_version_changes_with_the_prices_only():
    """Guards against a version that says nothing because it always changes, or never."""
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_lane(), 0.0)
    first = policy.table(0.0).version
    assert policy.table(1.0).version == first
    policy.ingest(_lane(now_s=1.0, acceptance=0.5), 1.0)
    assert policy.table(1.0).version == first, "prices are made anew twice per second"
    assert policy.table(1.5).version == first + 1
    policy.ingest(_lane("another", now_s=1.5, acceptance=0.9), 1.5)
    assert policy.table(1.5).version == first + 2, "a lane that joins is reckoned with at once"


def test_the_reason_is_one_sentence_with_the_numbers():
    """Guards against a dashboard that shows a decision without its cause."""
    policy = ControllerPolicy(max_depth=8)
    now_s = _load(policy, 30, 1)
    assert policy.snapshot(now_s)["reason"] == (
        "1 lane, 4.00 requests/s: 2.0 running per lane, 8.0 expected; "
        "at acceptance 0.85 speculation pays below 16 requests per lane"
    )


def test_reports_and_tables_cross_the_wire():
    """Guards against a field that msgpack cannot carry: what arrives is what was sent."""
    report, table = _lane(), DepthTable(prices=((1, 0.5, 2),), predicted_batch=1.5, reason="why", version=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=LaneReport) == report
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=DepthTable) == table


def _overlapping(name, **fields):
    return _lane(name, overlap=OverlapReport(is_active=True, hit_rate=0.7, num_rows=12.0, **fields))


def test_overlapped_lanes_get_prices_of_their_own():
    """Bug guarded: a table in which every position pays for a draft step, published to lanes that hide their drafts."""
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_overlapping("a", target_slowdown=1.25, draft_slowdown=1.5, hop_s=0.001), 0.0)
    table = policy.table(0.0)
    beside = OverlapCost(RoundCost.measured(CPU_TARGET, CPU_DRAFT, 0.001), 1.25, 1.5)
    assert table.overlapped_prices == overlap_price_table(0.85, beside.rounded(), HitLaws().rounded(), 8)
    assert table.prices == price_table(0.85, RoundCost.measured(CPU_TARGET, CPU_DRAFT), 8)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=DepthTable) == table


def test_without_overlapped_lanes_there_are_no_such_prices():
    """Bug guarded: time spent on, and a version that changes with, a table that nobody uses."""
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_lane(), 0.0)
    assert policy.table(0.0).overlapped_prices == ()
    before = policy.table(0.0).version
    policy.ingest(_overlapping("b"), 0.1)
    assert policy.table(0.1).overlapped_prices
    assert policy.table(0.1).version == before + 1


def test_the_snapshot_speaks_of_the_mode_of_most_lanes():
    """Bug guarded: a dashboard with the depth and the break-even of rounds that no lane plays."""
    cheap = ((1, 0.003), (64, 0.003))
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_lane("a", draft_step_times=cheap, target_step_times=((1, 0.03), (600, 0.03))), 0.0)
    assert (policy.snapshot(0.0)["depth"], policy.snapshot(0.0)["overlapped_lanes"]) == (7, 0)
    for name in ("b", "c"):
        overlap = OverlapReport(is_active=True, hit_rate=0.75)
        report = _lane(name, draft_step_times=cheap, target_step_times=((1, 0.03), (600, 0.03)), overlap=overlap)
        policy.ingest(report, 0.0)
    shot = policy.snapshot(0.0)
    assert (shot["depth"], shot["overlapped_lanes"], shot["hit_rate"]) == (8, 2, 0.75)


def test_the_snapshot_goes_no_deeper_than_the_draft_gets_in_time():
    """Bug guarded: positions that cost nothing beside the verify make it tell the largest depth allowed."""
    policy = ControllerPolicy(max_depth=16)
    flat, slow = ((1, 0.03), (600, 0.03)), ((1, 0.01), (64, 0.01))
    policy.ingest(_lane(draft_step_times=slow, target_step_times=flat, overlap=OverlapReport(is_active=True)), 0.0)
    shot = policy.snapshot(0.0)
    assert shot["price"] == 0.0
    assert 1 <= shot["depth"] <= 3, "a step of 30 ms hides two or three of 10 ms"


@pytest.mark.parametrize(
    "bad", [{"hit_rate": math.nan}, {"draft_slowdown": 0.0}, {"laws": HitLaws(lost=-1.0)}, {"hop_s": math.inf}]
)
def test_a_broken_overlap_report_is_replaced_and_counted(bad):
    """Bug guarded: one NaN from one lane in the prices of all that overlap."""
    policy = ControllerPolicy(max_depth=8)
    policy.ingest(_overlapping("a"), 0.0)
    before = policy.table(0.0)
    policy.ingest(_lane("a", overlap=OverlapReport(is_active=True, **bad)), 0.1)
    assert policy.table(0.1).overlapped_prices == before.overlapped_prices
    assert policy.snapshot(0.1)["anomalies"]["bad_fields"] == 1
    assert policy.snapshot(0.1)["hit_rate"] == 0.7
