"""A replica of the draft pool: soft state only, may be slow, absent or killed at any moment."""

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from autoscale.serve_adapter import WANTED_REPLICAS
from deployments.facts import read_facts
from deployments.logs import set_up_replica, tell
from deployments.memory import freeze_loaded
from deployments.merged_draft import MergedDraft
from deployments.messages import DraftReport
from deployments.wire import PROTOCOL_VERSION, WireServer, read_secret, read_tls
from engine.config import parse_config
from engine.types import PrepareReply, PrepareRequest, ProposeReply, ProposeRequest

logger = logging.getLogger("ray.serve")
LEAVE_NOTICE_S = 2.0


class Draft:
    """Hosts the draft model, merges the work of all lanes (`MergedDraft`) and announces its stream to the controller."""

    async def __init__(  # type: ignore[misc]
        self, config: dict[str, Any], secret: str, target_fingerprint: str, controller: DeploymentHandle[Any]
    ):
        from engine.build import build_served_draft

        self._config = parse_config(config)
        set_up_replica()
        self._controller = controller
        self._forwards = ThreadPoolExecutor(max_workers=1, thread_name_prefix="propose")
        loop = asyncio.get_running_loop()
        self._model = await loop.run_in_executor(self._forwards, build_served_draft, self._config)
        self._merged = MergedDraft(self._run)
        handlers = {"propose": self._merged.propose, "prepare": self._merged.prepare}
        streams = self._config.streams
        self._server = WireServer(handlers, read_secret(streams, secret), tls=read_tls(streams))
        address = await self._server.start(ray.util.get_node_ip_address())
        self._report = DraftReport(
            draft_id=serve.get_replica_context().replica_tag,
            address=address,
            target_fingerprint=target_fingerprint,
            info=self._model.info,
            protocol=PROTOCOL_VERSION,
            prepares=self._model.prepares,
            extends=self._model.extends,
            process_id=os.getpid(),
            process=read_facts(),
        )
        self._wanted: int | None = None
        self._announcing = asyncio.create_task(self._announce())
        freeze_loaded()

    async def check_health(self) -> None:
        """Serve's liveness probe: a replica that no longer announces itself is replaced."""
        if self._announcing.done():
            raise RuntimeError("the announcing task ended")

    async def process_id(self) -> int:
        """Of this replica, for tests and for people; also what `ColdStart` waits for."""
        return os.getpid()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `autoscale.serve_adapter.replicas_as_decided`: nothing while the controller is silent."""
        return {} if self._wanted is None else {WANTED_REPLICAS: self._wanted}

    async def __del__(self) -> None:
        if not hasattr(self, "_server"):
            return
        self._server.leaving = True
        await self._tell(self._controller.report_draft, self._current_report())
        await self._server.drain()
        self._announcing.cancel()
        await self._server.stop()
        await self._tell(self._controller.forget_draft, self._report.draft_id)

    async def _tell(self, method: Any, argument: Any) -> None:
        try:
            async with asyncio.timeout(LEAVE_NOTICE_S):
                await method.remote(argument)
        except Exception as error:
            logger.warning("the controller was not told that this draft leaves: %s", type(error).__name__)

    async def _announce(self) -> None:
        while True:
            try:
                await self._merged.expire(self._server.callers)
                self._wanted = await self._controller.report_draft.remote(self._current_report())
            except Exception as error:
                self._wanted = None
                logger.warning("could not report to the controller: %s: %s", type(error).__name__, error)
            await asyncio.sleep(self._config.controller.report_interval_s)

    def _current_report(self) -> DraftReport:
        return msgspec.structs.replace(self._report, work=self._merged.work, leaving=self._server.leaving)

    async def _run(
        self, proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]
    ) -> tuple[list[ProposeReply], list[PrepareReply]]:
        messages: list[ProposeRequest | PrepareRequest] = [*proposes, *prepares]
        for item in (item for message in messages for item in message.items):
            if item.context is not None:
                told = {"choice": item.sequence_id, "tokens": len(item.tokens)}
                tell(logger, logging.DEBUG, "sequence opened", item.context.log_id, **told)
        return await asyncio.get_running_loop().run_in_executor(self._forwards, self._model.run, proposes, prepares)
