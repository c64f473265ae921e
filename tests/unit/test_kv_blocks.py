import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.verify.blocks import BlockPool, OutOfBlocks


def test_extend_takes_whole_blocks_in_order() -> None:
    """Guards: a table that is one block short at a block boundary, which would write into a neighbour's slots."""
    pool = BlockPool(num_blocks=8, block_size=16)
    table: list[int] = []
    for num_tokens, blocks in ((1, 1), (16, 1), (17, 2), (32, 2), (33, 3)):
        pool.extend(table, num_tokens)
        assert table == list(range(blocks))
        assert pool.num_free == 8 - blocks


def test_truncate_frees_only_whole_blocks() -> None:
    """Guards: freeing the block that still holds the last kept token."""
    pool = BlockPool(num_blocks=4, block_size=16)
    table: list[int] = []
    pool.extend(table, 64)
    pool.truncate(table, 33)
    assert table == [0, 1, 2]
    pool.truncate(table, 32)
    assert table == [0, 1]
    pool.truncate(table, 0)
    assert table == []
    assert pool.num_free == 4


def test_a_refused_extension_changes_nothing() -> None:
    """Guards: blocks leaking, or being counted twice, when a sequence does not fit."""
    pool = BlockPool(num_blocks=3, block_size=16)
    first: list[int] = []
    second: list[int] = []
    pool.extend(first, 20)
    with pytest.raises(OutOfBlocks, match="need 2 more blocks of the KV cache, 1 are free"):
        pool.extend(second, 17)
    assert (first, second, pool.num_free) == ([0, 1], [], 1)
    pool.extend(second, 16)
    assert second == [2]


def test_a_growing_sequence_gets_neighbouring_blocks() -> None:
    """Guards: growth that scatters a sequence over the pool although its neighbours are free."""
    pool = BlockPool(num_blocks=6, block_size=1)
    low: list[int] = []
    pool.extend(low, 2)
    high: list[int] = []
    pool.extend(high, 2)
    pool.truncate(low, 0)
    pool.extend(high, 4)
    assert high == [2, 3, 4, 5]
    pool.extend(high, 5)
    assert high == [2, 3, 4, 5, 0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=60))
def test_no_block_has_two_owners_and_none_is_lost(steps: list[tuple[int, int]]) -> None:
    """Guards: any order of growing and shrinking that hands one block to two sequences, or loses one for good."""
    pool = BlockPool(num_blocks=10, block_size=4)
    tables: list[list[int]] = [[], [], [], []]
    lengths = [0, 0, 0, 0]
    for sequence, length in steps:
        try:
            pool.truncate(tables[sequence], length)
            lengths[sequence] = min(lengths[sequence], length)
            pool.extend(tables[sequence], length)
            lengths[sequence] = length
        except OutOfBlocks:
            pass
        owned = [block for table in tables for block in table]
        assert len(set(owned)) == len(owned)
        assert pool.num_free == 10 - len(owned)
        assert [len(table) for table in tables] == [pool.blocks_for(length) for length in lengths]
