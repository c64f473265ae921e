"""What a lane counts of overlap and of its streams, and how it is shown."""

import msgspec
from test_metrics import status

from deployments.counters import LaneCounters, draft_summary, overlap_summary
from deployments.messages import DraftReport, DraftWork, LaneStatus, Traffic
from deployments.metrics import render
from engine.testing import model_info
from engine.types import MODEL_SOURCE, SourceStep, StepReport


def step(draft_time_s: float, exposed_time_s: float, **more: object) -> StepReport:
    return StepReport(
        round_id=1,
        batch_size=1,
        num_waiting=0,
        num_target_tokens=1,
        num_prefill_tokens=0,
        num_committed=1,
        num_drafted=0,
        num_accepted=0,
        draft_time_s=draft_time_s,
        exposed_time_s=exposed_time_s,
        **more,  # type: ignore[arg-type]
    )


def lane_status(counters: LaneCounters) -> LaneStatus:
    return msgspec.structs.replace(
        status("lane"),
        counters=dict(counters.totals),
        hits=dict(counters.hits),
        misses=dict(counters.misses),
        requests_per_draft={"d0": 2},
        traffic={"target": Traffic(10, 100, 200, 0.01), "draft": Traffic(10, 50, 50, 0.03)},
    )


def test_each_source_is_counted_as_itself() -> None:
    """Bug guarded: what the text beside a model drafted counts as the model's, or only the last round counts."""
    counters = LaneCounters()
    for _ in range(2):
        sources = {MODEL_SOURCE: SourceStep(1, 4, 3, 0.2), "suffix": SourceStep(2, 9, 8, 0.001)}
        counters.round_done(step(0.2, 0.2, sources=sources), 0.0)
    assert counters.sources_by_name("self-int8") == {
        "self-int8": SourceStep(2, 8, 6, 0.4),
        "suffix": SourceStep(4, 18, 16, 0.002),
    }
    lane = msgspec.structs.replace(status("l"), sources=counters.sources_by_name("self-int8"))
    shown = render([lane], {"lanes": [], "drafts": []})
    assert 'outrider_source_accepted_tokens_total{lane="l",source="suffix"} 16.0' in shown
    assert 'outrider_source_drafts_total{lane="l",source="self-int8"} 2.0' in shown


def test_draft_time_is_hidden_or_exposed_round_by_round() -> None:
    """Bug guarded: a round that waited longer than the draft computed (hops) takes hidden time away from other rounds."""
    counters = LaneCounters()
    counters.round_done(step(0.4, 0.1), 0.0)
    counters.round_done(step(0.1, 0.5), 0.0)
    assert counters.totals["draft_seconds"] == 0.5
    assert round(counters.totals["draft_hidden_seconds"], 9) == 0.3
    assert round(counters.totals["draft_exposed_seconds"], 9) == 0.6


def test_the_controller_page_tells_how_well_drafting_is_hidden() -> None:
    """Bug guarded: a hit rate over the wrong whole, or a division by nothing in a lane that has just started."""
    counters = LaneCounters()
    assert overlap_summary(status("new")) == {"hit_rate": None, "hidden_share": None, "hop_ms": None, "bytes_per_round": None}
    counters.round_done(step(0.4, 0.1, hits={"bonus": 2, "recovery": 1}, misses={"late": 1}), 0.0)
    counters.round_done(step(0.0, 0.0, misses={"bonus": 4}), 0.0)
    summary = overlap_summary(lane_status(counters))
    assert {name: round(value or 0.0, 9) for name, value in summary.items()} == {
        "hit_rate": 3 / 8,
        "hidden_share": 0.75,
        "hop_ms": 2.0,
        "bytes_per_round": 200.0,
    }


def test_overlap_streams_and_drafts_have_series() -> None:
    """Bug guarded: a counter that is kept and never shown, or shown without the label that tells lanes and drafts apart."""
    counters = LaneCounters()
    counters.round_done(step(0.5, 0.25, hits={"bonus": 2}, misses={"late": 1}), 0.0)
    work = DraftWork(num_lanes=2, num_sequences=5, num_runs=10, num_messages=15, runs_by_size={1: 5, 2: 5}, num_expired=1)
    report = DraftReport(
        draft_id="d0", address="host:1", target_fingerprint="f", info=model_info(), protocol=2, process_id=7, work=work
    )
    details = draft_summary(report)
    assert (details["mean_merged"], details["process_id"], details["num_lanes"]) == (1.5, 7, 2)
    text = render([lane_status(counters)], {"lanes": ["lane"], "drafts": ["d0"], "draft_details": [details]})
    for line in (
        'outrider_draft_hidden_seconds_total{lane="lane"} 0.25',
        'outrider_draft_exposed_seconds_total{lane="lane"} 0.25',
        'outrider_prepared_hits_total{kind="bonus",lane="lane"} 2.0',
        'outrider_prepared_misses_total{kind="late",lane="lane"} 1.0',
        'outrider_hops_total{lane="lane",peer="draft"} 10.0',
        'outrider_stream_sent_bytes_total{lane="lane",peer="target"} 100.0',
        'outrider_requests_on_draft{draft="d0",lane="lane"} 2.0',
        'outrider_draft_lanes{draft="d0"} 2.0',
        'outrider_draft_runs_total{draft="d0"} 10.0',
    ):
        assert line in text.splitlines(), line


def test_a_lane_with_one_draft_left_alone_still_has_a_source() -> None:
    """Bug guarded: one failing replica out of two shows as a lane without drafts."""
    for state, value in (("ok", 1.0), ("ok, but d1 is left alone", 1.0), ("no draft is running", 0.0)):
        text = render([msgspec.structs.replace(status("lane"), draft_state=state)], {"lanes": ["lane"], "drafts": []})
        assert f'outrider_draft_available{{lane="lane",source="none"}} {value}' in text.splitlines()
