"""The facts that the rules for a running server look at."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoscale.cost_model import OverlapCost, RoundCost
from autoscale.hit_rate import HitLaws
from autoscale.overlap import best_overlap
from autoscale.price import best_depth, throughput
from deployments.messages import ProcessFacts
from deployments.scrape import Scrape

Details = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """What the server's routes said, and the process that asks."""

    health: Details
    controller: Details
    scrape: Scrape
    local: ProcessFacts

    @property
    def lanes(self) -> list[Details]:
        """As in ``lane_details`` of `GET /controller`."""
        return list(self.controller["lane_details"])

    @property
    def drafts(self) -> list[Details]:
        """As in ``draft_details``."""
        return list(self.controller.get("draft_details", []))

    @property
    def configured(self) -> Details:
        """What the configuration says of speculation."""
        return dict(self.controller.get("configured", {}))

    @property
    def wants_drafts(self) -> bool:
        """Whether the application is to speculate at all."""
        return bool(self.configured.get("source") != "none" and self.configured.get("max_depth") != 0)

    @cached_property
    def processes(self) -> dict[str, Details]:
        """Facts by name; processes of a release that did not say are left out."""
        return {name: facts for name, facts in self._all_processes() if facts is not None}

    def _all_processes(self) -> Iterator[tuple[str, Details | None]]:
        yield "controller", self.controller.get("process")
        yield "api", self.controller.get("api_process")
        for lane in self.lanes:
            for role, facts in lane.get("processes", {}).items():
                yield f"{role} of {lane['lane_id']}", facts
        for draft in self.drafts:
            yield f"draft {draft['draft_id']}", draft.get("process")

    def rounds(self, lane: Details) -> float:
        """Rounds that a lane has played."""
        return self.scrape.total("rounds", lane=lane["lane_id"]) or 0.0

    def drafted(self, lane: Details) -> float:
        """Draft tokens that its target verified."""
        return self.scrape.total("drafted_tokens", lane=lane["lane_id"]) or 0.0

    def accepted(self, lane: Details) -> float:
        """Those that were kept."""
        return self.scrape.total("accepted_tokens", lane=lane["lane_id"]) or 0.0

    def hop_s(self, lane: Details, peer: str) -> float | None:
        """Mean way to a peer and back without the model's own time."""
        return self.scrape.ratio("hop_seconds", "hops", lane=lane["lane_id"], peer=peer)

    def cost(self, lane: Details) -> RoundCost | None:
        """The lane's cost model as it last reported it; None while its target was not measured."""
        if not lane.get("target_step_times"):
            return None
        times = [tuple(tuple(point) for point in lane.get(name) or ()) for name in ("target_step_times", "draft_step_times")]
        return RoundCost.measured(times[0], times[1], self.hop_s(lane, "draft") or 0.0)

    def expected_gain(self, lane: Details, batch: int) -> tuple[float, int] | None:
        """(throughput over that without speculation, depth) of ``batch`` requests, by the lane's cost model and acceptance.

        Sequential rounds as in `autoscale.price`, or overlapped ones as in `autoscale.overlap` where the lane has them and they
        make more. None while nothing was measured.
        """
        cost = self.cost(lane)
        if cost is None:
            return None
        alpha, deepest = min(round(50 * lane["acceptance"]) / 50, 0.98), int(self.configured.get("max_depth", 8))
        plain = throughput(batch, 0, alpha, cost)
        depth = best_depth(batch, alpha, cost, deepest)
        gain = throughput(batch, depth, alpha, cost) / plain
        if lane["why"].get("mode") == "overlapped":
            overlap = best_overlap(batch, alpha, OverlapCost(cost).rounded(), HitLaws(), tuple(range(deepest + 1)), None)
            if overlap.throughput > gain * plain:
                return overlap.throughput / plain, overlap.depth
        return gain, depth
