"""Gumbel coupling: draft and target draw with the same noise (Daliri, Musco, Suresh, arXiv 2408.07978).

Each side takes ``argmax_v(log prob_v + G_v)`` with ``G`` keyed by (seed, position). The committed token is always the target's
own, so the text is a function of target, prompt and seed; the draft only decides how many tokens one forward commits.
"""

import torch
from torch import Tensor

from engine.accept.base import Drafts, Draw, Verdicts, match_own_tokens


def coupled(drafts: Drafts, logits: Tensor, draw: Draw) -> Verdicts:
    """Decide from logits [R, V]; ``draw`` holds temperature, filters and the noise that the draft used too.

    Acceptance per position: Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i) ≥ (1 - TV) / (1 + TV).
    """
    return match_own_tokens(drafts, draw(logits, torch.arange(len(logits), device=logits.device)))
