"""Attention with torch's own kernels over padded groups of sequences: any device, any mask.

Row invariance means that a row's result has the same bits whatever else is in the batch. In bfloat16 on CPU the fused kernel
provides it under two conditions, found by measuring: the number of keys is a multiple of `WIDTH_STEP` (padding gets weight 0
exactly), and none of the blocks of `ROW_BLOCK` rows, into which it cuts the queries, has a lone row, which would take another
matrix kernel. In float32 the kernels depend on the number of rows, so the invariant products take `INVARIANT_ROWS` at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from engine.transfer import on_device
from engine.verify.attention import AttentionSpec, Backend, Batch, Chunk, Kernels, Mask, Window, pack
from engine.verify.kv_cache import LayerCache

WIDTH_STEP = 64
ROW_BLOCK = 32
TILE = 1024
"""Most keys that one explicit product sums over: beyond, oneDNN cuts the sum into parts that depend on its length."""
INVARIANT_ROWS = 16
"""Query rows of every invariant product: few, since one token of one head group is padded to them."""
COPY_COST = 2
"""Copying a key, in query-key pairs."""
CALL_COST = 600
"""Treating a group by itself, in query-key pairs and per thread: a small group leaves threads idle."""


@dataclass(slots=True)
class Group:
    """Chunks of similar size, padded to N sequences of n rows that look at ``width`` keys."""

    first_row: int
    num_rows: int
    """Rows of the packed batch that belong to the group."""
    shape: tuple[int, int]
    """(N, n)."""
    width: int
    slots: Tensor | slice
    """Where the keys of all sequences are, one sequence after the other: int64 [N * width], or the slots of the only one."""
    positions: Tensor
    """int64 [N, n, 1]; a padded row repeats the last real one of its sequence."""
    plain: bool
    """Whether causality hides none of the ``width`` keys from any row."""
    spread: Tensor | None = None
    """int64 [N * n]: row of the group that each padded row copies; None when nothing is padded."""
    collect: Tensor | None = None
    """int64 [num_rows]: padded row of each row of the group."""
    masks: dict[tuple[Mask, int, int], Tensor | None] = field(default_factory=dict)

    def keys_values(self, layer: LayerCache) -> tuple[Tensor, Tensor]:
        """K [Hkv * N, width, Dk] and V [Hkv * N, width, Dv]."""
        if isinstance(self.slots, slice):
            return layer.keys[:, self.slots], layer.values[:, self.slots]
        return layer.gather(self.slots, self.shape[0])

    def additive_mask(self, mask: Mask, num_kv: int, shared: int, dtype: torch.dtype) -> Tensor | None:
        """0 or -inf, to be added to scores [Hkv * N, m, width]; None when all is visible. Layers of one kind share it."""
        key = (mask, num_kv, shared)
        if key not in self.masks:
            self.masks[key] = self._additive_mask(mask, num_kv, shared, dtype)
        return self.masks[key]

    def _additive_mask(self, mask: Mask, num_kv: int, shared: int, dtype: torch.dtype) -> Tensor | None:
        if self.plain and isinstance(mask, Window) and (mask.size is None or mask.size >= self.width):
            return None
        keys = torch.arange(self.width, device=self.positions.device)
        hidden = mask.visible(self.positions, keys).logical_not_()
        additive = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return without_lone_row(additive.repeat(num_kv if self.shape[0] > 1 else 1, shared, 1))


class PaddedAttention:
    """Attention of one batch, group by group. ``order`` is how the batch must be packed."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, device: torch.device, kernels: Kernels = "fast"):
        self._fused, self._explicit = PRODUCTS[kernels]
        if block_size % WIDTH_STEP:
            raise ValueError(f"padded keys must lie in a sequence's own blocks: {block_size} is no multiple of {WIDTH_STEP}")
        planned = plan_groups(_sizes(chunks))
        self.order = [index for group in planned for index in group]
        self._groups: list[Group] = []
        first_row = 0
        for indices in planned:
            self._groups.append(_group([chunks[i] for i in indices], first_row, block_size, device))
            first_row += self._groups[-1].num_rows

    def attend(self, query: Tensor, layer: LayerCache, spec: AttentionSpec) -> Tensor:
        """As `Backend.attend`."""
        if len(self._groups) == 1:
            return self._attend(self._groups[0], query, layer, spec)
        return torch.cat([self._attend(g, query.narrow(0, g.first_row, g.num_rows), layer, spec) for g in self._groups])

    def _attend(self, group: Group, query: Tensor, layer: LayerCache, spec: AttentionSpec) -> Tensor:
        num_sequences, rows = group.shape
        num_kv, num_heads = layer.num_heads, query.shape[1]
        shared = num_heads // num_kv
        if group.spread is not None:
            query = query.index_select(0, group.spread)
        # Query heads that share a key head become more rows: B = Hkv * N products of m = g * n rows.
        folded = query.view(num_sequences, rows, num_kv, shared, -1).permute(2, 0, 3, 1, 4)
        folded = without_lone_row(folded.reshape(num_kv * num_sequences, shared * rows, -1))
        mask = group.additive_mask(spec.mask, num_kv, shared, query.dtype)
        attention = self._fused if _has_fused_form(spec, layer) else self._explicit
        out = attention(folded, *group.keys_values(layer), mask, _with_sink_column(spec, folded.shape, num_kv, rows))
        out = out[:, : shared * rows].view(num_kv, num_sequences, shared, rows, -1)
        out = out.permute(1, 3, 0, 2, 4).reshape(num_sequences * rows, -1)
        return out if group.collect is None else out.index_select(0, group.collect)


def prepare(chunks: Sequence[Chunk], block_size: int, device: torch.device, kernels: Kernels) -> tuple[Batch, Backend]:
    """As `Prepare`."""
    backend = PaddedAttention(chunks, block_size, device, kernels)
    return pack(chunks, backend.order, block_size, device), backend


def without_lone_row(rows: Tensor) -> Tensor:
    """rows [B, m, ...], with the first one repeated at the end when m is one more than a multiple of `ROW_BLOCK`."""
    return torch.cat((rows, rows[:, :1]), dim=1) if rows.shape[1] % ROW_BLOCK == 1 else rows


# --- planning ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """Of a chunk: new rows, and keys in the cache with them."""

    rows: int
    keys: int


def plan_order(chunks: Sequence[Chunk]) -> list[int]:
    """How `PaddedAttention` wants the chunks to be packed."""
    return [index for group in plan_groups(_sizes(chunks)) for index in group]


def _sizes(chunks: Sequence[Chunk]) -> list[Size]:
    return [Size(len(chunk.ids), len(chunk.sequence.ids) + len(chunk.ids)) for chunk in chunks]


def plan_groups(sizes: Sequence[Size]) -> list[list[int]]:
    """Split chunks, by index, into groups. A sequence by itself is read in place; in a group it is copied and padded."""
    groups: list[list[int]] = []
    shapes: list[Size] = []
    limit = CALL_COST * torch.get_num_threads()
    for index in sorted(range(len(sizes)), key=lambda i: (sizes[i].rows, sizes[i].keys)):
        size = sizes[index]
        wider = [Size(max(size.rows, shape.rows), max(size.keys, shape.keys)) for shape in shapes]
        costs = [
            _cost(wide, len(group) + 1) - _cost(shape, len(group)) - _cost(size, 1)
            for group, shape, wide in zip(groups, shapes, wider, strict=True)
        ]
        best = min(range(len(groups)), key=costs.__getitem__, default=None)
        if best is None or costs[best] > limit:
            groups.append([index])
            shapes.append(size)
        else:
            groups[best].append(index)
            shapes[best] = wider[best]
    return groups


def _cost(shape: Size, num_sequences: int) -> int:
    return num_sequences * shape.keys * (shape.rows + (COPY_COST if num_sequences > 1 else 0))


def _group(chunks: list[Chunk], first_row: int, block_size: int, device: torch.device) -> Group:
    starts = [len(chunk.sequence.ids) for chunk in chunks]
    counts = [len(chunk.ids) for chunk in chunks]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    rows = max(counts)
    width = -(-max(lengths) // WIDTH_STEP) * WIDTH_STEP
    positions = [[start + min(j, count - 1) for j in range(rows)] for start, count in zip(starts, counts, strict=True)]
    group = Group(
        first_row=first_row,
        num_rows=sum(counts),
        shape=(len(chunks), rows),
        width=width,
        slots=_slots([chunk.sequence.blocks for chunk in chunks], width, block_size, device),
        positions=on_device(positions, torch.int64, device).unsqueeze(-1),
        plain=rows == 1 and min(lengths) == width,
    )
    if min(counts) < rows:
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        spread = [first + min(j, count - 1) for first, count in zip(firsts, counts, strict=True) for j in range(rows)]
        collect = [i * rows + j for i, count in enumerate(counts) for j in range(count)]
        group.spread, group.collect = (on_device(places, torch.int64, device) for places in (spread, collect))
    return group


def _slots(tables: list[list[int]], width: int, block_size: int, device: torch.device) -> Tensor | slice:
    """A shorter sequence repeats its own first block: nobody's padding points at what another sequence wrote."""
    num_blocks = -(-width // block_size)
    if len(tables) == 1:
        first, last = tables[0][0], tables[0][num_blocks - 1]
        if last - first == num_blocks - 1 and tables[0][:num_blocks] == list(range(first, last + 1)):
            return slice(first * block_size, first * block_size + width)
    padded = [(table[:num_blocks] + table[:1] * num_blocks)[:num_blocks] for table in tables]
    first_slots = on_device(padded, torch.int64, device).unsqueeze(-1) * block_size
    slots = (first_slots + torch.arange(block_size, device=device)).view(len(tables), -1)
    return slots[:, :width].reshape(-1)


# --- products ---------------------------------------------------------------------------------------------------------------


class Product(Protocol):
    """Attention of B products that need not know which sequence and head they are."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
        """query [B, m, D], keys [B, width, D], values [B, width, Dv], mask [B or 1, m, width] or None -> [B, m, Dv]."""


def fused_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """torch's fused kernel."""
    return scaled_dot_product_attention(
        query.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=None if mask is None else mask.unsqueeze(0),
        scale=spec.scaling,
    ).squeeze(0)


def fused_by_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """The fused kernel over blocks of `INVARIANT_ROWS` rows, as a batch of blocks that share keys and values."""
    num_rows = query.shape[1]
    query = _row_blocks(query)
    out = scaled_dot_product_attention(
        query,
        keys.expand(len(query), -1, -1, -1),
        values.expand(len(query), -1, -1, -1),
        attn_mask=None if mask is None else _row_blocks(mask),
        scale=spec.scaling,
    )
    return out.transpose(0, 1).flatten(1, 2)[:, :num_rows]


def explicit_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec, tile: int | None = None
) -> Tensor:
    """What the fused kernel has no form for; as transformers' eager, with scores and weights rounded to the dtype.

    Tiles are added in float32 and in order, so that a further tile of weight 0 changes nothing.
    """
    tile = tile or TILE
    weights = _weights(torch.bmm(query, keys.contiguous().mT), mask, spec)
    total = torch.zeros((), dtype=torch.float32, device=query.device)
    for part, part_values in zip(torch.split(weights, tile, dim=2), torch.split(values, tile, dim=1), strict=True):
        total = total + torch.bmm(part.contiguous(), part_values.contiguous())
    return total.to(query.dtype)


def explicit_by_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """The same over blocks of `INVARIANT_ROWS` rows and tiles of `WIDTH_STEP` keys: every product has one shape."""
    blocks = _row_blocks(query)
    masks = [None] * len(blocks) if mask is None else _row_blocks(mask)
    sinks = [None] * len(blocks) if spec.sinks is None else _row_blocks(spec.sinks)
    parts = [
        explicit_attention(rows, keys, values, hidden, replace(spec, sinks=sink), WIDTH_STEP)
        for rows, hidden, sink in zip(blocks, masks, sinks, strict=True)
    ]
    return torch.cat(parts, dim=1)[:, : query.shape[1]]


PRODUCTS: dict[Kernels, tuple[Product, Product]] = {
    "fast": (fused_attention, explicit_attention),
    "invariant": (fused_by_rows, explicit_by_rows),
}
"""What is used where the fused kernel has a form, and elsewhere."""


def _row_blocks(rows: Tensor) -> Tensor:
    """rows [B, m, X], padded with zeros, as [blocks, B, INVARIANT_ROWS, X]."""
    padded = pad(rows, (0, 0, 0, -rows.shape[1] % INVARIANT_ROWS))
    return padded.view(len(rows), -1, INVARIANT_ROWS, rows.shape[2]).transpose(0, 1)


def _has_fused_form(spec: AttentionSpec, layer: LayerCache) -> bool:
    return spec.softcap is None and spec.sinks is None and layer.both is not None


def _weights(scores: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Softmax of scores [B, m, width] over their last dimension; computed in float32 inside, whatever the dtype."""
    scores = scores * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores + mask
    if spec.sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat([scores, spec.sinks.to(scores.dtype)], dim=-1), dim=-1)[..., :-1]


def _with_sink_column(spec: AttentionSpec, folded: torch.Size, num_kv: int, rows: int) -> AttentionSpec:
    """The same with sinks [Hq] spread out to the rows of the products, [B, m, 1]."""
    if spec.sinks is None:
        return spec
    sinks = spec.sinks.view(num_kv, 1, -1, 1).expand(num_kv, folded[0] // num_kv, -1, rows)
    return replace(spec, sinks=without_lone_row(sinks.reshape(folded[0], -1, 1)))
