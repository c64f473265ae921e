"""What answers the prompts of a benchmark (the engine in this process, the application over HTTP), and how arms take turns."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.sse import read_events
from engine.build import LocalEngine
from engine.config import OutriderConfig
from engine.round import RoundResult
from engine.scheduler import DepthPolicy, Scheduler
from engine.types import GenerateRequest, ProposeRequest, SamplingParams, SamplingRule, StepReport, VerifyRequest

Text = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """Prompts that are answered together with ``num_tokens`` tokens each, past any end of text."""

    kind: str
    prompts: tuple[Text, ...]
    num_tokens: int

    @property
    def batch(self) -> int:
        """Sequences at once."""
        return len(self.prompts)


@dataclass
class Run:
    """One arm's answer to one task."""

    num_tokens: int
    seconds: float
    """Prefill included."""
    texts: tuple[Text, ...] = ()
    """One per prompt; empty where the arm does not tell token ids."""
    decode_s: tuple[float, ...] = ()
    """Times of the rounds in which nobody prefilled."""
    verify_s: tuple[tuple[int, float], ...] = ()
    """Of these rounds, the target's step: (tokens, seconds)."""
    draft_step_s: tuple[float, ...] = ()
    """Of those among them that had a draft, the source's time over the draft's length."""
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    tested: Counter[int] = field(default_factory=Counter)
    """Draft tokens per position whose predecessors were all accepted: the others say nothing about the draft."""
    kept: Counter[int] = field(default_factory=Counter)
    """Those that were accepted."""

    @property
    def tokens_per_s(self) -> float:
        """Over all sequences, prefill included."""
        return self.num_tokens / self.seconds


@dataclass
class Arm:
    """A way to answer tasks of one batch size. ``runs`` has one entry per task that was measured."""

    name: str
    batch: int
    answer: Callable[[Task], Run]
    is_peer: bool = False
    """Another engine: when it cannot answer, it is left out and the reason is told."""
    runs: list[tuple[Task, Run]] = field(default_factory=list)
    failure: str | None = None

    def play(self, task: Task) -> Run | None:
        """Answer a task; None, with `failure` set, from a peer that cannot."""
        if self.failure is not None:
            return None
        try:
            return self.answer(task)
        except Exception as error:
            if not self.is_peer:
                raise
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.runs.clear()
            return None


def take_turns(arms: Sequence[Arm], tasks: Iterable[Task], on_turn: Callable[[Arm, Task], None]) -> None:
    """Every arm answers every task before the next task begins, so that a slow phase of the machine hits all alike.

    Another arm begins each time, so that none always comes after the same one. ``on_turn`` is called before each answer.
    """
    for index, task in enumerate(tasks):
        first = index % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            on_turn(arm, task)
            run = arm.play(task)
            if run is not None:
                arm.runs.append((task, run))


def warm_up(arms: Sequence[Arm], task: Task, on_turn: Callable[[Arm, Task], None]) -> None:
    """Every arm answers once and nothing is kept: what is built at first use is built, and peers that cannot run are known."""
    for arm in arms:
        on_turn(arm, task)
        arm.play(task)


def engine_arm(
    name: str,
    batch: int,
    engine: LocalEngine,
    policy: DepthPolicy | None = None,
    *,
    temperature: float = 0.0,
    rule: SamplingRule = "coupled",
) -> Arm:
    """The engine in this process. One policy for the whole arm: what it learns of the acceptance stays, as in a server."""
    driver = engine.driver(policy)

    def answer(task: Task) -> Run:
        params = SamplingParams(temperature=temperature, rule=rule, max_tokens=task.num_tokens, ignore_eos=True)
        prefix = f"bench-{time.monotonic_ns()}"
        ids = [f"{prefix}-{index}" for index in range(task.batch)]
        results: list[RoundResult] = []
        seconds: list[float] = []
        started_s = time.perf_counter()
        for request_id, prompt in zip(ids, task.prompts, strict=True):
            driver.add(GenerateRequest(request_id=request_id, prompt_ids=prompt, params=params))
        while driver.scheduler.running or driver.scheduler.waiting:
            round_started_s = time.perf_counter()
            results.append(driver.step())
            seconds.append(time.perf_counter() - round_started_s)
        elapsed_s = time.perf_counter() - started_s
        release_ended(engine, driver.scheduler)
        return _run_of(ids, results, seconds, elapsed_s)

    return Arm(name, batch, answer)


def release_ended(engine: LocalEngine, scheduler: Scheduler) -> None:
    """Tell the models which sequences ended. Otherwise the next round would, but the next may be another arm's."""
    engine.target.verify(VerifyRequest(round_id=0, items=(), release=tuple(scheduler.target_released)))
    scheduler.target_released.clear()
    if engine.source is not None:
        engine.source.propose(ProposeRequest(round_id=0, items=(), release=tuple(scheduler.draft_released)))
        scheduler.draft_released.clear()


def _run_of(ids: list[str], results: list[RoundResult], seconds: list[float], elapsed_s: float) -> Run:
    texts: dict[str, Text] = dict.fromkeys(ids, ())
    run = Run(0, elapsed_s)
    for result in results:
        run.tested.update(dict(enumerate(_tested(result.report))))
        run.kept.update(dict(enumerate(result.report.accepted_per_position)))
        for delta in result.deltas:
            if delta.error is not None:
                raise RuntimeError(f"{delta.request_id}: {delta.error}")
            texts[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                run.drafted += delta.num_drafted
                run.accepted += delta.num_accepted
                run.rounds += delta.num_rounds
    run.texts = tuple(texts[request_id] for request_id in ids)
    run.num_tokens = sum(map(len, run.texts))
    run.decode_s = tuple(s for s, r in zip(seconds, results, strict=True) if r.report.num_prefill_tokens == 0)
    decoding = [r.report for r in results if r.report.num_prefill_tokens == 0]
    run.verify_s = tuple((report.num_target_tokens, report.verify_time_s) for report in decoding)
    run.draft_step_s = tuple(report.draft_time_s / max(report.depths) for report in decoding if any(report.depths))
    return run


def _tested(report: StepReport) -> list[int]:
    drafted, accepted = report.drafted_per_position, report.accepted_per_position
    return [min(drafted[j], accepted[j - 1]) if j else drafted[0] for j in range(len(drafted))]


def http_arm(name: str, config: OutriderConfig, max_depth: int | None) -> Arm:
    """One streaming completion against the running application."""
    import httpx

    client = httpx.Client(base_url=f"http://{config.api.host}:{config.api.port}", timeout=600)

    def answer(task: Task) -> Run:
        (prompt,) = task.prompts
        body: dict[str, Any] = {
            "model": config.served_model_name,
            "prompt": list(prompt),
            "temperature": 0,
            "max_tokens": task.num_tokens,
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
        elapsed_s = time.perf_counter() - started_s
        return Run(tokens, elapsed_s, drafted=drafted, accepted=accepted, rounds=tokens - accepted)

    return Arm(name, 1, answer)


def _read_usage(client: Any, body: dict[str, Any]) -> dict[str, Any]:
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for event in read_events(response):
            usage = event.get("usage") or usage
    return usage
