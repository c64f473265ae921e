"""Walk once: what ends an answer inside a draft ends everything at the same token as without drafts.

Real rounds over a draft that equals the target, 12 tokens deep, against plain decoding: ids, text, logprobs, reason, usage and
counters. The first token comes from the prefill; numbers 2 to 14 of a text are one run of 12 draft tokens and a bonus token, so
that an event at index 1 to 14 falls on every place in a run, on its bonus token, and on the first of the next run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from deployments.openai import Answer, ServedModel, validate_completion
from engine.config import ApiConfig
from engine.drivers import SyncDriver
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import ScriptedDraft, ScriptedTarget, model_info
from engine.types import Delta

EOS, X, Y, XYZ, STOP_ID = 0, 24, 25, 27, 28
PROMPT = [5, 6, 7]
LONG = 40
PLACES = range(1, 15)
DEPTHS = (12, 5, 1)
COUNTED = {"accepted_prediction_tokens", "rejected_prediction_tokens"}


class Letters:
    """Ids 1 to 26 are letters, 27 is "xyz", 28 is "!", 0 is EOS."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) - ord("a") + 1 for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        words = {**{i: chr(ord("a") + i - 1) for i in range(1, 27)}, XYZ: "xyz", STOP_ID: "!"}
        return "".join(words.get(token, "" if skip_special_tokens else "<eos>") for token in ids)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return str(ids)

    def __call__(self, text: str, **options: bool) -> Any:
        raise NotImplementedError

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> str:
        raise NotImplementedError


MODEL = ServedModel(name="m", tokenizer=Letters(), vocab_size=29, max_context=100, eos_token_ids=frozenset({EOS}))
INFO = model_info(vocab_size=29, max_context=100, eos_token_ids=(EOS,))


@dataclass
class Outcome:
    """Everything that a client and the metrics are told, but for what only drafts can change."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    streamed: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    num_output_tokens: int = 0
    num_committed: int = 0
    num_finished: int = 0
    stop_string: str | None = None


def script_of(events: dict[int, int]) -> Callable[[Sequence[int]], int]:
    """A text of letters a to t, with other tokens at some indices."""
    return lambda ids: events.get(len(ids) - len(PROMPT), (len(ids) - len(PROMPT)) % 20 + 1)


def play(events: dict[int, int], fields: dict[str, Any], depth: int) -> tuple[Outcome, list[Delta], dict[str, int]]:
    """Run one request from its HTTP body to its HTTP answer; also gives the deltas and the counters that drafts may change."""
    body = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": LONG, "logprobs": 0, "seed": 1, **fields}
    job = validate_completion(body, ApiConfig(), MODEL)
    script = script_of(events)
    target = ScriptedTarget(script, INFO)
    scheduler = Scheduler(INFO, FixedDepth(depth), max_batch=4, prefill_tokens=64, max_waiting=4)
    driver = SyncDriver(target, ScriptedDraft(script), scheduler, decoder=MODEL.tokenizer)
    driver.add(job.requests[0])
    answer, outcome, parts, deltas, counters = Answer(job, MODEL), Outcome(), [], [], {"drafted": 0, "accepted": 0}
    while scheduler.running or scheduler.waiting:
        result = driver.step()
        outcome.num_committed += result.report.num_committed
        outcome.num_finished += result.report.num_finished
        counters["drafted"] += result.report.num_drafted
        counters["accepted"] += result.report.num_accepted
        for delta in result.deltas:
            deltas.append(delta)
            parts.append(answer.feed(0, delta))
            outcome.ids += delta.token_ids
            outcome.logprobs += delta.logprobs or ()
    outcome.streamed = "".join(part.text for part in parts)
    outcome.body = answer.whole([parts])
    details = outcome.body["usage"].pop("completion_tokens_details")
    assert set(details) == COUNTED
    counters["usage_accepted"], counters["usage_rejected"] = (details[name] for name in sorted(COUNTED))
    for name in ("id", "created"):
        del outcome.body[name]
    outcome.num_output_tokens, outcome.stop_string = deltas[-1].num_output_tokens, deltas[-1].stop_string
    return outcome, deltas, counters


def letters(count: int) -> str:
    return "".join(chr(ord("a") + i % 20) for i in range(count))


# name -> index of the event -> (tokens at indices, fields of the body, tokens counted, text, reason)
Case = tuple[dict[int, int], dict[str, Any], int, str, str]
CASES: dict[str, Callable[[int], Case]] = {
    "EOS": lambda at: ({at: EOS}, {}, at + 1, letters(at), "stop"),
    "EOS twice": lambda at: ({at: EOS, at + 1: EOS}, {}, at + 1, letters(at), "stop"),
    "EOS as the last budgeted token": lambda at: ({at: EOS}, {"max_tokens": at + 1}, at + 1, letters(at), "stop"),
    "EOS beyond the budget": lambda at: ({at: EOS}, {"max_tokens": at}, at, letters(at), "length"),
    "EOS that is ignored": lambda at: (
        {at: EOS, at + 1: EOS},
        {"ignore_eos": True, "max_tokens": at + 3},
        at + 3,
        letters(at) + letters(at + 3)[-1],
        "length",
    ),
    "EOS as a stop id": lambda at: (
        {at: EOS},
        {"ignore_eos": True, "stop_token_ids": [EOS]},
        at + 1,
        letters(at),
        "stop",
    ),
    "stop id": lambda at: ({at: STOP_ID}, {"stop_token_ids": [STOP_ID]}, at + 1, letters(at), "stop"),
    "stop id, then EOS": lambda at: (
        {at: STOP_ID, at + 1: EOS},
        {"stop_token_ids": [STOP_ID]},
        at + 1,
        letters(at),
        "stop",
    ),
    "EOS, then a stop id": lambda at: (
        {at: EOS, at + 1: STOP_ID},
        {"stop_token_ids": [STOP_ID]},
        at + 1,
        letters(at),
        "stop",
    ),
    "stop string in one token": lambda at: ({at: XYZ}, {"stop": "y"}, at + 1, letters(at) + "x", "stop"),
    "stop string over two tokens": lambda at: ({at - 1: X, at: Y}, {"stop": "xy"}, at + 1, letters(at - 1), "stop"),
    "stop string over three tokens": lambda at: (
        {at - 1: X, at: Y, at + 1: X},
        {"stop": "xyx"},
        at + 2,
        letters(at - 1),
        "stop",
    ),
    "stop string that is not completed": lambda at: (
        {at - 1: X, at: Y},
        {"stop": "xyz", "max_tokens": at + 1},
        at + 1,
        letters(at - 1) + "xy",
        "length",
    ),
    "stop string completed by the last budgeted token": lambda at: (
        {at - 1: X, at: Y},
        {"stop": "xy", "max_tokens": at + 1},
        at + 1,
        letters(at - 1),
        "stop",
    ),
    "stop string and budget in one run": lambda at: (
        {at - 1: X, at: Y},
        {"stop": "xy", "max_tokens": at + 3},
        at + 1,
        letters(at - 1),
        "stop",
    ),
    "stop string beyond the budget": lambda at: (
        {at - 1: X, at: Y},
        {"stop": "xy", "max_tokens": at},
        at,
        letters(at - 1) + "x",
        "length",
    ),
    "EOS inside a stop string": lambda at: (
        {at - 1: X, at: EOS, at + 1: Y},
        {"stop": "xy"},
        at + 1,
        letters(at - 1) + "x",
        "stop",
    ),
    "stop string before EOS": lambda at: (
        {at - 1: X, at: Y, at + 1: EOS},
        {"stop": "xy"},
        at + 1,
        letters(at - 1),
        "stop",
    ),
    "the shorter of two stop strings": lambda at: (
        {at: XYZ, at + 1: X, at + 2: Y},
        {"stop": ["yzxy", "yz"]},
        at + 1,
        letters(at) + "x",
        "stop",
    ),
    "budget": lambda at: ({}, {"max_tokens": at + 1}, at + 1, letters(at + 1), "length"),
    "stop string before min_tokens": lambda at: (
        {at: XYZ, at + 2: XYZ},
        {"stop": "y", "min_tokens": at + 2},
        at + 3,
        letters(at) + "xyz" + letters(at + 2)[-1] + "x",
        "stop",
    ),
    "stop string at min_tokens": lambda at: (
        {at: XYZ},
        {"stop": "y", "min_tokens": at + 1},
        at + 1,
        letters(at) + "x",
        "stop",
    ),
}


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_an_answer_ends_at_the_same_token_at_any_depth(case: str, at: int) -> None:
    """Bug guarded: a check per round instead of per token: tokens, logprobs, usage or metrics after an answer has ended, a stop
    reported as "length", a budget charged per round (cases L18 to L24, L26, L28)."""
    events, fields, count, text, reason = CASES[case](at)
    plain, _, none = play(events, fields, 0)
    assert (plain.ids, plain.streamed) == ([script_of(events)([0] * (3 + i)) for i in range(count)], text)
    choice = plain.body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    assert choice["logprobs"]["tokens"] == [Letters().decode([token], False) for token in plain.ids]
    assert [(entry.token_id, entry.logprob) for entry in plain.logprobs] == [(t, -3.0 - i) for i, t in enumerate(plain.ids)]
    assert plain.num_output_tokens == plain.num_committed == plain.body["usage"]["completion_tokens"] == count
    assert set(none.values()) == {0}
    for depth in DEPTHS:
        assert play(events, fields, depth)[0] == plain


@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_drafts_are_counted_as_far_as_they_are_shown(case: str, at: int) -> None:
    """Bug guarded: draft tokens behind the end of an answer counted as accepted, so that more were accepted than were shown, or
    usage and metrics that disagree."""
    events, fields, *_ = CASES[case](at)
    for depth in DEPTHS:
        _, deltas, counters = play(events, fields, depth)
        shown = sum(min(delta.depth, len(delta.token_ids)) for delta in deltas)
        drafted = sum(delta.depth for delta in deltas)
        assert counters == {
            "drafted": drafted,
            "accepted": shown,
            "usage_accepted": shown,
            "usage_rejected": drafted - shown,
        }
        assert [delta.depth for delta in deltas[1:-1]] == [depth] * (len(deltas) - 2)
        assert all(len(delta.token_ids) == delta.depth + 1 for delta in deltas[:-1])
        assert len(deltas[-1].token_ids) <= deltas[-1].depth + 1


def test_an_end_that_only_the_draft_wants_ends_nothing() -> None:
    """Bug guarded: a request marked as finished because its draft proposed EOS (case L22)."""
    script = script_of({})
    scheduler = Scheduler(INFO, FixedDepth(12), max_batch=4, prefill_tokens=64, max_waiting=4)
    draft = ScriptedDraft(lambda ids: EOS if len(ids) % 2 else script(ids))
    job = validate_completion({"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 30}, ApiConfig(), MODEL)
    deltas = list(SyncDriver(ScriptedTarget(script, INFO), draft, scheduler).generate(job.requests))
    assert [token for delta in deltas for token in delta.token_ids] == [i % 20 + 1 for i in range(30)]
    assert deltas[-1].finish_reason == "length"
