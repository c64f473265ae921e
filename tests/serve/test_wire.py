"""The streams between processes: what arrives, what is refused, and what a broken peer can do (nothing)."""

import asyncio
import contextlib
import datetime
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments import wire
from deployments.wire import (
    PROTOCOL_VERSION,
    WINDOW,
    Answers,
    CallFailed,
    Leaving,
    Tls,
    Unreachable,
    WireClient,
    WireError,
    WireServer,
    decode,
    read_tls,
)
from engine.config import StreamsConfig
from engine.errors import ConfigError, InvalidRequest, Overloaded
from engine.types import Delta, GenerateRequest, SamplingParams, VerifyItem, VerifyReply, VerifyRequest

SECRET = "right"
LIMIT = 4096


ERRORS = {
    -1: RuntimeError("the model broke"),
    -2: InvalidRequest("top_k is wrong", "top_k"),
    -3: Overloaded("full", retry_after_s=7.5),
}


class Echo:
    """Answers a verify with its own round id; slow, failing or silent on demand. Counts up to max_tokens in a stream."""

    def __init__(self) -> None:
        self.num_made = 0
        self.left = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[int] = []
        self.waiting = asyncio.Event()

    async def verify(self, body: bytes, caller: str) -> VerifyReply:
        request = decode(body, VerifyRequest)
        self.seen.append(request.round_id)
        if request.round_id < 0:
            raise ERRORS[request.round_id]
        if request.round_id >= 1000:
            self.waiting.set()
            await self.gate.wait()
        return VerifyReply(round_id=request.round_id, verdicts=(), step_time_s=100.0)

    async def count(self, body: bytes, caller: str, answers: Answers) -> None:
        request = decode(body, GenerateRequest)
        if request.request_id == "break":
            raise RuntimeError("the model broke")
        try:
            for number in range(request.params.max_tokens):
                self.num_made += 1
                await answers.put(Delta(request_id=request.request_id, token_ids=(number,)))
                if request.request_id == "wait":
                    self.waiting.set()
                    await self.gate.wait()
        finally:
            self.left.set()


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def server(echo: Echo) -> AsyncIterator[tuple[WireServer, str]]:
    server = WireServer({"verify": echo.verify}, SECRET, streams={"count": echo.count})
    address = await server.start("127.0.0.1")
    yield server, address
    await server.stop()


@pytest.fixture
async def client(server: tuple[WireServer, str]) -> AsyncIterator[WireClient]:
    client = WireClient(server[1], SECRET)
    yield client
    await client.close()


async def ask(client: WireClient, round_id: int, timeout_s: float = 10.0) -> int:
    items = (VerifyItem(sequence_id="s", base_length=3, tokens=(1,), draft=(2, 3)),)
    reply = await client.call("verify", VerifyRequest(round_id=round_id, items=items), VerifyReply, timeout_s)
    return reply.round_id


def counting(client: WireClient, num: int, name: str = "r") -> AsyncGenerator[Delta]:
    request = GenerateRequest(request_id=name, prompt_ids=(1,), params=SamplingParams(max_tokens=num))
    return client.stream("count", request, Delta)


async def count(client: WireClient, num: int, name: str = "r") -> list[tuple[str, int]]:
    return [(delta.request_id, delta.token_ids[0]) async for delta in counting(client, num, name)]


def numbers(num: int, name: str = "r") -> list[tuple[str, int]]:
    return [(name, number) for number in range(num)]


# --- calls with one answer --------------------------------------------------------------------------------------------------


async def test_answers_find_their_calls(client: WireClient, echo: Echo) -> None:
    """Guards against answers that are handed out in the order of arrival: the slow call is overtaken."""
    echo.gate.clear()
    slow = asyncio.create_task(ask(client, 1000))
    assert await asyncio.gather(*(ask(client, n) for n in range(50))) == list(range(50))
    echo.gate.set()
    assert await slow == 1000


async def test_a_late_answer_is_dropped(client: WireClient, echo: Echo) -> None:
    """Guards against the answer of a round that was given up being taken for the next round's."""
    echo.gate.clear()
    with pytest.raises(WireError, match="within"):
        await ask(client, 1000, timeout_s=0.05)
    echo.gate.set()
    assert await ask(client, 7) == 7


async def test_a_wrong_secret_is_refused(server: tuple[WireServer, str], echo: Echo) -> None:
    """Guards against strangers who reach the port: nothing of theirs gets to the model."""
    stranger = WireClient(server[1], "wrong")
    with pytest.raises(WireError, match="secret"):
        await ask(stranger, 1)
    with pytest.raises(WireError, match="secret"):
        await count(stranger, 1)
    assert (echo.seen, echo.num_made) == ([], 0)
    assert server[0].num_refused == 2


async def test_a_failing_handler_costs_one_call(client: WireClient) -> None:
    """Guards against a stream that ends because one round failed."""
    with pytest.raises(WireError, match="the model broke"):
        await ask(client, -1)
    with pytest.raises(WireError, match="unknown call"):
        await client.call("vrfy", VerifyRequest(round_id=1, items=()), VerifyReply, 10)
    assert await ask(client, 2) == 2


async def test_a_server_that_dies_fails_the_calls_in_flight_and_a_new_one_is_found(echo: Echo) -> None:
    """Guards against callers that wait for ever, and against clients that never connect again."""
    first = WireServer({"verify": echo.verify}, SECRET)
    client = WireClient(await first.start("127.0.0.1"), SECRET)
    echo.gate.clear()
    waiting = asyncio.create_task(ask(client, 1000))
    await echo.waiting.wait()
    await first.stop()
    with pytest.raises(WireError):
        await waiting
    with pytest.raises(WireError):
        await ask(client, 1)
    second = WireServer({"verify": echo.verify}, SECRET)
    client = WireClient(await second.start("127.0.0.1"), SECRET)
    assert await ask(client, 2) == 2
    await client.close()
    await second.stop()


async def test_errors_of_a_handler_keep_their_type(client: WireClient) -> None:
    """Bug guarded: a request that is wrong, or comes to a full lane, is answered like a lane that broke."""
    with pytest.raises(InvalidRequest, match="top_k is wrong") as invalid:
        await ask(client, -2)
    with pytest.raises(Overloaded, match="full") as overloaded:
        await ask(client, -3)
    with pytest.raises(CallFailed) as failed:
        await ask(client, -1)
    assert (invalid.value.field, overloaded.value.retry_after_s, failed.value.kind) == ("top_k", 7.5, "RuntimeError")


async def test_a_deadline_during_a_write_costs_one_call(client: WireClient, echo: Echo) -> None:
    """Bug guarded: gRPC ends the whole stream when a task is cancelled in the middle of a write."""
    echo.gate.clear()
    other = asyncio.create_task(ask(client, 1000))
    await echo.waiting.wait()
    items = (VerifyItem(sequence_id="s", base_length=0, tokens=tuple(range(1_000_000))),)
    late = [client.call("verify", VerifyRequest(round_id=1, items=items), VerifyReply, 0.001) for _ in range(8)]
    assert all(isinstance(error, WireError) for error in await asyncio.gather(*late, return_exceptions=True))
    echo.gate.set()
    assert await other == 1000


async def test_the_client_counts(client: WireClient) -> None:
    """Bug guarded: the time of the model counted as time on the way, or bytes of answers left out."""
    await ask(client, 1)
    counters = client.counters
    assert (counters.calls, counters.hops, counters.failed) == (1, 1, 0)
    assert counters.hop_time_s < 0, "the answer claims a step of 100 s, which is not time on the way"
    sent, received = counters.bytes_sent, counters.bytes_received
    assert sent > received > 0
    await count(client, 3)
    assert (counters.calls, counters.hops) == (2, 1)
    assert counters.bytes_sent > sent
    assert counters.bytes_received > received
    with pytest.raises(CallFailed):
        await ask(client, -1)
    assert (counters.calls, counters.failed) == (3, 1)


# --- calls with a stream of answers -----------------------------------------------------------------------------------------


async def test_streams_share_a_connection(client: WireClient) -> None:
    """Bug guarded: answers of one request in another's stream, lost, or out of order, also beyond the window."""
    lengths = [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW]
    results = await asyncio.gather(*(count(client, num, f"r{num}") for num in lengths))
    assert results == [numbers(num, f"r{num}") for num in lengths]


async def test_who_leaves_ends_the_call_at_the_server(client: WireClient, echo: Echo) -> None:
    """Bug guarded: a lane that goes on for a client that has gone."""
    echo.gate.clear()
    async with aclosing(counting(client, 5, "wait")) as deltas:
        await anext(deltas)
        await echo.waiting.wait()
    await echo.left.wait()
    assert echo.num_made == 1
    assert await count(client, 3) == numbers(3)


async def test_a_cancelled_reader_ends_the_call_at_the_server(client: WireClient, echo: Echo) -> None:
    """Bug guarded: only readers that close their iterator themselves are noticed."""
    echo.gate.clear()
    reader = asyncio.create_task(count(client, 5, "wait"))
    await echo.waiting.wait()
    reader.cancel()
    await echo.left.wait()


async def test_an_error_ends_one_stream_of_answers(client: WireClient) -> None:
    """Bug guarded: a request that fails in the model looks finished, or takes the others down."""
    other = asyncio.create_task(count(client, 100))
    with pytest.raises(CallFailed, match="the model broke"):
        await count(client, 5, "break")
    assert await other == numbers(100)


async def test_all_calls_see_the_end_of_the_server(server: tuple[WireServer, str], client: WireClient, echo: Echo) -> None:
    """Bug guarded: requests that wait for ever for a lane that died."""
    echo.gate.clear()
    calls = [asyncio.create_task(count(client, 5, "wait")) for _ in range(5)] + [asyncio.create_task(ask(client, 1000))]
    await echo.waiting.wait()
    await server[0].stop()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert all(str(error).startswith(f"lost {server[1]}:") for error in errors), errors
    with pytest.raises(Unreachable):
        await count(client, 1)


async def test_a_slow_reader_holds_back_only_its_own_call(client: WireClient, echo: Echo) -> None:
    """Bug guarded: one client that does not read stops all requests of its Api, or fills the memory of two processes."""
    async with aclosing(counting(client, 1000)) as slow:
        first = await anext(slow)
        others = await asyncio.gather(*(count(client, 100, f"r{number}") for number in range(4)))
        assert others == [numbers(100, f"r{number}") for number in range(4)]
        assert echo.num_made - 400 <= WINDOW + 1, "answers for the slow reader were made ahead of it"
        rest = [delta.token_ids[0] async for delta in slow]
    assert [first.token_ids[0], *rest] == list(range(1000))


async def hurry(body: bytes, caller: str, answers: Answers) -> None:
    """Waits for no reader."""
    for number in range(1000):
        answers.put_nowait(Delta(request_id="r", token_ids=(number,)))


async def test_answers_that_wait_for_nobody_arrive_in_order() -> None:
    """Bug guarded: what a reader has no room for yet is lost, overtaken by later answers or by the end, or fills the reader."""
    server = WireServer({}, SECRET, streams={"hurry": hurry})
    client = WireClient(await server.start("127.0.0.1"), SECRET)
    request = GenerateRequest(request_id="r", prompt_ids=(1,), params=SamplingParams())
    answers = [delta.token_ids[0] async for delta in client.stream("hurry", request, Delta)]
    assert answers == list(range(1000))
    await client.close()
    await server.stop()


@pytest.mark.parametrize("kind", ["count", "hurry"])
async def test_a_reader_that_never_comes_back_is_ended(echo: Echo, kind: str) -> None:
    """Bug guarded: answers kept for ever for a reader that hangs."""
    server = WireServer({}, SECRET, streams={"count": echo.count, "hurry": hurry}, stalled_after_s=0)
    client = WireClient(await server.start("127.0.0.1"), SECRET)
    request = GenerateRequest(request_id="r", prompt_ids=(1,), params=SamplingParams(max_tokens=1000))
    stalled = client.stream(kind, request, Delta)
    await anext(stalled)
    await server.drain()
    with pytest.raises(CallFailed, match="took no answer"):
        _ = [delta async for delta in stalled]
    await client.close()
    await server.stop()


@pytest.mark.parametrize("number", [0, -1, WINDOW + 1, 2**63 - 1, "x", None])
async def test_a_window_is_opened_by_sensible_numbers_only(server: tuple[WireServer, str], number: object) -> None:
    """Bug guarded: a peer that opens the window by a strange number has it open for ever."""
    async with raw_stream(server[1]) as stream:
        long = msgspec.to_builtins(GenerateRequest(request_id="r", prompt_ids=(1,), params=SamplingParams(max_tokens=1000)))
        await stream.write(frame(call_id=1, kind="count", body=long))
        answers = await read_frames(stream, WINDOW)
        await stream.write(frame(call_id=1, kind="$more", body=number))
        answers += await read_frames(stream, 1)
    assert [answer[2] for answer in answers] == ["item"] * WINDOW + ["error"]


async def test_calls_in_flight_are_bounded(echo: Echo) -> None:
    """Bug guarded: a peer that begins calls without end fills the process."""
    server = WireServer({"verify": echo.verify}, SECRET, streams={"count": echo.count}, max_calls=1)
    client = WireClient(await server.start("127.0.0.1"), SECRET)
    echo.gate.clear()
    first = asyncio.create_task(ask(client, 1000))
    await echo.waiting.wait()
    with pytest.raises(Overloaded, match="in flight"):
        await count(client, 1)
    echo.gate.set()
    assert await first == 1000
    assert await count(client, 2) == numbers(2)
    await client.close()
    await server.stop()


async def test_a_server_that_leaves_finishes_what_it_has(
    server: tuple[WireServer, str], client: WireClient, echo: Echo
) -> None:
    """Bug guarded: a lane that is scaled down cuts its streams, or takes new ones and never ends."""
    echo.gate.clear()
    open_call = asyncio.create_task(count(client, 3, "wait"))
    await echo.waiting.wait()
    draining = asyncio.create_task(server[0].drain())
    await asyncio.sleep(0)
    for attempt in (count(client, 1), ask(client, 1)):
        with pytest.raises(Leaving):
            await attempt
    assert not draining.done()
    echo.gate.set()
    assert await open_call == numbers(3, "wait")
    await draining


# --- sizes ------------------------------------------------------------------------------------------------------------------


def wide(num_tokens: int, round_id: int = 1) -> VerifyRequest:
    return VerifyRequest(round_id=round_id, items=(VerifyItem(sequence_id="s", base_length=0, tokens=(1,) * num_tokens),))


async def test_a_message_that_is_too_large_is_refused_where_it_is_sent() -> None:
    """Bug guarded: a message over gRPC's limit ends the stream for everybody, and nobody learns why."""

    async def verify(body: bytes, caller: str) -> VerifyRequest:
        return wide(decode(body, VerifyRequest).round_id)

    async def count(body: bytes, caller: str, answers: Answers) -> None:
        answers.put_nowait(wide(10))
        answers.put_nowait(wide(2 * LIMIT))

    server = WireServer({"verify": verify}, SECRET, streams={"count": count}, max_frame_bytes=LIMIT)
    address = await server.start("127.0.0.1")
    client = WireClient(address, SECRET, max_frame_bytes=LIMIT)
    careless = WireClient(address, SECRET, max_frame_bytes=2 * LIMIT)
    for request, where, asking in (
        (wide(LIMIT), "^a message of", client),
        (wide(LIMIT), "refused: .* a frame of", careless),
        (wide(0, round_id=LIMIT), "refused: .* a message of", client),
    ):
        with pytest.raises(WireError, match=f"{where} .* over the limit of {LIMIT}"):
            await asking.call("verify", request, VerifyRequest, 10)
    answers = client.stream("count", wide(1), VerifyRequest)
    assert await anext(answers) == wide(10)
    with pytest.raises(CallFailed, match="over the limit"):
        await anext(answers)
    for each in (client, careless):
        assert await each.call("verify", wide(0, round_id=3), VerifyRequest, 10) == wide(3)
        assert each.counters.failed < each.counters.calls
        await each.close()
    await server.stop()


# --- what a bad peer can do -------------------------------------------------------------------------------------------------


async def test_equal_numbers_of_two_clients_are_different_calls(server: tuple[WireServer, str], echo: Echo) -> None:
    """Bug guarded: one process reads, holds back or ends the calls of another by naming their numbers."""
    victim, other = WireClient(server[1], SECRET), WireClient(server[1], SECRET)
    echo.gate.clear()
    waiting = asyncio.create_task(count(victim, 3, "wait"))
    await echo.waiting.wait()
    assert await count(other, 2 * WINDOW, "other") == numbers(2 * WINDOW, "other")
    assert other.counters.calls == victim.counters.calls == 1
    echo.left.clear()
    async with raw_stream(server[1]) as stream:
        await stream.write(frame(call_id=1, kind="$leave"))
        await stream.write(frame(call_id=1, kind="$more", body=1))
        await stream.write(frame(call_id=1, kind="count", body=GOOD_COUNT))
        answers = await read_frames(stream, 3)
    assert [(answer[1], answer[2]) for answer in answers] == [(1, "item"), (1, "item"), (1, "end")]
    assert not waiting.done()
    echo.gate.set()
    assert await waiting == numbers(3, "wait")
    await victim.close()
    await other.close()


@contextlib.asynccontextmanager
async def raw_stream(address: str) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel.stream_stream("/outrider.Stream/Open")(metadata=(("x-outrider-secret", SECRET),))


async def read_frames(stream: grpc.aio.StreamStreamCall, count: int) -> list[Any]:
    """The next frames, however they were joined into messages."""
    frames: list[Any] = []
    while len(frames) < count:
        frames += [msgspec.msgpack.decode(part) for part in wire._parts(await stream.read(), wire.MAX_FRAME_BYTES)]
    return frames


@contextlib.asynccontextmanager
async def raw_server(answers: Callable[[bytes], list[bytes]]) -> AsyncIterator[str]:
    """A server that writes whatever ``answers`` makes of each frame."""

    async def serve(frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for data in frames:
            for answer in (answer for part in wire._parts(data, wire.MAX_FRAME_BYTES) for answer in answers(part)):
                await context.write(answer)

    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.Stream", {"Open": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


async def test_a_server_that_ignores_the_window_fails_its_call() -> None:
    """Bug guarded: a lane of another release fills the Api's memory through one slow client."""

    def answers(data: bytes) -> list[bytes]:
        _, call_id, kind, _ = msgspec.msgpack.decode(data)
        if kind == "count":
            return [frame(call_id=call_id, kind="item", body=GOOD_DELTA)] * (3 * WINDOW)
        return [frame(call_id=call_id, kind="", body=GOOD_REPLY)] if kind == "verify" else []

    async with raw_server(answers) as address:
        client = WireClient(address, SECRET)
        slow = counting(client, 1)
        await anext(slow)
        assert await ask(client, 5) == 5
        with pytest.raises(WireError, match=f"more than {WINDOW} answers"):
            _ = [delta async for delta in slow]
        assert await ask(client, 5) == 5
        await client.close()


def frame(version: object = PROTOCOL_VERSION, call_id: object = 1, kind: object = "verify", body: object = None) -> bytes:
    return msgspec.msgpack.encode([version, call_id, kind, body])


GOOD_BODY = msgspec.to_builtins(VerifyRequest(round_id=5, items=()))
GOOD_REPLY = msgspec.to_builtins(VerifyReply(round_id=5, verdicts=()))
GOOD_DELTA = msgspec.to_builtins(Delta(request_id="r", token_ids=(1,)))
GOOD_COUNT = msgspec.to_builtins(GenerateRequest(request_id="r", prompt_ids=(1,), params=SamplingParams(max_tokens=2)))
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
kinds = st.sampled_from(["verify", "count", "$more", "$leave", "", "item", "end", "error"])
bad_frames = (
    st.binary(max_size=200)
    | st.builds(frame, kind=kinds, body=anything)
    | st.builds(frame, call_id=st.integers(0, 3), kind=kinds, body=anything)
    | st.builds(frame, version=anything, kind=kinds, body=st.just(GOOD_BODY))
    | st.builds(frame, call_id=anything, kind=kinds, body=st.just(GOOD_COUNT))
    | st.builds(frame, kind=anything, body=st.just(GOOD_BODY))
    | st.builds(lambda cut: frame(body=GOOD_BODY)[:cut], st.integers(0, 40))
    | st.just(frame(body=None)[:-1] + b"\x91" * 2000)
    | st.just(b"\x91" * 2000)
)
fuzzed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzed
@given(frames=st.lists(bad_frames, max_size=6))
def test_no_frame_breaks_the_server(frames: list[bytes]) -> None:
    """Guards against a peer of another version, or a hostile one, that ends the stream or the process with one frame."""

    async def scenario() -> None:
        echo = Echo()
        server = WireServer({"verify": echo.verify}, SECRET, streams={"count": echo.count})
        address = await server.start("127.0.0.1")
        answers = []
        try:
            async with raw_stream(address) as stream:
                good = [frame(call_id=77, body=GOOD_BODY), frame(call_id=78, kind="count", body=GOOD_COUNT)]
                for data in [*frames, *good]:
                    await stream.write(data)
                while len([a for a in answers if a[1] in (77, 78) and a[2] in ("", "end", "error")]) < 2:
                    answers += await read_frames(stream, 1)
        finally:  # a server that is left running keeps the interpreter from ending
            await server.stop()
        replies = [msgspec.convert(answer[3], VerifyReply) for answer in answers if answer[1:3] == [77, ""]]
        assert [reply.round_id for reply in replies] == [5]
        assert [answer[2] for answer in answers if answer[1] == 78] == ["item", "item", "end"]

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


@fuzzed
@given(frames=st.lists(bad_frames, max_size=6))
def test_no_frame_breaks_the_client(frames: list[bytes]) -> None:
    """Bug guarded: a worker of another version, or a broken one, ends the lane that asks it."""
    frames = [data for data in frames if not addressed_to(data, 2)]

    async def scenario() -> None:
        def answers(data: bytes) -> list[bytes]:
            number = msgspec.msgpack.decode(data)[1]
            return frames if number == 1 else [*frames, frame(call_id=2, kind="", body=GOOD_REPLY)]

        async with raw_server(answers) as address:
            client = WireClient(address, SECRET)
            first = asyncio.create_task(ask(client, 1))
            await asyncio.sleep(0)  # it gets the number 1
            try:
                assert await ask(client, 5) == 5
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await client.close()

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


def addressed_to(data: bytes, call_id: int) -> bool:
    try:
        number = msgspec.msgpack.decode(data)[1]
    except Exception:
        return False
    return bool(number == call_id)


async def test_another_protocol_version_is_named(server: tuple[WireServer, str]) -> None:
    """Guards against two releases that misread each other during a rolling upgrade."""
    async with raw_stream(server[1]) as stream:
        await stream.write(frame(version=1, call_id=4, body=GOOD_BODY))
        _, call_id, kind, (_, message, *_) = msgspec.msgpack.decode(await stream.read())
        assert (call_id, kind, message) == (4, "error", f"protocol version 1 met version {PROTOCOL_VERSION}")
        await stream.write(frame(call_id=5, body=GOOD_BODY))
        assert msgspec.msgpack.decode(await stream.read())[1:3] == [5, ""]


async def test_an_answer_of_another_version_fails_its_call_only() -> None:
    """Bug guarded: an old worker's answer is taken for an answer, or ends the calls of the others."""

    def answers(data: bytes) -> list[bytes]:
        number = msgspec.msgpack.decode(data)[1]
        return [frame(version=1 if number == 1 else PROTOCOL_VERSION, call_id=number, kind="", body=GOOD_REPLY)]

    async with raw_server(answers) as address:
        client = WireClient(address, SECRET)
        with pytest.raises(WireError, match="protocol version 1 met"):
            await ask(client, 5)
        assert await ask(client, 5) == 5
        assert client.counters.ignored == 1
        await client.close()


SLEEPER = """
import asyncio
from deployments.wire import WireServer

async def main():
    async def sleep(body, caller):
        print("asked", flush=True)
        await asyncio.sleep(3600)
    print(await WireServer({"verify": sleep}, "right").start("127.0.0.1"), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_a_link_that_is_cut_is_found() -> None:
    """Bug guarded: a node that vanishes without a word holds its requests for a minute. A stopped process stands in for it."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SLEEPER, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        client = WireClient((await process.stdout.readline()).decode().strip(), SECRET)
        asked = asyncio.create_task(ask(client, 1, timeout_s=600))
        assert await process.stdout.readline() == b"asked\n"
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(WireError, match=r"lost .*: .*timeout"):
            await asked
        await client.close()
    finally:
        process.kill()
        await process.wait()


# --- TLS --------------------------------------------------------------------------------------------------------------------


def make_authority(folder: Path, name: str) -> Tls:
    """Files NAME-ca.pem, NAME-cert.pem and NAME-key.pem: an authority, and a certificate signed by it for "outrider"."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = certificate(name, authority_key, x509.Name([common_name(name)]), authority_key, None)
    cert = certificate("outrider", key, authority.subject, authority_key, "outrider")
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem = serialization.Encoding.PEM
    tls = Tls(cert.public_bytes(pem), key.private_bytes(pem, *plain), authority.public_bytes(pem))
    for kind in ("cert", "key", "ca"):
        (folder / f"{name}-{kind}.pem").write_bytes(getattr(tls, kind))
    return tls


def common_name(name: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(x509.NameOID.COMMON_NAME, name)


def certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, signer: ec.EllipticCurvePrivateKey, dns: str | None
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([common_name(name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=dns is None, path_length=None), critical=True)
    )
    if dns is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns)]), critical=False)
    return builder.sign(signer, hashes.SHA256())


def streams_config(folder: Path, cert: str, key: str, ca: str) -> StreamsConfig:
    return StreamsConfig(tls_cert=folder / f"{cert}.pem", tls_key=folder / f"{key}.pem", tls_ca=folder / f"{ca}.pem")


async def test_tls_lets_in_who_has_a_certificate_of_the_same_authority(tmp_path: Path, echo: Echo) -> None:
    """Bug guarded: certificates that are accepted and not checked, on either side."""
    ours, theirs = make_authority(tmp_path, "ours"), make_authority(tmp_path, "theirs")
    assert read_tls(streams_config(tmp_path, "ours-cert", "ours-key", "ours-ca")) == ours
    server = WireServer({"verify": echo.verify}, SECRET, streams={"count": echo.count}, tls=ours)
    address = await server.start("127.0.0.1")
    foreign_certificate = Tls(theirs.cert, theirs.key, ours.ca)
    foreign_authority = Tls(ours.cert, ours.key, theirs.ca)
    for tls in (None, theirs, foreign_certificate, foreign_authority):
        with pytest.raises(WireError):
            await ask(WireClient(address, SECRET, tls=tls), 1)
    assert echo.seen == []
    with pytest.raises(WireError, match="secret"):
        await ask(WireClient(address, "wrong", tls=ours), 1)
    client = WireClient(address, SECRET, tls=ours)
    assert await ask(client, 1) == 1
    assert await count(client, 3) == numbers(3)
    await client.close()
    await server.stop()


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (("none", "ours-key", "ours-ca"), "streams.tls_cert: cannot read"),
        (("ours-cert", "none", "ours-ca"), "streams.tls_key: cannot read"),
        (("ours-cert", "ours-key", "none"), "streams.tls_ca: cannot read"),
        (("ours-cert", "theirs-key", "ours-ca"), "streams.tls_cert and streams.tls_key"),
        (("ours-key", "ours-cert", "ours-ca"), "streams.tls_cert and streams.tls_key"),
        (("ours-cert", "ours-key", "ours-key"), "streams.tls_ca"),
    ],
)
def test_files_that_make_no_tls_are_named(tmp_path: Path, files: tuple[str, str, str], complaint: str) -> None:
    """Bug guarded: a wrong path or a key of another certificate shows only as streams that do not connect."""
    make_authority(tmp_path, "ours")
    make_authority(tmp_path, "theirs")
    with pytest.raises(ConfigError, match=complaint):
        read_tls(streams_config(tmp_path, *files))
