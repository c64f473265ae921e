"""The HTTP application over fake lanes: in process where that shows the bug, on a real socket for disconnects and clients."""

import asyncio
import contextlib
import itertools
import json
import logging
import time

import httpx
import jinja2
import openai
import pytest
import torch
import uvicorn

from deployments.api import ApiState, build_http_app
from deployments.keys import KeySet
from deployments.openai import ServedModel
from engine.config import ApiConfig
from engine.drivers import AsyncDriver
from engine.errors import InvalidRequest, Overloaded
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import TableModel
from engine.text import TextStream
from engine.types import Delta, FinishReason, TokenLogprob

EOS = 257
TEXT = "Hello 👩‍👩‍👧‍👦, 日本語! The END is near."


class ByteTokenizer:
    """One token per byte; 257 is EOS."""

    chat_template = "yes"

    def encode(self, text, add_special_tokens):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens):
        special = "" if skip_special_tokens else "<eos>"
        return "".join(bytes(i for i in ids if i < 256).decode("utf-8", "replace")) + special * (EOS in ids)

    def convert_ids_to_tokens(self, ids):
        return f"<0x{ids:02X}>"

    def __call__(self, text, *, add_special_tokens, return_offsets_mapping):
        return {"offset_mapping": [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]}

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        if conversation[0]["content"] == "refuse me":
            raise jinja2.TemplateError("no such chat")
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)


TOKENIZER = ByteTokenizer()


def rounds(request, tokens, run=5):
    """What a router makes of a target that wants to say ``tokens``: ``run`` tokens per round, cut at the first rule to fire."""
    params, stream = request.params, TextStream.for_request(TOKENIZER, request)
    told, reason = [], None
    for num, token in enumerate(tokens, start=1):
        told.append(token)
        if token == EOS and not params.ignore_eos:
            reason = FinishReason.STOP
        else:
            stream.push(token)
            reason = FinishReason.STOP if stream.matched else FinishReason.LENGTH if num == params.max_tokens else None
        if reason or len(told) == run:
            logprobs = None if params.logprobs is None else tuple(logprob(i, params.logprobs) for i in told)
            yield Delta(
                request_id=request.request_id,
                token_ids=tuple(told),
                logprobs=logprobs,
                finish_reason=reason,
                stop_string=stream.matched,
                num_output_tokens=num,
                num_drafted=2 * num,
                num_accepted=num - 1,
            )
            told = []
        if reason:
            return


def logprob(token, num_top):
    top = ((token, -0.5), (33, float("-inf")), (34, -2.0))[:num_top]
    return TokenLogprob(token_id=token, logprob=-0.5, top=top)


class FakeLanes:
    """Answers with what ``say`` yields; knows what is running and what was cancelled."""

    def __init__(self, say=None):
        self.say = say or self.speak
        self.requests = []
        self.running = set()
        self.cancelled = []

    async def speak(self, request):
        for delta in rounds(request, [*TEXT.encode(), EOS]):
            yield delta

    async def generate(self, request):
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            async for delta in self.say(request):
                yield delta
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)


def make_app(lanes, *, config=None, ready=True, **state):
    async def status():
        if ready is None:
            raise RuntimeError("/secret/path")
        return {"ready": ready, "reason": None if ready else "no lane is ready", "targets": {"lane": {"path": "native"}}}

    async def metrics():
        return "# HELP x y\nx 1\n"

    async def controller():
        return {"depth": 3}

    async def dashboard():
        return {"lanes": []}

    model = ServedModel(name="m", tokenizer=TOKENIZER, vocab_size=300, max_context=4096, eos_token_ids=frozenset({EOS}))
    limits = config or ApiConfig()
    state = {"status": status, "metrics": metrics, "controller": controller, "dashboard": dashboard, **state}
    return build_http_app(ApiState(lanes=lanes, model=model, config=limits, **state))


def connect(lanes, **state):
    """A client that calls the application in this process."""
    transport = httpx.ASGITransport(make_app(lanes, **state))
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)


@contextlib.asynccontextmanager
async def listening(app):
    """The application on a real socket; gives its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def openai_client(lanes, **state):
    async with (
        listening(make_app(lanes, **state)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


def chat(**fields):
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def completion(**fields):
    return {"model": "m", "prompt": "hi", "max_tokens": 200, **fields}


BODIES = {"/v1/chat/completions": chat, "/v1/completions": completion}
ENDPOINTS = pytest.mark.parametrize("path", BODIES)


async def stream(client, path, **fields):
    """Raw events of a stream: parsed chunks, and [DONE] as it is."""
    reply = await client.post(path, json=BODIES[path](stream=True, **fields))
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.text.endswith("\n\n")
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n")[:-1] if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def text_of(choice):
    if "message" in choice:
        return choice["message"]["content"]
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


def gather(events, index=0):
    """Choice ``index`` of a stream: its text and its finish reasons."""
    choices = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(map(text_of, choices)), [c["finish_reason"] for c in choices]


def byte_table():
    """Logits [258, 258] of a model that says the alphabet on and on, and is a little unsure."""
    logits = torch.randn(258, 258, generator=torch.Generator().manual_seed(1))
    for letter in range(97, 123):
        logits[letter, 97 + (letter - 96) % 26] = 9.0
    return logits


class Inside:
    """Models in this process, as the driver of a lane knows them."""

    available = True
    prepares = False
    extends = False

    def __init__(self, model):
        self._model = model

    async def verify(self, request):
        return self._model.verify(request)

    async def propose(self, request):
        return self._model.propose(request)


@contextlib.asynccontextmanager
async def serving(target, draft=None, prefill_tokens=64):
    """A client of the application over a real lane: rounds, drafts and sampling, with tables for models."""
    target = TableModel(target, eos_token_ids=(EOS,))
    scheduler = Scheduler(target.info, FixedDepth(3), max_batch=8, prefill_tokens=prefill_tokens, max_waiting=8)
    source = Inside(TableModel(target.table if draft is None else draft, eos_token_ids=(EOS,)))
    driver = AsyncDriver(Inside(target), source, scheduler, TOKENIZER)
    task = asyncio.create_task(driver.run())
    try:
        async with connect(FakeLanes(driver.generate)) as client:
            yield client
    finally:
        task.cancel()


async def until(condition):
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen within 4 s")


# Streams


@ENDPOINTS
@pytest.mark.parametrize("run", [1, 2, 3, 8, 200])
async def test_a_stream_says_what_the_whole_says(path, run):
    """Guards: only the last token of a round, or all but the last round, reaches the client; characters cut in half."""

    async def say(request):
        for delta in rounds(request, [*TEXT.encode(), EOS], run):
            yield delta

    async with connect(FakeLanes(say)) as client:
        whole = (await client.post(path, json=BODIES[path]())).json()["choices"][0]
        text, reasons = gather(await stream(client, path))
    assert text == text_of(whole) == TEXT
    assert (reasons[-1], set(reasons[:-1])) == (whole["finish_reason"], {None} if len(reasons) > 1 else set())


@ENDPOINTS
async def test_the_frame_of_a_stream(path):
    """Guards: role in every delta, [DONE] missing, usage without being asked, chunks of one response with several ids."""
    async with connect(FakeLanes()) as client:
        events = await stream(client, path)
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1]]
    if path.startswith("/v1/chat"):
        assert [i for i, choice in enumerate(choices) if "role" in choice["delta"]] == [0]
    assert len({(event["id"], event["created"], event["model"]) for event in events[:-1]}) == 1
    assert all("usage" not in event for event in events[:-1])
    assert [i for i, choice in enumerate(choices) if "seed" in choice] == [0]


@ENDPOINTS
async def test_one_chunk_per_round(path):
    """Guards: a chunk per token, or rounds glued together: the policy is one round, one chunk."""
    async with connect(FakeLanes()) as client:
        events = await stream(client, path, logprobs=True if "chat" in path else 0, max_tokens=12)
    sizes = [
        len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])
        for logprobs in (event["choices"][0]["logprobs"] for event in events[:-1])
    ]
    assert sizes == [5, 5, 2]


@ENDPOINTS
async def test_usage_of_a_stream(path):
    """Guards: usage chunk missing, with choices, or counted in rounds; other chunks carry null."""
    async with connect(FakeLanes()) as client:
        events = await stream(client, path, stream_options={"include_usage": True}, max_tokens=12)
        whole = (await client.post(path, json=BODIES[path](max_tokens=12))).json()
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    prompt = whole["usage"]["prompt_tokens"]
    assert whole["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 12,
        "total_tokens": prompt + 12,
        "completion_tokens_details": {"accepted_prediction_tokens": 11, "rejected_prediction_tokens": 13},
    }


@ENDPOINTS
@pytest.mark.parametrize(
    ("fields", "status"),
    [({"n": 0}, 400), ({"model": "x"}, 404), ({"max_tokens": 5000}, 400), ({"temperature": -1}, 400)],
)
async def test_errors_before_a_stream_are_plain_json(path, fields, status):
    """Guards: a refusal inside a 200 stream, which clients take for an empty answer."""
    lanes = FakeLanes()
    async with connect(lanes) as client:
        reply = await client.post(path, json=BODIES[path](stream=True, **fields))
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json")
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert not lanes.requests


@ENDPOINTS
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    ("error", "status"),
    [(Overloaded("full", 2), 429), (InvalidRequest("bad", "prompt"), 400), (RuntimeError("/secret"), 500), (OSError("x"), 500)],
)
async def test_errors_of_a_lane_before_its_first_token(path, streaming, error, status):
    """Guards: a lane's refusal turned into a 200 stream, or its insides shown."""

    async def say(request):
        raise error
        yield

    async with connect(FakeLanes(say)) as client:
        reply = await client.post(path, json=BODIES[path](stream=streaming))
    assert (reply.status_code, reply.headers["content-type"]) == (status, "application/json")
    assert "secret" not in reply.text
    assert reply.headers.get("retry-after") == ("2" if status == 429 else None)


FAILURES = {
    "raise": (RuntimeError("/secret/path"), "internal_error"),
    "overload": (Overloaded("full"), "overloaded"),
    "lost": (ConnectionResetError("x"), "service_unavailable"),
    "error": (
        Delta(request_id="", token_ids=(), finish_reason=FinishReason.ERROR, error="logits are NaN"),
        "generation_failed",
    ),
    "cancelled": (Delta(request_id="", token_ids=(), finish_reason=FinishReason.CANCELLED), "service_unavailable"),
    "no end": (None, "service_unavailable"),
}


@ENDPOINTS
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_stream_that_breaks_does_not_look_finished(path, failure):
    """Guards: a broken stream that ends in finish_reason "stop" and [DONE]; a non-stream that returns half an answer as 200."""
    outcome, code = FAILURES[failure]

    async def say(request):
        yield Delta(request_id=request.request_id, token_ids=tuple(b"half"))
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            yield outcome

    async with connect(FakeLanes(say)) as client:
        events = await stream(client, path, stream_options={"include_usage": True})
        reply = await client.post(path, json=BODIES[path]())
    assert text_of(events[0]["choices"][0]) == "half"
    assert set(events[-1]) == {"error"}
    assert events[-1]["error"]["code"] == reply.json()["error"]["code"] == code
    assert len(events) == 2
    assert reply.status_code >= 429
    assert "secret" not in json.dumps(events) + reply.text


@ENDPOINTS
async def test_a_silent_stream_is_kept_alive(path):
    """Guards: proxies closing a stream that waits in a queue or for a long prefill."""

    async def say(request):
        await asyncio.sleep(0.35)
        for delta in rounds(request, [*b"late", EOS], 2):
            yield delta
            await asyncio.sleep(0.15)

    async with connect(FakeLanes(say), heartbeat_s=0.1) as client:
        reply = await client.post(path, json=BODIES[path](stream=True))
    assert reply.text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert reply.text.count(": keep-alive") >= 4
    assert reply.text.endswith("data: [DONE]\n\n")


# Text, stop strings, logprobs


@ENDPOINTS
@pytest.mark.parametrize(
    ("fields", "text", "reason", "num_tokens"),
    [
        ({}, TEXT, "stop", len(TEXT.encode()) + 1),
        ({"stop": "END"}, TEXT[: TEXT.index("END")], "stop", len(TEXT[: TEXT.index("END") + 3].encode())),
        ({"stop": ["is near", "END is"]}, TEXT[: TEXT.index("END")], "stop", len(TEXT[: TEXT.index("END") + 6].encode())),
        ({"stop": "lo", "max_tokens": 5}, "Hel", "stop", 5),
        ({"stop": "lo", "max_tokens": 4}, "Hell", "length", 4),
        ({"stop": "lo", "min_tokens": 6, "max_tokens": 7}, "Hello \ufffd", "length", 7),
        ({"max_tokens": 1}, "H", "length", 1),
    ],
)
async def test_where_an_answer_ends(path, fields, text, reason, num_tokens):
    """Guards: text, logprobs or usage beyond a stop string, EOS or the cap; "length" reported where a stop came first."""
    logprobs = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}
    async with connect(FakeLanes()) as client:
        body = (await client.post(path, json=BODIES[path](**fields, **logprobs))).json()
        events = await stream(client, path, **fields, **logprobs)
    choice = body["choices"][0]
    assert (text_of(choice), choice["finish_reason"]) == (text, reason)
    assert gather(events)[0] == text
    assert gather(events)[1][-1] == reason
    assert body["usage"]["completion_tokens"] == num_tokens
    key = "content" if "chat" in path else "tokens"
    assert len(choice["logprobs"][key]) == num_tokens
    assert sum(len(event["choices"][0]["logprobs"][key]) for event in events[:-1]) == num_tokens


async def test_chat_logprobs():
    """Guards: the completions shape in chats, a partial character without its bytes, -Infinity in JSON."""
    async with connect(FakeLanes()) as client:
        body = (await client.post("/v1/chat/completions", json=chat(logprobs=True, top_logprobs=2))).json()
        alone = (await client.post("/v1/chat/completions", json=chat(logprobs=True, max_tokens=1))).json()
    entries = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == TEXT
    assert entries[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.5, "bytes": [72]},
            {"token": "!", "logprob": -9999.0, "bytes": [33]},
        ],
    }
    assert (entries[6]["token"], entries[-1]["token"]) == ("bytes:\\xf0", "<eos>")
    assert alone["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_completion_logprobs():
    """Guards: the chat shape in completions; offsets that do not point into the text, also over chunks."""
    async with connect(FakeLanes()) as client:
        body = (await client.post("/v1/completions", json=completion(logprobs=1))).json()
        events = await stream(client, "/v1/completions", logprobs=1)
    logprobs = body["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["top_logprobs"][0] == {"H": -0.5}
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[:6] == [0, 1, 2, 3, 4, 5]
    position = TEXT.index("!")
    assert [TEXT[offset] for token, offset in zip(logprobs["tokens"], offsets, strict=True) if token == "!"] == ["!"]
    assert position in offsets
    assert [offset for event in events[:-1] for offset in event["choices"][0]["logprobs"]["text_offset"]] == offsets


async def test_missing_logprobs_are_an_error():
    """Guards: logprobs that are null or too few on some path, delivered as if complete."""

    async def say(request):
        yield Delta(request_id=request.request_id, token_ids=(65,), finish_reason=FinishReason.LENGTH)

    async with connect(FakeLanes(say)) as client:
        assert (await client.post("/v1/completions", json=completion(logprobs=0))).status_code == 500


async def test_echo():
    """Guards: echo accepted and ignored; max_tokens 0 sent to a lane."""
    lanes = FakeLanes()
    async with connect(lanes) as client:
        body = (await client.post("/v1/completions", json=completion(echo=True, max_tokens=3))).json()
        assert body["choices"][0]["text"] == "hiHel"
        assert gather(await stream(client, "/v1/completions", echo=True, max_tokens=3))[0] == "hiHel"
        num_requests = len(lanes.requests)
        body = (await client.post("/v1/completions", json=completion(echo=True, max_tokens=0))).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("hi", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert len(lanes.requests) == num_requests


async def test_echo_with_logprobs():
    """Guards: OpenAI's legacy form of a scored prompt missed: null first, offsets through prompt and answer, the same numbers
    streamed or not and whatever the drafts do; max_tokens 0 that samples a token, or is answered without asking the model."""
    table = byte_table()
    async with serving(table, prefill_tokens=3) as client:
        for prompt in ("the a", list(b"the a"), ["the a", "b"]):
            fields = {"prompt": prompt, "echo": True, "logprobs": 2, "temperature": 0}
            none, some = [
                (await client.post("/v1/completions", json=completion(**fields, max_tokens=count))).json() for count in (0, 20)
            ]
            events = await stream(client, "/v1/completions", **fields, max_tokens=20)
            logprobs = some["choices"][0]["logprobs"]
            text = some["choices"][0]["text"]
            assert text[:5] == none["choices"][0]["text"] == "the a"
            assert (none["choices"][0]["finish_reason"], none["usage"]["completion_tokens"]) == ("length", 0)
            assert none["choices"][0]["logprobs"] == {name: values[:5] for name, values in logprobs.items()}
            assert "".join(logprobs["tokens"]) == text
            assert len(text) == 25
            assert logprobs["text_offset"] == list(range(25))
            exact = table.log_softmax(dim=-1)
            expected = [float(exact[ord(a), ord(b)]) for a, b in itertools.pairwise(text)]
            assert logprobs["token_logprobs"] == [None, *expected]
            assert logprobs["top_logprobs"][0] is None
            assert all(text[i] in top and len(top) in (2, 3) for i, top in enumerate(logprobs["top_logprobs"]) if i)
            own = [c for e in events[:-1] for c in e["choices"] if c["index"] == 0]
            assert [value for c in own for value in c["logprobs"]["token_logprobs"]] == logprobs["token_logprobs"]
            assert "".join(c["text"] for c in own) == text


async def test_logits_that_are_no_numbers_fail_one_request():
    """Guards: a token made from NaN, a round that fails for everybody, or a half answer that looks complete (case L31)."""
    table = byte_table()
    sick, healthy = "mnop", "abcd"
    table[ord("r")] = float("nan")
    fields = {"temperature": 0, "max_tokens": 12}
    async with serving(table) as client:
        alone = (await client.post("/v1/completions", json=completion(prompt=healthy, **fields))).json()["choices"][0]
        failed, scored, streamed, beside = await asyncio.gather(
            client.post("/v1/completions", json=completion(prompt=sick, **fields)),
            client.post("/v1/completions", json=completion(prompt="qrs", echo=True, logprobs=0, **fields)),
            stream(client, "/v1/completions", prompt=sick, **fields),
            client.post("/v1/completions", json=completion(prompt=healthy, **fields)),
        )
        after = (await client.post("/v1/completions", json=completion(prompt=healthy, **fields))).json()["choices"][0]
    for error in (failed.json()["error"], scored.json()["error"], streamed[-1]["error"]):
        assert error["code"] == "generation_failed"
        assert "logits are not finite" in error["message"]
    assert (failed.status_code, scored.status_code) == (500, 500)
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) in ("q", "qr")
    assert alone["text"] == beside.json()["choices"][0]["text"] == after["text"] == "efghijklmnopqrstuvwx"[:12]


async def test_draft_logits_that_are_no_numbers_change_nothing():
    """Guards: a draft token made from NaN, or a draft's failure that reaches the request (case L31)."""
    broken = byte_table()
    broken[ord("g")] = float("nan")
    fields = {"prompt": "ab", "temperature": 0, "max_tokens": 12}
    async with serving(byte_table(), broken) as client:
        reply = await client.post("/v1/completions", json=completion(**fields))
    assert reply.json()["choices"][0]["text"] == "cdefghijklmn"
    assert reply.json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0


# Several choices


async def repeat_prompt(request):
    """Says its own prompt and seed, slowly for even choices."""
    words = bytes(request.prompt_ids) + str(request.params.seed % 1009).encode()
    for delta in rounds(request, [*words, EOS], 2):
        await asyncio.sleep(0.002 * (request.params.seed % 2))
        yield delta


async def test_choices_are_prompt_major():
    """Guards: choices lost, wrongly indexed in streams, or answering another prompt."""
    fields = {"prompt": ["aa", "bb"], "n": 2, "seed": 6}
    async with connect(FakeLanes(repeat_prompt)) as client:
        body = (await client.post("/v1/completions", json=completion(**fields))).json()
        events = await stream(client, "/v1/completions", **fields)
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [text[:2] for text in texts] == ["aa", "aa", "bb", "bb"]
    assert texts[0] != texts[1]
    assert [gather(events, index)[0] for index in range(4)] == texts
    assert all(gather(events, index)[1][-1] == "stop" for index in range(4))
    assert all(gather(events, index)[1].count("stop") == 1 for index in range(4))
    assert body["usage"]["prompt_tokens"] == 4
    assert body["choices"][0]["seed"] == body["choices"][2]["seed"] == 6


async def test_choices_run_side_by_side():
    """Guards: n choices made one after the other."""
    everyone = asyncio.Barrier(4)

    async def say(request):
        await everyone.wait()
        for delta in rounds(request, [65, EOS]):
            yield delta

    async with connect(FakeLanes(say)) as client:
        reply = await asyncio.wait_for(client.post("/v1/chat/completions", json=chat(n=4)), 5)
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("streaming", [True, False])
async def test_one_failed_choice_cancels_the_others(streaming):
    """Guards: choices that go on generating for a response that has failed already."""

    async def say(request):
        yield Delta(request_id=request.request_id, token_ids=(65,))
        if request.request_id.endswith("-1"):
            raise RuntimeError("x")
        await asyncio.sleep(60)

    lanes = FakeLanes(say)
    async with connect(lanes) as client:
        reply = await asyncio.wait_for(client.post("/v1/completions", json=completion(n=3, stream=streaming)), 5)
    assert "internal_error" in reply.text
    assert not lanes.running
    assert len(lanes.cancelled) == 2


async def test_a_finished_request_is_not_cancelled():
    """Guards: abort traffic for requests that are complete."""
    lanes = FakeLanes()
    async with connect(lanes) as client:
        await client.post("/v1/completions", json=completion(n=3))
        await stream(client, "/v1/completions", n=3)
    assert (lanes.cancelled, len(lanes.requests)) == ([], 6)


# Clients that leave


async def endless(request):
    while True:
        yield Delta(request_id=request.request_id, token_ids=(65,))
        await asyncio.sleep(0.02)


async def silent(request):
    await asyncio.sleep(60)
    yield Delta(request_id=request.request_id, token_ids=(65,))


async def one_then_silent(request):
    yield Delta(request_id=request.request_id, token_ids=(65,))
    await asyncio.sleep(60)


@ENDPOINTS
@pytest.mark.parametrize("say", [endless, silent, one_then_silent])
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_cancels_its_request(path, say, streaming):
    """Guards: a disconnect that is noticed only by the next token, or for streams only: the model works for nobody."""
    lanes = FakeLanes(say)
    async with listening(make_app(lanes)) as url, httpx.AsyncClient(base_url=url) as client:
        call = asyncio.create_task(client.post(path, json=BODIES[path](stream=streaming, n=2)))
        await until(lambda: len(lanes.running) == 2)
        await asyncio.sleep(0.1)
        call.cancel()
        await until(lambda: len(lanes.cancelled) == 2)
        assert not lanes.running


async def test_a_client_that_does_not_read_is_noticed_too(monkeypatch):
    """Guards: a full socket buffer hiding the disconnect while the process collects text without bound."""

    async def say(request):
        for _ in range(10_000):
            yield Delta(request_id=request.request_id, token_ids=(65,))
            told[0] += 1

    told = [0]
    lanes = FakeLanes(say)
    monkeypatch.setattr(ByteTokenizer, "decode", lambda self, ids, skip_special_tokens: "x" * 100_000 * len(ids))
    async with listening(make_app(lanes)) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(completion(stream=True)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await until(lambda: told[0] > 64)
        await asyncio.sleep(1)
        held = told[0]
        await asyncio.sleep(0.3)
        assert told[0] == held < 1000
        writer.transport.abort()
        await until(lambda: lanes.cancelled)


# Limits


@ENDPOINTS
async def test_a_timeout_is_an_answer_and_cancels(path):
    """Guards: a timeout answered with 500, not applied to streams, or leaving the request running."""
    for say in (silent, one_then_silent):
        lanes = FakeLanes(say)
        async with connect(lanes, request_timeout_s=0.2, heartbeat_s=0.15) as client:
            reply = await client.post(path, json=BODIES[path]())
            streamed = await client.post(path, json=BODIES[path](stream=True))
        assert (reply.status_code, reply.json()["error"]["code"]) == (408, "request_timeout")
        assert json.loads(streamed.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert len(lanes.cancelled) == 2


async def test_a_stream_that_keeps_talking_outlives_the_timeout():
    """Guards: long answers cut because the limit counts from the start."""

    async def say(request):
        for delta in rounds(request, [*b"abcdef", EOS], 1):
            await asyncio.sleep(0.2)
            yield delta

    async with connect(FakeLanes(say), request_timeout_s=1.0) as client:
        assert (await stream(client, "/v1/completions"))[-1] == "[DONE]"
        assert (await client.post("/v1/completions", json=completion())).status_code == 408


BAD_BODIES = [
    b'{"a":',
    b"[]",
    b"null",
    b"1",
    b"",
    b'{"a": "\xff"}',
    b"[" * 5000,
    b'{"prompt": "\\ud800"}',
    '{"a":1}'.encode("utf-16"),
]


@ENDPOINTS
@pytest.mark.parametrize("body", BAD_BODIES)
async def test_bad_json(path, body):
    """Guards: malformed bodies answered with 500."""
    async with connect(FakeLanes()) as client:
        reply = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
)
async def test_content_types(headers, status):
    """Guards: a form taken for JSON, or a charset parameter refused."""
    async with connect(FakeLanes()) as client:
        reply = await client.post("/v1/completions", content=json.dumps(completion()).encode(), headers=headers)
    assert reply.status_code == status


HUGE = pytest.mark.parametrize("length", ["content-length: 52428800", "transfer-encoding: chunked"])


@HUGE
async def test_huge_bodies_are_refused_for_everybodys_good(length):
    """Guards: a chunked body dodges the limit; a large upload blocks everybody else or breaks the client's connection."""

    async def body():
        for _ in range(50):
            yield b" " * (1 << 20)

    headers = dict([length.split(": ")], **{"content-type": "application/json"})
    async with listening(make_app(FakeLanes())) as url, httpx.AsyncClient(base_url=url) as client:
        reply, health = await asyncio.gather(
            client.post("/v1/completions", content=body(), headers=headers), client.get("/health", timeout=2)
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
        assert health.status_code == 200
        assert (await client.post("/v1/completions", json=completion())).status_code == 200


@HUGE
async def test_huge_bodies_are_refused_early(length):
    """Guards: a body that is read to its end before anyone looks at its length."""
    async with listening(make_app(FakeLanes(), config=ApiConfig(max_body_bytes=1024))) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
        writer.write(head.encode() + b"401\r\n" + b" " * 1025)
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


async def test_a_body_at_the_limit_is_accepted():
    """Guards: an off-by-one at the limit; large bodies prepared in a thread behave like small ones."""
    body = json.dumps(completion(prompt="x" * 3000, user="y" * 3000)).encode()
    for limit, status in ((len(body), 200), (len(body) - 1, 413)):
        async with connect(FakeLanes(), config=ApiConfig(max_body_bytes=limit)) as client:
            reply = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == status


async def test_an_overlong_prompt_hurts_nobody_else():
    """Guards: one over-long prompt takes the service down."""
    async with connect(FakeLanes()) as client:
        reply = await client.post("/v1/completions", json=completion(prompt="x" * 50_000))
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await client.post("/v1/completions", json=completion())).status_code == 200


async def test_a_slow_tokenizer_does_not_block_the_loop(monkeypatch):
    """Guards: tokenising a long prompt on the event loop, so that health checks and streams stand still."""
    encode = ByteTokenizer.encode
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *args, **kwargs: (time.sleep(1), encode(*args, **kwargs))[1])
    async with connect(FakeLanes()) as client:
        call = client.post("/v1/completions", json=completion(prompt="x" * 3000, user="y" * 3000))
        started = time.perf_counter()
        job = asyncio.create_task(call)
        await asyncio.sleep(0.1)
        assert (await client.get("/health")).status_code == 200
        assert time.perf_counter() - started < 0.8
        assert (await job).status_code == 200


# Everything else


async def test_models():
    """Guards: clients that list models first find nothing."""
    async with connect(FakeLanes()) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/m")).json()
        missing = await client.get("/v1/models/a/b")
    assert listed == {"object": "list", "data": [one]}
    assert (one["id"], one["object"], one["max_model_len"]) == ("m", "model", 4096)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_health_tells_the_truth():
    """Guards: ready while no lane is; liveness that depends on the model; a status that fails as a 500 with insides."""
    for ready, status in ((True, 200), (False, 503), (None, 503)):
        async with connect(FakeLanes(), ready=ready) as client:
            health = await client.get("/health")
            assert (health.status_code, health.json()["ready"]) == (status, ready is True)
            assert bool(health.json()["reason"]) != bool(ready)
            assert "secret" not in health.text
            assert (await client.get("/livez")).status_code == 200


async def test_operations():
    """Guards: metrics that Prometheus refuses for their content type."""
    async with connect(FakeLanes()) as client:
        metrics = await client.get("/metrics")
        assert (await client.get("/controller")).json() == {"depth": 3}
    assert metrics.text == "# HELP x y\nx 1\n"
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_dashboard():
    """Guards: a page that a proxy keeps or a frame holds, or that may run what is not its own; data without the times.

    Three tokens come in rounds of two and one: one time to first token, and one between tokens.
    """

    async def say(request):
        for delta in rounds(request, [65, 66, 67], run=2):
            yield delta

    async with connect(FakeLanes(say)) as client:
        page = await client.get("/dashboard")
        await client.post("/v1/completions", json=completion(max_tokens=3, prompt="a secret phrase"))
        data = await client.get("/dashboard/data")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    told = data.json()
    assert told["model"] == {"name": "m", "has_chat": True}
    assert [sum(count for _, count in told["latency"][kind]) for kind in ("ttft", "itl")] == [1, 1]
    assert told["lanes"] == []
    assert "secret" not in data.text


@ENDPOINTS
async def test_origins_in_a_stream(path):
    """Guards: origins that the endpoint's own shape of chunk leaves out; chunks of others that hold them."""

    async def say(request):
        yield Delta(request_id=request.request_id, token_ids=(65,))
        yield Delta(
            request_id=request.request_id, token_ids=(66, 67), depth=3, num_accepted=1, finish_reason=FinishReason.LENGTH
        )

    async with connect(FakeLanes(say)) as client:
        events = await stream(client, path, speculation={"report_origins": True})
        plain = await stream(client, path)
    told = [c["speculation"]["tokens"] for e in events if e != "[DONE]" for c in e["choices"]]
    assert [[(token["text"], token["origin"]) for token in tokens] for tokens in told] == [
        [("A", "target")],
        [("B", "draft"), ("C", "recovery")],
    ]
    assert gather(events) == gather(plain)
    assert all("speculation" not in c for e in plain if e != "[DONE]" for c in e["choices"])


async def test_unknown_routes_and_methods():
    """Guards: the framework's own error shape."""
    async with connect(FakeLanes()) as client:
        for reply, status in ((await client.get("/nothing"), 404), (await client.get("/v1/completions"), 405)):
            assert reply.status_code == status
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def routes(app):
    return [(method, route.path) for route in app.routes for method in route.methods]


async def test_keys_guard_every_route():
    """Guards: a key checked on some routes only; new routes open by default."""
    app = make_app(FakeLanes(), api_keys=KeySet.of("good", "other"))
    found = routes(app)
    assert len(found) >= 8
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for method, path in [*found, ("GET", "/nothing"), ("GET", "/docs")]:
            for key in (None, "Bearer bad", "good", "Bearer ", "Basic good", "Bearer gööd"):
                headers = {} if key is None else {"authorization": key.encode()}
                reply = await client.request(method, path, headers=headers)
                open_to_all = path in {"/health", "/livez", "/dashboard"}
                assert (reply.status_code == 401) != open_to_all, (path, key)
                assert open_to_all or reply.json()["error"]["code"] == "invalid_api_key"
            for key in ("good", "other"):
                reply = await client.request(method, path, headers={"authorization": f"Bearer {key}"})
                assert reply.status_code != 401


async def test_health_tells_strangers_whether_it_is_ready_and_no_more():
    """Guards: kernels, devices and process ids for everybody who reaches the port; a probe that needs a key."""
    app = make_app(FakeLanes(), api_keys=KeySet.of("good"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        strangers = await client.get("/health", headers={"authorization": "Bearer bad"})
        known = await client.get("/health", headers={"authorization": "Bearer good"})
    assert strangers.status_code == known.status_code == 200
    assert strangers.json().keys() == {"ready", "reason"}
    assert known.json().keys() > strangers.json().keys()


async def test_request_ids():
    """Guards: an answer that cannot be found in the logs; a header that lets callers write lines into them."""
    async with connect(FakeLanes()) as client:
        replies = [
            await client.get("/livez"),
            await client.get("/x"),
            await client.post("/v1/completions", json=completion(n=0)),
        ]
        replies.append(await client.post("/v1/completions", json=completion(stream=True)))
        assert len({reply.headers["x-request-id"] for reply in replies}) == 4
        for given, kept in (("my-id.1", True), ("a b", False), ("x" * 200, False)):
            reply = await client.get("/livez", headers={"x-request-id": given})
            assert (reply.headers["x-request-id"] == given) is kept
        reply = await client.get("/livez", headers={"x-request-id": "a b"})
        assert reply.headers["x-request-id"] == "a_b"


async def test_the_id_travels_with_the_request():
    """Guards: logs of other processes that cannot be joined with the answer; and a second id where the server adds its own."""
    lanes = FakeLanes()
    async with connect(lanes, answers_request_id=False, trace_parent=lambda: "00-1-2-01") as client:
        reply = await client.post("/v1/completions", json=completion(n=2), headers={"x-request-id": "mine"})
        assert "x-request-id" not in reply.headers
    assert [(request.log_id, request.trace_parent) for request in lanes.requests] == [("mine", "00-1-2-01")] * 2
    assert len({request.request_id for request in lanes.requests}) == 2


async def test_failures_are_logged_and_not_shown(caplog):
    """Guards: a 500 without a trace in the log, or with one in the answer."""

    async def say(request):
        raise RuntimeError("secret detail")
        yield

    with caplog.at_level(logging.ERROR):
        async with connect(FakeLanes(say)) as client:
            reply = await client.post("/v1/completions", json=completion())
    assert "secret detail" in caplog.text
    assert "secret" not in reply.text
    assert "Traceback" not in reply.text


# OpenAI's own client


async def test_openai_client_chat():
    """Guards: an answer that OpenAI's types refuse, or whose fields land elsewhere."""
    messages = [{"role": "user", "content": "hi"}]
    async with openai_client(FakeLanes()) as client:
        whole = await client.chat.completions.create(model="m", messages=messages, seed=9, logprobs=True, top_logprobs=1)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="m", messages=messages, stream=True, logprobs=True, stream_options={"include_usage": True}, stop=["END"]
            )
        ]
        async with client.chat.completions.stream(model="m", messages=messages) as helper:
            final = await helper.get_final_completion()
    type(whole).model_validate(whole.model_dump(), strict=True)
    [type(chunk).model_validate(chunk.model_dump(), strict=True) for chunk in chunks]
    assert whole.id.startswith("chatcmpl-")
    assert (whole.object, chunks[0].object) == ("chat.completion", "chat.completion.chunk")
    assert (whole.choices[0].message.content, whole.choices[0].message.role) == (TEXT, "assistant")
    assert (whole.choices[0].finish_reason, whole.choices[0].seed) == ("stop", 9)
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].bytes == [72]
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens == whole.usage.completion_tokens - 1
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT.partition("END")[0]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-2:] == [None, "stop"]
    assert chunks[-1].usage.total_tokens > 0
    assert final.choices[0].message.content == TEXT


async def test_openai_client_completions():
    """Guards: as above, for the older endpoint."""
    async with openai_client(FakeLanes()) as client:
        whole = await client.completions.create(model="m", prompt=["a", "b"], logprobs=2, max_tokens=200)
        streamed = await client.completions.create(model="m", prompt="a", stream=True, logprobs=0, max_tokens=200)
        chunks = [chunk async for chunk in streamed]
        assert [model.id async for model in client.models.list()] == [(await client.models.retrieve("m")).id] == ["m"]
    [type(body).model_validate(body.model_dump(), strict=True) for body in (whole, chunks[-1])]
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert whole.id.startswith("cmpl-")
    assert [choice.text for choice in whole.choices] == [TEXT, TEXT]
    assert "".join(whole.choices[0].logprobs.tokens[:5]) == "Hello"
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_openai_client_errors():
    """Guards: errors that the client cannot tell apart, so that it retries the hopeless and not the retryable."""

    async def full(request):
        raise Overloaded("the queue is full", 3)
        yield

    async def breaks(request):
        yield Delta(request_id=request.request_id, token_ids=(65,))
        raise ConnectionResetError

    async with openai_client(FakeLanes(full)) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="m", prompt="a", temperature=9)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "refuse me"}])
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="x", prompt="a", stream=True)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model="m", prompt="a", stream=True)
        assert limited.value.response.headers["retry-after"] == "3"
    async with openai_client(FakeLanes(breaks)) as client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="m", prompt="a")
        with pytest.raises(openai.APIError, match="not reachable"):
            [chunk async for chunk in await client.completions.create(model="m", prompt="a", stream=True)]
    async with openai_client(FakeLanes(), api_keys=KeySet.of("z")) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
