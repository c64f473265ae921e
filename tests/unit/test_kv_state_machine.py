"""The block pool under any order of calls, against a memory in which every slot says which tokens its K and V come from."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.verify.blocks import BlockPool, CachedSequence, OutOfBlocks

SIZE = 2
NUM_BLOCKS = 12
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
NUMBERS = st.integers(0, 100)
"""Taken modulo what there is to choose from."""


class PoolMachine(RuleBasedStateMachine):
    """Sequences open, go on together, roll back, fork, end and fail; some of a step's tokens are rejected drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.sequences: list[CachedSequence] = []
        self.memory: list[tuple[int, ...] | None] = [None] * (NUM_BLOCKS * SIZE)

    # --- what may happen ----------------------------------------------------------------------------------------------------

    @rule(text=TEXTS, spare=st.integers(0, 2))
    def open(self, text: list[int], spare: int) -> None:
        """A prompt that takes what is known of it."""
        self.sequences.append(CachedSequence())
        self._step([(self.sequences[-1], text, 0, spare)], fails=False)

    @rule(text=TEXTS, count=st.integers(2, 3))
    def open_together(self, text: list[int], count: int) -> None:
        """Equal prompts in one forward."""
        opened = [CachedSequence() for _ in range(count)]
        self.sequences += opened
        self._step([(sequence, text, 0, 0) for sequence in opened], fails=False)

    @rule(
        texts=st.lists(TEXTS, min_size=1, max_size=3), rejected=st.integers(0, 4), spare=st.integers(0, 2), fails=st.booleans()
    )
    def go_on(self, texts: list[list[int]], rejected: int, spare: int, fails: bool) -> None:
        """One forward over several sequences, which may break off; the last tokens of each turn out to be wrong drafts."""
        self._step(
            [
                (sequence, text, min(rejected, len(text) - 1), spare)
                for sequence, text in zip(self.sequences, texts, strict=False)
            ],
            fails,
        )

    @rule(which=NUMBERS, length=NUMBERS)
    def roll_back(self, which: int, length: int) -> None:
        """To any length."""
        if self.sequences:
            sequence = self.sequences[which % len(self.sequences)]
            self.pool.truncate(sequence, length % (len(sequence.ids) + 1))

    @rule(which=NUMBERS, length=NUMBERS, text=TEXTS)
    def rewrite(self, which: int, length: int, text: list[int]) -> None:
        """Roll back and go on with something else."""
        if self.sequences:
            self.roll_back(which, length)
            self._step([(self.sequences[which % len(self.sequences)], text, 0, 0)], fails=False)

    @rule(which=NUMBERS, length=NUMBERS)
    def fork(self, which: int, length: int) -> None:
        """At any length."""
        if not self.sequences:
            return
        sequence = self.sequences[which % len(self.sequences)]
        before = self._state()
        try:
            forked, copy = self.pool.fork(sequence, length % (len(sequence.ids) + 1))
        except OutOfBlocks:
            assert self._state() == before
            return
        self.sequences.append(forked)
        if copy is not None:
            self._wipe([copy.target])
            self._copy(copy.source, copy.target, copy.num_slots)

    @rule(which=NUMBERS, fails=st.booleans())
    def end(self, which: int, fails: bool) -> None:
        """Finished or cancelled, or with logits that were no numbers."""
        if self.sequences:
            sequence = self.sequences.pop(which % len(self.sequences))
            if fails:
                self.pool.forget(sequence)
            self.pool.truncate(sequence, 0)
            assert (sequence.ids, sequence.blocks, sequence.keys) == ([], [], [])

    @rule(which=NUMBERS, length=NUMBERS)
    def register(self, which: int, length: int) -> None:
        """Some or all of what a sequence holds."""
        if self.sequences:
            sequence = self.sequences[which % len(self.sequences)]
            self.pool.register(sequence, length % (len(sequence.ids) + 1))

    @rule(text=TEXTS)
    def look_up(self, text: list[int]) -> None:
        """By somebody who is gone at once."""
        self._look_up(text)

    def _look_up(self, text: list[int]) -> None:
        sequence = CachedSequence()
        taken = self.pool.adopt(sequence, text, len(text))
        assert sequence.ids == text[:taken]
        self._check_content(sequence)
        self.pool.truncate(sequence, 0)

    def teardown(self) -> None:
        """When all have ended, the whole pool is free."""
        for sequence in self.sequences:
            self.pool.truncate(sequence, 0)
        assert self.pool.num_free == NUM_BLOCKS
        everything = CachedSequence()
        self.pool.reserve(everything, NUM_BLOCKS * SIZE)
        assert sorted(everything.blocks) == list(range(NUM_BLOCKS))

    # --- what must always hold ----------------------------------------------------------------------------------------------

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        """Nobody wrote into a block that another one reads, and no block holds other content than it was taken for."""
        for sequence in self.sequences:
            self._check_content(sequence)

    @invariant()
    def blocks_are_owned_or_free(self) -> None:
        """No block leaked or freed twice, or twice in one table."""
        for sequence in self.sequences:
            assert len(set(sequence.blocks)) == len(sequence.blocks) >= self.pool.blocks_for(len(sequence.ids))
        owned = {block for sequence in self.sequences for block in sequence.blocks}
        assert self.pool.num_free == NUM_BLOCKS - len(owned)

    # --- a forward ----------------------------------------------------------------------------------------------------------

    def _step(self, parts: list[tuple[CachedSequence, list[int], int, int]], fails: bool) -> None:
        """Parts are sequence, new tokens, how many of these are rejected drafts, and room reserved beyond them."""
        lengths = [len(sequence.ids) for sequence, *_ in parts]
        started: list[tuple[CachedSequence, list[int], int]] = []
        for sequence, text, num_rejected, spare in parts:
            num_committed = len(text) - num_rejected
            taken = self.pool.adopt(sequence, text[:num_committed], num_committed - 1)
            if self._reserve(sequence, len(text) - taken + spare):
                self.pool.announce(sequence, text[taken:num_committed])
                started.append((sequence, text[taken:], num_rejected))
        if fails:  # whoever had no room may have adopted what was announced
            for (sequence, *_), length in zip(parts, lengths, strict=True):
                self.pool.forget(sequence, length)
                self.pool.truncate(sequence, length)
            for sequence, text, *_ in parts:
                self._look_up([*sequence.ids, *text])
            return
        for sequence, text, _ in started:
            self._write(sequence, text)
        for sequence, _, num_rejected in started:
            self.pool.truncate(sequence, len(sequence.ids) - num_rejected)
            self.pool.register(sequence, len(sequence.ids))

    def _reserve(self, sequence: CachedSequence, count: int) -> bool:
        """Refused only when the sequences' own needs, counted as if nothing were shared, exceed the pool."""
        before = self._state()
        needs = sum(len(other.blocks) for other in self.sequences if other is not sequence)
        needs += max(len(sequence.blocks), self.pool.blocks_for(len(sequence.ids) + count))
        try:
            fresh, copy = self.pool.reserve(sequence, count)
        except OutOfBlocks:
            assert needs > NUM_BLOCKS
            assert self._state() == before
            return False
        owners = Counter(block for other in self.sequences for block in other.blocks)
        assert all(owners[block] == 1 for block in fresh)
        self._wipe(fresh)
        if copy is not None:
            self._copy(copy.source, copy.target, copy.num_slots)
        return True

    def _write(self, sequence: CachedSequence, text: list[int]) -> None:
        for token in text:
            block, slot = divmod(len(sequence.ids), SIZE)
            sequence.ids.append(token)
            self.memory[sequence.blocks[block] * SIZE + slot] = tuple(sequence.ids)

    def _wipe(self, blocks: list[int]) -> None:
        for block in blocks:
            self.memory[block * SIZE : (block + 1) * SIZE] = [None] * SIZE

    def _copy(self, source: int, target: int, count: int) -> None:
        self.memory[target * SIZE : target * SIZE + count] = self.memory[source * SIZE : source * SIZE + count]

    def _check_content(self, sequence: CachedSequence) -> None:
        held = [self.memory[sequence.blocks[i // SIZE] * SIZE + i % SIZE] for i in range(len(sequence.ids))]
        assert held == [tuple(sequence.ids[: i + 1]) for i in range(len(sequence.ids))]

    def _state(self) -> tuple[list[list[int]], int]:
        return [list(sequence.blocks) for sequence in self.sequences], self.pool.num_free


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
