"""One attention over many sequences: which rows belong to whom, what they may see, and the hook into transformers.

`cpu` and `cuda` hold the arithmetic. A model is called with all new tokens packed into one row, ``input_ids`` [1, T]; the
functions registered here find the batch they serve in a context variable, since some architectures drop keyword arguments.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from engine.transfer import on_device
from engine.verify.kv_cache import CachedSequence, KVCache, LayerCache

NAME = "outrider"
"""Name of our attention in transformers' tables."""
Kernels = Literal["fast", "invariant"]
"""The fastest, or those by which a row's bits do not depend on its batch."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence; logits are wanted for the last ``num_logits`` of them."""

    sequence: CachedSequence
    ids: Sequence[int]
    num_logits: int
    num_left_out: int = 0
    """Tokens that the text has before the new ones and ``sequence`` has not: true positions are so much higher than places."""


@dataclass(frozen=True, slots=True)
class Window:
    """Causal attention to the last ``size`` positions, one's own included; None is all of them."""

    size: int | None = None

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether query positions (any shape) see key positions (broadcast against them): bool."""
        seen = keys <= queries
        return seen if self.size is None else seen & (keys > queries - self.size)


class MaskFunction:
    """What transformers makes for a layer instead of a mask tensor: its rule of who sees whom, over true positions."""

    def __init__(self, function: Callable[..., Tensor]):
        self.function = function
        self.shape = ()

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """As `Window.visible`."""
        zero = torch.zeros((), dtype=torch.int64, device=queries.device)
        return self.function(zero, zero, queries, keys) & (keys <= queries)

    def as_window(self, max_context: int, device: torch.device) -> "Window | MaskFunction":
        """The `Window` that says the same for all positions below ``max_context``, or self."""
        keys = torch.arange(max_context, device=device)
        size = int(self.visible(keys[-1:, None], keys).sum())
        window = Window(None if size == max_context else size)
        places = {0, 1, size - 1, size, size + 1, max_context // 3, max_context // 2, max_context - 1}
        queries = torch.tensor([[p] for p in sorted(places) if 0 <= p < max_context], device=device)
        same = torch.equal(self.visible(queries, keys), window.visible(queries, keys))
        return window if same else self

    def to(self, *args: Any, **kwargs: Any) -> "MaskFunction":
        """Architectures move and slice their masks; a rule needs neither."""
        return self

    def __getitem__(self, item: Any) -> "MaskFunction":
        return self


Mask = Window | MaskFunction


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one attention call differs from plain softmax(q·k·scaling)·v."""

    scaling: float
    mask: Mask = Window()
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap)."""
    sinks: Tensor | None = None
    """[Hq]: logits of one more column that takes probability and gives nothing."""


class Backend(Protocol):
    """Attention of one packed batch."""

    def attend(self, query: Tensor, layer: LayerCache, spec: AttentionSpec) -> Tensor:
        """Attention of query [T, Hq, D] over the cached K and V, new tokens included: heads side by side, [T, Hq * Dv]."""


@dataclass(slots=True)
class Batch:
    """The new tokens of all chunks in one row."""

    tokens: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: of the token in its own text."""
    slots: Tensor
    """int64 [T]: where its K and V go."""
    logit_rows: Tensor
    """int64 [R]: rows whose logits are wanted, in the order in which the chunks were given; row 0 when none are, since not
    every kernel takes an empty input.
    """


Prepare = Callable[[Sequence[Chunk], int, torch.device, Kernels], tuple[Batch, Backend]]
"""(chunks, block size, device, kernels) -> what a forward needs. The blocks must already have room for the new tokens."""


def pack(chunks: Sequence[Chunk], order: Sequence[int], block_size: int, device: torch.device) -> Batch:
    """Pack ``chunks`` in the given order. Their blocks must already hold the new tokens."""
    tokens, positions, slots, logit_rows = packed_lists(chunks, order, block_size)
    packed = on_device([tokens, positions, slots], torch.int64, device)
    return Batch(packed[0], packed[1], packed[2], on_device(logit_rows, torch.int64, device))


def packed_lists(
    chunks: Sequence[Chunk], order: Sequence[int], block_size: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """The parts of a `Batch` as lists."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[list[int]] = [[] for _ in chunks]
    for index in order:
        chunk = chunks[index]
        start, blocks = len(chunk.sequence.ids), chunk.sequence.blocks
        tokens += chunk.ids
        logit_rows[index] = list(range(len(tokens) - chunk.num_logits, len(tokens)))
        span = range(start, start + len(chunk.ids))
        positions += range(start + chunk.num_left_out, start + chunk.num_left_out + len(chunk.ids))
        slots += [blocks[p // block_size] * block_size + p % block_size for p in span]
    return tokens, positions, slots, [row for rows in logit_rows for row in rows] or [0]


@dataclass(slots=True)
class AttentionState:
    """One packed forward on its way through a model: counts the attention calls, which own one layer of the cache each."""

    batch: Batch
    backend: Backend
    cache: KVCache
    max_context: int
    masks: dict[int, Mask]
    """Per call, what transformers' rule came to; outlives the forward."""
    calls: int = 0

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        """Cache keys [Hkv, T, Dk] and values [Hkv, T, Dv], then attend with query [T, Hq, Dk]: [T, Hq * Dv]."""
        layer = self.cache.layer(self.calls, keys, values)
        self.calls += 1
        layer.write(self.batch.slots, keys, values)
        return self.backend.attend(query, layer, spec)

    def forward_both(self, query: Tensor, keys_values: Tensor, spec: AttentionSpec) -> Tensor:
        """The same with keys and values side by side, [2 * Hkv, T, D]: one copy instead of two."""
        layers = self.cache.layers
        if self.calls == len(layers):
            keys, values = keys_values.chunk(2)
            self.cache.layer(self.calls, keys, values)
        layer = layers[self.calls]
        self.calls += 1
        if layer.both is None:
            raise ValueError("this cache holds keys and values of different widths")
        layer.both.index_copy_(1, self.batch.slots, keys_values)
        return self.backend.attend(query, layer, spec)

    def resolve(self, mask: Any, window: int | None, device: torch.device) -> Mask:
        """The mask of the next call: as transformers' rule, or by the window that the layer names when it made none."""
        if not isinstance(mask, MaskFunction):
            if mask is not None:
                raise TypeError(f"the layer brings its own mask of type {type(mask).__name__}")
            return Window(window)
        known = self.masks.get(self.calls)
        if known is None:
            known = self.masks[self.calls] = mask.as_window(self.max_context, device)
        return known if isinstance(known, Window) else mask


_state: ContextVar[AttentionState] = ContextVar("attention_state")


def run_with(state: AttentionState, call: Callable[[], Any]) -> Any:
    """Run a model whose attention is ours over the batch of ``state``."""
    token = _state.set(state)
    try:
        return call()
    finally:
        _state.reset(token)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls per layer: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> ([1, T, Hq, Dv], None)."""
    state = _state.get()
    spec = AttentionSpec(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=state.resolve(attention_mask, sliding_window, query.device),
        softcap=softcap,
        sinks=s_aux,
    )
    out = state.forward(query[0].transpose(0, 1), key[0], value[0], spec)
    return out.view(1, len(out), query.shape[1], -1), None


def _mask(*args: Any, mask_function: Callable[..., Tensor], **kwargs: Any) -> MaskFunction:
    return MaskFunction(mask_function)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
