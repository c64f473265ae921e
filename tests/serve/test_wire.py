"""The streams between processes: what arrives, what is refused, and what a broken peer can do (nothing)."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.wire import PROTOCOL_VERSION, WireClient, WireError, WireServer, decode
from engine.types import VerifyItem, VerifyReply, VerifyRequest

SECRET = "right"


class Echo:
    """Answers a verify with its own round id; slow, failing or silent on demand."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[int] = []
        self.waiting = asyncio.Event()

    async def verify(self, body: bytes, caller: str) -> VerifyReply:
        request = decode(body, VerifyRequest)
        self.seen.append(request.round_id)
        if request.round_id < 0:
            raise RuntimeError("the model broke")
        if request.round_id >= 1000:
            self.waiting.set()
            await self.gate.wait()
        return VerifyReply(round_id=request.round_id, verdicts=())


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def server(echo: Echo) -> AsyncIterator[tuple[WireServer, str]]:
    server = WireServer({"verify": echo.verify}, SECRET)
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
    assert echo.seen == []
    assert server[0].num_refused == 1


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


def frame(version: object = PROTOCOL_VERSION, call_id: object = 1, kind: object = "verify", body: object = None) -> bytes:
    return msgspec.msgpack.encode([version, call_id, kind, body])


GOOD_BODY = msgspec.to_builtins(VerifyRequest(round_id=5, items=()))
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
bad_frames = (
    st.binary(max_size=200)
    | st.builds(frame, body=anything)
    | st.builds(frame, version=anything, body=st.just(GOOD_BODY))
    | st.builds(frame, kind=anything, body=st.just(GOOD_BODY))
    | st.builds(lambda cut: frame(body=GOOD_BODY)[:cut], st.integers(0, 40))
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(bad_frames, max_size=6))
def test_no_frame_breaks_the_server(frames: list[bytes]) -> None:
    """Guards against a peer of another version, or a hostile one, that ends the stream or the process with one frame."""

    async def scenario() -> None:
        echo = Echo()
        server = WireServer({"verify": echo.verify}, SECRET)
        address = await server.start("127.0.0.1")
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stream = channel.stream_stream("/outrider.Stream/Open")(metadata=(("x-outrider-secret", SECRET),))
                for data in [*frames, frame(call_id=77, body=GOOD_BODY)]:
                    await stream.write(data)
                answers = [msgspec.msgpack.decode(await stream.read()) for _ in range(len(frames) + 1)]
        finally:  # a server that is left running keeps the interpreter from ending
            await server.stop()
        assert [77, "", reply] in [answer[1:] for answer in answers]

    reply = msgspec.msgpack.decode(msgspec.msgpack.encode(VerifyReply(round_id=5, verdicts=())))
    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


async def test_another_protocol_version_is_named(server: tuple[WireServer, str]) -> None:
    """Guards against two releases that misread each other during a rolling upgrade."""
    async with grpc.aio.insecure_channel(server[1]) as channel:
        stream = channel.stream_stream("/outrider.Stream/Open")(metadata=(("x-outrider-secret", SECRET),))
        await stream.write(frame(version=99, body=GOOD_BODY))
        _, _, kind, message = msgspec.msgpack.decode(await stream.read())
    assert kind == "error"
    assert "version 99" in message
