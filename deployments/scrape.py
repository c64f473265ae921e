"""The numbers in a server's Prometheus text, by the names of `deployments.metrics`. A name that is not there gives None."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "outrider_"


@dataclass(frozen=True)
class Sample:
    """One line of the text."""

    labels: Mapping[str, str]
    value: float


class Scrape:
    """The samples of one text."""

    def __init__(self, text: str):
        """Raises ValueError for what is no Prometheus text."""
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: dict[str, list[Sample]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name.removeprefix(PREFIX)].append(Sample(sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over the series of a metric (``_total`` of counters may be left out) whose labels have these values."""
        samples = self._samples.get(name) or self._samples.get(f"{name}_total") or []
        values = [s.value for s in samples if labels.items() <= s.labels.items()]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The same sum for every value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for sample in self._samples.get(name) or self._samples.get(f"{name}_total") or []:
            if label in sample.labels:
                sums[sample.labels[label]] += sample.value
        return dict(sums)

    def ratio(self, part: str, whole: str, **labels: str) -> float | None:
        """Of two sums; None where one is missing or nothing was counted."""
        over, under = self.total(part, **labels), self.total(whole, **labels)
        return over / under if over is not None and under else None


@dataclass(frozen=True)
class FiveNumbers:
    """Since the server started; None where it does not export them or nothing was served yet."""

    ttft_s: float | None
    """Mean time to first token, from a request's arrival in its lane."""
    itl_s: float | None
    """Mean time between tokens of a request."""
    accepted_length: float | None
    """Mean tokens that a target step commits for a request that brought a draft."""
    tokens_per_s: float | None
    """Over the last two seconds."""
    break_even_batch: float | None
    """Requests per lane from which speculation does not pay; None: it always does, or nothing is measured."""


def five_numbers(scrape: Scrape) -> FiveNumbers:
    """From histograms where there are any, else from the counters that say the same."""
    ttft = scrape.ratio("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count")
    if ttft is None:
        ttft = scrape.ratio("first_token_seconds", "first_tokens")
    length = scrape.ratio("accepted_length_sum", "accepted_length_count")
    if length is None:
        accepted, drafts = scrape.total("accepted_tokens"), scrape.total("drafted_by_position", position="0")
        length = 1 + accepted / drafts if accepted is not None and drafts else None
    return FiveNumbers(
        ttft_s=ttft,
        itl_s=scrape.ratio("inter_token_latency_seconds_sum", "inter_token_latency_seconds_count"),
        accepted_length=length,
        tokens_per_s=scrape.total("tokens_per_second"),
        break_even_batch=scrape.total("break_even_batch"),
    )
