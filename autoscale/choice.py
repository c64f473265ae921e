"""Whether a request is drafted for from its text, by the model, by both in turn, or not at all.

Drafts are worth what they promise less what they cost. With Theta tokens per second, survival t_j and s_j of the text's and the
model's tokens, and b requests that share the draft's steps,

    text:                      sum_j (t_j - Theta dT/dn)
    model, asked for:          sum_j (s_j - Theta (dT/dn + T_draft(b) / b)) - Theta hop / b
    model, prepared:           sum_j (s_j - price)                 (`autoscale.overlap`: its steps hide behind the verify)
    text, then model:          G(j, k) of `autoscale.hybrid`, where the model can be asked to go on after the text's tokens
    model, then text:          sum_j (s_K t_j - Theta dT/dn) beyond the model's K tokens, once these are there

each over as many leading tokens as make it largest. What is prepared follows committed tokens, not the text's, so in
overlapped rounds the model does not go on after the text. The text's draft costs positions of the verify only, so it may pay
where load has closed the model's. ``T_draft(b) / b`` is the least that a step can cost a request: whoever prefers its text
even then is not asked for; what the model's steps really cost those that are left is for `autoscale.allocation` to say, and
who gets nothing there falls back on its text.

**Theta.** Plans know what the model's drafts make, not what the text's add, which may be a multiple. So the planned rate is
multiplied by tokens made per token planned, over the last rounds of the requests that are there: online, that is the iteration
of Dinkelbach (1967), in which the best choice at one rate makes the next one. Drafts count as what was expected of them, at
the cost that is modelled: so only the text moves the factor, and no luck or hiccup does. What the text adds after the model's
drafts is left out: counted, it made as many tokens in replays, and fewer where a match was bad (docs/log.md).

**Switching.** In sequential rounds the model has not read what was committed without it. A round with it would have to be
better by what reading takes, or better again and again: what was forgone is added up, and once it comes to the reading, it is
read (ski rental, at most twice the cost of who knows the future; Karlin et al. 1988). The prompt is no part of that: reading it
pays over the whole output.

**Exactness.** What is drafted, and how deep, is decided before the model's draft of the round is looked at: by the text, after
how much of it the model goes on, lengths, counts of earlier rounds, and whether (not which) tokens are prepared. Under
``rejection`` and ``block`` that is not a matter of taste: a draft that was drawn with q and then dropped, cut or replaced
because of its tokens is no draft from q any more, and what is committed in its place is biased (test_wrong_rules_table.py and
test_mixed_sources.py find it). Only what comes after the drawn tokens may depend on them, as each token of a draft depends on
those before it: so the text may go on after the model, as far as the drawn tokens let it. A text's own draft is certain: its
tokens are a function of those before, and may be looked at and cut as one likes. Under ``greedy`` and ``coupled`` nothing of
this could reach the text, so there the text's token might take the place of another one of the model's. It never does: where
they differed the text was right once in 177 times, and an int8 copy 165 times (docs/log.md).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoscale.allocation import allocate
from autoscale.cost_model import RoundCost
from autoscale.hybrid import NO_HYBRID, Hybrid, Terms, best_hybrid, longest_hybrid
from autoscale.price import expected_tokens
from autoscale.text_acceptance import TextAcceptance
from engine.types import TextChoice, TextOffer

YIELD_DECAY = 0.93
"""Per round: a request remembers about 14 of them."""
LEAST_SHARE = 0.02
"""Of the requests: about what is left of one answer's after 54 rounds in which the text served all."""
YIELD_START_TOKENS = 6.0
"""Made as planned, before a request's first round."""


class Chosen(NamedTuple):
    """What was decided for one request."""

    depth: int
    gain: float
    """Of its text's draft, in tokens."""
    promised: float
    """Tokens of it that are likely kept."""
    is_first: bool
    is_held_back: bool
    """The model would have to read too much."""
    head: int = 0
    """Tokens of the text after which the model goes on; 0 = it doesn't."""
    head_promised: float = 0.0
    """Tokens of these that are likely kept."""
    reach: float = 1.0
    """Chance that all of these are."""
    survival: tuple[float, ...] = ()
    """Of the text's draft, as deep as it is."""
    worth: float = 1.0
    """Of one of the request's tokens (`autoscale.pace`)."""

    @property
    def worths(self) -> list[float]:
        """Of the text's tokens, as they are likely kept."""
        return [self.worth * chance for chance in self.survival]

    def promised_with(self, alpha: float, model_depth: int) -> float:
        """Tokens that the round is expected to make, the target's own included; ``model_depth``: of them the model drafted."""
        if model_depth == 0:
            return 1.0 + self.promised
        return 1.0 + self.head_promised + self.reach * (expected_tokens(alpha, model_depth) - 1.0)


NOT_CHOSEN = Chosen(0, 0.0, 0.0, is_first=False, is_held_back=False)


@dataclass(slots=True)
class _Yield:
    """Of one request, decayed tokens: those it made, and those that its share of the rounds' time was planned to make."""

    made: float = YIELD_START_TOKENS
    planned: float = YIELD_START_TOKENS


class TextChooser:
    """Decides round by round between two sources of drafts, and learns what the text's are worth."""

    def __init__(self) -> None:
        self.acceptance = TextAcceptance()
        self._chosen: dict[str, Chosen] = {}
        self._forgone: dict[str, float] = {}
        """Tokens that the model's drafts would have brought since they were used last."""
        self._yields: dict[str, _Yield] = {}
        self._num_first, self._num_offers = 0, 0
        """Of the last round."""
        self._model_share = 1.0
        self._model_depths: dict[str, int] = {}
        """Of this round's drafts that came from the model."""

    def yield_factor(self, request_ids: Iterable[str]) -> float:
        """Tokens made per token that plans for the model alone had promised these requests; at least 1."""
        known = [self._yields[request_id] for request_id in request_ids if request_id in self._yields]
        return max(sum(one.made for one in known) / sum(one.planned for one in known), 1.0) if known else 1.0

    @property
    def factor(self) -> float:
        """`yield_factor` of the requests that were offered something in this round; 1 where there is no text."""
        return self.yield_factor(self._chosen)

    @property
    def model_share(self) -> float:
        """Of the last rounds' requests, those for which the model was to draft, alone or after the text; 1 without text.

        It fades and never comes to 0 of itself, but whoever has hardly any request to draft for is not wanted.
        """
        return self._model_share if self._model_share >= LEAST_SHARE else 0.0

    def reason(self) -> str:
        """How many requests were drafted for from their text in the last round; empty where there is no text."""
        if self._num_offers == 0:
            return ""
        plural = "s" * (self._num_offers > 1)
        return (
            f"; what the text offers goes before the model's drafts for {self._num_first} of {self._num_offers} request{plural}"
        )

    def of(self, request_id: str) -> Chosen:
        """What was decided for a request in this round."""
        return self._chosen.get(request_id, NOT_CHOSEN)

    def choose(
        self, offers: Sequence[tuple[TextOffer, float]], models: Sequence[Sequence[float]], terms: Terms
    ) -> list[TextChoice]:
        """For every request, how much of its text's draft is worth verifying, and whether before the model's is looked at.

        Each offer comes with what its tokens are worth (`autoscale.pace`), and with the survival of the model's draft in the
        same measure, empty where that is not to be used.
        """
        self._chosen.clear()
        survivals = [self.acceptance.survival(offer) for offer, _ in offers]
        texts = [[worth * chance for chance in own] for own, (_, worth) in zip(survivals, offers, strict=True)]
        free = RoundCost(terms.cost.target, None, 0.0, terms.cost.context_s)
        depths = allocate(texts, terms.rate, free, terms.batch)
        for (offer, worth), survival, text, depth, model in zip(offers, survivals, texts, depths, models, strict=True):
            gain = max(sum(text[:depth]) - depth * terms.position, 0.0)
            hybrid = best_hybrid(survival[: offer.extendable], worth, model, terms)
            is_held_back = self._is_held_back(offer, hybrid.gain - gain, terms)
            chosen = _of_text(survival[:depth], gain, is_held_back, worth)
            is_text = gain >= hybrid.gain or is_held_back
            self._chosen[offer.request.request_id] = chosen if is_text else _with_model(chosen, hybrid, survival)
        return self._choices([offer for offer, _ in offers])

    def choose_by_length(
        self, offers: Sequence[TextOffer], models: Sequence[Sequence[float]], fixed_depth: int
    ) -> list[TextChoice]:
        """The same for a fixed depth: what promises more kept tokens, whatever it costs."""
        self._chosen.clear()
        for offer, model in zip(offers, models, strict=True):
            text = self.acceptance.survival(offer)[:fixed_depth]
            hybrid = longest_hybrid(text[: offer.extendable], model) if model else NO_HYBRID
            chosen = _of_text(text, sum(text), is_held_back=False)
            is_text = sum(text) >= hybrid.gain
            self._chosen[offer.request.request_id] = chosen if is_text else _with_model(chosen, hybrid, text)
        return self._choices(offers)

    def num_verified(self, request_id: str) -> int:
        """Tokens of the text that are verified in this round, if the model drafts as it is to."""
        chosen = self.of(request_id)
        return chosen.head or (chosen.depth if chosen.is_first else 0)

    def trim(self, depths: Mapping[str, int]) -> None:
        """No more than so many tokens of each text are verified in this round. A hybrid that begins with more is none."""
        for request_id, depth in depths.items():
            kept = self.of(request_id).survival[:depth]
            chosen = self.of(request_id)._replace(depth=len(kept), promised=sum(kept), survival=kept)
            if chosen.head > chosen.depth:
                chosen = chosen._replace(head=0, head_promised=0.0, reach=1.0)
            self._chosen[request_id] = chosen

    def after_model(self, offer: TextOffer, worth: Sequence[float], drafted: int) -> list[float]:
        """Worth of the text's tokens after ``drafted`` ones that end with the model's, which are ``worth`` so much each."""
        num_model = drafted - self.of(offer.request.request_id).head
        if not 0 < num_model <= len(worth):
            return []
        return [worth[num_model - 1] * chance for chance in self.acceptance.survival(offer)]

    def observe(self, request_id: str, match: int, share: float, kept: int, tested: int) -> None:
        """As `TextAcceptance.observe`."""
        self.acceptance.observe(request_id, match, share, kept, tested)

    def model_was_used(self, request_id: str, depth: int) -> None:
        """A draft of the model was verified, so it has read all of the request."""
        self._forgone.pop(request_id, None)
        self._model_depths[request_id] = depth

    def end_round(self, alpha: float, planned_rate: float, cost: RoundCost) -> None:
        """A round ended in which the model alone, with ``alpha``, was to make ``planned_rate`` tokens/s at ``cost``."""
        self.acceptance.end_round()
        heads = (one.head if name in self._model_depths else one.depth for name, one in self._chosen.items())
        deepest, batch = max(self._model_depths.values(), default=0), max(len(self._chosen), 1)
        verified = len(self._chosen) + sum(heads) + sum(self._model_depths.values())
        seconds = cost.verify_time(batch, verified) + cost.time(batch, deepest) - cost.verify_time(batch, batch * (deepest + 1))
        for name, chosen in self._chosen.items():
            one = self._yields.setdefault(name, _Yield())
            one.made = YIELD_DECAY * one.made + chosen.promised_with(alpha, self._model_depths.get(name, 0))
            one.planned = YIELD_DECAY * one.planned + planned_rate * seconds / batch
        self._num_first = sum(one.is_first for one in self._chosen.values())
        self._num_offers = len(self._chosen)
        if self._chosen:
            num_model = sum(one.head > 0 or not one.is_first for one in self._chosen.values())
            self._model_share += (1 - YIELD_DECAY) * (num_model / len(self._chosen) - self._model_share)
        self._chosen.clear()
        self._model_depths.clear()

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self.acceptance.forget(request_id)
        for kept in (self._chosen, self._forgone, self._yields, self._model_depths):
            kept.pop(request_id, None)

    def _choices(self, offers: Sequence[TextOffer]) -> list[TextChoice]:
        chosen = [self.of(offer.request.request_id) for offer in offers]
        return [TextChoice(one.depth, one.is_first, one.head) for one in chosen]

    def _is_held_back(self, offer: TextOffer, better: float, terms: Terms) -> bool:
        """Whether the model must wait: it is better by ``better`` tokens, and would have to read first."""
        draft = terms.cost.draft
        if better <= 0 or terms.prepared_price is not None or draft is None or offer.num_unread <= 1:
            return False
        forgone = self._forgone.get(offer.request.request_id, 0.0) + better
        self._forgone[offer.request.request_id] = forgone
        return forgone < terms.rate * (draft.time(offer.num_unread) - draft.time(1))


def _of_text(survival: Sequence[float], gain: float, is_held_back: bool, worth: float = 1.0) -> Chosen:
    depth = len(survival)
    return Chosen(depth, gain, sum(survival), depth > 0, is_held_back, survival=tuple(survival), worth=worth)


def _with_model(chosen: Chosen, hybrid: Hybrid, survival: Sequence[float]) -> Chosen:
    """The model drafts, after so many tokens of the text or from the start. Where it gives nothing, what the text alone offers
    stands in."""
    head = survival[: hybrid.head]
    return chosen._replace(is_first=bool(head), head=len(head), head_promised=sum(head), reach=head[-1] if head else 1.0)
