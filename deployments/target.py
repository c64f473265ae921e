"""The target's process: one model on its own device, answering verify calls over a stream."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import ray

from deployments.facts import read_facts
from deployments.logs import SERVE_LOGGER, set_up_actor, tell
from deployments.memory import freeze_loaded
from deployments.messages import ProcessFacts
from deployments.wire import WireServer, decode, read_secret, read_tls
from engine.config import parse_config
from engine.types import VerifyReply, VerifyRequest

logger = logging.getLogger(SERVE_LOGGER)


class TargetActor:
    """Child of a router, in the router's placement group. Ray restarts it; its state is soft."""

    def __init__(self, config: dict[str, Any], secret: str):
        from engine.build import build_served_target

        parsed = parse_config(config)
        set_up_actor(parsed.logging, "target")
        # One thread runs every forward: torch's thread pool belongs to the thread that uses it.
        self._forwards = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verify")
        self._target = self._forwards.submit(build_served_target, parsed).result()
        self._address: str | None = None
        streams = parsed.streams
        self._server = WireServer({"verify": self._verify}, read_secret(streams, secret), tls=read_tls(streams))
        freeze_loaded()

    async def hello(self) -> tuple[str, ProcessFacts, dict[str, Any]]:
        """Stream address, facts of this process and model info."""
        if self._address is None:
            self._address = await self._server.start(ray.util.get_node_ip_address())
        return self._address, read_facts(), msgspec.structs.asdict(self._target.info)

    async def _verify(self, body: bytes, caller: str) -> VerifyReply:
        request = decode(body, VerifyRequest)
        reply = await asyncio.get_running_loop().run_in_executor(self._forwards, self._target.verify, request)
        for item, verdict in zip(request.items, reply.verdicts, strict=True):
            if item.context is not None:
                told = {"choice": item.sequence_id, "tokens": len(item.tokens)}
                tell(logger, logging.DEBUG, "sequence opened", item.context.log_id, **told)
            if verdict.error is not None:
                tell(logger, logging.WARNING, "sequence failed", choice=item.sequence_id, error=verdict.error)
        return reply
