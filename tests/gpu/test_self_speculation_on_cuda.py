"""Quantised copies and windows on a GPU; skipped where there is none. Not run on one yet."""

import pytest
import torch
from test_row_invariance_on_cuda import random_ids, random_model
from torch import nn

from engine.propose.draft_model import DraftModel
from engine.propose.self_speculation import FP8_CAPABILITY, build_self_copy
from engine.propose.window import ContextWindow
from engine.types import ProposeItem, ProposeRequest, SamplingParams, SequenceContext
from engine.verify.linear import MAKERS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY
KINDS = ["int4", pytest.param("fp8", marks=pytest.mark.skipif(not HAS_FP8, reason="no float8 on this GPU"))]


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("shape", [(96, 160), (50, 48)])
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_quantised_layers_are_close_to_plain_ones(weights: str, shape: tuple[int, int], num_rows: int) -> None:
    """Bug guarded: nibbles in the order of the CPU's kernel, tiles that do not divide the inputs, scales of another row."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(shape, generator=generator).cuda(), torch.randn(shape[0], generator=generator).cuda()
    x = torch.randn(num_rows, shape[1], generator=generator).cuda().bfloat16()
    wanted = nn.functional.linear(x.float(), weight, bias)
    got = MAKERS[weights](weight.bfloat16(), bias.bfloat16()).forward(x).float()
    assert (got - wanted).norm() / wanted.norm() < {"int4": 0.15, "fp8": 0.08}[weights]


@pytest.mark.parametrize("source", ["self-int4", pytest.param("self-fp8", marks=KINDS[1].marks)])  # type: ignore[attr-defined]
def test_copies_draft(source: str) -> None:
    """Bug guarded: a layer that cannot be captured in a graph, or that the packed forward cannot run."""
    draft = build_self_copy(random_model(), source, kv_capacity_tokens=8192)
    assert len(_ask(draft, random_ids(40, 1))) == 4


def test_a_windowed_draft_of_a_long_text() -> None:
    """Bug guarded: positions that graphs take for places, or pages that were given back."""
    draft = DraftModel(random_model(), kv_capacity_tokens=4 * 256, window=ContextWindow(256, 4), catch_up_tokens=256)
    assert len(_ask(draft, random_ids(1500, 1))) == 4


def _ask(draft: DraftModel, prompt: list[int]) -> tuple[int, ...]:
    context = SequenceContext(params=SamplingParams(temperature=0.0, ignore_eos=True), prompt_length=len(prompt))
    base = 0
    while True:
        item = ProposeItem(sequence_id="a", base_length=base, tokens=tuple(prompt[base:]), depth=4, context=context)
        proposal = draft.propose(ProposeRequest(round_id=1, items=(item,))).proposals[0]
        if proposal.reason != "catching_up":
            assert proposal.reason is None
            return proposal.tokens
        base = proposal.known_length
