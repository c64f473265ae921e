"""What a training step does, from its number alone: a run that was interrupted needs no other state to go on alike."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

WARM_UP = 0.05
"""Share of the run in which the learning rate rises."""
LAST_RATE = 0.05
"""Share of the learning rate at the end of the run."""


@dataclass(frozen=True)
class Budget:
    """How long to train: so many optimizer steps, or so many minutes. Exactly one of them is set."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("a budget is either steps or minutes")

    def progress(self, step: int, elapsed_s: float) -> float:
        """Share of the run that lies behind when ``step`` steps and ``elapsed_s`` seconds of training do; 1 ends it."""
        spent = step / self.steps if self.steps is not None else elapsed_s / (60 * (self.minutes or 0.0))
        return min(spent, 1.0)


def rate_factor(progress: float) -> float:
    """Factor of the learning rate: up linearly, then down along half a cosine (Loshchilov & Hutter 2017, SGDR)."""
    if progress < WARM_UP:
        return LAST_RATE + (1 - LAST_RATE) * progress / WARM_UP
    angle = math.pi * (progress - WARM_UP) / (1 - WARM_UP)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(angle)) / 2


def batch_at(step: int, num_texts: int, batch_size: int, seed: int) -> list[int]:
    """Indices of the texts of step ``step`` (from 0): every text once per epoch, each epoch in an order of its own."""
    first = step * batch_size
    indices = range(first, first + batch_size)
    orders = {epoch: _order(epoch, num_texts, seed) for epoch in {index // num_texts for index in indices}}
    return [orders[index // num_texts][index % num_texts] for index in indices]


def in_parts(indices: list[int], size: int) -> Iterator[list[int]]:
    """The same in parts of at most ``size``, whose gradients are added up."""
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def _order(epoch: int, num_texts: int, seed: int) -> list[int]:
    order = list(range(num_texts))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
