"""CUDA graphs without CUDA: work is recorded as a graph records it, and repeated on the same tensors without our Python.

What a real capture refuses is refused here too: reading a number on the host, shapes that depend on data, and constants that
come from the host.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from engine.verify import graphs, kv_cache, ragged
from engine.verify.attention import cuda

KEYS = 320
"""Keys that every sum of the stand-in attention runs over, so that a row's bits cannot depend on the width of a table."""
BLOCK_SIZE = 64
REFUSED = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "equal")


class Recording(TorchDispatchMode):
    """The operations of a block, with the very tensors they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in REFUSED:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, list(tensors_of(out))))
        return out

    def replay(self) -> None:
        for func, args, kwargs, recorded in self._steps:
            for old, new in zip(recorded, tensors_of(func(*args, **kwargs)), strict=True):
                if old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def tensors_of(out: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor))


class FakeRecorder:
    """As `engine.verify.graphs.CudaRecorder`; ``recorded`` counts what was recorded, ``replayed`` how often it was repeated."""

    def __init__(self, device: torch.device):
        self.recorded = 0
        self.replayed = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        with Recording() as recording:
            run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            recording.replay()

        return replay


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row_starts: Tensor,
    _: None,
    max_rows: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` computes over pages, row by row; rows of nobody are NaN."""
    num_sequences, width = block_table.shape
    page_size = keys.shape[1]
    assert width * page_size <= KEYS
    assert num_splits == 1
    assert enable_gqa == (query.shape[1] != keys.shape[2])
    rows = torch.arange(len(query))
    owner = (rows[:, None] >= row_starts[None, 1:]).sum(dim=1)
    known = owner.clamp_max(num_sequences - 1)
    counts = row_starts[1:] - row_starts[:-1]
    position = seqused_k[known] - counts[known] + rows - row_starts[known]
    places = torch.arange(KEYS)
    table = torch.nn.functional.pad(block_table, (0, KEYS // page_size - width)).long()
    slots = (table[:, :, None] * page_size + torch.arange(page_size)).flatten(1)[known]  # [T, KEYS]
    seen = places[None] <= position[:, None]
    if window_size[0] >= 0:
        seen = seen & (places[None] >= position[:, None] - window_size[0])
    shared = query.shape[1] // keys.shape[2]
    k, v = (
        torch.where(seen[:, :, None, None], part.flatten(0, 1)[slots].float(), 0.0).repeat_interleave(shared, dim=2)
        for part in (keys, values)
    )
    scores = (query[:, None].float() * k).sum(dim=-1) * scale
    weights = torch.softmax(torch.where(seen[:, :, None], scores, -torch.inf), dim=1)
    out = (weights[..., None] * v).sum(dim=1)
    return torch.where((owner < num_sequences)[:, None, None], out, torch.nan).to(query.dtype)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models load as they do on CUDA: paged attention, a scratch block, and graphs, all on CPU."""
    monkeypatch.setattr(cuda, "varlen_attn", paged_attention)
    monkeypatch.setattr(ragged, "attention_for", lambda device: (cuda.prepare, BLOCK_SIZE))
    monkeypatch.setitem(graphs.RECORDERS, "cpu", FakeRecorder)
    monkeypatch.setitem(kv_cache.SCRATCH_BLOCKS, "cpu", 1)
