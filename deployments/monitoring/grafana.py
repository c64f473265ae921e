"""The Grafana dashboard: panels as data, and how they become Grafana's JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deployments.monitoring.queries import Scope, break_even_length, failed_share, gain, hit_rate, kv_usage

SCOPE = Scope(matcher='namespace=~"$namespace"', window="$__rate_interval")
COLUMNS = 24
PANEL_HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One diagram. ``unit`` is Grafana's name of one; ``queries`` are (PromQL, legend)."""

    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False


def rows() -> dict[str, tuple[Panel, ...]]:
    """Title of each row and its panels, most important first."""
    return {
        "The five numbers": _five_numbers(),
        "Does speculation pay?": _speculation(),
        "Drafts": _drafts(),
        "Capacity": _capacity(),
        "Errors and health": _health(),
    }


def _quantiles(histogram: str, *shares: float) -> tuple[tuple[str, str], ...]:
    return tuple((SCOPE.quantile(share, histogram), f"p{100 * share:g}") for share in shares)


def _sum(name: str) -> str:
    return SCOPE.total(SCOPE.series(name))


def _max(name: str) -> str:
    """Of figures of the whole application, which any Api tells."""
    return SCOPE.total(SCOPE.series(name), function="max")


def _five_numbers() -> tuple[Panel, ...]:
    ttft, itl = "time_to_first_token_seconds", "inter_token_latency_seconds"
    return (
        Panel("Time to first token", "From arrival in the lane.", "s", _quantiles(ttft, 0.5, 0.95, 0.99)),
        Panel(
            "Inter-token latency",
            "Each of the n tokens of a round counts as 1/n of its time; the mean is the time per output token.",
            "s",
            (*_quantiles(itl, 0.5, 0.95), (SCOPE.mean(itl), "mean")),
        ),
        Panel(
            "Accepted length",
            "Tokens by which a verified draft moves its request on (accepted + 1), and what it must be so that speculating "
            "rounds make as many tokens per second as plain ones.",
            "none",
            ((SCOPE.mean("accepted_length"), "accepted length"), (break_even_length(SCOPE), "break-even")),
        ),
        Panel("Throughput", "Committed tokens per second.", "none", ((SCOPE.rates("tokens_total"), "tokens/s"),), width=12),
        Panel(
            "Break-even concurrency",
            "Requests in flight from which on speculation stops to pay, by the controller's price table, beside those "
            "that are. No line while it pays at every load.",
            "none",
            (
                (_max("break_even_concurrency"), "break-even"),
                (f"{_sum('running_requests')} + {_sum('waiting_requests')}", "in flight"),
            ),
            width=12,
        ),
    )


def _speculation() -> tuple[Panel, ...]:
    return (
        Panel(
            "Gain",
            "Tokens per second of speculating rounds over those of plain rounds of the same requests, as modelled.",
            "none",
            ((gain(SCOPE), "gain"),),
        ),
        Panel(
            "Depth",
            "Draft tokens verified per request and round; 0 where there was no draft.",
            "none",
            ((SCOPE.total(f"increase({SCOPE.series('draft_depth_bucket')}[{SCOPE.window}])", "le"), "{{le}}"),),
            kind="heatmap",
        ),
        Panel(
            "Price and acceptance",
            "A draft position is verified while its survival probability is above the price.",
            "percentunit",
            ((_max("price"), "price"), (_max("acceptance"), "acceptance per tested token")),
        ),
        Panel(
            "Kept of what was drafted",
            "By source of drafts.",
            "percentunit",
            ((SCOPE.ratio("source_accepted_tokens_total", "source_drafted_tokens_total", "source"), "{{source}}"),),
        ),
        Panel(
            "Kept by position",
            "Share of drafts whose token at this position was committed; 0 is the first.",
            "percentunit",
            ((SCOPE.ratio("accepted_by_position_total", "drafted_by_position_total", "position"), "{{position}}"),),
        ),
        Panel(
            "Predictions of survival",
            "Mean distance of predicted from observed survival: what the depth is chosen by.",
            "percentunit",
            ((_max("calibration_error"), "calibration error"),),
        ),
    )


def _drafts() -> tuple[Panel, ...]:
    return (
        Panel(
            "Draft time",
            "Seconds per second that drafts computed behind a verify, and that rounds waited for them.",
            "s",
            tuple((SCOPE.rates(f"draft_{kind}_seconds_total"), kind) for kind in ("hidden", "exposed")),
            stacked=True,
        ),
        Panel(
            "Speculation cache",
            "Outcomes for which a draft was prepared and there in time, and outcomes prepared per request and round.",
            "none",
            ((hit_rate(SCOPE), "hit rate"), (_max("prepared_outcomes_per_request"), "fan-out")),
        ),
        Panel(
            "Misses",
            "Outcomes without a prepared draft, per second, by kind.",
            "none",
            ((SCOPE.rates("prepared_misses_total", "kind"), "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "Fallbacks",
            "Requests times rounds without the draft they were to have, per second, by reason.",
            "none",
            ((SCOPE.rates("fallbacks_total", "reason"), "{{reason}}"), (failed_share(SCOPE), "share that failed")),
        ),
        Panel(
            "Merging",
            "Messages of lanes per call of a draft's model, and answers of drafts that nobody could use, per second.",
            "none",
            (
                (SCOPE.ratio("draft_messages_total", "draft_runs_total", "draft"), "merged {{draft}}"),
                (SCOPE.rates("dropped_draft_answers_total", "reason"), "dropped: {{reason}}"),
            ),
        ),
        Panel(
            "Hops",
            "Mean round trip over streams without the model's own time.",
            "s",
            ((SCOPE.ratio("hop_seconds_total", "hops_total", "peer"), "{{peer}}"),),
        ),
    )


def _capacity() -> tuple[Panel, ...]:
    return (
        Panel(
            "Requests",
            "In rounds and in queues.",
            "none",
            ((_sum("running_requests"), "running"), (_sum("waiting_requests"), "waiting")),
            stacked=True,
        ),
        Panel("Time in the queue", "Until first admitted.", "s", _quantiles("queue_seconds", 0.5, 0.95)),
        Panel("KV cache", "In use, by lane.", "percentunit", ((kv_usage(SCOPE), "{{lane}}"),)),
        Panel(
            "Replicas",
            "Lanes and drafts that report, and how many the controller wants.",
            "none",
            tuple(
                (_max(name), legend)
                for name, legend in (
                    ("ready_lanes", "lanes ready"),
                    ("wanted_lanes", "lanes wanted"),
                    ("drafts", "drafts"),
                    ("wanted_drafts", "drafts wanted"),
                )
            ),
        ),
        Panel(
            "Batch",
            "Requests per lane: running, and expected by Little's law.",
            "none",
            ((_max("actual_batch"), "running"), (_max("predicted_batch"), "expected")),
        ),
        Panel(
            "Prompts",
            "Tokens per second that were computed or found in the prefix cache.",
            "none",
            ((SCOPE.rates("prefill_tokens_total"), "computed"), (SCOPE.rates("prefix_cached_tokens_total"), "found")),
            stacked=True,
        ),
    )


def _health() -> tuple[Panel, ...]:
    return (
        Panel(
            "How requests end",
            "Per second, by reason.",
            "none",
            ((SCOPE.rates("finished_requests_total", "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Preemptions", "Requests prefilled again, per second.", "none", ((SCOPE.rates("preemptions_total"), "all lanes"),)
        ),
        Panel(
            "Since the last report",
            "Time since the controller heard of any lane.",
            "s",
            ((f"time() - {_max('last_report_timestamp_seconds')}", "since"),),
        ),
        Panel(
            "Row invariance",
            "1: no text depends on depth or batch; 0: the probe found different bits.",
            "none",
            ((SCOPE.series("row_invariant"), "{{lane}}"),),
        ),
        Panel(
            "Drafts that can be asked",
            "1 while a lane has a source of drafts.",
            "none",
            ((SCOPE.series("draft_available"), "{{lane}} {{source}}"),),
        ),
        Panel(
            "Controller",
            "Unusual input and changes of the number of replicas, per second.",
            "none",
            (
                (SCOPE.rates("controller_anomalies_total", "kind"), "{{kind}}"),
                (SCOPE.rates("replica_changes_total", "kind"), "changes: {{kind}}"),
            ),
        ),
    )


# --- Grafana's JSON ---------------------------------------------------------------------------------------------------------


def dashboard() -> dict[str, Any]:
    """The dashboard; the data source and the namespace are chosen in Grafana. Outside Kubernetes the namespace "All" fits."""
    return {
        "uid": "outrider",
        "title": "Outrider",
        "tags": ["outrider"],
        "editable": True,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_data_source(), _namespace()]},
        "panels": list(_placed()),
    }


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _namespace() -> dict[str, Any]:
    query = "label_values(outrider_lanes, namespace)"
    return {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "namespaces"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed() -> Iterator[dict[str, Any]]:
    """Panels from left to right and from top to bottom, under their rows."""
    number = top = 0
    for title, panels in rows().items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(top, 0, COLUMNS, 1),
        }
        top, left = top + 1, 0
        for panel in panels:
            if left + panel.width > COLUMNS:
                top, left = top + PANEL_HEIGHT, 0
            number += 1
            yield _as_json(panel, number, _place(top, left, panel.width, PANEL_HEIGHT))
            left += panel.width
        top += PANEL_HEIGHT


def _place(top: int, left: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _as_json(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    is_heatmap = panel.kind == "heatmap"
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {} if is_heatmap else custom}, "overrides": []},
        "options": {"calculate": False, "yAxis": {"unit": panel.unit}} if is_heatmap else {"tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "format": "heatmap" if is_heatmap else "time_series",
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }
