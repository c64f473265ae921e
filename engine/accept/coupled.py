"""Gumbel coupling: draft and target draw with the same noise (Daliri, Musco, Suresh, arXiv 2408.07978).

Each side takes ``argmax_v(log prob_v + G_v)`` with ``G`` keyed by (seed, position). The committed token is always the target's
own, so the text is a function of target, prompt and seed; the draft only decides how many tokens one forward commits.
"""

from torch import Tensor

from engine.accept.base import Drafts, Verdicts, match_own_tokens


def draw(logits: Tensor, noise: Tensor, ids: Tensor | None = None) -> Tensor:
    """Gumbel-max draws, int64 [R]: logits [R, n] (any constant per row may be missing), float64 Gumbel noise [R, n].

    ``ids`` [R, n] names the columns when only some tokens have a chance; it must be in ascending order of preference for ties,
    which have probability zero.
    """
    choice = (noise + logits).argmax(dim=-1, keepdim=True)
    return (choice if ids is None else ids.gather(1, choice)).squeeze(1)


def coupled(drafts: Drafts, logits: Tensor, noise: Tensor, ids: Tensor | None = None) -> Verdicts:
    """Decide from processed logits [R, n] (after temperature and filters) and the shared noise [R, n]."""
    return match_own_tokens(drafts, draw(logits, noise, ids))
