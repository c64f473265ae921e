"""Which lane a request goes to, and what it sees when lanes leave, die, refuse or are not there yet. Lanes are scripted."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from autoscale.replicas import ReplicaPolicy
from autoscale.serve_adapter import STALE_AFTER_S, WANTED_REPLICAS, ColdStart
from autoscale.signals import LaneReport
from deployments.app import _router_options as router_options
from deployments.controller import Controller
from deployments.lanes import MAX_RESUMES, LaneError, StreamLanes
from deployments.messages import Directory, DraftReport, LaneEntry, LaneStatus
from deployments.wire import Answers, WireServer, decode
from engine.config import OutriderConfig
from engine.errors import InvalidRequest, Overloaded
from engine.testing import model_info
from engine.types import Delta, FinishReason, GenerateRequest, SamplingParams

SECRET = "secret"
LENGTH = 6


class Lane:
    """Says the numbers from 0 on, one per round; can fail at a number, wait there, or die there."""

    def __init__(self, fails: dict[int, Exception] | None = None):
        self.fails = fails or {}
        self.dies_at: int | None = None
        self.death: asyncio.Task[None] | None = None
        self.waits_at: int | None = None
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.requests: list[GenerateRequest] = []
        self.callers: set[str] = set()
        self.num_open = 0
        self.server = WireServer({}, SECRET, streams={"generate": self.generate})
        self.address = ""

    async def generate(self, body: bytes, caller: str, answers: Answers) -> None:
        request = decode(body, GenerateRequest)
        self.requests.append(request)
        self.callers.add(caller)
        self.num_open += 1
        try:
            begin = len(request.output_ids)
            for number in range(begin, LENGTH):
                await self._happens(number)
                reason = FinishReason.LENGTH if number == LENGTH - 1 else None
                rounds = number - begin + 1
                answers.put_nowait(
                    Delta(
                        request_id=request.request_id,
                        token_ids=(number,),
                        finish_reason=reason,
                        num_rounds=rounds,
                        num_drafted=2 * rounds,
                        num_accepted=rounds,
                    )
                )
        finally:
            self.num_open -= 1

    async def _happens(self, number: int) -> None:
        if number in self.fails:
            raise self.fails[number]
        if number == self.waits_at:
            self.reached.set()
            await self.go_on.wait()
        if number == self.dies_at:
            self.death = asyncio.create_task(self.server.stop())  # it cancels this call
            await asyncio.Event().wait()

    def entry(self, num_requests: int = 0) -> LaneEntry:
        return LaneEntry(lane_id=self.address, address=self.address, num_requests=num_requests)


class World:
    """Some lanes, and the Api's side of them."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.api = StreamLanes(SECRET, "api-1")

    async def start(self, lane: Lane | None = None) -> Lane:
        lane = lane or Lane()
        lane.address = await lane.server.start("127.0.0.1")
        self.lanes.append(lane)
        return lane

    async def list(self, *entries: LaneEntry) -> None:
        await self.api.update(entries)

    async def end(self) -> None:
        await self.api.close()
        for lane in self.lanes:
            await (lane.death or lane.server.stop())


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.end()


def request(name: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=(7,), params=SamplingParams(max_tokens=LENGTH))


async def run(api: StreamLanes, name: str = "r") -> list[Delta]:
    return [delta async for delta in api.generate(request(name))]


def said(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_requests_spread_by_load(world: World) -> None:
    """Bug guarded: all requests of the time between two reports go to the same lane, or the load of other Apis is not seen."""
    busy, free = [await world.start() for _ in range(2)]
    await world.list(busy.entry(num_requests=3), free.entry())
    for lane in (busy, free):
        lane.waits_at = 0
    streams = [asyncio.create_task(run(world.api, f"r{number}")) for number in range(5)]
    await asyncio.gather(busy.reached.wait(), free.reached.wait())
    await world.list(busy.entry(num_requests=4), free.entry(num_requests=4))  # the same requests, reported
    last = asyncio.create_task(run(world.api, "last"))
    busy.go_on.set()
    free.go_on.set()
    results = await asyncio.gather(*streams, last)
    assert all(said(deltas) == list(range(LENGTH)) for deltas in results)
    assert (len(busy.requests) + len(free.requests), len(free.requests)) == (6, 4)
    assert free.callers == {"api-1"}


async def test_a_lost_lane_is_replaced_by_another(world: World) -> None:
    """Bug guarded: text lost or said twice when a lane dies, and usage that forgets what was before."""
    dying, other = [await world.start() for _ in range(2)]
    dying.waits_at = dying.dies_at = 3
    await world.list(dying.entry(), other.entry(num_requests=5))
    stream = world.api.generate(request())
    deltas = [await anext(stream) for _ in range(3)]
    dying.go_on.set()
    deltas += [delta async for delta in stream]
    assert said(deltas) == list(range(LENGTH))
    assert other.requests[0].output_ids == (0, 1, 2)
    assert other.requests[0].request_id != "r"
    assert {delta.request_id for delta in deltas} == {"r"}
    assert [delta.num_rounds for delta in deltas] == [1, 2, 3, 4, 5, 6]
    assert (deltas[-1].num_drafted, deltas[-1].num_accepted) == (12, 6)
    assert deltas[-1].finish_reason == FinishReason.LENGTH


async def test_a_request_that_kills_every_lane_is_given_up(world: World) -> None:
    """Bug guarded: one poisonous request goes from lane to lane until none is left."""
    for _ in range(MAX_RESUMES + 3):
        (await world.start()).dies_at = 2
    await world.list(*(lane.entry() for lane in world.lanes))
    with pytest.raises(LaneError, match=f"lost its lane {MAX_RESUMES + 1} times"):
        await run(world.api)
    assert sum(len(lane.requests) for lane in world.lanes) == MAX_RESUMES + 1


async def test_a_request_waits_for_the_first_lane(world: World) -> None:
    """Bug guarded: requests at start are refused although the lane comes a moment later."""
    waiting = asyncio.create_task(run(world.api))
    await asyncio.sleep(0)
    lane = await world.start()
    await world.list(lane.entry())
    assert said(await waiting) == list(range(LENGTH))


async def test_no_lane_is_an_error_in_the_end(world: World) -> None:
    """Bug guarded: requests that wait for ever, or that a lane which is gone but still listed sends round in circles."""
    api = StreamLanes(SECRET, "api-1", patience_s=0)
    with pytest.raises(LaneError, match="no lane is ready"):
        await run(api)
    gone = await world.start()
    await gone.server.stop()
    await api.update((gone.entry(),))
    with pytest.raises(LaneError, match="no lane is ready"):
        await run(api)
    impatient = StreamLanes(SECRET, "api-1", resume_patience_s=0)
    dying = await world.start()
    dying.dies_at = 1
    await impatient.update((dying.entry(),))
    with pytest.raises(LaneError, match="no lane is ready"):
        await run(impatient)


async def test_a_lane_that_leaves_keeps_its_streams_and_gets_no_new_ones(world: World) -> None:
    """Bug guarded: scaling down cuts streams, or new requests fail in the lane until the directory has forgotten it."""
    leaving, other = [await world.start() for _ in range(2)]
    leaving.waits_at = 2
    await world.list(leaving.entry(), other.entry(num_requests=5))
    first = asyncio.create_task(run(world.api))
    await leaving.reached.wait()
    drained = asyncio.create_task(leaving.server.drain())
    await asyncio.sleep(0)
    assert said(await run(world.api, "while listed")) == list(range(LENGTH))
    await world.list(other.entry())
    assert said(await run(world.api, "afterwards")) == list(range(LENGTH))
    leaving.go_on.set()
    assert said(await first) == list(range(LENGTH))
    await drained
    assert (len(leaving.requests), len(other.requests)) == (1, 2)


@pytest.mark.parametrize(
    ("error", "expected", "field"),
    [
        (InvalidRequest("too long", "prompt"), InvalidRequest, "too long"),
        (Overloaded("full", 3.0), Overloaded, "full"),
        (ZeroDivisionError("secret detail"), LaneError, "the lane failed: ZeroDivisionError"),
    ],
    ids=["invalid", "overloaded", "broken"],
)
async def test_a_refused_request_is_not_tried_elsewhere(
    world: World, error: Exception, expected: type[Exception], field: str
) -> None:
    """Bug guarded: wrong requests wander through all lanes, are answered 500, or tell the user of the inside."""
    for _ in range(2):
        await world.start(Lane({0: error}))
    await world.list(*(lane.entry() for lane in world.lanes))
    with pytest.raises(expected) as refused:
        await run(world.api)
    assert str(refused.value) == field
    assert sum(len(lane.requests) for lane in world.lanes) == 1
    if isinstance(error, (InvalidRequest, Overloaded)):
        assert vars(refused.value) == vars(error)


async def test_leaving_the_stream_cancels_the_request(world: World) -> None:
    """Bug guarded: a client that has gone keeps its place in the batch, and counts as load here for ever."""
    lane = await world.start()
    lane.waits_at = 1
    await world.list(lane.entry())
    async with aclosing(world.api.generate(request())) as deltas:
        await anext(deltas)
        await lane.reached.wait()
    lane.waits_at = None
    assert said(await run(world.api, "next")) == list(range(LENGTH))
    assert lane.num_open == 0


def status(lane_id: str, num_running: int, leaving: bool = False) -> LaneStatus:
    load = LaneReport(
        lane_id=lane_id,
        now_s=0.0,
        num_arrivals=0,
        num_running=num_running,
        num_waiting=1,
        mean_output_tokens=0.0,
        tokens_per_s=0.0,
        acceptance=0.5,
        mean_depth=0.0,
        target_step_times=(),
        draft_step_times=(),
    )
    return LaneStatus(
        load=load,
        address=f"{lane_id}:1",
        leaving=leaving,
        counters={},
        fallbacks={},
        accepted_per_position=(),
        drafted_per_position=(),
        target=model_info(),
        target_pid=1,
        draft_name="none",
        draft_state="ok",
        explanation={},
    )


async def test_the_directory_lists_the_lanes_that_take_requests() -> None:
    """Bug guarded: Apis send requests to lanes that are leaving, or do not see how busy a lane is."""
    controller = Controller(OutriderConfig().model_dump())
    assert (await controller.directory()).lanes == ()
    await controller.report_lane(status("a", 3))
    answer: Directory = await controller.report_lane(status("b", 0))
    assert answer.lanes == (await controller.directory()).lanes
    assert answer.lanes == (
        LaneEntry(lane_id="a", address="a:1", num_requests=4),
        LaneEntry(lane_id="b", address="b:1", num_requests=1),
    )
    await controller.report_lane(status("a", 3, leaving=True))
    assert [lane.lane_id for lane in (await controller.directory()).lanes] == ["b"]
    assert len(await controller.lanes()) == 2
    details = (await controller.snapshot())["lane_details"]
    assert [(lane["lane_id"], lane["leaving"]) for lane in details] == [("a", True), ("b", False)]


def test_serve_does_as_the_controller_decided() -> None:
    """Bug guarded: requests do not come through Serve, so that by its own rules it never starts a second lane; an old decision
    or a broken one that changes the number; bounds that Serve does not know."""
    from ray.serve.config import AutoscalingConfig

    options: Any = router_options(OutriderConfig.model_validate({"lanes": {"min": 1, "max": 4}}))
    scaling = AutoscalingConfig(**options["autoscaling_config"])
    policy = scaling.policy.get_policy()
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert "autoscaling_config" not in router_options(OutriderConfig())

    def replicas(**series: list[tuple[float, float]]) -> float:
        points = {name: [SimpleNamespace(timestamp=at, value=value) for at, value in told] for name, told in series.items()}
        context = SimpleNamespace(raw_metrics={WANTED_REPLICAS: points}, current_time=100.0, target_num_replicas=2)
        desired, state = policy(context)
        assert state == {}
        return float(desired)

    assert replicas(a=[(98.0, 1.0), (99.0, 3.0)], b=[(98.5, 1.0)]) == 3.0
    assert replicas(a=[(99.0, 0.0)]) == 0.0
    assert replicas() == 2.0, "before the first report nothing changes"
    assert replicas(a=[(100.0 - STALE_AFTER_S - 1, 3.0)]) == 2.0
    assert replicas(a=[(99.0, math.nan)]) == 2.0
    assert policy(SimpleNamespace(raw_metrics=None, current_time=100.0, target_num_replicas=2)) == (2, {})


async def test_the_controller_decides_and_forgets_who_has_ended() -> None:
    """Bug guarded: a lane that has ended holds its GPU for as long as one that is silent, a draft that leaves is given work,
    and a decision that neither lanes nor the controller's page get to know."""
    controller = Controller(OutriderConfig.model_validate({"drafts": {"max": 2}}).model_dump())
    controller._replicas = ReplicaPolicy(msgspec.structs.replace(controller._replicas.limits, settle_s=0.0))
    controller._decide_every_s = 0.0
    assert (await controller.report_lane(status("a", 3))).wanted_lanes == 1
    report = DraftReport(draft_id="d", address="host:1", target_fingerprint="f", info=model_info())
    assert await controller.report_draft(report) == 1
    assert [draft.draft_id for draft in (await controller.directory()).drafts] == ["d"]
    await controller.report_draft(msgspec.structs.replace(report, leaving=True))
    assert (await controller.directory()).drafts == ()
    state = await controller.snapshot()
    assert (state["wanted_lanes"], state["wanted_drafts"], state["drafts"]) == (1, 1, [])
    assert len(state["draft_details"]) == 1
    assert state["replicas"]["decision"]["lanes_reason"]
    await controller.forget_draft("d")
    await controller.forget_lane("a")
    state = await controller.snapshot()
    assert (state["lanes"], state["lane_details"], state["draft_details"]) == ([], [], [])


class WaitingCall:
    """What a handle's method gives: it can be awaited and taken back."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[int] = loop.create_future()
        self.taken_back = asyncio.Event()

    def __await__(self) -> Any:
        return self.done.__await__()

    def cancel(self) -> None:
        self.taken_back.set()


async def test_one_request_waits_for_a_deployment_without_replicas() -> None:
    """Bug guarded: a request more at every decision, one that goes on waiting when nobody wants the replica any more, and one
    failure after which nobody asks again."""
    calls: asyncio.Queue[WaitingCall] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def remote() -> WaitingCall:
        call = WaitingCall(loop)
        calls.put_nowait(call)
        return call

    start = ColdStart("Draft", "process_id", lambda: SimpleNamespace(process_id=SimpleNamespace(remote=remote)))
    start.ask(False)
    for _ in range(3):
        start.ask(True)
    first = await calls.get()
    assert start.num_starts == 1
    start.ask(False)
    await first.taken_back.wait()
    start.ask(True)
    second = await calls.get()
    second.done.set_exception(RuntimeError("no replica"))
    while calls.empty():
        start.ask(True)
        await asyncio.sleep(0)
    (await calls.get()).done.set_result(7)
    assert start.num_starts == 3
