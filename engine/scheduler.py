"""Who takes part in the next round, with which tokens and how deep. Plain bookkeeping: no torch, no I/O, no clock."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import Overloaded
from engine.request import Event, Request, State
from engine.types import ModelInfo, StepReport


class DepthPolicy(Protocol):
    """Decides how deep a request speculates. `autoscale.lane_policy.LanePolicy` follows the load; `FixedDepth` does not."""

    def depth(self, request_id: str, room: int, batch_size: int, now_s: float) -> int:
        """Depth for the coming round, from 0 to ``room``."""

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Tell how a draft of this request fared."""

    def finished(self, request_id: str) -> None:
        """Forget a request."""

    def report(self, report: StepReport, now_s: float) -> None:
        """Learn from a finished round."""


class FixedDepth:
    """The same depth for everybody: for tests and measurements."""

    def __init__(self, depth: int):
        self._depth = depth

    def depth(self, request_id: str, room: int, batch_size: int, now_s: float) -> int:
        """As many of the fixed number as there is room for."""
        return min(self._depth, room)

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

    def finished(self, request_id: str) -> None:
        """Nothing to forget."""

    def report(self, report: StepReport, now_s: float) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class Planned:
    """One request's part in a round: its tokens [start, end) go to the target, with up to ``depth`` draft tokens after them."""

    request: Request
    start: int
    end: int
    depth: int = 0

    @property
    def sample(self) -> bool:
        """Whether the target has seen all committed tokens after this, so that it can commit the next, if one is wanted."""
        return self.end == len(self.request.ids) and self.request.params.max_tokens > 0


@dataclass(slots=True)
class Plan:
    """A round before it is played."""

    items: list[Planned] = field(default_factory=list)
    num_preempted: int = 0

    @property
    def batch_size(self) -> int:
        """Requests that decode."""
        return sum(item.request.state is State.DECODING for item in self.items)


class Scheduler:
    """The request table of one lane.

    Every running request takes part in every round (lock-step); prompts are prefilled in chunks beside the decoding requests,
    so that a long prompt never stalls running streams. KV blocks are counted here, so the target is never asked for more than
    it has: under pressure first drafts are given up, then the youngest request is preempted and prefilled again later.
    """

    def __init__(self, info: ModelInfo, policy: DepthPolicy, *, max_batch: int, prefill_tokens: int, max_waiting: int):
        self.info = info
        self.policy = policy
        self.max_batch = max_batch
        self.prefill_tokens = prefill_tokens
        self.max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.target_released: list[str] = []
        """Sequences that the target may forget; the next round tells it."""
        self.draft_released: list[str] = []
        """Sequences that the draft may forget; told when the draft is asked for something, never on its own."""
        self._num_blocks = info.kv_capacity_tokens // info.kv_block_size
        self._ids: set[str] = set()

    @property
    def has_work(self) -> bool:
        """Whether a round would do anything."""
        return bool(self.running or self.waiting or self.target_released)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `Overloaded` when the queue is full, ValueError when the id is already in use."""
        if request.id in self._ids:
            raise ValueError(f"request id {request.id} is already in use")
        if len(self.waiting) >= self.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests are waiting already (api.max_waiting); try again later")
        self._ids.add(request.id)
        self.waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        """The live request of this id."""
        return next((r for r in (*self.running, *self.waiting) if r.id == request_id), None)

    def remove(self, request: Request, event: Event) -> None:
        """End a live request by FINISH, CANCEL or FAIL."""
        request.apply(event)
        if request in self.running:
            self.running.remove(request)
            self.target_released.append(request.id)
        else:
            self.waiting.remove(request)
        if request.draft_opened:
            self.draft_released.append(request.id)
        self._ids.discard(request.id)
        self.policy.finished(request.id)

    def forget_target(self) -> None:
        """The target lost everything (it died and came back): whoever is running prefills again from its ids."""
        for request in self.running:
            request.apply(Event.LOSE_CACHE)
            request.target_length = 0
        self.target_released.clear()

    def forget_draft(self) -> None:
        """Another draft answers from now on: nothing it holds is known."""
        for request in (*self.running, *self.waiting):
            request.draft_length = 0
            request.draft_opened = False
        self.draft_released.clear()

    def plan(self, now_s: float, *, drafts: bool) -> Plan:
        """Choose the next round. ``drafts`` false: no source of drafts can be asked now, so every depth is 0."""
        plan = Plan()
        self._make_room(plan)
        self._admit()
        budget = self.prefill_tokens
        for request in self.running:
            if request.state is State.DECODING:
                plan.items.append(Planned(request, request.target_length, len(request.ids)))
            elif budget > 0:
                chunk = min(request.num_pending, budget)
                budget -= chunk
                plan.items.append(Planned(request, request.target_length, request.target_length + chunk))
        if drafts:
            self._choose_depths(plan, now_s)
        return plan

    def room(self, request: Request) -> int:
        """Most draft tokens that can be of use: the bonus token must still fit into max_tokens and the context."""
        left = min(request.params.max_tokens - request.num_output, self.info.max_context - len(request.ids)) - 1
        for bound in (request.params.max_depth, self.info.max_draft_depth):
            left = left if bound is None else min(left, bound)
        return max(left, 0)

    def _choose_depths(self, plan: Plan, now_s: float) -> None:
        batch_size = plan.batch_size
        spare = self._num_blocks - sum(self._blocks(len(request.ids) + 1) for request in self.running)
        for item in plan.items:
            request = item.request
            if request.state is not State.DECODING:
                continue
            depth = self.policy.depth(request.id, self.room(request), batch_size, now_s)
            length = len(request.ids)
            while depth and self._blocks(length + 1 + depth) - self._blocks(length + 1) > spare:
                depth -= 1
            spare -= self._blocks(length + 1 + depth) - self._blocks(length + 1)
            item.depth = depth

    def _make_room(self, plan: Plan) -> None:
        """Preempt from the youngest until the others fit with one more token each."""
        while sum(self._blocks(len(request.ids) + 1) for request in self.running) > self._num_blocks:
            youngest = self.running.pop()
            youngest.apply(Event.PREEMPT)
            youngest.apply(Event.REQUEUE)
            youngest.target_length = 0
            self.target_released.append(youngest.id)
            self.waiting.appendleft(youngest)
            plan.num_preempted += 1

    def _admit(self) -> None:
        used = sum(self._blocks(len(request.ids) + 1) for request in self.running)
        while self.waiting and len(self.running) < self.max_batch:
            needed = self._blocks(len(self.waiting[0].ids) + 1)
            # A released sequence keeps its blocks until the target hears of it, which happens before the round's own items.
            if used + needed > self._num_blocks:
                return
            used += needed
            request = self.waiting.popleft()
            request.apply(Event.ADMIT)
            self.running.append(request)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.info.kv_block_size)
