"""Under every rule, with every source of drafts, texts through whole rounds have exactly the target's joint distribution.

`NUM_TEXTS` texts of four tokens per case; the last three are one round of depth 2. Each case tests all marginals of the joint
distribution by chi-square against an enumeration in plain Python. For another choice of seeds the odds that any case of this
file fails by chance are at most `FALSE_ALARM` in all (Bonferroni over the cases here and over the marginals in `texts_p`), as
far as the chi-square distribution holds for cells of 5; with the fixed seeds the results never change. That the test sees the
errors that engines have really had is shown in test_wrong_rules_table.py, by the same test at the same level.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from table_lane import BAD_DRAFT, DEPTH, GOOD_DRAFT, LEVEL, NUM_CASES, NUM_TEXTS, SETTINGS, TARGET, sample

from engine.propose.base import DraftSource
from engine.propose.ngram import NgramSource
from engine.testing import TableModel
from engine.types import Proposal, ProposeItem, ProposeReply, ProposeRequest


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tensors here are so small that a second thread only waits."""
    torch.set_num_threads(1)


LIKELY = TARGET.argmax(dim=1).tolist()


class Certain:
    """Drafts what follows most often in the target and sends no q: often right, always the same."""

    name = "certain"

    def propose(self, request: ProposeRequest) -> ProposeReply:
        return ProposeReply(round_id=request.round_id, proposals=tuple(self._proposal(item) for item in request.items))

    @staticmethod
    def _proposal(item: ProposeItem) -> Proposal:
        tokens = [LIKELY[item.tokens[-1]]]
        while len(tokens) < item.depth:
            tokens.append(LIKELY[tokens[-1]])
        return Proposal(
            sequence_id=item.sequence_id, tokens=tuple(tokens), known_length=item.base_length + len(item.tokens) - 1
        )


SOURCES: dict[str, Callable[[], DraftSource | None]] = {
    "no draft": lambda: None,
    "good draft": lambda: TableModel(GOOD_DRAFT),
    "bad draft": lambda: TableModel(BAD_DRAFT),
    "n-grams": lambda: NgramSource(),
    "certain": lambda: Certain(),
    "q of 1 token": lambda: TableModel(GOOD_DRAFT, num_probs=1),
    "q of 2 tokens": lambda: TableModel(GOOD_DRAFT, num_probs=2),
}
WITHOUT_Q = ["no draft", "good draft", "bad draft", "n-grams", "certain"]
PAIRS = [*(("coupled", source) for source in WITHOUT_Q), *itertools.product(["rejection", "block"], SOURCES)]
assert len(PAIRS) * len(SETTINGS) <= NUM_CASES
LOWEST_ACCEPTANCE = {
    "good draft": 0.5,
    "bad draft": 0.1,
    "n-grams": 0.1,
    "certain": 0.2,
    "q of 1 token": 0.2,
    "q of 2 tokens": 0.4,
}


@pytest.mark.parametrize(("rule", "source"), PAIRS)
def test_the_texts_have_the_targets_distribution(rule: str, source: str) -> None:
    """Bug guarded: any bias between proposing, accepting and resampling, including noise that is not independent: in particular
    noise that block verification used again when it tested a refused position once more (cases L05, L06)."""
    sampled = sample(rule, SETTINGS, SOURCES[source]())
    assert {name: result.p for name, result in sampled.items() if result.p <= LEVEL} == {}
    for result in sampled.values():
        if source != "no draft":
            assert LOWEST_ACCEPTANCE[source] < result.acceptance, "the draft is right often enough to test what is kept"
            assert result.num_drafted >= DEPTH * NUM_TEXTS
