"""Prometheus alerts: what a person should look at, and what to do then."""

from dataclasses import dataclass
from typing import Any

from deployments.monitoring.queries import Scope, failed_requests, failed_share, gain, kv_usage

SCOPE = Scope(window="5m", by=("namespace",))
SLOW_FIRST_TOKEN_S = 2.0
"""p95; a bound of the histogram's buckets, so that nothing is interpolated at the threshold."""
FAILED_DRAFTS = 0.2
FAILED_REQUESTS = 0.01
LOSING_GAIN = 0.95
"""The cost model that it rests on is not better than some percent."""
FULL_KV_CACHE = 0.95
PREEMPTIONS_PER_S = 0.1
STALE_REPORT_S = 15.0


@dataclass(frozen=True)
class Alert:
    """``lasting``: for how long the query must have results. ``severity``: critical (requests fail now), warning, info."""

    name: str
    query: str
    lasting: str
    severity: str
    summary: str
    todo: str


def _waiting() -> str:
    """Requests wait all the time, and more and more of them."""
    waiting = SCOPE.total(SCOPE.series("waiting_requests"))
    growth = SCOPE.total(f"deriv({SCOPE.series('waiting_requests')}[10m])")
    return f"{waiting} > 0 and {growth} > 0"


def _max(name: str) -> str:
    return SCOPE.total(SCOPE.series(name), function="max")


def alerts() -> tuple[Alert, ...]:
    """All of them, the most urgent first."""
    return (*_broken(), *_overloaded(), *_losing())


def _broken() -> tuple[Alert, ...]:
    return (
        Alert(
            "OutriderNoLaneReady",
            f"{_max('ready_lanes')} == 0",
            "2m",
            "critical",
            "No lane takes requests.",
            "Requests wait for a minute and fail then. GET /health says why; look at the workers' pods and the log of Router.",
        ),
        Alert(
            "OutriderMetricsMissing",
            f"absent({SCOPE.series('ready_lanes')})",
            "5m",
            "critical",
            "Nobody answers GET /metrics.",
            "The controller or all Apis are gone, or Prometheus is not let in (key, network policy): compare with GET /livez.",
        ),
        Alert(
            "OutriderReportStale",
            f"time() - {_max('last_report_timestamp_seconds')} > {STALE_REPORT_S:g}",
            "1m",
            "critical",
            "The controller hears of no lane any more.",
            "Lanes are dead, or cannot reach the controller; they go on with its last answer. Look at the log of Router.",
        ),
        Alert(
            "OutriderRequestsFailing",
            f"{failed_requests(SCOPE)} > {FAILED_REQUESTS:g}",
            "5m",
            "critical",
            "More than 1 % of the requests fail or are refused because queues are full.",
            "outrider_finished_requests_total by reason: error is in the log of Router, overloaded asks for lanes (lanes.max).",
        ),
    )


def _overloaded() -> tuple[Alert, ...]:
    return (
        Alert(
            "OutriderQueueGrowing",
            _waiting(),
            "10m",
            "warning",
            "Requests wait, and more and more of them.",
            "outrider_wanted_lanes above outrider_lanes: lanes are loading, or no GPU is free. Else raise lanes.max.",
        ),
        Alert(
            "OutriderFirstTokensSlow",
            f"{SCOPE.quantile(0.95, 'time_to_first_token_seconds')} > {SLOW_FIRST_TOKEN_S:g}",
            "10m",
            "warning",
            "The p95 of the time to first token is above 2 s.",
            "Queueing (outrider_queue_seconds) asks for lanes; prefill asks for lanes or a larger lanes.prefill_tokens.",
        ),
        Alert(
            "OutriderKvCacheFull",
            f"{SCOPE.total(kv_usage(SCOPE), function='max')} > {FULL_KV_CACHE:g} "
            f"and {SCOPE.total(SCOPE.series('waiting_requests'))} > 0",
            "10m",
            "warning",
            "A lane's KV cache is full, and requests wait.",
            "Raise target.kv_cache_tokens or lanes.max, or lower api.default_max_tokens.",
        ),
        Alert(
            "OutriderPreemptions",
            f"{SCOPE.rates('preemptions_total')} > {PREEMPTIONS_PER_S:g}",
            "10m",
            "warning",
            "Requests are thrown out of the KV cache and prefilled again.",
            "As for a full KV cache; lanes.max_batch bounds how many requests share it.",
        ),
    )


def _losing() -> tuple[Alert, ...]:
    return (
        Alert(
            "OutriderDraftsFailing",
            f"{failed_share(SCOPE)} > {FAILED_DRAFTS:g}",
            "10m",
            "warning",
            "A fifth of the drafts fail.",
            "Texts are right, but slow. See outrider_fallbacks_total by reason; GET /controller names drafts left alone.",
        ),
        Alert(
            "OutriderDraftsMissing",
            f"{_max('wanted_drafts')} > {_max('drafts')}",
            "15m",
            "warning",
            "Fewer drafts run than are wanted.",
            "Drafts are loading, or no GPU is free: look at the pods of their group and at the log of Draft.",
        ),
        Alert(
            "OutriderSpeculationLoses",
            f"{gain(SCOPE)} < {LOSING_GAIN:g}",
            "15m",
            "warning",
            "The accepted length is below break-even while requests speculate.",
            "Set speculation.depth to auto. If it is, rounds are slower than predicted: does something else use the devices?",
        ),
        Alert(
            "OutriderNotRowInvariant",
            f"{SCOPE.total(SCOPE.series('row_invariant'), 'lane', function='min')} == 0",
            "0m",
            "info",
            "A target's logits depend on what else is in the batch.",
            "Near-ties may turn with depth and load. GET /health names the kernels; set target.numerics to invariant.",
        ),
    )


def rules() -> dict[str, Any]:
    """A rules file of Prometheus."""
    return {"groups": [{"name": "outrider", "rules": [_rule(alert) for alert in alerts()]}]}


def prometheus_rule() -> dict[str, Any]:
    """The same for the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "outrider"},
        "spec": rules(),
    }


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.query,
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.todo},
    }
