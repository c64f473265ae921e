"""What `outrider distill` is asked to do: checked before anything is loaded, and kept in the folder for `--resume`."""

import hashlib
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from deployments.bench.load_plan import read_prompts
from engine.distill.schedule import Budget
from engine.distill.shards import BYTES_PER_TOKEN, TOP_K, num_stored
from engine.errors import ConfigError

PLAN_FILE = "plan.json"
SAMPLES, STATES, CHECKPOINTS = "samples", "states", "checkpoints"
KINDS = ("draft", "head")
ONLY_FOR = {"layers": "draft", "hidden": "draft", "vocabulary": "head"}
"""Options that mean something for one kind."""
SAMPLING = ("tokens", "temperature", "prompts")
"""Options that say what to sample."""
VOCABULARY, QUICK_VOCABULARY = 8192, 1024
TOKENS, QUICK_TOKENS = 2_000_000, 2_000
OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS = 128, 32
MAX_PROMPT_TOKENS = 512
LAYERS, QUICK_LAYERS = 4, 2
PASSES = 3
"""Over the samples, when neither steps nor minutes are given."""
QUICK_STEPS = 8
BATCH_TEXTS = {"draft": 16, "head": 8}
"""Per step, by kind: a head is small, so that more steps cost little more."""
PART_TEXTS = 4
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
    vocabulary: int | None = None
    samples: Path | None = None
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
    """To be sampled, or those that are trained on of another run's samples."""
    output_tokens: int
    """Longest text."""
    temperature: float
    prompts: str | None
    """SHA-256 of the user's prompts."""
    steps: int | None
    minutes: float | None
    seed: int
    quick: bool
    vocabulary: int | None = None
    """Draft ids of a head, none for a draft."""
    samples: str | None = None
    """Folder of the run that sampled what is used here; None = this one samples."""

    @property
    def budget(self) -> Budget:
        """How long to train."""
        return Budget(self.steps, self.minutes)

    def samples_folder(self, out: Path) -> Path:
        """Where the shards of texts are."""
        return (out if self.samples is None else Path(self.samples)) / SAMPLES


def make_plan(options: DistillOptions, texts: tuple[str, ...]) -> DistillPlan:
    """Check the options and fill in what was not given; ``texts`` are the user's prompts.

    Raises `ConfigError` that names the option and the fix.
    """
    quick, kind = options.quick, options.kind or "draft"
    _check_numbers(options)
    other = None if options.samples is None else _samples_of(options)
    if other is not None:
        tokens, output_tokens, temperature, prompts = other.tokens, other.output_tokens, other.temperature, other.prompts
    else:
        tokens, output_tokens = options.tokens or (QUICK_TOKENS if quick else TOKENS), _output_tokens(quick)
        temperature, prompts = 1.0 if options.temperature is None else options.temperature, _digest(texts)
    steps = options.steps
    if steps is None and options.minutes is None:
        steps = QUICK_STEPS if quick else math.ceil(PASSES * tokens / (BATCH_TEXTS[kind] * output_tokens))
    return DistillPlan(
        target=options.target,
        kind=kind,
        layers=1 if kind == "head" else options.layers or (QUICK_LAYERS if quick else LAYERS),
        hidden=options.hidden,
        tokens=tokens,
        output_tokens=output_tokens,
        temperature=temperature,
        prompts=prompts,
        steps=steps,
        minutes=options.minutes,
        seed=options.seed or 0,
        quick=quick,
        vocabulary=options.vocabulary or (QUICK_VOCABULARY if quick else VOCABULARY) if kind == "head" else None,
        samples=None if other is None else other.samples,
    )


def _check_numbers(options: DistillOptions) -> None:
    """What can be said of each option alone, and of those that exclude each other."""
    kind = options.kind or "draft"
    if kind not in KINDS:
        raise ConfigError(f"--kind {options.kind}: must be one of {', '.join(KINDS)}")
    for name, only in ONLY_FOR.items():
        if getattr(options, name) is not None and kind != only:
            raise ConfigError(f"--{name} has no meaning for --kind {kind}: remove it, or set --kind {only}")
    if options.steps is not None and options.minutes is not None:
        raise ConfigError("--steps and --minutes both say how long to train: give one of them")
    _at_least("--layers", options.layers, 1)
    _at_least("--hidden", options.hidden, 1)
    _at_least("--vocabulary", options.vocabulary, 2)
    _at_least("--steps", options.steps, 1)
    _at_least("--tokens", options.tokens, 2 * _output_tokens(options.quick), "at least two texts are needed")
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        raise ConfigError(f"--minutes {options.minutes:g}: a number above 0 is needed")
    if options.temperature is not None and not 0 < options.temperature <= 2:
        raise ConfigError(f"--temperature {options.temperature:g}: must be above 0, for texts that differ, and at most 2")
    if not 0 <= (options.seed or 0) < 1 << 32:
        raise ConfigError(f"--seed {options.seed}: must lie between 0 and {(1 << 32) - 1}")


def _output_tokens(quick: bool) -> int:
    return QUICK_OUTPUT_TOKENS if quick else OUTPUT_TOKENS


def _samples_of(options: DistillOptions) -> DistillPlan:
    """The plan of the run whose samples are to be used, with their folder and as many tokens as are there.

    Raises `ConfigError`.
    """
    folder = options.samples
    assert folder is not None
    for name in SAMPLING:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} says what to sample, and with --samples nothing is sampled: give one of them")
    plan = _read_plan(folder, "--samples")
    if plan.target != options.target:
        raise ConfigError(f"--samples {folder}: its texts are of {plan.target}, not of --target {options.target}")
    sampled_in = _sampled_in(folder)
    shards, tokens = num_stored(Path(sampled_in) / SAMPLES)
    if shards == 0:
        raise ConfigError(
            f"--samples {folder}: there is no complete shard in {sampled_in}; `outrider distill --resume` samples on there"
        )
    return replace(plan, tokens=tokens, samples=sampled_in)


def _sampled_in(folder: Path) -> str:
    """The run in ``folder``, or the one whose samples that run was begun with: where the shards are."""
    is_run = (folder / PLAN_FILE).is_file()
    samples = _read_plan(folder, "--samples").samples_folder(folder) if is_run else folder / SAMPLES
    return str(samples.parent.resolve())


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
        unused = {*([SAMPLES] if plan.samples else []), *([STATES] if plan.kind != "head" else [])}
        for folder in {SAMPLES, STATES, CHECKPOINTS} - unused:
            (out / folder).mkdir(parents=True, exist_ok=True)
        write_text(out / PLAN_FILE, json.dumps(asdict(plan), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from None


def check_room(out: Path, tokens: int, state_bytes: int = 0) -> None:
    """Raise `ConfigError` when so many more samples, and beside them hidden states of at most so many bytes, do not fit."""
    needed, free = tokens * BYTES_PER_TOKEN + state_bytes + SPARE_BYTES, shutil.disk_usage(out).free
    if needed > free:
        states = f" and at most {_gib(state_bytes)} of hidden states, prompts at their longest," if state_bytes else ""
        raise ConfigError(
            f"--out {out}: {tokens} samples with their {TOP_K} likeliest tokens{states} need {_gib(needed)}, "
            f"{_gib(free)} are free: free some and go on with --resume, or begin another run with --out on another disk or "
            "fewer --tokens"
        )


def check_state_room(out: Path, plan: DistillPlan, state_bytes: int) -> None:
    """Raise `ConfigError` when the hidden states of samples that are there (bytes) do not fit on the disk."""
    needed, free = state_bytes + SPARE_BYTES, shutil.disk_usage(out).free
    if needed > free:
        raise ConfigError(
            f"--out {out}: the hidden states of its samples need {_gib(needed)}, {_gib(free)} are free: free some and go on "
            f"with --resume, or begin another run with --out on another disk and --samples {plan.samples_folder(out).parent}"
        )


def state_tokens(plan: DistillPlan, sampled: int, missing: int) -> int:
    """Most tokens that hidden states are stored of: of texts with ``sampled`` tokens, and of those that ``missing`` will be in.

    Texts that end early are more of them, which prompts below their longest make up for.
    """
    return sampled + -(-missing // plan.output_tokens) * (MAX_PROMPT_TOKENS + plan.output_tokens)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def write_text(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _continued(options: DistillOptions, texts: tuple[str, ...]) -> DistillPlan:
    plan = _read_plan(options.out, "--resume")
    given: dict[str, Any] = {name: getattr(options, name, None) for name in (field.name for field in fields(DistillPlan))}
    samples = None if options.samples is None else _sampled_in(options.samples)
    given |= {"prompts": _digest(texts), "quick": options.quick or None, "samples": samples}
    for name, value in given.items():
        begun = getattr(plan, name)
        if value is not None and value != begun:
            said = "another file's" if name == "prompts" else value
            raise ConfigError(
                f"--{name} is {said} now, but the run in {options.out} was begun with "
                f"{'other prompts or none' if name == 'prompts' else begun}: leave the option out, or begin another run "
                "with another --out"
            )
    if plan.prompts is not None and plan.samples is None and not texts:
        raise ConfigError(f"--prompts is missing: the run in {options.out} was begun with a file of prompts")
    return plan


def _read_plan(out: Path, option: str) -> DistillPlan:
    path = out / PLAN_FILE
    if not path.is_file():
        raise ConfigError(f"{option}: there is no run in {out} ({PLAN_FILE} is missing); leave the option out to begin one")
    try:
        return DistillPlan(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{option}: {path} cannot be read ({error}): it is of another version, or damaged") from None


def _digest(texts: tuple[str, ...]) -> str | None:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest() if texts else None


def _at_least(name: str, value: int | None, least: int, reason: str = "") -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name} {value}: must be at least {least}" + (f"; {reason}" if reason else ""))
