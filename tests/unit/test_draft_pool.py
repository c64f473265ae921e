"""The draft pool of a lane over replicas that are slow, wrong, dead, or not there. No Ray, no clock but a fake one."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from fake_drafts import CONTEXT, FakeCluster, FakeReplica, continued, next_token, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.draft_pool import MISSING_UPDATES, DraftPool, shares_cores
from deployments.messages import DraftReport, Traffic
from engine.calibrate import DRAFT_ROWS
from engine.config import parse_config
from engine.drivers import AsyncDriver
from engine.propose.beside import TextBeside
from engine.propose.ngram import NgramSource
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import ScriptedTarget, model_info
from engine.types import (
    MODEL_SOURCE,
    GenerateRequest,
    Outcome,
    Prepared,
    PrepareItem,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    SamplingParams,
    StepReport,
    TextChoice,
    TextOffer,
    VerifyReply,
    VerifyRequest,
)

DEPTH = 2
PATIENCE_S = 30.0


class Lane:
    """The bookkeeping that the rounds of a lane do with a pool. Every draft that comes back must be right for its request."""

    def __init__(self, pool: DraftPool, first: int = 1):
        self.pool = pool
        self.ids: dict[str, list[int]] = {}
        self.known: dict[str, int] = {}
        self.released: list[str] = []
        self.round_id = 0
        self._first = first

    def begin(self, *names: str) -> None:
        for name in names:
            self.ids[name] = [self._first, len(self.ids) + 1]
            self.known[name] = 0

    def end(self, name: str) -> None:
        del self.ids[name], self.known[name]
        self.released.append(name)

    async def propose(self, *names: str) -> dict[str, str | None]:
        """Ask for drafts and commit a token; the reason for each missing draft, None where there was one."""
        self.round_id += 1
        items = tuple(ProposeItem(**self._item(name), depth=DEPTH) for name in names or self.ids)
        request = ProposeRequest(round_id=self.round_id, items=items, release=tuple(self.released))
        async with asyncio.timeout(PATIENCE_S):
            reply = await self.pool.propose(request)
        self.released.clear()
        assert reply.round_id == self.round_id
        assert len({proposal.sequence_id for proposal in reply.proposals}) == len(reply.proposals)
        for proposal in reply.proposals:
            self._learn(proposal)
            assert proposal.tokens == (() if proposal.reason else continued(self.ids[proposal.sequence_id], DEPTH))
        self._commit(items)
        return {proposal.sequence_id: proposal.reason for proposal in reply.proposals}

    def prepare(self, *names: str) -> dict[str, list[int]]:
        """Send prepares and commit a token; what was committed before it."""
        self.round_id += 1
        items = tuple(
            PrepareItem(**self._item(name), draft=(7, 8), depth=DEPTH, fan_out=(1, 1, 1)) for name in names or self.ids
        )
        self.pool.prepare(PrepareRequest(round_id=self.round_id, items=items, release=tuple(self.released)))
        self.released.clear()
        before = {item.sequence_id: list(self.ids[item.sequence_id]) for item in items}
        self._commit(items)
        return before

    async def collect(self, patience_s: float = PATIENCE_S) -> dict[str, Prepared]:
        async with asyncio.timeout(PATIENCE_S):
            replies = await self.pool.collect(patience_s)
        answers = {prepared.sequence_id: prepared for reply in replies for prepared in reply.prepared}
        for name, answer in answers.items():
            if name in self.ids:
                self._learn(answer)
        return answers

    def _item(self, name: str) -> dict[str, Any]:
        known = self.known[name]
        return {
            "sequence_id": name,
            "base_length": known,
            "tokens": tuple(self.ids[name][known:]),
            "context": CONTEXT if known == 0 else None,
        }

    def _learn(self, answer: Proposal | Prepared) -> None:
        self.known[answer.sequence_id] = min(answer.known_length, len(self.ids[answer.sequence_id]))

    def _commit(self, items: tuple[Any, ...]) -> None:
        for item in items:
            self.ids[item.sequence_id].append(next_token(self.ids[item.sequence_id]))


def outcomes_after(ids: list[int]) -> tuple[Outcome, ...]:
    """What the scripted model prepares after ``ids`` while the draft (7, 8) is verified."""
    prepared = []
    for accepted in range(3):
        before = [*ids, *(7, 8)[:accepted]]
        token = next_token(before)
        prepared.append(Outcome(accepted=accepted, token=token, tokens=continued([*before, token], DEPTH)))
    return tuple(prepared)


def home(pool: DraftPool, cluster: FakeCluster, name: str) -> FakeReplica:
    """The replica that a request sticks to."""
    return cluster[pool._homes[name].report.draft_id]


def sequences(replica: FakeReplica) -> set[str]:
    """Names that the replica's model holds, lanes included."""
    return set(replica.model.sequences)


# --- the good case ----------------------------------------------------------------------------------------------------------


async def test_a_request_sticks_to_one_replica_and_the_load_is_even() -> None:
    """Bug guarded: a request that wanders has its whole text computed again at every turn, or one replica gets everything."""
    cluster = FakeCluster("a", "b", "c")
    lane = Lane(await cluster.pool())
    lane.begin(*(f"r{i}" for i in range(9)))
    for _ in range(5):
        assert set((await lane.propose()).values()) == {None}
    assert lane.pool.requests_per_draft == {"a": 3, "b": 3, "c": 3}
    for replica in cluster.replicas.values():
        assert len(sequences(replica)) == 3
        first, *others = [message for _, message in replica.calls]
        assert {item.base_length for item in first.items} == {0}
        assert all(item.base_length > 0 for message in others for item in message.items)


async def test_two_lanes_share_three_replicas_and_nothing_else() -> None:
    """Bug guarded: two lanes with requests of the same name get each other's drafts, or end each other's sequences."""
    cluster = FakeCluster("a", "b", "c")
    lanes = [Lane(await cluster.pool(f"lane{n}"), first=n) for n in (1, 2)]
    for lane in lanes:
        lane.begin(*(f"r{i}" for i in range(6)))
    for _ in range(3):
        for reasons in await asyncio.gather(*(lane.propose() for lane in lanes)):
            assert set(reasons.values()) == {None}
    for replica in cluster.replicas.values():
        assert {lane for lane, _ in replica.calls} == {"lane1", "lane2"}
        assert len(sequences(replica)) == 4
    lanes[0].end("r0")
    await lanes[0].propose()
    assert set((await lanes[1].propose()).values()) == {None}


async def test_messages_of_a_round_go_out_side_by_side() -> None:
    """Bug guarded: the replicas are asked one after the other, and a round waits for the sum of their times."""
    cluster = FakeCluster("a", "b", "c")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1", "r2")
    for replica in cluster.replicas.values():
        replica.holding = True
    asking = asyncio.create_task(lane.propose())
    await turns()
    assert [len(replica.held) for replica in cluster.replicas.values()] == [1, 1, 1]
    for replica in cluster.replicas.values():
        replica.answer()
    assert set((await asking).values()) == {None}


async def test_the_draft_time_of_a_round_is_that_of_its_slowest_replica() -> None:
    """Bug guarded: times of replicas that work side by side are added up, and the cost model thinks that drafts got slower."""
    cluster = FakeCluster("a", "b")
    pool = await cluster.pool()
    items = tuple(ProposeItem(sequence_id=f"r{i}", base_length=0, tokens=(1,), depth=1, context=CONTEXT) for i in range(4))
    assert (await pool.propose(ProposeRequest(round_id=1, items=items))).step_time_s == 0.5
    assert all(len(replica.calls) == 1 for replica in cluster.replicas.values())


# --- releases ---------------------------------------------------------------------------------------------------------------


async def test_the_holder_of_a_sequence_is_told_of_its_end() -> None:
    """Bug guarded: releases go to whoever is asked next, and the replica that holds the sequence keeps its blocks."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1", "r2", "r3")
    await lane.propose()
    holder = home(lane.pool, cluster, "r0")
    lane.end("r0")
    await lane.propose()
    assert holder.calls[-1][1].release == ("r0",)
    assert len(sequences(holder)) == 1
    await lane.propose()
    assert holder.calls[-1][1].release == (), "once is enough"
    assert sum(lane.pool.requests_per_draft.values()) == 3


async def test_a_release_that_was_lost_is_repeated() -> None:
    """Bug guarded: a release that went down with a failed call is forgotten, and the sequence stays until it is evicted."""
    cluster = FakeCluster("a")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1")
    await lane.propose()
    lane.end("r0")
    cluster["a"].holding = True
    asking = asyncio.create_task(lane.propose())
    await turns()
    cluster["a"].fail()
    assert await asking == {"r1": "draft_failed"}
    cluster["a"].answer()
    assert len(sequences(cluster["a"])) == 2
    cluster.clock.advance(1)
    await lane.pool.update(cluster.directory)
    await turns()
    assert len(sequences(cluster["a"])) == 1


async def test_a_replica_that_is_asked_nothing_is_told_of_ends_by_the_next_prepare() -> None:
    """Bug guarded: the replica whose last request ended is never told, because it is never asked again."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1")
    await lane.propose()
    holder = home(lane.pool, cluster, "r0")
    lane.end("r0")
    lane.prepare()
    await lane.collect()
    await turns()
    assert sequences(holder) == set()


# --- replicas that go -------------------------------------------------------------------------------------------------------


async def test_requests_of_a_replica_that_is_gone_move() -> None:
    """Bug guarded: a lost replica's requests are asked for where nobody answers, or everybody's state is thrown away."""
    cluster = FakeCluster("a", "b", "c")
    lane = Lane(await cluster.pool())
    lane.begin(*(f"r{i}" for i in range(6)))
    await lane.propose()
    gone = {name for name in lane.ids if home(lane.pool, cluster, name) is cluster["b"]}
    cluster["b"].die()
    await lane.propose()
    del cluster.replicas["b"]
    assert await lane.pool.update(cluster.directory) == gone
    reasons = await lane.propose()
    assert {name for name, reason in reasons.items() if reason == "moved"} == gone
    assert {reason for name, reason in reasons.items() if name not in gone} == {None}
    assert set((await lane.propose()).values()) == {None}
    assert lane.pool.requests_per_draft == {"a": 3, "c": 3}


async def test_requests_move_before_the_directory_hears_of_a_death() -> None:
    """Bug guarded: until the directory drops a dead replica, which takes seconds, its requests go without drafts."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1")
    await lane.propose()
    dead = home(lane.pool, cluster, "r0")
    dead.die()
    assert await lane.propose() == {"r0": "draft_failed", "r1": None}
    assert await lane.propose() == {"r0": "draft_backoff", "r1": None}
    assert lane.pool.state.startswith("ok, but ")
    cluster.clock.advance(1)
    await lane.propose()  # sends a probe, which fails
    await turns()
    assert await lane.propose() == {"r0": "moved", "r1": None}
    assert await lane.propose() == {"r0": None, "r1": None}
    assert sum(lane.pool.requests_per_draft.values()) == 2


async def test_a_hiccup_moves_nobody() -> None:
    """Bug guarded: one slow answer makes every request of a replica start again elsewhere, which makes the others slow too."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1")
    await lane.propose()
    slow = home(lane.pool, cluster, "r0")
    slow.holding = True
    asking = asyncio.create_task(lane.propose())
    await turns()
    slow.fail()
    slow.answer()
    assert await asking == {"r0": "draft_failed", "r1": None}
    cluster.clock.advance(1)
    await lane.pool.update(cluster.directory)
    await turns()
    assert await lane.propose() == {"r0": None, "r1": None}
    assert home(lane.pool, cluster, "r0") is slow
    assert len([message for _, message in slow.calls if any(item.base_length == 0 for item in message.items)]) == 1


async def test_no_round_waits_for_a_replica_that_failed() -> None:
    """Bug guarded: every retry of a dead draft costs some round its whole deadline."""
    cluster = FakeCluster("a")
    lane = Lane(await cluster.pool())
    lane.begin("r0")
    await lane.propose()
    cluster["a"].holding = True
    asking = asyncio.create_task(lane.propose())
    await turns()
    cluster["a"].fail()
    await asking
    assert not lane.pool.available
    assert "no answer" in lane.pool.state
    for _ in range(3):
        cluster.clock.advance(10)
        assert await lane.propose() == {"r0": "draft_backoff"}  # the probe hangs, the round does not
    cluster["a"].answer()
    await turns()
    assert lane.pool.available
    assert lane.pool.state == "ok"
    assert await lane.propose() == {"r0": None}


async def test_a_failing_replica_is_probed_less_and_less_often() -> None:
    """Bug guarded: a dead replica is asked in every round, or a replica is given up for good."""
    cluster = FakeCluster("a")
    pool = await cluster.pool()
    cluster["a"].dead = True
    item = ProposeItem(sequence_id="r0", base_length=0, tokens=(1,), depth=1, context=CONTEXT)
    await pool.propose(ProposeRequest(round_id=1, items=(item,)))
    replica = pool._replicas["a"]
    waits_s = []
    for failures in range(1, 8):
        assert replica.failures == failures
        waits_s.append(replica.retry_at_s - cluster.clock.now_s)
        for _ in range(2):  # too early, then in time
            assert replica.failures == failures
            cluster.clock.advance(0.6 * waits_s[-1])
            await pool.update(cluster.directory)
            await turns()
    assert waits_s == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


async def test_without_any_replica_nothing_is_asked_and_nothing_breaks() -> None:
    """Bug guarded: an empty directory raises in the middle of a round."""
    lane = Lane(await FakeCluster().pool())
    lane.begin("r0")
    assert not lane.pool.available
    assert lane.pool.state == "no draft is running"
    assert await lane.propose() == {"r0": "no_draft"}
    lane.prepare()
    assert {name: answer.reason for name, answer in (await lane.collect()).items()} == {"r0": "no_draft"}
    assert await lane.pool.measure(64) == ()
    assert lane.pool.announced_step_times == ()


async def test_a_controller_that_restarts_costs_no_state() -> None:
    """Bug guarded: the first directory of a new controller names nobody, and the whole pool is hung up on."""
    cluster = FakeCluster("a")
    lane = Lane(await cluster.pool())
    lane.begin("r0")
    await lane.propose()
    for _ in range(MISSING_UPDATES - 1):
        assert await lane.pool.update(()) == set()
    assert await lane.propose() == {"r0": None}
    await lane.pool.update(cluster.directory)
    for _ in range(MISSING_UPDATES - 1):
        assert await lane.pool.update(()) == set()
    assert await lane.pool.update(()) == {"r0"}, "it is gone for good"
    assert not lane.pool.available


async def test_a_replica_that_came_back_under_its_name_is_a_new_one() -> None:
    """Bug guarded: the pool goes on talking to the address of the process that died."""
    cluster = FakeCluster("a")
    lane = Lane(await cluster.pool())
    lane.begin("r0")
    await lane.propose()
    cluster.replicas["a"] = FakeReplica("a", address="elsewhere:2")
    assert await lane.pool.update(cluster.directory) == {"r0"}
    lane.known["r0"] = 0
    assert await lane.propose() == {"r0": None}


@pytest.mark.parametrize(
    ("report", "words"),
    [({"target_fingerprint": "another"}, "vocabulary"), ({"protocol": 0}, "version 0")],
    ids=["vocabulary", "protocol"],
)
async def test_a_replica_that_does_not_fit_is_never_asked_and_is_named(report: dict[str, Any], words: str) -> None:
    """Bug guarded: a draft of another model, or of another release during an upgrade, is asked; or is left out in silence."""
    cluster = FakeCluster("fits")
    cluster.replicas["misfit"] = FakeReplica("misfit", **report)
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1", "r2")
    await lane.propose()
    assert cluster["misfit"].calls == []
    assert lane.pool.state.startswith("ok, but misfit is not used: ")
    assert words in lane.pool.state
    del cluster.replicas["fits"]
    alone = await cluster.pool()
    assert not alone.available
    assert alone.state.startswith("misfit is not used: ")


# --- answers that are wrong -------------------------------------------------------------------------------------------------


def _of_another_round(reply: Any) -> Any:
    return msgspec.structs.replace(reply, round_id=reply.round_id - 1)


async def test_an_answer_for_another_round_is_dropped_and_its_replica_left_alone() -> None:
    """Bug guarded: the drafts of an earlier round are taken for this one's."""
    cluster = FakeCluster("a")
    lane = Lane(await cluster.pool())
    lane.begin("r0")
    cluster["a"].twist = _of_another_round
    assert await lane.propose() == {"r0": "draft_failed"}
    assert lane.pool.dropped == {"late": 1}
    assert not lane.pool.available


def _with_strangers(reply: ProposeReply) -> ProposeReply:
    more = (Proposal(sequence_id="r9", tokens=(1, 2)), *(Proposal(sequence_id=p.sequence_id) for p in reply.proposals))
    return msgspec.structs.replace(reply, proposals=(*reply.proposals, *more))


async def test_answers_that_nobody_asked_for_and_second_answers_are_dropped() -> None:
    """Bug guarded: a confused replica overwrites what another one answered about its own requests."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1")
    home_of_r0 = await lane.propose()
    assert set(home_of_r0.values()) == {None}
    home(lane.pool, cluster, "r0").twist = _with_strangers
    assert await lane.propose() == {"r0": None, "r1": None}
    assert lane.pool.dropped == {"stray": 1, "twice": 1}


async def test_a_bug_in_one_replicas_connection_spares_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: an unexpected exception from one stream loses the drafts of all replicas."""
    caplog.set_level(logging.CRITICAL)
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1")
    await lane.propose()

    def broken(reply: Any) -> Any:
        raise KeyError("a bug")

    home(lane.pool, cluster, "r0").twist = broken
    assert await lane.propose() == {"r0": "draft_failed", "r1": None}


# --- prepare ----------------------------------------------------------------------------------------------------------------


async def test_prepared_outcomes_come_back_from_every_replica() -> None:
    """Bug guarded: only one replica's outcomes are collected, or those of one request are filed under another."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1", "r2", "r3")
    before = lane.prepare()
    answers = await lane.collect()
    assert {name: answer.outcomes for name, answer in answers.items()} == {n: outcomes_after(before[n]) for n in lane.ids}
    assert lane.known == dict.fromkeys(lane.ids, 2)
    assert await lane.collect() == {}, "answers are handed out once"


async def test_only_one_prepare_of_a_replica_is_outstanding() -> None:
    """Bug guarded: a slow draft gets a message per round, and answers about rounds that are long over."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1")
    await lane.propose()
    slow = home(lane.pool, cluster, "r0")
    slow.holding = True
    lane.prepare()
    await turns()
    assert set(await lane.collect(0)) == {"r1"}
    for _ in range(3):
        lane.prepare()
        answers = await lane.collect()  # waits for r1's, not for the answer to an older round
        assert {name: answer.reason for name, answer in answers.items()} == {"r0": "draft_busy", "r1": None}
        assert await lane.propose() == {"r0": "draft_busy", "r1": None}
    assert len(slow.held) == 1
    slow.answer()
    await turns()
    assert set(await lane.collect(0)) == {"r0"}, "what it holds now is worth knowing"
    assert await lane.propose() == {"r0": None, "r1": None}


async def test_collecting_waits_for_an_answer_that_is_under_way() -> None:
    """Bug guarded: patience is never spent, and a draft that comes a moment after the verdict is wasted."""
    cluster = FakeCluster("a")
    lane = Lane(await cluster.pool())
    lane.begin("r0")
    cluster["a"].holding = True
    lane.prepare()
    collecting = asyncio.create_task(lane.collect())
    await turns()
    assert not collecting.done()
    cluster["a"].answer()
    assert set(await collecting) == {"r0"}


async def test_a_prepare_that_is_never_answered_fails_its_replica_and_stalls_no_round() -> None:
    """Bug guarded: a replica that hangs in a prepare stays "busy" for ever, and its requests never move."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0", "r1")
    await lane.propose()
    hung = home(lane.pool, cluster, "r0")
    hung.holding = True
    lane.prepare()
    await turns()
    assert set(await lane.collect(0)) == {"r1"}
    hung.fail()
    await turns()
    answers = await lane.collect()
    assert {name: answer.reason for name, answer in answers.items()} == {"r0": "draft_failed"}
    assert "no answer" in lane.pool.state
    assert await lane.propose() == {"r0": "draft_backoff", "r1": None}


async def test_a_prepare_for_a_request_that_moved_asks_for_the_whole_context() -> None:
    """Bug guarded: the new replica is told the last few tokens of a text that it never saw."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0")
    await lane.propose()
    gone = home(lane.pool, cluster, "r0").report.draft_id
    del cluster.replicas[gone]
    for _ in range(MISSING_UPDATES):
        await lane.pool.update(cluster.directory)
    lane.prepare()
    assert {name: (a.reason, a.known_length) for name, a in (await lane.collect()).items()} == {"r0": ("moved", 0)}
    before = lane.prepare()
    assert (await lane.collect())["r0"].outcomes == outcomes_after(before["r0"])


async def test_a_replica_that_goes_with_a_prepare_outstanding_leaves_nothing_behind() -> None:
    """Bug guarded: the answer of a replica that is gone arrives later, or collecting waits for it."""
    cluster = FakeCluster("a")
    lane = Lane(await cluster.pool())
    lane.begin("r0")
    cluster["a"].holding = True
    lane.prepare()
    await turns()
    for _ in range(MISSING_UPDATES):
        lost = await lane.pool.update(())
    assert lost == {"r0"}
    cluster["a"].answer()
    await turns()
    assert await lane.collect() == {}


async def test_answers_about_a_request_that_lost_its_draft_are_dropped() -> None:
    """Bug guarded: the failed prepare of a replica that is gone surprises the round, which has forgotten that it asked."""
    cluster = FakeCluster("a")
    lane = Lane(await cluster.pool())
    lane.begin("r0")
    cluster["a"].dead = True
    lane.prepare()
    await turns()
    del cluster.replicas["a"]
    assert await lane.pool.update(()) == {"r0"}
    assert await lane.collect() == {}


@pytest.mark.parametrize(("able", "prepares"), [((True, False), True), ((False, False), False)], ids=["one", "none"])
async def test_rounds_are_sequential_where_no_draft_can_fork(able: tuple[bool, ...], prepares: bool) -> None:
    """Bug guarded: a draft whose cache cannot be forked is told to prepare for ever, and no round ever has a draft in time."""
    cluster = FakeCluster()
    for number, can in enumerate(able):
        cluster.replicas[f"d{number}"] = FakeReplica(f"d{number}", prepares=can)
    assert (await cluster.pool()).prepares is prepares


@pytest.mark.parametrize(("able", "extends"), [((True, True), True), ((True, False), False)], ids=["all", "one is old"])
async def test_all_drafts_must_know_how_to_go_on_after_a_text(able: tuple[bool, ...], extends: bool) -> None:
    """Bug guarded: during an update a draft of an older release is asked to go on after tokens that it does not know of, and
    drafts what stands in another place."""
    cluster = FakeCluster()
    for number, can in enumerate(able):
        cluster.replicas[f"d{number}"] = FakeReplica(f"d{number}", extends=can)
    assert (await cluster.pool()).extends is extends


# --- calibration ------------------------------------------------------------------------------------------------------------


async def test_calibration_uses_a_replica_without_work() -> None:
    """Bug guarded: step times are measured on a replica in use, with its queue in them, or nothing is released afterwards."""
    cluster = FakeCluster("a", "b")
    lane = Lane(await cluster.pool())
    lane.begin("r0")
    await lane.propose()
    busy = home(lane.pool, cluster, "r0")
    (free,) = (replica for replica in cluster.replicas.values() if replica is not busy)
    times = await lane.pool.measure(64)
    assert [rows for rows, _ in times] == list(DRAFT_ROWS)
    assert len(busy.calls) == 1
    assert sequences(free) == set()


async def test_a_replica_that_cannot_be_measured_is_taken_at_its_word() -> None:
    """Bug guarded: a replica that dies during calibration leaves the policy without any cost of a draft."""
    cluster = FakeCluster()
    cluster.replicas["a"] = FakeReplica("a", info=model_info(step_times=((1, 0.25),)))
    pool = await cluster.pool()
    assert pool.announced_step_times == ((1, 0.25),)
    cluster["a"].dead = True
    assert await pool.measure(64) == ((1, 0.25),)


async def test_traffic_of_streams_that_were_closed_still_counts() -> None:
    """Bug guarded: a counter that falls when a replica goes shows as a restart of the lane."""
    cluster = FakeCluster("a")
    pool = await cluster.pool()
    pool._replicas["a"].client.counters = type("C", (), {"hops": 3, "bytes_sent": 5, "bytes_received": 7, "hop_time_s": 0.5})  # type: ignore[attr-defined]
    assert pool.traffic == Traffic(3, 5, 7, 0.5)
    await pool.close()
    assert pool.traffic == Traffic(3, 5, 7, 0.5)


# --- anything at all --------------------------------------------------------------------------------------------------------


EVENTS = st.sampled_from(["die", "vanish", "born", "hold", "answer", "time_out", "confuse", "update", "wait", "end", "begin"])
ROUNDS = st.lists(st.tuples(EVENTS, st.integers(0, 9), st.sampled_from(["propose", "prepare", "collect"])), max_size=40)
KNOWN_REASONS = {None, "moved", "need_context", "draft_busy", "draft_failed", "draft_backoff", "no_draft"}


class Story:
    """Two lanes with requests of the same names over replicas that come, go, hang and lie."""

    def __init__(self) -> None:
        self.cluster = FakeCluster("d0", "d1", "d2")
        self.lanes: list[Lane] = []
        self.num_born = 3
        self.num_begun = 0

    async def start(self) -> None:
        self.lanes = [Lane(await self.cluster.pool(f"lane{n}"), first=n) for n in (1, 2)]
        for _ in range(3):
            await self.happen("begin", 0)

    async def happen(self, event: str, number: int) -> None:
        replicas = list(self.cluster.replicas.values())
        replica = replicas[number % len(replicas)] if replicas else None
        if event == "born":
            self.cluster.replicas[f"d{self.num_born}"] = FakeReplica(f"d{self.num_born}")
            self.num_born += 1
        elif event == "begin":
            for lane in self.lanes:
                lane.begin(f"r{self.num_begun}")
            self.num_begun += 1
        elif event == "end" and self.lanes[0].ids:
            name = sorted(self.lanes[0].ids)[number % len(self.lanes[0].ids)]
            for lane in self.lanes:
                lane.end(name)
        elif event == "update":
            await self.update()
        elif event == "wait":
            self.cluster.clock.advance(number)
            await turns()
        elif replica is not None:
            self._to_replica(event, replica)

    def _to_replica(self, event: str, replica: FakeReplica) -> None:
        if event in ("die", "vanish"):
            replica.die()
        if event == "vanish":
            del self.cluster.replicas[replica.report.draft_id]
        elif event == "hold":
            replica.holding = True
        elif event == "answer":
            replica.answer()
        elif event == "time_out":
            replica.fail()
        elif event == "confuse":
            replica.twist = _of_another_round

    async def update(self) -> None:
        for lane in self.lanes:
            for name in await lane.pool.update(self.cluster.directory):
                lane.known[name] = 0

    async def play(self, kind: str) -> None:
        for lane in self.lanes:
            if kind == "propose":
                await self._propose(lane)
            elif kind == "prepare":
                lane.prepare()
            else:
                answers = await lane.collect(0)
                assert {answer.reason for answer in answers.values()} <= KNOWN_REASONS

    async def _propose(self, lane: Lane) -> None:
        asked = set(lane.ids)
        asking = asyncio.create_task(lane.propose())
        await turns(30)
        for replica in self.cluster.replicas.values():  # the deadline of whoever does not answer
            replica.fail()
        reasons = await asking
        assert set(reasons) == asked, "every request is answered"
        assert set(reasons.values()) <= KNOWN_REASONS

    async def heal(self) -> None:
        """Everybody answers again, and one more replica is there."""
        await self.happen("born", 0)
        for replica in self.cluster.replicas.values():
            replica.twist = lambda reply: reply
            replica.answer()
        for _ in range(4):
            self.cluster.clock.advance(10)
            await self.update()
            for lane in self.lanes:
                await lane.collect(0)
                await lane.propose()
            await turns(20)


@settings(max_examples=40)
@given(rounds=ROUNDS)
def test_births_and_deaths_cost_drafts_and_nothing_else(rounds: list[tuple[str, int, str]]) -> None:
    """Bug guarded: some order of deaths, births, hangs and wrong answers that raises, loses a request for good, hands one
    lane's drafts to the other (`Lane` checks each), or leaves requests where nobody drafts for them."""

    async def scenario() -> None:
        story = Story()
        await story.start()
        for event, number, kind in rounds:
            await story.happen(event, number)
            await story.play(kind)
        await story.heal()
        for lane in story.lanes:
            assert set((await lane.propose()).values()) <= {None}, "drafts are back for everybody"
            assert sum(lane.pool.requests_per_draft.values()) == len(lane.ids)
        for lane in story.lanes:
            lane.prepare()  # tells those of ends that are asked nothing any more
        await turns(30)
        held = sum(len(sequences(replica)) for replica in story.cluster.replicas.values() if not replica.dead)
        assert held == sum(len(lane.ids) for lane in story.lanes), "nobody holds what has ended"

    logging.disable(logging.CRITICAL)
    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        logging.disable(logging.NOTSET)


# --- with rounds ------------------------------------------------------------------------------------------------------------


class RemoteTarget:
    def __init__(self) -> None:
        self.model = ScriptedTarget(next_token, model_info(eos_token_ids=(0,)))
        self.before: Callable[[int], None] = lambda round_id: None

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        await turns(30)
        self.before(request.round_id)
        return self.model.verify(request)


class PooledLane:
    """An `AsyncDriver` over a pool, with a target whose steps leave the drafts time to work."""

    def __init__(
        self,
        cluster: FakeCluster,
        pool: DraftPool,
        fan_out: int,
        policy: FixedDepth | None = None,
        text: TextBeside | None = None,
    ):
        self.target = RemoteTarget()
        policy = policy or FixedDepth(3, fan_out)
        limits = {"max_batch": 8, "prefill_tokens": 64, "max_waiting": 8}
        scheduler = Scheduler(self.target.model.info, policy, text=text, **limits)
        self.reports: list[StepReport] = []
        self.driver = AsyncDriver(self.target, pool, scheduler, None, self.reports.append, cluster.clock)

    async def texts(self, requests: list[GenerateRequest]) -> list[tuple[int, ...]]:
        async def text(request: GenerateRequest) -> tuple[int, ...]:
            return tuple([token async for delta in self.driver.generate(request) for token in delta.token_ids])

        running = asyncio.create_task(self.driver.run())
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await asyncio.gather(*map(text, requests))
        finally:
            running.cancel()

    def count(self, field: str) -> dict[str, int]:
        """Of all rounds, by reason or kind."""
        total: Counter[str] = Counter()
        for report in self.reports:
            total.update(getattr(report, field))
        return dict(total)


REQUESTS = [
    GenerateRequest(request_id=f"r{i}", prompt_ids=(i, 5), params=SamplingParams(temperature=0.0, max_tokens=120))
    for i in range(4)
]
TEXTS = [continued(request.prompt_ids, 120) for request in REQUESTS]


@pytest.mark.parametrize("fan_out", [0, 1], ids=["sequential", "overlapped"])
async def test_streams_go_on_when_a_draft_dies_and_acceptance_returns(fan_out: int) -> None:
    """Bug guarded: a draft's death changes or stops a text, or its requests decode without drafts from then on."""
    cluster = FakeCluster("a", "b")
    pool = await cluster.pool()
    lane = PooledLane(cluster, pool, fan_out)

    def die_in_round_5(round_id: int) -> None:
        cluster.clock.advance(0.3)
        if round_id == 5:
            cluster["a"].die()

    lane.target.before = die_in_round_5
    assert await lane.texts(REQUESTS) == TEXTS
    assert 0 < pool.requests_per_draft["b"] <= 4
    assert lane.count("fallbacks").keys() >= {"draft_backoff", "moved"}
    last = [report for report in lane.reports if report.batch_size][-4]
    assert last.num_accepted == last.num_drafted == 3 * last.batch_size


async def test_prepared_drafts_come_from_every_replica_without_a_wait() -> None:
    """Bug guarded: outcomes that were prepared by one of several replicas are not used, or a round asks all the same."""
    cluster = FakeCluster("a", "b")
    lane = PooledLane(cluster, await cluster.pool(), fan_out=1)
    assert await lane.texts(REQUESTS) == TEXTS
    assert lane.count("misses") == {}
    assert lane.count("hits").keys() <= {"bonus", "plain"}
    assert sum(lane.count("hits").values()) > 4 * 25
    assert sum(report.num_asked for report in lane.reports) == 0
    sent = [message for replica in cluster.replicas.values() for _, message in replica.calls]
    assert all(isinstance(message, PrepareRequest) for message in sent)


class Extending(FixedDepth):
    """The text's first tokens, at most two, and then the model's."""

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        return [TextChoice(0, offer.extendable > 0, min(offer.extendable, 2)) for offer in offers]


async def test_replicas_go_on_after_the_text() -> None:
    """Bug guarded: what a replica is to go on after gets lost on its way, or stays there when the target has refused it: then
    its next draft is wrong, which it never is after what was committed."""
    cluster = FakeCluster("a", "b")
    for replica in cluster.replicas.values():
        replica.report = msgspec.structs.replace(replica.report, extends=True)
    lane = PooledLane(cluster, await cluster.pool(), 0, Extending(3), TextBeside(NgramSource(), 8))
    assert await lane.texts(REQUESTS) == TEXTS
    refused, plain = 0, 0
    for report in lane.reports:
        refused += report.num_extended > 0 and report.sources["ngram"].num_accepted == 0
        alone = [depth for depth, text in zip(report.depths, report.text_depths, strict=True) if text == 0]
        assert report.sources[MODEL_SOURCE].num_accepted >= sum(alone)
        plain += len(alone)
    assert min(refused, plain) > 20
    assert not lane.count("fallbacks")


@pytest.mark.parametrize(
    ("threads", "draft", "address", "shared"),
    [
        ((None, None), "cpu", "10.0.0.1:7", True),
        ((2, 3), "cpu", "10.0.0.1:7", True),
        ((2, 2), "cpu", "10.0.0.1:7", False),
        ((None, None), "cpu", "10.0.0.2:7", False),
        ((None, None), "cuda:0", "10.0.0.1:7", False),
    ],
)
def test_cores_are_shared_on_one_host_with_too_many_threads(
    threads: tuple[int | None, int | None], draft: str, address: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a draft that works beside the verify on the verify's own cores, and slows the first requests down."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    target, own = threads
    config = parse_config({"target": {"num_threads": target}, "draft": {"num_threads": own}})
    report = DraftReport(draft_id="d", address=address, target_fingerprint="", info=model_info(device=draft))
    assert shares_cores(config, model_info(device="cpu"), "10.0.0.1:9", (report,)) is shared
    assert not shares_cores(config, model_info(device="cuda"), "10.0.0.1:9", (report,))
