"""`outrider verify-lossless`: the promise, checked on the user's own pair. In this process, through the router's own rounds."""

import json
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress

from deployments.bench.prompts import PROMPTS
from deployments.lossless.checks import Matrix, make_requests
from deployments.lossless.reference import LogitsOf, target_logits
from deployments.lossless.report import Plan, Report, as_object, print_tables, verdict_line
from deployments.lossless.statistics import PREFIXES, Statistics, exact_distribution
from engine.build import LocalEngine, build_local_engine
from engine.config import OutriderConfig
from engine.errors import ConfigError
from engine.propose.base import DraftSource
from engine.verify.base import TargetModel

console = Console(stderr=True)
QUICK_PROMPT_TOKENS = 80


def run_verify_lossless(config: OutriderConfig, plan: Plan, *, as_json: bool) -> int:
    """Check, print tables on stderr and the verdict on stdout. Returns the exit code: 0 pass, 1 fail.

    Raises `ConfigError` for a tolerance where none applies.
    """
    with console.status("loading models"):
        engine = build_local_engine(config)
    report = _verify_engine(engine, plan, config)
    print_tables(report, console)
    print(json.dumps(as_object(report, plan)) if as_json else verdict_line(report))
    return 1 if report.problems else 0


def _verify_engine(engine: LocalEngine, plan: Plan, config: OutriderConfig) -> Report:
    prefixes = {text: ids for text in PREFIXES if (ids := engine.encode(text, chat=False))}
    return verify(
        engine.target,
        engine.source,
        _prompts(engine, plan),
        prefixes,
        target_logits(engine.target),
        engine.target.near_tie_tolerance,
        plan,
        engine.target.forget_prefixes if config.target.prefix_cache else None,
    )


def _prompts(engine: LocalEngine, plan: Plan) -> dict[str, list[int]]:
    """A short one and a long one, which is cut in quick runs; otherwise one between them, too."""
    chat = not plan.quick and engine.tokenizer.chat_template is not None
    prompts = {kind: engine.encode(texts[0], chat=chat) for kind, texts in PROMPTS.items()}
    by_length = sorted(prompts, key=lambda kind: len(prompts[kind]))
    if plan.quick:
        return {kind: prompts[kind][:QUICK_PROMPT_TOKENS] for kind in (by_length[0], by_length[-1])}
    return {kind: prompts[kind] for kind in (by_length[0], by_length[1], by_length[-1])}


def verify(
    target: TargetModel,
    source: DraftSource | None,
    prompts: dict[str, list[int]],
    prefixes: dict[str, list[int]],
    logits_of: LogitsOf,
    near_tie_tolerance: float,
    plan: Plan,
    forget_prefixes: Callable[[], None] | None = None,
) -> Report:
    """Play the matrix on ``prompts`` and the statistical test on one of the ``prefixes``.

    ``forget_prefixes`` empties the target's prefix cache, if it has one.

    Raises `ConfigError` when the plan brings a tolerance although the target is row-invariant, or has no room for its tokens.
    """
    exact = bool(target.info.row_invariant)
    if exact and plan.tolerance is not None:
        raise ConfigError(
            "--tolerance: this target is row-invariant, so every difference is an error and none is a near-tie; leave it out"
        )
    if plan.num_tokens + 2 > min(target.info.max_context, target.info.kv_capacity_tokens) // 2:
        raise ConfigError(f"--tokens {plan.num_tokens} is too much for a context of {target.info.max_context} tokens")
    started_s = time.perf_counter()
    tolerance = near_tie_tolerance if plan.tolerance is None else plan.tolerance
    report = Report(target.info, source.name if source else "none", 0.0 if exact else tolerance, exact)
    requests = make_requests(prompts, plan.num_tokens, target.info)
    matrix = Matrix(
        target, source, requests, logits_of, exact=exact, tolerance=report.tolerance, forget_prefixes=forget_prefixes
    )
    with Progress(console=console, transient=True) as progress:
        _run_matrix(matrix, report, progress, plan)
        _run_statistics(target, source, prefixes, logits_of, report, progress, plan)
    report.seconds = time.perf_counter() - started_s
    return report


def _run_matrix(matrix: Matrix, report: Report, progress: Progress, plan: Plan) -> None:
    task = progress.add_task("the target alone", total=None)
    matrix.play_reference()
    report.arms = list(matrix.arms(quick=plan.quick))
    report.control = matrix.control()
    progress.update(task, total=len(report.arms) + 1)
    for arm in (*report.arms, report.control):
        progress.update(task, description=arm.name)
        matrix.run(arm)
        progress.advance(task)


def _run_statistics(
    target: TargetModel,
    source: DraftSource | None,
    prefixes: dict[str, list[int]],
    logits_of: LogitsOf,
    report: Report,
    progress: Progress,
    plan: Plan,
) -> None:
    task = progress.add_task("exact probabilities", total=None)
    report.prompt, exact = exact_distribution(prefixes, logits_of)
    statistics = Statistics(target, exact, plan.num_seeds, row_invariant=report.exact)
    tests = statistics.tests(source, quick=plan.quick)
    progress.update(task, total=len(tests) + 1)
    for name, sample in tests:
        progress.update(task, description=f"samples: {name}")
        report.sampled.append(sample())
        progress.advance(task)
    progress.update(task, description="samples: control")
    report.sampled_control = statistics.control()
    progress.advance(task)
