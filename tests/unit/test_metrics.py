"""What the metrics and `GET /health` say of a lane's target."""

import re
import shutil
import subprocess

import msgspec
import pytest
from metrics_page import full_page, status
from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import numerics_by_lane, render


@pytest.mark.parametrize(("row_invariant", "line"), [(True, "1.0"), (False, "0.0"), (None, None)])
def test_row_invariance_is_a_gauge_by_lane(row_invariant: bool | None, line: str | None) -> None:
    """Bug guarded: a target that was not probed, or failed the probe, showing up as row-invariant."""
    text = render([status("a", row_invariant=row_invariant)], {"lanes": ["a"], "drafts": []})
    series = [row for row in text.splitlines() if row.startswith("outrider_row_invariant")]
    assert series == ([] if line is None else [f'outrider_row_invariant{{lane="a"}} {line}'])


def test_the_page_is_one_that_prometheus_reads() -> None:
    """Bug guarded: a name against the conventions (a counter without `_total`, a unit that is not a base unit), a metric
    without help, buckets that fall.
    """
    page = full_page()
    for family in text_string_to_metric_families(page):
        assert family.documentation.endswith("."), family.name
        assert family.type != "unknown", family.name
        assert not re.search(r"_(ms|milliseconds|percent|kb|mb)(_|$)", family.name)
        buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        assert family.samples, f"{family.name} has no series on a page that is to have all"
    if shutil.which("promtool"):
        checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_cluster_that_has_just_started_has_a_page() -> None:
    """Bug guarded: no metrics, and so no alert, from a controller that has heard of nobody."""
    page = render([], {"lanes": [], "drafts": [], "price": None, "break_even_batch": None, "last_report_unix_s": None})
    assert "outrider_ready_lanes 0.0" in page.splitlines()
    assert not [line for line in page.splitlines() if line.startswith(("outrider_break_even", "outrider_last_report"))]


def test_a_lane_that_leaves_is_not_ready() -> None:
    """Bug guarded: no alert while the only lane takes no requests any more."""
    leaving = msgspec.structs.replace(status("a"), leaving=True)
    lines = render([leaving, status("b")], {"lanes": ["a", "b"], "drafts": [], "break_even_batch": 8}).splitlines()
    assert {"outrider_lanes 2.0", "outrider_ready_lanes 1.0", "outrider_break_even_concurrency 16.0"} <= set(lines)


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
