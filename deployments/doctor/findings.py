"""What a rule says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``advice`` is empty where there is nothing to do."""

    level: Level
    check: str
    seen: str
    advice: str = ""


def ok(check: str, seen: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", check, seen)


def warning(check: str, seen: str, advice: str) -> Finding:
    """It works, but worse than it could."""
    return Finding("warning", check, seen, advice)


def problem(check: str, seen: str, advice: str) -> Finding:
    """Something is broken, or costs more than it brings."""
    return Finding("problem", check, seen, advice)


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level; ok for none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")
