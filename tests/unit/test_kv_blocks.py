import pytest

from engine.verify.blocks import ABSENT, BlockPool, CachedSequence, Copy, OutOfBlocks, content_key

SIZE = 4


def grow(pool: BlockPool, sequence: CachedSequence, *tokens: int) -> Copy | None:
    """Append tokens, as a forward does."""
    _, copy = pool.reserve(sequence, len(tokens))
    sequence.ids += tokens
    return copy


def grown(pool: BlockPool, *tokens: int) -> CachedSequence:
    sequence = CachedSequence()
    grow(pool, sequence, *tokens)
    return sequence


def registered(pool: BlockPool, *tokens: int) -> CachedSequence:
    sequence = grown(pool, *tokens)
    pool.register(sequence, len(tokens))
    return sequence


def found(pool: BlockPool, *tokens: int) -> list[int]:
    """Blocks that a newcomer with these tokens takes; afterwards it is gone."""
    sequence = CachedSequence()
    assert pool.adopt(sequence, tokens, len(tokens)) == len(sequence.ids) == len(sequence.blocks) * pool.block_size
    assert sequence.ids == list(tokens[: len(sequence.ids)])
    blocks = list(sequence.blocks)
    pool.truncate(sequence, 0)
    return blocks


# --- growing and shrinking --------------------------------------------------------------------------------------------------


def test_reserve_takes_whole_blocks_in_order() -> None:
    """Bug guarded: a table that is one block short at a block boundary, which would write into a neighbour's slots."""
    pool = BlockPool(num_blocks=8, block_size=16)
    sequence = CachedSequence()
    for num_tokens, blocks in ((1, 1), (15, 1), (1, 2), (15, 2), (1, 3)):
        grow(pool, sequence, *range(num_tokens))
        assert sequence.blocks == list(range(blocks))
        assert pool.num_free == 8 - blocks


def test_truncate_frees_only_whole_blocks() -> None:
    """Bug guarded: freeing the block that still holds the last kept token."""
    pool = BlockPool(num_blocks=4, block_size=16)
    sequence = grown(pool, *range(64))
    for length, blocks in ((33, [0, 1, 2]), (32, [0, 1]), (0, [])):
        pool.truncate(sequence, length)
        assert (sequence.ids, sequence.blocks) == (list(range(length)), blocks)
        assert pool.num_free == 4 - len(blocks)


def test_a_refused_reservation_changes_nothing() -> None:
    """Bug guarded: blocks leaking, or being counted twice, when a sequence does not fit."""
    pool = BlockPool(num_blocks=3, block_size=16)
    first, second = grown(pool, *range(20)), CachedSequence()
    with pytest.raises(OutOfBlocks, match="17 tokens need 2 more blocks of the KV cache, 1 are free"):
        pool.reserve(second, 17)
    assert (first.blocks, second.blocks, pool.num_free) == ([0, 1], [], 1)
    assert pool.reserve(second, 16) == ([2], None)


def test_a_growing_sequence_gets_neighbouring_blocks() -> None:
    """Bug guarded: growth that scatters a sequence over the pool although its neighbours are free."""
    pool = BlockPool(num_blocks=6, block_size=1)
    low, high = grown(pool, 1, 2), grown(pool, 3, 4)
    pool.truncate(low, 0)
    grow(pool, high, 5, 6)
    assert high.blocks == [2, 3, 4, 5]
    grow(pool, high, 7)
    assert high.blocks == [2, 3, 4, 5, 0]


# --- sharing ----------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_last() -> None:
    """Bug guarded: a fork that writes its own continuation into the block that its parent goes on in."""
    pool = BlockPool(num_blocks=8, block_size=SIZE)
    parent = grown(pool, *range(11))
    child, copy = pool.fork(parent, 10)
    assert (child.ids, child.blocks, copy) == (list(range(10)), [0, 1, 3], Copy(2, 3, 2))
    assert pool.num_free == 4
    pool.truncate(parent, 0)
    assert pool.num_free == 5  # only the block that the fork does not hold
    pool.truncate(child, 0)
    assert pool.num_free == 8


def test_a_fork_at_a_block_boundary_needs_no_room() -> None:
    """Bug guarded: a fork that is refused, or that copies an empty block, although everything it needs can be shared."""
    pool = BlockPool(num_blocks=2, block_size=SIZE)
    parent = grown(pool, *range(8))
    child, copy = pool.fork(parent, 4)
    assert (child.blocks, copy, pool.num_free) == ([0], None, 0)
    with pytest.raises(OutOfBlocks, match="a fork after 5 tokens needs 1 more blocks"):
        pool.fork(parent, 5)
    assert pool.num_free == 0


def test_writing_into_a_shared_block_copies_it_first() -> None:
    """Bug guarded: a sequence that is rolled back into a shared block and overwrites what the other one reads."""
    pool = BlockPool(num_blocks=3, block_size=SIZE)
    parent = grown(pool, *range(8))
    child, _ = pool.fork(parent, 8)
    pool.truncate(child, 6)
    assert pool.reserve(child, 0) == ([], None)  # nothing is to be written
    assert pool.reserve(child, 1) == ([2], Copy(1, 2, 2))
    assert (parent.blocks, child.blocks) == ([0, 1], [0, 2])
    pool.truncate(parent, 6)
    assert pool.reserve(parent, 1) == ([], None)  # it is the only owner now


def test_a_copy_on_write_that_finds_no_room_changes_nothing() -> None:
    """Bug guarded: a shared block that is written because there was no block for the copy."""
    pool = BlockPool(num_blocks=2, block_size=SIZE)
    parent = grown(pool, *range(8))
    child, _ = pool.fork(parent, 8)
    pool.truncate(child, 6)
    with pytest.raises(OutOfBlocks):
        pool.reserve(child, 1)
    assert (parent.blocks, child.blocks, pool.num_free) == ([0, 1], [0, 1], 0)


# --- content ----------------------------------------------------------------------------------------------------------------


def test_a_key_names_all_tokens_up_to_the_end_of_the_block() -> None:
    """Bug guarded: equal tokens behind another beginning taken for the same block, whose K and V differ."""
    texts = ([1, 2, 3, 4], [1, 2, 4, 3], [513, 0, 0, 0], [1, 2, 0, 0], [2**31, 0, 0, 0])
    keys = {content_key(before, ids) for before in (b"", content_key(b"", [7])) for ids in texts}
    assert len(keys) == 2 * len(texts)
    assert all(len(key) == 16 for key in keys)


def test_known_blocks_are_found_in_whole_blocks_up_to_the_limit() -> None:
    """Bug guarded: a lookup that leaves no token to compute, or that takes a block beyond what it was allowed to."""
    pool = BlockPool(num_blocks=8, block_size=SIZE)
    registered(pool, *range(11))  # two full blocks and three tokens
    for most, taken in ((3, 0), (4, 4), (7, 4), (8, 8), (11, 8)):
        newcomer = CachedSequence()
        assert pool.adopt(newcomer, range(11), most) == taken
        assert (newcomer.ids, newcomer.blocks) == (list(range(taken)), [0, 1][: taken // SIZE])
    assert found(pool, 0, 1, 2, 9, 4, 5, 6, 7) == []
    assert found(pool, 0, 1, 2, 3, 4, 5, 6, 9) == [0]


def test_known_blocks_survive_their_last_owner_and_count_as_free() -> None:
    """Bug guarded: a cache that keeps blocks from sequences that need them, or that forgets a prompt with its request."""
    pool = BlockPool(num_blocks=3, block_size=SIZE)
    pool.truncate(registered(pool, *range(9)), 0)
    assert pool.num_free == 3
    assert found(pool, *range(8)) == [0, 1]
    other = grown(pool, *range(100, 112))
    assert (sorted(other.blocks), pool.num_free) == ([0, 1, 2], 0)
    assert found(pool, *range(8)) == []


def test_the_longest_unused_goes_first_and_successors_before_predecessors() -> None:
    """Bug guarded: evicting a system prompt that was used a moment ago, or a block on which cached others depend."""
    pool = BlockPool(num_blocks=6, block_size=SIZE)
    for start in (0, 100, 200):
        pool.truncate(registered(pool, *range(start, start + 8)), 0)
    found(pool, *range(8))  # now the most recently used
    grown(pool, *range(300, 304))
    assert [len(found(pool, *range(start, start + 8))) for start in (0, 100, 200)] == [2, 1, 2]


def test_free_blocks_are_taken_before_known_ones() -> None:
    """Bug guarded: evicting cached prompts while the pool has room."""
    pool = BlockPool(num_blocks=4, block_size=SIZE)
    pool.truncate(registered(pool, *range(8)), 0)
    grown(pool, *range(100, 108))
    assert found(pool, *range(8)) == [0, 1]


def test_a_large_pool_evicts_neighbours_together() -> None:
    """Bug guarded: a full pool that gives back single blocks, last ones first, so that no sequence stays in one piece."""
    pool = BlockPool(num_blocks=256, block_size=1)
    pool.truncate(registered(pool, *range(256)), 0)
    sequence = grown(pool, 1000)
    for token in range(3):
        grow(pool, sequence, token)
    assert sequence.blocks == [252, 253, 254, 255]
    assert len(found(pool, *range(256))) == 252


def test_a_begun_block_is_exchanged_for_a_known_one() -> None:
    """Bug guarded: chunks of a prompt that end inside a block make all later ones miss."""
    pool = BlockPool(num_blocks=6, block_size=SIZE)
    registered(pool, *range(12))
    sequence = registered(pool, *range(6))
    assert sequence.blocks == [0, 4]  # its first block was known already
    assert pool.adopt(sequence, range(6, 12), 6) == 6
    assert (sequence.ids, sequence.blocks, pool.num_free) == (list(range(12)), [0, 1, 2], 3)


def test_equal_blocks_that_were_computed_twice_become_one() -> None:
    """Bug guarded: sequences that say the same hold a copy each, and one of them is never found."""
    pool = BlockPool(num_blocks=6, block_size=SIZE)
    first, second = grown(pool, *range(8)), grown(pool, *range(8))
    assert pool.num_free == 2
    pool.register(first, 8)
    pool.register(second, 7)  # the rest may be a draft
    assert (second.blocks, pool.num_free) == ([0, 3], 3)
    pool.register(second, 8)
    assert (second.blocks, pool.num_free) == ([0, 1], 4)


def test_rewriting_a_known_block_makes_it_unknown() -> None:
    """Bug guarded: a block that is found under tokens which its owner rolled back and replaced."""
    pool = BlockPool(num_blocks=4, block_size=SIZE)
    sequence = registered(pool, *range(8))
    pool.truncate(sequence, 6)
    assert found(pool, *range(8)) == [0, 1]  # still intact
    grow(pool, sequence, 50, 51)
    assert found(pool, *range(8)) == [0]
    pool.register(sequence, 8)
    assert found(pool, *range(6), 50, 51) == [0, 1]


def test_announced_blocks_are_shared_before_they_are_written() -> None:
    """Bug guarded: n equal prompts that arrive together are computed n times; or a known block is written a second time."""
    pool = BlockPool(num_blocks=8, block_size=SIZE)
    first, second, third = CachedSequence(), CachedSequence(), CachedSequence()
    pool.reserve(first, 8)
    pool.announce(first, range(8))
    assert pool.adopt(second, range(8), 7) == 4
    assert second.blocks == [0]
    pool.reserve(third, 8)  # one that needs the logits of all its tokens computes them itself
    pool.announce(third, range(8))
    assert set(third.blocks).isdisjoint(first.blocks)
    third.ids += range(8)
    first.ids += range(8)
    pool.register(third, 8)
    assert third.blocks == first.blocks == [0, 1]


def test_what_fills_no_block_has_nothing_to_share() -> None:
    """Bug guarded: a step that completes a block is taken for one that does not, so that equal prompts are computed twice."""
    for held in range(2 * SIZE + 1):
        for num_tokens in range(1, 2 * SIZE + 1):
            pool = BlockPool(num_blocks=16, block_size=SIZE)
            ids = list(range(held + num_tokens))
            registered(pool, *ids)
            sequence = grown(pool, *ids[:held])
            pool.register(sequence, held)
            adopted = pool.adopt(sequence, ids[held:], num_tokens)
            fills = pool.fills_blocks(CachedSequence(ids[:held]), num_tokens)
            assert fills == (adopted > 0), (held, num_tokens)


def test_forgotten_content_is_not_found() -> None:
    """Bug guarded: K and V that gave no numbers, or were never written, go to the next request with the same beginning."""
    pool = BlockPool(num_blocks=8, block_size=SIZE)
    sequence = registered(pool, *range(8))
    pool.reserve(sequence, 8)
    pool.announce(sequence, range(8, 16))
    pool.forget(sequence, 8)
    pool.truncate(sequence, 8)
    assert found(pool, *range(16)) == [0, 1]
    pool.forget(sequence)
    pool.truncate(sequence, 0)
    assert (found(pool, *range(8)), pool.num_free) == ([], 8)


def test_everything_can_be_forgotten() -> None:
    """Bug guarded: a block that is forgotten is lost to the pool, taken from who still holds it, or found again."""
    pool = BlockPool(num_blocks=8, block_size=SIZE)
    gone, held = registered(pool, *range(9)), registered(pool, *range(20, 28))
    pool.truncate(gone, 0)
    assert found(pool, *range(9)) != []
    pool.forget_everything()
    held.keys.clear()
    assert (found(pool, *range(9)), found(pool, *range(20, 28))) == ([], [])
    assert pool.num_free == 6
    pool.truncate(held, 0)
    assert pool.num_free == 8
    assert sorted(grown(pool, *range(8 * SIZE)).blocks) == list(range(8))


# --- blocks that are left out -----------------------------------------------------------------------------------------------


def test_what_is_left_out_is_free_and_is_neither_freed_nor_shared_again() -> None:
    """Bug guarded: a block that a windowed sequence gave back is freed a second time, or held by a fork, in someone's hands."""
    pool = BlockPool(6, SIZE)
    sequence = grown(pool, *range(14))
    assert pool.num_free == 2
    pool.leave_out(sequence, 1, 3)
    pool.leave_out(sequence, 1, 3)
    assert (pool.num_free, sequence.blocks) == (4, [0, ABSENT, ABSENT, 3])
    other = grown(pool, *range(50, 58))
    assert set(other.blocks) == {1, 2}
    forked, copy = pool.fork(sequence, 13)
    assert copy is not None
    assert forked.blocks[:3] == [0, ABSENT, ABSENT]
    for one in (forked, sequence, other):
        pool.truncate(one, 0)
    assert pool.num_free == 6


def test_blocks_that_are_left_out_stay_known_and_end_what_can_be_registered() -> None:
    """Bug guarded: the place of an absent block is registered, so that a newcomer adopts block -1."""
    pool = BlockPool(6, SIZE)
    sequence = registered(pool, *range(8))
    pool.leave_out(sequence, 0, 1)
    assert found(pool, *range(8)) == [0, 1]
    unknown = grown(pool, *range(20, 32))
    pool.leave_out(unknown, 1, 2)
    pool.register(unknown, 12)
    assert len(unknown.keys) == 1
    assert found(pool, *range(20, 32)) == unknown.blocks[:1]
