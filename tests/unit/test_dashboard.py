"""The live page without a browser: its document, its times, and what it says speculation is worth."""

import base64
import hashlib
import re
from typing import Any

import pytest

from autoscale.cost_model import OverlapCost, RoundCost
from autoscale.overlap import best_overlap
from autoscale.signals import LaneReport, OverlapReport
from deployments.dashboard.data import cluster_data, modelled_gain, speculation_gain
from deployments.dashboard.latency import MAX_TIMES, STEPS_PER_FACTOR_OF_TEN, WINDOW_S, LatencyWindow
from deployments.dashboard.page import page
from deployments.messages import LaneStatus
from engine.config import parse_config
from engine.testing import FakeClock, model_info

TARGET = ((1.0, 0.010), (8.0, 0.017))
DRAFT = ((1.0, 0.001), (8.0, 0.001))


def lane(**fields: Any) -> LaneReport:
    known = {"lane_id": "a", "now_s": 1.0, "target_step_times": TARGET, "draft_step_times": DRAFT, "acceptance": 0.5}
    return LaneReport(**{**known, "num_running": 1, "tokens_per_s": 90.0, **fields})


def test_the_page_is_whole_and_runs_only_its_own() -> None:
    """Bug guarded: an edit of script or style that the policy's hashes do not know (a dead page), or a link to another host."""
    document, headers = page()
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", document, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in headers["Content-Security-Policy"]
        assert len(inside) > 1000
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", document) == []
    assert re.findall(r"""<(?:script|link|img)[^>]+(?:src|href)=["'](?!data:)""", document) == []
    assert re.findall(r"\s(?:style|on[a-z]+)=", re.sub(r"<(script|style)>.*?</\1>", "", document, flags=re.DOTALL)) == []


def test_times_of_a_stream() -> None:
    """Bug guarded: a round of four tokens counted as one long pause, or the wait for the first token among the pauses.

    First token after 0.5 s; then 4 tokens 0.1 s later (25 ms each) and one 0.02 s later.
    """
    clock = FakeClock()
    window = LatencyWindow(clock)
    times = window.stream()
    for after_s, num_tokens in ((0.5, 1), (0.1, 4), (0.01, 0), (0.01, 1)):
        clock.advance(after_s)
        times.arrived(num_tokens)
    told = window.summary()
    shown = {kind: [(10 ** (step / STEPS_PER_FACTOR_OF_TEN), count) for step, count in told[kind]] for kind in ("ttft", "itl")}
    assert shown["ttft"] == [(pytest.approx(500, rel=0.025), 1)]
    assert shown["itl"] == [(pytest.approx(20, rel=0.025), 1), (pytest.approx(25, rel=0.025), 4)]


def test_old_times_are_forgotten() -> None:
    """Bug guarded: percentiles over the life of a process, in which now cannot be seen; memory without bound."""
    clock = FakeClock()
    window = LatencyWindow(clock)
    window.stream().arrived(1)
    clock.advance(WINDOW_S + 1)
    assert window.summary()["ttft"] == []
    for _ in range(MAX_TIMES + 10):
        window.stream().arrived(1)
    assert sum(count for _, count in window.summary()["ttft"]) == MAX_TIMES


def test_gain_of_sequential_rounds() -> None:
    """Bug guarded: draft time left out, or the gain inverted.

    Acceptance 0.5, depth 2: E = 1 + 0.5 + 0.25 = 1.75 tokens in 10 + 2 * 1 (three tokens verified) + 2 * 1 (drafts) = 14 ms.
    Without: 1 token in 10 ms.
    """
    assert modelled_gain(lane(mean_depth=2.0)) == pytest.approx((1.75 / 0.014) / (1 / 0.010))
    assert modelled_gain(lane(mean_depth=0.0)) == 1.0
    gain_of_one = (1.5 / 0.012) / (1 / 0.010)
    assert modelled_gain(lane(mean_depth=0.25)) == pytest.approx(0.75 + 0.25 * gain_of_one)


def test_gain_of_overlapped_rounds() -> None:
    """Bug guarded: rounds that hide their drafts judged as if they waited for them."""
    overlap = OverlapReport(is_active=True, hop_s=0.001, target_slowdown=1.1)
    told = modelled_gain(lane(mean_depth=2.0, overlap=overlap))
    cost = OverlapCost(RoundCost.measured(TARGET, DRAFT, 0.001), 1.1, 1.0).rounded()
    best = best_overlap(1, 0.5, cost, overlap.laws.rounded(), (2,), None)
    assert told == pytest.approx(best.throughput / 100.0)
    assert told != pytest.approx(modelled_gain(lane(mean_depth=2.0)), rel=0.01)


def test_gain_of_all_lanes() -> None:
    """Bug guarded: a mean of ratios; idle lanes counted; a division by nothing in a cluster that is idle or unmeasured.

    Lane a makes 125 tokens/s where it would make 100, lane b makes 50 and drafts nothing, lane c is idle.
    """
    lanes = [
        lane(lane_id="a", mean_depth=2.0, tokens_per_s=125.0),
        lane(lane_id="b", tokens_per_s=50.0),
        lane(lane_id="c", num_running=0, tokens_per_s=0.0),
    ]
    assert speculation_gain(lanes) == {"tokens_per_s": 175.0, "without": pytest.approx(150.0), "gain": pytest.approx(7 / 6)}
    assert speculation_gain([]) == {"tokens_per_s": 0, "without": None, "gain": None}
    assert modelled_gain(lane(target_step_times=(), mean_depth=3.0)) == 1.0


def snapshot(**fields: Any) -> dict[str, Any]:
    known = {"qps": 1.5, "actual_batch": 3.0, "mean_depth": 2.0, "acceptance": 0.5, "reason": "why", "draft_details": []}
    return {**known, "price": 0.1, "break_even_batch": 8, "replicas": {"decision": None}, **fields}


def status(lane_id: str, **load: Any) -> LaneStatus:
    return LaneStatus(
        load=lane(lane_id=lane_id, **load),
        address="127.0.0.1:1",
        counters={"tokens": 10, "accepted_tokens": 6},
        fallbacks={},
        accepted_per_position=(),
        drafted_per_position=(),
        target=model_info(device="cuda:0"),
        target_pid=1,
        draft_name="self-int8",
        draft_state="ok",
        explanation={"reason": "depth 2"},
    )


def test_what_the_page_is_told() -> None:
    """Bug guarded: break-even of one lane shown as the cluster's; waiting requests not in flight; parts mixed up."""
    config = parse_config({"target": {"num_gpus": 2}})
    statuses = [status("b", num_running=4, num_waiting=1), status("a", num_running=2)]
    draft = {"draft_id": "d", "device": "cuda:1", "num_lanes": 2, "num_sequences": 6, "mean_merged": 1.5}
    told = cluster_data(snapshot(draft_details=[draft]), statuses, config)
    assert told["load"] == {"qps": 1.5, "running": 6, "waiting": 1, "in_flight": 7, "batch": 3.0, "mean_depth": 2.0}
    assert told["break_even"] == {"is_known": True, "per_lane": 8, "concurrency": 16, "largest": 512}
    assert [(part["lane_id"], part["gpus"], part["device"], part["why"]) for part in told["lanes"]] == [
        ("a", 2, "cuda:0", "depth 2"),
        ("b", 2, "cuda:0", "depth 2"),
    ]
    assert told["drafts"] == [
        {"draft_id": "d", "device": "cuda:1", "gpus": 0.0, "lanes": 2, "sequences": 6, "mean_merged": 1.5}
    ]


def test_unknown_is_not_never() -> None:
    """Bug guarded: a cluster that has measured nothing shown as one where speculation always pays."""
    told = cluster_data(snapshot(price=None, break_even_batch=None), [], parse_config({}))
    assert told["break_even"] == {"is_known": False, "per_lane": None, "concurrency": None, "largest": 0}
    assert told["lanes"] == []
