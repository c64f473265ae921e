"""The depth of every request of one lane, round by round: what the scheduler asks and what it reports back."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from autoscale.acceptance import MAX_ALPHA, AcceptanceEstimator, Calibration
from autoscale.allocation import allocate
from autoscale.catch_up import CatchUp
from autoscale.choice import Chosen, TextChooser
from autoscale.context import ContextFit
from autoscale.cost_model import DRAFT_WEIGHT, OverlapCost, RoundCost, StepCost
from autoscale.depth import choose_depth
from autoscale.hit_rate import HitLaws
from autoscale.hybrid import Terms, after_text
from autoscale.lane_plan import LanePlan
from autoscale.overlap import Overlap, ask_gains, best_overlap, worth_waiting_s
from autoscale.pace import Paces
from autoscale.prepared import OverlapLearner
from autoscale.price import best_depth, price, price_at, throughput
from autoscale.probing import PROBE_ALPHA, Probes
from autoscale.prompts import PromptShare
from autoscale.signals import DepthTable, OverlapReport, StepTimes
from autoscale.stabilise import DwellGate, GateMemory
from engine.propose.from_text import TextDraft
from engine.types import DepthRequest, StepReport, TextChoice, TextOffer

TABLE_MAX_AGE_S = 5.0
MODEL_ROUNDS = 8
"""Rounds for which the model of overlapped rounds keeps what it was given: searching it takes 2 ms of Python."""
FIRST_TOKEN_DELAY = 0.05
"""Drafts of others may lengthen a round that reads prompts by this share."""
OVERLAP_MARGIN = 1.05
"""Overlap that was left must promise this much more than sequential rounds to be taken up again."""
GREAT_OVERLAP_MARGIN = 1.3
"""And this much more to be taken up soon, if it was left soon the last time."""
DEMAND_MARGIN = 1.05
"""Drafts must promise this much more throughput than none to be wanted clearly."""
FORGIVE_HALF_LIFE_S = 600.0
"""Without drafts, what was learned of their acceptance says less and less of the next ones."""


class LanePolicy:
    """Chooses depths by the price of the moment and each request's own acceptance. Reads no clock, draws no random number.

    The price is looked up at the larger of the actual batch and the one that the controller predicts: in the controller's
    table, or, without one for `TABLE_MAX_AGE_S`, with the same formulas from this lane's own measurements.

    **Probing.** A request (or a whole lane) whose acceptance fell until no depth paid would never learn that its drafts became
    good again. So in every 64th round of the lane such a request gets depth 1, provided that a good draft would pay at this
    batch: when the load is the reason for depth 0, no draft work is done at all (`autoscale.probing`).

    **Overlap.** Where the source can prepare (``overlaps``), rounds are sequential or overlapped, whichever has the larger
    modelled throughput (`autoscale.overlap`): left as soon as it does not pay, taken up again with a margin and after a dwell.
    Hits, step times and hops are learned from the rounds themselves; after overlap was left, what was learned fades, so that it
    is tried again after some hundred rounds.

    **Text.** Where a text source stands beside the model, each request gets the draft that promises more for what it costs: one
    of either, or one of both, in either order (`autoscale.choice`).
    """

    overlaps: bool
    """Whether the source can prepare now (an n-gram source cannot); may change at any time."""

    def __init__(
        self,
        max_depth: int,
        target_step_times: StepTimes,
        draft_step_times: StepTimes | None,
        prior_alpha: float = 0.7,
        dwell_s: float = 1.0,
        fixed_depth: int | None = None,
        hop_s: float = 0.0,
        fan_out: int | None = None,
        overlaps: bool = False,
        latency_objective_s: float | None = None,
    ):
        """Build from the workers' start-up profiles, (tokens or rows, seconds).

        ``draft_step_times`` None or empty: drafts cost nothing. ``fixed_depth`` (``speculation.depth``) bypasses everything but
        the room of a request. ``hop_s`` is the way to the draft and back. ``fan_out`` (``speculation.fan_out``): None chooses
        by the cost model, a number guesses so many tokens for every number of accepted ones, 0 keeps rounds sequential.
        ``latency_objective_s``: time per output token that no request should be slower than (`autoscale.pace`).
        """
        self.overlaps = overlaps
        self._max_depth = max_depth
        self._cost = OverlapCost(RoundCost.measured(target_step_times, draft_step_times, hop_s))
        self._fixed_depth = fixed_depth
        self._depths = tuple(range(max_depth + 1)) if fixed_depth is None else (fixed_depth,)
        self._fan_out = fan_out
        self._acceptance = AcceptanceEstimator(prior_alpha)
        self._paces = Paces(latency_objective_s)
        self._texts = TextChooser()
        self._context = ContextFit()
        self._learner = OverlapLearner(HitLaws())
        self._gate = DwellGate(dwell_s)
        self._gate_memory = GateMemory()
        self._overlap_memory = GateMemory()
        self._table: DepthTable | None = None
        self._table_at_s: float | None = None
        self._plan: LanePlan | None = None
        self._plan_is_current = False
        self._round = 0
        self._inputs = self._current_inputs()
        self._inputs_from = self._round
        self._probes = Probes()
        self._catch_up = CatchUp()
        self._prompts = PromptShare()
        self._drafted: set[str] = set()
        self._drafted_before: set[str] = set()
        self._prior_alpha = prior_alpha
        self._drafted_at_s: float | None = None
        """When a round last had drafts."""

    @property
    def acceptance(self) -> float:
        """Mean acceptance per tested draft token, for the lane's report."""
        return self._acceptance.prior

    @property
    def calibration(self) -> Calibration:
        """Predicted against observed survival of the draft tokens."""
        return self._acceptance.calibration

    @property
    def position_table(self) -> tuple[tuple[float, float], ...]:
        """(tested, accepted) decayed counts by draft position."""
        return self._acceptance.position_table()

    @property
    def target_step_times(self) -> StepTimes:
        """(tokens, seconds) as corrected online, for the lane's report; empty if nothing was measured."""
        return self._cost.alone.target.points

    @property
    def draft_step_times(self) -> StepTimes:
        """(rows, seconds) as corrected online, for the lane's report; empty if drafts cost nothing."""
        return () if self._cost.alone.draft is None else self._cost.alone.draft.points

    @property
    def context_s(self) -> float:
        """Seconds that reading the KV cache of a mean request adds to a step, for the lane's report."""
        return self._cost.alone.context_s

    @property
    def overlap_report(self) -> OverlapReport:
        """What is known of overlapped rounds, for the lane's report."""
        overlap = self._plan.overlap if self._plan is not None else None
        return OverlapReport(
            is_active=overlap is not None and overlap.depth > 0,
            hit_rate=self._learner.hit_rate,
            num_rows=overlap.num_rows if overlap is not None else 0.0,
            laws=self._learner.laws,
            target_slowdown=self._cost.target_slowdown,
            draft_slowdown=self._cost.draft_slowdown,
            hop_s=self._cost.alone.hop_s,
        )

    def draft_demand(self, batch_size: int, could_overlap: bool, now_s: float) -> tuple[float, float]:
        """Rows of a draft's step that are wanted, and that are clearly wanted (`LaneReport.wanted_draft_rows`).

        Asked beside the rounds, also while there is no draft: the modelled throughput with the best depth is compared with
        that of plain decoding, at the costs of the last draft. One that nobody has seen yet costs nothing. ``could_overlap``:
        whether rounds would overlap if a draft were there. Requests that are drafted for from their text want no rows. A fixed
        depth wants drafts always.
        """
        table = self._fresh_table(now_s)
        batch = max(batch_size, table.predicted_batch if table else 0.0, 1.0)
        if self._fixed_depth is not None:
            rows = batch if self._fixed_depth > 0 else 0.0
            return rows, rows
        size, alpha, (_, cost, laws) = _two_digits(batch), self._hoped_alpha(now_s), self._inputs
        plain, *deeper = (throughput(size, depth, alpha, cost.alone) for depth in self._depths)
        gain, rows = max(deeper, default=0.0) / plain, batch
        if could_overlap and self._fan_out != 0:
            overlap = best_overlap(size, alpha, cost, laws, self._depths, self._fan_out)
            if overlap.depth > 0 and overlap.throughput > gain * plain:
                gain, rows = overlap.throughput / plain, batch * max(overlap.num_rows, 1.0)
        rows *= self._texts.model_share
        return (rows if gain > 1 else 0.0), (rows if gain > DEMAND_MARGIN else 0.0)

    def depths(self, requests: Sequence[DepthRequest], batch_size: int, now_s: float) -> list[int]:
        """Draft tokens that each request gets in this round, 0..room, when ``batch_size`` requests decode."""
        chosen = [self._texts.of(request.request_id) for request in requests]
        if self._fixed_depth is not None:
            limits = (min(self._fixed_depth, request.room) for request in requests)
            return [max(0, limit - one.head) for limit, one in zip(limits, chosen, strict=True)]
        if self._max_depth == 0:
            return [0] * len(requests)
        plan = self._plan_round(batch_size, now_s)
        worths = [self._survival(request, plan, self._paces.worth(request, now_s)) for request in requests]
        if not plan.is_open:
            depths = [0] * len(requests)
        elif plan.overlap is not None:
            price = plan.price * self._texts.factor
            depths = [choose_depth(worth, price, len(worth)) for worth in worths]
        else:
            worths = [_after_choice(one, worth) for one, worth in zip(chosen, worths, strict=True)]
            depths = allocate(worths, plan.rate * self._texts.factor, self._cost.alone, plan.effective_batch)
        for index, request in enumerate(requests):
            if depths[index] == 0 and request.room > 0 and not chosen[index].is_first:
                depths[index] = self._probe_depth(request.request_id, plan)
            plan.depths[request.request_id] = depths[index]
            plan.worths[request.request_id] = worths[index]
        return depths

    def trim(self, depths: Mapping[str, int], num_prompt_tokens: int, batch_size: int, now_s: float) -> Mapping[str, int]:
        """How much of what `depths` said to verify beside ``num_prompt_tokens`` of prompts in the same forward.

        Positions that cost nothing alone may cost their share beside a prompt that fills the step, and they delay its first
        token. What the draft has prepared costs no more than its verification.
        """
        if self._fixed_depth is not None or not any(depths.values()):
            return depths
        plan, alone = self._plan_later(batch_size, now_s), self._cost.alone
        if plan.overlap is not None:
            alone = alone.with_draft(None)
        survivals = [plan.worths.get(request_id, ())[:depth] for request_id, depth in depths.items()]
        num_beside = num_prompt_tokens + sum(self._texts.num_verified(request_id) for request_id in depths)
        slack = self._slack(num_prompt_tokens + len(depths), num_beside - num_prompt_tokens)
        rate = self._rate_beside_prompts(plan)
        return dict(zip(depths, allocate(survivals, rate, alone, len(depths), num_beside, slack), strict=True))

    def trim_texts(self, depths: Mapping[str, int], num_prompt_tokens: int, batch_size: int, now_s: float) -> Mapping[str, int]:
        """As `trim`, of what `text_choices` said to verify. It costs positions alone, and what it takes of the delay that
        drafts may cause the model's do not get.
        """
        if self._fixed_depth is not None or not any(depths.values()):
            return depths
        plan, free = self._plan_later(batch_size, now_s), self._cost.alone.with_draft(None)
        worths = [self._texts.of(request_id).worths[:depth] for request_id, depth in depths.items()]
        slack = self._slack(num_prompt_tokens + len(depths), 0)
        trimmed = allocate(worths, self._rate_beside_prompts(plan), free, len(depths), num_prompt_tokens, slack)
        self._texts.trim(dict(zip(depths, trimmed, strict=True)))
        return {request_id: self._texts.of(request_id).depth for request_id in depths}

    def text_choices(self, offers: Sequence[TextOffer], batch_size: int, now_s: float, *, has_model: bool) -> list[TextChoice]:
        """What to do with what the text itself offers to draft; asked before `depths`, for all requests that decode."""
        if self._max_depth == 0:
            return [TextChoice(0, is_first=False)] * len(offers)
        if self._fixed_depth is not None:
            fixed = [self._fixed_survival(offer.request) if has_model else () for offer in offers]
            if self._plan_round(batch_size, now_s).overlap is not None:
                offers = [offer._replace(extendable=0) for offer in offers]
            return self._texts.choose_by_length(offers, fixed, self._fixed_depth)
        plan = self._plan_round(batch_size, now_s)
        worths = [self._paces.worth(offer.request, now_s) for offer in offers]
        uses_model = has_model and plan.is_open
        models: list[Sequence[float]] = [
            self._survival(offer.request, plan, worth) if uses_model else ()
            for offer, worth in zip(offers, worths, strict=True)
        ]
        return self._texts.choose(list(zip(offers, worths, strict=True)), models, self._terms(plan, offers))

    def continuations(
        self,
        offers: Sequence[tuple[TextOffer, int]],
        num_prompt_tokens: int,
        num_drafted: int,
        batch_size: int,
        now_s: float,
    ) -> list[int]:
        """How much of the text to verify after the model's drafts: positions that pay if all before them is kept.

        They cost no step of the model, so its draft stays as deep as it pays and the text goes on from there.
        """
        if self._fixed_depth is not None:
            return [max(min(offer.length, self._fixed_depth - drafted), 0) for offer, drafted in offers]
        plan, free = self._plan_later(batch_size, now_s), self._cost.alone.with_draft(None)
        tails = [
            self._texts.after_model(offer, plan.worths.get(offer.request.request_id, ()), drafted) for offer, drafted in offers
        ]
        others: list[Sequence[float]] = [()] * (plan.batch - len(offers))
        slack = self._slack(plan.batch + num_prompt_tokens, num_drafted) if num_prompt_tokens else math.inf
        rate = self._rate_beside_prompts(plan) if num_prompt_tokens else self._planned_rate(plan) * self._texts.factor
        num_beside = num_prompt_tokens + num_drafted
        depths = allocate([*tails, *others], rate, free, plan.effective_batch, num_beside, slack)
        return depths[: len(offers)]

    def observe_text(self, request_id: str, offer: TextDraft, kept: int, tested: int) -> None:
        """Learn from an offer, used or not."""
        self._texts.observe(request_id, offer.match, offer.share, kept, tested)

    def fan_out(self, request_id: str, draft_length: int, batch_size: int, now_s: float) -> tuple[int, ...]:
        """Outcomes to prepare while a draft of ``draft_length`` tokens is verified: guesses for 0..draft_length accepted.

        Empty: prepare nothing. Then rounds are sequential now, or the request is not to speculate.
        """
        plan = self._plan_later(batch_size, now_s)
        if plan.overlap is None:
            return ()
        depth = self._max_depth if self._fixed_depth is None else self._fixed_depth
        depth = plan.depths.get(request_id, depth)
        if depth == 0:
            return ()
        key = (round(20 * self._acceptance.alpha(request_id)) / 20, draft_length)
        guesses = plan.guesses.get(key)
        if guesses is None:
            guesses = plan.guesses[key] = plan.overlap.guesses(*key, plan.laws)
        if not any(guesses):
            return ()
        self._learner.note(request_id, key[0], guesses, depth)
        return guesses

    def asked_depth(self, missed: Sequence[tuple[str, int]], batch_size: int, now_s: float) -> int:
        """Draft tokens to ask for, and wait for, on behalf of requests of which nothing is prepared: (id, planned depth).

        0: they take a plain step. In sequential rounds everybody is asked as deep as was planned. The caller leaves out
        requests that prefill or that the draft would first have to catch up with.
        """
        deepest = max((planned for _, planned in missed), default=0)
        plan = self._plan_later(batch_size, now_s)
        overlap = self._overlap_now(batch_size, plan, plan.laws)
        if overlap is None or deepest == 0:
            return deepest
        survivals = [0.0] * deepest
        for request_id, planned in missed:
            for position, probability in enumerate(self._acceptance.survival(request_id, planned)):
                survivals[position] += probability
        gains = ask_gains(survivals, len(missed), batch_size, overlap, plan.cost)
        instead = sum(self._texts.of(request_id).gain for request_id, _ in missed)
        return max(range(deepest + 1), key=lambda depth: gains[depth] if depth > 0 else instead)

    def patience_s(self, batch_size: int, num_expected: int, now_s: float) -> float:
        """Longest time to wait for the prepared drafts of ``num_expected`` requests that are not here when a round begins.

        Worth what it is if what is waited for comes: impatience that fed on the drafts it has lost would end all waiting.
        """
        plan = self._plan_later(batch_size, now_s)
        overlap = self._overlap_now(batch_size, plan, msgspec.structs.replace(plan.laws, lost=0.0))
        return 0.0 if overlap is None else worth_waiting_s(num_expected, overlap)

    @property
    def spares_first_tokens(self) -> bool:
        """Drafts that cost no time delay nobody; a fixed depth is for measurements."""
        return self._fixed_depth is None and self._cost.alone.draft is not None

    def observe(self, request_id: str, drafted: int, accepted: int, *, reached: bool = True) -> None:
        """Learn from a verified draft of the model: after every round in which the request had one."""
        if reached:
            self._acceptance.observe(request_id, drafted, accepted)
        if drafted > 0:
            self._drafted.add(request_id)
            self._texts.model_was_used(request_id, drafted)
            if reached:
                self._probes.observe(request_id, accepted)

    def finished(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._acceptance.forget(request_id)
        self._paces.forget(request_id)
        self._texts.forget(request_id)
        self._probes.forget(request_id)

    def report(self, report: StepReport, now_s: float) -> None:
        """Learn from a finished round; ``now_s`` also dates a table that came since the round was planned.

        Rounds with prefill do not correct the target's cost: their time depends on more than the number of tokens.
        """
        self._fresh_table(now_s)
        self._acceptance.end_round()
        if any(report.model_depths):
            self._drafted_at_s = now_s
        if self._plan is not None:
            self._texts.end_round(self._plan.alpha, self._planned_rate(self._plan), self._drafting_cost(self._plan))
        self._catch_up.note(report)
        self._prompts.note(report, self._cost.alone)
        self._probes.end_round()
        self._round += 1
        self._plan_is_current = False
        alone = self._cost.alone
        target, draft = alone.target, alone.draft
        is_plain = report.num_target_tokens > 0 and report.num_prefill_tokens == 0
        if is_plain and not self._learner.is_preparing:
            target = self._corrected_target(target, report)
        if draft is not None and not self._learner.has_prepared:
            draft = self._corrected_draft(draft, report)
        alone = RoundCost(target, draft, alone.hop_s, self._context.per_request_s)
        cost = msgspec.structs.replace(self._cost, alone=alone)
        self._cost = self._learner.learn(report, cost)
        self._drafted, self._drafted_before = set(), self._drafted

    def look_ahead(self, batch_size: int) -> None:
        """Search the model for the next round now, while nobody waits: `best_overlap` remembers what it found."""
        if self._plan is None or not self.overlaps or self._fan_out == 0:
            return
        self._refresh_inputs(self._round + 1)
        alpha, cost, laws = self._inputs
        effective = max(batch_size, 1, self._plan.predicted_batch)
        self._candidate(effective, alpha, cost, laws)
        if not self._plan.is_overlapped:
            return
        self._candidate(effective, PROBE_ALPHA, cost, laws)
        self._candidate(max(batch_size, 1), alpha, cost, laws)
        self._candidate(max(batch_size, 1), alpha, cost, msgspec.structs.replace(laws, lost=0.0))

    def update_table(self, table: DepthTable) -> None:
        """Install what the controller published. It counts as fresh from the first use after this call."""
        self._table, self._table_at_s, self._plan_is_current = table, None, False

    def update_target_cost(self, target_step_times: StepTimes) -> None:
        """The target was measured again: (tokens, seconds). An empty profile changes nothing."""
        if target_step_times:
            self._replace_alone(msgspec.structs.replace(self._cost.alone, target=StepCost.measured(target_step_times)))

    def update_draft_cost(self, draft_step_times: StepTimes) -> None:
        """Another draft answers from now on: (rows, seconds) of its profile. An empty one changes nothing.

        Nobody measured it, or there is no draft at the moment; neither makes a draft model free.
        """
        if draft_step_times:
            self._replace_alone(self._cost.alone.with_draft(draft_step_times))

    def explain(self) -> dict[str, Any]:
        """Batch, price, acceptance, depth and mode of the last planned round, and in one sentence why."""
        plan = self._plan
        mode = {} if plan is None else plan.told_mode(self._learner.hit_rate)
        mode_reason = "" if plan is None else plan.mode_reason(is_chosen=self._fan_out is not None)
        if self._fixed_depth is not None:
            reason = f"depth {self._fixed_depth}: fixed by speculation.depth"
            return {"depth": self._fixed_depth, **mode, "reason": reason + mode_reason}
        if plan is None:
            return {"depth": 0, "reason": "no request has decoded yet"}
        typical = self._acceptance.survival_at(plan.alpha, self._deepest(plan))
        depth = choose_depth(typical, plan.price, len(typical)) if plan.is_open else 0
        return {
            "batch": plan.batch,
            "predicted_batch": plan.predicted_batch,
            "price": plan.price,
            "alpha": plan.alpha,
            "depth": depth,
            "price_from": "controller" if plan.from_controller else "lane",
            **mode,
            "reason": plan.reason(depth, self._cost.alone, self._gate.dwell_s) + mode_reason + self._texts.reason(),
        }

    def _rate_beside_prompts(self, plan: LanePlan) -> float:
        if plan.overlap is None:
            return self._prompts.rate(plan.sequential) * self._texts.factor
        return self._prompts.rate(plan.overlap.throughput) * self._cost.target_slowdown * self._texts.factor

    def _slack(self, num_tokens: int, num_drafted: int) -> float:
        """Seconds by which drafts may yet lengthen a forward over ``num_tokens`` tokens, when ``num_drafted`` are added."""
        target = self._cost.alone.target
        if not self.spares_first_tokens:
            return math.inf
        added_s = target.time(num_tokens + num_drafted) - target.time(num_tokens)
        return max(FIRST_TOKEN_DELAY * target.time(num_tokens) - added_s, 0.0)

    @staticmethod
    def _planned_rate(plan: LanePlan) -> float:
        """Tokens per second that a plan promises with the model's drafts alone."""
        return plan.rate if plan.overlap is None else plan.overlap.throughput

    def _drafting_cost(self, plan: LanePlan) -> RoundCost:
        """Of rounds as the target sees them: drafts that were prepared take none of its time."""
        alone = self._cost.alone
        return alone if plan.overlap is None else msgspec.structs.replace(alone, draft=None, hop_s=0.0)

    def _terms(self, plan: LanePlan, offers: Sequence[TextOffer]) -> Terms:
        factor = self._texts.yield_factor(offer.request.request_id for offer in offers)
        prepared = None if plan.overlap is None else plan.price * factor
        return Terms(self._planned_rate(plan) * factor, self._cost.alone, plan.effective_batch, prepared)

    def _fixed_survival(self, request: DepthRequest) -> tuple[float, ...]:
        return self._acceptance.survival(request.request_id, max(min(self._fixed_depth or 0, request.room), 0))

    def _replace_alone(self, alone: RoundCost) -> None:
        self._cost = msgspec.structs.replace(self._cost, alone=alone)
        self._inputs, self._plan_is_current = self._current_inputs(), False

    def _plan_round(self, batch_size: int, now_s: float) -> LanePlan:
        """The plan of this round, made when its first depth is asked for."""
        batch = max(batch_size, 1)
        plan = self._plan
        if plan is None or not self._plan_is_current or (plan.batch, plan.now_s) != (batch, now_s):
            plan = self._make_plan(batch, now_s)
            self._plan, self._plan_is_current = plan, True
        return plan

    def _plan_later(self, batch_size: int, now_s: float) -> LanePlan:
        """The plan of this round for what is asked after the depths, perhaps at a later time: no change of mind in a round."""
        plan = self._plan
        if plan is not None and self._plan_is_current and plan.batch == max(batch_size, 1):
            return plan
        return self._plan_round(batch_size, now_s)

    def _make_plan(self, batch: int, now_s: float) -> LanePlan:
        table = self._fresh_table(now_s)
        predicted = table.predicted_batch if table else 0.0
        effective = max(batch, predicted)
        alpha, alone = self._acceptance.prior, self._cost.alone
        self._refresh_inputs(self._round)
        model_alpha, cost, laws = self._inputs
        sequential = self._sequential(_two_digits(effective), model_alpha, cost.alone)
        candidate = self._candidate(effective, model_alpha, cost, laws)
        is_overlapped = self._chooses_overlap(candidate, sequential, now_s)
        overlap = candidate if is_overlapped else None
        rows = (table.overlapped_prices if overlap else table.prices) if table else ()
        own, depth = (overlap.price(alpha), overlap.depth) if overlap else price(effective, alpha, alone, self._max_depth)
        current = price_at(rows, effective) if rows else own
        rate = throughput(effective, depth, alpha, alone) * (current / own if own > 0 else 1.0)
        redeemed_s = 0.0 if overlap else self._catch_up.redeemed_s(current, alpha, self._max_depth, batch, alone)
        is_open, self._gate_memory = self._gate.step(current, alpha, self._gate_memory, now_s, redeemed_s)
        good = self._candidate(effective, PROBE_ALPHA, cost, laws) if overlap else None
        may_probe = (good.depth if good else best_depth(effective, PROBE_ALPHA, alone, self._max_depth)) > 0
        return LanePlan(
            batch=batch,
            predicted_batch=predicted,
            price=current,
            rate=rate,
            alpha=alpha,
            is_open=is_open,
            may_probe=may_probe,
            from_controller=bool(rows),
            now_s=now_s,
            sequential=sequential,
            candidate=candidate,
            is_overlapped=is_overlapped,
            model_alpha=model_alpha,
            cost=cost,
            laws=laws,
            survivals={},
            depths={},
            worths={},
            guesses={},
        )

    def _sequential(self, batch: int, alpha: float, cost: RoundCost) -> float:
        """Tokens per second of sequential rounds. Those that make first tokens wait for no draft (`spares_first_tokens`)."""
        best = max(throughput(batch, depth, alpha, cost) for depth in self._depths)
        if not self.spares_first_tokens:
            return best
        return best - self._prompts.share * (best - throughput(batch, 0, alpha, cost))

    def _refresh_inputs(self, round_number: int) -> None:
        if round_number >= self._inputs_from + MODEL_ROUNDS:
            self._inputs, self._inputs_from = self._current_inputs(), round_number

    def _candidate(self, batch: float, alpha: float, cost: OverlapCost, laws: HitLaws) -> Overlap | None:
        if not self.overlaps or self._fan_out == 0:
            return None
        return best_overlap(_two_digits(batch), alpha, cost, laws, self._depths, self._fan_out)

    def _current_inputs(self) -> tuple[float, OverlapCost, HitLaws]:
        return _rounded_alpha(self._acceptance.prior), self._cost.rounded(), self._learner.laws.rounded()

    def _hoped_alpha(self, now_s: float) -> float:
        """The acceptance, and the longer there were no drafts to measure it, the more of what it was taken for at first."""
        learned, at_s = self._acceptance.prior, self._drafted_at_s
        if at_s is None or not math.isfinite(now_s):
            return _rounded_alpha(learned)
        weight = 2.0 ** (-max(now_s - at_s, 0.0) / FORGIVE_HALF_LIFE_S)
        return _rounded_alpha(weight * learned + (1 - weight) * self._prior_alpha)

    def _overlap_now(self, batch_size: int, plan: LanePlan, laws: HitLaws) -> Overlap | None:
        """The overlapped rounds of the batch that is there, not of the one that is expected: what waiting costs now."""
        if plan.overlap is None:
            return None
        return self._candidate(batch_size, plan.model_alpha, plan.cost, laws) or plan.overlap

    def _chooses_overlap(self, candidate: Overlap | None, sequential: float, now_s: float) -> bool:
        """Where nothing pays, neither way is better: the lane stays as it is."""
        if candidate is None:
            return False
        if self._fan_out is not None:
            return True
        if candidate.depth > 0 or sequential > candidate.throughput:
            factors = (1.0, OVERLAP_MARGIN, GREAT_OVERLAP_MARGIN)
            pays, clearly, greatly = (candidate.throughput > factor * sequential for factor in factors)
            _, self._overlap_memory = self._gate.step_by(pays, clearly, greatly, self._overlap_memory, now_s)
        return self._overlap_memory.is_open

    def _deepest(self, plan: LanePlan) -> int:
        """No request drafts deeper: in overlapped rounds, what the draft prepares in time, or more where that pays."""
        return self._max_depth if plan.overlap is None else min(plan.overlap.deepest, self._max_depth)

    def _survival(self, request: DepthRequest, plan: LanePlan, worth: float) -> Sequence[float]:
        """By position, as far as the request has room and may draft, each token counted ``worth`` times."""
        percent = round(100 * self._acceptance.alpha(request.request_id))
        survival = plan.survivals.get(percent)
        if survival is None:
            survival = self._acceptance.survival_at(min(percent / 100, MAX_ALPHA), self._deepest(plan))
            plan.survivals[percent] = survival
        survival = survival[: max(request.room, 0)]
        return survival if worth == 1.0 else [worth * probability for probability in survival]

    def _fresh_table(self, now_s: float) -> DepthTable | None:
        if self._table is None:
            return None
        if self._table_at_s is None or now_s < self._table_at_s:
            self._table_at_s = now_s
        return self._table if now_s - self._table_at_s <= TABLE_MAX_AGE_S else None

    def _probe_depth(self, request_id: str, plan: LanePlan) -> int:
        if not plan.may_probe or min(plan.alpha, self._acceptance.alpha(request_id)) >= PROBE_ALPHA:
            return 0
        return int(self._probes.is_due(request_id))

    def _corrected_target(self, target: StepCost, report: StepReport) -> StepCost:
        """Learn both parts of the step's time: what depends on its tokens, and what reading the contexts adds."""
        explained_s = target.time(report.num_target_tokens)
        self._context = self._context.learned(
            report.num_context_tokens,
            report.batch_size,
            report.verify_time_s,
            explained_s / target.factor,
            target.time(1) / target.factor,
        )
        context_s = self._context.seconds_per_token * report.num_context_tokens
        return target.corrected(report.verify_time_s - context_s, explained_s)

    def _corrected_draft(self, draft: StepCost, report: StepReport) -> StepCost:
        """Learn from rounds in which every drafting request had a draft the round before too.

        In the others the draft also catches up, as for every probe: it would look too slow to ever be tried again.
        Without drafts the cost drifts back to the profile, so that a draft that was slow for a while gets another chance.
        """
        if not self._drafted:
            return draft.relaxed()
        rows = sum(depth > 0 for depth in report.model_depths)
        if rows == 0 or not self._drafted <= self._drafted_before:
            return draft
        explained_s = (max(report.model_depths) - 1) * draft.time(rows) + draft.time(rows + report.num_extended)
        return draft.corrected(report.draft_time_s, explained_s, DRAFT_WEIGHT)


def _after_choice(chosen: Chosen, worth: Sequence[float]) -> Sequence[float]:
    """What the positions are worth for which a request's model may be asked in a sequential round."""
    if chosen.head:
        return after_text(worth, chosen.head, chosen.reach)
    return [] if chosen.is_first or chosen.is_held_back else worth


def _two_digits(batch: float) -> int:
    """The batch as a key of remembered decisions."""
    return max(round(float(f"{batch:.2g}")), 1)


def _rounded_alpha(alpha: float) -> float:
    return min(round(50 * alpha) / 50, 0.98)
