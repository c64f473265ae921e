"""What one hop costs: router → draft → router with the ids of a batch, as a message over our streams and over Ray actor calls.

Both go between the same two actors, in turns within one run, so that whatever else the machine does hits both alike.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np

from deployments.wire import WireClient, WireServer, decode
from engine.types import Proposal, ProposeItem, ProposeReply, ProposeRequest

DEADLINE_S = 10.0
IN_A_TURN = 20
"""Calls of one kind before the other has its turn: Ray's threads still tidy up after an actor call when its answer is there."""
UNTIMED = 5
"""First calls of a turn."""


class Quartiles(msgspec.Struct, frozen=True):
    """Of round trips, in milliseconds."""

    p25: float
    p50: float
    p75: float


class Hops(msgspec.Struct, frozen=True, kw_only=True):
    """Round trips of the same message between the same two processes."""

    num_ids: int
    num_calls: int
    stream_ms: Quartiles
    actor_ms: Quartiles


class _Answering:
    """The draft's part: answers with as many ids as it got."""

    def __init__(self) -> None:
        self._server = WireServer({"propose": self._propose}, "")

    async def address(self) -> str:
        from ray.util import get_node_ip_address

        return await self._server.start(get_node_ip_address())

    async def _propose(self, body: bytes, caller: str) -> ProposeReply:
        return await self.propose(decode(body, ProposeRequest))

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        proposals = tuple(Proposal(sequence_id=item.sequence_id, tokens=item.tokens) for item in request.items)
        return ProposeReply(round_id=request.round_id, proposals=proposals)


class _Asking:
    """The router's part."""

    def __init__(self, answering: Any, address: str):
        self._answering = answering
        self._client = WireClient(address, "")

    async def measure(self, num_ids: int, num_calls: int) -> tuple[list[float], list[float]]:
        """Seconds of every round trip over the stream, and over actor calls."""
        item = ProposeItem(sequence_id="s", base_length=0, tokens=tuple(range(100_000, 100_000 + num_ids)), depth=num_ids)
        request = ProposeRequest(round_id=1, items=(item,))
        stream_s: list[float] = []
        actor_s: list[float] = []
        while len(stream_s) < num_calls:
            stream_s += await _time_in_turn(lambda: self._over_stream(request))
            actor_s += await _time_in_turn(lambda: self._over_actor_call(request))
        return stream_s, actor_s

    async def _over_stream(self, request: ProposeRequest) -> ProposeReply:
        return await self._client.call("propose", request, ProposeReply, DEADLINE_S)

    async def _over_actor_call(self, request: ProposeRequest) -> ProposeReply:
        reply: ProposeReply = await self._answering.propose.remote(request)
        return reply


def measure_hops(num_ids: int = 64, num_calls: int = 500) -> Hops:
    """Measure on the Ray that is running, in two workers of its own.

    Ray is imported here and not before: its settings are read when it is, and `deployments.launch.cluster` makes them.
    """
    import ray

    answering = _start(_Answering)
    asking = _start(_Asking, answering, ray.get(answering.address.remote()))
    stream_s, actor_s = ray.get(asking.measure.remote(num_ids, num_calls))
    ray.kill(asking)
    ray.kill(answering)
    return Hops(num_ids=num_ids, num_calls=num_calls, stream_ms=_quartiles(stream_s), actor_ms=_quartiles(actor_s))


def _start(actor_class: type, *arguments: Any) -> Any:
    import ray

    return ray.remote(num_cpus=0)(actor_class).remote(*arguments)


async def _time_in_turn(call: Callable[[], Awaitable[ProposeReply]]) -> list[float]:
    """Seconds of each call."""
    times_s = []
    for _ in range(UNTIMED + IN_A_TURN):
        started_s = time.perf_counter()
        await call()
        times_s.append(time.perf_counter() - started_s)
    return times_s[UNTIMED:]


def _quartiles(times_s: list[float]) -> Quartiles:
    return Quartiles(*(1000 * float(value) for value in np.quantile(times_s, (0.25, 0.5, 0.75))))
