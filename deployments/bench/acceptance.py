"""`outrider bench acceptance`: what share of the configured draft's tokens each rule keeps, by temperature.

All rules get the same committed contexts: texts that the target wrote at that temperature, cut at several places. Every context
is drafted and verified anew for every rule and seed.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deployments.bench.prompts import PROMPTS
from engine.build import LocalEngine, build_local_engine
from engine.config import OutriderConfig
from engine.errors import ConfigError, OutriderError
from engine.propose.base import DraftSource
from engine.scheduler import FixedDepth
from engine.types import (
    SAMPLING_RULES,
    GenerateRequest,
    Proposal,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    SequenceContext,
    VerifyItem,
    VerifyRequest,
)
from engine.verify.base import TargetModel

console = Console(stderr=True)
DEPTH = 4
TEMPERATURES = (0.0, 0.7, 1.0)
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """A committed text; its last token is the first that a round brings."""

    name: str
    ids: Tokens
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Tally:
    """Accepted lengths of one rule at one temperature: ``lengths[c][s]`` in context c with seed s."""

    rule: str
    temperature: float
    lengths: list[list[int]]
    drafted: list[list[int]]

    def as_object(self) -> dict[str, Any]:
        """Shares and means with their standard errors, taken over contexts, whose seeds are not independent of each other."""
        means = [statistics.mean(own) for own in self.lengths]
        shares = [sum(own) / max(sum(drafted), 1) for own, drafted in zip(self.lengths, self.drafted, strict=True)]
        return {
            "rule": self.rule,
            "temperature": self.temperature,
            "num_contexts": len(self.lengths),
            "num_rounds": sum(map(len, self.lengths)),
            "num_drafted": sum(map(sum, self.drafted)),
            "accepted_share": sum(map(sum, self.lengths)) / max(sum(map(sum, self.drafted)), 1),
            "accepted_share_error": standard_error(shares),
            "accepted_by_position": [self._share_at(j) for j in range(DEPTH)],
            "mean_accepted": statistics.mean(means),
            "mean_accepted_error": standard_error(means),
        }

    def minus(self, other: "Tally") -> tuple[float, float]:
        """Difference of the mean accepted length on the same contexts, and its standard error."""
        pairs = zip(self.lengths, other.lengths, strict=True)
        differences = [statistics.mean(mine) - statistics.mean(theirs) for mine, theirs in pairs]
        return statistics.mean(differences), standard_error(differences)

    def _share_at(self, position: int) -> float | None:
        """Accepted per drafted token at a position, refused predecessors included."""
        drafted = sum(count > position for own in self.drafted for count in own)
        return sum(count > position for own in self.lengths for count in own) / drafted if drafted else None


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def run_bench_acceptance(config: OutriderConfig, *, quick: bool, as_json: bool) -> int:
    """Measure, print a table on stderr and, if asked, one JSON object as the last line of stdout.

    Raises `ConfigError` when the configuration has no draft.
    """
    with console.status("loading models"):
        engine = build_local_engine(config)
    if engine.source is None:
        raise ConfigError("nothing to measure without drafts: set draft.source, and speculation.max_depth above 0")
    tallies = list(_measure(engine, engine.source, quick=quick))
    result = _summary(engine, tallies)
    _print_table(result)
    if as_json:
        print(json.dumps(result))
    return 0


def _measure(engine: LocalEngine, source: DraftSource, *, quick: bool) -> Iterator[Tally]:
    num_seeds, cuts = (6, (6, 20)) if quick else (16, (4, 16, 32, 60))
    with Progress(console=console, transient=True) as progress:
        rounds = 2 * len(SAMPLING_RULES) * num_seeds + 1
        task = progress.add_task("measuring", total=rounds)
        for temperature in TEMPERATURES:
            progress.update(task, description=f"T={temperature:g}: texts")
            contexts = said_after(engine, encoded_prompts(engine, 2 if quick else 3), temperature, cuts)
            rules, seeds = (SAMPLING_RULES, num_seeds) if temperature > 0 else (("greedy",), 1)
            bench = Rounds(engine.target, source, contexts)
            for rule in rules:
                progress.update(task, description=f"T={temperature:g}: {rule}")
                yield bench.tally(rule, temperature, seeds)
                progress.advance(task, seeds)
            bench.release()


def encoded_prompts(engine: LocalEngine, num_prompts: int | None) -> dict[str, list[int]]:
    """Token ids by name of the first ``num_prompts`` prompts of every kind (None: all), in the chat template if any."""
    has_template = engine.tokenizer.chat_template is not None
    return {
        f"{kind} {i}": engine.encode(text, chat=has_template)
        for kind, texts in PROMPTS.items()
        for i, text in enumerate(texts[:num_prompts])
    }


def said_after(
    engine: LocalEngine, prompts: Mapping[str, Sequence[int]], temperature: float, cuts: Sequence[int]
) -> list[Context]:
    """Prompts with what the target says to them, cut at several places. Raises `OutriderError` when it refuses one."""
    params = SamplingParams(temperature=temperature, max_tokens=max(cuts), ignore_eos=True, seed=17)
    requests = [GenerateRequest(request_id=name, prompt_ids=tuple(ids), params=params) for name, ids in prompts.items()]
    made: dict[str, Tokens] = {}
    for delta in engine.generate(requests, FixedDepth(DEPTH)):
        if delta.error is not None:
            raise OutriderError(delta.error)
        made[delta.request_id] = made.get(delta.request_id, ()) + delta.token_ids
    return [
        Context(f"{r.request_id} after {cut}", r.prompt_ids + made[r.request_id][:cut], len(r.prompt_ids))
        for r in requests
        for cut in cuts
    ]


class Rounds:
    """Single rounds on fixed contexts. Target and draft hold each context once and are rolled back to it every time."""

    def __init__(self, target: TargetModel, source: DraftSource, contexts: Sequence[Context]):
        self.target = target
        self.source = source
        self.contexts = contexts
        self._is_known = False

    def tally(self, rule: str, temperature: float, num_seeds: int) -> Tally:
        """Draft and verify every context once per seed; raises `OutriderError` when the target refuses a context."""
        lengths: list[list[int]] = [[] for _ in self.contexts]
        drafted: list[list[int]] = [[] for _ in self.contexts]
        # At temperature 0 the rule is greedy whatever is named here.
        params = SamplingParams(
            temperature=temperature, max_tokens=1 << 20, ignore_eos=True, rule="coupled" if rule == "greedy" else rule
        )
        for repetition in range(num_seeds):
            # No two rounds share noise, or contexts of equal length would be accepted alike.
            first_seed = repetition * len(self.contexts)
            told = {
                c.name: SequenceContext(params=replace(params, seed=first_seed + i), prompt_length=c.prompt_length)
                for i, c in enumerate(self.contexts)
            }
            for index, (accepted, count) in enumerate(self._round(told)):
                lengths[index].append(accepted)
                drafted[index].append(count)
        return Tally(rule, temperature, lengths, drafted)

    def release(self) -> None:
        """Both sides forget the contexts."""
        names = tuple(context.name for context in self.contexts)
        self.target.verify(VerifyRequest(round_id=0, items=(), release=names))
        self.source.propose(ProposeRequest(round_id=0, items=(), release=names))

    def _round(self, told: dict[str, SequenceContext]) -> list[tuple[int, int]]:
        proposals = self._propose(told)
        items = tuple(
            VerifyItem(
                sequence_id=c.name,
                base_length=self._base_length(c),
                tokens=c.ids[self._base_length(c) :],
                draft=proposals[c.name].tokens,
                draft_probs=proposals[c.name].probs,
                context=told[c.name],
            )
            for c in self.contexts
        )
        verdicts = self.target.verify(VerifyRequest(round_id=0, items=items)).verdicts
        problem = next((v for v in verdicts if v.error is not None or v.need_context), None)
        if problem is not None:
            raise OutriderError(f"{problem.sequence_id}: {problem.error or 'the target forgot it'}")
        self._is_known = True
        return [(v.accepted, len(proposals[v.sequence_id].tokens)) for v in verdicts]

    def _propose(self, told: dict[str, SequenceContext]) -> dict[str, Proposal]:
        """Ask again where the draft has only caught up with a part of the contexts."""
        missing = list(self.contexts)
        found: dict[str, Proposal] = {}
        base = {c.name: self._base_length(c) for c in missing}
        while missing:
            items = tuple(
                ProposeItem(
                    sequence_id=c.name,
                    base_length=base[c.name],
                    tokens=c.ids[base[c.name] :],
                    depth=DEPTH,
                    context=told[c.name],
                )
                for c in missing
            )
            proposals = {p.sequence_id: p for p in self.source.propose(ProposeRequest(round_id=0, items=items)).proposals}
            waiting = [c for c in missing if proposals[c.name].reason == "catching_up"]
            # What was drafted for in this call may have left nothing of its budget to those that wait.
            if len(waiting) == len(missing) and all(proposals[c.name].known_length <= base[c.name] for c in waiting):
                raise OutriderError("the draft does not catch up with its contexts")
            base |= {c.name: proposals[c.name].known_length for c in waiting}
            found |= proposals
            missing = waiting
        return found

    def _base_length(self, context: Context) -> int:
        return len(context.ids) - 1 if self._is_known else 0


def _summary(engine: LocalEngine, tallies: Sequence[Tally]) -> dict[str, Any]:
    coupled = {tally.temperature: tally for tally in tallies if tally.rule == "coupled"}
    rows = []
    for tally in tallies:
        row = tally.as_object()
        if tally.temperature in coupled:
            row["mean_accepted_minus_coupled"], row["minus_coupled_error"] = tally.minus(coupled[tally.temperature])
        rows.append(row)
    return {"target": engine.info.name, "draft": engine.source_name, "depth": DEPTH, "rows": rows}


def _print_table(result: dict[str, Any]) -> None:
    table = Table("T", "rule", "accepted per drafted", "by position", "mean accepted", "minus coupled", "rounds")
    for row in result["rows"]:
        by_position = "  ".join("-" if value is None else f"{value:.0%}" for value in row["accepted_by_position"])
        minus = (
            f"{row['mean_accepted_minus_coupled']:+.2f} ± {row['minus_coupled_error']:.2f}"
            if "minus_coupled_error" in row
            else "-"
        )
        table.add_row(
            f"{row['temperature']:g}",
            row["rule"],
            f"{row['accepted_share']:.1%} ± {row['accepted_share_error']:.1%}",
            by_position,
            f"{row['mean_accepted']:.2f} ± {row['mean_accepted_error']:.2f}",
            minus,
            str(row["num_rounds"]),
        )
    console.print(table)
    console.print(f"{result['draft']} for {result['target']}, K={result['depth']}; ± is a standard error over contexts")
