"""What the controller concludes from the reports of all lanes: the cluster's load and the price table."""

import math
from collections import Counter
from typing import Any

import msgspec

from autoscale.acceptance import survival
from autoscale.cost_model import OverlapCost, RoundCost
from autoscale.depth import choose_depth
from autoscale.hit_rate import HitLaws
from autoscale.overlap import overlap_price_table
from autoscale.price import break_even_batch, deepest_at, price_at, price_table
from autoscale.replicas import ReplicaSignals
from autoscale.signals import (
    ArrivalRate,
    ClusterState,
    DepthTable,
    LaneReport,
    OverlapReport,
    PriceRow,
    StepTimes,
    expected_batch,
    update_arrival_rate,
)

PRICES_EVERY_S = 0.5
"""Prices are made anew this often, and when a lane joins or leaves: it takes 20 ms, and every report asks for them."""
_NUMBERS = (
    "num_arrivals",
    "num_running",
    "num_waiting",
    "mean_output_tokens",
    "tokens_per_s",
    "acceptance",
    "mean_depth",
    "context_s",
    "calibration_error",
    "wanted_draft_rows",
    "clearly_wanted_draft_rows",
)


class _Lane(msgspec.Struct, frozen=True):
    report: LaneReport
    received_s: float
    arrivals: ArrivalRate


class ControllerPolicy:
    """Keeps the last report of every lane and turns them into one `DepthTable`. Reads no clock, does no I/O.

    Broken input never raises and never reaches the table; it is counted in ``snapshot()["anomalies"]``:
    ``bad_fields`` (NaN, infinite or negative: the lane's previous value is used, else 0), ``clock_jumps`` (the controller's
    or a lane's time went backwards or is no number), ``unnamed_lanes``, ``lanes_joined``, ``lanes_dropped``.
    """

    def __init__(self, max_depth: int, arrival_half_life_s: float = 2.0, lane_timeout_s: float = 5.0):
        self._max_depth = max_depth
        self._half_life_s = arrival_half_life_s
        self._lane_timeout_s = lane_timeout_s
        self._lanes: dict[str, _Lane] = {}
        self._now_s = -math.inf
        self._prices: tuple[tuple[PriceRow, ...], tuple[PriceRow, ...]] = ((), ())
        self._priced_s = -math.inf
        self._priced_lanes: frozenset[str] = frozenset()
        self._version = 0
        self._draft_times: StepTimes = ()
        self._anomalies: Counter[str] = Counter()

    def ingest(self, report: LaneReport, now_s: float) -> None:
        """Take in a lane's report; ``now_s`` is the controller's clock."""
        self._advance(now_s)
        if not report.lane_id:
            self._anomalies["unnamed_lanes"] += 1
            return
        previous = self._lanes.get(report.lane_id)
        if previous is None:
            self._anomalies["lanes_joined"] += 1
        report = self._cleaned(report, previous.report if previous else None)
        memory = previous.arrivals if previous else ArrivalRate()
        if not math.isfinite(report.now_s) or (memory.at_s is not None and report.now_s < memory.at_s):
            self._anomalies["clock_jumps"] += 1
        arrivals = update_arrival_rate(memory, report.num_arrivals, report.now_s, self._half_life_s)
        self._draft_times = report.draft_step_times or self._draft_times
        self._lanes[report.lane_id] = _Lane(report, self._now_s, arrivals)

    def forget(self, lane_id: str) -> None:
        """A lane has ended."""
        self._lanes.pop(lane_id, None)

    @property
    def draft_step_times(self) -> StepTimes:
        """The last that any lane knew, (rows, seconds): for lanes that have not met a draft; empty without any."""
        return self._draft_times

    def replica_signals(self, now_s: float, *, num_leaving: int, num_drafts: int) -> ReplicaSignals:
        """What `autoscale.replicas` decides by; ``num_leaving`` lanes and ``num_drafts`` drafts are known to the caller."""
        state = self.state(now_s)
        reports = [lane.report for lane in self._lanes.values()]
        return ReplicaSignals(
            num_lanes=state.num_lanes,
            num_leaving=num_leaving,
            num_drafts=num_drafts,
            num_running=sum(report.num_running for report in reports),
            num_waiting=state.num_waiting,
            most_running=max((report.num_running for report in reports), default=0),
            expected_requests=state.predicted_batch * state.num_lanes,
            token_rate=state.arrival_rate * self._mean_output_tokens(),
            wanted_rows=sum(report.wanted_draft_rows for report in reports),
            clearly_wanted_rows=sum(report.clearly_wanted_draft_rows for report in reports),
            acceptance=state.acceptance,
            cost=self._cost(),
        )

    def state(self, now_s: float) -> ClusterState:
        """The live lanes together; lanes silent for ``lane_timeout_s`` are dropped first."""
        self._advance(now_s)
        reports = [lane.report for lane in self._lanes.values()]
        num_lanes = len(reports)
        rate = sum(lane.arrivals.per_s for lane in self._lanes.values())
        return ClusterState(
            num_lanes=num_lanes,
            arrival_rate=rate,
            actual_batch=_mean([report.num_running for report in reports]),
            predicted_batch=expected_batch(rate, self._mean_output_tokens(), self._time_per_output_token_s(), num_lanes),
            num_waiting=sum(report.num_waiting for report in reports),
            acceptance=min(_mean([r.acceptance for r in reports], [r.num_running for r in reports]), 1.0),
            tokens_per_s=sum(report.tokens_per_s for report in reports),
            mean_depth=_mean([r.mean_depth for r in reports], [r.num_running for r in reports]),
        )

    def table(self, now_s: float) -> DepthTable:
        """What to publish now. Without a measured lane it has no rows, and every lane goes by its own measurements."""
        state = self.state(now_s)
        if self._lanes.keys() != self._priced_lanes or not 0 <= self._now_s - self._priced_s < PRICES_EVERY_S:
            self._price(state.acceptance)
        prices, overlapped = self._prices
        return DepthTable(
            prices=prices,
            overlapped_prices=overlapped,
            predicted_batch=state.predicted_batch,
            reason=_reason(state, overlapped if self._mostly_overlapped() else prices),
            version=self._version,
        )

    def _price(self, acceptance: float) -> None:
        cost = self._cost()
        prices = () if cost.target.is_default else price_table(acceptance, cost, self._max_depth)
        overlapped = self._overlapped_prices(acceptance, cost) if prices else ()
        self._priced_s, self._priced_lanes = self._now_s, frozenset(self._lanes)
        if (prices, overlapped) != self._prices:
            self._prices = (prices, overlapped)
            self._version += 1

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """The decision and what it rests on, for people and metrics. Batches are per lane."""
        state, table = self.state(now_s), self.table(now_s)
        batch = max(state.actual_batch, state.predicted_batch, 1.0)
        rows = table.overlapped_prices if self._mostly_overlapped() else table.prices
        current = price_at(rows, batch) if rows else None
        reachable = survival(state.acceptance, deepest_at(rows, batch) if rows else 0)
        return {
            "qps": state.arrival_rate,
            "predicted_batch": state.predicted_batch,
            "actual_batch": state.actual_batch,
            "waiting": state.num_waiting,
            "acceptance": state.acceptance,
            "tokens_per_s": state.tokens_per_s,
            "mean_depth": state.mean_depth,
            "calibration_error": _mean([lane.report.calibration_error for lane in self._lanes.values()]),
            "price": current,
            "depth": None if current is None else choose_depth(reachable, current, len(reachable)),
            "lanes": sorted(self._lanes),
            "break_even_batch": break_even_batch(rows),
            "hit_rate": _mean([overlap.hit_rate for overlap in self._overlapped()]),
            "prepared_outcomes": _mean([overlap.num_rows for overlap in self._overlapped()]),
            "overlapped_lanes": len(self._overlapped()),
            "reason": table.reason,
            "version": table.version,
            "anomalies": dict(self._anomalies),
        }

    def _advance(self, now_s: float) -> None:
        """Move the clock and drop silent lanes; after a step backwards every lane counts as heard of just now."""
        if not math.isfinite(now_s):
            self._anomalies["clock_jumps"] += 1
            return
        if now_s < self._now_s:
            self._anomalies["clock_jumps"] += 1
            self._lanes = {name: msgspec.structs.replace(lane, received_s=now_s) for name, lane in self._lanes.items()}
        self._now_s = now_s
        live = {name: lane for name, lane in self._lanes.items() if now_s - lane.received_s <= self._lane_timeout_s}
        self._anomalies["lanes_dropped"] += len(self._lanes) - len(live)
        self._lanes = live

    def _cleaned(self, report: LaneReport, previous: LaneReport | None) -> LaneReport:
        bad = [name for name in _NUMBERS if not (math.isfinite(getattr(report, name)) and getattr(report, name) >= 0)]
        self._anomalies["bad_fields"] += len(bad)
        overlap = report.overlap
        if not _is_sound(overlap):
            self._anomalies["bad_fields"] += 1
            overlap = previous.overlap if previous is not None else OverlapReport()
        return msgspec.structs.replace(report, overlap=overlap, **{name: _last_good(previous, name) for name in bad})

    def _overlapped(self) -> list[OverlapReport]:
        """Of the lanes whose rounds overlap now."""
        return [lane.report.overlap for lane in self._lanes.values() if lane.report.overlap.is_active]

    def _mostly_overlapped(self) -> bool:
        return 2 * len(self._overlapped()) > len(self._lanes)

    def _overlapped_prices(self, acceptance: float, cost: RoundCost) -> tuple[PriceRow, ...]:
        """As the lanes that overlap would compute them, from what all of them measured."""
        overlaps = self._overlapped()
        if not overlaps:
            return ()
        laws = HitLaws(**{name: _mean([getattr(o.laws, name) for o in overlaps]) for name in HitLaws.__struct_fields__})
        cost = msgspec.structs.replace(cost, hop_s=_mean([overlap.hop_s for overlap in overlaps]))
        beside = OverlapCost(
            cost,
            _mean([overlap.target_slowdown for overlap in overlaps]),
            _mean([overlap.draft_slowdown for overlap in overlaps]),
        )
        return overlap_price_table(min(round(acceptance, 2), 0.98), beside.rounded(), laws.rounded(), self._max_depth)

    def _cost(self) -> RoundCost:
        reports = [lane.report for lane in self._lanes.values()]
        cost = RoundCost.measured(
            _pooled([report.target_step_times for report in reports]),
            _pooled([report.draft_step_times for report in reports]) or self._draft_times,
        )
        return msgspec.structs.replace(cost, context_s=_mean([r.context_s for r in reports], [r.num_running for r in reports]))

    def _mean_output_tokens(self) -> float:
        """Over the lanes in which a request has ended lately."""
        return _mean([lane.report.mean_output_tokens for lane in self._lanes.values() if lane.report.mean_output_tokens > 0])

    def _time_per_output_token_s(self) -> float:
        """Measured over the busy lanes, but at most a plain step at their batch.

        A lane that idled for part of its report looks slow per token although its requests are not.
        """
        busy = [lane.report for lane in self._lanes.values() if lane.report.num_running > 0 and lane.report.tokens_per_s > 0]
        running = sum(report.num_running for report in busy)
        measured_s = running / sum(report.tokens_per_s for report in busy) if busy else math.inf
        cost, batch = self._cost(), max(running / max(len(busy), 1), 1.0)
        plain_s = math.inf if cost.target.is_default else cost.verify_time(batch, batch)
        return min(measured_s, plain_s)


def _last_good(previous: LaneReport | None, name: str) -> float:
    if previous is None or name == "num_arrivals":
        return 0
    value: float = getattr(previous, name)
    return value


def _is_sound(overlap: OverlapReport) -> bool:
    laws = [getattr(overlap.laws, name) for name in HitLaws.__struct_fields__]
    numbers = [overlap.hit_rate, overlap.num_rows, overlap.hop_s, *laws]
    factors = [overlap.target_slowdown, overlap.draft_slowdown]
    return all(math.isfinite(n) and n >= 0 for n in numbers) and all(math.isfinite(f) and f > 0 for f in factors)


def _mean(values: list[float] | list[int], weights: list[int] | None = None) -> float:
    """Weighted mean; the plain one when all weights are 0, and 0 for no values."""
    if weights and sum(weights) > 0:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    return sum(values) / len(values) if values else 0.0


def _pooled(profiles: list[StepTimes]) -> StepTimes:
    """All points of all lanes; equal sizes are averaged by the cost model."""
    return tuple(point for profile in profiles for point in profile)


def _reason(state: ClusterState, prices: tuple[PriceRow, ...]) -> str:
    if not state.num_lanes:
        return "no lane is reporting"
    if not prices:
        return "no lane has reported step times: each goes by its own measurements"
    limit = break_even_batch(prices)
    pays = "at every batch size" if limit is None else f"below {limit} requests per lane" if limit > 1 else "at no batch size"
    return (
        f"{state.num_lanes} lane{'s' * (state.num_lanes > 1)}, {state.arrival_rate:.2f} requests/s: "
        f"{state.actual_batch:.1f} running per lane, "
        f"{state.predicted_batch:.1f} expected; at acceptance {state.acceptance:.2f} speculation pays {pays}"
    )
