"""The fallback: one cache per sequence, taken back by cropping, by copies and replay, or not at all."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, plain_logits, random_ids, tiny_model

from engine.drivers import SyncDriver
from engine.errors import ModelError
from engine.models import LoadedModel
from engine.propose.base import DraftSource
from engine.propose.draft_model import DraftModel
from engine.propose.self_speculation import build_self_int8
from engine.scheduler import FixedDepth, Scheduler
from engine.testing import ScriptedDraft
from engine.types import GenerateRequest, ProposeItem, ProposeRequest, SamplingParams, SequenceContext
from engine.verify.attention import Chunk
from engine.verify.blocks import CachedSequence
from engine.verify.load import load_engine_model
from engine.verify.ragged import STEP_SIZES, RaggedModel
from engine.verify.stateful import BLOCK_SIZE, COPY_SPACING, MOST_REPLAYED, NUM_COPIES, SequenceState, StatefulModel
from engine.verify.target import Target

CROP, REPLAY, FOREIGN, ONE_BY_ONE, NEVER_ALONE = "bloom", "granitemoehybrid", "minimax", "mamba", "nemotron_h"
KINDS = (CROP, REPLAY, FOREIGN, ONE_BY_ONE, NEVER_ALONE)
TOLERANCE = 1e-4
MAX_TOKENS = 24


measure_step_times = StatefulModel._measure_step_times


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring step times takes longer than the tests, and at this size a second thread only waits."""
    torch.set_num_threads(1)
    for model in (RaggedModel, StatefulModel):
        monkeypatch.setattr(model, "_measure_step_times", lambda self: ())


def stateful(family: str, **options: Any) -> StatefulModel:
    model = load_engine_model(tiny_model(family), kv_capacity_tokens=options.pop("kv_capacity_tokens", 1024), **options)
    assert isinstance(model, StatefulModel)
    return model


def step(model: StatefulModel, sequence: CachedSequence, ids: list[int], num_logits: int | None = None) -> torch.Tensor:
    model.cache.reserve(sequence, len(ids))
    return model.forward([Chunk(sequence, ids, len(ids) if num_logits is None else num_logits)])


class Recorder:
    """A stateful model, what the plain forward says of a text, and the tokens that each forward computed."""

    def __init__(self, family: str, length: int, monkeypatch: pytest.MonkeyPatch):
        loaded = tiny_model(family)
        self.text = random_ids(length)
        self.logits = plain_logits(loaded.model, self.text)
        self.model = StatefulModel(loaded, reason="test", kv_capacity_tokens=1024)
        self.sequence = CachedSequence()
        self.computed: list[int] = []
        forward: Callable[[SequenceState, list[int], int], torch.Tensor] = self.model._forward

        def counting(state: SequenceState, ids: list[int], num_logits: int) -> torch.Tensor:
            self.computed.append(len(ids))
            return forward(state, ids, num_logits)

        monkeypatch.setattr(self.model, "_forward", counting)

    def advance(self, end: int, *, rejected: int = 0, num_logits: int | None = None) -> list[int]:
        """Go on to ``end`` with some more tokens that are taken back; returns the sizes of the forwards that it took."""
        self.computed.clear()
        start = len(self.sequence.ids)
        ids = self.text[start:end] + random_ids(rejected)
        rows = step(self.model, self.sequence, ids, num_logits)
        first = start + len(ids) - len(rows)
        kept = max(end - first, 0)
        assert kept == 0 or (rows[:kept] - self.logits[first:end]).abs().max() < TOLERANCE
        self.model.cache.truncate(self.sequence, end)
        return list(self.computed)


# --- what is computed -------------------------------------------------------------------------------------------------------


def test_cropping_computes_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a prompt that is computed again after every rejected draft."""
    recorder = Recorder(CROP, 100, monkeypatch)
    assert recorder.advance(50, rejected=6) == [56]
    assert recorder.advance(53, rejected=20) == [23]
    recorder.model.cache.truncate(recorder.sequence, 10)
    assert recorder.advance(60) == [50]
    state = recorder.model.cache.states[recorder.sequence]
    assert state.copies == []


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "llama4_text"])
def test_a_rollback_brings_tokens_back_into_the_window(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: transformers' sliding layers, which keep the last tokens only: after a rollback some are missing."""
    recorder = Recorder(family, 120, monkeypatch)
    for end in range(1, 30):
        recorder.advance(end)
    recorder.advance(60, rejected=20)
    for length in (50, 25, 3):
        recorder.model.cache.truncate(recorder.sequence, length)
        assert recorder.advance(length + 40, rejected=5) == [45]


@pytest.mark.parametrize("family", [REPLAY, FOREIGN])
def test_accepted_tokens_are_replayed_with_the_next_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: states that keep rejected tokens; a forward of its own for a few accepted ones; a prompt computed again."""
    recorder = Recorder(family, 200, monkeypatch)
    recorder.advance(50, num_logits=1)
    assert recorder.advance(53, rejected=4) == [7]
    assert recorder.advance(56, rejected=4) == [3 + 7]  # behind a copy at 50
    assert recorder.advance(58, rejected=2) == [6 + 4]
    assert recorder.advance(60, rejected=1) == [8 + 3]
    assert MOST_REPLAYED < 60 - 50
    assert recorder.advance(63, rejected=3) == [10, 6]  # and a copy at 60
    assert recorder.advance(66) == [3 + 3]
    assert recorder.advance(67) == [1]
    assert len(recorder.model.cache.states[recorder.sequence].copies) == NUM_COPIES


def test_copies_while_tokens_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a draft model, whose tokens come one by one, that copies its state for each, or that has no copy from before
    its draft and begins every draft with the prompt.
    """
    recorder = Recorder(REPLAY, 160, monkeypatch)
    copied: list[int] = []
    remember = SequenceState.remember

    def counting(state: SequenceState) -> None:
        copied.append(state.length)
        remember(state)

    monkeypatch.setattr(SequenceState, "remember", counting)
    recorder.advance(40, num_logits=1)
    for end in range(41, 120):
        recorder.advance(end)
    assert copied == [0, 40, 40 + COPY_SPACING, 40 + 2 * COPY_SPACING]
    for end in (105, 75):  # behind the newest copy, then behind the one before
        recorder.model.cache.truncate(recorder.sequence, end)
        assert sum(recorder.advance(end + 1)) <= COPY_SPACING + 1
    recorder.model.cache.truncate(recorder.sequence, 60)  # behind all
    assert sum(recorder.advance(61)) == 61


def test_a_prompt_in_chunks_where_only_a_whole_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: chunks of a prompt that ignore those before them, or that are computed token by token."""
    recorder = Recorder(ONE_BY_ONE, 60, monkeypatch)
    assert recorder.model.max_draft_depth == 0
    assert recorder.advance(20, num_logits=0) == []
    assert recorder.advance(40, num_logits=0) == []
    assert recorder.advance(50, num_logits=1) == [50]
    assert recorder.advance(51) == [1]
    assert recorder.advance(54, rejected=2) == [1] * 5  # a draft all the same: right, only not faster
    assert recorder.advance(55) == [1] * 4


def test_a_lone_token_waits_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: text that depends on the depth, since a single step has another formula than a longer one."""
    recorder = Recorder(NEVER_ALONE, 60, monkeypatch)
    recorder.advance(40, num_logits=1)
    assert [recorder.advance(end) for end in range(41, 45)] == [[2], [2], [2], [2]]
    assert recorder.advance(45) == [2]
    assert recorder.advance(47, rejected=3) == [1 + 2 + 3]


def test_a_forward_that_breaks_off_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: layers that have absorbed the tokens of a failed forward, and others that have not."""
    recorder = Recorder(REPLAY, 60, monkeypatch)
    recorder.advance(30)
    last = recorder.model.loaded.model.model.layers[-1]

    def fail(*args: Any) -> None:
        raise RuntimeError("broke off")

    hook = last.register_forward_pre_hook(fail)
    recorder.model.cache.reserve(recorder.sequence, 5)
    with pytest.raises(RuntimeError, match="broke off"):
        recorder.model.forward([Chunk(recorder.sequence, recorder.text[30:35], 5)])
    hook.remove()
    assert len(recorder.sequence.ids) == 30
    recorder.advance(40)


# --- memory -----------------------------------------------------------------------------------------------------------------


def test_states_go_with_their_sequences() -> None:
    """Bug guarded: caches of ended requests that are kept for ever."""
    model = stateful(REPLAY)
    released, dropped, kept = CachedSequence(), CachedSequence(), CachedSequence()
    for sequence in (released, dropped, kept):
        step(model, sequence, random_ids(20))
    model.cache.truncate(released, 0)
    del dropped
    gc.collect()
    assert list(model.cache.states) == [kept]


def test_memory_is_counted_in_tokens() -> None:
    """Bug guarded: states of fixed size that cost nothing, so that sequences are admitted until memory runs out."""
    attention, mixed, recurrent = (stateful(family) for family in (CROP, REPLAY, ONE_BY_ONE))
    assert attention._bytes_per_token() == 3 * 2 * 32 * 4  # keys and values of three layers, float32
    assert 0 < recurrent._bytes_per_token() < mixed._bytes_per_token()
    assert stateful(CROP, kv_capacity_tokens=700).info.kv_capacity_tokens == 512
    with pytest.raises(ModelError, match="tiny-bloom: no room for a KV cache"):
        stateful(CROP, kv_capacity_tokens=100)


@pytest.mark.parametrize("family", KINDS)
def test_step_times_are_measured_and_leave_nothing_behind(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a measurement that fails where the context is short, or that keeps blocks that nobody gives back."""
    monkeypatch.setattr("engine.verify.ragged.STEP_BUDGET_S", 0.2)
    model = stateful(family)
    times = measure_step_times(model)
    assert [size for size, _ in times] == list(STEP_SIZES[: len(times)])
    assert times
    assert all(seconds > 0 for _, seconds in times)
    assert model.cache.pool.num_free == model.cache.pool.num_blocks
    short = stateful(family, max_context=32)
    assert measure_step_times(short) == ()


# --- lanes ------------------------------------------------------------------------------------------------------------------


def greedy_text(loaded: LoadedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(plain_logits(loaded.model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def play(target: Target, source: DraftSource | None, prompts: list[tuple[int, ...]], **params: Any) -> tuple[Any, Any]:
    """Texts by request, and the reports of the rounds."""
    scheduler = Scheduler(target.info, FixedDepth(5), max_batch=8, prefill_tokens=16, max_waiting=100)
    driver = SyncDriver(target, source, scheduler)
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **params})
    for index, prompt in enumerate(prompts):
        driver.add(GenerateRequest(request_id=str(index), prompt_ids=prompt, params=chosen))
    texts: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    reports = []
    while scheduler.has_work:
        result = driver.step()
        reports.append(result.report)
        for delta in result.deltas:
            assert delta.error is None
            texts[delta.request_id] += delta.token_ids
    return texts, reports


def prompts() -> list[tuple[int, ...]]:
    return [tuple(random_ids(count)) for count in (40, 7, 23)]


def half_right(texts: dict[str, list[int]], starts: list[tuple[int, ...]]) -> ScriptedDraft:
    """A draft that knows the texts and lies at every third place."""
    known = {start[:5]: [*start, *texts[str(index)], 0, 0, 0, 0, 0, 0] for index, start in enumerate(starts)}

    def next_token(ids: Any) -> int:
        right = known[tuple(ids[:5])][len(ids)]
        return right if len(ids) % 3 else (right + 1) % VOCAB

    return ScriptedDraft(next_token)


@pytest.mark.parametrize("family", KINDS)
def test_drafts_do_not_change_a_greedy_text(family: str) -> None:
    """Bug guarded: wrong text after a partly accepted draft, in silence: the worst that a fallback can do."""
    starts, loaded = prompts(), tiny_model(family)
    expected = {str(index): greedy_text(loaded, start, MAX_TOKENS) for index, start in enumerate(starts)}
    target = Target(loaded, kv_capacity_tokens=2048)
    without, _ = play(target, None, starts)
    assert without == expected
    texts, reports = play(target, half_right(expected, starts), starts)
    assert texts == expected
    drafted, accepted = (sum(getattr(report, name) for report in reports) for name in ("num_drafted", "num_accepted"))
    if family == ONE_BY_ONE:
        assert drafted == 0
    else:
        assert 0 < accepted < drafted
        assert len(reports) < MAX_TOKENS


@pytest.mark.parametrize("family", [CROP, ONE_BY_ONE])
def test_what_a_target_cannot_use_is_counted(family: str) -> None:
    """Bug guarded: speculation that is on and never happens, with no sign of it in the metrics."""
    starts = prompts()
    target = Target(tiny_model(family), kv_capacity_tokens=2048)
    _, reports = play(target, ScriptedDraft(lambda ids: 5), starts)
    counted = sum(report.fallbacks.get("target_takes_no_drafts", 0) for report in reports)
    assert counted == (sum(report.batch_size for report in reports) if family == ONE_BY_ONE else 0)


@pytest.mark.parametrize("family", KINDS)
def test_preempted_requests_go_on_with_the_same_text(family: str) -> None:
    """Bug guarded: a request that lost its state to others and goes on from the wrong one."""
    starts = [tuple(random_ids(BLOCK_SIZE - 10)) for _ in range(2)]
    roomy, tight = (
        Target(
            LoadedModel(**{**vars(tiny_model(family, max_position_embeddings=512)), "max_context": 512}),
            kv_capacity_tokens=size,
        )
        for size in (4 * BLOCK_SIZE, 2 * BLOCK_SIZE)
    )
    expected, _ = play(roomy, None, starts)
    texts, reports = play(tight, half_right(expected, starts), starts)
    assert texts == expected
    assert sum(report.num_preempted for report in reports) > 0


def _propose(draft: DraftModel, prompt: list[int], base: int, depth: int) -> tuple[int, ...]:
    context = SequenceContext(params=SamplingParams(temperature=0.0, ignore_eos=True), prompt_length=len(prompt))
    item = ProposeItem(
        sequence_id="a",
        base_length=base,
        tokens=tuple(prompt[base:]),
        depth=depth,
        context=context if base == 0 else None,
    )
    (proposal,) = draft.propose(ProposeRequest(round_id=1, items=(item,))).proposals
    assert proposal.reason is None
    return proposal.tokens


@pytest.mark.parametrize("family", KINDS)
def test_a_stateful_draft_drafts_its_own_continuation(family: str) -> None:
    """Bug guarded: a draft whose state keeps what it drafted and the target rejected."""
    loaded = tiny_model(family)
    prompt = random_ids(30)
    rounds = []
    for accepted in (2, 0, 4, 1):
        rounds.append((list(prompt), tuple(greedy_text(loaded, tuple(prompt), 4))))
        prompt = [*prompt, *rounds[-1][1][:accepted], *random_ids(1)]
    draft = DraftModel(loaded, kv_capacity_tokens=1024, catch_up_tokens=64)
    base = 0
    for text, continuation in rounds:
        assert _propose(draft, text, base, 4) == continuation
        base = len(text)


@pytest.mark.parametrize("family", [CROP, REPLAY])
def test_the_int8_copy_of_a_stateful_target(family: str) -> None:
    """Bug guarded: self-speculation, the default, that does not start with such a target, or that drafts noise."""
    loaded = tiny_model(family, initializer_range=0.1)
    prompt = random_ids(30)
    continuation = greedy_text(loaded, tuple(prompt), 1)
    draft = build_self_int8(loaded, kv_capacity_tokens=1024)
    assert (draft.info.path, draft.info.dtype) == ("stateful", "int8")
    assert _propose(draft, prompt, 0, 4)[:1] == tuple(continuation)


# --- what is said of it -----------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="engine.verify.load")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "engine.verify.load"]


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama", "dense path: the lean forward of llama"),
        ("gemma2", "generic path: transformers' own layers reproduce the plain forward of gemma2"),
        (
            CROP,
            "stateful path: it cannot be packed: its attention cannot be replaced; one cache per sequence, rolled back by crop",
        ),
        (
            "lfm2",
            "stateful path: its cache has layers of type LinearAttentionLayer; one cache per sequence, rolled back by copies",
        ),
        (ONE_BY_ONE, "stateful path: MambaForCausalLM keeps a recurrent state; steps of several tokens are not what single"),
    ],
)
def test_the_choice_is_logged_once_by_name(family: str, words: str, logged: Callable[[], list[str]]) -> None:
    """Bug guarded: a slow path that nobody hears of."""
    target = Target(tiny_model(family), kv_capacity_tokens=512)
    (line,) = logged()
    assert line.startswith(f"tiny-{family}: {words}")
    assert f"{target.info.path} path: {target.info.path_reason}" in line


def test_prefixes_are_not_shared() -> None:
    """Bug guarded: tokens taken from a prefix cache whose state nobody has."""
    starts = [tuple(random_ids(300))]
    loaded = LoadedModel(**{**vars(tiny_model(REPLAY)), "max_context": 1024})
    target = Target(loaded, kv_capacity_tokens=2048, prefix_cache=True)
    first, _ = play(target, None, starts, max_tokens=3)
    again, reports = play(target, None, starts, max_tokens=3)
    assert first == again
    assert sum(report.num_cached_tokens for report in reports) == 0


def test_a_state_is_not_packed_however_little_it_changes() -> None:
    """Bug guarded: a short convolution that mixes requests, which bfloat16's tolerance lets pass. Beforehand: that it does."""
    loaded = [tiny_model("lfm2", torch.bfloat16, initializer_range=0.05) for _ in range(2)]
    assert RaggedModel(loaded[0], kv_capacity_tokens=512).network == "generic"
    assert load_engine_model(loaded[1], kv_capacity_tokens=512).info.path == "stateful"


def test_a_failed_attempt_to_pack_leaves_the_model_as_it_was() -> None:
    """Bug guarded: a fallback that runs with the attention of the path that failed."""
    loaded = tiny_model("doge")
    text = random_ids(20)
    expected = plain_logits(loaded.model, text)
    load_engine_model(loaded, kv_capacity_tokens=512)
    assert torch.equal(plain_logits(loaded.model, text), expected)
