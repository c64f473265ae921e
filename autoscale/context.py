"""What reading the KV cache adds to a step of the target, learned from the rounds.

A forward of n tokens whose sequences hold C tokens of KV takes ``T(n, C) = f T0(n) + kappa C``: T0 is the profile, measured
over short contexts, and f its correction (`autoscale.cost_model`). The second part does not grow with the draft: the rows of a
sequence share one reading of its KV. So long contexts make steps longer and draft positions no dearer, which keeps speculation
profitable at batches where short ones end it (MagicDec, Sadhukhan et al. 2024, arXiv 2408.11049).
"""

import math

import msgspec

DECAY = 0.98
"""Per round: about 50 of them are remembered."""
PRIOR_SHARE = 0.01
"""What f = 1 is worth, as a share of the rounds: while contexts and numbers of tokens hardly vary, f and kappa cannot be told
apart, and then the profile, which was measured on this very device, is believed."""
MOST_PER_TOKEN = 3e-4
"""kappa is at most this share of a step of one token: a KV token is so many times smaller than the weights, or smaller."""
LEAST_ROUNDS = 10.0
STEP = 0.1
"""Share of the way that kappa moves towards its new estimate in a round."""


class ContextFit(msgspec.Struct, frozen=True):
    """Decayed sums for least squares in f and kappa over the last rounds, and kappa."""

    seconds_per_token: float = 0.0
    """kappa, at least 0."""
    rounds: float = 0.0
    profile_squared: float = 0.0
    profile_context: float = 0.0
    context_squared: float = 0.0
    profile_time: float = 0.0
    context_time: float = 0.0
    """Sums of products: of T0(n), C and the measured time."""
    per_request: float = 0.0
    """Mean KV tokens of a decoding request."""

    def learned(
        self, num_context_tokens: int, num_requests: int, verify_time_s: float, profile_s: float, step_s: float
    ) -> "ContextFit":
        """Take in a round. ``profile_s``: T0 of its tokens, ``step_s``: of one. Times that are no times teach nothing."""
        numbers = (verify_time_s, profile_s)
        if num_requests <= 0 or not all(math.isfinite(number) and number > 0 for number in numbers):
            return self
        context, mine = float(num_context_tokens), num_context_tokens / num_requests
        fit = ContextFit(
            seconds_per_token=self.seconds_per_token,
            rounds=DECAY * self.rounds + 1,
            profile_squared=DECAY * self.profile_squared + profile_s * profile_s,
            profile_context=DECAY * self.profile_context + profile_s * context,
            context_squared=DECAY * self.context_squared + context * context,
            profile_time=DECAY * self.profile_time + profile_s * verify_time_s,
            context_time=DECAY * self.context_time + context * verify_time_s,
            per_request=mine if not self.rounds else self.per_request + (1 - DECAY) * (mine - self.per_request),
        )
        return msgspec.structs.replace(fit, seconds_per_token=fit._estimate(step_s))

    @property
    def per_request_s(self) -> float:
        """Seconds that a request of mean context adds to a step."""
        return self.seconds_per_token * self.per_request

    def _estimate(self, step_s: float) -> float:
        """The normal equations' kappa, with a ridge that holds f at 1."""
        if self.rounds < LEAST_ROUNDS or not self.context_squared:
            return self.seconds_per_token
        ridge = PRIOR_SHARE * self.profile_squared
        squared, time = self.profile_squared + ridge, self.profile_time + ridge
        determinant = squared * self.context_squared - self.profile_context**2
        kappa = (squared * self.context_time - self.profile_context * time) / determinant
        kappa = self.seconds_per_token + STEP * (kappa - self.seconds_per_token)
        return min(max(kappa, 0.0), MOST_PER_TOKEN * step_s)
