"""What a lane counts of its rounds, its drafts and its streams, for `deployments.metrics` and for its reports."""

import asyncio
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec

from autoscale.cost_model import RoundCost
from deployments.messages import DraftReport, Histogram, LaneStatus, Traffic
from engine.drivers import Clock
from engine.errors import InvalidRequest, Overloaded
from engine.types import MODEL_SOURCE, Delta, GenerateRequest, SourceStep, StepReport

RECENT_REQUESTS = 64
RATE_WINDOW_S = 2.0
BUCKETS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60),
    "inter_token_latency_seconds": (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1),
    "queue_seconds": (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60),
    "accepted_length": (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17),
    "draft_depth": (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16),
}
"""Upper bounds of the buckets of each histogram."""
OUTCOMES = ("stop", "length", "error", "cancelled", "overloaded", "invalid")
"""How a request ends. All are told from the start: Prometheus sees no growth in a series that begins at 1."""


def traffic_of(client: Any) -> Traffic:
    """What a `WireClient` counted since it was made; nothing for a stand-in that does not count."""
    counted = getattr(client, "counters", None)
    if counted is None:
        return Traffic()
    return Traffic(counted.hops, counted.bytes_sent, counted.bytes_received, counted.hop_time_s)


class Buckets:
    """A histogram that is still counted."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """See ``value`` so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def frozen(self) -> Histogram:
        """As it is now, for a report."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


class Watch:
    """One request in its lane: when its tokens left, and how it ended.

    The time to the first token runs from the request's arrival in the lane. Between two rounds that gave it tokens, each of the
    n tokens of the second one took 1/n of the time: the sum is that of the request, and a round that commits many is fast. A
    request that was resumed has had its first token elsewhere.
    """

    def __init__(self, counters: "LaneCounters", request: GenerateRequest, clock: Clock):
        self._counters = counters
        self._clock = clock
        self._arrived_s: float | None = None if request.output_ids else clock()
        self._last_s: float | None = None
        self._ended = False

    def saw(self, delta: Delta) -> None:
        """A round gave the request something."""
        if delta.token_ids:
            self._time_tokens(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._counters.note_length(delta.num_output_tokens)
            self.ended(str(delta.finish_reason))

    def ended(self, outcome: str) -> None:
        """The request is over; only the first call counts."""
        if not self._ended:
            self._ended = True
            self._counters.outcomes[outcome] += 1

    def _time_tokens(self, count: int) -> None:
        now_s, histograms = self._clock(), self._counters.histograms
        if self._last_s is not None:
            histograms["inter_token_latency_seconds"].add((now_s - self._last_s) / count, count)
        elif self._arrived_s is not None:
            histograms["time_to_first_token_seconds"].add(now_s - self._arrived_s)
        self._last_s = now_s


class LaneCounters:
    """Cumulative counters of a lane and the few averages it reports."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self.outcomes: Counter[str] = Counter()
        """How requests ended."""
        self.histograms = {name: Buckets(bounds) for name, bounds in BUCKETS.items()}
        self.plain_cost: RoundCost | None = None
        """Of a round without drafts, as the lane knows it now; None: not measured."""
        self.fallbacks: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        """Requests times rounds whose draft was prepared, by kind of outcome."""
        self.misses: Counter[str] = Counter()
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []
        self.sources: dict[str, SourceStep] = defaultdict(SourceStep)
        """What the drafts of each source came to; keys as in `StepReport.sources`."""
        self.arrivals = 0
        """Since the last report."""
        self._output_lengths: deque[int] = deque(maxlen=RECENT_REQUESTS)
        self._recent: deque[tuple[float, int]] = deque()
        self._depths: deque[tuple[float, int, int]] = deque()

    @contextmanager
    def watching(self, request: GenerateRequest, clock: Clock = time.monotonic) -> Iterator[Watch]:
        """Around everything that a lane does for a request; tells how it ended where no delta does."""
        watch = Watch(self, request, clock)
        try:
            yield watch
        except Exception as error:
            watch.ended(_outcome_of(error))
            raise
        except asyncio.CancelledError:
            watch.ended("cancelled")
            raise

    def arrived(self) -> None:
        """A request came in that can be served."""
        self.arrivals += 1
        self.totals["requests"] += 1

    def note_length(self, num_tokens: int) -> None:
        """A request ended in a round, with so many tokens."""
        self._output_lengths.append(num_tokens)

    def round_done(self, report: StepReport, now_s: float) -> None:
        """Add a round."""
        for name, value in (
            ("rounds", 1),
            ("tokens", report.num_committed),
            ("drafted_tokens", report.num_drafted),
            ("accepted_tokens", report.num_accepted),
            ("prefill_tokens", report.num_prefill_tokens),
            ("prefix_cached_tokens", report.num_cached_tokens),
            ("target_tokens", report.num_target_tokens),
            ("verify_seconds", report.verify_time_s),
            ("draft_seconds", report.draft_time_s),
            ("draft_hidden_seconds", max(report.draft_time_s - report.exposed_time_s, 0.0)),
            ("draft_exposed_seconds", report.exposed_time_s),
            ("draft_asked", report.num_asked),
            ("prepared_seconds", 0.0 if report.num_asked else report.draft_time_s),
            ("prepared_exposed_seconds", 0.0 if report.num_asked else report.exposed_time_s),
            ("round_seconds", report.round_time_s),
            ("preemptions", report.num_preempted),
        ):
            self.totals[name] += value
        self.fallbacks.update(report.fallbacks)
        self.hits.update(report.hits)
        self.misses.update(report.misses)
        for source, step in report.sources.items():
            self.sources[source] += step
        _add(self.drafted_per_position, report.drafted_per_position)
        _add(self.accepted_per_position, report.accepted_per_position)
        self._count_lengths(report)
        if report.num_drafted and not report.num_prefill_tokens:
            self._compare_with_plain(report)
        self._recent.append((now_s, report.num_committed))
        self._depths.append((now_s, sum(report.depths), len(report.depths)))

    def _count_lengths(self, report: StepReport) -> None:
        for seconds in report.queue_times_s:
            self.histograms["queue_seconds"].add(seconds)
        for depth in report.depths:
            self.histograms["draft_depth"].add(depth)
        if report.drafted_per_position:
            # Requests that kept at least 0, 1, 2, ... draft tokens: neighbours differ by those that kept just so many.
            at_least = (report.drafted_per_position[0], *report.accepted_per_position, 0)
            for accepted, (these, more) in enumerate(pairwise(at_least)):
                self.histograms["accepted_length"].add(accepted + 1, these - more)

    def _compare_with_plain(self, report: StepReport) -> None:
        """Beside the round's own time, that of a plain round for the same requests: its forward, and the same bookkeeping."""
        if self.plain_cost is None:
            return
        beside_s = max(report.round_time_s - report.verify_time_s - report.exposed_time_s, 0.0)
        plain_s = self.plain_cost.verify_time(report.batch_size, report.batch_size) + beside_s
        for name, value in (
            ("speculating_requests", report.batch_size),
            ("speculating_tokens", report.num_committed),
            ("speculating_round_seconds", report.round_time_s),
            ("speculating_plain_seconds", plain_s),
        ):
            self.totals[name] += value

    def sources_by_name(self, draft_name: str) -> dict[str, SourceStep]:
        """`sources` with the name of the source that rounds ask."""
        return {draft_name if source == MODEL_SOURCE else source: step for source, step in self.sources.items()}

    def tokens_per_s(self, now_s: float) -> float:
        """Over the last two seconds."""
        _drop_before(self._recent, now_s - RATE_WINDOW_S)
        return sum(count for _, count in self._recent) / RATE_WINDOW_S

    def mean_depth(self, now_s: float) -> float:
        """Over the decoding requests of the last two seconds."""
        _drop_before(self._depths, now_s - RATE_WINDOW_S)
        rows = sum(count for *_, count in self._depths)
        return sum(total for _, total, _ in self._depths) / rows if rows else 0.0

    def told(self) -> dict[str, Any]:
        """The fields of a `LaneStatus` that hold what was counted, as it is now."""
        return {
            "counters": dict(self.totals),
            "fallbacks": dict(self.fallbacks),
            "accepted_per_position": tuple(self.accepted_per_position),
            "drafted_per_position": tuple(self.drafted_per_position),
            "hits": dict(self.hits),
            "misses": dict(self.misses),
            "outcomes": {outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "histograms": {name: buckets.frozen() for name, buckets in self.histograms.items()},
        }

    def mean_output_tokens(self) -> float:
        """Over the requests that ended lately."""
        return sum(self._output_lengths) / len(self._output_lengths) if self._output_lengths else 0.0


def overlap_summary(lane: LaneStatus) -> dict[str, float | None]:
    """How well drafting is hidden behind verifying, since the lane started; None where nothing was counted.

    ``hit_rate`` = hits / (hits + misses); ``hidden_share`` = hidden draft time / draft time; ``hop_ms`` and ``bytes_per_round``
    over all streams of the lane, both directions.
    """
    hits, misses = sum(lane.hits.values()), sum(lane.misses.values())
    traffic = sum(lane.traffic.values(), Traffic())
    num_bytes = traffic.bytes_sent + traffic.bytes_received
    return {
        "hit_rate": _ratio(hits, hits + misses),
        "hidden_share": _ratio(lane.counters.get("draft_hidden_seconds", 0.0), lane.counters.get("draft_seconds", 0.0)),
        "hop_ms": _ratio(1000 * traffic.hop_time_s, traffic.num_hops),
        "bytes_per_round": _ratio(num_bytes, lane.counters.get("rounds", 0.0)),
    }


def draft_summary(draft: DraftReport) -> dict[str, Any]:
    """What a draft replica serves; ``mean_merged`` = messages of lanes per call of its model."""
    work = draft.work
    return {
        "draft_id": draft.draft_id,
        "process_id": draft.process_id,
        "device": draft.info.device,
        "mean_merged": _ratio(work.num_messages, work.num_runs),
        **msgspec.structs.asdict(work),
    }


def _outcome_of(error: Exception) -> str:
    if isinstance(error, InvalidRequest):
        return "invalid"
    return "overloaded" if isinstance(error, Overloaded) else "error"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _add(totals: list[int], more: tuple[int, ...]) -> None:
    totals.extend([0] * (len(more) - len(totals)))
    for position, count in enumerate(more):
        totals[position] += count


def _drop_before(entries: "deque[Any]", then_s: float) -> None:
    while entries and entries[0][0] < then_s:
        entries.popleft()
