"""What the trainer needs of a model that learns from a target, and what such a model learns from."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.distill.shards import Text

CROSS_ENTROPY_WEIGHT = 0.1
"""Of the sampled token, beside 1 for the divergence: it is the same gradient with noise, and all there is beyond the stored
top tokens."""


@dataclass(frozen=True)
class Said:
    """What the target said at some rows, in the student's ids."""

    next_ids: Tensor
    """[N] int64: what it wrote there; -1 for what the student cannot say."""
    top_ids: Tensor
    """[N, K] int64."""
    top_logprobs: Tensor
    """[N, K] float32; -inf for what does not count."""

    @classmethod
    def of(cls, texts: Sequence[Text]) -> "Said":
        """After all prompts, one text behind the other; on the CPU."""
        return cls(
            torch.cat([torch.from_numpy(text.tokens[text.prompt_length :]).long() for text in texts]),
            torch.cat([torch.from_numpy(text.top_ids).long() for text in texts]),
            torch.cat([torch.from_numpy(text.top_logprobs) for text in texts]),
        )

    def to(self, device: torch.device) -> "Said":
        """The same there."""
        return Said(self.next_ids.to(device), self.top_ids.to(device), self.top_logprobs.to(device))

    def at(self, rows: Tensor) -> "Said":
        """At these rows only."""
        return Said(self.next_ids[rows], self.top_ids[rows], self.top_logprobs[rows])


@dataclass(frozen=True)
class Batch:
    """Texts of different lengths, filled up at the end, which no position before it can see."""

    ids: Tensor
    """[B, L] int64."""
    rows: Tensor
    """[N] int64: positions in the flattened [B * L] whose next token the target wrote."""
    said: Said
    """Of these rows."""

    @classmethod
    def of(cls, texts: Sequence[Text], device: torch.device) -> "Batch":
        """Pack texts."""
        longest = max(len(text.tokens) for text in texts)
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        rows = []
        for index, text in enumerate(texts):
            tokens = torch.from_numpy(text.tokens).long()
            ids[index, : len(tokens)] = tokens
            first = index * longest + text.prompt_length
            rows.append(torch.arange(first - 1, first - 1 + text.num_output))
        return cls(ids.to(device), torch.cat(rows).to(device), Said.of(texts).to(device))


@dataclass(frozen=True)
class Losses:
    """Sums over the rows of a batch."""

    total: Tensor
    """Scalar with a gradient: what is minimised."""
    divergence: float
    """Kullback-Leibler divergence from the target, in nats, over its top tokens and all others as one."""
    agreement: float
    """Rows where both find the same token likeliest: what greedy drafts are accepted by."""
    overlap: float
    """Sums of min(p, q) over the target's top tokens: a lower bound of what the ratio test accepts at temperature 1."""
    num_rows: int
    agreement_by_step: tuple[tuple[float, int], ...] = ()
    """Of a student that drafts on: (rows that agree, rows) by how many of its own tokens lie between it and the target."""


class Student(Protocol):
    """A model that is trained to foresee the target. A kind of student is one module that implements this."""

    @property
    def module(self) -> nn.Module:
        """The weights; those that are trained require gradients."""

    def loss(self, texts: Sequence[Text]) -> Losses:
        """One forward over texts, on the device of the weights."""

    def save(self, folder: Path) -> None:
        """Write what serves as a draft: configuration and weights. Raises OSError."""


def mixed_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """What to train in: on CPU casting weights anew in every step costs more than products in bfloat16 save (docs/log.md)."""
    if device.type == "cuda" and dtype == torch.bfloat16:  # float16 would need its gradients scaled
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def distillation_loss(logits: Tensor, said: Said) -> Losses:
    """Divergence from the target plus a little cross-entropy of what it wrote, from the student's logits [N, V] at the rows.

    The target is known at its top K tokens. The rest of the vocabulary counts as one more token, with what is left of the
    probability on either side; within the rest only the cross-entropy teaches. Tokens that the student cannot say are part of
    the target's rest: it learns to be unsure where they are likely.
    """
    logprobs = F.log_softmax(logits.float(), dim=-1)
    ours = logprobs.gather(1, said.top_ids)
    theirs = said.top_logprobs
    probs = theirs.exp()
    known = torch.where(probs > 0, probs * (theirs - ours), torch.zeros_like(ours)).sum(dim=1)
    divergence = known + _rest_divergence(probs, torch.where(probs > 0, ours.exp(), torch.zeros_like(ours)))
    wrote = logprobs.gather(1, said.next_ids.clamp_min(0)[:, None])[:, 0]
    cross_entropy = -torch.where(said.next_ids >= 0, wrote, torch.zeros_like(wrote))
    with torch.no_grad():
        agreement = ((logprobs.argmax(dim=1) == said.top_ids[:, 0]) & (probs[:, 0] > 0)).sum()
        overlap = torch.minimum(ours.exp(), probs).sum()
    return Losses(
        total=(divergence + CROSS_ENTROPY_WEIGHT * cross_entropy).sum(),
        divergence=float(divergence.detach().sum()),
        agreement=float(agreement),
        overlap=float(overlap),
        num_rows=len(said.next_ids),
    )


def _rest_divergence(probs: Tensor, ours: Tensor) -> Tensor:
    """The term of all tokens that are not among the top ones, [N]."""
    least = torch.finfo(torch.float32).eps
    rest, our_rest = (1 - probs.sum(dim=1)).clamp_min(0), (1 - ours.sum(dim=1)).clamp_min(least)
    return torch.where(rest > least, rest * (rest.clamp_min(least) / our_rest).log(), torch.zeros_like(rest))
