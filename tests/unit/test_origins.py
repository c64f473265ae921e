"""Where the tokens of an answer came from: rounds computed by hand, and how their text is divided among them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deployments.openai import Answer, Job, ServedModel, validate_chat, validate_completion
from deployments.origins import Origin, OriginTexts, round_origins
from engine.config import ApiConfig
from engine.drivers import SyncDriver
from engine.errors import InvalidRequest
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import NextToken, ScriptedDraft, ScriptedTarget, model_info
from engine.types import Delta, FinishReason

D, R, B, T = Origin.DRAFT, Origin.RECOVERY, Origin.BONUS, Origin.TARGET
EOS = 0


class Bytes:
    """One token per byte; 0 is EOS."""

    chat_template = "yes"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(i for i in ids if i != EOS).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids: int) -> str:
        return f"<0x{ids:02X}>"

    def __call__(self, text: str, **options: bool) -> Any:
        raise NotImplementedError

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> str:
        return conversation[0]["content"]


MODEL = ServedModel(name="m", tokenizer=Bytes(), vocab_size=256, max_context=400, eos_token_ids=frozenset({EOS}))
INFO = model_info(vocab_size=256, max_context=400, eos_token_ids=(EOS,))
PROMPT = "ab"


def served(text: str, draft: str, depth: int, **fields: Any) -> list[dict[str, Any]]:
    """The first choice of every chunk: rounds of a target that says ``text`` and of a draft that would have said ``draft``."""

    def says(script: str) -> NextToken:
        ids = [*script.encode(), EOS]
        return lambda known: ids[min(len(known) - len(PROMPT), len(ids) - 1)]

    body = {"model": "m", "prompt": PROMPT, "stream": True, "max_tokens": 100, "temperature": 0, **fields}
    job = validate_completion(body, ApiConfig(), MODEL)
    scheduler = Scheduler(INFO, FixedDepth(depth), max_batch=1, prefill_tokens=64, max_waiting=1)
    answer = Answer(job, MODEL)
    deltas = SyncDriver(
        ScriptedTarget(says(text), INFO), ScriptedDraft(says(draft), vocab_size=256), scheduler, Bytes()
    ).generate(list(job.requests))
    return [answer.chunk(0, answer.feed(0, delta))["choices"][0] for delta in deltas]


def told(choices: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    return [[(token["text"], token["origin"]) for token in choice["speculation"]["tokens"]] for choice in choices]


ASKED = {"speculation": {"report_origins": True}}


@pytest.mark.parametrize(
    ("num_tokens", "depth", "num_accepted", "origins"),
    [
        (1, 0, 0, (T,)),
        (1, 4, 0, (R,)),
        (3, 4, 2, (D, D, R)),
        (5, 4, 4, (D, D, D, D, B)),
        (4, 4, 4, (D, D, D, D)),  # cut at max_tokens, before the bonus token
        (2, 4, 2, (D, D)),  # cut inside the draft
        (0, 0, 0, ()),  # the prompt was only scored
    ],
)
def test_origins_of_one_round(num_tokens: int, depth: int, num_accepted: int, origins: tuple[Origin, ...]) -> None:
    """Bug guarded: a recovery token taken for a bonus token, or a run that was cut by a stop counted to its end."""
    assert round_origins(num_tokens, depth, num_accepted) == origins


@pytest.mark.parametrize("numbers", [(3, 4, 1), (1, 2, 2), (2, 0, 1), (5, 3, 4), (1, 4, -1)])
def test_numbers_that_no_round_has_are_refused(numbers: tuple[int, int, int]) -> None:
    """Bug guarded: totals that do not belong to this round (two rounds in one delta) shown as if they did."""
    with pytest.raises(ValueError, match="a round cannot commit"):
        round_origins(*numbers)


def test_rounds_computed_by_hand() -> None:
    """Bug guarded: origins shifted by a round, because totals were taken for what the round itself accepted.

    The first token comes from the prefill. The draft (3 tokens deep) is wrong at "e" and at "n", and right elsewhere.
    """
    choices = served("cdefghijklmno", "cdXfghijklmXo", 3, **ASKED)
    assert told(choices) == [
        [("c", T)],
        [("d", D), ("e", R)],
        [("f", D), ("g", D), ("h", D), ("i", B)],
        [("j", D), ("k", D), ("l", D), ("m", B)],
        [("n", R)],
        [("o", D), ("", D)],  # the draft foresaw the end, too
    ]
    assert [choice["text"] for choice in choices] == ["c", "de", "fghi", "jklm", "n", "o"]


def test_without_speculation_all_is_the_targets() -> None:
    """Bug guarded: plain tokens shown as bonus tokens, for nothing was rejected."""
    choices = served("cde", "cde", 0, **ASKED)
    assert told(choices) == [[("c", T)], [("d", T)], [("e", T)], [("", T)]]


def test_a_character_of_several_tokens_comes_with_its_last_one() -> None:
    """Bug guarded: half a character as U+FFFD, or a token that is never told because it has no text of its own."""
    choices = served("aéb", "aéb", 2, **ASKED)
    assert told(choices) == [[("a", T)], [("", D), ("é", D), ("b", B)], [("", D)]]


def test_text_that_ends_inside_a_character() -> None:
    """Bug guarded: the replacement character at the end of a text dropped from the tokens though the text has it."""
    choices = served("aé", "aé", 0, max_tokens=2, **ASKED)
    assert told(choices) == [[("a", T)], [("", T), ("�", T)]]
    assert [choice["text"] for choice in choices] == ["a", "�"]


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize("stop", ["i", "gh", "ghiX", "mno", "cde", "zz"])
@pytest.mark.parametrize("echo", [False, True])
def test_texts_of_the_tokens_are_the_text(depth: int, stop: str, echo: bool) -> None:
    """Bug guarded: text that was held back for a stop string given to the wrong token or told twice; swallowed text told."""
    choices = served("cdéfghijklmno", "cdéXghijklXno", depth, stop=stop, echo=echo, **ASKED)
    plain = served("cdéfghijklmno", "cdéXghijklXno", depth, stop=stop, echo=echo)
    assert ["".join(text for text, _ in tokens) for tokens in told(choices)] == [choice["text"] for choice in choices]
    assert [choice["text"] for choice in plain] == [choice["text"] for choice in choices]
    origins = {text: origin for tokens in told(choices) for text, origin in tokens}
    assert origins.get(PROMPT) == (Origin.PROMPT if echo else None)
    if depth == 3 and stop != "cde":  # c | d and both bytes of é, then f
        assert origins["é"] == D
        assert origins["f"] == B


def test_held_text_goes_to_its_own_token_later() -> None:
    """Bug guarded: text that a stop string held back shown under the token that released it.

    "gh" may begin "ghX" and is held over the end of its round; the next round shows that it does not.
    """
    texts = OriginTexts()
    texts.committed([(D, 1), (R, 2)])
    assert texts.shown("", is_last=False) == []
    texts.committed([(B, 3)])
    pieces = texts.shown("ghi", is_last=False)
    assert [(piece.text, piece.origin) for piece in pieces] == [("g", D), ("h", R), ("i", B)]
    texts.committed([(T, 6)])
    shown = [texts.shown("j", is_last=False), texts.shown("k", is_last=True)]
    assert [[(piece.text, piece.origin) for piece in some] for some in shown] == [[("j", T)], [("k", T)]]


def test_a_token_shown_in_two_parts() -> None:
    """Bug guarded: the rest of a token, held back because a stop string may begin inside it, given to the one after it."""
    texts = OriginTexts()
    texts.committed([(D, 3)])
    first = texts.shown("ab", is_last=False)
    texts.committed([(T, 4)])
    pieces = [*first, *texts.shown("cd", is_last=True)]
    assert [(piece.text, piece.origin) for piece in pieces] == [("ab", D), ("c", D), ("d", T)]


def test_tokens_that_a_stop_string_swallowed_are_told() -> None:
    """Bug guarded: origins that do not add up to the tokens that the usage counts.

    c | d e f and the bonus token g, which is held back; then h completes the stop string inside a draft.
    """
    choices = served("cdefghijkl", "cdefghijkl", 3, stop="gh", **ASKED)
    assert told(choices) == [[("c", T)], [("d", D), ("e", D), ("f", D)], [("", B), ("", D)]]


def test_rounds_after_a_lost_lane_count_on() -> None:
    """Bug guarded: totals that begin again in another lane would make the accepted number of a round negative."""
    texts = OriginTexts()
    rounds = [
        Delta(request_id="a", token_ids=(1, 2, 3), depth=2, num_accepted=2),
        Delta(request_id="a", token_ids=(4,), depth=0, num_accepted=2),  # the first of the new lane
        Delta(request_id="a", token_ids=(5, 6), depth=3, num_accepted=3, finish_reason=FinishReason.LENGTH),
    ]
    assert [texts.of_round(delta) for delta in rounds] == [(D, D, B), (T,), (D, R)]


def test_nobody_who_did_not_ask_is_told() -> None:
    """Bug guarded: a field that strict clients refuse, in every chunk of every stream."""
    assert all("speculation" not in choice for choice in served("cdef", "cdef", 2))
    assert all("speculation" not in choice for choice in served("cdef", "cdef", 2, speculation={"report_origins": False}))


@pytest.mark.parametrize(
    ("validate", "prompt"),
    [(validate_chat, {"messages": [{"role": "user", "content": "a"}]}), (validate_completion, {"prompt": "a"})],
    ids=["chat", "completion"],
)
def test_only_a_stream_can_be_asked(validate: Callable[..., Job], prompt: dict[str, Any]) -> None:
    """Bug guarded: an option that is accepted and ignored."""
    with pytest.raises(InvalidRequest, match="report_origins is only allowed when stream is true") as refused:
        validate({"model": "m", **prompt, **ASKED}, ApiConfig(), MODEL)
    assert refused.value.field == "speculation"
