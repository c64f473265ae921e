"""The router's view of models in other processes: calls over streams, what to do when they fail, and when to ask again."""

import asyncio
import logging
import time
import zlib
from functools import partial
from typing import Any

from deployments.messages import DraftReport
from deployments.wire import Tls, WireClient, WireError
from engine.calibrate import StepTimes, measure_draft
from engine.drivers import Clock, DraftUnavailable, TargetLost
from engine.propose.base import DraftSource
from engine.types import ModelInfo, ProposeReply, ProposeRequest, VerifyReply, VerifyRequest

logger = logging.getLogger("ray.serve")

VERIFY_DEADLINE_S = 60.0
"""A target that needs longer for one round hangs: it is restarted."""
MEASURE_DEADLINE_S = 10.0
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0


class StreamTarget:
    """The lane's own target actor. Ray restarts it when it dies; the caller is told by `TargetLost` and prefills again."""

    def __init__(self, actor: Any, secret: str, tls: Tls | None = None):
        self._actor = actor
        self._secret = secret
        self._tls = tls
        self._client: WireClient | None = None
        self.pid = 0

    async def connect(self) -> ModelInfo:
        """Wait until the actor has loaded its model and open the stream; raises what its constructor raised."""
        address, self.pid, info = await self._actor.hello.remote()
        if self._client is not None:
            await self._client.close()
        self._client = WireClient(address, self._secret, tls=self._tls)
        return ModelInfo(**info)

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """As `TargetModel.verify`."""
        if self._client is None:
            raise TargetLost("not connected")
        try:
            return await self._client.call("verify", request, VerifyReply, VERIFY_DEADLINE_S)
        except WireError as error:
            logger.warning("the target does not answer: %s", error)
            await self._reconnect()
            raise TargetLost(str(error)) from None

    async def _reconnect(self) -> None:
        """Ask until Ray has restarted the actor."""
        delay_s = FIRST_RETRY_S
        while True:
            try:
                await self.connect()
                return
            except Exception as error:
                logger.warning("waiting for the target to come back: %s", type(error).__name__)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_RETRY_S)


class LocalDraft:
    """A source that runs in the router itself because it costs next to nothing (n-gram lookup)."""

    available = True
    state = "ok"

    def __init__(self, source: DraftSource):
        self._source = source
        self.name = source.name

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`."""
        return self._source.propose(request)

    async def update(self, drafts: tuple[DraftReport, ...]) -> bool:
        """There are no replicas to follow."""
        return False


class NoDraft:
    """Speculation is switched off."""

    available = False
    name = "none"
    state = "off"

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        """Never asked."""
        raise DraftUnavailable("off")

    async def update(self, drafts: tuple[DraftReport, ...]) -> bool:
        """There are no replicas to follow."""
        return False


class StreamDraft:
    """One replica of the draft pool, chosen from the directory and kept while it lives.

    After a failure it is left alone for a while that doubles with each failure in a row, then tried again by a real round; that
    round pays at most the deadline.
    """

    def __init__(
        self,
        name: str,
        lane_id: str,
        target_fingerprint: str,
        secret: str,
        timeout_s: float,
        clock: Clock = time.monotonic,
        *,
        tls: Tls | None = None,
    ):
        self.name = name
        self.state = "no draft has announced itself yet"
        self._lane_id = lane_id
        self._fingerprint = target_fingerprint
        self._secret = secret
        self._timeout_s = timeout_s
        self._tls = tls
        self._clock = clock
        self._current: DraftReport | None = None
        self._client: WireClient | None = None
        self._failures = 0
        self._retry_at_s = 0.0

    @property
    def available(self) -> bool:
        """Whether there is a draft and it is not being left alone."""
        return self._client is not None and self._clock() >= self._retry_at_s

    async def measure(self) -> StepTimes:
        """Step times of the draft that answers now, hops included; as announced when it does not answer."""
        if self._client is None or self._current is None:
            return ()
        try:
            return await measure_draft(partial(self._client.call, "propose", answer=ProposeReply, timeout_s=MEASURE_DEADLINE_S))
        except WireError:
            return self._current.info.step_times

    @property
    def announced_step_times(self) -> StepTimes:
        """What the draft measured when it loaded."""
        return self._current.info.step_times if self._current is not None else ()

    async def update(self, drafts: tuple[DraftReport, ...]) -> bool:
        """Follow the directory; true when another draft answers from now on."""
        if self._current is not None and any(draft.draft_id == self._current.draft_id for draft in drafts):
            return False
        fitting = [draft for draft in drafts if draft.target_fingerprint == self._fingerprint]
        await self._hang_up()
        if not fitting:
            self.state = "no draft for this target's vocabulary" if drafts else "no draft is running"
            return True
        self._current = fitting[zlib.crc32(self._lane_id.encode()) % len(fitting)]
        self._client = WireClient(self._current.address, self._secret, self._lane_id, tls=self._tls)
        self._failures, self._retry_at_s, self.state = 0, 0.0, "ok"
        return True

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`, within the deadline."""
        if self._client is None:
            raise DraftUnavailable("no_draft")
        try:
            reply = await self._client.call("propose", request, ProposeReply, self._timeout_s)
        except WireError as error:
            self._failures += 1
            self._retry_at_s = self._clock() + min(FIRST_RETRY_S * 2 ** (self._failures - 1), LONGEST_RETRY_S)
            self.state = f"left alone after {self._failures} failures: {error}"
            raise DraftUnavailable("draft_failed") from None
        self._failures, self.state = 0, "ok"
        return reply

    async def _hang_up(self) -> None:
        if self._client is not None:
            await self._client.close()
        self._client, self._current = None, None
