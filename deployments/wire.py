"""The data plane: one persistent gRPC bidirectional stream per pair of processes, msgpack frames, no pickle.

Ray places, finds and restarts the processes; per-round messages do not go through Ray, because a round trip over a Serve handle
costs more than ten times one over such a stream. Many calls share a stream; every frame carries its call's number. A call has
one answer, or a stream of answers that its reader may leave at any time.

What a peer cannot do: a bad frame costs an error answer, a large one is refused before it is sent, a reader that falls behind
holds back its own call only (`WINDOW`), and a link that is cut is found within `KEEPALIVE_S` + `KEEPALIVE_TIMEOUT_S`.
"""

import asyncio
import contextlib
import hmac
import itertools
import logging
import math
import ssl
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
import msgspec

from engine.config import StreamsConfig
from engine.errors import ConfigError, InvalidRequest, OutriderError, Overloaded

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_CALLS = 1024
"""Calls that one stream may have in flight."""
WINDOW = 32
"""Answers of one call that may be under way or wait for its reader; the server waits with the next. Part of the protocol."""
QUEUED_FRAMES = 1024
"""Frames of one stream that wait to be written; a call waits with the next."""
MAX_REASON_CHARACTERS = 2000
STALLED_AFTER_S = 600.0
"""A call whose reader takes nothing for this long is ended."""
KEEPALIVE_S = 3.0
KEEPALIVE_TIMEOUT_S = 7.0
"""Long enough for a machine that is far too busy: a link that is wrongly taken for cut costs a prefill."""
CONNECT_TIMEOUT_S = 3.0
MIN_SECRET_CHARACTERS = 16
TLS_NAME = "outrider"
"""The DNS name that every process's certificate is for: addresses of actors are not known beforehand."""

_SERVICE = "outrider.Stream"
_METHOD = f"/{_SERVICE}/Open"
_SECRET_KEY = "x-outrider-secret"
_NAME_KEY = "x-outrider-name"
_ANSWER, _ITEM, _END, _ERROR = "", "item", "end", "error"
"""Kinds of frames from a server. A client's are names of calls, or:"""
_MORE, _LEAVE = "$more", "$leave"
_JOINED = "$joined"
"""Frames that were queued at the same time, in one message: a round's answers to hundreds of calls cost one write."""
JOINED_BYTES = 1 << 16
_TRANSPORT_OPTIONS = [
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    # Without it gRPC waits a minute for a process that is stopped: its kernel still acknowledges what is sent.
    ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    # Else a new stream shares the back-off of the broken one and fails although its server is back.
    ("grpc.use_local_subchannel_pool", 1),
    # Proxies of the environment are for the way out of the cluster.
    ("grpc.enable_http_proxy", 0),
]
T = TypeVar("T")
Handler = Callable[[bytes, str], Awaitable[msgspec.Struct]]
"""(body, name of the caller) -> answer."""
StreamHandler = Callable[[bytes, str, "Answers"], Awaitable[None]]
"""(body, name of the caller, where its answers go); returns after the last one, cancelled when the caller leaves."""
Write = Callable[[bytes], Awaitable[None]]


class WireError(Exception):
    """The other side cannot be reached, hung up, or did not answer in time."""


class Unreachable(WireError):
    """Nothing was sent: there was no connection."""


class CallFailed(WireError):
    """The other side answered that this call failed or is refused. ``kind`` is the type of the error there."""

    def __init__(self, message: str, kind: str):
        super().__init__(message)
        self.kind = kind


class Leaving(CallFailed):
    """The other side finishes the calls it has and takes no more."""


@dataclass(frozen=True)
class Tls:
    """PEM texts for mutual TLS: own certificate and key, and the authority that signs everybody's."""

    cert: bytes
    key: bytes
    ca: bytes


@dataclass
class WireCounters:
    """What a client has sent and received, and how long its calls were under way. Cumulative."""

    calls: int = 0
    failed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    hops: int = 0
    """Calls with one answer that were answered."""
    hop_time_s: float = 0.0
    """Their round trips, minus ``step_time_s`` of answers that have one: the model's own time."""
    ignored: int = 0
    """Frames that could not be read or belong to no call of ours."""


class _Frame(msgspec.Struct, array_like=True):
    version: int
    call_id: int
    kind: str
    body: msgspec.Raw


class _Failure(msgspec.Struct, array_like=True):
    kind: str
    message: str
    field: str | None = None
    retry_after_s: float = 1.0


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(_Frame)


def decode(body: bytes, kind: type[T]) -> T:
    """Read a message; raises `WireError` when it is not one."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"malformed {kind.__name__}: {error}") from None


def read_secret(config: StreamsConfig, generated: str) -> str:
    """What every process of the application must show: the content of the configured file, else ``generated``.

    White space around it does not count. Raises `ConfigError` when the file cannot be used.
    """
    path = config.secret_file
    if path is None:
        return generated
    try:
        secret = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"streams.secret_file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"streams.secret_file: {path} is not ASCII text; `openssl rand -hex 32` makes a good one") from None
    if len(secret) < MIN_SECRET_CHARACTERS or not secret.isprintable():
        raise ConfigError(
            f"streams.secret_file: {path} must hold one line of at least {MIN_SECRET_CHARACTERS} characters; "
            "`openssl rand -hex 32` makes a good one"
        )
    return secret


def read_tls(config: StreamsConfig) -> Tls | None:
    """The files of the configuration, or None without any; raises `ConfigError` when they cannot be used."""
    if config.tls_cert is None or config.tls_key is None or config.tls_ca is None:
        return None
    texts = {}
    for name, path in (("tls_cert", config.tls_cert), ("tls_key", config.tls_key), ("tls_ca", config.tls_ca)):
        try:
            texts[name] = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"streams.{name}: cannot read {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password, if an empty one, it does not ask the terminal for that of an encrypted key.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except ssl.SSLError as error:
        raise ConfigError(f"streams.tls_cert and streams.tls_key are no PEM pair that fits: {error.reason or error}") from None
    try:
        context.load_verify_locations(config.tls_ca)
    except ssl.SSLError as error:
        raise ConfigError(f"streams.tls_ca holds no PEM certificate: {error.reason or error}") from None
    return Tls(texts["tls_cert"], texts["tls_key"], texts["tls_ca"])


# --- the server -------------------------------------------------------------------------------------------------------------


class WireServer:
    """Answers calls of the given kinds. A bad frame or a failing handler costs an error answer, never the stream."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        secret: str,
        *,
        streams: Mapping[str, StreamHandler] | None = None,
        tls: Tls | None = None,
        max_calls: int = MAX_CALLS,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        stalled_after_s: float = STALLED_AFTER_S,
    ):
        """``handlers`` give one answer, ``streams`` many. ``max_calls`` bounds each stream's calls in flight."""
        self.handlers = handlers
        self.streams = streams or {}
        self.max_calls = max_calls
        self.max_frame_bytes = max_frame_bytes
        self.stalled_after_s = stalled_after_s
        self.leaving = False
        self.num_refused = 0
        """Streams with a wrong secret, and frames that could not be read or are not allowed."""
        self.callers: Counter[str] = Counter()
        """Name -> open streams, for those who have any."""
        self._secret = secret
        self._tls = tls
        self._server: grpc.aio.Server | None = None
        self._num_calls = 0
        self._idle = asyncio.Event()

    async def start(self, host: str) -> str:
        """Listen on a free port of ``host``; returns "host:port"."""
        server = self._server = grpc.aio.server(options=_options(self.max_frame_bytes))
        method = grpc.stream_stream_rpc_method_handler(self._serve_stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Open": method}),))
        port = self._listen(server, f"{host}:0")
        await server.start()
        return f"{host}:{port}"

    async def drain(self) -> None:
        """Refuse new calls with `Leaving` and wait until those in flight have ended."""
        self.leaving = True
        while self._num_calls:
            self._idle.clear()
            await self._idle.wait()

    async def stop(self) -> None:
        """Hang up on everybody."""
        if self._server is not None:
            await self._server.stop(grace=None)

    def call_began(self) -> None:
        """Counted for `drain`."""
        self._num_calls += 1

    def call_ended(self) -> None:
        """Counted for `drain`."""
        self._num_calls -= 1
        self._idle.set()

    def _listen(self, server: grpc.aio.Server, address: str) -> int:
        if self._tls is None:
            return int(server.add_insecure_port(address))
        pair = (self._tls.key, self._tls.cert)
        credentials = grpc.ssl_server_credentials([pair], root_certificates=self._tls.ca, require_client_auth=True)
        return int(server.add_secure_port(address, credentials))

    async def _serve_stream(self, frames: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        metadata = dict(context.invocation_metadata() or ())
        if not hmac.compare_digest(str(metadata.get(_SECRET_KEY, "")).encode(), self._secret.encode()):
            self.num_refused += 1
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong stream secret")
        caller = str(metadata.get(_NAME_KEY, ""))
        stream = _ServedStream(self, caller, context.write)
        self.callers[caller] += 1
        try:
            async for data in frames:
                await stream.receive(data)
        finally:
            self.callers -= Counter([caller])  # which also drops those with none left
            stream.hang_up()


class _ServedStream:
    """One client's calls. Their numbers mean something on its own stream only."""

    def __init__(self, server: WireServer, caller: str, write: Write):
        self._server = server
        self._caller = caller
        self._writer = _Writer(write, server.max_frame_bytes)
        self._writing = asyncio.create_task(self._write_for_ever())
        self._calls: dict[int, tuple[asyncio.Task[None], Answers]] = {}

    async def receive(self, data: bytes) -> None:
        """Take in a message of one or many frames: begin a call, or steer one. What is wrong with one is told to the caller."""
        for part in _parts(data, self._server.max_frame_bytes):
            await self._receive(part)

    async def _receive(self, data: bytes) -> None:
        try:
            frame = _read(data, self._server.max_frame_bytes)
            if frame.kind in (_MORE, _LEAVE):
                self._steer(frame)
            else:
                self._begin(frame)
        except Exception as error:
            self._server.num_refused += 1
            logger.warning("refused a frame of '%s': %s", self._caller, error)
            await self._send(_call_id(data), _ERROR, _failure(error))

    async def _write_for_ever(self) -> None:
        try:
            await self._writer.run()
        except Exception as error:
            logger.debug("'%s' is gone: %s", self._caller, error)

    def hang_up(self) -> None:
        """The client is gone."""
        self._writing.cancel()
        for task, _ in self._calls.values():
            task.cancel()

    def _steer(self, frame: _Frame) -> None:
        """Frames for calls that have ended are late, not wrong."""
        call = self._calls.get(frame.call_id)
        if call is None:
            return
        task, answers = call
        if frame.kind == _LEAVE:
            task.cancel()
        else:
            answers.open(decode(bytes(frame.body), int))

    def _begin(self, frame: _Frame) -> None:
        server = self._server
        if server.leaving:
            raise Leaving("this process takes no more calls", "Leaving")
        if frame.call_id in self._calls:
            raise WireError(f"call {frame.call_id} is in flight already")
        if len(self._calls) >= server.max_calls:
            raise Overloaded(f"{server.max_calls} calls are in flight on this stream already")
        answers = Answers(frame.call_id, self._writer, server.max_frame_bytes)
        if frame.kind in server.handlers:
            work = self._answer(frame, server.handlers[frame.kind])
        elif frame.kind in server.streams:
            work = self._stream(frame, server.streams[frame.kind], answers)
        else:
            raise WireError(f"unknown call {frame.kind[:40]!r}")
        task = asyncio.create_task(work)
        self._calls[frame.call_id] = (task, answers)
        server.call_began()
        task.add_done_callback(lambda _: self._ended(frame.call_id))

    def _ended(self, call_id: int) -> None:
        del self._calls[call_id]
        self._server.call_ended()

    async def _answer(self, frame: _Frame, handler: Handler) -> None:
        try:
            await self._send(frame.call_id, _ANSWER, await handler(bytes(frame.body), self._caller))
        except Exception as error:
            await self._call_failed(frame.call_id, error)

    async def _stream(self, frame: _Frame, handler: StreamHandler, answers: "Answers") -> None:
        try:
            async with answers.taken_within(self._server.stalled_after_s):
                await handler(bytes(frame.body), self._caller, answers)
                await answers.drained()
            await self._send(frame.call_id, _END, None)
        except Exception as error:
            await self._call_failed(frame.call_id, error)

    async def _call_failed(self, call_id: int, error: Exception) -> None:
        self._server.num_refused += isinstance(error, WireError)
        if not isinstance(error, (InvalidRequest, Overloaded)):
            logger.warning("call %d of '%s' failed: %s: %s", call_id, self._caller, type(error).__name__, error)
        await self._send(call_id, _ERROR, _failure(error))

    async def _send(self, call_id: int, kind: str, message: msgspec.Struct | None) -> None:
        await self._writer.put(_frame(call_id, kind, message, self._server.max_frame_bytes))


class Answers:
    """Where a handler puts the answers of one call. At most `WINDOW` go out before their reader asks for more, the others wait
    here; a handler with more of them than it wants to keep in memory waits with `put`.
    """

    def __init__(self, call_id: int, writer: "_Writer", max_frame_bytes: int):
        self._call_id = call_id
        self._writer = writer
        self._max_frame_bytes = max_frame_bytes
        self._free = WINDOW
        self._held: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._patience_s = math.inf
        self._deadline: asyncio.Timeout | None = None

    def put_nowait(self, answer: msgspec.Struct) -> None:
        """Send an answer, or keep it until the reader has room; raises `WireError` when it is too large."""
        frame = _frame(self._call_id, _ITEM, answer, self._max_frame_bytes)
        if self._free:
            self._free -= 1
            self._writer.put_nowait(frame)
            return
        self._held.append(frame)
        if len(self._held) == 1:
            self._expect_reader(True)

    async def put(self, answer: msgspec.Struct) -> None:
        """Send an answer; waits while the reader, or the stream, does not keep up."""
        await self._writer.room()
        self.put_nowait(answer)
        await self.drained()

    async def drained(self) -> None:
        """Wait until no answer waits here."""
        while self._held:
            self._changed.clear()
            await self._changed.wait()

    def open(self, num_answers: int) -> None:
        """The reader has taken some; raises `WireError` for a number that makes no sense."""
        if not 0 < num_answers <= WINDOW:
            raise WireError(f"a reader may ask for 1 to {WINDOW} more answers, not {num_answers}")
        self._free = min(self._free + num_answers, WINDOW)
        while self._held and self._free:
            self._free -= 1
            self._writer.put_nowait(self._held.popleft())
        self._expect_reader(bool(self._held))
        self._changed.set()

    @contextlib.asynccontextmanager
    async def taken_within(self, patience_s: float) -> AsyncIterator[None]:
        """Raises `WireError` as soon as answers have waited here for longer than that and none was taken."""
        self._patience_s = patience_s
        try:
            async with asyncio.timeout(None) as self._deadline:
                yield
        except TimeoutError:
            if self._deadline is not None and self._deadline.expired():
                raise WireError(f"the reader took no answer for {patience_s:g} s") from None
            raise
        finally:
            self._deadline = None

    def _expect_reader(self, expected: bool) -> None:
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._patience_s if expected else None)


# --- the client -------------------------------------------------------------------------------------------------------------


class WireClient:
    """One stream to one server, opened by the first call and again after it broke."""

    def __init__(
        self, address: str, secret: str, name: str = "", *, tls: Tls | None = None, max_frame_bytes: int = MAX_FRAME_BYTES
    ):
        """``name`` (ASCII) tells the server who calls."""
        self.address = address
        self.counters = WireCounters()
        self._metadata = ((_SECRET_KEY, secret), (_NAME_KEY, name))
        self._tls = tls
        self._max_frame_bytes = max_frame_bytes
        self._connection: _Connection | None = None
        self._numbers = itertools.count(1)

    async def call(self, kind: str, message: msgspec.Struct, answer: type[T], timeout_s: float) -> T:
        """Send ``message`` and wait for its answer.

        Raises `CallFailed` when the server refused, `InvalidRequest` or `Overloaded` when its handler did, another `WireError`
        when it cannot be reached, also when ``timeout_s`` has passed. An answer that comes later is dropped.
        """
        call_id = next(self._numbers)
        counters = self.counters
        counters.calls += 1
        started_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                result = decode(await self._exchange(call_id, kind, message), answer)
        except TimeoutError:
            counters.failed += 1
            raise WireError(f"no answer from {self.address} within {timeout_s:g} s") from None
        except Exception:
            counters.failed += 1
            raise
        counters.hops += 1
        counters.hop_time_s += asyncio.get_running_loop().time() - started_s - getattr(result, "step_time_s", 0.0)
        return result

    async def stream(self, kind: str, message: msgspec.Struct, answer: type[T]) -> AsyncGenerator[T]:
        """Send ``message`` and yield its answers. Leaving the iterator ends the call at the server; errors as in `call`.

        The server is held back when answers are not taken, and only for this call.
        """
        call_id = next(self._numbers)
        self.counters.calls += 1
        call = _Answers()
        connection = self._connect()
        try:
            await connection.begin(call_id, kind, message, call)
            num_taken = 0
            while (body := await call.next()) is not None:
                num_taken += 1
                if num_taken % (WINDOW // 2) == 0:
                    connection.steer(call_id, _MORE, WINDOW // 2)
                yield decode(body, answer)
        except (WireError, OutriderError):
            self.counters.failed += 1
            raise
        finally:
            connection.end(call_id)
            if not call.complete:
                connection.steer(call_id, _LEAVE)

    async def close(self) -> None:
        """Hang up; calls in flight raise `WireError`."""
        if self._connection is not None:
            await self._connection.lose("the stream was closed")

    async def _exchange(self, call_id: int, kind: str, message: msgspec.Struct) -> bytes:
        connection = self._connect()
        call = _Answer()
        try:
            await connection.begin(call_id, kind, message, call)
            return await call.future
        finally:
            connection.end(call_id)

    def _connect(self) -> "_Connection":
        if self._connection is None or self._connection.lost:
            self._connection = _Connection(self.address, self._metadata, self._tls, self._max_frame_bytes, self.counters)
        return self._connection


class _Call(Protocol):
    """Who waits for the frames of one call."""

    def receive(self, frame: _Frame) -> None:
        """A frame other than an error."""

    def fail(self, error: Exception) -> None:
        """Nothing else will come."""


class _Answer:
    """A call with one answer."""

    def __init__(self) -> None:
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def receive(self, frame: _Frame) -> None:
        if frame.kind != _ANSWER:
            self.fail(WireError(f"an answer of kind {frame.kind[:40]!r} to a call with one answer"))
        elif not self.future.done():
            self.future.set_result(bytes(frame.body))

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Answers:
    """A call with many answers: at most `WINDOW` wait here, then their end, which may be an error."""

    def __init__(self) -> None:
        self.complete = False
        """The server has nothing more to say."""
        self._closed = False
        self._bodies: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    def receive(self, frame: _Frame) -> None:
        if self._closed:
            return
        if frame.kind == _END:
            self.complete = True
            self._close(None)
        elif frame.kind != _ITEM:
            self.fail(WireError(f"an answer of kind {frame.kind[:40]!r} to a call with a stream of answers"))
        elif self._bodies.qsize() >= WINDOW:
            self.fail(WireError(f"more than {WINDOW} answers came before their reader had taken the first"))
        else:
            self._bodies.put_nowait(bytes(frame.body))

    def fail(self, error: Exception) -> None:
        if not self._closed:
            self._close(error)

    async def next(self) -> bytes | None:
        body = await self._bodies.get()
        if isinstance(body, Exception):
            raise body
        return body

    def _close(self, end: Exception | None) -> None:
        self._closed = True
        self._bodies.put_nowait(end)


class _Connection:
    """An open stream and the calls on it; once lost it stays lost."""

    def __init__(
        self,
        address: str,
        metadata: tuple[tuple[str, str], ...],
        tls: Tls | None,
        max_frame_bytes: int,
        counters: WireCounters,
    ):
        self.lost = False
        self._address = address
        self._max_frame_bytes = max_frame_bytes
        self._counters = counters
        self._calls: dict[int, _Call] = {}
        self._channel = _channel(address, tls, max_frame_bytes)
        self._stream = self._channel.stream_stream(_METHOD)(metadata=metadata)
        self._writer = _Writer(self._stream.write, max_frame_bytes)
        self._tasks = [asyncio.create_task(self._run(self._writer.run())), asyncio.create_task(self._run(self._read()))]

    async def begin(self, call_id: int, kind: str, message: msgspec.Struct, call: _Call) -> None:
        """Send a call; its answers, or the loss of this stream, go to ``call`` until `end`."""
        frame = _frame(call_id, kind, message, self._max_frame_bytes)
        self._calls[call_id] = call
        self._counters.bytes_sent += len(frame)
        await self._writer.put(frame)

    def end(self, call_id: int) -> None:
        """Answers that still come are dropped."""
        self._calls.pop(call_id, None)

    def steer(self, call_id: int, kind: str, message: int | None = None) -> None:
        """Tell the server about a call; never waits."""
        self._writer.put_nowait(_frame(call_id, kind, message, self._max_frame_bytes))

    async def lose(self, reason: str) -> None:
        """Close the stream; every call on it fails at once."""
        if self.lost:
            return
        self.lost = True
        error = WireError if self._writer.num_written else Unreachable
        for call in self._calls.values():
            call.fail(error(f"lost {self._address}: {reason}"))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await self._channel.close()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        reason = "the other side hung up"
        try:
            await work
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # A write to a stream that has ended says only that: the stream itself knows why.
            reason = str(error.details() if isinstance(error, grpc.aio.AioRpcError) else await self._stream.details())
        finally:
            await self.lose(reason)

    async def _read(self) -> None:
        async for data in self._stream:
            self._counters.bytes_received += len(data)
            for part in _parts(data, self._max_frame_bytes):
                self._receive(part)

    def _receive(self, data: bytes) -> None:
        counters = self._counters
        try:
            frame = _read(data, self._max_frame_bytes)
        except WireError as error:
            counters.ignored += 1
            self._fail(_call_id(data), error)
            return
        call = self._calls.get(frame.call_id)
        if frame.kind == _ERROR:
            self._fail(frame.call_id, _error(self._address, bytes(frame.body)))
        elif call is not None:
            call.receive(frame)
        else:
            counters.ignored += 1

    def _fail(self, call_id: int, error: Exception) -> None:
        call = self._calls.get(call_id)
        if call is not None:
            call.fail(error)


# --- both sides -------------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes frames one after the other.

    gRPC ends the whole stream when a task is cancelled in the middle of a write. So calls, which have deadlines and readers
    that leave, only queue, and a task of the stream's own writes.
    """

    def __init__(self, write: Write, max_frame_bytes: int):
        self.num_written = 0
        self._write = write
        self._joined_bytes = min(JOINED_BYTES, max_frame_bytes // 2)
        self._frames: deque[bytes] = deque()
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False

    async def room(self) -> None:
        """Wait while the other side does not keep up."""
        while len(self._frames) >= QUEUED_FRAMES and not self._closed:
            self._room.clear()
            await self._room.wait()

    async def put(self, frame: bytes) -> None:
        """Queue a frame, after a while when the other side does not keep up. Dropped when the stream has ended."""
        await self.room()
        self.put_nowait(frame)

    def put_nowait(self, frame: bytes) -> None:
        """Queue a small frame at once; for those of which every call has few."""
        if not self._closed:
            self._frames.append(frame)
            self._filled.set()

    def _next(self) -> bytes:
        """The first frame in the queue, together with those behind it while they are small."""
        frames = [self._frames.popleft()]
        size = len(frames[0])
        while self._frames and size + len(self._frames[0]) <= self._joined_bytes:
            frames.append(self._frames.popleft())
            size += len(frames[-1])
        return frames[0] if len(frames) == 1 else _encoder.encode((PROTOCOL_VERSION, 0, _JOINED, frames))

    async def run(self) -> None:
        """Write until cancelled, or until a write fails."""
        try:
            while True:
                while self._frames:
                    await self._write(self._next())
                    self.num_written += 1
                    self._room.set()
                self._filled.clear()
                await self._filled.wait()
        finally:
            self._closed = True
            self._frames.clear()
            self._room.set()


def _parts(data: bytes, max_bytes: int) -> Sequence[bytes]:
    """The frames of a message; the message itself where it is not several, or cannot be read."""
    if _JOINED.encode() in data[:24]:  # so that nothing else is read twice
        with contextlib.suppress(WireError):
            frame = _read(data, max_bytes)
            if frame.kind == _JOINED:
                return decode(bytes(frame.body), list[bytes])
    return (data,)


def _frame(call_id: int, kind: str, message: msgspec.Struct | int | None, max_bytes: int) -> bytes:
    data = _encoder.encode((PROTOCOL_VERSION, call_id, kind, message))
    if len(data) > max_bytes:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {max_bytes}")
    return data


def _read(data: bytes, max_bytes: int) -> _Frame:
    if len(data) > max_bytes:
        raise WireError(f"a frame of {len(data)} bytes is over the limit of {max_bytes}")
    try:
        frame = _frames.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"malformed frame: {error}") from None
    if frame.version != PROTOCOL_VERSION:
        raise WireError(f"protocol version {frame.version} met version {PROTOCOL_VERSION}")
    return frame


def _call_id(data: bytes) -> int:
    """The call that a frame which cannot be read belongs to, or -1."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        match msgspec.msgpack.decode(data):
            case [_, int(call_id), *_] if abs(call_id) < 2**63:
                return call_id
    return -1


def _failure(error: Exception) -> _Failure:
    kind, message = type(error).__name__, str(error)[:MAX_REASON_CHARACTERS]
    if isinstance(error, InvalidRequest):
        return _Failure("InvalidRequest", message, error.field)
    if isinstance(error, Overloaded):
        return _Failure("Overloaded", message, None, error.retry_after_s)
    return _Failure(kind, message)


def _error(address: str, body: bytes) -> Exception:
    try:
        failure = decode(body, _Failure)
    except WireError as error:
        return error
    if failure.kind == "InvalidRequest":
        return InvalidRequest(failure.message, failure.field)
    if failure.kind == "Overloaded":
        return Overloaded(failure.message, failure.retry_after_s)
    kind = Leaving if failure.kind == "Leaving" else CallFailed
    return kind(f"{address} refused: {failure.kind}: {failure.message}", failure.kind)


def _options(max_frame_bytes: int) -> list[tuple[str, int]]:
    # gRPC ends a stream on a message over its limit; ours is half of it, so that one over ours costs only its call.
    limit = 2 * max_frame_bytes
    return [*_TRANSPORT_OPTIONS, ("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit)]


def _channel(address: str, tls: Tls | None, max_frame_bytes: int) -> grpc.aio.Channel:
    options = _options(max_frame_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(root_certificates=tls.ca, private_key=tls.key, certificate_chain=tls.cert)
    return grpc.aio.secure_channel(address, credentials, options=[*options, ("grpc.ssl_target_name_override", TLS_NAME)])
