"""Lanes and clusters on discrete events."""

import statistics
from typing import Any

import msgspec
import pytest

from autoscale.signals import ClusterState
from autoscale.simulator import (
    ADAPTIVE,
    ARMS,
    FIXED,
    PLAIN,
    SEQUENTIAL,
    Arrival,
    Cluster,
    Lengths,
    Replicas,
    Run,
    Traffic,
    parse_traffic,
    simulate,
)
from engine.testing.profiles import parse_emulation

PAIR = parse_emulation("emulated:70b-h100?alpha=0.75", "profile")
LENGTHS = Lengths(300.0, 60.0)


def _poisson(rate: float, count: int = 120) -> Traffic:
    return parse_traffic(f"poisson:rate={rate}", count, LENGTHS, 3)


def _mean_time_s(run: Run) -> float:
    return statistics.fmean(job.end_s - job.at_s for job in run.jobs)


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_every_request_is_served_whole_and_once(arm: Any) -> None:
    """Bug guarded: rounds that commit beyond a request's end, or requests lost between an arrival and a running round."""
    traffic = _poisson(8, 60)
    run = simulate(Cluster(PAIR, num_lanes=2), traffic, arm, seed=1)
    assert sorted(int(job.id[1:]) for job in run.jobs) == list(range(len(traffic.arrivals)))
    assert all(job.done == job.output_tokens for job in run.jobs)
    assert run.num_tokens == sum(arrival.output_tokens for arrival in traffic.arrivals)
    assert all(job.at_s < job.first_s <= job.end_s for job in run.jobs)
    assert run.num_open == 0


@pytest.mark.parametrize("stride_s", [0.0, 0.2])
def test_a_run_is_a_function_of_its_seed(stride_s: float) -> None:
    """Bug guarded: order by identity or hash somewhere makes results irreproducible."""
    runs = [simulate(Cluster(PAIR), _poisson(4, 40), ADAPTIVE, seed=seed, stride_s=stride_s) for seed in (5, 5, 6)]
    times = [[(job.id, job.first_s, job.end_s) for job in run.jobs] for run in runs]
    assert times[0] == times[1] != times[2]


def test_plain_decoding_takes_the_time_of_its_steps() -> None:
    """Bug guarded: step times that do not know the context, or prefill that costs nothing."""
    run = simulate(Cluster(PAIR, prefill_tokens=200), Traffic("one", (Arrival(1.0, 300, 4),)), PLAIN)
    step_s = PAIR.target.step_s
    prefill_s = step_s(200, 200) + step_s(100, 300)
    (job,) = run.jobs
    assert job.first_s == pytest.approx(1 + prefill_s)
    assert job.end_s == pytest.approx(1 + prefill_s + step_s(1, 302) + step_s(1, 303) + step_s(1, 304))


def test_fixed_depth_takes_draft_steps_and_commits_what_is_accepted() -> None:
    """Bug guarded: drafts that cost no time or no hop; a certain draft must commit K + 1 tokens in every round."""
    pair = parse_emulation("emulated:free?step_ms=10&c=0.1&alpha=1&hop_ms=0.5&knee=1000000", "profile")
    run = simulate(Cluster(pair, cached_prompts=True), Traffic("one", (Arrival(0.0, 8, 11),)), FIXED[2])
    (job,) = run.jobs
    assert FIXED[2].depth == 4
    assert job.end_s == pytest.approx(2 * (0.010 + 4 * 0.001 + 2 * 0.0005))


def test_acceptance_is_that_of_the_pair() -> None:
    """Bug guarded: the geometric draw is off by one. E(2) = 1 + .75 + .75^2; bound: 5 standard deviations."""
    pair = parse_emulation("emulated:free?step_ms=10&c=0.1&alpha=0.75&knee=1000000", "profile")
    cluster = Cluster(pair, cached_prompts=True)
    run = simulate(cluster, Traffic("one", (Arrival(0.0, 8, 20_001),)), FIXED[1])
    rounds = run.jobs[0].end_s / 0.012
    assert 20_000 / rounds == pytest.approx(1 + 0.75 + 0.75**2, rel=0.03)


@pytest.mark.parametrize("arm", [PLAIN, SEQUENTIAL, ADAPTIVE], ids=lambda arm: str(arm.name))
def test_a_stride_hardly_changes_what_comes_out(arm: Any) -> None:
    """Bug guarded: rounds that are repeated without asking the policy lose drafts, tokens or the time of arrivals."""
    traffic = _poisson(8, 250)
    exact, coarse = (simulate(Cluster(PAIR, num_lanes=2, num_drafts=2), traffic, arm, stride_s=s) for s in (0.0, 0.3))
    assert _mean_time_s(coarse) == pytest.approx(_mean_time_s(exact), rel=0.12)
    assert coarse.mean_depth == pytest.approx(exact.mean_depth, abs=1.5)


def test_requests_go_to_the_least_loaded_lane() -> None:
    """Bug guarded: one lane gets everything while the others idle."""
    together = Traffic("burst", tuple(Arrival(0.0, 100, 50) for _ in range(12)))
    run = simulate(Cluster(PAIR, num_lanes=4), together, PLAIN)
    assert sorted(job.lane for job in run.jobs) == sorted([0, 1, 2, 3] * 3)


def test_the_batch_and_the_kv_cache_bound_who_runs() -> None:
    """Bug guarded: a lane that runs more requests than it has rows or KV cache for."""
    together = Traffic("burst", tuple(Arrival(0.0, 100, 50) for _ in range(12)))
    assert max(m.batch for m in simulate(Cluster(PAIR, max_batch=5), together, PLAIN, keep_moments=True).moments) == 5
    capacity = PAIR.target.kv_capacity_tokens
    long = Traffic("long", tuple(Arrival(0.0, capacity // 3, 50) for _ in range(4)))
    fits = Cluster(PAIR, prefill_tokens=capacity)
    assert max(m.batch for m in simulate(fits, long, PLAIN, keep_moments=True).moments) == 2


def test_users_are_kept_at_their_number() -> None:
    """Bug guarded: users who do not come back, or a step of their number that never happens."""
    traffic = parse_traffic("users:count=2,to=9,at_s=3", 10_000, LENGTHS, 0)
    run = simulate(Cluster(PAIR), traffic, PLAIN, until_s=8.0, keep_moments=True)
    assert {moment.batch for moment in run.moments if 0.1 < moment.at_s < 3} == {2}
    assert {moment.batch for moment in run.moments if moment.at_s > 3.1} == {9}
    assert run.num_open == 9
    assert run.seconds == 8.0


def test_without_drafts_nothing_is_drafted() -> None:
    """Bug guarded: a cluster without draft replicas speculates for free."""
    run = simulate(Cluster(PAIR, num_drafts=0), _poisson(4), ADAPTIVE)
    assert run.mean_depth == 0.0
    assert _mean_time_s(run) == pytest.approx(_mean_time_s(simulate(Cluster(PAIR), _poisson(4), PLAIN)), rel=1e-6)


def test_a_shared_draft_is_slower() -> None:
    """Bug guarded: one draft for a hundred lanes is as good as one for each."""
    cluster = Cluster(PAIR, num_lanes=64, num_drafts=64)
    many = _poisson(200, 600)
    shared = msgspec.structs.replace(cluster, num_drafts=1)
    times = [_mean_time_s(simulate(one, many, FIXED[2], stride_s=0.2)) for one in (cluster, shared)]
    assert times[1] > 1.2 * times[0]


def test_a_replica_policy_moves_gpus_between_lanes_and_drafts() -> None:
    """Bug guarded: a lane that goes takes its requests with it, or drafts that went are still asked."""
    seen: list[tuple[float, int]] = []

    def policy(state: ClusterState, memory: int | None, now_s: float) -> tuple[Replicas | None, int]:
        seen.append((now_s, state.num_lanes))
        calls = (memory or 0) + 1
        decisions = {8: Replicas(3, 0), 40: Replicas(1, 1)}
        return decisions.get(calls), calls

    traffic = _poisson(12, 300)
    run = simulate(Cluster(PAIR), traffic, SEQUENTIAL, keep_moments=True, replicas=policy)
    assert len(run.jobs) == 300
    assert {job.lane for job in run.jobs} == {0, 1, 2}
    assert max(moment.depth for moment in run.moments if 2.1 < moment.at_s < 10) == 0
    assert max(moment.depth for moment in run.moments if moment.at_s > 12) > 0
    assert max(lanes for _, lanes in seen) == 3
    assert {moment.lane for moment in run.moments if moment.at_s > 18} == {0}
