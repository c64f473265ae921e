"""Keeps a decision from flapping when the load hovers around the switch point."""

import math

import msgspec

BACKOFF = 8.0
"""The dwell grows by this when the gate had to close soon after it opened."""
LONGEST_DWELL_S = 60.0


class GateMemory(msgspec.Struct, frozen=True):
    """Whether the lane speculates (or overlaps its rounds), and since when."""

    is_open: bool = True
    changed_at_s: float = -math.inf
    patience: float = 1.0
    """The dwell of the moment, in dwells."""


class DwellGate(msgspec.Struct, frozen=True):
    """Off at once, on again only with a margin and after a minimum dwell.

    Plain decoding is never wrong, so closing needs no patience. Opening makes the draft catch up with every request, so it must
    pay clearly and not soon after the last change: in t seconds the gate changes at most ``2 (t / dwell_s + 1)`` times.

    A load that sits on the threshold opens and closes it for ever. So each time it has to close again within
    `LONGEST_DWELL_S` the dwell grows, up to that, which leaves one opening and one closing per minute. It is the short one
    again where opening pays greatly, as when the load has gone, and after the gate was open for so long.
    """

    dwell_s: float
    margin: float = 0.5
    """In draft positions: the price must be so low that a position this much deeper than the first would still pay."""
    great_margin: float = 2.0
    """The same for opening after the short dwell."""

    def step(self, price: float, alpha: float, memory: GateMemory, now_s: float) -> tuple[bool, GateMemory]:
        """Decide whether requests of acceptance ``alpha`` speculate at ``price``; returns (open, new memory)."""
        clearly, greatly = (price < alpha ** (1 + margin) for margin in (self.margin, self.great_margin))
        return self.step_by(price < alpha, clearly, greatly, memory, now_s)

    def step_by(
        self, pays: bool, pays_clearly: bool, pays_greatly: bool, memory: GateMemory, now_s: float
    ) -> tuple[bool, GateMemory]:
        """Stay open while it ``pays``, open when it ``pays_clearly`` and the dwell is over; returns (open, new memory).

        ``pays_greatly``: the dwell is the short one.

        After a clock that went backwards the dwell starts again, so that it ends; without a valid time the gate cannot open.
        """
        if not math.isfinite(now_s):
            now_s = memory.changed_at_s
        if now_s < memory.changed_at_s:
            memory = GateMemory(memory.is_open, now_s, memory.patience)
        since_s = now_s - memory.changed_at_s
        has_dwelt = since_s >= (self.dwell_s if pays_greatly else min(memory.patience * self.dwell_s, LONGEST_DWELL_S))
        should_open = pays if memory.is_open else pays_clearly and has_dwelt
        if should_open == memory.is_open:
            return memory.is_open, memory
        patience = memory.patience
        if not should_open:
            patience = 1.0 if since_s > LONGEST_DWELL_S else BACKOFF * patience
        return should_open, GateMemory(should_open, now_s, patience)
