"""`outrider top`: load, depth, price and the five numbers of a running server, live in the terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deployments.endpoint import Routes, read_routes
from deployments.scrape import FiveNumbers, Scrape, five_numbers
from engine.errors import OutriderError

REFRESH_S = 1.0
PIPE_WIDTH = 160
NOTHING = "–"


def run_top(url: str, headers: dict[str, str], *, once: bool) -> int:
    """Show frames until Ctrl-C, or one frame on stdout. Raises `OutriderError` when the first cannot be read.

    A server that cannot be reached later is waited for: an update of the application must not end the view.
    """
    shown: RenderableType = frame(read_routes(url, headers))
    # A pipe has no width of its own; rich would fold the tables at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if once:
        console.print(shown)
        return 0
    with suppress(KeyboardInterrupt), _view(console) as show:
        while True:
            show(shown)
            time.sleep(REFRESH_S)
            shown = _next_frame(url, headers)
    return 0


@contextmanager
def _view(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Shows frames in the place of each other, or one after the other where there is no terminal."""
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield partial(live.update, refresh=True)


def _next_frame(url: str, headers: dict[str, str]) -> RenderableType:
    try:
        return frame(read_routes(url, headers))
    except OutriderError as error:
        return Text(f"{error}; waiting", style="red")


def frame(routes: Routes) -> Group:
    """Everything that is shown, from what the routes said."""
    seen = routes.controller
    return Group(
        _headline(routes),
        Text(""),
        _numbers(seen, five_numbers(Scrape(routes.metrics))),
        Text(""),
        _lanes(seen["lane_details"]),
        *_reasons(seen["lane_details"]),
        *_drafts(seen.get("draft_details", [])),
    )


def _headline(routes: Routes) -> Text:
    health, seen = routes.health, routes.controller
    state = ("ready", "green") if health["ready"] else (f"not ready: {health.get('reason')}", "red")
    line = Text.assemble(("outrider ", "bold"), (routes.url, "cyan"), "  ", state)
    for problem in health.get("degraded") or []:
        line.append(f"\ndegraded: {problem}", "yellow")
    return line.append(f"\n{seen.get('reason') or ''}")


def _numbers(seen: dict[str, Any], five: FiveNumbers) -> Table:
    lanes = seen["lane_details"]
    running, rate = sum(lane["running"] for lane in lanes), five.tokens_per_s
    # Each running request gets its share of the tokens: its mean time between them at this moment.
    now_s = running / rate if running and rate else None
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
    table.add_row(
        *(
            "requests/s",
            _number(seen.get("qps"), ".2f"),
            "running",
            str(running),
            "waiting",
            _number(seen.get("waiting"), ".0f"),
        ),
        *("batch", _number(seen.get("actual_batch"), ".1f")),
    )
    table.add_row(
        *("mean depth", _number(seen.get("mean_depth"), ".2f"), "price", _number(seen.get("price"), ".2f")),
        *("acceptance", _number(seen.get("acceptance"), ".0%"), "expected", _number(seen.get("predicted_batch"), ".1f")),
    )
    table.add_row(
        *("TTFT", _milliseconds(five.ttft_s), "ITL now", _milliseconds(now_s), "ITL mean", _milliseconds(five.itl_s)),
        *("tokens/s", _number(rate, ".0f")),
    )
    table.add_row(
        *("tokens per draft", _number(five.accepted_length, ".2f"), "break-even", _break_even(seen)),
        *("lanes", _of(len(lanes), seen.get("wanted_lanes")), "drafts"),
        _of(len(seen.get("drafts", [])), seen.get("wanted_drafts")),
    )
    return table


def _break_even(seen: dict[str, Any]) -> str:
    batch = seen.get("break_even_batch")
    if batch is not None:
        return f"{batch} per lane"
    return NOTHING if seen.get("price") is None else "none"


def _lanes(lanes: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("lane", "run", "wait", "tok/s", "depth", "price", "acc", "mode", "draft", "hits", "device"):
        table.add_column(name, justify="left" if name in ("lane", "mode", "draft", "device") else "right")
    for lane in lanes:
        why = lane["why"]
        table.add_row(
            _short(lane["lane_id"]) + (" (leaving)" if lane["leaving"] else ""),
            str(lane["running"]),
            str(lane["waiting"]),
            _number(lane["tokens_per_s"], ".0f"),
            _number(lane["mean_depth"], ".2f"),
            _number(why.get("price"), ".2f"),
            _number(lane["acceptance"], ".0%"),
            str(why.get("mode", NOTHING)),
            lane["draft"] + ("" if lane["draft_state"] == "ok" else f": {lane['draft_state']}"),
            _number(lane.get("hit_rate"), ".0%"),
            f"{lane['target_device']} {lane['target_dtype']}",
        )
    return table


def _reasons(lanes: list[dict[str, Any]]) -> list[Text]:
    return [Text(f"{_short(lane['lane_id'])}: {lane['why'].get('reason', '')}", style="dim") for lane in lanes]


def _drafts(drafts: list[dict[str, Any]]) -> list[RenderableType]:
    if not drafts:
        return []
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "draft replica": lambda draft: _short(draft["draft_id"]),
        "device": lambda draft: str(draft["device"]),
        "lanes": lambda draft: str(draft["num_lanes"]),
        "sequences": lambda draft: str(draft["num_sequences"]),
        "calls": lambda draft: str(draft["num_runs"]),
        "merged": lambda draft: _number(draft["mean_merged"], ".2f"),
    }
    for name in columns:
        table.add_column(name, justify="left" if name in ("draft replica", "device") else "right")
    for draft in drafts:
        table.add_row(*(show(draft) for show in columns.values()))
    return [Text(""), table]


def _short(name: str) -> str:
    """Serve's replica tags share their beginning."""
    return name.rpartition("#")[2] or name


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{1e3 * seconds:.0f} ms"


def _of(number: int, wanted: int | None) -> str:
    return str(number) if wanted is None or wanted == number else f"{number} of {wanted}"
