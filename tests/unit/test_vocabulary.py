"""Two vocabularies: which tokens they share, and how a text of one is spelled in the other."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import ModelError
from engine.propose.vocabulary import SEGMENT_TOKENS, SharedVocabulary, Spelling, Vocabulary, read_vocabulary
from engine.text import BYTE_OF

SPELLING = {byte: character for character, byte in BYTE_OF.items()}


def longest_match(name: str, words: Sequence[str], specials: Sequence[str] = (), **options: Any) -> Vocabulary:
    """All single bytes, these words, and these special tokens; a text is read by always taking the longest token that fits."""
    pieces: list[bytes | None] = [bytes((byte,)) for byte in range(256)]
    pieces += [word.encode() for word in words if len(word.encode()) > 1]
    id_of = {piece: i for i, piece in enumerate(pieces)}
    longest = max(len(piece or b"") for piece in pieces)

    def encode(text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            piece = next(data[:n] for n in range(longest, 0, -1) if data[:n] in id_of)
            ids.append(id_of[piece])
            data = data[len(piece) :]
        return ids

    named = {token: len(pieces) + i for i, token in enumerate(specials)}
    return Vocabulary(name, (*pieces, *[None] * len(named)), encode, specials=named, **options)


TARGET = longest_match("target", ["the", " the", " cat", "ing", "é", "\n\n", " 🙂"], ["<eos>", "<user>", "<only>"])
DRAFT = longest_match("draft", ["th", " the", " ca", "ing", "ng", "é", "🙂", "\n\n"], ["<user>", "<eos>"])
SHARED = SharedVocabulary(TARGET, DRAFT)


def text_of(vocabulary: Vocabulary, ids: Sequence[int]) -> bytes:
    return b"".join(vocabulary.pieces[i] or b"" for i in ids if i < len(vocabulary.pieces))


def byte_level_tokenizer(words: Sequence[str]) -> Tokenizer:
    spelled = ["".join(SPELLING[byte] for byte in word.encode()) for word in words]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(spelled)}, []))
    tokenizer.decoder, tokenizer.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def sentence_piece_tokenizer(tokens: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


class Wrapped:
    """What of a transformers tokenizer is read."""

    def __init__(self, tokenizer: Tokenizer, specials: Sequence[str] = ()):
        tokenizer.add_special_tokens(list(specials))
        self.backend_tokenizer = tokenizer
        self.all_special_tokens = list(specials)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab())


def read(tokenizer: Wrapped, eos: Sequence[int] = ()) -> Vocabulary:
    return read_vocabulary("m", tokenizer, len(tokenizer.get_vocab()), eos)


# --- which tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_are_compared_by_their_bytes() -> None:
    """Bug guarded: comparing strings, so that 'Ġthe' and '▁the', or 'Ċ' and '<0x0A>', are two different tokens and a byte-level
    target shares nothing with a SentencePiece draft."""
    target = read(Wrapped(byte_level_tokenizer([" the", "\n", "é", "a", "<x>"]), ["</s>"]), [5])
    draft = read(Wrapped(sentence_piece_tokenizer(["a", "\u2581the", "<0x0A>", "é", "\u2581a"]), ["</s>"]), [5])
    assert target.pieces == (b" the", b"\n", "é".encode(), b"a", b"<x>", None)
    assert SharedVocabulary(target, draft).to_draft == {0: 1, 1: 2, 2: 3, 3: 0, 5: 5}


def test_added_tokens_are_spelled_as_they_are() -> None:
    """Bug guarded: an added token that is no special one ('<tool>', or one with a space) read through the byte alphabet."""
    tokenizer = byte_level_tokenizer(["a"])
    tokenizer.add_tokens([AddedToken("<to ol>", special=False)])
    assert read(Wrapped(tokenizer)).pieces == (b"a", b"<to ol>")


def test_a_byte_fallback_gives_way_to_the_token_that_the_tokenizer_uses() -> None:
    """Bug guarded: of two ids for one byte the one that the target never says is drafted, and always refused."""
    target = read(Wrapped(sentence_piece_tokenizer(["<0x61>", "a", "<0x62>"])))
    draft = longest_match("draft", [])
    assert SharedVocabulary(target, draft).to_draft == {1: ord("a"), 2: ord("b")}


def test_a_tokenizer_that_does_not_say_how_it_spells_is_refused() -> None:
    """Bug guarded: WordPiece's '##ing' taken for text, so that tokens pair that mean different things."""
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match=r"m: .*decoder: WordPiece.*neither byte-level nor SentencePiece"):
        read(Wrapped(tokenizer))


def test_ids_that_cannot_be_sampled_are_not_shared() -> None:
    """Bug guarded: a token beyond the model's head is drafted, and its column of the logits is not there."""
    tokenizer = Wrapped(byte_level_tokenizer(["a", "b", "c"]))
    assert read_vocabulary("m", tokenizer, 2, ()).pieces == (b"a", b"b")


ENDS = (
    # (the target's ends, the draft's ends, pairs of special tokens that can be drafted)
    (["<eos>"], ["<eos>"], {"<eos>": "<eos>", "<user>": "<user>"}),
    (["<eos>"], [], {"<user>": "<user>"}),
    ([], ["<eos>"], {"<user>": "<user>"}),
    (["<only>"], ["<mine>"], {"<only>": "<mine>", "<eos>": "<eos>", "<user>": "<user>"}),
)


@pytest.mark.parametrize(("ours", "theirs", "expected"), ENDS)
def test_what_ends_the_targets_texts_pairs_only_with_what_ends_the_drafts(
    ours: list[str], theirs: list[str], expected: dict[str, str]
) -> None:
    """Bug guarded: the end of a text drafted where the draft means something else by that token, or a separator for its end."""
    target = longest_match(
        "target", [], ["<eos>", "<user>", "<only>"], eos_token_ids=tuple(256 + "euo".index(e[1]) for e in ours)
    )
    draft = longest_match("draft", ["<only>"], ["<user>", "<eos>", "<mine>"])
    ends = tuple(draft.specials[name] for name in theirs)
    draft = longest_match("draft", ["<only>"], ["<user>", "<eos>", "<mine>"], eos_token_ids=ends)
    shared = SharedVocabulary(target, draft)
    pairs = {i: j for i, j in shared.to_draft.items() if i >= 256}
    assert pairs == {target.specials[i]: draft.specials[j] for i, j in expected.items()}


@settings(max_examples=20)
@given(st.lists(st.text("ab é🙂", max_size=3), max_size=8), st.lists(st.text("ab é🙂", max_size=3), max_size=8))
def test_pairs_are_one_to_one_and_mean_the_same(ours: list[str], theirs: list[str]) -> None:
    """Bug guarded: two target tokens on one column of the draft's logits, so that its probability counts twice in q."""
    target, draft = longest_match("t", list(dict.fromkeys(ours))), longest_match("d", list(dict.fromkeys(theirs)))
    pairs = SharedVocabulary(target, draft).to_draft
    assert len(set(pairs.values())) == len(pairs)
    assert all(target.pieces[i] == draft.pieces[j] for i, j in pairs.items())
    both = {piece for piece in target.pieces if piece} & {piece for piece in draft.pieces if piece}
    assert {target.pieces[i] for i in pairs} == both


def test_too_little_in_common_is_refused_with_the_numbers() -> None:
    """Bug guarded: a pair whose drafts can never be accepted starts all the same, and is slow for no visible reason."""
    letters = longest_match("letters", [])
    rare = longest_match("rare", [f"{i:05}" for i in range(9000)])
    with pytest.raises(
        ModelError, match=r"'letters' \(draft\) and 'rare' \(target\).*256 tokens.*2\.8% of the target's tokens"
    ):
        SharedVocabulary(rare, letters).check()
    pairs = longest_match("pairs", [chr(a) + chr(b) for a in range(32, 127) for b in range(32, 127)])
    seldom = longest_match("seldom", [first + chr(b) for first in "~^|}{`@" for b in range(32, 127)])
    with pytest.raises(ModelError, match=r"only \d.*% of the tokens that the target makes of a sample text.*at least 50%"):
        SharedVocabulary(pairs, seldom).check()
    SHARED.check()
    assert f"{len(SHARED.to_draft)} tokens that both have" in SHARED.describe()


# --- texts ------------------------------------------------------------------------------------------------------------------

TEXTS = st.lists(st.sampled_from(["the", " the", " cat", "ing", " th", "é", "🙂", "\n\n", "x", " ", "ö"]), max_size=60).map(
    "".join
)
TOKENS = st.one_of(st.sampled_from(TARGET.encode("thé 🙂 cat") + list(range(256, 300))), st.integers(0, len(TARGET.pieces) - 1))
IDS = st.lists(TOKENS, min_size=1, max_size=5 * SEGMENT_TOKENS)


@given(TEXTS)
def test_a_spelling_is_the_same_text_as_the_draft_would_read_it(text: str) -> None:
    """Bug guarded: tokens translated one by one, so that the draft reads a spelling ('th' 'e') that it would never write."""
    spelled = SHARED.spell(TARGET.encode(text))
    assert spelled == DRAFT.encode(text)
    assert text_of(DRAFT, spelled) == text.encode()


@given(st.binary(max_size=12))
def test_bytes_that_are_no_characters_are_spelled_byte_by_byte(data: bytes) -> None:
    """Bug guarded: a character that has only half arrived, or never will be whole, is lost or replaced by U+FFFD."""
    assert text_of(DRAFT, SHARED.spell(list(data))) == data


def test_special_tokens_pass_by_name_or_are_left_out() -> None:
    """Bug guarded: the names of special tokens spelled as text, or the text around them joined to words across them."""
    eos, user, only = (TARGET.specials[name] for name in ("<eos>", "<user>", "<only>"))
    spelled = SHARED.spell([user, *TARGET.encode("t"), only, *TARGET.encode("he"), eos, 10_000])
    text = DRAFT.encode("t") + DRAFT.encode("he")
    assert spelled == [DRAFT.specials["<user>"], *text, DRAFT.specials["<eos>"]]


def test_a_text_begins_as_the_draft_expects_and_is_never_empty() -> None:
    """Bug guarded: a draft that learned <s> before every text reads none or two, or is given no token at all to go on from."""
    draft = longest_match("d", [], ["<s>", "</s>"], opening=(256,), eos_token_ids=(257,))
    shared = SharedVocabulary(longest_match("t", [], ["<s>", "<bos>"]), draft)
    assert Spelling(shared).spell([97]) == [256, 97]
    assert Spelling(shared).spell([256, 97]) == [256, 97]
    assert Spelling(shared).spell([257]) == [256]
    bare = SharedVocabulary(TARGET, longest_match("d", [], ["</s>"], eos_token_ids=(256,)))
    assert Spelling(bare).spell([TARGET.specials["<only>"]]) == [256]


def test_the_space_that_sentence_piece_puts_before_a_text_is_not_doubled() -> None:
    """Bug guarded: every segment but the first begins with two spaces for a draft whose tokenizer adds one itself."""
    plain = longest_match("d", [" the", " cat"])
    draft = Vocabulary("d", plain.pieces, lambda text: plain.encode(" " + text))
    shared = SharedVocabulary(TARGET, draft)
    ids = TARGET.encode("the" + " cat the" * SEGMENT_TOKENS)
    assert text_of(draft, Spelling(shared).spell(ids)) == b" the" + b" cat the" * SEGMENT_TOKENS


@given(IDS, st.data())
def test_a_spelling_depends_on_the_ids_alone(ids: list[int], data: st.DataObject) -> None:
    """Bug guarded: after a roll-back, a fork or another size of steps the draft reads the same text in another spelling, so
    that what is prepared is not what would have been drafted."""
    grown = Spelling(SHARED)
    for _ in range(data.draw(st.integers(1, 4))):
        other = data.draw(IDS)
        shared_length = data.draw(st.integers(0, len(ids)))
        grown.spell(ids[:shared_length] + other)
        grown.truncate(shared_length)
        if data.draw(st.booleans()):
            grown = grown.copy()
    assert grown.spell(ids) == Spelling(SHARED).spell(ids)


@given(IDS)
def test_segments_lose_nothing(ids: list[int]) -> None:
    """Bug guarded: a token lost or doubled, or a character torn, where one segment of a long text ends and the next begins."""
    spelled = Spelling(SHARED).spell(ids)
    assert text_of(DRAFT, spelled) == text_of(TARGET, ids)


def test_long_words_are_cut_between_characters() -> None:
    """Bug guarded: a text without spaces is one segment that is spelled anew at every token, or is cut within a character."""
    calls: list[str] = []
    draft = Vocabulary("d", DRAFT.pieces, lambda text: (calls.append(text), DRAFT.encode(text))[1])
    grown = Spelling(SharedVocabulary(TARGET, draft))
    calls.clear()
    ids = TARGET.encode("ö" * 200)
    for length in range(2, len(ids) + 1, 2):
        grown.spell(ids[:length])
    assert max(map(len, calls)) < 100
    assert text_of(DRAFT, grown.spell(ids)) == ("ö" * 200).encode()
