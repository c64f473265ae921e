import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from engine.errors import ModelError
from engine.models import LoadedModel, choose_dtype
from engine.types import SamplingParams, SequenceContext, Verdict, VerifyItem, VerifyRequest
from engine.verify.attention import AttentionSpec, Chunk, MaskFunction, Window
from engine.verify.attention.cpu import (
    WIDTH_STEP,
    Size,
    explicit_attention,
    fused_attention,
    plan_groups,
    without_lone_row,
)
from engine.verify.kv_cache import CachedSequence, KVCache, affordable_blocks
from engine.verify.linear import Int8Linear, PackedLinear, PlainRMSNorm, replace_linears, replace_rms_norms
from engine.verify.ragged import RaggedModel
from engine.verify.target import Target

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # dense
    "llama": ("dense", {}),
    "mistral": ("dense", WINDOW),
    "qwen2": ("dense", {}),
    "qwen3": ("dense", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    # transformers' own forward: what each adds is in the comment
    "gemma2": ("generic", {**WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),  # softcap, 1 + weight norms
    "gemma3_text": ("generic", {**WINDOW, "query_pre_attn_scalar": 8}),  # two rotary tables
    "gpt_oss": ("generic", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),  # sinks, experts
    "mixtral": ("generic", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("generic", {**WINDOW, "num_local_experts": 4}),  # a window that only the mask knows
    "gpt2": ("generic", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}),  # learned positions, no nn.Linear
    "phi": ("generic", {"partial_rotary_factor": 0.5}),  # layer norm, parallel MLP
    "deepseek_v3": (  # values narrower than keys
        "generic",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4_text": ("generic", {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}),  # chunks
}


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    """A random model of a real architecture, small enough that a forward takes milliseconds."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, ("", {}))[1], **changes})
    config.architectures = [family]
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    for parameter in model.parameters():  # some initialise norms and biases to constants, which hides their absence
        parameter.requires_grad_(False).add_(0.1 * torch.randn_like(parameter))
    return LoadedModel(
        name=f"tiny-{family}",
        tokenizer=None,
        config=config,
        eos_token_ids=(2,),
        vocab_size=VOCAB,
        max_context=256,
        fingerprint="tiny",
        model=model,
        dtype=dtype,
        dtype_reason="test",
        device=torch.device("cpu"),
    )


def plain_logits(model: nn.Module, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].clone()


def random_ids(count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,)).tolist()


def run(model: RaggedModel, *steps: tuple[CachedSequence, list[int]]) -> list[Tensor]:
    """One packed forward; logits of all new tokens, per sequence."""
    chunks = [Chunk(sequence, ids, len(ids)) for sequence, ids in steps]
    for chunk in chunks:
        model.cache.reserve(chunk.sequence, len(chunk.ids))
    logits = model.forward(chunks)
    return list(logits.split([len(ids) for _, ids in steps]))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring step times takes longer than the tests, and at this size a second thread only waits."""
    torch.set_num_threads(1)
    monkeypatch.setattr(RaggedModel, "_measure_step_times", lambda self: ())


# --- the packed forward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_forward_equals_the_plain_one(family: str) -> None:
    """Guards: a mask, position, scale, cap, sink or window that is lost on the way through our attention; rows that end up at
    the wrong request; K and V of rejected tokens that stay visible.
    """
    loaded = tiny_model(family)
    texts = [random_ids(60) for _ in range(3)]
    expected = [plain_logits(loaded.model, ids) for ids in texts]
    scale = torch.cat(expected).abs().max()
    model = RaggedModel(loaded, kv_capacity_tokens=1024)
    assert model.network == FAMILIES[family][0]
    sequences = [CachedSequence() for _ in texts]
    generator = torch.Generator().manual_seed(1)
    while any(len(sequence.ids) < 60 for sequence in sequences):
        counts = torch.randint(1, 12, (3,), generator=generator).tolist()
        active = [(s, t, e, n) for s, t, e, n in zip(sequences, texts, expected, counts, strict=True) if len(s.ids) < 60]
        starts = [len(s.ids) for s, *_ in active]
        results = run(model, *[(s, t[len(s.ids) : len(s.ids) + n] + random_ids(3)) for s, t, _, n in active])
        for (sequence, text, logits, count), start, result in zip(active, starts, results, strict=True):
            end = min(start + count, 60)
            assert (result[: end - start] - logits[start:end]).abs().max() < 2e-5 * scale
            assert sequence.ids[start:end] == text[start:end]
            model.cache.truncate(sequence, end)


def test_an_architecture_that_cannot_be_packed_is_refused_by_name() -> None:
    """Guards: a recurrent model that mixes the states of different requests and is served anyway."""
    loaded = tiny_model("mamba", state_size=4, conv_kernel=3, time_step_rank=4)
    with pytest.raises(ModelError, match=r"tiny-mamba: the architecture mamba is not supported yet"):
        RaggedModel(loaded, kv_capacity_tokens=512)


def test_a_wrong_lean_forward_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: trusting the family's name when the weights give something else (here: the window is forgotten)."""
    monkeypatch.setattr("engine.verify.dense.window_size", lambda config, layer: None)
    model = RaggedModel(tiny_model("mistral"), kv_capacity_tokens=512)
    assert model.network == "generic"


def test_sequences_of_very_different_size_in_one_step() -> None:
    """Guards: padding rows or columns of one group leaking into another; results returned in the order of packing."""
    loaded = tiny_model()
    texts = [random_ids(n) for n in (200, 3, 90, 1, 40)]
    expected = [plain_logits(loaded.model, ids) for ids in texts]
    model = RaggedModel(loaded, kv_capacity_tokens=2048)
    sequences = [CachedSequence() for _ in texts]
    run(model, *[(s, t[:-1]) for s, t in zip(sequences, texts, strict=True) if len(t) > 1])
    results = run(model, *[(s, t[len(s.ids) :]) for s, t in zip(sequences, texts, strict=True)], (CachedSequence(), texts[0]))
    for result, logits in zip(results, [*expected, expected[0]], strict=True):
        assert torch.allclose(result, logits[-len(result) :], atol=1e-4)


def test_groups_bound_the_padding() -> None:
    """Guards: a long prompt that pads every decoding request to its own size; groups that lose or repeat a request."""
    sizes = [Size(1, 40), Size(512, 512), Size(1, 45), Size(4, 50), Size(1, 8000)]
    groups = plan_groups(sizes)
    assert sorted(index for group in groups for index in group) == [0, 1, 2, 3, 4]
    assert {frozenset(group) for group in groups} == {frozenset({0, 2, 3}), frozenset({1}), frozenset({4})}


@torch.inference_mode()
def test_nan_in_one_sequence_stays_there() -> None:
    """Guards: 0 × NaN. Another request's padding, and whoever gets the blocks next, must not see a spoilt cache."""
    model = RaggedModel(tiny_model(), kv_capacity_tokens=256)
    spoilt, healthy, text = CachedSequence(), CachedSequence(), random_ids(40)
    run(model, (spoilt, random_ids(40)))
    for layer in model.cache.layers:
        for block in spoilt.blocks:
            layer.keys[:, block * 64 : block * 64 + 64] = torch.nan
            layer.values[:, block * 64 : block * 64 + 64] = torch.nan
    bad, good = run(model, (spoilt, random_ids(2)), (healthy, text[:3]))
    assert bad.isnan().any()
    assert good.isfinite().all()
    model.cache.truncate(spoilt, 0)
    newcomer = CachedSequence()
    model.cache.reserve(newcomer, 190)  # among them the spoilt blocks
    assert all(rows.isfinite().all() for rows in run(model, (newcomer, text[:5]), (healthy, text[3:])))


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 256),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 128),
        ({"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}, 64),
    ],
)
def test_context_ends_where_rotary_frequencies_would_change(parameters: dict[str, Any], limit: int) -> None:
    """Guards: one long request changing the frequencies, and so the text, of all others in the batch."""
    if parameters["rope_type"] == "longrope":
        parameters = {**parameters, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    loaded = tiny_model(rope_parameters=parameters, max_position_embeddings=128)
    assert RaggedModel(loaded, kv_capacity_tokens=256).max_context == limit


# --- row invariance ---------------------------------------------------------------------------------------------------------


needs_bfloat16 = pytest.mark.skipif(
    choose_dtype("auto", torch.device("cpu"))[0] != torch.bfloat16, reason="this CPU does not compute in bfloat16"
)


@needs_bfloat16
@pytest.mark.parametrize(("family", "width", "num_kv"), [("llama", 1152, 2), ("qwen3", 128, 4), ("gemma2", 128, 2)])
def test_rows_have_the_same_bits_in_any_batch(family: str, width: int, num_kv: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: any kernel whose sums depend on the shape of the batch. Then the text depends on load and speculation depth.

    Tolerance zero. The first model is wider than 1024, where oneDNN sums a lone row in another order; the second has one query
    head per key head, so that a lone token is a lone row in attention; the context crosses 1024.
    """
    sizes = {
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "initializer_range": 0.02,
    }
    loaded = tiny_model(family, torch.bfloat16, **sizes, max_position_embeddings=4096)
    loaded = LoadedModel(**{**vars(loaded), "max_context": 4096})
    model = RaggedModel(loaded, kernels="torch", kv_capacity_tokens=8192)
    probe = model.probe_row_invariance()
    with capsys.disabled():
        print(f"\n{family}, {model.network}: {probe.verdict}")
    assert probe.holds
    text = random_ids(1032)
    alone, chunked, mixed = CachedSequence(), CachedSequence(), CachedSequence()
    others = [CachedSequence(), CachedSequence(), CachedSequence()]
    run(model, (alone, text[:1012]))
    run(
        model,
        (chunked, text[:512]),
        *[(other, random_ids(length)) for other, length in zip(others, (30, 700, 1500), strict=True)],
    )
    run(model, (chunked, text[512:1012]), (mixed, text[:1012]))
    expected = torch.cat([run(model, (alone, [token]))[0] for token in text[1012:]])
    for count in (2, 5, 8, 16):
        for sequence in (chunked, mixed):
            model.cache.truncate(sequence, 1012)
        for start in range(0, 20, count):
            ids = text[1012 + start : 1012 + start + count]
            (rows,) = run(model, (chunked, ids))
            assert torch.equal(rows, expected[start : start + count])
            _, rows, *_ = run(model, (others[0], random_ids(1)), (mixed, ids), *[(o, random_ids(3)) for o in others[1:]])
            assert torch.equal(rows, expected[start : start + count])


def cancelling_values(count: int) -> Tensor:
    """bfloat16 [count, 64] whose sum is 0 but for rounding errors, which depend on nothing but the order of summation."""
    half = torch.randn(count // 2, 64) * torch.exp2(torch.randint(-6, 6, (count // 2, 64)))
    return torch.cat([half, -half])[torch.randperm(count)].bfloat16()


def weigh_equally(values: Tensor, num_rows: int, width: int, *, explicit: bool) -> Tensor:
    """Attention of ``num_rows`` equal rows to all values, padded to ``width`` keys; the last row of the result."""
    padded = torch.zeros(1, width, 64, dtype=torch.bfloat16)
    padded[0, : len(values)] = values
    query = without_lone_row(torch.zeros(1, num_rows, 64, dtype=torch.bfloat16))
    mask = torch.zeros(1, query.shape[1], width, dtype=torch.bfloat16)
    mask[..., len(values) :] = -torch.inf
    attend = explicit_attention if explicit else fused_attention
    return attend(query, torch.zeros_like(padded), padded, mask, AttentionSpec(0.125))[0, num_rows - 1]


@needs_bfloat16
@pytest.mark.parametrize(("count", "explicit"), [(60, False), (1000, False), (1500, False), (60, True), (1000, True)])
def test_attention_sums_in_one_order(count: int, explicit: bool) -> None:
    """Guards: sums over keys that depend on how many rows and padded keys come along."""
    values = cancelling_values(count)
    step = -(-count // WIDTH_STEP) * WIDTH_STEP
    results = [
        weigh_equally(values, rows, width, explicit=explicit)
        for rows in (1, 2, 3, 31, 32, 33, 65, 193, 200, 769)
        for width in (step, step + WIDTH_STEP, 2048)
    ]
    assert results[0].abs().max() > 0
    assert all(torch.equal(result, results[0]) for result in results)


@needs_bfloat16
def test_what_makes_attention_invariant_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: without each of the three measures a result differs, so the comparison can fail."""
    values = cancelling_values(1000)
    assert not torch.equal(
        weigh_equally(values, 2, 1000, explicit=False), weigh_equally(values, 2, 1024, explicit=False)
    )  # WIDTH_STEP
    monkeypatch.setattr("engine.verify.attention.cpu.TILE", 4096)
    assert not torch.equal(weigh_equally(values, 2, 1024, explicit=True), weigh_equally(values, 2, 2048, explicit=True))
    monkeypatch.setattr(f"{__name__}.without_lone_row", lambda rows: rows)
    assert not torch.equal(weigh_equally(values, 33, 1024, explicit=False), weigh_equally(values, 34, 1024, explicit=False))


@needs_bfloat16
def test_the_probe_sees_a_forward_that_is_not_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a probe that always says yes."""
    monkeypatch.setattr("engine.verify.linear._lone_row_differs", lambda *args: False)
    sizes = {"hidden_size": 1152, "intermediate_size": 4352, "head_dim": 64}
    loaded = tiny_model("llama", torch.bfloat16, **sizes)
    verdict = RaggedModel(loaded, kernels="torch", kv_capacity_tokens=512).probe_row_invariance()
    assert not verdict.holds
    assert "logits differ" in verdict.verdict


# --- the target -------------------------------------------------------------------------------------------------------------


def tiny_target(**changes: Any) -> Target:
    loaded = tiny_model()
    return Target(LoadedModel(**{**vars(loaded), **changes}), kv_capacity_tokens=1024)


def context(num_prompt: int, **params: Any) -> SequenceContext:
    return SequenceContext(params=SamplingParams(**{"temperature": 0.0, **params}), prompt_length=num_prompt)


def verify(target: Target, *items: VerifyItem, release: tuple[str, ...] = ()) -> list[Verdict]:
    reply = target.verify(VerifyRequest(round_id=3, items=items, release=release))
    assert reply.round_id == 3
    assert [verdict.sequence_id for verdict in reply.verdicts] == [item.sequence_id for item in items]
    return list(reply.verdicts)


def opening(sequence_id: str, ids: list[int], **fields: Any) -> VerifyItem:
    return VerifyItem(sequence_id=sequence_id, base_length=0, tokens=tuple(ids), **{"context": context(len(ids)), **fields})


def greedy_text(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(plain_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_greedy_text_is_the_models_own_whatever_the_drafts(depth: int) -> None:
    """Guards: a verdict read from the wrong row, K and V of a rejected token that stay, a length that is off by one."""
    prompt = random_ids(23)
    expected = greedy_text(tiny_model().model, prompt, 24)
    target = tiny_target()
    verify(target, opening("a", prompt[:10], sample=False), opening("other", random_ids(30)))
    known, ids, rejected = 10, list(prompt), 0
    while len(ids) < 47:
        position = len(ids) - len(prompt)
        draft = tuple(token if n % 3 else 3 for n, token in enumerate(expected[position : position + depth], start=position))
        item = VerifyItem(sequence_id="a", base_length=known, tokens=tuple(ids[known:]), draft=draft)
        (verdict,) = verify(target, item)
        assert verdict.tokens[:-1] == draft[: verdict.accepted]
        rejected += len(draft) - verdict.accepted
        known = len(ids) + verdict.accepted
        ids += verdict.tokens
    assert ids[23:47] == expected
    assert bool(rejected) == bool(depth)


def test_an_item_that_cannot_be_served_leaves_the_others_alone() -> None:
    """Guards: one bad request failing the round of the whole batch."""
    target = tiny_target()
    prompt = random_ids(9)
    expected = greedy_text(tiny_model().model, prompt, 1)
    answers = verify(
        target,
        opening("a", prompt),
        opening("id", [5, VOCAB]),
        opening("negative", [-1]),
        opening("empty", []),
        opening("draft", [5], draft=(6,), sample=False),
        opening("long", random_ids(257)),
        opening("full", random_ids(250), draft=tuple(random_ids(6))),
        opening("fuller", random_ids(256)),
        opening("fullest", random_ids(256)),
        opening("too much", random_ids(200)),
        opening("b", prompt),
    )
    assert [answer.tokens for answer in (answers[0], answers[-1])] == [tuple(expected)] * 2
    assert {answer.sequence_id: answer.error for answer in answers if answer.error} == {
        "id": "token ids lie between 0 and 96, got 97",
        "negative": "token ids lie between 0 and 96, got -1",
        "empty": "no tokens to process",
        "draft": "a chunk that is not sampled has no draft",
        "long": "257 tokens, but the context holds 256",
        "too much": "kv_full",
    }
    (again,) = verify(target, opening("too much", prompt), release=("full",))
    assert again.tokens == tuple(expected)


def test_logits_that_are_not_finite_end_one_sequence_only() -> None:
    """Guards: NaN that spreads over the batch, or that is sampled from."""
    loaded = tiny_model()
    loaded.model.get_input_embeddings().weight[50] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.verify.ragged._random_ids", lambda count, vocab_size, seed: [3 + i for i in range(count)])
        target = Target(loaded, kv_capacity_tokens=512)
    spoilt, healthy = verify(target, opening("a", [7, 50, 8]), opening("b", [7, 9, 8]))
    assert spoilt.error is not None
    assert "not finite" in spoilt.error
    assert healthy.error is None
    assert len(healthy.tokens) == 1


def test_context_is_asked_for_when_it_is_missing() -> None:
    """Guards: serving a sequence from tokens that were never computed, after an eviction, a restart or a lost message."""
    target = tiny_target()
    unknown = VerifyItem(sequence_id="a", base_length=0, tokens=(5, 6))
    assert verify(target, unknown)[0].need_context
    assert verify(target, opening("a", [5, 6, 7]))[0].tokens
    ahead = VerifyItem(sequence_id="a", base_length=4, tokens=(5,))
    assert verify(target, ahead)[0] == Verdict(sequence_id="a", need_context=True)
    assert verify(target, VerifyItem(sequence_id="a", base_length=3, tokens=(5,)))[0].tokens
    assert verify(target, VerifyItem(sequence_id="a", base_length=4, tokens=(5,)), release=("a",))[0].need_context


def test_going_back_in_a_sequence_gives_the_same_again() -> None:
    """Guards: a smaller base_length, which is how a round is repeated, being taken for an error or for nothing."""
    target = tiny_target()
    prompt = random_ids(40)
    first = verify(target, opening("a", prompt))
    verify(target, VerifyItem(sequence_id="a", base_length=40, tokens=(9, 9, 9)))
    again = verify(target, VerifyItem(sequence_id="a", base_length=12, tokens=tuple(prompt[12:])))
    assert first == again


def test_padding_of_the_vocabulary_is_never_sampled() -> None:
    """Guards: ids that the head has and the tokenizer has not."""
    prompts = [random_ids(5) for _ in range(16)]
    items = [opening(str(i), prompt, context=context(5, temperature=5.0, seed=i)) for i, prompt in enumerate(prompts)]
    free = [verdict.tokens[0] for verdict in verify(tiny_target(), *items)]
    assert max(free) >= 40  # else the test below could not fail
    assert all(verdict.tokens[0] < 40 for verdict in verify(tiny_target(vocab_size=40), *items))


def test_released_sequences_give_their_blocks_back() -> None:
    """Guards: blocks that leak when a sequence ends, until no request can be admitted."""
    target = tiny_target()
    for i in range(20):
        (verdict,) = verify(target, opening(str(i), random_ids(256)), release=(str(i - 4), "never seen"))
        assert verdict.error is None
    assert target.info.kv_capacity_tokens == 1024


# --- masks ------------------------------------------------------------------------------------------------------------------


def test_transformers_rules_are_recognised_as_windows() -> None:
    """Guards: an off-by-one in the window, or a chunked rule that is taken for a window."""
    cpu = torch.device("cpu")
    causal = MaskFunction(lambda batch, head, query, key: key <= query)
    sliding = MaskFunction(lambda batch, head, query, key: (key <= query) & (key > query - 8))
    chunked = MaskFunction(lambda batch, head, query, key: (key <= query) & (key // 8 == query // 8))
    assert causal.as_window(100, cpu) == Window(None)
    assert sliding.as_window(100, cpu) == Window(8)
    assert chunked.as_window(96, cpu) is chunked


# --- layers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear_is_the_same_map(dtype: torch.dtype, bias: bool) -> None:
    """Guards: a wrong bias or layout, and the doubled lone row coming back as two rows or in another shape."""
    weight, offset = torch.randn(24, 1300).to(dtype), torch.randn(24).to(dtype) if bias else None
    if not PackedLinear.supports(weight):
        pytest.skip("this build of torch does not pack weights")
    layer = PackedLinear(weight, offset)
    x, residual = torch.randn(5, 1300).to(dtype), torch.randn(5, 24).to(dtype)
    expected = nn.functional.linear(x.double(), weight.double(), offset.double() if offset is not None else None)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-4 if dtype == torch.float32 else 0.5}
    for rows in (1, 2, 5):
        assert torch.allclose(layer(x[:rows]).double(), expected[:rows], **tolerance)
        assert layer(x[None, :rows]).shape == (1, rows, 24)
        added = layer.add_to(residual[:rows].clone(), x[:rows])
        assert torch.allclose(added.double(), expected[:rows] + residual[:rows], **tolerance)
    assert torch.equal(layer.weight, weight)


def test_int8_scales_every_row_by_itself() -> None:
    """Guards: one activation scale for the whole matrix, with which an outlier in one row rounds the others to nothing."""
    weight, bias = torch.randn(64, 96), torch.randn(64)
    layer = Int8Linear(weight, bias)
    x = torch.randn(3, 96)
    x[1] *= 1e4
    x[2] = 0
    expected = nn.functional.linear(x, weight, bias)
    result = layer(x)
    for row in (0, 1):
        assert (result[row] - expected[row]).norm() < 0.02 * expected[row].norm()
        assert torch.equal(layer(x[row : row + 1])[0], result[row])
    assert torch.equal(result[2], bias)
    assert torch.allclose(layer.add_to(torch.ones(3, 64), x), result + 1)
    assert layer(torch.full((1, 96), torch.nan)).isnan().all()


def test_replaced_weights_are_freed_and_shared_inputs_fused() -> None:
    """Guards: the old weights staying in memory beside the packed ones; a fused product handing k the output of v."""
    loaded = tiny_model("phi")
    layer = loaded.model.model.layers[0]
    x = torch.randn(4, 32)
    expected = [getattr(layer.self_attn, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    old = [weakref.ref(layer.self_attn.k_proj.weight), weakref.ref(layer.mlp.fc1.weight)]
    replace_linears(loaded.model, lambda weight, bias: Int8Linear(weight, bias))
    assert [reference() for reference in old] == [None, None]
    results = [getattr(layer.self_attn, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    for result, plain in zip(results, expected, strict=True):
        assert (result - plain).norm() < 0.02 * plain.norm()
    loaded = tiny_model("llama")
    layer = loaded.model.model.layers[0]
    old = [weakref.ref(layer.self_attn.q_proj.weight), weakref.ref(layer.mlp.down_proj.weight)]
    del layer
    RaggedModel(loaded, kv_capacity_tokens=256)
    assert [reference() for reference in old] == [None, None]


@pytest.mark.parametrize(("family", "replaced"), [("llama", True), ("gemma2", False)])
def test_only_plain_rms_norms_are_replaced(family: str, replaced: bool) -> None:
    """Guards: Gemma's norm, which multiplies by 1 + weight, being taken for a plain one."""
    model = tiny_model(family).model
    replace_rms_norms(model)
    assert isinstance(model.model.norm, PlainRMSNorm) == replaced


# --- the cache --------------------------------------------------------------------------------------------------------------


def test_cache_size_is_as_requested_or_an_error_says_why() -> None:
    """Guards: a cache of zero blocks that preempts every request for ever."""
    cpu = torch.device("cpu")
    assert affordable_blocks("m", 1000, 32, 4096, cpu, requested_tokens=1000) == 31
    assert affordable_blocks("m", 1, 32, 64, cpu, requested_tokens=None) == 64 * 64 // 32
    with pytest.raises(ModelError, match=r"m: no room for a KV cache: one block of 32 tokens takes .* MiB"):
        affordable_blocks("m", 2**60, 32, 4096, cpu, requested_tokens=None)


def test_cache_takes_memory_only_where_it_is_used() -> None:
    """Guards: a cache sized for the whole machine that is written full of zeros at start."""
    before = _resident_bytes()
    cache = KVCache(num_blocks=2**15, block_size=32)
    layer = cache.layer(0, torch.ones(2, 1, 64), torch.ones(2, 1, 64))  # 1 GiB
    layer.write(torch.tensor([0, 2**20 - 1]), torch.ones(2, 2, 64), torch.ones(2, 2, 64))
    keys, values = layer.gather(torch.tensor([2**20 - 1, 5]), num_sequences=1)
    assert torch.equal(keys, torch.tensor([1.0, 0.0]).view(1, 2, 1).expand(2, 2, 64))
    assert torch.equal(keys, values)
    assert _resident_bytes() - before < 2**27


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
