"""What `outrider verify-lossless` found, and how it is told."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from deployments.lossless.checks import Arm, Divergence
from deployments.lossless.statistics import FALSE_ALARM, SETTINGS, Sampled
from engine.errors import ConfigError
from engine.types import ModelInfo

LEAST_SEEDS = 100
LEAST_TOKENS = 4
SHOWN_DIVERGENCES = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is checked."""

    quick: bool
    num_seeds: int
    num_tokens: int
    tolerance: float | None = None
    """Of near-ties where the target is not row-invariant; None = the target's own."""

    @classmethod
    def of(cls, *, quick: bool, seeds: int | None, tokens: int | None, tolerance: float | None) -> "Plan":
        """Defaults filled in; raises `ConfigError` for numbers that cannot check anything."""
        if seeds is not None and seeds < LEAST_SEEDS:
            raise ConfigError(f"--seeds must be at least {LEAST_SEEDS}, or no difference could be seen; got {seeds}")
        if tokens is not None and tokens < LEAST_TOKENS:
            raise ConfigError(f"--tokens must be at least {LEAST_TOKENS}, so that there are drafts to check; got {tokens}")
        if tolerance is not None and not 0 <= tolerance < float("inf"):
            raise ConfigError(f"--tolerance must be a number of at least 0 (a distance of logits), got {tolerance}")
        return cls(quick, seeds or (400 if quick else 2000), tokens or (22 if quick else 40), tolerance)


@dataclass(slots=True)
class Report:
    """Everything that was found."""

    info: ModelInfo
    draft: str
    tolerance: float
    exact: bool
    """Whether bits were compared, without any tolerance."""
    seconds: float = 0.0
    arms: list[Arm] = field(default_factory=list)
    control: Arm | None = None
    prompt: str = ""
    sampled: list[Sampled] = field(default_factory=list)
    sampled_control: Sampled | None = None

    @property
    def divergences(self) -> list[Divergence]:
        """Of all arms but the control."""
        return [divergence for arm in self.arms for divergence in arm.divergences]

    @property
    def problems(self) -> list[str]:
        """Why this is no pass, in words; empty = pass."""
        failed = [d for d in self.divergences if not d.tolerated]
        problems = [f"{len(failed)} texts differ from what the target says alone"] if failed else []
        problems += [f"{arm.name}: {arm.idle}, so it checked nothing" for arm in self.arms if arm.idle is not None]
        problems += [
            f"rule {s.rule} with the {s.draft} draft: p = {min(s.p_first, s.p_joint):.2g}" for s in self.sampled if not s.passes
        ]
        problems += [f"rule {s.rule}: too few seeds to compare pairs (--seeds)" for s in self.sampled if s.num_cells < 2]
        if not self.controls_found:
            problems.append("a deliberate error was not found, so the check itself is worth nothing here")
        return problems

    @property
    def controls_found(self) -> bool:
        """Whether both deliberate errors were seen."""
        matrix = self.control is not None and len(self.control.divergences) > 0
        return matrix and self.sampled_control is not None and not self.sampled_control.passes

    @property
    def near_ties_per_1000(self) -> float:
        """Tolerated divergences per thousand tokens compared."""
        tokens = sum(arm.num_tokens for arm in self.arms)
        return 1000 * sum(d.tolerated for d in self.divergences) / max(tokens, 1)


def as_object(report: Report, plan: Plan) -> dict[str, Any]:
    """The report as plain data."""
    info, control = report.info, report.sampled_control
    return {
        "verdict": "fail" if report.problems else "pass",
        "problems": report.problems,
        "seconds": round(report.seconds, 1),
        "target": {
            "name": info.name,
            "device": info.device,
            "dtype": info.dtype,
            "numerics": info.numerics,
            "row_invariant": info.row_invariant,
            "row_invariance": info.row_invariance,
        },
        "draft": report.draft,
        "plan": asdict(plan),
        "matrix": {
            "exact": report.exact,
            "tolerance": report.tolerance,
            "num_comparisons": sum(arm.num_requests for arm in report.arms),
            "num_tokens_compared": sum(arm.num_tokens for arm in report.arms),
            "near_ties_per_1000_tokens": report.near_ties_per_1000,
            "divergences": [asdict(divergence) for divergence in report.divergences],
            "arms": [_arm_object(arm) for arm in report.arms],
        },
        "statistics": {
            "prompt": report.prompt,
            "params": SETTINGS,
            "false_alarm": FALSE_ALARM,
            "num_p_values": 2 * len(report.sampled),
            "tests": [{**asdict(one), "pass": one.passes} for one in report.sampled],
        },
        "can_fail": {
            "found": report.controls_found,
            "other_seeds_diverged": len(report.control.divergences) if report.control else 0,
            "other_seeds_played": report.control.num_requests if report.control else 0,
            "biased_draft": asdict(control) if control else None,
        },
    }


def _arm_object(arm: Arm) -> dict[str, Any]:
    return {
        "name": arm.name,
        "num_comparisons": arm.num_requests,
        "num_tokens_compared": arm.num_tokens,
        "num_drafted": arm.num_drafted,
        "num_accepted": arm.num_accepted,
        "num_preempted": arm.num_preempted,
        "num_cached_tokens": arm.num_cached,
        "num_hits": arm.num_hits,
        "fallbacks": dict(arm.fallbacks),
        "num_divergences": len(arm.divergences),
    }


def verdict_line(report: Report) -> str:
    """One line: PASS or FAIL, and the numbers behind it."""
    arms, worst = report.arms, min(min(s.p_first, s.p_joint) for s in report.sampled)
    figures = (
        f"{sum(arm.num_requests for arm in arms)} texts in {len(arms)} arms, {sum(arm.num_tokens for arm in arms)} tokens "
        f"compared, {len(report.divergences)} divergences; {len(report.sampled)} statistical tests, smallest p = {worst:.2g}; "
        f"the check can fail: {'yes' if report.controls_found else 'no'}"
    )
    if report.problems:
        return f"FAIL: {'; '.join(report.problems)} ({figures})"
    return f"PASS: {figures}"


def print_tables(report: Report, console: Console) -> None:
    """Everything, for people."""
    info = report.info
    console.print(f"target {info.name}: {info.dtype} on {info.device}, numerics {info.numerics}; {info.row_invariance}")
    console.print(f"draft: {report.draft}")
    _print_arms(report.arms, console)
    rule = "ids and logprobs, zero tolerance" if report.exact else f"ids, near-ties up to a margin of {report.tolerance:g}"
    console.print(f"compared: {rule}; near-ties per 1000 tokens: {report.near_ties_per_1000:.2f}")
    _print_divergences(report.divergences, console)
    _print_samples(report, console)
    console.print(f"{report.seconds:.0f} s")


def _print_arms(arms: Sequence[Arm], console: Console) -> None:
    table = Table("same text as the target alone", "texts", "tokens", "accepted/drafted", "fallbacks", "preempted", "differ")
    for arm in arms:
        table.add_row(
            arm.name,
            str(arm.num_requests),
            str(arm.num_tokens),
            f"{arm.num_accepted}/{arm.num_drafted}" if arm.num_drafted else "-",
            ", ".join(f"{reason} {count}" for reason, count in arm.fallbacks.most_common(3)) or "-",
            str(arm.num_preempted or "-"),
            str(len(arm.divergences)),
        )
    console.print(table)


def _print_divergences(divergences: Sequence[Divergence], console: Console) -> None:
    if not divergences:
        return
    table = Table("arm", "request", "position", "what", "expected", "got", "margin", "")
    for d in divergences[:SHOWN_DIVERGENCES]:
        margin = "-" if d.margin is None else f"{d.margin:.3g}"
        ending = "near-tie" if d.tolerated else "ERROR"
        table.add_row(d.arm, d.request, str(d.position), d.what, str(d.expected), str(d.got), margin, ending)
    console.print(table)
    if len(divergences) > SHOWN_DIVERGENCES:
        console.print(f"and {len(divergences) - SHOWN_DIVERGENCES} more (--json lists all)")


def _print_samples(report: Report, console: Console) -> None:
    settings = ", ".join(f"{name}={value:g}" for name, value in SETTINGS.items())
    console.print(f"samples after '{report.prompt}' at {settings}; false alarms: {FALSE_ALARM:g} per p-value")
    table = Table("rule", "draft", "seeds", "accepted", "p, one token", "p, two tokens", "cells", "TV distance (by chance)", "")
    controls = [] if report.sampled_control is None else [report.sampled_control]
    for one in (*report.sampled, *controls):
        is_control = one is report.sampled_control
        table.add_row(
            f"control: {one.rule}" if is_control else one.rule,
            "biased" if is_control else one.draft,
            str(one.num_samples),
            "-" if one.acceptance is None else f"{one.acceptance:.0%}",
            f"{one.p_first:.3g}",
            f"{one.p_joint:.3g}",
            str(one.num_cells),
            f"{one.distance:.3f} ({one.distance_by_chance:.3f})",
            ("not found" if one.passes else "found") if is_control else ("pass" if one.passes else "FAIL"),
        )
    console.print(table)
    different = len(report.control.divergences) if report.control else 0
    console.print(f"the check can fail: {'yes' if report.controls_found else 'no'} (other seeds: {different} texts differ)")
