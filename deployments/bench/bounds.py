"""How fast rounds can be, in closed form: tokens per target step, for i.i.d. acceptance and target steps of one length.

``alpha`` is the probability that a draft token is kept, ``c`` the draft's time per token and ``hop`` the way to it, one way,
both in target steps. The formulas are those of Leviathan et al. (2211.17192) and of SSD (2603.03251), put together.
"""

import math

DEEPEST = 64


def expected_tokens(alpha: float, depth: int) -> float:
    """``E(K) = (1 - alpha^(K+1)) / (1 - alpha)``: tokens that a round with a draft of ``depth`` tokens commits."""
    return sum(alpha**accepted for accepted in range(depth + 1))


def sequential(alpha: float, c: float, hop: float) -> tuple[float, int]:
    """``max_K E(K) / (K c + 1 + 2 hop)`` and its K; plain decoding, 1.0 and 0, where no draft pays."""
    rates = {depth: expected_tokens(alpha, depth) / (depth * c + 1 + 2 * hop) for depth in range(1, DEEPEST + 1)}
    best = max(rates, key=lambda depth: rates[depth])
    return max((rates[best], best), (1.0, 0))


def overlapped_depth(c: float, hop: float) -> int:
    """``(1 - 2 hop) / c``: draft tokens that are ready and here when a verify ends."""
    return max(0, min(DEEPEST, math.floor((1 - 2 * hop) / c + 1e-9)))


def overlapped(alpha: float, c: float, hop: float) -> float:
    """``E(K)`` at `overlapped_depth`: every outcome was prepared, and nobody ever waits."""
    return expected_tokens(alpha, overlapped_depth(c, hop))


def overlapped_with_misses(alpha: float, c: float, hop: float, hit_rate: float) -> float:
    """``(p E(K) + (1-p) E_m) / (p + (1-p) T_m)``, the better of a plain step and of asking (at its best depth) on a miss."""
    hit, asked = overlapped(alpha, c, hop), []
    for depth in range(DEEPEST + 1):
        time = 1 + 2 * hop + depth * c if depth else 1.0
        asked.append((hit_rate * hit + (1 - hit_rate) * expected_tokens(alpha, depth)) / (hit_rate + (1 - hit_rate) * time))
    return max(asked)
