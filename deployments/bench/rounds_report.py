"""From what `outrider bench rounds` saw to its figures, and to tables."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from deployments.bench.bounds import overlapped, overlapped_depth, overlapped_with_misses, sequential
from deployments.bench.hit_rate import KINDS, HitRate
from deployments.bench.hops import Hops
from deployments.bench.lane import Window
from deployments.bench.report import quartiles


@dataclass
class Cell:
    """All arms under one condition and batch."""

    alpha: float
    c: float
    hop: float
    batch: int
    arms: dict[str, Window] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, window: Window, texts: list[str]) -> None:
        """What an arm did."""
        self.arms[name], self.texts[name] = window, texts

    @property
    def best_sequential(self) -> str:
        """The fastest arm with sequential rounds."""
        return max((name for name in self.arms if name.startswith("sequential")), key=lambda name: self.arms[name].tokens_per_s)

    @property
    def best_overlapped(self) -> str:
        """The fastest arm with overlapped rounds."""
        return max((name for name in self.arms if name.startswith("overlapped")), key=lambda name: self.arms[name].tokens_per_s)

    @property
    def texts_equal(self) -> bool:
        """Whether all arms said the same."""
        return len({tuple(texts) for texts in self.texts.values()}) == 1


@dataclass(frozen=True)
class RealRun:
    """One arm's answer to one prompt on the real pair."""

    arm: str
    prompt: int
    temperature: float
    tokens_per_s: float
    """Prefill included."""
    text: str
    window: Window
    pinned: bool


def summary(
    cells: Sequence[Cell],
    real: Sequence[RealRun],
    hits: HitRate | None,
    hops: Hops | None,
    large: Mapping[str, Window],
    step_s: float,
) -> dict[str, Any]:
    """The object that ``--json`` prints. What was not measured is None."""
    rows = [_cell_row(cell, step_s) for cell in cells]
    first = rows[0] if rows else None
    headline = [row for row in rows if first and all(row[key] == first[key] for key in ("alpha", "c", "hop"))]
    hidden = [row["hidden_share"] for row in headline if row["hidden_share"] is not None]
    real_part = _real(real)
    return {
        "emulated": f"cells and router_ms_b256 are of emulated devices: steps of {1e3 * step_s:g} ms are waited for",
        "cells": rows,
        "hit_rate": _hit_rate(hits),
        "real": real_part,
        "large": {name: _window_row(window) for name, window in large.items()},
        "texts_equal": all(cell.texts_equal for cell in cells) and real_part["texts_equal"],
        "hop_ms_p50": hops.stream_ms.p50 if hops else None,
        "actor_hop_ms_p50": hops.actor_ms.p50 if hops else None,
        "overlap_vs_sequential": min((row["overlap_vs_sequential"] for row in headline), default=None),
        "overlap_vs_bound": min((row["overlap_vs_bound"] for row in headline), default=None),
        "hidden_share": min(hidden, default=None),
        "hit_rate_t1": _rounded(hits.overall) if hits else None,
        "router_ms_b256": _rounded(large["auto"].router_ms_per_round) if "auto" in large else None,
        "real_overlap_vs_sequential": real_part["overlap_vs_sequential"],
    }


def _cell_row(cell: Cell, step_s: float) -> dict[str, Any]:
    condition = (cell.alpha, cell.c, cell.hop)
    per_step = {name: step_s * window.tokens_per_s / cell.batch for name, window in cell.arms.items()}
    best, overlapping = cell.best_sequential, cell.best_overlapped
    window = cell.arms[overlapping]
    limit, (sequential_limit, _) = overlapped(*condition), sequential(*condition)
    return {
        "alpha": cell.alpha,
        "c": cell.c,
        "hop": cell.hop,
        "batch": cell.batch,
        "arms": {name: _window_row(arm) for name, arm in cell.arms.items()},
        "sequential": round(per_step[best], 3),
        "sequential_arm": best,
        "sequential_bound": round(sequential_limit, 3),
        "overlapped": round(per_step[overlapping], 3),
        "overlapped_arm": overlapping,
        "overlapped_bound": round(limit, 3),
        "overlapped_bound_depth": overlapped_depth(cell.c, cell.hop),
        "overlapped_bound_at_hit_rate": _rounded(
            None if window.hit_rate is None else overlapped_with_misses(*condition, window.hit_rate)
        ),
        "overlap_vs_sequential": round(per_step[overlapping] / per_step[best], 3),
        "overlap_vs_bound": round(per_step[overlapping] / limit, 3),
        "hit_rate": _rounded(window.hit_rate),
        "hidden_share": _rounded(window.hidden_share),
        "texts_equal": cell.texts_equal,
    }


def _window_row(window: Window) -> dict[str, Any]:
    rounds = window.counters["rounds"]
    return {
        "tokens_per_s": _rounded(window.tokens_per_s if window.seconds else None),
        "rounds": rounds,
        "depth": _rounded(window.counters["drafted_tokens"] / rounds if rounds else None),
        "round_ms": _rounded(1e3 * window.seconds / rounds if rounds else None),
        "verify_ms": _rounded(1e3 * window.counters["verify_seconds"] / rounds if rounds else None),
        "exposed_ms": _rounded(1e3 * window.counters["draft_exposed_seconds"] / rounds if rounds else None),
        "hit_rate": _rounded(window.hit_rate),
        "hits": dict(window.hits),
        "misses": dict(window.misses),
        "asked": window.counters["draft_asked"],
        "hidden_share": _rounded(window.hidden_share),
        "router_ms_per_round": _rounded(window.router_ms_per_round),
    }


def _hit_rate(hits: HitRate | None) -> dict[str, Any] | None:
    if hits is None:
        return None
    return {
        "target": hits.target,
        "draft": hits.draft,
        "depth": hits.depth,
        "fan_out": hits.fan_out,
        "rounds": hits.rounds,
        "by_kind": {kind: _rounded(hits.of(kind)) for kind in KINDS},
        "accepted_share": _rounded(hits.accepted / hits.drafted if hits.drafted else None),
    }


def _real(runs: Sequence[RealRun]) -> dict[str, Any]:
    """Ratios are taken prompt by prompt between the sequential and the overlapped arm that are the fastest over all prompts."""
    arms: dict[str, dict[tuple[int, float], RealRun]] = {}
    for run in runs:
        arms.setdefault(run.arm, {})[run.prompt, run.temperature] = run
    medians = {name: statistics.median(run.tokens_per_s for run in own.values()) for name, own in arms.items()}
    best, overlapping = (
        max((name for name in arms if name.startswith(kind)), key=lambda name: medians[name], default=None)
        for kind in ("sequential", "overlapped")
    )
    ratios: dict[float, list[float]] = {}
    if best is not None and overlapping is not None:
        for key, run in arms[overlapping].items():
            ratios.setdefault(key[1], []).append(run.tokens_per_s / arms[best][key].tokens_per_s)
    spread = quartiles([ratio for own in ratios.values() for ratio in own])
    total = Window()
    for run in arms[overlapping].values() if overlapping is not None else ():
        total.hits.update(run.window.hits)
        total.misses.update(run.window.misses)
    texts: dict[tuple[int, float], set[str]] = {}
    for run in runs:
        texts.setdefault((run.prompt, run.temperature), set()).add(run.text)
    return {
        "tokens_per_s": {name: round(value, 2) for name, value in medians.items()},
        "sequential_arm": best,
        "overlapped_arm": overlapping,
        "overlap_vs_sequential": _rounded(spread[1] if spread else None),
        "quartiles": [round(spread[0], 3), round(spread[2], 3)] if spread else None,
        "by_temperature": {str(temperature): round(statistics.median(own), 3) for temperature, own in ratios.items()},
        "hit_rate": _rounded(total.hit_rate),
        "pinned": all(run.pinned for run in runs),
        "texts_equal": all(len(different) == 1 for different in texts.values()),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


# --- tables -----------------------------------------------------------------------------------------------------------------


def print_report(result: dict[str, Any], console: Console) -> None:
    """The same for people."""
    console.print(_cells_table(result["cells"]))
    console.print(
        "[bold]emulated devices[/bold]: tokens per target step and request; c and hop in target steps; the bounds are those of "
        "closed forms for an ideal sequential and an ideal overlapped lane"
    )
    hits, real, large = result["hit_rate"], result["real"], result["large"]
    if result["hop_ms_p50"] is not None:
        console.print(
            f"hop, 64 ids: {result['hop_ms_p50']:.3f} ms over a stream, {result['actor_hop_ms_p50']:.3f} ms by actor call"
        )
    for name, row in large.items():
        console.print(
            f"batch 256 (emulated), {name}: {row['router_ms_per_round']} ms of router CPU per round of {row['round_ms']} ms"
        )
    if hits is not None:
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in hits["by_kind"].items() if share is not None)
        console.print(
            f"{hits['target']} with {hits['draft']} at temperature 1, K={hits['depth']}, F={hits['fan_out']}: "
            f"{result['hit_rate_t1']:.0%} of {hits['rounds']} outcomes were prepared ({kinds}); "
            f"{hits['accepted_share']:.0%} of the draft tokens were accepted"
        )
    if real["tokens_per_s"]:
        console.print(_real_table(real))
        where = "target and draft on a core each" if real["pinned"] else "cores could not be pinned"
        console.print(f"real pair, one thread each, {where}; ratio prompt by prompt, median (quartiles)")
    if not result["texts_equal"]:
        console.print("[red]sequential and overlapped rounds gave different texts[/red]")


def _cells_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "α", "c", "hop", "batch", "sequential", "bound", "overlapped", "bound", "× sequential", "of bound", "hits", "hidden"
    )
    for row in rows:
        table.add_row(
            *(f"{row[key]:g}" for key in ("alpha", "c", "hop", "batch")),
            f"{row['sequential']:.2f} ({row['sequential_arm'].removeprefix('sequential ')})",
            f"{row['sequential_bound']:.2f}",
            f"{row['overlapped']:.2f} ({row['overlapped_arm'].removeprefix('overlapped ')})",
            f"{row['overlapped_bound']:.2f}",
            f"{row['overlap_vs_sequential']:.2f}",
            f"{row['overlap_vs_bound']:.0%}",
            _percent(row["hit_rate"]),
            _percent(row["hidden_share"]),
        )
    return table


def _real_table(real: dict[str, Any]) -> Table:
    table = Table("arm", "tokens/s", "× best sequential")
    for name, rate in real["tokens_per_s"].items():
        ratio = ""
        if name == real["overlapped_arm"] and real["quartiles"] is not None:
            low, high = real["quartiles"]
            ratio = f"{real['overlap_vs_sequential']:.2f} ({low:.2f} to {high:.2f})"
        table.add_row(name, f"{rate:.1f}", ratio)
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
