"""Many lanes on one clock: requests are routed to the least loaded one, the controller is told of all of them."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec

from autoscale.controller_policy import ControllerPolicy
from autoscale.lane_policy import LanePolicy
from autoscale.signals import ClusterState, LaneReport, StepTimes
from autoscale.simulator.lane import Device, Job, Lane, Pair
from autoscale.simulator.traffic import Traffic
from engine.scheduler import DepthPolicy, FixedDepth

PROFILE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
PROFILE_CONTEXT = 64
"""Tokens and context at which a worker measures itself when it starts."""
RATE_WINDOW_S = 2.0
"""Over which a lane reports its tokens per second."""
LANES_PER_REPORT = 16
"""With more lanes each reports less often, so that the controller's work stays within a fraction of a simulation's."""
STRIDES_PER_REPORT = 10
"""The same where lanes are asked less often."""
MAX_REPORT_S = 4.0
"""Below the age at which the controller gives a lane up."""


class Arm(msgspec.Struct, frozen=True):
    """How depths are chosen: ``depth`` None follows the load, a number is fixed."""

    name: str
    depth: int | None = None
    overlaps: bool = False
    """Whether the draft may prepare while the target verifies."""


PLAIN = Arm("none", 0)
FIXED = tuple(Arm(f"K={depth}", depth) for depth in (1, 2, 4, 8))
SEQUENTIAL = Arm("sequential")
ADAPTIVE = Arm("adaptive", overlaps=True)
ARMS = {arm.name: arm for arm in (PLAIN, *FIXED, SEQUENTIAL, ADAPTIVE)}


class Cluster(msgspec.Struct, frozen=True):
    """What is simulated. ``num_drafts`` replicas are shared by ``num_lanes`` lanes, each with one target."""

    pair: Pair
    num_lanes: int = 1
    num_drafts: int = 1
    max_batch: int = 256
    prefill_tokens: int = 512
    """As ``lanes.max_batch`` and ``lanes.prefill_tokens``."""
    max_depth: int = 8
    dwell_s: float = 1.0
    report_interval_s: float = 0.25
    cached_prompts: bool = False
    """Prompts cost the target nothing, as if its prefix cache held them: to look at decoding alone."""


class Replicas(msgspec.Struct, frozen=True):
    """How many lanes and drafts there are to be."""

    num_lanes: int
    num_drafts: int


ReplicaPolicy = Callable[[ClusterState, Any, float], tuple[Replicas | None, Any]]
"""``(signals, memory, now) -> (decision, memory)``; None as a decision leaves everything as it is. First memory: None."""
MakePolicy = Callable[[Cluster, Arm], DepthPolicy]
Progress = Callable[[float], None]
"""Called now and then with the share of the simulation that is done."""


class Moment(msgspec.Struct, frozen=True):
    """A lane when it began to play a round (or several like it)."""

    at_s: float
    lane: int
    batch: int
    num_tokens: int
    """Committed by the lane so far."""
    depth: float
    """Mean over the decoding requests."""
    speculates: bool
    """What the policy says; probes, which are there to learn, do not count."""


class Run(msgspec.Struct, frozen=True):
    """What came of a simulation."""

    jobs: tuple[Job, ...]
    """That ended, in the order of their ends."""
    num_open: int
    """Requests still in the cluster when the time was over."""
    seconds: float
    """Simulated."""
    num_tokens: int
    """Committed, those of open requests included."""
    mean_depth: float
    """Draft tokens per request and round."""
    moments: tuple[Moment, ...]
    """Of all lanes; empty unless asked for."""

    @property
    def tokens_per_s(self) -> float:
        """Of the whole cluster."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


def simulate(
    cluster: Cluster,
    traffic: Traffic,
    arm: Arm,
    *,
    seed: int = 0,
    stride_s: float = 0.0,
    until_s: float = math.inf,
    keep_moments: bool = False,
    make_policy: MakePolicy | None = None,
    replicas: ReplicaPolicy | None = None,
    progress: Progress | None = None,
) -> Run:
    """Play ``traffic`` against ``cluster`` until its requests have ended, or until ``until_s``.

    ``stride_s``: a lane asks its policy no more often than that, and plays as many equal rounds in a row as fit into it; 0
    asks before every round. ``make_policy`` builds the policy of a lane (default: `depth_policy`). ``replicas`` is asked after
    every report and may change the number of lanes and drafts.
    """
    simulation = _Simulation(cluster, traffic, arm, seed, stride_s, keep_moments, make_policy or depth_policy, replicas)
    return simulation.play(until_s, progress)


def depth_policy(cluster: Cluster, arm: Arm) -> DepthPolicy:
    """The policy of a lane, as a router builds it: from what target and draft measured of themselves when they started."""
    if arm.depth is not None:
        return FixedDepth(arm.depth)
    return LanePolicy(
        max_depth=cluster.max_depth,
        target_step_times=step_times(cluster.pair.target),
        draft_step_times=step_times(cluster.pair.draft),
        dwell_s=cluster.dwell_s,
        overlaps=arm.overlaps,
    )


def step_times(device: Device) -> StepTimes:
    """What a worker announces: (tokens, seconds) at a short context."""
    return tuple((size, device.step_s(size, PROFILE_CONTEXT + size)) for size in PROFILE_SIZES)


class _Playing:
    """A lane, and what it plays now."""

    def __init__(self, lane: Lane):
        self.lane = lane
        self.started_s = self.round_s = 0.0
        self.num_rounds = 0
        """0: the lane is idle."""
        self.asked_s = -math.inf
        """When the policy was asked last."""
        self.version = 0
        """Of the event that ends it: a request that comes meanwhile moves that event."""
        self.is_open = True
        """Whether it gets new requests."""
        self.recent: deque[tuple[float, int]] = deque()
        """(time, tokens committed until then), for the last seconds."""
        self.lengths: deque[int] = deque(maxlen=64)
        """Outputs of the requests that ended lately."""


class _Simulation:
    def __init__(
        self,
        cluster: Cluster,
        traffic: Traffic,
        arm: Arm,
        seed: int,
        stride_s: float,
        keep_moments: bool,
        make_policy: MakePolicy,
        replicas: ReplicaPolicy | None,
    ):
        self._cluster, self._traffic, self._arm = cluster, traffic, arm
        self._random, self._lengths_random = Random(seed), Random(seed + 1)
        self._stride_s, self._keep_moments = stride_s, keep_moments
        self._make_policy, self._replicas = make_policy, replicas
        self._memory: Any = None
        self._controller = ControllerPolicy(cluster.max_depth)
        self._lanes: list[_Playing] = []
        self._num_drafts = cluster.num_drafts
        self._loads: list[tuple[int, int]] = []
        """Heap of (requests, lane); entries that are no longer true are dropped when they come up."""
        self._events: list[tuple[float, int, int, int]] = []
        """Heap of (time, number, lane or `_REPORT`, version)."""
        self._numbers = itertools.count()
        self._ended: list[Job] = []
        self._num_sent = 0
        self._num_open = 0
        self._moments: list[Moment] = []
        self._now_s = 0.0
        self._resize(Replicas(cluster.num_lanes, cluster.num_drafts))

    def play(self, until_s: float, progress: Progress | None) -> Run:
        if self._follows_load or self._replicas:
            self._schedule(self._report_interval_s, _REPORT, 0)
        arrivals = self._arrivals()
        arrival = next(arrivals, None)
        self._keep_users()
        if self._traffic.users is not None and self._traffic.users.to > self._traffic.users.count:
            self._schedule(self._traffic.users.at_s, _USERS, 0)
        for step in itertools.count(1):
            next_s = self._events[0][0] if self._events else math.inf
            if min(next_s, arrival.at_s if arrival else math.inf) > until_s:
                self._now_s = until_s
                break
            if arrival is not None and arrival.at_s <= next_s:
                self._now_s = arrival.at_s
                self._send(arrival)
                arrival = next(arrivals, None)
            elif not self._events or (arrival is None and not self._num_open):
                break
            else:
                self._handle(*heapq.heappop(self._events))
            if progress is not None and step % 4096 == 0:
                progress(self._share_done(until_s))
        return self._run()

    # --- requests -----------------------------------------------------------------------------------------------------------

    def _arrivals(self) -> Iterator[Job]:
        for number, arrival in enumerate(self._traffic.arrivals):
            yield self._job(f"r{number}", arrival.at_s, arrival.prompt_tokens, arrival.output_tokens)

    def _job(self, name: str, at_s: float, prompt_tokens: int, output_tokens: int) -> Job:
        job = Job(name, at_s, prompt_tokens, output_tokens, unread=prompt_tokens)
        if self._cluster.cached_prompts:
            job.unread, job.done, job.first_s, job.known = 0, 1, at_s, prompt_tokens
        return job

    def _keep_users(self) -> None:
        """Users without a request send one."""
        users = self._traffic.users
        if users is None:
            return
        while self._num_open < users.at(self._now_s) and self._num_sent < self._traffic.num_requests:
            lengths = self._traffic.lengths.draw(self._lengths_random)
            self._send(self._job(f"r{self._num_sent}", self._now_s, *lengths))

    def _send(self, job: Job) -> None:
        self._num_sent += 1
        self._num_open += 1
        playing = self._least_loaded()
        playing.lane.add(job)
        self._note_load(playing)
        if playing.num_rounds == 0:
            self._begin(playing)
        elif playing.num_rounds > 1:
            self._cut_short(playing)

    def _least_loaded(self) -> _Playing:
        while True:
            count, index = self._loads[0]
            playing = self._lanes[index]
            if playing.is_open and playing.lane.num_requests == count:
                return playing
            heapq.heappop(self._loads)

    def _note_load(self, playing: _Playing) -> None:
        heapq.heappush(self._loads, (playing.lane.num_requests, playing.lane.index))

    # --- rounds -------------------------------------------------------------------------------------------------------------

    def _begin(self, playing: _Playing) -> None:
        lane = playing.lane
        asks = self._now_s >= playing.asked_s + self._stride_s
        if asks:
            playing.asked_s = self._now_s
        playing.started_s, playing.round_s = self._now_s, lane.begin(self._now_s, asks=asks)
        playing.num_rounds = max(int(self._stride_s / playing.round_s), 1) if lane.is_steady else 1
        if self._keep_moments:
            self._moments.append(_moment(lane, self._now_s))
        self._schedule_end(playing)

    def _cut_short(self, playing: _Playing) -> None:
        """A request has come: it joins when the round of this moment ends."""
        num_rounds = max(math.ceil((self._now_s - playing.started_s) / playing.round_s), 1)
        if num_rounds < playing.num_rounds:
            playing.num_rounds = num_rounds
            self._schedule_end(playing)

    def _schedule_end(self, playing: _Playing) -> None:
        playing.version += 1
        end_s = playing.started_s + playing.num_rounds * playing.round_s
        self._schedule(max(end_s, self._now_s), playing.lane.index, playing.version)

    def _schedule(self, at_s: float, what: int, version: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), what, version))

    def _handle(self, at_s: float, _: int, what: int, version: int) -> None:
        if what >= 0 and version != self._lanes[what].version:
            return
        self._now_s = at_s
        if what == _REPORT:
            self._report()
        elif what == _USERS:
            self._keep_users()
        else:
            self._end(self._lanes[what])

    def _end(self, playing: _Playing) -> None:
        lane = playing.lane
        ended = lane.end(playing.started_s, playing.round_s, playing.num_rounds)
        playing.num_rounds = 1  # still: what users send now joins the next round together
        if self._follows_load:
            playing.recent.append((self._now_s, lane.num_tokens))
        if ended:
            self._ended += ended
            self._num_open -= len(ended)
            playing.lengths.extend(job.output_tokens for job in ended)
            self._note_load(playing)
            self._keep_users()
        playing.num_rounds = 0
        if lane.num_requests:
            self._begin(playing)

    # --- the controller -----------------------------------------------------------------------------------------------------

    @property
    def _follows_load(self) -> bool:
        return self._arm.depth is None

    @property
    def _report_interval_s(self) -> float:
        least_s = max(self._cluster.report_interval_s, STRIDES_PER_REPORT * self._stride_s)
        return min(least_s * max(len(self._lanes) / LANES_PER_REPORT, 1), MAX_REPORT_S)

    def _report(self) -> None:
        for playing in self._lanes:
            if playing.is_open or playing.lane.num_requests:
                self._controller.ingest(self._lane_report(playing), self._now_s)
        if self._replicas is not None:
            decision, self._memory = self._replicas(self._controller.state(self._now_s), self._memory, self._now_s)
            if decision is not None:
                self._resize(decision)
        table = self._controller.table(self._now_s)
        for playing in self._lanes:
            if isinstance(playing.lane.policy, LanePolicy):
                playing.lane.policy.update_table(table)
        self._schedule(self._now_s + self._report_interval_s, _REPORT, 0)

    def _lane_report(self, playing: _Playing) -> LaneReport:
        lane, policy = playing.lane, playing.lane.policy
        num_arrivals, lane.num_arrivals = lane.num_arrivals, 0
        learned: dict[str, Any] = {}
        if isinstance(policy, LanePolicy):
            learned = {
                "acceptance": policy.acceptance,
                "target_step_times": policy.target_step_times,
                "draft_step_times": policy.draft_step_times,
                "context_s": policy.context_s,
                "calibration_error": policy.calibration.error or 0.0,
                "overlap": policy.overlap_report,
            }
        return LaneReport(
            lane_id=str(lane.index),
            now_s=self._now_s,
            num_arrivals=num_arrivals,
            num_running=len(lane.running),
            num_waiting=len(lane.waiting),
            mean_output_tokens=sum(playing.lengths) / len(playing.lengths) if playing.lengths else 0.0,
            tokens_per_s=self._recent_rate(playing),
            mean_depth=lane.mean_depth,
            **learned,
        )

    def _recent_rate(self, playing: _Playing) -> float:
        recent = playing.recent
        while len(recent) > 1 and recent[1][0] <= self._now_s - RATE_WINDOW_S:
            recent.popleft()
        return (recent[-1][1] - recent[0][1]) / RATE_WINDOW_S if recent else 0.0

    def _resize(self, replicas: Replicas) -> None:
        """Lanes that are to go finish what they have; those that come are there at once."""
        while sum(playing.is_open for playing in self._lanes) < replicas.num_lanes:
            closed = next((playing for playing in self._lanes if not playing.is_open), None)
            if closed is None:
                closed = _Playing(self._new_lane(len(self._lanes)))
                self._lanes.append(closed)
            closed.is_open = True
            self._note_load(closed)
        for playing in [playing for playing in self._lanes if playing.is_open][max(replicas.num_lanes, 1) :]:
            playing.is_open = False
        self._num_drafts = replicas.num_drafts
        for playing in self._lanes:
            share = replicas.num_lanes / replicas.num_drafts if replicas.num_drafts else 0.0
            playing.lane.lanes_per_draft = share

    def _new_lane(self, index: int) -> Lane:
        cluster = self._cluster
        return Lane(
            index,
            cluster.pair,
            self._make_policy(cluster, self._arm),
            self._random,
            max_batch=cluster.max_batch,
            prefill_tokens=cluster.prefill_tokens,
            overlaps=self._arm.overlaps,
        )

    # --- results ------------------------------------------------------------------------------------------------------------

    def _share_done(self, until_s: float) -> float:
        of_requests = len(self._ended) / max(self._traffic.num_requests, 1)
        return min(max(of_requests, self._now_s / until_s), 1.0)

    def _run(self) -> Run:
        lanes = [playing.lane for playing in self._lanes]
        return Run(
            jobs=tuple(self._ended),
            num_open=self._num_open,
            seconds=self._now_s,
            num_tokens=sum(lane.num_tokens for lane in lanes),
            mean_depth=sum(lane.num_drafted for lane in lanes) / max(sum(lane.num_played for lane in lanes), 1),
            moments=tuple(self._moments),
        )


_REPORT, _USERS = -1, -2


def _moment(lane: Lane, now_s: float) -> Moment:
    policy, depth = lane.policy, lane.mean_depth
    speculates = policy.explain()["depth"] > 0 if isinstance(policy, LanePolicy) else depth > 0
    return Moment(now_s, lane.index, len(lane.running), lane.num_tokens, depth, speculates)
