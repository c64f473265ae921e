"""Preparing the next round while the target verifies: the same drafts as asked for afterwards, in few forwards."""

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, random_ids, tiny_model
from torch import Tensor

from engine import noise
from engine.models import load_model
from engine.noise import Stream
from engine.propose.draft_model import DraftModel, affordable_tokens
from engine.sampling import SampledSequence, likeliest_next, propose_tokens
from engine.types import (
    Outcome,
    Prepared,
    PrepareItem,
    PrepareRequest,
    Proposal,
    ProposeItem,
    ProposeRequest,
    SamplingParams,
    SequenceContext,
)
from engine.verify.attention import Chunk
from engine.verify.ragged import CPU_BLOCK_SIZE, RaggedModel
from engine.verify.stateful import StatefulModel

EOS = 2
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {7: 2.0}},
    "coupled": {"temperature": 1.0},
    "coupled, filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "coupled, penalised": {"temperature": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4, "min_tokens": 40},
    "rejection": {"temperature": 1.0, "rule": "rejection"},
    "rejection, filtered": {"temperature": 1.3, "rule": "rejection", "min_p": 0.05, "repetition_penalty": 1.2},
    "block": {"temperature": 0.7, "rule": "block"},
    "block, filtered": {"temperature": 1.0, "rule": "block", "top_p": 0.8},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring step times takes longer than the tests, and at this size a second thread only waits."""
    torch.set_num_threads(1)
    for model in (RaggedModel, StatefulModel):
        monkeypatch.setattr(model, "_measure_step_times", lambda self: ())


def draft_model(family: str = "llama", **options: Any) -> DraftModel:
    sizes = {"kv_capacity_tokens": 16 * 1024, "shared_catch_up_tokens": 256, **options}  # not what this machine affords today
    return DraftModel(tiny_model(family, head_dim=16), **sizes)


def context(prompt: Sequence[int], **params: Any) -> SequenceContext:
    return SequenceContext(
        params=SamplingParams(**{"ignore_eos": True, "seed": 3, "temperature": 0.0, **params}), prompt_length=len(prompt)
    )


def ask(name: str, tokens: Sequence[int], depth: int, known: SequenceContext, base: int = 0) -> ProposeItem:
    return ProposeItem(
        sequence_id=name, base_length=base, tokens=tuple(tokens), depth=depth, context=known if base == 0 else None
    )


def want(
    name: str,
    tokens: Sequence[int],
    known: SequenceContext,
    draft: Sequence[int] = (),
    depth: int = 3,
    fan_out: Sequence[int] | int = 2,
    base: int = 0,
) -> PrepareItem:
    fans = (fan_out,) * (len(draft) + 1) if isinstance(fan_out, int) else tuple(fan_out)
    return PrepareItem(
        sequence_id=name,
        base_length=base,
        tokens=tuple(tokens),
        draft=tuple(draft),
        depth=depth,
        fan_out=fans,
        context=known if base == 0 else None,
    )


def propose(draft: DraftModel, *items: ProposeItem) -> tuple[Proposal, ...]:
    return draft.propose(ProposeRequest(round_id=1, items=items)).proposals


def prepare(draft: DraftModel, *items: PrepareItem) -> tuple[Prepared, ...]:
    return draft.prepare(PrepareRequest(round_id=2, items=items)).prepared


def count_tokens(monkeypatch: pytest.MonkeyPatch, draft: DraftModel) -> list[int]:
    """Tokens of every forward from now on."""
    computed: list[int] = []
    forward: Callable[[Sequence[Chunk]], Tensor] = draft.model.forward

    def counting(chunks: Sequence[Chunk]) -> Tensor:
        computed.append(sum(len(chunk.ids) for chunk in chunks))
        return forward(chunks)

    monkeypatch.setattr(draft.model, "forward", counting)
    return computed


def break_forward(monkeypatch: pytest.MonkeyPatch, draft: DraftModel, when: Callable[[Sequence[Chunk]], bool]) -> None:
    forward: Callable[[Sequence[Chunk]], Tensor] = draft.model.forward

    def breaking(chunks: Sequence[Chunk]) -> Tensor:
        if when(chunks):
            raise RuntimeError("out of memory")
        return forward(chunks)

    monkeypatch.setattr(draft.model, "forward", breaking)


def num_owned(draft: DraftModel) -> int:
    return draft.model.cache.pool.num_blocks - draft.model.cache.pool.num_free


def assert_as_proposed(outcome: Outcome, after: Proposal, exact: bool) -> None:
    """Bits on kernels whose rows do not depend on their batch, otherwise up to rounding."""
    assert outcome.tokens == after.tokens
    assert (outcome.probs is None) == (after.probs is None)
    for own, other in zip(outcome.probs or (), after.probs or (), strict=True):
        assert (
            own == other if exact else dict(zip(*own, strict=True)) == pytest.approx(dict(zip(*other, strict=True)), rel=1e-3)
        )


# --- what is prepared -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kernels"), [("llama", "auto"), ("llama", "torch"), ("mistral", "auto"), ("gemma2", "auto")]
)
def test_an_outcome_has_the_draft_that_would_be_proposed_after_it(family: str, kernels: str) -> None:
    """Bug guarded: forks that read each other's keys, noise or penalties keyed to the wrong position, num_drawn that counts the
    outcome's token, a q of another row: under every rule, with filters and penalties, at mixed depths and fan-outs."""
    draft, fresh = (draft_model(family, kernels=kernels, prefix_cache=on) for on in (True, False))
    exact = draft.model.info.path == "native"
    chance = random.Random(1)
    items, texts = [], {}
    for place, (name, params) in enumerate(PARAMS.items()):
        prompt = random_ids((5, 62, 63, 64, 90, 30, 61, 127, 60)[place])  # drafts and forks on both sides of blocks' ends
        known = context(prompt, **params)
        (own,) = propose(draft, ask(name, prompt, chance.randint(1, 5), known))
        fans = [chance.randint(0, 3) for _ in own.tokens] + [chance.randint(1, 4)]
        items.append(want(name, prompt[-1:], known, own.tokens, chance.randint(1, 4), fans, base=len(prompt) - 1))
        texts[name] = (prompt, known)
    before = num_owned(draft)
    answers = prepare(draft, *items)
    assert num_owned(draft) <= before + len(items)  # the draft at the target, no forks
    for item, answer in zip(items, answers, strict=True):
        prompt, known = texts[item.sequence_id]
        assert (answer.reason, answer.known_length) == (None, len(prompt))
        assert [sum(o.accepted == a for o in answer.outcomes) for a in range(len(item.fan_out))] == list(item.fan_out)
        assert len({(o.accepted, o.token) for o in answer.outcomes}) == len(answer.outcomes)
        for number, outcome in enumerate(answer.outcomes):
            text = [*prompt, *item.draft[: outcome.accepted], outcome.token]
            (after,) = propose(fresh, ask(f"{item.sequence_id}/{number}", text, item.depth, replace_prompt(known, prompt)))
            assert_as_proposed(outcome, after, exact)
            assert len(outcome.tokens) == item.depth


def replace_prompt(known: SequenceContext, prompt: Sequence[int]) -> SequenceContext:
    return SequenceContext(params=known.params, prompt_length=len(prompt))


def test_the_real_int8_draft_prepares_what_it_would_propose() -> None:
    """Bug guarded: as above, in the packed int8 kernels with three query heads per key head and bfloat16 caches."""
    torch.set_num_threads(2)  # rows that share blocks may run beside each other
    loaded = load_model("smollm2")
    prompt = loaded.tokenizer.encode("The history of the city begins with a small settlement on the river, where")
    draft = DraftModel(loaded, weights="int8", kv_capacity_tokens=8192)
    for rule in ("coupled", "block"):
        known = context(prompt, temperature=0.9, rule=rule)
        (own,) = propose(draft, ask(rule, prompt, 3, known))
        (answer,) = prepare(draft, want(rule, prompt[-1:], known, own.tokens, 3, (1, 1, 1, 2), base=len(prompt) - 1))
        assert len(answer.outcomes) == 5
        for number, outcome in enumerate(answer.outcomes):
            text = [*prompt, *own.tokens[: outcome.accepted], outcome.token]
            (after,) = propose(draft, ask(f"{rule}/{number}", text, 3, known))
            assert_as_proposed(outcome, after, draft.model.info.path == "native")


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_many_rounds_of_hits_and_misses(params: dict[str, Any]) -> None:
    """Bug guarded: a cache that keeps a refused draft, a fork's token in the parent's block, or a block that others adopted
    before its text was committed: after some rounds the draft is no longer the model's."""
    draft, fresh = draft_model(), draft_model(prefix_cache=False)
    exact = draft.model.info.path == "native"
    chance = random.Random(4)
    shared = random_ids(70)
    texts = {name: [*shared, *random_ids(n)] for name, n in (("a", 0), ("b", 0), ("c", 9))}
    known = {name: context(text, **params) for name, text in texts.items()}
    lengths, drafts = dict.fromkeys(texts, 0), dict.fromkeys(texts, ())
    for number in range(12):
        items = [
            want(name, text[lengths[name] :], known[name], drafts[name], chance.randint(1, 4), 2, base=lengths[name])
            for name, text in texts.items()
        ]
        for item, answer in zip(items, prepare(draft, *items), strict=True):
            name = item.sequence_id
            assert answer.outcomes
            hit = chance.choice(answer.outcomes)
            accepted = chance.randint(0, len(item.draft))
            is_hit = chance.random() < 0.7
            texts[name] += (*item.draft[: hit.accepted], hit.token) if is_hit else (*item.draft[:accepted], 5)
            lengths[name] = answer.known_length
            drafts[name] = hit.tokens if is_hit else ()
            if is_hit:
                (after,) = propose(fresh, ask(f"{name}{number}", texts[name], item.depth, known[name]))
                assert_as_proposed(hit, after, exact)


def test_the_first_token_of_a_text_can_be_prepared() -> None:
    """Bug guarded: a prompt's last chunk without a draft that has no outcomes, so that every request begins with a miss."""
    draft, prompt = draft_model(), random_ids(40)
    known = context(prompt, temperature=1.0)
    (answer,) = prepare(draft, want("a", prompt[:30], known, fan_out=(), depth=0))
    assert (answer.outcomes, answer.known_length, answer.reason) == ((), 30, None)
    (answer,) = prepare(draft, want("a", prompt[30:], known, fan_out=(3,), base=30))
    (drawn,) = propose(draft, ask("b", prompt, 1, known))
    assert [outcome.accepted for outcome in answer.outcomes] == [0, 0, 0]
    assert answer.outcomes[0].token == drawn.tokens[0]


def test_outcomes_are_neither_the_drafts_own_token_nor_the_end_of_the_text() -> None:
    """Bug guarded: a fork for what cannot be the outcome, or behind which nothing follows, in place of one that could hit."""
    draft, prompt = draft_model(), random_ids(20)
    (own,) = propose(draft, ask("a", prompt, 3, context(prompt)))
    everything = prepare(draft, want("a", prompt[-1:], context(prompt), own.tokens, 1, VOCAB, base=19))[0].outcomes
    places = [[o.token for o in everything if o.accepted == a] for a in range(4)]
    assert [token in tokens for token, tokens in zip(own.tokens, places, strict=False)] == [False] * 3
    best = places[0][0]
    stopping = context(prompt, stop_token_ids=(best,))
    (answer,) = prepare(draft, want("s", prompt, stopping, own.tokens, 1, 1))
    assert [o.token for o in answer.outcomes if o.accepted == 0] == [places[0][1]]
    ending = context(prompt, stop_token_ids=(own.tokens[1],))
    (answer,) = prepare(draft, want("e", prompt, ending, own.tokens, 1, 1))
    assert {o.accepted for o in answer.outcomes} == {0, 1}
    (answer,) = prepare(draft, want("f", prompt, context(prompt, temperature=1.0, top_k=1), own.tokens[:1], 1, (2, 0)))
    assert (answer.outcomes, answer.reason) == ((), "no_outcome")


def test_forwards_are_shared_and_short_items_drop_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a forward per item or per outcome, or rows of items that are done, which would cost more than the verify."""
    draft = draft_model(shared_catch_up_tokens=256)
    computed = count_tokens(monkeypatch, draft)
    prompts = [random_ids(n) for n in (10, 20, 30, 7)]
    items = [
        want("a", prompts[0], context(prompts[0]), [5, 6], 3, (1, 1, 2)),
        want("b", prompts[1], context(prompts[1]), [7], 1, (3, 0)),
        want("catches up", prompts[2], context(prompts[2]), [], 0, ()),
        want("d", prompts[3], context(prompts[3]), [], 4, (2,)),
    ]
    reply = draft.prepare(PrepareRequest(round_id=9, items=tuple(items)))
    assert computed == [12 + 21 + 30 + 7, 4 + 3 + 2, 4 + 2, 4 + 2, 2]
    assert (reply.round_id, reply.num_steps) == (9, 5)
    computed.clear()
    prepare(draft, want("a", [5, 9], context(prompts[0]), [4], 1, (1, 1), base=10))  # one accepted, one corrected
    assert computed == [2, 2]


# --- room -------------------------------------------------------------------------------------------------------------------


def test_forks_leave_no_blocks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: blocks that nobody gives back, until the draft can hold nothing: after answers, and after forwards that
    break off at any step."""
    draft, prompt = draft_model(prefix_cache=False), random_ids(70)
    known = context(prompt)
    prepare(draft, want("a", prompt, known, [5, 6, 7], 3, 3))
    assert num_owned(draft) == 2
    for step in range(4):
        draft.propose(ProposeRequest(round_id=0, items=(), release=("a",)))
        assert num_owned(draft) == 0
        steps = iter(range(9))
        with monkeypatch.context() as patch:
            break_forward(patch, draft, lambda chunks, steps=steps, step=step: next(steps) == step)
            with pytest.raises(RuntimeError, match="out of memory"):
                prepare(draft, want("a", prompt, known, [5, 6, 7], 3, 3))
        assert num_owned(draft) == 0
        assert len(prepare(draft, want("a", prompt, known, [5, 6, 7], 3, 3))[0].outcomes) == 12


def test_without_room_the_likeliest_outcomes_are_prepared() -> None:
    """Bug guarded: a full cache that costs all outcomes, those of others, or the proposals in the same call; or the outcomes
    that fit being whatever came first."""
    prompt = random_ids(60)
    known, own = context(prompt), random_ids(2)
    roomy = prepare(draft_model(), want("a", prompt, known, own, 2, (1, 1, 3)))[0].outcomes
    assert [o.accepted for o in roomy] == [2, 2, 2, 0, 1]
    for num_free in range(4):
        draft = draft_model(kv_capacity_tokens=(3 + num_free) * CPU_BLOCK_SIZE)
        propose(draft, ask("idle", random_ids(130), 1, known))  # three blocks that are taken back
        asked = ask("proposes", prompt, 2, known)
        (proposed,), (prepared,) = draft.run(
            [ProposeRequest(round_id=1, items=(asked,))],
            [PrepareRequest(round_id=1, items=(want("a", prompt, known, own, 2, (1, 1, 3)),))],
        )
        assert len(proposed.proposals[0].tokens) == 2
        (answer,) = prepared.prepared
        assert answer.outcomes == roomy[: 1 + num_free]
        assert answer.reason is None
        assert propose(draft, ask("idle", [5], 1, known, base=131))[0].reason == "need_context"
    draft = draft_model(kv_capacity_tokens=CPU_BLOCK_SIZE)
    (answer,) = prepare(draft, want("a", prompt, known, own, 2, 1))
    assert (answer.outcomes, answer.reason, answer.known_length) == ((), "kv_full", 60)
    draft = draft_model(kv_capacity_tokens=2 * CPU_BLOCK_SIZE, prefix_cache=False)
    (answer,) = prepare(draft, want("a", [*prompt, 5, 6, 7], known, [8], 3, (1, 0)))  # room for the copy, not for what follows
    assert (answer.outcomes, answer.reason, num_owned(draft)) == ((), "kv_full", 1)


def test_the_end_of_the_context_is_no_place_for_outcomes() -> None:
    """Bug guarded: positions beyond what the model was made for, or a refused call, when a text nearly fills the context."""
    draft, prompt = draft_model(max_context=80), random_ids(77)
    known = context(prompt)
    (answer,) = prepare(draft, want("a", prompt, known, [5, 6, 7, 8], 4, 1))
    assert [(o.accepted, len(o.tokens)) for o in sorted(answer.outcomes, key=lambda o: o.accepted)] == [(0, 3), (1, 2), (2, 1)]
    full = [*prompt, 5, 6, 7]
    (answer,) = prepare(draft, want("b", full, known, [8], 4, 1))
    assert (answer.outcomes, answer.reason) == ((), "out_of_context")
    (answer,) = prepare(draft, want("c", prompt[:9], known, [5, VOCAB, 6], 2, 1))  # an id that only the target knows
    assert {o.accepted for o in answer.outcomes} == {0, 1}


def test_long_catching_up_leaves_outcomes_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: one request that comes back with a long text makes the outcomes of all others late, round after round."""
    draft = draft_model(catch_up_tokens=100, shared_catch_up_tokens=16)
    computed = count_tokens(monkeypatch, draft)
    long, short = random_ids(130), random_ids(12)
    behind = want("long", long, context(long), depth=2, fan_out=(1,))
    first, second = prepare(draft, behind, want("short", short, context(short), [5], 2, 1))
    assert (first.outcomes, first.reason, first.known_length) == ((), "catching_up", 5)
    assert len(second.outcomes) == 2
    assert computed[0] == 16 + 2
    (alone,) = prepare(draft, want("long", long[5:], context(long), depth=2, fan_out=(1,), base=5))
    assert (alone.reason, alone.known_length) == ("catching_up", 105)
    (last,) = prepare(draft, want("long", long[105:], context(long), depth=2, fan_out=(1,), base=105))
    assert (last.reason, len(last.outcomes)) == (None, 1)


def test_few_tokens_are_what_the_step_times_allow() -> None:
    """Bug guarded: a bound of a size that holds outcomes up on a CPU, or makes a GPU catch up for minutes."""
    assert affordable_tokens(((1, 0.010), (8, 0.028), (16, 0.039), (32, 0.058))) == 16
    assert affordable_tokens(((1, 0.004), (64, 0.005))) == 64
    assert [affordable_tokens(times) for times in ((), ((1, 3.9),))] == [16, 16]  # hardly measured


def test_a_full_batch_of_single_tokens_is_no_catching_up() -> None:
    """Bug guarded: requests that missed once, each one token behind, that are put off because together they are many."""
    draft = draft_model(shared_catch_up_tokens=4)
    prompts = {str(i): random_ids(9) for i in range(12)}
    prepare(draft, *(want(name, ids[:7], context(ids), depth=0, fan_out=()) for name, ids in prompts.items()))
    answers = prepare(draft, *(want(n, ids[7:], context(ids), fan_out=1, base=7) for n, ids in prompts.items()))
    assert [answer.reason for answer in answers] == [None] * 12


# --- several callers, and what goes wrong -----------------------------------------------------------------------------------


def test_requests_of_several_callers_share_their_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: answers that go to the wrong request or differ from those to the same request alone, or forwards one after
    another where one would do."""
    prompts = {name: random_ids(n) for name, n in (("p", 9), ("q", 30), ("r", 65), ("s", 12))}
    known = {name: context(ids, temperature=1.0, rule="rejection") for name, ids in prompts.items()}
    proposes = [ProposeRequest(round_id=i, items=(ask(n, prompts[n], 2, known[n]),)) for i, n in ((4, "p"), (5, "q"))]
    prepares = [
        PrepareRequest(round_id=6, items=(want("r", prompts["r"], known["r"], [5, 6], 2, 2),)),
        PrepareRequest(round_id=7, items=(want("s", prompts["s"], known["s"], [8], 3, 1),)),
    ]
    draft, alone = draft_model(shared_catch_up_tokens=256), draft_model()
    computed = count_tokens(monkeypatch, draft)
    proposed, prepared = draft.run(proposes, prepares)
    assert len(computed) == 4
    assert {reply.num_steps for reply in (*proposed, *prepared)} == {4}
    assert len({reply.step_time_s for reply in (*proposed, *prepared)}) == 1
    exact = draft.model.info.path == "native"
    for reply, request in zip(proposed, proposes, strict=True):
        (own,), (other,) = reply.proposals, alone.propose(request).proposals
        assert (reply.round_id, own.sequence_id) == (request.round_id, other.sequence_id)
        assert own == other if exact else own.tokens == other.tokens
    for reply, request in zip(prepared, prepares, strict=True):
        (mine,), (theirs,) = reply.prepared, alone.prepare(request).prepared
        assert (reply.round_id, mine.sequence_id) == (request.round_id, theirs.sequence_id)
        assert mine == theirs if exact else [o.tokens for o in mine.outcomes] == [o.tokens for o in theirs.outcomes]


def test_a_request_that_fails_does_not_take_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: one caller's request that breaks every forward it is in leaves all other callers without drafts."""
    draft = draft_model()
    good, bad = random_ids(10), [*random_ids(10), 77]
    break_forward(monkeypatch, draft, lambda chunks: any(77 in chunk.ids for chunk in chunks))
    proposed, prepared = draft.run(
        [ProposeRequest(round_id=n, items=(ask(f"p{n}", ids, 2, context(ids)),)) for n, ids in enumerate((bad, good))],
        [PrepareRequest(round_id=n, items=(want(f"q{n}", ids, context(ids), [5], 2, 1),)) for n, ids in enumerate((good, bad))],
    )
    assert [reply.proposals[0].reason for reply in proposed] == ["failed", None]
    assert [reply.prepared[0].reason for reply in prepared] == [None, "failed"]
    assert len(proposed[1].proposals[0].tokens) == 2
    assert len(prepared[0].prepared[0].outcomes) == 2


def test_what_makes_no_sense_is_refused_item_by_item() -> None:
    """Bug guarded: a negative length, a fan-out of the wrong size or a sequence twice, which a stream may bring, that breaks or
    falsifies the answers to others."""
    draft, prompt = draft_model(), random_ids(10)
    known = context(prompt)
    items = [
        want("fan-out", prompt, known, [5, 6], 2, (1, 1)),
        want("negative fan-out", prompt, known, [5], 2, (1, -1)),
        want("negative depth", prompt, known, [5], -1, (1, 1)),
        want("negative base", prompt, known, [5], 2, (1, 1), base=-3),
        want("unknown", prompt, known, [5], 2, (1, 1), base=4),
        want("no embedding", [*prompt, VOCAB], known, [5], 2, (1, 1)),
        want("good", prompt, known, [5], 2, (1, 1)),
        want("good", prompt, known, [5], 2, (1, 1)),
        want("too many", prompt, known, [], 1, (10**9,)),
    ]
    reasons = [answer.reason for answer in prepare(draft, *items)]
    assert reasons == ["malformed"] * 4 + ["need_context", "unknown_token", None, "repeated", None]
    assert propose(draft, ask("n", prompt, -1, known))[0].reason == "malformed"


def test_logits_that_are_no_numbers_cost_only_what_follows_them() -> None:
    """Bug guarded: outcomes guessed from NaN; or a whole answer lost because a draft token, not the text, was bad."""
    loaded = tiny_model("llama", head_dim=16)
    loaded.model.get_input_embeddings().weight[50] = torch.nan
    loaded.model.lm_head.weight[50] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.verify.ragged._random_ids", lambda count, vocab_size, seed: [3 + i for i in range(count)])
        draft = DraftModel(loaded, kv_capacity_tokens=1024)
    known = context([7, 9])
    certain = context([7, 9], logit_bias={50: 100.0})
    text, drafted, healthy, guessed = prepare(
        draft,
        want("text", [7, 50], known, [8], 2, 1),
        want("draft", [7, 9], known, [8, 50], 2, 1),
        want("healthy", [7, 9], known, [8, 10], 2, 1),
        want("guessed", [7, 9], certain, [], 2, 2),
    )
    assert (text.outcomes, text.reason) == ((), "bad_logits")
    assert ({o.accepted for o in drafted.outcomes}, drafted.reason) == ({0, 1}, None)
    assert {o.accepted for o in healthy.outcomes} == {0, 1, 2}
    assert [(o.token == 50, o.tokens) for o in guessed.outcomes] == [(False, (50,))]


def test_a_stateful_draft_catches_up_and_says_that_it_cannot_fork(caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: outcomes of a state that cannot be shared, a crash instead of a reason, or a log full of it."""
    draft = DraftModel(tiny_model("falcon_h1"), kv_capacity_tokens=2048)
    assert not draft.prepares
    assert draft_model().prepares
    prompt = random_ids(20)
    known = context(prompt)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (answer,) = prepare(draft, want("a", prompt, known, [5], 2, 1))
            assert (answer.outcomes, answer.reason, answer.known_length) == ((), "no_fork", 20)
    assert sum("forked" in record.message for record in caplog.records) == 1
    assert len(propose(draft, ask("a", [5], 2, known, base=20))[0].tokens) == 2


# --- guesses ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_likeliest_are_those_that_would_be_drawn_were_the_better_ones_not_there(params: dict[str, Any]) -> None:
    """Bug guarded: guesses by other scores than those that draw: without the noise, the filters or the row's penalties. The
    order is checked against draws with the better tokens forbidden (under the rules with q, against q itself)."""
    chosen = SamplingParams(**{"seed": 11, **params})
    draft, ids = (5, 9), [4, 8, 6, 5, 9]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    rows = likeliest_next(logits, [SampledSequence(chosen, 3, ids, draft)], (EOS,), 6)
    for row, tokens in enumerate(rows):
        before = SampledSequence(chosen, 3, ids[: 3 + row])
        ((drawn, q, _),) = propose_tokens(logits[row : row + 1], [before], (EOS,), VOCAB)
        if q is not None:
            assert tokens == list(q[0][:6])
            continue
        assert tokens[0] == drawn
        assert len(set(tokens)) == len(tokens) >= 3
        if "top_p" not in params:  # a nucleus changes with what is forbidden
            forbidden = logits[row : row + 1].clone()
            for token in tokens:
                assert propose_tokens(forbidden, [before], (EOS,))[0][0] == token
                forbidden[0, token] = -torch.inf


def test_fewer_are_likely_where_filters_leave_fewer() -> None:
    """Bug guarded: guesses with no chance at all filling the fan-out; rows of several rules mixed up; NaN as a guess."""
    logits = torch.zeros(5, 8)
    logits[:, 3], logits[:, 5] = 4.0, 3.0
    logits[2] = torch.nan
    sequences = [
        SampledSequence(SamplingParams(temperature=1.0, top_k=2), 1, [1]),
        SampledSequence(SamplingParams(temperature=0.0), 1, [1, 2], (2,)),
        SampledSequence(SamplingParams(temperature=1.0, top_p=0.2, rule="block"), 1, [1]),
        SampledSequence(SamplingParams(temperature=1.0, min_p=0.2, rule="rejection"), 1, [1]),
    ]
    filtered, greedy, bad, block, rejection = likeliest_next(logits, sequences, (), 20)
    assert set(filtered) == {3, 5}
    assert greedy == [3, 5, 0, 1, 2, 4, 6, 7]
    assert (bad, block, rejection) == ([], [3], [3, 5])
    assert likeliest_next(logits, sequences, (), 0) == [[]] * 5
    scores = torch.tensor([1.0, 2.0]) + noise.gumbel(
        noise.row_keys(torch.tensor([0]), torch.tensor([1]), Stream.COUPLED), torch.arange(2)
    )
    plain = SampledSequence(SamplingParams(temperature=1.0), 1, [1])
    assert likeliest_next(torch.tensor([[1.0, 2.0]]), [plain], (), 2) == scores.argsort(descending=True).tolist()
