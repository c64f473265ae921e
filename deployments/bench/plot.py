"""Curves as pictures; matplotlib is an optional extra."""

import importlib.util
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

SUFFIXES = (".png", ".svg")


def check_plot_file(path: Path) -> None:
    """Raise `ConfigError` when a plot could not be written there, before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.absolute().parent} does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'outrider[plots]'")


def draw_curve(path: Path, rows: list[dict[str, float]], floor_ms: float | None, title: str) -> None:
    """Step time over the number of verified tokens, with the two lines that bound it.

    ``rows`` as `Curve.rows`. The flat line is the time of reading the weights once; the slanted one the time per token at the
    largest size, as if all of it were arithmetic.
    """
    from matplotlib.figure import Figure

    sizes = [row["tokens"] for row in rows]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.plot(sizes, [row["verify_ms"] for row in rows], "o-", label="verify (forward, sampling, verdict)")
    axes.plot(sizes, [row["forward_ms"] for row in rows], "s--", label="forward alone")
    if floor_ms is not None:
        axes.axhline(floor_ms, color="black", linestyle=":", label=f"weights read once: {floor_ms:.2g} ms")
    per_token = rows[-1]["forward_ms"] / sizes[-1]
    axes.plot(sizes, [per_token * size for size in sizes], color="grey", linestyle=":", label=f"{per_token:.2g} ms per token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_xlabel("tokens verified in one step")
    axes.set_ylabel("ms")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def draw_rounds(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Tokens per target step under each condition: measured, and the closed forms' bounds. ``rows``: the JSON's cells."""
    from matplotlib.figure import Figure

    names = [f"α={row['alpha']:g}\nc={row['c']:g}\nhop={row['hop']:g}\nbatch {row['batch']}" for row in rows]
    places = range(len(rows))
    figure = Figure(figsize=(max(5.0, 2 + 0.75 * len(rows)), 5), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.bar(
        [x - 0.2 for x in places],
        [row["sequential"] for row in rows],
        0.4,
        label="sequential, its best depth",
        color="tab:gray",
    )
    axes.bar([x + 0.2 for x in places], [row["overlapped"] for row in rows], 0.4, label="overlapped", color="tab:blue")
    for shift, key in ((-0.2, "sequential_bound"), (0.2, "overlapped_bound")):
        for x, row in zip(places, rows, strict=True):
            axes.hlines(row[key], x + shift - 0.2, x + shift + 0.2, color="black", linestyle=":")
    axes.set_xticks(list(places), names, fontsize=8)
    axes.set_ylabel("tokens per target step and request (dotted: bound)")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=150)


def draw_simulation(path: Path, speedups: dict[str, dict[str, float]], trials: list[dict[str, Any]], title: str) -> None:
    """Speed-up over the batch for every arm; time of a request over the GPUs of every split that was tried.

    ``speedups``: by arm and batch. ``trials``: the JSON's splits.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = (figure.add_subplot(1, 2, place) for place in (1, 2))
    curves: Any = left
    for name, by_batch in speedups.items():
        style = "o-" if name.startswith("adaptive") else "--"
        curves.plot([int(batch) for batch in by_batch], list(by_batch.values()), style, label=name)
    batches = [int(batch) for batch in next(iter(speedups.values()))]
    curves.axhline(1.0, color="black", linestyle=":")
    curves.set_xscale("log", base=2)
    curves.set_xticks(batches, [str(batch) for batch in batches])
    curves.set_xlabel("requests that decode in one lane")
    curves.set_ylabel("tokens/s over no speculation")
    curves.set_title(title)
    curves.grid(alpha=0.3)
    curves.legend()
    bars: Any = right
    names = [f"{trial['lanes']} + {trial['drafts']}\n({trial['gpus']} GPUs)" for trial in trials]
    bars.bar(names, [trial["request_mean_s"] for trial in trials], color="tab:blue")
    bars.set_xlabel("targets + drafts")
    bars.set_ylabel("mean time of a request, s")
    bars.set_title("the same traffic, adaptive depth")
    figure.savefig(path, dpi=150)
