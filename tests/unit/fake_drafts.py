"""Draft replicas without processes: a scripted model behind the real server-side code, and streams that answer on command."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from deployments.draft_pool import DraftPool
from deployments.merged_draft import MergedDraft
from deployments.messages import DraftReport
from deployments.wire import PROTOCOL_VERSION, WireError
from engine.testing import FakeClock, model_info
from engine.types import (
    Outcome,
    Prepared,
    PrepareItem,
    PrepareReply,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    SamplingParams,
    SequenceContext,
)

CONTEXT = SequenceContext(params=SamplingParams(temperature=0.0), prompt_length=1)


def next_token(ids: Sequence[int]) -> int:
    """Depends on every id: a draft that holds another sequence's tokens drafts other tokens."""
    state = len(ids)
    for token in ids:
        state = (state * 31 + token + 7) % 9973
    return state % 50 + 1


def continued(ids: Sequence[int], count: int) -> tuple[int, ...]:
    known = list(ids)
    for _ in range(count):
        known.append(next_token(known))
    return tuple(known[len(ids) :])


class FakeModel:
    """A `MergingModel` whose drafts are always right for the tokens that it holds."""

    def __init__(self) -> None:
        self.sequences: dict[str, list[int]] = {}
        self.runs: list[tuple[list[ProposeRequest], list[PrepareRequest]]] = []
        self.before: Callable[[Sequence[ProposeRequest], Sequence[PrepareRequest]], None] = lambda proposes, prepares: None

    def run(
        self, proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]
    ) -> tuple[list[ProposeReply], list[PrepareReply]]:
        self.runs.append((list(proposes), list(prepares)))
        self.before(proposes, prepares)
        requests = (*proposes, *prepares)
        names = [item.sequence_id for request in requests for item in request.items]
        assert len(set(names)) == len(names), "a sequence occurs twice in one pass"
        for name in (name for request in requests for name in request.release):
            self.sequences.pop(name, None)
        return (
            [
                ProposeReply(round_id=r.round_id, proposals=tuple(map(self._proposal, r.items)), step_time_s=0.5)
                for r in proposes
            ],
            [
                PrepareReply(round_id=r.round_id, prepared=tuple(map(self._prepared, r.items)), step_time_s=0.5)
                for r in prepares
            ],
        )

    def _catch_up(self, item: ProposeItem | PrepareItem) -> list[int] | None:
        known = self.sequences.get(item.sequence_id, [] if item.context is not None else None)
        if known is None or len(known) < item.base_length:
            return None
        self.sequences[item.sequence_id] = known = [*known[: item.base_length], *item.tokens]
        return known

    def _proposal(self, item: ProposeItem) -> Proposal:
        known = self._catch_up(item)
        if known is None:
            return Proposal(sequence_id=item.sequence_id, reason="need_context")
        tokens = continued([*known, *item.ahead], item.depth)
        self.sequences[item.sequence_id] = [*known, *item.ahead, *tokens[:-1]]  # a draft holds its own tokens, but the last
        return Proposal(sequence_id=item.sequence_id, tokens=tokens, known_length=len(known))

    def _prepared(self, item: PrepareItem) -> Prepared:
        known = self._catch_up(item)
        if known is None:
            return Prepared(sequence_id=item.sequence_id, reason="need_context")
        outcomes = []
        for accepted in range(len(item.fan_out)):
            ids = [*known, *item.draft[:accepted]]
            token = next_token(ids)
            outcomes.append(Outcome(accepted=accepted, token=token, tokens=continued([*ids, token], item.depth)))
        return Prepared(sequence_id=item.sequence_id, outcomes=tuple(outcomes), known_length=len(known))


class FakeReplica:
    """A draft replica. Its answers can be held back, changed, or never come."""

    def __init__(self, name: str, **report: Any):
        self.model = FakeModel()
        self.merged = MergedDraft(self._run)
        fields = {"address": f"{name}:1", "target_fingerprint": "scripted", "info": model_info(), "protocol": PROTOCOL_VERSION}
        self.report = DraftReport(**{"draft_id": name, **fields, **report})
        self.twist: Callable[[Any], Any] = lambda reply: reply
        """What a broken replica makes of its answers."""
        self.dead = False
        self.holding = False
        self.held: list[asyncio.Future[None]] = []
        self.calls: list[tuple[str, Any]] = []
        """(lane, message) in the order of arrival."""

    async def _run(
        self, proposes: Sequence[ProposeRequest], prepares: Sequence[PrepareRequest]
    ) -> tuple[list[ProposeReply], list[PrepareReply]]:
        await asyncio.sleep(0)
        return self.model.run(proposes, prepares)

    def answer(self) -> None:
        """Let answers that were held back go, and hold back no more."""
        self.holding = False
        for future in self.held:
            if not future.done():
                future.set_result(None)

    def fail(self, reason: str = "no answer within the deadline") -> None:
        """What waits for an answer gets none."""
        for future in self.held:
            if not future.done():
                future.set_exception(WireError(reason))

    def die(self) -> None:
        self.dead = True
        self.fail("the stream broke")


class FakeClient:
    """A lane's stream to a replica."""

    def __init__(self, replica: FakeReplica, lane: str):
        self._replica = replica
        self._lane = lane
        self.closed = False

    async def call(self, kind: str, message: msgspec.Struct, answer: type[Any], timeout_s: float) -> Any:
        replica = self._replica
        await asyncio.sleep(0)
        if self.closed or replica.dead:
            raise WireError("cannot be reached")
        replica.calls.append((self._lane, message))
        if replica.holding:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            replica.held.append(future)
            await future
        reply = await getattr(replica.merged, kind)(msgspec.msgpack.encode(message), self._lane)
        if self.closed or replica.dead:
            raise WireError("the stream broke")
        return msgspec.msgpack.decode(msgspec.msgpack.encode(replica.twist(reply)), type=answer)

    async def close(self) -> None:
        self.closed = True


class FakeCluster:
    """Replicas by name, and the pools of lanes over them."""

    def __init__(self, *names: str):
        self.clock = FakeClock()
        self.replicas = {name: FakeReplica(name) for name in names}

    def __getitem__(self, name: str) -> FakeReplica:
        return self.replicas[name]

    @property
    def directory(self) -> tuple[DraftReport, ...]:
        return tuple(replica.report for replica in self.replicas.values())

    async def pool(self, lane: str = "lane") -> DraftPool:
        """A lane's pool that knows everybody."""

        def connect(report: DraftReport) -> FakeClient:
            return FakeClient(self.replicas[report.draft_id], lane)

        pool = DraftPool("scripted", "scripted", 0.5, connect, self.clock)
        await pool.update(self.directory)
        return pool


async def turns(count: int = 10) -> None:
    """Let every other task have some turns."""
    for _ in range(count):
        await asyncio.sleep(0)
