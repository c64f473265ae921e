"""Rejection sampling (Leviathan et al. arXiv 2211.17192, algorithm 1; Chen et al. arXiv 2302.01318)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.accept.base import Drafts, Verdicts, leading_true


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """q of every draft position as n (id, probability) pairs: what the token was actually drawn from.

    ids int64 [N, K_max, n] padded with 0, probs float64 [N, K_max, n] padded with 0.
    """

    ids: Tensor
    probs: Tensor

    def of(self, tokens: Tensor) -> Tensor:
        """q of the drafted tokens, float64 [N, K_max]."""
        return torch.where(self.ids == tokens[..., None], self.probs, 0.0).sum(dim=-1)


def rejection(drafts: Drafts, p: Tensor, q: DraftProbs, accept_uniform: Tensor, resample_noise: Tensor) -> Verdicts:
    """Keep draft token x with probability min(1, p(x)/q(x)); at the first refusal draw from norm(max(0, p - q)).

    p float64 [R, V] sums to 1; accept_uniform float64 [N, K_max] in (0, 1); resample_noise float64 [N, V] Gumbel, independent
    of both the accept and the draft noise. Where p - q has no mass (p = q up to rounding) the draw is from p.
    """
    p_drafted = p[drafts.position_rows(), drafts.tokens.clamp_min(0)]
    kept = (accept_uniform * q.of(drafts.tokens) < p_drafted) & (drafts.tokens >= 0)
    accepted = leading_true(kept)
    p_next = p[drafts.first_row + accepted]
    residual = _subtract(p_next, q, accepted, refused=accepted < drafts.lengths)
    return Verdicts(accepted=accepted, tokens=(residual.log() + resample_noise).argmax(dim=-1))


def _subtract(p_next: Tensor, q: DraftProbs, accepted: Tensor, refused: Tensor) -> Tensor:
    """max(0, p - q) where a draft token was refused, p where all were accepted; p also where nothing is left: [N, V]."""
    if q.ids.shape[1] == 0:
        return p_next
    rows = torch.arange(len(accepted), device=accepted.device)
    at = accepted.clamp_max(q.ids.shape[1] - 1)
    masses = torch.where(refused[:, None], q.probs[rows, at], 0.0)
    residual = p_next.scatter_add(1, q.ids[rows, at], -masses).clamp_min(0.0)
    return torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p_next)
