"""What `outrider distill` is asked to do: checked before anything is loaded, and kept in the folder for `--resume`."""

import hashlib
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from deployments.bench.load_plan import read_prompts
from engine.distill.schedule import Budget
from engine.distill.shards import BYTES_PER_TOKEN, TOP_K
from engine.errors import ConfigError

PLAN_FILE = "plan.json"
SAMPLES, CHECKPOINTS = "samples", "checkpoints"
KINDS = ("draft",)
TOKENS, QUICK_TOKENS = 2_000_000, 2_000
OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS = 128, 32
LAYERS, QUICK_LAYERS = 4, 2
PASSES = 3
"""Over the samples, when neither steps nor minutes are given."""
QUICK_STEPS = 8
BATCH_TEXTS, PART_TEXTS = 16, 4
LEARNING_RATE = 1e-3
SPARE_BYTES = 512 * 2**20
"""Beside the samples: room for checkpoints and the draft of a small target."""


@dataclass(frozen=True)
class DistillOptions:
    """The options of the command as they were given; None = not given."""

    target: str
    out: Path
    kind: str | None = None
    layers: int | None = None
    hidden: int | None = None
    tokens: int | None = None
    temperature: float | None = None
    prompts: Path | None = None
    steps: int | None = None
    minutes: float | None = None
    seed: int | None = None
    device: str = "auto"
    resume: bool = False
    quick: bool = False


@dataclass(frozen=True)
class DistillPlan:
    """Everything that decides what becomes of a run: it may not change when the run goes on."""

    target: str
    kind: str
    layers: int
    hidden: int | None
    """Width; None = the target's."""
    tokens: int
    """To be sampled."""
    output_tokens: int
    """Longest text."""
    temperature: float
    prompts: str | None
    """SHA-256 of the user's prompts."""
    steps: int | None
    minutes: float | None
    seed: int
    quick: bool

    @property
    def budget(self) -> Budget:
        """How long to train."""
        return Budget(self.steps, self.minutes)


def make_plan(options: DistillOptions, texts: tuple[str, ...]) -> DistillPlan:
    """Check the options and fill in what was not given; ``texts`` are the user's prompts.

    Raises `ConfigError` that names the option and the fix.
    """
    quick = options.quick
    if options.kind not in (None, *KINDS):
        raise ConfigError(f"--kind {options.kind}: must be one of {', '.join(KINDS)}")
    if options.steps is not None and options.minutes is not None:
        raise ConfigError("--steps and --minutes both say how long to train: give one of them")
    _at_least("--layers", options.layers, 1)
    _at_least("--hidden", options.hidden, 1)
    _at_least("--steps", options.steps, 1)
    output_tokens = QUICK_OUTPUT_TOKENS if quick else OUTPUT_TOKENS
    _at_least("--tokens", options.tokens, 2 * output_tokens, "at least two texts are needed")
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        raise ConfigError(f"--minutes {options.minutes:g}: a number above 0 is needed")
    temperature = 1.0 if options.temperature is None else options.temperature
    if not 0 < temperature <= 2:
        raise ConfigError(f"--temperature {temperature:g}: must be above 0, for texts that differ, and at most 2")
    seed = options.seed or 0
    if not 0 <= seed < 1 << 32:
        raise ConfigError(f"--seed {seed}: must lie between 0 and {(1 << 32) - 1}")
    tokens = options.tokens or (QUICK_TOKENS if quick else TOKENS)
    steps = options.steps
    if steps is None and options.minutes is None:
        steps = QUICK_STEPS if quick else math.ceil(PASSES * tokens / (BATCH_TEXTS * output_tokens))
    return DistillPlan(
        target=options.target,
        kind=options.kind or "draft",
        layers=options.layers or (QUICK_LAYERS if quick else LAYERS),
        hidden=options.hidden,
        tokens=tokens,
        output_tokens=output_tokens,
        temperature=temperature,
        prompts=_digest(texts),
        steps=steps,
        minutes=options.minutes,
        seed=seed,
        quick=quick,
    )


def find_plan(options: DistillOptions) -> tuple[DistillPlan, tuple[str, ...]]:
    """The plan of the run that is to begin or to go on, and the user's prompts; nothing is written.

    Raises `ConfigError`: a folder that holds something else or no run, options that are not those of the run.
    """
    texts = () if options.prompts is None else read_prompts(options.prompts)
    out = options.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file; name a folder")
    if options.resume:
        return _continued(options, texts), texts
    plan = make_plan(options, texts)
    if out.is_dir() and any(out.iterdir()):
        hint = "--resume goes on with the run in it; or " if (out / PLAN_FILE).is_file() else ""
        raise ConfigError(f"--out {out}: the folder is not empty; {hint}name another one")
    return plan, texts


def begin(out: Path, plan: DistillPlan) -> None:
    """Make the folder of a new run, or check that one that goes on can. Raises `ConfigError` when it cannot be written."""
    try:
        for folder in (SAMPLES, CHECKPOINTS):
            (out / folder).mkdir(parents=True, exist_ok=True)
        write_text(out / PLAN_FILE, json.dumps(asdict(plan), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from None


def check_room(out: Path, tokens: int) -> None:
    """Raise `ConfigError` when so many more samples do not fit on the disk."""
    needed, free = tokens * BYTES_PER_TOKEN + SPARE_BYTES, shutil.disk_usage(out).free
    if needed > free:
        raise ConfigError(
            f"--out {out}: {tokens} samples with their {TOP_K} likeliest tokens need {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} are free: choose another disk or fewer --tokens"
        )


def write_text(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _continued(options: DistillOptions, texts: tuple[str, ...]) -> DistillPlan:
    plan = _read_plan(options.out)
    given: dict[str, Any] = {name: getattr(options, name, None) for name in (field.name for field in fields(DistillPlan))}
    given |= {"prompts": _digest(texts), "quick": options.quick or None}
    for name, value in given.items():
        begun = getattr(plan, name)
        if value is not None and value != begun:
            said = "another file's" if name == "prompts" else value
            raise ConfigError(
                f"--{name} is {said} now, but the run in {options.out} was begun with "
                f"{'other prompts or none' if name == 'prompts' else begun}: leave the option out, or begin another run "
                "with another --out"
            )
    if plan.prompts is not None and not texts:
        raise ConfigError(f"--prompts is missing: the run in {options.out} was begun with a file of prompts")
    return plan


def _read_plan(out: Path) -> DistillPlan:
    path = out / PLAN_FILE
    if not path.is_file():
        raise ConfigError(f"--resume: there is no run in {out} ({PLAN_FILE} is missing); leave the option out to begin one")
    try:
        return DistillPlan(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"--resume: {path} cannot be read ({error}): it is of another version, or damaged") from None


def _digest(texts: tuple[str, ...]) -> str | None:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest() if texts else None


def _at_least(name: str, value: int | None, least: int, reason: str = "") -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} {value}: must be at least {least}" + (f"; {reason}" if reason else ""))
