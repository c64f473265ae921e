"""The router's view of its target in another process, and of sources of drafts that need no process (see `draft_pool`)."""

import asyncio
import logging
from typing import Any

from deployments.counters import traffic_of
from deployments.logs import tell
from deployments.messages import DraftReport, ProcessFacts, Traffic
from deployments.wire import Tls, WireClient, WireError
from engine.drivers import DraftUnavailable, TargetLost
from engine.propose.base import DraftSource
from engine.types import (
    ModelInfo,
    PrepareReply,
    PrepareRequest,
    ProposeReply,
    ProposeRequest,
    VerifyReply,
    VerifyRequest,
)

logger = logging.getLogger("ray.serve")

VERIFY_DEADLINE_S = 60.0
"""A target that needs longer for one round hangs: it is restarted."""
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0


class StreamTarget:
    """The lane's own target actor. Ray restarts it when it dies; the caller is told by `TargetLost` and prefills again."""

    def __init__(self, actor: Any, secret: str, tls: Tls | None = None):
        self._actor = actor
        self._secret = secret
        self._tls = tls
        self._client: WireClient | None = None
        self._traffic_before = Traffic()
        """Of streams that are closed."""
        self.pid = 0
        self.head_step_times: tuple[tuple[int, float], ...] = ()
        """(rows, seconds) of a step of the prediction heads that live there; empty without any."""
        self.process: ProcessFacts | None = None
        """What the target's process says of itself."""
        self.num_losses = 0
        """Times that it did not answer any more and was waited for."""

    @property
    def traffic(self) -> Traffic:
        """Over all streams to the target, closed ones included."""
        return self._traffic_before if self._client is None else self._traffic_before + traffic_of(self._client)

    async def connect(self) -> ModelInfo:
        """Wait until the actor has loaded its model and open the stream; raises what its constructor raised."""
        address, self.process, info = await self._actor.hello.remote()
        self.pid = self.process.process_id
        self.head_step_times = await self._actor.head_step_times.remote()
        if self._client is not None:
            self._traffic_before += traffic_of(self._client)
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
            self.num_losses += 1
            names = ",".join(item.sequence_id for item in request.items)
            tell(logger, logging.WARNING, "the target does not answer", reason=error, choices=names)
            await self._reconnect()
            raise TargetLost(str(error)) from None

    async def propose(self, request: ProposeRequest, timeout_s: float) -> ProposeReply:
        """Ask the prediction heads that live with the target. Raises `DraftUnavailable`: a loss shows in the next verify."""
        if self._client is None:
            raise DraftUnavailable("no_draft")
        try:
            return await self._client.call("propose", request, ProposeReply, timeout_s)
        except WireError as error:
            logger.warning("the heads beside the target do not answer: %s", error)
            raise DraftUnavailable("draft_failed") from None

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


class _WithoutReplicas:
    """A source that no process can be asked for, and that has nobody to prepare anything."""

    prepares = False
    extends = False

    def prepare(self, request: PrepareRequest) -> None:
        """Never asked: ``prepares`` is false."""

    async def collect(self, patience_s: float) -> tuple[PrepareReply, ...]:
        """Nothing was prepared."""
        return ()

    async def update(self, drafts: tuple[DraftReport, ...]) -> set[str]:
        """There are no replicas to follow."""
        return set()


class LocalDraft(_WithoutReplicas):
    """A source that runs in the router itself because it costs next to nothing (drafts from text)."""

    available = True
    state = "ok"

    def __init__(self, source: DraftSource):
        self._source = source
        self.name = source.name

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`."""
        return self._source.propose(request)


class TargetHeads(_WithoutReplicas):
    """Prediction heads that live with the target, which answers for them over its own stream."""

    available = True
    state = "ok"
    name = "heads"

    def __init__(self, target: StreamTarget, timeout_s: float):
        """``timeout_s``: longest wait of a round for its drafts."""
        self._target = target
        self._timeout_s = timeout_s

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`. Raises `DraftUnavailable`."""
        return await self._target.propose(request, self._timeout_s)


class NoDraft(_WithoutReplicas):
    """Speculation is switched off."""

    available = False
    name = "none"
    state = "off"

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        """Never asked."""
        raise DraftUnavailable("off")
