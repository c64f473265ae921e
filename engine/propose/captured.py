"""Drafts of a whole batch without a look at the device in between: each step feeds the token that it drew to the next one.

One step of all sequences (forward, draw) is one graph that works on its own state: it reads the tokens of the step before,
moves every sequence on by one position and notes what it drew. For drafts of K tokens it is launched K - 1 times in a row, and
the tokens are read once. A graph per number of steps would save launches that the device does not wait for, and would have to
be captured anew whenever the depth moves with the load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine import noise
from engine.noise import Stream
from engine.processing import has_filter, is_plain
from engine.transfer import host_words, on_device, read
from engine.types import SequenceContext
from engine.verify.attention.paged import PagedBatch
from engine.verify.graphs import SEQUENCES, GraphedForward, Replay, smallest_of
from engine.verify.kv_cache import CachedSequence, KVCache
from engine.verify.load import EngineModel
from engine.verify.ragged import RaggedModel

MAX_STEPS = 64
"""Longest draft; the limit of ``speculation.max_depth``."""
REFUSED = -1
"""In place of a token: the logits had none."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence whose logits are there, with room in its blocks for ``depth`` - 1 more tokens."""

    cached: CachedSequence
    context: SequenceContext
    depth: int

    @property
    def is_simple(self) -> bool:
        """Whether its tokens follow from logits, temperature and seed alone: greedy or coupled, nothing cut or penalised."""
        params = self.context.params
        return (
            params.acceptance_rule in ("greedy", "coupled")
            and (params.greedy or not has_filter(params))
            and is_plain(params, len(self.cached.ids) - self.context.prompt_length)
        )


class _Kind(NamedTuple):
    num_sequences: int
    noisy: bool
    """Whether some sequence is sampled; without one no noise is made."""


class CapturedDrafts:
    """Drafts from the model of ``graphs``, over one KV cache."""

    def __init__(self, graphs: GraphedForward, cache: KVCache, vocab_size: int):
        self._graphs = graphs
        self._cache = cache
        self._vocab_size = vocab_size
        self._states: dict[int, _State] = {}
        self._steps: dict[_Kind, Replay] = {}

    def draft(self, logits: Tensor, wanted: Sequence[Wanted]) -> list[list[int]] | None:
        """``depth`` tokens per sequence, the first from its row of logits [N, V], or None where no graph can be had.

        `REFUSED` stands where logits had no token to draw, and what follows it means nothing; nor does what follows the end of
        a text. The tokens but the last are in the sequences' slots then, but not in their ids. No draft goes past the longest
        context, so there may be fewer than ``depth``.
        """
        if len(wanted) > SEQUENCES[-1]:
            return None
        kind = _Kind(smallest_of(SEQUENCES, len(wanted)), any(not one.context.params.greedy for one in wanted))
        state = self._state(kind.num_sequences)
        counts = [min(one.depth, self._graphs.max_context + 1 - len(one.cached.ids), MAX_STEPS) for one in wanted]
        step = self._step(kind, state)
        if step is None:
            return None
        state.begin(wanted, counts, self._cache)
        first = logits.new_zeros(kind.num_sequences, logits.shape[1])
        first[: len(wanted)] = logits
        state.draw(first, noisy=kind.noisy)
        for _ in range(max(counts) - 1):
            step()
        rows: list[list[int]] = read(state.drawn[: len(wanted)]).tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def _state(self, num_sequences: int) -> "_State":
        if num_sequences not in self._states:
            self._states[num_sequences] = _State(num_sequences, self._graphs)
        return self._states[num_sequences]

    def _step(self, kind: _Kind, state: "_State") -> Replay | None:
        if kind not in self._steps:

            def run() -> None:
                state.advance(self._cache.scratch_block)
                logits = self._graphs.run(state.batch, self._cache)
                state.draw(logits[:, : self._vocab_size], noisy=kind.noisy)

            state.begin((), (), self._cache)  # recording runs it too: over nobody's sequences
            replay = self._graphs.record(f"a draft step of {kind.num_sequences} sequences", run)
            if replay is None:
                return None
            self._steps[kind] = replay
        return self._steps[kind]


def captured_drafts(model: EngineModel) -> CapturedDrafts | None:
    """Captured drafts of a model whose steps can be graphs."""
    if not isinstance(model, RaggedModel) or model.graphs is None:
        return None
    return CapturedDrafts(model.graphs, model.cache, model.loaded.vocab_size)


def pick_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Some rows of logits [N, V], given in ascending order."""
    return logits if len(rows) == len(logits) else logits[on_device(rows, torch.int64, logits.device)]


class _State:
    """N sequences on their way, on the device; all tensors stay where they are."""

    def __init__(self, num_sequences: int, graphs: GraphedForward):
        device, width = graphs.device, graphs.table_width
        self._block_size = graphs.block_size
        self._last_position = graphs.max_context - 1
        # In int64 words: what `begin` sends to the device, where temperatures are float64 and greedy is 0 or 1.
        self._numbers = torch.zeros(5 + width, num_sequences, dtype=torch.int64, device=device)
        self._seeds, self._next, self._left, self._greedy = self._numbers[:4]
        """``_next``: position of the token to be drawn; ``_left``: steps in which the sequence still takes part."""
        self._temperatures = self._numbers[4].view(torch.float64)
        self._blocks = self._numbers[5:]
        """[blocks, N]."""
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(num_sequences, MAX_STEPS, dtype=torch.int64, device=device)
        """int64 [N, steps]."""
        one_each = torch.arange(num_sequences + 1, device=device)
        self.batch = PagedBatch(
            tokens=torch.zeros(num_sequences, dtype=torch.int64, device=device),
            positions=torch.zeros(num_sequences, dtype=torch.int64, device=device),
            slots=torch.zeros(num_sequences, dtype=torch.int64, device=device),
            logit_rows=one_each[:-1].clone(),
            row_starts=one_each.to(torch.int32),
            lengths=torch.zeros(num_sequences, dtype=torch.int32, device=device),
            tables=torch.zeros(num_sequences, width, dtype=torch.int32, device=device),
        )

    def begin(self, wanted: Sequence[Wanted], counts: Sequence[int], cache: KVCache) -> None:
        """Put the sequences in place, with one copy; the rest are nobody's and write to the scratch block."""
        host = host_words(self._numbers.numel(), self._numbers.device).view(self._numbers.shape)
        numbers = host.numpy()
        numbers[:5] = 0
        numbers[4].view("float64")[:] = 1.0
        numbers[5:] = cache.scratch_block
        for column, (one, count) in enumerate(zip(wanted, counts, strict=True)):
            params, blocks = one.context.params, one.cached.blocks[: len(self._blocks)]
            numbers[:4, column] = noise.signed64(params.seed), len(one.cached.ids), count - 1, params.greedy
            numbers[4].view("float64")[column] = 1.0 if params.greedy else params.temperature
            numbers[5:, column] = blocks + blocks[:1] * (len(self._blocks) - len(blocks))
        self._numbers.copy_(host, non_blocking=True)
        self.batch.tables.copy_(self._blocks.t())
        self._column.zero_()

    def draw(self, logits: Tensor, *, noisy: bool) -> None:
        """Draw a token per row of logits [N, V], note it, and make it the next one to be fed."""
        raw = logits.float()
        tokens = raw.argmax(dim=-1)
        if noisy:
            keys = noise.row_keys(self._seeds, self._next, Stream.COUPLED)
            sampled = noise.plain_gumbel_argmax(raw / self._temperatures.to(raw.dtype)[:, None], keys)
            tokens = torch.where(self._greedy > 0, tokens, sampled)
        self.batch.tokens.copy_(tokens)
        noted = tokens.masked_fill(~torch.isfinite(raw.amax(dim=-1)), REFUSED)
        self.drawn.index_copy_(1, self._column, noted[:, None])
        self._column.add_(1)

    def advance(self, scratch_block: int) -> None:
        """Set the forward's inputs for the tokens just drawn. Who has left stays where it is and writes to the scratch."""
        takes_part = self._left > 0
        position = self._next.clamp_max(self._last_position)
        block = self.batch.tables.gather(1, (position // self._block_size)[:, None]).squeeze(1)
        block = torch.where(takes_part, block.to(torch.int64), scratch_block)
        self.batch.slots.copy_(block * self._block_size + position % self._block_size)
        self.batch.positions.copy_(position)
        self.batch.lengths.copy_(position + 1)
        self._next.add_(takes_part)
        self._left.sub_(takes_part.to(torch.int64))
