"""The paged KV cache: tensors of one model for all sequences, their blocks, and how much memory they may take."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelError
from engine.verify.blocks import BlockPool, Copy
from engine.verify.blocks import CachedSequence as CachedSequence

MEMORY_SHARE = 0.3
"""Share of the free memory that a KV cache takes when no size is configured."""
MAX_SEQUENCES = 64
"""A cache is not made larger than this many sequences of full length need."""

SCRATCH_BLOCKS = {"cuda": 1}
"""By type of device, blocks behind those of the pool: they belong to nobody, and padded rows write there."""


class LayerCache:
    """K and V of one attention call for every slot of the pool.

    ``keys`` [Hkv, slots, Dk] and ``values`` [Hkv, slots, Dv] are laid out head by head on CPU, where the gathered copy then
    feeds a batched product without another copy, and token by token on CUDA, whose paged kernel wants whole tokens.
    """

    def __init__(self, num_slots: int, keys: Tensor, values: Tensor):
        """Sizes, dtype and device are those of ``keys`` [Hkv, T, Dk] and ``values`` [Hkv, T, Dv] as they first arrive."""
        self.num_heads = keys.shape[0]
        self.both: Tensor | None = None
        """[2 * Hkv, slots, D]: keys, then values, when their widths agree."""
        if keys.shape == values.shape:
            self.both = _zeros(2 * self.num_heads, num_slots, keys)
            self.keys, self.values = self.both[: self.num_heads], self.both[self.num_heads :]
        else:
            self.keys = _zeros(self.num_heads, num_slots, keys)
            self.values = _zeros(self.num_heads, num_slots, values)

    @property
    def bytes_per_token(self) -> int:
        """Memory of one slot."""
        width: int = self.keys.shape[2] + self.values.shape[2]
        return self.num_heads * width * self.keys.element_size()

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that is stored: [heads, slots, width] each."""
        return (self.keys, self.values) if self.both is None else (self.both,)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys [Hkv, T, Dk] and values [Hkv, T, Dv] in slots [T]."""
        self.keys.index_copy_(1, slots, keys)
        self.values.index_copy_(1, slots, values)

    def gather(self, slots: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Copies of K [Hkv * N, w, Dk] and V [Hkv * N, w, Dv] of N sequences, whose w slots each follow one another [N * w]."""
        batch = self.num_heads * num_sequences
        if self.both is None:
            keys, values = (cached.index_select(1, slots) for cached in (self.keys, self.values))
            return keys.view(batch, -1, keys.shape[2]), values.view(batch, -1, values.shape[2])
        gathered = self.both.index_select(1, slots)
        keys, values = gathered.view(2, batch, -1, gathered.shape[2]).unbind()
        return keys, values


class KVCache:
    """One `LayerCache` per attention call of a forward, in the order of the calls; all share one `BlockPool`."""

    def __init__(self, num_blocks: int, block_size: int):
        self.pool = BlockPool(num_blocks, block_size)
        self.layers: list[LayerCache] = []
        self.reads_unwritten = True
        """Whether attention reads slots that nobody has written yet, and multiplies what is there by 0."""

    @property
    def bytes_per_token(self) -> int:
        """Memory that one token takes over all layers; known after the first forward."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def scratch_block(self) -> int:
        """The first block behind the pool's; there on devices with `SCRATCH_BLOCKS`."""
        return self.pool.num_blocks

    def layer(self, call: int, keys: Tensor, values: Tensor) -> LayerCache:
        """The cache of the call-th attention of a forward; made when it is asked for the first time."""
        if call == len(self.layers):
            num_blocks = self.pool.num_blocks + SCRATCH_BLOCKS.get(keys.device.type, 0)
            self.layers.append(LayerCache(num_blocks * self.pool.block_size, keys, values))
        return self.layers[call]

    def reserve(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Make room for ``num_tokens`` more tokens. Raises `OutOfBlocks` and changes nothing when there is none.

        Where `reads_unwritten`, blocks that change hands are wiped: a NaN that the last owner left would not be silenced by
        weight 0.
        """
        fresh, copy = self.pool.reserve(sequence, num_tokens)
        if fresh and self.reads_unwritten:
            self._wipe(fresh)
        if copy is not None:
            self._copy(copy)

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.pool.truncate(sequence, length)

    def fork(self, sequence: CachedSequence, length: int) -> CachedSequence:
        """Another sequence that goes on after the same first ``length`` tokens. Raises `OutOfBlocks`."""
        forked, copy = self.pool.fork(sequence, length)
        if copy is not None:
            if self.reads_unwritten:
                self._wipe([copy.target])
            self._copy(copy)
        return forked

    @torch.inference_mode()
    def _wipe(self, blocks: list[int]) -> None:
        size = self.pool.block_size
        for layer in self.layers:
            for block in blocks:
                for cached in layer.parts:
                    cached[:, block * size : (block + 1) * size].zero_()

    @torch.inference_mode()
    def _copy(self, copy: Copy) -> None:
        source, target = copy.source * self.pool.block_size, copy.target * self.pool.block_size
        for layer in self.layers:
            for cached in layer.parts:
                cached[:, target : target + copy.num_slots] = cached[:, source : source + copy.num_slots]


def affordable_blocks(
    name: str,
    bytes_per_token: int,
    block_size: int,
    max_context: int,
    device: torch.device,
    requested_tokens: int | None,
    reserved_bytes: int = 0,
) -> int:
    """Number of blocks: as requested, else from the free memory but for ``reserved_bytes``.

    Raises `ModelError` when that is not even one.
    """
    if requested_tokens is not None:
        tokens = requested_tokens
    else:
        free = max(available_bytes(device) - reserved_bytes, 0)
        tokens = min(int(free * MEMORY_SHARE) // bytes_per_token, MAX_SEQUENCES * max_context)
    if tokens < block_size:
        raise ModelError(
            f"{name}: no room for a KV cache: one block of {block_size} tokens takes "
            f"{block_size * bytes_per_token / 2**20:.1f} MiB, {available_bytes(device) / 2**20:.0f} MiB are free on {device} "
            f"(of which {MEMORY_SHARE:.0%} may be used), and kv_cache_tokens is {requested_tokens or 'not set'}"
        )
    return tokens // block_size


def available_bytes(device: torch.device) -> int:
    """Free memory of a device; on CPU what the kernel calls available, or what the container's limit leaves if that is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = _fields(Path("/proc/meminfo"))
    limits = [meminfo["MemAvailable:"] * 1024] if "MemAvailable:" in meminfo else [4 * 2**30]
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        reclaimable = _fields(Path("/sys/fs/cgroup/memory.stat")).get("inactive_file", 0)
        limits.append(limit - used + reclaimable)
    return max(min(limits), 0)


def _zeros(num_heads: int, num_slots: int, like: Tensor) -> Tensor:
    """Zeros [heads, slots, D]. What padding points at must be finite, since 0 × NaN is NaN.

    On CPU the pages come zeroed from the kernel when they are first touched, so an unused part of the cache takes no memory.
    """
    width = like.shape[2]
    if like.device.type != "cpu":
        return torch.zeros(num_slots, num_heads, width, dtype=like.dtype, device=like.device).transpose(0, 1)
    raw = np.zeros(num_heads * num_slots * width * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(raw).view(like.dtype).view(num_heads, num_slots, width)


def _fields(path: Path) -> dict[str, int]:
    """Lines ``name number ...`` of a file of the kernel; nothing where there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
