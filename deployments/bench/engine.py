"""`outrider bench engine`: the engine's speed by batch, draft and step size, against the memory's and against transformers'.

All arms take turns on every task in one process with the same weights, dtype and threads; ratios are taken task by task and
reported as the median with the quartiles. The prefix cache is off in all of them, so every token is computed.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from deployments.bench.arms import Arm, Task, Text, engine_arm, http_arm, take_turns, warm_up
from deployments.bench.floor import STEP_BATCH, Bandwidth, measure_cost_ratio, measure_curve, measure_round_parts
from deployments.bench.peers import Peer
from deployments.bench.plot import check_plot_file, draw_curve
from deployments.bench.prompts import PROMPTS
from deployments.bench.report import Measured, print_tables, summary
from engine.build import LocalEngine, build_draft_model, build_free_source, build_target, draft_is_a_model, preflight
from engine.config import OutriderConfig, parse_config
from engine.errors import ConfigError
from engine.models import LoadedTokenizer
from engine.propose.base import DraftSource
from engine.scheduler import FixedDepth

console = Console(stderr=True)
BATCHES = (4, 16, 64)
PADDED_BATCHES = (4, 16)
"""Batches of transformers' `generate`."""
LONGEST_PROMPT = 384


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    prompts_per_kind: int
    num_tokens: int
    """Per prompt, one stream."""
    batch_prompt: int
    """Tokens of a prompt in a batch: few, since a batch of whole prompts is mostly prefill, and decoding is measured."""
    batch_tokens: int
    """Per prompt, in batches."""
    repetitions: int
    """Of every batch."""
    sweeps: int
    """Over the step sizes."""
    rounds: int
    """Rounds that are taken apart."""
    depths: tuple[int, ...]
    """Fixed ones, beside the depth that follows the load."""
    http_prompts: int
    """Of the prompts for one stream, how many go over HTTP."""


QUICK = Size(
    prompts_per_kind=1,
    num_tokens=32,
    batch_prompt=16,
    batch_tokens=16,
    repetitions=2,
    sweeps=12,
    rounds=10,
    depths=(4,),
    http_prompts=2,
)
FULL = Size(
    prompts_per_kind=3,
    num_tokens=128,
    batch_prompt=32,
    batch_tokens=48,
    repetitions=4,
    sweeps=40,
    rounds=40,
    depths=(2, 4),
    http_prompts=12,
)


def run_bench_engine(
    config: OutriderConfig, *, quick: bool, as_json: bool, over_http: bool, batches: Sequence[int], plot: Path | None
) -> int:
    """Measure, print tables on stderr and, if asked, one JSON object as the last line of stdout.

    ``batches`` of `BATCHES` are measured besides one stream. The time outside the forward is that of a batch of 64 and is left
    out without it.
    Exit code 1 when arms gave different greedy texts although the target says that its rows are invariant. Raises `ConfigError`
    for a plot that could not be written and a context that is too short.
    """
    if plot is not None:
        check_plot_file(plot)
    size = QUICK if quick else FULL
    config = comparable(config)
    with console.status("loading models"):
        bench = Bench(config, size, batches)
    with Progress(console=console) as progress:
        bench.measure(progress, over_http=over_http)
    result = summary(bench.measured, quick=quick)
    print_tables(result, console)
    if plot is not None:
        title = f"{result['model']}, {result['dtype']}, {result['device']}, {result['threads']} threads"
        draw_curve(plot, result["curve"]["rows"], result["floor"]["floor_ms"], title)
        console.print(f"plot: {plot}")
    if as_json:
        print(json.dumps(result))
    return 1 if result["row_invariant"] and not result["greedy_texts_equal"] else 0


def comparable(config: OutriderConfig) -> OutriderConfig:
    """The configuration without what only one side has: a prefix cache; and with room for the largest batch."""
    tree = config.model_dump()
    tree["target"]["prefix_cache"] = False
    tree["lanes"]["max_batch"] = max(config.lanes.max_batch, STEP_BATCH)
    tree["api"]["max_waiting"] = max(config.api.max_waiting, STEP_BATCH)
    tree["speculation"]["depth"] = "auto"
    return parse_config(tree)


def with_source(config: OutriderConfig, name: str) -> OutriderConfig:
    """The same with another source of drafts, or with two: "self-int8+suffix" is a model with a text beside it."""
    tree = config.model_dump()
    source, _, text = name.partition("+")
    model = config.draft.model if source in ("model", "heads") else None
    shared = config.draft.suffix_shared_tokens if "suffix" in (source, text) else 0
    changes = {"source": source, "text": text or "none", "model": model, "suffix_shared_tokens": shared}
    tree["draft"] = {**tree["draft"], **changes}
    if source != config.draft.source:
        tree["draft"] |= {"dtype": "auto", "skip_layers": None, "window_tokens": None, "sink_tokens": None}
    return parse_config(tree)


def model_source(config: OutriderConfig) -> str:
    """The source that runs a model: the configured one where it does, else the int8 copy."""
    return config.draft.source if draft_is_a_model(config) or config.draft.source == "heads" else "self-int8"


def text_beside(config: OutriderConfig) -> str:
    """The text source that is measured beside the model: the configured one, or suffixes."""
    return config.draft.text if config.draft.text != "none" else "suffix"


def build_engines(config: OutriderConfig) -> dict[str, LocalEngine]:
    """Engines over one target, by source of drafts. A named draft takes the place of the int8 copy: a target that is worth a
    named draft may be too large to be held twice.
    """
    tokenizer = preflight(config)
    model = model_source(config)
    names = ["none", "ngram", "suffix", model, f"{model}+{text_beside(config)}"]
    configs = {name: with_source(config, name) for name in names}
    sources = {
        name: build_draft_model(own) if draft_is_a_model(own) else build_free_source(own)
        for name, own in configs.items()
        if name not in ("none", "heads") and own.draft.text == "none"
    }
    return over_one_target(config, tokenizer, configs, sources)


def over_one_target(
    config: OutriderConfig,
    tokenizer: LoadedTokenizer,
    configs: Mapping[str, OutriderConfig],
    sources: Mapping[str, DraftSource],
) -> dict[str, LocalEngine]:
    """Engines by the names of ``configs``. The target is loaded last, so that its number of threads is the one in use; its
    heads are a source too. They take turns, so one draft model does both with and without a text beside it.
    """
    target = build_target(config)
    if target.heads is not None:
        sources = {**sources, "heads": target.heads}
    return {name: LocalEngine(target, sources.get(name.partition("+")[0]), tokenizer, own) for name, own in configs.items()}


def check_context(engine: LocalEngine, size: Size) -> None:
    """Raise `ConfigError` where the longest prompt and its answer have no room."""
    longest = LONGEST_PROMPT + size.num_tokens
    if engine.info.max_context < longest:
        raise ConfigError(
            f"the benchmark needs a context of {longest} tokens, {engine.info.name} holds {engine.info.max_context}: raise "
            "target.max_context or choose another model"
        )


def single_tasks(engine: LocalEngine, size: Size) -> list[Task]:
    """One stream: prompts of all kinds, in the chat template where there is one."""
    chat = engine.tokenizer.chat_template is not None
    return [
        Task(kind, (tuple(engine.encode(text, chat=chat)[-LONGEST_PROMPT:]),), size.num_tokens)
        for kind, texts in PROMPTS.items()
        for text in texts[: size.prompts_per_kind]
    ]


def batch_task(engine: LocalEngine, batch: int, size: Size) -> Task:
    """Prompts that all differ. The smaller batches are the beginning of the larger ones."""
    texts = [engine.encode(text, chat=False) for texts in PROMPTS.values() for text in texts]
    prompts: list[Text] = []
    for index in range(batch):
        skipped, number = divmod(index, len(texts))
        prompts.append(tuple(texts[number][skipped : skipped + size.batch_prompt]))
    return Task("batch", tuple(prompts), size.batch_tokens)


def shortened(task: Task) -> Task:
    """The same batch, only for warming up."""
    return Task("warm-up", tuple(prompt[:4] for prompt in task.prompts), 4)


@dataclass
class _Turns:
    """Shows whose turn it is; measures the memory's bandwidth beside every turn of plain decoding."""

    progress: Progress
    bar: TaskID
    bandwidth: Bandwidth
    samples: list[float] = field(default_factory=list)

    def __call__(self, arm: Arm, task: Task) -> None:
        self.progress.update(self.bar, description=f"{task.kind}: {arm.name}, batch {arm.batch}")
        self.progress.advance(self.bar)
        if arm.name == "plain" and arm.batch == 1 and task.kind != "warm-up":
            self.samples.append(self.bandwidth.sample())


class Bench:
    """Models, arms, and what was measured."""

    def __init__(self, config: OutriderConfig, size: Size, batches: Sequence[int] = BATCHES):
        self.config = config
        self.size = size
        self.engines = build_engines(config)
        self.plain = self.engines["none"]
        check_context(self.plain, size)
        peer = Peer(config)
        self.singles = list(self._single_arms(peer))
        self.batches = {batch: list(self._batch_arms(peer, batch)) for batch in batches}
        self.measured = Measured(
            info=self.plain.info,
            source=config.draft.source,
            threads=torch.get_num_threads(),
            weight_bytes=peer.bytes_per_step,
            arms=[*self.singles, *(arm for arms in self.batches.values() for arm in arms)],
        )

    def measure(self, progress: Progress, *, over_http: bool) -> None:
        """Everything, in the order in which it is reported."""
        tasks = single_tasks(self.plain, self.size)
        batch_tasks = {batch: batch_task(self.plain, batch, self.size) for batch in self.batches}
        turns = _Turns(progress, progress.add_task("", total=None), Bandwidth(torch.device(self.plain.info.device)))
        self._count(turns, self.singles, len(tasks) + 1)
        warm_up(self.singles, Task("warm-up", tasks[0].prompts, 8), turns)
        take_turns(self.singles, tasks, turns)
        self.measured.bandwidths = turns.samples
        self._measure_steps(progress)
        for batch, arms in self.batches.items():
            self._count(turns, arms, self.size.repetitions + 1)
            warm_up(arms, shortened(batch_tasks[batch]), turns)
            take_turns(arms, [batch_tasks[batch]] * self.size.repetitions, turns)
        if over_http:
            self._measure_http(turns, tasks[: self.size.http_prompts])

    def _count(self, turns: _Turns, arms: Sequence[Arm], num_tasks: int) -> None:
        turns.progress.reset(turns.bar, total=len(arms) * num_tasks)

    def _measure_steps(self, progress: Progress) -> None:
        bar = progress.add_task("step times", total=self.size.sweeps)
        self.measured.curve = measure_curve(self.plain, self.size.sweeps, lambda: progress.advance(bar))
        draft = self.engines[model_source(self.config)].source
        if draft is not None:
            self.measured.cost_ratio = asyncio.run(measure_cost_ratio(self.plain.target, draft))
        if STEP_BATCH in self.batches:
            self.measured.round_parts = measure_round_parts(self.plain, self.size.rounds)

    def _measure_http(self, turns: _Turns, tasks: list[Task]) -> None:
        """The server's own processes take time of the cores, so what is in this process is measured again beside it."""
        from deployments.launch import running

        source = model_source(self.config)
        with running(with_source(self.config, source), None):
            arms = [
                engine_arm("plain beside the server", 1, self.plain),
                engine_arm(f"{source} auto beside the server", 1, self.engines[source]),
                http_arm("http off", self.config, max_depth=0),
                http_arm(f"http {source} auto", self.config, max_depth=None),
            ]
            self._count(turns, arms, len(tasks) + 1)
            warm_up(arms, Task("warm-up", tasks[0].prompts, 16), turns)
            take_turns(arms, tasks, turns)
        self.measured.arms += arms

    def _single_arms(self, peer: Peer) -> Iterator[Arm]:
        yield engine_arm("plain", 1, self.plain)
        for source, engine in self.engines.items():
            if source == "none":
                continue
            yield engine_arm(f"{source} auto", 1, engine)
            if "+" in source:
                continue  # at a fixed depth nothing is chosen by what it costs
            for depth in self.size.depths:
                yield engine_arm(f"{source} K={depth}", 1, engine, FixedDepth(depth))
        yield peer.plain(1)
        yield peer.assisted()

    def _batch_arms(self, peer: Peer, batch: int) -> Iterator[Arm]:
        yield engine_arm("plain", batch, self.plain)
        if batch in PADDED_BATCHES:
            yield peer.plain(batch)
        yield peer.continuous(batch, max(BATCHES), self.size.batch_prompt + self.size.batch_tokens)
