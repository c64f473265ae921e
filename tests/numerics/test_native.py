"""The compiled kernels: the same map as transformers', the same bits in every batch, and torch's operations where they fail."""

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from engine.models import LoadedModel
from engine.verify.attention import Chunk
from engine.verify.kv_cache import CachedSequence, KVCache
from engine.verify.native import build
from engine.verify.native.build import NoKernels, kernels, load, openmp_runtime
from engine.verify.native.model import NativeModel, quantised, shares_blocks
from engine.verify.ragged import RaggedModel

VOCAB = 97
NUM_BLOCKS, BLOCK_SIZE = 64, 64
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # widths that fill no panel, biases; heads per key head that make one block, two, and a rest; windows; norms of heads
    "one head per key head": ("llama", {"hidden_size": 66, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}),
    "three heads per key head": (
        "llama",
        {"hidden_size": 66, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    ),
    "seven heads per key head": ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16}),
    "wide heads": (
        "llama",
        {"hidden_size": 76, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "attention_bias": True},
    ),
    "heads of 96": (
        "llama",
        {"hidden_size": 66, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 96, "mlp_bias": True},
    ),
    "a window": ("mistral", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 70}),
    "head norms": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 80}),
}


@pytest.fixture(scope="module", autouse=True)
def _needs_kernels() -> None:
    if kernels() is None:
        pytest.skip("no C compiler, or no AVX-512: torch's operations run here")


def random_model(shape: str = "a window", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model of odd widths, without a parameter that is 0 or 1."""
    torch.manual_seed(5)
    family, sizes = SHAPES[shape]
    sizes = {"hidden_size": 71, "intermediate_size": 45, "num_hidden_layers": 2, "max_position_embeddings": 2048, **sizes}
    config = transformers.AutoConfig.for_model(
        family, **{"vocab_size": VOCAB, "eos_token_id": 2, "initializer_range": 0.2, **sizes, **changes}
    )
    config.architectures = [family]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False).add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(
        name="random",
        tokenizer=None,
        config=model.config,
        eos_token_ids=(2,),
        vocab_size=VOCAB,
        max_context=256,
        fingerprint="random",
        model=model,
        dtype=model.dtype,
        dtype_reason="test",
        device=torch.device("cpu"),
    )


def native(model: Any, dtype: torch.dtype | None = None) -> NativeModel:
    library = kernels()
    assert library is not None
    return NativeModel(model, dtype or model.dtype, library, model.config.max_position_embeddings)


def scattered(*lengths: int) -> list[CachedSequence]:
    """Sequences whose blocks lie in a random order among each other's."""
    free: list[int] = torch.randperm(NUM_BLOCKS).tolist()
    return [CachedSequence(blocks=[free.pop() for _ in range(-(-length // BLOCK_SIZE))]) for length in lengths]


def random_ids(count: int) -> list[int]:
    ids: list[int] = torch.randint(3, VOCAB, (count,)).tolist()
    return ids


@torch.inference_mode()
def run(model: NativeModel, cache: KVCache, *steps: tuple[CachedSequence, list[int]]) -> list[Tensor]:
    """One forward; logits of all new tokens, per sequence."""
    logits = model.forward(cache, [Chunk(sequence, ids, len(ids)) for sequence, ids in steps])
    for sequence, ids in steps:
        sequence.ids.extend(ids)
    return list(logits.split([len(ids) for _, ids in steps]))


def run_in_chunks(model: NativeModel, texts: list[list[int]]) -> list[Tensor]:
    """Logits of whole texts, computed in ragged steps of random sizes."""
    cache, sequences = KVCache(NUM_BLOCKS, BLOCK_SIZE), scattered(*map(len, texts))
    parts: list[list[Tensor]] = [[] for _ in texts]
    while any(len(s.ids) < len(t) for s, t in zip(sequences, texts, strict=True)):
        left = [i for i, (s, t) in enumerate(zip(sequences, texts, strict=True)) if len(s.ids) < len(t)]
        counts = torch.randint(1, 40, (len(left),)).tolist()
        steps = [(sequences[i], texts[i][len(sequences[i].ids) :][:n]) for i, n in zip(left, counts, strict=True)]
        for i, rows in zip(left, run(model, cache, *steps), strict=True):
            parts[i].append(rows)
    return [torch.cat(rows) for rows in parts]


def plain_logits(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def largest_error(model: Any, expected: Any, dtype: torch.dtype | None = None) -> float:
    """Of logits in ragged chunks, relative to the largest one that ``expected`` gives for whole texts."""
    texts = [random_ids(n) for n in (150, 3, 90)]
    reference = [plain_logits(expected, ids) for ids in texts]
    got = run_in_chunks(native(model, dtype), texts)
    differences = [(a - b).abs().max() for a, b in zip(got, reference, strict=True)]
    return float(torch.stack(differences).max() / torch.cat(reference).abs().max())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_compute_what_transformers_does(shape: str) -> None:
    """Bug guarded: a panel, group or vector that is not full, a head, bias, norm, window or page that is lost or mixed up."""
    model = random_model(shape)
    assert largest_error(model, model) < 1e-5


def test_the_rotation_is_not_looked_up_behind_the_limit() -> None:
    """Bug guarded: frequencies that change, for all positions, when tables are made longer than the model's context."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = random_model("one head per key head", rope_parameters=parameters, max_position_embeddings=160)
    assert largest_error(model, model) < 1e-5


@pytest.mark.parametrize("shape", ["seven heads per key head", "wide heads", "head norms"])
def test_bfloat16_weights_lose_nothing_but_the_cache(shape: str) -> None:
    """Bug guarded: the halves of a pair of bfloat16 exchanged, or rounding where the activations should stay float32."""
    model = random_model(shape, torch.bfloat16)
    assert largest_error(model, random_model(shape, torch.bfloat16).float()) < 0.02


@pytest.mark.parametrize("shape", ["seven heads per key head", "wide heads", "head norms"])
def test_int8_is_the_rounded_weights_exactly(shape: str) -> None:
    """Bug guarded: a scale, an offset or a byte plane that belongs to another output, input or row."""
    model, rounded = random_model(shape), random_model(shape, tie_word_embeddings=False)
    for layer in rounded.modules():
        if isinstance(layer, torch.nn.Linear):
            weight, scale = quantised(layer.weight)
            layer.weight = torch.nn.Parameter(weight * scale[:, None], requires_grad=False)
    assert largest_error(model, rounded, torch.int8) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", ["three heads per key head", "a window"])
def test_rows_have_the_same_bits_in_any_batch(shape: str, dtype: torch.dtype) -> None:
    """Bug guarded: sums whose order depends on the number of rows, sequences or threads, or on where the pages are.

    Tolerance 0; contexts cross several tiles, and step sizes all numbers of rows that have code of their own.
    """
    model = native(random_model(shape, torch.float32 if dtype == torch.int8 else dtype), dtype)
    text = random_ids(240)
    cache = KVCache(NUM_BLOCKS, BLOCK_SIZE)
    (whole,) = run(model, cache, (scattered(240)[0], text))
    alone, mixed, *others = scattered(240, 240, 300, 300)
    run(model, cache, (alone, text[:180]))
    run(model, cache, (others[0], random_ids(30)), (mixed, text[:7]), (others[1], random_ids(1)))
    run(model, cache, (mixed, text[7:180]))
    torch.set_num_threads(1)
    assert torch.equal(torch.cat([run(model, cache, (alone, [token]))[0] for token in text[180:210]]), whole[180:210])
    torch.set_num_threads(2)
    for count in (*range(1, 15), 16, 17, 24, 25, 33):
        del alone.ids[180:], mixed.ids[180:]
        assert torch.equal(run(model, cache, (alone, text[180 : 180 + count]))[0], whole[180 : 180 + count])
        step = [(others[0], random_ids(count % 4 + 1)), (mixed, text[180 : 180 + count]), (others[1], random_ids(2))]
        assert torch.equal(run(model, cache, *step)[1], whole[180 : 180 + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("infinite", [torch.nan, torch.inf])
def test_a_spoilt_row_stays_alone(dtype: torch.dtype, infinite: float) -> None:
    """Bug guarded: 0 × NaN. Rows before it, other sequences, and pages that held it must not see it; its own row must."""
    model = random_model(tie_word_embeddings=False)
    model.model.embed_tokens.weight[VOCAB - 1] = infinite
    forward, cache = native(model, dtype), KVCache(NUM_BLOCKS, BLOCK_SIZE)
    first, second, third = scattered(128, 128, 128)
    ids, other = random_ids(30), random_ids(9)
    expected, other_expected = run(forward, cache, (first, ids), (second, other))
    del first.ids[:], second.ids[:]
    rows, other_rows = run(forward, cache, (first, [*ids, VOCAB - 1, 3]), (second, other))
    assert rows[30:].isnan().all()
    assert torch.equal(rows[:30], expected)
    assert torch.equal(other_rows, other_expected)
    third.blocks = first.blocks  # not wiped
    assert torch.equal(run(forward, cache, (third, ids))[0], expected)


@torch.inference_mode()
def test_blocks_that_change_hands_are_wiped_for_torch_only() -> None:
    """Bug guarded: padding that reads the NaN of a block's last owner; or a pass over all layers for every new block, although
    the kernels read nothing that is not written."""
    model, cache = native(random_model()), KVCache(NUM_BLOCKS, BLOCK_SIZE)
    cache.layer(0, torch.zeros(2, 0, 16), torch.zeros(2, 0, 16)).parts[0].fill_(torch.nan)
    cache.reserve(CachedSequence(), 1)
    assert cache.layers[0].parts[0][:, :BLOCK_SIZE].eq(0).all()
    used = KVCache(NUM_BLOCKS, BLOCK_SIZE)
    run(model, used, (scattered(64)[0], random_ids(5)))
    used.layers[0].parts[0].fill_(torch.nan)
    used.reserve(CachedSequence(), 1)
    assert used.layers[0].parts[0].isnan().all()


def test_keys_are_placed_first_where_sequences_share_a_block() -> None:
    """Bug guarded: of two equal prompts in one forward the second reads keys of the first that are not written yet."""
    assert not shares_blocks(np.array([3, 4, 9], dtype=np.int32))
    assert shares_blocks(np.array([3, 4, 9, 4], dtype=np.int32))


def test_rows_without_logits_are_computed_for_the_cache_only() -> None:
    """Bug guarded: a step that wants no logits, or those of some rows only, and gets the wrong ones or none."""
    model = native(random_model())
    cache, (first, second) = KVCache(NUM_BLOCKS, BLOCK_SIZE), scattered(64, 64)
    text = random_ids(20)
    (expected,) = run(model, cache, (second, text))
    model.forward(cache, [Chunk(first, text[:10], 0)])
    first.ids.extend(text[:10])
    assert torch.equal(model.forward(cache, [Chunk(first, text[10:], 2)]), expected[-2:])


# --- where they cannot be had -----------------------------------------------------------------------------------------------


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RaggedModel, "_measure_step_times", lambda self: ())


@pytest.mark.usefixtures("_quick")
def test_the_kernels_run_by_default() -> None:
    """Bug guarded: a check that refuses right kernels, which nobody would notice but by the clock."""
    assert RaggedModel(loaded(random_model()), kv_capacity_tokens=512).network == "native"
    assert RaggedModel(loaded(random_model()), kernels="torch", kv_capacity_tokens=512).network == "dense"


@pytest.mark.usefixtures("_quick")
def test_without_a_compiler_torch_runs_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Bug guarded: a start that fails, or is slow in silence, on a machine without a compiler."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        networks = [RaggedModel(loaded(random_model()), kv_capacity_tokens=512).network for _ in range(2)]
    kernels.cache_clear()
    assert networks == ["dense", "dense"]
    assert caplog.text.count("there is no C compiler (gcc or cc on the PATH)") == 1


def test_a_failing_compiler_is_named_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug guarded: half a library that the next start loads; an error that does not say what the compiler said."""
    broken = tmp_path / "broken.c"
    broken.write_text("#error this compiler is too old\n")
    monkeypatch.setattr(build, "SOURCES", (broken,))
    with pytest.raises(NoKernels, match="this compiler is too old"):
        load(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_compiler_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug guarded: a start that waits for ever."""
    monkeypatch.setattr(build, "TIMEOUT_S", 0.001)
    with pytest.raises(NoKernels, match="did not finish within"):
        load(tmp_path)


def test_compiled_once_and_with_the_threads_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bug guarded: a compiler run at every start; a second OpenMP library, whose threads spin against torch's."""
    before = mapped_openmp()
    load(tmp_path)
    assert mapped_openmp() == before
    assert str(openmp_runtime()) in before

    def never(*args: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_compile", never)
    load(tmp_path)


def mapped_openmp() -> set[str]:
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}


@pytest.mark.usefixtures("_quick")
def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: trusting compiled code because it was compiled (here: the window is forgotten)."""
    monkeypatch.setattr("engine.verify.native.model.window_size", lambda config, layer: None)
    model = RaggedModel(loaded(random_model(sliding_window=8)), kv_capacity_tokens=512)
    assert model.network == "dense"
    assert "the native forward is off by" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "changes"), [(torch.float16, {}), (torch.float32, {"head_dim": 8}), (torch.float32, {"hidden_act": "gelu"})]
)
def test_what_the_kernels_have_no_form_for_is_left_to_torch(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Bug guarded: vectors read past the end of a head, or bits read as a dtype that they are not."""
    assert NativeModel.supports(random_model())
    assert not NativeModel.supports(random_model(dtype=dtype, **changes))
