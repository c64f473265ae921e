"""What a lane learns from its overlapped rounds: hits, step times of two models at work, the way to the draft."""

import math
from collections import Counter

import msgspec

from autoscale.cost_model import FACTOR_WEIGHT, OverlapCost
from autoscale.fan_out import position_kinds, position_weights
from autoscale.hit_rate import HitEstimator, HitLaws
from engine.types import StepReport

REAL_WAIT = 0.05
"""Shorter waits for what was prepared, as a share of the verify, are only the time to look for it."""

LATE = 1.5
"""What a late answer is taken to have needed, in terms of the time after which nobody waited for it any more."""


class _Prepared(msgspec.Struct, frozen=True):
    """What was asked for on behalf of one request: its fan-out, and the acceptance of the draft that was being verified."""

    alpha: float
    fan_out: tuple[int, ...]
    depth: int


class OverlapLearner:
    """Follows a lane round by round: `note` for everything a round has prepared, then `learn` with its report.

    A round reports the hits and the draft's time of what the round before it had prepared.
    """

    def __init__(self, prior: HitLaws):
        self._estimator = HitEstimator(prior)
        self._now: dict[str, _Prepared] = {}
        self._before: dict[str, _Prepared] = {}
        self._verify_before_s = 0.0

    @property
    def laws(self) -> HitLaws:
        """How predictable outcomes are."""
        return self._estimator.laws

    @property
    def hit_rate(self) -> float:
        """Share of the last few hundred outcomes that were prepared and there in time."""
        return self._estimator.hit_rate

    def note(self, request_id: str, alpha: float, fan_out: tuple[int, ...], depth: int) -> None:
        """This round prepares ``fan_out`` outcomes of a request, each with a draft of ``depth`` tokens."""
        self._now[request_id] = _Prepared(round(alpha, 1), fan_out, depth)

    def learn(self, report: StepReport, cost: OverlapCost) -> OverlapCost:
        """Take in what a round did; returns the cost corrected by it."""
        self._estimator.observe(report.hits, report.misses, _shares(self._before))
        if self._now or self._before:
            cost = cost.corrected(verify=self._verify(report, cost), prepare=self._prepare(report, cost))
        else:
            cost = cost.relaxed()
        hop_s = self._hop(report, cost.alone.hop_s)
        cost = msgspec.structs.replace(cost, alone=msgspec.structs.replace(cost.alone, hop_s=hop_s))
        self._now, self._before = {}, self._now
        self._verify_before_s = report.verify_time_s
        return cost

    @property
    def is_preparing(self) -> bool:
        """Whether the round that is being played has prepared anything so far."""
        return bool(self._now)

    @property
    def has_prepared(self) -> bool:
        """Whether the round before it has: then the draft's time that it reports is not only of what it asked for."""
        return bool(self._before)

    def _verify(self, report: StepReport, cost: OverlapCost) -> tuple[float, float]:
        if not self._now or report.num_prefill_tokens > 0 or report.num_target_tokens <= 0:
            return 0.0, 0.0
        return report.verify_time_s, cost.verify_time(report.batch_size, report.num_target_tokens)

    def _prepare(self, report: StepReport, cost: OverlapCost) -> tuple[float, float]:
        """One that came late took longer than the verify and the wait: less is never believed of it."""
        if not self._before or report.num_asked > 0:
            return 0.0, 0.0
        num_rows = sum(sum(prepared.fan_out) for prepared in self._before.values())
        num_tokens = sum(len(prepared.fan_out) for prepared in self._before.values())
        depth = max(prepared.depth for prepared in self._before.values())
        predicted_s = cost.prepare_time(num_tokens, num_rows, depth) - cost.alone.hop_s
        if report.misses.get("late", 0) > 0:
            return max(LATE * (self._verify_before_s + report.exposed_time_s), predicted_s), predicted_s
        return report.draft_time_s, predicted_s

    def _hop(self, report: StepReport, hop_s: float) -> float:
        """What a wait had in it beside the draft's own time. A prepare that came in time bounds the hop from above."""
        waited_s, draft_s, verify_s = report.exposed_time_s, report.draft_time_s, self._verify_before_s
        if not (math.isfinite(waited_s) and math.isfinite(draft_s) and math.isfinite(verify_s)) or draft_s <= 0:
            return hop_s
        if report.num_asked > 0 and not self._before:
            return hop_s + FACTOR_WEIGHT * (max(waited_s - draft_s, 0.0) - hop_s)
        if not self._was_only_prepared(report):
            return hop_s
        implied_s = max(waited_s + verify_s - draft_s, 0.0)
        if waited_s > REAL_WAIT * verify_s:
            return hop_s + FACTOR_WEIGHT * (implied_s - hop_s)
        return min(hop_s, implied_s)

    def _was_only_prepared(self, report: StepReport) -> bool:
        """Whether the report's draft time is that of the prepare before it: nobody was asked, nothing came late."""
        return bool(self._before) and report.num_asked == 0 and report.misses.get("late", 0) == 0


def _shares(prepared: dict[str, _Prepared]) -> dict[str, dict[int, float]]:
    """By kind: of the outcomes of this kind, the expected share that had so many guesses."""
    weights: dict[str, Counter[int]] = {}
    for (alpha, fan_out), count in Counter((one.alpha, one.fan_out) for one in prepared.values()).items():
        depth = len(fan_out) - 1
        for kind, weight, guesses in zip(position_kinds(depth), position_weights(alpha, depth), fan_out, strict=True):
            weights.setdefault(kind, Counter())[guesses] += count * weight  # type: ignore[assignment]
    totals = {kind: sum(counts.values()) for kind, counts in weights.items()}
    return {
        kind: {guesses: weight / totals[kind] for guesses, weight in counts.items()}
        for kind, counts in weights.items()
        if totals[kind] > 0
    }
