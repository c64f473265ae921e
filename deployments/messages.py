"""What lanes, drafts and the controller tell each other about themselves (frozen data, sent over Serve handles)."""

import msgspec

from autoscale.signals import DepthTable, LaneReport
from engine.types import ModelInfo


class DraftReport(msgspec.Struct, frozen=True, kw_only=True):
    """A draft replica announces itself."""

    draft_id: str
    address: str
    """host:port of its stream."""
    target_fingerprint: str
    """Vocabulary it was checked against: only lanes whose target has this fingerprint may use it."""
    info: ModelInfo


class LaneStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a lane tells besides its load: cumulative counters for the metrics, and why its depth is what it is."""

    load: LaneReport
    address: str
    """host:port of the lane's stream, for the Apis."""
    leaving: bool = False
    """The lane finishes what it has and takes no more requests."""
    counters: dict[str, float]
    """Cumulative since the lane started; keys as in `deployments.metrics.COUNTERS`."""
    fallbacks: dict[str, int]
    accepted_per_position: tuple[int, ...]
    drafted_per_position: tuple[int, ...]
    target: ModelInfo
    target_pid: int
    draft_name: str
    draft_state: str
    """ok, or why no drafts are asked for."""
    explanation: dict[str, float | int | str | None]


class LaneEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A lane that takes requests."""

    lane_id: str
    address: str
    """host:port of its stream."""
    num_requests: int
    """Running and waiting there when it last reported."""


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's answer to every report."""

    table: DepthTable
    drafts: tuple[DraftReport, ...] = ()
    lanes: tuple[LaneEntry, ...] = ()
