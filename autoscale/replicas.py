"""How many lanes and how many draft replicas there should be, from the load and the cost model.

**Lanes.** A lane is full when its plain step takes `SLOWDOWN` times as long as with one request (or longer than the latency
objective), at `FULL_SHARE` of ``max_batch``, or when requests wait although it has room by these measures (its KV cache is
full). Lanes = requests that are there or expected / requests that fill one. A lane is given up only if the others can hold the
requests *and* make the tokens that arrive, with a margin: in an open loop fewer lanes are slower, so more requests pile up, and
a count alone would take the lane back at once.

**Drafts.** Replicas = rows that the lanes want drafted / rows at which a draft's step takes `SLOWDOWN` times as long. When no
lane wants any for ``idle_s``, the drafts go; they come back when some lane has *clearly* wanted them for ``dwell_s``. The
holds bound how often: in t seconds at most ``2 (t / (idle_s + dwell_s) + 1)`` changes between none and some.

**A fixed number of GPUs.** Where lanes and drafts do not both fit, the one of the two fits with the larger modelled throughput
is taken. A replica is asked for only when the GPU that it needs is free: first the one that has it goes, then the other comes.
"""

import math
from typing import NamedTuple

import msgspec

from autoscale.cost_model import RoundCost, StepCost
from autoscale.price import best_depth, throughput

SLOWDOWN = 2.0
"""A step that takes so many times as long as with one request: what another replica halves again."""
FULL_SHARE = 0.9
"""Of ``lanes.max_batch``: beyond, requests are about to wait."""
MARGIN = 0.2
"""A replica is given up when the others would still have this share of their room."""
TRADE_MARGIN = 1.05
"""Lanes are traded for drafts, and back, when that promises this much more throughput."""
WAITING_SHARE = 0.1
"""Fewer waiting than this share of the running requests are just being taken in."""
IDLE_REQUESTS = 0.05
"""Fewer expected requests than this are none."""
MOST_ROWS = 1 << 16


class ReplicaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is configured. GPUs are counted as Ray does, so they may be fractions."""

    min_lanes: int = 1
    max_lanes: int = 1
    min_drafts: int = 0
    max_drafts: int = 0
    lane_gpus: float = 0.0
    draft_gpus: float = 0.0
    num_gpus: float | None = None
    """That lanes and drafts share; None: no limit but the numbers above (a cluster that grows), and idle GPUs cost money."""
    max_batch: int = 64
    max_depth: int = 8
    latency_objective_s: float | None = None
    """Longest step, time per output token."""
    scale_up_s: float = 5.0
    """The load must ask for more lanes for so long."""
    scale_down_s: float = 60.0
    idle_s: float = 300.0
    """For so long no lane must want drafts."""
    dwell_s: float = 1.0
    """For so long some lane must clearly want more of them: in a lane on the threshold, requests end and begin."""
    settle_s: float = 5.0
    """After the first signals nothing is decided: not all replicas may have reported yet."""


class ReplicaSignals(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at this moment, over all lanes. Replicas that leave still hold their GPUs."""

    num_lanes: int
    """That are there, leaving ones included."""
    num_leaving: int = 0
    num_drafts: int = 0
    """That are there, leaving ones included."""
    num_running: float = 0.0
    num_waiting: float = 0.0
    most_running: float = 0.0
    """In one lane."""
    expected_requests: float = 0.0
    """That all lanes are about to hold, by Little's law."""
    token_rate: float = 0.0
    """Tokens per second that the arriving requests ask for."""
    wanted_rows: float = 0.0
    """Rows of a draft's step that the lanes want, drafts or not (`LaneReport.wanted_draft_rows`)."""
    clearly_wanted_rows: float = 0.0
    acceptance: float = 0.0
    cost: RoundCost = RoundCost(StepCost.measured(()))
    """Sequential rounds of one lane."""


class ReplicaDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for now, and why."""

    lanes: int
    drafts: int
    lanes_reason: str
    drafts_reason: str


class Hold(msgspec.Struct, frozen=True):
    """A change that the signals have asked for since then, and the least of it that they asked for all the time."""

    since_s: float
    to: int


class Scale(msgspec.Struct, frozen=True):
    """The wanted number of replicas of one kind, before the GPUs are counted, and what may change it soon."""

    wanted: int
    up: Hold | None = None
    down: Hold | None = None

    def step(self, up_to: int, down_to: int, up_s: float, down_s: float, now_s: float) -> "Scale":
        """Up to ``up_to`` after ``up_s``, down to ``down_to`` after ``down_s``, each if that held all the time.

        ``down_to`` carries a margin, so it is at least ``up_to``; between the two the number stays.
        """
        if up_to > self.wanted:
            since_s, to = (self.up.since_s, min(self.up.to, up_to)) if self.up else (now_s, up_to)
            return Scale(to) if now_s - since_s >= up_s else Scale(self.wanted, up=Hold(since_s, to))
        if down_to < self.wanted:
            since_s, to = (self.down.since_s, max(self.down.to, down_to)) if self.down else (now_s, down_to)
            return Scale(to) if now_s - since_s >= down_s else Scale(self.wanted, down=Hold(since_s, to))
        return Scale(self.wanted)

    def restarted(self, now_s: float) -> "Scale":
        """After a clock that went backwards: what is held begins now."""
        up, down = (hold and Hold(now_s, hold.to) for hold in (self.up, self.down))
        return Scale(self.wanted, up, down)


class ReplicaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of `ReplicaPolicy.step`; the counters are cumulative."""

    now_s: float = -math.inf
    settling_since_s: float | None = None
    lanes: Scale | None = None
    """None until the first decision."""
    drafts: Scale | None = None
    prefers_lanes: bool = True
    """Where lanes and drafts do not both fit."""
    decision: ReplicaDecision | None = None
    num_lane_changes: int = 0
    num_draft_changes: int = 0
    num_bad_signals: int = 0
    """Signals that were not finite or negative: the decision stayed as it was."""
    num_clock_jumps: int = 0


class _Fit(NamedTuple):
    """Lanes and drafts that fit on the GPUs together."""

    lanes: int
    drafts: int


class ReplicaPolicy(msgspec.Struct, frozen=True):
    """The decision for given limits. Reads no clock, does no I/O, keeps nothing."""

    limits: ReplicaLimits

    def step(
        self, signals: ReplicaSignals, memory: ReplicaMemory, now_s: float
    ) -> tuple[ReplicaDecision | None, ReplicaMemory]:
        """Decide; None while it is not known yet what is there (then everything stays as it is).

        While no lane reports the decision stays. So it does with bad signals or times, which are counted in the memory.
        """
        if not math.isfinite(now_s):
            return memory.decision, _counted(memory, clock=1)
        memory = _at(memory, now_s)
        if not _are_sound(signals):
            return memory.decision, _counted(memory, signals=1)
        if signals.num_lanes == 0:
            return memory.decision, memory
        if memory.settling_since_s is None:
            memory = msgspec.structs.replace(memory, settling_since_s=now_s)
        if memory.decision is None and now_s - (memory.settling_since_s or now_s) < self.limits.settle_s:
            return None, memory
        lanes, drafts = self._scales(signals, memory)
        prefers_lanes = self._prefers_lanes(signals, lanes.wanted, drafts.wanted, memory.prefers_lanes)
        goal = self._fit(lanes.wanted, drafts.wanted, prefers_lanes)
        now = self._with_free_gpus(goal, signals, memory)
        decision = ReplicaDecision(
            lanes=now.lanes,
            drafts=now.drafts,
            lanes_reason=self._lanes_reason(signals, lanes, goal, now, now_s),
            drafts_reason=self._drafts_reason(signals, drafts, goal, now, now_s),
        )
        before = memory.decision or decision
        return decision, msgspec.structs.replace(
            memory,
            lanes=lanes,
            drafts=drafts,
            prefers_lanes=prefers_lanes,
            decision=decision,
            num_lane_changes=memory.num_lane_changes + (decision.lanes != before.lanes),
            num_draft_changes=memory.num_draft_changes + (decision.drafts != before.drafts),
        )

    def lane_capacity(self, signals: ReplicaSignals) -> float:
        """Requests that fill one lane, at least 1."""
        limits, target = self.limits, signals.cost.target
        if target.is_default:
            return max(limits.max_batch / 2, 1.0)
        longest_s = limits.latency_objective_s or SLOWDOWN * target.time(1)
        full = min(_most_within(target, longest_s), FULL_SHARE * limits.max_batch)
        if signals.num_waiting > WAITING_SHARE * signals.num_running:
            # Of the lane that runs most, not of the mean: a new lane has none yet, and would call for more new ones.
            full = min(full, signals.most_running)
        return max(full, 1.0)

    def _scales(self, signals: ReplicaSignals, memory: ReplicaMemory) -> tuple[Scale, Scale]:
        limits = self.limits
        lanes = memory.lanes or Scale(self._bounded_lanes(_taking(signals)))
        drafts = memory.drafts or Scale(self._bounded_drafts(signals.num_drafts))
        more, enough = (self._bounded_lanes(count) for count in self._lanes_needed(signals))
        more_drafts, enough_drafts = (self._bounded_drafts(count) for count in self._drafts_needed(signals))
        return (
            lanes.step(more, enough, limits.scale_up_s, limits.scale_down_s, memory.now_s),
            drafts.step(more_drafts, enough_drafts, limits.dwell_s, limits.idle_s, memory.now_s),
        )

    def _lanes_needed(self, signals: ReplicaSignals) -> tuple[int, int]:
        """(to ask for, to keep)."""
        requests, full = _requests(signals), self.lane_capacity(signals)
        kept = (1 - MARGIN) * full
        more, enough = _replicas(requests, full), _replicas(requests, kept)
        if not signals.cost.target.is_default:
            enough = max(enough, _ceil(signals.token_rate / self._lane_rate(kept, signals, signals.num_drafts > 0)))
        return more, enough

    def _drafts_needed(self, signals: ReplicaSignals) -> tuple[int, int]:
        """(to ask for, to keep)."""
        if self.limits.num_gpus is None and _is_idle(signals):
            return 0, 0
        draft = signals.cost.draft
        rows = math.inf if draft is None else _most_within(draft, SLOWDOWN * draft.time(1))
        return _replicas(signals.clearly_wanted_rows, rows), _replicas(signals.wanted_rows, (1 - MARGIN) * rows)

    def _lane_rate(self, batch: float, signals: ReplicaSignals, with_drafts: bool) -> float:
        """Tokens per second of a lane of ``batch`` requests."""
        cost, alpha = signals.cost, signals.acceptance
        depth = best_depth(batch, alpha, cost, self.limits.max_depth) if with_drafts else 0
        return throughput(batch, depth, alpha, cost)

    def _prefers_lanes(self, signals: ReplicaSignals, lanes: int, drafts: int, before: bool) -> bool:
        lanes_first, drafts_first = self._fit(lanes, drafts, True), self._fit(lanes, drafts, False)
        if lanes_first == drafts_first or signals.cost.target.is_default:
            return before
        with_lanes, with_drafts = self._rate(lanes_first, signals), self._rate(drafts_first, signals)
        return with_lanes * TRADE_MARGIN >= with_drafts if before else with_lanes > with_drafts * TRADE_MARGIN

    def _rate(self, fit: _Fit, signals: ReplicaSignals) -> float:
        """Tokens per second of the cluster, requests spread evenly. Overlapped rounds are left out: under load, where lanes
        and drafts compete, they bring little over sequential ones.
        """
        return fit.lanes * self._lane_rate(max(_requests(signals) / fit.lanes, 1.0), signals, fit.drafts > 0)

    def _fit(self, lanes: int, drafts: int, lanes_first: bool) -> _Fit:
        """What fits on the GPUs, never less than the minimum of each."""
        limits = self.limits
        if lanes_first:
            lanes = min(lanes, max(self._room_for_lanes(limits.min_drafts), limits.min_lanes))
            return _Fit(lanes, min(drafts, max(self._room_for_drafts(lanes), limits.min_drafts)))
        drafts = min(drafts, max(self._room_for_drafts(limits.min_lanes), limits.min_drafts))
        return _Fit(min(lanes, max(self._room_for_lanes(drafts), limits.min_lanes)), drafts)

    def _with_free_gpus(self, goal: _Fit, signals: ReplicaSignals, memory: ReplicaMemory) -> _Fit:
        """The goal, but more of one kind only as far as GPUs are free that replicas of the other kind have left."""
        before = memory.decision
        lanes_before = self._bounded_lanes(_taking(signals)) if before is None else before.lanes
        drafts_before = self._bounded_drafts(signals.num_drafts) if before is None else before.drafts
        lanes, drafts = goal
        if lanes > lanes_before:
            lanes = max(min(lanes, self._room_for_lanes(max(signals.num_drafts, drafts))), lanes_before)
        if drafts > drafts_before:
            drafts = max(min(drafts, self._room_for_drafts(max(signals.num_lanes, goal.lanes))), drafts_before)
        return _Fit(lanes, drafts)

    def _room_for_lanes(self, drafts: int) -> int:
        return self._room(drafts * self.limits.draft_gpus, self.limits.lane_gpus, self.limits.max_lanes)

    def _room_for_drafts(self, lanes: int) -> int:
        return self._room(lanes * self.limits.lane_gpus, self.limits.draft_gpus, self.limits.max_drafts)

    def _room(self, taken: float, each: float, most: int) -> int:
        if self.limits.num_gpus is None or each == 0:
            return most
        return max(math.floor((self.limits.num_gpus - taken) / each + 1e-9), 0)

    def _bounded_lanes(self, count: int) -> int:
        return min(max(count, self.limits.min_lanes), self.limits.max_lanes)

    def _bounded_drafts(self, count: int) -> int:
        return min(max(count, self.limits.min_drafts), self.limits.max_drafts)

    def _lanes_reason(self, signals: ReplicaSignals, scale: Scale, goal: _Fit, now: _Fit, now_s: float) -> str:
        reason = (
            f"{_requests(signals):.1f} requests running, waiting or expected; {self.lane_capacity(signals):.0f} fill a lane"
        )
        if now.lanes < goal.lanes:
            return f"{reason}; a lane more when a draft has left its GPU"
        if goal.lanes < scale.wanted:
            why = "drafts are worth more here" if goal.drafts > self.limits.min_drafts else "there are no more GPUs"
            return f"{reason}; {scale.wanted} are wanted, but {why}"
        return reason + _soon(scale, self.limits.scale_up_s, self.limits.scale_down_s, now_s)

    def _drafts_reason(self, signals: ReplicaSignals, scale: Scale, goal: _Fit, now: _Fit, now_s: float) -> str:
        if self.limits.max_drafts == 0:
            return "no draft model is configured"
        is_idle = self.limits.num_gpus is None and _is_idle(signals)
        rows = "no requests" if is_idle else f"the lanes want {signals.wanted_rows:.0f} rows drafted"
        if not is_idle and signals.wanted_rows == 0:
            rows = "speculation does not pay at this load"
        if now.drafts < goal.drafts:
            return f"{rows}; a draft more when a lane has left its GPU"
        if goal.drafts < scale.wanted:
            return f"{rows}; {scale.wanted} are wanted, but lanes need the GPUs"
        return rows + _soon(scale, self.limits.dwell_s, self.limits.idle_s, now_s)


def _at(memory: ReplicaMemory, now_s: float) -> ReplicaMemory:
    """The memory at this time; after a clock that went backwards everything that is held begins now."""
    if now_s >= memory.now_s:
        return msgspec.structs.replace(memory, now_s=now_s)
    return msgspec.structs.replace(
        _counted(memory, clock=1),
        now_s=now_s,
        settling_since_s=None if memory.settling_since_s is None else now_s,
        lanes=memory.lanes and memory.lanes.restarted(now_s),
        drafts=memory.drafts and memory.drafts.restarted(now_s),
    )


def _counted(memory: ReplicaMemory, signals: int = 0, clock: int = 0) -> ReplicaMemory:
    return msgspec.structs.replace(
        memory, num_bad_signals=memory.num_bad_signals + signals, num_clock_jumps=memory.num_clock_jumps + clock
    )


def _are_sound(signals: ReplicaSignals) -> bool:
    numbers = [getattr(signals, name) for name in signals.__struct_fields__ if name != "cost"]
    return all(math.isfinite(number) and number >= 0 for number in numbers)


def _taking(signals: ReplicaSignals) -> int:
    """Lanes that take requests."""
    return max(signals.num_lanes - signals.num_leaving, 0)


def _requests(signals: ReplicaSignals) -> float:
    return max(signals.num_running + signals.num_waiting, signals.expected_requests)


def _is_idle(signals: ReplicaSignals) -> bool:
    return _requests(signals) < IDLE_REQUESTS


def _ceil(ratio: float) -> int:
    return math.ceil(ratio - 1e-9)


def _replicas(load: float, each: float) -> int:
    """For a load of which each takes so much; some load needs one even if that could take any."""
    return max(_ceil(load / each), int(load > 0))


def _most_within(cost: StepCost, longest_s: float) -> int:
    """The most tokens of a forward that takes at most ``longest_s``; at least 1."""
    low, high = 1, 2
    while high < MOST_ROWS and cost.time(high) <= longest_s:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost.time(middle) <= longest_s else (low, middle)
    return low


def _soon(scale: Scale, up_s: float, down_s: float, now_s: float) -> str:
    """What comes if the signals stay as they are."""
    if scale.up is not None:
        return f"; {scale.up.to} in {up_s - (now_s - scale.up.since_s):.1f} s if that lasts"
    if scale.down is not None:
        return f"; {scale.down.to} in {down_s - (now_s - scale.down.since_s):.1f} s if that lasts"
    return ""
