"""What lanes, drafts and the controller tell each other about themselves (frozen data, sent over Serve handles)."""

import msgspec

from autoscale.signals import DepthTable, LaneReport, StepTimes
from engine.types import ModelInfo, SourceStep


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A process and its machine, as they were when it became ready (`deployments.facts`)."""

    process_id: int
    host: str
    python: str
    packages: dict[str, str]
    """Versions by name."""
    num_cpus: int
    """That it may run on."""
    num_threads: int | None = None
    """Of torch; None where torch is not loaded."""
    spin_count: str | None = None
    """``GOMP_SPINCOUNT``."""
    nice: int = 0
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    visible_gpus: str | None = None
    """``CUDA_VISIBLE_DEVICES``."""
    haproxy: bool = False
    """Whether Serve was told to use HAProxy as its ingress."""


class DraftWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a draft replica serves, and how it merges the work of several lanes."""

    num_lanes: int = 0
    """Lanes that asked about some sequence and have not released it."""
    num_sequences: int = 0
    """Such sequences; the model may have forgotten some of them under pressure."""
    num_runs: int = 0
    """Calls of the model since it started."""
    num_messages: int = 0
    """Messages of lanes that these calls answered; mean merged batch = num_messages / num_runs."""
    runs_by_size: dict[int, int] = {}
    """Messages merged into one call -> such calls."""
    num_expired: int = 0
    """Sequences that were forgotten because their lane was gone or they had not been asked about for too long."""


class DraftReport(msgspec.Struct, frozen=True, kw_only=True):
    """A draft replica announces itself."""

    draft_id: str
    address: str
    """host:port of its stream."""
    target_fingerprint: str
    """Vocabulary it was checked against: only lanes whose target has this fingerprint may use it."""
    info: ModelInfo
    protocol: int = 0
    """Version of the stream protocol that it speaks; 0 from a release that did not say."""
    prepares: bool = True
    """Whether its model can fork sequences, which preparing outcomes takes."""
    extends: bool = False
    """Whether it goes on after tokens that another source drafted; false from a release that did not know of that."""
    process_id: int = 0
    work: DraftWork = DraftWork()
    leaving: bool = False
    """The replica answers what it has been asked and takes no more."""
    process: ProcessFacts | None = None
    """None from a release that did not say."""


class Traffic(msgspec.Struct, frozen=True):
    """What went over streams, cumulative. A hop is a call with one answer that was answered."""

    num_hops: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    hop_time_s: float = 0.0
    """Round trips minus the model's own time."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.num_hops + other.num_hops,
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.hop_time_s + other.hop_time_s,
        )


class Histogram(msgspec.Struct, frozen=True):
    """How often values of different sizes were seen, cumulative over time."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets, inclusive and increasing; above the last one is one more bucket."""
    counts: tuple[int, ...]
    """Of each bucket alone, one more than bounds."""
    total: float
    """Sum of the values."""


class LaneStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a lane tells besides its load: cumulative counters for the metrics, and why its depth is what it is."""

    load: LaneReport
    address: str
    """host:port of the lane's stream, for the Apis."""
    leaving: bool = False
    """The lane finishes what it has and takes no more requests."""
    counters: dict[str, float]
    """Cumulative since the lane started; keys as in `deployments.metrics.COUNTERS` and `SOURCE_COUNTERS`."""
    fallbacks: dict[str, int]
    accepted_per_position: tuple[int, ...]
    drafted_per_position: tuple[int, ...]
    target: ModelInfo
    target_pid: int
    draft_name: str
    draft_state: str
    """ok, or what is wrong; begins with "ok" while drafts can be had."""
    explanation: dict[str, float | int | str | None]
    sources: dict[str, SourceStep] = {}
    """Source of drafts, as in ``draft.source`` and ``draft.text`` -> what its drafts came to since the lane started."""
    hits: dict[str, int] = {}
    """Requests times rounds whose draft was prepared, by kind of outcome: recovery, bonus, plain."""
    misses: dict[str, int] = {}
    """Those whose draft was not, by kind as above, or late, unprepared."""
    dropped_answers: dict[str, int] = {}
    """Answers of drafts that were not used, by what was wrong with them: late, stray, twice."""
    requests_per_draft: dict[str, int] = {}
    """Draft replica -> requests of this lane that stick to it now."""
    traffic: dict[str, Traffic] = {}
    """Over the lane's streams to its target ("target") and to drafts ("draft")."""
    outcomes: dict[str, int] = {}
    """How requests ended: stop, length, error, cancelled, overloaded, invalid."""
    histograms: dict[str, Histogram] = {}
    """Keys as in `deployments.counters.BUCKETS`."""
    kv_used_tokens: int = 0
    """Tokens of KV cache that running requests take, in whole blocks."""
    process: ProcessFacts | None = None
    """Of the router."""
    target_process: ProcessFacts | None = None


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
    wanted_lanes: int | None = None
    """The number of lanes that was decided, for Serve's autoscaler; None: nothing is decided yet."""
    draft_step_times: StepTimes = ()
    """Of the last draft that any lane knew, for lanes that have not met one."""
