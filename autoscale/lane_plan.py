"""What a lane decided for one round, and in one sentence why."""

from collections.abc import Sequence
from typing import Any

import msgspec

from autoscale.cost_model import OverlapCost, RoundCost
from autoscale.hit_rate import HitLaws
from autoscale.overlap import Overlap


class LanePlan(msgspec.Struct, frozen=True):
    """What holds for all requests of one round."""

    batch: int
    predicted_batch: float
    price: float
    rate: float
    """Tokens per second of the lane (Theta) at which a position's price is what it is."""
    alpha: float
    is_open: bool
    may_probe: bool
    from_controller: bool
    now_s: float
    sequential: float
    """Tokens per second of sequential rounds at the effective batch, as modelled."""
    candidate: Overlap | None
    """The best overlapped rounds; None where nothing can be prepared."""
    is_overlapped: bool
    model_alpha: float
    cost: OverlapCost
    laws: HitLaws
    """These three: rounded, what `candidate` was found with."""
    survivals: dict[int, tuple[float, ...]]
    """By acceptance in percent: over as many positions as may pay."""
    depths: dict[str, int]
    """Answers of `autoscale.lane_policy.LanePolicy.depths` in this round."""
    worths: dict[str, Sequence[float]]
    """By request: what each position of its draft is worth in this round, in tokens."""
    guesses: dict[tuple[float, int], tuple[int, ...]]
    """Answers of `autoscale.lane_policy.LanePolicy.fan_out` in this round, by acceptance and draft length."""

    @property
    def overlap(self) -> Overlap | None:
        """How rounds overlap; None where they are sequential."""
        return self.candidate if self.is_overlapped else None

    @property
    def effective_batch(self) -> float:
        """The larger of the batch that is there and the one that is expected."""
        return max(self.batch, self.predicted_batch)

    def told_mode(self, hit_rate: float) -> dict[str, Any]:
        """Whether rounds overlap, and if so with which fan-out and share of hits."""
        told: dict[str, Any] = {"mode": "overlapped" if self.overlap else "sequential"}
        if self.overlap:
            told["fan_out"] = self.overlap.guesses(self.alpha, self.overlap.depth, self.laws)
            told["hit_rate"] = hit_rate
        return told

    def reason(self, depth: int, alone: RoundCost, dwell_s: float) -> str:
        """Why a typical request gets ``depth``."""
        if alone.target.is_default:
            return "speculation off: the target's step times were not measured"
        state = f"depth {depth}" if depth else "speculation off"
        predicted = f" ({self.predicted_batch:.1f} expected)" if self.predicted_batch > self.batch else ""
        token_ms = 1e3 * alone.target.slope(self.effective_batch)
        draft_ms = 1e3 * alone.draft_time(self.effective_batch)
        sentence = (
            f"{state}: {self.batch} request{'s' * (self.batch > 1)} running{predicted}, verifying one more token costs "
            f"{token_ms:.2f} ms and a draft step {draft_ms:.2f} ms, so a draft token must survive with more than "
            f"{self.price:.2f}; the first one does with {self.alpha:.2f}"
        )
        if depth == 0 and self.price < self.alpha:
            sentence += f"; it stays off until that has held clearly for {dwell_s:g} s or more"
        return sentence

    def mode_reason(self, *, is_chosen: bool) -> str:
        """Why rounds overlap or not; ``is_chosen``: `speculation.fan_out` decides it. Empty where nothing can be prepared."""
        if self.candidate is None:
            return ""
        rates = f"{self.candidate.throughput:.0f} tokens/s against {self.sequential:.0f}"
        if self.overlap is None:
            return f"; rounds are sequential: overlapped ones would make {rates}"
        chosen = " (speculation.fan_out is set)" if is_chosen else ""
        return (
            f"; rounds overlap{chosen}: with {self.overlap.num_rows:.0f} outcomes prepared per request and "
            f"{self.overlap.hit_rate:.0%} of the rounds drafted, {rates} in sequential rounds"
        )
