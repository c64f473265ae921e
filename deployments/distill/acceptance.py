"""What a draft is worth to its target: accepted tokens on prompts that nobody was trained on, cost, and expected speed-up."""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoscale.cost_model import RoundCost
from autoscale.price import best_depth, throughput
from deployments.bench.acceptance import Context, Rounds, encoded_prompts, said_after
from engine.build import LocalEngine, build_draft_model
from engine.calibrate import CONTEXT_TOKENS, DRAFT_ROWS, DRAFT_STEPS, REPEATS, StepTimes, measure_draft, measure_target
from engine.config import OutriderConfig, parse_config
from engine.errors import OutriderError
from engine.propose.base import DraftSource
from engine.types import (
    ProposeItem,
    ProposeReply,
    ProposeRequest,
    SamplingParams,
    SequenceContext,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
)
from engine.verify.base import TargetModel

TEMPERATURES = {0.0: "greedy", 1.0: "coupled"}
"""Rule by temperature."""
CUTS, QUICK_CUTS = (8, 40), (8,)
SEEDS, QUICK_SEEDS = 6, 2
MAX_DEPTH = 8
_PARAMS = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


@dataclass(frozen=True)
class Candidate:
    """One way to draft for the target."""

    name: str
    draft: dict[str, str]
    """The configuration's section that serves it."""


def candidates(folder: str, kind: str) -> tuple[Candidate, ...]:
    """The new draft, its int8 copy if it is a model, and the target's int8 copy, which needs no training."""
    own = [served_draft(folder, kind)]
    if kind == "draft":
        own.append(Candidate("distilled-int8", {"source": "model", "model": folder, "dtype": "int8"}))
    return (*own, Candidate("self-int8", {"source": "self-int8"}))


def served_draft(folder: str, kind: str) -> Candidate:
    """What was made, as it is served."""
    return Candidate("distilled", {"source": "heads" if kind == "head" else "model", "model": folder})


def engine_config(target: str, device: str, draft: dict[str, str]) -> OutriderConfig:
    """The configuration that all parts of the command work with.

    Beside a head no prefixes are shared: it would know contexts that begin alike from where they part only.
    """
    with_head = draft["source"] == "heads"
    section = draft if with_head or draft["source"] == "none" else {**draft, "device": device}
    own_target = {"model": target, "device": device, "prefix_cache": not with_head}
    return parse_config({"target": own_target, "draft": section, "lanes": {"max_batch": 64}})


def measure_candidates(engine: LocalEngine, folder: str, device: str, kind: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """A row for each candidate, all on the same contexts: texts of the target, cut at several places.

    The engine's own source is the head, where one is measured: it lives with its target.
    """
    prompts, cuts = encoded_prompts(engine, 1 if quick else None), QUICK_CUTS if quick else CUTS
    contexts = {temperature: said_after(engine, prompts, temperature, cuts) for temperature in TEMPERATURES}
    num_seeds = QUICK_SEEDS if quick else SEEDS
    for candidate in candidates(folder, kind):
        if candidate.draft["source"] == "heads":
            yield _measure_head(engine, candidate, contexts, num_seeds)
            continue
        source = build_draft_model(engine_config(engine.info.name, device, candidate.draft))
        costs = asyncio.run(_costs(engine, source))
        yield _measure(engine, candidate, source, costs, contexts, num_seeds)


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
    engine: LocalEngine,
    candidate: Candidate,
    source: DraftSource,
    costs: tuple[StepTimes, StepTimes],
    contexts: dict[float, list[Context]],
    num_seeds: int,
    rounds: type[Rounds] = Rounds,
) -> dict[str, Any]:
    cost = RoundCost.measured(*costs)
    ratio = cost.draft_time(1) / cost.target.time(1)
    row: dict[str, Any] = {"name": candidate.name, "draft": candidate.draft, "cost_ratio": ratio, "rules": []}
    for temperature, rule in TEMPERATURES.items():
        bench = rounds(engine.target, source, contexts[temperature])
        tally = bench.tally(rule, temperature, 1 if rule == "greedy" else num_seeds)
        bench.release()
        found = tally.as_object()
        found["accepted_share_error"] = _finite(found["accepted_share_error"])
        found["mean_accepted_error"] = _finite(found["mean_accepted_error"])
        found["alpha"] = token_acceptance(found["accepted_by_position"])
        found["expected_speed_up"], found["best_depth"] = expected_speed_up(found["alpha"], cost)
        row["rules"].append(found)
    return row


def _measure_head(
    engine: LocalEngine, candidate: Candidate, contexts: dict[float, list[Context]], num_seeds: int
) -> dict[str, Any]:
    source = engine.source
    if source is None:
        raise ValueError("a head is measured by an engine that drafts with it")
    costs = asyncio.run(_target_times(engine)), head_step_times(engine.target, source)
    return _measure(engine, candidate, source, costs, contexts, num_seeds, RoundsOfHead)


class RoundsOfHead(Rounds):
    """As `Rounds`, for a source that knows of a context what the target's last forward told it.

    So all contexts are opened and caught up with before the first draft, and each forward begins one token farther back, for
    the hidden state that the next draft begins with.
    """

    def __init__(self, target: TargetModel, source: DraftSource, contexts: Sequence[Context]):
        super().__init__(target, source, contexts)
        self._tell()
        for context in contexts:  # one at a time: a head bounds how many tokens of catching up one call computes
            item = ProposeItem(sequence_id=context.name, base_length=len(context.ids), tokens=(), depth=1)
            source.propose(ProposeRequest(round_id=0, items=(item,)))
        self._is_known = True
        self._tell()

    def _tell(self) -> None:
        """A forward over the end of every context, without drafts."""
        items = tuple(
            VerifyItem(
                sequence_id=c.name,
                base_length=self._base_length(c),
                tokens=c.ids[self._base_length(c) :],
                context=SequenceContext(params=_PARAMS, prompt_length=c.prompt_length),
            )
            for c in self.contexts
        )
        for verdict in self.target.verify(VerifyRequest(round_id=0, items=items)).verdicts:
            if verdict.error is not None:
                raise OutriderError(f"{verdict.sequence_id}: {verdict.error}")

    def _base_length(self, context: Context) -> int:
        return max(super()._base_length(context) - 1, 0)


def head_step_times(target: TargetModel, source: DraftSource) -> StepTimes:
    """(rows, seconds per draft step) of a head: the best of three drafts, each after a forward that told of its contexts."""
    times: list[tuple[int, float]] = []
    names = tuple(f"calibrate-head-{row}" for row in range(max(DRAFT_ROWS)))
    context = SequenceContext(params=_PARAMS, prompt_length=CONTEXT_TOKENS)
    for name in names:
        item = VerifyItem(sequence_id=name, base_length=0, tokens=(0,) * CONTEXT_TOKENS, context=context)
        target.verify(VerifyRequest(round_id=0, items=(item,)))
        _head_draft(target, source, (name,), depth=1)  # catches up; one call bounds how much
    for rows in DRAFT_ROWS:
        best_s = min(_head_draft(target, source, names[:rows]) for _ in range(REPEATS))
        times.append((rows, best_s / DRAFT_STEPS))
    target.verify(VerifyRequest(round_id=0, items=(), release=names))
    source.propose(ProposeRequest(round_id=0, items=(), release=names))
    return tuple(times)


def _head_draft(target: TargetModel, source: DraftSource, names: Sequence[str], depth: int = DRAFT_STEPS) -> float:
    """Seconds of one draft after two new tokens, as when one was accepted. Raises `OutriderError` if there is none."""
    new = tuple(VerifyItem(sequence_id=name, base_length=CONTEXT_TOKENS - 2, tokens=(0, 0)) for name in names)
    target.verify(VerifyRequest(round_id=0, items=new))
    items = tuple(ProposeItem(sequence_id=name, base_length=CONTEXT_TOKENS, tokens=(0,), depth=depth) for name in names)
    started_s = time.perf_counter()
    reply = source.propose(ProposeRequest(round_id=0, items=items))
    elapsed_s = time.perf_counter() - started_s
    if not all(proposal.tokens for proposal in reply.proposals):
        raise OutriderError(f"the head does not draft: {reply.proposals[0].reason}")
    return elapsed_s


async def _costs(engine: LocalEngine, source: DraftSource) -> tuple[StepTimes, StepTimes]:
    """Step times of target and draft by the calls of rounds, one after the other."""

    async def propose(request: ProposeRequest) -> ProposeReply:
        return source.propose(request)

    return await _target_times(engine), await measure_draft(propose)


async def _target_times(engine: LocalEngine) -> StepTimes:
    async def verify(request: VerifyRequest) -> VerifyReply:
        return engine.target.verify(request)

    return await measure_target(verify)


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
