"""`outrider distill`: a draft of one's own. Samples from the target, trains, measures; what was done is never done again."""

import gc
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deployments.distill.plan import CHECKPOINTS, DistillOptions, DistillPlan, begin, check_room, find_plan
from engine.config import use_patient_threads
from engine.errors import ConfigError, OutriderError
from engine.testing.profiles import is_emulated

if TYPE_CHECKING:
    from deployments.distill.sample import Sampled
    from engine.distill.student import Student
    from engine.distill.train import TrainingState
    from engine.models import LoadedTokenizer

console = Console(stderr=True)


def run_distill(options: DistillOptions, *, as_json: bool) -> int:
    """Make the draft, print a table on stderr and, if asked, one JSON object as the last line of stdout.

    Raises `ConfigError` for options that cannot work, before anything is sampled, and `OutriderError` for what fails later.
    """
    plan, texts = find_plan(options)
    use_patient_threads()
    _check_target(plan, options.device)
    begin(options.out, plan)
    samples = _sample(options, plan, texts)
    training = _train(options, plan)
    report = _measure(options, plan, samples, training)
    if as_json:
        print(json.dumps(report))
    return 0


def _check_target(plan: DistillPlan, device: str) -> None:
    """What can be known without weights: the target exists, and a student of this shape fits beside it."""
    from engine.distill.draft_student import student_config
    from engine.models import choose_device, load_tokenizer

    if is_emulated(plan.target):
        raise ConfigError(f"--target '{plan.target}' is emulated: it has no logits to learn from; name a real model")
    choose_device(device, "--device")
    student_config(load_tokenizer(plan.target, "--target").config, layers=plan.layers, hidden=plan.hidden)


def _sample(options: DistillOptions, plan: DistillPlan, texts: tuple[str, ...]) -> dict[str, Any]:
    """Sample what is missing. Returns the figures of the report."""
    from deployments.distill.acceptance import engine_config
    from deployments.distill.sample import Sampler, num_stored
    from engine.build import build_local_engine

    last: Sampled | None = None
    _, stored = num_stored(options.out)
    if stored < plan.tokens:
        check_room(options.out, plan.tokens - stored)
        with console.status("loading the target"):
            engine = build_local_engine(engine_config(plan.target, options.device, {"source": "none"}))
        with _progress("{task.fields[rate]}", MofNCompleteColumn()) as progress:
            task = progress.add_task("sampling", total=plan.tokens, completed=stored, rate="")

            def on_tokens(sampled: "Sampled") -> None:
                nonlocal last
                last = sampled
                progress.update(task, completed=sampled.num_tokens, rate=f"{sampled.new_tokens / sampled.seconds:.0f} tokens/s")

            Sampler(engine, plan, options.out, texts).run(on_tokens)
        del engine
        gc.collect()  # the weights and the KV cache of the target make room for the training
    shards, tokens = num_stored(options.out)
    rate = None if last is None else round(last.new_tokens / last.seconds, 1)
    return {"shards": shards, "tokens": tokens, "tokens_per_s": rate}


def _train(options: DistillOptions, plan: DistillPlan) -> dict[str, Any]:
    """Train to the end and write the draft. Returns the figures of the report."""
    from deployments.distill.plan import BATCH_TEXTS, LEARNING_RATE, PART_TEXTS
    from deployments.distill.sample import stored_texts
    from engine.distill.shards import split
    from engine.distill.train import Recipe, Trainer
    from engine.models import load_tokenizer

    train_texts, held_out = split(text for texts in stored_texts(options.out) for text in texts)
    recipe = Recipe(plan.budget, LEARNING_RATE, BATCH_TEXTS, PART_TEXTS, plan.seed)
    with console.status("making the student of the target"):
        student = _build_student(options, plan)
        trainer = Trainer(student, train_texts, held_out, recipe, options.out / CHECKPOINTS)
        trainer.resume()
    with _progress("{task.percentage:>3.0f}%", "loss {task.fields[loss]}", "agreement {task.fields[agreement]}") as progress:
        task = progress.add_task("training", total=1.0, loss="-", agreement="-")

        def on_step(state: "TrainingState", done: float, loss: float) -> None:
            agreement = f"{state.curve[-1]['agreement']:.1%}"
            progress.update(task, completed=done, loss=f"{loss:.3f}", agreement=agreement)

        state = trainer.run(on_step)
    _export(options.out, student, load_tokenizer(plan.target, "--target"))
    return {
        "steps": state.step,
        "best_step": state.best_step,
        "texts": len(train_texts),
        "tokens": state.num_rows,
        "seconds": round(state.elapsed_s, 1),
        "tokens_per_s": round(state.num_rows / state.elapsed_s, 1),
        "curve": state.curve,
    }


def _build_student(options: DistillOptions, plan: DistillPlan) -> "Student":
    from engine.distill.draft_student import DraftStudent
    from engine.models import choose_dtype, load_model

    target = load_model(plan.target, dtype="float32", device=options.device, field="--target")
    dtype, _ = choose_dtype("auto", target.device)
    return DraftStudent.build(target, layers=plan.layers, hidden=plan.hidden, dtype=dtype, seed=plan.seed)


def _export(out: Path, student: "Student", target: "LoadedTokenizer") -> None:
    """The draft beside its samples; the configuration, which makes the folder a model, comes last."""
    partial = out / "draft.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        student.save(partial)
        target.tokenizer.save_pretrained(partial)
        mode = (partial / "config.json").stat().st_mode
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            path.chmod(mode)  # safetensors writes files that only their owner may read
            os.replace(path, out / path.name)
        partial.rmdir()
    except OSError as error:
        raise OutriderError(f"--out: cannot write the draft to {out}: {error.strerror or error}") from None


def _measure(options: DistillOptions, plan: DistillPlan, samples: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    from deployments.distill.acceptance import engine_config, measure_candidates
    from deployments.distill.report import make_report, report_table, verdict, write_report
    from engine.build import build_local_engine

    with console.status("measuring acceptance and cost"):
        engine = build_local_engine(engine_config(plan.target, options.device, {"source": "none"}))
        rows = list(measure_candidates(engine, str(options.out), options.device, quick=plan.quick))
    report = make_report(plan, samples=samples, training=training, rows=rows)
    try:
        write_report(options.out, report)
    except OSError as error:
        raise OutriderError(f"--out: cannot write the report to {options.out}: {error.strerror or error}") from None
    console.print(report_table(report))
    console.print(verdict(report, options.out))
    return report


def _progress(*columns: Any) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *(TextColumn(column) if isinstance(column, str) else column for column in columns),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
