"""The depth follows the load: deep when idle, 0 when many requests run, deep again afterwards."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import App, wait_for_draft
from helpers import drafted, wait_until

MANY = 24
PATIENCE_S = 150.0
"""Whoever regretted drafts waits a minute, and on a busy machine the first ones may be regretted."""


@pytest.fixture(scope="module")
def app(deploy_app: Callable[..., App]) -> App:
    app = deploy_app(draft={"source": "ngram"}, speculation={"max_depth": 4})
    wait_for_draft(app)
    return app


def lane(app: App) -> dict[str, Any]:
    details: dict[str, Any] = app.controller()["lane_details"][0]
    return details


def test_depth_falls_to_zero_with_concurrency_and_comes_back(app: App) -> None:
    """Guards the product's reason: a depth that stays up under load makes a busy service slower than none at all."""

    def depth_of_a_single_request() -> int:
        return drafted(app.complete("one two one two one two one two", max_tokens=32, ignore_eos=True))

    wait_until(depth_of_a_single_request, lambda count: count > 0, PATIENCE_S, "drafts when idle")
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            app.text("Tell me a long story about the sea.", max_tokens=48, ignore_eos=True)

    threads = [threading.Thread(target=load, daemon=True) for _ in range(MANY)]
    for thread in threads:
        thread.start()
    try:
        busy = wait_until(
            lambda: lane(app), lambda d: d["running"] >= MANY // 2 and d["mean_depth"] < 0.05, 90, "depth at load"
        )
        assert "speculation off" in busy["why"]["reason"], busy["why"]
        assert app.controller()["qps"] > 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    wait_until(depth_of_a_single_request, lambda count: count > 0, PATIENCE_S, "drafts after the load")


def test_metrics_say_what_happened(app: App) -> None:
    """Guards against counters that count rounds for tokens, or nothing."""
    before = settled_counters(app)
    result = app.complete("one two one two one two one two", max_tokens=40, ignore_eos=True)
    wait_until(
        lambda: counters(app)["outrider_tokens_total"] - before["outrider_tokens_total"],
        lambda count: count == result["usage"]["completion_tokens"] == 40,
        10,
        "tokens counted",
    )
    after = counters(app)
    details = result["usage"]["completion_tokens_details"]
    assert (
        after["outrider_accepted_tokens_total"] - before["outrider_accepted_tokens_total"]
        == details["accepted_prediction_tokens"]
    )
    assert after["outrider_requests_total"] - before["outrider_requests_total"] == 1


def settled_counters(app: App) -> dict[str, float]:
    """The counters once lanes have reported everything that was before: unchanged over three report intervals."""
    seen: list[dict[str, float]] = []

    def look() -> bool:
        time.sleep(3 * app.config.controller.report_interval_s)
        seen.append(counters(app))
        return len(seen) > 1 and seen[-1] == seen[-2]

    wait_until(look, bool, 30, "counters at rest")
    return seen[-1]


def counters(app: App) -> dict[str, float]:
    """Counters summed over lanes."""
    totals: dict[str, float] = {}
    for line in app.client.get("/metrics").text.splitlines():
        if line.startswith("outrider_") and "_total{" in line:
            name, _, rest = line.partition("{")
            totals[name] = totals.get(name, 0.0) + float(rest.rsplit(" ", 1)[1])
    return totals
