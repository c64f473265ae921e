"""The depths of all requests of a sequential round together: they share the draft's steps and the target's.

With Theta tokens per second, drafts that survive with ``s_ij`` (request i, position j) are worth a round of

    sum_ij s_ij - Theta (T_target(b + N) + sum_j T_draft(n_j)),    N = sum_j n_j,

n_j being the requests that go as deep as j. A draft step takes hardly less for one request than for all, so a request that is
better than the others does not draft on alone, and beyond a knee of the target's step the best positions of the batch go first.
Largest for the deepest step J and the N positions of largest survival up to it: the same choice as vLLM's adaptive verification
and DSpark (arXiv 2607.05147) make for the target alone. At the largest Theta the choice that is worth most is the one with the
largest rate (Dinkelbach, as in `autoscale.price`).
"""

from collections import Counter
from collections.abc import Sequence

from autoscale.cost_model import RoundCost


def allocate(
    survivals: Sequence[Sequence[float]], rate: float, cost: RoundCost, batch: float, num_beside: int = 0
) -> list[int]:
    """Depths of requests whose survival by position is ``survivals``, each as long as the request has room.

    ``rate``: Theta. ``batch``: requests to reckon with; where more are expected than are there, each stands for several.
    ``num_beside``: further tokens of the same forward, of prompts.
    """
    if not survivals:
        return []
    share = batch / len(survivals)
    row_s, step_s = _draft_costs(cost, batch)
    slots = _slots(survivals, rate * row_s)
    costs = _verify_costs(len(slots), rate, cost, batch + num_beside, share)
    best: Counter[int] = Counter()
    best_worth, deepest = 0.0, max((level for _, level, _ in slots), default=0)
    for level in range(1, deepest + 1):
        reached = [(survival, index) for survival, own_level, index in slots if own_level <= level]
        worth, count = _best_prefix([survival for survival, _ in reached], costs, rate * row_s, share)
        worth -= rate * step_s * level
        if worth > best_worth:
            best, best_worth = Counter(index for _, index in reached[:count]), worth
    return [best[index] for index in range(len(survivals))]


def _draft_costs(cost: RoundCost, batch: float) -> tuple[float, float]:
    """Seconds of one more row in a draft step, and of the step itself."""
    one, everybody = cost.draft_time(1), cost.draft_time(batch)
    row_s = (everybody - one) / (batch - 1) if batch > 1 else 0.0
    return row_s, max(one - row_s, 0.0)


def _slots(survivals: Sequence[Sequence[float]], least: float) -> list[tuple[float, int, int]]:
    """(survival, position, request), best first; a position comes after those before it."""
    slots = [
        (survival, level, index)
        for index, own in enumerate(survivals)
        for level, survival in enumerate(own, start=1)
        if survival > least
    ]
    slots.sort(key=lambda slot: (-slot[0], slot[1]))
    return slots


def _verify_costs(count: int, rate: float, cost: RoundCost, num_tokens: float, share: float) -> list[float]:
    """Tokens that the target could have made in the time of 1, 2, ... more positions."""
    alone_s = cost.target.time(num_tokens)
    return [rate * (cost.target.time(num_tokens + (n + 1) * share) - alone_s) for n in range(count)]


def _best_prefix(survivals: list[float], costs: list[float], row_price: float, share: float) -> tuple[float, int]:
    """(worth, number) of the first positions that are worth most together. Steps of a target may grow in stairs: what does not
    pay alone may pay with those after it."""
    gained, best_worth, best_count = 0.0, 0.0, 0
    for count, survival in enumerate(survivals, start=1):
        gained += share * (survival - row_price)
        if gained - costs[count - 1] > best_worth:
            best_worth, best_count = gained - costs[count - 1], count
    return best_worth, best_count
