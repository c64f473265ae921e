"""`outrider bench load` against a served application: over HTTP alone, and with the arms that switch the lane."""

import contextlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import App
from helpers import write_emulation

from deployments.bench.lane import BenchLane
from deployments.bench.load import LoadBench, run_bench_load
from deployments.bench.load_app import lane_arms
from deployments.bench.load_client import find_endpoint
from deployments.bench.load_plan import LoadOptions, LoadPlan
from deployments.bench.load_report import ADAPTIVE, FIXED_DEPTHS, OFF, fixed, summary
from deployments.bench.rounds import wait_for_draft
from deployments.cli import main

SHORT: dict[str, Any] = {"requests": 3, "repeats": 1, "max_tokens": 40, "quick": True}


@pytest.fixture(scope="module")
def app(emulated: tuple[App, Path]) -> App:
    """Every draft token is accepted, so that the depth can be read off the accepted length."""
    app, file = emulated
    write_emulation(file, "alpha=1")
    wait_for_draft(BenchLane(app.config))
    return app


def test_a_served_application_with_and_without_speculation(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: arms that are one and the same, figures that our own usage does not give, or a missing key of the JSON."""
    assert run_bench_load(LoadOptions(url=app.url, sweep="1,2", **SHORT), None, as_json=True, plot=None) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    points = {(point["arm"], point["concurrency"]): point for point in result["points"]}
    assert list(points) == [(OFF, 1), (ADAPTIVE, 1), (OFF, 2), (ADAPTIVE, 2)]
    assert all(point["errors"] == {} and point["tokens_from_usage"] for point in points.values())
    assert all(point["ttft_p50_s"] > 0 and point["itl_p50_s"] > 0 for point in points.values())
    assert {points[OFF, level]["accepted_length"] for level in (1, 2)} == {1.0}
    assert all(points[ADAPTIVE, level]["accepted_length"] > 3 for level in (1, 2))
    assert result["worst_adaptive_vs_best"] > 0
    assert result["adaptive_vs_k4_at_top"] is None


def test_the_lane_is_switched_between_arms(app: App) -> None:
    """Bug guarded: an arm that does not reach the lane, so that one depth is measured under the names of all."""
    arms = lane_arms(BenchLane(app.config), calibrate=False)
    results = LoadBench(find_endpoint(app.url), arms, LoadPlan.of(LoadOptions(sweep="1", **SHORT))).measure()
    lengths = {point["arm"]: point["accepted_length"] for point in summary(results, is_open=False)["points"]}
    assert list(lengths) == [OFF, *map(fixed, FIXED_DEPTHS), ADAPTIVE]
    assert lengths[OFF] == 1.0
    for shallow, deep in pairwise((OFF, *map(fixed, FIXED_DEPTHS))):
        assert lengths[shallow] + 0.3 < lengths[deep]
    assert all(lengths[fixed(depth)] <= depth + 1 for depth in FIXED_DEPTHS)


def test_the_command_without_a_server_of_its_own(
    app: App, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: `outrider bench load` works on a server and not on the configured pair, which nobody else serves.

    On the application that runs here already, in place of one on a cluster of the command's own.
    """
    monkeypatch.setattr("deployments.launch.cluster", lambda config, address: contextlib.nullcontext())
    monkeypatch.setattr("deployments.launch.deploy", lambda config, progress: None)
    pair = ["--paced", "emulated:free?step_ms=5&alpha=1", "--set", f"api.port={app.config.api.port}"]
    arguments = ["--sweep", "1", "--requests", "1", "--repeats", "1", "--max-tokens", "8", "--json", "--quick"]
    assert main(["bench", "load", *pair, *arguments]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [point["arm"] for point in told["points"]] == [OFF, *map(fixed, FIXED_DEPTHS), ADAPTIVE]
    assert all(point["errors"] == {} for point in told["points"])
