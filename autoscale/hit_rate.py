"""How often an outcome that the draft guessed is the one that comes, by the number of guesses, learned while serving.

An outcome is missed with probability ``(1 + F / scale) ** -rate`` when F tokens are guessed: 1 without a guess, the power law
``F ** -rate`` of SSD (Kumar, Dao, May 2026, arXiv 2603.03251) for many, and convex in between, so that each further guess
brings less than the one before. With the scales below one rate per kind meets the measured hits at F = 1, 3 and 5.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

import msgspec

KINDS = ("recovery", "bonus", "plain")
"""As in `StepReport.hits`: the target corrected the draft, accepted all of it, or there was none."""
SCALES = {"recovery": 2.0, "bonus": 1.0, "plain": 1.0}
MAX_FAN_OUT = 8
"""Most guesses per number of accepted tokens."""
OUTCOME_DECAY = 0.995
"""Per outcome: about 200 of a kind are remembered."""
START_OUTCOMES = 50.0
"""What the prior is worth before anything was measured."""
RELAX_WEIGHT = 0.002
"""What was learned is halved in about 350 rounds without an outcome."""
MAX_RATE = 8.0
_NEWTON_STEPS = 12


class HitLaws(msgspec.Struct, frozen=True):
    """How predictable outcomes are: one rate per kind, and the share of prepared drafts that never arrive.

    The defaults miss as a real pair does under ``coupled`` with F = 3: hits of .70 (recovery) and .90 (bonus, plain).
    """

    recovery: float = 1.31
    bonus: float = 1.66
    plain: float = 1.66
    lost: float = 0.0
    """Share of outcomes whose preparation was late or refused, whatever was guessed."""

    def miss(self, kind: str, fan_out: int) -> float:
        """Probability that the token that comes is none of ``fan_out`` guesses."""
        rate: float = getattr(self, kind)
        return float((1 + fan_out / SCALES[kind]) ** -rate)

    def hits(self, kind: str) -> tuple[float, ...]:
        """Probability of a hit with 0, 1, ..., `MAX_FAN_OUT` guesses."""
        return _hits(self, kind)

    def rounded(self) -> "HitLaws":
        """Close to this, and equal for laws that hardly differ: as a key of remembered decisions."""
        recovery, bonus, plain = (round(5 * rate) / 5 for rate in (self.recovery, self.bonus, self.plain))
        return HitLaws(recovery, bonus, plain, round(50 * self.lost) / 50)


@lru_cache(maxsize=256)
def _hits(laws: HitLaws, kind: str) -> tuple[float, ...]:
    return tuple(1 - laws.miss(kind, fan_out) for fan_out in range(MAX_FAN_OUT + 1))


class _Outcomes(msgspec.Struct):
    """Decayed counts of one kind."""

    missed: float
    guesses: list[float]
    """Outcomes by the number of guesses that were made for them."""

    def add(self, hits: int, misses: int, shares: Mapping[int, float]) -> None:
        kept = OUTCOME_DECAY ** (hits + misses)
        self.missed = kept * self.missed + misses
        self.guesses = [kept * count + (hits + misses) * shares.get(f, 0.0) for f, count in enumerate(self.guesses)]

    def move_to(self, other: "_Outcomes", weight: float) -> None:
        self.missed += weight * (other.missed - self.missed)
        self.guesses = [own + weight * (its - own) for own, its in zip(self.guesses, other.guesses, strict=True)]

    def rate(self, scale: float) -> float:
        """The rate at which as many are missed as were, by Newton's method: the sum is convex, so it closes in from below."""
        logs = [math.log1p(fan_out / scale) for fan_out in range(MAX_FAN_OUT + 1)]
        rate = 0.0
        for _ in range(_NEWTON_STEPS):
            terms = [count * math.exp(-rate * log) for count, log in zip(self.guesses, logs, strict=True)]
            slope = sum(term * log for term, log in zip(terms, logs, strict=True))
            if slope <= 1e-9 or rate >= MAX_RATE:
                break
            rate += (sum(terms) - self.missed) / slope
        return min(max(rate, 0.0), MAX_RATE)


class HitEstimator:
    """Learns `HitLaws` from the hits and misses of the rounds. Starts at a prior and returns to it while nothing is prepared,
    so that overlap that was left for its misses is tried again.
    """

    def __init__(self, prior: HitLaws):
        self._prior = prior
        self._kinds = {kind: _prior_outcomes(prior, kind) for kind in KINDS}
        self._hits = self._outcomes = 0.0
        self._lost = prior.lost
        self._laws: HitLaws | None = prior

    @property
    def laws(self) -> HitLaws:
        """What is known now."""
        if self._laws is None:
            rates = {kind: outcomes.rate(SCALES[kind]) for kind, outcomes in self._kinds.items()}
            self._laws = HitLaws(**rates, lost=self._lost)
        return self._laws

    @property
    def hit_rate(self) -> float:
        """Share of the last few hundred outcomes that were prepared and there in time; 0 before the first one."""
        return self._hits / self._outcomes if self._outcomes else 0.0

    def observe(self, hits: Mapping[str, int], misses: Mapping[str, int], shares: Mapping[str, Mapping[int, float]]) -> None:
        """Learn from a round. ``shares``: of the outcomes of a kind, the expected share that had so many guesses (sums to 1).

        Kinds without shares teach nothing about guessing; misses of no kind (late, unprepared) count as lost.
        """
        num_hits, num_misses = sum(hits.values()), sum(misses.values())
        if num_hits + num_misses == 0:
            self._relax()
            return
        for kind in KINDS:
            if shares.get(kind) and (hits.get(kind, 0) or misses.get(kind, 0)):
                self._kinds[kind].add(hits.get(kind, 0), misses.get(kind, 0), shares[kind])
        kept = OUTCOME_DECAY ** (num_hits + num_misses)
        lost = num_misses - sum(misses.get(kind, 0) for kind in KINDS)
        self._lost = kept * self._lost + (1 - kept) * lost / (num_hits + num_misses)
        self._hits, self._outcomes = kept * self._hits + num_hits, kept * self._outcomes + num_hits + num_misses
        self._laws = None

    def _relax(self) -> None:
        for kind, outcomes in self._kinds.items():
            outcomes.move_to(_prior_outcomes(self._prior, kind), RELAX_WEIGHT)
        self._lost += RELAX_WEIGHT * (self._prior.lost - self._lost)
        self._laws = None


def _prior_outcomes(prior: HitLaws, kind: str) -> _Outcomes:
    guesses = [START_OUTCOMES if fan_out == 3 else 0.0 for fan_out in range(MAX_FAN_OUT + 1)]
    return _Outcomes(START_OUTCOMES * prior.miss(kind, 3), guesses)
