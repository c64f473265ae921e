"""Prediction heads beside the target: the module, its files, hidden states on every path, drafts, and that no text changes."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, plain_logits, random_ids, tiny_model
from torch import Tensor
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from deployments.lossless.checks import Arm, Matrix, make_requests
from deployments.lossless.play import Limits, play, random_depth
from deployments.lossless.reference import target_logits
from deployments.lossless.statistics import Statistics, exact_distribution
from engine.errors import ModelError
from engine.models import LoadedModel
from engine.propose.heads import source as source_module
from engine.propose.heads.eagle import EagleHead, default_aux_layers, head_config
from engine.propose.heads.load import check_head, load_head
from engine.propose.heads.mtp import MtpHead
from engine.propose.heads.source import HeadSource
from engine.types import Proposal, ProposeItem, ProposeRequest, SamplingParams, SequenceContext, VerifyItem, VerifyRequest
from engine.verify.attention import Chunk
from engine.verify.kv_cache import CachedSequence
from engine.verify.native.build import kernels
from engine.verify.ragged import RaggedModel
from engine.verify.target import Target

DRAFT_IDS = list(range(3, VOCAB, 2))


@pytest.fixture(autouse=True)
def _no_time_for_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models measure themselves for seconds when they load; and with tensors as small as these a second thread only waits."""
    torch.set_num_threads(1)
    monkeypatch.setattr("engine.verify.ragged.STEP_BUDGET_S", 0.0)


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=64)


def random_head(loaded: LoadedModel, draft_ids: Sequence[int] | None = DRAFT_IDS, **changes: Any) -> EagleHead:
    """An untrained head without a parameter that is 0 or 1."""
    torch.manual_seed(11)
    head = EagleHead.untrained(loaded.config, loaded.model.get_input_embeddings().weight, draft_ids=draft_ids)
    if changes:
        config = {**head.config, **{name: value for name, value in changes.items() if name != "model_type"}}
        if "model_type" in changes:
            config["transformer_layer_config"] = {**config["transformer_layer_config"], "model_type": changes["model_type"]}
        changed = EagleHead(config)
        changed.load_state_dict({**changed.state_dict(), **head.state_dict()})
        head = changed
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return head.eval().requires_grad_(False)


def saved_head(loaded: LoadedModel, folder: Path, **changes: Any) -> Path:
    random_head(loaded, **changes).save(folder)
    return folder


def target_with(name: str | None, loaded: LoadedModel, **options: Any) -> tuple[Target, HeadSource]:
    head = load_head(name, loaded)
    target = Target(loaded, **{"kv_capacity_tokens": 2048, "kernels": "torch", **options}, hidden_layers=head.layers)
    heads = HeadSource(head, target.info)
    target.listen(heads)
    return target, heads


# --- the module and its files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_before_residual", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_layer_is_transformers_layer_over_embedding_and_hidden_state(family: str, norm_before_residual: bool) -> None:
    """Bug guarded: a norm, a residual or the rotation in the wrong place: published heads would draft badly, and in silence."""
    loaded = tiny_model("llama")
    head = random_head(loaded, model_type=family, norm_before_residual=norm_before_residual)
    config = transformers.AutoConfig.for_model(**head.config["transformer_layer_config"])
    config._attn_implementation = "eager"
    layer: Any = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}[family](config, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        wide = getattr(head.layers[0].self_attn, name)
        setattr(layer.self_attn, name, torch.nn.Linear(wide.in_features, wide.out_features, bias=False))
    weights = head.layers[0].state_dict()
    hidden_norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    hidden_norm.weight.data.copy_(weights.pop("hidden_norm.weight"))
    layer.load_state_dict(weights)
    ids, hidden, positions = torch.tensor(random_ids(12)), torch.randn(12, config.hidden_size), torch.arange(12)

    with torch.inference_mode():
        normed = hidden_norm(hidden)
        both = torch.cat((layer.input_layernorm(head.embed_tokens(ids)), normed), dim=-1)[None]
        mask = torch.full((12, 12), -torch.inf).triu(1)[None, None]
        rotation = LlamaRotaryEmbedding(config)(both, positions[None])
        attended, _ = layer.self_attn(hidden_states=both, attention_mask=mask, position_embeddings=rotation)
        x = (normed if norm_before_residual else hidden) + attended[0]
        expected = x + layer.mlp(layer.post_attention_layernorm(x))
        got = head(ids, hidden, positions)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_saved_head_is_read_back(tmp_path: Path) -> None:
    """Bug guarded: weights or maps of ids that are lost on the way, other names than the format's."""
    head = random_head(tiny_model("llama"))
    head.save(tmp_path)
    again = EagleHead.from_folder(tmp_path)
    assert again.config == head.config
    hidden = torch.randn(5, head.hidden_size)
    torch.testing.assert_close(again.target_logits(hidden), head.target_logits(hidden))
    assert again.draft_ids.tolist() == DRAFT_IDS
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {
        "fc.weight",
        "layers.0.hidden_norm.weight",
        "layers.0.self_attn.q_proj.weight",
        "d2t",
        "t2d",
        "lm_head.weight",
    } <= names


def test_a_checkpoint_may_lack_the_embedding_and_name_the_layer_otherwise(tmp_path: Path) -> None:
    """Bug guarded: published heads without an embedding, or with the authors' name of the layer, are refused."""
    head = random_head(tiny_model("llama"))
    head.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights.pop("embed_tokens.weight")
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items()}
    save_file({**renamed, "verifier_norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    again = EagleHead.from_folder(tmp_path, embedding)
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor)


def test_only_the_chosen_ids_can_be_drafted() -> None:
    """Bug guarded: draft ids taken for the target's: every draft of a cut vocabulary would be another token."""
    head = random_head(tiny_model("llama"))
    hidden = torch.randn(4, head.hidden_size)
    logits = head.target_logits(hidden)
    assert logits.shape == (4, VOCAB)
    assert torch.isfinite(logits).nonzero()[:, 1].unique().tolist() == DRAFT_IDS
    torch.testing.assert_close(logits[:, DRAFT_IDS], head.logits(hidden))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"speculators_model_type": "medusa"}, "medusa"),
    "hidden size": ({"target_hidden_size": 64}, "64"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "9"),
    "a switch that is not known": ({"norm_before_fc": True}, "norm_before_fc"),
    "vocabulary": ({"transformer_layer_config.vocab_size": 50}, "50"),
    "two layers": ({"transformer_layer_config.num_hidden_layers": 2}, "2"),
    "a family": ({"transformer_layer_config.model_type": "gemma"}, "gemma"),
}


@pytest.mark.parametrize(("changes", "named"), WRONG.values(), ids=WRONG)
def test_a_head_for_another_target_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Bug guarded: a head that does not fit starts, and drafts noise or fails in the first round."""
    loaded = tiny_model("llama")
    saved_head(loaded, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name, value in changes.items():
        *sections, field = name.split(".")
        section = config[sections[0]] if sections else config
        section[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=named):
        check_head(str(tmp_path), loaded)


@pytest.mark.parametrize("wrong", ["missing", "left over", "shape", "maps"])
def test_weights_that_do_not_fit_are_named(wrong: str, tmp_path: Path) -> None:
    """Bug guarded: a layer that keeps its random weights because the checkpoint has none of that name."""
    saved_head(tiny_model("llama"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if wrong == "missing":
        del weights["fc.weight"]
    elif wrong == "left over":
        weights["input_norm.weight"] = torch.ones(3)
    elif wrong == "shape":
        weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()
    else:
        weights["d2t"] = weights["d2t"] + 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match={"maps": "d2t"}.get(wrong, "fc.weight|input_norm.weight|lm_head.weight")):
        EagleHead.from_folder(tmp_path)


# --- hidden states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["exact", "int8"])
@pytest.mark.parametrize(("family", "network"), [("llama", "native"), ("qwen3", "dense"), ("gemma2", "generic")])
def test_hidden_states_are_those_of_transformers(family: str, network: str, weights: Any) -> None:
    """Bug guarded: states of another layer, of another sequence of the batch, or overwritten by the layer that reads them."""
    if network == "native" and kernels() is None:
        pytest.skip("no C compiler, or no AVX-512")
    if weights == "int8" and network == "generic":
        pytest.skip("the same hooks as with exact weights")
    changes = {"head_dim": 16, "hidden_size": 64} if network == "native" else {}
    plain = tiny_model(family, **changes).model
    layers = (0, 2, 3)
    model = RaggedModel(
        tiny_model(family, **changes),
        weights=weights,
        kernels="auto" if network == "native" else "torch",
        kv_capacity_tokens=1024,
        hidden_layers=layers,
    )
    assert model.network == network
    texts = [random_ids(length) for length in (40, 3, 21)]
    sequences = [CachedSequence() for _ in texts]
    for part in (slice(0, 2), slice(2, None)):
        chunks = [Chunk(sequence, ids[part], 1) for sequence, ids in zip(sequences, texts, strict=True)]
        for chunk in chunks:
            model.cache.reserve(chunk.sequence, len(chunk.ids))
        model.forward(chunks)
        got = list(model.hidden)
    for ids, hidden in zip(texts, got, strict=True):
        assert hidden.shape == (len(ids) - 2, 3 * plain.config.hidden_size)
        expected = states_of(plain, ids, layers)[2:]
        difference = (hidden.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert difference < (0.1 if weights == "int8" else 1e-4)


def states_of(model: Any, ids: list[int], layers: Sequence[int]) -> Tensor:
    """[n, H * layers] of the residual stream, by hooks on the plain model, since transformers norms the last one."""
    kept: dict[int, Tensor] = {}
    decoder = model.get_decoder()
    hooks = [
        decoder.norm.register_forward_pre_hook(lambda module, args: kept.__setitem__(len(decoder.layers), args[0][0].clone()))
    ]
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    hooks[0].remove()
    kept |= {index: state[0] for index, state in enumerate(states[:-1])}
    return torch.cat([kept[layer] for layer in layers], dim=-1)


# --- drafts -----------------------------------------------------------------------------------------------------------------


class Lane:
    """One sequence at a target with a head, and what was committed; greedy."""

    def __init__(self, target: Target, heads: HeadSource, prompt: list[int], params: SamplingParams = GREEDY, name: str = "a"):
        self.target, self.heads, self.name = target, heads, name
        self.ids = list(prompt)
        self.context = SequenceContext(params=params, prompt_length=len(prompt))
        self.target_length = self.draft_length = 0

    def verify(self, draft: tuple[int, ...] = (), chunk: int | None = None) -> int:
        """A round of the target; returns how many draft tokens it kept."""
        end = len(self.ids) if chunk is None else self.target_length + chunk
        item = VerifyItem(
            sequence_id=self.name,
            base_length=self.target_length,
            tokens=tuple(self.ids[self.target_length : end]),
            draft=draft,
            context=self.context if self.target_length == 0 else None,
            sample=chunk is None,
        )
        (verdict,) = self.target.verify(VerifyRequest(round_id=1, items=(item,))).verdicts
        assert verdict.error is None
        assert not verdict.need_context
        self.target_length = end + verdict.accepted
        self.ids += verdict.tokens
        return verdict.accepted

    def propose(self, depth: int) -> Proposal:
        """Ask for a draft as the router does, with the tokens that the source has not heard of."""
        item = ProposeItem(
            sequence_id=self.name,
            base_length=self.draft_length,
            tokens=tuple(self.ids[self.draft_length :]),
            depth=depth,
            context=self.context if self.draft_length == 0 else None,
        )
        (proposal,) = self.heads.propose(ProposeRequest(round_id=1, items=(item,))).proposals
        self.draft_length = proposal.known_length
        return proposal


def expected_draft(head: EagleHead, model: Any, layers: Sequence[int], ids: list[int], depth: int, start: int = 0) -> list[int]:
    """Greedy drafts by the head alone over the whole text, from token ``start`` on, without any cache."""
    fused = head.fuse(states_of(model, ids, layers)[start:-1])
    tokens, drafted = torch.tensor(ids[start + 1 :]), []
    with torch.inference_mode():
        for _ in range(depth):
            out = head(tokens, fused, torch.arange(len(tokens)))
            drafted.append(int(head.target_logits(out[-1:]).argmax()))
            tokens, fused = torch.cat((tokens, torch.tensor(drafted[-1:]))), torch.cat((fused, out[-1:]))
    return drafted


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["all ids", "a cut vocabulary"])
def test_drafts_are_those_of_the_whole_text(draft_ids: list[int] | None, tmp_path: Path) -> None:
    """Bug guarded: rows of refused drafts that stay in the head's cache, hidden states of the token before or after, a head
    that goes on from its own guess where the target's state is known.
    """
    plain = tiny_model("llama").model
    saved_head(tiny_model("llama"), tmp_path, draft_ids=draft_ids)
    target, heads = target_with(str(tmp_path), tiny_model("llama"))
    head = EagleHead.from_folder(tmp_path).requires_grad_(False)
    lane = Lane(target, heads, random_ids(11))
    lane.verify(chunk=5)
    lane.verify()
    for depth, kept in ((4, 0), (1, 1), (6, 3), (0, 0), (3, 3), (5, 2)):
        proposal = lane.propose(depth) if depth else None
        if proposal is not None:
            assert list(proposal.tokens) == expected_draft(head, plain, heads.head.layers, lane.ids, depth)
        right = [int(token) for token in greedy_text(plain, lane.ids, depth)]
        wrong = [(token + 1) % VOCAB for token in right]
        assert lane.verify((*right[:kept], *wrong[kept:])) == kept  # whatever was drafted: the router may send other drafts


def greedy_text(model: Any, ids: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(int(plain_logits(model, [*ids, *made])[-1].argmax()))
    return made


def test_sequences_of_a_batch_do_not_mix(tmp_path: Path) -> None:
    """Bug guarded: hidden states or rows of logits given to another sequence, where chunks are packed in another order."""
    saved_head(tiny_model("llama"), tmp_path)
    plain, head = tiny_model("llama").model, EagleHead.from_folder(tmp_path).requires_grad_(False)
    target, heads = target_with(str(tmp_path), tiny_model("llama"))
    lanes = [Lane(target, heads, random_ids(length), name=str(length)) for length in (90, 3, 40, 4)]
    for lane in lanes:
        lane.verify()
    items = [
        ProposeItem(sequence_id=lane.name, base_length=0, tokens=tuple(lane.ids), depth=depth, context=lane.context)
        for lane, depth in zip(lanes, (2, 4, 1, 3), strict=True)
    ]
    found = {
        one.sequence_id: list(one.tokens) for one in heads.propose(ProposeRequest(round_id=1, items=tuple(items))).proposals
    }
    for lane, item in zip(lanes, items, strict=True):
        assert found[lane.name] == expected_draft(head, plain, heads.head.layers, lane.ids, item.depth)


def test_a_head_without_state_says_so_and_goes_on(tmp_path: Path) -> None:
    """Bug guarded: a draft from states that are not there: of a sequence that nobody told of, that the target began anew, whose
    draft was asked for twice, or whose target has not caught up.
    """
    saved_head(tiny_model("llama"), tmp_path)
    target, heads = target_with(str(tmp_path), tiny_model("llama"))
    lane = Lane(target, heads, random_ids(20))
    assert lane.propose(3).reason == "need_context"
    lane.verify(chunk=8)
    assert lane.propose(3).reason == "catching_up"
    lane.verify()
    assert lane.propose(3).tokens
    assert lane.propose(3).reason == "catching_up"
    lane.verify()
    assert lane.propose(3).tokens
    target.verify(VerifyRequest(round_id=1, items=(), release=("a",)))
    assert lane.propose(3).reason == "need_context"
    lane.target_length = 0
    lane.verify()
    assert lane.propose(3).tokens


def test_a_head_begins_anew_after_what_it_did_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: rows at wrong places after a gap, which tokens from the prefix cache and states that were too many leave."""
    monkeypatch.setattr(source_module, "MOST_PENDING", 16)
    saved_head(tiny_model("llama"), tmp_path)
    plain, head = tiny_model("llama").model, EagleHead.from_folder(tmp_path).requires_grad_(False)
    target, heads = target_with(str(tmp_path), tiny_model("llama"))
    prompt = random_ids(64 + 30)
    first = Lane(target, heads, prompt)
    first.verify()
    layers = heads.head.layers
    assert list(first.propose(4).tokens) == expected_draft(head, plain, layers, first.ids, 4, start=94 - 16)
    monkeypatch.setattr(source_module, "MOST_PENDING", 64)
    second = Lane(target, heads, prompt, name="b")
    second.verify()
    assert list(second.propose(4).tokens) == expected_draft(head, plain, layers, second.ids, 4, start=64)


def test_a_full_cache_forgets_others_and_no_more(tmp_path: Path) -> None:
    """Bug guarded: an exception, or a draft from another sequence's rows, where the head's cache has no room left."""
    saved_head(tiny_model("llama"), tmp_path)
    plain, head = tiny_model("llama").model, EagleHead.from_folder(tmp_path).requires_grad_(False)
    loaded = tiny_model("llama")
    drafter = load_head(str(tmp_path), loaded)
    target = Target(loaded, kv_capacity_tokens=2048, kernels="torch", hidden_layers=drafter.layers)
    heads = HeadSource(drafter, target.info, kv_capacity_tokens=128)
    target.listen(heads)
    lanes = [Lane(target, heads, random_ids(60), name=name) for name in "abc"]
    for lane in lanes:
        lane.verify()
        assert list(lane.propose(3).tokens) == expected_draft(head, plain, heads.head.layers, lane.ids, 3)
    long = Lane(target, heads, random_ids(150), name="long")
    long.verify()
    assert long.propose(3).reason == "kv_full"
    lanes[0].verify()
    assert lanes[0].propose(3).tokens


# --- text is the target's ---------------------------------------------------------------------------------------------------

PARAMETERS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "coupled, penalties": {"temperature": 1.0, "presence_penalty": 0.5, "logit_bias": {5: 2.0}},
    "coupled, top-p": {"temperature": 0.8, "top_p": 0.9},
}
ARMS = ("heads draft, a random K", "prompts from the prefix cache", "chunked", "moved")


def check_lossless(target: Target, heads: HeadSource) -> None:
    """The arms of `outrider verify-lossless` that concern a head, and its statistical tests of all rules."""
    logits_of = target_logits(target)
    requests = make_requests({"short": random_ids(5), "long": random_ids(70)}, 10, target.info, PARAMETERS)
    exact = bool(target.info.row_invariant)
    tolerance = target.near_tie_tolerance
    matrix = Matrix(
        target, heads, requests, logits_of, exact=exact, tolerance=tolerance, forget_prefixes=target.forget_prefixes
    )
    matrix.play_reference()
    arms = [arm for arm in matrix.arms(quick=True) if arm.name.startswith(ARMS)]
    assert len(arms) == len(ARMS)
    tight = Limits(kv_capacity_tokens=sum(len(request.prompt_ids) + 1 for request in requests))
    preempted = Arm("preempted", lambda: play(target, heads, requests, random_depth(8), tight), ("preempt", "draft"))
    for arm in (*arms, preempted):
        matrix.run(arm)
        assert [difference for difference in arm.divergences if not difference.tolerated] == []
        assert arm.idle is None
    _, distribution = exact_distribution({"a": random_ids(4)}, logits_of)
    tests = Statistics(target, distribution, 200, row_invariant=exact).tests(heads, quick=True)
    assert len(tests) == 3
    for name, sample in tests:
        assert sample().passes, name


def test_no_text_changes_with_an_eagle_head(tmp_path: Path) -> None:
    """Bug guarded: an untrue q from a cut vocabulary, drafts that are dropped for what they are, states that survive
    preemption, migration or another chunking and change what is committed.
    """
    saved_head(tiny_model("llama"), tmp_path)
    check_lossless(*target_with(str(tmp_path), tiny_model("llama")))


# --- MTP --------------------------------------------------------------------------------------------------------------------


def model_with_mtp(family: str, folder: Path) -> LoadedModel:
    """A tiny model of a family, whose checkpoint in ``folder`` has an MTP layer behind its own."""
    loaded = tiny_model(family, num_mtp_layers=1)
    loaded.model.save_pretrained(folder)
    torch.manual_seed(3)
    mtp = MtpModel(loaded.model, 1)
    number = loaded.config.num_hidden_layers
    weights = load_file(folder / "model.safetensors")
    for name, tensor in published_names(mtp).items():
        weights[f"model.layers.{number}.{name}"] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return replace(loaded, model=from_folder(folder))


def from_folder(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def published_names(mtp: MtpModel) -> dict[str, Tensor]:
    """Random weights of the MTP layer under the names of published checkpoints, experts one by one."""
    found: dict[str, Tensor] = {}
    for name, parameter in mtp.layers[0].state_dict().items():
        tensor = (0.3 * torch.randn(parameter.shape)).contiguous()
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if name.endswith("experts.gate_up_proj"):
            for index, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                found[name.replace("gate_up_proj", f"{index}.gate_proj.weight")] = gate.contiguous()
                found[name.replace("gate_up_proj", f"{index}.up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for index, expert in enumerate(tensor):
                found[name.replace("down_proj", f"{index}.down_proj.weight")] = expert.contiguous()
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp_drafts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Bug guarded: weights that transformers makes up, the hidden state before the norm, a cache that mixes rows."""
    loaded = model_with_mtp(family, tmp_path)
    plain = from_folder(tmp_path)
    pattern = rf"model\.layers\.{plain.config.num_hidden_layers}.*"  # transformers knows that of the largest sizes
    plain._keys_to_ignore_on_load_unexpected = [pattern]
    reference = MtpModel.from_pretrained(plain).eval()
    reference.config._attn_implementation = "eager"
    target, heads = target_with(None, loaded)
    assert isinstance(heads.head, MtpHead)
    lane = Lane(target, heads, random_ids(13))
    lane.verify()
    for _ in range(2):
        expected = expected_mtp(reference, plain, lane.ids, 3)
        proposal = lane.propose(3)
        assert list(proposal.tokens) == expected
        lane.verify(proposal.tokens)


def expected_mtp(mtp: MtpModel, model: Any, ids: list[int], depth: int) -> list[int]:
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states[-1][:, :-1]
        tokens, drafted = torch.tensor([ids[1:]]), []
        for _ in range(depth):
            positions = torch.arange(tokens.shape[1])[None]
            out = mtp.forward_layer(0, hidden, positions, None, input_ids=tokens)
            drafted.append(int(mtp._project_to_logits(out[:, -1])[0].argmax()))
            tokens = torch.cat((tokens, torch.tensor([drafted[-1:]])), dim=1)
            hidden = torch.cat((hidden, out[:, -1:]), dim=1)
    return drafted


def test_no_text_changes_with_mtp(tmp_path: Path) -> None:
    """Bug guarded: as with an EAGLE head, over the layers of transformers."""
    check_lossless(*target_with(None, model_with_mtp("glm4_moe", tmp_path)))


def test_models_without_mtp_are_refused(tmp_path: Path) -> None:
    """Bug guarded: an MTP layer of random weights, where a checkpoint has none or its configuration counts none."""
    with pytest.raises(ModelError, match=r"draft\.model"):
        check_head(None, tiny_model("llama"))
    with pytest.raises(ModelError, match="counts no MTP"):
        check_head(None, tiny_model("glm4_moe", num_mtp_layers=0))
    loaded = tiny_model("glm4_moe", num_mtp_layers=1)
    loaded.model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="eh_proj"):
        load_head(None, replace(loaded, model=from_folder(tmp_path)))


# --- training ---------------------------------------------------------------------------------------------------------------


def test_a_trained_head_is_accepted(tmp_path: Path) -> None:
    """Bug guarded: a module that trains on other rows than it drafts from: its drafts would never be accepted."""
    loaded = tiny_model("llama")
    prompt = random_ids(6)
    text = [*prompt, *greedy_text(loaded.model, prompt, 40)]
    head = EagleHead.untrained(loaded.config, loaded.model.get_input_embeddings().weight, draft_ids=sorted(set(text)))
    layers = head.aux_layers or default_aux_layers(3)
    hidden, ids, positions = states_of(loaded.model, text, layers).clone(), torch.tensor(text), torch.arange(len(text) - 2)
    labels = torch.searchsorted(head.draft_ids, ids[2:])
    optimiser = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(60):
        fused, loss = head.fuse(hidden[:-2]), torch.zeros(())
        for step in range(3):  # the head learns to go on from its own states
            rows = len(text) - 2 - step
            fused = head(ids[1 + step : 1 + step + rows], fused[:rows], positions[:rows])
            loss = loss + torch.nn.functional.cross_entropy(head.logits(fused), labels[step:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    head.save(tmp_path)
    target, heads = target_with(str(tmp_path), loaded)
    lane = Lane(target, heads, prompt)
    lane.verify()
    drafted = accepted = 0
    while len(lane.ids) < 36:
        proposal = lane.propose(2)
        drafted += len(proposal.tokens)
        accepted += lane.verify(proposal.tokens)
    assert lane.ids[:36] == text[:36]
    assert accepted > 0.6 * drafted


def test_the_configuration_of_a_head_is_complete() -> None:
    """Bug guarded: fields that other programs need to load a head that was made here."""
    config = head_config(tiny_model("llama").config, num_draft_ids=10)
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["draft_vocab_size"] == 10
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 1, 0]
