"""`outrider bench sampling`: time from logits to verdicts and to draft tokens, against one softmax over the same rows.

The rows are the target's own on the benchmark prompts, since made-up ones are flat where real ones are peaked, which filters
and noise feel. Softmax and the measured call take turns, so that a slow phase of the machine hits both alike.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from deployments.bench.prompts import PROMPTS
from engine.build import LocalEngine, build_target, preflight
from engine.config import OutriderConfig
from engine.sampling import SampledSequence, decide, propose_tokens
from engine.types import SamplingParams
from engine.verify.attention import Chunk
from engine.verify.kv_cache import CachedSequence
from engine.verify.target import Target

console = Console(stderr=True)
DEPTH = 4
BATCHES = (64, 1)
LARGE_VOCAB = 151_936
"""Of Qwen's tokenizer: three times that of the default target."""
TILE_DROP = 6.0
"""Nats by which each further copy of a row lies lower: the added tokens are a long tail, as those of a large vocabulary."""
DRAFT_ERROR = 0.5
"""Standard deviation of what a draft's logits differ by: most of its tokens are accepted."""
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {},
    "coupled, T=0.7, top_p=0.9": {"temperature": 0.7, "top_p": 0.9},
    "coupled, top_k=50": {"top_k": 50},
    "coupled, penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "rejection": {"rule": "rejection"},
    "block": {"rule": "block"},
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One call against softmax over the rows it was given."""

    setting: str
    side: str
    """target: sampling and acceptance; draft: one token for each request."""
    vocab_size: int
    num_requests: int
    num_rows: int
    call_ms: float
    softmax_ms: float
    ratio: float
    """Median of the ratios of neighbouring calls."""
    ratio_q1: float
    ratio_q3: float


def run_bench_sampling(config: OutriderConfig, *, quick: bool, as_json: bool) -> int:
    """Measure, print a table on stderr and, if asked, one JSON object as the last line of stdout."""
    with console.status("loading the target"):
        tokenizer = preflight(config)
        target = build_target(config)
        engine = LocalEngine(target, None, tokenizer, config)
        rows = _real_rows(engine, max(BATCHES) * (DEPTH + 1))
    measured = _measure(rows, 5 if quick else 25)
    _print_table(measured)
    if as_json:
        print(json.dumps({"target": target.info.name, "device": target.info.device, "rows": [_object(m) for m in measured]}))
    return 0


def _measure(rows: Tensor, num_repetitions: int) -> list[Measured]:
    """Everything at the target's own vocabulary and at a large one."""
    sizes = sorted({rows.shape[1], max(LARGE_VOCAB, rows.shape[1])})
    measured = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(sizes) * len(BATCHES) * len(SETTINGS))
        for vocab_size in sizes:
            logits = tiled(rows, vocab_size)
            for num_requests in BATCHES:
                for setting, options in SETTINGS.items():
                    progress.update(task, description=f"{vocab_size} tokens, {num_requests} requests: {setting}")
                    measured += _measure_setting(setting, SamplingParams(**options), logits, num_requests, num_repetitions)
                    progress.advance(task)
    return measured


def _measure_setting(
    setting: str, params: SamplingParams, logits: Tensor, num_requests: int, num_repetitions: int
) -> list[Measured]:
    own = logits[: num_requests * (DEPTH + 1)]
    sequences = _drafted(own, params, num_requests)
    first = [SampledSequence(s.params, s.prompt_length, s.ids[: -len(s.draft)]) for s in sequences]
    drafting = own[:: DEPTH + 1].contiguous()
    calls: list[tuple[str, Tensor, Callable[[], object]]] = [
        ("target", own, lambda: decide(own, sequences, (0,))),
        ("draft", drafting, lambda: propose_tokens(drafting, first, (0,))),
    ]
    return [_compare(setting, side, rows, num_requests, call, num_repetitions) for side, rows, call in calls]


def _compare(
    setting: str, side: str, rows: Tensor, num_requests: int, call: Callable[[], object], num_repetitions: int
) -> Measured:
    pairs = []
    for repetition in range(num_repetitions + 1):
        pair = _time_s(lambda: torch.softmax(rows.float(), dim=-1), rows.device), _time_s(call, rows.device)
        if repetition:  # the first is a warm-up
            pairs.append(pair)
    low, median, high = statistics.quantiles([mine / softmax for softmax, mine in pairs], n=4)
    softmax_ms, call_ms = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    return Measured(setting, side, rows.shape[1], num_requests, len(rows), call_ms, softmax_ms, median, low, high)


def _time_s(call: Callable[[], object], device: torch.device) -> float:
    started_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


# --- rows and drafts --------------------------------------------------------------------------------------------------------


def _real_rows(engine: LocalEngine, num_rows: int) -> Tensor:
    """The target's logits [num_rows, V] after the last tokens of the benchmark prompts, taken again when there are too few."""
    has_template = engine.tokenizer.chat_template is not None
    texts = [engine.encode(text, chat=has_template) for own in PROMPTS.values() for text in own]
    rows = torch.cat([_logits_of(engine.target, ids[: engine.info.max_context]) for ids in texts])
    return rows.repeat(-(-num_rows // len(rows)), 1)[:num_rows].contiguous()


def _logits_of(target: Target, ids: Sequence[int]) -> Tensor:
    sequence = CachedSequence()
    target.model.cache.reserve(sequence, len(ids))
    logits = target.model.forward([Chunk(sequence, ids, min(len(ids), 32))]).clone()
    target.model.cache.truncate(sequence, 0)
    return logits


def tiled(rows: Tensor, vocab_size: int) -> Tensor:
    """Rows [R, V] made ``vocab_size`` wide by copies of themselves, each shifted by a token and `TILE_DROP` lower."""
    copies = -(-vocab_size // rows.shape[1])
    return torch.cat([rows.roll(i, dims=1) - i * TILE_DROP for i in range(copies)], dim=1)[:, :vocab_size].contiguous()


def _drafted(logits: Tensor, params: SamplingParams, num_requests: int) -> list[SampledSequence]:
    """Requests after 256 committed tokens, with drafts from the same rows with an error: [num_requests * (DEPTH + 1), V]."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(logits.shape[1], (num_requests, 256), generator=generator).tolist()
    drafts: list[list[int]] = [[] for _ in prompts]
    probs: list[list[Any]] = [[] for _ in prompts]
    for step in range(DEPTH):
        rows = logits[step :: DEPTH + 1].float()
        rows = rows + DRAFT_ERROR * torch.randn(rows.shape, generator=generator).to(rows)
        sequences = [SampledSequence(params, 200, ids + own) for ids, own in zip(prompts, drafts, strict=True)]
        for i, (token, q, _) in enumerate(propose_tokens(rows, sequences, (0,))):
            drafts[i].append(token)
            probs[i] += [q] if q is not None else []
    return [
        SampledSequence(params, 200, ids + own, tuple(own), tuple(q) or None)
        for ids, own, q in zip(prompts, drafts, probs, strict=True)
    ]


# --- telling ----------------------------------------------------------------------------------------------------------------


def _object(measured: Measured) -> dict[str, Any]:
    return {name: getattr(measured, name) for name in Measured.__slots__}


def _print_table(measured: Sequence[Measured]) -> None:
    table = Table("vocabulary", "requests", "side", "setting", "rows", "ms", "softmax ms", "ratio", "quartiles")
    for m in measured:
        table.add_row(
            str(m.vocab_size),
            str(m.num_requests),
            m.side,
            m.setting,
            str(m.num_rows),
            f"{m.call_ms:.2f}",
            f"{m.softmax_ms:.2f}",
            f"{m.ratio:.2f}",
            f"{m.ratio_q1:.2f} to {m.ratio_q3:.2f}",
        )
    console.print(table)
    console.print(
        f"rows: the target's own on the benchmark prompts; wider ones tiled with shifted copies {TILE_DROP:g} nats lower"
    )
