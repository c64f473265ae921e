"""Acceptance rules: pure functions (draft, target's distribution, noise) -> verdict. `RULES` lists them by name."""

from engine.accept.base import RULES, Drafts, Rule, Verdicts
from engine.accept.coupled import coupled
from engine.accept.greedy import greedy
from engine.accept.rejection import DraftProbs, rejection

__all__ = ["RULES", "DraftProbs", "Drafts", "Rule", "Verdicts", "coupled", "greedy", "rejection"]
