"""The integers of one forward over pages of the KV cache, side by side in one buffer: one copy takes them to the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.verify.attention import Batch, Chunk, packed_lists


class Sizes(NamedTuple):
    """What a `PagedBatch` has room for."""

    num_rows: int
    num_logits: int
    num_sequences: int
    table_width: int
    """Blocks per sequence."""

    @property
    def num_words(self) -> int:
        """int64 words of the buffer; two of the int32 numbers share one."""
        return 3 * self.num_rows + self.num_logits + -(-self._num_int32 // 2)

    @property
    def _num_int32(self) -> int:
        return 2 * self.num_sequences + 1 + self.num_sequences * self.table_width


@dataclass(slots=True)
class PagedBatch(Batch):
    """A `Batch` with what a kernel over pages reads, all of it views of one buffer."""

    row_starts: Tensor
    """int32 [N + 1]: first row of each sequence, and the end of the last one."""
    lengths: Tensor
    """int32 [N]: keys of each sequence, new ones included."""
    tables: Tensor
    """int32 [N, blocks]: the blocks of each sequence."""

    @classmethod
    def over(cls, buffer: Tensor, sizes: Sizes) -> "PagedBatch":
        """The parts of ``buffer`` int64 [``sizes.num_words``]."""
        rows, count = sizes.num_rows, sizes.num_sequences
        parts = [rows, rows, rows, sizes.num_logits, len(buffer) - 3 * rows - sizes.num_logits]
        tokens, positions, slots, logit_rows, rest = torch.split(buffer, parts)
        small = rest.view(torch.int32)
        row_starts, lengths = small[: count + 1], small[count + 1 : 2 * count + 1]
        tables = small[2 * count + 1 :][: count * sizes.table_width].view(count, sizes.table_width)
        return cls(tokens, positions, slots, logit_rows, row_starts, lengths, tables)

    def fill(self, chunks: Sequence[Chunk], order: Sequence[int], block_size: int, scratch_block: int = 0) -> None:
        """Write the numbers of ``chunks``, packed in ``order``, and padding, into a buffer on the host.

        Padded rows belong to no sequence and write to ``scratch_block``, which belongs to nobody and may hold what is no
        number; padded sequences have no rows. Behind its last block a table repeats its first one: what a kernel reads and
        masks there is the sequence's own too.
        """
        parts = packed_lists(chunks, order, block_size)
        num_rows = len(parts[0])
        for place, values, padding in zip(
            (self.tokens, self.positions, self.slots, self.logit_rows),
            parts,
            (0, 0, scratch_block * block_size, 0),
            strict=True,
        ):
            numbers = place.numpy()
            numbers[: len(values)] = values
            numbers[len(values) :] = padding
        ordered = [chunks[i] for i in order]
        row_starts, lengths, tables = self.row_starts.numpy(), self.lengths.numpy(), self.tables.numpy()
        row_starts[0] = 0
        row_starts[1 : len(ordered) + 1] = list(accumulate(len(chunk.ids) for chunk in ordered))
        row_starts[len(ordered) + 1 :] = num_rows
        lengths[: len(ordered)] = [len(chunk.sequence.ids) + len(chunk.ids) for chunk in ordered]
        lengths[len(ordered) :] = 1
        tables.fill(scratch_block)
        for row, chunk in zip(tables, ordered, strict=False):
            blocks = chunk.sequence.blocks[: len(row)]  # room for a draft may reach past the longest context
            row[: len(blocks)] = blocks
            row[len(blocks) :] = blocks[0]
