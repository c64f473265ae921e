"""`outrider distill`: a draft or head of one's own. Samples from the target, trains, measures; what is done stays done."""

import gc
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deployments.distill.plan import (
    CHECKPOINTS,
    STATES,
    DistillOptions,
    DistillPlan,
    begin,
    check_room,
    check_state_room,
    find_plan,
    state_tokens,
)
from engine.config import use_patient_threads
from engine.errors import ConfigError, OutriderError
from engine.testing.profiles import is_emulated

if TYPE_CHECKING:
    from deployments.distill.sample import Sampled
    from engine.distill.shards import Text
    from engine.distill.student import Student
    from engine.distill.train import TrainingState
    from engine.verify.target import Target

console = Console(stderr=True)


def run_distill(options: DistillOptions, *, as_json: bool) -> int:
    """Make the draft, print a table on stderr and, if asked, one JSON object as the last line of stdout.

    Raises `ConfigError` for options that cannot work, before anything is sampled, and `OutriderError` for what fails later.
    """
    plan, texts = find_plan(options)
    use_patient_threads()
    plan = _fit_to_target(options, plan)
    begin(options.out, plan)
    samples = _sample(options, plan, texts)
    if plan.kind == "head":
        _store_states(options, plan)
    training = _train(options, plan)
    report = _measure(options, plan, samples, training)
    if as_json:
        print(json.dumps(report))
    return 0


def _fit_to_target(options: DistillOptions, plan: DistillPlan) -> DistillPlan:
    """What can be known without weights: the target exists, and a student of this shape fits beside it.

    Returns the plan with a head's vocabulary at most the target's. Raises `ConfigError`, also for one that was asked for.
    """
    from engine.distill.draft_student import student_config
    from engine.distill.head_student import check_fits
    from engine.models import choose_device, load_tokenizer

    if is_emulated(plan.target):
        raise ConfigError(f"--target '{plan.target}' is emulated: it has no logits to learn from; name a real model")
    choose_device(options.device, "--device")
    config = load_tokenizer(plan.target, "--target").config
    if plan.kind == "draft":
        student_config(config, layers=plan.layers, hidden=plan.hidden)
        return plan
    check_fits(config, plan.target)
    vocab_size = config.get_text_config().vocab_size
    if options.vocabulary is not None and options.vocabulary > vocab_size:
        raise ConfigError(f"--vocabulary {options.vocabulary}: the target has {vocab_size} tokens; give at most as many")
    return replace(plan, vocabulary=min(_vocabulary(plan), vocab_size))


def _vocabulary(plan: DistillPlan) -> int:
    if plan.vocabulary is None:
        raise ValueError("the plan of a head has a vocabulary")
    return plan.vocabulary


def _sample(options: DistillOptions, plan: DistillPlan, texts: tuple[str, ...]) -> dict[str, Any]:
    """Sample what is missing. Returns the figures of the report."""
    from deployments.distill.acceptance import engine_config
    from deployments.distill.sample import Sampler
    from engine.build import build_local_engine
    from engine.distill.shards import num_stored

    last: Sampled | None = None
    folder = plan.samples_folder(options.out)
    _, stored = num_stored(folder, plan.tokens)
    if stored < plan.tokens:
        if plan.samples is not None:
            raise OutriderError(
                f"--samples {plan.samples}: {plan.tokens - stored} tokens of its samples are not there any more"
            )
        check_room(options.out, plan.tokens - stored, _most_state_bytes(options, plan))
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
    shards, tokens = num_stored(folder, plan.tokens)
    rate = None if last is None else round(last.new_tokens / last.seconds, 1)
    return {"shards": shards, "tokens": tokens, "tokens_per_s": rate}


def _store_states(options: DistillOptions, plan: DistillPlan) -> None:
    """The hidden states of all samples that have none yet. Raises `ConfigError` when they do not fit on the disk."""
    from deployments.distill.states import StateWriter
    from engine.distill.shards import stored_texts
    from engine.distill.states import states_path

    folder = options.out / STATES
    shards = list(enumerate(stored_texts(plan.samples_folder(options.out), plan.tokens)))
    missing = [(index, texts) for index, texts in shards if not states_path(folder, index).is_file()]
    if not missing:
        return
    num_tokens = sum(len(text.tokens) for _, texts in missing for text in texts)
    check_state_room(options.out, plan, num_tokens * _state_bytes(options, plan))
    with console.status("loading the target"):
        writer = StateWriter(_target_with_states(options, plan), folder)
    with _progress(MofNCompleteColumn()) as progress:
        task = progress.add_task("hidden states", total=num_tokens)
        for index, texts in missing:
            writer.shard(index, texts, lambda count: progress.advance(task, count))
    del writer
    gc.collect()


def _most_state_bytes(options: DistillOptions, plan: DistillPlan) -> int:
    """Hidden states of all texts, those that are sampled by now and the others; 0 for a draft."""
    from engine.distill.shards import stored_texts

    if plan.kind != "head":
        return 0
    texts = [text for shard in stored_texts(plan.samples_folder(options.out), plan.tokens) for text in shard]
    missing = plan.tokens - sum(text.num_output for text in texts)
    return state_tokens(plan, sum(len(text.tokens) for text in texts), missing) * _state_bytes(options, plan)


def _state_bytes(options: DistillOptions, plan: DistillPlan) -> int:
    """Of one token, in the dtype that the target computes in on this machine."""
    from engine.models import choose_device, choose_dtype, load_tokenizer
    from engine.propose.heads.eagle import NUM_FUSED

    dtype, _ = choose_dtype("auto", choose_device(options.device, "--device"))
    return int(dtype.itemsize * NUM_FUSED * load_tokenizer(plan.target, "--target").config.get_text_config().hidden_size)


def _target_with_states(options: DistillOptions, plan: DistillPlan) -> "Target":
    from engine.models import load_model
    from engine.propose.heads.eagle import default_aux_layers
    from engine.verify.target import Target

    loaded = load_model(plan.target, dtype="auto", device=options.device, field="--target")
    layers = default_aux_layers(loaded.config.get_text_config().num_hidden_layers)
    return Target(loaded, prefix_cache=False, hidden_layers=layers)


def _texts(options: DistillOptions, plan: DistillPlan) -> "list[Text]":
    """All samples; for a head with their hidden states, without those that are too short for a single row."""
    from engine.distill.shards import stored_texts

    shards = stored_texts(plan.samples_folder(options.out), plan.tokens)
    if plan.kind != "head":
        return [text for texts in shards for text in texts]
    from engine.distill.head_student import LEAST_TOKENS
    from engine.distill.states import with_states

    placed = (with_states(options.out / STATES, index, texts) for index, texts in enumerate(shards))
    return [text for texts in placed for text in texts if len(text.tokens) >= LEAST_TOKENS]


def _train(options: DistillOptions, plan: DistillPlan) -> dict[str, Any]:
    """Train to the end and write the draft. Returns the figures of the report."""
    from deployments.distill.plan import BATCH_TEXTS, LEARNING_RATE, PART_TEXTS
    from engine.distill.shards import split
    from engine.distill.train import Recipe, Trainer

    train_texts, held_out = split(_texts(options, plan))
    recipe = Recipe(plan.budget, LEARNING_RATE, BATCH_TEXTS[plan.kind], PART_TEXTS, plan.seed)
    with console.status("making the student of the target"):
        student = _build_student(options, plan, train_texts)
        trainer = Trainer(student, train_texts, held_out, recipe, options.out / CHECKPOINTS)
        trainer.resume()
    with _progress("{task.percentage:>3.0f}%", "loss {task.fields[loss]}", "agreement {task.fields[agreement]}") as progress:
        task = progress.add_task("training", total=1.0, loss="-", agreement="-")

        def on_step(state: "TrainingState", done: float, loss: float) -> None:
            agreement = f"{state.curve[-1]['agreement']:.1%}"
            progress.update(task, completed=done, loss=f"{loss:.3f}", agreement=agreement)

        state = trainer.run(on_step)
    _export(options.out, student, plan)
    return {
        "steps": state.step,
        "best_step": state.best_step,
        "texts": len(train_texts),
        "tokens": state.num_rows,
        "seconds": round(state.elapsed_s, 1),
        "tokens_per_s": round(state.num_rows / state.elapsed_s, 1),
        "curve": state.curve,
    }


def _build_student(options: DistillOptions, plan: DistillPlan, texts: "Sequence[Text]") -> "Student":
    from engine.distill.draft_student import DraftStudent
    from engine.distill.head_student import HeadStudent, most_frequent
    from engine.models import choose_dtype, load_model

    target = load_model(plan.target, dtype="float32", device=options.device, field="--target")
    dtype, _ = choose_dtype("auto", target.device)
    if plan.kind == "draft":
        return DraftStudent.build(target, layers=plan.layers, hidden=plan.hidden, dtype=dtype, seed=plan.seed)
    vocab_size = target.config.get_text_config().vocab_size
    draft_ids = most_frequent(texts, _vocabulary(plan), vocab_size)
    return HeadStudent.build(target, draft_ids=draft_ids, dtype=dtype, seed=plan.seed)


def _export(out: Path, student: "Student", plan: DistillPlan) -> None:
    """The draft beside its samples; the configuration, which makes the folder a model, comes last."""
    from engine.models import load_tokenizer

    partial = out / "draft.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        student.save(partial)
        if plan.kind == "draft":  # a head lives with its target
            load_tokenizer(plan.target, "--target").tokenizer.save_pretrained(partial)
        mode = (partial / "config.json").stat().st_mode
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            path.chmod(mode)  # safetensors writes files that only their owner may read
            os.replace(path, out / path.name)
        partial.rmdir()
    except OSError as error:
        raise OutriderError(f"--out: cannot write the draft to {out}: {error.strerror or error}") from None


def _measure(options: DistillOptions, plan: DistillPlan, samples: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    from deployments.distill.acceptance import engine_config, measure_candidates, served_draft
    from deployments.distill.report import make_report, report_table, verdict, write_report
    from engine.build import build_local_engine

    with console.status("measuring acceptance and cost"):
        beside = served_draft(str(options.out), plan.kind).draft if plan.kind == "head" else {"source": "none"}
        engine = build_local_engine(engine_config(plan.target, options.device, beside))
        rows = list(measure_candidates(engine, str(options.out), options.device, plan.kind, quick=plan.quick))
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
