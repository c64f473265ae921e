"""What prompts in the same forward do to drafts: they fill it, and their first token is waited for."""

from autoscale.cost_model import RoundCost
from engine.types import StepReport

WEIGHT = 0.05
"""Of one round."""


class PromptShare:
    """Follows a lane's rounds: its rate in the time that prompts leave, and how many rounds have prompts in them.

    Every committed token of an endless stream of requests brings ``rho`` prompt tokens with it, whichever way it was made. With
    the rate Theta of the lane and a forward that grows by dT/dn, a draft position of survival s is worth its verification if
    ``s > Theta dT/dn (1 + rho s)``, that is ``s > Theta' dT/dn`` with ``Theta' = Theta / (1 - Theta rho dT/dn)``: the tokens per
    second of the time that prompts did not take.
    """

    def __init__(self) -> None:
        self.share = 0.0
        """Of the rounds with prompt tokens, lately."""
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, report: StepReport, cost: RoundCost) -> None:
        """A round ended."""
        self.share += WEIGHT * ((report.num_prefill_tokens > 0) - self.share)
        num_decoded = report.num_target_tokens - report.num_prefill_tokens
        prompts_s = cost.target.time(report.num_target_tokens) - cost.target.time(num_decoded)
        seconds = report.verify_time_s + report.exposed_time_s - prompts_s
        if report.batch_size > 0 and seconds > 0:
            self._tokens += WEIGHT * (report.num_committed - self._tokens)
            self._seconds += WEIGHT * (seconds - self._seconds)

    def rate(self, otherwise: float) -> float:
        """Theta', tokens per second; ``otherwise`` before anything was measured."""
        return self._tokens / self._seconds if self._seconds > 0 else otherwise
