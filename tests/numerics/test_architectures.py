"""Every family by its own path: logits as in the plain forward, whatever was accepted and rejected before."""

import time

import pytest
import torch
from tiny_models import CROPPED, FAMILIES, NEVER_ALONE, ONE_BY_ONE, PATHS, REPLAYED, plain_logits, random_ids, tiny_model
from torch import Tensor

from engine.errors import ModelError
from engine.models import LoadedModel
from engine.verify.attention import Chunk
from engine.verify.blocks import CachedSequence
from engine.verify.load import EngineModel, load_engine_model
from engine.verify.ragged import RaggedModel
from engine.verify.stateful import SequenceState, StatefulModel

TOLERANCE = 1e-4
"""Of a logit, absolute. Half a unit in the last place of every weight moves the plain logits of these models by up to 1e-4."""
LENGTH = 60
"""Of every text; windows and chunks of attention are 8 wide."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring step times takes longer than the tests, and at this size a second thread only waits."""
    torch.set_num_threads(1)
    for model in (RaggedModel, StatefulModel):
        monkeypatch.setattr(model, "_measure_step_times", lambda self: ())


def texts_and_logits(loaded: LoadedModel, length: int, count: int = 3) -> list[tuple[list[int], Tensor]]:
    texts = [random_ids(length) for _ in range(count)]
    return [(text, plain_logits(loaded.model, text)) for text in texts]


def largest_error(model: EngineModel, expected: list[tuple[list[int], Tensor]], longest_step: int = 11) -> float:
    """Largest difference of a logit while all texts are taken in together, in random steps, a part of which is rejected."""
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    sequences = [CachedSequence() for _ in expected]
    length = len(expected[0][0])
    while any(len(sequence.ids) < length for sequence in sequences):
        accepted = torch.randint(1, longest_step + 1, (len(sequences),), generator=generator)
        rejected = torch.randint(0, 7, (len(sequences),), generator=generator)
        single = torch.rand(len(sequences), generator=generator) < 0.4  # without a draft
        steps = []
        counts = torch.where(single, 1, accepted).tolist()
        wrongs = torch.where(single, 0, rejected).tolist()
        for sequence, (text, logits), count, wrong in zip(sequences, expected, counts, wrongs, strict=True):
            if len(sequence.ids) < length:
                start, end = len(sequence.ids), min(len(sequence.ids) + count, length)
                ids = text[start:end] + random_ids(wrong)
                model.cache.reserve(sequence, len(ids))
                steps.append((Chunk(sequence, ids, len(ids)), end, logits[start:end]))
        results = model.forward([chunk for chunk, *_ in steps]).split([len(chunk.ids) for chunk, *_ in steps])
        for (chunk, end, logits), rows in zip(steps, results, strict=True):
            worst = max(worst, float((rows[: len(logits)] - logits).abs().max()))
            model.cache.truncate(chunk.sequence, end)
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_what_was_rejected(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a mask, position, window, cap, sink or state that is lost on the way, rows at the wrong request, tokens of a
    rejected draft that stay visible; a family that falls to a slower path, or to none, after an upgrade of transformers.
    """
    started = time.perf_counter()
    loaded = tiny_model(family)
    expected = texts_and_logits(loaded, LENGTH)
    model = load_engine_model(loaded, kv_capacity_tokens=1024)
    error = largest_error(model, expected)
    info = model.info
    with capsys.disabled():
        print(f"\n{family:18} {info.path:8} largest error {error:.1e}, {time.perf_counter() - started:.1f} s", end="")
    assert info.path == PATHS[family]
    assert info.max_draft_depth == (0 if family in ONE_BY_ONE else None)
    assert ("cropping" in info.path_reason) == (family in CROPPED)
    assert ("copies" in info.path_reason) == (family in REPLAYED)
    assert ("beside a filler" in info.path_reason) == (family in NEVER_ALONE)
    assert error < TOLERANCE


@pytest.mark.parametrize(
    "family",
    ["mistral", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "phi3", "cohere2", "starcoder2", "llama4_text", "gpt_neo"],
)
def test_far_beyond_the_window(family: str) -> None:
    """Bug guarded: a cache of just the window's size, in which rejected tokens take the place of tokens that come back into it;
    windows that are lost where the cache begins another block.
    """
    loaded = tiny_model(family)
    expected = texts_and_logits(loaded, 240, count=2)
    model = load_engine_model(loaded, kv_capacity_tokens=1024)
    assert largest_error(model, expected, longest_step=30) < TOLERANCE


def test_falcon_with_alibi() -> None:
    """Bug guarded: biases by distance that are counted from the start of a pack instead of the sequence."""
    loaded = tiny_model("falcon", alibi=True, multi_query=False)
    expected = texts_and_logits(loaded, LENGTH)
    assert largest_error(load_engine_model(loaded, kv_capacity_tokens=1024), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["bloom", "falcon_h1"])
def test_a_rollback_that_is_forgotten_shows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the first test: without cropping or restoring, logits differ by far more than its tolerance."""
    loaded = tiny_model(family)
    expected = texts_and_logits(loaded, LENGTH)
    model = load_engine_model(loaded, kv_capacity_tokens=1024)

    def forget(state: SequenceState, length: int) -> bool:
        state.length = length
        return True

    monkeypatch.setattr(SequenceState, "roll_back", forget)
    assert largest_error(model, expected) > 1000 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("recurrent_gemma", {"attention_window_size": 8, "lru_width": 32, "block_types": ["recurrent", "attention"]}),
        ("rwkv", {"attention_hidden_size": 32, "context_length": 256}),
    ],
)
def test_states_that_cannot_be_kept_apart_are_refused_by_name(
    family: str, changes: dict[str, object], dtype: torch.dtype
) -> None:
    """Bug guarded: a model that keeps its state in itself, or that ignores the cache it is given, and is served anyway; in
    bfloat16 too, where the check must allow for much.
    """
    with pytest.raises(ModelError, match=f"tiny-{family}: the architecture {family} is not supported yet: with a cache per"):
        load_engine_model(tiny_model(family, dtype, **changes), kv_capacity_tokens=1024)


@pytest.mark.parametrize(("family", "spread"), [("jamba", 0.02), ("jamba", 0.1), ("mamba", 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_ignore_the_state_are_told_from_rounding(family: str, spread: float, dtype: torch.dtype) -> None:
    """Bug guarded: a mixed model whose state-space layers forget the past in steps of several tokens, which changes logits by
    less than bfloat16's tolerance.
    """
    loaded = tiny_model(family, dtype, initializer_range=spread)
    assert load_engine_model(loaded, kv_capacity_tokens=1024).info.max_draft_depth == 0


def test_context_ends_where_llama4_sharpens_attention() -> None:
    """Bug guarded: Llama 4 scales queries by their place in the forward, which in a pack is not their position."""
    loaded = tiny_model("llama4_text", attn_temperature_tuning=True, floor_scale=50)
    assert load_engine_model(loaded, kv_capacity_tokens=256).info.max_context == 49
