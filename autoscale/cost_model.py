"""How long a forward of n tokens takes: measured when a worker starts, corrected while it serves."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from statistics import fmean

import msgspec

from autoscale.signals import StepTimes

STEP_RANGE = (0.25, 4.0)
FACTOR_RANGE = (1 / 64, 64.0)
"""A draft that extends 20 outcomes of 16,000 tokens each takes a dozen times as long as its profile over short contexts."""
FACTOR_WEIGHT = 0.05
"""Weight of one step in the correction: a single hiccup moves it by at most 15 %."""
DRAFT_WEIGHT = 0.2
"""The same for a draft: its profile says less (rows with contexts of their own, other lanes), and while it is wrong the target
waits in every round."""
RELAX_WEIGHT = 0.002
"""What was learned is halved in about 350 rounds without a measurement."""
DEFAULT_SECONDS_PER_TOKEN = 1e-3
TRUSTED_BEYOND = 4.0
"""A profile is continued to so many times its largest step when outcomes are counted."""


class StepCost(msgspec.Struct, frozen=True):
    """Step time T(n): straight lines between measured points, times a factor learned online.

    Constant before the first point (a step has fixed costs). Beyond the last one it grows by the last slope, or by the slope
    from the first to the last point where that is steeper: one noisy last point must not make large batches look free.
    """

    tokens: tuple[float, ...]
    """Increasing."""
    seconds: tuple[float, ...]
    """Never decreasing."""
    is_default: bool = False
    """Nothing usable was measured."""
    factor: float = 1.0
    """Measured time over profiled time (`corrected`)."""

    @classmethod
    def measured(cls, points: Iterable[tuple[float, float]]) -> "StepCost":
        """Build from (tokens, seconds) in any order; points that are not finite and positive are left out.

        Times at the same size are averaged, and a larger step is never cheaper than a smaller one (running maximum). Without
        any usable point the cost is a default that is proportional to the tokens: then no depth above 0 ever pays, so an
        unmeasured model is served without speculation instead of slower than without it.
        """
        by_size: dict[float, list[float]] = defaultdict(list)
        for size, seconds in points:
            if math.isfinite(size) and math.isfinite(seconds) and size > 0 and seconds > 0:
                by_size[float(size)].append(seconds)
        if not by_size:
            return cls((1.0,), (DEFAULT_SECONDS_PER_TOKEN,), is_default=True)
        sizes = sorted(by_size)
        return cls(tuple(sizes), tuple(accumulate((fmean(by_size[size]) for size in sizes), max)))

    @property
    def points(self) -> StepTimes:
        """(tokens, corrected seconds); empty for the default, so that it is never mistaken for a measurement."""
        if self.is_default:
            return ()
        return tuple((size, self.factor * seconds) for size, seconds in zip(self.tokens, self.seconds, strict=True))

    def time(self, num_tokens: float) -> float:
        """Seconds of a forward of ``num_tokens``."""
        after = bisect_right(self.tokens, num_tokens)
        if after == 0:
            return self.factor * self.seconds[0]
        past = num_tokens - self.tokens[after - 1]
        return self.factor * (self.seconds[after - 1] + past * self._slope_to(after))

    def slope(self, num_tokens: float) -> float:
        """dT/dn, seconds that one more token adds to a forward of ``num_tokens``."""
        return self.factor * self._slope_to(bisect_right(self.tokens, num_tokens))

    def corrected(self, measured_s: float, predicted_s: float, weight: float = FACTOR_WEIGHT) -> "StepCost":
        """This cost with its factor moved towards ``measured_s / predicted_s``; ``predicted_s`` came from this cost.

        The factor moves by ``weight`` of what is missing, which is clipped to `STEP_RANGE`: to an exponentially weighted
        average of measured over profiled time.
        Times that are not finite and positive change nothing.
        """
        return msgspec.structs.replace(self, factor=corrected_factor(self.factor, measured_s, predicted_s, weight))

    def relaxed(self) -> "StepCost":
        """This cost with its factor moved back towards 1, by `RELAX_WEIGHT`: for a round that could not measure it."""
        return msgspec.structs.replace(self, factor=relaxed_factor(self.factor))

    def rounded(self) -> "StepCost":
        """Close to this, and equal for factors that hardly differ: as a key of remembered decisions."""
        return msgspec.structs.replace(self, factor=_rounded_factor(self.factor))

    def _slope_to(self, index: int) -> float:
        """Slope of the line that ends at point ``index``; the last index + 1 means the extrapolation."""
        if index == 0:
            return 0.0
        if index < len(self.tokens):
            return self._slope_between(index - 1, index)
        if index == 1:
            return self.seconds[0] / self.tokens[0]
        return max(self._slope_between(index - 2, index - 1), self._slope_between(0, index - 1))

    def _slope_between(self, first: int, last: int) -> float:
        return (self.seconds[last] - self.seconds[first]) / (self.tokens[last] - self.tokens[first])


class RoundCost(msgspec.Struct, frozen=True):
    """Time of one sequential round: the draft steps, the hop to the draft, the target's forward."""

    target: StepCost
    draft: StepCost | None = None
    """By rows; None = drafts cost nothing (n-gram)."""
    hop_s: float = 0.0
    """To the draft and back; paid once in every round that asks it."""
    context_s: float = 0.0
    """Reading the KV cache of one request, in every forward of the target that it takes part in (`autoscale.context`)."""

    @classmethod
    def measured(cls, target: StepTimes, draft: StepTimes | None, hop_s: float = 0.0) -> "RoundCost":
        """Build from two profiles; ``draft`` as in `with_draft`."""
        return cls(StepCost.measured(target), None, hop_s).with_draft(draft)

    def with_draft(self, draft: StepTimes | None) -> "RoundCost":
        """This cost with another draft's profile. No draft times (None or empty) means a free source.

        Draft times of which none is usable count as the target's own: at that cost no depth above 0 pays.
        """
        if not draft:
            return msgspec.structs.replace(self, draft=None)
        cost = StepCost.measured(draft)
        return msgspec.structs.replace(self, draft=self.target if cost.is_default else cost)

    def draft_time(self, batch: float) -> float:
        """Seconds of one draft step for ``batch`` rows."""
        return 0.0 if self.draft is None else self.draft.time(batch)

    def time(self, batch: float, depth: int) -> float:
        """``T(b, K) = T_target(b (K + 1)) + b T_context + K * T_draft(b) + hop [K > 0]`` in seconds."""
        drafting = depth * self.draft_time(batch) + self.hop_s if depth > 0 else 0.0
        return self.verify_time(batch, batch * (depth + 1)) + drafting

    def verify_time(self, batch: float, num_tokens: float) -> float:
        """Seconds of a forward of the target over ``num_tokens`` of ``batch`` requests."""
        return self.target.time(num_tokens) + batch * self.context_s


class OverlapCost(msgspec.Struct, frozen=True):
    """Time of one overlapped round: the target verifies while the draft prepares the next round.

    Where both share cores, memory or a link, each is slower then than alone: two factors of their own, learned from such
    rounds only, carry that.
    """

    alone: RoundCost
    target_slowdown: float = 1.0
    draft_slowdown: float = 1.0

    def verify_time(self, batch: float, num_tokens: float) -> float:
        """Seconds of a forward of the target beside a draft that prepares."""
        return self.target_slowdown * self.alone.verify_time(batch, num_tokens)

    def prepare_time(self, num_tokens: float, num_rows: float, depth: int) -> float:
        """Seconds until the prepared drafts are there, beside a target that verifies.

        The first forward holds what is being verified (``num_tokens``), the ``depth`` others one row for every outcome.
        """
        steps_s = self.alone.draft_time(num_tokens) + depth * self.alone.draft_time(num_rows)
        return self.draft_slowdown * steps_s * self._beyond_profile(num_rows) + self.alone.hop_s

    def _beyond_profile(self, num_rows: float) -> float:
        """No measurement says that rows are still cheap far beyond the largest one: from there on they cost their share."""
        return 1.0 if self.alone.draft is None else max(1.0, num_rows / (TRUSTED_BEYOND * self.alone.draft.tokens[-1]))

    def corrected(self, *, verify: tuple[float, float], prepare: tuple[float, float]) -> "OverlapCost":
        """Learn from an overlapped round; each pair is (measured, predicted) seconds, 0 where there is none."""
        return msgspec.structs.replace(
            self,
            target_slowdown=corrected_factor(self.target_slowdown, *verify),
            draft_slowdown=corrected_factor(self.draft_slowdown, *prepare, weight=DRAFT_WEIGHT),
        )

    def relaxed(self) -> "OverlapCost":
        """For a round without overlap: what was learned fades, so that overlap that was left is tried again."""
        return msgspec.structs.replace(
            self, target_slowdown=relaxed_factor(self.target_slowdown), draft_slowdown=relaxed_factor(self.draft_slowdown)
        )

    def rounded(self) -> "OverlapCost":
        """Close to this, and equal for costs that hardly differ: as a key of remembered decisions."""
        alone = self.alone
        draft = None if alone.draft is None else alone.draft.rounded()
        return OverlapCost(
            RoundCost(alone.target.rounded(), draft, round(alone.hop_s, 4), float(f"{alone.context_s:.1g}")),
            _rounded_factor(self.target_slowdown),
            _rounded_factor(self.draft_slowdown),
        )


def corrected_factor(factor: float, measured_s: float, predicted_s: float, weight: float = FACTOR_WEIGHT) -> float:
    """``factor`` moved towards what would have predicted the measurement; ``predicted_s`` was made with ``factor``."""
    if not (math.isfinite(measured_s) and math.isfinite(predicted_s) and measured_s > 0 and predicted_s > 0):
        return factor
    ratio = min(max(measured_s / predicted_s, STEP_RANGE[0]), STEP_RANGE[1])
    return min(max(factor * (1 + weight * (ratio - 1)), FACTOR_RANGE[0]), FACTOR_RANGE[1])


def relaxed_factor(factor: float) -> float:
    """``factor`` moved back towards 1: its logarithm falls by `RELAX_WEIGHT`."""
    return float(factor ** (1 - RELAX_WEIGHT))


def _rounded_factor(factor: float) -> float:
    """To steps of 2 %."""
    return float(math.exp(round(50 * math.log(factor)) / 50))
