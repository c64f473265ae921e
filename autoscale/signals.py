"""What the lanes measure, what the controller answers, and the two formulas that turn arrivals into a batch size."""

import math

import msgspec

from autoscale.hit_rate import HitLaws

StepTimes = tuple[tuple[float, float], ...]
"""Measured steps of a model: (tokens in one forward, seconds)."""

PriceRow = tuple[int, float, int]
"""(batch size of a lane, price, depth that a request of average acceptance gets at this price)."""


class OverlapReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a lane knows of drafting while the target verifies."""

    is_active: bool = False
    """Rounds overlap now; false: they are sequential, or the source cannot prepare."""
    hit_rate: float = 0.0
    """Share of the last few hundred outcomes that were prepared and there in time."""
    num_rows: float = 0.0
    """Outcomes prepared per request and round, by the last plan."""
    laws: HitLaws = HitLaws()
    target_slowdown: float = 1.0
    """Step time beside the other model over that alone."""
    draft_slowdown: float = 1.0
    hop_s: float = 0.0
    """To the draft and back, as learned from rounds that waited for it."""


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one lane tells the controller, every `controller.report_interval_s`."""

    lane_id: str
    now_s: float
    """The lane's own clock: only differences between its reports are used."""
    num_arrivals: int = 0
    """Requests that arrived since this lane's previous report."""
    num_running: int = 0
    num_waiting: int = 0
    mean_output_tokens: float = 0.0
    """Over the requests that ended lately; 0 while none has."""
    tokens_per_s: float = 0.0
    acceptance: float = 0.0
    """Probability that a draft token is accepted when it is tested (mean over the lane)."""
    mean_depth: float = 0.0
    target_step_times: StepTimes = ()
    draft_step_times: StepTimes = ()
    """(rows, seconds); empty when drafts cost nothing."""
    context_s: float = 0.0
    """Seconds that reading the KV cache of a mean request adds to a step of the target."""
    calibration_error: float = 0.0
    """Mean distance of predicted from observed survival (`autoscale.acceptance.Calibration.error`); 0 before any draft."""
    overlap: OverlapReport = OverlapReport()
    wanted_draft_rows: float = 0.0
    """Rows of a draft's step that the lane would want now, also while no draft is there: what it knows of the costs is of the
    last one. 0 where drafts would not raise its throughput; for an idle lane, those of one request."""
    clearly_wanted_draft_rows: float = 0.0
    """The same where they would raise it clearly, else 0."""


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """All live lanes together."""

    num_lanes: int
    arrival_rate: float
    """Requests per second over all lanes."""
    actual_batch: float
    """Requests running per lane."""
    predicted_batch: float
    """Requests that each lane is about to run (`expected_batch`)."""
    num_waiting: int
    acceptance: float
    tokens_per_s: float
    mean_depth: float


class DepthTable(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller publishes to every lane."""

    prices: tuple[PriceRow, ...] = ()
    """For sequential rounds, by increasing batch; empty while no lane has sent its step times."""
    overlapped_prices: tuple[PriceRow, ...] = ()
    """For overlapped rounds; empty while no lane has them."""
    predicted_batch: float = 0.0
    reason: str = ""
    version: int = 0
    """Changes with the prices."""


class ArrivalRate(msgspec.Struct, frozen=True):
    """Memory of `update_arrival_rate`."""

    per_s: float = 0.0
    at_s: float | None = None
    pending: int = 0
    """Arrivals reported without any time having passed: they belong to the next interval."""


def update_arrival_rate(memory: ArrivalRate, num_arrivals: int, now_s: float, half_life_s: float) -> ArrivalRate:
    """Exponentially weighted average rate in requests per second, from counts at irregular times.

    Over an interval dt the old rate keeps the weight ``w = 2^(-dt / half_life)``: ``rate = w * rate + (1 - w) * n / dt``, so a
    steady stream gives ``rate * (1 - 2^(-t / half_life))`` however t is cut into intervals.
    Without a usable interval the rate stays as it is: arrivals are kept for the next one when no time has passed (or the time
    is NaN), and dropped after a clock that went backwards and in the first report: nobody knows how long they took.
    """
    if not math.isfinite(now_s) or now_s == memory.at_s:
        return ArrivalRate(memory.per_s, memory.at_s, memory.pending + num_arrivals)
    if memory.at_s is None or now_s < memory.at_s:
        return ArrivalRate(memory.per_s, now_s)
    interval_s = now_s - memory.at_s
    weight = 2.0 ** (-interval_s / half_life_s)
    rate = (memory.pending + num_arrivals) / interval_s
    return ArrivalRate(weight * memory.per_s + (1 - weight) * rate, now_s)


def expected_batch(arrival_rate: float, mean_output_tokens: float, time_per_output_token_s: float, num_lanes: int) -> float:
    """Requests that each lane holds in the long run, by Little's law: ``rate * time in the system / lanes``.

    Time in the system is output tokens times seconds per output token. 0 when anything is unknown, negative or not finite.
    """
    factors = (arrival_rate, mean_output_tokens, time_per_output_token_s)
    if num_lanes < 1 or not all(math.isfinite(factor) and factor > 0 for factor in factors):
        return 0.0
    return math.prod(factors) / num_lanes
