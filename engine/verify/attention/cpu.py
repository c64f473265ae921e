"""Attention as batched matrix products over gathered K and V: any device, any mask, and on CPU in bfloat16 row-invariant.

Row invariance means that a row's result has the same bits whatever else is in the batch. Two things provide it: the products
are explicit (fused kernels split the work by shape), and no product sums over more than `TILE` keys, in multiples of
`WIDTH_STEP`: beyond 1024 oneDNN cuts the sum into parts that depend on its length. Padded keys get weight 0 exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.verify.attention import AttentionSpec, Chunk, Mask, Window
from engine.verify.kv_cache import LayerCache

WIDTH_STEP = 64
TILE = 1024
MAX_WASTE = 4096
"""Query-key pairs that padding a sequence into a group may add; more than that, and a group of its own is cheaper."""


@dataclass(slots=True)
class Group:
    """Chunks of similar size, padded to N sequences of n rows that look at ``width`` keys."""

    first_row: int
    num_rows: int
    """Rows of the packed batch that belong to the group."""
    shape: tuple[int, int]
    """(N, n)."""
    width: int
    tiles: list[Tensor]
    """Slots of the keys, int64 [N * tile width] each."""
    positions: Tensor
    """int64 [N, n, 1]; a padded row repeats the last real one of its sequence."""
    plain: bool
    """Whether causality hides none of the ``width`` keys from any row."""
    spread: Tensor | None = None
    """int64 [N * n]: row of the group that each padded row copies; None when nothing is padded."""
    collect: Tensor | None = None
    """int64 [num_rows]: padded row of each row of the group."""
    masks: dict[tuple[Mask, int, int], Tensor | None] = field(default_factory=dict)

    def additive_mask(self, mask: Mask, num_kv: int, group: int, dtype: torch.dtype) -> Tensor | None:
        """0 or -inf, to be added to scores [Hkv * N, g * n, width]; None when all is visible. Equal layers share it."""
        key = (mask, num_kv, group)
        if key not in self.masks:
            self.masks[key] = self._additive_mask(mask, num_kv, group, dtype)
        return self.masks[key]

    def _additive_mask(self, mask: Mask, num_kv: int, group: int, dtype: torch.dtype) -> Tensor | None:
        if self.plain and isinstance(mask, Window) and (mask.size is None or mask.size >= self.width):
            return None
        keys = torch.arange(self.width, device=self.positions.device)
        hidden = mask.visible(self.positions, keys).logical_not_()
        additive = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        num_sequences = self.shape[0]
        return additive.repeat(num_kv if num_sequences > 1 else 1, group, 1)


class PaddedAttention:
    """Attention of one batch, group by group. ``order`` is how the batch must be packed."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, device: torch.device, numerics: str):
        """``numerics``: a key of `PRODUCTS`."""
        self._product, width_step, tile = PRODUCTS[numerics]
        planned = plan_groups([Size(len(chunk.ids), len(chunk.sequence.ids) + len(chunk.ids)) for chunk in chunks])
        self.order = [index for group in planned for index in group]
        self._groups: list[Group] = []
        first_row = 0
        for indices in planned:
            members = [chunks[i] for i in indices]
            self._groups.append(_group(members, first_row, block_size, width_step, tile, device))
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
        # Query heads that share a key head become more rows of one product.
        folded = query.view(num_sequences, rows, num_kv, shared, -1).permute(2, 0, 3, 1, 4)
        folded = folded.reshape(num_kv * num_sequences, shared * rows, -1)
        if spec.sinks is not None:
            sinks = spec.sinks.view(num_kv, 1, shared, 1).expand(num_kv, num_sequences, shared, rows)
            spec = replace(spec, sinks=sinks.reshape(num_kv * num_sequences, shared * rows, 1))
        tiles = [layer.gather(slots, num_sequences) for slots in group.tiles]
        out = self._product(folded, tiles, group.additive_mask(spec.mask, num_kv, shared, query.dtype), spec)
        out = out.view(num_kv, num_sequences, shared, rows, -1).permute(1, 3, 0, 2, 4).reshape(num_sequences * rows, -1)
        return out if group.collect is None else out.index_select(0, group.collect)


@dataclass(frozen=True, slots=True)
class Size:
    """Of a chunk: new rows, and keys in the cache with them."""

    rows: int
    keys: int

    @property
    def area(self) -> int:
        """Work of one sequence, in query-key pairs; copying a key counts as one more."""
        return (self.rows + 1) * self.keys


def plan_groups(sizes: Sequence[Size]) -> list[list[int]]:
    """Split chunks, by index, into groups that are worth padding to one shape."""
    groups: list[list[int]] = []
    shapes: list[Size] = []
    for index in sorted(range(len(sizes)), key=lambda i: (sizes[i].rows, sizes[i].keys)):
        size = sizes[index]
        wider = [Size(max(size.rows, shape.rows), max(size.keys, shape.keys)) for shape in shapes]
        waste = [
            (len(group) + 1) * wide.area - len(group) * shape.area - size.area
            for group, shape, wide in zip(groups, shapes, wider, strict=True)
        ]
        best = min(range(len(groups)), key=waste.__getitem__, default=None)
        if best is None or waste[best] > MAX_WASTE:
            groups.append([index])
            shapes.append(size)
        else:
            groups[best].append(index)
            shapes[best] = wider[best]
    return groups


def _group(
    chunks: list[Chunk], first_row: int, block_size: int, width_step: int, tile: int | None, device: torch.device
) -> Group:
    starts = [len(chunk.sequence.ids) for chunk in chunks]
    counts = [len(chunk.ids) for chunk in chunks]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    rows = max(counts)
    width = -(-max(lengths) // width_step) * width_step
    positions = [[start + min(j, count - 1) for j in range(rows)] for start, count in zip(starts, counts, strict=True)]
    group = Group(
        first_row=first_row,
        num_rows=sum(counts),
        shape=(len(chunks), rows),
        width=width,
        tiles=_tiles(chunks, lengths, width, tile or width, block_size, device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device).unsqueeze(-1),
        plain=rows == 1 and min(lengths) == width,
    )
    if min(counts) < rows:
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        spread = [first + min(j, count - 1) for first, count in zip(firsts, counts, strict=True) for j in range(rows)]
        collect = [i * rows + j for i, count in enumerate(counts) for j in range(count)]
        group.spread, group.collect = torch.tensor([spread], device=device)[0], torch.tensor([collect], device=device)[0]
    return group


def _tiles(
    chunks: list[Chunk], lengths: list[int], width: int, tile: int, block_size: int, device: torch.device
) -> list[Tensor]:
    """Slots of the keys of all sequences side by side, int64 [N * w] per tile of w <= ``tile`` keys.

    Beyond a sequence's own length its first slot is repeated: a slot that nobody wrote, or that another sequence spoilt with
    NaN, must not reach its products, where weight 0 would not silence it.
    """
    blocks = -(-width // block_size)
    tables = [(chunk.sequence.blocks + chunk.sequence.blocks[:1] * blocks)[:blocks] for chunk in chunks]
    table = torch.tensor(tables, dtype=torch.int64, device=device).unsqueeze(-1) * block_size
    places = torch.arange(blocks * block_size, device=device)
    slots = (table + places[:block_size]).view(len(chunks), -1)
    if min(lengths) < width:
        beyond = places >= torch.tensor(lengths, device=device).unsqueeze(1)
        slots = torch.where(beyond, slots[:, :1], slots)
    return [slots[:, a : min(a + tile, width)].reshape(-1) for a in range(0, width, tile)]


# --- products ---------------------------------------------------------------------------------------------------------------
# With B = Hkv * N and m = g * n: query [B, m, D], tiles of (K [B, w, D], V [B, w, Dv]), mask [B or 1, m, width] or None, sinks
# in the spec already spread out to [B, m, 1] -> [B, m, Dv].


def explicit_attention(query: Tensor, tiles: list[tuple[Tensor, Tensor]], mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Row-invariant. Scores and weights are rounded to the dtype, softmax computes in float32, as in transformers' eager."""
    if len(tiles) == 1:
        ((keys, values),) = tiles
        return torch.bmm(_weights(torch.bmm(query, keys.mT), mask, spec), values)
    scores = torch.cat([torch.bmm(query, keys.mT) for keys, _ in tiles], dim=-1)
    parts = torch.split(_weights(scores, mask, spec), TILE, dim=-1)
    # In float32 and in order, so that a further tile of weight 0 changes nothing.
    total = torch.zeros((), dtype=torch.float32, device=query.device)
    for part, (_, values) in zip(parts, tiles, strict=True):
        total = total + torch.bmm(part.contiguous(), values)
    return total.to(query.dtype)


def fused_attention(query: Tensor, tiles: list[tuple[Tensor, Tensor]], mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """With torch's fused kernel: faster, not row-invariant."""
    if spec.softcap is not None or spec.sinks is not None:
        return explicit_attention(query, tiles, mask, spec)
    ((keys, values),) = tiles
    mask = None if mask is None else mask.unsqueeze(0)
    return torch.nn.functional.scaled_dot_product_attention(
        query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=spec.scaling
    ).squeeze(0)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], int, int | None]] = {
    "invariant": (explicit_attention, WIDTH_STEP, TILE),
    "fast": (fused_attention, 1, None),
}
"""Per `numerics`: how the products are computed, what widths are rounded up to, and into what tiles they are cut."""


def _weights(scores: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """Softmax of scores [B, m, width] over their last dimension."""
    if spec.softcap is not None:
        scores = torch.tanh(scores * (spec.scaling / spec.softcap)) * spec.softcap
        scores = scores if mask is None else scores + mask
    elif mask is None:
        scores = scores.mul_(spec.scaling)
    else:
        scores = torch.add(mask, scores, alpha=spec.scaling)
    if spec.sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat([scores, spec.sinks.to(scores.dtype)], dim=-1), dim=-1)[..., :-1].contiguous()
