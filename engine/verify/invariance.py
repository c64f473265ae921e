"""Does a row's result depend on its batch? Decided on the loaded weights, bit by bit.

Kernels that sum in another order for another number of rows make a text depend on the depth, the load and the chunking. Which
kernels do is a matter of device, dtype, build and shape, so no table can say it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.verify.attention import Chunk
from engine.verify.kv_cache import CachedSequence, KVCache

STEPS = {12: (2, 5, 11, 13, 14, 17), 1021: (2, 11)}
"""Tokens per step, by the tokens before them: few, and just before 1024, where matrix kernels begin to cut sums into parts.

Kernels cut rows into blocks, and the odd one out is a last block of one or two rows. Where up to 8 query heads share a key head
and blocks have 32 rows, it occurs among these steps, unless the number of heads rules it out.
"""
LONGEST_STEP = 21
"""What the others are compared with: depth 20."""
NUM_ROWS = 3
"""Rows that are decoded one by one."""
OTHERS = ((0, 12, 0), (300, 1, 1), (0, 3, 3), (5, 2, 2), (64, 1, 1), (77, 4, 4), (130, 2, 2))
"""The other sequences of a mixed batch: context, new tokens, wanted logits. The first is a chunk of a prefill."""
PROMPT = 48
CHUNKS = (1, 15, 32)
"""Tokens of a prompt, and how it is cut."""

Run = Callable[[KVCache, Sequence[Chunk]], Tensor]
"""A packed forward: logits [R, V] of the wanted tokens of all chunks."""


@dataclass(frozen=True, slots=True)
class RowInvariance:
    """Whether a row's logits have the same bits whatever else is in the batch (None = not probed), and in words why."""

    holds: bool | None
    verdict: str


def probe(run: Run, *, vocab_size: int, max_context: int, block_size: int) -> RowInvariance:
    """Compare rows that are decoded one by one with the same rows in other batches, and a prompt in one chunk with several.

    Takes some twenty-five forwards.
    """
    contexts = [context for context in STEPS if context + LONGEST_STEP <= max_context]
    if not contexts:
        return RowInvariance(None, f"row invariance unknown: a context of {max_context} tokens is too short to check it")
    differences: dict[str, float] = {}
    for context in contexts:
        batches = _Batches(run, context, vocab_size, max_context, block_size)
        differences.update({f"{case} after {context}": difference for case, difference in batches.differences().items()})
    logits, keys_values = _compare_chunks(run, vocab_size, min(max_context, PROMPT), block_size)
    differences["a prompt in chunks"] = logits
    case = max(differences, key=differences.__getitem__)
    if differences[case] > 0:
        return RowInvariance(False, f"not row-invariant: logits differ by {differences[case]:.2g} in {case} tokens")
    if keys_values > 0:
        return RowInvariance(False, f"not row-invariant: keys and values of a prompt in chunks differ by {keys_values:.2g}")
    after = " and ".join(map(str, contexts))
    return RowInvariance(
        True,
        f"row-invariant: equal bits in steps of 1 to {LONGEST_STEP} tokens after {after} others, "
        f"alone and among {len(OTHERS)} sequences, and with a prompt in chunks",
    )


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Ids below ``vocab_size``, the same everywhere."""
    ids: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


class _Batches:
    """Batches around one sequence behind a context. What the cache holds there does not matter, so it is noise."""

    def __init__(self, run: Run, context: int, vocab_size: int, max_context: int, block_size: int):
        self._run = run
        self._context = context
        self._ids = random_ids(LONGEST_STEP, vocab_size, seed=2)
        self._row = CachedSequence([0] * context)
        contexts = [min(length, max_context - count) for length, count, _ in OTHERS]
        self._others = [(CachedSequence([0] * length), *other[1:]) for length, other in zip(contexts, OTHERS, strict=True)]
        lengths = [context + LONGEST_STEP, *(len(sequence.ids) + count for sequence, count, _ in self._others)]
        self._cache = KVCache(sum(-(-length // block_size) for length in lengths), block_size)
        for sequence, *_ in self._others:
            self._cache.reserve(sequence, 0)
        self._step(0, LONGEST_STEP)
        _fill_with_noise(self._cache)

    def differences(self) -> dict[str, float]:
        """Largest difference of a logit from the longest step, per way of batching."""
        alone = torch.cat([self._step(start, 1) for start in range(NUM_ROWS)])
        steps = {count: self._step(0, count) for count in STEPS[self._context]}
        longest = self._step(0, LONGEST_STEP)
        last = self._step(LONGEST_STEP - 1, 1)
        differences = {f"steps of {count}": _difference(rows, longest) for count, rows in steps.items()}
        differences["steps of 1"] = max(_difference(alone, longest), _difference(last, longest[-1:]))
        differences["a mixed batch"] = max(
            _difference(self._step(0, 5, after=len(OTHERS)), longest),
            _difference(self._step(0, 3, before=4, after=len(OTHERS) - 4), longest),
        )
        return differences

    def _step(self, start: int, count: int, *, before: int = 0, after: int = 0) -> Tensor:
        """Logits [count, V] of ids from ``start`` on, in a batch with some of the others before and after them."""
        self._cache.truncate(self._row, self._context + start)
        others = [self._other(*other) for other in self._others[: before + after]]
        chunks = [*others[:before], Chunk(self._row, self._ids[start : start + count], count), *others[before:]]
        for chunk in chunks:
            self._cache.reserve(chunk.sequence, len(chunk.ids))
        lengths = [len(chunk.sequence.ids) for chunk in chunks]
        first = sum(chunk.num_logits for chunk in chunks[:before])
        logits = self._run(self._cache, chunks)[first : first + count].clone()
        for chunk, length in zip(chunks, lengths, strict=True):
            if chunk.sequence is not self._row:
                self._cache.truncate(chunk.sequence, length)
        return logits

    def _other(self, sequence: CachedSequence, count: int, num_logits: int) -> Chunk:
        return Chunk(sequence, (self._ids * 2)[:count], num_logits)


def _compare_chunks(run: Run, vocab_size: int, num_tokens: int, block_size: int) -> tuple[float, float]:
    """Largest difference of the last logits and of K and V between one prompt in a chunk and in `CHUNKS`."""
    ids = random_ids(num_tokens, vocab_size, seed=3)
    cache = KVCache(2 * -(-num_tokens // block_size), block_size)
    whole, parts = CachedSequence(), CachedSequence()
    cache.reserve(whole, num_tokens)
    expected = run(cache, [Chunk(whole, ids, 1)]).clone()
    logits = expected
    for count in CHUNKS:
        chunk = ids[len(parts.ids) :][:count]
        if chunk:
            cache.reserve(parts, len(chunk))
            logits = run(cache, [Chunk(parts, chunk, 1)])
    differences = [
        _difference(_cached(tensor, whole, block_size), _cached(tensor, parts, block_size))
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    ]
    return _difference(logits, expected), max(differences)


def _cached(tensor: Tensor, sequence: CachedSequence, block_size: int) -> Tensor:
    """K or V of a sequence, [H, tokens, D]."""
    slots = [sequence.blocks[i // block_size] * block_size + i % block_size for i in range(len(sequence.ids))]
    return tensor[:, torch.tensor(slots, device=tensor.device)]


def _difference(rows: Tensor, expected: Tensor) -> float:
    """Largest absolute difference of the rows that both have; infinite where one is NaN."""
    num_rows = min(len(rows), len(expected))
    difference = (rows[:num_rows].double() - expected[:num_rows].double()).abs()
    return float(difference.nan_to_num_(nan=torch.inf).max())


def _fill_with_noise(cache: KVCache) -> None:
    noise: dict[torch.Size, Tensor] = {}
    for tensor in (tensor for layer in cache.layers for tensor in (layer.keys, layer.values)):
        if tensor.shape not in noise:
            noise[tensor.shape] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
        tensor.copy_(noise[tensor.shape])
