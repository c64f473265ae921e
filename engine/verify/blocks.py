"""Which blocks of the KV cache belong to whom, and which hold what: bookkeeping over integers, without tensors.

A block counts the sequences that hold it. A full block can be *known* by its content, so that a sequence that begins with the
same tokens takes it instead of computing it again: K and V depend on the tokens up to theirs and on nothing else. A known block
whose last owner left stays known until its room is needed.
"""

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

EVICTED_TOGETHER = 64
"""Of a pool with no free block left, at least one in so many is evicted at once: neighbours then come free together, and what
grows into them stays in one piece, which a CPU reads in place.
"""


ABSENT = -1
"""In place of a block that a sequence has given back though it goes on."""


class OutOfBlocks(Exception):
    """The KV cache has fewer free blocks than a sequence needs; nothing was taken."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class CachedSequence:
    """A sequence in the cache: K and V of exactly ``ids`` are there, in the slots of ``blocks``, but for those `ABSENT`."""

    ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """`content_key` of the first full blocks, as far as they were registered."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What the tensors must do before the next write: copy the first ``num_slots`` slots of a block to another."""

    source: int
    target: int
    num_slots: int


def content_key(before: bytes, ids: Sequence[int]) -> bytes:
    """128 bits that name a full block by its tokens and, through the key ``before`` (b"" for none), by all tokens before it."""
    return blake2b(before + array("q", ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Hands out blocks of ``block_size`` tokens. A sequence's blocks are in the order of its tokens.

    Block b of the pool holds the slots ``b * block_size`` … ``(b + 1) * block_size - 1`` of the cache's tensors. Whatever
    sequences share, they hold no more blocks than the sum of `blocks_for` over them: who keeps that sum within the pool never
    meets `OutOfBlocks`.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # ascending
        self._num_owners = [0] * num_blocks
        self._known: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # known blocks without an owner, the longest unused first

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody, those that are still known among them."""
        return len(self._free) + len(self._unused)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def reserve(self, sequence: CachedSequence, num_tokens: int) -> tuple[list[int], Copy | None]:
        """Make room for ``num_tokens`` more tokens, with neighbouring blocks where they are free.

        Returns the blocks that changed hands, and a copy to make when the next slot lies in a block that others hold too: they
        keep it and this sequence goes on in its own. Raises `OutOfBlocks` and changes nothing when there are too few.
        """
        table, length = sequence.blocks, len(sequence.ids) + num_tokens
        index, num_used = divmod(len(sequence.ids), self.block_size)
        begun = num_tokens > 0 and num_used > 0 and index < len(table)
        shared = begun and self._num_owners[table[index]] > 1
        missing = max(self.blocks_for(length) - len(table), 0)
        if missing or shared:
            self._free_up(missing + shared, f"{length} tokens need")
        copy = None
        if shared:
            copy = Copy(table[index], self._take(table[index]), num_used)
            self._drop(copy.source)
            table[index] = copy.target
        elif begun:
            self._forget(table[index])  # its content is about to change
        fresh = [copy.target] if copy is not None else []
        for _ in range(missing):
            table.append(self._take(table[-1] if table else -1))
            fresh.append(table[-1])
        return fresh, copy

    def truncate(self, sequence: CachedSequence, length: int) -> None:
        """Let go of all but the first ``length`` tokens, and of the whole blocks behind them."""
        del sequence.ids[length:]
        del sequence.keys[length // self.block_size :]
        while len(sequence.blocks) > self.blocks_for(length):  # from the end, so that no block is evicted before its successors
            block = sequence.blocks.pop()
            if block != ABSENT:
                self._drop(block)

    def leave_out(self, sequence: CachedSequence, first: int, end: int) -> None:
        """Give back the blocks at places ``first`` to ``end`` - 1 of a sequence that goes on without them."""
        for index in range(first, end):
            if sequence.blocks[index] != ABSENT:
                self._drop(sequence.blocks[index])
                sequence.blocks[index] = ABSENT

    def fork(self, sequence: CachedSequence, length: int) -> tuple[CachedSequence, Copy | None]:
        """Another sequence with the same first ``length`` tokens: it shares the full blocks and needs a copy of the rest.

        Raises `OutOfBlocks` when there is no block for the rest.
        """
        num_full, rest = divmod(length, self.block_size)
        self._free_up(int(rest > 0), f"a fork after {length} tokens needs")
        forked = CachedSequence(sequence.ids[:length], sequence.blocks[:num_full], sequence.keys[:num_full])
        for block in forked.blocks:
            if block != ABSENT:
                self._num_owners[block] += 1
        if not rest:
            return forked, None
        copy = Copy(sequence.blocks[num_full], self._take(sequence.blocks[num_full]), rest)
        forked.blocks.append(copy.target)
        return forked, copy

    # --- content ------------------------------------------------------------------------------------------------------------

    def fills_blocks(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Whether ``num_tokens`` more tokens complete a block: without one there is nothing to `adopt` nor to `announce`."""
        return len(sequence.ids) % self.block_size + num_tokens >= self.block_size

    def adopt(self, sequence: CachedSequence, tokens: Sequence[int], most: int) -> int:
        """Take known blocks that hold what comes next, whole blocks only, up to ``most`` of ``tokens``. Returns how many.

        A block that the sequence has begun is given back for a known one with the same beginning. Nothing is found where the
        sequence's own full blocks are not registered.
        """
        size, held = self.block_size, len(sequence.ids)
        if len(sequence.keys) < held // size:
            return 0
        for index in range(held // size, (held + most) // size):
            start = len(sequence.ids)
            rest = tokens[start - held : (index + 1) * size - held]
            key = content_key(_last(sequence.keys), [*sequence.ids[index * size :], *rest])
            block = self._known.get(key)
            if block is None:
                break
            self._hold(block)
            if index < len(sequence.blocks):
                self._drop(sequence.blocks[index])
                sequence.blocks[index] = block
            else:
                sequence.blocks.append(block)
            sequence.ids.extend(rest)
            sequence.keys.append(key)
        return len(sequence.ids) - held

    def register(self, sequence: CachedSequence, length: int) -> None:
        """Make the full blocks of the first ``length`` tokens known, up to one that is absent.

        Where their content is known already, share that block.
        """
        size, keys = self.block_size, sequence.keys
        for index in range(len(keys), length // size):
            block = sequence.blocks[index]
            if block == ABSENT:
                return
            keys.append(content_key(_last(keys), sequence.ids[index * size : (index + 1) * size]))
            known = self._known.get(keys[-1])
            if known is None:
                self._know(block, keys[-1])
            elif known != block:
                self._hold(known)
                self._drop(block)
                sequence.blocks[index] = known

    def announce(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Make blocks known that the coming forward fills with ``tokens``; room for them is reserved.

        Other sequences of the same forward may adopt them: every layer writes all K and V before anyone looks. When the forward
        fails, who announced must `forget`.
        """
        size, held, keys = self.block_size, len(sequence.ids), sequence.keys
        if len(keys) < held // size:
            return
        for index in range(held // size, (held + len(tokens)) // size):
            begun = sequence.ids[index * size :]
            key = content_key(_last(keys), [*begun, *tokens[max(index * size - held, 0) : (index + 1) * size - held]])
            if key in self._known:  # it cannot be shared before it is written
                return
            keys.append(key)
            self._know(sequence.blocks[index], key)

    def forget(self, sequence: CachedSequence, length: int = 0) -> None:
        """The content behind the first ``length`` tokens is not to be trusted: nobody may adopt it any more."""
        first = length // self.block_size
        del sequence.keys[first:]
        for block in sequence.blocks[first:]:
            self._forget(block)

    def forget_everything(self) -> None:
        """No block is known any more; those without an owner are free again."""
        for block in self._unused:
            insort(self._free, block)
        self._unused.clear()
        self._known.clear()
        self._key_of.clear()

    # --- single blocks ------------------------------------------------------------------------------------------------------

    def _free_up(self, count: int, who: str) -> None:
        """Evict until ``count`` blocks are free. Raises `OutOfBlocks`."""
        if count > self.num_free:
            raise OutOfBlocks(f"{who} {count} more blocks of the KV cache, {self.num_free} are free")
        missing = count - len(self._free)
        if missing > 0:
            for _ in range(min(max(missing, self.num_blocks // EVICTED_TOGETHER), len(self._unused))):
                block, _ = self._unused.popitem(last=False)
                self._forget(block)
                insort(self._free, block)

    def _take(self, after: int) -> int:
        """A free block for one owner: the next one after ``after``."""
        place = bisect_left(self._free, after + 1)
        block = self._free.pop(place if place < len(self._free) else 0)
        self._num_owners[block] = 1
        return block

    def _hold(self, block: int) -> None:
        self._num_owners[block] += 1
        self._unused.pop(block, None)

    def _drop(self, block: int) -> None:
        self._num_owners[block] -= 1
        if self._num_owners[block] > 0:
            return
        if block in self._key_of:
            self._unused[block] = None
        else:
            insort(self._free, block)

    def _know(self, block: int, key: bytes) -> None:
        self._known[key] = block
        self._key_of[block] = key

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._known[key]


def _last(keys: list[bytes]) -> bytes:
    return keys[-1] if keys else b""
