"""Stand-ins that are shipped: deterministic models over a few tokens, scripted drafts, a clock that is moved by hand.

`ScriptedTarget` needs no torch and knows only greedy; `TableModel` is a real (tiny) language model with logits that goes
through the same sampling and acceptance code as a real one.
"""

from engine.testing.scripted import FakeClock, NextToken, ScriptedDraft, ScriptedTarget, model_info
from engine.testing.table import TableModel

__all__ = ["FakeClock", "NextToken", "ScriptedDraft", "ScriptedTarget", "TableModel", "model_info"]
