"""Throughput of overlapped rounds: how deep to draft, how many outcomes to prepare, whether to ask and how long to wait.

A request is in one of two states when a round begins: its outcome was prepared (it has a draft of K tokens) or it was not (a
plain step). From either the next outcome is prepared with the probability p_draft or p_plain of `autoscale.fan_out`, so in the
long run the share ``pi = p_plain / (1 - p_draft + p_plain)`` of the rounds has a draft, and with b requests in lock-step

    Theta = b (pi E(K) + 1 - pi) / max(T_target(b (1 + pi K)), T_draft(b (1 + pi K)) + K T_draft(rows) + hop),

``rows`` being the outcomes prepared for all of them. The hop is to the draft and back. Coming into a round with a draft is
worth ``V = (E(K) - 1 - Theta K dT/dn) / (1 - p_draft + p_plain)`` tokens, the rounds after it included: what a hit is worth
to wait for. Idealised (T_target = 1, prepare hidden, p_draft = p_plain) this is ``p E(K) + 1 - p``.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from autoscale.cost_model import OverlapCost
from autoscale.fan_out import count_worth, guesses_worth
from autoscale.hit_rate import MAX_FAN_OUT, HitLaws
from autoscale.price import TABLE_BATCHES, clipped_price, expected_tokens
from autoscale.signals import PriceRow

LEAST_GAINS = (0.3, 0.2, 0.14, 0.1, 0.07, 0.05, 0.035, 0.025, 0.018, 0.012, 0.008, 0.005)
"""Hit probability that one more outcome must bring (`guesses_worth`): the candidates, from few outcomes to many."""
CLEARLY = 1.002
"""More rows of the draft must raise the throughput by this much: what they cost in memory is not in the model."""
MAX_ASKING_BATCH = 16
"""Beyond, waiting for the draft on behalf of the missed ones is not part of the modelled throughput; it hardly pays there."""

ASKING_STEPS = 2


class Overlap(msgspec.Struct, frozen=True):
    """The best overlapped rounds of a lane, and what the model expects of them."""

    depth: int
    deepest: int
    """No request drafts deeper: the most that is hidden behind the verify, or ``depth`` where some waiting pays."""
    throughput: float
    """Tokens per second of the lane."""
    raw_price: float
    """Survival that pays for one more position at ``depth``, before `clipped_price`."""
    hit_rate: float
    """Share of the outcomes that are prepared and there."""
    hit_after: tuple[float, ...]
    """The same after a draft of 0, 1, ... tokens."""
    hit_value: float
    """Tokens that a request gains by having a draft in a round (V)."""
    num_rows: float
    """Outcomes prepared per request and round."""
    exposed_s: float
    """Time per round that the target waits for the draft."""
    fan_out: int | None
    """The same number of guesses everywhere; None: by ``least_gain``."""
    least_gain: float

    def guesses(self, alpha: float, draft_length: int, laws: HitLaws) -> tuple[int, ...]:
        """Guesses for 0..draft_length accepted tokens of a request of acceptance ``alpha``."""
        if self.fan_out is not None:
            return (self.fan_out,) * (draft_length + 1)
        return guesses_worth(alpha, draft_length, laws, self.least_gain)

    def price(self, alpha: float) -> float:
        """The price at which a request of acceptance ``alpha`` gets ``depth`` (`autoscale.price`).

        Where the draft's time limits the depth, and not what it costs to verify, worse requests get as much of it as others:
        their drafts take no more time.
        """
        return clipped_price(self.raw_price, alpha, self.depth, self.deepest)


class _Guessing(msgspec.Struct, frozen=True):
    """For one fan-out, by the length of the draft that is verified (0: a plain step)."""

    rows: tuple[int, ...]
    hit: tuple[float, ...]
    """Probability that the outcome is prepared and there."""


class _Candidate(msgspec.Struct, frozen=True):
    throughput: float
    depth: int
    least_gain: float
    guessing: _Guessing


@lru_cache(maxsize=512)
def best_overlap(
    batch: int, alpha: float, cost: OverlapCost, laws: HitLaws, depths: tuple[int, ...], fan_out: int | None
) -> Overlap:
    """The depth among ``depths`` and the fan-out (``fan_out`` where it is given) with the largest throughput.

    On ties the smaller depth and the fewer rows. Remembered, so arguments are best rounded (`OverlapCost.rounded`).
    """
    least_gains = LEAST_GAINS if fan_out is None else (0.0,)
    chosen = _candidate(batch, alpha, cost, laws, depths, fan_out, least_gains[0])
    for least_gain in least_gains[1:]:
        other = _candidate(batch, alpha, cost, laws, depths, fan_out, least_gain)
        if other.throughput > chosen.throughput * CLEARLY:
            chosen = other
    return _with_asking(_describe(batch, alpha, cost, chosen, depths, fan_out), batch, alpha, cost)


def ask_gains(
    survivals: Sequence[float], num_missed: int, batch: int, overlap: Overlap, cost: OverlapCost
) -> tuple[float, ...]:
    """Tokens gained by asking for k = 0, 1, ... draft tokens for the missed requests while the target waits; 0 for k = 0.

    ``survivals[j - 1]``: sum over the missed ones of the probability that j draft tokens are accepted. With m missed,
    ``gain(k) = sum_i (E_i(k) - 1) - Theta (k (T_draft(m) + m dT/dn) + hop)``, plus what the other chance of a hit after it is
    worth: the outcome of a plain step is easier to guess than that of a draft.
    """
    options = _ask_options(survivals, num_missed, batch, overlap, cost)
    return tuple(tokens - overlap.throughput * seconds for tokens, seconds in options)


def _ask_options(
    survivals: Sequence[float], num_missed: int, batch: int, overlap: Overlap, cost: OverlapCost
) -> list[tuple[float, float]]:
    """For k = 0, 1, ...: (tokens gained, seconds waited)."""
    step_s = cost.alone.draft_time(num_missed) + num_missed * cost.target_slowdown * cost.alone.target.slope(batch)
    options, tokens = [(0.0, 0.0)], 0.0
    for depth, survival in enumerate(survivals, start=1):
        tokens += survival
        follow_up = num_missed * (overlap.hit_after[depth] - overlap.hit_after[0]) * overlap.hit_value
        options.append((tokens + follow_up, depth * step_s + cost.alone.hop_s))
    return options


def worth_waiting_s(num_expected: float, overlap: Overlap) -> float:
    """Longest time to wait for the prepared drafts of ``num_expected`` requests: their hits' worth over the throughput.

    Their worth counts twice. A draft that is still at them when the verify begins cannot prepare the round after it either.
    """
    return 2 * num_expected * overlap.hit_rate * overlap.hit_value / overlap.throughput


def overlap_price_table(
    alpha: float, cost: OverlapCost, laws: HitLaws, max_depth: int, fan_out: int | None = None
) -> tuple[PriceRow, ...]:
    """Rows (batch, price, K*) as `price_table`, for lanes whose drafts are prepared beside the verify."""
    depths = tuple(range(max_depth + 1))
    rows = []
    for batch in TABLE_BATCHES:
        overlap = best_overlap(batch, alpha, cost, laws, depths, fan_out)
        rows.append((batch, overlap.price(alpha), overlap.depth))
    return tuple(rows)


def _guessing(alpha: float, max_depth: int, laws: HitLaws, fan_out: int | None, least_gain: float) -> _Guessing:
    recovery, bonus, plain = laws.hits("recovery"), laws.hits("bonus"), laws.hits("plain")

    def count(hits: tuple[float, ...], weight: float) -> int:
        return min(fan_out, MAX_FAN_OUT) if fan_out is not None else count_worth(hits, weight, least_gain)

    arrived = 1 - laws.lost
    rows = [count(plain, 1.0)]
    hit = [arrived * plain[rows[0]]]
    rows_before, hit_before, reached = 0, 0.0, 1.0
    for _ in range(max_depth):
        here = count(recovery, reached * (1 - alpha))
        rows_before += here
        hit_before += reached * (1 - alpha) * recovery[here]
        reached *= alpha
        last = count(bonus, reached)
        rows.append(rows_before + last)
        hit.append(arrived * (hit_before + reached * bonus[last]))
    return _Guessing(tuple(rows), tuple(hit))


def _share_with_draft(guessing: _Guessing, depth: int) -> float:
    leaving = 1 - guessing.hit[depth]
    return guessing.hit[0] / (leaving + guessing.hit[0]) if guessing.hit[0] > 0 else 0.0


def _times(batch: int, cost: OverlapCost, guessing: _Guessing, depth: int) -> tuple[float, float]:
    """Seconds of the verify and of the prepare of a round whose drafts are ``depth`` deep."""
    share = _share_with_draft(guessing, depth)
    num_tokens = batch * (1 + share * depth)
    num_rows = batch * (share * guessing.rows[depth] + (1 - share) * guessing.rows[0])
    prepare_s = cost.prepare_time(num_tokens, num_rows, depth) if depth > 0 and num_rows > 0 else 0.0
    verify_s = (cost if prepare_s > 0 else cost.alone).verify_time(batch, num_tokens)
    return verify_s, prepare_s


def _is_hidden(times: tuple[float, float]) -> bool:
    verify_s, prepare_s = times
    return prepare_s <= verify_s


def _tokens(batch: int, alpha: float, guessing: _Guessing, depth: int) -> float:
    share = _share_with_draft(guessing, depth)
    return batch * (share * expected_tokens(alpha, depth) + 1 - share)


def _candidate(
    batch: int,
    alpha: float,
    cost: OverlapCost,
    laws: HitLaws,
    depths: tuple[int, ...],
    fan_out: int | None,
    least_gain: float,
) -> _Candidate:
    """The best depth for one fan-out."""
    guessing = _guessing(alpha, max(depths), laws, fan_out, least_gain)
    rates = [_tokens(batch, alpha, guessing, depth) / max(_times(batch, cost, guessing, depth)) for depth in depths]
    best = max(range(len(depths)), key=lambda index: rates[index])
    return _Candidate(rates[best], depths[best], least_gain, guessing)


def _describe(
    batch: int,
    alpha: float,
    cost: OverlapCost,
    chosen: _Candidate,
    depths: tuple[int, ...],
    fan_out: int | None,
) -> Overlap:
    theta, depth, guessing = chosen.throughput, chosen.depth, chosen.guessing
    share = _share_with_draft(guessing, depth)
    verify_s, prepare_s = _times(batch, cost, guessing, depth)
    slope = cost.target_slowdown * cost.alone.target.slope(batch * (1 + share * depth))
    gained = expected_tokens(alpha, depth) - 1 - theta * depth * slope
    hidden = [other for other in depths if _is_hidden(_times(batch, cost, guessing, other))]
    marginal_s = max(verify_s, prepare_s) - max(_times(batch, cost, guessing, max(depth - 1, 0)))
    return Overlap(
        depth=depth,
        deepest=max(depth, *hidden) if hidden else depth,
        throughput=theta,
        raw_price=theta * marginal_s / batch,
        hit_rate=share,
        hit_after=guessing.hit,
        hit_value=max(gained, 0.0) / (1 - guessing.hit[depth] + guessing.hit[0]) if depth else 0.0,
        num_rows=share * guessing.rows[depth] + (1 - share) * guessing.rows[0] if depth else 0.0,
        exposed_s=max(prepare_s - verify_s, 0.0),
        fan_out=None if fan_out is None else min(fan_out, MAX_FAN_OUT),
        least_gain=chosen.least_gain,
    )


def _with_asking(overlap: Overlap, batch: int, alpha: float, cost: OverlapCost) -> Overlap:
    """Its throughput with what asking for the missed ones adds, where that pays.

    How many of a batch are missed in a round is binomial. The throughput and the asking that it makes worth while are found in
    turns (Dinkelbach, as in `autoscale.price`).
    """
    if overlap.depth == 0 or batch > MAX_ASKING_BATCH:
        return overlap
    tokens = batch * (overlap.hit_rate * expected_tokens(alpha, overlap.depth) + 1 - overlap.hit_rate)
    seconds = tokens / overlap.throughput
    for _ in range(ASKING_STEPS):
        more_tokens, more_s = _expected_asking(overlap, batch, alpha, cost)
        overlap = msgspec.structs.replace(overlap, throughput=(tokens + more_tokens) / (seconds + more_s))
    return overlap


def _expected_asking(overlap: Overlap, batch: int, alpha: float, cost: OverlapCost) -> tuple[float, float]:
    """Per round: (tokens gained, seconds waited)."""
    expected_gain = expected_s = 0.0
    for missed in range(1, batch + 1):
        chance = math.comb(batch, missed) * (1 - overlap.hit_rate) ** missed * overlap.hit_rate ** (batch - missed)
        if chance < 1e-3:
            continue
        survivals = [missed * alpha**position for position in range(1, overlap.depth + 1)]
        options = _ask_options(survivals, missed, batch, overlap, cost)
        tokens, seconds = max(options, key=lambda option: option[0] - overlap.throughput * option[1])
        expected_gain += chance * tokens
        expected_s += chance * seconds
    return expected_gain, expected_s
