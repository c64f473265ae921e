"""Logprobs of the prompt (echo): every token but the first is scored once, whatever happens to the prefill."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from deployments.openai import Answer, ServedModel, validate_completion
from deployments.schema import CompletionShape
from engine.config import ApiConfig
from engine.drivers import SyncDriver
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import ScriptedDraft, ScriptedTarget, model_info
from engine.types import Delta, FinishReason, GenerateRequest, SamplingParams, TokenLogprob, VerifyReply, VerifyRequest

VOCAB = 100
PROMPT = tuple(range(10, 31))


def next_token(ids: Sequence[int]) -> int:
    return (7 * len(ids) + ids[-1]) % 60 + 1


class FaultyTarget(ScriptedTarget):
    """Forgets everything, or answers wrongly, at chosen rounds."""

    def __init__(self, forgets: Sequence[int] = (), **info: Any):
        super().__init__(next_token, model_info(vocab_size=VOCAB, **info))
        self.forgets = forgets
        self.scored: list[tuple[str, int]] = []
        """Sequence and position of every token that was scored."""

    def verify(self, request: VerifyRequest) -> VerifyReply:
        if len(self.requests) in self.forgets:
            self.lose_everything()
        return super().verify(request)

    def _score(self, ids: list[int], item: Any) -> tuple[TokenLogprob, ...]:
        scores = super()._score(ids, item)
        first = item.base_length + item.first_scored + 1
        self.scored += [(item.sequence_id, first + i) for i in range(len(scores))]
        return scores


def _request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **fields: Any) -> GenerateRequest:
    output = fields.pop("output_ids", ())
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, "prompt_logprobs": 0, **fields})
    return GenerateRequest(request_id=name, prompt_ids=prompt, params=params, output_ids=output)


def _driver(target: ScriptedTarget, **options: Any) -> SyncDriver:
    options = {"max_batch": 8, "prefill_tokens": 8, "max_waiting": 9, **options}
    return SyncDriver(target, ScriptedDraft(next_token), Scheduler(target.info, FixedDepth(3), **options))


def _scores(prompt: Sequence[int] = PROMPT) -> tuple[TokenLogprob, ...]:
    """What `ScriptedTarget` says of a prompt: the position of every token is in its logprob."""
    return tuple(TokenLogprob(token, -float(position)) for position, token in enumerate(prompt) if position)


def _output(count: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


def _check(deltas: Sequence[Delta], target: FaultyTarget, prompt: Sequence[int] = PROMPT, count: int = 5) -> None:
    assert deltas[0].prompt_logprobs == _scores(prompt)
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    assert [token for delta in deltas for token in delta.token_ids] == _output(count, prompt)
    assert (deltas[-1].finish_reason, deltas[-1].num_output_tokens) == (FinishReason.LENGTH, count)
    positions = [position for name, position in target.scored if name == deltas[0].request_id]
    assert positions == list(range(1, len(prompt)))


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 16, 21])
@pytest.mark.parametrize("prefill_tokens", [1, 2, 7, 8, 64])
def test_a_prompt_is_scored_in_any_chunks(prefill_tokens: int, length: int, max_tokens: int) -> None:
    """Bug guarded: the token after a chunk, which is the next chunk's first, is scored twice or never; max_tokens 0 samples a
    token or never ends; a prompt of one token, which has nothing to score, waits for its scores."""
    target = FaultyTarget()
    prompt = PROMPT[:length]
    deltas = list(_driver(target, prefill_tokens=prefill_tokens).generate([_request(prompt=prompt, max_tokens=max_tokens)]))
    _check(deltas, target, prompt, max_tokens)


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("lost_at", range(6))
@pytest.mark.parametrize("again", [0, 1, 2, 4])
def test_a_target_that_forgets_scores_nothing_twice(lost_at: int, again: int, max_tokens: int) -> None:
    """Bug guarded: a prefill that begins anew adds the scores of its first chunks a second time, or leaves a gap where chunks
    fall otherwise than before."""
    target = FaultyTarget(forgets=(lost_at, lost_at + again))
    _check(list(_driver(target).generate([_request(max_tokens=max_tokens)])), target, count=max_tokens)


@pytest.mark.parametrize("rounds", range(4))
def test_a_restarted_target_scores_nothing_twice(rounds: int) -> None:
    """Bug guarded: as above, when the router hears of the loss itself."""
    target = FaultyTarget()
    driver = _driver(target)
    driver.add(_request())
    deltas = [delta for _ in range(rounds) for delta in driver.step().deltas]
    target.lose_everything()
    driver.scheduler.forget_target()
    while driver.scheduler.running or driver.scheduler.waiting:
        deltas += driver.step().deltas
    _check(deltas, target)


def test_preempted_requests_keep_their_scores() -> None:
    """Bug guarded: a request that is preempted half way through its prompt, or after its first token, forgets or repeats its
    scores; a neighbour's rows are taken for its own."""
    target = FaultyTarget(kv_capacity_tokens=96, kv_block_size=16)
    driver = _driver(target, prefill_tokens=5)
    prompts = {name: tuple(range(start, start + 20)) for name, start in (("a", 10), ("b", 40), ("c", 60), ("d", 70))}
    deltas: dict[str, list[Delta]] = {name: [] for name in prompts}
    preempted = 0
    for name, prompt in prompts.items():
        driver.add(_request(name, prompt, max_tokens=30))
    while driver.scheduler.running or driver.scheduler.waiting:
        result = driver.step()
        preempted += result.report.num_preempted
        for delta in result.deltas:
            deltas[delta.request_id].append(delta)
    assert preempted
    for name, prompt in prompts.items():
        _check(deltas[name], target, prompt, 30)


def test_only_those_who_ask_are_scored() -> None:
    """Bug guarded: everybody's prefill pays for rows of logits that one request wants."""
    target = FaultyTarget()
    requests = [_request("scored"), _request("plain", prompt_logprobs=None)]
    deltas = list(_driver(target).generate(requests))
    assert {name for name, _ in target.scored} == {"scored"}
    assert all(delta.prompt_logprobs is None for delta in deltas if delta.request_id == "plain")


def test_a_request_that_goes_on_elsewhere_is_not_scored_again() -> None:
    """Bug guarded: a lane died after the first delta, which had the scores, and the next lane computes and sends them again."""
    target = FaultyTarget()
    deltas = list(_driver(target).generate([_request(output_ids=tuple(_output(2)))]))
    assert all(delta.prompt_logprobs is None for delta in deltas)
    assert not target.scored
    assert [token for delta in deltas for token in delta.token_ids] == _output(5)[2:]


@pytest.mark.parametrize("count", [0, 1])
def test_a_target_that_scores_too_few_fails_that_request_alone(count: int) -> None:
    """Bug guarded: a worker of another version leaves out scores: the answer has a hole, or the whole round fails."""

    class Careless(FaultyTarget):
        def verify(self, request: VerifyRequest) -> VerifyReply:
            reply = super().verify(request)
            verdicts = [
                msgspec.structs.replace(v, prompt_logprobs=v.prompt_logprobs[:count]) if v.prompt_logprobs else v
                for v in reply.verdicts
            ]
            return msgspec.structs.replace(reply, verdicts=tuple(verdicts))

    target = Careless()
    deltas = list(_driver(target).generate([_request("bad"), _request("good", prompt_logprobs=None)]))
    ends = {delta.request_id: delta for delta in deltas if delta.finish_reason is not None}
    assert ends["bad"].finish_reason is FinishReason.ERROR
    assert f"scored {count} of 8 tokens" in (ends["bad"].error or "")
    assert (ends["good"].finish_reason, ends["good"].num_output_tokens) == (FinishReason.LENGTH, 5)


def test_a_report_counts_the_prefill_of_a_request_that_samples_nothing() -> None:
    """Bug guarded: a request with max_tokens 0 missing in the metrics, or counted as a decoding one."""
    driver = _driver(FaultyTarget(), prefill_tokens=64)
    driver.add(_request(max_tokens=0))
    report = driver.step().report
    assert (report.num_prefill_tokens, report.num_finished) == (len(PROMPT), 1)
    assert (report.num_committed, report.batch_size) == (0, 0)
    assert not driver.scheduler.running


# --- the answer -------------------------------------------------------------------------------------------------------------


class Words:
    """One token per word of letters; 0 is BOS."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0, *(len(word) for word in text.split(" "))]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(("" if skip_special_tokens else "<s>") if i == 0 else " " + "x" * i for i in ids)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return str(ids)

    def __call__(self, text: str, **options: bool) -> Any:
        ends = [0, *(i for i, letter in enumerate(text) if letter == " "), len(text)]
        return {"offset_mapping": [(0, 0), *pairwise(ends)]}

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> str:
        raise NotImplementedError


MODEL = ServedModel(name="m", tokenizer=Words(), vocab_size=VOCAB, max_context=512, eos_token_ids=frozenset({99}))


def _answers(**fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the chunks of the same answer streamed, to a body of /v1/completions."""
    body = {"model": "m", "prompt": "xx xxx x", "echo": True, "logprobs": 1, "temperature": 0, "seed": 1, **fields}
    job = validate_completion(body, ApiConfig(), MODEL)
    assert isinstance(job.shape, CompletionShape)
    driver = _driver(FaultyTarget(), prefill_tokens=2)
    index = {request.request_id: i for i, request in enumerate(job.requests)}
    answer = Answer(job, MODEL)
    parts: list[list[Any]] = [[] for _ in job.requests]
    chunks = []
    for delta in driver.generate(job.requests):
        part = answer.feed(index[delta.request_id], delta)
        parts[index[delta.request_id]].append(part)
        chunks.append(answer.chunk(index[delta.request_id], part)["choices"][0])
    return answer.whole(parts), chunks


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("prompt", ["xx xxx x", [0, 2, 3, 1]])
def test_an_echo_is_scored_as_the_answer_is(prompt: Any, max_tokens: int) -> None:
    """Bug guarded: the first token of the prompt without its null, scores shifted by one token, offsets that do not point into
    the choice's text, prompt and answer in one list of the wrong length."""
    body, _ = _answers(prompt=prompt, max_tokens=max_tokens)
    choice = body["choices"][0]
    ids = [0, 2, 3, 1, *_output(max_tokens, (0, 2, 3, 1))]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [Words().decode([i], False) for i in ids]
    assert logprobs["token_logprobs"] == [None, *(-float(i) for i in range(1, len(ids)))]
    expected = [None, *({token: -float(i)} for i, token in enumerate(logprobs["tokens"]) if i)]
    assert logprobs["top_logprobs"] == expected
    text = prompt if isinstance(prompt, str) else Words().decode(prompt, True)
    assert choice["text"] == text + Words().decode(ids[4:], True)
    starts = [*logprobs["text_offset"], len(choice["text"])]
    pieces = [choice["text"][a:b] for a, b in pairwise(starts)]
    assert [len(piece) for piece in pieces[1:]] == [
        len(token) - (i == 0 and text[0] != " ") for i, token in enumerate(logprobs["tokens"][1:])
    ]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == max_tokens
    assert body["usage"]["prompt_tokens"] == 4


def test_a_streamed_echo_is_the_whole_one() -> None:
    """Bug guarded: a stream that repeats the prompt's logprobs in every chunk, or leaves them out."""
    body, chunks = _answers(max_tokens=9, n=2, prompt=["xx xxx x", "x xxxx"])
    assert len(body["choices"]) == 4
    for choice in body["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert len(own) > 1
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [value for chunk in own for value in chunk["logprobs"][key]] == values
    assert [choice["logprobs"]["token_logprobs"].count(None) for choice in body["choices"]] == [1] * 4
    assert not any(math.isnan(value) for value in body["choices"][0]["logprobs"]["token_logprobs"][1:])


def test_scores_that_are_missing_are_no_answer() -> None:
    """Bug guarded: an echo without the prompt's logprobs delivered as if it were complete."""
    body = {"model": "m", "prompt": [1, 2, 3], "echo": True, "logprobs": 0}
    answer = Answer(validate_completion(body, ApiConfig(), MODEL), MODEL)
    with pytest.raises(RuntimeError, match="a prompt of 3 tokens came with 0 logprobs"):
        answer.feed(0, Delta(request_id="r", token_ids=(5,), logprobs=(TokenLogprob(5, -1.0),)))
