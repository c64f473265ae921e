"""A draft that attends only to the first tokens of a text and to the last ones, whatever its length (StreamingLLM, Xiao et al.
2023, arXiv 2309.17453).

Whole blocks of the paged KV cache are left out of the forward's block tables. Keys are cached as they were rotated, at their
true positions, so what remains needs no change, any kernel can run it, and the blocks left out go back to the pool.
"""

from dataclasses import dataclass

from engine.verify.attention import Chunk
from engine.verify.blocks import ABSENT, BlockPool, CachedSequence


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """At least the first ``sink_tokens`` and the ``window_tokens`` before a chunk; both are rounded up to whole blocks."""

    window_tokens: int
    sink_tokens: int

    def view(self, chunk: Chunk, block_size: int) -> Chunk:
        """The chunk over what it sees of its sequence; the chunk itself where that is everything."""
        sequence = chunk.sequence
        first, end = self._left_out(len(sequence.ids), block_size)
        left_out = [i for i, block in enumerate(sequence.blocks) if block == ABSENT or first <= i < end]
        if not left_out:
            return chunk
        kept = [block for i, block in enumerate(sequence.blocks) if block != ABSENT and not first <= i < end]
        num_left_out = len(left_out) * block_size
        seen = CachedSequence(sequence.ids[num_left_out:], kept)
        return Chunk(seen, chunk.ids, chunk.num_logits, num_left_out)

    def give_back(self, pool: BlockPool, sequence: CachedSequence, length: int) -> None:
        """Free the blocks that nothing after the first ``length`` tokens sees."""
        pool.leave_out(sequence, *self._left_out(length, pool.block_size))

    def _left_out(self, length: int, block_size: int) -> tuple[int, int]:
        """First and end of the blocks that a chunk after ``length`` tokens does not see."""
        first = -(-self.sink_tokens // block_size)
        return first, max(first, (length - self.window_tokens) // block_size)
