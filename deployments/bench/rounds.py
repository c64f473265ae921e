"""`outrider bench rounds`: drafting while the target verifies, against the same lane with sequential rounds.

The stack is the real one: an application on a Ray cluster of its own, every part in its process, requests over HTTP. Devices
are emulated (`engine.testing.paced`), so that step times are those of a large target and a small draft; a second part measures
a real pair. One deployment is measured under many conditions: the emulation is followed in a file, and the router changes
its speculation settings between loads.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from deployments.bench.bounds import overlapped_depth, sequential
from deployments.bench.hit_rate import HitRate, measure_hit_rate
from deployments.bench.hops import Hops, measure_hops
from deployments.bench.lane import BenchLane, Load, Text, Window, pin
from deployments.bench.plot import check_plot_file, draw_rounds
from deployments.bench.prompts import PROMPTS
from deployments.bench.rounds_report import Cell, RealRun, print_report, summary
from engine.build import draft_is_a_model, preflight
from engine.config import OutriderConfig, parse_config
from engine.errors import ConfigError, OutriderError
from engine.testing.profiles import FILE_PREFIX

console = Console(stderr=True)
STEP_MS = 30.0
MAX_DEPTH = 16
MADE_UP_PROMPT: Text = tuple(range(1000, 1016))
"""For models that read nothing."""
WARM_UP_TOKENS = 80
LARGE_BATCH = 256
"""At which the router's own work is measured."""
LARGE_SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {"depth": "auto", "fan_out": "auto"},
    "K=4 F=1": {"depth": 4, "fan_out": 1},
}
"""What the policy does there (plain decoding: the emulated target is past its knee), and far more than it would."""


@dataclass(frozen=True)
class Condition:
    """One emulated pair: acceptance, cost of a draft token and one-way hop, both in target steps."""

    alpha: float = 0.8
    c: float = 0.1
    hop: float = 0.0

    @property
    def emulation(self) -> str:
        """Its name. Outcomes are as predictable as a real pair's (F=3): recovery token .7, bonus token .9 at alpha .8."""
        bonus = "&bonus=0.9" if self.alpha == 0.8 else ""
        return (
            f"emulated:free?step_ms={STEP_MS:g}&c={self.c:g}&alpha={self.alpha:g}&recovery=0.7{bonus}"
            f"&hop_ms={self.hop * STEP_MS:g}"
        )


HEADLINE = Condition()


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    batches: tuple[int, ...]
    """Under the headline's condition."""
    others: tuple[Condition, ...]
    """At batch 1."""
    depths: tuple[int, ...]
    """Fixed depths of sequential rounds, beside the best one in theory and the depth that follows the load."""
    num_tokens: int
    """Per request of a paced load."""
    large_tokens: int
    prompts_per_kind: int
    """Of the real pair."""
    real_tokens: int
    real_depths: tuple[int, ...]
    real_overlaps: tuple[tuple[int, int], ...]
    """Fixed depth and fan-out."""
    num_hops: int


QUICK = Size(
    batches=(1, 8),
    others=(),
    depths=(),
    num_tokens=240,
    large_tokens=100,
    prompts_per_kind=1,
    real_tokens=32,
    real_depths=(2,),
    real_overlaps=((1, 1),),
    num_hops=200,
)
FULL = Size(
    batches=(1, 2, 4, 8),
    others=tuple(
        Condition(alpha, c, hop)
        for alpha in (0.6, 0.8, 0.9)
        for c in (0.05, 0.1, 0.2)
        for hop in (0.0, 0.05, 0.1)
        if Condition(alpha, c, hop) != HEADLINE
    ),
    depths=(3, 4, 8),
    num_tokens=800,
    large_tokens=300,
    prompts_per_kind=3,
    real_tokens=128,
    real_depths=(1, 2, 3),
    real_overlaps=((1, 1), (1, 2), (2, 1), (2, 2)),
    num_hops=1000,
)


def run_bench_rounds(config: OutriderConfig, *, quick: bool, as_json: bool, plot: Path | None) -> int:
    """Measure, print tables on stderr and, if asked, one JSON object as the last line of stdout.

    ``config`` describes the real pair. Exit code 1 when sequential and overlapped rounds gave different texts although the
    target says that its rows are invariant. Raises `ConfigError` for a pair without a draft model and a plot that could not be
    written.
    """
    if plot is not None:
        check_plot_file(plot)
    if not draft_is_a_model(config):
        raise ConfigError(f"draft.source is '{config.draft.source}': this benchmark needs a draft with a device of its own")
    preflight(config)
    with Progress(console=console) as progress, tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        bench = RoundsBench(config, QUICK if quick else FULL, Path(folder), progress)
        bench.measure()
    result = {"quick": quick, **summary(bench.cells, bench.real, bench.hits, bench.hops, bench.large, STEP_MS / 1e3)}
    print_report(result, console)
    if plot is not None:
        draw_rounds(plot, result["cells"], f"emulated devices, target step {STEP_MS:g} ms")
        console.print(f"plot: {plot}")
    if as_json:
        print(json.dumps(result))
    return 0 if result["texts_equal"] else 1


@dataclass
class RoundsBench:
    """Deployments, loads, and what was measured."""

    config: OutriderConfig
    size: Size
    folder: Path
    progress: Progress
    cells: list[Cell] = field(default_factory=list)
    real: list[RealRun] = field(default_factory=list)
    hits: HitRate | None = None
    hops: Hops | None = None
    large: dict[str, Window] = field(default_factory=dict)

    def measure(self) -> None:
        """Everything; the real pair's hit rate first, in this process, while nothing else runs."""
        from deployments.launch import cluster

        with self._step("hit rate of the real pair"):
            self.hits = measure_hit_rate(self.config, self.size.prompts_per_kind, self.size.real_tokens)
        self._write(HEADLINE)
        paced = paced_config(self._file, self.config.api.port)
        with cluster(paced, None):
            with self._step("hops"):
                self.hops = measure_hops(num_calls=self.size.num_hops)
            with self._deployed(paced) as lane:
                self._measure_paced(lane)
                self._measure_large(lane)
            with self._deployed(real_config(self.config)) as lane:
                self._measure_real(lane)

    # --- emulated devices ---------------------------------------------------------------------------------------------------

    def _measure_paced(self, lane: BenchLane) -> None:
        cells = [(HEADLINE, batch) for batch in self.size.batches] + [(other, 1) for other in self.size.others]
        bar = self.progress.add_task("", total=len(cells))
        for condition, batch in cells:
            what = f"alpha {condition.alpha:g}, c {condition.c:g}, hop {condition.hop:g}, batch {batch}"
            self.progress.update(bar, description=what)
            self._write(condition)
            self._measure_cell(lane, condition, batch, partial(self._describe, bar, what))
            self.progress.advance(bar)

    def _measure_cell(self, lane: BenchLane, condition: Condition, batch: int, on_arm: Callable[[str], None]) -> None:
        cell = Cell(condition.alpha, condition.c, condition.hop, batch)
        load = Load(MADE_UP_PROMPT, self.size.num_tokens, batch)
        for name, settings in self._arms(condition):
            on_arm(name)
            lane.use(settings, afresh=True)
            lane.play(Load(MADE_UP_PROMPT, WARM_UP_TOKENS, batch), seed=1000)
            texts, window = lane.play(load)
            if window.counters["rounds"] == 0:
                raise OutriderError(
                    f"{name}: the lane was never seen with {batch} requests; the machine is too busy to measure"
                )
            cell.add(name, window, texts)
        self.cells.append(cell)

    def _arms(self, condition: Condition) -> Iterator[tuple[str, dict[str, Any]]]:
        _, best = sequential(condition.alpha, condition.c, condition.hop)
        depths = dict.fromkeys((best, *(self.size.depths if condition == HEADLINE else ())))
        yield "sequential auto", {"depth": "auto", "fan_out": 0}
        for depth in depths:
            yield f"sequential K={depth}", {"depth": depth, "fan_out": 0}
        if condition == HEADLINE:
            # The prepared draft's first forward goes into what was drafted before: one position less than in theory.
            depth = min(MAX_DEPTH, overlapped_depth(condition.c, condition.hop) - 1)
            yield f"overlapped K={depth} F=3", {"depth": depth, "fan_out": 3}
        yield "overlapped auto", {"depth": "auto", "fan_out": "auto"}

    def _measure_large(self, lane: BenchLane) -> None:
        with self._step(f"batch {LARGE_BATCH}"):
            self._write(HEADLINE)
            for name, settings in LARGE_SETTINGS.items():
                lane.use(settings, afresh=True)
                _, self.large[name] = lane.play(Load(MADE_UP_PROMPT, self.size.large_tokens, LARGE_BATCH))

    @property
    def _file(self) -> Path:
        return self.folder / "emulation"

    def _write(self, condition: Condition) -> None:
        new = self.folder / "new"
        new.write_text(condition.emulation, encoding="utf-8")
        os.replace(new, self._file)

    # --- the real pair ------------------------------------------------------------------------------------------------------

    def _measure_real(self, lane: BenchLane) -> None:
        """Arms take turns on every prompt, at temperature 0 and 1, so that a slow phase of the machine hits all alike."""
        arms = [("sequential auto", {"depth": "auto", "fan_out": 0})]
        arms += [(f"sequential K={depth}", {"depth": depth, "fan_out": 0}) for depth in self.size.real_depths]
        arms += [(f"overlapped K={depth} F={fan}", {"depth": depth, "fan_out": fan}) for depth, fan in self.size.real_overlaps]
        arms += [("overlapped auto", {"depth": "auto", "fan_out": "auto"})]
        pinned = pin([lane.pids["target"], lane.pids["draft"]])
        prompts = [prompt for kind in encoded_prompts(self.config, self.size.prompts_per_kind).values() for prompt in kind]
        bar = self.progress.add_task("real pair", total=len(arms) * (2 * len(prompts) + 1))
        for _, settings in arms:
            lane.use(settings, afresh=True)
            lane.play(Load(prompts[0], self.size.real_tokens))
            self.progress.advance(bar)
        for index, prompt in enumerate(prompts):
            for temperature in (0.0, 1.0):
                load = Load(prompt, self.size.real_tokens, temperature=temperature)
                for name, settings in arms[index % len(arms) :] + arms[: index % len(arms)]:
                    lane.use(settings)
                    started_s = time.perf_counter()
                    texts, window = lane.play(load)
                    seconds = time.perf_counter() - started_s
                    self.real.append(
                        RealRun(name, index, temperature, self.size.real_tokens / seconds, texts[0], window, pinned)
                    )
                    self.progress.advance(bar)

    def _describe(self, bar: TaskID, what: str, arm: str) -> None:
        self.progress.update(bar, description=f"{what}: {arm}")

    # --- helpers ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        bar = self.progress.add_task(what, total=None)
        yield
        self.progress.update(bar, total=1, completed=1)

    @contextmanager
    def _deployed(self, config: OutriderConfig) -> Iterator[BenchLane]:
        from deployments.launch import deploy

        with self._step(f"starting {config.served_model_name}"):
            deploy(config)
            lane = wait_for_draft(BenchLane(config))
        yield lane


def wait_for_draft(lane: BenchLane, timeout_s: float = 120.0) -> BenchLane:
    """The lane, once it has a draft; raises `OutriderError` when it does not find one."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        status = lane.status()
        if status is not None and status.draft_state.startswith("ok"):
            return lane
        time.sleep(0.1)
    raise OutriderError("the lane found no draft")


def paced_config(file: Path, port: int) -> OutriderConfig:
    """The application of the emulated pair whose name ``file`` holds."""
    name = f"{FILE_PREFIX}{file}"
    return parse_config(
        {
            "target": {"model": name, "name": "emulated"},
            "draft": {"source": "model", "model": name, "timeout_s": 5.0},
            "lanes": {"max_batch": LARGE_BATCH, "prefill_tokens": LARGE_BATCH * len(MADE_UP_PROMPT)},
            "speculation": {"max_depth": MAX_DEPTH},
            "api": {"port": port, "max_waiting": LARGE_BATCH, "max_choices": LARGE_BATCH},
        }
    )


def real_config(config: OutriderConfig) -> OutriderConfig:
    """The same pair with one thread for each model and no prefix cache, so that every prompt is computed in every arm."""
    tree = config.model_dump()
    tree["target"] |= {"num_threads": 1, "prefix_cache": False}
    tree["draft"] |= {"num_threads": 1, "timeout_s": 5.0}
    return parse_config(tree)


def encoded_prompts(config: OutriderConfig, per_kind: int) -> dict[str, list[Text]]:
    """Prompts of all kinds for the real target, in its chat template where it has one."""
    from engine.models import load_tokenizer

    tokenizer = load_tokenizer(config.target.model).tokenizer

    def encode(text: str) -> Text:
        if tokenizer.chat_template is None:
            return tuple(tokenizer.encode(text))
        messages = [{"role": "user", "content": text}]
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    return {kind: [encode(text) for text in texts[:per_kind]] for kind, texts in PROMPTS.items()}
