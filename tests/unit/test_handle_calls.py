"""Calls from Python get what HTTP gets."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from deployments.api import ApiState
from deployments.handle_calls import complete_call, stream_call
from deployments.openai import ServedModel
from engine.config import ApiConfig
from engine.drivers import SyncDriver
from engine.errors import InvalidRequest
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import ScriptedDraft, ScriptedTarget, model_info
from engine.types import Delta, GenerateRequest

INFO = model_info(vocab_size=128, eos_token_ids=(0,))


class Characters:
    """One token per character."""

    chat_template = "yes"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))

    def convert_ids_to_tokens(self, ids: int) -> str:
        return chr(ids)

    def __call__(self, text: str, **options: bool) -> Any:
        raise NotImplementedError

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> str:
        return "".join(turn["content"] for turn in conversation)


def next_token(ids: Sequence[int]) -> int:
    return 97 + (ids[-1] - 96) % 26


class Lane:
    """Rounds with a perfect draft of 12 tokens."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        target = ScriptedTarget(next_token, INFO)
        scheduler = Scheduler(INFO, FixedDepth(12), max_batch=1, prefill_tokens=64, max_waiting=1)
        for delta in SyncDriver(target, ScriptedDraft(next_token), scheduler, Characters()).generate([request]):
            yield delta


async def _nothing() -> Any:
    raise AssertionError


MODEL = ServedModel(name="m", tokenizer=Characters(), vocab_size=128, max_context=512, eos_token_ids=frozenset({0}))
ASKED = dict.fromkeys(("status", "metrics", "controller", "dashboard"), _nothing)
STATE = ApiState(lanes=Lane(), model=MODEL, config=ApiConfig(), **ASKED)
CHAT = [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(("prompt", "asked"), [("ab", {"logprobs": 0}), (CHAT, {"logprobs": True})], ids=["completion", "chat"])
async def test_logprobs_arrive_one_per_token(prompt: Any, asked: dict[str, Any]) -> None:
    """Bug guarded: logprobs accepted and left out of a Python call, or one entry per round of many tokens (case L26)."""
    params = {"max_tokens": 20, "temperature": 0, "stop": "t", **asked}
    whole = await complete_call(STATE, prompt, params)
    pieces = [piece async for piece in stream_call(STATE, prompt, params)]
    assert whole["text"] == "cdefghijklmnopqrs" == "".join(piece["text"] for piece in pieces)
    assert (whole["finish_reason"], whole["usage"]["completion_tokens"]) == ("stop", 18)
    assert [entry["token"] for entry in whole["logprobs"]] == list("cdefghijklmnopqrst")
    assert [entry["logprob"] for entry in whole["logprobs"]] == [-2.0 - i for i in range(18)]
    assert [entry for piece in pieces for entry in piece["logprobs"]] == whole["logprobs"]
    assert len(pieces) == 3
    assert whole["usage"]["accepted_prediction_tokens"] == 12 + 4
    assert whole["usage"]["rejected_prediction_tokens"] == pieces[-1]["usage"]["rejected_prediction_tokens"] == 1


async def test_without_logprobs_there_are_none() -> None:
    """Bug guarded: a field that nobody asked for."""
    whole = await complete_call(STATE, "ab", {"max_tokens": 3, "temperature": 0, "seed": 5})
    assert set(whole) == {"text", "finish_reason", "usage", "seed"}
    assert (whole["text"], whole["finish_reason"], whole["seed"]) == ("cde", "length", 5)


@pytest.mark.parametrize("field", ["stream", "stream_options", "model", "echo"])
async def test_what_means_nothing_in_a_call_is_refused(field: str) -> None:
    """Bug guarded: an option of HTTP that is accepted and ignored."""
    with pytest.raises(InvalidRequest, match=field) as refused:
        await complete_call(STATE, "ab", {field: True})
    assert refused.value.field == field
