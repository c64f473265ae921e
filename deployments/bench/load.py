"""`outrider bench load`: latency and throughput of any OpenAI-compatible endpoint, and the load from which speculation loses.

A closed loop keeps so many requests in flight; an open one sends them at the random moments of a Poisson process, however far
the server has fallen behind. Every load is played by all arms before the next repetition, another arm first each time, so that
a slow phase of the machine hits all alike.

What the arms are depends on whom we talk to. A foreign server is measured as it is served. A running Outrider server lets each
request bound its own depth: to 0, or not at all. Without a URL the application is our own, and its lane can be switched to any
fixed depth between two loads.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deployments.bench.load_client import PATHS, Answer, Arm, Endpoint, ask, find_endpoint
from deployments.bench.load_loops import TOO_MANY, Played, play_closed, play_open, poisson_arrivals
from deployments.bench.load_plan import LoadOptions, LoadPlan, Request, check_place
from deployments.bench.load_report import ADAPTIVE, AS_SERVED, OFF, Cell, Results, draw_points, print_report, summary
from deployments.bench.plot import check_plot_file
from deployments.endpoint import read_headers
from engine.config import OutriderConfig
from engine.errors import OutriderError

console = Console(stderr=True)
Measured = tuple[Endpoint, list[Arm]]


def run_bench_load(options: LoadOptions, config: OutriderConfig | None, *, as_json: bool, plot: Path | None) -> int:
    """Measure, print a table on stderr and, if asked, one JSON object as the last line of stdout.

    ``config`` describes our own application; None with ``options.url``. Requests that fail are counted and nothing ends. Raises
    `ConfigError` for options that cannot be used, `OutriderError` for an endpoint that cannot be reached or answers nothing.
    """
    check_place(options, has_config=config is not None)
    plan = LoadPlan.of(options)
    headers = read_headers(options.api_key_env, options.api_key_file)
    if plot is not None:
        check_plot_file(plot)
    with _place(options, config, headers) as (endpoint, arms):
        results = LoadBench(endpoint, arms, plan).measure()
    result = {**_setting(options, plan, endpoint, arms), **summary(results, is_open=plan.is_open)}
    print_report(result, console)
    console.print(result["note"])
    if plot is not None:
        draw_points(plot, result["points"], f"{endpoint.model} at {endpoint.url}")
        console.print(f"plot: {plot}")
    if as_json:
        print(json.dumps(result))
    return 0


@contextmanager
def _place(options: LoadOptions, config: OutriderConfig | None, headers: dict[str, str]) -> Iterator[Measured]:
    if options.url is None:
        from deployments.bench.load_app import own_application

        assert config is not None
        with own_application(config, options.emulation, options.api, headers) as measured:
            yield measured
        return
    endpoint = find_endpoint(options.url, model=options.model, api=options.api, headers=headers)
    if endpoint.is_outrider:
        yield endpoint, [Arm(OFF, {"speculation": {"max_depth": 0}}), Arm(ADAPTIVE)]
    else:
        yield endpoint, [Arm(AS_SERVED)]


class LoadBench:
    """Plays every load by every arm against one endpoint."""

    def __init__(self, endpoint: Endpoint, arms: list[Arm], plan: LoadPlan):
        self._endpoint = endpoint
        self._arms = arms
        self._plan = plan
        self._last_failure: Answer | None = None
        self._results = Results()

    def measure(self) -> Results:
        """Everything. Raises `OutriderError` when the first request is refused, and when no request was answered at all."""
        self._check_first_request()
        plan = self._plan
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=len(plan.levels) * len(self._arms) * plan.repeats)
            for level in plan.levels:
                for repeat in range(plan.repeats):
                    self._take_turns(level, repeat, partial(progress.update, bar))
        failure = self._last_failure
        if failure is not None and not any(cell.tokens_per_s for own in self._results.cells.values() for cell in own):
            raise OutriderError(f"{self._endpoint.url}: no request was answered: {failure.error} {failure.detail}".rstrip())
        return self._results

    def _take_turns(self, level: float, repeat: int, show: Callable[..., None]) -> None:
        first = repeat % len(self._arms)
        for arm in self._arms[first:] + self._arms[:first]:
            show(description=f"{_load_name(self._plan, level)}: {arm.name}")
            arm.enter()
            played = asyncio.run(self._play(arm, level, repeat))
            self._results.add(Cell.of(arm.name, level, played, counts_drafts=self._endpoint.is_outrider))
            self._last_failure = next((answer for answer in played.answers if answer.error is not None), self._last_failure)
            show(advance=1)

    async def _play(self, arm: Arm, level: float, repeat: int) -> Played:
        requests, span = self._plan.requests(level, repeat), self._plan.span(level)
        async with self._endpoint.client() as client:

            async def send(number: int, intended_s: float, on_text: Callable[[], None]) -> Answer:
                return await ask(client, PATHS[self._endpoint.api], self._body(arm, next(requests)), intended_s, on_text)

            if self._plan.is_open:
                arrivals_s = poisson_arrivals(level, span, self._plan.seed + repeat)
                return await play_open(send, arrivals_s, span)
            return await play_closed(send, int(level), span)

    def _body(self, arm: Arm, request: Request) -> dict[str, Any]:
        """Our own servers go on to ``max_tokens``, so that all arms do the same work; others may not know how."""
        whole = {"ignore_eos": True} if self._endpoint.is_outrider else {}
        return self._endpoint.body(
            request.prompt,
            max_tokens=request.max_tokens,
            temperature=self._plan.temperature,
            seed=request.seed,
            **whole,
            **arm.fields,
        )

    def _check_first_request(self) -> None:
        answer = asyncio.run(self._ask_once())
        if answer.error is not None and answer.error != TOO_MANY:
            raise OutriderError(f"{self._endpoint.url}: the first request failed: {answer.error} {answer.detail}".rstrip())

    async def _ask_once(self) -> Answer:
        request = Request("Hello", 2, 0)
        async with self._endpoint.client() as client:
            body = self._body(self._arms[0], request)
            return await ask(client, PATHS[self._endpoint.api], body, time.monotonic(), lambda: None)


def _load_name(plan: LoadPlan, level: float) -> str:
    return f"{level:g} requests per second" if plan.is_open else f"concurrency {level:g}"


def _setting(options: LoadOptions, plan: LoadPlan, endpoint: Endpoint, arms: list[Arm]) -> dict[str, Any]:
    """The part of the JSON object that says what was measured."""
    return {
        "quick": options.quick,
        "url": options.url,
        "model": endpoint.model,
        "emulated": options.emulation,
        "loop": "open" if plan.is_open else "closed",
        "api": endpoint.api,
        "arms": [arm.name for arm in arms],
        "note": _note(options, endpoint),
        "repeats": plan.repeats,
        "duration_s": plan.duration_s,
        "requests": plan.num_requests,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
    }


def _note(options: LoadOptions, endpoint: Endpoint) -> str:
    """What a reader of the figures must know."""
    prompts = "Every prompt begins with a mark of its own, so that no prefix cache knows it."
    if options.url is None:
        emulated = f"Emulated devices ({options.emulation}): steps are waited for. " if options.emulation else ""
        return f"{emulated}The lane was switched between arms. {prompts}"
    if endpoint.is_outrider:
        return (
            "Over HTTP a request can bound its depth to 0 or leave it to the server, which goes on as it is configured; "
            f"fixed depths need an application of this command's own, without --url. {prompts}"
        )
    return f"This server's speculation cannot be chosen by request: one arm, as it is served. {prompts}"
