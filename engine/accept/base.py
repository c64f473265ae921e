"""What all acceptance rules share: ragged drafts, both distributions, verdicts, and the table of rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.transfer import on_device

Draw = Callable[[Tensor, Tensor], Tensor]
"""(log-weights [M, V] up to a constant per row, rows int64 [M] of the verify that they stand for) -> one token each, int64 [M].

All randomness of a drawn token is in here: the caller keys it by the row's sequence and position.
"""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of N sequences over the R = Σ(K_i + 1) rows of one verify. Sequence i owns rows first_row[i] … +K_i.

    Row first_row[i] + j predicts the token at draft position j; the last row of a sequence predicts its bonus token.
    """

    tokens: Tensor
    """int64 [N, K_max], padded with -1."""
    lengths: Tensor
    """int64 [N]: K_i, zero included."""
    first_row: Tensor
    """int64 [N]."""

    @classmethod
    def from_lists(cls, drafts: list[tuple[int, ...]], device: torch.device | str = "cpu") -> "Drafts":
        """Pack drafts whose rows follow one another in the given order."""
        lengths = [len(draft) for draft in drafts]
        width = max(lengths, default=0)
        padded = [list(draft) + [-1] * (width - len(draft)) for draft in drafts]
        device = torch.device(device)
        lengths_tensor = on_device(lengths, torch.int64, device)
        return cls(
            tokens=on_device(padded, torch.int64, device).view(len(drafts), width),
            lengths=lengths_tensor,
            first_row=lengths_tensor.cumsum(0) + torch.arange(len(drafts), device=device) - lengths_tensor,
        )

    @property
    def real(self) -> Tensor:
        """Which entries of ``tokens`` are draft tokens and not padding: bool [N, K_max]."""
        return self.tokens >= 0

    def position_rows(self) -> Tensor:
        """Row of every draft position, int64 [N, K_max]; positions beyond a sequence's own draft point at its last row."""
        steps = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return self.first_row[:, None] + torch.minimum(steps[None, :], self.lengths[:, None])


@dataclass(frozen=True, slots=True)
class Verdicts:
    """accepted int64 [N]: leading draft tokens kept; tokens int64 [N]: the recovery or bonus token after them."""

    accepted: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class TargetProbs:
    """p of every row of a verify, as its logarithm: ``logits`` [R, V] of any float dtype, minus ``log_total`` float64 [R]."""

    logits: Tensor
    log_total: Tensor

    @classmethod
    def from_logits(cls, logits: Tensor) -> "TargetProbs":
        """Normalise rows of logits [R, V]; a row's total has the same bits in every batch.

        ``log_softmax`` sums each row in one fixed order, where ``logsumexp`` splits a lone long row over threads.
        """
        return cls(logits, (logits.amax(dim=-1) - torch.log_softmax(logits, dim=-1).amax(dim=-1)).double())

    @classmethod
    def from_probs(cls, p: Tensor) -> "TargetProbs":
        """From float64 probabilities [R, V] that sum to 1."""
        return cls(p.log(), p.new_zeros(len(p)))

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        """p of token ``ids`` in ``rows`` (int64, broadcast against each other), float64."""
        return (self.logits[rows, ids].double() - self.log_total[rows]).exp()

    def of_rows(self, rows: Tensor) -> Tensor:
        """p of whole rows int64 [M], float64 [M, V]."""
        return (self.logits[rows].double() - self.log_total[rows, None]).exp_()


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """q of every draft position as n (id, probability) pairs: what the token was actually drawn from.

    ids int64 [N, K_max, n] padded with 0, probs float64 [N, K_max, n] padded with 0.
    """

    ids: Tensor
    probs: Tensor

    def of(self, tokens: Tensor) -> Tensor:
        """q of the drafted tokens int64 [N, K_max], float64 [N, K_max]."""
        return torch.where(self.ids == tokens[..., None], self.probs, 0.0).sum(dim=-1)


def leading_true(kept: Tensor) -> Tensor:
    """Number of True before the first False in each row: bool [N, K] -> int64 [N]."""
    return kept.to(torch.int64).cumprod(dim=1).sum(dim=1)


def match_own_tokens(drafts: Drafts, own: Tensor) -> Verdicts:
    """Keep draft tokens while they equal the target's own token of their row; commit the own token at the first mismatch.

    ``own`` is int64 [R]. This is all there is to the rules whose draft only foretells what the target says anyway.
    """
    accepted = leading_true((own[drafts.position_rows()] == drafts.tokens) & drafts.real)
    return Verdicts(accepted=accepted, tokens=own[drafts.first_row + accepted])


def draw_next(drafts: Drafts, p: TargetProbs, q: DraftProbs, accepted: Tensor, scale: Tensor, draw: Draw) -> Tensor:
    """The token after the ``accepted`` ones, int64 [N]: from norm(max(0, scale · p - q)), or from p after a whole draft.

    ``scale`` float64 [N] is 1 for the ratio test. Where nothing is left (p = q up to rounding) the draw is from p.
    """
    rows = drafts.first_row + accepted
    weights = p.of_rows(rows)
    if q.ids.shape[1]:
        sequences = torch.arange(len(accepted), device=accepted.device)
        at = accepted.clamp_max(q.ids.shape[1] - 1)
        refused = (accepted < drafts.lengths)[:, None]
        residual = (weights * scale[:, None]).scatter_add_(1, q.ids[sequences, at], -q.probs[sequences, at]).clamp_min_(0.0)
        weights = torch.where(refused & (residual.sum(dim=-1, keepdim=True) > 0), residual, weights)
    return draw(weights.log_(), rows)


@dataclass(frozen=True, slots=True)
class Rule:
    """An acceptance rule as the configuration and the wire see it."""

    name: str
    wire: Literal["ids", "sparse_q"]
    """What a draft must send: token ids only, or also the distribution that each token was drawn from."""
    summary: str


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("greedy", "ids", "keep while the draft token is the target's most likely one"),
        Rule("coupled", "ids", "keep while draft and target draw the same token from shared noise"),
        Rule("rejection", "sparse_q", "keep with probability min(1, p/q), else draw from what q lacks of p"),
        Rule("block", "sparse_q", "as rejection, but deciding on the whole draft at once: never fewer tokens in expectation"),
    )
}
