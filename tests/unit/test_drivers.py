"""The asynchronous driver with models that are elsewhere: slow, late, lost, broken, or gone. And the synchronous one's
edges."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from engine.drivers import AsyncDriver, DraftUnavailable, SyncDriver, TargetLost
from engine.errors import InvalidRequest, Overloaded
from engine.request import Committed, State
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import FakeClock, ScriptedDraft, ScriptedTarget, model_info
from engine.types import (
    Delta,
    FinishReason,
    GenerateRequest,
    PrepareReply,
    PrepareRequest,
    ProposeReply,
    ProposeRequest,
    SamplingParams,
    StepReport,
    VerifyReply,
    VerifyRequest,
)

PATIENCE_S = 5.0


def next_token(ids: Sequence[int]) -> int:
    state = len(ids)
    for token in ids:
        state = (state * 31 + token + 7) % 9973
    return state % 50 + 1


def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class RemoteTarget:
    """A scripted target behind an await; ``before`` may delay or fail each call."""

    def __init__(self) -> None:
        self.model = ScriptedTarget(next_token, model_info(eos_token_ids=(0,)))
        self.before: Callable[[VerifyRequest], None] = lambda request: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        self.asked.set()
        await asyncio.sleep(0)
        await self.gate.wait()
        self.before(request)
        return self.model.verify(request)


class ImpatientTarget(RemoteTarget):
    """Fails without ever giving up control, as a closed connection does."""

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        self.before(request)
        return self.model.verify(request)


class RemoteDraft:
    """A scripted draft behind an await."""

    def __init__(self) -> None:
        self.model = ScriptedDraft(next_token)
        self.available = True
        self.prepares = self.extends = False
        self.after: Callable[[ProposeReply], ProposeReply] = lambda reply: reply
        self.prepared: list[PrepareReply] = []
        self.patience_s: list[float] = []

    async def propose(self, request: ProposeRequest) -> ProposeReply:
        await asyncio.sleep(0)
        return self.after(self.model.propose(request))

    def prepare(self, request: PrepareRequest) -> None:
        self.prepared.append(self.model.prepare(request))

    async def collect(self, patience_s: float) -> tuple[PrepareReply, ...]:
        self.patience_s.append(patience_s)
        await asyncio.sleep(0)
        prepared, self.prepared = self.prepared, []
        return tuple(prepared)


class Patient(FixedDepth):
    """Waits for prepared drafts, a quarter of a second for each."""

    def patience_s(self, batch_size: int, num_expected: int, now_s: float) -> float:
        return num_expected / 4


class Lane:
    """An `AsyncDriver` that runs, its models, and what it reported."""

    def __init__(
        self,
        target: RemoteTarget | None = None,
        *,
        depth: int = 3,
        fan_out: int = 0,
        max_batch: int = 8,
        max_waiting: int = 100,
    ):
        self.target = target or RemoteTarget()
        self.draft = RemoteDraft()
        self.draft.prepares = fan_out > 0
        self.clock = FakeClock()
        self.reports: list[StepReport] = []
        self.scheduler = Scheduler(
            self.target.model.info, Patient(depth, fan_out), max_batch=max_batch, prefill_tokens=64, max_waiting=max_waiting
        )
        self.driver = AsyncDriver(self.target, self.draft, self.scheduler, None, self.reports.append, self.clock)

    @property
    def fallbacks(self) -> dict[str, int]:
        return {reason: count for report in self.reports for reason, count in report.fallbacks.items()}

    def stream(self, name: str, prompt: Sequence[int], **params: object) -> AsyncGenerator[Delta, None]:
        request = GenerateRequest(
            request_id=name,
            prompt_ids=tuple(prompt),
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}),  # type: ignore[arg-type]
        )
        return self.driver.generate(request)

    async def deltas(self, name: str, prompt: Sequence[int], **params: object) -> list[Delta]:
        return [delta async for delta in self.stream(name, prompt, **params)]

    async def tokens(self, name: str, prompt: Sequence[int], **params: object) -> list[int]:
        return [token for delta in await self.deltas(name, prompt, **params) for token in delta.token_ids]

    async def until_idle(self) -> None:
        while self.scheduler.has_work:  # noqa: ASYNC110 - the driver tells nobody that it came to rest
            await asyncio.sleep(0)


@asynccontextmanager
async def running(lane: Lane) -> AsyncIterator[Lane]:
    """Let the lane play rounds, for a few seconds at most: a lane that hangs fails its test."""
    task = asyncio.create_task(lane.driver.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield lane
        assert not task.done(), "the loop ended"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- the good case ----------------------------------------------------------------------------------------------------------


async def test_concurrent_streams_get_their_own_text() -> None:
    """Bug guarded: deltas reach the wrong stream, or a request that joins late disturbs those that run."""
    async with running(Lane()) as lane:
        prompts = {str(i): [i + 1, 2 * i + 1] for i in range(20)}
        tasks = []
        for name, prompt in prompts.items():
            tasks.append(asyncio.create_task(lane.tokens(name, prompt)))
            await asyncio.sleep(0)
        for task, prompt in zip(tasks, prompts.values(), strict=True):
            assert await task == expected(prompt, 12)
        await lane.until_idle()
        assert not lane.target.model.sequences


async def test_a_waiting_lane_wakes_up() -> None:
    """Bug guarded: a request that arrives while nothing runs waits for ever."""
    async with running(Lane()) as lane:
        for i in range(3):
            await asyncio.sleep(0.01)
            assert await lane.tokens(str(i), [i + 1]) == expected([i + 1], 12)


async def test_an_idle_lane_plays_no_rounds() -> None:
    """Bug guarded: a lane without work asks the target in a tight loop."""
    async with running(Lane()) as lane:
        await lane.tokens("a", [1])
        await lane.until_idle()
        count = len(lane.target.model.requests)
        await asyncio.sleep(0.05)
        assert len(lane.target.model.requests) == count


async def test_the_last_delta_has_the_totals() -> None:
    """Bug guarded: usage is computed from what the client read instead of what was committed."""
    async with running(Lane()) as lane:
        *_, last = await lane.deltas("a", [1, 2, 3])
        assert (last.finish_reason, last.num_prompt_tokens, last.num_output_tokens) == (FinishReason.LENGTH, 3, 12)


async def test_rounds_are_timed() -> None:
    """Bug guarded: the round's time lacks the hops, so that the cost model thinks them free."""
    lane = Lane()
    lane.target.before = lambda request: lane.clock.advance(0.25)
    async with running(lane):
        await lane.tokens("a", [1])
    assert {report.round_time_s for report in lane.reports} == {0.25}


class Thinker(Patient):
    """Notes when it looks ahead, and then breaks."""

    def __init__(self) -> None:
        super().__init__(3, 0)
        self.looked: list[int] = []
        self.has_looked = asyncio.Event()

    def look_ahead(self, batch_size: int) -> None:
        self.looked.append(batch_size)
        self.has_looked.set()
        raise ZeroDivisionError


async def test_the_policy_looks_ahead_while_the_target_verifies(caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: the search for the next round's depth runs when the verify has ended, and its time is added to the round; or
    a policy that breaks there costs the round.
    """
    lane = Lane()
    lane.scheduler.policy = policy = Thinker()
    lane.target.gate.clear()
    async with running(lane):
        first = asyncio.create_task(lane.tokens("a", [1]))
        await policy.has_looked.wait()
        assert policy.looked == [1], "the first round's one request is being verified"
        lane.target.gate.set()
        assert await first == expected([1], 12)
    assert "could not look ahead" in caplog.text


async def test_deltas_are_handed_over_without_waking_anybody() -> None:
    """Bug guarded: a task wakes for every request in every round: with hundreds of requests that takes longer than the step."""
    async with running(Lane()) as lane:
        deltas: list[Delta] = []
        request = GenerateRequest(request_id="a", prompt_ids=(1,), params=SamplingParams(temperature=0.0, max_tokens=12))
        await lane.driver.play(request, deltas.append)
        assert [token for delta in deltas for token in delta.token_ids] == expected([1], 12)
        assert deltas[-1].finish_reason == FinishReason.LENGTH


async def test_who_cannot_take_its_deltas_ends_alone() -> None:
    """Bug guarded: one answer that is too large for its stream fails the round of everybody, or leaves its request running."""

    def refuse(delta: Delta) -> None:
        raise ValueError("too large")

    async with running(Lane()) as lane:
        request = GenerateRequest(request_id="a", prompt_ids=(1,), params=SamplingParams(temperature=0.0, max_tokens=1000))
        other = asyncio.create_task(lane.tokens("b", [2]))
        with pytest.raises(ValueError, match="too large"):
            await lane.driver.play(request, refuse)
        assert await other == expected([2], 12)
        await lane.until_idle()
        assert not lane.target.model.sequences


async def test_leaving_a_request_that_is_played_cancels_it() -> None:
    """Bug guarded: a client that is gone keeps its place in the batch."""
    async with running(Lane()) as lane:
        request = GenerateRequest(request_id="a", prompt_ids=(1,), params=SamplingParams(temperature=0.0, max_tokens=1000))
        began = asyncio.Event()
        played = asyncio.create_task(lane.driver.play(request, lambda delta: began.set()))
        await began.wait()
        played.cancel()
        await lane.until_idle()
        assert not lane.target.model.sequences


async def test_a_draft_on_the_targets_own_cores_does_nothing_beside_it() -> None:
    """Bug guarded: the draft reads a new prompt while the target does, on the same cores, and the first token comes late."""

    class Sequential(Patient):
        overlaps = False

    for policy, prepares in ((Patient(3, 2), True), (Sequential(3, 2), False)):
        lane = Lane(fan_out=2)
        lane.scheduler.policy = policy
        async with running(lane):
            prompt = list(range(1, 45))
            assert await lane.tokens("a", prompt) == expected(prompt, 12)
        assert bool(lane.draft.model.prepare_requests) is prepares


# --- overload and refusals --------------------------------------------------------------------------------------------------


async def test_overload_is_told_before_the_first_item() -> None:
    """Bug guarded: a full queue is found out after the response has begun, or the refused stream stays registered."""
    lane = Lane(max_batch=1, max_waiting=1)
    lane.target.gate.clear()
    async with running(lane):
        first = asyncio.create_task(lane.tokens("first", [1]))
        await lane.target.asked.wait()
        second = asyncio.create_task(lane.tokens("second", [2]))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await anext(lane.stream("third", [3]))
        lane.target.gate.set()
        assert await first == expected([1], 12)
        assert await second == expected([2], 12)
        assert await lane.tokens("third", [3]) == expected([3], 12)


async def test_a_request_that_cannot_be_served_is_refused_at_once() -> None:
    """Bug guarded: a request that is refused after it was queued leaves a dead entry behind."""
    async with running(Lane()) as lane:
        with pytest.raises(InvalidRequest):
            await anext(lane.stream("a", [1], stop=("x",)))
        assert await lane.tokens("a", [1]) == expected([1], 12)


async def test_an_id_in_use_is_refused() -> None:
    """Bug guarded: a second request under the same id takes over the stream of the first, which then hangs."""
    lane = Lane()
    lane.target.gate.clear()
    async with running(lane):
        first = asyncio.create_task(lane.tokens("same", [1]))
        await lane.target.asked.wait()
        with pytest.raises(ValueError, match="in use"):
            await anext(lane.stream("same", [2]))
        lane.target.gate.set()
        assert await first == expected([1], 12)


async def test_an_id_is_in_use_until_its_stream_is_read() -> None:
    """Bug guarded: a slow reader's id is given away when the lane is done with it; closing the old stream then closes the new
    one, which hangs."""
    async with running(Lane()) as lane:
        async with aclosing(lane.stream("same", [1])) as slow:
            tokens = list((await anext(slow)).token_ids)
            await lane.until_idle()
            with pytest.raises(ValueError, match="in use"):
                await anext(lane.stream("same", [2]))
            tokens += [token async for delta in slow for token in delta.token_ids]
        assert tokens == expected([1], 12)
        assert await lane.tokens("same", [2]) == expected([2], 12)


# --- clients that leave -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 5])
async def test_every_client_that_leaves_is_cancelled(number: int) -> None:
    """Bug guarded: of several clients that leave during one round only the first is cancelled; the others run to their end."""
    lane = Lane()
    async with running(lane):
        streams = [lane.stream(f"leaves{i}", [i + 1], max_tokens=400) for i in range(number)]
        for stream in streams:
            await anext(stream)
        stays = asyncio.create_task(lane.tokens("stays", [40], max_tokens=50))
        await asyncio.sleep(0)
        lane.target.gate.clear()
        for _ in range(10):
            await asyncio.sleep(0)
        for stream in streams:
            await stream.aclose()
        lane.target.gate.set()
        assert await stays == expected([40], 50)
        assert lane.scheduler.running == []
        await lane.until_idle()
        assert not lane.target.model.sequences
        assert not lane.driver._cancelled, "what was cancelled is not kept"


async def test_a_waiting_client_may_leave() -> None:
    """Bug guarded: a request cancelled in the queue is run all the same."""
    lane = Lane(max_batch=1)
    lane.target.gate.clear()
    async with running(lane):
        first = asyncio.create_task(lane.tokens("first", [1]))
        await lane.target.asked.wait()
        second = asyncio.create_task(lane.tokens("second", [2]))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        lane.target.gate.set()
        await first
        await lane.until_idle()
        seen = {item.sequence_id for request in lane.target.model.requests for item in request.items}
        assert seen == {"first"}


async def test_leaving_just_after_the_end_spares_the_next_request_of_that_name() -> None:
    """Bug guarded: a client leaves without reading its last delta; the late cancel then hits a new request with the same id,
    whose client waits for ever."""
    lane = Lane(depth=0)
    async with running(lane):
        stream = lane.stream("same", [1])
        await anext(stream)
        await lane.until_idle()
        await stream.aclose()
        assert await lane.tokens("same", [2]) == expected([2], 12)


async def test_leaving_after_the_last_delta_cancels_nothing() -> None:
    """Bug guarded: every normal end counts as a cancel."""
    async with running(Lane()) as lane:
        await lane.tokens("a", [1])
        await lane.until_idle()
        count = len(lane.target.model.requests)
        assert await lane.tokens("a", [2]) == expected([2], 12)
        assert lane.target.model.requests[count].release == ()


# --- the draft --------------------------------------------------------------------------------------------------------------


async def test_without_a_draft_the_text_is_the_same() -> None:
    """Bug guarded: an unavailable draft is asked all the same and every round waits for its deadline."""
    lane = Lane()
    lane.draft.available = False
    async with running(lane):
        assert await lane.tokens("a", [1]) == expected([1], 12)
    assert lane.draft.model.requests == []
    assert lane.fallbacks == {}


def _unavailable(reply: ProposeReply) -> ProposeReply:
    raise DraftUnavailable("too_slow")


def _broken(reply: ProposeReply) -> ProposeReply:
    raise RuntimeError("a bug in the draft's connection")


def _late(reply: ProposeReply) -> ProposeReply:
    return ProposeReply(round_id=reply.round_id - 1, proposals=reply.proposals)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(_unavailable, "too_slow"), (_broken, "draft_error"), (_late, "late")],
    ids=["unavailable", "broken", "late"],
)
async def test_no_fault_of_the_draft_reaches_a_user(
    fault: Callable[[ProposeReply], ProposeReply], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: an exception out of the draft's connection fails every running request, although the target is healthy."""
    caplog.set_level(logging.CRITICAL)
    lane = Lane()
    async with running(lane):
        stream = lane.stream("a", [1], max_tokens=40)
        tokens = list((await anext(stream)).token_ids) + list((await anext(stream)).token_ids)
        lane.draft.after = fault
        for _ in range(4):
            tokens += (await anext(stream)).token_ids
        lane.draft.after = lambda reply: reply
        tokens += [token async for delta in stream for token in delta.token_ids]
        assert tokens == expected([1], 40)
    assert set(lane.fallbacks) == {reason}
    assert lane.reports[-2].num_accepted > 0, "the draft is used again afterwards"


# --- prepared drafts --------------------------------------------------------------------------------------------------------


async def test_prepared_drafts_need_no_asking() -> None:
    """Bug guarded: the driver drops what was prepared, or asks the draft although the answer is there."""
    async with running(Lane(fan_out=1)) as lane:
        prompts = {str(i): [i + 1, 2 * i + 1] for i in range(5)}
        texts = await asyncio.gather(*(lane.tokens(name, prompt) for name, prompt in prompts.items()))
        assert texts == [expected(prompt, 12) for prompt in prompts.values()]
    assert lane.draft.model.requests == []
    hits = sum((Counter(report.hits) for report in lane.reports), Counter[str]())
    assert hits == {"plain": 5, "bonus": 10}
    assert set(lane.draft.patience_s) == {0.0, 1.25}, "a round waits for those that it needs, not for those that ended"


async def test_the_target_is_asked_at_the_same_time() -> None:
    """Bug guarded: the verify waits until the draft has prepared, so that nothing overlaps."""
    lane = Lane(fan_out=1)
    lane.target.gate.clear()
    async with running(lane):
        stream = asyncio.create_task(lane.tokens("a", [1]))
        await lane.target.asked.wait()
        assert lane.draft.model.prepare_requests, "sent before the target has answered"
        lane.target.gate.set()
        assert await stream == expected([1], 12)


async def test_a_draft_that_prepares_late_is_asked_instead() -> None:
    """Bug guarded: answers that do not come stall the rounds, or come to a round to which they do not belong."""
    lane = Lane(fan_out=1)
    collect = lane.draft.collect

    async def late(patience_s: float) -> tuple[PrepareReply, ...]:
        return tuple(reply for reply in await collect(patience_s) if reply.round_id % 2)

    lane.draft.collect = late  # type: ignore[method-assign]
    async with running(lane):
        assert await lane.tokens("a", [1], max_tokens=40) == expected([1], 40)
    misses = sum((Counter(report.misses) for report in lane.reports), Counter[str]())
    assert misses["late"] == len(lane.draft.model.requests) > 2


@pytest.mark.parametrize("broken", ["prepare", "collect"])
async def test_a_draft_that_cannot_prepare_is_asked_instead(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: an exception on the way to what is prepared fails every running request."""
    caplog.set_level(logging.CRITICAL)
    lane = Lane(fan_out=1)

    def fail(*args: object) -> None:
        raise RuntimeError("a bug in the pool")

    setattr(lane.draft, broken, fail)
    async with running(lane):
        assert await lane.tokens("a", [1]) == expected([1], 12)
    assert lane.draft.model.requests


async def test_waiting_for_drafts_is_exposed_time() -> None:
    """Bug guarded: time for which a round waits for the draft, asked for or prepared, counts as hidden behind the target; or
    the time of the target counts as waiting."""
    lane = Lane(fan_out=1)
    propose, collect = lane.draft.propose, lane.draft.collect

    async def slow_propose(request: ProposeRequest) -> ProposeReply:
        lane.clock.advance(2.0)
        return await propose(request)

    async def slow_collect(patience_s: float) -> tuple[PrepareReply, ...]:
        lane.clock.advance(0.5)
        await collect(patience_s)
        return ()

    lane.draft.propose, lane.draft.collect = slow_propose, slow_collect  # type: ignore[method-assign]
    lane.target.before = lambda request: lane.clock.advance(8.0)
    async with running(lane):
        await lane.tokens("a", [1])
    assert [report.exposed_time_s for report in lane.reports] == [0.0, 2.5, 2.5, 2.5]
    assert [report.round_time_s for report in lane.reports] == [8.0, 10.5, 10.5, 10.5]
    assert [report.draft_time_s for report in lane.reports] == [0.0, 0.001, 0.001, 0.001]


async def test_a_client_that_leaves_while_its_draft_is_prepared() -> None:
    """Bug guarded: the answer about a cancelled request raises, is counted as a fault, or is given to its successor."""
    lane = Lane(fan_out=1)
    async with running(lane):
        stays = asyncio.create_task(lane.tokens("stays", [40], max_tokens=60))
        stream = lane.stream("same", [1], max_tokens=400)
        await anext(stream)
        await stream.aclose()
        while lane.scheduler.find("same") is not None:  # noqa: ASYNC110 - the driver tells nobody that it dropped a request
            await asyncio.sleep(0)
        assert await lane.tokens("same", [2]) == expected([2], 12)
        assert await stays == expected([40], 60)
    assert lane.fallbacks == {}


async def test_a_cancelled_driver_does_not_take_it_for_a_fault_of_the_draft() -> None:
    """Bug guarded: catching everything around the draft also catches the cancellation, and the lane cannot be stopped."""
    lane = Lane()
    waiting = asyncio.Event()

    async def propose(request: ProposeRequest) -> ProposeReply:
        waiting.set()
        await asyncio.sleep(60)
        raise AssertionError("unreachable")

    lane.draft.propose = propose  # type: ignore[method-assign]
    task = asyncio.create_task(lane.driver.run())
    stream = asyncio.create_task(lane.tokens("a", [1]))
    await asyncio.wait_for(waiting.wait(), PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE_S)
    stream.cancel()


# --- the target -------------------------------------------------------------------------------------------------------------


class Faults:
    """Raises each exception once, in the rounds given."""

    def __init__(self, lane: Lane, faults: dict[int, Exception], lose: bool = False):
        self._lane, self._faults, self._lose, self._count = lane, faults, lose, 0
        self.played_before: list[int] = []
        """Rounds that the target had played at each fault."""

    def __call__(self, request: VerifyRequest) -> None:
        self._count += 1
        if self._count in self._faults:
            self.played_before.append(len(self._lane.target.model.requests))
            if self._lose:
                self._lane.target.model.lose_everything()
            raise self._faults[self._count]


@pytest.mark.parametrize("rounds", [(1,), (2,), (3, 4, 5), (1, 3, 6)], ids=str)
async def test_streams_survive_the_loss_of_the_target(rounds: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: a restarted target ends the streams, tokens are lost or repeated around the restart, or a round is wasted on
    asking the new target for what only the old one knew."""
    caplog.set_level(logging.CRITICAL)
    lane = Lane()
    lane.target.before = faults = Faults(lane, {number: TargetLost("restarted") for number in rounds}, lose=True)
    async with running(lane):
        texts = await asyncio.gather(*(lane.tokens(str(i), [i + 1], max_tokens=20) for i in range(3)))
    assert texts == [expected([i + 1], 20) for i in range(3)]
    assert len(faults.played_before) == len(rounds)
    for number in faults.played_before:
        assert {item.base_length for item in lane.target.model.requests[number].items} == {0}


async def test_a_failing_round_fails_its_requests_and_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: an exception ends the loop (everything hangs), or fails the queue, or leaves streams without an end."""
    caplog.set_level(logging.CRITICAL)
    lane = Lane(max_batch=2)
    lane.target.before = Faults(lane, {3: RuntimeError("secret detail")})
    async with running(lane):
        first, second, third = await asyncio.gather(*(lane.deltas(str(i), [i + 1, 7]) for i in range(3)))
        for deltas in (first, second):
            last = deltas[-1]
            assert (last.finish_reason, last.token_ids) == (FinishReason.ERROR, ())
            assert last.error is not None
            assert "secret detail" not in last.error
            shown = [token for delta in deltas for token in delta.token_ids]
            assert shown == expected([1 if deltas is first else 2, 7], 12)[: len(shown)]
            assert (last.num_prompt_tokens, last.num_output_tokens) == (2, len(shown))
        assert [token for delta in third for token in delta.token_ids] == expected([3, 7], 12)
        await lane.until_idle()
        assert not lane.target.model.sequences


async def test_a_round_that_breaks_before_it_admits_anybody_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: rounds that fail for ever while their requests wait in the queue, and their clients with them."""
    caplog.set_level(logging.CRITICAL)
    lane = Lane()
    with monkeypatch.context() as broken:
        broken.delattr(lane.draft, "prepares")
        async with running(lane):
            (last,) = await lane.deltas("a", [1, 7])
    assert last.finish_reason is FinishReason.ERROR
    async with running(lane):
        assert await lane.tokens("b", [1, 7]) == expected([1, 7], 12)


async def test_a_request_that_ended_in_a_round_that_broke_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: one request ends, another one's walk raises in the same round: the delta of the first is lost with the
    round, and its client waits for ever."""
    caplog.set_level(logging.CRITICAL)
    lane = Lane(depth=0)
    lane.target.gate.clear()
    async with running(lane):
        tasks = [asyncio.create_task(lane.deltas(name, [1], max_tokens=4 + 4 * i)) for i, name in enumerate(("ends", "breaks"))]
        await lane.target.asked.wait()
        ends, breaks = (lane.scheduler.find(name) for name in ("ends", "breaks"))
        assert ends is not None
        assert breaks is not None
        walk = breaks.commit

        def break_when_the_other_ends(*run: Any) -> Committed:
            assert ends.state is not State.FINISHED, "a bug in the walk"
            return walk(*run)

        monkeypatch.setattr(breaks, "commit", break_when_the_other_ends)
        lane.target.gate.set()
        first, second = await asyncio.gather(*tasks)
    assert ends.state is State.FINISHED
    assert [first[-1].finish_reason, second[-1].finish_reason] == [FinishReason.ERROR, FinishReason.ERROR]


@pytest.mark.parametrize("fault", [ConnectionError, TargetLost])
@pytest.mark.parametrize("target", [RemoteTarget, ImpatientTarget])
async def test_a_target_that_always_fails_does_not_freeze_the_process(
    target: type[RemoteTarget], fault: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: with releases left to tell, a target that raises at once is asked again and again without a pause; nothing
    else in the process gets a turn, not even its health check."""
    caplog.set_level(logging.CRITICAL)
    lane = Lane(target())
    calls = 0

    def fail(request: VerifyRequest) -> None:
        nonlocal calls
        calls += 1
        if calls > 1000:
            raise SystemExit("asked a thousand times without a pause")
        raise fault("closed")

    lane.target.before = fail
    async with running(lane):
        stream = asyncio.create_task(lane.deltas("a", [1]))
        await asyncio.sleep(0.2)
        assert 1 <= calls <= 20
        lane.target.before = lambda request: None
        assert await lane.tokens("b", [2]) == expected([2], 12)
        assert (await stream)[-1].finish_reason is (FinishReason.ERROR if fault is ConnectionError else FinishReason.LENGTH)


async def test_a_report_that_fails_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: a bug in the metrics, after the tokens were delivered, fails every running request."""
    caplog.set_level(logging.CRITICAL)
    lane = Lane()

    def broken(report: StepReport) -> None:
        raise KeyError("a metric")

    lane.driver._on_report = broken
    async with running(lane):
        assert await lane.tokens("a", [1]) == expected([1], 12)


# --- in one process ---------------------------------------------------------------------------------------------------------


def _sync(source: ScriptedDraft | None, max_waiting: int = 10, fan_out: int = 0) -> SyncDriver:
    target = ScriptedTarget(next_token)
    scheduler = Scheduler(target.info, FixedDepth(3, fan_out), max_batch=2, prefill_tokens=64, max_waiting=max_waiting)
    return SyncDriver(target, source, scheduler, clock=FakeClock())


def _request(name: str, prompt: Sequence[int]) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=tuple(prompt), params=SamplingParams(temperature=0.0, max_tokens=6))


def test_generate_streams_several_requests() -> None:
    """Bug guarded: the synchronous driver runs requests one after the other, or stops at the end of the first."""
    driver = _sync(ScriptedDraft(next_token))
    outputs: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for delta in driver.generate([_request(name, [ord(name) % 50]) for name in "abc"]):
        outputs[delta.request_id].extend(delta.token_ids)
    assert outputs == {name: expected([ord(name) % 50], 6) for name in "abc"}


def test_without_a_source_nobody_is_asked() -> None:
    """Bug guarded: a driver without a draft crashes at the first round with a depth."""
    driver = _sync(None)
    assert [token for delta in driver.generate([_request("a", [1])]) for token in delta.token_ids] == expected([1], 6)


def test_a_source_may_be_unavailable_in_one_process_too() -> None:
    """Bug guarded: a source that says that it cannot answer now fails the whole generation, where the router goes on."""

    class Away(ScriptedDraft):
        def propose(self, request: ProposeRequest) -> ProposeReply:
            raise DraftUnavailable("away")

        def prepare(self, request: PrepareRequest) -> PrepareReply:
            raise DraftUnavailable("away")

    driver = _sync(Away(next_token), fan_out=2)
    driver.add(_request("a", [1]))
    tokens, reasons = [], Counter[str]()
    while driver.scheduler.running or driver.scheduler.waiting:
        result = driver.step()
        tokens += [token for delta in result.deltas for token in delta.token_ids]
        reasons.update(result.report.fallbacks)
    assert tokens == expected([1], 6)
    assert reasons == {"away": 4}, "the first token comes without a draft, the last has no room for one"


def test_a_bug_of_a_source_in_this_process_is_raised() -> None:
    """Bug guarded: what a test's source asserts about the messages is swallowed, so that the test cannot fail."""

    class Broken(ScriptedDraft):
        def propose(self, request: ProposeRequest) -> ProposeReply:
            raise AssertionError("what a test checks")

    with pytest.raises(AssertionError, match="what a test checks"):
        list(_sync(Broken(next_token)).generate([_request("a", [1])]))


def test_too_many_requests_at_once_are_refused() -> None:
    """Bug guarded: the synchronous driver has a queue without bound."""
    with pytest.raises(Overloaded):
        list(_sync(None, max_waiting=2).generate([_request(name, [1]) for name in "abc"]))
