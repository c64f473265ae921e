"""What it costs to take up drafting again: the draft must read all that was decided without it."""

import math

from autoscale.cost_model import RoundCost
from engine.types import StepReport


class CatchUp:
    """Follows a lane's rounds and counts the tokens that its draft has not read."""

    def __init__(self) -> None:
        self._num_missed = 0.0

    def note(self, report: StepReport) -> None:
        """A round ended. Requests that had a draft are known to it; of the others it missed at most all that there is."""
        depths = report.model_depths
        without = sum(depth == 0 for depth in depths) / len(depths) if depths else 0.0
        most = report.num_context_tokens + report.num_target_tokens
        self._num_missed = without * min(self._num_missed + report.num_committed + report.num_prefill_tokens, most)

    def redeemed_s(self, price: float, alpha: float, max_depth: int, batch: int, cost: RoundCost) -> float:
        """After how many seconds of sequential rounds with drafts the reading is paid for; infinite where they gain nothing.

        While the draft reads, the target waits. Then each second makes ``sum_j max(alpha^j - price, 0)`` seconds' worth more
        than plain decoding does (`autoscale.price`; exact where the step's time is linear). What a draft step for ``batch``
        requests takes anyway does not count.
        """
        gain = sum(max(alpha**position - price, 0.0) for position in range(1, max_depth + 1))
        reading_s = cost.draft_time(max(self._num_missed, batch)) - cost.draft_time(batch)
        return reading_s / gain if gain > 0 else math.inf
