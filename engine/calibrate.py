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
TARGET_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Up to a batch of 64 with drafts; many GPUs' steps begin to grow beyond 128 tokens."""
DRAFT_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Sequences in one step; an outcome that is prepared is one too."""
DRAFT_STEPS = 4
REPEATS = 3
BUDGET_S = 2.0
"""Larger sizes are left out when they would, at twice the time of the one before, take longer than this."""
_CONTEXT = SequenceContext(params=SamplingParams(temperature=0.0, ignore_eos=True), prompt_length=CONTEXT_TOKENS)


async def measure_target(verify: Callable[[VerifyRequest], Awaitable[VerifyReply]]) -> StepTimes:
    """(tokens in one forward, seconds): the best of three, over one sequence of 64 tokens plus the new ones."""
    name = "calibrate-target"
    opening = VerifyItem(sequence_id=name, base_length=0, tokens=(0,) * CONTEXT_TOKENS, context=_CONTEXT, sample=False)
    await verify(VerifyRequest(round_id=0, items=(opening,)))

    async def step(size: int) -> bool:
        item = VerifyItem(sequence_id=name, base_length=CONTEXT_TOKENS, tokens=(0,), draft=(0,) * (size - 1))
        reply = await verify(VerifyRequest(round_id=0, items=(item,)))
        return bool(reply.verdicts) and all(verdict.tokens for verdict in reply.verdicts)

    times = await _best_times(TARGET_TOKENS, step)
    await verify(VerifyRequest(round_id=0, items=(), release=(name,)))
    return times


async def measure_draft(
    propose: Callable[[ProposeRequest], Awaitable[ProposeReply]], most_rows: int = max(DRAFT_ROWS)
) -> StepTimes:
    """(rows, seconds per draft step): the best of three drafts of four tokens; a call's hop is shared by its steps.

    Each row is a sequence of its own, as the outcomes are that a draft prepares: their sampling and their contexts are in the
    times, which those of one sequence's tokens (`ModelInfo.step_times`) lack. Ends where the draft has no room for more.
    """
    names = tuple(f"calibrate-draft-{row}" for row in range(max(DRAFT_ROWS)))
    num_open = 0

    async def make_ready(rows: int) -> None:
        nonlocal num_open
        for name in names[num_open:rows]:  # one at a time: a draft bounds how many tokens of catching up one call computes
            opening = ProposeItem(sequence_id=name, base_length=0, tokens=(0,) * CONTEXT_TOKENS, depth=0, context=_CONTEXT)
            await propose(ProposeRequest(round_id=0, items=(opening,)))
        num_open = max(num_open, rows)

    async def step(rows: int) -> bool:
        items = [
            ProposeItem(sequence_id=name, base_length=CONTEXT_TOKENS - 1, tokens=(0,), depth=DRAFT_STEPS)
            for name in names[:rows]
        ]
        reply = await propose(ProposeRequest(round_id=0, items=tuple(items)))
        return len(reply.proposals) == rows and all(proposal.tokens for proposal in reply.proposals)

    times = await _best_times(tuple(rows for rows in DRAFT_ROWS if rows <= most_rows), step, make_ready)
    await propose(ProposeRequest(round_id=0, items=(), release=names))
    return tuple((rows, seconds / DRAFT_STEPS) for rows, seconds in times)


async def _nothing(size: int) -> None:
    pass


async def _best_times(
    sizes: tuple[int, ...],
    step: Callable[[int], Awaitable[bool]],
    make_ready: Callable[[int], Awaitable[None]] = _nothing,
) -> StepTimes:
    """(size, seconds) while steps succeed and the budget lasts."""
    times: list[tuple[int, float]] = []
    started_s = time.perf_counter()
    for size in sizes:
        expected_s = 2 * REPEATS * times[-1][1] if times else 0.0
        if time.perf_counter() - started_s + expected_s > BUDGET_S:
            break
        await make_ready(size)
        samples = [await _seconds(step, size) for _ in range(REPEATS)]
        if None in samples:
            break
        times.append((size, min(seconds for seconds in samples if seconds is not None)))
    return tuple(times)


async def _seconds(step: Callable[[int], Awaitable[bool]], size: int) -> float | None:
    started_s = time.perf_counter()
    succeeded = await step(size)
    return time.perf_counter() - started_s if succeeded else None
