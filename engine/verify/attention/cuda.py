"""Attention with torch's paged variable-length kernel, one call for the whole batch."""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine.transfer import host_words, moved
from engine.verify.attention import AttentionSpec, Backend, Batch, Chunk, Kernels, Window
from engine.verify.attention.cpu import PaddedAttention, plan_order
from engine.verify.attention.paged import PagedBatch, Sizes
from engine.verify.kv_cache import LayerCache

BLOCK_SIZE = 256
"""Tokens per block: the kernel's pages are a multiple of this."""
MAX_HEAD_DIM = 256


class NoKernel(Exception):
    """The kernel over pages has no form for an attention call."""


def has_paged_kernel() -> bool:
    """Whether this build of torch attends over pages, in one order for every batch."""
    return {"block_table", "seqused_k", "num_splits"} <= inspect.signature(varlen_attn).parameters.keys()


def prepare(chunks: Sequence[Chunk], block_size: int, device: torch.device, kernels: Kernels) -> tuple[Batch, Backend]:
    """As `Prepare`, with one copy to the device."""
    sizes = Sizes(
        num_rows=sum(len(chunk.ids) for chunk in chunks),
        num_logits=max(sum(chunk.num_logits for chunk in chunks), 1),
        num_sequences=len(chunks),
        table_width=max(len(chunk.sequence.blocks) for chunk in chunks),
    )
    host = host_words(sizes.num_words, device)
    PagedBatch.over(host, sizes).fill(chunks, plan_order(chunks), block_size)
    batch = PagedBatch.over(moved(host, device), sizes)
    backend = VarlenAttention(
        batch,
        block_size,
        max_rows=max(len(chunk.ids) for chunk in chunks),
        max_keys=max(len(chunk.sequence.ids) + len(chunk.ids) for chunk in chunks),
        fallback=lambda: PaddedAttention(chunks, block_size, device, kernels),
    )
    return batch, backend


class VarlenAttention:
    """Attention of one batch over pages.

    ``max_rows`` and ``max_keys`` are the most new rows and keys of a sequence, or bounds on them. Calls that the kernel has no
    form for (caps, sinks, odd masks, float32) go to ``fallback``, which is made when it is first needed; without one they raise
    `NoKernel`.
    """

    def __init__(
        self,
        batch: PagedBatch,
        block_size: int,
        *,
        max_rows: int,
        max_keys: int,
        fallback: Callable[[], Backend] | None = None,
    ):
        self._batch = batch
        self._block_size = block_size
        self._max_rows, self._max_keys = max_rows, max_keys
        self._make_fallback = fallback
        self._fallback: Backend | None = None

    def attend(self, query: Tensor, layer: LayerCache, spec: AttentionSpec) -> Tensor:
        """As `Backend.attend`. Raises `NoKernel`."""
        problem = _problem(query, layer, spec)
        if problem is not None:
            return self._other(problem).attend(query, layer, spec)
        size = spec.mask.size if isinstance(spec.mask, Window) else None
        out = varlen_attn(
            query.contiguous(),
            self._pages(layer.keys),
            self._pages(layer.values),
            self._batch.row_starts,
            None,
            self._max_rows,
            self._max_keys,
            scale=spec.scaling,
            window_size=(-1 if size is None else size - 1, 0),
            enable_gqa=query.shape[1] != layer.num_heads,
            seqused_k=self._batch.lengths,
            block_table=self._batch.tables,
            num_splits=1,  # each row's keys are added up in one order, whatever the batch
        )
        assert isinstance(out, Tensor)  # the log-sum-exp was not asked for
        return out.flatten(1)

    def _other(self, problem: str) -> Backend:
        if self._make_fallback is None:
            raise NoKernel(f"the kernel over pages has no form for {problem}")
        if self._fallback is None:
            self._fallback = self._make_fallback()
        return self._fallback

    def _pages(self, cached: Tensor) -> Tensor:
        """[Hkv, slots, D], stored token by token, as pages [blocks, block size, Hkv, D]."""
        num_heads, num_slots, width = cached.shape
        return cached.transpose(0, 1).view(num_slots // self._block_size, self._block_size, num_heads, width)


def _problem(query: Tensor, layer: LayerCache, spec: AttentionSpec) -> str | None:
    """What the kernel has no form for in a call."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return str(query.dtype).removeprefix("torch.")
    if layer.both is None:
        return "keys and values of different widths"
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"heads of width {query.shape[-1]}"
    if spec.softcap is not None:
        return "capped scores"
    if spec.sinks is not None:
        return "sinks"
    return None if isinstance(spec.mask, Window) else "a mask that is no window"
