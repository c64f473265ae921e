"""From the loads of `outrider bench load` to its figures, tables and plot."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deployments.bench.load_loops import Played

OFF, ADAPTIVE, AS_SERVED = "no speculation", "adaptive", "as served"
FIXED_DEPTHS = (1, 2, 4, 8)
BUSY_CLIENT = 0.8
"""CPU share of the client from which its own slowness may be in the figures."""
Figure = Literal["tokens_per_s", "ttft_p50_s", "itl_p50_s", "accepted_length"]
"""Of a `Cell`."""


def fixed(depth: int) -> str:
    """Name of the arm of this depth."""
    return f"K={depth}"


@dataclass(frozen=True)
class Cell:
    """One arm under one load, once. ``level`` is a concurrency, or a rate in requests per second."""

    arm: str
    level: float
    tokens_per_s: float
    """Of all requests together, within the window."""
    ttft_p50_s: float | None
    """Median over the requests that were meant to be sent within the window."""
    itl_p50_s: float | None
    """Median of `Answer.itl_s` over the requests that said something within the window."""
    accepted_length: float | None
    """Tokens per target forward: n / (n - accepted draft tokens) over those requests; None where the server does not tell."""
    in_flight: float
    """Mean number of requests within the window."""
    num_requests: int
    """Meant for the window."""
    num_rejections: int
    """Answers 429 that were waited out."""
    client_cpu_share: float
    has_usage: bool
    errors: Counter[str] = field(default_factory=Counter)
    """Of the requests that were meant for the window, by status or kind."""

    @classmethod
    def of(cls, arm: str, level: float, played: Played, *, counts_drafts: bool) -> "Cell":
        """The figures of a load; ``counts_drafts``: usage tells the draft tokens that were accepted."""
        begin_s, end_s = played.begin_s, played.end_s
        meant = [answer for answer in played.answers if begin_s <= answer.intended_s <= end_s]
        tokens = [answer.tokens_within(begin_s, end_s) for answer in played.answers]
        seen = [answer for answer, count in zip(played.answers, tokens, strict=True) if count]
        forwards = sum(answer.num_tokens - (answer.num_accepted or 0) for answer in seen)
        overlaps = (min(a.ended_s, end_s) - max(a.intended_s, begin_s) for a in played.answers)
        return cls(
            arm=arm,
            level=level,
            tokens_per_s=sum(tokens) / (end_s - begin_s),
            ttft_p50_s=median(answer.ttft_s for answer in meant),
            itl_p50_s=median(answer.itl_s for answer in seen),
            accepted_length=sum(answer.num_tokens for answer in seen) / forwards if counts_drafts and forwards else None,
            in_flight=sum(max(0.0, overlap) for overlap in overlaps) / (end_s - begin_s),
            num_requests=len(meant),
            num_rejections=sum(answer.num_rejections for answer in meant),
            client_cpu_share=played.client_cpu_share,
            has_usage=all(answer.has_usage for answer in seen),
            errors=Counter(answer.error for answer in meant if answer.error is not None),
        )


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None of nothing."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass
class Results:
    """Everything that was measured: the repetitions of every arm and level, in the order in which they were played."""

    cells: dict[tuple[str, float], list[Cell]] = field(default_factory=dict)

    def add(self, cell: Cell) -> None:
        """Note a repetition."""
        self.cells.setdefault((cell.arm, cell.level), []).append(cell)

    @property
    def arms(self) -> list[str]:
        """In the order of the first round."""
        return list(dict.fromkeys(arm for arm, _ in self.cells))

    @property
    def fixed_arms(self) -> list[str]:
        """Those of fixed depths."""
        return [arm for arm in map(fixed, FIXED_DEPTHS) if arm in self.arms]

    @property
    def levels(self) -> list[float]:
        """Rising."""
        return sorted({level for _, level in self.cells})

    def figure(self, arm: str, level: float, figure: Figure) -> float | None:
        """Median over the repetitions."""
        return median(getattr(cell, figure) for cell in self.cells.get((arm, level), ()))

    def ratios(self, arm: str, base: str, level: float, figure: Figure) -> list[float]:
        """``arm`` over ``base``, repetition by repetition: those that lie next to each other in time are compared."""
        pairs = zip(self.cells.get((arm, level), ()), self.cells.get((base, level), ()), strict=False)
        values = [(getattr(mine, figure), getattr(theirs, figure)) for mine, theirs in pairs]
        return [mine / theirs for mine, theirs in values if mine is not None and theirs]

    def best(self, arms: Sequence[str], level: float) -> str | None:
        """The arm with the most tokens per second."""
        rates = {arm: rate for arm in arms if (rate := self.figure(arm, level, "tokens_per_s")) is not None}
        return max(rates, key=lambda arm: rates[arm], default=None)

    def break_even(self, arm: str) -> float | None:
        """Where ``arm`` begins to be slower than no speculation, and stays so."""
        return break_even({level: median(self.ratios(arm, OFF, level, "tokens_per_s")) for level in self.levels})


def break_even(ratios: Mapping[float, float | None]) -> float | None:
    """The smallest level from which the ratio to no speculation stays below 1; None where it does not at the highest level.

    A level without a ratio, where nothing was answered, says nothing and ends the search.
    """
    found = None
    for level in sorted(ratios, reverse=True):
        ratio = ratios[level]
        if ratio is None or ratio >= 1:
            break
        found = level
    return found


def summary(results: Results, *, is_open: bool) -> dict[str, Any]:
    """The part of the JSON object that is computed. What cannot be is None.

    Ratios are medians over the repetitions, and the ``..._spread`` beside them least and most. In an open loop tokens per
    second are what arrives and not what the server can do: ratios of throughput and the break-even are left out.
    """
    levels = [] if is_open else results.levels
    by_arm = {arm: results.break_even(arm) for arm in (*results.fixed_arms, ADAPTIVE)} if OFF in results.arms and levels else {}
    rivals = [arm for arm in (OFF, *results.fixed_arms) if arm in results.arms]
    against_best = [_against(results, results.best(rivals, level), level) for level in levels]
    at_top = _against(results, fixed(4), levels[-1]) if levels else []
    ttft = [results.ratios(ADAPTIVE, OFF, level, "ttft_p50_s") for level in results.levels]
    worst, slowest = _extreme(min, against_best), _extreme(max, ttft)
    return {
        "points": [_point(results, arm, level, is_open) for level in results.levels for arm in results.arms],
        "break_even_concurrency": _whole(_all_lose(by_arm)),
        "break_even_by_arm": {arm: _whole(level) for arm, level in by_arm.items()},
        "worst_adaptive_vs_best": _rounded(median(worst)),
        "worst_adaptive_vs_best_spread": _spread(worst),
        "adaptive_vs_k4_at_top": _rounded(median(at_top)),
        "adaptive_vs_k4_at_top_spread": _spread(at_top),
        "ttft_vs_off": _rounded(median(slowest)),
        "ttft_vs_off_spread": _spread(slowest),
        "errors": dict(sum((cell.errors for own in results.cells.values() for cell in own), Counter[str]())),
    }


def _against(results: Results, rival: str | None, level: float) -> list[float]:
    return [] if rival is None else results.ratios(ADAPTIVE, rival, level, "tokens_per_s")


def _extreme(choose: Callable[..., list[float]], ratios: Sequence[list[float]]) -> list[float]:
    """Of the levels that have ratios, the one with the least or the largest median."""
    return choose((own for own in ratios if own), key=statistics.median, default=[])


def _all_lose(by_arm: Mapping[str, float | None]) -> float | None:
    """From where on every fixed depth loses; without fixed depths, adaptive, which hardly can lose: it stops speculating."""
    levels = [level for arm, level in by_arm.items() if arm != ADAPTIVE] or list(by_arm.values())
    known = [level for level in levels if level is not None]
    return max(known) if known and len(known) == len(levels) else None


def _point(results: Results, arm: str, level: float, is_open: bool) -> dict[str, Any]:
    cells = results.cells[arm, level]
    ratios = [] if is_open else results.ratios(arm, OFF, level, "tokens_per_s")
    return {
        "arm": arm,
        "concurrency": _rounded(median(cell.in_flight for cell in cells)) if is_open else int(level),
        "rate": level if is_open else None,
        "tokens_per_s": _rounded(results.figure(arm, level, "tokens_per_s")),
        "ttft_p50_s": _rounded(results.figure(arm, level, "ttft_p50_s"), 5),
        "itl_p50_s": _rounded(results.figure(arm, level, "itl_p50_s"), 5),
        "accepted_length": _rounded(results.figure(arm, level, "accepted_length")),
        "vs_off": _rounded(median(ratios)),
        "vs_off_spread": _spread(ratios),
        "requests": sum(cell.num_requests for cell in cells),
        "errors": dict(sum((cell.errors for cell in cells), Counter[str]())),
        "waited_429": sum(cell.num_rejections for cell in cells),
        "tokens_from_usage": all(cell.has_usage for cell in cells),
        "client_cpu_share": _rounded(max(cell.client_cpu_share for cell in cells)),
    }


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _whole(level: float | None) -> int | None:
    return None if level is None else int(level)


def _spread(ratios: Sequence[float]) -> list[float] | None:
    return [round(min(ratios), 3), round(max(ratios), 3)] if ratios else None


# --- tables -----------------------------------------------------------------------------------------------------------------


def print_report(result: Mapping[str, Any], console: Console) -> None:
    """The same for people."""
    points: list[dict[str, Any]] = result["points"]
    console.print(_points_table(points))
    console.print(
        "TTFT and ITL: p50; accepted: tokens per target forward; medians of the repetitions, ratios "
        "repetition by repetition (least-most)"
    )
    if result["break_even_by_arm"]:
        console.print(_break_even_line(result))
    for key, what in _RATIOS.items():
        if result[key] is not None:
            low, high = result[f"{key}_spread"]
            console.print(f"{what}: [bold]{result[key]:.2f}[/bold] ({low:.2f}-{high:.2f})")
    if any(point["waited_429"] for point in points):
        console.print("429: answers that were waited out as Retry-After says; their time is part of the TTFT")
    if not all(point["tokens_from_usage"] for point in points):
        console.print("[yellow]the server sends no usage: chunks were counted, which may hold several tokens each[/yellow]")
    busy = max(point["client_cpu_share"] for point in points)
    if busy > BUSY_CLIENT:
        console.print(f"[yellow]this client used {busy:.0%} of a core: the fastest figures may be its own[/yellow]")


_RATIOS = {
    "worst_adaptive_vs_best": "adaptive against the best of all other arms, tokens/s, at its worst load",
    "adaptive_vs_k4_at_top": "adaptive against K=4, tokens/s, at the highest load",
    "ttft_vs_off": "adaptive against no speculation, TTFT p50, at its worst load",
}


def _break_even_line(result: Mapping[str, Any]) -> str:
    level, by_arm = result["break_even_concurrency"], result["break_even_by_arm"]
    arms = ", ".join(f"{arm} {'never' if value is None else f'from {value}'}" for arm, value in by_arm.items())
    overall = "never, up to here" if level is None else f"from concurrency {level}"
    return f"speculation loses against none: [bold]{overall}[/bold] ({arms})"


def _points_table(points: Sequence[Mapping[str, Any]]) -> Table:
    is_open = points[0]["rate"] is not None
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("per s" if is_open else "load", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    for name in ("tokens/s", "× none", "TTFT ms", "ITL ms", "accepted"):
        table.add_column(name, justify="right", no_wrap=True)
    extra = _extra_columns(points)
    for name in extra:
        table.add_column(name)
    for index, point in enumerate(points):
        is_last = index + 1 == len(points) or points[index + 1]["arm"] == points[0]["arm"]
        table.add_row(
            f"{point['rate' if is_open else 'concurrency']:g}" if point["arm"] == points[0]["arm"] else "",
            point["arm"],
            f"{point['tokens_per_s']:.1f}",
            _ratio(point),
            _ms(point["ttft_p50_s"]),
            _ms(point["itl_p50_s"]),
            "-" if point["accepted_length"] is None else f"{point['accepted_length']:.2f}",
            *(column[index] for column in extra.values()),
            end_section=is_last,
        )
    return table


def _extra_columns(points: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What only some loads have to tell."""
    columns = {
        "in flight": ["" if point["rate"] is None else f"{point['concurrency']:.1f}" for point in points],
        "429 waited": [str(point["waited_429"] or "") for point in points],
        "failed": [", ".join(f"{count}× {kind}" for kind, count in point["errors"].items()) for point in points],
    }
    return {name: column for name, column in columns.items() if any(column)}


def _ratio(point: Mapping[str, Any]) -> str:
    if point["vs_off"] is None:
        return "-"
    low, high = point["vs_off_spread"]
    return f"{point['vs_off']:.2f} ({low:.2f}-{high:.2f})"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def draw_points(path: Path, points: Sequence[Mapping[str, Any]], title: str) -> None:
    """Throughput, TTFT and ITL of all arms over the load, as .png or .svg."""
    from matplotlib.figure import Figure as Drawing

    is_open = points[0]["rate"] is not None
    level = "rate" if is_open else "concurrency"
    drawing = Drawing(figsize=(13, 4.5), layout="constrained")
    panels = {"tokens_per_s": "tokens/s", "ttft_p50_s": "TTFT p50, s", "itl_p50_s": "ITL p50, s per token"}
    for axes, (key, label) in zip(drawing.subplots(1, len(panels)), panels.items(), strict=True):
        axes.set_prop_cycle(color=["tab:blue", "tab:cyan", "tab:green", "tab:olive"])  # red is the adaptive one
        for arm in dict.fromkeys(point["arm"] for point in points):
            own = [point for point in points if point["arm"] == arm and point[key] is not None]
            style = {OFF: "k--", ADAPTIVE: "r-"}.get(arm, "-")
            axes.plot([point[level] for point in own], [point[key] for point in own], style, marker="o", label=arm)
        levels = sorted({point[level] for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, [f"{value:g}" for value in levels])
        axes.set_xlabel("requests per second" if is_open else "requests in flight")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    drawing.axes[0].legend()
    drawing.suptitle(title)
    drawing.savefig(path, dpi=150)
