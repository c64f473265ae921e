"""PromQL over the metrics that `deployments.metrics` exports, for dashboard and alerts alike."""

from dataclasses import dataclass

FAILED_DRAFTS = ("bad_logits", "draft_backoff", "draft_error", "draft_failed", "invalid_draft", "late", "no_answer")
"""Reasons of fallbacks that say that something is broken; the others (no match, catching up, …) are part of the work."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which series are meant, over which time, and by which labels results are kept apart."""

    matcher: str = ""
    """PromQL label matcher that every selector gets."""
    window: str
    by: tuple[str, ...] = ()

    def series(self, name: str, *matchers: str) -> str:
        """The selector of a metric, without our prefix."""
        inside = ", ".join(matcher for matcher in (self.matcher, *matchers) if matcher)
        return f"outrider_{name}{{{inside}}}" if inside else f"outrider_{name}"

    def rate(self, name: str, *matchers: str) -> str:
        """Per second, of each series by itself: it must come before any sum, or a lane that ends looks like a step down."""
        return f"rate({self.series(name, *matchers)}[{self.window}])"

    def total(self, vector: str, *by: str, function: str = "sum") -> str:
        """Over lanes; ``by`` are more labels to keep."""
        kept = ", ".join((*self.by, *by))
        return f"{function} by ({kept}) ({vector})" if kept else f"{function}({vector})"

    def rates(self, name: str, *by: str) -> str:
        """Per second over all lanes."""
        return self.total(self.rate(name), *by)

    def ratio(self, above: str, below: str, *by: str) -> str:
        """Of the growth of two counters."""
        return f"{self.rates(above, *by)} / {self.rates(below, *by)}"

    def mean(self, histogram: str) -> str:
        """Of the values that a histogram saw."""
        return self.ratio(f"{histogram}_sum", f"{histogram}_count")

    def quantile(self, share: float, histogram: str) -> str:
        """Of the values that a histogram saw, on a straight line within a bucket."""
        return f"histogram_quantile({share}, {self.rates(f'{histogram}_bucket', 'le')})"


def break_even_length(scope: Scope) -> str:
    """Accepted length below which speculating rounds make fewer tokens per second than plain ones."""
    return scope.ratio("speculating_round_seconds_total", "speculating_plain_seconds_total")


def gain(scope: Scope) -> str:
    """Tokens per second of speculating rounds over those of plain rounds of the same requests."""
    length = scope.ratio("speculating_tokens_total", "speculating_requests_total")
    return f"({length}) / ({break_even_length(scope)})"


def failed_share(scope: Scope) -> str:
    """Of the requests times rounds that were to have a draft, those whose draft failed."""
    reasons = "|".join(FAILED_DRAFTS)
    failed = scope.total(scope.rate("fallbacks_total", f'reason=~"{reasons}"'))
    drafted = scope.total(scope.rate("drafted_by_position_total", 'position="0"'))
    return f"{failed} / ({failed} + ({drafted} or {failed} * 0))"


def hit_rate(scope: Scope) -> str:
    """Prepared drafts over all outcomes that could have had one."""
    hits, misses = (scope.rates(f"prepared_{name}_total") for name in ("hits", "misses"))
    return f"{hits} / ({hits} + {misses})"


def kv_usage(scope: Scope) -> str:
    """Share of a lane's KV cache that running requests take."""
    return f"{scope.series('kv_cache_used_tokens')} / {scope.series('kv_cache_tokens')}"


def failed_requests(scope: Scope) -> str:
    """Of the requests that ended, those that ended by our fault."""
    failed = scope.total(scope.rate("finished_requests_total", 'reason=~"error|overloaded"'))
    return f"{failed} / {scope.rates('finished_requests_total')}"
