"""Two lanes on one draft over real streams: what one of them sends, however wrong, does not reach the other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from fake_drafts import CONTEXT, FakeModel, continued
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.merged_draft import LANE_TTL_S, MergedDraft
from deployments.wire import WireClient, WireError, WireServer
from engine.testing import FakeClock
from engine.types import PrepareReply, PrepareRequest, ProposeItem, ProposeReply, ProposeRequest

SECRET = "right"


class Draft:
    """A draft replica without Ray."""

    def __init__(self) -> None:
        self.model = FakeModel()
        self.clock = FakeClock()
        self.merged = MergedDraft(self._run, self.clock)
        self.server = WireServer({"propose": self.merged.propose, "prepare": self.merged.prepare}, SECRET)
        self.address = ""

    async def __aenter__(self) -> "Draft":
        self.address = await self.server.start("127.0.0.1")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()

    def client(self, lane: str) -> WireClient:
        return WireClient(self.address, SECRET, lane)

    async def _run(
        self, proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]
    ) -> tuple[list[ProposeReply], list[PrepareReply]]:
        return self.model.run(proposes, prepares)


async def drafted(client: WireClient, name: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    item = ProposeItem(sequence_id=name, base_length=0, tokens=ids, depth=2, context=CONTEXT)
    reply = await client.call("propose", ProposeRequest(round_id=1, items=(item,)), ProposeReply, 10)
    return reply.proposals[0].tokens


@pytest.fixture
async def draft() -> AsyncIterator[Draft]:
    async with Draft() as draft:
        yield draft


async def test_lanes_are_told_apart_by_their_streams(draft: Draft) -> None:
    """Bug guarded: the name of the lane does not arrive, and all lanes share their sequences."""
    one, two = draft.client("one"), draft.client("two")
    texts = await asyncio.gather(drafted(one, "r0", (1, 2)), drafted(two, "r0", (7, 8, 9)))
    assert texts == [continued((1, 2), 2), continued((7, 8, 9), 2)]
    assert draft.server.callers == {"one": 1, "two": 1}
    await two.call("propose", ProposeRequest(round_id=2, items=(), release=("r0",)), ProposeReply, 10)
    assert [name for name in draft.model.sequences if "one" in name]
    assert not [name for name in draft.model.sequences if "two" in name]
    await one.close()
    await two.close()


async def test_a_lane_that_hung_up_is_noticed_and_its_sequences_go(draft: Draft) -> None:
    """Bug guarded: streams that broke still count as open, and sequences of dead lanes fill the KV cache."""
    dead, alive = draft.client("dead"), draft.client("alive")
    await drafted(dead, "r0", (1,))
    await drafted(alive, "r0", (2,))
    await dead.close()
    async with asyncio.timeout(10):
        while draft.server.callers["dead"]:
            await drafted(alive, "r0", (2,))
    for _ in range(2):
        await draft.merged.expire(draft.server.callers)
        draft.clock.advance(1.1 * LANE_TTL_S)
    await draft.merged.expire(draft.server.callers)
    assert len(draft.model.sequences) == 1
    assert await drafted(alive, "r0", (2,)) == continued((2,), 2)
    await alive.close()


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
items = st.fixed_dictionaries(
    {
        "sequence_id": st.sampled_from(["r0", "3:two:r0", "", "two"]),
        "base_length": st.integers(-3, 5),
        "tokens": st.lists(st.integers(-2, 60), max_size=3),
        "depth": st.integers(-1, 3),
    },
    optional={
        "draft": st.lists(st.integers(0, 60), max_size=2),
        "fan_out": st.lists(st.integers(-1, 2), max_size=3),
        "x": anything,
    },
)
bodies = anything | st.fixed_dictionaries(
    {"round_id": st.integers(-1, 9), "items": st.lists(items, max_size=3)},
    optional={"release": st.lists(st.sampled_from(["r0", "3:two:r0", "two"]), max_size=3)},
)


@settings(max_examples=30)
@given(calls=st.lists(st.tuples(st.sampled_from(["propose", "prepare"]), bodies), max_size=8))
def test_nothing_that_one_lane_sends_touches_another(calls: list[tuple[str, Any]]) -> None:
    """Bug guarded: a message that ends the draft's worker, or that reads, rolls back or releases another lane's sequence."""

    async def scenario() -> None:
        async with Draft() as draft:
            hostile, honest = draft.client("one"), draft.client("two")
            assert await drafted(honest, "r0", (5, 6)) == continued((5, 6), 2)
            before = {name: list(ids) for name, ids in draft.model.sequences.items()}
            answers = await asyncio.gather(*(send(hostile, kind, body) for kind, body in calls))
            after = {name: draft.model.sequences.get(name) for name in before}
            assert after == before
            assert {name for reply in answers for name in names_in(reply)} <= {"r0", "3:two:r0", "", "two"}
            item = ProposeItem(sequence_id="r0", base_length=2, tokens=(7,), depth=2)
            reply = await honest.call("propose", ProposeRequest(round_id=2, items=(item,)), ProposeReply, 10)
            assert reply.proposals[0].tokens == continued((5, 6, 7), 2)
            await hostile.close()
            await honest.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def send(client: WireClient, kind: str, body: Any) -> ProposeReply | PrepareReply | None:
    """None when the call was refused."""
    try:
        return await client.call(kind, body, ProposeReply if kind == "propose" else PrepareReply, 10)
    except WireError:
        return None


def names_in(reply: ProposeReply | PrepareReply | None) -> list[str]:
    if reply is None:
        return []
    answers = reply.proposals if isinstance(reply, ProposeReply) else reply.prepared
    return [answer.sequence_id for answer in answers]
