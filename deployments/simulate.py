"""`outrider simulate`: the service's own policies on devices and traffic that are not here."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from autoscale.simulator import ADAPTIVE, FIXED, PLAIN, SEQUENTIAL, Arm, Cluster, Lengths, Traffic, parse_traffic, simulate
from autoscale.simulator.questions import (
    Objective,
    Split,
    Stability,
    Trial,
    break_even_batch,
    expected_depths,
    gpus_needed,
    latencies,
    speedup_by_batch,
    splits_of,
    stability,
    try_split,
)
from deployments.bench.plot import check_plot_file, draw_simulation
from engine.config import checked_number
from engine.errors import ConfigError
from engine.testing.profiles import PREFIX, Timed, parse_emulation

console = Console(stderr=True)
T = TypeVar("T")
COMPARED = (*FIXED, SEQUENTIAL, ADAPTIVE)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EXACT_REQUESTS, COARSE_REQUESTS = 1000, 10_000
"""Up to the first, a lane asks its policy before every round; up to the second every `MEDIUM_S`, beyond every `COARSE_S`."""
MEDIUM_S, COARSE_S = 0.1, 0.5
WORTH_TELLING = 0.8
"""Another division is mentioned where a request takes less than this share of its time there."""


@dataclass(frozen=True)
class Plan:
    """What was asked for, checked."""

    cluster: Cluster
    """Without numbers of lanes and drafts."""
    profile: str
    traffic: Traffic
    lengths: Lengths
    objective: Objective
    gpus: int | None
    gpus_per_target: int
    gpus_per_draft: int
    seed: int
    plot: Path | None

    @property
    def stride_s(self) -> float:
        """As of `simulate`, for the whole traffic."""
        if self.traffic.num_requests <= EXACT_REQUESTS:
            return 0.0
        return MEDIUM_S if self.traffic.num_requests <= COARSE_REQUESTS else COARSE_S


def read_plan(parsed: argparse.Namespace) -> Plan:
    """Check the command's arguments. Raises `ConfigError` that names the one that is wrong and the fix."""
    pair = parse_emulation(PREFIX + parsed.profile, "--profile")
    requests = _integer("--requests", parsed.requests, 1, 10_000_000)
    seed = _integer("--seed", parsed.seed, 0, (1 << 32) - 1)
    lengths = Lengths(
        _integer("--prompt-tokens", parsed.prompt_tokens, 1, 1_000_000),
        _integer("--output-tokens", parsed.output_tokens, 2, 1_000_000),
        checked_number("--spread", parsed.spread, lambda v: 0 <= v <= 5, "a number from 0 to 5"),
    )
    ttft_ms = checked_number("--max-ttft-ms", parsed.max_ttft_ms, lambda v: v > 0, "a number of milliseconds above 0")
    itl_s = None
    if parsed.max_itl_ms is not None:
        itl_s = checked_number("--max-itl-ms", parsed.max_itl_ms, lambda v: v > 0, "a number of milliseconds above 0") / 1e3
    if parsed.plot is not None:
        check_plot_file(parsed.plot)
    plan = Plan(
        cluster=Cluster(
            pair,
            max_batch=_integer("--max-batch", parsed.max_batch, 1, 4096),
            max_depth=_integer("--max-depth", parsed.max_depth, 1, 64),
            dwell_s=checked_number("--dwell-s", parsed.dwell_s, lambda v: 0 <= v <= 3600, "a number of seconds from 0 to 3600"),
        ),
        profile=parsed.profile,
        traffic=parse_traffic(parsed.traffic, requests, lengths, seed),
        lengths=lengths,
        objective=Objective(ttft_ms / 1e3, itl_s),
        gpus=None if parsed.gpus is None else _integer("--gpus", parsed.gpus, 1, 100_000),
        gpus_per_target=_gpus(pair.target),
        gpus_per_draft=_gpus(pair.draft),
        seed=seed,
        plot=parsed.plot,
    )
    _check_fits(plan)
    return plan


def _integer(field: str, text: str, low: int, high: int) -> int:
    return int(checked_number(field, text, lambda v: v == int(v) and low <= v <= high, f"an integer from {low} to {high}"))


def _gpus(device: Timed) -> int:
    """A device whose times were chosen is one GPU."""
    return int(getattr(device, "num_gpus", 1))


def _check_fits(plan: Plan) -> None:
    if plan.gpus is not None and plan.gpus < plan.gpus_per_target:
        raise ConfigError(
            f"--gpus {plan.gpus}: a target of {plan.profile} needs {plan.gpus_per_target} GPUs; give at least as many"
        )
    longest = plan.lengths.prompt_tokens + plan.lengths.output_tokens
    if plan.traffic.arrivals:
        longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in plan.traffic.arrivals)
    capacity = plan.cluster.pair.target.kv_capacity_tokens
    if longest > capacity:
        raise ConfigError(
            f"--prompt-tokens and --output-tokens: a request of {longest:.0f} tokens does not fit into the KV cache of "
            f"{plan.profile} ({capacity} tokens); make requests shorter"
        )


def run_simulate(plan: Plan, *, as_json: bool) -> int:
    """Simulate, print tables on stderr and, if asked, one JSON object as the last line of stdout, else a one-line answer."""
    with Progress(console=console) as progress:
        speedups = _speedups(plan, progress)
        steadiness = _with_task(progress, "stability", lambda: stability(plan.cluster, ADAPTIVE, plan.lengths, seed=plan.seed))
        trials = _with_task(progress, "GPUs and drafts", lambda: _trials(plan))
        best = _best(plan, trials)
        arms = _arms(plan, best.split, progress) if best is not None else []
    result = _summary(plan, speedups, steadiness, trials, best, arms)
    _print_tables(plan, result)
    if plan.plot is not None:
        draw_simulation(plan.plot, result["arms_by_batch"], result["splits"], f"simulated: {plan.profile}")
    print(json.dumps(result) if as_json else result["answer"])
    return 0


# --- what is simulated ------------------------------------------------------------------------------------------------------


def _speedups(plan: Plan, progress: Progress) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {arm.name: {} for arm in COMPARED}
    task = progress.add_task("speed-up by batch", total=len(BATCHES) * len(COMPARED))
    for batch, name, speedup in speedup_by_batch(plan.cluster, COMPARED, BATCHES, plan.lengths, seed=plan.seed):
        found[name][batch] = speedup
        progress.advance(task)
    return found


def _with_task(progress: Progress, what: str, work: Callable[[], T]) -> T:
    task = progress.add_task(what, total=None)
    result = work()
    progress.update(task, total=1, completed=1)
    return result


def _trials(plan: Plan) -> list[Trial]:
    per_target, per_draft = plan.gpus_per_target, plan.gpus_per_draft
    if plan.gpus is None:
        return gpus_needed(plan.cluster, plan.traffic, ADAPTIVE, plan.objective, per_target, per_draft, seed=plan.seed)
    splits = splits_of(plan.gpus, per_target, per_draft)
    trials = [try_split(plan.cluster, plan.traffic, ADAPTIVE, split, seed=plan.seed) for split in splits]
    return sorted(trials, key=lambda trial: trial.latencies.request_mean_s)


def _best(plan: Plan, trials: list[Trial]) -> Trial | None:
    """With given GPUs one that keeps the objectives if any does; the list is in order of merit."""
    keeping = [trial for trial in trials if plan.objective.is_met(trial.latencies)]
    return next(iter(keeping or trials), None)


def _arms(plan: Plan, split: Split, progress: Progress) -> list[dict[str, Any]]:
    """The whole traffic on the chosen split with adaptive depth; the other arms on the part that the splits were tried on."""
    cluster = msgspec.structs.replace(plan.cluster, num_lanes=split.num_lanes, num_drafts=split.num_drafts)
    task = progress.add_task(f"{plan.traffic.num_requests} requests, {split.num_gpus} GPUs", total=1.0)
    run = simulate(cluster, plan.traffic, ADAPTIVE, seed=plan.seed, stride_s=plan.stride_s, progress=_follow(progress, task))
    progress.update(task, completed=1.0)
    whole = Trial(split, latencies(run), run.tokens_per_s, run.mean_depth)
    others: list[Arm] = [PLAIN, *FIXED, SEQUENTIAL] if split.num_drafts else [PLAIN]
    rows = [_arm_row(arm.name, try_split(plan.cluster, plan.traffic, arm, split, seed=plan.seed), plan) for arm in others]
    return [*rows, {**_arm_row(ADAPTIVE.name, whole, plan), "requests": len(run.jobs), "seconds": round(run.seconds, 2)}]


def _follow(progress: Progress, task: TaskID) -> Callable[[float], None]:
    return lambda share: progress.update(task, completed=share)


# --- what is told -----------------------------------------------------------------------------------------------------------


def _summary(
    plan: Plan,
    speedups: dict[str, dict[int, float]],
    steadiness: Stability,
    trials: list[Trial],
    best: Trial | None,
    arms: list[dict[str, Any]],
) -> dict[str, Any]:
    by_arm = {name: {str(batch): round(value, 3) for batch, value in row.items()} for name, row in speedups.items()}
    return {
        "profile": plan.profile,
        "emulated": True,
        "traffic": plan.traffic.name,
        "requests": plan.traffic.num_requests,
        "seed": plan.seed,
        "settle_s": round(steadiness.settle_s, 3),
        "reversals_per_min": round(steadiness.reversals_per_min, 3),
        "step_to": steadiness.step_to,
        "threshold_batch": steadiness.threshold_batch,
        "speedup_by_batch": by_arm[ADAPTIVE.name],
        "arms_by_batch": by_arm,
        "depth_by_batch": {str(b): depth for b, depth in expected_depths(plan.cluster, BATCHES, plan.lengths).items()},
        "break_even_batch": break_even_batch(plan.cluster, plan.lengths),
        "splits": [_trial_row(trial, plan) for trial in trials],
        "chosen": None if best is None else _trial_row(best, plan),
        "arms": arms,
        "asked_every_s": plan.stride_s,
        "answer": _answer(plan, best, trials, arms),
    }


def _trial_row(trial: Trial, plan: Plan) -> dict[str, Any]:
    split = trial.split
    return {"gpus": split.num_gpus, "lanes": split.num_lanes, "drafts": split.num_drafts, **_figures(trial, plan)}


def _arm_row(name: str, trial: Trial, plan: Plan) -> dict[str, Any]:
    return {"arm": name, **_figures(trial, plan)}


def _figures(trial: Trial, plan: Plan) -> dict[str, Any]:
    seen = trial.latencies
    return {
        "tokens_per_s": round(trial.tokens_per_s, 1),
        "ttft_p50_s": _rounded(seen.ttft_p50_s),
        "ttft_p95_s": _rounded(seen.ttft_p95_s),
        "itl_p50_s": _rounded(seen.itl_p50_s),
        "request_mean_s": _rounded(seen.request_mean_s),
        "mean_depth": round(trial.mean_depth, 2),
        "keeps_objectives": plan.objective.is_met(seen),
    }


def _rounded(seconds: float) -> float | None:
    return round(seconds, 5) if math.isfinite(seconds) else None


def _answer(plan: Plan, best: Trial | None, trials: list[Trial], arms: list[dict[str, Any]]) -> str:
    if best is None:
        return f"no cluster of {plan.profile} that was tried keeps the objectives: allow longer times or send less traffic"
    kept = "" if plan.objective.is_met(best.latencies) else " (no division of them keeps the objectives)"
    told = f"{_in_words(best.split)}{kept}: mean depth {arms[-1]['mean_depth']:.1f}, a request takes {_seconds(arms[-1])} s"
    if best.split.num_drafts:
        told += f", without speculation on the same targets {_seconds(arms[0])} s"
    fastest = min(trials, key=lambda trial: trial.latencies.request_mean_s)
    if fastest.latencies.request_mean_s < WORTH_TELLING * best.latencies.request_mean_s:
        told += f"; {_in_words(fastest.split)}: {fastest.latencies.request_mean_s:.2f} s"
    return told


def _in_words(split: Split) -> str:
    targets = f"{split.num_lanes} target{'s' * (split.num_lanes != 1)}"
    drafts = f"{split.num_drafts} draft{'s' * (split.num_drafts != 1)}" if split.num_drafts else "no draft"
    return f"{split.num_gpus} GPU{'s' * (split.num_gpus != 1)} as {targets} and {drafts}"


def _seconds(row: dict[str, Any]) -> str:
    return "-" if row["request_mean_s"] is None else f"{row['request_mean_s']:.2f}"


def _print_tables(plan: Plan, result: dict[str, Any]) -> None:
    console.print(_speedup_table(result))
    console.print(
        _trial_table(
            "targets + drafts", [(f"{row['lanes']} + {row['drafts']} = {row['gpus']} GPUs", row) for row in result["splits"]]
        )
    )
    console.print(_trial_table("arm", [(row["arm"], row) for row in result["arms"]]))
    limit, threshold = result["break_even_batch"], result["threshold_batch"]
    console.print(
        f"sequential rounds pay {'at every batch' if limit is None else f'below {limit} requests per lane'} at this context; "
        f"after a step from 1 to {result['step_to']} users the depth settles within {result['settle_s']:.1f} s"
    )
    if threshold is not None:
        console.print(
            f"with {threshold} users in a lane, where speculation is about to stop paying, it goes on or off "
            f"{result['reversals_per_min']:.1f} times a minute"
        )
    console.print(
        "step times are rooflines of data sheets (85 % of the bandwidth, 65 % of the FLOPS), so real devices are slower; "
        f"splits and fixed arms are played by up to 8 lanes and 500 requests. {plan.traffic.name}, seed {plan.seed}"
    )


def _speedup_table(result: dict[str, Any]) -> Table:
    names = list(result["arms_by_batch"])
    table = Table("requests", *names, "best K", title="tokens/s of one lane over no speculation")
    for batch, depth in result["depth_by_batch"].items():
        table.add_row(batch, *(f"{result['arms_by_batch'][name][batch]:.2f}" for name in names), str(depth))
    return table


def _trial_table(first: str, rows: list[tuple[str, dict[str, Any]]]) -> Table:
    table = Table(
        first, "tokens/s", "TTFT ms", "p95", "ITL ms", "request s", "mean K", "kept", title="times: p50, mean of requests"
    )
    for name, row in rows:
        table.add_row(
            name,
            f"{row['tokens_per_s']:.0f}",
            _ms(row["ttft_p50_s"]),
            _ms(row["ttft_p95_s"]),
            _ms(row["itl_p50_s"]),
            _seconds(row),
            f"{row['mean_depth']:.1f}",
            "yes" if row["keeps_objectives"] else "no",
        )
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
