"""From logits to tokens: processing, drawing and accepting for a ragged batch, every request with its own parameters.

Draft and target use the same code, so p and q are both the distributions *after* penalties, bias, temperature and filters.
Order: repetition, presence, frequency penalty, logit bias, min_tokens, temperature, top-k, top-p (of what top-k left), min-p.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import noise
from engine.accept import DraftProbs, Drafts, Verdicts, coupled, greedy, rejection
from engine.accept.coupled import draw
from engine.noise import Stream
from engine.types import SamplingParams, SparseProbs, TokenLogprob

CANDIDATES = 1024
"""Most likely tokens looked at first when a filter is on; rows whose filter reaches further are sorted in full."""
DRAFT_PROBS = 64
"""A draft that must report q draws from its most likely tokens, cut here and renormalised: that is then its q, exactly."""
DRAFT_CANDIDATES = 512
"""A coupled draft looks for the best noisy score among its most likely tokens only: a miss costs acceptance, not text."""


@dataclass(slots=True)
class SampledSequence:
    """One sequence's consecutive rows of a [R, V] logits tensor: len(draft) + 1 of them.

    Row j predicts the token at position len(ids) - len(draft) + j of the sequence.
    """

    params: SamplingParams
    prompt_length: int
    ids: list[int]
    """Committed and drafted tokens."""
    draft: tuple[int, ...] = ()
    draft_probs: tuple[SparseProbs, ...] | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the logits that belong to this sequence."""
        return len(self.draft) + 1

    @property
    def first_position(self) -> int:
        """Position of the token that the first row predicts."""
        return len(self.ids) - len(self.draft)


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
    first_rows = _first_rows(sequences)
    for rule, members in _alike(sequences):
        chosen = [sequences[i] for i in members]
        raw = _rows_of(logits, [(first_rows[i], sequences[i].num_rows) for i in members]).float()
        processed = _penalised(raw, chosen, eos_token_ids)
        verdicts = _DECIDE[rule](processed, chosen, _drafts(chosen, logits.device))
        for i, decision in zip(members, _to_decisions(verdicts, raw, _usable(raw, processed), chosen), strict=True):
            decisions[i] = decision
    return [decision for decision in decisions if decision is not None]


def propose_tokens(
    logits: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: tuple[int, ...]
) -> list[tuple[int, SparseProbs | None, bool]]:
    """Draw one draft token per row of logits [N, V]: (token, its q where the rule needs it, True).

    A row without a token to draw gives (-1, None, False).
    """
    results: list[tuple[int, SparseProbs | None, bool]] = [(-1, None, False)] * len(sequences)
    for rule, members in _alike(sequences):
        chosen = [sequences[i] for i in members]
        raw = _rows_of(logits, [(i, 1) for i in members]).float()
        processed = _penalised(raw, chosen, eos_token_ids)
        drawn = zip(members, _usable(raw, processed), _PROPOSE[rule](processed, chosen), strict=True)
        for i, (token, probs) in ((i, result) for i, good, result in drawn if good):
            results[i] = (token, probs, True)
    return results


# --- rules ------------------------------------------------------------------------------------------------------------------


def _decide_greedy(logits: Tensor, sequences: Sequence[SampledSequence], drafts: Drafts) -> Verdicts:
    return greedy(drafts, logits)


def _decide_coupled(logits: Tensor, sequences: Sequence[SampledSequence], drafts: Drafts) -> Verdicts:
    scaled, ids = _filtered(_tempered(logits, sequences), sequences)
    keys = _keys(sequences, Stream.COUPLED, logits.device)
    columns = ids if ids is not None else torch.arange(logits.shape[1], device=logits.device)
    return coupled(drafts, scaled, noise.gumbel(keys, columns), ids)


def _decide_rejection(logits: Tensor, sequences: Sequence[SampledSequence], drafts: Drafts) -> Verdicts:
    p = _probs(logits, sequences)
    columns = torch.arange(logits.shape[1], device=logits.device)
    width = drafts.tokens.shape[1]
    accept_keys = _keys(sequences, Stream.ACCEPT, logits.device)
    accept_uniform = (
        noise.uniform(accept_keys, columns[:1]).squeeze(1)[drafts.position_rows()] if width else p.new_zeros(len(p), 0)
    )
    # The resampled token's noise is keyed by its own position, which is only known once the accepted length is: draw it for all
    # rows of the sequence lazily would cost V per row, so the length is decided first with a cheap pass.
    q = _draft_probs(sequences, width, logits.device)
    first = rejection(drafts, p, q, accept_uniform, torch.zeros(len(sequences), 1, dtype=torch.float64, device=p.device))
    keys = _keys(sequences, Stream.RESAMPLE, logits.device)[drafts.first_row + first.accepted]
    return rejection(drafts, p, q, accept_uniform, noise.gumbel(keys, columns))


def _propose_greedy(logits: Tensor, sequences: Sequence[SampledSequence]) -> list[tuple[int, SparseProbs | None]]:
    return [(token, None) for token in logits.argmax(dim=-1).tolist()]


def _propose_coupled(logits: Tensor, sequences: Sequence[SampledSequence]) -> list[tuple[int, SparseProbs | None]]:
    scaled, ids = _filtered(_tempered(logits, sequences), sequences, at_most=DRAFT_CANDIDATES)
    if ids is None:
        scaled, ids = scaled.topk(min(DRAFT_CANDIDATES, scaled.shape[1]), dim=-1)
    tokens = draw(scaled, noise.gumbel(_keys(sequences, Stream.COUPLED, logits.device), ids), ids)
    return [(token, None) for token in tokens.tolist()]


def _propose_rejection(logits: Tensor, sequences: Sequence[SampledSequence]) -> list[tuple[int, SparseProbs | None]]:
    q, ids = _probs(logits, sequences).topk(min(DRAFT_PROBS, logits.shape[1]), dim=-1)
    q = q / q.sum(dim=-1, keepdim=True)
    tokens = draw(q.log(), noise.gumbel(_keys(sequences, Stream.DRAFT, logits.device), ids), ids)
    pairs = [_positive_pairs(i, p) for i, p in zip(ids.tolist(), q.tolist(), strict=True)]
    return list(zip(tokens.tolist(), pairs, strict=True))


_DECIDE: dict[str, Callable[[Tensor, Sequence[SampledSequence], Drafts], Verdicts]] = {
    "greedy": _decide_greedy,
    "coupled": _decide_coupled,
    "rejection": _decide_rejection,
}
_PROPOSE: dict[str, Callable[[Tensor, Sequence[SampledSequence]], list[tuple[int, SparseProbs | None]]]] = {
    "greedy": _propose_greedy,
    "coupled": _propose_coupled,
    "rejection": _propose_rejection,
}


# --- rows -------------------------------------------------------------------------------------------------------------------


def _alike(sequences: Sequence[SampledSequence]) -> list[tuple[str, list[int]]]:
    """Group the sequences by rule, and apart from those whose filters need only a few candidates per row."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault((sequence.params.acceptance_rule, _has_filter(sequence.params)), []).append(index)
    return [(rule, members) for (rule, _), members in groups.items()]


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _first_rows(sequences: Sequence[SampledSequence]) -> list[int]:
    rows, total = [], 0
    for sequence in sequences:
        rows.append(total)
        total += sequence.num_rows
    return rows


def _rows_of(logits: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    rows = [row for start, count in spans for row in range(start, start + count)]
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _usable(raw: Tensor, processed: Tensor) -> list[bool]:
    """Whether a row has a finite maximum before and after processing: NaN and +inf reach it, a row of -inf has none."""
    finite = torch.isfinite(raw.amax(dim=-1))
    if processed is not raw:
        finite &= torch.isfinite(processed.amax(dim=-1))
    usable: list[bool] = finite.tolist()
    return usable


def _per_row(sequences: Sequence[SampledSequence], value: Callable[[SamplingParams], float]) -> list[float]:
    return [value(sequence.params) for sequence in sequences for _ in range(sequence.num_rows)]


def _keys(sequences: Sequence[SampledSequence], stream: Stream, device: torch.device) -> Tensor:
    seeds = [noise.signed64(s.params.seed) for s in sequences for _ in range(s.num_rows)]
    positions = [s.first_position + j for s in sequences for j in range(s.num_rows)]
    keys = torch.tensor([seeds, positions], dtype=torch.int64, device=device)
    return noise.row_keys(keys[0], keys[1], stream)


def _drafts(sequences: Sequence[SampledSequence], device: torch.device) -> Drafts:
    return Drafts.from_lists([sequence.draft for sequence in sequences], device)


def _draft_probs(sequences: Sequence[SampledSequence], width: int, device: torch.device) -> DraftProbs:
    """q of every draft position, padded; a draft without probabilities was certain of its token."""
    pairs = [s.draft_probs or tuple(((token,), (1.0,)) for token in s.draft) for s in sequences]
    n = max((len(ids) for row in pairs for ids, _ in row), default=1)
    ids = torch.zeros(len(sequences), width, n, dtype=torch.int64)
    probs = torch.zeros(len(sequences), width, n, dtype=torch.float64)
    for i, row in enumerate(pairs):
        for j, (token_ids, masses) in enumerate(row):
            ids[i, j, : len(token_ids)] = torch.tensor(token_ids)
            probs[i, j, : len(masses)] = torch.tensor(masses, dtype=torch.float64)
    return DraftProbs(ids.to(device), probs.to(device))


def _positive_pairs(ids: list[int], probs: list[float]) -> SparseProbs:
    kept = sum(p > 0 for p in probs)
    return tuple(ids[:kept]), tuple(probs[:kept])


# --- processing -------------------------------------------------------------------------------------------------------------


def _penalised(raw: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: tuple[int, ...]) -> Tensor:
    """Penalties, bias and min_tokens on float32 logits [R, V]; the very same tensor comes back when nobody asks for any."""
    edits = _Edits(raw.shape[1])
    row = 0
    for sequence in sequences:
        edits.collect(sequence, row, eos_token_ids)
        row += sequence.num_rows
    return edits.apply(raw)


class _Edits:
    """(row, token id) pairs to change, gathered per request and applied in one pass each."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.scale: list[tuple[int, int, float]] = []
        self.subtract: list[tuple[int, int, float]] = []
        self.forbid: list[tuple[int, int]] = []

    def collect(self, sequence: SampledSequence, first_row: int, eos_token_ids: tuple[int, ...]) -> None:
        params = sequence.params
        penalised = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        if not (penalised or params.logit_bias or params.min_tokens):
            return
        counts = Counter(sequence.ids[sequence.prompt_length : sequence.first_position])
        seen = set(sequence.ids[: sequence.first_position])
        for j in range(sequence.num_rows):
            if j:
                counts[sequence.draft[j - 1]] += 1
                seen.add(sequence.draft[j - 1])
            row = first_row + j
            if params.repetition_penalty != 1.0:
                self.scale += [(row, token, params.repetition_penalty) for token in seen if token < self.vocab_size]
            if params.presence_penalty or params.frequency_penalty:
                self.subtract += [
                    (row, token, params.presence_penalty + count * params.frequency_penalty) for token, count in counts.items()
                ]
            self.subtract += [(row, token, -bias) for token, bias in params.logit_bias.items()]
            if sequence.first_position + j - sequence.prompt_length < params.min_tokens:
                self.forbid += [(row, token) for token in {*eos_token_ids, *params.stop_token_ids} if token < self.vocab_size]

    def apply(self, raw: Tensor) -> Tensor:
        if not (self.scale or self.subtract or self.forbid):
            return raw
        logits = raw.clone()
        if self.scale:
            rows, tokens, factors = _columns(self.scale, logits)
            old = logits[rows, tokens]
            logits[rows, tokens] = torch.where(old > 0, old / factors, old * factors)
        if self.subtract:
            rows, tokens, amounts = _columns(self.subtract, logits)
            logits.index_put_((rows, tokens), -amounts, accumulate=True)
        if self.forbid:
            rows, tokens = torch.tensor(self.forbid, device=logits.device).T
            logits[rows, tokens] = -torch.inf
        return logits


def _columns(triples: list[tuple[int, int, float]], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens, values = zip(*triples, strict=True)
    return (
        torch.tensor(rows, device=like.device),
        torch.tensor(tokens, device=like.device),
        torch.tensor(values, dtype=like.dtype, device=like.device),
    )


def _tempered(logits: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    temperatures = _per_row(sequences, lambda params: params.temperature)
    if all(value == 1.0 for value in temperatures):
        return logits
    return logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]


def _filtered(scaled: Tensor, sequences: Sequence[SampledSequence], at_most: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Top-k, top-p, min-p. Returns (logits, None) over the whole vocabulary, or (logits, ids) over the candidates left.

    A row keeps the tokens whose logit reaches a threshold, so ties at the edge are kept and the order of a sort cannot matter.
    ``at_most`` cuts the candidates: only for drafts, where an approximation costs acceptance and nothing else.
    """
    if not any(_has_filter(s.params) for s in sequences):
        return scaled, None
    vocab_size = scaled.shape[1]
    width = min(vocab_size, at_most or max(CANDIDATES, *(s.params.top_k for s in sequences)))
    values, ids = scaled.topk(width, dim=-1)
    threshold = _threshold(values, scaled, sequences)
    if width < vocab_size and at_most is None and bool((values[:, -1] >= threshold).any()):
        threshold = _threshold(scaled.sort(dim=-1, descending=True).values, scaled, sequences)
        return scaled.masked_fill(scaled < threshold[:, None], -torch.inf), None
    return values.masked_fill(values < threshold[:, None], -torch.inf), ids


def _threshold(values: Tensor, scaled: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    """Lowest logit that every filter of a row keeps, [R]; values [R, n] are the n largest logits in descending order.

    When a filter would keep more than these n, the smallest of them is returned and the caller sees that the row is cut.
    """
    width = values.shape[1]
    device = values.device
    top_k = torch.tensor([min(int(k) or width, width) for k in _per_row(sequences, lambda params: params.top_k)], device=device)
    top_p = torch.tensor(_per_row(sequences, lambda params: params.top_p), dtype=torch.float32, device=device)
    min_p = torch.tensor(_per_row(sequences, lambda params: params.min_p), dtype=torch.float32, device=device)
    kth = values.gather(1, top_k[:, None] - 1)
    limited = torch.tensor([bool(k) for k in _per_row(sequences, lambda params: params.top_k)], device=device)[:, None]
    # log_softmax sums a row in one fixed order; logsumexp splits a lone long row over threads and then rounds otherwise.
    ranked = torch.log_softmax(values.masked_fill(values < kth, -torch.inf), dim=-1)
    overall = values - values[:, :1] + torch.log_softmax(scaled, dim=-1).amax(dim=-1, keepdim=True)
    before = torch.where(limited, ranked, overall).exp().cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = 0.0
    last_of_nucleus = values.gather(1, ((before < top_p[:, None]).sum(dim=-1, keepdim=True) - 1).clamp_min(0))
    nucleus = torch.where(top_p[:, None] < 1.0, last_of_nucleus, -torch.inf)
    rank = torch.where(limited, kth, -torch.inf)
    floor = values[:, :1] + min_p[:, None].log()
    return torch.cat([rank, nucleus, floor], dim=1).amax(dim=-1)


def _probs(logits: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    """The distribution that is sampled, float64 [R, V], each row summing to 1."""
    scaled, ids = _filtered(_tempered(logits, sequences), sequences)
    p = torch.softmax(scaled.double(), dim=-1)
    if ids is None:
        return p
    return torch.zeros(len(p), logits.shape[1], dtype=p.dtype, device=p.device).scatter_(1, ids, p)


# --- results ----------------------------------------------------------------------------------------------------------------


def _to_decisions(verdicts: Verdicts, raw: Tensor, usable: list[bool], sequences: Sequence[SampledSequence]) -> list[Decision]:
    decisions = [Decision(a, t) for a, t in zip(verdicts.accepted.tolist(), verdicts.tokens.tolist(), strict=True)]
    row = 0
    for sequence, decision in zip(sequences, decisions, strict=True):
        if not all(usable[row : row + decision.accepted + 1]):
            decision.accepted, decision.token = 0, -1
            decision.error = "no next token: the logits are not finite numbers, or the request's options leave none"
        elif sequence.params.logprobs is not None:
            committed = [*sequence.draft[: decision.accepted], decision.token]
            decision.logprobs = _logprobs(raw[row : row + len(committed)], committed, sequence.params.logprobs)
        row += sequence.num_rows
    return decisions


def _logprobs(raw: Tensor, tokens: list[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Of the model's own distribution: raw logits [n, V], one row per committed token."""
    logprobs = torch.log_softmax(raw, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=raw.device)[:, None]).squeeze(1).tolist()
    top = logprobs.topk(num_top, dim=-1) if num_top else None
    result = []
    for i, token in enumerate(tokens):
        pairs = tuple(zip(top.indices[i].tolist(), top.values[i].tolist(), strict=True)) if top is not None else ()
        result.append(TokenLogprob(token, chosen[i], pairs))
    return tuple(result)
