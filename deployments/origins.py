"""Where each token of an answer came from, and which part of its text it stands for. Knows no tokenizer."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from engine.types import Delta


class Origin(StrEnum):
    """Who said a token. All but the prompt's were decided by the target; these words say whether a draft had them first."""

    DRAFT = "draft"
    """A draft token that the target accepted."""
    RECOVERY = "recovery"
    """The target's own token in place of the first draft token that it rejected."""
    BONUS = "bonus"
    """The target's own token after a draft that it accepted to its end."""
    TARGET = "target"
    """The target's own token in a round without a draft."""
    PROMPT = "prompt"
    """Text of the prompt, repeated because the request asked for it (echo)."""


@dataclass(frozen=True, slots=True)
class OriginText:
    """A token's text and origin; the texts of a choice, joined, are its text."""

    text: str
    origin: Origin

    def as_dict(self) -> dict[str, str]:
        """As it is written in a chunk."""
        return {"text": self.text, "origin": self.origin}


def round_origins(num_tokens: int, depth: int, num_accepted: int) -> tuple[Origin, ...]:
    """Origins of the ``num_tokens`` that a round committed and showed, after a draft of ``depth`` tokens.

    A round commits the ``num_accepted`` first tokens of its draft and one token of the target. A stop or a limit may have cut
    that run anywhere. Raises `ValueError` for numbers that no round can have.
    """
    num_own = num_tokens - num_accepted
    if not (0 <= num_accepted <= depth and num_own in (0, 1)):
        raise ValueError(f"a round cannot commit {num_tokens} tokens with {num_accepted} accepted of {depth} draft tokens")
    own = Origin.TARGET if depth == 0 else Origin.BONUS if num_accepted == depth else Origin.RECOVERY
    return (Origin.DRAFT,) * num_accepted + (own,) * num_own


class OriginTexts:
    """Follows one choice: hands every piece of shown text to the token that it belongs to.

    Text may be shown later than its token is committed: a stop string may have begun in it. A token whose text is shown in two
    parts comes twice, one that has no text of its own (EOS, or bytes that are not a whole character yet) with an empty one.
    """

    def __init__(self) -> None:
        self._num_accepted = 0
        """By the last delta."""
        self._open: deque[tuple[Origin, int]] = deque()
        """Tokens that are not shown to their end: origin, and where they end in the choice's text, in characters."""
        self._num_shown = 0
        self._last = Origin.TARGET

    def of_round(self, delta: Delta) -> tuple[Origin, ...]:
        """Origins of the tokens of ``delta``, which comes from one round."""
        before, self._num_accepted = self._num_accepted, delta.num_accepted
        return round_origins(len(delta.token_ids), delta.depth, delta.num_accepted - before)

    def committed(self, tokens: Iterable[tuple[Origin, int]]) -> None:
        """Further tokens, and the number of characters that the choice's decoded text has after each."""
        self._open.extend(tokens)

    def shown(self, text: str, *, is_last: bool) -> list[OriginText]:
        """Divide the next piece of shown text. After the last one no token is left: a stop string may have swallowed some."""
        pieces = []
        while self._open and (is_last or self._open[0][1] <= self._num_shown + len(text)):
            self._last, end = self._open.popleft()
            own, text = text[: end - self._num_shown], text[end - self._num_shown :]
            self._num_shown += len(own)
            pieces.append(OriginText(own, self._last))
        if text:
            self._num_shown += len(text)
            pieces.append(OriginText(text, self._open[0][0] if self._open else self._last))
        return pieces
