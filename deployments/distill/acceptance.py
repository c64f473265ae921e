"""What a draft is worth to its target: accepted tokens on prompts that nobody was trained on, cost, and expected speed-up."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoscale.cost_model import RoundCost
from autoscale.price import best_depth, throughput
from deployments.bench.acceptance import Context, Rounds, encoded_prompts, said_after
from engine.build import LocalEngine, build_draft_model
from engine.calibrate import measure_draft, measure_target
from engine.config import OutriderConfig, parse_config
from engine.propose.base import DraftSource
from engine.types import (
    ProposeReply,
    ProposeRequest,
    VerifyReply,
    VerifyRequest,
)

TEMPERATURES = {0.0: "greedy", 1.0: "coupled"}
"""Rule by temperature."""
CUTS, QUICK_CUTS = (8, 40), (8,)
SEEDS, QUICK_SEEDS = 6, 2
MAX_DEPTH = 8


@dataclass(frozen=True)
class Candidate:
    """One way to draft for the target."""

    name: str
    draft: dict[str, str]
    """The configuration's section that serves it."""


def candidates(folder: str) -> tuple[Candidate, ...]:
    """The new draft, its int8 copy, and the target's int8 copy, which needs no training."""
    return (
        Candidate("distilled", {"source": "model", "model": folder}),
        Candidate("distilled-int8", {"source": "model", "model": folder, "dtype": "int8"}),
        Candidate("self-int8", {"source": "self-int8"}),
    )


def engine_config(target: str, device: str, draft: dict[str, str]) -> OutriderConfig:
    """The configuration that all parts of the command work with."""
    section = draft if draft["source"] == "none" else {**draft, "device": device}
    return parse_config({"target": {"model": target, "device": device}, "draft": section, "lanes": {"max_batch": 64}})


def measure_candidates(engine: LocalEngine, folder: str, device: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each candidate, all on the same contexts: texts of the target, cut at several places."""
    prompts, cuts = encoded_prompts(engine, 1 if quick else None), QUICK_CUTS if quick else CUTS
    contexts = {temperature: said_after(engine, prompts, temperature, cuts) for temperature in TEMPERATURES}
    for candidate in candidates(folder):
        source = build_draft_model(engine_config(engine.info.name, device, candidate.draft))
        yield _measure(engine, candidate, source, contexts, SEEDS if not quick else QUICK_SEEDS)


def expected_speed_up(alpha: float, cost: RoundCost) -> tuple[float, int]:
    """(tokens per second over those without drafts, depth) of one request at the best depth, by the autoscaler's formulas."""
    depth = best_depth(1, alpha, cost, MAX_DEPTH)
    return throughput(1, depth, alpha, cost) / throughput(1, 0, alpha, cost), depth


def token_acceptance(by_position: list[float | None]) -> float:
    """Mean acceptance of a token whose predecessors were accepted, from the shares accepted up to each position.

    A draft of K tokens of which ``a`` are kept tests ``min(a + 1, K)``: ``alpha = sum_j s_j / (1 + sum_{j<K} s_j)``.
    """
    survived = [share or 0.0 for share in by_position]
    return min(sum(survived) / (1 + sum(survived[:-1])), 1.0)


def _measure(
    engine: LocalEngine, candidate: Candidate, source: DraftSource, contexts: dict[float, list[Context]], num_seeds: int
) -> dict[str, Any]:
    cost, ratio = asyncio.run(_costs(engine, source))
    row: dict[str, Any] = {"name": candidate.name, "draft": candidate.draft, "cost_ratio": ratio, "rules": []}
    for temperature, rule in TEMPERATURES.items():
        bench = Rounds(engine.target, source, contexts[temperature])
        tally = bench.tally(rule, temperature, 1 if rule == "greedy" else num_seeds)
        bench.release()
        found = tally.as_object()
        found["accepted_share_error"] = _finite(found["accepted_share_error"])
        found["mean_accepted_error"] = _finite(found["mean_accepted_error"])
        found["alpha"] = token_acceptance(found["accepted_by_position"])
        found["expected_speed_up"], found["best_depth"] = expected_speed_up(found["alpha"], cost)
        row["rules"].append(found)
    return row


async def _costs(engine: LocalEngine, source: DraftSource) -> tuple[RoundCost, float]:
    """Step times by the calls of rounds, one after the other, and c: a draft step of one row in target steps of one token."""

    async def verify(request: VerifyRequest) -> VerifyReply:
        return engine.target.verify(request)

    async def propose(request: ProposeRequest) -> ProposeReply:
        return source.propose(request)

    target, draft = await measure_target(verify), await measure_draft(propose)
    cost = RoundCost.measured(target, draft)
    return cost, cost.draft_time(1) / cost.target.time(1)


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
