"""The data plane: one persistent gRPC bidirectional stream per pair of processes, msgpack frames, no pickle.

Ray places, finds and restarts the processes; per-round messages do not go through Ray, because a round trip over a Serve handle
costs more than ten times one over such a stream. Many calls may be in flight on one stream; answers carry the call's number.
"""

import asyncio
import hmac
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024
_METHOD = "/outrider.Stream/Open"
_SECRET_KEY = "x-outrider-secret"
_NAME_KEY = "x-outrider-name"
_OPTIONS = [
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
T = TypeVar("T")
Handler = Callable[[bytes, str], Awaitable[msgspec.Struct]]
"""(body, name of the caller) -> answer."""
Write = Callable[[bytes], Awaitable[None]]


class WireError(Exception):
    """The other side cannot be reached, hung up, or refused the call."""


class _Frame(msgspec.Struct, array_like=True):
    version: int
    call_id: int
    kind: str
    """Name of the method in a call; empty in an answer; ``error`` in a refusal."""
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(_Frame)


def decode(body: bytes, kind: type[T]) -> T:
    """Read a message; raises `WireError` when it is not one."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"malformed {kind.__name__}: {error}") from None


class WireServer:
    """Answers calls of the given kinds. A bad frame or a failing handler costs an error answer, never the stream."""

    def __init__(self, handlers: dict[str, Handler], secret: str):
        self._handlers = handlers
        self._secret = secret
        self._server: grpc.aio.Server | None = None
        self.num_refused = 0
        """Streams with a wrong secret and frames that could not be read."""
        self.callers: Counter[str] = Counter()
        """Name -> open streams, for those who have any."""

    async def start(self, host: str) -> str:
        """Listen on a free port of ``host``; returns "host:port"."""
        self._server = grpc.aio.server(options=_OPTIONS)
        method = grpc.stream_stream_rpc_method_handler(self._serve_stream)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.Stream", {"Open": method}),))
        port = self._server.add_insecure_port(f"{host}:0")
        await self._server.start()
        return f"{host}:{port}"

    async def stop(self) -> None:
        """Hang up on everybody."""
        if self._server is not None:
            await self._server.stop(grace=None)

    async def _serve_stream(self, frames: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        metadata = dict(context.invocation_metadata() or ())
        if not hmac.compare_digest(str(metadata.get(_SECRET_KEY, "")), self._secret):
            self.num_refused += 1
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong stream secret")
        caller = str(metadata.get(_NAME_KEY, ""))
        calls: set[asyncio.Task[None]] = set()
        write = _in_turn(context.write)
        self.callers[caller] += 1
        try:
            async for data in frames:
                task = asyncio.create_task(self._serve_call(data, caller, write))
                calls.add(task)
                task.add_done_callback(calls.discard)
        finally:
            self.callers -= Counter([caller])  # drops who has none left
            for task in calls:
                task.cancel()

    async def _serve_call(self, data: bytes, caller: str, write: Write) -> None:
        call_id = -1
        try:
            frame = _read(data)
            call_id = frame.call_id
            if frame.kind not in self._handlers:
                raise WireError(f"unknown call '{frame.kind}'")
            answer = await self._handlers[frame.kind](bytes(frame.body), caller)
            await write(_write(call_id, "", answer))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.num_refused += isinstance(error, WireError)
            logger.warning("call %d failed: %s: %s", call_id, type(error).__name__, error)
            await write(_write(call_id, "error", f"{type(error).__name__}: {error}"))


class WireClient:
    """One stream to one server, opened by the first call and again after it broke."""

    def __init__(self, address: str, secret: str, name: str = ""):
        """``name`` (ASCII) tells the server who calls."""
        self.address = address
        self._metadata = ((_SECRET_KEY, secret), (_NAME_KEY, name))
        self._channel: grpc.aio.Channel | None = None
        self._stream: Any = None
        self._write_frame: Write | None = None
        self._reader: asyncio.Task[None] | None = None
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)

    async def call(self, kind: str, message: msgspec.Struct, answer: type[T], timeout_s: float) -> T:
        """Send ``message`` and wait for an answer; raises `WireError`, also when ``timeout_s`` has passed.

        An answer that comes after its time is dropped when it arrives.
        """
        call_id = next(self._numbers)
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._exchange(call_id, _write(call_id, kind, message))
        except TimeoutError:
            raise WireError(f"no answer from {self.address} within {timeout_s:g} s") from None
        finally:
            self._pending.pop(call_id, None)
        return decode(body, answer)

    async def close(self) -> None:
        """Hang up; calls in flight raise `WireError`."""
        self._fail_pending("the stream was closed")
        if self._reader is not None:
            self._reader.cancel()
        if self._channel is not None:
            await self._channel.close()
        self._channel = self._stream = self._reader = self._write_frame = None

    async def _exchange(self, call_id: int, frame: bytes) -> bytes:
        write = self._write_frame or self._open()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = answer
        try:
            await write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            del self._pending[call_id]
            await self.close()
            raise WireError(f"cannot send to {self.address}: {_reason(error)}") from None
        return await answer

    def _open(self) -> Write:
        self._channel = grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        self._stream = self._channel.stream_stream(_METHOD)(metadata=self._metadata)
        self._reader = asyncio.create_task(self._read_answers(self._stream))
        self._write_frame = _in_turn(self._stream.write)
        return self._write_frame

    async def _read_answers(self, stream: Any) -> None:
        reason = "the other side hung up"
        try:
            async for data in stream:
                frame = _read(data)
                self._resolve(frame)
        except (grpc.aio.AioRpcError, WireError) as error:
            reason = _reason(error)
        finally:
            if stream is self._stream:
                channel = self._channel
                self._channel = self._stream = self._reader = self._write_frame = None
                self._fail_pending(f"lost {self.address}: {reason}")
                if channel is not None:
                    await channel.close()

    def _resolve(self, frame: _Frame) -> None:
        future = self._pending.get(frame.call_id)
        if future is None or future.done():
            return
        if frame.kind == "error":
            future.set_exception(WireError(f"{self.address} refused: {decode(bytes(frame.body), str)}"))
        else:
            future.set_result(bytes(frame.body))

    def _fail_pending(self, reason: str) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(WireError(reason))


def _in_turn(write: Write) -> Write:
    """A gRPC stream takes one write at a time, and many calls share it."""
    lock = asyncio.Lock()

    async def write_in_turn(frame: bytes) -> None:
        async with lock:
            await write(frame)

    return write_in_turn


def _write(call_id: int, kind: str, message: msgspec.Struct | str) -> bytes:
    return _encoder.encode(_Frame(PROTOCOL_VERSION, call_id, kind, msgspec.Raw(_encoder.encode(message))))


def _read(data: bytes) -> _Frame:
    try:
        frame = _frames.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"malformed frame: {error}") from None
    if frame.version != PROTOCOL_VERSION:
        raise WireError(f"protocol version {frame.version} met version {PROTOCOL_VERSION}")
    return frame


def _reason(error: Exception) -> str:
    return str(error.details()) if isinstance(error, grpc.aio.AioRpcError) else str(error)
