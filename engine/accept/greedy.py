"""Temperature 0: the target's most likely token, lowest id on ties."""

from torch import Tensor

from engine.accept.base import Drafts, Verdicts, match_own_tokens


def greedy(drafts: Drafts, logits: Tensor) -> Verdicts:
    """Decide from logits [R, V]. ``argmax`` returns the first of equal maxima, on the draft's side too."""
    return match_own_tokens(drafts, logits.argmax(dim=-1))
