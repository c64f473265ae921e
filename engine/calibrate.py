"""Measure step times from where they matter: through the same calls that the rounds use, hops included.

Models measure themselves when they load, but then the others load too, on the same cores. A lane measures again when its
models are there and nobody is waiting. Sequences with synthetic ids are opened, used and released again.
"""

import time
from collections.abc import Awaitable, Callable

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

StepTimes = tuple[tuple[int, float], ...]
CONTEXT_TOKENS = 64
TARGET_TOKENS = (1, 2, 4, 8, 16, 32, 64)
DRAFT_ROWS = (1, 2, 4, 8, 16, 64)
"""Overlapped rounds draft several outcomes per request at once."""
DRAFT_STEPS = 4
REPEATS = 3
BUDGET_S = 2.0
"""Larger sizes are left out when the smaller ones took longer than this."""
_CONTEXT = SequenceContext(params=SamplingParams(temperature=0.0, ignore_eos=True), prompt_length=CONTEXT_TOKENS)


async def measure_target(verify: Callable[[VerifyRequest], Awaitable[VerifyReply]]) -> StepTimes:
    """(tokens in one forward, seconds): the best of three, over one sequence of 64 tokens plus the new ones."""
    name = "calibrate-target"
    opening = VerifyItem(sequence_id=name, base_length=0, tokens=(0,) * CONTEXT_TOKENS, context=_CONTEXT, sample=False)
    await verify(VerifyRequest(round_id=0, items=(opening,)))

    async def step(size: int) -> None:
        item = VerifyItem(sequence_id=name, base_length=CONTEXT_TOKENS, tokens=(0,), draft=(0,) * (size - 1))
        await verify(VerifyRequest(round_id=0, items=(item,)))

    times = await _best_times(TARGET_TOKENS, step)
    await verify(VerifyRequest(round_id=0, items=(), release=(name,)))
    return times


async def measure_draft(propose: Callable[[ProposeRequest], Awaitable[ProposeReply]]) -> StepTimes:
    """(rows, seconds per draft step): the best of three drafts of four tokens; a call's hop is shared by its steps."""
    names: list[str] = []

    async def open_sequences(rows: int) -> None:
        for row in range(len(names), rows):  # one at a time: a draft bounds how many tokens of catching up one call computes
            names.append(f"calibrate-draft-{row}")
            opening = ProposeItem(
                sequence_id=names[row], base_length=0, tokens=(0,) * CONTEXT_TOKENS, depth=0, context=_CONTEXT
            )
            await propose(ProposeRequest(round_id=0, items=(opening,)))

    async def step(rows: int) -> None:
        await open_sequences(rows)  # in the first repeat only, which is then not the best one
        items = [
            ProposeItem(sequence_id=name, base_length=CONTEXT_TOKENS - 1, tokens=(0,), depth=DRAFT_STEPS)
            for name in names[:rows]
        ]
        await propose(ProposeRequest(round_id=0, items=tuple(items)))

    times = await _best_times(DRAFT_ROWS, step)
    await propose(ProposeRequest(round_id=0, items=(), release=tuple(names)))
    return tuple((rows, seconds / DRAFT_STEPS) for rows, seconds in times)


async def _best_times(sizes: tuple[int, ...], step: Callable[[int], Awaitable[None]]) -> StepTimes:
    times: list[tuple[int, float]] = []
    started_s = time.perf_counter()
    for size in sizes:
        if times and time.perf_counter() - started_s > BUDGET_S:
            break
        times.append((size, min([await _seconds(step, size) for _ in range(REPEATS)])))
    return tuple(times)


async def _seconds(step: Callable[[int], Awaitable[None]], size: int) -> float:
    started_s = time.perf_counter()
    await step(size)
    return time.perf_counter() - started_s
