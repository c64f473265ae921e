"""What the routes of a healthy server say: a lane on one GPU, its draft on another; tests change what they are about."""

import copy
from typing import Any

from deployments.doctor.seen import Seen
from deployments.endpoint import Routes
from deployments.messages import ProcessFacts
from deployments.scrape import Scrape

LANE, DRAFT = "outrider#Router#abc", "outrider#Draft#def"
PACKAGES = {"torch": "2.13.0", "transformers": "5.24.0", "ray": "2.60.0"}
LOCAL = ProcessFacts(process_id=1, host="here", python="3.11.7", packages=PACKAGES, num_cpus=8)
METRICS = {
    "tokens_per_second": 120.0,
    "first_token_seconds_total": 4.0,
    "first_tokens_total": 20.0,
    f'rounds_total{{lane="{LANE}"}}': 500.0,
    f'requests_total{{lane="{LANE}"}}': 20.0,
    f'drafted_tokens_total{{lane="{LANE}"}}': 2000.0,
    f'accepted_tokens_total{{lane="{LANE}"}}': 1500.0,
    f'drafted_by_position_total{{lane="{LANE}",position="0"}}': 500.0,
    f'preemptions_total{{lane="{LANE}"}}': 0.0,
    f'hops_total{{lane="{LANE}",peer="target"}}': 100.0,
    f'hop_seconds_total{{lane="{LANE}",peer="target"}}': 0.02,
    f'hops_total{{lane="{LANE}",peer="draft"}}': 100.0,
    f'hop_seconds_total{{lane="{LANE}",peer="draft"}}': 0.02,
}


def facts(**changes: Any) -> dict[str, Any]:
    """Of one process."""
    healthy = {
        "process_id": 7,
        "host": "node-1",
        "python": "3.11.7",
        "packages": PACKAGES,
        "num_cpus": 8,
        "num_threads": 8,
        "spin_count": "10000",
        "nice": 0,
        "memory_bytes": 64_000_000_000,
        "memory_available_bytes": 32_000_000_000,
        "visible_gpus": "0",
        "haproxy": True,
    }
    return {**healthy, **changes}


def lane(**changes: Any) -> dict[str, Any]:
    """An entry of ``lane_details``."""
    healthy = {
        "lane_id": LANE,
        "leaving": False,
        "running": 4,
        "waiting": 0,
        "tokens_per_s": 120.0,
        "mean_depth": 3.5,
        "acceptance": 0.85,
        "draft": "self-int8",
        "draft_state": "ok",
        "target_device": "cuda:0",
        "target_dtype": "bfloat16",
        "target": {"fingerprint": "v1"},
        "target_step_times": [[1, 0.03], [16, 0.031], [256, 0.06]],
        "draft_step_times": [[1, 0.003], [64, 0.004]],
        "processes": {"router": facts(num_threads=None), "target": facts()},
        "why": {"price": 0.2, "mode": "sequential", "reason": "depth 4: 4 requests running"},
        "hit_rate": None,
    }
    return {**healthy, **changes}


def draft(**changes: Any) -> dict[str, Any]:
    """An entry of ``draft_details``."""
    healthy = {
        "draft_id": DRAFT,
        "device": "cuda:0",
        "num_lanes": 1,
        "num_sequences": 4,
        "num_runs": 500,
        "mean_merged": 1.0,
        "model": {"dtype": "int8"},
        "target_fingerprint": "v1",
        "process": facts(visible_gpus="1"),
    }
    return {**healthy, **changes}


def routes(*, metrics: dict[str, float] | None = None, health: dict[str, Any] | None = None, **controller: Any) -> Routes:
    """What a server says, with parts of it changed; ``metrics`` are added by name and labels."""
    told = {
        "ready": True,
        "reason": None,
        "degraded": [],
        "targets": {LANE: {"row_invariant": True, "row_invariance": "row-invariant: equal bits"}},
        **(health or {}),
    }
    seen = {
        "qps": 1.5,
        "waiting": 0,
        "actual_batch": 4.0,
        "predicted_batch": 4.2,
        "mean_depth": 3.5,
        "price": 0.2,
        "acceptance": 0.85,
        "break_even_batch": 64,
        "reason": "1 lane, 1.50 requests/s",
        "wanted_lanes": 1,
        "wanted_drafts": 1,
        "lane_details": [lane()],
        "drafts": [DRAFT],
        "draft_details": [draft()],
        "process": facts(num_threads=None),
        "api_process": facts(num_threads=None),
        "configured": {"source": "self-int8", "max_depth": 8, "depth": "auto"},
        **controller,
    }
    lines = [f"outrider_{name} {value}" for name, value in {**METRICS, **(metrics or {})}.items()]
    return Routes("http://host:8000", copy.deepcopy(told), copy.deepcopy(seen), "\n".join(lines) + "\n")


def seen_of(said: Routes) -> Seen:
    """As `outrider doctor` reads it."""
    return Seen(said.health, said.controller, Scrape(said.metrics), LOCAL)
