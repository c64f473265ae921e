"""A metrics page on which every metric has a series, and the schema that follows from it."""

from dataclasses import dataclass
from functools import cache

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from autoscale.signals import LaneReport
from deployments.counters import LaneCounters, draft_summary
from deployments.messages import DraftReport, DraftWork, LaneStatus, Traffic
from deployments.metrics import render
from engine.testing import model_info
from engine.types import SourceStep, StepReport

SNAPSHOT = {
    "lanes": ["lane"],
    "drafts": ["d0"],
    "qps": 1.5,
    "predicted_batch": 2.0,
    "actual_batch": 1.0,
    "acceptance": 0.75,
    "tokens_per_s": 30.0,
    "mean_depth": 3.0,
    "calibration_error": 0.02,
    "price": 0.25,
    "break_even_batch": 16,
    "hit_rate": 0.5,
    "prepared_outcomes": 4.0,
    "wanted_lanes": 2,
    "wanted_drafts": 1,
    "last_report_unix_s": 1.8e9,
    "anomalies": {"lanes_joined": 1},
    "replicas": {"lane_changes": 1, "draft_changes": 2, "draft_cold_starts": 3},
}


def status(lane_id: str, **info: object) -> LaneStatus:
    load = LaneReport(
        lane_id=lane_id,
        now_s=0.0,
        num_arrivals=0,
        num_running=0,
        num_waiting=0,
        mean_output_tokens=0.0,
        tokens_per_s=0.0,
        acceptance=0.5,
        mean_depth=0.0,
        target_step_times=(),
        draft_step_times=(),
    )
    return LaneStatus(
        load=load,
        address="host:1",
        counters={},
        fallbacks={},
        accepted_per_position=(),
        drafted_per_position=(),
        target=model_info(**info),
        target_pid=1,
        draft_name="none",
        draft_state="ok",
        explanation={},
    )


def full_page() -> str:
    counters = LaneCounters()
    report = StepReport(
        round_id=1,
        batch_size=1,
        num_waiting=0,
        num_target_tokens=2,
        num_prefill_tokens=0,
        num_committed=2,
        num_drafted=1,
        num_accepted=1,
        depths=(1,),
        drafted_per_position=(1,),
        accepted_per_position=(1,),
        hits={"bonus": 1},
        misses={"late": 1},
        fallbacks={"no_draft": 1},
        queue_times_s=(0.0,),
        sources={"model": SourceStep(1, 1, 1, 0.1)},
    )
    counters.round_done(report, 0.0)
    lane = msgspec.structs.replace(
        status("lane", row_invariant=True),
        dropped_answers={"late": 1},
        requests_per_draft={"d0": 1},
        traffic={"draft": Traffic(1, 1, 1, 0.1)},
        sources=counters.sources_by_name("self-int8"),
        **counters.told(),
    )
    work = DraftWork(num_lanes=1, num_sequences=1, num_runs=1, num_messages=1)
    draft = DraftReport(draft_id="d0", address="host:1", target_fingerprint="f", info=model_info(), work=work)
    return render([lane], {**SNAPSHOT, "draft_details": [draft_summary(draft)]})


@dataclass(frozen=True)
class Family:
    kind: str
    labels: frozenset[str]


@cache
def schema() -> dict[str, Family]:
    """Name of every sample, as a query would ask for it -> its type and labels."""
    found: dict[str, Family] = {}
    for family in text_string_to_metric_families(full_page()):
        for sample in family.samples:
            found[sample.name] = Family(family.type, frozenset(sample.labels))
    return found
