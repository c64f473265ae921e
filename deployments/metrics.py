"""Prometheus text for the whole application, from the counters that the lanes push to the controller.

Every name says its unit; every help text says how the number is made. What a lane counts carries the lane's name, which no
other lane ever has again: one that is replaced ends its series and its successor begins new ones at 0, so no counter goes back.
Sum over ``lane`` after `rate`.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from deployments.messages import LaneStatus

COUNTERS = {
    "requests": "Requests that reached a lane and could be served, also those that go on there after another lane was lost.",
    "tokens": "Tokens committed and shown (a round commits accepted draft tokens plus one); throughput = rate(tokens).",
    "rounds": "Rounds played; one target forward each.",
    "prefill_tokens": "Prompt tokens put through the target, repeated prefills included.",
    "prefix_cached_tokens": "Prompt tokens taken from the prefix cache instead of being computed; hit rate of the cache = "
    "prefix_cached_tokens / (prefix_cached_tokens + prefill_tokens).",
    "target_tokens": "Tokens put through the target: prefill, last committed tokens and draft tokens.",
    "verify_seconds": "Time of target forwards with sampling and acceptance, as the target measured it.",
    "prepared_seconds": "The part of draft_seconds in rounds that asked no draft: all of their drafts were prepared.",
    "prepared_exposed_seconds": "The part of draft_exposed_seconds in those rounds; hidden share on hits = 1 - "
    "prepared_exposed_seconds / prepared_seconds.",
    "draft_asked": "Requests times rounds that asked a draft and waited for the answer, because nothing was prepared.",
    "round_seconds": "Time of whole rounds: draft, hops, verify and bookkeeping.",
    "speculating_requests": "Requests times rounds, in rounds with drafts and without prefill while the target's step times "
    "are known: the rounds in which speculation is judged.",
    "speculating_tokens": "Tokens committed in those rounds; accepted length = speculating_tokens / speculating_requests, "
    "requests without a draft included.",
    "speculating_round_seconds": "Time of those rounds; break-even accepted length = speculating_round_seconds / "
    "speculating_plain_seconds; gain = accepted length / break-even accepted length.",
    "speculating_plain_seconds": "Time that plain rounds of the same requests would have taken: the target's step for the "
    "batch, as modelled from its measured steps, plus the bookkeeping of the real round.",
    "preemptions": "Requests that gave their KV cache to others and were prefilled again.",
}
"""Of a lane."""
SOURCE_COUNTERS = {
    "drafted_tokens": "Draft tokens that the target verified, of all sources together; source: the one that rounds ask.",
    "accepted_tokens": "Draft tokens that were committed; acceptance rate = accepted_tokens / drafted_tokens.",
    "draft_seconds": "Time of draft forwards for the drafts of each round, as the draft measured it; 0 for rounds at depth 0.",
    "draft_hidden_seconds": "Draft time behind a verify: max(0, draft_seconds - draft_exposed_seconds), round by round; "
    "hidden share = draft_hidden_seconds / draft_seconds.",
    "draft_exposed_seconds": "Time that rounds waited for drafts, hops included.",
}
"""Of a lane, with the name of its source of drafts."""
HISTOGRAMS = {
    "time_to_first_token_seconds": "Time to first token: from a request's arrival in its lane to the end of the round that "
    "made its first token, queueing and prefill included. Without HTTP, tokenising, the way between Api and lane, and waiting "
    "for a lane.",
    "inter_token_latency_seconds": "Time between tokens, after the first: each of the n tokens of a round counts as 1/n of the "
    "time since the round before that gave the request tokens; sum / count = mean time per output token.",
    "queue_seconds": "From a request's arrival in its lane to the round that admitted it for the first time.",
    "accepted_length": "Tokens by which a verify with a draft moved its request on: accepted draft tokens + 1. Mean accepted "
    "length = sum / count; requests without a draft in a round are not counted there.",
    "draft_depth": "Draft tokens verified per decoding request and round, 0 where there was none; mean depth = sum / count.",
}
"""Of a lane; the buckets are in `deployments.counters.BUCKETS`."""
_GAUGES = {
    "qps": ("arrival_rate_per_second", "Exponentially weighted arrival rate over all lanes, requests per second."),
    "predicted_batch": (
        "predicted_batch",
        "Expected requests per lane: arrival rate x mean output tokens x time per token / lanes.",
    ),
    "actual_batch": ("actual_batch", "Running requests per lane, mean."),
    "price": ("price", "Least survival probability at which a draft position is verified, at the batch of the moment."),
    "mean_depth": ("mean_depth", "Mean draft tokens per decoding request and round over the last two seconds."),
    "hit_rate": (
        "prepared_hit_rate",
        "Share of the last hundreds of outcomes that were prepared and there in time, mean over overlapping lanes, "
        "0 when none do.",
    ),
    "prepared_outcomes": (
        "prepared_outcomes_per_request",
        "Fan-out: outcomes prepared per request and round by the last plan, mean over the lanes whose rounds overlap; 0 when "
        "none do.",
    ),
    "calibration_error": (
        "calibration_error",
        "Mean distance of predicted from observed survival of draft tokens, in ten bins by prediction, mean over the lanes.",
    ),
    "acceptance": ("acceptance", "Decayed mean probability that a tested draft token is accepted."),
    "tokens_per_s": ("tokens_per_second", "Committed tokens per second over the last two seconds, all lanes."),
    "break_even_batch": (
        "break_even_batch",
        "Smallest batch per lane at which the depth is 0, by the controller's price table: 1, 2, 4, ... 256; absent while "
        "speculation pays at all of them, or nothing is measured.",
    ),
    "break_even_concurrency": (
        "break_even_concurrency",
        "Requests in flight at which speculation stops to pay = break_even_batch * lanes; absent like break_even_batch.",
    ),
    "last_report_unix_s": (
        "last_report_timestamp_seconds",
        "Unix time at which the controller last heard of any lane; they report every controller.report_interval_s. Absent "
        "until the first report.",
    ),
    "wanted_lanes": (
        "wanted_lanes",
        "Lanes that Serve is asked for: requests running, waiting or expected / requests that fill a lane, within lanes.min "
        "and lanes.max, after lanes.scale_up_s or lanes.scale_down_s, and as far as GPUs are free.",
    ),
    "wanted_drafts": (
        "wanted_drafts",
        "Draft replicas that Serve is asked for: rows that the lanes want drafted / rows that fill a draft, within drafts.min "
        "and drafts.max, 0 after drafts.idle_s without demand, and as far as GPUs are free.",
    ),
}


_BY_LABEL: dict[str, tuple[str, str, Callable[[LaneStatus], dict[str, int]]]] = {
    "finished_requests": (
        "reason",
        "Requests by how they ended in their lane: stop (EOS, a stop token or a stop string), length (max_tokens), error, "
        "cancelled (the client left), overloaded (the queue was full), invalid (refused, not in requests). In flight = "
        "requests - all but invalid. What the Api refuses by itself reaches no lane.",
        lambda lane: lane.outcomes,
    ),
    "fallbacks": (
        "reason",
        "Requests times rounds that ran without the draft they were to have, by reason.",
        lambda lane: lane.fallbacks,
    ),
    "prepared_hits": (
        "kind",
        "Requests times rounds whose draft was prepared while the target verified, by kind of outcome: recovery (the draft was "
        "corrected), bonus (all of it was accepted), plain (there was none); hit rate = prepared_hits / (prepared_hits + "
        "prepared_misses).",
        lambda lane: lane.hits,
    ),
    "prepared_misses": (
        "kind",
        "Requests times rounds whose outcome was not prepared, by kind as in prepared_hits, or late (no answer in time), "
        "unprepared (the draft had a reason).",
        lambda lane: lane.misses,
    ),
    "dropped_draft_answers": (
        "reason",
        "Answers of drafts that were not used: late (for another round), stray (nobody asked), twice.",
        lambda lane: lane.dropped_answers,
    ),
}
"""Counters with one more label than the lane: (label, help, where to find them)."""
_BY_SOURCE = {
    "source_drafts": ("num_requests", "Requests times rounds whose draft came from a source."),
    "source_drafted_tokens": ("num_drafted", "Draft tokens of a source that the target verified."),
    "source_accepted_tokens": (
        "num_accepted",
        "Draft tokens of a source that were committed; its acceptance rate = source_accepted_tokens / source_drafted_tokens.",
    ),
    "source_seconds": ("time_s", "Time of a source for drafts, those included that were prepared and not used."),
}
_TRAFFIC = {
    "hops": ("num_hops", "Calls over streams that were answered; mean hop = hop_seconds / hops."),
    "hop_seconds": ("hop_time_s", "Round trips of calls over streams minus the model's own time, queueing included, summed."),
    "stream_sent_bytes": ("bytes_sent", "Bytes of frames sent over streams; bytes per round = stream_sent_bytes / rounds."),
    "stream_received_bytes": ("bytes_received", "Bytes of frames received over streams."),
}
_DRAFT_COUNTERS = {
    "draft_runs": ("num_runs", "Calls of a draft replica's model, each over all messages that were pending."),
    "draft_messages": (
        "num_messages",
        "Messages of lanes that a draft replica answered; mean merged = draft_messages / draft_runs.",
    ),
    "draft_expired_sequences": (
        "num_expired",
        "Sequences that a draft replica forgot because nobody asked about them any more.",
    ),
}
_DRAFT_GAUGES = {
    "draft_lanes": ("num_lanes", "Lanes that a draft replica holds sequences of."),
    "draft_sequences": ("num_sequences", "Sequences that lanes asked a draft replica about and have not released."),
}


_LANE_GAUGES: dict[str, tuple[str, Callable[[LaneStatus], float]]] = {
    "running_requests": ("Requests that take part in the lane's rounds.", lambda lane: lane.load.num_running),
    "waiting_requests": ("Requests that wait for a place in the lane.", lambda lane: lane.load.num_waiting),
    "kv_cache_used_tokens": (
        "Tokens of KV cache that running requests take, in whole blocks; usage = kv_cache_used_tokens / kv_cache_tokens.",
        lambda lane: lane.kv_used_tokens,
    ),
    "kv_cache_tokens": (
        "Tokens that the target's KV cache holds, in whole blocks.",
        lambda lane: lane.target.kv_capacity_tokens // lane.target.kv_block_size * lane.target.kv_block_size,
    ),
}
_CONTROLLER_COUNTERS: dict[str, tuple[str, str, Callable[[dict[str, Any]], dict[str, int]]]] = {
    "replica_changes": (
        "kind",
        "Changes of mind of the controller about the number of replicas, by kind: lane, draft.",
        lambda seen: {kind: seen["replicas"][f"{kind}_changes"] for kind in ("lane", "draft")} if "replicas" in seen else {},
    ),
    "controller_anomalies": (
        "kind",
        "Broken or unusual input of the controller, by kind: bad_fields, clock_jumps, unnamed_lanes, lanes_joined, "
        "lanes_dropped (silent for five seconds).",
        lambda seen: seen.get("anomalies", {}),
    ),
}


def render(lanes: list[LaneStatus], snapshot: dict[str, Any]) -> str:
    """The exposition text, one series per lane where a number belongs to a lane.

    ``snapshot`` is `Controller.snapshot`; what it lacks or does not know has no series.
    """
    registry = CollectorRegistry()
    registry.register(_Collector([*_lane_metrics(lanes), *_cluster_metrics(lanes, snapshot)]))
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
    for name, text in SOURCE_COUNTERS.items():
        family = CounterMetricFamily(f"outrider_{name}", text, labels=["lane", "source"])
        for lane in lanes:
            family.add_metric([lane.load.lane_id, lane.draft_name], lane.counters.get(name, 0.0))
        yield family
    yield from (_histogram(name, text, lanes) for name, text in HISTOGRAMS.items())
    for name, (text, read) in _LANE_GAUGES.items():
        gauge = GaugeMetricFamily(f"outrider_{name}", text, labels=["lane"])
        for lane in lanes:
            gauge.add_metric([lane.load.lane_id], read(lane))
        yield gauge
    yield _lane_info(lanes)
    yield _per_position("drafted", "Draft tokens verified", lanes)
    yield _per_position("accepted", "Draft tokens committed", lanes)
    yield from (_labelled(name, label, text, get, lanes) for name, (label, text, get) in _BY_LABEL.items())
    yield from (_by_source(name, attribute, text, lanes) for name, (attribute, text) in _BY_SOURCE.items())
    yield _per_draft(lanes)
    yield from _traffic(lanes)
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
        available.add_metric([lane.load.lane_id, lane.draft_name], float(lane.draft_state.startswith("ok")))
        if lane.target.row_invariant is not None:
            invariant.add_metric([lane.load.lane_id], float(lane.target.row_invariant))
    yield available
    yield invariant


def _histogram(name: str, text: str, lanes: list[LaneStatus]) -> Metric:
    family = HistogramMetricFamily(f"outrider_{name}", text, labels=["lane"])
    for lane in lanes:
        seen = lane.histograms.get(name)
        if seen is not None:
            bounds = [*(str(float(bound)) for bound in seen.bounds), "+Inf"]
            family.add_metric([lane.load.lane_id], list(zip(bounds, accumulate(seen.counts), strict=True)), seen.total)
    return family


def _lane_info(lanes: list[LaneStatus]) -> Metric:
    family = InfoMetricFamily("outrider_lane", "What runs in a lane; always 1.", labels=["lane"])
    for lane in lanes:
        target = lane.target
        family.add_metric(
            [lane.load.lane_id],
            {
                "model": target.name,
                "device": target.device,
                "dtype": target.dtype,
                "path": target.path,
                "numerics": target.numerics,
                "source": lane.draft_name,
            },
        )
    return family


def _per_position(kind: str, text: str, lanes: list[LaneStatus]) -> Metric:
    family = CounterMetricFamily(
        f"outrider_{kind}_by_position", f"{text}, by position in the draft (0 = first).", labels=["lane", "position"]
    )
    for lane in lanes:
        for position, count in enumerate(getattr(lane, f"{kind}_per_position")):
            family.add_metric([lane.load.lane_id, str(position)], count)
    return family


def _labelled(name: str, label: str, text: str, get: Callable[[LaneStatus], dict[str, int]], lanes: list[LaneStatus]) -> Metric:
    family = CounterMetricFamily(f"outrider_{name}", text, labels=["lane", label])
    for lane in lanes:
        for value, count in get(lane).items():
            family.add_metric([lane.load.lane_id, value], count)
    return family


def _by_source(name: str, attribute: str, text: str, lanes: list[LaneStatus]) -> Metric:
    family = CounterMetricFamily(f"outrider_{name}", text, labels=["lane", "source"])
    for lane in lanes:
        for source, step in lane.sources.items():
            family.add_metric([lane.load.lane_id, source], getattr(step, attribute))
    return family


def _per_draft(lanes: list[LaneStatus]) -> Metric:
    family = GaugeMetricFamily(
        "outrider_requests_on_draft", "Requests of a lane that stick to a draft replica now.", labels=["lane", "draft"]
    )
    for lane in lanes:
        for draft_id, count in lane.requests_per_draft.items():
            family.add_metric([lane.load.lane_id, draft_id], count)
    return family


def _traffic(lanes: list[LaneStatus]) -> Iterator[Metric]:
    for name, (attribute, text) in _TRAFFIC.items():
        family = CounterMetricFamily(f"outrider_{name}", f"{text} By peer: target, draft.", labels=["lane", "peer"])
        for lane in lanes:
            for peer, traffic in lane.traffic.items():
                family.add_metric([lane.load.lane_id, peer], getattr(traffic, attribute))
        yield family


def _draft_metrics(drafts: list[dict[str, Any]]) -> Iterator[Metric]:
    families: list[tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], dict[str, tuple[str, str]]]] = [
        (CounterMetricFamily, _DRAFT_COUNTERS),
        (GaugeMetricFamily, _DRAFT_GAUGES),
    ]
    for make, table in families:
        for name, (key, text) in table.items():
            family = make(f"outrider_{name}", text, labels=["draft"])
            for draft in drafts:
                family.add_metric([draft["draft_id"]], float(draft[key]))
            yield family


def _cluster_metrics(lanes: list[LaneStatus], snapshot: dict[str, Any]) -> Iterator[Metric]:
    batch = snapshot.get("break_even_batch")
    known = {**snapshot, "break_even_concurrency": None if batch is None else batch * len(snapshot["lanes"])}
    for key, (name, text) in _GAUGES.items():
        value = known.get(key)
        if value is not None:
            yield GaugeMetricFamily(f"outrider_{name}", text, value=float(value))
    yield GaugeMetricFamily("outrider_lanes", "Lanes that reported within the last five seconds.", value=len(snapshot["lanes"]))
    yield GaugeMetricFamily(
        "outrider_ready_lanes",
        "Those among them that take requests; a lane that leaves only finishes what it has.",
        value=sum(not lane.leaving for lane in lanes),
    )
    yield GaugeMetricFamily(
        "outrider_drafts", "Draft replicas that reported within the last five seconds.", value=len(snapshot["drafts"])
    )
    for name, (label, text, read) in _CONTROLLER_COUNTERS.items():
        family = CounterMetricFamily(f"outrider_{name}", text, labels=[label])
        for value, count in read(snapshot).items():
            family.add_metric([value], count)
        yield family
    if "replicas" in snapshot:
        yield CounterMetricFamily(
            "outrider_draft_cold_starts",
            "Times that the controller asked for a first draft where none ran.",
            value=snapshot["replicas"]["draft_cold_starts"],
        )
    yield from _draft_metrics(snapshot.get("draft_details", []))
