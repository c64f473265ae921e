"""What a simulation is asked: published curves, settling, flapping, how many GPUs and drafts.

The published figures are those of real engines; ours are of rooflines with a chosen acceptance. One figure of each source sets
the acceptance (it is not published), the others are predicted: that is what "in shape" means here.
"""

import dataclasses
import itertools

import msgspec
import pytest

from autoscale.lane_policy import LanePolicy
from autoscale.simulator import ADAPTIVE, FIXED, PLAIN, SEQUENTIAL, Arm, Cluster, Lengths, parse_traffic, simulate
from autoscale.simulator.cluster import MakePolicy, Moment, depth_policy
from autoscale.simulator.questions import (
    Objective,
    Split,
    break_even_batch,
    expected_depths,
    gpus_needed,
    reversals_per_min,
    settle_time_s,
    smallest,
    speedup_by_batch,
    splits_of,
    stability,
    try_split,
    users_traffic,
)
from autoscale.stabilise import DwellGate
from engine.scheduler import DepthPolicy
from engine.testing.profiles import Flat, parse_emulation

K3 = Arm("K=3", 3)
LENGTHS = Lengths(512.0, 128.0)


def _cluster(profile: str) -> Cluster:
    return Cluster(parse_emulation(f"emulated:{profile}", "profile"))


def _speedup(cluster: Cluster, arm: Arm, batch: int, lengths: Lengths = LENGTHS) -> float:
    ((_, _, value),) = speedup_by_batch(cluster, (arm,), (batch,), lengths)
    return value


# --- published curves -------------------------------------------------------------------------------------------------------

ILLUSION_ALPHA = 0.65
"""Set by the first figure: E(3) / (1 + 3 c) = 1.96 with the draft's c of 0.07."""


def test_70b_at_batch_1_gains_what_was_published() -> None:
    """Llama-3-70B on 4 H100, k=3: 1.96x at batch 1 (Liu et al., "Speculative Decoding: Performance or Illusion?", 2601.11580).

    Within 10 %. Bug guarded: drafts that are free, or a target whose steps grow with every verified token.
    """
    assert _speedup(_cluster(f"70b-h100?alpha={ILLUSION_ALPHA}"), K3, 1) == pytest.approx(1.96, rel=0.10)


def test_8b_at_batch_128_gains_what_was_published() -> None:
    """Llama-3.1-8B on H100 with EAGLE, k=3, GSM8K: 1.21x at batch 128 (as above). Predicted, within 15 %.

    The head reads one layer and the vocabulary's matrix, 0.74B of 8B parameters. Bug guarded: a model without arithmetic, where
    speculation pays at every batch.
    """
    pair = parse_emulation(f"emulated:8b-h100?alpha={ILLUSION_ALPHA}", "profile")
    head = Flat(0.74 / 8 * pair.target.step_s(1, 0), knee=1e9)
    cluster = Cluster(dataclasses.replace(pair, draft=head))
    assert _speedup(cluster, K3, 128) == pytest.approx(1.21, rel=0.15)


@pytest.mark.parametrize("profile", ["70b-h100", "8b-h100", "72b-h200"])
def test_fixed_depths_lose_at_a_high_load_and_following_the_load_does_not(profile: str) -> None:
    """A fixed K falls below 1 beyond the published range: vLLM's blog of October 2024 tells of 1.4x to 1.8x slower.

    Bug guarded: a loaded service that is slower with speculation than without it.
    """
    cluster = _cluster(f"{profile}?alpha={ILLUSION_ALPHA}")
    k4 = [_speedup(cluster, FIXED[2], batch) for batch in (1, 32, 128, 256)]
    assert all(later < earlier * 1.03 for earlier, later in itertools.pairwise(k4))
    assert k4[0] > 1.5
    assert 0.45 < k4[-1] < 0.8
    assert _speedup(cluster, ADAPTIVE, 256) >= 0.97


def test_72b_on_h200_with_overlap_falls_with_the_batch_as_published() -> None:
    """Qwen2.5-72B with a draft of 1.5B that drafts meanwhile, H200, HumanEval (nano-PEARL): 3.76x, 3.51x, 3.09x and 2.46x at
    batch 1, 8, 16 and 32. Batch 1 sets the acceptance (within 10 %), the others are predicted (within 15 %).

    Bug guarded: overlapped rounds that wait for the draft, or whose gain does not know the batch.
    """
    cluster = _cluster("72b-h200?alpha=0.8")
    assert _speedup(cluster, ADAPTIVE, 1) == pytest.approx(3.76, rel=0.10)
    for batch, published in ((8, 3.51), (16, 3.09), (32, 2.46)):
        assert _speedup(cluster, ADAPTIVE, batch) == pytest.approx(published, rel=0.15)


def test_long_contexts_keep_speculation_profitable() -> None:
    """At 64 requests on H200 a context of 16k reads so much KV that K=4 still pays, where it hardly does at 512 (MagicDec,
    2408.11049: speed-ups that rise with the batch, for long contexts and a draft that is cheap there).

    The draft must be cheap there too: here eight replicas share its rows. Bug guarded: step times without the context.
    """
    cluster = msgspec.structs.replace(_cluster("70b-h200?alpha=0.75"), num_drafts=8)
    short = _speedup(cluster, FIXED[2], 128)
    long = _speedup(cluster, FIXED[2], 64, Lengths(16_000.0, 128.0, 0.0))
    assert short < 1.2
    assert long > 1.8


# --- stability --------------------------------------------------------------------------------------------------------------


def _without_gate(cluster: Cluster, arm: Arm) -> DepthPolicy:
    policy = depth_policy(cluster, arm)
    assert isinstance(policy, LanePolicy)
    policy._gate = DwellGate(0.0, margin=0.0, great_margin=0.0)
    policy._catch_up.note = lambda report: None
    return policy


def test_the_gate_keeps_the_depth_from_flapping() -> None:
    """Bug guarded: a lane at the load where speculation just stops paying goes on and off with every noisy estimate.

    Negative control: the same lane without hysteresis, dwell and a price for catching up.
    """
    cluster = _cluster("free?step_ms=10&c=0.05&alpha=0.7&knee=32")
    gated = stability(cluster, SEQUENTIAL, Lengths(), seconds=30)
    loose = stability(cluster, SEQUENTIAL, Lengths(), seconds=30, make_policy=_without_gate)
    assert gated.threshold_batch == loose.threshold_batch is not None
    assert loose.reversals_per_min > 60
    assert gated.reversals_per_min <= 2
    assert gated.settle_s <= 2.0


def test_reversals_are_counted_per_minute() -> None:
    """Bug guarded: changes before the watch began are counted, or a minute of another length."""
    moments = [Moment(float(at_s), 0, 8, 0, 1.0, at_s in {0, 2, 12, 13}) for at_s in range(20)]
    assert reversals_per_min(moments, 10.0, 20.0) == pytest.approx(2 * 6)
    assert reversals_per_min(moments, 14.0, 20.0) == 0


def test_the_depth_has_settled_when_it_stays_near_its_last_value() -> None:
    """Bug guarded: the first visit to the last value is taken for settling, though the depth leaves it again."""
    depths = [8.0] * 10 + [2.0] * 10 + [6.0] * 10 + [2.0] * 70
    moments = [Moment(5 + 0.1 * index, 0, 8, 0, depth, True) for index, depth in enumerate(depths)]
    assert settle_time_s(moments, 5.0, 15.0) == pytest.approx(3.0, abs=0.51)
    assert settle_time_s(moments[30:], 8.0, 15.0) == 0.0


# --- how many GPUs ----------------------------------------------------------------------------------------------------------


def test_splits_use_the_gpus_that_there_are() -> None:
    """Bug guarded: more GPUs than were given, a target without all of its GPUs, or drafts that nobody has."""
    splits = splits_of(9, 4, 1)
    assert Split(2, 0, 8) in splits
    assert Split(2, 1, 9) in splits
    assert all(split.num_gpus <= 9 and split.num_gpus == 4 * split.num_lanes + split.num_drafts for split in splits)
    assert splits_of(4, 4, 1) == [Split(1, 0, 4)]
    assert splits_of(3, 4, 1) == []
    assert all(990 <= split.num_gpus <= 1000 for split in splits_of(1000, 4, 1))


def test_at_a_low_load_drafts_are_better_and_at_a_high_load_targets() -> None:
    """Bug guarded: an answer that does not depend on the traffic (issue: low load one target and one draft, high load two)."""
    pair = parse_emulation("emulated:free?step_ms=20&c=0.1&alpha=0.8&knee=64", "profile")
    cluster, lengths = Cluster(pair, max_batch=128), Lengths(64.0, 64.0)
    for rate, drafts_win in ((2, True), (60, False)):
        traffic = parse_traffic(f"poisson:rate={rate}", 300, lengths, 0)
        draft, targets = (try_split(cluster, traffic, ADAPTIVE, split) for split in (Split(1, 1, 2), Split(2, 0, 2)))
        assert (draft.latencies.request_mean_s < targets.latencies.request_mean_s) is drafts_win


def test_more_traffic_needs_more_gpus() -> None:
    """Bug guarded: a search that stops at the first cluster it looks at, or returns one that does not keep the objective."""
    pair = parse_emulation("emulated:free?step_ms=20&c=0.1&alpha=0.8&knee=64", "profile")
    cluster, objective = Cluster(pair, max_batch=64), Objective(0.3)
    needed = []
    for rate in (5, 40, 160):
        traffic = parse_traffic(f"poisson:rate={rate}", 200, Lengths(64.0, 64.0), 0)
        trials = gpus_needed(cluster, traffic, PLAIN, objective, 1, 1)
        assert all(objective.is_met(trial.latencies) for trial in trials)
        needed.append(trials[0].split.num_gpus)
    assert needed[0] == 1
    assert needed[0] < needed[1] < needed[2]


def test_the_best_depth_falls_with_the_batch_to_none() -> None:
    """Bug guarded: a table of depths that does not know the batch, or a break-even that contradicts it."""
    cluster = _cluster("70b-h100")
    depths = expected_depths(cluster, (1, 16, 64, 128, 1024), Lengths())
    assert list(depths.values()) == sorted(depths.values(), reverse=True)
    assert depths[1] > 4
    assert depths[1024] == 0
    limit = break_even_batch(cluster, Lengths())
    assert limit is not None
    around = expected_depths(cluster, (limit - 1, limit), Lengths())
    assert around[limit - 1] > 0 == around[limit]


def test_the_smallest_number_is_found() -> None:
    """Bug guarded: bisection that is off by one at either end."""
    for wanted in range(1, 9):
        assert smallest(1, 8, lambda number, wanted=wanted: number >= wanted) == wanted  # type: ignore[misc]
    assert smallest(1, 8, lambda number: False) is None


# --- prompts ----------------------------------------------------------------------------------------------------------------

SHORT = Lengths(60.0, 36.0, 0.3)
"""So short answers that prompts are most of the work."""


def _rate_beside_prompts(arm: Arm, users: int, make_policy: MakePolicy | None = None) -> float:
    cluster = _cluster("free?step_ms=200&c=0.1&alpha=0.8&recovery=0.7&bonus=0.9&knee=256")
    cluster = msgspec.structs.replace(cluster, max_batch=256)
    run = simulate(
        cluster, users_traffic(users, users, 0.0, SHORT), arm, until_s=60.0, keep_moments=True, make_policy=make_policy
    )
    first = next(moment for moment in run.moments if moment.at_s >= 15.0)
    return (run.num_tokens - first.num_tokens) / (run.seconds - first.at_s)


def _without_trim(cluster: Cluster, arm: Arm) -> DepthPolicy:
    policy = depth_policy(cluster, arm)
    assert isinstance(policy, LanePolicy)
    policy.trim = lambda depths, *others: depths
    return policy


@pytest.mark.parametrize("users", [64, 256])
def test_beside_many_prompts_adaptive_is_as_good_as_the_best_fixed_depth(users: int) -> None:
    """Bug guarded: drafts priced as if the forward held nothing else: 0.78 of no speculation at 256 users, 0.88 of K=1 at 64.

    Negative control: the same without trimming.
    """
    best = max(_rate_beside_prompts(arm, users) for arm in (PLAIN, Arm("K=1", 1), Arm("K=2", 2)))
    assert _rate_beside_prompts(ADAPTIVE, users) >= 0.96 * best
    if users == 256:
        assert _rate_beside_prompts(ADAPTIVE, users, _without_trim) < 0.9 * best
