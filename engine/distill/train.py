"""The training loop: AdamW, a rate that warms up and falls, checkpoints, and a run that goes on where it was killed."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.distill.checkpoints import checkpoint_steps, load_state, load_weights, save_checkpoint
from engine.distill.schedule import Budget, batch_at, in_parts, rate_factor
from engine.distill.shards import Text
from engine.distill.student import Losses, Student
from engine.errors import OutriderError

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
NUM_EVALUATIONS = 20
"""In one run, evenly spread."""
SAVE_AFTER_S = 600.0
"""A run that is killed loses at most so much, even when evaluations are farther apart."""


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    budget: Budget
    learning_rate: float
    batch_texts: int
    """Texts per optimizer step."""
    part_texts: int
    """Texts whose logits are in memory at once."""
    seed: int


@dataclass
class TrainingState:
    """Where a run stands. The texts of a step follow from its number, and nothing else is drawn at random."""

    step: int = 0
    elapsed_s: float = 0.0
    """Spent on steps, in all runs together."""
    num_rows: int = 0
    """Tokens of the target that were learned from, repetitions included."""
    curve: list[dict[str, Any]] = field(default_factory=list)
    """One row per evaluation on held-out texts."""

    @property
    def best_step(self) -> int:
        """Of the evaluation after a step with the least divergence; 0 before the first."""
        rows = [row for row in self.curve if row["step"] > 0]
        return int(min(rows, key=lambda row: row["divergence"])["step"]) if rows else 0


OnStep = Callable[[TrainingState, float, float], None]
"""Called after every step with the state, the share of the run that is done, and the step's mean loss."""


class Trainer:
    """One student, its optimizer, and where they stand."""

    def __init__(self, student: Student, texts: Sequence[Text], held_out: Sequence[Text], recipe: Recipe, folder: Path):
        self.student = student
        self.state = TrainingState()
        self._texts = texts
        self._held_out = held_out
        self._recipe = recipe
        self._folder = folder
        self._optimizer = _optimizer(student.module, recipe.learning_rate)
        self._loss_sum, self._loss_rows = 0.0, 0

    def resume(self) -> bool:
        """Go on from the newest checkpoint, if there is one. Raises `OutriderError` when it is damaged."""
        steps = checkpoint_steps(self._folder)
        if not steps:
            return False
        stored = load_state(self._folder, steps[-1])
        load_weights(self._folder, steps[-1], self.student.module)
        self._optimizer.load_state_dict(stored["optimizer"])
        self._loss_sum, self._loss_rows = stored["loss"]
        self.state = TrainingState(**stored["training"])
        return True

    def run(self, on_step: OnStep = lambda state, progress, loss: None) -> TrainingState:
        """Train to the end of the budget and leave the student with the weights that did best on held-out texts.

        Raises `OutriderError` when the loss is no number any more, or a checkpoint cannot be written.
        """
        if not self.state.curve:
            self._evaluate()
        saved_s = time.monotonic()
        progress = self._progress()
        while progress < 1:
            started_s = time.monotonic()
            loss = self._step(progress)
            self.state.elapsed_s += time.monotonic() - started_s
            before, progress = progress, self._progress()
            is_due = int(progress * NUM_EVALUATIONS) > int(before * NUM_EVALUATIONS)
            if is_due:
                self._evaluate()
            if is_due or time.monotonic() - saved_s > SAVE_AFTER_S:
                self._save()
                saved_s = time.monotonic()
            on_step(self.state, progress, loss)
        if self.state.best_step > 0:
            load_weights(self._folder, self.state.best_step, self.student.module)
        return self.state

    def _progress(self) -> float:
        return self._recipe.budget.progress(self.state.step, self.state.elapsed_s)

    def _step(self, progress: float) -> float:
        recipe = self._recipe
        indices = batch_at(self.state.step, len(self._texts), recipe.batch_texts, recipe.seed)
        num_rows = sum(self._texts[index].num_output for index in indices)
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate_factor(progress)
        total = 0.0
        for part in in_parts(indices, recipe.part_texts):
            losses = self._losses(part, self._texts)
            (losses.total / num_rows).backward()  # type: ignore[no-untyped-call]
            total += float(losses.total.detach())
        if not math.isfinite(total):
            raise OutriderError(f"the loss of step {self.state.step} is {total}: the run has diverged; try another --seed")
        nn.utils.clip_grad_norm_(self.student.module.parameters(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        self.state.num_rows += num_rows
        self._loss_sum += total
        self._loss_rows += num_rows
        return total / num_rows

    def _losses(self, indices: Sequence[int], texts: Sequence[Text]) -> Losses:
        return self.student.loss([texts[index] for index in indices])

    @torch.no_grad()
    def _evaluate(self) -> None:
        parts = in_parts(list(range(len(self._held_out))), self._recipe.part_texts)
        found = [self._losses(part, self._held_out) for part in parts]
        rows = sum(losses.num_rows for losses in found)
        by_step = list(zip(*(losses.agreement_by_step for losses in found), strict=True))
        self.state.curve.append(
            {
                "step": self.state.step,
                "trained_tokens": self.state.num_rows,
                "epochs": self.state.step * self._recipe.batch_texts / len(self._texts),
                "seconds": self.state.elapsed_s,
                "loss": self._loss_sum / max(self._loss_rows, 1),
                "divergence": sum(losses.divergence for losses in found) / rows,
                "agreement": sum(losses.agreement for losses in found) / rows,
                "overlap": sum(losses.overlap for losses in found) / rows,
                **({"agreement_by_step": [_share(counts) for counts in by_step]} if by_step else {}),
            }
        )
        self._loss_sum, self._loss_rows = 0.0, 0

    def _save(self) -> None:
        stored: dict[str, Any] = {
            "training": asdict(self.state),
            "optimizer": self._optimizer.state_dict(),
            "loss": (self._loss_sum, self._loss_rows),
        }
        try:
            save_checkpoint(self._folder, self.state.step, self.student.module, stored, best_step=self.state.best_step)
        except OSError as error:
            raise OutriderError(f"--out: cannot write a checkpoint to {self._folder}: {error.strerror or error}") from None


def _share(counts: Sequence[tuple[float, int]]) -> float:
    return sum(count for count, _ in counts) / max(sum(rows for _, rows in counts), 1)


def _optimizer(module: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},  # norms and biases
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=learning_rate, betas=BETAS)
