"""The fallback for architectures whose sequences cannot share a packed forward: one transformers cache per sequence.

Sequences run one after another. What a cache layer can cut off again is cut off; layers that fold the past into a state of
fixed size (state-space, linear attention, convolution) are copied before tokens that may be taken back, and after a rollback
the copy is put in place and the tokens that stay are computed again, together with what comes next.
"""

import copy
import inspect
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from engine.models import LoadedModel
from engine.types import ModelInfo
from engine.verify.attention import Chunk, Kernels
from engine.verify.blocks import BlockPool, CachedSequence
from engine.verify.invariance import RowInvariance
from engine.verify.kv_cache import affordable_blocks
from engine.verify.linear import MAKERS, replace_linears
from engine.verify.ragged import (
    STEP_CONTEXT,
    Reference,
    UnsupportedArchitecture,
    Weights,
    architecture_errors,
    context_limit,
    describe,
    largest_error,
    median_step_times,
    plain_reference,
    relative_error,
)

logger = logging.getLogger(__name__)

BLOCK_SIZE = 256
"""Tokens by which room is counted. The caches themselves grow token by token; a block also pays for one sequence's states."""
CROPPABLE = (DynamicLayer, DynamicIndexedLayer, DummyLayer)
"""Layers that keep every token, so that any number of them can be cut off. Exactly these classes: heirs may keep more."""
NUM_COPIES = 2
"""Copies of the states that a sequence keeps."""
COPY_SPACING = 32
"""Tokens between copies while none is to be taken back: no more than a draft of this length needs the older copy."""
MOST_ROUNDING = 4.0
"""Ratio of the errors of longer and of single steps up to which both are rounding.

Measured on tiny models of 15 families in bfloat16 and float32: up to 1.1 where both are right, from 4.6 where one ignores the
state or a limit, unless the state matters less than bfloat16's rounding.
"""
ROUNDING_SHARE = 0.01
"""Of the largest accepted error, an error that is too small to be compared."""
LEAK_SHARE = 0.1
"""Of the largest accepted error, what another sequence in between or a draft that was taken back may change."""
MOST_REPLAYED = 8
"""Tokens that are computed again beside new ones; if there are more they get a forward and a copy of their own."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """What cannot be cropped, as it was after the first ``length`` tokens."""

    length: int
    layers: dict[int, Any]
    """By index; unused where ``cache`` is set."""
    cache: Any = None
    """A whole cache of a kind that only its architecture knows."""


@dataclass(slots=True)
class SequenceState:
    """What transformers keeps of the first ``length`` tokens of one sequence."""

    cache: Any
    """A `DynamicCache`, or a cache of the architecture's own kind; that is None until the first forward makes it."""
    length: int = 0
    copies: list[_Copy] = field(default_factory=list)

    @property
    def is_foreign(self) -> bool:
        """Whether the cache is of the architecture's own kind, of which nothing is known."""
        return type(self.cache) is not DynamicCache

    @property
    def crops(self) -> bool:
        """Whether tokens can be cut off again without a copy."""
        return not self.is_foreign and not self._fixed

    @property
    def _fixed(self) -> dict[int, Any]:
        """Layers that only a copy can take back, by index."""
        return {index: layer for index, layer in enumerate(self.cache.layers) if type(layer) not in CROPPABLE}

    def copied(self) -> _Copy:
        """What it takes to `restore` the state of now."""
        if self.is_foreign:
            return _Copy(self.length, {}, copy.deepcopy(self.cache))
        return _Copy(self.length, copy.deepcopy(self._fixed))

    def restore(self, copied: _Copy) -> None:
        """Be as when ``copied``, an earlier state, was made; it can be used again."""
        if self.is_foreign:
            self.cache, self.length = copy.deepcopy(copied.cache), copied.length
            return
        self._crop(copied.length)
        for index, layer in copy.deepcopy(copied.layers).items():
            self.cache.layers[index] = layer

    def remember(self) -> None:
        """Copy what cannot be cropped; the oldest copy beyond `NUM_COPIES` goes. Nothing to do where everything can."""
        if self.length == 0 or self.crops or (self.copies and self.copies[-1].length == self.length):
            return
        self.copies = [*self.copies, self.copied()][-NUM_COPIES:]

    def roll_back(self, length: int) -> bool:
        """Go back to the first ``length`` tokens, or to fewer where only an older copy is left; False where none is."""
        if self.crops:
            self._crop(length)
            return True
        self.copies = [known for known in self.copies if known.length <= length]
        if not self.copies:
            return False
        self.restore(self.copies[-1])
        return True

    def _crop(self, length: int) -> None:
        """Cut the layers off that can be cut."""
        for layer in self.cache.layers:
            if type(layer) in CROPPABLE:
                layer.crop(length - self.length)
        self.length = length


class StateCache:
    """The caches of all sequences, and a pool that counts their tokens in blocks that stand for no memory of their own."""

    def __init__(self, num_blocks: int):
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.states: WeakKeyDictionary[CachedSequence, SequenceState] = WeakKeyDictionary()

    def reserve(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens. Raises `OutOfBlocks` and changes nothing when there is no room."""
        self.pool.reserve(sequence, num_tokens)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget all but the first ``length`` tokens. Their states follow when the sequence goes on."""
        self.pool.truncate(sequence, length)
        if length == 0:
            self.states.pop(sequence, None)


class StatefulModel:
    """A causal language model as a function of chunks, as `RaggedModel` is, sequence by sequence.

    Whether several tokens may follow a cache in one forward is found out on the loaded weights. Where they may not (Mamba,
    whose code for more than one token begins from an empty state), tokens go one by one and a draft saves nothing:
    ``max_draft_depth`` is 0, and a prompt is computed as a whole when its last chunk arrives.

    The loaded model is taken over. Raises `ModelError` when it does not reproduce its own plain forward either way, and when
    there is no memory for one block of tokens.
    """

    path = "stateful"
    shares_prefixes = False
    """States are not cut into blocks that others could take."""
    hidden: Sequence[Tensor] = ()
    """None are kept."""
    numerics: Kernels = "fast"
    row_invariance = RowInvariance(
        None, "not probed: sequences run one by one, steps of several tokens sum in an order of their own"
    )

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        reason: str,
        weights: Weights = "exact",
        kv_capacity_tokens: int | None = None,
        max_context: int | None = None,
    ):
        """``reason``: why the model is not packed."""
        self.loaded = loaded
        self.device = torch.device(loaded.device)
        self.num_ids: int = loaded.model.get_input_embeddings().weight.shape[0]
        self.max_context = min(loaded.max_context, max_context or loaded.max_context, context_limit(loaded.config))
        self._weights = weights
        self._takes = inspect.signature(loaded.model.forward).parameters
        self._one_by_one = False
        self._foreign = False
        self._never_alone = False
        self.cache = StateCache(num_blocks=4)
        rollback = self._prepare()
        self.path_reason = f"{reason}; {rollback}"
        num_blocks = affordable_blocks(
            loaded.name, self._bytes_per_token(), BLOCK_SIZE, self.max_context, self.device, kv_capacity_tokens
        )
        self.cache = StateCache(num_blocks)
        self.step_times = self._measure_step_times()

    @property
    def max_draft_depth(self) -> int | None:
        """0 where tokens go one by one; None is no bound."""
        return 0 if self._one_by_one else None

    @property
    def info(self) -> ModelInfo:
        """Sizes, identity and measured step times."""
        return describe(
            self.loaded,
            self._weights,
            max_context=self.max_context,
            kv_capacity_tokens=self.cache.pool.num_blocks * BLOCK_SIZE,
            kv_block_size=BLOCK_SIZE,
            device=str(self.device),
            step_times=self.step_times,
            numerics=self.numerics,
            row_invariant=self.row_invariance.holds,
            row_invariance=self.row_invariance.verdict,
            path=self.path,
            path_reason=self.path_reason,
            max_draft_depth=self.max_draft_depth,
        )

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """As `RaggedModel.forward`. When a sequence fails it begins anew in the next call, and no chunk counts as computed."""
        rows = [self._advance(chunk) for chunk in chunks]
        for chunk in chunks:
            chunk.sequence.ids.extend(chunk.ids)
        return torch.cat(rows)

    def _advance(self, chunk: Chunk) -> Tensor:
        """Logits [num_logits, V] of a chunk; its sequence's state has absorbed it then."""
        sequence = chunk.sequence
        state = self._current(sequence)
        behind = sequence.ids[state.length :]
        from_scratch = self._one_by_one and state.length == 0
        if from_scratch and chunk.num_logits == 0:
            return torch.empty(
                0, self.loaded.vocab_size, dtype=self.loaded.dtype, device=self.device
            )  # with the prompt's last chunk, in one forward
        try:
            if catches_up := len(behind) > MOST_REPLAYED and not from_scratch:
                self._run(state, behind, 0)
                behind = []
            since = state.length - (state.copies[-1].length if state.copies else -COPY_SPACING)
            if catches_up or chunk.num_logits > 1 or since >= COPY_SPACING:
                state.remember()
            ids = [*behind, *chunk.ids]
            run = self._run_beside_filler if self._never_alone and len(ids) == 1 and state.length else self._run
            return run(state, ids, chunk.num_logits)[:, : self.loaded.vocab_size]
        except BaseException:
            self.cache.states.pop(sequence, None)  # some layers may have gone further than others
            raise

    def _current(self, sequence: CachedSequence) -> SequenceState:
        """The state of at most the tokens that the sequence holds now."""
        state = self.cache.states.get(sequence)
        if state is None or (state.length > len(sequence.ids) and not state.roll_back(len(sequence.ids))):
            state = self.cache.states[sequence] = self._new_state()
        return state

    def _new_state(self) -> SequenceState:
        return SequenceState(None if self._foreign else _new_cache(self.loaded.model.config))

    def _run(self, state: SequenceState, ids: Sequence[int], num_logits: int) -> Tensor:
        """Absorb ids; logits [num_logits, V] of the last of them."""
        pieces = [[token] for token in ids] if self._one_by_one and state.length else [list(ids)]
        rows = [self._forward(state, piece, min(num_logits, len(piece))) for piece in pieces]
        return torch.cat(rows)[sum(map(len, rows)) - num_logits :]

    def _run_beside_filler(self, state: SequenceState, ids: Sequence[int], num_logits: int) -> Tensor:
        """The logits of a lone token from a step of two; the state stays before both, so that the token waits for the next."""
        before = state.copied()
        logits = self._run(state, [*ids, *ids], 2)[:num_logits]
        state.restore(before)
        return logits

    def _forward(self, state: SequenceState, ids: list[int], num_logits: int) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": torch.tensor([ids], device=self.device), "cache": state.cache, "use_cache": True}
        if "position_ids" in self._takes:  # not every architecture counts on from its cache by itself
            inputs["position_ids"] = torch.arange(state.length, state.length + len(ids), device=self.device).unsqueeze(0)
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = max(num_logits, 1)  # 0 would be all
        output = self.loaded.model(**inputs)
        logits: Tensor = output.logits[0]
        state.cache = output.cache if state.cache is None else state.cache
        state.length += len(ids)
        return logits[len(logits) - num_logits :]

    # --- loading ------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _prepare(self) -> str:
        """Find the way that reproduces the plain forward; how it rolls back, in words."""
        model = self.loaded.model
        with architecture_errors(self.loaded):
            reference = plain_reference(self.loaded)
        problems = []
        for self._foreign, self._one_by_one in ((False, False), (False, True), (True, False), (True, True)):
            problems.append(self._problem(reference))
            if problems[-1] is None:
                break
        else:
            raise UnsupportedArchitecture(
                self.loaded,
                f"with a cache per sequence, steps of several tokens fail the check against the plain forward ({problems[0]}), "
                f"and steps of one too ({problems[1]}); with the architecture's own cache: {problems[2]}",
            )
        if self._weights != "exact":
            replace_linears(model, MAKERS[self._weights])
            with architecture_errors(self.loaded):
                problem = self._check(reference)
            if problem is not None:
                raise UnsupportedArchitecture(self.loaded, f"its {self._weights} copy fails the check: {problem}")
        if self._one_by_one:
            return "steps of several tokens are not what single ones are, so tokens go one by one, without drafts"
        how = "cropping" if self._probe_state(1).crops else "copies of the state and replay"
        alone = (
            "; a lone token goes beside a filler, since single steps are not what longer ones are" if self._never_alone else ""
        )
        return f"one cache per sequence, rolled back by {how}{alone}"

    def _problem(self, reference: Reference) -> str | None:
        """What is wrong with the way in use, if anything; decides about lone tokens."""
        try:
            problem = None if self._one_by_one else self._compare_step_sizes(reference)
            return problem or self._check(reference)
        except Exception as failure:  # an architecture may fail in any way
            return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"

    def _compare_step_sizes(self, reference: Reference) -> str | None:
        """Tell the rounding of steps from mistakes in them: some architectures have other formulas for one token than for more.

        What is wrong with steps of several tokens. If it is single ones that are wrong, no token may go alone from now on.
        """
        if self.loaded.dtype != torch.float32 and _has_first_mamba(self.loaded.model):
            return "longer steps of the first Mamba begin from an empty state, which rounding may hide"
        (ids, logits), _ = reference
        start, end = 9, 15
        errors = []
        self._never_alone = False
        for count in (end - start, 1):
            state = self._new_state()
            self._run(state, ids[:start], 1)
            rows = [self._run(state, ids[first : first + count], count) for first in range(start, end, count)]
            got = torch.cat(rows)[:, : self.loaded.vocab_size]
            errors.append(relative_error(got, [(ids[start:end], logits[start:end])], self.loaded.vocab_size))
        several, single = errors
        least = largest_error(self.loaded.dtype, "exact") * ROUNDING_SHARE
        if several > MOST_ROUNDING * max(single, least):
            return f"steps of several tokens are off by {several:.2g} of the logits' spread, single ones by {single:.2g}"
        self._never_alone = single > MOST_ROUNDING * max(several, least)
        return None

    def _check(self, reference: Reference) -> str | None:
        """What is wrong about chunks, rollbacks and sequences in turns, if anything."""
        self.cache = StateCache(num_blocks=4)
        error, leak = self._error(reference), self._leak(reference)
        most = largest_error(self.loaded.dtype, self._weights)
        if not error <= most:
            return f"off by {error:.2g} of the logits' spread"
        if not leak <= most * LEAK_SHARE:
            return f"another sequence, or tokens that were taken back, change the logits by {leak:.2g} of their spread"
        return None

    def _error(self, reference: Reference) -> float:
        """Error over two sequences in turns, with a whole draft taken back, then a part of one, then one by one."""
        (a, _), (b, _) = reference
        first, second = CachedSequence(), CachedSequence()
        of_first = [self._step(first, a[:9], 9)]
        of_second = [self._step(second, b[:5], 5)]
        of_first += [self._step(first, b[:4], 0), self._step(first, [*a[9:12], *b[:3]], 3)]
        of_second += [self._step(second, b[5:12], 7)]
        of_first += [self._step(first, [*a[12:14], *b[:2]], 2)]
        of_second += [self._step(second, b[12:], len(b) - 12)]
        of_first += [self._step(first, [token], 1) for token in a[14:20]]
        of_first += [self._step(first, a[20:], len(a) - 20)]
        for sequence in (first, second):
            self.cache.truncate(sequence, 0)
        return relative_error(torch.cat([*of_first, *of_second]), reference, self.loaded.vocab_size)

    def _leak(self, reference: Reference) -> float:
        """What another sequence in between, and a draft that is taken back, change about the same steps of a sequence.

        They are forwards of the same shapes, so it is 0 where kernels are deterministic, in any dtype.
        """
        (a, _), (b, _) = reference
        results = []
        for disturbed in (False, True):
            sequence, other = CachedSequence(), CachedSequence()
            self._step(sequence, a[:9], 9)
            if disturbed:
                self._step(other, b[:5], 5)
                self._step(sequence, b[:4], 0)
            results.append(self._step(sequence, a[9:], len(a) - 9))
            for used in (sequence, other):
                self.cache.truncate(used, 0)
        return relative_error(results[1], [(a[9:], results[0])], self.loaded.vocab_size)

    def _step(self, sequence: CachedSequence, ids: Sequence[int], num_kept: int) -> Tensor:
        """Logits [num_kept, V] of the first of some new tokens; the others are taken back."""
        length = len(sequence.ids)
        self.cache.reserve(sequence, len(ids))
        logits = self.forward([Chunk(sequence, ids, len(ids))])
        self.cache.truncate(sequence, length + num_kept)
        return logits[:num_kept]

    def _bytes_per_token(self) -> int:
        """What grows with each token, and a block's share of the states of fixed size and their copies."""
        few, many = 8, 24
        small, large = (_num_bytes(self._probe_state(length).cache) for length in (few, many))
        growing = max(large - small, 0) / (many - few)
        fixed = max(small - few * growing, 0) * (1 + NUM_COPIES)
        return max(round(growing + fixed / BLOCK_SIZE), 1)

    @torch.inference_mode()
    def _probe_state(self, length: int) -> SequenceState:
        state = self._new_state()
        self._run(state, [0] * length, 1)
        return state

    def _measure_step_times(self) -> tuple[tuple[int, float], ...]:
        """As `RaggedModel` measures them: (new tokens of one sequence, seconds)."""
        sequence = CachedSequence()
        room = min(self.max_context, self.cache.pool.num_blocks * BLOCK_SIZE) - STEP_CONTEXT
        if room < 1:
            return ()
        self.cache.reserve(sequence, STEP_CONTEXT)
        self.forward([Chunk(sequence, [0] * STEP_CONTEXT, 1)])

        def time_step(size: int) -> float:
            self.cache.reserve(sequence, size)
            started = time.perf_counter()
            self.forward([Chunk(sequence, [0] * size, size)])[0, 0].item()  # waits for the device
            elapsed = time.perf_counter() - started
            self.cache.truncate(sequence, STEP_CONTEXT)
            return elapsed

        times = median_step_times(time_step, room)
        self.cache.truncate(sequence, 0)
        return times


def _new_cache(config: Any) -> DynamicCache:
    """An empty cache of the layers that the configuration names.

    A sliding layer would throw away tokens that a rollback brings back into its window, so it becomes one that keeps them all;
    who sees whom is the mask's business.
    """
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def _has_first_mamba(model: torch.nn.Module) -> bool:
    """Whether there are scans with a decay per channel and state, which transformers continues by single tokens only."""
    return any(name.endswith("A_log") and parameter.ndim == 2 for name, parameter in model.named_parameters())


def _num_bytes(value: Any) -> int:
    """Memory of all tensors in a nest of objects, lists and dicts."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, dict):
        parts: Sequence[Any] = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from _tensors(part, seen)
