"""What the metrics and `GET /health` say of a lane's target."""

import pytest

from autoscale.signals import LaneReport
from deployments.messages import LaneStatus
from deployments.metrics import numerics_by_lane, render
from engine.testing import model_info


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


@pytest.mark.parametrize(("row_invariant", "line"), [(True, "1.0"), (False, "0.0"), (None, None)])
def test_row_invariance_is_a_gauge_by_lane(row_invariant: bool | None, line: str | None) -> None:
    """Bug guarded: a target that was not probed, or failed the probe, showing up as row-invariant."""
    text = render([status("a", row_invariant=row_invariant)], {"lanes": ["a"], "drafts": []})
    series = [row for row in text.splitlines() if row.startswith("outrider_row_invariant")]
    assert series == ([] if line is None else [f'outrider_row_invariant{{lane="a"}} {line}'])


def test_health_names_the_numerics_of_every_lane() -> None:
    """Bug guarded: one lane's verdict standing for all, on a cluster whose machines have different kernels."""
    good = status("a", numerics="invariant", row_invariant=True, row_invariance="row-invariant: equal bits", path="dense")
    verdict = "not row-invariant: logits differ by 0.1"
    bad = status("b", row_invariant=False, row_invariance=verdict, path="stateful", path_reason="it keeps a state")
    assert numerics_by_lane([good, bad]) == {
        "a": {
            "numerics": "invariant",
            "row_invariant": True,
            "row_invariance": "row-invariant: equal bits",
            "path": "dense",
            "path_reason": "",
        },
        "b": {
            "numerics": "fast",
            "row_invariant": False,
            "row_invariance": verdict,
            "path": "stateful",
            "path_reason": "it keeps a state",
        },
    }
