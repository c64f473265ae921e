"""A lane: the request table, the rounds, and the target actor they run on."""

import asyncio
import logging
import os
import time
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from autoscale.cost_model import RoundCost
from autoscale.lane_policy import LanePolicy
from autoscale.serve_adapter import WANTED_REPLICAS
from autoscale.signals import LaneReport
from deployments.counters import LaneCounters
from deployments.draft_pool import DraftPool, shares_cores
from deployments.facts import read_facts
from deployments.journal import Journal
from deployments.logs import set_up_replica
from deployments.memory import freeze_loaded
from deployments.messages import Directory, DraftReport, LaneStatus
from deployments.remote import LocalDraft, NoDraft, StreamTarget, TargetHeads
from deployments.target import TargetActor
from deployments.tracing import find_tracer
from deployments.wire import Answers, Tls, WireClient, WireServer, decode, read_secret, read_tls
from engine.build import build_free_source, build_text_beside, draft_is_a_model, drafts_beside_target
from engine.calibrate import StepTimes, measure_target
from engine.config import OutriderConfig, parse_config
from engine.drivers import AsyncDriver, TargetLost
from engine.request import check_request, fit_to_cache
from engine.scheduler import Scheduler
from engine.types import Delta, GenerateRequest, ModelInfo, StepReport

logger = logging.getLogger("ray.serve")
CALIBRATE_AFTER_S = (1.0, 30.0)
"""Idle lanes measure their models this long after they started or found a draft: at first the machine is still busy loading."""
CALIBRATE_EVERY_S = 600.0
CALIBRATE_AGAIN_S = 5.0
"""After rounds began while the models were measured."""
BUSY_PATIENCE_S = 60.0
"""A lane that is never idle for so long has its draft measured beside its rounds, which makes it look slower than it is."""
SEQUENTIAL_ROWS, OVERLAPPED_ROWS = 16, 64
"""Rows of a draft step up to which it is measured."""
LEAVE_NOTICE_S = 2.0
EXPECTED_ACCEPTANCE = {"self-int8": 0.88, "self-fp8": 0.88, "self-int4": 0.85, "layer-skip": 0.8}
OTHER_ACCEPTANCE = 0.7
"""Per tested draft token, until a lane has seen its own: of the int8 copy's 84 to 98 % are accepted (README), of the int4
copy's 93 % and of layer skipping's 73 to 90 % at temperature 0 (docs/log.md), less above it; float8 was not measured and counts
as int8. A draft that is thought worse than it is may never be tried where its step costs half of the target's; models,
with whatever vocabulary, and heads are cheaper, and may be anything.
"""


class Router:
    """One lane. Serve replicates it; every replica owns a target in its placement group."""

    async def __init__(self, config: dict[str, Any], secret: str, controller: DeploymentHandle[Any]):  # type: ignore[misc]
        self._config = parse_config(config)
        set_up_replica()
        self._controller = controller
        self._lane_id = serve.get_replica_context().replica_tag
        self._counters = LaneCounters()
        tls = read_tls(self._config.streams)
        self._actor = _start_target(self._config, secret)
        secret = read_secret(self._config.streams, secret)
        self._target = StreamTarget(self._actor, secret, tls)
        self._info = await self._target.connect()
        self._journal = Journal(find_tracer(), lambda: self._target.num_losses)
        self._process = read_facts()
        level = logging.WARNING if self._info.row_invariant is False else logging.INFO
        logger.log(level, "%s: numerics %s, %s", self._info.name, self._info.numerics, self._info.row_invariance)
        self._policy = _build_policy(self._config, self._info)
        self._policies: dict[str, LanePolicy] = {}
        """Of `use_speculation`, by settings."""
        self._draft = _build_draft(self._config, self._lane_id, self._info, self._target, secret, tls)
        self._scheduler = Scheduler(
            self._info,
            self._policy,
            max_batch=self._config.lanes.max_batch,
            prefill_tokens=self._config.lanes.prefill_tokens,
            max_waiting=self._config.api.max_waiting,
            text=build_text_beside(self._config),
        )
        decoder = await asyncio.to_thread(_load_decoder, self._config.target.model)
        self._driver = AsyncDriver(self._target, self._draft, self._scheduler, decoder, self._round_done)
        self._server = WireServer({}, secret, streams={"generate": self._generate}, tls=tls, max_calls=_max_calls(self._config))
        self._address = await self._server.start(ray.util.get_node_ip_address())
        self._announced: StepTimes = self._target.head_step_times
        self._policy.update_draft_cost(self._announced)
        self._drafts: tuple[DraftReport, ...] = ()
        self._could_overlap = True
        """As with the last draft that could be asked; hopeful before the first one."""
        self._wanted: int | None = None
        self._tasks = [asyncio.create_task(self._driver.run()), asyncio.create_task(self._report_for_ever())]
        self._calibrations_due_s = _calibration_times()
        self._calibrations: list[asyncio.Task[None]] = []
        freeze_loaded()

    async def _generate(self, body: bytes, caller: str, answers: Answers) -> None:
        """Stream one request; leaving the stream cancels it. Raises `InvalidRequest` or `Overloaded` before the first delta."""
        request = decode(body, GenerateRequest)
        with self._counters.watching(request) as watch, self._journal.open(request) as entry:
            check_request(request, self._info)
            request = fit_to_cache(request, self._info)
            self._counters.arrived()

            def deliver(delta: Delta) -> None:
                watch.saw(delta)
                entry.saw(delta)
                answers.put_nowait(delta)

            await self._driver.play(request, deliver)

    async def process_ids(self) -> dict[str, int]:
        """Of this router and its target, for tests and for people."""
        return {"router": os.getpid(), "target": self._target.pid}

    async def use_speculation(self, changes: dict[str, Any], *, afresh: bool = False) -> None:
        """Go on with other settings of the section ``speculation``, for measurements; call it while nothing runs.

        Each setting keeps what its policy has learned; ``afresh`` forgets that and measures the models again, and they are not
        measured again for a while then. Raises `ConfigError`.
        """
        tree = self._config.model_dump()
        tree["speculation"] |= changes
        config, key = parse_config(tree), repr(sorted(tree["speculation"].items()))
        if afresh or key not in self._policies:
            self._policies[key] = _build_policy(config, self._info)
            self._policies[key].update_draft_cost(self._announced)
        self._policy = self._scheduler.policy = self._policies[key]
        self._policy.overlaps = self._may_overlap(config)
        if afresh:
            await asyncio.gather(*self._calibrations)
            self._calibrations_due_s = [time.monotonic() + CALIBRATE_EVERY_S]
            await self._calibrate(with_target=True)

    async def check_health(self) -> None:
        """Serve's liveness probe: a lane whose loops ended is replaced."""
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"a lane task ended: {task.exception() if not task.cancelled() else 'cancelled'}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `autoscale.serve_adapter.replicas_as_decided`: nothing while the controller is silent."""
        return {} if self._wanted is None else {WANTED_REPLICAS: self._wanted}

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._leave()
        for task in getattr(self, "_tasks", []):
            task.cancel()
        if hasattr(self, "_actor"):
            ray.kill(self._actor)
        await self._tell(self._controller.forget_lane, self._lane_id)

    async def _leave(self) -> None:
        """Finish the streams that are open; Serve waits for as long as the deployment's options say."""
        self._server.leaving = True
        await self._tell(self._controller.report_lane, self._status())
        await self._server.drain()
        await self._server.stop()

    async def _tell(self, method: Any, argument: Any) -> None:
        try:
            async with asyncio.timeout(LEAVE_NOTICE_S):
                await method.remote(argument)
        except Exception as error:
            logger.warning("the controller was not told that this lane leaves: %s", type(error).__name__)

    def _round_done(self, report: StepReport) -> None:
        self._journal.round_done(report)
        self._counters.round_done(report, time.monotonic())

    async def _report_for_ever(self) -> None:
        while True:
            try:
                directory: Directory = await self._controller.report_lane.remote(self._status())
                self._policy.update_table(directory.table)
                self._drafts, self._wanted = directory.drafts, directory.wanted_lanes
                if not self._policy.draft_step_times:
                    self._policy.update_draft_cost(directory.draft_step_times)
            except Exception as error:
                self._wanted = None
                logger.warning("the controller cannot be reached, going on with its last answer: %s", type(error).__name__)
            try:
                await self._follow_drafts()
                self._calibrate_if_due()
            except Exception:
                logger.exception("the drafts could not be followed")
            await asyncio.sleep(self._config.controller.report_interval_s)

    async def _follow_drafts(self) -> None:
        """Also without a new directory: drafts that failed are probed on this occasion."""
        lost = await self._draft.update(self._drafts)
        if lost:
            self._scheduler.forget_draft(lost)
        self._policy.overlaps = self._may_overlap(self._config)
        if self._draft.available:
            self._could_overlap = self._policy.overlaps
        if isinstance(self._draft, DraftPool) and self._draft.announced_step_times != self._announced:
            self._announced = self._draft.announced_step_times
            self._policy.update_draft_cost(self._announced)
            self._calibrations_due_s = _calibration_times()

    def _may_overlap(self, config: OutriderConfig) -> bool:
        """Whether drafts may be prepared beside the verify: not on the target's own cores, unless fan_out is a number."""
        chosen = config.speculation.fan_out != "auto"
        return self._draft.prepares and (chosen or not shares_cores(config, self._info, self._address, self._drafts))

    def _calibrate_if_due(self) -> None:
        """Measure the models again when it is time: the target while nobody waits, the draft while nobody uses it.

        Conditions change: when the models loaded they measured themselves on cores that were busy loading, and a draft that
        looked too slow once would never be asked again.
        """
        now_s = time.monotonic()
        busy, late_s = self._scheduler.has_work, now_s - self._calibrations_due_s[0]
        if late_s < 0 or (busy and (late_s < BUSY_PATIENCE_S or self._counters.mean_depth(now_s) > 0)):
            return
        self._calibrations_due_s = self._calibrations_due_s[1:] or [now_s + CALIBRATE_EVERY_S]
        self._calibrations = [asyncio.create_task(self._calibrate(with_target=not busy))]

    async def _calibrate(self, with_target: bool) -> None:
        """Measure the models in turn, the target only in an idle lane. If rounds began there meanwhile, it was for nothing."""
        target_times: StepTimes = ()
        draft_times: StepTimes = ()
        num_rounds = self._counters.totals["rounds"]
        try:
            if with_target:
                target_times = await measure_target(self._target.verify)
        except TargetLost:
            self._scheduler.forget_target()
        if isinstance(self._draft, DraftPool) and self._draft.available:
            draft_times = await self._draft.measure(OVERLAPPED_ROWS if self._policy.overlaps else SEQUENTIAL_ROWS)
        if with_target and self._counters.totals["rounds"] != num_rounds:
            self._calibrations_due_s.insert(0, time.monotonic() + CALIBRATE_AGAIN_S)
            return
        self._policy.update_target_cost(target_times)
        self._policy.update_draft_cost(draft_times)

    def _status(self) -> LaneStatus:
        now_s = time.monotonic()
        pool = self._draft if isinstance(self._draft, DraftPool) else None
        counters, arrivals = self._counters, self._counters.arrivals
        counters.arrivals = 0
        wanted, clearly_wanted = (0.0, 0.0)
        if pool is not None:
            num_open = len(self._scheduler.running) + len(self._scheduler.waiting)
            wanted, clearly_wanted = self._policy.draft_demand(num_open, self._could_overlap, now_s)
        counters.plain_cost = _plain_cost(self._policy)
        load = LaneReport(
            lane_id=self._lane_id,
            now_s=now_s,
            num_arrivals=arrivals,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            mean_output_tokens=counters.mean_output_tokens(),
            tokens_per_s=counters.tokens_per_s(now_s),
            acceptance=self._policy.acceptance,
            mean_depth=counters.mean_depth(now_s),
            target_step_times=self._policy.target_step_times,
            draft_step_times=self._policy.draft_step_times,
            context_s=self._policy.context_s,
            calibration_error=self._policy.calibration.error or 0.0,
            overlap=self._policy.overlap_report,
            wanted_draft_rows=wanted,
            clearly_wanted_draft_rows=clearly_wanted,
        )
        return LaneStatus(
            load=load,
            address=self._address,
            leaving=self._server.leaving,
            target=self._info,
            target_pid=self._target.pid,
            process=self._process,
            target_process=self._target.process,
            draft_name=self._draft.name,
            draft_state=self._draft.state,
            explanation=self._policy.explain(),
            sources=counters.sources_by_name(self._draft.name),
            dropped_answers=dict(pool.dropped) if pool else {},
            requests_per_draft=pool.requests_per_draft if pool else {},
            traffic={"target": self._target.traffic, **({"draft": pool.traffic} if pool else {})},
            kv_used_tokens=self._scheduler.kv_used_tokens,
            **counters.told(),
        )


def _plain_cost(policy: LanePolicy) -> RoundCost | None:
    if not policy.target_step_times:
        return None
    return msgspec.structs.replace(RoundCost.measured(policy.target_step_times, None), context_s=policy.context_s)


def _calibration_times() -> list[float]:
    now_s = time.monotonic()
    return [now_s + after_s for after_s in CALIBRATE_AFTER_S]


def _max_calls(config: OutriderConfig) -> int:
    """The lane's own queue refuses with 429; the stream must not refuse before it."""
    return config.lanes.max_batch + config.api.max_waiting + 1000


def _start_target(config: OutriderConfig, secret: str) -> Any:
    """Start the target actor in the bundle that the deployment reserved for it."""
    actor_class = ray.remote(TargetActor)
    options = {"num_cpus": config.target.num_cpus, "num_gpus": config.target.num_gpus, "max_restarts": -1}
    return actor_class.options(**options).remote(config.model_dump(), secret)


def _build_policy(config: OutriderConfig, info: ModelInfo) -> LanePolicy:
    fixed = None if config.speculation.depth == "auto" else config.speculation.depth
    return LanePolicy(
        max_depth=config.speculation.max_depth,
        target_step_times=info.step_times,
        draft_step_times=None,
        prior_alpha=EXPECTED_ACCEPTANCE.get(config.draft.source, OTHER_ACCEPTANCE),
        dwell_s=config.controller.dwell_s,
        fixed_depth=fixed,
        fan_out=None if config.speculation.fan_out == "auto" else config.speculation.fan_out,
        latency_objective_s=config.controller.latency_objective_s,
    )


def _build_draft(
    config: OutriderConfig, lane_id: str, info: ModelInfo, target: StreamTarget, secret: str, tls: Tls | None
) -> DraftPool | LocalDraft | TargetHeads | NoDraft:
    if config.draft.source == "none" or config.speculation.max_depth == 0:
        return NoDraft()
    if drafts_beside_target(config):
        return TargetHeads(target, config.draft.timeout_s)
    if not draft_is_a_model(config):
        return LocalDraft(build_free_source(config))

    def connect(draft: DraftReport) -> WireClient:
        return WireClient(draft.address, secret, lane_id, tls=tls)

    return DraftPool(config.draft.source, info.fingerprint, config.draft.timeout_s, connect)


def _load_decoder(model: str) -> Any:
    from engine.models import load_tokenizer

    return load_tokenizer(model).tokenizer
