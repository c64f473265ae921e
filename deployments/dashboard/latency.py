"""Times to first token and between tokens, as one Api process saw them lately: what percentiles are made of."""

import math
import secrets
import time
from collections import Counter, deque
from typing import Any

from engine.drivers import Clock

WINDOW_S = 120.0
MAX_TIMES = 4096
"""Of each kind: a busy server remembers less than the window."""
STEPS_PER_FACTOR_OF_TEN = 48
"""Times are counted in steps of 4.9 %, so percentiles are right within 2.4 %."""


class LatencyWindow:
    """The latest times of one process. Counts add up, so a reader that hears several processes can put theirs together."""

    def __init__(self, clock: Clock = time.monotonic):
        self._name = secrets.token_hex(4)
        """Tells processes apart; another one after a restart."""
        self._clock = clock
        self._first: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)
        self._between: deque[tuple[float, float, int]] = deque(maxlen=MAX_TIMES)

    def stream(self) -> "StreamTimes":
        """For one request that begins now."""
        return StreamTimes(self, self._clock)

    def add_first(self, now_s: float, seconds: float) -> None:
        """A request got its first token."""
        self._first.append((now_s, seconds))

    def add_between(self, now_s: float, seconds: float, num_tokens: int) -> None:
        """A round brought ``num_tokens``, each ``seconds`` after the one before it."""
        self._between.append((now_s, seconds, num_tokens))

    def summary(self) -> dict[str, Any]:
        """Counts of the last `WINDOW_S` by step: step n holds the times around ``10^(n / steps_per_factor_of_ten)`` ms."""
        since_s = self._clock() - WINDOW_S
        first: Counter[int] = Counter()
        between: Counter[int] = Counter()
        for _, seconds in (entry for entry in self._first if entry[0] >= since_s):
            first[_step(seconds)] += 1
        for _, seconds, num_tokens in (entry for entry in self._between if entry[0] >= since_s):
            between[_step(seconds)] += num_tokens
        return {
            "process": self._name,
            "window_s": WINDOW_S,
            "steps_per_factor_of_ten": STEPS_PER_FACTOR_OF_TEN,
            "ttft": sorted(first.items()),
            "itl": sorted(between.items()),
        }


class StreamTimes:
    """Times of one request. The tokens of a round come together: the time since the round before is divided among them."""

    def __init__(self, window: LatencyWindow, clock: Clock):
        self._window = window
        self._clock = clock
        self._last_s = clock()
        self._has_begun = False

    def arrived(self, num_tokens: int) -> None:
        """A round's tokens are there; without any nothing is counted."""
        if num_tokens == 0:
            return
        now_s = self._clock()
        since_s, self._last_s = now_s - self._last_s, now_s
        if self._has_begun:
            self._window.add_between(now_s, since_s / num_tokens, num_tokens)
        else:
            self._window.add_first(now_s, since_s)
            self._has_begun = True


def _step(seconds: float) -> int:
    """Times below a microsecond, and those of a clock that stood still, count as one."""
    return round(STEPS_PER_FACTOR_OF_TEN * math.log10(max(1000 * seconds, 1e-3)))
