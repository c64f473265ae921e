"""Attention with torch's paged variable-length kernel, one call for the whole batch."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from engine.verify.attention import AttentionSpec, Chunk, Kernels, Window
from engine.verify.attention.cpu import PaddedAttention
from engine.verify.kv_cache import LayerCache

BLOCK_SIZE = 256
"""Tokens per block: the kernel's pages are a multiple of this."""
MAX_HEAD_DIM = 256


def has_paged_kernel() -> bool:
    """Whether this build of torch attends over pages, in one order for every batch."""
    return {"block_table", "seqused_k", "num_splits"} <= inspect.signature(varlen_attn).parameters.keys()


class VarlenAttention:
    """Attention of one batch. Calls that the kernel has no form for (caps, sinks, odd masks) go to `PaddedAttention`."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, device: torch.device, kernels: Kernels = "fast"):
        self._block_size = block_size
        self._padded = PaddedAttention(chunks, block_size, device, kernels)
        self.order = self._padded.order
        ordered = [chunks[i] for i in self.order]
        counts = [len(chunk.ids) for chunk in ordered]
        lengths = [len(chunk.sequence.ids) + len(chunk.ids) for chunk in ordered]
        width = max(len(chunk.sequence.blocks) for chunk in ordered)
        tables = [(chunk.sequence.blocks + [0] * width)[:width] for chunk in ordered]
        self._max_rows, self._max_keys = max(counts), max(lengths)
        self._row_starts = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        self._lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self._tables = torch.tensor(tables, dtype=torch.int32, device=device)

    def attend(self, query: Tensor, layer: LayerCache, spec: AttentionSpec) -> Tensor:
        """As `Backend.attend`."""
        if not _has_kernel(query, layer, spec):
            return self._padded.attend(query, layer, spec)
        size = spec.mask.size if isinstance(spec.mask, Window) else None
        out = varlen_attn(
            query.contiguous(),
            self._pages(layer.keys),
            self._pages(layer.values),
            self._row_starts,
            None,
            self._max_rows,
            self._max_keys,
            scale=spec.scaling,
            window_size=(-1 if size is None else size - 1, 0),
            enable_gqa=query.shape[1] != layer.num_heads,
            seqused_k=self._lengths,
            block_table=self._tables,
            num_splits=1,  # each row's keys are added up in one order, whatever the batch
        )
        assert isinstance(out, Tensor)  # the log-sum-exp was not asked for
        return out.flatten(1)

    def _pages(self, cached: Tensor) -> Tensor:
        """[Hkv, slots, D], stored token by token, as pages [blocks, block size, Hkv, D]."""
        num_heads, num_slots, width = cached.shape
        return cached.transpose(0, 1).view(num_slots // self._block_size, self._block_size, num_heads, width)


def _has_kernel(query: Tensor, layer: LayerCache, spec: AttentionSpec) -> bool:
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and layer.both is not None
        and query.shape[-1] <= MAX_HEAD_DIM
        and spec.softcap is None
        and spec.sinks is None
        and isinstance(spec.mask, Window)
    )
