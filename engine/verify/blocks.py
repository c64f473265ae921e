"""Which blocks of the KV cache belong to whom: bookkeeping over integers."""

from bisect import bisect_left, insort


class OutOfBlocks(Exception):
    """The KV cache has fewer free blocks than a sequence needs; nothing was taken."""


class BlockPool:
    """Hands out blocks of ``block_size`` tokens. A sequence's blocks are a plain list (its table), in the order of its tokens.

    Block b of the pool holds the slots ``b * block_size`` … ``(b + 1) * block_size - 1`` of the cache's tensors.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # ascending

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def extend(self, table: list[int], num_tokens: int) -> None:
        """Grow a table to hold ``num_tokens`` tokens, with neighbouring blocks where they are free.

        Raises `OutOfBlocks` and leaves the table as it was when there are too few.
        """
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > len(self._free):
            raise OutOfBlocks(f"{num_tokens} tokens need {missing} more blocks of the KV cache, {len(self._free)} are free")
        for _ in range(missing):
            place = bisect_left(self._free, table[-1] + 1) if table else 0
            table.append(self._free.pop(place if place < len(self._free) else 0))

    def truncate(self, table: list[int], num_tokens: int) -> None:
        """Give back the whole blocks that lie behind the first ``num_tokens`` tokens."""
        while len(table) > self.blocks_for(num_tokens):
            insort(self._free, table.pop())
