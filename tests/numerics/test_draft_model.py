from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import nn

from engine.models import LoadedModel
from engine.propose.draft_model import DraftModel
from engine.propose.self_speculation import build_self_int8
from engine.types import Proposal, ProposeItem, ProposeReply, ProposeRequest, SamplingParams, SequenceContext
from engine.verify.attention import Chunk
from engine.verify.ragged import RaggedModel

VOCAB = 97
EOS = 2


def tiny_model() -> LoadedModel:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(
        name="tiny",
        tokenizer=None,
        config=config,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        max_context=128,
        fingerprint="tiny",
        model=model,
        dtype=torch.float32,
        dtype_reason="test",
        device=torch.device("cpu"),
    )


def greedy_text(model: nn.Module, prompt: list[int], count: int) -> tuple[int, ...]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def random_ids(count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,)).tolist()


def item(sequence_id: str, base: int, tokens: list[int] | tuple[int, ...], depth: int, **params: Any) -> ProposeItem:
    """Context is sent with a sequence's first token, as the router does."""
    chosen = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    context = SequenceContext(params=chosen, prompt_length=len(tokens)) if base == 0 else None
    return ProposeItem(sequence_id=sequence_id, base_length=base, tokens=tuple(tokens), depth=depth, context=context)


class Recorder:
    """A draft model and the number of tokens that each of its forwards computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any):
        loaded = tiny_model()
        self.reference: nn.Module = tiny_model().model
        self.draft = DraftModel(loaded, **{"kv_capacity_tokens": 512, **options})
        self.computed: list[int] = []
        forward: Callable[..., torch.Tensor] = self.draft.model.forward

        def counting(chunks: list[Chunk]) -> torch.Tensor:
            self.computed.append(sum(len(chunk.ids) for chunk in chunks))
            return forward(chunks)

        monkeypatch.setattr(self.draft.model, "forward", counting)

    def ask(self, *items: ProposeItem, release: tuple[str, ...] = ()) -> ProposeReply:
        self.computed.clear()
        reply = self.draft.propose(ProposeRequest(round_id=7, items=items, release=release))
        assert reply.round_id == 7
        assert reply.num_steps == len(self.computed)
        assert [proposal.sequence_id for proposal in reply.proposals] == [item.sequence_id for item in items]
        return reply

    def one(self, item: ProposeItem, release: tuple[str, ...] = ()) -> Proposal:
        return self.ask(item, release=release).proposals[0]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring step times takes longer than the tests, and at this size a second thread only waits."""
    torch.set_num_threads(1)
    monkeypatch.setattr(RaggedModel, "_measure_step_times", lambda self: ())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_drafts_are_the_models_own_continuation(recorder: Recorder) -> None:
    """Guards: a draft token fed at the wrong position or to the wrong request when depths and lengths differ."""
    prompts = [random_ids(n) for n in (30, 7, 1, 12)]
    depths = [3, 0, 5, 1]
    reply = recorder.ask(*[item(str(i), 0, p, d) for i, (p, d) in enumerate(zip(prompts, depths, strict=True))])
    for proposal, prompt, depth in zip(reply.proposals, prompts, depths, strict=True):
        assert proposal.tokens == greedy_text(recorder.reference, prompt, depth)
        assert proposal.probs is None
        assert proposal.known_length == len(prompt)
    assert recorder.computed == [50, 2, 2, 1, 1]  # no forward for the last token of a draft


def test_accepted_drafts_are_not_computed_again(recorder: Recorder) -> None:
    """Guards: rolling the draft back to the committed length and paying for its own accepted tokens a second time."""
    prompt = random_ids(20)
    text = greedy_text(recorder.reference, prompt, 9)
    first = recorder.one(item("a", 0, prompt, 4))
    assert first.tokens == text[:4]
    second = recorder.one(item("a", 20, text[:5], 2))  # all four and the bonus token
    assert (second.tokens, recorder.computed) == (text[5:7], [2, 1])
    rejected = [*text[5:6], 3]  # one, then the target's own
    third = recorder.one(item("a", 25, rejected, 3))
    assert third.tokens == greedy_text(recorder.reference, [*prompt, *text[:5], *rejected], 3)
    assert recorder.computed == [1, 1, 1]


def test_a_late_answer_leaves_the_draft_ahead_and_nothing_is_lost(recorder: Recorder) -> None:
    """Guards: a round that timed out making the next one slower still, or wrong."""
    prompt = random_ids(20)
    text = greedy_text(recorder.reference, prompt, 12)
    recorder.one(item("a", 0, prompt, 2))
    recorder.one(item("a", 20, text[:3], 4))  # the router gave up on this one
    proposal = recorder.one(item("a", 20, text[:6], 2))
    assert (proposal.tokens, proposal.known_length) == (text[6:8], 26)
    assert recorder.computed == [1, 1]
    wrong = [*text[:2], 3, 4]
    assert recorder.one(item("a", 20, wrong, 1)).tokens == greedy_text(recorder.reference, [*prompt, *wrong], 1)
    assert recorder.one(item("a", 24, [], 1)).tokens == greedy_text(recorder.reference, [*prompt, *wrong], 1)


def test_catching_up_is_spread_over_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a long prompt in the draft holding up the drafts of everyone else; a request that never catches up."""
    recorder = Recorder(monkeypatch, catch_up_tokens=16)
    long, short = random_ids(45), random_ids(6)
    first, second = recorder.ask(item("long", 0, long, 2), item("short", 0, short, 2)).proposals
    assert (first.tokens, first.reason, first.known_length) == ((), "catching_up", 11)
    assert second.tokens == greedy_text(recorder.reference, short, 2)
    assert recorder.one(item("long", 11, long[11:], 0)).known_length == 27
    assert recorder.one(item("long", 27, long[27:], 2)).known_length == 43
    last = recorder.one(item("long", 43, long[43:], 2))
    assert (last.tokens, last.reason) == (greedy_text(recorder.reference, long, 2), None)


def test_need_context_when_the_sequence_is_not_known_that_far(recorder: Recorder) -> None:
    """Guards: drafting from tokens that this replica never saw."""
    unknown = recorder.one(item("a", 4, [5, 6], 2))
    assert (unknown.reason, unknown.known_length, unknown.tokens) == ("need_context", 0, ())
    recorder.one(item("a", 0, random_ids(8), 2))
    assert recorder.one(item("a", 11, [5], 2)).reason == "need_context"
    assert recorder.one(item("a", 8, [5], 2)).reason is None
    assert recorder.one(item("a", 9, [5], 2), release=("a",)).reason == "need_context"
    assert recorder.one(item("empty", 0, [], 2)).reason == "need_context"


def test_a_draft_says_when_it_cannot_read_or_hold_a_sequence(recorder: Recorder) -> None:
    """Guards: a crash, or a wrong embedding, when the target knows more ids or a longer context than its draft."""
    assert recorder.one(item("a", 0, [5, VOCAB, 6], 2)).reason == "unknown_token"
    assert recorder.one(item("b", 0, random_ids(129), 2)).reason == "out_of_context"
    near_the_end = recorder.one(item("c", 0, random_ids(126), 8))
    assert (len(near_the_end.tokens), near_the_end.reason) == (3, None)


def test_a_draft_stops_after_the_end_of_the_text(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: verifying tokens behind EOS, which can never be shown; and stopping where EOS does not end the text."""
    prompt = random_ids(9)
    text = greedy_text(recorder.reference, prompt, 5)
    assert len(set(text[:3])) == 3
    assert recorder.one(item("a", 0, prompt, 5, stop_token_ids=(text[2],))).tokens == text[:3]
    info = msgspec.structs.replace(recorder.draft.info, eos_token_ids=(text[1],))
    monkeypatch.setattr(recorder.draft, "_info", info)
    assert recorder.one(item("b", 0, prompt, 5, ignore_eos=False)).tokens == text[:2]
    assert recorder.one(item("c", 0, prompt, 5)).tokens == text


def test_distributions_are_sent_only_where_the_rule_needs_them(recorder: Recorder) -> None:
    """Guards: a rejection request without q, or with the q of another request's tokens."""
    prompt = random_ids(9)
    reply = recorder.ask(
        item("coupled", 0, prompt, 2, temperature=1.0, seed=1),
        item("rejection", 0, prompt, 3, temperature=1.0, seed=1, rule="rejection"),
        item("greedy", 0, prompt, 2, rule="rejection"),
    )
    coupled, rejection, greedy = reply.proposals
    assert coupled.probs is None
    assert greedy.probs is None
    assert rejection.probs is not None
    assert len(rejection.probs) == len(rejection.tokens) == 3
    for token, (ids, probs) in zip(rejection.tokens, rejection.probs, strict=True):
        assert token in ids
        assert sum(probs) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("top_n", [1, 5, VOCAB])
def test_the_configured_number_of_probabilities_is_sent(rule: str, top_n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: ``draft.top_n`` is accepted and ignored, or q is not cut where the token was drawn."""
    recorder = Recorder(monkeypatch, top_n=top_n)
    proposal = recorder.one(item("a", 0, random_ids(9), 4, temperature=1.0, seed=1, rule=rule))
    assert proposal.probs is not None
    assert [len(ids) for ids, _ in proposal.probs] == [top_n] * 4
    for token, (ids, probs) in zip(proposal.tokens, proposal.probs, strict=True):
        assert token in ids
        assert sum(probs) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_position_that_is_drafted_again_has_new_noise(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: block verification refuses a prefix because of the tokens after it; drafted again in the next round with the
    same noise they bias the text (found by the chi-square test of test_distribution_table.py)."""
    recorder, prompt = Recorder(monkeypatch, kv_capacity_tokens=4096), random_ids(6)
    names = [str(seed) for seed in range(20)]
    opening = [item(name, 0, prompt, 2, temperature=2.0, seed=int(name), rule=rule) for name in names]
    first = recorder.ask(*opening).proposals
    going_on = [item(p.sequence_id, len(prompt), p.tokens[:1], 1) for p in first]
    second = recorder.ask(*going_on).proposals
    assert len({p.tokens[0] for p in first}) > 10
    assert sum(a.tokens[1] == b.tokens[0] for a, b in zip(first, second, strict=True)) < 10


def test_the_longest_unused_sequence_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a full cache that stops all drafting, and evicting a sequence that this very call is about."""
    recorder = Recorder(monkeypatch, kv_capacity_tokens=256)
    for name in ("a", "b"):
        recorder.one(item(name, 0, random_ids(100), 1))
    recorder.one(item("a", 100, [5], 1))  # b is now the older one
    assert recorder.one(item("c", 0, random_ids(100), 1)).reason is None
    assert recorder.one(item("a", 101, [5], 1)).reason is None
    assert recorder.one(item("b", 100, [5], 1)).reason == "need_context"
    names = ("d", "e", "f")
    reasons = [p.reason for p in recorder.ask(*[item(name, 0, random_ids(100), 1) for name in names]).proposals]
    assert reasons == [None, None, "kv_full"]


def test_logits_that_are_not_finite_end_the_draft() -> None:
    """Guards: sending whatever argmax makes of NaN."""
    loaded = tiny_model()
    loaded.model.get_input_embeddings().weight[50] = torch.nan
    loaded.model.lm_head.weight[50] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.verify.ragged._random_ids", lambda count, vocab_size, seed: [3 + i for i in range(count)])
        draft = DraftModel(loaded, kv_capacity_tokens=512)
    request = ProposeRequest(round_id=1, items=(item("a", 0, [7, 50], 3), item("b", 0, [7, 9], 3)))
    spoilt, healthy = draft.propose(request).proposals
    assert (spoilt.tokens, spoilt.reason) == ((), "bad_logits")
    assert (len(healthy.tokens), healthy.reason) == (3, None)


def test_the_int8_copy_is_close_to_the_model() -> None:
    """Guards: quantisation that is broken rather than coarse: a scale lost, weights permuted."""
    reference = tiny_model().model
    draft = build_self_int8(tiny_model(), kv_capacity_tokens=1024)
    assert (draft.name, draft.info.dtype, draft.info.max_context) == ("self-int8", "int8", 128)
    prompts = [random_ids(8) for _ in range(16)]
    items = tuple(item(str(i), 0, prompt, 1) for i, prompt in enumerate(prompts))
    tokens = [proposal.tokens for proposal in draft.propose(ProposeRequest(round_id=1, items=items)).proposals]
    agreement = sum(token == greedy_text(reference, prompt, 1) for token, prompt in zip(tokens, prompts, strict=True))
    assert agreement >= 12  # of 16; by chance it would be 0 or 1


# --- after tokens of another source -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_goes_on_after_tokens_of_the_text(recorder: Recorder, temperature: float) -> None:
    """Bug guarded: the draft follows the committed tokens in spite of what is ahead, reads that one token a step, or counts it
    as committed."""
    prompt, ahead, options = random_ids(20), tuple(random_ids(3)), {"temperature": temperature, "seed": 3}
    plain = recorder.one(item("plain", 0, [*prompt, *ahead], 4, **options))
    hybrid = recorder.one(msgspec.structs.replace(item("hybrid", 0, prompt, 4, **options), ahead=ahead))
    assert hybrid.tokens == plain.tokens
    assert hybrid.known_length == len(prompt)
    assert recorder.computed == [len(prompt) + len(ahead), 1, 1, 1]


def test_refused_tokens_of_the_text_leave_the_drafts_cache(recorder: Recorder) -> None:
    """Bug guarded: the draft of a later round follows tokens of the text that the target refused, or computes again what it
    kept."""
    prompt, ahead = random_ids(20), tuple(random_ids(3))
    hybrid = recorder.one(msgspec.structs.replace(item("s", 0, prompt, 4), ahead=ahead))
    kept = [*prompt, *ahead, *hybrid.tokens[:2], 5]
    drafted = recorder.one(item("s", len(prompt) + 5, kept[-1:], 3))
    assert recorder.computed == [1, 1, 1]
    assert drafted.tokens == greedy_text(recorder.reference, kept, 3)
    refused = [*kept, 7]
    again = msgspec.structs.replace(item("s", len(kept), [7], 3), ahead=(9, 11))
    assert recorder.one(again).tokens == greedy_text(recorder.reference, [*refused, 9, 11], 3)
    corrected = [*refused, 9, 12]
    assert recorder.one(item("s", len(refused) + 1, [12], 3)).tokens == greedy_text(recorder.reference, corrected, 3)


def test_what_is_drawn_after_the_text_has_the_noise_of_its_round(recorder: Recorder) -> None:
    """Bug guarded: under the ratio rules a token after the text's is drawn with the noise of the round in which all before it
    is committed: where the text's last token is refused, that round draws with it again."""
    prompt, ahead = random_ids(20), tuple(random_ids(1))
    options = {"temperature": 5.0, "rule": "block"}
    later = [recorder.one(item(f"l{seed}", 0, [*prompt, *ahead], 1, seed=seed, **options)).tokens for seed in range(8)]
    hybrid = [
        recorder.one(msgspec.structs.replace(item(f"h{seed}", 0, prompt, 1, seed=seed, **options), ahead=ahead)).tokens
        for seed in range(8)
    ]
    assert later != hybrid


@pytest.mark.parametrize(("ahead", "reason"), [((VOCAB + 5,), "unknown_token"), ((3,) * 120, "out_of_context")])
def test_text_that_the_draft_cannot_read_is_refused(recorder: Recorder, ahead: tuple[int, ...], reason: str) -> None:
    """Bug guarded: an id without an embedding, or one beyond the context, breaks the batch of everybody."""
    bad = msgspec.structs.replace(item("bad", 0, random_ids(20), 2), ahead=ahead)
    refused, good = recorder.ask(bad, item("good", 0, random_ids(9), 2)).proposals
    assert (refused.tokens, refused.reason) == ((), reason)
    assert len(good.tokens) == 2
