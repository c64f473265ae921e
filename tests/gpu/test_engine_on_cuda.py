"""The engine on a CUDA device; skipped where there is none."""

import pytest
import torch

from engine.build import build_local_engine
from engine.config import parse_config
from engine.scheduler import FixedDepth
from engine.types import GenerateRequest, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("source", ["ngram", "self-int8"])
def test_greedy_text_with_drafts_equals_plain_text(source: str) -> None:
    """Bug guarded: a paged kernel that aligns the causal mask of several query rows otherwise than that of one.

    In float32, where two best tokens that are closer than the rounding error are rare.
    """
    config = parse_config({"target": {"device": "cuda", "dtype": "float32"}, "draft": {"source": source, "device": "cuda"}})
    engine = build_local_engine(config)
    prompt = tuple(engine.encode("Count: one two three one two three one two three", chat=False))
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)

    def text(depth: int) -> list[int]:
        request = GenerateRequest(request_id=f"depth-{depth}", prompt_ids=prompt, params=params)
        return [token for delta in engine.generate([request], FixedDepth(depth)) for token in delta.token_ids]

    plain = text(0)
    for depth in (1, 4, 8):
        assert text(depth) == plain
