"""Stand-ins that are shipped: deterministic models over a few tokens, scripted drafts, emulated devices, a clock moved by hand.

`ScriptedTarget` needs no torch and knows only greedy; `TableModel` is a real (tiny) language model with logits that goes
through the same sampling and acceptance code as a real one; `PacedTarget` and `PacedDraft` take the time of devices that are
not here.
"""

from engine.testing.paced import PacedDraft, PacedTarget, paced_info
from engine.testing.profiles import Emulation, follow_emulation, is_emulated, parse_emulation
from engine.testing.scripted import FakeClock, NextToken, ScriptedDraft, ScriptedTarget, model_info
from engine.testing.table import TableModel

__all__ = [
    "Emulation",
    "FakeClock",
    "NextToken",
    "PacedDraft",
    "PacedTarget",
    "ScriptedDraft",
    "ScriptedTarget",
    "TableModel",
    "follow_emulation",
    "is_emulated",
    "model_info",
    "paced_info",
    "parse_emulation",
]
