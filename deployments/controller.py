"""One per application: hears every lane and draft, answers with the depth table, the directory and the number of replicas."""

import logging
import time
from typing import Any

import msgspec

from autoscale.controller_policy import ControllerPolicy
from autoscale.replicas import ReplicaLimits, ReplicaMemory, ReplicaPolicy
from autoscale.serve_adapter import ColdStart
from deployments.counters import draft_summary, overlap_summary
from deployments.facts import read_facts
from deployments.logs import SERVE_LOGGER, set_up_replica, tell
from deployments.messages import Directory, DraftReport, LaneEntry, LaneStatus
from engine.build import draft_is_a_model
from engine.config import OutriderConfig, parse_config
from engine.types import ModelInfo

logger = logging.getLogger(SERVE_LOGGER)
SILENT_AFTER_S = 5.0


class Controller:
    """Holds soft state only: after a restart everybody reports again within a fraction of a second."""

    def __init__(self, config: dict[str, Any]):
        section = parse_config(config)
        set_up_replica()
        self._process = read_facts()
        speculation = section.speculation
        self._configured = {"source": section.draft.source, "max_depth": speculation.max_depth, "depth": speculation.depth}
        self._policy = ControllerPolicy(section.speculation.max_depth, section.controller.arrival_half_life_s)
        self._replicas = ReplicaPolicy(replica_limits(section))
        self._replica_memory = ReplicaMemory()
        self._decide_every_s = section.controller.report_interval_s
        self._cold_start = ColdStart("Draft", "process_id")
        self._lanes: dict[str, tuple[float, LaneStatus]] = {}
        self._drafts: dict[str, tuple[float, DraftReport]] = {}
        self._last_report_unix_s: float | None = None

    async def report_lane(self, status: LaneStatus) -> Directory:
        """Take in a lane's load; the answer carries what the lane needs to know of the cluster."""
        now_s = time.monotonic()
        self._last_report_unix_s = time.time()
        if status.load.lane_id not in self._lanes:
            tell(logger, logging.INFO, "lane joined", lane=status.load.lane_id, address=status.address)
        self._lanes[status.load.lane_id] = (now_s, status)
        self._policy.ingest(status.load, now_s)
        return self._directory(now_s)

    async def forget_lane(self, lane_id: str) -> None:
        """A lane has ended, and its target with it."""
        if self._lanes.pop(lane_id, None) is not None:
            tell(logger, logging.INFO, "lane left", lane=lane_id)
        self._policy.forget(lane_id)

    async def report_draft(self, report: DraftReport) -> int | None:
        """A draft is alive. The answer is how many there should be; None while that is not decided."""
        now_s = time.monotonic()
        if report.draft_id not in self._drafts:
            tell(logger, logging.INFO, "draft joined", draft=report.draft_id, address=report.address)
        self._drafts[report.draft_id] = (now_s, report)
        self._decide(now_s)
        decision = self._replica_memory.decision
        return None if decision is None else decision.drafts

    async def forget_draft(self, draft_id: str) -> None:
        """A draft has ended."""
        if self._drafts.pop(draft_id, None) is not None:
            tell(logger, logging.INFO, "draft left", draft=draft_id)

    async def directory(self) -> Directory:
        """For Apis, which have nothing to report."""
        return self._directory(time.monotonic())

    async def lanes(self) -> list[LaneStatus]:
        """Last status of every live lane."""
        return self._live_lanes(time.monotonic())

    async def snapshot(self) -> dict[str, Any]:
        """Load, depth and why, for `GET /controller`."""
        now_s = time.monotonic()
        lanes = await self.lanes()
        return {
            **self._policy.snapshot(now_s),
            **self._replica_snapshot(),
            "last_report_unix_s": self._last_report_unix_s,
            "lane_details": [
                {
                    "lane_id": lane.load.lane_id,
                    "leaving": lane.leaving,
                    "running": lane.load.num_running,
                    "waiting": lane.load.num_waiting,
                    "tokens_per_s": lane.load.tokens_per_s,
                    "mean_depth": lane.load.mean_depth,
                    "acceptance": lane.load.acceptance,
                    "draft": lane.draft_name,
                    "draft_state": lane.draft_state,
                    "target_pid": lane.target_pid,
                    "target_device": lane.target.device,
                    "target_dtype": lane.target.dtype,
                    "target": _model_facts(lane.target),
                    "target_step_times": lane.load.target_step_times,
                    "draft_step_times": lane.load.draft_step_times,
                    "processes": {"router": lane.process, "target": lane.target_process},
                    "why": lane.explanation,
                    "requests_per_draft": lane.requests_per_draft,
                    **overlap_summary(lane),
                }
                for lane in lanes
            ],
            "drafts": [draft.draft_id for draft in self._useful_drafts(now_s)],
            "draft_details": [
                {**draft_summary(draft), "model": _model_facts(draft.info), "target_fingerprint": draft.target_fingerprint}
                | {"process": draft.process}
                for draft in self._live_drafts(now_s)
            ],
            "process": self._process,
            "configured": self._configured,
        }

    def _directory(self, now_s: float) -> Directory:
        self._decide(now_s)
        decision = self._replica_memory.decision
        return Directory(
            table=self._policy.table(now_s),
            drafts=self._useful_drafts(now_s),
            lanes=tuple(_entry(status) for status in self._live_lanes(now_s) if not status.leaving),
            wanted_lanes=None if decision is None else decision.lanes,
            draft_step_times=self._policy.draft_step_times,
        )

    def _decide(self, now_s: float) -> None:
        """How many lanes and drafts there should be, not more often than one lane reports."""
        if now_s - self._replica_memory.now_s < self._decide_every_s:
            return
        num_leaving = sum(status.leaving for status in self._live_lanes(now_s))
        num_drafts = len(self._live_drafts(now_s))
        signals = self._policy.replica_signals(now_s, num_leaving=num_leaving, num_drafts=num_drafts)
        decision, self._replica_memory = self._replicas.step(signals, self._replica_memory, now_s)
        if decision is not None:
            self._cold_start.ask(decision.drafts > 0 and num_drafts == 0 and self._replicas.limits.min_drafts == 0)

    def _replica_snapshot(self) -> dict[str, Any]:
        """How many there should be and why, for people and metrics."""
        memory = self._replica_memory
        decision = None if memory.decision is None else msgspec.structs.asdict(memory.decision)
        return {
            "wanted_lanes": memory.decision.lanes if memory.decision else None,
            "wanted_drafts": memory.decision.drafts if memory.decision else None,
            "replicas": {
                "decision": decision,
                "lane_changes": memory.num_lane_changes,
                "draft_changes": memory.num_draft_changes,
                "draft_cold_starts": self._cold_start.num_starts,
                "bad_signals": memory.num_bad_signals,
                "clock_jumps": memory.num_clock_jumps,
            },
        }

    def _live_lanes(self, now_s: float) -> list[LaneStatus]:
        return [status for heard_s, status in self._lanes.values() if now_s - heard_s <= SILENT_AFTER_S]

    def _live_drafts(self, now_s: float) -> tuple[DraftReport, ...]:
        live = [report for heard_s, report in self._drafts.values() if now_s - heard_s <= SILENT_AFTER_S]
        return tuple(sorted(live, key=lambda report: report.draft_id))

    def _useful_drafts(self, now_s: float) -> tuple[DraftReport, ...]:
        return tuple(report for report in self._live_drafts(now_s) if not report.leaving)


def replica_limits(config: OutriderConfig) -> ReplicaLimits:
    """What the configuration says of the number of lanes and drafts."""
    has_drafts = draft_is_a_model(config) and config.speculation.max_depth > 0
    return ReplicaLimits(
        min_lanes=config.lanes.min,
        max_lanes=config.lanes.max,
        min_drafts=config.drafts.min if has_drafts else 0,
        max_drafts=config.drafts.max if has_drafts else 0,
        lane_gpus=config.target.num_gpus,
        draft_gpus=config.drafts.num_gpus,
        num_gpus=config.controller.num_gpus,
        max_batch=config.lanes.max_batch,
        max_depth=config.speculation.max_depth,
        latency_objective_s=config.controller.latency_objective_s,
        scale_up_s=config.lanes.scale_up_s,
        scale_down_s=config.lanes.scale_down_s,
        idle_s=config.drafts.idle_s,
        dwell_s=config.controller.dwell_s,
    )


def _model_facts(info: ModelInfo) -> dict[str, Any]:
    names = ("name", "device", "dtype", "dtype_reason", "vocab_size", "fingerprint", "max_context", "kv_capacity_tokens")
    return {name: getattr(info, name) for name in names}


def _entry(status: LaneStatus) -> LaneEntry:
    load = status.load
    return LaneEntry(lane_id=load.lane_id, address=status.address, num_requests=load.num_running + load.num_waiting)
