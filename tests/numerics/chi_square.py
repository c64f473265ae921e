"""The exact distribution of short texts, in plain Python, and the test whether texts that were made follow it.

Nothing here uses the engine's code for penalties, temperature or filters: both sides would share its mistakes.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.types import SamplingParams

Table = Sequence[Sequence[float]]


def next_probs(table: Table, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Distribution of the token after ``prompt`` and ``output`` under a model whose logits are ``table[last token]``.

    The logits may not tie.
    """
    ids, counts = [*prompt, *output], Counter(output)
    logits = list(table[ids[-1]])
    for token in set(ids):
        if params.repetition_penalty != 1.0:
            logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        logits[token] -= params.presence_penalty * (counts[token] > 0) + params.frequency_penalty * counts[token]
    weights = [math.exp(logit / params.temperature) for logit in logits]
    ranking = sorted(range(len(weights)), key=lambda token: -weights[token])
    ranking = ranking[: params.top_k or None]
    total = sum(weights[token] for token in ranking)
    kept: list[int] = []
    for token in ranking:
        if sum(weights[other] for other in kept) < params.top_p * total and weights[token] >= params.min_p * max(weights):
            kept.append(token)
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


def exact_joint(table: Table, params: SamplingParams, prompt: Sequence[int], length: int) -> Tensor:
    """Probability of every text of ``length`` tokens, float64 [V, …, V]: the product over its tokens, prefix by prefix."""
    joint = torch.zeros([len(table)] * length, dtype=torch.float64)

    def extend(output: tuple[int, ...], reached: float) -> None:
        if len(output) == length:
            joint[output] = reached
        elif reached > 0:
            for token, prob in enumerate(next_probs(table, params, prompt, output)):
                extend((*output, token), reached * prob)

    extend((), 1.0)
    return joint


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """Upper tail of Pearson's test of float64 counts [n]; a hit in an impossible cell is certain proof.

    Cells with an expectation below 5 are pooled, and so is the smallest of the others while the pool itself stays below 5.
    """
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    num_large = int((expected >= 5).sum())
    while num_large and 0 < expected[num_large:].sum() < 5:
        num_large -= 1
    pooled = torch.cat([expected[:num_large], expected[num_large:].sum()[None]])
    seen = torch.cat([counts[:num_large], counts[num_large:].sum()[None]])
    seen, pooled = seen[pooled > 0], pooled[pooled > 0]
    if len(pooled) == 1:
        return 1.0
    statistic = ((seen - pooled) ** 2 / pooled).sum()
    return float(torch.special.gammaincc(torch.tensor((len(pooled) - 1) / 2, dtype=torch.float64), statistic / 2))


def texts_p(texts: Sequence[Sequence[int]], joint: Tensor) -> float:
    """p-value of texts, all as long as ``joint`` has axes: every marginal from single tokens to the whole (Bonferroni)."""
    counts = torch.zeros_like(joint)
    index = torch.tensor(texts).T
    counts.index_put_(tuple(index), torch.ones(len(texts), dtype=torch.float64), accumulate=True)
    expected = joint * len(texts)
    axes = range(joint.dim())
    views = [kept for size in range(1, joint.dim() + 1) for kept in itertools.combinations(axes, size)]
    smallest = min(chi_square_p(_marginal(counts, kept), _marginal(expected, kept)) for kept in views)
    return min(smallest * len(views), 1.0)


def _marginal(cells: Tensor, kept: tuple[int, ...]) -> Tensor:
    summed = [axis for axis in range(cells.dim()) if axis not in kept]
    return (cells.sum(dim=summed) if summed else cells).flatten()
