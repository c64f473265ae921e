"""Closed and open loops of requests: what is in flight, and the window in which it is measured."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deployments.bench.load_client import Answer

MAX_RETRIES = 10
"""Answers 429 that one request of a closed loop waits out."""
ERROR_PAUSE_S = 0.2
"""After a failed request: a closed loop would turn into a storm where everything fails at once."""
TOO_MANY = "429"

Send = Callable[[int, float, Callable[[], None]], Awaitable[Answer]]
"""Request by number; the moment it is meant for; what to call with every chunk."""


@dataclass(frozen=True)
class Span:
    """How long a load is measured: ``num_requests`` where that is given, else ``duration_s``; after a warm-up."""

    warm_up_s: float
    duration_s: float
    num_requests: int | None = None


@dataclass(frozen=True)
class Played:
    """A load that was played, and the window (`time.monotonic`) in which it counts."""

    answers: list[Answer]
    begin_s: float
    end_s: float
    client_cpu_share: float
    """CPU time of this process over time, from the first to the last request."""


async def play_closed(send: Send, concurrency: int, span: Span) -> Played:
    """Keep ``concurrency`` requests in flight. The window begins ``warm_up_s`` after all of the first ones have said something.

    After the window nothing new is sent, and what is in flight may finish: only then does its usage say what it was.
    """
    return await _ClosedLoop(send, concurrency, span).play()


class _ClosedLoop:
    def __init__(self, send: Send, concurrency: int, span: Span):
        self._send = send
        self._span = span
        self._numbers = itertools.count()
        self._answers: list[Answer] = []
        self._waiting = set(range(concurrency))
        """Workers whose first request has not said anything yet."""
        self._begun, self._enough, self._stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._enough_at = float("inf")

    async def play(self) -> Played:
        watch = _Watch()
        async with asyncio.TaskGroup() as group:
            for worker in tuple(self._waiting):
                group.create_task(self._work(partial(self._begin, worker)))
            await self._begun.wait()
            await asyncio.sleep(self._span.warm_up_s)
            begin_s = time.monotonic()
            await self._measure()
            end_s = time.monotonic()
            self._stopping.set()
        return Played(self._answers, begin_s, end_s, watch.cpu_share)

    async def _measure(self) -> None:
        if self._span.num_requests is None:
            await asyncio.sleep(self._span.duration_s)
            return
        self._enough_at = len(self._answers) + self._span.num_requests
        await self._enough.wait()

    async def _work(self, begin: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            answer = await self._patiently(next(self._numbers), begin)
            begin()
            self._answers.append(answer)
            if len(self._answers) >= self._enough_at:
                self._enough.set()
            if answer.error is not None:
                await self._pause(ERROR_PAUSE_S)

    def _begin(self, worker: int) -> None:
        self._waiting.discard(worker)
        if not self._waiting:
            self._begun.set()

    async def _patiently(self, number: int, on_text: Callable[[], None]) -> Answer:
        """Try again after 429, when the server says; the time counts from the first try."""
        intended_s = time.monotonic()
        for num_rejections in range(MAX_RETRIES + 1):
            answer = replace(await self._send(number, intended_s, on_text), num_rejections=num_rejections)
            if answer.error != TOO_MANY or num_rejections == MAX_RETRIES or self._stopping.is_set():
                break
            await self._pause(answer.retry_after_s)
        return answer

    async def _pause(self, seconds: float) -> None:
        """Shorter when the window ends."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


async def play_open(send: Send, arrivals_s: Sequence[float], span: Span) -> Played:
    """Send requests at these seconds from now, whatever is still in flight; each is timed from its own moment.

    So a server (or a client) that falls behind is seen in every latency, and not omitted. Nothing is tried again.
    """
    watch = _Watch()
    start_s = time.monotonic()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for number, arrival_s in enumerate(arrivals_s):
            tasks.append(group.create_task(_send_at(send, number, start_s + arrival_s)))
    begin_s = start_s + span.warm_up_s
    end_s = begin_s + span.duration_s if span.num_requests is None else start_s + arrivals_s[-1]
    return Played([task.result() for task in tasks], begin_s, end_s, watch.cpu_share)


async def _send_at(send: Send, number: int, intended_s: float) -> Answer:
    await asyncio.sleep(intended_s - time.monotonic())
    return await send(number, intended_s, lambda: None)


def poisson_arrivals(rate: float, span: Span, seed: int) -> list[float]:
    """Increasing seconds of a Poisson process of ``rate`` per second, warm-up included: gaps are exponential, mean 1 / rate.

    Ends with the window's duration, or with the last of ``num_requests`` arrivals after the warm-up.
    """
    draw = random.Random(seed)
    times_s: list[float] = []
    at_s, num_counted = 0.0, 0
    while num_counted != span.num_requests:
        at_s += draw.expovariate(rate)
        if span.num_requests is None and at_s >= span.warm_up_s + span.duration_s:
            break
        times_s.append(at_s)
        num_counted += at_s >= span.warm_up_s
    return times_s


class _Watch:
    """CPU time of this process since it was made."""

    def __init__(self) -> None:
        self._cpu_s, self._now_s = time.process_time(), time.monotonic()

    @property
    def cpu_share(self) -> float:
        """Over time."""
        return (time.process_time() - self._cpu_s) / max(time.monotonic() - self._now_s, 1e-9)
