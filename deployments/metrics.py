"""Prometheus text for the whole application, from the counters that the lanes push to the controller.

Every name says its unit; every help text says how the number is made.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from deployments.messages import LaneStatus

COUNTERS = {
    "requests": "Requests that reached a lane.",
    "finished_stop": "Requests that ended by EOS, a stop token or a stop string.",
    "finished_length": "Requests that ended at max_tokens.",
    "finished_error": "Requests that failed.",
    "tokens": "Tokens committed and shown (a round commits accepted draft tokens plus one).",
    "rounds": "Rounds played; one target forward each.",
    "drafted_tokens": "Draft tokens that the target verified.",
    "accepted_tokens": "Draft tokens that were committed; acceptance rate = accepted_tokens / drafted_tokens.",
    "prefill_tokens": "Prompt tokens put through the target, repeated prefills included.",
    "prefix_cached_tokens": "Prompt tokens taken from the prefix cache instead of being computed.",
    "target_tokens": "Tokens put through the target: prefill, last committed tokens and draft tokens.",
    "verify_seconds": "Time of target forwards with sampling and acceptance, as the target measured it.",
    "draft_seconds": "Time of draft forwards, as the draft measured it; 0 for rounds at depth 0.",
    "round_seconds": "Time of whole rounds: draft, hops, verify and bookkeeping.",
    "first_tokens": "Requests that got a first token; mean time to first token = first_token_seconds / first_tokens.",
    "first_token_seconds": "Time from a request's arrival in the router to its first token, summed.",
    "preemptions": "Requests that gave their KV cache to others and were prefilled again.",
}
_GAUGES = {
    "qps": ("arrival_rate_per_second", "Exponentially weighted arrival rate over all lanes, requests per second."),
    "predicted_batch": (
        "predicted_batch",
        "Expected requests per lane: arrival rate x mean output tokens x time per token / lanes.",
    ),
    "actual_batch": ("actual_batch", "Running requests per lane, mean."),
    "waiting": ("waiting_requests", "Requests waiting for a place in a lane."),
    "price": ("price", "Least survival probability at which a draft position is verified, at the batch of the moment."),
    "mean_depth": ("mean_depth", "Mean draft tokens per decoding request and round over the last two seconds."),
    "acceptance": ("acceptance", "Decayed mean probability that a tested draft token is accepted."),
    "tokens_per_s": ("tokens_per_second", "Committed tokens per second over the last two seconds, all lanes."),
    "break_even_batch": (
        "break_even_batch",
        "Smallest batch per lane at which the depth is 0; absent when speculation always pays.",
    ),
}


def render(lanes: list[LaneStatus], snapshot: dict[str, Any]) -> str:
    """The exposition text, one series per lane where a number belongs to a lane."""
    registry = CollectorRegistry()
    registry.register(_Collector([*_lane_metrics(lanes), *_cluster_metrics(snapshot)]))
    return generate_latest(registry).decode()


def numerics_by_lane(lanes: list[LaneStatus]) -> dict[str, dict[str, str | bool | None]]:
    """For `GET /health`: by which path and kernels each target runs, and what the probe of its row invariance said."""
    return {
        lane.load.lane_id: {
            "numerics": lane.target.numerics,
            "row_invariant": lane.target.row_invariant,
            "row_invariance": lane.target.row_invariance,
            "path": lane.target.path,
            "path_reason": lane.target.path_reason,
        }
        for lane in lanes
    }


class _Collector:
    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _lane_metrics(lanes: list[LaneStatus]) -> Iterator[Metric]:
    for name, text in COUNTERS.items():
        family = CounterMetricFamily(f"outrider_{name}", text, labels=["lane"])
        for lane in lanes:
            family.add_metric([lane.load.lane_id], lane.counters.get(name, 0.0))
        yield family
    yield _per_position("drafted", "Draft tokens verified", lanes)
    yield _per_position("accepted", "Draft tokens committed", lanes)
    fallbacks = CounterMetricFamily(
        "outrider_fallbacks",
        "Requests times rounds that ran without the draft they were to have, by reason.",
        labels=["lane", "reason"],
    )
    available = GaugeMetricFamily(
        "outrider_draft_available", "1 when the lane has a source of drafts it can ask.", labels=["lane", "source"]
    )
    invariant = GaugeMetricFamily(
        "outrider_row_invariant",
        "1 when logits had the same bits in every batch that was probed on the target's weights at start, so that no text "
        "depends on depth, batch or chunking; 0 when they differed, so that near-ties may turn; absent when not probed.",
        labels=["lane"],
    )
    for lane in lanes:
        for reason, count in lane.fallbacks.items():
            fallbacks.add_metric([lane.load.lane_id, reason], count)
        available.add_metric([lane.load.lane_id, lane.draft_name], float(lane.draft_state == "ok"))
        if lane.target.row_invariant is not None:
            invariant.add_metric([lane.load.lane_id], float(lane.target.row_invariant))
    yield fallbacks
    yield available
    yield invariant


def _per_position(kind: str, text: str, lanes: list[LaneStatus]) -> Metric:
    family = CounterMetricFamily(
        f"outrider_{kind}_by_position", f"{text}, by position in the draft (0 = first).", labels=["lane", "position"]
    )
    for lane in lanes:
        for position, count in enumerate(getattr(lane, f"{kind}_per_position")):
            family.add_metric([lane.load.lane_id, str(position)], count)
    return family


def _cluster_metrics(snapshot: dict[str, Any]) -> Iterator[Metric]:
    for key, (name, text) in _GAUGES.items():
        value = snapshot.get(key)
        if value is not None:
            yield GaugeMetricFamily(f"outrider_{name}", text, value=float(value))
    yield GaugeMetricFamily("outrider_lanes", "Lanes that reported within the last five seconds.", value=len(snapshot["lanes"]))
    yield GaugeMetricFamily(
        "outrider_drafts", "Draft replicas that reported within the last five seconds.", value=len(snapshot["drafts"])
    )
