"""What a simulation is asked: how much faster, how soon it settles, whether it flaps, how many GPUs and drafts."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import msgspec

from autoscale.cost_model import OverlapCost, RoundCost, StepCost
from autoscale.hit_rate import HitLaws
from autoscale.overlap import overlap_price_table
from autoscale.price import best_depth, price_at, price_table
from autoscale.simulator.cluster import PLAIN, Arm, Cluster, MakePolicy, Moment, Run, simulate, step_times
from autoscale.simulator.lane import Device
from autoscale.simulator.traffic import Lengths, Traffic, Users

ENDLESS = 1 << 40
"""Requests of users who never stop."""
WARM_UP_ROUNDS = 40
"""In which a lane learns its acceptance; then the measured rounds begin."""
MEASURED_ROUNDS = (50, 200)
"""At a large and at a small batch: a round of many requests tells more."""
SETTLED = 1.5
"""Draft tokens by which the depth may differ from what it comes to: it wanders by one with the estimate of the acceptance."""
WINDOW_S = 0.5
"""Over which depths are averaged when it is asked whether they have settled."""
DRAFT_SHARES = (0.0, 0.25, 0.5, 1.0, 2.0)
"""Drafts per lane that are tried."""
MAX_SAMPLE_LANES = 8
"""A split of a large cluster is tried on so many of its lanes, with their share of the traffic."""
MAX_SAMPLE_REQUESTS = 500
SAMPLE_STRIDE_S = 0.1
HELPS = 0.99
"""Twice as many lanes must bring the time of a request below this share of what it was, or more lanes do not help."""
MAX_LANES = 4096
MAX_BATCH = 4096


class Latencies(msgspec.Struct, frozen=True):
    """Over the requests that ended; seconds. NaN where there is none."""

    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    """Of the requests' mean time per token after the first."""
    request_mean_s: float
    """From arrival to the last token."""


def latencies(run: Run) -> Latencies:
    """What users see of a run."""
    first = sorted(job.first_s - job.at_s for job in run.jobs)
    between = sorted((job.end_s - job.first_s) / (job.output_tokens - 1) for job in run.jobs if job.output_tokens > 1)
    whole = [job.end_s - job.at_s for job in run.jobs]
    return Latencies(_at(first, 0.5), _at(first, 0.95), _at(between, 0.5), statistics.fmean(whole) if whole else math.nan)


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan


# --- speed-up by batch ------------------------------------------------------------------------------------------------------


def speedup_by_batch(
    cluster: Cluster, arms: Iterable[Arm], batches: Iterable[int], lengths: Lengths, *, seed: int = 0
) -> Iterator[tuple[int, str, float]]:
    """(batch, arm, speed-up): tokens per second of one lane whose ``batch`` requests decode, over those of plain decoding.

    Prompts cost nothing; a request that ends is replaced at once. Arms that follow the load are warm when it is measured.
    """
    for batch in batches:
        plain = steady_rate(cluster, PLAIN, batch, lengths, seed=seed)
        for arm in arms:
            yield batch, arm.name, steady_rate(cluster, arm, batch, lengths, seed=seed) / plain


def steady_rate(cluster: Cluster, arm: Arm, batch: int, lengths: Lengths, *, seed: int = 0) -> float:
    """Tokens per second of one lane with ``batch`` decoding requests, over some plain rounds' time after warming up."""
    lane = msgspec.structs.replace(
        cluster,
        num_lanes=1,
        num_drafts=min(cluster.num_drafts, max(cluster.num_drafts // cluster.num_lanes, 1)),
        max_batch=batch,
        cached_prompts=True,
    )
    traffic = users_traffic(batch, batch, 0.0, lengths)
    step_s = cluster.pair.target.step_s(batch, round(batch * (lengths.prompt_tokens + lengths.output_tokens / 2)))
    rounds = min(max(MEASURED_ROUNDS[1] * 8 // batch, MEASURED_ROUNDS[0]), MEASURED_ROUNDS[1])
    warm_s = WARM_UP_ROUNDS * step_s
    run = simulate(lane, traffic, arm, seed=seed, until_s=warm_s + rounds * step_s, keep_moments=True)
    first = next(moment for moment in run.moments if moment.at_s >= warm_s)
    return (run.num_tokens - first.num_tokens) / (run.seconds - first.at_s)


def users_traffic(count: int, to: int, at_s: float, lengths: Lengths) -> Traffic:
    """Users who never stop."""
    return Traffic(f"users:count={count},to={to}", users=Users(count, to, at_s), lengths=lengths, num_requests=ENDLESS)


def expected_depths(cluster: Cluster, batches: Iterable[int], lengths: Lengths) -> dict[int, int]:
    """The depth with the largest throughput of sequential rounds (`autoscale.price.best_depth`) by batch, at that context."""
    context = round(lengths.prompt_tokens + lengths.output_tokens / 2)
    return {batch: _depth_at(cluster, batch, context) for batch in batches}


def break_even_batch(cluster: Cluster, lengths: Lengths, most: int = 1 << 14) -> int | None:
    """The smallest batch at which no depth pays in sequential rounds; None if there is none up to ``most``."""
    context = round(lengths.prompt_tokens + lengths.output_tokens / 2)
    return smallest(1, most, lambda batch: _depth_at(cluster, batch, context) == 0)


def _depth_at(cluster: Cluster, batch: int, context: int) -> int:
    pair, at = cluster.pair, batch * context
    sizes = [batch * (depth + 1) for depth in range(cluster.max_depth + 1)]
    cost = RoundCost.measured(
        tuple((size, pair.target.step_s(size, at + size)) for size in sizes),
        ((batch, pair.draft.step_s(batch, at)),),
        2 * pair.hop_s,
    )
    return best_depth(batch, pair.alpha, cost, cluster.max_depth)


def smallest(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest number for which ``holds`` is true, which it stays from there on; None if it is not even for ``high``."""
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


# --- stability --------------------------------------------------------------------------------------------------------------


def settle_time_s(moments: Sequence[Moment], step_s: float, until_s: float) -> float:
    """Seconds from a step of the load until the depth stays within `SETTLED` of what it comes to.

    ``moments`` of one lane. What it comes to is its mean over the last third of the time after the step.
    """
    after = [moment for moment in moments if moment.at_s >= step_s]
    windows = list(_windows(after, step_s, until_s))
    final = statistics.fmean(depth for at_s, depth in windows if at_s >= until_s - (until_s - step_s) / 3)
    unsettled = [at_s for at_s, depth in windows if abs(depth - final) > SETTLED]
    return max(unsettled) + WINDOW_S - step_s if unsettled else 0.0


def _windows(moments: Sequence[Moment], start_s: float, until_s: float) -> Iterator[tuple[float, float]]:
    """(beginning, mean depth) of every window, each depth weighted by the time for which it held."""
    ends = [*(moment.at_s for moment in moments[1:]), until_s]
    sums: dict[int, list[float]] = {}
    for moment, end_s in zip(moments, ends, strict=True):
        index = int((moment.at_s - start_s) / WINDOW_S)
        held = sums.setdefault(index, [0.0, 0.0])
        held[0] += (end_s - moment.at_s) * moment.depth
        held[1] += end_s - moment.at_s
    yield from ((start_s + index * WINDOW_S, total / seconds) for index, (total, seconds) in sums.items() if seconds > 0)


def reversals_per_min(moments: Sequence[Moment], since_s: float, until_s: float) -> float:
    """How often per minute one lane changed from speculating to plain decoding or back."""
    states = [moment.speculates for moment in moments if since_s <= moment.at_s < until_s]
    return 60 * sum(before != after for before, after in pairwise(states)) / (until_s - since_s)


class Stability(msgspec.Struct, frozen=True):
    """How the depth behaves when the load steps up, and where it sits on the threshold."""

    settle_s: float
    """After a step of one lane from 1 to ``step_to`` users."""
    step_to: int
    reversals_per_min: float
    """At ``threshold_batch`` users, after the first seconds."""
    threshold_batch: int | None
    """Where speculation is about to stop paying, as the lane's own model has it; None where it pays at any batch."""


def stability(
    cluster: Cluster,
    arm: Arm,
    lengths: Lengths,
    *,
    step_to: int = 64,
    seconds: float = 60.0,
    seed: int = 0,
    make_policy: MakePolicy | None = None,
) -> Stability:
    """Watch one lane through a step of its load, and then at the load at which speculation just stops paying.

    Prompts cost nothing, so that it is the policy that settles and not the prefill of many prompts at once.
    """
    lane = msgspec.structs.replace(cluster, num_lanes=1, num_drafts=1, max_batch=MAX_BATCH, cached_prompts=True)
    step_s, settled_s = 5.0, 15.0
    stepped = simulate(
        lane,
        users_traffic(1, step_to, step_s, lengths),
        arm,
        seed=seed,
        until_s=step_s + settled_s,
        keep_moments=True,
        make_policy=make_policy,
    )
    threshold = threshold_batch(lane, arm, lengths)
    reversals = 0.0
    if threshold is not None:
        warm_s = 10.0
        held = simulate(
            lane,
            users_traffic(threshold, threshold, 0.0, lengths),
            arm,
            seed=seed,
            until_s=warm_s + seconds,
            keep_moments=True,
            make_policy=make_policy,
        )
        reversals = reversals_per_min(held.moments, warm_s, warm_s + seconds)
    return Stability(settle_time_s(stepped.moments, step_s, step_s + settled_s), step_to, reversals, threshold)


def threshold_batch(cluster: Cluster, arm: Arm, lengths: Lengths) -> int | None:
    """The smallest batch at which the controller's table has no depth pay; None if there is none up to 2048.

    A lane measured itself at a short context and corrects all its times alike for what longer ones take.
    """
    context = round(lengths.prompt_tokens + lengths.output_tokens / 2)
    alpha, most = cluster.pair.alpha, cluster.max_depth

    def pays_nothing(batch: int) -> bool:
        cost = RoundCost(_seen(cluster.pair.target, batch, context), _seen(cluster.pair.draft, batch, context))
        rows = price_table(alpha, cost, most)
        if arm.overlaps and price_at(rows, batch) >= alpha:
            rows = overlap_price_table(round(alpha, 2), OverlapCost(cost).rounded(), HitLaws().rounded(), most)
        return price_at(rows, batch) >= alpha

    return smallest(1, 2048, pays_nothing)


def _seen(device: Device, batch: int, context: int) -> StepCost:
    profiled = StepCost.measured(step_times(device))
    return msgspec.structs.replace(profiled, factor=device.step_s(batch, batch * context) / profiled.time(batch))


# --- how many GPUs, how many of them drafts ---------------------------------------------------------------------------------


class Split(msgspec.Struct, frozen=True):
    """GPUs divided between targets (one per lane) and drafts."""

    num_lanes: int
    num_drafts: int
    num_gpus: int


class Objective(msgspec.Struct, frozen=True):
    """What users are to see; None = whatever comes."""

    ttft_p95_s: float
    itl_p50_s: float | None = None

    def is_met(self, seen: Latencies) -> bool:
        """Whether both are kept."""
        return seen.ttft_p95_s <= self.ttft_p95_s and (self.itl_p50_s is None or seen.itl_p50_s <= self.itl_p50_s)


class Trial(msgspec.Struct, frozen=True):
    """A split, and what came of it."""

    split: Split
    latencies: Latencies
    tokens_per_s: float
    """Of the whole cluster, where only a part was simulated."""
    mean_depth: float


def splits_of(num_gpus: int, gpus_per_target: int, gpus_per_draft: int) -> list[Split]:
    """Ways to divide exactly these GPUs, as far as they go; empty where not even one target fits."""
    found = {}
    for share in DRAFT_SHARES:
        num_lanes = int(num_gpus / (gpus_per_target + share * gpus_per_draft)) or num_gpus // gpus_per_target
        spare = (num_gpus - num_lanes * gpus_per_target) // gpus_per_draft
        num_drafts = min(spare, max(round(share * num_lanes), 1)) if share else 0
        if num_lanes:
            found[num_lanes, num_drafts] = Split(
                num_lanes, num_drafts, num_lanes * gpus_per_target + num_drafts * gpus_per_draft
            )
    return list(found.values())


def try_split(cluster: Cluster, traffic: Traffic, arm: Arm, split: Split, *, seed: int = 0) -> Trial:
    """Play the traffic against a split, or a part of it against a part of a large one."""
    share = min(MAX_SAMPLE_LANES / split.num_lanes, 1.0)
    part = msgspec.structs.replace(
        cluster,
        num_lanes=min(split.num_lanes, MAX_SAMPLE_LANES),
        num_drafts=max(round(share * split.num_drafts), 1) if split.num_drafts else 0,
    )
    run = simulate(part, traffic.thinned(share, MAX_SAMPLE_REQUESTS, seed), arm, seed=seed, stride_s=SAMPLE_STRIDE_S)
    return Trial(split, latencies(run), run.tokens_per_s / share, run.mean_depth)


def gpus_needed(
    cluster: Cluster,
    traffic: Traffic,
    arm: Arm,
    objective: Objective,
    gpus_per_target: int,
    gpus_per_draft: int,
    *,
    seed: int = 0,
) -> list[Trial]:
    """For every number of drafts per lane, the fewest lanes that keep the objective; by GPUs, then by the time of a request.

    Empty where no number of lanes keeps it.
    """
    tried: dict[Split, Trial] = {}

    def attempt(num_lanes: int, share: float) -> Trial:
        num_drafts = math.ceil(share * num_lanes)
        split = Split(num_lanes, num_drafts, num_lanes * gpus_per_target + num_drafts * gpus_per_draft)
        if split not in tried:
            tried[split] = try_split(cluster, traffic, arm, split, seed=seed)
        return tried[split]

    # A lane for every request is as good as it gets.
    most = min(MAX_LANES, 2 * traffic.num_requests)
    fewest = {_fewest(partial(attempt, share=share), objective, most) for share in DRAFT_SHARES}
    kept = [trial for trial in fewest if trial is not None]
    return sorted(kept, key=lambda trial: (trial.split.num_gpus, trial.latencies.request_mean_s))


def _fewest(attempt: Callable[[int], Trial], objective: Objective, limit: int) -> Trial | None:
    """More lanes until the objective is kept, then fewer again as long as it is."""

    def is_met(num_lanes: int) -> bool:
        return objective.is_met(attempt(num_lanes).latencies)

    most = 1
    while not is_met(most):
        most *= 2
        if most > limit or attempt(most).latencies.request_mean_s > HELPS * attempt(most // 2).latencies.request_mean_s:
            return None
    fewest = smallest(most // 2 + 1, most, is_met)
    return None if fewest is None else attempt(fewest)
