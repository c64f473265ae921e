"""How likely a draft token is accepted, per request, learned while serving."""

from dataclasses import dataclass

MAX_ALPHA = 0.995
"""No estimate is certain: at 1 every position would survive and no price could tell two depths apart."""
CLASS_DECAY = 0.98
"""Per tested token: the class remembers about 1 / (1 - 0.98) = 50 of them."""
REQUEST_DECAY = 0.95
"""A request's own text changes (prose, then code): about 20 tokens."""
SHRINK_TOKENS = 8.0
"""m: the class prior weighs as much as this many tested tokens of the request."""
START_TOKENS = 16.0
"""What the configured prior is worth before anything was measured, in tested tokens."""


@dataclass(slots=True)
class _Counts:
    accepted: float = 0.0
    tested: float = 0.0

    def add(self, accepted: int, tested: int, decay: float) -> None:
        kept = decay**tested
        self.accepted = self.accepted * kept + accepted
        self.tested = self.tested * kept + tested


class AcceptanceEstimator:
    """Decayed counts per request, shrunk to those of its class (all requests with one draft source; one estimator each).

    ``alpha_i = (a_i + m * prior) / (n_i + m)`` with a_i of n_i tested tokens accepted: the mean of a Beta posterior whose prior
    is the class. Only tokens that were tested count: after the first rejection the rest of a draft says nothing, so
    ``tested = min(accepted + 1, drafted)``, which makes a/n the maximum-likelihood estimate of alpha.
    """

    def __init__(self, prior_alpha: float = 0.7):
        self._class = _Counts(prior_alpha * START_TOKENS, START_TOKENS)
        self._requests: dict[str, _Counts] = {}
        self._positions: list[_Counts] = []

    @property
    def prior(self) -> float:
        """Acceptance of the class: what a request that was never tested is expected to have."""
        return min(self._class.accepted / self._class.tested, MAX_ALPHA)

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Learn from one verified draft; a draft of no token teaches nothing."""
        if drafted <= 0:
            return
        accepted = min(max(accepted, 0), drafted)
        tested = min(accepted + 1, drafted)
        self._class.add(accepted, tested, CLASS_DECAY)
        self._requests.setdefault(request_id, _Counts()).add(accepted, tested, REQUEST_DECAY)
        while len(self._positions) < tested:
            self._positions.append(_Counts())
        for position, counts in enumerate(self._positions[:tested]):
            counts.accepted = CLASS_DECAY * counts.accepted + (position < accepted)
            counts.tested = CLASS_DECAY * counts.tested + 1

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that ended; the class keeps what it learned from it."""
        self._requests.pop(request_id, None)

    def alpha(self, request_id: str) -> float:
        """Acceptance per token of one request; the class prior for an unknown one."""
        counts = self._requests.get(request_id)
        if counts is None:
            return self.prior
        return min((counts.accepted + SHRINK_TOKENS * self.prior) / (counts.tested + SHRINK_TOKENS), MAX_ALPHA)

    def survival(self, request_id: str, depth: int) -> tuple[float, ...]:
        """Probability that draft position j = 1..depth is committed: all up to it are accepted, ``alpha_i ** j``."""
        return survival(self.alpha(request_id), depth)

    def position_table(self) -> tuple[tuple[float, float], ...]:
        """(tested, accepted) decayed counts by draft position, over all requests: shows where ``alpha ** j`` is wrong."""
        return tuple((counts.tested, counts.accepted) for counts in self._positions)


def survival(alpha: float, depth: int) -> tuple[float, ...]:
    """``alpha ** j`` for j = 1..depth."""
    return tuple(alpha**position for position in range(1, depth + 1))
