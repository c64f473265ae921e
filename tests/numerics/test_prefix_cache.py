"""Prompts that begin alike share K and V: to the same bits as without, at the cost of the tokens that differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine.drivers import SyncDriver
from engine.models import LoadedModel
from engine.propose.base import DraftSource
from engine.propose.draft_model import DraftModel
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import ScriptedDraft
from engine.types import (
    FinishReason,
    GenerateRequest,
    Proposal,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    SequenceContext,
    StepReport,
    TokenLogprob,
    VerifyItem,
    VerifyRequest,
)
from engine.verify.attention import Chunk
from engine.verify.kv_cache import CachedSequence
from engine.verify.ragged import CPU_BLOCK_SIZE, RaggedModel
from engine.verify.target import Target

VOCAB = 97
SYSTEM = tuple((11 * i * i + 5 * i + 3) % 90 + 3 for i in range(128))
"""Two blocks that many prompts begin with."""


def tiny_model() -> LoadedModel:
    """Random weights; keys of 64 values, for which attention in bfloat16 is row-invariant on a CPU."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False).to(torch.bfloat16)
    return LoadedModel(
        name="tiny",
        tokenizer=None,
        config=config,
        eos_token_ids=(2,),
        vocab_size=VOCAB,
        max_context=512,
        fingerprint="tiny",
        model=model,
        dtype=torch.bfloat16,
        dtype_reason="test",
        device=torch.device("cpu"),
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring step times takes longer than the tests, and at this size a second thread only waits."""
    torch.set_num_threads(1)
    monkeypatch.setattr(RaggedModel, "_measure_step_times", lambda self: ())


@dataclass
class Counted:
    """A model and what its forwards computed."""

    model: RaggedModel
    num_computed: int = 0
    fault: Callable[[Tensor], Tensor] | None = None
    """What happens to the logits of the next forward; it may raise."""
    _forward: Callable[[Sequence[Chunk]], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._forward = self.model.forward
        self.model.forward = self._counting  # type: ignore[method-assign]

    def _counting(self, chunks: Sequence[Chunk]) -> Tensor:
        self.num_computed += sum(len(chunk.ids) for chunk in chunks)
        fault, self.fault = self.fault, None
        logits = self._forward(chunks)
        return logits if fault is None else fault(logits)

    def since(self, before: int) -> int:
        return self.num_computed - before


@pytest.fixture(scope="module")
def reference() -> Target:
    """A target that computes everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RaggedModel, "_measure_step_times", lambda self: ())
        target = Target(tiny_model(), kv_capacity_tokens=4096, prefix_cache=False)
    assert target.row_invariance.holds
    return target


def cached_target(kv_capacity_tokens: int = 4096, **options: Any) -> tuple[Target, Counted]:
    target = Target(tiny_model(), kv_capacity_tokens=kv_capacity_tokens, **options)
    return target, Counted(target.model)


Answer = tuple[tuple[int, ...], tuple[TokenLogprob, ...]]


@dataclass
class Played:
    """Tokens with logprobs per request that finished, and the rounds' reports."""

    answers: dict[str, Answer] = field(default_factory=dict)
    reports: list[StepReport] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        return sum(report.num_cached_tokens for report in self.reports)

    @property
    def num_prefilled(self) -> int:
        return sum(report.num_prefill_tokens for report in self.reports)


def request(name: str, prompt: tuple[int, ...], **params: Any) -> GenerateRequest:
    chosen = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True, "logprobs": 2, **params}
    return GenerateRequest(request_id=name, prompt_ids=prompt, params=SamplingParams(**chosen))


def play(
    target: Target,
    *requests: GenerateRequest,
    draft: DraftSource | None = None,
    prefill_tokens: int = 4096,
    later: Mapping[int, Sequence[GenerateRequest]] | None = None,
    cancelled: Mapping[int, Sequence[str]] | None = None,
) -> Played:
    """Run requests to their ends; ``later`` ones come before the given round, and ``cancelled`` ones go."""
    scheduler = Scheduler(target.info, FixedDepth(4), max_batch=16, prefill_tokens=prefill_tokens, max_waiting=99)
    driver = SyncDriver(target, draft, scheduler)
    played, parts = Played(), dict[str, Answer]()
    for one in requests:
        driver.add(one)
    while scheduler.running or scheduler.waiting:
        for name in (cancelled or {}).get(len(played.reports), ()):
            driver.cancel(name)
        for one in (later or {}).get(len(played.reports), ()):
            driver.add(one)
        result = driver.step()
        played.reports.append(result.report)
        for delta in result.deltas:
            tokens, logprobs = parts.get(delta.request_id, ((), ()))
            parts[delta.request_id] = tokens + delta.token_ids, logprobs + (delta.logprobs or ())
            if delta.finish_reason is not None:
                assert delta.finish_reason is FinishReason.LENGTH, delta.error
                played.answers[delta.request_id] = parts[delta.request_id]
    driver.step()  # tells the target who has ended
    return played


def alone(reference: Target, *requests: GenerateRequest) -> dict[str, Answer]:
    """Each request by itself, without speculation or cache."""
    return {name: answer for one in requests for name, answer in play(reference, one).answers.items()}


def half_right(texts: Mapping[tuple[int, ...], tuple[int, ...]]) -> ScriptedDraft:
    """A draft that knows the continuation of each prompt and is wrong at every third position."""

    def next_token(ids: Sequence[int]) -> int:
        for prompt, text in texts.items():
            place = len(ids) - len(prompt)
            if tuple(ids[: len(prompt)]) == prompt and 0 <= place < len(text):
                return text[place] if len(ids) % 3 else 3
        return 3

    return ScriptedDraft(next_token)


# --- the target -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "sampled"])
def test_a_hit_says_what_a_miss_says(reference: Target, params: dict[str, Any]) -> None:
    """Bug guarded: K and V of other tokens, positions or bits behind a prompt that was seen before (L37)."""
    target, counted = cached_target()
    ask = request("a", (*SYSTEM, *range(20, 42)), **params)
    expected = alone(reference, ask)
    computed, cached = [], []
    for _ in range(3):
        before = counted.num_computed
        played = play(target, ask)
        assert played.answers == expected
        computed.append(counted.since(before))
        cached.append((played.num_cached, played.num_prefilled))
    assert computed == [150 + 8, 22 + 8, 22 + 8]
    assert cached == [(0, 150), (128, 22), (128, 22)]
    target.forget_prefixes()
    before = counted.num_computed
    assert play(target, ask).answers == expected
    assert counted.since(before) == 150 + 8


def test_equal_prompts_of_one_round_are_computed_once(reference: Target) -> None:
    """Bug guarded: n > 1 pays for its prompt n times; or reads what is still to be written."""
    target, counted = cached_target()
    choices = [request(str(i), (*SYSTEM, *range(20, 42)), temperature=0.9, seed=i) for i in range(4)]
    played = play(target, *choices)
    assert played.answers == alone(reference, *choices)
    assert len(set(played.answers.values())) > 1
    assert counted.num_computed == 150 + 3 * 22 + 4 * 8
    assert played.reports[0].num_target_tokens == 150 + 3 * 22


@pytest.mark.parametrize("prefill_tokens", [40, 64, 100, 128])
def test_chunks_find_what_is_known(reference: Target, prefill_tokens: int) -> None:
    """Bug guarded: a chunk that ends inside a block or at its end misses, or is answered without the logits it needs."""
    target, counted = cached_target()
    prompt = (*SYSTEM, *SYSTEM[::-1], 7)
    ask, again = request("a", prompt), request("b", prompt)
    expected = alone(reference, ask, again)
    assert play(target, ask, prefill_tokens=prefill_tokens).answers["a"] == expected["a"]
    before = counted.num_computed
    assert play(target, again, prefill_tokens=prefill_tokens).answers["b"] == expected["b"]
    ends = [*range(prefill_tokens, len(prompt), prefill_tokens), len(prompt)]
    starts = [0, *ends[:-1]]
    found = [end // CPU_BLOCK_SIZE * CPU_BLOCK_SIZE for end in ends]  # the last token of the prompt ends no block
    assert counted.since(before) == sum(end - max(a, b) for end, a, b in zip(ends, starts, found, strict=True)) + 8


def test_the_next_turn_finds_the_last_answer(reference: Target) -> None:
    """Bug guarded: a conversation computes its own answers again; or finds blocks that rejected drafts have filled."""
    target, counted = cached_target()
    turn = request("a", SYSTEM[:60], max_tokens=100)
    expected = alone(reference, turn)
    said = expected["a"][0]
    played = play(target, turn, draft=half_right({turn.prompt_ids: said}))
    assert played.answers == expected
    assert 0 < sum(report.num_accepted for report in played.reports) < sum(report.num_drafted for report in played.reports)
    again = request("b", (*turn.prompt_ids, *said, 5, 6))
    before = counted.num_computed
    assert play(target, again).answers == alone(reference, again)
    assert counted.since(before) == 162 - 128 + 8


def test_others_share_cancel_and_return(reference: Target) -> None:
    """Bug guarded: cancelling and retrying requests with a shared prefix corrupts the others, or unrelated ones (L36)."""
    target, _ = cached_target()
    sharing = [request(str(i), (*SYSTEM, *range(30 + i, 40 + 3 * i)), max_tokens=70) for i in range(6)]
    unrelated = [request(f"u{i}", SYSTEM[i + 1 : i + 80], max_tokens=70) for i in range(2)]
    retried = [request(f"r{i}", sharing[i].prompt_ids, max_tokens=70) for i in range(2)]
    expected = alone(reference, *sharing, *unrelated, *retried)
    draft = half_right({one.prompt_ids: expected[one.request_id][0] for one in (*sharing, *unrelated)})
    played = play(
        target,
        *sharing,
        *unrelated,
        draft=draft,
        later={5: retried[:1], 9: retried[1:]},
        cancelled={4: ["0"], 8: ["1"]},
    )
    assert {"0", "1"}.isdisjoint(played.answers)
    assert played.answers == {name: answer for name, answer in expected.items() if name not in ("0", "1")}
    assert sum(report.num_accepted for report in played.reports) > 50
    assert played.num_cached >= 7 * 128


def test_evicted_prompts_are_computed_again(reference: Target) -> None:
    """Bug guarded: a prompt whose blocks went to others is still found, or only its end is."""
    target, counted = cached_target(kv_capacity_tokens=6 * CPU_BLOCK_SIZE)
    ask = request("a", (*SYSTEM, 5, 6, 7))
    other = request("b", tuple(reversed(SYSTEM + SYSTEM))[:250])
    expected = alone(reference, ask, other)
    computed = []
    for one in (ask, other, ask, other, ask):
        before = counted.num_computed
        assert play(target, one).answers[one.request_id] == expected[one.request_id]
        computed.append(counted.since(before) - 8)
    assert computed[:2] == [131, 250]
    assert computed[2] in (131, 131 - 64)  # of five blocks that the other one takes, four were free
    assert computed[3] < 250


def test_a_preempted_request_comes_back_cheaply(reference: Target) -> None:
    """Bug guarded: preemption under memory pressure costs the whole prompt once more; or the bound on blocks is broken."""
    requests = [request(str(i), (*SYSTEM, *range(20 + 9 * i, 80 + i)), max_tokens=90) for i in range(3)]
    expected = alone(reference, *requests)
    computed = {}
    for prefix_cache in (False, True):
        target, counted = cached_target(kv_capacity_tokens=10 * CPU_BLOCK_SIZE, prefix_cache=prefix_cache)
        played = play(target, *requests)
        assert sum(report.num_preempted for report in played.reports) > 0
        assert played.answers == expected
        computed[prefix_cache] = counted.num_computed
    assert computed[True] < computed[False] - 2 * 128


def test_scored_prompts_are_computed(reference: Target) -> None:
    """Bug guarded: echo of a known prompt without the logprobs of what the cache held."""
    target, counted = cached_target()
    prompt = (*SYSTEM, 5, 6, 7)
    play(target, request("a", prompt))
    before = counted.num_computed
    scored = request("b", prompt, prompt_logprobs=1)
    driver = SyncDriver(target, None, Scheduler(target.info, FixedDepth(0), max_batch=1, prefill_tokens=50, max_waiting=1))
    first = next(delta for delta in driver.generate([scored]) if delta.prompt_logprobs)
    other = SyncDriver(
        reference, None, Scheduler(reference.info, FixedDepth(0), max_batch=1, prefill_tokens=999, max_waiting=1)
    )
    assert first.prompt_logprobs == next(d for d in other.generate([scored]) if d.prompt_logprobs).prompt_logprobs
    assert len(first.prompt_logprobs or ()) == len(prompt) - 1
    assert counted.since(before) == len(prompt)


def test_switched_off_nothing_is_shared() -> None:
    """Bug guarded: an option that is accepted and ignored."""
    target, counted = cached_target(prefix_cache=False)
    for name in "ab":
        assert play(target, request(name, (*SYSTEM, 5))).num_cached == 0
    assert counted.num_computed == 2 * (129 + 8)


def verify_item(name: str, *tokens: int) -> VerifyItem:
    context = SequenceContext(params=SamplingParams(temperature=0.0), prompt_length=len(tokens))
    return VerifyItem(sequence_id=name, base_length=0, tokens=tokens, context=context)


def verify(target: Target, *items: VerifyItem, release: tuple[str, ...] = ()) -> list[tuple[int, ...] | str]:
    reply = target.verify(VerifyRequest(round_id=1, items=items, release=release))
    return [verdict.error or verdict.tokens for verdict in reply.verdicts]


def test_what_gave_no_numbers_is_not_cached(reference: Target) -> None:
    """Bug guarded: one faulty forward makes every later request with the same beginning fail."""
    target, counted = cached_target()
    counted.fault = lambda logits: logits.fill_(torch.nan)
    item = verify_item("a", *SYSTEM, 5)
    assert all("finite" in str(answer) for answer in verify(target, item, verify_item("b", *SYSTEM, 6)))
    before = counted.num_computed
    assert verify(target, verify_item("c", *SYSTEM, 5), release=("a", "b")) == verify(reference, item)
    assert counted.since(before) == 129
    reference.verify(VerifyRequest(round_id=1, items=(), release=("a",)))


def test_a_forward_that_breaks_off_leaves_nothing_behind(reference: Target) -> None:
    """Bug guarded: blocks that were announced and never written are found by the next request."""
    target, counted = cached_target()

    def break_off(logits: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    items = [verify_item(name, *SYSTEM, 5) for name in "ab"]
    counted.fault = break_off
    with pytest.raises(RuntimeError, match="out of memory"):
        verify(target, *items)
    before = counted.num_computed
    assert verify(target, *items) == 2 * verify(reference, items[0])
    assert counted.since(before) == 129 + 1
    verify(target, release=("a", "b"))
    assert target.model.cache.pool.num_free == target.model.cache.pool.num_blocks
    verify(reference, release=("a",))


# --- the draft --------------------------------------------------------------------------------------------------------------


def propose_item(name: str, prompt: tuple[int, ...], depth: int = 3) -> ProposeItem:
    context = SequenceContext(params=SamplingParams(temperature=0.0, ignore_eos=True), prompt_length=len(prompt))
    return ProposeItem(sequence_id=name, base_length=0, tokens=prompt, depth=depth, context=context)


def propose(draft: DraftModel, *items: ProposeItem, release: tuple[str, ...] = ()) -> tuple[Proposal, ...]:
    return draft.propose(ProposeRequest(round_id=1, items=items, release=release)).proposals


def test_a_draft_catches_up_from_the_cache() -> None:
    """Bug guarded: a draft that computes known prompts again, or continues them as another text."""
    draft = DraftModel(tiny_model(), kv_capacity_tokens=2048, catch_up_tokens=400)
    counted = Counted(draft.model)
    plain = DraftModel(tiny_model(), kv_capacity_tokens=2048, catch_up_tokens=4000, prefix_cache=False)
    items = [propose_item(str(i), (*SYSTEM, *range(20 + i, 42 + i))) for i in range(4)]
    expected = propose(plain, *items)
    assert [proposal.reason for proposal in expected] == [None] * 4
    assert propose(draft, *items) == expected
    assert counted.num_computed == 150 + 3 * 22 + 4 * 2
    before = counted.num_computed
    assert propose(draft, *items, release=("0", "1", "2", "3")) == expected
    assert counted.since(before) == 4 * 22 + 4 * 2


def test_accepted_drafts_are_found_by_others() -> None:
    """Bug guarded: a draft whose own tokens were accepted never offers the block that they filled."""
    draft = DraftModel(tiny_model(), kv_capacity_tokens=2048)
    counted = Counted(draft.model)
    drafted = propose(draft, propose_item("a", SYSTEM[:62], 6))[0].tokens
    accepted = ProposeItem(sequence_id="a", base_length=62, tokens=(*drafted[:5], 9), depth=3)
    expected = propose(draft, accepted)[0].tokens
    before = counted.num_computed
    assert propose(draft, propose_item("b", (*SYSTEM[:62], *drafted[:5], 9)))[0].tokens == expected
    assert counted.since(before) == 68 - 64 + 2


def test_a_forgotten_draft_sequence_comes_back_cheaply() -> None:
    """Bug guarded: a full draft computes a prompt from its start whenever it had to forget it."""
    draft = DraftModel(tiny_model(), kv_capacity_tokens=6 * CPU_BLOCK_SIZE)
    counted = Counted(draft.model)
    first, second = propose_item("a", (*SYSTEM, 5)), propose_item("b", (*SYSTEM[::-1], 6))
    third = propose_item("c", (*SYSTEM[::2], 7))  # takes the two blocks that only a gives
    expected = propose(draft, first)
    propose(draft, second)
    propose(draft, third)
    before = counted.num_computed
    assert propose(draft, first) == expected
    assert counted.since(before) < 129 + 2


# --- the tensors ------------------------------------------------------------------------------------------------------------


def test_a_fork_and_its_parent_go_their_own_ways() -> None:
    """Bug guarded: a copy that misses a layer or a slot, or one of the two reading what the other one wrote."""
    model = RaggedModel(tiny_model(), numerics="invariant", kv_capacity_tokens=2048)

    def rows(sequence: CachedSequence, tokens: Sequence[int]) -> Tensor:
        model.cache.reserve(sequence, len(tokens))
        return model.forward([Chunk(sequence, tokens, len(tokens))]).clone()

    parent, by_itself, other = CachedSequence(), CachedSequence(), CachedSequence()
    rows(parent, SYSTEM[:100])
    child = model.cache.fork(parent, 90)
    assert child.blocks[0] == parent.blocks[0]
    assert child.blocks[1] != parent.blocks[1]
    rows(other, SYSTEM[:90])
    rows(by_itself, SYSTEM[:100])
    assert torch.equal(rows(child, range(3, 60)), rows(other, range(3, 60)))
    assert torch.equal(rows(parent, range(9, 70)), rows(by_itself, range(9, 70)))
    model.cache.truncate(child, 30)  # into the shared block
    model.cache.truncate(other, 30)
    assert torch.equal(rows(child, range(50, 90)), rows(other, range(50, 90)))
    assert torch.equal(rows(parent, range(9, 30)), rows(by_itself, range(9, 30)))
