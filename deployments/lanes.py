"""The Api's view of the lanes: which one a request goes to, its stream, and going on elsewhere when a lane is lost."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from deployments.logs import tell
from deployments.messages import LaneEntry
from deployments.wire import CallFailed, Leaving, Tls, Unreachable, WireClient, WireError
from engine.drivers import Clock
from engine.errors import OutriderError
from engine.types import Delta, GenerateRequest

logger = logging.getLogger("ray.serve")
MAX_RESUMES = 3
WAIT_FOR_LANE_S = 60.0
"""A new request waits this long while no lane takes it."""
RESUME_WAIT_S = 300.0
"""A request that lost its lane waits longer: the only lane may have to load its model again, and the work would be lost."""
RETRY_S = 0.5
"""A lane that was lost is left alone for this long; a lane that is dead leaves the directory after some seconds."""


class LaneError(OutriderError):
    """The lane failed, too many lanes died under one request, or none is there."""


class _LaneLost(Exception):
    """The lane died in the middle of a stream."""


class _NotTaken(Exception):
    """The lane never got the request, or takes no more."""


class _Lane:
    """One lane of the directory, its stream, and its load as seen from here."""

    def __init__(self, entry: LaneEntry, client: WireClient):
        self.address = entry.address
        self.client = client
        self.listed = True
        self.num_open = 0
        """Requests of this Api."""
        self.retry_at_s = 0.0
        self._num_others = 0

    @property
    def num_requests(self) -> int:
        """Requests there: those of others when the lane last reported, and our own now."""
        return self._num_others + self.num_open

    def update(self, entry: LaneEntry) -> None:
        """Take in a report."""
        self._num_others = max(entry.num_requests - self.num_open, 0)


class StreamLanes:
    """Streams of requests to the lanes of the directory, each to the least loaded; leaving a stream cancels it in the lane.

    When the lane is lost, the request goes on in another one with what it has committed. Under ``greedy`` and ``coupled`` the
    text is the same as without the fault, under ``rejection`` and ``block`` it has the same distribution.
    """

    def __init__(
        self,
        secret: str,
        name: str,
        tls: Tls | None = None,
        *,
        patience_s: float = WAIT_FOR_LANE_S,
        resume_patience_s: float = RESUME_WAIT_S,
        clock: Clock = time.monotonic,
    ):
        """``name`` tells the lanes who calls; the patience bounds the wait for a lane that takes a request."""
        self._secret = secret
        self._name = name
        self._tls = tls
        self._patience_s = patience_s
        self._resume_patience_s = resume_patience_s
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._changed = asyncio.Event()

    async def update(self, entries: tuple[LaneEntry, ...]) -> None:
        """Follow the directory. Streams on a lane that is no longer listed go on while the lane lives."""
        addresses = {entry.address for entry in entries}
        for entry in entries:
            lane = self._lanes.get(entry.address)
            if lane is None:
                client = WireClient(entry.address, self._secret, self._name, tls=self._tls)
                lane = self._lanes[entry.address] = _Lane(entry, client)
            lane.update(entry)
        for lane in list(self._lanes.values()):
            lane.listed = lane.address in addresses
            await self._drop_if_unused(lane)
        self._changed.set()

    async def close(self) -> None:
        """Hang up on all lanes."""
        for lane in self._lanes.values():
            await lane.client.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """One request's deltas; raises `InvalidRequest`, `Overloaded` or `LaneError`."""
        before = last = Delta(request_id=request.request_id, token_ids=())
        name = request.log_id or request.request_id
        num_lost, deadline_s, output = 0, self._clock() + self._patience_s, list(request.output_ids)
        while num_lost <= MAX_RESUMES:
            lane = await self._choose(deadline_s)
            # A new id: if the old lane lives after all, it must not meet its own request again.
            own_id = f"{request.request_id}.{num_lost}" if num_lost else request.request_id
            resumed = msgspec.structs.replace(request, request_id=own_id, output_ids=tuple(output))
            try:
                async with aclosing(self._stream(lane, resumed)) as deltas:
                    async for delta in deltas:
                        last = _continued(before, delta) if num_lost else delta
                        output += delta.token_ids
                        yield last
                return
            except _NotTaken as error:
                tell(logger, logging.INFO, "request not taken by a lane", name, choice=request.request_id, reason=error)
            except _LaneLost as error:
                before, num_lost, deadline_s = last, num_lost + 1, self._clock() + self._resume_patience_s
                told = {"choice": request.request_id, "reason": error, "tokens": len(output), "times": num_lost}
                tell(logger, logging.WARNING, "request lost its lane and goes on in another", name, **told)
        raise LaneError(f"the request lost its lane {num_lost} times")

    async def _stream(self, lane: _Lane, request: GenerateRequest) -> AsyncGenerator[Delta]:
        lane.num_open += 1
        try:
            async with aclosing(lane.client.stream("generate", request, Delta)) as deltas:
                async for delta in deltas:
                    yield delta
                    if delta.finish_reason is not None:
                        return
            raise _LaneLost("the stream ended early")
        except (Leaving, Unreachable) as error:
            lane.retry_at_s = self._clock() + RETRY_S
            raise _NotTaken(str(error)) from None
        except CallFailed as error:
            name = request.log_id or request.request_id
            tell(logger, logging.ERROR, "request failed in its lane", name, choice=request.request_id, reason=error)
            raise LaneError(f"the lane failed: {error.kind}") from None
        except WireError as error:
            lane.retry_at_s = self._clock() + RETRY_S
            raise _LaneLost(str(error)) from None
        finally:
            lane.num_open -= 1
            await self._drop_if_unused(lane)

    async def _choose(self, deadline_s: float) -> _Lane:
        """The least loaded lane that may be asked; waits for one until the deadline."""
        while True:
            now_s = self._clock()
            usable = [lane for lane in self._lanes.values() if lane.listed and now_s >= lane.retry_at_s]
            if usable:
                return min(usable, key=lambda lane: (lane.num_requests, lane.num_open, lane.address))
            if now_s >= deadline_s:
                raise LaneError("no lane is ready to take the request; try again later")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(RETRY_S, deadline_s - now_s)):
                    await self._changed.wait()

    async def _drop_if_unused(self, lane: _Lane) -> None:
        if not lane.listed and not lane.num_open and self._lanes.get(lane.address) is lane:
            del self._lanes[lane.address]
            await lane.client.close()


def _continued(before: Delta, delta: Delta) -> Delta:
    """Counters of a resumed request include those of the lanes before."""
    return msgspec.structs.replace(
        delta,
        request_id=before.request_id,
        num_drafted=before.num_drafted + delta.num_drafted,
        num_accepted=before.num_accepted + delta.num_accepted,
        num_rounds=before.num_rounds + delta.num_rounds,
    )
