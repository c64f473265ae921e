"""From logits to tokens: drawing and accepting for a ragged batch, every request with its own parameters and rule.

Draft and target use the same code, so p and q are both the distributions *after* everything in `engine.processing`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine import noise
from engine.accept import DraftProbs, Drafts, TargetProbs, Verdicts, block, coupled, greedy, rejection
from engine.accept.greedy import most_likely
from engine.noise import Stream
from engine.processing import Kept, SampledSequence, filtered, first_rows, has_filter, penalised, tempered
from engine.types import SparseProbs, TokenLogprob

__all__ = ["DRAFT_PROBS", "Decision", "SampledSequence", "decide", "likeliest_next", "propose_tokens", "token_logprobs"]

DRAFT_PROBS = 64
"""A draft that must report q draws from its most likely tokens, cut here and renormalised: that is then its q, exactly."""


@dataclass(slots=True)
class Decision:
    """What one sequence commits: the first ``accepted`` draft tokens, then ``token``. With ``error`` set it commits nothing."""

    accepted: int
    token: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


def decide(logits: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: tuple[int, ...]) -> list[Decision]:
    """Decide all drafts of a verify. logits [R, V] of any float dtype, R = Σ(len(draft) + 1), in the order of ``sequences``.

    A sequence fails when a row that it needs has no token to draw; rows after a refused draft token cannot make it fail.
    """
    decisions: list[Decision | None] = [None] * len(sequences)
    starts = first_rows(sequences)
    for rule, members in _alike(sequences):
        chosen = [sequences[i] for i in members]
        raw = _rows_of(logits, [(starts[i], sequences[i].num_rows) for i in members]).float()
        processed, usable = _processed(raw, chosen, eos_token_ids)
        verdicts = _DECIDE[rule](processed, chosen, Drafts.from_lists([s.draft for s in chosen], logits.device))
        for i, decision in zip(members, _to_decisions(verdicts, raw, usable, chosen), strict=True):
            decisions[i] = decision
    return [decision for decision in decisions if decision is not None]


def propose_tokens(
    logits: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: tuple[int, ...], num_probs: int = DRAFT_PROBS
) -> list[tuple[int, SparseProbs | None, bool]]:
    """Draw one draft token per row of logits [N, V]: (token, its q where the rule needs it, True).

    ``num_probs``: a draft that must report q draws from this many tokens at most. A row without a token to draw gives
    (-1, None, False).
    """
    results: list[tuple[int, SparseProbs | None, bool]] = [(-1, None, False)] * len(sequences)
    for rule, members in _alike(sequences):
        chosen = [sequences[i] for i in members]
        raw = _rows_of(logits, [(i, 1) for i in members]).float()
        processed, usable = _processed(raw, chosen, eos_token_ids)
        drawn = zip(members, usable, _PROPOSE[rule](processed, chosen, num_probs), strict=True)
        for i, (token, probs) in ((i, result) for i, good, result in drawn if good):
            results[i] = (token, probs, True)
    return results


def likeliest_next(
    logits: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: tuple[int, ...], count: int
) -> list[list[int]]:
    """Per row the ``count`` likeliest next tokens, the best first; logits [R, V] and ``sequences`` as for `decide`.

    By the scores that draw them: under ``coupled`` the tempered logits plus the row's own noise, so that the first is what the
    model draws there; under the others the logits as processed, filtered and, beyond `greedy`, tempered. A row gives fewer
    where fewer have a chance, and none where it has no token to draw.
    """
    found: list[list[int]] = [[] for _ in range(len(logits))]
    starts = first_rows(sequences)
    for rule, members in _alike(sequences):
        chosen = [sequences[i] for i in members]
        spans = [(starts[i], sequences[i].num_rows) for i in members]
        processed, usable = _processed(_rows_of(logits, spans).float(), chosen, eos_token_ids)
        rows = [row for start, length in spans for row in range(start, start + length)]
        for row, good, tokens in zip(rows, usable, _best_first(_RANKED[rule](processed, chosen), count), strict=True):
            found[row] = tokens if good else []
    return found


def token_logprobs(raw: Tensor, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Of the model's own distribution: raw logits [n, V] of any float dtype, one row per token."""
    logprobs = torch.log_softmax(raw.float(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=raw.device)[:, None]).squeeze(1).tolist()
    if not num_top:
        return tuple(TokenLogprob(token, value) for token, value in zip(tokens, chosen, strict=True))
    top = logprobs.topk(num_top, dim=-1)
    pairs = [
        tuple(zip(ids, values, strict=True)) for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return tuple(TokenLogprob(*entry) for entry in zip(tokens, chosen, pairs, strict=True))


# --- rules ------------------------------------------------------------------------------------------------------------------


def _decide_greedy(logits: Tensor, sequences: Sequence[SampledSequence], drafts: Drafts) -> Verdicts:
    return greedy(drafts, logits)


def _decide_coupled(logits: Tensor, sequences: Sequence[SampledSequence], drafts: Drafts) -> Verdicts:
    scaled = tempered(logits, sequences)
    return coupled(drafts, scaled, lambda weights, _: _draw_coupled(weights, sequences))


def _decide_by_ratio(
    rule: Callable[..., Verdicts], logits: Tensor, sequences: Sequence[SampledSequence], drafts: Drafts
) -> Verdicts:
    scaled = _masked(tempered(logits, sequences), sequences)
    keys = _round_keys(sequences, Stream.ACCEPT, logits.device)
    resample = _keys(sequences, Stream.RESAMPLE, logits.device)
    return rule(
        drafts,
        TargetProbs.from_logits(scaled),
        _draft_probs(sequences, logits.device),
        noise.uniform(keys, torch.arange(drafts.tokens.shape[1], device=logits.device)),
        # Keyed by the token's own position, which is only known once the accepted length is.
        lambda weights, rows: noise.gumbel_argmax(weights, resample[rows]),
    )


def _decide_rejection(logits: Tensor, sequences: Sequence[SampledSequence], drafts: Drafts) -> Verdicts:
    return _decide_by_ratio(rejection, logits, sequences, drafts)


def _decide_block(logits: Tensor, sequences: Sequence[SampledSequence], drafts: Drafts) -> Verdicts:
    return _decide_by_ratio(block, logits, sequences, drafts)


Drawn = list[tuple[int, SparseProbs | None]]


def _propose_greedy(logits: Tensor, sequences: Sequence[SampledSequence], num_probs: int) -> Drawn:
    return [(token, None) for token in most_likely(logits).tolist()]


def _propose_coupled(logits: Tensor, sequences: Sequence[SampledSequence], num_probs: int) -> Drawn:
    return [(token, None) for token in _draw_coupled(tempered(logits, sequences), sequences).tolist()]


def _propose_with_probs(logits: Tensor, sequences: Sequence[SampledSequence], num_probs: int) -> Drawn:
    scaled = _masked(tempered(logits, sequences), sequences)
    values, ids = scaled.topk(min(num_probs, scaled.shape[1]), dim=-1)
    q = torch.softmax(values.double(), dim=-1)
    keys = _round_keys(sequences, Stream.DRAFT, logits.device)
    drawn = torch.tensor([s.num_drawn for s in sequences], device=logits.device)
    scores = noise.gumbel(keys, ids + drawn[:, None] * scaled.shape[1]) + q.log()
    tokens = ids.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
    pairs = [_positive_pairs(i, p) for i, p in zip(ids.tolist(), q.tolist(), strict=True)]
    return list(zip(tokens.tolist(), pairs, strict=True))


_DECIDE: dict[str, Callable[[Tensor, Sequence[SampledSequence], Drafts], Verdicts]] = {
    "greedy": _decide_greedy,
    "coupled": _decide_coupled,
    "rejection": _decide_rejection,
    "block": _decide_block,
}
_PROPOSE: dict[str, Callable[[Tensor, Sequence[SampledSequence], int], Drawn]] = {
    "greedy": _propose_greedy,
    "coupled": _propose_coupled,
    "rejection": _propose_with_probs,
    "block": _propose_with_probs,
}


Ranked = Callable[[Tensor, Sequence[SampledSequence]], Tensor]


def _ranked_greedy(logits: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    return logits


def _ranked_coupled(logits: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    scaled, keys = tempered(logits, sequences), _keys(sequences, Stream.COUPLED, logits.device)
    if has_filter(sequences[0].params):
        kept = filtered(scaled, sequences)
        scores = noise.gumbel(keys[kept.rows], kept.ids[:, None]).squeeze(1) + kept.values
        return Kept(kept.rows, kept.ids, scores).dense(scaled.double())
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    few = max(1, RANKED_ELEMENTS // len(ids))
    parts = zip(torch.split(scaled, few), torch.split(keys, few), strict=True)
    return torch.cat([noise.gumbel(own, ids).add_(part) for part, own in parts])


def _ranked_by_q(logits: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    return _masked(tempered(logits, sequences), sequences)


RANKED_ELEMENTS = 1 << 18
"""Noise that is made in one go: what it is made from stays in the processor's cache."""
_RANKED: dict[str, Ranked] = {
    "greedy": _ranked_greedy,
    "coupled": _ranked_coupled,
    "rejection": _ranked_by_q,
    "block": _ranked_by_q,
}


def _best_first(scores: Tensor, count: int) -> list[list[int]]:
    """The ``count`` best tokens of every row of [R, V], without those at -inf: the lowest id first where scores are alike."""
    left = scores.clone()
    picked: list[Tensor] = []
    values: list[Tensor] = []
    for _ in range(min(count, scores.shape[1])):
        picked.append(most_likely(left)[:, None])
        values.append(left.gather(1, picked[-1]))
        left.scatter_(1, picked[-1], -torch.inf)
    if not picked:
        return [[] for _ in range(len(scores))]
    has_chance = torch.cat(values, dim=1) > -torch.inf
    rows = zip(torch.cat(picked, dim=1).tolist(), has_chance.sum(dim=1).tolist(), strict=True)
    return [tokens[:number] for tokens, number in rows]


def _draw_coupled(scaled: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    """The token of every row [R, V] under the noise that draft and target share, int64 [R]."""
    keys = _keys(sequences, Stream.COUPLED, scaled.device)
    if not has_filter(sequences[0].params):
        return noise.gumbel_argmax(scaled, keys)
    kept = filtered(scaled, sequences)
    scores = noise.gumbel(keys[kept.rows], kept.ids[:, None]).squeeze(1) + kept.values
    return noise.argmax_among(scores, kept.ids, kept.rows, len(scaled))


def _masked(scaled: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    """Logits [R, V] with -inf for the tokens that the filters of the group cut."""
    if not has_filter(sequences[0].params):
        return scaled
    kept: Kept = filtered(scaled, sequences)
    return kept.dense(scaled)


# --- rows -------------------------------------------------------------------------------------------------------------------


def _alike(sequences: Sequence[SampledSequence]) -> list[tuple[str, list[int]]]:
    """Group the sequences by rule, and those with filters apart from those without."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, sequence in enumerate(sequences):
        rule = sequence.params.acceptance_rule
        groups.setdefault((rule, rule != "greedy" and has_filter(sequence.params)), []).append(index)
    return [(rule, members) for (rule, _), members in groups.items()]


def _rows_of(logits: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    rows = [row for start, count in spans for row in range(start, start + count)]
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _processed(raw: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: tuple[int, ...]) -> tuple[Tensor, list[bool]]:
    """Penalised logits, and which rows have a token to draw: NaN and +inf reach the maximum, a row of -inf has none.

    Rows without one come back as zeros, so that nothing after this sees a number that is not finite.
    """
    processed = penalised(raw, sequences, eos_token_ids)
    finite = torch.isfinite(raw.amax(dim=-1))
    if processed is not raw:
        finite &= torch.isfinite(processed.amax(dim=-1))
    usable: list[bool] = finite.tolist()
    return processed if all(usable) else processed.masked_fill(~finite[:, None], 0.0), usable


def _keys(sequences: Sequence[SampledSequence], stream: Stream, device: torch.device) -> Tensor:
    seeds = [noise.signed64(s.params.seed) for s in sequences for _ in range(s.num_rows)]
    positions = [s.first_position + j for s in sequences for j in range(s.num_rows)]
    keys = torch.tensor([seeds, positions], dtype=torch.int64, device=device)
    return noise.row_keys(keys[0], keys[1], stream)


def _round_keys(sequences: Sequence[SampledSequence], stream: Stream, device: torch.device) -> Tensor:
    """One key per sequence, by the number of committed tokens, which no two rounds share.

    Block verification looks at draft tokens that it then refuses: when their positions are drafted and tested again, the same
    noise would be a bias.
    """
    seeds = [noise.signed64(s.params.seed) for s in sequences]
    committed = [s.first_position - s.num_drawn for s in sequences]
    keys = torch.tensor([seeds, committed], dtype=torch.int64, device=device)
    return noise.row_keys(keys[0], keys[1], stream)


def _draft_probs(sequences: Sequence[SampledSequence], device: torch.device) -> DraftProbs:
    """q of every draft position, padded; a draft without probabilities was certain of its token."""
    pairs = [s.draft_probs or tuple(((token,), (1.0,)) for token in s.draft) for s in sequences]
    flat = list(chain.from_iterable(pairs))
    sizes = np.array([len(ids) for ids, _ in flat], np.int64)
    depth = max(map(len, pairs), default=0)
    place = np.array([i * depth + j for i, own in enumerate(pairs) for j in range(len(own))], np.int64)
    ids = np.zeros((len(pairs) * depth, sizes.max(initial=1)), np.int64)
    probs = np.zeros(ids.shape, np.float64)
    filled = np.arange(ids.shape[1]) < sizes[:, None]
    at = np.repeat(place, sizes), np.nonzero(filled)[1]
    ids[at] = np.fromiter(chain.from_iterable(tokens for tokens, _ in flat), np.int64)
    probs[at] = np.fromiter(chain.from_iterable(masses for _, masses in flat), np.float64)
    shape = (len(pairs), depth, ids.shape[1])
    return DraftProbs(torch.from_numpy(ids).view(shape).to(device), torch.from_numpy(probs).view(shape).to(device))


def _positive_pairs(ids: list[int], probs: list[float]) -> SparseProbs:
    kept = sum(p > 0 for p in probs)
    return tuple(ids[:kept]), tuple(probs[:kept])


# --- results ----------------------------------------------------------------------------------------------------------------


def _to_decisions(verdicts: Verdicts, raw: Tensor, usable: list[bool], sequences: Sequence[SampledSequence]) -> list[Decision]:
    decisions = [Decision(a, t) for a, t in zip(verdicts.accepted.tolist(), verdicts.tokens.tolist(), strict=True)]
    asked: list[tuple[Decision, SampledSequence, int]] = []
    for start, sequence, decision in zip(first_rows(sequences), sequences, decisions, strict=True):
        if not all(usable[start : start + decision.accepted + 1]):
            decision.accepted, decision.token = 0, -1
            decision.error = "no next token: the logits are not finite numbers, or the request's options leave none"
        elif sequence.params.logprobs is not None:
            asked.append((decision, sequence, start))
    if asked:
        _add_logprobs(asked, raw)
    return decisions


def _add_logprobs(asked: list[tuple[Decision, SampledSequence, int]], raw: Tensor) -> None:
    """All requests' committed tokens in one pass."""
    committed = [[*s.draft[: decision.accepted], decision.token] for decision, s, _ in asked]
    rows = [start + j for (_, _, start), tokens in zip(asked, committed, strict=True) for j in range(len(tokens))]
    most = max(s.params.logprobs or 0 for _, s, _ in asked)
    entries = iter(token_logprobs(raw[torch.tensor(rows, device=raw.device)], list(chain.from_iterable(committed)), most))
    for (decision, sequence, _), tokens in zip(asked, committed, strict=True):
        own = [next(entries) for _ in tokens]
        decision.logprobs = tuple(TokenLogprob(e.token_id, e.logprob, e.top[: sequence.params.logprobs]) for e in own)
