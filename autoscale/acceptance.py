"""How likely draft tokens are accepted, per request and position, learned while serving, and how true that was."""

from dataclasses import dataclass, field

MAX_ALPHA = 0.995
"""No estimate is certain: at 1 every position would survive and no price could tell two depths apart."""
CLASS_DECAY = 0.95
"""Per round with drafts: the class remembers about 20 of them. By token it would forget, in a batch of hundreds, all but the
last round, whose chance alone then decides whether anybody speculates (36 changes per minute at the threshold, simulated)."""
POSITION_DECAY = 0.99
"""Per round with drafts: about 100."""
REQUEST_DECAY = 0.95
"""A request's own text changes (prose, then code): about 20 tokens."""
SHRINK_TOKENS = 8.0
"""m: the class prior weighs as much as this many tested tokens of the request."""
SHRINK_TESTS = 10.0
"""The class's mean weighs as much as this many tests of one position."""
START_TOKENS = 16.0
"""What the configured prior is worth before anything was measured, in tested tokens."""
NUM_BINS = 10
CALIBRATION_DECAY = 0.999
"""Per prediction: the check of what was predicted remembers about 1,000."""


@dataclass(slots=True)
class _Counts:
    accepted: float = 0.0
    tested: float = 0.0

    def add(self, accepted: int, tested: int) -> None:
        self.accepted += accepted
        self.tested += tested

    def decay(self, kept: float) -> "_Counts":
        self.accepted *= kept
        self.tested *= kept
        return self


@dataclass(slots=True)
class _Bin:
    """Predictions of about the same survival, and what came of them (sums)."""

    predicted: float = 0.0
    survived: float = 0.0
    count: float = 0.0


@dataclass(slots=True)
class Calibration:
    """Compares predicted survival with what survived, in ten bins by what was predicted."""

    bins: list[_Bin] = field(default_factory=lambda: [_Bin() for _ in range(NUM_BINS)])

    def add(self, predicted: float, survived: bool) -> None:
        """One draft token."""
        one = self.bins[min(int(NUM_BINS * predicted), NUM_BINS - 1)]
        one.predicted = CALIBRATION_DECAY * one.predicted + predicted
        one.survived = CALIBRATION_DECAY * one.survived + survived
        one.count = CALIBRATION_DECAY * one.count + 1

    @property
    def error(self) -> float | None:
        """Expected calibration error, 0..1: ``sum_bins n |mean predicted - share that survived| / sum_bins n``.

        Naeini et al. 2015, "Obtaining well calibrated probabilities using Bayesian binning". None before the first draft.
        """
        total = sum(one.count for one in self.bins)
        return sum(abs(one.predicted - one.survived) for one in self.bins) / total if total else None

    def table(self) -> tuple[tuple[float, float, float], ...]:
        """(mean predicted, share that survived, predictions remembered) of the bins that have any."""
        return tuple((one.predicted / one.count, one.survived / one.count, one.count) for one in self.bins if one.count)


class AcceptanceEstimator:
    """Decayed counts per request, shrunk to those of its class (all requests with one draft source; one estimator each).

    ``alpha_i = (a_i + m * prior) / (n_i + m)`` with a_i of n_i tested tokens accepted: the mean of a Beta posterior whose prior
    is the class. Only tokens that were tested count: after the first rejection the rest of a draft says nothing, so
    ``tested = min(accepted + 1, drafted)``, which makes a/n the maximum-likelihood estimate of alpha.

    Acceptance also depends on the position in the draft, in a way that requests share: the odds of a request at position j are
    its own odds times those of the class at j over the class's mean odds.
    """

    def __init__(self, prior_alpha: float = 0.7):
        self._class = _Counts(prior_alpha * START_TOKENS, START_TOKENS)
        self._has_observed = False
        """In this round."""
        self._requests: dict[str, _Counts] = {}
        self._positions: list[_Counts] = []
        self._tilts: list[float] = []
        """By position: odds of the class there over its mean odds; empty = to be computed."""
        self.calibration = Calibration()

    @property
    def prior(self) -> float:
        """Acceptance of the class: what a request that was never tested is expected to have."""
        return min(self._class.accepted / self._class.tested, MAX_ALPHA)

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Learn from one verified draft; a draft of no token teaches nothing."""
        if drafted <= 0:
            return
        accepted = min(max(accepted, 0), drafted)
        for position, predicted in enumerate(self.survival(request_id, drafted)):
            self.calibration.add(predicted, position < accepted)
        tested = min(accepted + 1, drafted)
        self._has_observed = True
        self._class.add(accepted, tested)
        self._requests.setdefault(request_id, _Counts()).decay(REQUEST_DECAY**tested).add(accepted, tested)
        while len(self._positions) < tested:
            self._positions.append(_Counts())
        for position, counts in enumerate(self._positions[:tested]):
            counts.add(int(position < accepted), 1)
        self._tilts = []

    def end_round(self) -> None:
        """What the class has learned grows older by a round, if it learned anything in this one."""
        if self._has_observed:
            self._has_observed = False
            self._class.decay(CLASS_DECAY)
            for counts in self._positions:
                counts.decay(POSITION_DECAY)

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
        """Probability that draft position j = 1..depth of a request is committed: that all up to it are accepted."""
        return self.survival_at(self.alpha(request_id), depth)

    def survival_at(self, alpha: float, depth: int) -> tuple[float, ...]:
        """The same for any request of acceptance ``alpha``."""
        if not self._tilts:
            self._tilts = self._position_tilts()
        survivals, reached = [], 1.0
        for position in range(depth):
            tilt = self._tilts[min(position, len(self._tilts) - 1)]
            reached *= min(alpha * tilt / (1 - alpha + alpha * tilt), MAX_ALPHA)
            survivals.append(reached)
        return tuple(survivals)

    def position_table(self) -> tuple[tuple[float, float], ...]:
        """(tested, accepted) decayed counts by draft position, over all requests."""
        return tuple((counts.tested, counts.accepted) for counts in self._positions)

    def _position_tilts(self) -> list[float]:
        """Beyond the last position that was tested it goes on as there; with none, all are alike."""
        mean = self._mean_over_positions()
        tilts = []
        for counts in self._positions:
            rate = min((counts.accepted + SHRINK_TESTS * mean) / (counts.tested + SHRINK_TESTS), MAX_ALPHA)
            tilts.append(rate / (1 - rate) * (1 - mean) / mean if 0 < mean < 1 else 1.0)
        return tilts or [1.0]

    def _mean_over_positions(self) -> float:
        """Of the same counts as the positions' rates: their memory is longer than that of the class."""
        tested = sum(counts.tested for counts in self._positions)
        return min(sum(counts.accepted for counts in self._positions) / tested, MAX_ALPHA) if tested else 0.0


def survival(alpha: float, depth: int) -> tuple[float, ...]:
    """``alpha ** j`` for j = 1..depth."""
    return tuple(alpha**position for position in range(1, depth + 1))
