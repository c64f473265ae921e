"""What a lane counts of overlap and of its streams, and how it is shown."""

import asyncio

import msgspec
import pytest
from metrics_page import status

from autoscale.cost_model import RoundCost
from deployments.counters import LaneCounters, draft_summary, overlap_summary
from deployments.messages import DraftReport, DraftWork, LaneStatus, Traffic
from deployments.metrics import render
from engine.errors import InvalidRequest, Overloaded
from engine.testing import FakeClock, model_info
from engine.types import (
    MODEL_SOURCE,
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    SourceStep,
    StepReport,
)


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
        **counters.told(),
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
        'outrider_draft_hidden_seconds_total{lane="lane",source="none"} 0.25',
        'outrider_draft_exposed_seconds_total{lane="lane",source="none"} 0.25',
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


def request(**more: object) -> GenerateRequest:
    return GenerateRequest(request_id="r", prompt_ids=(1,), params=SamplingParams(), **more)  # type: ignore[arg-type]


def delta(num_tokens: int, finish_reason: FinishReason | None = None) -> Delta:
    return Delta(request_id="r", token_ids=(1,) * num_tokens, finish_reason=finish_reason, num_output_tokens=7)


def test_a_request_that_goes_on_here_had_its_first_token_elsewhere() -> None:
    """Bug guarded: a lost lane that shows as a burst of fast first tokens, or as one gap between tokens of many seconds."""
    counters, clock = LaneCounters(), FakeClock()
    with counters.watching(request(output_ids=(5,)), clock) as watch:
        for _ in range(2):
            clock.advance(0.25)
            watch.saw(delta(1))
    seen = counters.told()["histograms"]
    assert sum(seen["time_to_first_token_seconds"].counts) == 0
    assert (sum(seen["inter_token_latency_seconds"].counts), seen["inter_token_latency_seconds"].total) == (1, 0.25)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("no"), "invalid"),
        (Overloaded("full"), "overloaded"),
        (asyncio.CancelledError(), "cancelled"),
        (RuntimeError("broken"), "error"),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_every_request_ends_once(error: BaseException, outcome: str, finished: bool) -> None:
    """Bug guarded: a request that is counted twice because its client hangs up after the last token, or never."""
    counters = LaneCounters()

    def serve() -> None:
        with counters.watching(request()) as watch:
            if finished:
                watch.saw(delta(1, FinishReason.STOP))
            raise error

    with pytest.raises(type(error)):
        serve()
    assert counters.outcomes == {"stop" if finished else outcome: 1}
    assert counters.mean_output_tokens() == (7 if finished else 0)


def test_rounds_are_compared_with_plain_ones_only_where_that_is_fair() -> None:
    """Bug guarded: prefill, or a round whose plain cost nobody knows, counted as time that speculation cost."""
    counters = LaneCounters()
    drafted = msgspec.structs.replace(step(0.0, 0.0), num_drafted=2, round_time_s=1.0)
    counters.round_done(drafted, 0.0)
    counters.plain_cost = RoundCost.measured(((1, 0.5),), None)
    counters.round_done(msgspec.structs.replace(drafted, num_prefill_tokens=8), 0.0)
    counters.round_done(step(0.0, 0.0), 0.0)
    assert "speculating_requests" not in counters.totals
    counters.round_done(drafted, 0.0)
    assert counters.totals["speculating_round_seconds"] == 1.0
    assert counters.totals["speculating_plain_seconds"] == 1.5  # all of this round is bookkeeping
