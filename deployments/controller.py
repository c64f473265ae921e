"""One per application: hears every lane and draft, answers with the depth table and the directory of lanes and drafts."""

import time
from typing import Any

from autoscale.controller_policy import ControllerPolicy
from deployments.counters import draft_summary, overlap_summary
from deployments.messages import Directory, DraftReport, LaneEntry, LaneStatus
from engine.config import parse_config

SILENT_AFTER_S = 5.0


class Controller:
    """Holds soft state only: after a restart everybody reports again within a fraction of a second."""

    def __init__(self, config: dict[str, Any]):
        section = parse_config(config)
        self._policy = ControllerPolicy(section.speculation.max_depth, section.controller.arrival_half_life_s)
        self._lanes: dict[str, tuple[float, LaneStatus]] = {}
        self._drafts: dict[str, tuple[float, DraftReport]] = {}

    async def report_lane(self, status: LaneStatus) -> Directory:
        """Take in a lane's load; the answer carries what the lane needs to know of the cluster."""
        now_s = time.monotonic()
        self._lanes[status.load.lane_id] = (now_s, status)
        self._policy.ingest(status.load, now_s)
        return self._directory(now_s)

    async def report_draft(self, report: DraftReport) -> None:
        """A draft is alive."""
        self._drafts[report.draft_id] = (time.monotonic(), report)

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
                    "why": lane.explanation,
                    "requests_per_draft": lane.requests_per_draft,
                    **overlap_summary(lane),
                }
                for lane in lanes
            ],
            "drafts": [draft.draft_id for draft in self._live_drafts(now_s)],
            "draft_details": [draft_summary(draft) for draft in self._live_drafts(now_s)],
        }

    def _directory(self, now_s: float) -> Directory:
        return Directory(
            table=self._policy.table(now_s),
            drafts=self._live_drafts(now_s),
            lanes=tuple(_entry(status) for status in self._live_lanes(now_s) if not status.leaving),
        )

    def _live_lanes(self, now_s: float) -> list[LaneStatus]:
        return [status for heard_s, status in self._lanes.values() if now_s - heard_s <= SILENT_AFTER_S]

    def _live_drafts(self, now_s: float) -> tuple[DraftReport, ...]:
        live = [report for heard_s, report in self._drafts.values() if now_s - heard_s <= SILENT_AFTER_S]
        return tuple(sorted(live, key=lambda report: report.draft_id))


def _entry(status: LaneStatus) -> LaneEntry:
    load = status.load
    return LaneEntry(lane_id=load.lane_id, address=status.address, num_requests=load.num_running + load.num_waiting)
