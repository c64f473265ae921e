"""Block verification: the ratio test taken jointly over the whole draft (Sun et al. arXiv 2403.10444, algorithm 2)."""

import torch
from torch import Tensor

from engine.accept.base import DraftProbs, Drafts, Draw, TargetProbs, Verdicts, draw_next


def block(drafts: Drafts, p: TargetProbs, q: DraftProbs, accept_uniform: Tensor, draw: Draw) -> Verdicts:
    """Keep the longest prefix whose own test passes; never fewer tokens in expectation than `rejection`.

    With b_0 = 1, b_i = min(1, b_{i-1} p_i(x_i) / q_i(x_i)) and S_i = Σ_v max(0, b_i p_{i+1}(v) - q_{i+1}(v)), prefix i < K
    passes with probability h_i = S_i / (S_i + 1 - b_i) and the whole draft with h_K = b_K, each by a uniform of its own. The
    next token comes from norm(max(0, b_i p_{i+1} - q_{i+1})), after a whole draft from p. Arguments as in `rejection`.
    """
    reach = _reach(drafts, p, q)
    passed = accept_uniform < _passing_probabilities(drafts, p, q, reach)
    longest = torch.arange(1, reach.shape[1], device=reach.device) * passed
    accepted = torch.cat((torch.zeros_like(drafts.lengths)[:, None], longest), dim=1).amax(dim=1)
    return Verdicts(accepted, draw_next(drafts, p, q, accepted, reach.gather(1, accepted[:, None]).squeeze(1), draw))


def _reach(drafts: Drafts, p: TargetProbs, q: DraftProbs) -> Tensor:
    """b_0 … b_K, float64 [N, K_max + 1]; 0 for padding."""
    p_drafted = p.at(drafts.position_rows(), drafts.tokens.clamp_min(0))
    ratios = torch.where(drafts.real, p_drafted / q.of(drafts.tokens), 0.0)
    reach = [p.log_total.new_ones(len(ratios))]
    for ratio in ratios.unbind(dim=1):
        reach.append((reach[-1] * ratio).clamp_max(1.0))
    return torch.stack(reach, dim=1)


def _passing_probabilities(drafts: Drafts, p: TargetProbs, q: DraftProbs, reach: Tensor) -> Tensor:
    """h_1 … h_K, float64 [N, K_max]; 0 for padding."""
    b = reach[:, 1:]
    # S_i over the n tokens that q_{i+1} knows, and over all others, where b_i p_{i+1} stays whole.
    p_known = torch.where(q.probs > 0, p.at(drafts.position_rows()[..., None], q.ids), 0.0)[:, 1:]
    unknown = (1.0 - p_known.sum(dim=-1)).clamp_min(0.0)
    left = (b[:, :-1, None] * p_known - q.probs[:, 1:]).clamp_min(0.0).sum(dim=-1) + b[:, :-1] * unknown
    total = left + 1.0 - b[:, :-1]
    # Nothing left and b_i = 1 means p = q at the next position, whose b is then 1 again: some longer prefix passes for certain.
    # Behind a shorter draft q is 0, so S_K = b_K and its last h is b_K too; in padding b and with it h is 0.
    return torch.cat((torch.where(total > 0, left / total, 1.0), b[:, -1:]), dim=1)
