"""Token ids to text, a few tokens at a time: incremental decoding, stop strings, the bytes of single tokens."""

import re
from collections.abc import Sequence
from typing import Protocol, Self

from engine.types import GenerateRequest

_REPLACEMENT = "\ufffd"
"""What every decoder writes for bytes that are not (yet) UTF-8."""
_MAX_PENDING = 3
"""Bytes of an unfinished character, at most; byte fallback writes one U+FFFD for each, byte-level BPE one for all."""
_KEPT_OPEN_TOKENS = _MAX_PENDING * (_MAX_PENDING + 1)
"""Enough to hold the bytes behind the pending U+FFFD and to find the next character's first byte before them."""
_MAX_OPEN_TOKENS = 2 * _KEPT_OPEN_TOKENS
"""Tokens decoded again at every push while no character is complete; bounds the cost of a stream of broken bytes."""
_PROMPT_TAIL_TOKENS = 8


class TokenDecoder(Protocol):
    """Turns ids into text; every transformers tokenizer does."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ``ids``; bytes that are not UTF-8 come out as U+FFFD."""


class Tokenizer(TokenDecoder, Protocol):
    """What `TokenBytes` needs besides decoding; every fast transformers tokenizer has it."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of ``text``, with the tokenizer's own BOS and EOS if asked for."""

    def convert_ids_to_tokens(self, ids: int) -> str:
        """The vocabulary's spelling of one id, such as ``Ġthe`` or ``<0xE2>``."""


class TextStream:
    """The text of one request, token by token, held back while it may still change or turn out to be a stop string.

    The joined results of `push` and `finish` equal the one-shot decode of all ids, cut before the first stop string that is
    completed. The cost is linear in the number of tokens. One exception, because a stream cannot take back what it said:
    SentencePiece's byte fallback turns a whole run of byte tokens into U+FFFD when one of its bytes is broken; a stream keeps
    the characters of the run that were complete.
    """

    def __init__(self, decoder: TokenDecoder, stop: tuple[str, ...] = (), min_tokens: int = 0, prompt_tail: Sequence[int] = ()):
        """Stop strings that end before token number ``min_tokens`` are ordinary text.

        ``prompt_tail`` is the end of the prompt: with it the text continues the prompt, so that a SentencePiece tokenizer keeps
        the space before the first word.
        """
        self.matched: str | None = None
        """The stop string that ended the text; what follows it is discarded."""
        self.num_characters = 0
        """Characters decoded so far, shown or held back."""
        self._detokenizer = _Detokenizer(decoder, prompt_tail)
        self._stops = _StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @classmethod
    def for_request(cls, decoder: TokenDecoder, request: GenerateRequest) -> Self:
        """The stream that router and API both use for ``request``; tokens committed elsewhere have passed through it."""
        params = request.params
        stream = cls(decoder, params.stop, params.min_tokens, request.prompt_ids[-_PROMPT_TAIL_TOKENS:])
        for token_id in request.output_ids:
            stream.push(token_id)
        return stream

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is now certain, which may be empty."""
        if self.matched is not None:
            return ""
        self._num_tokens += 1
        text = self._detokenizer.push(token_id)
        self.num_characters += len(text)
        shown, self.matched = self._stops.push(text, may_match=self._num_tokens >= self._min_tokens)
        return shown

    def finish(self) -> str:
        """The text held back, when no more tokens come; U+FFFD if they ended inside a character."""
        if self.matched is not None:
            return ""
        return self._stops.held + self._detokenizer.finish()


class _Detokenizer:
    """Decodes *open* tokens after *closed* ones.

    Closed tokens are shown in full; the last few are decoded again with the open ones, because decoders join tokens (leading
    spaces, for one). Open tokens are those since the last complete character.
    """

    def __init__(self, decoder: TokenDecoder, closed: Sequence[int]):
        self._decoder = decoder
        self._closed = list(closed)
        self._closed_text = self._decode(self._closed) if self._closed else ""
        self._open: list[int] = []
        self._open_text = ""
        self._num_shown = 0
        """Characters of the open text that were returned."""

    def push(self, token_id: int) -> str:
        before = self._open_text
        self._open.append(token_id)
        self._open_text = self._decode_open()
        if self._open_text == before and self._is_silent(token_id):
            self._open.pop()
            return ""
        if self._open_text.endswith(_REPLACEMENT):
            return self._show_complete()
        return self._close()

    def finish(self) -> str:
        return self._open_text[self._num_shown :]

    def _is_silent(self, token_id: int) -> bool:
        """Whether the token is skipped by the decoder. The first tokens of a text are kept: a space there looks silent too."""
        at_start = not self._closed and not self._open_text and len(self._open) <= _MAX_OPEN_TOKENS
        return not at_start and not self._decode([token_id])

    def _show_complete(self) -> str:
        """The open text ends in U+FFFD: show what no further token can change."""
        num_pending = 1
        while num_pending < _MAX_PENDING and self._open_text[:-num_pending].endswith(_REPLACEMENT):
            num_pending += 1
        complete = self._open_text[:-num_pending]
        new = complete[self._num_shown :]
        self._num_shown = max(self._num_shown, len(complete))
        if len(self._open) > _MAX_OPEN_TOKENS:
            self._drop_broken()
        return new

    def _drop_broken(self) -> None:
        num_pending = len(self._open_text) - self._num_shown
        self._closed, self._closed_text = [], ""
        self._open = self._open[-_KEPT_OPEN_TOKENS:]
        self._open_text = self._decode(self._open)
        self._num_shown = max(len(self._open_text) - num_pending, 0)

    def _close(self) -> str:
        new = self._open_text[self._num_shown :]
        if self._open_text:
            self._closed, self._closed_text = self._open, self._decode(self._open)
            self._open, self._open_text = [], ""
            self._num_shown = 0
        return new

    def _decode_open(self) -> str:
        joined = self._decode(self._closed + self._open)
        if joined.startswith(self._closed_text):
            return joined[len(self._closed_text) :]
        return self._decode(self._open)

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)


class _StopMatcher:
    """Finds the stop string that is completed first, one automaton per string (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stops: tuple[str, ...]):
        self.held = ""
        """Text that is the beginning of a stop string."""
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._num_matched = [0] * len(stops)

    def push(self, text: str, may_match: bool) -> tuple[str, str | None]:
        """Text that is certain now, and the stop string that was completed, if one was."""
        if not self._stops:
            return text, None
        for end, character in enumerate(text, start=1):
            completed = self._advance(character)
            if completed is not None and may_match:
                before = self.held + text[:end]
                self.held = ""
                return before[: len(before) - len(completed)], completed
        self.held += text
        certain = len(self.held) - max(self._num_matched)
        shown, self.held = self.held[:certain], self.held[certain:]
        return shown, None

    def _advance(self, character: str) -> str | None:
        """Step every automaton; returns the longest stop string that ends here."""
        completed: str | None = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._num_matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched]
            matched += stop[matched] == character
            if matched == len(stop):
                matched = borders[matched]
                completed = stop if completed is None or len(stop) > len(completed) else completed
            self._num_matched[i] = matched
        return completed


def _borders(pattern: str) -> list[int]:
    """For every prefix length, the length of the longest proper prefix of it that is also its suffix."""
    borders = [0, 0]
    for character in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != character:
            length = borders[length]
        borders.append(length + (pattern[length] == character))
    return borders


class TokenBytes:
    """The bytes that single tokens stand for, also when they are only a part of a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._before = tokenizer.encode("a", add_special_tokens=False)
        """Decoded in front, so that a leading space is not taken for the start of a text."""
        self._before_text = self._decode(self._before)

    def __call__(self, token_id: int) -> bytes:
        """Bytes of ``token_id``; a special token gives its name."""
        if token_id not in self._known:
            self._known[token_id] = self._find(token_id)
        return self._known[token_id]

    def _find(self, token_id: int) -> bytes:
        text = self._decode([*self._before, token_id])
        text = text[len(self._before_text) :] if text.startswith(self._before_text) else self._decode([token_id])
        if _REPLACEMENT not in text:
            return text.encode()
        spelling = self._tokenizer.convert_ids_to_tokens(token_id)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", spelling):
            return bytes.fromhex(byte[1])
        if all(character in BYTE_OF for character in spelling):
            return bytes(BYTE_OF[character] for character in spelling)
        return text.encode()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE spells bytes (GPT-2): printable ones as themselves, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
