"""`outrider bench sources`: what each source of drafts is worth to this target, by kind of prompt and temperature.

Without speculation, and every source at a fixed depth and with the depth that follows the load, take turns on every prompt in
one process over one target.
"""

import datetime
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from autoscale.cost_model import RoundCost
from autoscale.signals import StepTimes
from deployments.bench.acceptance import DEPTH
from deployments.bench.arms import Arm, Task, engine_arm, take_turns, warm_up
from deployments.bench.engine import FULL, QUICK, Size, check_context, comparable, over_one_target, single_tasks, with_source
from deployments.bench.prompts import PROMPTS
from deployments.bench.report import quartiles, ratios_of_runs
from deployments.bench.sources_report import (
    ALL_KINDS,
    SourcesOptions,
    check_document,
    check_sources,
    print_sources,
    write_document,
)
from engine.build import LocalEngine, build_draft_model, build_free_source, draft_is_a_model, preflight
from engine.config import OutriderConfig
from engine.errors import ConfigError, ModelError
from engine.propose.base import DraftSource
from engine.scheduler import FixedDepth

console = Console(stderr=True)
EXIT_INTERRUPTED = 130
LEAST_STEPS = 5
"""Of one size: the quartile of fewer says nothing."""
CPU_FEATURES = {"AVX512": "AVX-512", "AVX2": "AVX2"}


@dataclass
class Drafted:
    """The arms of one source."""

    source: str
    fixed: Arm
    by_load: Arm


@dataclass
class Turns:
    """The arms that took turns at one temperature."""

    temperature: float
    plain: Arm
    sources: list[Drafted]

    @property
    def arms(self) -> list[Arm]:
        """All of them."""
        return [self.plain, *(arm for own in self.sources for arm in (own.fixed, own.by_load))]

    def keep_whole(self) -> None:
        """Drop the answers to a prompt that not every arm has answered."""
        num_whole = min(len(arm.runs) for arm in self.arms)
        for arm in self.arms:
            del arm.runs[num_whole:]


def run_bench_sources(config: OutriderConfig, options: SourcesOptions, *, as_json: bool) -> int:
    """Measure, print tables on stderr, write the document, and end with one JSON object on stdout, as far as asked for.

    Interrupted from the keyboard it reports the prompts that every arm has answered and returns 130. Raises `ConfigError` for
    options that mean nothing, a document that could not be written, and a context that is too short.
    """
    check_sources(config)
    names, temperatures = options.chosen(config), options.values()
    size = replace(QUICK if options.quick else FULL, num_tokens=options.num_tokens())
    if options.markdown is not None:
        check_document(options.markdown)
    config = comparable(config)
    with console.status("loading models"):
        engines, refused = build_engines(config, names)
    check_context(engines["none"], size)
    played = [_turns(engines, temperature, config) for temperature in temperatures]
    is_interrupted = _play(played, single_tasks(engines["none"], size))
    result = _result(config, engines["none"], played, size)
    result |= {"command": options.command(), "refused": refused, "is_interrupted": is_interrupted}
    print_sources(result, console)
    if options.markdown is not None:
        write_document(options.markdown, result)
    if as_json:
        print(json.dumps(result))
    return EXIT_INTERRUPTED if is_interrupted else 0


def build_engines(config: OutriderConfig, names: Sequence[str]) -> tuple[dict[str, LocalEngine], dict[str, str]]:
    """Engines over one target by source, ``none`` first; and the reasons by source that this target or device cannot have."""
    tokenizer = preflight(config)
    configs, sources, refused = {"none": with_source(config, "none")}, dict[str, DraftSource](), dict[str, str]()
    for name in names:
        try:
            own = with_source(config, name)
            if name != "heads":
                sources[name] = build_draft_model(own) if draft_is_a_model(own) else build_free_source(own)
            configs[name] = own
        except (ConfigError, ModelError) as error:
            refused[name] = str(error)
    return over_one_target(config, tokenizer, configs, sources), refused


def _turns(engines: dict[str, LocalEngine], temperature: float, config: OutriderConfig) -> Turns:
    depth = min(DEPTH, config.speculation.max_depth)

    def arm(name: str, source: str, fixed_depth: int | None) -> Arm:
        policy = None if fixed_depth is None else FixedDepth(fixed_depth)
        return engine_arm(name, 1, engines[source], policy, temperature=temperature, rule=config.speculation.rule)

    sources = [
        Drafted(name, arm(f"{name} K={depth}", name, depth), arm(f"{name} by load", name, None))
        for name in engines
        if name != "none"
    ]
    return Turns(temperature, arm("plain", "none", 0), sources)


def _play(played: Sequence[Turns], tasks: Sequence[Task]) -> bool:
    """Answer all tasks at all temperatures; whether that was interrupted."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=sum(len(turns.arms) for turns in played) * (len(tasks) + 1))
        try:
            for turns in played:

                def on_turn(arm: Arm, task: Task, temperature: float = turns.temperature) -> None:
                    progress.update(bar, description=f"T={temperature:g}, {task.kind}: {arm.name}", advance=1)

                warm_up(turns.arms, Task("warm-up", tasks[0].prompts, 8), on_turn)
                take_turns(turns.arms, tasks, on_turn)
        except KeyboardInterrupt:
            return True
        finally:
            for turns in played:
                turns.keep_whole()
    return False


# --- figures ----------------------------------------------------------------------------------------------------------------


def _result(config: OutriderConfig, engine: LocalEngine, played: Sequence[Turns], size: Size) -> dict[str, Any]:
    return {
        "model": engine.info.name,
        "dtype": engine.info.dtype,
        "machine": machine(engine.info.device),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "rule": config.speculation.rule,
        "depth": min(DEPTH, config.speculation.max_depth),
        "num_tokens": size.num_tokens,
        "rows": [row for turns in played for row in figures(turns)],
    }


def machine(device: str) -> str:
    """What computes, in words and without names."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0))
    feature = CPU_FEATURES.get(torch.backends.cpu.get_cpu_capability())
    return f"{cores} cores" + (f" with {feature}" if feature else "")


def figures(turns: Turns) -> Iterator[dict[str, Any]]:
    """One row per source and kind of prompt that was answered, and one over all kinds where all were."""
    answered = {task.kind for task, _ in turns.plain.runs}
    kinds = [kind for kind in PROMPTS if kind in answered]
    rows = [*kinds, ALL_KINDS] if len(kinds) == len(PROMPTS) else kinds
    target = target_times(turns.arms)
    for own in turns.sources if kinds else ():
        cost = RoundCost.measured(target, draft_times(own.fixed))
        for kind in rows:
            yield {"source": own.source, "temperature": turns.temperature, **_row(own, turns.plain, kind, cost)}


def target_times(arms: Sequence[Arm]) -> StepTimes:
    """(tokens, seconds) of the target's steps in all these rounds, the first quartile where there are enough of a size."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for arm in arms:
        for _, run in arm.runs:
            for size, seconds in run.verify_s:
                by_size[size].append(seconds)
    spreads = {size: quartiles(seconds) for size, seconds in by_size.items() if len(seconds) >= LEAST_STEPS}
    return tuple((size, spread[0]) for size, spread in sorted(spreads.items()) if spread is not None)


def draft_times(arm: Arm) -> StepTimes | None:
    """(rows, seconds) of a draft step; None where it took no time or there was no draft."""
    spread = quartiles([seconds for _, run in arm.runs for seconds in run.draft_step_s])
    return None if spread is None or spread[0] == 0 else ((1, spread[0]),)


def _row(own: Drafted, plain: Arm, kind: str, cost: RoundCost) -> dict[str, Any]:
    runs = [run for task, run in own.fixed.runs if kind in (ALL_KINDS, task.kind)]
    tested, kept = sum((run.tested for run in runs), Counter[int]()), sum((run.kept for run in runs), Counter[int]())
    num_rounds = max(sum(run.rounds for run in runs), 1)
    accepted_length = sum(run.num_tokens for run in runs) / num_rounds
    mean_depth = sum(run.drafted for run in runs) / num_rounds
    only = None if kind == ALL_KINDS else kind
    return {
        "kind": kind,
        "num_prompts": len(runs),
        "num_tested": tested.total(),
        "alpha": kept.total() / tested.total() if tested.total() else None,
        "alpha_by_position": [kept[j] / tested[j] for j in sorted(tested) if tested[j]],
        "accepted_length": accepted_length,
        "mean_depth": mean_depth,
        "c": cost.draft_time(1) / cost.target.time(1) if any(run.draft_step_s for _, run in own.fixed.runs) else None,
        "expected_speedup": expected_speedup(accepted_length, mean_depth, cost),
        "speedup": quartiles(ratios_of_runs(own.fixed, plain, only)),
        "speedup_by_load": quartiles(ratios_of_runs(own.by_load, plain, only)),
    }


def expected_speedup(accepted_length: float, mean_depth: float, cost: RoundCost) -> float:
    """Tokens per second over those without speculation, of rounds that draft ``mean_depth`` tokens and commit
    ``accepted_length``: ``L T(1) / (T(1 + m) + m T_draft(1))``, T by `RoundCost`, where m need not be whole.
    """
    round_s = cost.verify_time(1, 1 + mean_depth) + mean_depth * cost.draft_time(1)
    return accepted_length * cost.verify_time(1, 1) / round_s
