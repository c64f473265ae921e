"""Keeps a decision from flapping when the load hovers around the switch point."""

import math

import msgspec

CALM_S = 60.0
"""A gate that had to close within this time of its opening opens this long after it, unless it pays greatly."""


class GateMemory(msgspec.Struct, frozen=True):
    """Whether the lane speculates (or overlaps its rounds), and since when."""

    is_open: bool = True
    changed_at_s: float = -math.inf
    pays_since_s: float | None = None
    """Since when opening would have paid clearly without a break; None while it is open or does not pay."""
    is_wary: bool = False
    """The last opening was regretted soon."""


class DwellGate(msgspec.Struct, frozen=True):
    """Off at once, on again only with a margin, after a minimum dwell, and when the catching up is worth it.

    Plain decoding is never wrong, so closing needs no patience. Opening must pay clearly and not soon after the last change: in
    t seconds the gate changes at most ``2 (t / dwell_s + 1)`` times. A load that sits on the threshold opens and closes it for
    ever, so after an opening that was regretted within `CALM_S` the dwell is `CALM_S`, which leaves one opening and one closing
    per minute; it stays the short one where opening pays greatly, as when the load has gone.

    Opening also makes the draft catch up with every request. Nobody knows for how long it will pay then, so it is bought when
    what has been forgone by not having it comes to its price: the rule of the ski rental, never more than twice as expensive as
    knowing the future (Karlin, Manasse, Rudolph and Sleator 1988, "Competitive snoopy caching").
    """

    dwell_s: float
    margin: float = 0.5
    """In draft positions: the price must be so low that a position this much deeper than the first would still pay."""
    great_margin: float = 2.0
    """The same for paying greatly."""

    def step(
        self, price: float, alpha: float, memory: GateMemory, now_s: float, redeemed_s: float = 0.0
    ) -> tuple[bool, GateMemory]:
        """Decide whether requests of acceptance ``alpha`` speculate at ``price``; returns (open, new memory)."""
        clearly, greatly = (price < alpha ** (1 + margin) for margin in (self.margin, self.great_margin))
        return self.step_by(price < alpha, clearly, greatly, memory, now_s, redeemed_s)

    def step_by(
        self, pays: bool, clearly: bool, greatly: bool, memory: GateMemory, now_s: float, redeemed_s: float = 0.0
    ) -> tuple[bool, GateMemory]:
        """Stay open while it ``pays``; open when it pays ``clearly`` and long enough; returns (open, new memory).

        ``greatly``: the dwell is the short one. ``redeemed_s``: seconds after which the gain of being open comes to the price
        of opening, infinite where there is no gain.

        After a clock that went backwards the waiting starts again, so that it ends; without a valid time the gate cannot open.
        """
        if not math.isfinite(now_s):
            now_s = memory.changed_at_s
        if now_s < max(memory.changed_at_s, memory.pays_since_s or -math.inf):
            memory = GateMemory(memory.is_open, now_s, is_wary=memory.is_wary)
        since_s = now_s - memory.changed_at_s
        if memory.is_open:
            return pays, memory if pays else GateMemory(False, now_s, is_wary=since_s < CALM_S)
        if not clearly:
            return False, msgspec.structs.replace(memory, pays_since_s=None)
        pays_since_s = now_s if memory.pays_since_s is None else memory.pays_since_s
        has_dwelt = since_s >= (CALM_S if memory.is_wary and not greatly else self.dwell_s)
        if has_dwelt and now_s - pays_since_s >= redeemed_s:
            return True, GateMemory(True, now_s)
        return False, msgspec.structs.replace(memory, pays_since_s=pays_since_s)
