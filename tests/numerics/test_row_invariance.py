"""A row's logits have the same bits in every batch, with zero tolerance; and what happens where they have not."""

import logging
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor, nn

from engine import build
from engine.config import parse_config
from engine.models import LoadedModel, choose_dtype
from engine.propose.draft_model import DraftModel
from engine.types import SamplingParams, SequenceContext, Verdict, VerifyItem, VerifyRequest
from engine.verify.attention import AttentionSpec, Chunk
from engine.verify.attention.cpu import (
    PRODUCTS,
    WIDTH_STEP,
    Product,
    explicit_attention,
    explicit_by_rows,
    fused_attention,
    fused_by_rows,
    without_lone_row,
)
from engine.verify.kv_cache import CachedSequence
from engine.verify.linear import MAKERS, PackedLinear, PlainLinear
from engine.verify.native.build import kernels as compiled_kernels
from engine.verify.ragged import NEAR_TIE, RaggedModel
from engine.verify.target import Target

VOCAB = 97
NUM_PROMPT = 40
STEPS = range(1, 22)
MODELS = {
    # name: (family, query heads, key heads); the lean forward, then transformers' own with capped scores
    "one head per key head": ("llama", 4, 4),
    "three heads per key head": ("llama", 6, 2),
    "generic": ("gemma2", 4, 2),
}
BFLOAT16 = choose_dtype("auto", torch.device("cpu"))[0] == torch.bfloat16
DTYPES = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not BFLOAT16, reason="this CPU does not compute in bfloat16")),
]


def random_model(name: str, dtype: torch.dtype) -> LoadedModel:
    """A random model whose widths are those of kernels in earnest, though it is small."""
    family, num_heads, num_kv = MODELS[name]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=2,
        sliding_window=None if family == "llama" else 64,
    )
    config.architectures = [family]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    return LoadedModel(
        name=f"random-{family}",
        tokenizer=None,
        config=config,
        eos_token_ids=(2,),
        vocab_size=VOCAB,
        max_context=256,
        fingerprint="random",
        model=model.requires_grad_(False),
        dtype=dtype,
        dtype_reason="test",
        device=torch.device("cpu"),
    )


def random_ids(count: int) -> list[int]:
    ids: list[int] = torch.randint(3, VOCAB, (count,)).tolist()
    return ids


def run(model: RaggedModel, *steps: tuple[CachedSequence, list[int]]) -> list[Tensor]:
    """One packed forward; logits of all new tokens, per sequence."""
    chunks = [Chunk(sequence, ids, len(ids)) for sequence, ids in steps]
    for chunk in chunks:
        model.cache.reserve(chunk.sequence, len(chunk.ids))
    return list(model.forward(chunks).split([len(ids) for _, ids in steps]))


def differing_rows(model: RaggedModel) -> dict[str, set[int]]:
    """Steps whose rows have other bits than rows decoded one by one: alone, in a mixed batch, after a prompt in chunks."""
    text = random_ids(NUM_PROMPT + max(STEPS))
    prompt, rest = text[:NUM_PROMPT], text[NUM_PROMPT:]
    alone, chunked, others = CachedSequence(), CachedSequence(), [CachedSequence() for _ in range(3)]
    run(model, (alone, prompt))
    expected = torch.cat([run(model, (alone, [token]))[0] for token in rest])
    run(model, (chunked, prompt[:1]), (others[0], random_ids(90)))
    run(model, (others[1], random_ids(3)), (chunked, prompt[1:18]), (others[2], random_ids(31)))
    run(model, (chunked, prompt[18:]))
    different: dict[str, set[int]] = {"alone": set(), "mixed": set(), "chunked": set()}
    for count in STEPS:
        for way, sequence, company in (("alone", alone, 0), ("chunked", chunked, 0), ("mixed", chunked, 3)):
            model.cache.truncate(sequence, NUM_PROMPT)
            before = [(other, random_ids(1 + i)) for i, other in enumerate(others[:company])]
            rows = run(model, *before[:2], (sequence, rest[:count]), *before[2:])[len(before[:2])]
            if not torch.equal(rows, expected[:count]):
                different[way].add(count)
    return different


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times are of no interest here, and at this size a second thread only waits."""
    torch.set_num_threads(1)
    monkeypatch.setattr(RaggedModel, "_measure_step_times", lambda self: ())


@pytest.fixture
def _torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr("engine.verify.ragged.compiled_kernels", lambda: None)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_rows_have_the_same_bits_in_any_batch(
    name: str, dtype: torch.dtype, kernels: Literal["auto", "torch"], capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: a kernel whose sums depend on the batch, and with it the text on depth, load and chunking. Tolerance 0."""
    model = RaggedModel(random_model(name, dtype), numerics="invariant", kernels=kernels, kv_capacity_tokens=4096)
    with capsys.disabled():
        print(f"\n{name}, {model.network}, {dtype}: attention {model._attention}; {model.row_invariance.verdict}")
    assert model.row_invariance.holds
    assert (model.info.numerics, model.info.row_invariant) == ("invariant", True)
    assert differing_rows(model) == {"alone": set(), "mixed": set(), "chunked": set()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_quantised_target_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    """Bug guarded: activations quantised with one scale for several rows, which lets a neighbour reach a row's text."""
    target = Target(random_model(name, dtype), weights="int8", kv_capacity_tokens=4096)
    assert (target.info.dtype, target.info.row_invariant) == ("int8", True)
    assert differing_rows(target.model) == {"alone": set(), "mixed": set(), "chunked": set()}


def test_the_fast_kernels_differ_in_float32_and_the_probe_says_so() -> None:
    """Bug guarded: a comparison and a probe that always say yes; "fast" that pays for other kernels than the fastest."""
    model = RaggedModel(
        random_model("one head per key head", torch.float32), numerics="fast", kernels="torch", kv_capacity_tokens=4096
    )
    assert (model.info.numerics, model._attention) == ("fast", "fast")
    if not any(differing_rows(model).values()):
        pytest.skip("the fast float32 kernels of this CPU happen to be row-invariant")
    assert model.info.row_invariant is False
    assert "logits differ by" in model.info.row_invariance


# --- where it cannot be had -------------------------------------------------------------------------------------------------


class OneScaleForAllRows(PlainLinear):
    """Activations in 16 bits with one scale per matrix: each row is rounded by the largest one."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax() / 2**15
        return nn.functional.linear((x / scale).round() * scale, self.weight, self.bias)


@pytest.mark.usefixtures("_torch_only")
def test_a_model_that_is_not_invariant_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: a promise of equal text that the kernels do not keep, or a target that does not start without it."""
    monkeypatch.setitem(MAKERS, "exact", OneScaleForAllRows)
    with caplog.at_level(logging.WARNING, logger="engine.verify.target"):
        target = Target(random_model("one head per key head", torch.float32), kv_capacity_tokens=1024)
    assert (target.info.numerics, target.info.row_invariant) == ("fast", False)
    assert "logits differ by" in target.info.row_invariance
    assert "nor with invariant kernels" in target.info.row_invariance
    assert target.info.row_invariance in caplog.text
    assert target.near_tie_tolerance == NEAR_TIE[torch.float32]
    assert len(decode_one(target).tokens) == 1


def decode_one(target: Target) -> Verdict:
    context = SequenceContext(params=SamplingParams(temperature=0.0), prompt_length=3)
    item = VerifyItem(sequence_id="s", base_length=0, tokens=(3, 4, 5), context=context)
    return target.verify(VerifyRequest(round_id=0, items=(item,))).verdicts[0]


@pytest.mark.usefixtures("_torch_only")
def test_an_invariant_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: an invariant kernel that computes something else (here: attention to nothing), taken for being steady."""

    def nothing(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
        return torch.zeros(*query.shape[:2], values.shape[2])

    monkeypatch.setattr("engine.verify.ragged.probe", lambda *args, **sizes: fails_first())
    verdicts = iter([False, True, True])

    def fails_first() -> Any:
        from engine.verify.invariance import RowInvariance

        holds = next(verdicts)
        return RowInvariance(holds, f"holds: {holds}")

    monkeypatch.setitem(PRODUCTS, "invariant", (nothing, nothing))
    model = RaggedModel(random_model("one head per key head", torch.float32), numerics="invariant", kv_capacity_tokens=1024)
    assert (model.info.numerics, model.info.row_invariant, model._attention) == ("fast", False, "fast")


def test_without_a_difference_there_is_no_tolerance() -> None:
    """Bug guarded: divergences called near-ties on a target that has none."""
    target = Target(random_model("three heads per key head", torch.float32), kv_capacity_tokens=1024)
    assert target.info.row_invariant
    assert target.near_tie_tolerance == 0


def test_a_context_too_short_to_probe_is_no_verdict() -> None:
    """Bug guarded: "not invariant" or "invariant" said of a model on which nothing could be compared."""
    model = RaggedModel(
        random_model("one head per key head", torch.float32), numerics="invariant", kv_capacity_tokens=1024, max_context=32
    )
    assert (model.info.numerics, model.info.row_invariant) == ("fast", None)
    assert "too short" in model.info.row_invariance


def test_drafts_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a draft, which may say anything, that pays for steady kernels or for finding out."""

    def never(*args: Any, **sizes: Any) -> None:
        raise AssertionError("a draft was probed")

    monkeypatch.setattr("engine.verify.ragged.probe", never)
    info = DraftModel(random_model("one head per key head", torch.float32), kv_capacity_tokens=1024).info
    assert (info.numerics, info.row_invariant, info.row_invariance) == ("fast", None, "not probed")


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
def test_the_configuration_chooses_the_kernels(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: an option that is accepted and ignored."""
    chosen: list[str] = []
    monkeypatch.setattr(build, "_load", lambda *args: random_model("one head per key head", torch.float32))
    monkeypatch.setattr(RaggedModel, "_choose_kernels", lambda self, numerics, reference: chosen.append(numerics))
    build.build_target(parse_config({"target": {"numerics": numerics, "kv_cache_tokens": 1024, "num_threads": 1}}))
    assert chosen == [numerics]


@pytest.mark.parametrize(("kernels", "network"), [("auto", "native"), ("torch", "dense")])
def test_the_configuration_chooses_what_runs(kernels: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: an option that is accepted and ignored, by the target or by its copy."""
    if compiled_kernels() is None:
        pytest.skip("no C compiler, or no AVX-512: torch's operations run here")
    monkeypatch.setattr(build, "_load", lambda *args: random_model("one head per key head", torch.float32))
    section = {"kernels": kernels, "kv_cache_tokens": 1024, "num_threads": 1}
    config = parse_config({"target": section, "draft": {"num_threads": 1}})
    assert build.build_target(config).model.network == network
    assert build.build_draft_model(config).model.network == network


@pytest.mark.parametrize(("quantization", "dtype"), [("none", "float32"), ("int8", "int8")])
def test_the_configuration_chooses_the_weights(quantization: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: an option that is accepted and ignored."""
    monkeypatch.setattr(build, "_load", lambda *args: random_model("one head per key head", torch.float32))
    section = {"quantization": quantization, "kv_cache_tokens": 1024, "num_threads": 1}
    assert build.build_target(parse_config({"target": section, "draft": {"source": "ngram"}})).info.dtype == dtype


# --- kernels ----------------------------------------------------------------------------------------------------------------


def cancelling(*shape: int) -> Tensor:
    """Random [..., n] whose sum over n is 0 but for rounding errors, which depend on nothing but the order of summation."""
    half = torch.randn(*shape[:-1], shape[-1] // 2) * torch.exp2(torch.randint(-6, 6, (*shape[:-1], shape[-1] // 2)))
    return torch.cat([half, -half], dim=-1)


@pytest.mark.parametrize("make", [PlainLinear, PackedLinear])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_invariant_linear_is_the_same_map_for_any_number_of_rows(
    make: type[PlainLinear | PackedLinear], num_threads: int
) -> None:
    """Bug guarded: padding that reaches a result, a shape that is lost, and products that see how many rows there are."""
    torch.set_num_threads(num_threads)
    order = torch.randperm(576)
    x, weight, bias = cancelling(70, 576)[:, order], torch.randn(1, 288).repeat(96, 2)[:, order], torch.randn(96)
    if make is PackedLinear and not PackedLinear.supports(weight):
        pytest.skip("this build of torch does not pack weights")
    layer = make(weight, bias)
    layer.invariant = True
    whole = layer(x)
    exact = nn.functional.linear(x.double(), weight.double(), bias.double())
    assert torch.allclose(whole.double(), exact, atol=1e-2)
    for count in (*range(1, 35), 64, 65):
        assert torch.equal(layer(x[:count]), whole[:count])
        assert torch.equal(layer(x[None, 3 : 3 + count])[0], whole[3 : 3 + count])
        assert torch.equal(layer.add_to(torch.ones(count, 96), x[:count]), whole[:count] + 1)


def attend_alike(product: Product, keys_values: Tensor, batch: int, num_rows: int, width: int) -> Tensor:
    """Attention of equal rows to the same keys and values [n, D], padded to ``width``; all rows [batch * num_rows, D]."""
    num_keys, size = keys_values.shape
    padded = torch.zeros(batch, width, size)
    padded[:, :num_keys] = keys_values
    query = without_lone_row(torch.linspace(-1, 1, size).expand(batch, num_rows, size))
    mask = torch.zeros(1, query.shape[1], width)
    mask[..., num_keys:] = -torch.inf
    return product(query, padded, padded, mask, AttentionSpec(1e-3))[:, :num_rows].flatten(0, 1)


def distinct_results(product: Product, count: int) -> int:
    """How many different results the same sum has over batches, numbers of rows and paddings."""
    values = cancelling(64, count).T[torch.randperm(count)]
    step = -(-count // WIDTH_STEP) * WIDTH_STEP
    rows = [
        attend_alike(product, values, batch, num_rows, width)
        for batch in (1, 3)
        for num_rows in (1, 2, 3, 16, 17, 34, 65)
        for width in (step, step + WIDTH_STEP, step + 8 * WIDTH_STEP)
    ]
    return len(torch.cat(rows).unique(dim=0))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("product", [fused_by_rows, explicit_by_rows])
@pytest.mark.parametrize("count", [60, 1000])
def test_invariant_attention_sums_in_one_order_in_float32(product: Product, count: int, num_threads: int) -> None:
    """Bug guarded: sums over keys that depend on how many rows, sequences and padded keys come along."""
    torch.set_num_threads(num_threads)
    assert distinct_results(product, count) == 1


@pytest.mark.parametrize("product", [fused_attention, explicit_attention])
def test_fast_attention_does_not_in_float32(product: Product) -> None:
    """Negative control of the test above."""
    if distinct_results(product, 1000) == 1:
        pytest.skip("this CPU's fast kernels happen to sum in one order")


@pytest.mark.parametrize("num_rows", [1, 16, 33])
def test_invariant_attention_is_attention(num_rows: int) -> None:
    """Bug guarded: a mask, a sink or a value that ends up at another block of rows."""
    query, keys, values = torch.randn(2, num_rows, 8), torch.randn(2, 128, 8), torch.randn(2, 128, 8)
    mask = torch.zeros(2, num_rows, 128).masked_fill_(torch.rand(2, num_rows, 128) < 0.5, -torch.inf)
    plain, sinks = AttentionSpec(0.3), AttentionSpec(0.3, sinks=torch.randn(2, num_rows, 1))
    expected = fused_attention(query, keys, values, mask, plain)
    assert torch.allclose(fused_by_rows(query, keys, values, mask, plain), expected, atol=1e-5)
    assert torch.allclose(explicit_by_rows(query, keys, values, mask, plain), expected, atol=1e-5)
    expected = explicit_attention(query, keys, values, mask, sinks)
    assert torch.allclose(explicit_by_rows(query, keys, values, mask, sinks), expected, atol=1e-5)
    expected = fused_attention(query, keys, values, None, plain)
    assert torch.allclose(fused_by_rows(query, keys, values, None, plain), expected, atol=1e-5)
    assert torch.allclose(explicit_by_rows(query, keys, values, None, plain), expected, atol=1e-5)
