"""The target's process: one model on its own device, answering verify calls over a stream.

Prediction heads live here too: then it answers propose calls as well.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import ray

from deployments.facts import read_facts
from deployments.logs import SERVE_LOGGER, set_up_actor, tell
from deployments.memory import freeze_loaded
from deployments.messages import ProcessFacts
from deployments.wire import WireServer, decode, read_secret, read_tls
from engine.config import parse_config
from engine.types import ProposeReply, ProposeRequest, VerifyReply, VerifyRequest

if TYPE_CHECKING:
    from engine.verify.taps import HeadsBeside

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
        heads = getattr(self._target, "heads", None)
        self._heads: HeadsBeside | None = heads
        handlers = {"verify": self._verify, **({} if heads is None else {"propose": self._propose})}
        self._server = WireServer(handlers, read_secret(streams, secret), tls=read_tls(streams))
        freeze_loaded()

    async def hello(self) -> tuple[str, ProcessFacts, dict[str, Any]]:
        """Stream address, facts of this process and model info."""
        if self._address is None:
            self._address = await self._server.start(ray.util.get_node_ip_address())
        return self._address, read_facts(), msgspec.structs.asdict(self._target.info)

    async def head_step_times(self) -> tuple[tuple[int, float], ...]:
        """(rows, seconds) of a step of the prediction heads; empty without any."""
        return () if self._heads is None else self._heads.info.step_times

    async def _propose(self, body: bytes, caller: str) -> ProposeReply:
        if self._heads is None:
            raise AssertionError("there are no heads to ask")
        request = decode(body, ProposeRequest)
        return await asyncio.get_running_loop().run_in_executor(self._forwards, self._heads.propose, request)

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
