"""Two ways to play rounds: in this process (`SyncDriver`) and with models elsewhere (`AsyncDriver`, the router's)."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec

from engine.drafting import Answer
from engine.errors import OutriderError
from engine.propose.base import DraftSource, OverlappedSource, can_extend, can_prepare
from engine.request import LIVE, Event, Request
from engine.round import Collect, Collected, NoDrafts, Propose, RoundResult, Steps, Verify, make_delta, play_round
from engine.scheduler import Scheduler
from engine.text import TokenDecoder
from engine.types import (
    Delta,
    FinishReason,
    GenerateRequest,
    PrepareReply,
    PrepareRequest,
    ProposeReply,
    ProposeRequest,
    StepReport,
    VerifyReply,
    VerifyRequest,
)
from engine.verify.base import TargetModel

logger = logging.getLogger(__name__)
Clock = Callable[[], float]
Deliver = Callable[[Delta], None]
Wish = Collect | Propose | Verify
LOOK_AHEAD_AFTER_S = 0.002
"""After the request is on its way, and before most targets have answered."""
PAUSE_AFTER_FAILURE_S = 0.05
"""A target that fails at once is asked again after this, so that the other tasks of the process get their turn."""


class TargetLost(OutriderError):
    """The target does not answer any more and holds nothing; raised by a verify call, once per loss."""


class DraftUnavailable(OutriderError):
    """No drafts can be had now; the message is the reason that is counted."""


class SyncDriver:
    """All parts in one process, one call after the other: tests, `outrider generate`, benchmarks.

    A source that can prepare is told to just before the target verifies: nothing overlaps, but what is prepared is the same.
    A source may be unavailable; any other error of a part in this process is a bug and is raised.
    """

    def __init__(
        self,
        target: TargetModel,
        source: DraftSource | None,
        scheduler: Scheduler,
        decoder: TokenDecoder | None = None,
        clock: Clock = time.monotonic,
    ):
        self.target = target
        self.source = source
        self.scheduler = scheduler
        self._decoder = decoder
        self._clock = clock
        self._round_id = 0
        self._prepared: list[PrepareReply] = []
        self._asking_s = 0.0

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; raises `Overloaded` when the queue is full."""
        self.scheduler.add(Request(request, self._decoder, self._clock()))

    def cancel(self, request_id: str) -> None:
        """End a request if it is still alive."""
        request = self.scheduler.find(request_id)
        if request is not None:
            self.scheduler.remove(request, Event.CANCEL)

    def step(self) -> RoundResult:
        """Play one round."""
        now_s = self._clock()
        self._round_id += 1
        self._asking_s = 0.0
        drafts, prepares, extends = self.source is not None, can_prepare(self.source), can_extend(self.source)
        steps = play_round(self.scheduler, self._round_id, now_s, drafts=drafts, prepares=prepares, extends=extends)
        result = self._drive(steps)
        self.scheduler.policy.report(_timed(result.report, self._clock() - now_s, self._asking_s), now_s)
        return result

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Delta]:
        """Run requests to their ends, yielding what each round commits."""
        for request in requests:
            self.add(request)
        while self.scheduler.running or self.scheduler.waiting:
            yield from self.step().deltas

    def _drive(self, steps: Steps) -> RoundResult:
        try:
            wish = next(steps)
            while True:
                wish = steps.send(self._answer(wish))
        except StopIteration as finished:
            result: RoundResult = finished.value
            return result

    def _answer(self, wish: Wish) -> Answer:
        if isinstance(wish, Propose):
            return self._propose(wish.request)
        if isinstance(wish, Collect):
            replies, self._prepared = self._prepared, []
            return Collected(tuple(replies))
        if wish.prepare is not None:
            self._prepare(wish.prepare)
        return self.target.verify(wish.request)

    def _propose(self, request: ProposeRequest) -> ProposeReply | NoDrafts:
        if self.source is None:
            raise AssertionError("a round asked for drafts although there is no source")
        started_s = self._clock()
        try:
            return self.source.propose(request)
        except DraftUnavailable as error:
            return NoDrafts(str(error))
        finally:
            self._asking_s += self._clock() - started_s

    def _prepare(self, request: PrepareRequest) -> None:
        with suppress(DraftUnavailable):  # the next round misses what was to be prepared
            self._prepared.append(cast(OverlappedSource, self.source).prepare(request))


class RemoteTarget(Protocol):
    """A target in another process."""

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """As `TargetModel.verify`; raises `TargetLost` when a new one took its place."""


class RemoteDraft(Protocol):
    """A source of drafts that may be anywhere, or nowhere."""

    @property
    def available(self) -> bool:
        """Whether asking makes sense now."""

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`; raises `DraftUnavailable` at the latest when its deadline has passed."""

    @property
    def prepares(self) -> bool:
        """Whether it can work while the target verifies. If not, `prepare` and `collect` are never called."""

    @property
    def extends(self) -> bool:
        """Whether it can go on after tokens that another source drafted, as `engine.propose.base.can_extend`."""

    def prepare(self, request: PrepareRequest) -> None:
        """Send `OverlappedSource.prepare` its request and return at once; what fails is an answer that never comes.

        Items whose replica has not answered its last request are left out.
        """

    async def collect(self, patience_s: float) -> tuple[PrepareReply, ...]:
        """The answers that have come since the last call, each once; waits up to ``patience_s`` while any are under way."""


@dataclass(slots=True)
class _Stream:
    request: Request
    deliver: Deliver
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    """Of `deliver`."""


class AsyncDriver:
    """Plays rounds for many concurrent streams. One task (`run`) changes running requests; the streams only queue and wait."""

    def __init__(
        self,
        target: RemoteTarget,
        draft: RemoteDraft,
        scheduler: Scheduler,
        decoder: TokenDecoder | None = None,
        on_report: Callable[[StepReport], None] = lambda report: None,
        clock: Clock = time.monotonic,
    ):
        self.scheduler = scheduler
        self._target = target
        self._draft = draft
        self._decoder = decoder
        self._on_report = on_report
        self._clock = clock
        self._round_id = 0
        self._asking_s = 0.0
        self._streams: dict[str, _Stream] = {}
        self._cancelled: list[Request] = []
        self._wake = asyncio.Event()

    async def play(self, request: GenerateRequest, deliver: Deliver) -> None:
        """Run one request to its end. Leaving this call cancels it.

        ``deliver`` takes each of its deltas when a round ends; it must not wait: a round wakes nobody but those whose request
        has ended. What it raises ends its request only, and is raised here. Raises `Overloaded`, or ValueError for an id whose
        stream is still open, before the first delta.
        """
        with self._playing(request, deliver) as stream:
            await stream.ended.wait()
            if stream.error is not None:
                raise stream.error

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """As `play`, for callers that take the deltas one by one. Leaving the iterator early cancels the request."""
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        with self._playing(request, deltas.put_nowait):
            while True:
                delta = await deltas.get()
                yield delta
                if delta.finish_reason is not None:
                    return

    @contextmanager
    def _playing(self, request: GenerateRequest, deliver: Deliver) -> Iterator[_Stream]:
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id} is already in use")
        stream = _Stream(Request(request, self._decoder, self._clock()), deliver)
        self.scheduler.add(stream.request)
        self._streams[request.request_id] = stream
        self._wake.set()
        try:
            yield stream
        finally:
            del self._streams[request.request_id]
            if stream.request.state in LIVE:
                self._cancelled.append(stream.request)
                self._wake.set()

    async def run(self) -> None:
        """Play rounds while there is work, for ever. A failing round fails its requests, never the loop."""
        while True:
            self._drop_cancelled()
            if not self.scheduler.has_work:
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                await self._step()
            except TargetLost as error:
                logger.warning("target lost, prefilling %d requests again: %s", len(self.scheduler.running), error)
                self.scheduler.forget_target()
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
            except Exception as error:
                logger.exception("round %d failed", self._round_id)
                self._fail_running(f"the target could not run this round: {type(error).__name__}")
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _step(self) -> None:
        now_s = self._clock()
        self._round_id += 1
        self._asking_s = 0.0
        available, prepares = self._draft.available, self._draft.prepares and self.scheduler.policy.overlaps
        extends = self._draft.extends
        steps = play_round(self.scheduler, self._round_id, now_s, drafts=available, prepares=prepares, extends=extends)
        result = await self._drive(steps)
        for delta in result.deltas:
            self._deliver(delta)
        self._learn(_timed(result.report, self._clock() - now_s, self._asking_s), now_s)

    def _learn(self, report: StepReport, now_s: float) -> None:
        """The tokens are on their way already: what is wrong with a policy or a metric is no reason to fail anybody."""
        try:
            self.scheduler.policy.report(report, now_s)
            self._on_report(report)
        except Exception:
            logger.exception("the report of round %d could not be used", report.round_id)

    async def _drive(self, steps: Steps) -> RoundResult:
        try:
            wish = next(steps)
            while True:
                wish = steps.send(await self._answer(wish))
        except StopIteration as finished:
            result: RoundResult = finished.value
            return result

    async def _answer(self, wish: Wish) -> Answer:
        if isinstance(wish, Propose):
            return await self._propose(wish.request)
        if isinstance(wish, Collect):
            return await self._collect(wish.patience_s)
        if wish.prepare is not None:
            self._prepare(wish.prepare)
        return await self._verify(wish.request)

    async def _verify(self, request: VerifyRequest) -> VerifyReply:
        """Ask the target; while it computes, the policy does what the next round would have to wait for."""
        verify = asyncio.ensure_future(self._target.verify(request))
        try:
            await asyncio.wait((verify,), timeout=LOOK_AHEAD_AFTER_S)
            if not verify.done():
                self._look_ahead(sum(item.sample for item in request.items))
            return await verify
        finally:
            verify.cancel()

    def _look_ahead(self, batch_size: int) -> None:
        try:
            self.scheduler.policy.look_ahead(batch_size)
        except Exception:
            logger.exception("the policy could not look ahead in round %d", self._round_id)

    async def _propose(self, request: ProposeRequest) -> ProposeReply | NoDrafts:
        started_s = self._clock()
        try:
            return await self._draft.propose(request)
        except DraftUnavailable as error:
            return NoDrafts(str(error))
        except Exception:
            logger.exception("the draft could not be asked in round %d", request.round_id)
            return NoDrafts("draft_error")
        finally:
            self._asking_s += self._clock() - started_s

    def _prepare(self, request: PrepareRequest) -> None:
        try:
            self._draft.prepare(request)
        except Exception:
            logger.exception("the draft could not be told to prepare in round %d", request.round_id)

    async def _collect(self, patience_s: float) -> Collected:
        started_s = self._clock()
        try:
            replies = await self._draft.collect(patience_s)
        except Exception:
            logger.exception("what the draft prepared could not be collected in round %d", self._round_id)
            replies = ()
        return Collected(replies, self._clock() - started_s)

    def _deliver(self, delta: Delta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None or stream.ended.is_set():
            return
        try:
            stream.deliver(delta)
        except Exception as error:
            stream.error = error
        if stream.error is not None or delta.finish_reason is not None:
            stream.ended.set()

    def _drop_cancelled(self) -> None:
        for request in self._cancelled:
            if request.state in LIVE:
                self.scheduler.remove(request, Event.CANCEL)
        self._cancelled.clear()

    def _fail_running(self, message: str) -> None:
        # A round that fails before it admits anybody would fail for ever: then it is those who wait who cannot be served.
        for request in list(self.scheduler.running or self.scheduler.waiting):
            self.scheduler.remove(request, Event.FAIL)
        # Besides these, a round that broke half way may have ended requests whose last delta went down with it.
        for stream in self._streams.values():
            if stream.request.state not in LIVE:
                self._deliver(make_delta(stream.request, FinishReason.ERROR, error=message))


def _timed(report: StepReport, round_time_s: float, asking_s: float) -> StepReport:
    """With the times that only a driver can take; waiting for prepared drafts is in the report already."""
    return msgspec.structs.replace(report, round_time_s=round_time_s, exposed_time_s=report.exposed_time_s + asking_s)
