"""What bounds a step: the memory's bandwidth, the time of a step by its tokens, and what a round does beside the forward."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deployments.bench.arms import release_ended
from engine.build import LocalEngine
from engine.calibrate import measure_draft, measure_target
from engine.propose.base import DraftSource
from engine.sampling import decide
from engine.scheduler import FixedDepth
from engine.types import (
    GenerateRequest,
    ProposeReply,
    ProposeRequest,
    SamplingParams,
    SequenceContext,
    VerifyItem,
    VerifyReply,
    VerifyRequest,
)
from engine.verify.base import TargetModel

SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 128
"""Most tokens in the KV cache before a step of the curve."""
READ_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
"""Much more than any cache on the way to the memory."""
READ_WIDTH = 1024
READS_PER_SAMPLE = 3
STEP_BATCH = 64
STEP_PROMPT = 4


class Bandwidth:
    """Sequential reading by torch with its present number of threads, on the device of the model."""

    def __init__(self, device: torch.device):
        num_rows = READ_BYTES.get(device.type, READ_BYTES["cpu"]) // (4 * READ_WIDTH)
        self._matrix = torch.ones(num_rows, READ_WIDTH, device=device)
        self._vector = torch.ones(READ_WIDTH, device=device)

    def sample(self) -> float:
        """Bytes per second of the fastest of a few passes over the buffer: a floor is what the machine can do.

        Two kernels try, since on some processors a sum is not the fastest reader and on others a matrix-vector product is not.
        """
        readers = (self._matrix.sum, lambda: torch.mv(self._matrix, self._vector)[0])
        return max(self._pass(reader) for reader in readers for _ in range(READS_PER_SAMPLE))

    def _pass(self, reader: Callable[[], Tensor]) -> float:
        started_s = time.perf_counter()
        reader().item()
        return self._matrix.numel() * self._matrix.element_size() / (time.perf_counter() - started_s)


@dataclass
class Curve:
    """Seconds of a verify of n tokens, in sweeps over all sizes, so that ratios are taken within one sweep."""

    context: int
    sizes: tuple[int, ...]
    verify_s: list[list[float]] = field(default_factory=list)
    """Per sweep and size: the whole call, sampling included."""
    forward_s: list[list[float]] = field(default_factory=list)
    """Per sweep and size: the forward in it."""

    def ratios(self, size: int) -> list[float]:
        """Times of a verify of ``size`` tokens over those of one token, per sweep; empty when it was not measured."""
        if size not in self.sizes:
            return []
        column = self.sizes.index(size)
        return [row[column] / row[0] for row in self.verify_s]

    def rows(self) -> list[dict[str, float]]:
        """Medians in ms, by number of tokens."""
        columns = [
            [statistics.median(row[i] for row in table) * 1e3 for i in range(len(self.sizes))]
            for table in (self.verify_s, self.forward_s)
        ]
        return [
            {"tokens": size, "verify_ms": round(verify, 3), "forward_ms": round(forward, 3)}
            for size, verify, forward in zip(self.sizes, *columns, strict=True)
        ]


def measure_curve(engine: LocalEngine, num_sweeps: int, on_sweep: Callable[[], None]) -> Curve:
    """Verify one sequence's drafts of all sizes in turns, each from the same state; the first sweep is not counted."""
    room = min(engine.info.max_context, engine.info.kv_capacity_tokens)
    sizes = tuple(size for size in SIZES if size + STEP_PROMPT <= room)
    curve = Curve(min(CONTEXT, room - sizes[-1]), sizes)
    params = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
    context = SequenceContext(params=params, prompt_length=curve.context)
    ids = _some_ids(engine, curve.context + sizes[-1])
    start = VerifyItem(sequence_id="curve", base_length=0, tokens=ids[: curve.context], context=context, sample=False)
    _verify(engine, start)
    with timed_parts(engine) as parts:
        for sweep in range(num_sweeps + 1):
            rows = [_time_verify(engine, ids[curve.context :][:size], curve.context, parts) for size in sizes]
            if sweep > 0:
                curve.verify_s.append([whole for whole, _ in rows])
                curve.forward_s.append([forward for _, forward in rows])
                on_sweep()
    engine.target.verify(VerifyRequest(round_id=0, items=(), release=("curve",)))
    return curve


def _time_verify(engine: LocalEngine, ids: tuple[int, ...], base_length: int, parts: "Parts") -> tuple[float, float]:
    item = VerifyItem(sequence_id="curve", base_length=base_length, tokens=ids[:1], draft=ids[1:])
    before_s, started_s = parts.forward_s, time.perf_counter()
    _verify(engine, item)
    return time.perf_counter() - started_s, parts.forward_s - before_s


def _verify(engine: LocalEngine, item: VerifyItem) -> None:
    (verdict,) = engine.target.verify(VerifyRequest(round_id=0, items=(item,))).verdicts
    if verdict.error is not None or verdict.need_context:
        raise RuntimeError(f"the target cannot be timed: {verdict.error or 'it lost the sequence'}")


def _some_ids(engine: LocalEngine, count: int) -> tuple[int, ...]:
    """Tokens of a text, repeated: drafts that are mostly wrong cost as much as right ones."""
    words = engine.encode("The quick brown fox jumps over the lazy dog.", chat=False)
    return tuple((words * (count // len(words) + 1))[:count])


@dataclass
class Parts:
    """Seconds so far, in total."""

    forward_s: float = 0.0
    """`RaggedModel.forward`: it includes packing the batch's metadata, and on CUDA the wait for the device."""
    sampling_s: float = 0.0
    """`engine.sampling.decide`: logits to verdicts."""


@contextmanager
def timed_parts(engine: LocalEngine) -> Iterator[Parts]:
    """Count the time of the target's forwards and of its sampling, for the time of the block."""
    parts = Parts()
    forward = engine.target.model.forward

    def timed_forward(chunks: Sequence[Any]) -> Tensor:
        started_s = time.perf_counter()
        logits = forward(chunks)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        parts.forward_s += time.perf_counter() - started_s
        return logits

    def timed_decide(*arguments: Any) -> Any:
        started_s = time.perf_counter()
        decisions = decide(*arguments)
        parts.sampling_s += time.perf_counter() - started_s
        return decisions

    with (
        mock.patch.object(engine.target.model, "forward", timed_forward),
        mock.patch("engine.verify.target.decide", timed_decide),
    ):
        yield parts


@dataclass(frozen=True)
class RoundParts:
    """One round of plain decoding: seconds of the whole, of the forward, and of the sampling."""

    round_s: float
    forward_s: float
    sampling_s: float

    @property
    def outside_s(self) -> float:
        """Whatever is not the forward: plan, messages, block tables' bookkeeping, sampling, commit."""
        return self.round_s - self.forward_s


def measure_round_parts(engine: LocalEngine, num_rounds: int, batch: int = STEP_BATCH) -> list[RoundParts]:
    """Rounds in which ``batch`` sequences decode one token each, from short prompts."""
    driver = engine.driver(FixedDepth(0))
    params = SamplingParams(temperature=0.0, max_tokens=num_rounds + 1, ignore_eos=True)
    for index in range(batch):
        ids = _some_ids(engine, STEP_PROMPT + index)[-STEP_PROMPT:]
        driver.add(GenerateRequest(request_id=f"parts-{time.monotonic_ns()}-{index}", prompt_ids=ids, params=params))
    measured: list[RoundParts] = []
    with timed_parts(engine) as parts:
        while driver.scheduler.running or driver.scheduler.waiting:
            forward_s, sampling_s, started_s = parts.forward_s, parts.sampling_s, time.perf_counter()
            report = driver.step().report
            elapsed_s = time.perf_counter() - started_s
            if report.num_prefill_tokens == 0 and report.batch_size == batch:
                measured.append(RoundParts(elapsed_s, parts.forward_s - forward_s, parts.sampling_s - sampling_s))
    release_ended(engine, driver.scheduler)
    return measured


async def measure_cost_ratio(target: TargetModel, draft: DraftSource) -> float:
    """c: seconds of a draft step over those of a target step, one row each, by the calls of rounds, one after the other."""

    async def verify(request: VerifyRequest) -> VerifyReply:
        return target.verify(request)

    async def propose(request: ProposeRequest) -> ProposeReply:
        return draft.propose(request)

    return dict(await measure_draft(propose))[1] / dict(await measure_target(verify))[1]
