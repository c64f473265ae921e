"""The price of a draft position: the lowest survival probability at which verifying it pays now.

Useful tokens per second of a lane are a ratio, ``Theta = tokens / time``. At the largest Theta* a further position that brings
s tokens and takes dt seconds raises the ratio if and only if ``s > Theta* dt`` (Dinkelbach 1967, "On nonlinear fractional
programming"). Choosing a uniform depth by this ratio is the goodput of SmartSpec (Liu et al. 2024, arXiv 2406.14066).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

from autoscale.cost_model import RoundCost
from autoscale.signals import PriceRow

PRICE_OFF = 1.0
"""No survival probability is above it."""
TABLE_BATCHES = tuple(2**power for power in range(9))
_BELOW = 1 - 1e-9


def expected_tokens(alpha: float, depth: int) -> float:
    """Tokens per request and round, ``E(K) = (1 - alpha^(K+1)) / (1 - alpha)``, summed so that alpha = 1 needs no case.

    Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", equation 1.
    """
    return sum(alpha**position for position in range(depth + 1))


def throughput(batch: float, depth: int, alpha: float, cost: RoundCost) -> float:
    """``Theta(b, K) = b E(K) / T(b, K)``, tokens per second of a lane whose ``batch`` requests all speculate ``depth`` deep."""
    return batch * expected_tokens(alpha, depth) / cost.time(batch, depth)


def best_depth(batch: float, alpha: float, cost: RoundCost, max_depth: int) -> int:
    """K*, the depth in 0..max_depth with the largest throughput; the smallest one on ties."""
    return max(range(max_depth + 1), key=lambda depth: throughput(batch, depth, alpha, cost))


def price(batch: float, alpha: float, cost: RoundCost, max_depth: int) -> tuple[float, int]:
    """The price at ``batch`` requests of mean acceptance ``alpha``, and K* (`best_depth`).

    ``price = Theta* (dT_target/dn + T_draft(b) / b)``: what one position of one request costs when all share the step. dT/dn
    is the difference quotient between K* - 1 and K*, since a depth moves by whole positions. Optimality of K* puts the price
    between ``alpha^(K*+1)`` and ``alpha^K*`` for a convex cost; it is held there for any cost, so a request of average
    acceptance gets exactly K*, a better or worse one more or less. When K* = 0 nothing pays: `PRICE_OFF`.
    """
    depth = best_depth(batch, alpha, cost, max_depth)
    if depth == 0:
        return PRICE_OFF, 0
    marginal_s = (cost.time(batch, depth) - cost.time(batch, depth - 1)) / batch
    raw = throughput(batch, depth, alpha, cost) * marginal_s
    return clipped_price(raw, alpha, depth, max_depth), depth


def clipped_price(raw: float, alpha: float, depth: int, max_depth: int) -> float:
    """``raw`` held where a request of acceptance ``alpha`` gets exactly ``depth``; `PRICE_OFF` for depth 0."""
    if depth == 0:
        return PRICE_OFF
    lowest = alpha ** (depth + 1) if depth < max_depth else 0.0
    return min(max(raw, lowest), alpha**depth * _BELOW)


def price_table(alpha: float, cost: RoundCost, max_depth: int) -> tuple[PriceRow, ...]:
    """Rows (batch, price, K*) for the batch sizes 1, 2, 4, ..., 256."""
    return tuple((batch, *price(batch, alpha, cost, max_depth)) for batch in TABLE_BATCHES)


def price_at(rows: Sequence[PriceRow], batch: float) -> float:
    """Price at any batch size: linear in log(batch) between rows, constant outside of them. ``rows`` is not empty."""
    after = bisect_left(rows, batch, key=lambda row: row[0])
    if after == 0:
        return rows[0][1]
    if after == len(rows):
        return rows[-1][1]
    (low, low_price, _), (high, high_price, _) = rows[after - 1], rows[after]
    share = math.log(batch / low) / math.log(high / low)
    return low_price + share * (high_price - low_price)


def deepest_at(rows: Sequence[PriceRow], batch: float) -> int:
    """The larger K* of the rows around a batch. A price of 0 alone would say: as deep as may be, and never mind that overlapped
    drafts must be there in time. ``rows`` is not empty."""
    after = min(bisect_left(rows, batch, key=lambda row: row[0]), len(rows) - 1)
    return max(depth for _, _, depth in rows[max(after - 1, 0) : after + 1])


def break_even_batch(rows: Sequence[PriceRow]) -> int | None:
    """The smallest batch of the table at which speculation no longer pays; None if it pays at all of them."""
    return next((batch for batch, _, depth in rows if depth == 0), None)
