"""A draft model with a vocabulary of its own, as one that reads and writes the target's ids.

Everything that draws, penalises, counts and compares tokens sees the target's ids alone, so noise, q and stop tokens are those
of a draft with the target's vocabulary. Logits are those of the draft after the text in its own spelling, for the tokens that
both vocabularies have; the others have no chance. They depend on the text alone, however it came to be there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import Tensor

from engine.models import LoadedModel
from engine.propose.vocabulary import SharedVocabulary, Spelling
from engine.types import ModelInfo
from engine.verify.attention import Chunk, Kernels
from engine.verify.blocks import BlockPool, CachedSequence, OutOfBlocks
from engine.verify.invariance import RowInvariance
from engine.verify.kv_cache import KVCache
from engine.verify.load import EngineModel, SequenceCache

SPARE_TOKENS = 8
"""Draft tokens reserved beyond those that the sample text lets expect."""
CONTEXT_MARGIN = 1.1
"""The longest text, in target tokens, is so much shorter than what the draft would hold of the sample text."""


@dataclass(slots=True)
class _Spelled:
    """What the draft holds of a sequence, in its own ids. It may reach beyond the sequence, into what was taken back."""

    spelling: Spelling
    cached: CachedSequence = field(default_factory=CachedSequence)


class TranslatedCache:
    """Sequences of target ids, whose K and V are those of draft ids. Counts of tokens are the target's."""

    def __init__(self, cache: SequenceCache, shared: SharedVocabulary):
        self._cache = cache
        self._shared = shared
        self._spelled: WeakKeyDictionary[CachedSequence, _Spelled] = WeakKeyDictionary()

    @property
    def pool(self) -> BlockPool:
        """Of draft ids; sequences of target ids hold none of its blocks."""
        return self._cache.pool

    def spelled(self, sequence: CachedSequence) -> _Spelled:
        """What the draft holds of ``sequence``."""
        found = self._spelled.get(sequence)
        if found is None:
            found = self._spelled[sequence] = _Spelled(Spelling(self._shared))
        return found

    def reserve(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Make room for about ``num_tokens`` more tokens. Raises `OutOfBlocks` and changes nothing when there is none."""
        self._cache.reserve(self.spelled(sequence).cached, int(num_tokens * max(self._shared.growth, 1.0)) + SPARE_TOKENS)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget all but the first ``length`` tokens; the draft's K and V of the others stay until something else follows."""
        del sequence.ids[length:]
        spelled = self._spelled.get(sequence)
        if spelled is None:
            return
        spelled.spelling.truncate(length)
        if length == 0:
            self._cache.truncate(spelled.cached, 0)
            del self._spelled[sequence]


class ForkingTranslatedCache(TranslatedCache):
    """The same over a cache whose sequences can share their beginning."""

    def __init__(self, cache: KVCache, shared: SharedVocabulary):
        super().__init__(cache, shared)
        self._paged = cache

    def fork(self, sequence: CachedSequence, length: int) -> CachedSequence:
        """Another sequence that goes on after the same first ``length`` tokens. Raises `OutOfBlocks`."""
        original, forked = self.spelled(sequence), CachedSequence(sequence.ids[:length])
        spelling = original.spelling.copy()
        spelling.truncate(length)
        kept = num_alike(original.cached.ids, spelling.spell(forked.ids))
        self._spelled[forked] = _Spelled(spelling, self._paged.fork(original.cached, kept))
        return forked


@dataclass(frozen=True, slots=True)
class _Step:
    """What the draft computes for a chunk, and the places of the wanted rows among the rows of that."""

    chunk: Chunk | None
    rows: tuple[int, ...] = ()
    is_refused: bool = False


class TranslatedModel:
    """An `EngineModel` over target ids, made of the draft's, which is taken over.

    A chunk's last ``num_logits`` - 1 tokens are a draft at the target: each is spelled on its own, all before it as one text.
    Rows that cannot be had are NaN: of a text that in the draft's spelling is longer than its context or than the room left.
    The prefix cache is not used.
    """

    shares_prefixes = False
    hidden: Sequence[Tensor] = ()
    """None are kept."""

    def __init__(self, model: EngineModel, shared: SharedVocabulary):
        self._model = model
        self._shared = shared
        self.cache = _cache(model.cache, shared)
        self.num_ids = len(shared.target.pieces)
        device = torch.device(model.info.device)
        self._columns = torch.tensor([shared.to_draft.get(i, 0) for i in range(self.num_ids)], device=device)
        """int64 [V]: the draft's id of every target id."""
        self._missing = torch.tensor([i not in shared.to_draft for i in range(self.num_ids)], device=device)
        """bool [V]."""

    @property
    def loaded(self) -> LoadedModel:
        """The draft as it was loaded."""
        return self._model.loaded

    @property
    def info(self) -> ModelInfo:
        """The draft's, in the target's ids."""
        info = self._model.info
        return msgspec.structs.replace(
            info,
            vocab_size=self.num_ids,
            max_context=self.max_context,
            eos_token_ids=self._shared.target.eos_token_ids,
            fingerprint=self._shared.target.fingerprint,
            path_reason=f"{info.path_reason}; {self._shared.describe()}",
        )

    @property
    def max_context(self) -> int:
        """Target tokens that one sequence may hold."""
        return int(self._model.max_context / max(self._shared.growth * CONTEXT_MARGIN, 1.0))

    @property
    def numerics(self) -> Kernels:
        """Of the draft."""
        return self._model.numerics

    @property
    def row_invariance(self) -> RowInvariance:
        """Of the draft."""
        return self._model.row_invariance

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [R, V] of the last ``num_logits`` tokens of every chunk, in the order of ``chunks``; V target ids."""
        steps = [self._step(chunk) for chunk in chunks]
        computed = [step.chunk for step in steps if step.chunk is not None]
        logits = self._model.forward(computed) if computed else None
        for chunk in chunks:
            chunk.sequence.ids.extend(chunk.ids)
        return self._translated(logits, steps)

    def _step(self, chunk: Chunk) -> _Step:
        """Spell a chunk's text, roll the draft back to where it differs, and find what is to be computed."""
        spelled = self.cache.spelled(chunk.sequence)
        ids = [*chunk.sequence.ids, *chunk.ids]
        num_committed = len(ids) - max(chunk.num_logits - 1, 0)
        wanted = spelled.spelling.spell(ids[:num_committed])
        ends = [len(wanted)]
        for token in ids[num_committed:]:
            wanted += self._shared.spell_token(token)
            ends.append(len(wanted))
        is_wanted = chunk.num_logits > 0
        kept = min(num_alike(spelled.cached.ids, wanted), ends[0] - is_wanted)
        if kept < 0 or len(wanted) > self._model.max_context or not self._make_room(spelled.cached, kept, len(wanted)):
            return _Step(None, (0,) * chunk.num_logits, is_refused=True)
        if kept == len(wanted):
            return _Step(None)
        rows = tuple(end - ends[0] for end in ends) if is_wanted else ()
        return _Step(Chunk(spelled.cached, wanted[kept:], rows[-1] + 1 if rows else 0), rows)

    def _make_room(self, cached: CachedSequence, kept: int, length: int) -> bool:
        """For ``length`` draft tokens, of which the first ``kept`` stay."""
        self._model.cache.truncate(cached, kept)
        try:
            self._model.cache.reserve(cached, length - kept)
        except OutOfBlocks:
            return False
        return True

    def _translated(self, logits: Tensor | None, steps: Sequence[_Step]) -> Tensor:
        """Rows [R, V] over target ids from the draft's [·, V of the draft]."""
        places: list[int] = []
        start = 0
        for step in steps:
            places += [-1 if step.is_refused else start + row for row in step.rows]
            start += step.chunk.num_logits if step.chunk is not None else 0
        device = self._columns.device
        if logits is None or not len(logits):
            return torch.full((len(places), self.num_ids), torch.nan, device=device)
        if places != list(range(len(logits))):
            logits = logits[torch.tensor(places, device=device).clamp_min(0)]
        translated = logits.index_select(1, self._columns).masked_fill_(self._missing, -torch.inf)
        refused = [row for row, place in enumerate(places) if place < 0]
        if refused:
            translated[torch.tensor(refused, device=device)] = torch.nan
        return translated


def num_alike(ids: Sequence[int], others: Sequence[int]) -> int:
    """Length of the longest common beginning of two lists."""
    length = min(len(ids), len(others))
    if ids[:length] == others[:length]:
        return length
    return next(i for i in range(length) if ids[i] != others[i])


def _cache(cache: SequenceCache, shared: SharedVocabulary) -> TranslatedCache:
    return ForkingTranslatedCache(cache, shared) if isinstance(cache, KVCache) else TranslatedCache(cache, shared)
