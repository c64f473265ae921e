"""The depth of every request of one lane, round by round: what the scheduler asks and what it reports back."""

from typing import Any

import msgspec

from autoscale.acceptance import AcceptanceEstimator, survival
from autoscale.cost_model import RoundCost, StepCost
from autoscale.depth import choose_depth
from autoscale.price import best_depth, price, price_at
from autoscale.signals import DepthTable, StepTimes
from autoscale.stabilise import DwellGate, GateMemory
from engine.types import StepReport

TABLE_MAX_AGE_S = 5.0
PROBE_INTERVAL = 64
"""Rounds between probes after failures."""
PROBE_INTERVAL_MIN = 4
PROBE_BACKOFF = 4
PROBE_ALPHA = 0.9
"""A good draft. Where even this one would not pay, or lane and request are as good already, a probe has nothing to find."""


class _Plan(msgspec.Struct, frozen=True):
    """What holds for all requests of one round."""

    batch: int
    predicted_batch: float
    price: float
    alpha: float
    is_open: bool
    may_probe: bool
    from_controller: bool
    now_s: float

    @property
    def effective_batch(self) -> float:
        return max(self.batch, self.predicted_batch)


class LanePolicy:
    """Chooses depths by the price of the moment and each request's own acceptance. Reads no clock, draws no random number.

    The price is looked up at the larger of the actual batch and the one that the controller predicts: in the controller's
    table, or, without one for `TABLE_MAX_AGE_S`, with the same formulas from this lane's own measurements.

    **Probing.** A request (or a whole lane) whose acceptance fell until no depth paid would never learn that its drafts became
    good again. So in every 64th round of the lane such a request gets depth 1, provided that a good draft would pay at this
    batch: when the load is the reason for depth 0, no draft work is done at all. The interval falls to 16 and 4 rounds while
    first draft tokens are accepted and rises again with each one that is not. The probes of all requests fall into the same
    rounds, so that the other rounds have no draft step.
    """

    def __init__(
        self,
        max_depth: int,
        target_step_times: StepTimes,
        draft_step_times: StepTimes | None,
        prior_alpha: float = 0.7,
        dwell_s: float = 1.0,
        fixed_depth: int | None = None,
        hop_s: float = 0.0,
    ):
        """Build from the workers' start-up profiles, (tokens or rows, seconds).

        ``draft_step_times`` None or empty: drafts cost nothing. ``fixed_depth`` (``speculation.depth``) bypasses everything but
        the room of a request.
        """
        self._max_depth = max_depth
        self._cost = RoundCost.measured(target_step_times, draft_step_times, hop_s)
        self._fixed_depth = fixed_depth
        self._acceptance = AcceptanceEstimator(prior_alpha)
        self._gate = DwellGate(dwell_s)
        self._gate_memory = GateMemory()
        self._table: DepthTable | None = None
        self._table_at_s: float | None = None
        self._plan: _Plan | None = None
        self._plan_is_current = False
        self._round = 1
        self._probe_intervals: dict[str, int] = {}
        self._drafted: set[str] = set()
        self._drafted_before: set[str] = set()

    @property
    def acceptance(self) -> float:
        """Mean acceptance per tested draft token, for the lane's report."""
        return self._acceptance.prior

    @property
    def position_table(self) -> tuple[tuple[float, float], ...]:
        """(tested, accepted) decayed counts by draft position."""
        return self._acceptance.position_table()

    @property
    def target_step_times(self) -> StepTimes:
        """(tokens, seconds) as corrected online, for the lane's report; empty if nothing was measured."""
        return self._cost.target.points

    @property
    def draft_step_times(self) -> StepTimes:
        """(rows, seconds) as corrected online, for the lane's report; empty if drafts cost nothing."""
        return () if self._cost.draft is None else self._cost.draft.points

    def depth(self, request_id: str, room: int, batch_size: int, now_s: float) -> int:
        """Draft tokens that this request gets in this round, 0..room, when ``batch_size`` requests decode."""
        if self._fixed_depth is not None:
            return max(0, min(self._fixed_depth, room))
        deepest = min(self._max_depth, room)
        if deepest <= 0:
            return 0
        plan = self._plan_round(batch_size, now_s)
        paying = choose_depth(self._acceptance.survival(request_id, deepest), plan.price, room) if plan.is_open else 0
        return paying or self._probe_depth(request_id, plan)

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """Learn from a verified draft: after every round in which the request had one."""
        self._acceptance.observe(request_id, drafted, accepted)
        if drafted > 0:
            self._drafted.add(request_id)
            interval = self._probe_intervals.get(request_id, PROBE_INTERVAL)
            interval = interval // PROBE_BACKOFF if accepted > 0 else interval * PROBE_BACKOFF
            self._probe_intervals[request_id] = min(max(interval, PROBE_INTERVAL_MIN), PROBE_INTERVAL)

    def finished(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._acceptance.forget(request_id)
        self._probe_intervals.pop(request_id, None)

    def report(self, report: StepReport, now_s: float) -> None:
        """Learn from a finished round; ``now_s`` also dates a table that came since the round was planned.

        Rounds with prefill do not correct the target's cost: their time depends on more than the number of tokens.
        """
        self._fresh_table(now_s)
        self._round += 1
        self._plan_is_current = False
        target, draft = self._cost.target, self._cost.draft
        if report.num_target_tokens > 0 and report.num_prefill_tokens == 0:
            target = target.corrected(report.verify_time_s, target.time(report.num_target_tokens))
        if draft is not None:
            draft = self._corrected_draft(draft, report)
        self._cost = RoundCost(target, draft, self._cost.hop_s)
        self._drafted, self._drafted_before = set(), self._drafted

    def update_table(self, table: DepthTable) -> None:
        """Install what the controller published. It counts as fresh from the first use after this call."""
        self._table, self._table_at_s, self._plan_is_current = table, None, False

    def update_target_cost(self, target_step_times: StepTimes) -> None:
        """The target was measured again: (tokens, seconds). An empty profile changes nothing."""
        if target_step_times:
            self._cost = msgspec.structs.replace(self._cost, target=StepCost.measured(target_step_times))
            self._plan_is_current = False

    def update_draft_cost(self, draft_step_times: StepTimes) -> None:
        """Another draft answers from now on: (rows, seconds) of its profile. An empty one changes nothing.

        Nobody measured it, or there is no draft at the moment; neither makes a draft model free.
        """
        if draft_step_times:
            self._cost = self._cost.with_draft(draft_step_times)
            self._plan_is_current = False

    def explain(self) -> dict[str, Any]:
        """Batch, price, acceptance and depth of the last planned round, and in one sentence why."""
        if self._fixed_depth is not None:
            return {"depth": self._fixed_depth, "reason": f"depth {self._fixed_depth}: fixed by speculation.depth"}
        if self._plan is None:
            return {"depth": 0, "reason": "no request has decoded yet"}
        plan = self._plan
        depth = choose_depth(survival(plan.alpha, self._max_depth), plan.price, self._max_depth) if plan.is_open else 0
        return {
            "batch": plan.batch,
            "predicted_batch": plan.predicted_batch,
            "price": plan.price,
            "alpha": plan.alpha,
            "depth": depth,
            "price_from": "controller" if plan.from_controller else "lane",
            "reason": self._reason(plan, depth),
        }

    def _plan_round(self, batch_size: int, now_s: float) -> _Plan:
        batch = max(batch_size, 1)
        plan = self._plan
        if plan is None or not self._plan_is_current or (plan.batch, plan.now_s) != (batch, now_s):
            plan = self._make_plan(batch, now_s)
            self._plan, self._plan_is_current = plan, True
        return plan

    def _make_plan(self, batch: int, now_s: float) -> _Plan:
        table = self._fresh_table(now_s)
        predicted = table.predicted_batch if table else 0.0
        effective = max(batch, predicted)
        alpha = self._acceptance.prior
        if table and table.prices:
            current = price_at(table.prices, effective)
        else:
            current, _ = price(effective, alpha, self._cost, self._max_depth)
        is_open, self._gate_memory = self._gate.step(current, alpha, self._gate_memory, now_s)
        may_probe = best_depth(effective, PROBE_ALPHA, self._cost, self._max_depth) > 0
        return _Plan(batch, predicted, current, alpha, is_open, may_probe, bool(table and table.prices), now_s)

    def _fresh_table(self, now_s: float) -> DepthTable | None:
        if self._table is None:
            return None
        if self._table_at_s is None or now_s < self._table_at_s:
            self._table_at_s = now_s
        return self._table if now_s - self._table_at_s <= TABLE_MAX_AGE_S else None

    def _probe_depth(self, request_id: str, plan: _Plan) -> int:
        if not plan.may_probe or min(plan.alpha, self._acceptance.alpha(request_id)) >= PROBE_ALPHA:
            return 0
        return int(self._round % self._probe_intervals.get(request_id, PROBE_INTERVAL) == 0)

    def _corrected_draft(self, draft: StepCost, report: StepReport) -> StepCost:
        """Learn from rounds in which every drafting request had a draft the round before too.

        In the others the draft also catches up, as for every probe: it would look too slow to ever be tried again.
        Without drafts the cost drifts back to the profile, so that a draft that was slow for a while gets another chance.
        """
        if not self._drafted:
            return draft.relaxed()
        rows = sum(depth > 0 for depth in report.depths)
        if rows == 0 or not self._drafted <= self._drafted_before:
            return draft
        return draft.corrected(report.draft_time_s, max(report.depths) * draft.time(rows))

    def _reason(self, plan: _Plan, depth: int) -> str:
        if self._cost.target.is_default:
            return "speculation off: the target's step times were not measured"
        state = f"depth {depth}" if depth else "speculation off"
        predicted = f" ({plan.predicted_batch:.1f} expected)" if plan.predicted_batch > plan.batch else ""
        token_ms = 1e3 * self._cost.target.slope(plan.effective_batch)
        draft_ms = 1e3 * self._cost.draft_time(plan.effective_batch)
        sentence = (
            f"{state}: {plan.batch} request{'s' * (plan.batch > 1)} running{predicted}, verifying one more token costs "
            f"{token_ms:.2f} ms and a draft step {draft_ms:.2f} ms, so a draft token must survive with more than "
            f"{plan.price:.2f}; the first one does with {plan.alpha:.2f}"
        )
        if depth == 0 and plan.price < plan.alpha:
            return f"{sentence}; it stays off until that has held clearly for {self._gate.dwell_s:g} s"
        return sentence
