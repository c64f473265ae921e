"""From a model's logits to the distribution that is sampled: penalties, bias, min_tokens, temperature, filters.

Order: repetition, presence, frequency penalty, logit bias, min_tokens, temperature, top-k, top-p (of what top-k left), min-p.
Every request brings its own values; each step is one pass over all of them, and a step that nobody asks for costs nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.transfer import moved, on_device
from engine.types import SamplingParams, SparseProbs

WINDOWS = (10.0, 25.0, torch.inf)
"""Filters first sort the tokens whose logit lies this close to the row's largest; a row that needs more takes the next one."""
UNIT = 2.0**36
"""Probability masses are added up as whole multiples of 1 / UNIT of the largest: integer sums do not depend on their order."""

Integers = npt.NDArray[np.int64]


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
    num_drawn: int = 0
    """While a draft is being made: how many tokens at the end of ``ids`` it has since the last committed one."""

    @property
    def num_rows(self) -> int:
        """Rows of the logits that belong to this sequence."""
        return len(self.draft) + 1

    @property
    def first_position(self) -> int:
        """Position of the token that the first row predicts."""
        return len(self.ids) - len(self.draft)


def is_plain(params: SamplingParams, num_output: int) -> bool:
    """Whether nothing changes single tokens' logits once ``num_output`` tokens are made; nor later then."""
    return not (_is_penalised(params) or params.logit_bias or num_output < params.min_tokens)


def per_row(sequences: Sequence[SampledSequence], value: Callable[[SamplingParams], float]) -> list[float]:
    """A parameter of every row."""
    return [value(sequence.params) for sequence in sequences for _ in range(sequence.num_rows)]


def has_filter(params: SamplingParams) -> bool:
    """Whether some tokens may have no chance at all."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def first_rows(sequences: Sequence[SampledSequence]) -> list[int]:
    """First row of each sequence."""
    rows, total = [], 0
    for sequence in sequences:
        rows.append(total)
        total += sequence.num_rows
    return rows


# --- penalties, bias, min_tokens --------------------------------------------------------------------------------------------


def penalised(raw: Tensor, sequences: Sequence[SampledSequence], eos_token_ids: tuple[int, ...]) -> Tensor:
    """Apply what changes single tokens' logits [R, V], in float32; the very same tensor comes back when nobody asks."""
    if not any(_is_changed(sequence) for sequence in sequences):
        return raw
    placed = list(zip(first_rows(sequences), sequences, strict=True))
    repeating = [(row, s) for row, s in placed if _is_penalised(s.params)]
    biased = [(row, s) for row, s in placed if s.params.logit_bias]
    unfinished = [(row, s) for row, s in placed if _may_not_end(s)]
    logits = raw.to(torch.float32, copy=True)
    if repeating:
        _penalise(logits, *zip(*repeating, strict=True))
    if biased:
        _add_bias(logits, *zip(*biased, strict=True))
    if unfinished:
        _forbid_ends(logits, eos_token_ids, *zip(*unfinished, strict=True))
    return logits


def _is_changed(sequence: SampledSequence) -> bool:
    return _is_penalised(sequence.params) or bool(sequence.params.logit_bias) or _may_not_end(sequence)


def _may_not_end(sequence: SampledSequence) -> bool:
    """Whether ``min_tokens`` forbids the first row to end the text."""
    return sequence.params.min_tokens > 0 and sequence.first_position - sequence.prompt_length < sequence.params.min_tokens


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _penalise(logits: Tensor, rows: Sequence[int], sequences: Sequence[SampledSequence]) -> None:
    """Repetition, presence and frequency penalty; a draft token counts as output in the rows after it."""
    row, token, count, owner = _occurrences(rows, sequences, logits.shape[1])
    at, ids = _on(logits, row), _on(logits, token)

    def value(of: Callable[[SamplingParams], float]) -> Tensor:
        return on_device([of(s.params) for s in sequences], logits.dtype, logits.device)[_on(logits, owner)]

    counts = _on(logits, count).to(logits.dtype)
    old, factor = logits[at, ids], value(lambda params: params.repetition_penalty)
    old = torch.where(old > 0, old / factor, old * factor)
    presence = value(lambda params: params.presence_penalty) * (counts > 0)
    logits[at, ids] = old - (presence + counts * value(lambda params: params.frequency_penalty))


def _occurrences(
    rows: Sequence[int], sequences: Sequence[SampledSequence], vocab_size: int
) -> tuple[Integers, Integers, Integers, Integers]:
    """Every (row, token) that occurred before the row, with the token's count in the output and its sequence's index."""
    starts, num_rows = np.array(rows), np.array([s.num_rows for s in sequences])
    row, token, count = _committed_before(starts, num_rows, sequences, vocab_size)
    if num_rows.max() > 1:
        later, drafted = _drafted_before(starts, num_rows, sequences)
        count = np.concatenate((count, np.ones_like(later)))
        row, token, count = _merge(np.concatenate((row, later)), np.concatenate((token, drafted)), count, vocab_size)
    known = token < vocab_size
    return row[known], token[known], count[known], np.searchsorted(starts, row[known], side="right") - 1


def _committed_before(
    starts: Integers, num_rows: Integers, sequences: Sequence[SampledSequence], vocab_size: int
) -> tuple[Integers, Integers, Integers]:
    """(row, token, count in the output) of the prompt's and the committed tokens, once for each row of their sequence."""
    lengths = np.array([s.first_position for s in sequences])
    owner = np.repeat(np.arange(len(sequences)), lengths)
    token = np.fromiter(chain.from_iterable(s.ids[: s.first_position] for s in sequences), np.int64, int(lengths.sum()))
    is_output = _ranges(lengths) >= np.array([s.prompt_length for s in sequences])[owner]
    owner, token, count = _merge(owner, token, is_output.astype(np.int64), vocab_size)
    repeats = num_rows[owner]
    return np.repeat(starts[owner], repeats) + _ranges(repeats), np.repeat(token, repeats), np.repeat(count, repeats)


def _drafted_before(starts: Integers, num_rows: Integers, sequences: Sequence[SampledSequence]) -> tuple[Integers, Integers]:
    """(row, token) of every draft token for each of the rows after it."""
    drafted = np.fromiter(chain.from_iterable(s.draft for s in sequences), np.int64)
    place = _ranges(num_rows - 1)
    owner = np.repeat(np.arange(len(sequences)), num_rows - 1)
    repeats = num_rows[owner] - 1 - place
    return np.repeat(starts[owner] + place + 1, repeats) + _ranges(repeats), np.repeat(drafted, repeats)


def _merge(group: Integers, token: Integers, count: Integers, vocab_size: int) -> tuple[Integers, Integers, Integers]:
    """Equal (group, token) pairs as one, their counts added."""
    span = max(vocab_size, int(token.max(initial=0)) + 1)
    keys, inverse = np.unique(group * span + token, return_inverse=True)
    totals = np.bincount(inverse, weights=count, minlength=len(keys)).astype(np.int64)
    return keys // span, keys % span, totals


def _ranges(lengths: Integers) -> Integers:
    """0 … n - 1 for every n of ``lengths``, one after the other."""
    return np.arange(int(lengths.sum())) - np.repeat(lengths.cumsum() - lengths, lengths)


def _add_bias(logits: Tensor, rows: Sequence[int], sequences: Sequence[SampledSequence]) -> None:
    sizes = np.array([len(s.params.logit_bias) for s in sequences])
    ids = np.fromiter(chain.from_iterable(s.params.logit_bias for s in sequences), np.int64)
    values = np.fromiter(chain.from_iterable(s.params.logit_bias.values() for s in sequences), np.float32)
    at, columns = _spread(rows, sequences, sizes)
    logits.index_put_((_on(logits, at), _on(logits, ids[columns])), _on(logits, values[columns]), accumulate=True)


def _forbid_ends(
    logits: Tensor, eos_token_ids: tuple[int, ...], rows: Sequence[int], sequences: Sequence[SampledSequence]
) -> None:
    ends = [[t for t in {*eos_token_ids, *s.params.stop_token_ids} if t < logits.shape[1]] for s in sequences]
    at, columns = _spread(rows, sequences, np.array([len(ids) for ids in ends]))
    ids = np.fromiter(chain.from_iterable(ends), np.int64)[columns]
    starts = np.array(rows)
    owner = np.searchsorted(starts, at, side="right") - 1
    made = np.array([s.first_position - s.prompt_length for s in sequences])[owner] + at - starts[owner]
    early = made < np.array([s.params.min_tokens for s in sequences])[owner]
    logits[_on(logits, at[early]), _on(logits, ids[early])] = -torch.inf


def _spread(rows: Sequence[int], sequences: Sequence[SampledSequence], sizes: Integers) -> tuple[Integers, Integers]:
    """Each sequence's run of ``sizes`` entries for each of its rows: the rows, and indices into the runs' concatenation."""
    num_rows = np.array([s.num_rows for s in sequences])
    owner = np.repeat(np.arange(len(sequences)), num_rows)
    row = np.array(rows)[owner] + _ranges(num_rows)
    repeats = sizes[owner]
    return np.repeat(row, repeats), np.repeat((sizes.cumsum() - sizes)[owner], repeats) + _ranges(repeats)


def _on(like: Tensor, array: npt.NDArray[np.generic]) -> Tensor:
    return moved(torch.from_numpy(array), like.device)


# --- temperature and filters ------------------------------------------------------------------------------------------------


def tempered(logits: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
    """Logits [R, V] divided by their rows' temperatures, which are not zero."""
    divisors = temperatures(logits, sequences)
    return logits if divisors is None else logits / divisors[:, None]


def temperatures(logits: Tensor, sequences: Sequence[SampledSequence]) -> Tensor | None:
    """The temperature of every row of logits [R, V], [R] in their dtype; None where all are 1."""
    if all(sequence.params.temperature == 1.0 for sequence in sequences):
        return None
    return on_device(per_row(sequences, lambda params: params.temperature), logits.dtype, logits.device)


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that the filters leave, flat over all rows: ``rows``, ``ids`` int64 [M] and ``values`` [M], their logits."""

    rows: Tensor
    ids: Tensor
    values: Tensor

    def dense(self, like: Tensor) -> Tensor:
        """Logits [R, V] as ``like``, -inf where a token has no chance."""
        return torch.full_like(like, -torch.inf).index_put_((self.rows, self.ids), self.values)


@dataclass(frozen=True, slots=True)
class _Filters:
    """Per row of R."""

    top_k: Tensor
    """int64; the vocabulary's size where it is off."""
    kth: Tensor
    """The top_k-th largest logit; -inf where it is off."""
    top_p: Tensor
    """float64."""
    floor: Tensor
    """Lowest logit that min_p allows."""
    largest: Tensor
    mass: Tensor
    """Of all tokens, as a multiple of the largest token's divided by `UNIT`; 1 where nobody needs it."""

    def of(self, rows: Tensor) -> "_Filters":
        return _Filters(*(getattr(self, one.name)[rows] for one in fields(self)))


def filtered(scaled: Tensor, sequences: Sequence[SampledSequence]) -> Kept:
    """Top-k, top-p and min-p on tempered logits [R, V] with a finite maximum in each row.

    Tokens are ranked by logit, the lower id first on ties, so top_k keeps exactly k and a tiny top_p exactly the greedy token.
    Decided row by row, without regard to the batch.
    """
    filters = _filters(scaled, sequences)
    pending = torch.arange(len(scaled), device=scaled.device)
    parts: list[Kept] = []
    for window in WINDOWS:
        kept, is_complete = _filter_within(
            scaled if len(pending) == len(scaled) else scaled[pending], filters.of(pending), window
        )
        done = is_complete[kept.rows]
        parts.append(Kept(pending[kept.rows[done]], kept.ids[done], kept.values[done]))
        pending = pending[~is_complete]
        if not len(pending):
            break
    return (
        parts[0]
        if len(parts) == 1
        else Kept(*(torch.cat([getattr(p, name) for p in parts]) for name in ("rows", "ids", "values")))
    )


def _filters(scaled: Tensor, sequences: Sequence[SampledSequence]) -> _Filters:
    def column(value: Callable[[SamplingParams], float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(per_row(sequences, value), dtype=dtype, device=scaled.device)

    largest = scaled.amax(dim=-1)
    top_k = column(lambda params: params.top_k or scaled.shape[1], torch.int64).clamp_max_(scaled.shape[1])
    # The largest log-probability is minus the log of all mass in units of the largest token's.
    mass = torch.ones_like(largest)
    if any(s.params.top_p < 1.0 and not 0 < s.params.top_k < scaled.shape[1] for s in sequences):
        mass = torch.log_softmax(scaled, dim=-1).amax(dim=-1).neg_().exp_()
    return _Filters(
        top_k=top_k,
        kth=_kth_largest(scaled, top_k),
        top_p=column(lambda params: params.top_p, torch.float64),
        floor=largest + column(lambda params: params.min_p, torch.float32).log_(),
        largest=largest,
        mass=mass.double() * UNIT,
    )


def _kth_largest(scaled: Tensor, top_k: Tensor) -> Tensor:
    limited = (top_k < scaled.shape[1]).nonzero().squeeze(1)
    kth = torch.full_like(scaled[:, 0], -torch.inf)
    if len(limited):
        ranks = top_k[limited]
        kth[limited] = scaled[limited].topk(int(ranks.max()), dim=-1).values.gather(1, ranks[:, None] - 1).squeeze(1)
    return kth


def _filter_within(scaled: Tensor, filters: _Filters, window: float) -> tuple[Kept, Tensor]:
    """Filter the tokens within ``window`` of the largest. Returns what is kept, and of which rows that is all: bool [R]."""
    num_rows, vocab_size = scaled.shape
    is_limited = filters.top_k < vocab_size
    lowest = torch.where(is_limited, filters.kth, filters.largest - window)
    rows, ids = (scaled >= lowest[:, None]).nonzero().unbind(dim=1)
    values = scaled[rows, ids]
    by_value = values.argsort(descending=True, stable=True)
    order = by_value[rows[by_value].argsort(stable=True)]  # by row, then the best first, then by id
    rows, ids, values = rows[order], ids[order], values[order]
    counts = torch.bincount(rows, minlength=num_rows)
    ends = counts.cumsum(0)
    starts = ends - counts
    rank = torch.arange(len(rows), device=rows.device) - starts[rows]

    mass = ((values - filters.largest[rows]).double().exp_() * UNIT).round_().to(torch.int64)
    is_ranked = rank < filters.top_k[rows]
    ranked_mass = torch.zeros_like(counts).scatter_add_(0, rows, mass * is_ranked)
    whole_mass = torch.where(is_limited, ranked_mass.double(), filters.mass)
    before = mass.cumsum(0) - mass
    before -= before[starts.clamp_max(len(rows) - 1)][rows]
    in_nucleus = (filters.top_p >= 1.0)[rows] | (before < (filters.top_p * whole_mass)[rows])
    keep = is_ranked & in_nucleus & (values >= filters.floor[rows])

    # Filters only ever cut the tail of a ranking: once the last token looked at is cut, nothing below can be kept.
    is_complete = is_limited | ~keep[ends - 1] | (counts == vocab_size) | (window == torch.inf)
    return Kept(rows[keep], ids[keep], values[keep]), is_complete
