"""How many outcomes to prepare for each number of accepted tokens.

With acceptance a, the target keeps exactly k of K draft tokens with probability ``w_k = a^k (1 - a)``, all of them with
``w_K = a^K``. The hit probability ``sum_k w_k (1 - miss(F_k))`` under a limit on ``sum_k F_k`` is largest where every last
guess gains the same. For misses that fall as ``F^-r`` that is the shape of SSD (Kumar, Dao, May 2026, arXiv 2603.03251):
``F_k`` proportional to ``a^{k / (1 + r)}``, the last times ``(1 - a)^{-1 / (1 + r)}``. In whole numbers: take the guesses in
the order of their gain. Gains fall with every guess (`HitLaws`), so what was taken is the best choice of its size. Where to
stop, the least gain, follows from the rows that the draft has time for (`autoscale.overlap`).
"""

from autoscale.hit_rate import KINDS, MAX_FAN_OUT, HitLaws


def position_weights(alpha: float, depth: int) -> tuple[float, ...]:
    """Probability that exactly k = 0..depth draft tokens are accepted."""
    return (*(alpha**k * (1 - alpha) for k in range(depth)), alpha**depth)


def position_kinds(depth: int) -> tuple[str, ...]:
    """Kind of the outcome (`KINDS`) with k = 0..depth draft tokens accepted."""
    return (*("recovery",) * depth, "bonus") if depth else ("plain",)


def guesses_worth(alpha: float, depth: int, laws: HitLaws, least_gain: float) -> tuple[int, ...]:
    """All guesses that each raise the hit probability by at least ``least_gain``.

    One least gain for all requests of a lane divides the draft's rows between them, and between requests with a draft and
    without one, in the best way: like one price for all depths.
    """
    hits = {kind: laws.hits(kind) for kind in KINDS}
    return tuple(
        count_worth(hits[kind], weight, least_gain)
        for weight, kind in zip(position_weights(alpha, depth), position_kinds(depth), strict=True)
    )


def count_worth(hits: tuple[float, ...], weight: float, least_gain: float) -> int:
    """Guesses, of an outcome of probability ``weight`` with `HitLaws.hits`, that each gain at least ``least_gain``."""
    count = 0
    while count < MAX_FAN_OUT and weight * (hits[count + 1] - hits[count]) >= least_gain:
        count += 1
    return count
