"""Acceptance rules: pure functions (draft, target's distribution, randomness) -> verdict. `RULES` lists them by name."""

from engine.accept.base import RULES, DraftProbs, Drafts, Draw, Rule, TargetProbs, Verdicts
from engine.accept.block import block
from engine.accept.coupled import coupled
from engine.accept.greedy import greedy
from engine.accept.rejection import rejection

__all__ = [
    "RULES",
    "DraftProbs",
    "Drafts",
    "Draw",
    "Rule",
    "TargetProbs",
    "Verdicts",
    "block",
    "coupled",
    "greedy",
    "rejection",
]
