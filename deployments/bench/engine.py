"""`outrider bench engine`: tokens per second of one stream against transformers, off against on, in process against HTTP.

All arms take turns on every prompt in one process (the HTTP arm's server waits meanwhile), so that a slow phase of the machine
hits them alike; ratios are taken per prompt and reported as the median with the quartiles.
"""

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deployments.bench.prompts import PROMPTS
from engine.build import LocalEngine, build_local_engine
from engine.config import OutriderConfig, parse_config
from engine.round import RoundResult
from engine.scheduler import DepthPolicy, FixedDepth
from engine.types import GenerateRequest, SamplingParams, StepReport

console = Console(stderr=True)


@dataclass
class Run:
    """One arm's answer to one prompt."""

    arm: str
    kind: str
    prompt: int
    num_tokens: int
    seconds: float
    token_ids: tuple[int, ...] = ()
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    tested: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_s(self) -> float:
        """Prefill included."""
        return self.num_tokens / self.seconds


@dataclass
class Arm:
    """A way to answer a prompt: (prompt ids, number of tokens) -> run."""

    name: str
    answer: Callable[[list[int], int], Run]
    runs: list[Run] = field(default_factory=list)


def run_bench_engine(config: OutriderConfig, *, quick: bool, as_json: bool, over_http: bool) -> int:
    """Measure, print a table on stderr and, if asked, one JSON object as the last line of stdout."""
    num_tokens = 48 if quick else 128
    prompts = [(kind, text) for kind, texts in PROMPTS.items() for text in (texts[:1] if quick else texts)]
    with ExitStack() as stack:
        with console.status("loading models"):
            engines = {source: build_local_engine(_with_source(config, source)) for source in ("none", "ngram", "self-int8")}
            arms = list(_arms(config, engines, over_http, stack))
        _measure(arms, engines["none"], prompts, num_tokens)
        result = _summary(arms, engines)
    _print_table(result)
    if as_json:
        print(json.dumps(result))
    return 0 if result["greedy_texts_equal"] else 1


# --- arms -------------------------------------------------------------------------------------------------------------------


def _with_source(config: OutriderConfig, source: str, depth: int | None = None) -> OutriderConfig:
    tree = config.model_dump()
    tree["draft"] = {**tree["draft"], "source": source, "model": None}
    if depth is not None:
        tree["speculation"]["depth"] = depth
    return parse_config(tree)


def _arms(config: OutriderConfig, engines: dict[str, LocalEngine], over_http: bool, stack: ExitStack) -> Iterator[Arm]:
    yield _transformers_arm(config)
    yield _engine_arm("off", engines["none"], None)
    for source in ("ngram", "self-int8"):
        yield _engine_arm(f"{source} auto", engines[source], None)
        for depth in (2, 4):
            yield _engine_arm(f"{source} K={depth}", engines[source], FixedDepth(depth))
    if over_http:
        from deployments.launch import running

        stack.enter_context(running(_with_source(config, "self-int8"), None))
        yield _http_arm("http off", config, engines["none"], max_depth=0)
        yield _http_arm("http self-int8 auto", config, engines["none"], max_depth=None)


def _engine_arm(name: str, engine: LocalEngine, policy: DepthPolicy | None) -> Arm:
    # One policy for the whole arm, so that what it learns of the acceptance stays, as it does in a server.
    driver = engine.driver(policy)

    def answer(ids: list[int], num_tokens: int) -> Run:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = GenerateRequest(request_id=f"bench-{time.monotonic_ns()}", prompt_ids=tuple(ids), params=params)
        started_s = time.perf_counter()
        driver.add(request)
        results = []
        while driver.scheduler.running or driver.scheduler.waiting:
            results.append(driver.step())
        return _run_of(name, results, time.perf_counter() - started_s)

    return Arm(name, answer)


def _run_of(name: str, results: list[RoundResult], seconds: float) -> Run:
    deltas = [delta for result in results for delta in result.deltas]
    last, tokens = deltas[-1], tuple(token for delta in deltas for token in delta.token_ids)
    run = Run(name, "", 0, len(tokens), seconds, tokens, last.num_drafted, last.num_accepted, last.num_rounds)
    for result in results:
        run.tested.update(dict(enumerate(_tested(result.report))))
        run.kept.update(dict(enumerate(result.report.accepted_per_position)))
    return run


def _tested(report: StepReport) -> list[int]:
    """Draft tokens per position whose predecessors were all accepted: the others say nothing about the draft."""
    drafted, accepted = report.drafted_per_position, report.accepted_per_position
    return [min(drafted[j], accepted[j - 1]) if j else drafted[0] for j in range(len(drafted))]


def _transformers_arm(config: OutriderConfig) -> Arm:
    """transformers' own `generate` on the same weights, dtype and threads."""
    import torch

    from engine.models import load_model

    model = load_model(config.target.model, dtype=config.target.dtype, device=config.target.device).model

    def answer(ids: list[int], num_tokens: int) -> Run:
        prompt = torch.tensor([ids], device=model.device)
        started_s = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=model.config.eos_token_id,
            )
        tokens = tuple(output[0, len(ids) :].tolist())
        return Run("transformers", "", 0, len(tokens), time.perf_counter() - started_s, tokens)

    return Arm("transformers", answer)


def _http_arm(name: str, config: OutriderConfig, engine: LocalEngine, max_depth: int | None) -> Arm:
    import httpx

    client = httpx.Client(base_url=f"http://{config.api.host}:{config.api.port}", timeout=600)

    def answer(ids: list[int], num_tokens: int) -> Run:
        body: dict[str, Any] = {
            "model": config.served_model_name,
            "prompt": ids,
            "temperature": 0,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if max_depth is not None:
            body["speculation"] = {"max_depth": max_depth}
        started_s = time.perf_counter()
        usage = _read_usage(client, body)
        details = usage["completion_tokens_details"]
        accepted = details["accepted_prediction_tokens"]
        drafted = accepted + details["rejected_prediction_tokens"]
        tokens = usage["completion_tokens"]
        return Run(name, "", 0, tokens, time.perf_counter() - started_s, (), drafted, accepted, tokens - accepted)

    return Arm(name, answer)


def _read_usage(client: Any, body: dict[str, Any]) -> dict[str, Any]:
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    return usage


# --- measuring --------------------------------------------------------------------------------------------------------------


def _measure(arms: list[Arm], engine: LocalEngine, prompts: list[tuple[str, str]], num_tokens: int) -> None:
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=(len(prompts) + 1) * len(arms))
        for index, (kind, text) in enumerate([("warm-up", prompts[0][1]), *prompts]):
            ids = engine.encode(text, chat=True)
            for arm in arms:
                progress.update(task, description=f"{kind}: {arm.name}")
                run = arm.answer(ids, num_tokens if kind != "warm-up" else 16)
                run.kind, run.prompt = kind, index
                if kind != "warm-up":
                    arm.runs.append(run)
                progress.advance(task)


def _summary(arms: list[Arm], engines: dict[str, LocalEngine]) -> dict[str, Any]:
    by_name = {arm.name: arm for arm in arms}
    off = by_name["off"]
    ratios = {"plain_vs_transformers_b1": _ratio(off, by_name["transformers"])}
    for arm in arms:
        if arm.name not in ("off", "transformers") and not arm.name.startswith("http"):
            ratios[f"{arm.name} vs off"] = _ratio(arm, off)
    ratios["ngram_edit_vs_plain"] = _ratio(by_name["ngram auto"], off, "editing")
    ratios["self_int8_vs_plain"] = _ratio(by_name["self-int8 auto"], off)
    if "http off" in by_name:
        ratios["http_off_vs_in_process"] = _ratio(by_name["http off"], off)
        ratios["http_self_int8_vs_in_process"] = _ratio(by_name["http self-int8 auto"], by_name["self-int8 auto"])
        ratios["http_self_int8_vs_http_off"] = _ratio(by_name["http self-int8 auto"], by_name["http off"])
    own = [arm for arm in arms if arm.runs and arm.runs[0].token_ids and arm.name != "transformers"]
    return {
        "arms": [
            {"arm": arm.name, "batch": 1, "tokens_per_s": statistics.median(run.tokens_per_s for run in arm.runs)}
            for arm in arms
        ],
        "ratios": ratios,
        "sources": [_source_row(arm, kind) for arm in arms if "K=4" in arm.name for kind in PROMPTS],
        "cost_ratio": _cost_ratio(engines),
        "greedy_texts_equal": all(
            run.token_ids == plain.token_ids for arm in own for run, plain in zip(arm.runs, off.runs, strict=True)
        ),
    }


def _ratio(arm: Arm, base: Arm, kind: str | None = None) -> dict[str, float]:
    """Of tokens per second, prompt by prompt."""
    values = [
        run.tokens_per_s / other.tokens_per_s
        for run, other in zip(arm.runs, base.runs, strict=True)
        if kind is None or run.kind == kind
    ]
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": round(median, 3), "q1": round(low, 3), "q3": round(high, 3)}


def _source_row(arm: Arm, kind: str) -> dict[str, Any]:
    runs = [run for run in arm.runs if run.kind == kind]
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    tested, kept = sum((run.tested for run in runs), Counter[int]()), sum((run.kept for run in runs), Counter[int]())
    return {
        "source": arm.name,
        "kind": kind,
        "drafted": drafted,
        "accepted_share": round(accepted / drafted, 3) if drafted else None,
        "acceptance_by_position": [round(kept[j] / tested[j], 3) for j in sorted(tested) if tested[j]],
        "tokens_per_round": round(sum(run.num_tokens for run in runs) / max(sum(run.rounds for run in runs), 1), 2),
    }


def _cost_ratio(engines: dict[str, LocalEngine]) -> float:
    """Time of one draft step over one target step, one row, as both measured it when they were loaded."""
    draft = dict(engines["self-int8"].source.info.step_times)  # type: ignore[union-attr]
    return round(float(draft[1] / dict(engines["none"].info.step_times)[1]), 3)


def _print_table(result: dict[str, Any]) -> None:
    table = Table("arm", "tokens/s")
    for row in result["arms"]:
        table.add_row(row["arm"], f"{row['tokens_per_s']:.1f}")
    console.print(table)
    table = Table("ratio of tokens/s", "median", "quartiles")
    for name, value in result["ratios"].items():
        table.add_row(name, f"{value['median']:.2f}", f"{value['q1']:.2f} to {value['q3']:.2f}")
    console.print(table)
    table = Table("source", "kind", "accepted", "by position, of those tested", "tokens per target forward")
    for row in result["sources"]:
        share = "-" if row["accepted_share"] is None else f"{row['accepted_share']:.0%}"
        by_position = "  ".join(f"{value:.0%}" for value in row["acceptance_by_position"])
        table.add_row(row["source"], row["kind"], share, by_position, str(row["tokens_per_round"]))
    console.print(table)
    console.print(f"cost of a self-int8 draft step: c = {result['cost_ratio']} target steps")
    if not result["greedy_texts_equal"]:
        print("outrider: greedy texts differ between arms", file=sys.stderr)
