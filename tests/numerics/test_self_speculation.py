"""Cheaper versions of the target as drafts: quantised copies, layers left out, a window over the context."""

from collections.abc import Sequence
from typing import Any

import pytest
import table_lane
import torch
import transformers
from table_lane import lane
from torch import Tensor, nn

from engine.errors import ConfigError, ModelError
from engine.models import LoadedModel
from engine.propose.draft_model import DraftModel
from engine.propose.layer_skip import choose_layers, leave_out, measure, rank_layers
from engine.propose.self_speculation import build_layer_skip, build_self_copy, check_kernels
from engine.propose.window import ContextWindow
from engine.scheduler import FixedDepth
from engine.types import GenerateRequest, Proposal, ProposeItem, ProposeRequest, SamplingParams, SequenceContext
from engine.verify.blocks import ABSENT
from engine.verify.linear import MAKERS
from engine.verify.ragged import RaggedModel
from engine.verify.target import Target

VOCAB = 97
NUM_LAYERS = 4
BLOCK = 64


def tiny_model(architecture: str = "llama", **changes: Any) -> LoadedModel:
    torch.manual_seed(5)
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
    }
    config = transformers.AutoConfig.for_model(architecture, **{**small, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return LoadedModel(
        name="tiny",
        tokenizer=None,
        config=config,
        eos_token_ids=(2,),
        vocab_size=config.vocab_size,
        max_context=1024,
        fingerprint="tiny",
        model=model,
        dtype=torch.float32,
        dtype_reason="test",
        device=torch.device("cpu"),
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring step times takes longer than the tests, and at this size a second thread only waits."""
    torch.set_num_threads(1)
    monkeypatch.setattr(RaggedModel, "_measure_step_times", lambda self: ())


def random_ids(count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def ask(draft: DraftModel, tokens: list[int], depth: int, base: int = 0) -> Proposal:
    """One proposal, after as many calls as catching up takes."""
    context = SequenceContext(params=SamplingParams(temperature=0.0, ignore_eos=True), prompt_length=len(tokens))
    while True:
        item = ProposeItem(sequence_id="a", base_length=base, tokens=tuple(tokens[base:]), depth=depth, context=context)
        proposal = draft.propose(ProposeRequest(round_id=1, items=(item,))).proposals[0]
        if proposal.reason != "catching_up":
            return proposal
        base = proposal.known_length


def logits_of(model: nn.Module, ids: list[int], mask: Tensor | None = None) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]


# --- layers ---------------------------------------------------------------------------------------------------------------


class _HandsOn(nn.Module):
    """A decoder layer that does nothing, beside attributes that the model asks it for."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        (
            "qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
        ),
        ("gemma2", {"sliding_window": 8}),
    ],
)
def test_a_draft_without_layers_is_the_model_whose_layers_do_nothing(architecture: str, changes: dict[str, Any]) -> None:
    """Bug guarded: after leaving layers out, the others take the attention type, or the cache, of their old neighbours."""
    reference = tiny_model(architecture, **changes).model
    for index in (0, 2):
        reference.model.layers[index] = _HandsOn(reference.model.layers[index])
    draft = build_layer_skip(tiny_model(architecture, **changes), (2, 0), kv_capacity_tokens=1024)
    prompt = random_ids(40)
    ids = list(prompt)
    for _ in range(4):
        ids.append(int(logits_of(reference, ids)[-1].argmax()))
    assert ask(draft, prompt, 4).tokens == tuple(ids[40:])
    assert (draft.name, draft.model.cache.layers[0].keys.shape[0], len(draft.model.cache.layers)) == ("layer-skip", 1, 2)


@pytest.mark.parametrize("skipped", [(4,), (-1, 0), (0, 1, 2, 3)])
def test_layers_that_are_not_there_are_refused_by_name(skipped: tuple[int, ...]) -> None:
    """Bug guarded: an index beyond the last layer is ignored, a negative one counts from the end, or no layer is left."""
    with pytest.raises(ConfigError, match=r"draft\.skip_layers"):
        leave_out(tiny_model(), skipped)


def test_layers_that_share_keys_are_not_left_out() -> None:
    """Bug guarded: a layer that borrows the keys of one that is gone reads those of another."""
    loaded = tiny_model()
    loaded.model.config.num_kv_shared_layers = 2
    with pytest.raises(ModelError, match="share keys and values"):
        leave_out(loaded, (1,))


def test_the_layer_that_changes_nothing_is_left_out_first() -> None:
    """Bug guarded: layers ranked from the most important one on, hooks that stay, or agreement with itself."""
    loaded = tiny_model()
    for projection in (loaded.model.model.layers[2].self_attn.o_proj, loaded.model.model.layers[2].mlp.down_proj):
        projection.weight.zero_()
    ids = random_ids(64)
    before = logits_of(loaded.model, ids)
    assert rank_layers(loaded, ids)[0] == 2
    assert measure(loaded, [2], ids).agreement == 1.0
    assert measure(loaded, [0, 1], ids).agreement < 0.9
    chosen = choose_layers(loaded, ids)
    assert chosen.layers == (2,)
    assert chosen.cost < 1
    assert torch.equal(logits_of(loaded.model, ids), before)


# --- copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("shape", [(32, 64), (50, 48)])
@pytest.mark.parametrize("biased", [False, True])
def test_quantised_layers_are_close_to_plain_ones(weights: str, shape: tuple[int, int], biased: bool) -> None:
    """Bug guarded: scales or nibbles of another group, padding that reaches the outputs, a forgotten bias."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-1, 1, shape[0])[:, None]
    bias = torch.randn(shape[0], generator=generator) if biased else None
    x, residual = torch.randn(32, shape[1], generator=generator), torch.randn(32, shape[0], generator=generator)
    layer = MAKERS[weights](weight, bias)
    wanted = nn.functional.linear(x, weight, bias)
    per_output = (layer.forward(x) - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert per_output.max() < {"int8": 0.03, "int4": 0.15, "fp8": 0.08}[weights]
    assert torch.allclose(layer.add_to(residual.clone(), x), residual + layer.forward(x), atol=1e-4, rtol=1e-2)


def test_the_int4_copy_drafts_like_the_model() -> None:
    """Bug guarded: a copy that is broken rather than coarse, or that runs by kernels that know no int4."""
    reference = tiny_model(hidden_size=64, intermediate_size=96).model
    draft = build_self_copy(tiny_model(hidden_size=64, intermediate_size=96), "self-int4", kv_capacity_tokens=4096)
    assert (draft.name, draft.info.dtype, draft.info.path) == ("self-int4", "int4", "dense")
    agreed = 0
    for length in range(8, 24):
        prompt = random_ids(length)
        agreed += ask(draft, prompt, 1).tokens == (int(logits_of(reference, prompt)[-1].argmax()),)
        draft.propose(ProposeRequest(round_id=1, items=(), release=("a",)))
    assert agreed >= 8  # of 16; by chance it would be 0 or 1


def test_float8_without_a_gpu_is_refused_by_name() -> None:
    """Bug guarded: an error of the kernel in the first round, or a slow emulation without a word."""
    with pytest.raises(ConfigError, match=r"draft\.source 'self-fp8' needs a GPU.*draft\.device is cpu.*self-int8"):
        build_self_copy(tiny_model(), "self-fp8")
    check_kernels("self-int4", torch.device("cpu"))


# --- window ---------------------------------------------------------------------------------------------------------------


def windowed_text(
    model: nn.Module, prompt: list[int], starts: Sequence[int], depth: int, window: ContextWindow
) -> tuple[int, ...]:
    """Greedy continuation where the rows of a chunk do not see the blocks between the sinks and the window before the chunk.

    ``starts``: where the prompt's chunks begin; the last token goes with the last one.
    """
    first = -(-window.sink_tokens // BLOCK) * BLOCK
    ids = list(prompt)
    for _ in range(depth):
        size = len(ids)
        begins = torch.tensor([max(s for s in [*starts, *range(len(prompt), size)] if s <= q) for q in range(size)])
        ends = (begins - window.window_tokens).clamp(min=0) // BLOCK * BLOCK
        keys, queries = torch.arange(size)[None, :], torch.arange(size)[:, None]
        seen = (keys <= queries) & ((keys < first) | (keys >= ends[:, None]))
        mask = torch.zeros(1, 1, size, size).masked_fill(~seen, -torch.inf)
        ids.append(int(logits_of(model, ids, mask)[-1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("window", [ContextWindow(100, 4), ContextWindow(64, 0), ContextWindow(200, 65)])
def test_a_windowed_draft_sees_sinks_and_window_at_their_true_positions(kernels: Any, window: ContextWindow) -> None:
    """Bug guarded: rotations by place instead of position, masks by position instead of place, or the wrong blocks left out."""
    draft = DraftModel(tiny_model(), kv_capacity_tokens=1024, window=window, catch_up_tokens=150, kernels=kernels)
    prompt = random_ids(451)
    proposal = ask(draft, prompt, 5)
    assert proposal.tokens == windowed_text(tiny_model().model, prompt, (0, 150, 300), 5, window)
    assert proposal.tokens != ask(DraftModel(tiny_model(), kv_capacity_tokens=1024), prompt, 5).tokens


def test_a_window_frees_the_blocks_behind_it() -> None:
    """Bug guarded: a windowed draft that still needs room for the whole context: of 6 blocks here for texts of 16."""
    draft = DraftModel(tiny_model(), kv_capacity_tokens=6 * BLOCK, window=ContextWindow(100, 4), catch_up_tokens=64)
    pool = draft.model.cache.pool
    prompt = random_ids(1000)
    proposal = ask(draft, prompt, 4)
    assert (len(proposal.tokens), proposal.reason, proposal.known_length) == (4, None, 1000)
    draft.propose(ProposeRequest(round_id=2, items=(), release=("a",)))
    assert pool.num_free == pool.num_blocks


def test_going_back_behind_the_window_computes_again() -> None:
    """Bug guarded: a text that went on elsewhere continues over blocks that now belong to someone else."""
    window = ContextWindow(64, 4)
    draft = DraftModel(tiny_model(), kv_capacity_tokens=1024, window=window, prefix_cache=False)
    prompt = random_ids(700)
    ask(draft, prompt, 2)
    held = draft._sequences._held["a"].cached
    assert held.blocks.count(ABSENT) > 5
    again = ask(draft, prompt[:301], 3, base=301)
    # The block of the sinks is still there; the rest is one chunk, after which the window holds three blocks.
    assert again.tokens == windowed_text(tiny_model().model, prompt[:301], (0, BLOCK), 3, window)
    assert held.blocks.count(ABSENT) == 2


def test_a_window_needs_a_paged_cache() -> None:
    """Bug guarded: a window that is accepted and ignored where states are kept sequence by sequence."""
    config = {"state_size": 4, "num_hidden_layers": 2}
    loaded = tiny_model("mamba", **config)
    with pytest.raises(ModelError, match=r"draft\.window_tokens needs a paged KV cache"):
        DraftModel(loaded, kv_capacity_tokens=1024, window=ContextWindow(64, 4))


# --- the text stays the target's ------------------------------------------------------------------------------------------


def play(draft: DraftModel | None, prompt: list[int]) -> tuple[dict[str, tuple[int, ...]], int]:
    """Texts of 16 tokens, greedy and with three seeds, with drafts of three, and how many drafted tokens were accepted."""
    target = Target(tiny_model(), kv_capacity_tokens=4096)
    driver = lane(target, draft, FixedDepth(3))
    for name, temperature, seed in (("greedy", 0.0, 0), ("a", 1.0, 1), ("b", 0.7, 2), ("c", 1.0, 3)):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=16, ignore_eos=True, rule="coupled")
        driver.add(GenerateRequest(request_id=name, prompt_ids=tuple(prompt), params=params))
    texts: dict[str, tuple[int, ...]] = {}
    accepted = 0
    while driver.scheduler.running or driver.scheduler.waiting:
        for delta in driver.step().deltas:
            texts[delta.request_id] = texts.get(delta.request_id, ()) + delta.token_ids
            accepted += delta.num_accepted if delta.finish_reason is not None else 0
    return texts, accepted


def test_no_self_speculation_changes_the_text() -> None:
    """Bug guarded: a draft that reaches into what the target says, by weights, caches or noise that both use."""
    prompt = random_ids(300)
    room: dict[str, Any] = {"kv_capacity_tokens": 4096, "catch_up_tokens": 4096}
    drafts = [
        build_self_copy(tiny_model(), "self-int4", **room),
        build_layer_skip(tiny_model(), (1,), **room),
        build_layer_skip(tiny_model(), (2,), weights="int8", window=ContextWindow(64, 4), **room),
        DraftModel(tiny_model(), window=ContextWindow(128, 0), **room),
    ]
    wanted, _ = play(None, prompt)
    played = [play(draft, prompt) for draft in drafts]
    assert [texts for texts, _ in played] == [wanted] * len(drafts)
    assert all(accepted > 0 for _, accepted in played), played


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_text_has_the_targets_distribution_where_the_draft_is_windowed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a q that is not what was drawn from: that of another window, or of all layers."""
    monkeypatch.setattr(table_lane, "PROMPT", table_lane.PROMPT * 16)
    draft = build_layer_skip(
        tiny_model(vocab_size=4, eos_token_id=None, pad_token_id=None, bos_token_id=None),
        (1,),
        weights="int8",
        window=ContextWindow(16, 0),
        kv_capacity_tokens=1 << 18,
        catch_up_tokens=1 << 20,
    )
    sampled = table_lane.sample(rule, {"plain": {}}, draft, num_texts=500)["plain"]
    assert sampled.p > table_lane.LEVEL
    assert 0.05 < sampled.acceptance < 0.95
