"""`outrider calibrate`: which cheaper version of the target is worth most as its draft, here.

Every setting drafts after the same committed texts, which the target wrote, and is judged by what the target accepts and by how
long its steps take beside the target's, one request at a time. `engine.calibrate` is something else: the step times that a lane
measures when it starts.
"""

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from autoscale.cost_model import RoundCost
from autoscale.price import best_depth, throughput
from deployments.bench.acceptance import DEPTH, Context, Rounds, encoded_prompts, said_after
from deployments.bench.prompts import PROMPTS
from engine.build import LocalEngine, build_draft_model, build_target, preflight
from engine.config import OutriderConfig, parse_config
from engine.errors import ConfigError, ModelError
from engine.models import load_model
from engine.propose.base import DraftSource
from engine.propose.layer_skip import calibration_ids, rank_layers
from engine.testing.profiles import is_emulated
from engine.types import ProposeItem, ProposeRequest, VerifyItem, VerifyRequest
from engine.verify.target import Target

console = Console(stderr=True)
SKIPPED_SHARES = (1 / 30, 1 / 15, 1 / 10, 1 / 6, 1 / 4)
QUICK_SKIPPED_SHARES = (1 / 30, 1 / 10)
"""Of the target's layers: left out, as many as these, those that matter least."""
WINDOWS = (256, 1024)
"""Tokens; tried where texts are at least twice as long."""
SINKS = 4
REPEATS, QUICK_REPEATS = 8, 5
DraftSection = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """Keys of the section ``draft``, and what came of them."""

    draft: DraftSection
    tested: tuple[int, ...] = ()
    """By position: drafted tokens whose predecessors were all accepted."""
    accepted: tuple[int, ...] = ()
    """Of these."""
    draft_step_s: float = 0.0
    target_times: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of the target's steps that took turns with the draft's."""
    max_depth: int = 0
    refused: str | None = None
    """Why there is nothing."""

    @property
    def name(self) -> str:
        """One short line."""
        parts = [str(self.draft["source"])]
        for key, value in self.draft.items():
            if key == "skip_layers":
                parts.append(f"without {len(value)}")
            elif key not in ("source", "sink_tokens"):
                parts.append(f"window {value}" if key == "window_tokens" else str(value))
        return ", ".join(parts)

    @property
    def alpha(self) -> float:
        """Acceptance per tested token."""
        return sum(self.accepted) / max(sum(self.tested), 1)

    @property
    def cost(self) -> float:
        """c: a draft step over a target step of one token."""
        return self.draft_step_s / self.target_times[0][1]

    @property
    def rounds(self) -> RoundCost:
        """Time of sequential rounds."""
        return RoundCost.measured(self.target_times, ((1, self.draft_step_s),))

    @property
    def depth(self) -> int:
        """K with the largest throughput of one request; 0 where drafts do not pay."""
        return best_depth(1, self.alpha, self.rounds, self.max_depth)

    @property
    def speedup(self) -> float:
        """Expected throughput at that depth over that without drafts, and at a depth of 1 at least: what is lost shows too."""
        depth = max(self.depth, 1)
        return throughput(1, depth, self.alpha, self.rounds) / throughput(1, 0, self.alpha, self.rounds)

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        told: dict[str, Any] = {"name": self.name, "draft": self.draft}
        if self.refused is not None:
            return {**told, "refused": self.refused}
        by_position = [a / t if t else None for a, t in zip(self.accepted, self.tested, strict=True)]
        return {
            **told,
            "alpha": self.alpha,
            "alpha_by_position": by_position,
            "num_tested": sum(self.tested),
            "c": self.cost,
            "draft_step_ms": 1e3 * self.draft_step_s,
            "target_step_ms": 1e3 * self.target_times[0][1],
            "depth": self.depth,
            "expected_speedup": self.speedup,
        }


def run_calibrate(
    config: OutriderConfig, *, quick: bool, as_json: bool, temperature: float = 0.0, context_tokens: int | None = None
) -> int:
    """Measure, print a table on stderr, and on stdout the lines for the configuration or, if asked, one JSON object.

    Returns 1 where no setting is expected to pay. Raises `ConfigError` for an emulated target and for arguments that mean
    nothing, and `ModelError` as `build_target`.
    """
    _check(config, temperature, context_tokens)
    with console.status("loading the target"):
        tokenizer = preflight(_with_draft(config, {"source": "none"}))
        engine = LocalEngine(build_target(config), None, tokenizer, config)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("texts of the target", total=None)
        contexts = _contexts(engine, temperature, context_tokens, quick=quick)
        progress.update(task, description="which layers matter least")
        settings = _settings(config, quick=quick, is_long=context_tokens)
        progress.update(task, total=len(settings))
        measured = []
        for setting in settings:
            progress.update(task, description=setting.name)
            measured.append(_measured(config, setting, engine, contexts, temperature, quick=quick))
            progress.advance(task)
    best = _best(measured)
    _print_table(measured, engine, temperature)
    lines = yaml.safe_dump(_configuration(best), sort_keys=False, default_flow_style=None) if best is not None else ""
    if as_json:
        told = {
            "target": engine.info.name,
            "temperature": temperature,
            "context_tokens": context_tokens,
            "settings": [setting.as_object() for setting in measured],
            "best": None if best is None else best.as_object(),
            "configuration": None if best is None else _configuration(best),
        }
        print(json.dumps(told))
    elif best is not None:
        print(lines, end="")
    if best is None:
        console.print("no setting is expected to pay while draft and target take turns on this device: try ngram or suffix")
    return 0 if best is not None else 1


def _check(config: OutriderConfig, temperature: float, context_tokens: int | None) -> None:
    if is_emulated(config.target.model):
        raise ConfigError(f"target.model '{config.target.model}' is emulated: it has no logits that a draft could agree with")
    if config.speculation.max_depth == 0:
        raise ConfigError("speculation.max_depth is 0, which switches drafts off: set it to 1 or more")
    if not 0 <= temperature <= 2:
        raise ConfigError(f"--temperature must be a number from 0 to 2, got {temperature:g}")
    if context_tokens is not None and context_tokens < 64:
        raise ConfigError(f"--context must be at least 64 tokens, got {context_tokens}")


# --- what is tried ----------------------------------------------------------------------------------------------------------


def _settings(config: OutriderConfig, *, quick: bool, is_long: int | None) -> list[Setting]:
    """The configured draft if it is a named model, copies, and the target without some layers; windows on long texts."""
    sections: list[DraftSection] = []
    if config.draft.source == "model":
        sections.append({"source": "model", "model": config.draft.model, "dtype": config.draft.dtype})
    if config.target.quantization != "int8":
        sections.append({"source": "self-int8"})
    sections.append({"source": "self-int4"})
    if torch.cuda.is_available():
        sections.append({"source": "self-fp8"})
    sections += _layer_skips(config, quick=quick)
    windows = [size for size in WINDOWS if is_long is not None and is_long >= 2 * size]
    base = next((section for section in sections if section["source"] == "self-int8"), sections[0])
    sections += [{**base, "window_tokens": size, "sink_tokens": SINKS} for size in windows]
    return [Setting(section, max_depth=config.speculation.max_depth) for section in sections]


def _layer_skips(config: OutriderConfig, *, quick: bool) -> Iterator[DraftSection]:
    """The target without the layers that change least, more and more of them, as they are and in int8."""
    loaded = load_model(config.target.model, dtype=config.target.dtype, device=config.draft.device)
    try:
        order = rank_layers(loaded, calibration_ids(loaded))
    except ModelError as error:
        console.print(f"layer-skip is left out: {error}")
        return
    shares = QUICK_SKIPPED_SHARES if quick else SKIPPED_SHARES
    for number in sorted({max(1, round(len(order) * share)) for share in shares}):
        layers = sorted(order[:number])
        yield {"source": "layer-skip", "skip_layers": layers}
        yield {"source": "layer-skip", "skip_layers": layers, "dtype": "int8"}


def _with_draft(config: OutriderConfig, draft: DraftSection) -> OutriderConfig:
    """The configuration with another draft on the same device."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    kept = ("device", "num_threads", "kv_cache_tokens", "top_n")
    own = tree.get("draft", {})
    tree["draft"] = {**{key: own[key] for key in kept if key in own}, **draft}
    return parse_config(tree)


def _contexts(engine: LocalEngine, temperature: float, context_tokens: int | None, *, quick: bool) -> list[Context]:
    """Prompts of all kinds with what the target says to them, cut at several places; behind other texts where they are long."""
    cuts = (2, 9, 16, 23) if quick else (2, 7, 12, 17, 22, 27, 32, 37)
    prompts = encoded_prompts(engine, 2 if not quick and context_tokens is None else 1)
    if context_tokens is not None:
        prompts = {name: _lengthened(engine, ids, context_tokens) for name, ids in list(prompts.items())[: 2 if quick else 5]}
    return said_after(engine, prompts, temperature, cuts)


def _lengthened(engine: LocalEngine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The prompt behind all other prompts, over and over, ``num_tokens`` in all."""
    if num_tokens + DEPTH + 40 > engine.info.max_context:
        raise ConfigError(
            f"--context {num_tokens} and an answer do not fit into the {engine.info.max_context} tokens of the target"
        )
    filler = engine.encode("\n\n".join(text for texts in PROMPTS.values() for text in texts), chat=False)
    missing = max(num_tokens - len(prompt), 0)
    return [*(filler * (missing // len(filler) + 1))[:missing], *prompt]


# --- measuring --------------------------------------------------------------------------------------------------------------


def _measured(
    config: OutriderConfig,
    setting: Setting,
    engine: LocalEngine,
    contexts: Sequence[Context],
    temperature: float,
    *,
    quick: bool,
) -> Setting:
    """The setting with its figures, or with the reason why it cannot be had."""
    gc.collect()  # the draft before this one
    try:
        source = build_draft_model(_with_draft(config, setting.draft))
    except (ConfigError, ModelError) as error:
        return Setting(setting.draft, max_depth=setting.max_depth, refused=str(error))
    rounds = Rounds(engine.target, source, contexts)
    tally = rounds.tally("greedy" if temperature == 0 else config.speculation.rule, temperature, 1 if temperature == 0 else 3)
    outcomes = [pair for own in zip(tally.lengths, tally.drafted, strict=True) for pair in zip(*own, strict=True)]
    draft_step_s, target_times = _step_times(engine.target, source, contexts[-1], QUICK_REPEATS if quick else REPEATS)
    rounds.release()
    return Setting(
        setting.draft,
        tested=tuple(sum(j < drafted and j <= kept for kept, drafted in outcomes) for j in range(DEPTH)),
        accepted=tuple(sum(j < kept for kept, _ in outcomes) for j in range(DEPTH)),
        draft_step_s=draft_step_s,
        target_times=target_times,
        max_depth=setting.max_depth,
    )


def _step_times(
    target: Target, source: DraftSource, context: Context, repeats: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Seconds of a draft step, and of target steps of 1 and DEPTH + 1 tokens, in turns: the best of each."""
    base, last = len(context.ids) - 1, context.ids[-1:]
    drafts, targets = [], {1: [], DEPTH + 1: []}  # type: tuple[list[float], dict[int, list[float]]]
    for _ in range(repeats):
        item = ProposeItem(sequence_id=context.name, base_length=base, tokens=last, depth=DEPTH)
        reply = source.propose(ProposeRequest(round_id=0, items=(item,)))
        drafts.append(reply.step_time_s / max(reply.num_steps, 1))
        for size, seconds in targets.items():
            checked = VerifyItem(sequence_id=context.name, base_length=base, tokens=last, draft=last * (size - 1))
            seconds.append(target.verify(VerifyRequest(round_id=0, items=(checked,))).step_time_s)
    return min(drafts), tuple((size, min(seconds)) for size, seconds in targets.items())


# --- telling ----------------------------------------------------------------------------------------------------------------


def _best(measured: Sequence[Setting]) -> Setting | None:
    paying = [setting for setting in measured if setting.refused is None and setting.depth > 0]
    return max(paying, key=lambda setting: setting.speedup, default=None)


def _configuration(best: Setting) -> dict[str, Any]:
    return {"draft": best.draft}


def _print_table(measured: Sequence[Setting], engine: LocalEngine, temperature: float) -> None:
    table = Table("setting", "α", "by position", "c", "best K", "expected speed-up")
    for setting in measured:
        if setting.refused is not None:
            table.add_row(setting.name, "-", setting.refused, "-", "-", "-")
            continue
        shares = [f"{a / t:.0%}" if t else "-" for a, t in zip(setting.accepted, setting.tested, strict=True)]
        table.add_row(
            setting.name,
            f"{setting.alpha:.1%}",
            " ".join(shares),
            f"{setting.cost:.2f}",
            str(setting.depth),
            f"{setting.speedup:.2f}",
        )
    console.print(table)
    console.print(
        f"{engine.info.name}, temperature {temperature:g}, one request, draft and target in turns on what runs this; α: "
        "accepted per drafted token whose predecessors were; c: draft step over target step"
    )
