"""Row invariance on a CUDA device, on random weights of realistic width; skipped where there is none."""

import pytest
import torch
import transformers
from torch import Tensor

from engine.drivers import SyncDriver
from engine.models import LoadedModel
from engine.propose.draft_model import DraftModel
from engine.scheduler import FixedDepth, Scheduler
from engine.types import GenerateRequest, SamplingParams
from engine.verify.attention import Chunk
from engine.verify.kv_cache import CachedSequence
from engine.verify.linear import INVARIANT_ROWS, PlainLinear, by_row_blocks
from engine.verify.ragged import RaggedModel
from engine.verify.target import Target
from engine.verify.triton_linear import has_triton, invariant_linear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda")
VOCAB = 49152
NUM_PROMPT = 200
NUM_TOKENS = 40


def random_model(dtype: torch.dtype = torch.bfloat16, num_layers: int = 8) -> LoadedModel:
    """Hidden 1024, 16 query heads on 4 key heads; the same weights in every call."""
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.05,
        eos_token_id=2,
    )
    config.architectures = ["LlamaForCausalLM"]
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False).to(device=DEVICE, dtype=dtype)
    return LoadedModel(
        name="random",
        tokenizer=None,
        config=config,
        eos_token_ids=(2,),
        vocab_size=VOCAB,
        max_context=2048,
        fingerprint="random",
        model=model,
        dtype=dtype,
        dtype_reason="test",
        device=DEVICE,
    )


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def run(model: RaggedModel, *steps: tuple[CachedSequence, list[int]]) -> list[Tensor]:
    """One packed forward; logits of all new tokens, per sequence."""
    chunks = [Chunk(sequence, ids, len(ids)) for sequence, ids in steps]
    for chunk in chunks:
        model.cache.reserve(chunk.sequence, len(chunk.ids))
    return list(model.forward(chunks).split([len(ids) for _, ids in steps]))


def largest_difference(model: RaggedModel) -> float:
    """Of any logit in steps of 1 to 21 tokens, alone and in a mixed batch, from rows decoded one by one."""
    prompt, rest = random_ids(NUM_PROMPT, 1), random_ids(21, 2)
    alone, chunked, other = CachedSequence(), CachedSequence(), CachedSequence()
    run(model, (alone, prompt))
    expected = torch.cat([run(model, (alone, [token]))[0] for token in rest])
    run(model, (other, prompt[:90]), (chunked, prompt[:77]))
    run(model, (chunked, prompt[77:]))
    differences = []
    for count in range(1, 22):
        for sequence in (alone, chunked):
            model.cache.truncate(sequence, NUM_PROMPT)
        differences.append(run(model, (alone, rest[:count]))[0] - expected[:count])
        differences.append(run(model, (other, prompt[: count % 5 + 1]), (chunked, rest[:count]))[1] - expected[:count])
    return float(torch.cat(differences).abs().max())


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(random_model(), kv_capacity_tokens=16384)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_have_the_same_bits_in_any_batch(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: kernels that are chosen by the number of rows, or split their sums by it. Tolerance 0."""
    model = RaggedModel(random_model(dtype), numerics="invariant", kv_capacity_tokens=4096)
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}, {dtype}, attention {model._attention}: {model.row_invariance.verdict}")
    assert model.row_invariance.holds
    assert largest_difference(model) == 0


def test_fast_kernels_report_their_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """Bug guarded: a probe that calls kernels row-invariant whose rows differ."""
    model = RaggedModel(random_model(), numerics="fast", kv_capacity_tokens=4096)
    difference = largest_difference(model)
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}, fast: largest difference {difference:.3g}; {model.row_invariance.verdict}")
    assert not (model.row_invariance.holds and difference > 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ids_are_the_same_at_any_depth(target: Target, temperature: float) -> None:
    """Bug guarded: a text that depends on how many draft tokens were verified beside it, or on its batch."""
    drafts = DraftModel(random_model(), weights="int8", kv_capacity_tokens=16384)

    def texts(depth: int, names: str) -> dict[str, list[int]]:
        scheduler = Scheduler(target.info, FixedDepth(depth), max_batch=8, prefill_tokens=128, max_waiting=8)
        requests = [
            GenerateRequest(
                request_id=name,
                prompt_ids=tuple(random_ids(30 * (1 + "abcd".index(name)), ord(name))),
                params=SamplingParams(temperature=temperature, seed=ord(name), max_tokens=NUM_TOKENS, ignore_eos=True),
            )
            for name in names
        ]
        ids: dict[str, list[int]] = {name: [] for name in names}
        for delta in SyncDriver(target, drafts, scheduler).generate(requests):
            ids[delta.request_id] += delta.token_ids
        return ids

    plain = {name: ids for name in "abcd" for name, ids in texts(0, name).items()}
    assert all(len(ids) == NUM_TOKENS for ids in plain.values())
    for depth in (0, 1, 3, 8, 20):
        assert texts(depth, "abcd") == plain
        assert texts(depth, "b")["b"] == plain["b"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("in_features", "out_features"), [(1024, 1536), (1000, 33)])
def test_invariant_linear_is_the_same_map_for_any_number_of_rows(
    dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    """Bug guarded: a tile past an edge that reaches a result; code that is compiled anew for some numbers of rows."""
    x = torch.randn(200, in_features, device=DEVICE, dtype=dtype)
    weight = torch.randn(out_features, in_features, device=DEVICE, dtype=dtype)
    bias = torch.randn(out_features, device=DEVICE, dtype=dtype)
    layer = PlainLinear(weight, bias)
    products = [lambda rows: by_row_blocks(layer, rows)]
    if has_triton(DEVICE):
        products.append(lambda rows: invariant_linear(rows, weight, bias))
    exact = x.double() @ weight.double().T + bias.double()
    for product in products:
        whole = product(x)
        assert (whole.double() - exact).abs().max() <= max(1e-5, 4 * torch.finfo(dtype).eps) * exact.abs().max()
        for count in (1, 2, INVARIANT_ROWS, INVARIANT_ROWS + 1, 63, 64, 65, 128, 200):
            assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[5:9]), whole[5:9])
