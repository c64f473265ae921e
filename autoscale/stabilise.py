"""Keeps a decision from flapping when the load hovers around the switch point."""

import math

import msgspec


class GateMemory(msgspec.Struct, frozen=True):
    """Whether the lane speculates (or overlaps its rounds), and since when."""

    is_open: bool = True
    changed_at_s: float = -math.inf


class DwellGate(msgspec.Struct, frozen=True):
    """Off at once, on again only with a margin and after a minimum dwell.

    Plain decoding is never wrong, so closing needs no patience. Opening makes the draft catch up with every request, so it must
    pay clearly and not soon after the last change: in t seconds the gate changes at most ``2 (t / dwell_s + 1)`` times.
    """

    dwell_s: float
    margin: float = 0.5
    """In draft positions: the price must be so low that a position this much deeper than the first would still pay."""

    def step(self, price: float, alpha: float, memory: GateMemory, now_s: float) -> tuple[bool, GateMemory]:
        """Decide whether requests of acceptance ``alpha`` speculate at ``price``; returns (open, new memory)."""
        return self.step_by(price < alpha, price < alpha ** (1 + self.margin), memory, now_s)

    def step_by(self, pays: bool, pays_clearly: bool, memory: GateMemory, now_s: float) -> tuple[bool, GateMemory]:
        """Stay open while it ``pays``, open when it ``pays_clearly`` and the dwell is over; returns (open, new memory).

        After a clock that went backwards the dwell starts again, so that it ends; without a valid time the gate cannot open.
        """
        if not math.isfinite(now_s):
            now_s = memory.changed_at_s
        if now_s < memory.changed_at_s:
            memory = GateMemory(memory.is_open, now_s)
        has_dwelt = now_s - memory.changed_at_s >= self.dwell_s
        should_open = pays if memory.is_open else pays_clearly and has_dwelt
        if should_open == memory.is_open:
            return memory.is_open, memory
        return should_open, GateMemory(should_open, now_s)
