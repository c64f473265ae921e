"""What the live page is told of the cluster: numbers and names of parts, never a text of anybody."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from autoscale.cost_model import OverlapCost, RoundCost
from autoscale.overlap import best_overlap
from autoscale.price import TABLE_BATCHES, throughput
from autoscale.signals import LaneReport
from deployments.messages import LaneStatus
from engine.config import OutriderConfig

_MAX_ALPHA = 0.98


def cluster_data(snapshot: dict[str, Any], statuses: Sequence[LaneStatus], config: OutriderConfig) -> dict[str, Any]:
    """From the controller's snapshot and the lanes' last reports: load, break-even, modelled gain, who does what, and why."""
    return {
        "load": _load(snapshot, statuses),
        "acceptance": snapshot["acceptance"],
        "speculation": speculation_gain([status.load for status in statuses]),
        "break_even": _break_even(snapshot, len(statuses)),
        "reason": snapshot["reason"],
        "max_depth": config.speculation.max_depth,
        "lanes": [_lane(status, config.target.num_gpus) for status in sorted(statuses, key=lambda s: s.load.lane_id)],
        "drafts": [_draft(draft, config.drafts.num_gpus) for draft in snapshot["draft_details"]],
        "replicas": snapshot["replicas"]["decision"],
    }


def speculation_gain(lanes: Sequence[LaneReport]) -> dict[str, float | None]:
    """Measured tokens per second, and what they would be without speculation by the cost model.

    Lane by lane ``without = tokens_per_s / gain(batch, mean depth)`` (`modelled_gain`); ``gain`` is the ratio of the sums. Both
    are None while no token was made lately.
    """
    busy = [lane for lane in lanes if lane.tokens_per_s > 0]
    now = sum(lane.tokens_per_s for lane in busy)
    without = sum(lane.tokens_per_s / modelled_gain(lane) for lane in busy)
    return {
        "tokens_per_s": now,
        "without": without if busy else None,
        "gain": now / without if busy else None,
    }


def modelled_gain(lane: LaneReport) -> float:
    """``Theta(b, K) / Theta(b, 0)`` of a lane at its present batch and mean depth; between whole depths on a straight line.

    Theta is that of `autoscale.price`, in lanes whose rounds overlap that of `autoscale.overlap`. 1 where nothing is measured.
    """
    cost = RoundCost.measured(lane.target_step_times, lane.draft_step_times or None, lane.overlap.hop_s)
    if cost.target.is_default:
        return 1.0
    cost = msgspec.structs.replace(cost, context_s=lane.context_s)
    below = math.floor(lane.mean_depth)
    share = lane.mean_depth - below
    gains = [_gain(lane, depth, cost) for depth in (below, below + 1)]
    return (1 - share) * gains[0] + share * gains[1]


def _gain(lane: LaneReport, depth: int, cost: RoundCost) -> float:
    batch, alpha = max(lane.num_running, 1), min(round(lane.acceptance, 2), _MAX_ALPHA)
    if depth == 0:
        return 1.0
    plain = throughput(batch, 0, alpha, cost)
    overlap = lane.overlap
    if not overlap.is_active:
        return throughput(batch, depth, alpha, cost) / plain
    beside = OverlapCost(cost, overlap.target_slowdown, overlap.draft_slowdown).rounded()
    return best_overlap(batch, alpha, beside, overlap.laws.rounded(), (depth,), None).throughput / plain


def _load(snapshot: dict[str, Any], statuses: Sequence[LaneStatus]) -> dict[str, float | int]:
    running = sum(status.load.num_running for status in statuses)
    waiting = sum(status.load.num_waiting for status in statuses)
    return {
        "qps": snapshot["qps"],
        "running": running,
        "waiting": waiting,
        "in_flight": running + waiting,
        "batch": snapshot["actual_batch"],
        "mean_depth": snapshot["mean_depth"],
    }


def _break_even(snapshot: dict[str, Any], num_lanes: int) -> dict[str, int | bool | None]:
    """Requests in flight from which on speculation no longer pays; ``concurrency`` None where it pays up to ``largest``."""
    per_lane = snapshot["break_even_batch"]
    return {
        "is_known": snapshot["price"] is not None,
        "per_lane": per_lane,
        "concurrency": None if per_lane is None else per_lane * num_lanes,
        "largest": TABLE_BATCHES[-1] * num_lanes,
    }


def _lane(status: LaneStatus, num_gpus: float) -> dict[str, Any]:
    """``tokens`` and ``accepted`` are cumulative: a reader makes the accepted length of any interval from two answers."""
    load = status.load
    return {
        "lane_id": load.lane_id,
        "device": status.target.device,
        "gpus": num_gpus,
        "dtype": status.target.dtype,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "tokens_per_s": load.tokens_per_s,
        "mean_depth": load.mean_depth,
        "draft": status.draft_name,
        "draft_state": status.draft_state,
        "leaving": status.leaving,
        "why": status.explanation.get("reason"),
        "tokens": status.counters.get("tokens", 0),
        "accepted": status.counters.get("accepted_tokens", 0),
    }


def _draft(draft: dict[str, Any], num_gpus: float) -> dict[str, Any]:
    return {
        "draft_id": draft["draft_id"],
        "device": draft["device"],
        "gpus": num_gpus,
        "lanes": draft["num_lanes"],
        "sequences": draft["num_sequences"],
        "mean_merged": draft["mean_merged"],
    }
