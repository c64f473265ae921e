"""Dashboard and alerts against the metrics that the code exports."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from metrics_page import schema

from deployments.counters import BUCKETS
from deployments.monitoring.alerts import SLOW_FIRST_TOKEN_S, alerts
from deployments.monitoring.grafana import COLUMNS, dashboard
from deployments.monitoring.queries import FAILED_DRAFTS
from engine import drafting, drivers
from engine.config import OutriderConfig
from engine.propose.checks import REASONS

promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed (pip install .[dev])")
FROM_OUTSIDE = {"namespace"}
"""Labels that Prometheus adds to what it scrapes."""
GRAFANA_VARIABLES = {"$__rate_interval": "5m", "$namespace": ".*"}


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL)."""
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in GRAFANA_VARIABLES.items():
                query = query.replace(name, value)
            yield f"panel {panel['title']}", query
    for alert in alerts():
        yield f"alert {alert.name}", alert.query


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


class Reading:
    """What a query asks of the metrics; ``problems`` where we do not export that."""

    def __init__(self, query: str):
        self.schema = schema()
        self.problems: list[str] = []
        self.names: set[str] = set()
        self._read(promql.parse(query), rated=False)

    def _read(self, node: Any, rated: bool) -> frozenset[str]:
        """Returns the labels of the result."""
        match node:
            case promql.VectorSelector():
                return self._select(node, rated)
            case promql.MatrixSelector():
                return self._read(node.vector_selector, rated)
            case promql.AggregateExpr():
                return self._aggregate(node, rated)
            case promql.Call():
                is_rate = node.func.name in ("rate", "increase")
                inner = [self._read(argument, is_rate or rated) for argument in node.args]
                return frozenset().union(*inner)
            case promql.BinaryExpr():
                return self._read(node.lhs, rated) | self._read(node.rhs, rated)
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return self._read(node.expr, rated)
            case promql.NumberLiteral():
                return frozenset()
        raise AssertionError(f"the test does not know {type(node).__name__}")

    def _select(self, node: Any, rated: bool) -> frozenset[str]:
        self.names.add(node.name)
        family = self.schema.get(node.name)
        if family is None:
            self.problems.append(f"{node.name} is not exported")
            return frozenset()
        labels = family.labels | FROM_OUTSIDE
        self.problems += [f"{node.name} has no {m.name}" for m in node.matchers.matchers if m.name not in labels]
        is_counter = family.kind in ("counter", "histogram")
        if is_counter != rated:
            self.problems.append(f"{node.name} is a {family.kind}: {'rate' if is_counter else 'no rate'} is needed")
        return labels

    def _aggregate(self, node: Any, rated: bool) -> frozenset[str]:
        labels = self._read(node.expr, rated)
        if node.modifier is None:
            return frozenset()
        self.problems += [f"by {name}: no such label" for name in node.modifier.labels if name not in labels]
        return frozenset(node.modifier.labels)


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_every_query_asks_for_what_is_exported(where: str, query: str) -> None:
    """Bug guarded: a panel or alert that stays empty for ever: a metric that was renamed, a label that it lacks, a counter
    without a rate.
    """
    reading = Reading(query)
    assert reading.problems == []
    assert reading.names


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("rate(outrider_token_total[5m])", "outrider_token_total is not exported"),
        ("sum(rate(outrider_tokens_total{source='x'}[5m]))", "outrider_tokens_total has no source"),
        ("sum by (source) (rate(outrider_tokens_total[5m]))", "by source: no such label"),
        ("sum(outrider_tokens_total)", "outrider_tokens_total is a counter: rate is needed"),
        ("rate(outrider_price[5m])", "outrider_price is a gauge: no rate is needed"),
    ],
)
def test_the_check_finds_wrong_queries(query: str, problem: str) -> None:
    """Bug guarded: a check that every query passes."""
    assert Reading(query).problems == [problem]


def test_every_metric_of_importance_is_looked_at() -> None:
    """Bug guarded: a number that is exported and that nobody sees."""
    asked = set().union(*(Reading(query).names for _, query in queries()))
    exported = {name for name in schema() if not name.endswith("_created")}
    base = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    unseen = {name for name in exported - asked if re.sub(r"_(bucket|sum|count)$", "", name) not in base}
    assert unseen == {
        "outrider_accepted_tokens_total",
        "outrider_arrival_rate_per_second",
        "outrider_break_even_batch",
        "outrider_draft_asked_total",
        "outrider_draft_cold_starts_total",
        "outrider_draft_expired_sequences_total",
        "outrider_draft_lanes",
        "outrider_draft_seconds_total",
        "outrider_draft_sequences",
        "outrider_drafted_tokens_total",
        "outrider_lane_info",
        "outrider_lanes",
        "outrider_mean_depth",
        "outrider_prepared_exposed_seconds_total",
        "outrider_prepared_hit_rate",
        "outrider_prepared_seconds_total",
        "outrider_requests_on_draft",
        "outrider_requests_total",
        "outrider_source_drafts_total",
        "outrider_source_seconds_total",
        "outrider_round_seconds_total",
        "outrider_rounds_total",
        "outrider_stream_received_bytes_total",
        "outrider_stream_sent_bytes_total",
        "outrider_target_tokens_total",
        "outrider_tokens_per_second",
        "outrider_verify_seconds_total",
    }


def test_legends_name_labels_that_results_have() -> None:
    """Bug guarded: a legend that shows an empty place instead of the lane."""
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "5m")
            names = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert names <= Reading(query)._read(promql.parse(query), rated=False), panel["title"]


def test_panels_do_not_overlap() -> None:
    """Bug guarded: panels that Grafana moves about because they lie on each other, or two with one id."""
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_five_numbers_come_first() -> None:
    """Bug guarded: a dashboard on which one must search for what matters."""
    assert [panel["title"] for panel in panels()[:5]] == [
        "Time to first token",
        "Inter-token latency",
        "Accepted length",
        "Throughput",
        "Break-even concurrency",
    ]


def test_alerts_can_be_acted_upon() -> None:
    """Bug guarded: advice to change a setting that does not exist; a name used twice; a threshold within a bucket."""
    tree = OutriderConfig().model_dump()
    found = alerts()
    assert len({alert.name for alert in found}) == len(found)
    for alert in found:
        assert alert.severity in ("critical", "warning", "info")
        assert alert.summary.endswith(".")
        assert alert.todo.endswith((".", "?"))
        for section, key in re.findall(rf"\b({'|'.join(tree)})\.(\w+)", alert.todo):
            assert key in tree[section], f"{alert.name}: {section}.{key}"
    assert SLOW_FIRST_TOKEN_S in BUCKETS["time_to_first_token_seconds"]


def test_failures_of_drafts_are_named_as_they_are_counted() -> None:
    """Bug guarded: an alert on reasons that nobody counts."""
    sources = [inspect.getsource(module) for module in (drafting, drivers)]
    for reason in FAILED_DRAFTS:
        assert reason in REASONS or any(f'"{reason}"' in source for source in sources), reason
