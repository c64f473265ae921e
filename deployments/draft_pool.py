"""The lane's view of the draft pool: which replica drafts for which request, and what to do when one is slow, wrong or gone."""

import asyncio
import logging
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from deployments.counters import traffic_of
from deployments.messages import DraftReport, Traffic
from deployments.wire import PROTOCOL_VERSION, WireError
from engine.calibrate import StepTimes, measure_draft
from engine.config import OutriderConfig
from engine.drivers import Clock
from engine.errors import OutriderError
from engine.types import (
    ModelInfo,
    Prepared,
    PrepareItem,
    PrepareReply,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
)

logger = logging.getLogger("ray.serve")

MEASURE_DEADLINE_S = 10.0
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 5.0
MOVE_AFTER_FAILURES = 2
"""Failures in a row after which a replica's requests move: one may be a hiccup, and moving costs a prefill elsewhere."""
PREPARE_PATIENCE = 4.0
"""Nobody waits for a prepare, so it may take this many times ``draft.timeout_s`` before its replica counts as failed."""
MISSING_UPDATES = 4
"""A healthy replica is dropped when so many directories in a row do not name it: a controller that has just restarted has not
heard of anybody yet."""

T = TypeVar("T")
Reply = TypeVar("Reply", ProposeReply, PrepareReply)
Item = TypeVar("Item", ProposeItem, PrepareItem)
Answer = TypeVar("Answer", Proposal, Prepared)


class DraftClient(Protocol):
    """A stream to one replica, as `deployments.wire.WireClient`."""

    async def call(self, kind: str, message: msgspec.Struct, answer: type[T], timeout_s: float) -> T:
        """Send and wait; raises `WireError`, also after ``timeout_s``."""

    async def close(self) -> None:
        """Hang up; calls in flight raise `WireError`."""


Connect = Callable[[DraftReport], DraftClient]


@dataclass(eq=False, slots=True)
class _Replica:
    report: DraftReport
    client: DraftClient
    requests: set[str] = field(default_factory=set)
    """Requests of this lane that stick to it."""
    releases: dict[str, None] = field(default_factory=dict)
    """Sequences that it may forget and has not been told of; an ordered set."""
    failures: int = 0
    """In a row; while there are any, only probes are sent."""
    retry_at_s: float = 0.0
    problem: str = ""
    missing: int = 0
    """Directories in a row that did not name it."""
    preparing: asyncio.Task[None] | None = None
    prepare_round: int = -1
    probe: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return self.failures == 0


class DraftPool:
    """A `RemoteDraft` over any number of draft replicas, which serve other lanes too.

    A request sticks to one replica, the one with the fewest requests of this lane when it first asked: its KV cache is there.
    It moves when the replica is gone or failed `MOVE_AFTER_FAILURES` times in a row, and only if another one can be used; the
    answer is then an empty one with reason "moved" and nothing known, so that the round sends the whole context.

    A replica that fails is left alone for a while that doubles with each failure in a row, then probed by a message of its own:
    no round waits for a replica that failed before. At most one prepare per replica is outstanding, so a slow one is asked less
    rather than later; its requests get no drafts meanwhile (reason "draft_busy"). Other reasons: draft_failed, draft_backoff,
    no_draft. In all of these what the replica is believed to know stays as it was.

    Answers for another round, for sequences that were not asked for, and second answers are dropped and counted in ``dropped``.
    """

    def __init__(self, name: str, target_fingerprint: str, timeout_s: float, connect: Connect, clock: Clock = time.monotonic):
        """``timeout_s``: longest wait of a round for its drafts. ``connect`` makes a stream that opens at the first call."""
        self.name = name
        self.dropped: Counter[str] = Counter()
        """Answers that were not used, by what was wrong with them: late, stray (nobody asked), twice."""
        self._fingerprint = target_fingerprint
        self._timeout_s = timeout_s
        self._connect = connect
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._homes: dict[str, _Replica] = {}
        self._unfit: tuple[str, ...] = ()
        self._arrived: list[PrepareReply] = []
        self._prepare_round = -1
        self._traffic_before = Traffic()
        """Of streams that are closed."""

    # --- what others may know ------------------------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """Whether some replica can be asked now."""
        return any(replica.usable for replica in self._replicas.values())

    @property
    def prepares(self) -> bool:
        """Whether some replica can fork sequences: without that, rounds are sequential."""
        return any(replica.report.prepares for replica in self._replicas.values())

    @property
    def extends(self) -> bool:
        """Whether all replicas go on after tokens that another source drafted: a request may go to any of them."""
        return all(replica.report.extends for replica in self._replicas.values())

    @property
    def state(self) -> str:
        """ok, or what is wrong; it begins with "ok" while some replica can be asked."""
        notes = list(self._unfit)
        for name, replica in self._replicas.items():
            if not replica.usable:
                notes.append(f"{name} is left alone after {replica.failures} failures: {replica.problem}")
        if self.available:
            return f"ok, but {'; '.join(notes)}" if notes else "ok"
        return "; ".join(notes) or "no draft is running"

    @property
    def requests_per_draft(self) -> dict[str, int]:
        """Requests of this lane by the replica that they stick to."""
        return {name: len(replica.requests) for name, replica in self._replicas.items()}

    @property
    def traffic(self) -> Traffic:
        """Over all streams to drafts, closed ones included."""
        return sum((traffic_of(replica.client) for replica in self._replicas.values()), self._traffic_before)

    @property
    def announced_step_times(self) -> StepTimes:
        """What a draft measured when it loaded, of the first that can be asked; empty without any."""
        ranked = sorted(self._replicas.items(), key=lambda entry: (not entry[1].usable, entry[0]))
        return ranked[0][1].report.info.step_times if ranked else ()

    async def measure(self, most_rows: int) -> StepTimes:
        """Step times, up to ``most_rows``, of the replica with the least work of this lane, hops included; as announced when it
        does not answer.
        """
        replica = self._least_loaded("calibration", [r for r in self._replicas.values() if r.preparing is None])
        if replica is None:
            return ()
        call = partial(replica.client.call, "propose", answer=ProposeReply, timeout_s=MEASURE_DEADLINE_S)
        try:
            return await measure_draft(call, most_rows)
        except WireError:
            return replica.report.info.step_times

    # --- the directory -------------------------------------------------------------------------------------------------------

    async def update(self, drafts: tuple[DraftReport, ...]) -> set[str]:
        """Follow the directory. Returns the requests that lost their draft: nothing of them is held anywhere."""
        fitting = {draft.draft_id: draft for draft in drafts if self._misfit(draft) is None}
        self._unfit = tuple(f"{draft.draft_id} is not used: {why}" for draft in drafts if (why := self._misfit(draft)))
        lost: set[str] = set()
        for name, replica in list(self._replicas.items()):
            announced = fitting.get(name)
            replica.missing = 0 if announced is not None else replica.missing + 1
            moved_house = announced is not None and announced.address != replica.report.address
            if moved_house or (replica.missing and not replica.usable) or replica.missing >= MISSING_UPDATES:
                lost |= replica.requests
                await self._drop(name)
        self._forget_answers(lost)
        for name, draft in fitting.items():
            if name not in self._replicas:
                self._replicas[name] = _Replica(draft, self._connect(draft))
        self._probe_failed()
        return lost

    def _forget_answers(self, lost: set[str]) -> None:
        """Nobody expects an answer about a request that lost its draft."""
        self._arrived = [
            msgspec.structs.replace(reply, prepared=tuple(one for one in reply.prepared if one.sequence_id not in lost))
            for reply in self._arrived
        ]

    def _misfit(self, draft: DraftReport) -> str | None:
        if draft.target_fingerprint != self._fingerprint:
            return "it has another vocabulary than this target"
        if draft.protocol != PROTOCOL_VERSION:
            return f"it speaks version {draft.protocol} of the stream protocol, not {PROTOCOL_VERSION}"
        return None

    async def _drop(self, name: str) -> None:
        replica = self._replicas.pop(name)
        for request_id in replica.requests:
            del self._homes[request_id]
        for task in (replica.preparing, replica.probe):
            if task is not None:
                task.cancel()
        self._traffic_before += traffic_of(replica.client)
        await replica.client.close()

    async def close(self) -> None:
        """Hang up on everybody."""
        for name in list(self._replicas):
            await self._drop(name)

    # --- propose -------------------------------------------------------------------------------------------------------------

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        """As `DraftSource.propose`, within the deadline, each item by its own replica; never raises."""
        self._note_released(request.release)
        parts, refused = self._split(request.items)
        replies = await asyncio.gather(*(self._ask(replica, request.round_id, items) for replica, items in parts.items()))
        local = tuple(_no_proposal(item, reason) for item, reason in refused)
        return ProposeReply(
            round_id=request.round_id,
            proposals=local + tuple(proposal for reply in replies for proposal in reply.proposals),
            step_time_s=max((reply.step_time_s for reply in replies), default=0.0),
            num_steps=max((reply.num_steps for reply in replies), default=0),
        )

    async def _ask(self, replica: _Replica, round_id: int, items: list[ProposeItem]) -> ProposeReply:
        request = ProposeRequest(round_id=round_id, items=tuple(items), release=tuple(replica.releases))
        reply = await self._call(replica, "propose", request, ProposeReply, self._timeout_s)
        if reply is None:
            return ProposeReply(round_id=round_id, proposals=tuple(_no_proposal(item, "draft_failed") for item in items))
        return msgspec.structs.replace(reply, proposals=self._own(reply.proposals, items))

    # --- prepare -------------------------------------------------------------------------------------------------------------

    def prepare(self, request: PrepareRequest) -> None:
        """Send each replica its part and return at once; the answers are for `collect`. Never raises.

        Items of a replica that still owes an answer are not sent: theirs, with reason "draft_busy", is there at once.
        """
        self._note_released(request.release)
        self._prepare_round = request.round_id
        parts, refused = self._split(request.items)
        if refused:
            local = tuple(_not_prepared(item, reason) for item, reason in refused)
            self._arrived.append(PrepareReply(round_id=request.round_id, prepared=local))
        for replica in self._replicas.values():
            if replica in parts or (replica.releases and replica.usable and replica.preparing is None):
                replica.prepare_round = request.round_id
                replica.preparing = asyncio.create_task(self._send(replica, request.round_id, parts.get(replica, [])))

    async def collect(self, patience_s: float) -> tuple[PrepareReply, ...]:
        """The answers that have come, merged by round, the latest last; waits at most ``patience_s`` for those of the latest.

        Answers to older rounds come too: what they say of the draft's knowledge is still true.
        """
        owing = [r.preparing for r in self._replicas.values() if r.preparing and r.prepare_round == self._prepare_round]
        if owing:
            await asyncio.wait(owing, timeout=max(patience_s, 0.0))
        arrived, self._arrived = self._arrived, []
        return tuple(
            PrepareReply(
                round_id=round_id,
                prepared=tuple(prepared for reply in arrived if reply.round_id == round_id for prepared in reply.prepared),
                step_time_s=max(reply.step_time_s for reply in arrived if reply.round_id == round_id),
                num_steps=max(reply.num_steps for reply in arrived if reply.round_id == round_id),
            )
            for round_id in sorted({reply.round_id for reply in arrived})
        )

    async def _send(self, replica: _Replica, round_id: int, items: list[PrepareItem]) -> None:
        request = PrepareRequest(round_id=round_id, items=tuple(items), release=tuple(replica.releases))
        try:
            reply = await self._call(replica, "prepare", request, PrepareReply, PREPARE_PATIENCE * self._timeout_s)
        finally:
            replica.preparing = None
        if reply is None:
            reply = PrepareReply(round_id=round_id, prepared=tuple(_not_prepared(item, "draft_failed") for item in items))
        if items:
            self._arrived.append(msgspec.structs.replace(reply, prepared=self._own(reply.prepared, items)))

    # --- one replica ---------------------------------------------------------------------------------------------------------

    async def _call(
        self, replica: _Replica, kind: str, request: ProposeRequest | PrepareRequest, answer: type[Reply], timeout_s: float
    ) -> Reply | None:
        """One exchange; None when it failed. Whatever a replica does is its own failure, not its neighbours'."""
        try:
            reply = await replica.client.call(kind, request, answer, timeout_s)
            if reply.round_id != request.round_id:
                self.dropped["late"] += 1
                raise WireError(f"round {request.round_id} was answered as round {reply.round_id}")
        except Exception as error:
            if not isinstance(error, (WireError, OutriderError)):
                logger.exception("draft %s could not be asked", replica.report.draft_id)
            self._note_failure(replica, error)
            return None
        replica.failures = 0
        for sequence_id in request.release:
            replica.releases.pop(sequence_id, None)
        return reply

    def _note_failure(self, replica: _Replica, error: Exception) -> None:
        replica.failures += 1
        replica.retry_at_s = self._clock() + min(FIRST_RETRY_S * 2 ** (replica.failures - 1), LONGEST_RETRY_S)
        replica.problem = str(error) or type(error).__name__

    def _probe_failed(self) -> None:
        """Ask replicas that failed, when it is time, for nothing but a sign of life."""
        for replica in self._replicas.values():
            if replica.failures and replica.probe is None and self._clock() >= replica.retry_at_s:
                replica.probe = asyncio.create_task(self._probe(replica))

    async def _probe(self, replica: _Replica) -> None:
        request = PrepareRequest(round_id=0, items=(), release=tuple(replica.releases))
        try:
            await self._call(replica, "prepare", request, PrepareReply, self._timeout_s)
        finally:
            replica.probe = None

    # --- who drafts for whom -------------------------------------------------------------------------------------------------

    def _split(self, items: Sequence[Item]) -> tuple[dict[_Replica, list[Item]], list[tuple[Item, str]]]:
        """Items by the replica that is to get them, and (item, reason) of those that nobody gets."""
        self._probe_failed()
        parts: dict[_Replica, list[Item]] = {}
        refused: list[tuple[Item, str]] = []
        for item in items:
            goal = self._route(item)
            if isinstance(goal, _Replica):
                parts.setdefault(goal, []).append(item)
            else:
                refused.append((item, goal))
        return parts, refused

    def _route(self, item: ProposeItem | PrepareItem) -> _Replica | str:
        """The replica to ask, or why there is none."""
        home = self._homes.get(item.sequence_id)
        if home is None or home.failures >= MOVE_AFTER_FAILURES:
            other = self._least_loaded(item.sequence_id, self._replicas.values())
            if other is not None:
                self._settle(item.sequence_id, home, other)
                if item.base_length > 0:
                    return "moved"
                home = other
        if home is None:
            return "draft_backoff" if self._replicas else "no_draft"
        if not home.usable:
            return "draft_backoff"
        return home if home.preparing is None else "draft_busy"

    def _least_loaded(self, sequence_id: str, replicas: Iterable[_Replica]) -> _Replica | None:
        """By requests of this lane, ties by a hash: equal lanes shall not all choose the same replica."""

        def rank(replica: _Replica) -> tuple[int, int, str]:
            name = replica.report.draft_id
            return len(replica.requests), zlib.crc32(f"{sequence_id}\n{name}".encode()), name

        return min((replica for replica in replicas if replica.usable), key=rank, default=None)

    def _settle(self, sequence_id: str, old: _Replica | None, new: _Replica) -> None:
        if old is not None:
            old.requests.discard(sequence_id)
            old.releases[sequence_id] = None
        new.requests.add(sequence_id)
        self._homes[sequence_id] = new

    def _note_released(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            home = self._homes.pop(sequence_id, None)
            if home is not None:
                home.requests.discard(sequence_id)
                home.releases[sequence_id] = None

    def _own(self, answers: Sequence[Answer], items: Sequence[Item]) -> tuple[Answer, ...]:
        """The first answer to each item."""
        asked = {item.sequence_id for item in items}
        own: dict[str, Answer] = {}
        for answer in answers:
            if answer.sequence_id not in asked:
                self.dropped["stray"] += 1
            elif answer.sequence_id in own:
                self.dropped["twice"] += 1
            else:
                own[answer.sequence_id] = answer
        return tuple(own.values())


def _no_proposal(item: ProposeItem, reason: str) -> Proposal:
    return Proposal(sequence_id=item.sequence_id, known_length=_still_known(item, reason), reason=reason)


def _not_prepared(item: PrepareItem, reason: str) -> Prepared:
    return Prepared(sequence_id=item.sequence_id, known_length=_still_known(item, reason), reason=reason)


def _still_known(item: ProposeItem | PrepareItem, reason: str) -> int:
    """Tokens that the request's draft holds: as far as anybody knows those that the round believed it to."""
    return 0 if reason == "moved" else item.base_length


def shares_cores(config: OutriderConfig, target: ModelInfo, address: str, drafts: tuple[DraftReport, ...]) -> bool:
    """Whether a draft computes on cores that the target needs: both on CPUs of one host, with more threads than it has cores.

    A lane of this ``address`` has its target beside it. Step times that were measured in turn say nothing about such a pair at
    work together, and learning that by trying costs the first requests.
    """
    host = address.rpartition(":")[0]
    together = target.device == "cpu" and any(
        draft.info.device == "cpu" and draft.address.rpartition(":")[0] == host for draft in drafts
    )
    threads = (config.target.num_threads, config.draft.num_threads)
    wanted = sum(count or (os.cpu_count() or 1) for count in threads)
    return together and wanted > (os.cpu_count() or 1)
