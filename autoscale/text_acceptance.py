"""How likely tokens of drafts from text are kept, by how sure their source is: learned from every committed token.

What a text source offers can be scored without being verified: a draft token counts as kept where the committed token is the
same one. That is what verifying it would have come to, under every rule: the committed token has the target's distribution p
whatever was drafted, and a draft that is certain is kept with probability p of its token. So classes that are never used are
known as well as the others, nothing has to be probed, and it says as much while no draft pays.
"""

from dataclasses import dataclass, field

from autoscale.acceptance import MAX_ALPHA
from engine.types import TextOffer

PRIOR_ALPHAS = (0.2, 0.4, 0.6, 0.75, 0.85, 0.85)
"""Until a lane has seen its own, for matches of 1, 2, 3 to 4, 5 to 8, 9 to 16 and more tokens: what SmolLM2-135M said 96 tokens
long to ten prompts of five kinds agreed with n-grams in 0.18, 0.42, 0.61, 0.80, 0.90, 0.82 of 615 places (docs/log.md)."""
SHRINK_CLASS = 8.0
"""The prior weighs as much as this many tested tokens of a class."""
SHRINK_REQUEST = 4.0
"""What the classes predict weighs as much as this many tested tokens of one request: it copies, or it does not."""
ROUND_DECAY = 0.99
"""Per round with offers: classes remember about 100."""
REQUEST_DECAY = 0.95
"""Per tested token: about 20."""
LONGEST_MATCH = 17
"""Tokens beyond which a longer match says nothing more."""
SURE_SHARES = (0.7, 1.0)
"""Mean shares of followers that begin the second and the third class of certainty."""
Class = tuple[int, int]


@dataclass(slots=True)
class _Counts:
    kept: float = 0.0
    tested: float = 0.0


@dataclass(slots=True)
class _Own:
    """Of one request: what was kept, and what its classes had predicted of the same tokens."""

    kept: float = 0.0
    predicted: float = 0.0
    tested: float = 0.0


def confidence_class(match: int, share: float) -> Class:
    """Of a token that follows ``match`` matched tokens: (ceil log2 of the match, how sure the counts are)."""
    return (max(min(match, LONGEST_MATCH), 1) - 1).bit_length(), sum(share >= least for least in SURE_SHARES)


@dataclass(slots=True)
class TextAcceptance:
    """Counts by class, shrunk to what is expected of its matches; a request's own odds against those that its classes predict.

    ``alpha_c = (a_c + m prior_c) / (n_c + m)``, as `autoscale.acceptance.AcceptanceEstimator` for requests. A request of which
    a_i of n_i tested tokens were kept where e_i were predicted has ``odds_ic = odds_c odds((a_i + m e_i/n_i)/(n_i + m)) /
    odds(e_i/n_i)``. The draft's token at j follows a match that is j tokens longer if it is tested at all, which is the class
    it counts in.
    """

    _classes: dict[Class, _Counts] = field(default_factory=dict)
    _requests: dict[str, _Own] = field(default_factory=dict)
    _has_observed: bool = False

    def survival(self, offer: TextOffer) -> list[float]:
        """Probability that all tokens up to the first, second, ... one of the offer are kept."""
        tilt, survivals, reached = self._tilt(offer.request.request_id), [], 1.0
        for position in range(offer.length):
            odds = tilt * _odds(self._class_alpha(confidence_class(offer.match + position, offer.share)))
            reached *= min(odds / (1 + odds), MAX_ALPHA)
            survivals.append(reached)
        return survivals

    def observe(self, request_id: str, match: int, share: float, kept: int, tested: int) -> None:
        """Of an offer, the first ``tested`` tokens could be compared with committed ones, of which the first ``kept`` agree."""
        if tested <= 0:
            return
        self._has_observed = True
        own = self._requests.setdefault(request_id, _Own())
        for position in range(tested):
            key, is_kept = confidence_class(match + position, share), float(position < kept)
            own.kept = REQUEST_DECAY * own.kept + is_kept
            own.predicted = REQUEST_DECAY * own.predicted + self._class_alpha(key)
            own.tested = REQUEST_DECAY * own.tested + 1
            counts = self._classes.setdefault(key, _Counts())
            counts.kept += is_kept
            counts.tested += 1

    def end_round(self) -> None:
        """What was learned grows older by a round, if anything was learned in this one."""
        if self._has_observed:
            self._has_observed = False
            for counts in self._classes.values():
                counts.kept *= ROUND_DECAY
                counts.tested *= ROUND_DECAY

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._requests.pop(request_id, None)

    def _class_alpha(self, key: Class) -> float:
        counts = self._classes.get(key) or _Counts()
        return min((counts.kept + SHRINK_CLASS * PRIOR_ALPHAS[key[0]]) / (counts.tested + SHRINK_CLASS), MAX_ALPHA)

    def _tilt(self, request_id: str) -> float:
        own = self._requests.get(request_id)
        if own is None:
            return 1.0
        predicted = own.predicted / own.tested
        return _odds((own.kept + SHRINK_REQUEST * predicted) / (own.tested + SHRINK_REQUEST)) / _odds(predicted)


def _odds(probability: float) -> float:
    held = min(max(probability, 1 - MAX_ALPHA), MAX_ALPHA)
    return held / (1 - held)
