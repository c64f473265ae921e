"""One draft model for many lanes: what is merged, what is kept apart, and what is forgotten."""

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import pytest
from fake_drafts import CONTEXT, FakeModel, continued, turns
from hypothesis import given
from hypothesis import strategies as st

from deployments.merged_draft import LANE_TTL_S, SEQUENCE_TTL_S, MergedDraft, _prefix
from deployments.wire import WireError
from engine.testing import FakeClock
from engine.types import (
    PrepareItem,
    PrepareReply,
    PrepareRequest,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
)


class Server:
    """A `MergedDraft` whose model can be kept busy."""

    def __init__(self) -> None:
        self.model = FakeModel()
        self.clock = FakeClock()
        self.merged = MergedDraft(self._run, self.clock)
        self.gate = asyncio.Event()
        self.gate.set()

    async def _run(
        self, proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]
    ) -> tuple[list[ProposeReply], list[PrepareReply]]:
        await self.gate.wait()
        replies = self.model.run(proposes, prepares)
        await turns(3)  # a pass takes its time: others arrive meanwhile
        return replies

    async def propose(
        self, lane: str, *names: str, ids: tuple[int, ...] = (1, 2), release: tuple[str, ...] = ()
    ) -> ProposeReply:
        """Ask for two tokens for each of the named sequences."""
        items = tuple(ProposeItem(sequence_id=name, base_length=0, tokens=ids, depth=2, context=CONTEXT) for name in names)
        request = ProposeRequest(round_id=1, items=items, release=release)
        return await self.merged.propose(msgspec.msgpack.encode(request), lane)

    async def prepare(self, lane: str, name: str) -> PrepareReply:
        item = PrepareItem(sequence_id=name, base_length=0, tokens=(1, 2), depth=2, fan_out=(1,), context=CONTEXT)
        return await self.merged.prepare(msgspec.msgpack.encode(PrepareRequest(round_id=1, items=(item,))), lane)

    @property
    def batches(self) -> list[int]:
        """Messages of each pass."""
        return [len(proposes) + len(prepares) for proposes, prepares in self.model.runs]


async def test_an_idle_model_runs_at_once_and_a_busy_one_collects() -> None:
    """Bug guarded: every message is a pass of its own (lanes wait for each other), or the first one waits for company."""
    server = Server()
    await server.propose("a", "r0")
    assert server.batches == [1]
    server.gate.clear()
    first = asyncio.create_task(server.propose("a", "r0"))
    await turns()
    others = [asyncio.create_task(server.propose(lane, "r0")) for lane in "bcd"]
    await turns()
    server.gate.set()
    replies = await asyncio.gather(first, *others)
    assert server.batches == [1, 1, 3]
    assert [reply.proposals[0].tokens for reply in replies] == [continued((1, 2), 2)] * 4
    assert server.merged.work.runs_by_size == {1: 2, 3: 1}
    assert (server.merged.work.num_runs, server.merged.work.num_messages) == (3, 5)


async def test_prepares_are_overtaken_by_proposes_once() -> None:
    """Bug guarded: a lane that stands still waits for the prepares of others; or prepares starve while lanes keep asking."""
    server = Server()
    server.gate.clear()
    tasks = [asyncio.create_task(server.propose("a", "busy"))]
    await turns()
    for lane in "abc":
        tasks.append(asyncio.create_task(server.prepare(lane, "r1")))
        tasks.append(asyncio.create_task(server.propose(lane, "r2")))
    await turns()

    def more_arrive(proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]) -> None:
        if len(server.model.runs) == 2:
            tasks.append(asyncio.create_task(server.propose("d", "r3")))

    server.model.before = more_arrive
    server.gate.set()
    await turns()
    await asyncio.gather(*tasks)
    assert [(len(proposes), len(prepares)) for proposes, prepares in server.model.runs] == [(1, 0), (3, 0), (1, 3)]
    assert [task.result().prepared[0].sequence_id for task in tasks[1:7:2]] == ["r1"] * 3


async def test_lanes_with_requests_of_the_same_name_do_not_meet() -> None:
    """Bug guarded: one lane rolls back, reads or ends what another lane calls by the same name."""
    server = Server()
    mine, other = await asyncio.gather(server.propose("a", "r0", ids=(1, 2)), server.propose("b", "r0", ids=(9, 9, 9)))
    assert (mine.proposals[0].sequence_id, mine.proposals[0].tokens) == ("r0", continued((1, 2), 2))
    assert (other.proposals[0].sequence_id, other.proposals[0].tokens) == ("r0", continued((9, 9, 9), 2))
    await server.propose("b", release=("r0",))
    assert len(server.model.sequences) == 1
    assert server.merged.work.num_lanes == 1


@given(
    names=st.lists(st.tuples(st.text(alphabet="a1:", max_size=4), st.text(alphabet="a1:", max_size=4)), max_size=8, unique=True)
)
def test_no_two_lanes_can_name_the_same_sequence(names: list[tuple[str, str]]) -> None:
    """Bug guarded: a lane called "a" reaches sequences of a lane called "a:b" by a well chosen name."""
    assert len({_prefix(lane) + sequence for lane, sequence in names}) == len(names)


async def test_two_messages_about_one_sequence_are_two_passes_in_their_order() -> None:
    """Bug guarded: a lane that asks again, its first call having timed out, has one sequence twice in one forward."""
    server = Server()
    server.gate.clear()
    busy = asyncio.create_task(server.propose("a", "x"))
    await turns()
    tasks = [
        asyncio.create_task(call)
        for call in (
            server.propose("a", "r0"),
            server.prepare("a", "r0"),
            server.propose("b", "r0"),
            server.propose("a", "r0", "y"),
        )
    ]
    await turns()
    server.gate.set()
    await asyncio.gather(busy, *tasks)
    assert [(len(proposes), len(prepares)) for proposes, prepares in server.model.runs] == [(1, 0), (2, 0), (0, 1), (1, 0)]


async def test_a_pass_that_fails_is_told_to_everybody_in_it_and_to_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: a bug in the model ends the task that works, and every lane waits for its deadline from then on."""
    caplog.set_level(logging.CRITICAL)
    server = Server()

    def fail(proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]) -> None:
        if any("bad" in item.sequence_id for request in prepares for item in request.items):
            raise ValueError("a bug")

    server.model.before = fail
    server.gate.clear()
    before = asyncio.create_task(server.propose("a", "x"))
    await turns()
    together = [asyncio.create_task(server.prepare("b", "bad")), asyncio.create_task(server.prepare("a", "r0"))]
    await turns()
    server.gate.set()
    for task in together:
        with pytest.raises(ValueError, match="a bug"):
            await task
    assert (await before).proposals
    assert (await server.propose("b", "r1")).proposals, "it goes on"


async def test_what_is_no_message_is_refused() -> None:
    """Bug guarded: garbage reaches the model, or a sequence is twice in one pass because one message names it twice."""
    server = Server()
    with pytest.raises(WireError, match="malformed ProposeRequest"):
        await server.merged.propose(b"\x00garbage", "a")
    with pytest.raises(WireError, match="twice in one message"):
        await server.propose("a", "r0", "r0")
    assert server.batches == []


async def test_nobody_computes_for_a_lane_that_hung_up() -> None:
    """Bug guarded: the queue of a dead lane is worked off while others wait."""
    server = Server()
    server.gate.clear()
    busy = asyncio.create_task(server.propose("a", "x"))
    await turns()
    gone = asyncio.create_task(server.propose("b", "r0"))
    await turns()
    gone.cancel()
    await turns()
    server.gate.set()
    await busy
    await turns()
    assert server.batches == [1]


async def test_a_lane_whose_stream_is_gone_for_long_loses_its_sequences() -> None:
    """Bug guarded: a lane that died leaves its sequences in the KV cache; or one that only reconnects loses them."""
    server = Server()
    await server.propose("dead", "r0", "r1")
    await server.propose("reconnects", "r0")
    for connected in ({"reconnects"}, set(), {"reconnects"}):
        await server.merged.expire(connected)
        server.clock.advance(0.6 * LANE_TTL_S)
    await server.merged.expire({"reconnects"})
    assert set(server.model.sequences) == {_prefix("reconnects") + "r0"}
    assert server.merged.work.num_expired == 2
    assert server.merged.work.num_lanes == 1


async def test_a_sequence_that_nobody_asks_about_is_forgotten() -> None:
    """Bug guarded: sequences whose release got lost stay for ever; or those in use expire by their age."""
    server = Server()
    await server.propose("a", "old", "used")
    server.clock.advance(0.6 * SEQUENCE_TTL_S)
    await server.propose("a", "used")
    server.clock.advance(0.6 * SEQUENCE_TTL_S)
    await server.merged.expire({"a"})
    assert set(server.model.sequences) == {_prefix("a") + "used"}
    assert server.merged.work.num_sequences == 1
