"""What all acceptance rules share: ragged drafts, verdicts, and the table of rules."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


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
        lengths_tensor = torch.tensor(lengths, dtype=torch.int64, device=device)
        return cls(
            tokens=torch.tensor(padded, dtype=torch.int64, device=device).view(len(drafts), width),
            lengths=lengths_tensor,
            first_row=lengths_tensor.cumsum(0) + torch.arange(len(drafts), device=device) - lengths_tensor,
        )

    def position_rows(self) -> Tensor:
        """Row of every draft position, int64 [N, K_max]; positions beyond a sequence's own draft point at its last row."""
        steps = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return self.first_row[:, None] + torch.minimum(steps[None, :], self.lengths[:, None])


@dataclass(frozen=True, slots=True)
class Verdicts:
    """accepted int64 [N]: leading draft tokens kept; tokens int64 [N]: the recovery or bonus token after them."""

    accepted: Tensor
    tokens: Tensor


def leading_true(kept: Tensor) -> Tensor:
    """Number of True before the first False in each row: bool [N, K] -> int64 [N]."""
    return kept.to(torch.int64).cumprod(dim=1).sum(dim=1)


def match_own_tokens(drafts: Drafts, own: Tensor) -> Verdicts:
    """Keep draft tokens while they equal the target's own token of their row; commit the own token at the first mismatch.

    ``own`` is int64 [R]. This is all there is to the rules whose draft only foretells what the target says anyway.
    """
    kept = (own[drafts.position_rows()] == drafts.tokens) & (drafts.tokens >= 0)
    accepted = leading_true(kept)
    return Verdicts(accepted=accepted, tokens=own[drafts.first_row + accepted])


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
    )
}
