"""What a model's draft is worth, of its own or after tokens of the text: a hybrid draft.

With Theta tokens per second, b requests that share the draft's steps, survival t_j of the text's tokens and s_k of the model's
after what it follows, a draft of j tokens of the text and k of the model is worth, in tokens,

    G(j, k) = sum_{i<=j} (t_i - Theta dT/dn) + sum_{l<=k} (t_j s_l - Theta (dT/dn + T_draft(b) / b))
              - [k > 0] Theta (hop / b + T_draft(b + j) - T_draft(b)),                t_0 = 1.

The text's tokens save the model's steps, which is what they are for: they are read in the first of its steps, all at once. The
model's are tested only if all of the text's were kept. k = 0 is the text alone and j = 0 the model alone, so the best (j, k) is
expected to be at least as good as either; j + k is at most as deep as any draft.
"""

from collections.abc import Sequence
from typing import NamedTuple

from autoscale.cost_model import RoundCost


class Terms(NamedTuple):
    """What the model's and the text's drafts cost in this round."""

    rate: float
    """Theta, tokens per second."""
    cost: RoundCost
    batch: float
    """Requests to reckon with."""
    prepared_price: float | None = None
    """Of a position that was prepared; None in sequential rounds."""

    @property
    def position(self) -> float:
        """Tokens that the lane could make in the time of one more position of a verify."""
        return self.rate * self.cost.target.slope(self.batch)

    def reading(self, num_tokens: int) -> float:
        """And in the time in which the draft reads so many tokens of the text beside its first step."""
        return self.rate * (self.cost.draft_time(self.batch + num_tokens) - self.cost.draft_time(self.batch))


class Hybrid(NamedTuple):
    """The best draft in which the model takes part."""

    head: int
    """Tokens of the text that it begins with; 0 = the model alone."""
    gain: float
    """In tokens; 0 where no such draft pays."""


NO_HYBRID = Hybrid(0, 0.0)


def best_hybrid(text: Sequence[float], worth: float, model: Sequence[float], terms: Terms) -> Hybrid:
    """Over the leading tokens of the text that the model can go on after, whose survival is ``text``.

    ``worth``: of a token. ``model``: what each position of the model's own draft is worth, as many as may be drafted at all.
    What is prepared cannot follow the text, so overlapped rounds have no hybrids.
    """
    best, head_gain = Hybrid(0, model_gain(model, terms)), 0.0
    most = len(model) - 1 if terms.prepared_price is None else 0
    for head, reach in enumerate(text[: max(most, 0)], start=1):
        head_gain += worth * reach - terms.position
        gain = model_gain(after_text(model, head, reach), terms) - terms.reading(head)
        if gain > 0 and head_gain + gain > best.gain:
            best = Hybrid(head, head_gain + gain)
    return best


def longest_hybrid(text: Sequence[float], model: Sequence[float]) -> Hybrid:
    """The draft of which most tokens are likely kept, whatever it costs: as long as ``model``, which is what may be drafted."""
    best, kept = Hybrid(0, sum(model)), 0.0
    for head, reach in enumerate(text[: max(len(model) - 1, 0)], start=1):
        kept += reach
        promised = kept + sum(after_text(model, head, reach))
        if promised > best.gain:
            best = Hybrid(head, promised)
    return best


def after_text(model: Sequence[float], head: int, reach: float) -> list[float]:
    """What the model's positions are worth after ``head`` tokens of the text, all of which are kept with chance ``reach``."""
    return [reach * worth for worth in model[: max(len(model) - head, 0)]]


def model_gain(survival: Sequence[float], terms: Terms) -> float:
    """Tokens that the model's draft of the best length is worth, at least 0."""
    if terms.prepared_price is not None:
        price, paid = terms.prepared_price, 0.0
    else:
        share_s = terms.cost.draft_time(terms.batch) / terms.batch
        price, paid = terms.position + terms.rate * share_s, terms.rate * terms.cost.hop_s / terms.batch
    best, gained = 0.0, -paid
    for probability in survival:
        gained += probability - price
        best = max(best, gained)
    return best
