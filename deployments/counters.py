"""What a lane counts of its rounds, its drafts and its streams, for `deployments.metrics` and for its reports."""

from collections import Counter, defaultdict, deque
from typing import Any

import msgspec

from deployments.messages import DraftReport, LaneStatus, Traffic
from engine.types import MODEL_SOURCE, Delta, SourceStep, StepReport

RECENT_REQUESTS = 64
RATE_WINDOW_S = 2.0


def traffic_of(client: Any) -> Traffic:
    """What a `WireClient` counted since it was made; nothing for a stand-in that does not count."""
    counted = getattr(client, "counters", None)
    if counted is None:
        return Traffic()
    return Traffic(counted.hops, counted.bytes_sent, counted.bytes_received, counted.hop_time_s)


class LaneCounters:
    """Cumulative counters of a lane and the few averages it reports."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
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

    def arrived(self) -> None:
        """A request came in."""
        self.arrivals += 1
        self.totals["requests"] += 1

    def finished(self, delta: Delta) -> None:
        """A request ended by itself."""
        self._output_lengths.append(delta.num_output_tokens)
        self.totals[f"finished_{delta.finish_reason}"] += 1

    def first_token(self, seconds: float) -> None:
        """A request got its first token."""
        self.totals["first_tokens"] += 1
        self.totals["first_token_seconds"] += seconds

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
        self._recent.append((now_s, report.num_committed))
        self._depths.append((now_s, sum(report.depths), len(report.depths)))

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


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _add(totals: list[int], more: tuple[int, ...]) -> None:
    totals.extend([0] * (len(more) - len(totals)))
    for position, count in enumerate(more):
        totals[position] += count


def _drop_before(entries: "deque[Any]", then_s: float) -> None:
    while entries and entries[0][0] < then_s:
        entries.popleft()
