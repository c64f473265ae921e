import random
import re
import time
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.text import TextStream, TokenBytes
from engine.types import GenerateRequest, SamplingParams

settings.register_profile("unit", max_examples=100, deadline=None)
settings.load_profile("unit")

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps. Streams of text are cut in many places.",
    "日本語のテキスト。你好,世界! ภาษาไทยไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 family 👍🏽 thumbs 🏳️‍🌈 flag é ñ",
    "def f(x):\n    return x + 1\n\n\tprint('done')",
]
TEXTS = st.one_of(st.sampled_from(CORPUS), st.text(max_size=40), st.text(alphabet="ab 日本👩‍👧é\n", max_size=60))


class ByteDecoder:
    """One token per byte; ids from 256 on are special tokens. Counts the ids it was asked to decode."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        special = b"" if skip_special_tokens else b"<special>"
        return b"".join(bytes([i]) if i < 256 else special for i in ids).decode("utf-8", "replace")


class Fast:
    """A `tokenizers.Tokenizer` with the names of transformers."""

    def __init__(self, tokenizer: Tokenizer):
        self.inner = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def convert_ids_to_tokens(self, ids: int) -> str:
        return self.inner.id_to_token(ids)


@cache
def byte_level() -> Fast:
    """As GPT-2, Llama 3 and Qwen: bytes first, merges may end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    return Fast(tokenizer)


@cache
def sentencepiece() -> Fast:
    """As Llama 2 and Gemma: words start with a space, rare characters fall back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "▁The", "▁quick", "▁fox", "▁a", "a", "b", "c", "s", ",", "▁▁"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return Fast(tokenizer)


def stream(decoder, ids, stop=(), min_tokens=0):
    text = TextStream(decoder, stop, min_tokens)
    return [*(text.push(i) for i in ids), text.finish()], text


def cut(text, stop):
    """The text before the stop string that is completed first; of two that end together the longer one."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    return text if not ends else text[: min(ends)[0] + min(ends)[1]]


@given(TEXTS)
def test_byte_tokens_join_to_the_text(text):
    """Guards: a character split over tokens arrives as U+FFFD, or is sent twice."""
    deltas, _ = stream(ByteDecoder(), text.encode())
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


@given(st.lists(st.one_of(st.integers(0, 260), st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xEF, 0xBF, 0xBD]))))
@example([0xE2, 0x82] * 40)
@example([0x80] * 60 + [0xF0, 0x9F, 0x98, 0x80])
@example([0xEF, 0xBF, 0xBD] * 20 + [0xE2, 256, 256, 256, 256, 0x82, 257, 0xAC])
@example([0xF0, 0x9F] + [300] * 100 + [0x98, 0x80])
def test_any_bytes_join_to_the_one_shot_decode(ids):
    """Guards: broken bytes, real U+FFFD and special tokens in between make the stream differ from the whole."""
    deltas, text = stream(ByteDecoder(), ids)
    assert "".join(deltas) == ByteDecoder().decode(ids, skip_special_tokens=True)
    assert text.num_characters <= len("".join(deltas))


@given(TEXTS)
def test_byte_level_bpe_joins_to_the_one_shot_decode(text):
    """Guards: merges that end inside a character (Thai, CJK, ZWJ sequences) with a real tokenizer."""
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids, skip_special_tokens=True) == text


@given(st.data())
def test_any_ids_of_byte_level_bpe_join_to_the_one_shot_decode(data):
    """Guards: a sampling model writes any ids in any order, not only what an encoder would."""
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.inner.get_vocab_size() - 1), max_size=60))
    assert "".join(stream(tokenizer, ids)[0]) == tokenizer.decode(ids, skip_special_tokens=True)


@given(st.text(alphabet="abc ,Théquickfosé日👩‍", max_size=60))
@example("  a  The quick a")
@example("👩‍👩‍👧‍👦日本")
def test_sentencepiece_keeps_leading_spaces_and_bytes(text):
    """Guards: the space of a word lost or doubled at a delta's edge; byte-fallback characters shown as U+FFFD per byte."""
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=True)
    assert all("\ufffd" not in delta for delta in deltas)


@given(st.lists(st.one_of(st.integers(0, 14), st.integers(259, 269), st.sampled_from([0xE2 + 3, 0x82 + 3, 0xAC + 3]))))
def test_broken_byte_runs_of_sentencepiece_lose_no_words(ids):
    """Guards: after a broken run of byte tokens, words or spaces around it are lost or repeated."""
    tokenizer = sentencepiece()
    joined, whole = "".join(stream(tokenizer, ids)[0]), tokenizer.decode(ids, skip_special_tokens=True)
    assert re.sub("[^ -~]", "", joined) == re.sub("[^ -~]", "", whole)
    assert joined == whole or "\ufffd" in whole


@given(
    st.one_of(st.text(alphabet="ab", max_size=30), TEXTS),
    st.lists(st.text(alphabet="ab日", min_size=1, max_size=4), max_size=3),
)
@example("ababac", ["abac"])
@example("aabaab", ["ab", "aabaab"])
@example("aaab", ["aab", "ab"])
def test_stop_strings_cut_where_the_first_is_completed(text, stop):
    """Guards: a stop string found late, its beginning shown, or an overlapping beginning forgotten."""
    deltas, end = stream(ByteDecoder(), text.encode(), tuple(stop))
    assert "".join(deltas) == cut(text, stop)
    assert (end.matched is not None) == any(s in text for s in stop)
    assert end.matched is None or end.matched in stop


@given(TEXTS, st.integers(0, 200), st.integers(1, 8))
def test_a_stop_string_over_token_borders(text, start, length):
    """Guards: a stop string that spans tokens of a real tokenizer is missed."""
    tokenizer = byte_level()
    stop = text[start % (len(text) + 1) :][:length]
    if stop and "\ufffd" not in stop:
        deltas, end = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False), (stop,))
        assert ("".join(deltas), end.matched) == (cut(text, [stop]), stop)


def test_nothing_after_a_stop_string_is_shown():
    """Guards: tokens of the same round after the stop leak, or the held-back text is flushed at the end."""
    text = TextStream(ByteDecoder(), ("END",))
    assert [text.push(i) for i in b"oEN"] == ["o", "", ""]
    assert text.matched is None
    assert [text.push(i) for i in b"Dmore"] == [""] * 5
    assert (text.matched, text.finish()) == ("END", "")


def test_a_held_beginning_is_shown_when_it_is_no_stop_string():
    """Guards: the tail that looked like a stop string is lost at the end of the answer."""
    assert stream(ByteDecoder(), b"a EN", (" END",))[0] == ["a", "", "", "", " EN"]


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, "a"), (3, "a"), (4, "aXYbXYc"[:4]), (100, "aXYbXYc")])
def test_a_stop_string_before_min_tokens_is_text(min_tokens, shown):
    """Guards: min_tokens ignored by stop strings, or router and API disagreeing on it."""
    assert "".join(stream(ByteDecoder(), b"aXYbXYc", ("XY",), min_tokens)[0]) == shown


def test_a_character_cut_off_at_the_end_is_flushed_once():
    """Guards: the bytes held back at the end vanish, or come out as several U+FFFD."""
    assert stream(ByteDecoder(), "a€".encode()[:-1])[0] == ["a", "", "", "\ufffd"]


def test_the_cost_is_linear():
    """Guards: the whole output decoded again for every token, also while no character is ever completed."""
    for ids in (b"abc " * 1000, [0x80] * 4000, [0xE2, 0x82] * 2000, [300] * 4000, [97, *[300] * 4000]):
        decoder = ByteDecoder()
        stream(decoder, ids)
        assert decoder.num_decoded < 60 * len(ids)


def test_many_long_stop_strings_cost_little():
    """Guards: comparing every tail with every beginning of every stop string, quadratic in their length."""
    stop = tuple("a" * 999 + chr(98 + i) for i in range(16))
    started = time.perf_counter()
    stream(ByteDecoder(), b"a" * 3000, stop)
    assert time.perf_counter() - started < 2


def test_the_prompt_keeps_the_first_space():
    """Guards: "The capital is" + "Paris" glued together with SentencePiece tokenizers; resumed tokens shown again."""
    tokenizer = sentencepiece()
    prompt = tokenizer.encode("The", add_special_tokens=False)
    ids = tokenizer.encode("quick fox", add_special_tokens=False)
    request = GenerateRequest(request_id="r", prompt_ids=tuple(prompt), params=SamplingParams())
    text = TextStream.for_request(tokenizer, request)
    assert "".join(text.push(i) for i in ids) + text.finish() == " quick fox"


def test_a_resumed_request_goes_on_inside_its_stop_string():
    """Guards: after a lane died, a stop string that began before the fault is not recognised any more."""
    request = GenerateRequest(
        request_id="r", prompt_ids=(65,), params=SamplingParams(stop=("END",)), output_ids=tuple(b"text EN")
    )
    text = TextStream.for_request(ByteDecoder(), request)
    assert (text.push(ord("D")), text.matched) == ("", "END")


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_bytes_of_tokens_join_to_the_text(make):
    """Guards: logprob entries of a split character that show U+FFFD's bytes instead of the token's own."""
    tokenizer = make()
    text = "The quick 👩‍👩‍👧‍👦, 日本é"
    token_bytes = TokenBytes(tokenizer)
    joined = b"".join(token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False))
    assert joined.decode().removeprefix(" ") == text


def test_bytes_of_every_token_are_its_own():
    """Guards: a leading space lost from a single token, a special token without a name."""
    tokenizer = byte_level()
    token_bytes = TokenBytes(tokenizer)
    ids = random.Random(0).sample(range(1, tokenizer.inner.get_vocab_size()), 100)
    whole = b"".join(token_bytes(i) for i in ids).decode("utf-8", "replace")
    assert whole == tokenizer.decode(ids, skip_special_tokens=True)
    assert token_bytes(0) == b"<|end|>"
    assert TokenBytes(sentencepiece())(260) == b" The"
