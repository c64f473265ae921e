"""Two vocabularies that differ: the tokens that both have, by the bytes they stand for, and texts of one spelled in the other.

Drafts over the tokens that two vocabularies share are the token-level intersection of Timor et al. 2025, "Accelerating LLM
Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies" (arXiv 2502.05202); committed text is
read in the draft's own spelling, as in universal assisted generation.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from engine.errors import ModelError
from engine.text import BYTE_OF

LEAST_SHARE = 0.05
"""Of the target's tokens: with fewer in common the draft has nothing to say in most languages, whatever the sample's says."""
LEAST_COVERAGE = 0.5
"""Of the tokens that the target's tokenizer makes of `SAMPLE`. No more tokens than these can be accepted; at a half, a draft of
any depth brings less than one token per round even if it foresees every one of them."""
SEGMENT_TOKENS = 24
"""Texts are spelled in segments of at least so many target tokens; one is spelled anew while it grows, and never after."""
LONGEST_SEGMENT = 4 * SEGMENT_TOKENS
"""A segment ends here in the middle of a word; in the middle of a character after as many again."""
SAMPLE = """\
The committee met on 14 March 2023, and its members weren't surprised: "prices had risen by 3.75 %," said Dr. Eleanor Whitfield,
"while wages hadn't." Nobody asked why. Over the following weeks, however, the newspapers began to wonder whether the minister's
explanation (that storms in the Atlantic had delayed most shipments) could be true; by then it no longer mattered.

## How to read a file

1. Open it: `with open(path, encoding="utf-8") as file:`
2. Go through its lines, and count the words.

```python
def count_words(path: str, minimum: int = 0) -> dict[str, int]:
    counts: dict[str, int] = {}
    for line in open(path):
        for word in line.strip().lower().split():
            counts[word] = counts.get(word, 0) + 1
    return {word: n for word, n in counts.items() if n >= minimum}
```

{"id": 4711, "name": "Müller", "tags": ["a", "b"], "active": true, "score": -0.25}
<p class="note">The total is <b>$1,299.00</b>.</p>
Der Zug nach Köln fährt um halb neun ab. Le café était fermé, mais la boulangerie restait ouverte.
If x² + y² = 1, then x = cos θ and y = sin θ for some angle θ.
"""
"""Prose, code, data, markup, numbers and some other languages."""


@dataclass(frozen=True)
class Vocabulary:
    """What the ids of one tokenizer stand for."""

    name: str
    pieces: tuple[bytes | None, ...]
    """Bytes of every id; None for special tokens and for holes."""
    encode: Callable[[str], Sequence[int]]
    """Ids of a text, without any token that stands for none of it."""
    specials: Mapping[str, int] = field(default_factory=dict)
    """Tokens that stand for no text, by name."""
    eos_token_ids: tuple[int, ...] = ()
    """Those that end a text; each is among ``specials``."""
    opening: tuple[int, ...] = ()
    """Special tokens that every text begins with."""
    byte_fallbacks: frozenset[int] = frozenset()
    """Ids for single bytes that are used only where no other token has them."""
    fingerprint: str = ""
    """Names the mapping from token to id."""

    @cached_property
    def id_of(self) -> dict[bytes, int]:
        """The id that the tokenizer itself would use for bytes: no byte fallback where there is another, then the lowest."""
        order = sorted(range(len(self.pieces)), key=lambda i: (i not in self.byte_fallbacks, -i))
        return {piece: i for i in order if (piece := self.pieces[i])}

    @cached_property
    def begins_with_space(self) -> bool:
        """Whether the tokenizer puts a space before a text, as SentencePiece does."""
        return b"".join(self.pieces[i] or b"" for i in self.encode("a") if i < len(self.pieces)) == b" a"


def read_vocabulary(name: str, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """From a transformers tokenizer. ``vocab_size``: ids from here on cannot be sampled.

    Raises `ModelError` where the tokenizer does not say how it spells bytes: byte-level BPE and SentencePiece do.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{name}: its tokenizer has no tokenizer.json, so its tokens cannot be compared with another's")
    described = json.loads(backend.to_str())
    read, tokens = _reader(name, described["decoder"]), tokenizer.get_vocab()
    added = {token["content"]: token["special"] for token in described["added_tokens"]}
    ends = set(eos_token_ids)
    specials: dict[str, int] = {}
    pieces: list[bytes | None] = [None] * vocab_size
    for token, token_id in tokens.items():
        if token_id >= vocab_size:
            continue
        if added.get(token) or token_id in ends or token in tokenizer.all_special_tokens:
            specials[token] = token_id
        else:
            pieces[token_id] = token.encode() if token in added else read(token)
    known = set(specials.values())
    return Vocabulary(
        name=name,
        pieces=tuple(pieces),
        encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
        specials=specials,
        eos_token_ids=tuple(i for i in eos_token_ids if i < vocab_size),
        opening=tuple(takewhile(known.__contains__, backend.encode("a", add_special_tokens=True).ids)),
        byte_fallbacks=frozenset(i for token, i in tokens.items() if i < vocab_size and _fallback_byte(token) is not None),
    )


def _reader(name: str, decoder: Any) -> Callable[[str], bytes | None]:
    """How the strings of a vocabulary spell bytes, by the decoder in its tokenizer.json."""
    steps = list(_steps(decoder))
    if any(step["type"] == "ByteLevel" for step in steps):
        return _byte_level
    if any(step["type"] == "Metaspace" or _replaces_metaspace(step) for step in steps):
        return _sentence_piece
    kinds = ", ".join(step["type"] for step in steps) or "none"
    raise ModelError(
        f"{name}: the tokens of its tokenizer (decoder: {kinds}) cannot be compared with another's: they are neither "
        "byte-level nor SentencePiece's"
    )


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder is not None:
        yield from decoder["decoders"] if decoder["type"] == "Sequence" else (decoder,)


def _replaces_metaspace(step: Mapping[str, Any]) -> bool:
    return bool(step["type"] == "Replace" and step["pattern"] == {"String": _METASPACE} and step["content"] == " ")


def _byte_level(token: str) -> bytes | None:
    return bytes(BYTE_OF[c] for c in token) if all(c in BYTE_OF for c in token) else None


def _sentence_piece(token: str) -> bytes | None:
    byte = _fallback_byte(token)
    return bytes((byte,)) if byte is not None else token.replace(_METASPACE, " ").encode()


def _fallback_byte(token: str) -> int | None:
    """The byte that ``<0x0A>`` stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


_METASPACE = "\u2581"


class SharedVocabulary:
    """What a draft with a vocabulary of its own can say to a target, and how it reads what the target says.

    ``to_draft`` pairs ids one to one, by the bytes they stand for; special tokens pair with special tokens of the same name. A
    token that ends the target's texts pairs only with one that ends the draft's, and nothing else does.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary):
        self.target = target
        self.draft = draft
        ordinary = {ours: draft.id_of[piece] for piece, ours in target.id_of.items() if piece in draft.id_of}
        self._special = _same_specials(target, draft)
        ends = set(target.eos_token_ids), set(draft.eos_token_ids)
        self.to_draft = ordinary | {i: j for i, j in self._special.items() if (i in ends[0]) == (j in ends[1])}
        """Target id -> draft id of every token that can be drafted."""
        self._byte_ids = {piece[0]: i for piece, i in draft.id_of.items() if len(piece) == 1}
        self._nothing = [*draft.opening] or [*draft.eos_token_ids[:1]]
        """In place of a text that nothing is left of."""
        sample = target.encode(SAMPLE)
        self.coverage = sum(i in self.to_draft for i in sample) / max(len(sample), 1)
        """Share of the target's tokens of `SAMPLE` that can be drafted: the most that can ever be accepted of such texts."""
        self.growth = len(draft.encode(SAMPLE)) / max(len(sample), 1)
        """Draft tokens per target token of `SAMPLE`."""

    @property
    def share(self) -> float:
        """Of the target's tokens, those that can be drafted."""
        num_tokens = sum(piece is not None for piece in self.target.pieces) + len(self.target.specials)
        return len(self.to_draft) / max(num_tokens, 1)

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"draft '{self.draft.name}' has another vocabulary than '{self.target.name}': drafts are made of the "
            f"{len(self.to_draft)} tokens that both have, {self.share:.1%} of the target's and {self.coverage:.1%} of those in "
            "a sample text"
        )

    def check(self) -> None:
        """Raise `ModelError` where drafts over so few tokens could not pay."""
        for value, least, what in (
            (self.share, LEAST_SHARE, "of the target's tokens"),
            (self.coverage, LEAST_COVERAGE, "of the tokens that the target makes of a sample text"),
        ):
            if value < least:
                raise ModelError(
                    f"draft.model: '{self.draft.name}' (draft) and '{self.target.name}' (target) have different vocabularies. "
                    f"The {len(self.to_draft)} tokens that both have are only {value:.1%} {what}, and at least {least:.0%} are "
                    "needed: choose a draft of the target's family, or set draft.source to self-int8"
                )

    def spell_token(self, token: int) -> list[int]:
        """One target token on its own, in draft ids; nothing where the draft has no word for it."""
        if token in self.to_draft:
            return [self.to_draft[token]]
        return self.spell([token])

    def spell(self, ids: Sequence[int]) -> list[int]:
        """Target ids as the draft's tokenizer spells their text. Bytes that are no UTF-8, or not yet, become tokens for single
        bytes where there are such; special tokens without a counterpart and ids without a meaning are left out.
        """
        spelled: list[int] = []
        run = bytearray()
        for token in ids:
            piece = self.target.pieces[token] if token < len(self.target.pieces) else None
            if piece is not None:
                run += piece
                continue
            spelled += self._spell_bytes(bytes(run))
            run.clear()
            if token in self._special:
                spelled.append(self._special[token])
        return spelled + self._spell_bytes(bytes(run))

    def begin(self, spelled: list[int]) -> list[int]:
        """A whole text: with what the draft expects at its beginning. Empty only where the draft has no special tokens."""
        opening = list(self.draft.opening)
        return (spelled if spelled[: len(opening)] == opening else opening + spelled) or list(self._nothing)

    def _spell_bytes(self, data: bytes) -> list[int]:
        spelled: list[int] = []
        while data:
            try:
                text, broken, data = data.decode(), b"", b""
            except UnicodeDecodeError as error:
                text, broken, data = data[: error.start].decode(), data[error.start : error.end], data[error.end :]
            spelled += self._encode(text)
            spelled += [self._byte_ids[byte] for byte in broken if byte in self._byte_ids]
        return spelled

    def _encode(self, text: str) -> list[int]:
        if self.draft.begins_with_space:
            text = text.removeprefix(" ")
        return [i for i in self.draft.encode(text) if i < len(self.draft.pieces)] if text else []


def _same_specials(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Special tokens of one name, and ends of a text that have no namesake among the other's special tokens."""
    same = {i: draft.specials[name] for name, i in target.specials.items() if name in draft.specials}
    ours = [i for i in target.eos_token_ids if i not in same]
    theirs = [j for j in draft.eos_token_ids if j not in same.values()]
    return same | dict(zip(ours, theirs, strict=False))


class Spelling:
    """A growing text in draft ids: a function of its target ids alone, however it grew.

    The tokenizer reads segments of it. Where they end is decided by the target ids up to the next token, in front of a word
    where possible, so a spelling differs from that of the text in one go at most around these ends.
    """

    def __init__(self, shared: SharedVocabulary):
        self._shared = shared
        self._ends = [0]
        """Target tokens before the end of each closed segment."""
        self._closed: list[list[int]] = []

    def copy(self) -> "Spelling":
        """For a text that begins alike."""
        other = Spelling(self._shared)
        other._ends, other._closed = list(self._ends), list(self._closed)
        return other

    def truncate(self, length: int) -> None:
        """Only the first ``length`` target ids stay as they were. What ends a segment is the token behind it."""
        while self._ends[-1] > 0 and self._ends[-1] >= length:
            self._ends.pop()
            self._closed.pop()

    def spell(self, ids: Sequence[int]) -> list[int]:
        """Draft ids of the whole text, which begins as at the last call, as far as it was not truncated."""
        while (end := self._next_end(ids)) is not None:
            self._closed.append(self._shared.spell(ids[self._ends[-1] : end]))
            self._ends.append(end)
        spelled = [token for segment in self._closed for token in segment]
        return self._shared.begin(spelled + self._shared.spell(ids[self._ends[-1] :]))

    def _next_end(self, ids: Sequence[int]) -> int | None:
        start = self._ends[-1]
        for end in range(start + SEGMENT_TOKENS, len(ids)):
            length = end - start
            if length >= 2 * LONGEST_SEGMENT or self._starts_word(ids, end):
                return end
            if length >= LONGEST_SEGMENT and not self._goes_on_character(ids[end]):
                return end
        return None

    def _starts_word(self, ids: Sequence[int], at: int) -> bool:
        piece, before = self._piece(ids[at]), self._piece(ids[at - 1])
        if not piece:
            return True
        return bool(before) and not before[-1:].isspace() and piece[:1] == b" " and not piece[:2].isspace()

    def _goes_on_character(self, token: int) -> bool:
        piece = self._piece(token)
        return bool(piece) and 0x80 <= piece[0] < 0xC0

    def _piece(self, token: int) -> bytes:
        pieces = self._shared.target.pieces
        return (pieces[token] if token < len(pieces) else None) or b""
