"""A replica of the draft pool: soft state only, may be slow, absent or killed at any moment."""

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.messages import DraftReport
from deployments.wire import WireServer, decode
from engine.config import parse_config
from engine.types import ProposeReply, ProposeRequest

logger = logging.getLogger("ray.serve")


class Draft:
    """Hosts the draft model and announces its stream to the controller."""

    async def __init__(  # type: ignore[misc]
        self, config: dict[str, Any], secret: str, target_fingerprint: str, controller: DeploymentHandle[Any]
    ):
        from engine.build import build_served_draft

        self._config = parse_config(config)
        self._controller = controller
        self._forwards = ThreadPoolExecutor(max_workers=1, thread_name_prefix="propose")
        loop = asyncio.get_running_loop()
        self._model = await loop.run_in_executor(self._forwards, build_served_draft, self._config)
        self._server = WireServer({"propose": self._propose}, secret)
        address = await self._server.start(ray.util.get_node_ip_address())
        self._report = DraftReport(
            draft_id=serve.get_replica_context().replica_tag,
            address=address,
            target_fingerprint=target_fingerprint,
            info=self._model.info,
        )
        self._announcing = asyncio.create_task(self._announce())

    async def check_health(self) -> None:
        """Serve's liveness probe: a replica that no longer announces itself is replaced."""
        if self._announcing.done():
            raise RuntimeError("the announcing task ended")

    async def process_id(self) -> int:
        """Of this replica, for tests and for people."""
        return os.getpid()

    async def _announce(self) -> None:
        while True:
            try:
                await self._controller.report_draft.remote(self._report)
            except Exception as error:
                logger.warning("the controller cannot be reached: %s", type(error).__name__)
            await asyncio.sleep(self._config.controller.report_interval_s)

    async def _propose(self, body: bytes, caller: str) -> ProposeReply:
        request = decode(body, ProposeRequest)
        return await asyncio.get_running_loop().run_in_executor(self._forwards, self._model.propose, request)
