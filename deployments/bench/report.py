"""From the runs of `outrider bench engine` to its figures, and to tables."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from deployments.bench.arms import Arm, Run
from deployments.bench.floor import Curve, RoundParts
from deployments.bench.prompts import PROMPTS
from engine.config import MODEL_SOURCES
from engine.types import ModelInfo

CONTINUOUS = "transformers continuous batching"
ASSISTED = ("transformers assisted", "transformers prompt lookup")
Quartiles = tuple[float, float, float]


@dataclass
class Measured:
    """Everything that a run of the benchmark saw."""

    info: ModelInfo
    """Of the target."""
    source: str
    """``draft.source`` as configured: it is the one that is held against assisted generation."""
    threads: int
    weight_bytes: int | None
    """Bytes of weights that a step of one token must read."""
    arms: list[Arm]
    bandwidths: list[float] = field(default_factory=list)
    """Bytes per second, one beside every run of plain decoding at batch 1."""
    curve: Curve = field(default_factory=lambda: Curve(0, ()))
    round_parts: list[RoundParts] = field(default_factory=list)
    cost_ratio: float | None = None
    """c: a step of the draft model, in steps of the target, one row each."""

    def arm(self, name: str, batch: int = 1) -> Arm | None:
        """The arm of this name and batch, if it was measured."""
        return next((arm for arm in self.arms if (arm.name, arm.batch) == (name, batch) and arm.runs), None)


def quartiles(values: Sequence[float]) -> Quartiles | None:
    """First quartile, median and third quartile; None of nothing. Never outside the values."""
    if len(values) < 2:
        return (values[0], values[0], values[0]) if values else None
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def ratios_of_runs(arm: Arm | None, base: Arm | None, kind: str | None = None) -> list[float]:
    """Tokens per second of ``arm`` over those of ``base``, task by task; empty when one of the two was not measured."""
    if arm is None or base is None:
        return []
    pairs = zip(arm.runs, base.runs, strict=True)
    return [mine.tokens_per_s / theirs.tokens_per_s for (task, mine), (_, theirs) in pairs if kind in (None, task.kind)]


def ratios_to_best(arm: Arm | None, others: Sequence[Arm]) -> list[float]:
    """Tokens per second of ``arm`` over those of the best of ``others``, kind by kind, each the total over its tasks."""
    if arm is None or not others:
        return []
    return [
        _speed(arm, kind) / max(_speed(other, kind) for other in others) for kind in dict.fromkeys(t.kind for t, _ in arm.runs)
    ]


def _speed(arm: Arm, kind: str) -> float:
    runs = [run for task, run in arm.runs if task.kind == kind]
    return sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs)


def floor_shares(measured: Measured) -> list[float]:
    """Time of reading the weights once over the time of a decoding round of one stream, per run.

    The KV cache, which a step reads too, is left out: the share is a little understated.
    """
    plain = measured.arm("plain")
    if measured.weight_bytes is None or plain is None:
        return []
    pairs = zip(plain.runs, measured.bandwidths, strict=True)
    return [measured.weight_bytes / rate / statistics.median(run.decode_s) for (_, run), rate in pairs]


def all_ratios(measured: Measured) -> dict[str, list[float]]:
    """Every ratio by name, as the values that it is the median of."""
    arm = measured.arm
    plain, transformers = arm("plain"), arm("transformers")
    assisted = next((found for name in ASSISTED if (found := arm(name)) is not None), None)
    configured = None if measured.source == "none" else arm(f"{measured.source} auto")
    ratios = {
        "plain_vs_transformers_b1": ratios_of_runs(plain, transformers),
        "floor_share_b1": floor_shares(measured),
        "plain_vs_continuous_batching_b16": ratios_of_runs(arm("plain", 16), arm(CONTINUOUS, 16)),
        "plain_vs_continuous_batching_b64": ratios_of_runs(arm("plain", 64), arm(CONTINUOUS, 64)),
        "verify4_vs_1": measured.curve.ratios(4),
        "verify8_vs_1": measured.curve.ratios(8),
        "ngram_edit_vs_plain": ratios_of_runs(arm("ngram auto"), plain, "editing"),
        "suffix_edit_vs_plain": ratios_of_runs(arm("suffix auto"), plain, "editing"),
        "suffix_agent_vs_plain": ratios_of_runs(arm("suffix auto"), plain, "agent"),
        "suffix_open_vs_plain": ratios_of_runs(arm("suffix auto"), plain, "open"),
        "self_int8_vs_plain": ratios_of_runs(arm("self-int8 auto"), plain),
        "draft_vs_assisted": ratios_of_runs(configured, assisted),
        "python_ms_per_step_b64": [parts.outside_s * 1e3 for parts in measured.round_parts],
        "draft_vs_plain": ratios_of_runs(arm("model auto"), plain),
        "assisted_vs_transformers": ratios_of_runs(assisted, transformers),
        "plain_vs_continuous_batching_b4": ratios_of_runs(arm("plain", 4), arm(CONTINUOUS, 4)),
        "plain_vs_transformers_b4": ratios_of_runs(arm("plain", 4), arm("transformers", 4)),
        "plain_vs_transformers_b16": ratios_of_runs(arm("plain", 16), arm("transformers", 16)),
    }
    for mixed in (own for own in measured.arms if "+" in own.name and own.batch == 1 and own.runs):
        single = [arm(f"{name} auto") for name in mixed.name.removesuffix(" auto").split("+")]
        ratios["choice_vs_best_source"] = ratios_to_best(mixed, [own for own in single if own is not None])
    drafting = [own.name for own in measured.arms if own.name.endswith("auto") or " K=" in own.name]
    ratios |= {f"{name} vs plain": ratios_of_runs(arm(name), plain) for name in drafting if not name.startswith("http")}
    return ratios | _http_ratios(measured)


def _http_ratios(measured: Measured) -> dict[str, list[float]]:
    off = measured.arm("http off")
    if off is None:
        return {}
    source = measured.source if measured.source in MODEL_SOURCES else "self-int8"
    on, name = measured.arm(f"http {source} auto"), source.replace("-", "_")
    return {
        "http_off_vs_in_process": ratios_of_runs(off, measured.arm("plain beside the server")),
        f"http_{name}_vs_in_process": ratios_of_runs(on, measured.arm(f"{source} auto beside the server")),
        f"http_{name}_vs_http_off": ratios_of_runs(on, off),
    }


def greedy_texts_equal(arms: Sequence[Arm]) -> bool:
    """Whether the engine's arms gave one and the same text to every prompt, at any draft and batch."""
    texts: dict[tuple[tuple[int, ...], int], set[tuple[int, ...]]] = {}
    for arm in arms:
        for task, run in arm.runs if not arm.is_peer else ():
            for prompt, text in zip(task.prompts, run.texts, strict=False):  # over HTTP there are no ids
                texts.setdefault((prompt, task.num_tokens), set()).add(text)
    return all(len(different) == 1 for different in texts.values())


def summary(measured: Measured, *, quick: bool) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    values = {name: quartiles(own) for name, own in all_ratios(measured).items()}
    return {
        "model": measured.info.name,
        "device": measured.info.device,
        "dtype": measured.info.dtype,
        "threads": measured.threads,
        "quick": quick,
        "prefix_cache": False,
        "arms": [_arm_row(arm) for arm in measured.arms],
        "ratios": {name: None if own is None else round(own[1], 3) for name, own in values.items()},
        "spread": {name: None if own is None else [round(own[0], 3), round(own[2], 3)] for name, own in values.items()},
        "curve": {"context": measured.curve.context, "rows": measured.curve.rows()},
        "floor": _floor(measured),
        "step_b64": _step(measured.round_parts),
        "sources": [_source_row(arm, kind) for arm in measured.arms if "K=4" in arm.name for kind in PROMPTS],
        "cost_ratio": None if measured.cost_ratio is None else round(measured.cost_ratio, 3),
        "row_invariant": measured.info.row_invariant,
        "greedy_texts_equal": greedy_texts_equal(measured.arms),
    }


def _arm_row(arm: Arm) -> dict[str, Any]:
    rate = quartiles([run.tokens_per_s for _, run in arm.runs])
    row: dict[str, Any] = {"arm": arm.name, "batch": arm.batch, "tokens_per_s": None if rate is None else round(rate[1], 2)}
    return row if arm.failure is None else {**row, "reason": arm.failure}


def _floor(measured: Measured) -> dict[str, float | None]:
    plain = measured.arm("plain")
    bandwidth = statistics.median(measured.bandwidths)
    step_s = None if plain is None else statistics.median(s for _, run in plain.runs for s in run.decode_s)
    weights = measured.weight_bytes
    return {
        "weight_bytes": weights,
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 2),
        "floor_ms": None if weights is None else round(weights / bandwidth * 1e3, 3),
        "step_ms": None if step_s is None else round(step_s * 1e3, 3),
    }


def _step(parts: Sequence[RoundParts]) -> dict[str, float] | None:
    """Medians in ms. ``outside_forward`` contains ``sampling``."""
    if not parts:
        return None
    columns = {
        "round": [part.round_s for part in parts],
        "forward": [part.forward_s for part in parts],
        "outside_forward": [part.outside_s for part in parts],
        "sampling": [part.sampling_s for part in parts],
    }
    return {f"{name}_ms": round(statistics.median(values) * 1e3, 3) for name, values in columns.items()}


def _source_row(arm: Arm, kind: str) -> dict[str, Any]:
    runs: list[Run] = [run for task, run in arm.runs if task.kind == kind]
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    tested, kept = sum((run.tested for run in runs), Counter[int]()), sum((run.kept for run in runs), Counter[int]())
    return {
        "source": arm.name,
        "kind": kind,
        "drafted": drafted,
        "accepted_share": round(accepted / drafted, 3) if drafted else None,
        "acceptance_by_position": [round(kept[j] / tested[j], 3) for j in sorted(tested) if tested[j]],
        "tokens_per_round": round(sum(run.num_tokens for run in runs) / max(sum(run.rounds for run in runs), 1), 2),
    }


# --- tables -----------------------------------------------------------------------------------------------------------------


def print_tables(result: dict[str, Any], console: Console) -> None:
    """The same for people."""
    console.print(_arms_table(result["arms"]))
    console.print(_ratios_table(result["ratios"], result["spread"]))
    console.print(_curve_table(result["curve"]))
    console.print(_sources_table(result["sources"]))
    floor, step = result["floor"], result["step_b64"]
    console.print(
        f"one stream: {floor['step_ms']} ms per step; reading {floor['weight_bytes']} bytes of weights at "
        f"{floor['bandwidth_gb_per_s']} GB/s takes {floor['floor_ms']} ms"
    )
    if step is not None:
        console.print(
            f"batch 64: a round takes {step['round_ms']} ms, of which {step['forward_ms']} are the forward (packing of its "
            f"metadata included) and {step['outside_forward_ms']} plan, messages, blocks, commit and sampling "
            f"(the sampling alone: {step['sampling_ms']})"
        )
    console.print(f"a step of the draft model costs c = {result['cost_ratio']} target steps")
    console.print("tokens/s count the prefill; the prefix cache is off in every arm, and texts do not end before their length")
    console.print(
        "draft_vs_assisted: the configured draft.source against assisted generation, without a named draft prompt lookup"
    )
    if not result["greedy_texts_equal"]:
        excuse = "" if result["row_invariant"] else " (near-ties may: this target's rows are not invariant)"
        console.print(f"[red]greedy texts differ between arms[/red]{excuse}")


def _arms_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("arm", "batch", "tokens/s")
    for row in rows:
        rate = f"not run: {row['reason']}" if "reason" in row else f"{row['tokens_per_s']:.1f}"
        table.add_row(row["arm"], str(row["batch"]), rate)
    return table


def _ratios_table(ratios: dict[str, float | None], spread: dict[str, list[float] | None]) -> Table:
    table = Table("ratio", "median", "quartiles")
    for name, value in ratios.items():
        bounds = spread[name]
        if value is not None and bounds is not None:
            table.add_row(name, f"{value:.2f}", f"{bounds[0]:.2f} to {bounds[1]:.2f}")
    return table


def _curve_table(curve: dict[str, Any]) -> Table:
    table = Table("tokens verified", "ms", "forward", "of one token", title=f"context {curve['context']}")
    for row in curve["rows"]:
        relative = row["verify_ms"] / curve["rows"][0]["verify_ms"]
        table.add_row(str(row["tokens"]), f"{row['verify_ms']:.1f}", f"{row['forward_ms']:.1f}", f"{relative:.2f}")
    return table


def _sources_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("source", "kind", "accepted", "by position, of those tested", "tokens per target forward")
    for row in rows:
        share = "-" if row["accepted_share"] is None else f"{row['accepted_share']:.0%}"
        by_position = "  ".join(f"{value:.0%}" for value in row["acceptance_by_position"])
        table.add_row(row["source"], row["kind"], share, by_position, str(row["tokens_per_round"]))
    return table
