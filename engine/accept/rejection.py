"""The ratio test (Leviathan et al. arXiv 2211.17192, algorithm 1; Chen et al. arXiv 2302.01318)."""

from torch import Tensor

from engine.accept.base import DraftProbs, Drafts, Draw, TargetProbs, Verdicts, draw_next, leading_true


def rejection(drafts: Drafts, p: TargetProbs, q: DraftProbs, accept_uniform: Tensor, draw: Draw) -> Verdicts:
    """Keep draft token x with probability min(1, p(x)/q(x)); at the first refusal draw from norm(max(0, p - q)).

    accept_uniform float64 [N, K_max] in (0, 1). Its randomness, that of ``draw`` and that of the draft must be independent:
    shared noise is a bias here.
    """
    p_drafted = p.at(drafts.position_rows(), drafts.tokens.clamp_min(0))
    accepted = leading_true((accept_uniform * q.of(drafts.tokens) < p_drafted) & drafts.real)
    return Verdicts(accepted, draw_next(drafts, p, q, accepted, p.log_total.new_ones(len(accepted)), draw))
