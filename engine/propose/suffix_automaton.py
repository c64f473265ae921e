"""How often which token followed which words: a suffix automaton with counts, built one token at a time.

A state stands for all strings that end at the same places of the text (Blumer et al. 1985); its *link* is the state of the
longest suffix of theirs that also ends elsewhere. A text of n tokens has at most 2n states and 3n transitions, and adding a
token takes amortised O(1) steps. Counts change for every suffix of the text when a token is added, so they are kept for
*contexts* of at most ``MAX_CONTEXT`` tokens only: that bounds the work per token.
"""

from array import array
from collections.abc import Sequence

MAX_CONTEXT = 32
"""Tokens before a position that are looked at."""
SEPARATOR = -1
"""Between texts that share an automaton. No token is negative."""
ROOT, NONE = 0, -1
"""States: of the empty string, and its link."""


class SuffixAutomaton:
    """Counts over one text. A *place* is (state, length): the context that consists of ``length`` tokens of the state."""

    def __init__(self) -> None:
        self.size = 0
        """Tokens of the text."""
        self._next: list[dict[int, int]] = []
        self._link = array("i")
        self._length = array("i")
        """Of the longest string of a state."""
        self._count = array("i")
        """Occurrences."""
        self._num_followed = array("i")
        """Occurrences that a token follows: all but one at the end of the text."""
        self._best = array("i")
        """The token that followed most often, of several the one that did so last."""
        self._new_state(0, NONE, {})
        self._whole = ROOT
        """State of the whole text."""
        self._recent = ROOT, 0
        """Place of the text's last tokens."""

    def append(self, token: int) -> None:
        """Add a token to the text."""
        before, length = self._recent
        self._extend(token)
        self._recent = self._longest_suffix(self._next[before][token], length + 1, MAX_CONTEXT + 1)
        self._count_endings(self._recent[0])
        self._count_followers(before, token)
        self.size += 1

    def places(self, recent: Sequence[int]) -> list[tuple[int, int]]:
        """Where to look: the suffixes of ``recent`` that a token has followed, the longest of each state, longest first.

        Of ``recent`` the last ``MAX_CONTEXT`` tokens count. The empty suffix is not among them.
        """
        state, length = ROOT, 0
        for token in recent[-MAX_CONTEXT:]:
            while token not in self._next[state] and state != ROOT:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        found = []
        while state != ROOT:
            if self._num_followed[state]:
                found.append((state, length))
            state = self._link[state]
            length = self._length[state]
        return found

    def follow(self, state: int, length: int) -> tuple[int, float, int, int] | None:
        """The likeliest token after a place, its share of all that followed there, and the place with it.

        Where nothing has followed yet, which is at the end of the text, the longest suffix counts that something has followed:
        so a loop goes on. None where only the empty one is left.
        """
        while state != ROOT and not self._num_followed[state]:
            state = self._link[state]
            length = self._length[state]
        if state == ROOT:
            return None
        token = self._best[state]
        after = self._next[state][token]
        share = self._count[after] / self._num_followed[state]
        return token, share, *self._longest_suffix(after, length + 1, MAX_CONTEXT)

    @property
    def num_states(self) -> int:
        """At most 2 size + 1."""
        return len(self._next)

    @property
    def num_transitions(self) -> int:
        """At most 3 size."""
        return sum(map(len, self._next))

    # --- building -----------------------------------------------------------------------------------------------------------

    def _new_state(self, length: int, link: int, following: dict[int, int]) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._count.append(0)
        self._num_followed.append(0)
        self._best.append(SEPARATOR)
        return len(self._next) - 1

    def _extend(self, token: int) -> None:
        """The states and transitions of the text with one more token."""
        whole = self._new_state(self._length[self._whole] + 1, ROOT, {})
        state = self._whole
        while state != NONE and token not in self._next[state]:
            self._next[state][token] = whole
            state = self._link[state]
        if state != NONE:
            known = self._next[state][token]
            length = self._length[state] + 1
            self._link[whole] = known if self._length[known] == length else self._split(known, length, state, token)
        self._whole = whole

    def _split(self, known: int, length: int, state: int, token: int) -> int:
        """The strings of ``known`` of at most ``length`` tokens end in one place more now: they get a state of their own."""
        short = self._new_state(length, self._link[known], self._next[known].copy())
        self._count[short] = self._count[known]
        self._num_followed[short] = self._num_followed[known]
        self._best[short] = self._best[known]
        self._link[known] = short
        while state != NONE and self._next[state].get(token) == known:
            self._next[state][token] = short
            state = self._link[state]
        return short

    def _longest_suffix(self, state: int, length: int, limit: int) -> tuple[int, int]:
        """Place of the longest suffix of at most ``limit`` tokens; ``length`` is not 0."""
        length = min(length, limit)
        while length <= self._length[self._link[state]]:
            state = self._link[state]
        return state, length

    def _count_endings(self, state: int) -> None:
        while state != ROOT:
            self._count[state] += 1
            state = self._link[state]

    def _count_followers(self, state: int, token: int) -> None:
        """The contexts that ended before ``token`` are followed by it."""
        while state != ROOT:
            following = self._next[state]
            is_first = self._num_followed[state] == 0
            if is_first or self._count[following[token]] >= self._count[following[self._best[state]]]:
                self._best[state] = token
            self._num_followed[state] += 1
            state = self._link[state]
