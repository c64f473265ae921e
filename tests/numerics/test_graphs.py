"""Steps as recorded graphs, with a stand-in for the recorder and for the paged kernel: what is computed, and for whom."""

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from recorded_graph import BLOCK_SIZE, FakeRecorder, Recording, fake_cuda  # noqa: F401
from tiny_models import random_ids, tiny_model
from torch import Tensor

from engine import sampling, transfer
from engine.processing import SampledSequence
from engine.propose.captured import Wanted
from engine.propose.draft_model import DraftModel
from engine.types import PrepareItem, PrepareRequest, Proposal, ProposeItem, ProposeRequest, SamplingParams, SequenceContext
from engine.verify import graphs, ragged
from engine.verify.attention import Chunk
from engine.verify.attention.paged import PagedBatch, Sizes
from engine.verify.graphs import BUCKETS, MAX_ROWS, Bucket, bucket_of
from engine.verify.kv_cache import CachedSequence
from engine.verify.ragged import RaggedModel

pytestmark = pytest.mark.usefixtures("fake_cuda")
TEXT = random_ids(200)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured when a test needs them; at this size a second thread only waits."""
    torch.set_num_threads(1)
    monkeypatch.setattr(RaggedModel, "_measure_step_times", lambda self: ())
    monkeypatch.setattr(ragged, "FIRST_BUCKETS", ())


def load(family: str = "llama", **options: Any) -> RaggedModel:
    return RaggedModel(tiny_model(family, torch.bfloat16), kernels="torch", kv_capacity_tokens=2048, **options)


def recorder_of(model: RaggedModel) -> FakeRecorder:
    assert model.graphs is not None
    recorder = model.graphs._recorder
    assert isinstance(recorder, FakeRecorder)
    return recorder


def run(model: RaggedModel, *steps: tuple[CachedSequence, list[int]]) -> list[Tensor]:
    """One forward; logits of all new tokens, per sequence."""
    chunks = [Chunk(sequence, ids, len(ids)) for sequence, ids in steps]
    for chunk in chunks:
        model.cache.reserve(chunk.sequence, len(chunk.ids))
    return list(model.forward(chunks).split([len(ids) for _, ids in steps]))


def play(model: RaggedModel) -> list[Tensor]:
    """Prefills of different lengths, then steps of 1 to 13 rows with roll-back; logits of all of them, in order."""
    sequences = [CachedSequence() for _ in range(4)]
    logits = run(model, *[(s, TEXT[i : i + n]) for i, (s, n) in enumerate(zip(sequences, (40, 63, 7, 90), strict=True))])
    for counts in ((1, 1, 1, 1), (5, 1, 2, 1), (1, 3, 0, 9), (0, 1, 0, 0), (4, 4, 4, 1)):
        taking = [(s, TEXT[len(s.ids) :][:count]) for s, count in zip(sequences, counts, strict=True) if count]
        logits += run(model, *taking)
        for sequence, ids in taking:
            model.cache.truncate(sequence, len(sequence.ids) - len(ids) // 2)
    return logits


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "qwen3_moe", "olmo2"])
def test_padded_buckets_give_the_same_bits(family: str) -> None:
    """Bug guarded: a number of the first step that a graph keeps (a length, a slot, a window), padding that reaches a real row.

    Lean and generic forwards, with sliding windows and experts; padded rows hold NaN behind the stand-in attention.
    """
    model = load(family)
    recorder = recorder_of(model)
    recorder.replayed = 0
    graphed = play(model)
    assert recorder.replayed == 5  # prefill ran eagerly
    plain = load(family)
    plain.graphs = None
    for own, expected in zip(graphed, play(plain), strict=True):
        assert torch.equal(own, expected)


def test_a_graph_leaves_the_cache_of_others_alone() -> None:
    """Bug guarded: padded rows that write to slot 0, which is some sequence's; sequences of the last step written again."""
    model = load()
    others, own = CachedSequence(), CachedSequence()
    run(model, (others, TEXT[:100]), (own, TEXT[:30]))
    before = [layer.both.clone() for layer in model.cache.layers if layer.both is not None]
    run(model, (others, TEXT[100:103]))  # the bucket's first step is another's
    run(model, (own, TEXT[30:33]))
    written = {
        sequence.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for sequence, places in ((others, range(100, 103)), (own, range(30, 33)))
        for p in places
    }
    scratch = model.cache.scratch_block * BLOCK_SIZE
    for layer, old in zip(model.cache.layers, before, strict=True):
        assert layer.both is not None
        changed = set((layer.both != old).any(dim=2).any(dim=0).nonzero().flatten().tolist())
        assert changed == {*written, scratch}


def test_padding_belongs_to_nobody() -> None:
    """Bug guarded: padded rows in a sequence's range, or a table that shows a sequence what others wrote."""
    sequences = [CachedSequence(ids=[7] * 70, blocks=[5, 3]), CachedSequence(ids=[], blocks=[4])]
    sizes = Sizes(num_rows=8, num_logits=8, num_sequences=4, table_width=3)
    batch = PagedBatch.over(torch.full((sizes.num_words,), -1), sizes)
    batch.fill([Chunk(sequences[0], [1, 2], 2), Chunk(sequences[1], [3], 0)], [1, 0], BLOCK_SIZE, scratch_block=9)
    assert batch.tokens.tolist() == [3, 1, 2, 0, 0, 0, 0, 0]
    assert batch.positions.tolist() == [0, 70, 71, 0, 0, 0, 0, 0]
    assert batch.slots.tolist() == [4 * 64, 3 * 64 + 6, 3 * 64 + 7, *[9 * 64] * 5]
    assert batch.logit_rows.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert batch.row_starts.tolist() == [0, 1, 3, 3, 3]
    assert batch.lengths.tolist() == [1, 72, 1, 1]
    assert batch.tables.tolist() == [[4, 4, 4], [5, 3, 5], [9, 9, 9], [9, 9, 9]]


def test_logits_outlive_the_next_step() -> None:
    """Bug guarded: handing out the graphs' own output, which the next replay overwrites."""
    model = load()
    assert model.graphs is not None
    sequence = CachedSequence()
    run(model, (sequence, TEXT[:40]))
    first = run(model, (sequence, TEXT[40:41]))[0]
    kept = first.clone()
    run(model, (sequence, TEXT[41:42]))
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("counts", "bucket"),
    [
        ([1], (1, 1)),
        ([9], (1, 16)),
        ([1, 1], (8, 2)),
        ([9] * 8, (8, 96)),
        ([32] * 8, (8, 256)),
        ([1] * 9, (64, 16)),
        ([1] * 64, (64, 64)),
        ([9, *[1] * 63], (64, 96)),
        ([8] * 64, (64, 512)),
        ([9] * 64, None),
        ([1] * 65, None),
        ([MAX_ROWS + 1], None),
        ([1, 1, 500], None),
    ],
)
def test_dispatch(counts: list[int], bucket: tuple[int, int] | None) -> None:
    """Bug guarded: a step in a bucket without room for it, a prefill padded to a graph, one deep draft padding all."""
    chunks = [Chunk(CachedSequence(), [0] * count, 1) for count in counts]
    assert bucket_of(chunks) == bucket


def test_every_step_that_fits_has_a_bucket_of_the_table() -> None:
    """Bug guarded: more graphs than the table bounds, or a bucket smaller than its step."""
    for num_sequences in range(1, 65):
        for num_rows in range(num_sequences, min(num_sequences * MAX_ROWS, 512) + 1, 7):
            rows = [num_rows // num_sequences + (i < num_rows % num_sequences) for i in range(num_sequences)]
            bucket = bucket_of([Chunk(CachedSequence(), [0] * count, 1) for count in rows])
            assert bucket in BUCKETS
            assert bucket.num_sequences >= num_sequences
            assert bucket.num_rows >= num_rows
    assert len(BUCKETS) == len(set(BUCKETS)) <= 32


def test_graphs_are_captured_once_each_and_follow_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: capturing on every step, graphs without bound, graphs that outlive the memory they write to."""
    model = load()
    assert model.graphs is not None
    play(model)
    count = model.graphs.num_captured(model.cache)
    assert 0 < count <= len(BUCKETS)
    recorded = recorder_of(model).recorded
    play(model)
    assert recorder_of(model).recorded == recorded
    model.probe_row_invariance()
    assert len(model.graphs._captured) == 1  # those of the probe's caches went with them
    assert recorder_of(model).recorded > recorded  # the probe ran as graphs


def test_first_graphs_are_there_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a service whose first requests wait for captures; a sequence of the load that keeps its blocks."""
    monkeypatch.setattr(ragged, "FIRST_BUCKETS", (Bucket(1, 1), Bucket(8, 4)))
    model = load()
    assert model.graphs is not None
    assert model.graphs.num_captured(model.cache) == 2
    assert model.cache.pool.num_free == model.cache.pool.num_blocks


def test_invariant_kernels_are_recorded_anew() -> None:
    """Bug guarded: a verdict on new kernels from graphs of the old ones."""
    model = load()
    sequence = CachedSequence()
    run(model, (sequence, TEXT[:40]))
    run(model, (sequence, TEXT[40:41]))
    recorded = recorder_of(model).recorded
    model._use("invariant", "invariant")
    run(model, (sequence, TEXT[41:42]))
    assert recorder_of(model).recorded == recorded + 1


@pytest.mark.parametrize(("family", "reason"), [("gemma2", "capped scores"), ("gpt_oss", "sinks")])
def test_what_the_kernel_cannot_do_is_named_once_and_runs_eagerly(
    family: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: a silent fallback, or a model that cannot be captured and does not load."""
    with caplog.at_level(logging.WARNING):
        model = load(family)
        run(model, (CachedSequence(), TEXT[:3]))
    assert model.graphs is None
    assert [reason in record.getMessage() for record in caplog.records if "captured" in record.getMessage()] == [True]


def test_a_graph_that_forgets_its_inputs_is_found_at_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bug guarded: a forward that looks at its data on the host, so that a graph repeats the first step's answer."""

    class Forgetful(FakeRecorder):
        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            run()
            return lambda: None

    monkeypatch.setitem(graphs.RECORDERS, "cpu", Forgetful)
    with caplog.at_level(logging.WARNING):
        assert load().graphs is None
    assert "launched one by one" in caplog.text


def test_no_memory_for_one_more_graph_keeps_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a step that fails because the device is full, or that tries to capture again every time."""
    model = load()
    sequence = CachedSequence()
    run(model, (sequence, TEXT[:40]))
    run(model, (sequence, TEXT[40:41]))
    attempts = []

    def full(run: Callable[[], None]) -> Callable[[], None]:
        attempts.append(run)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(recorder_of(model), "record", full)
    for start in (41, 44):
        run(model, (sequence, TEXT[start : start + 3]))
    replayed = recorder_of(model).replayed
    run(model, (sequence, TEXT[47:48]))
    assert recorder_of(model).replayed == replayed + 1
    assert len(attempts) == 1


@pytest.mark.parametrize("work", [lambda x: x.sum().item(), lambda x: x + torch.tensor([1.0]), lambda x: x.nonzero()])
def test_the_stand_in_refuses_what_a_capture_refuses(work: Callable[[Tensor], object]) -> None:
    """Bug guarded: tests over a recorder that lets through what a device does not."""
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="capturing"), Recording():
        work(x)


# --- drafts -----------------------------------------------------------------------------------------------------------------


def item(name: str, prompt: list[int], depth: int, **params: Any) -> ProposeItem:
    chosen = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "seed": ord(name), **params})
    context = SequenceContext(params=chosen, prompt_length=len(prompt))
    return ProposeItem(sequence_id=name, base_length=0, tokens=tuple(prompt), depth=depth, context=context)


def draft(captured: bool) -> DraftModel:
    drafts = DraftModel(tiny_model("llama", torch.bfloat16), kernels="torch", kv_capacity_tokens=2048)
    if not captured:
        drafts._captured = None
        assert isinstance(drafts.model, RaggedModel)
        drafts.model.graphs = None
    return drafts


def proposals(drafts: DraftModel, *items: ProposeItem) -> tuple[Proposal, ...]:
    return drafts.propose(ProposeRequest(round_id=1, items=items)).proposals


ITEMS = {
    "greedy": [item("a", TEXT[:30], 5), item("b", TEXT[:7], 1), item("c", TEXT[50:112], 3)],
    "sampled": [item("a", TEXT[:63], 4, temperature=1.0), item("b", TEXT[:7], 6, temperature=0.6), item("c", TEXT[3:20], 2)],
    "not all": [
        item("a", TEXT[:30], 4, temperature=0.8),
        item("b", TEXT[:9], 5, temperature=0.9, top_k=5),
        item("c", TEXT[:20], 3, repetition_penalty=1.3),
        item("d", TEXT[:12], 2, temperature=0.8, rule="rejection"),
        item("e", TEXT[:40], 4, temperature=0.8, min_tokens=2),
        item("f", TEXT[:40], 4),
    ],
    "at the end of the context": [item("a", [*TEXT, *TEXT[:54]], 8), item("b", TEXT[:30], 8)],
    "nothing to draw": [item("a", TEXT[:30], 0), item("b", TEXT[:20], 2)],
}


@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS.keys())
def test_captured_drafts_are_those_of_the_loop(items: list[ProposeItem]) -> None:
    """Bug guarded: a token fed at the wrong place, noise of another position, a request that leaves with another's row.

    Then what the caches hold is compared by going on from them.
    """
    captured, plain = draft(captured=True), draft(captured=False)
    assert captured._captured is not None
    assert proposals(captured, *items) == proposals(plain, *items)
    assert captured._captured._steps
    for one in items:
        ids = [[*d._sequences._held[one.sequence_id].cached.ids] for d in (captured, plain)]
        assert ids[0] == ids[1]
    going_on = [
        ProposeItem(sequence_id=one.sequence_id, base_length=len(one.tokens), tokens=(5,), depth=3)
        for one in items
        if len(one.tokens) < 200
    ]
    assert proposals(captured, *going_on) == proposals(plain, *going_on)


def test_a_draft_ends_with_its_text() -> None:
    """Bug guarded: drafting behind an end of text, which the loop stops at and a graph does not see."""
    plain, captured = draft(captured=False), draft(captured=True)
    tokens = proposals(plain, item("a", TEXT[:30], 6))[0].tokens
    stop = tokens[2]
    ending = item("a", TEXT[:30], 6, stop_token_ids=(stop,))
    (own,) = proposals(captured, ending)
    assert own.tokens == tokens[: tokens.index(stop) + 1]
    assert len(captured._sequences._held["a"].cached.ids) == 30 + len(own.tokens) - 1


def test_a_draft_ends_with_the_context() -> None:
    """Bug guarded: steps behind the longest context, which nobody can use."""
    captured, plain = draft(captured=True), draft(captured=False)
    own, expected = (
        d.propose(ProposeRequest(round_id=1, items=(item("a", [*TEXT, *TEXT[:54]], 8),))) for d in (captured, plain)
    )
    assert own.proposals == expected.proposals
    assert own.num_steps == expected.num_steps == 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_forks_are_those_of_the_loop(temperature: float) -> None:
    """Bug guarded: graphs that draft after a guess of an outcome what follows another one, or lose a guess's first token."""
    captured, plain = draft(captured=True), draft(captured=False)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=64, ignore_eos=True)
    context = SequenceContext(params=params, prompt_length=30)
    ids = tuple(TEXT[:30])
    asked = PrepareItem(sequence_id="a", base_length=0, tokens=ids, draft=(7, 9), depth=4, fan_out=(2, 1, 3), context=context)
    own, expected = (d.prepare(PrepareRequest(round_id=1, items=(asked,))) for d in (captured, plain))
    assert captured._captured is not None
    assert captured._captured._steps
    assert len(own.prepared[0].outcomes) == 6
    assert own.prepared == expected.prepared
    assert own.num_steps == expected.num_steps


def test_recording_a_draft_step_touches_nobody() -> None:
    """Bug guarded: warm-ups over a state that a broken-off draft left, which write to blocks that are others' by now."""
    drafts, plain = draft(captured=True), draft(captured=False)
    proposals(drafts, item("a", TEXT[:30], 4))
    assert drafts._captured is not None
    (state,) = drafts._captured._states.values()
    held = drafts._sequences._held["a"]
    with torch.inference_mode():
        state.begin([Wanted(held.cached, held.context, 4)], [4], drafts._captured._cache)
    drafts.propose(ProposeRequest(round_id=2, items=(), release=("a",)))
    drafts.model.cache.pool.forget_everything()
    noisy = item("b", TEXT[60:120], 3, temperature=0.5)  # records another kind of step, and has the block that was a's
    assert proposals(drafts, noisy) == proposals(plain, noisy)
    going_on = ProposeItem(sequence_id="b", base_length=60, tokens=(5,), depth=4)
    assert proposals(drafts, going_on) == proposals(plain, going_on)


def test_drafts_without_numbers_are_refused() -> None:
    """Bug guarded: logits that are no numbers drafted from, or blamed on the requests beside them."""
    drafts = draft(captured=True)
    assert isinstance(drafts.model, RaggedModel)
    expected = proposals(drafts, item("b", TEXT[:20], 3))[0].tokens
    forward = drafts.model.forward

    def broken(chunks: list[Chunk]) -> Tensor:
        logits = forward(chunks).clone()
        logits[-1] = torch.nan
        return logits

    drafts.model.forward = broken  # type: ignore[method-assign]
    bad, good = proposals(drafts, item("x", TEXT[:3], 3), item("b", TEXT[:20], 3))
    assert (bad.tokens, bad.reason) == ((), "bad_logits")
    assert good.tokens == expected


def test_drafts_that_cannot_be_captured_are_drafted_step_by_step(caplog: pytest.LogCaptureFixture) -> None:
    """Bug guarded: a draft that fails, or that is silently empty, where its loop cannot be recorded."""
    drafts, plain = draft(captured=True), draft(captured=False)
    assert isinstance(drafts.model, RaggedModel)
    recorder = recorder_of(drafts.model)
    recorder.record = lambda run: (_ for _ in ()).throw(RuntimeError("no capture"))  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.WARNING):
        assert proposals(drafts, item("a", TEXT[:90], 4)) == proposals(plain, item("a", TEXT[:90], 4))
    assert caplog.text.count("cannot be captured") == 1


# --- reading ----------------------------------------------------------------------------------------------------------------


def test_one_read_decides_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: waiting for the device once per rule and result; verdicts that go to the wrong sequences then.

    The way of a device is taken on CPU and compared with the CPU's own.
    """
    drafts = [(3, 4), (), (9,), (1, 2, 3)]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 0.0}]
    sequences = [
        SampledSequence(SamplingParams(seed=i, **kind), 2, [5, 6, 7, *own], own)
        for i, (own, kind) in enumerate(zip(drafts, kinds, strict=True))
    ]
    logits = torch.randn(sum(s.num_rows for s in sequences), 50)
    starts = [0, 3, 4, 6]
    logits[0, 3] = logits[6, 1] = 20.0
    logits[7] = torch.nan  # after the first draft token of the last one
    assert [b - a for a, b in pairwise([*starts, len(logits)])] == [s.num_rows for s in sequences]
    reads: list[Tensor] = []

    def counting(tensor: Tensor) -> Tensor:
        reads.append(tensor)
        return transfer.read(tensor)

    monkeypatch.setattr(sampling, "read", counting)
    own = sampling._decide_with_one_read(logits, sequences, (2,))
    assert own == sampling.decide(logits, sequences, (2,))
    assert own[3].error is not None
    assert own[0].accepted >= 1
    assert len(reads) == 1


KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "coupled": [{"temperature": 1.0}, {"temperature": 0.7}],
    "both": [{"temperature": 0.0}, {"temperature": 0.7}],
    "penalties": [{"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}, {"min_tokens": 5, "temperature": 0.0}],
    "rejection": [{"rule": "rejection"}],
    "block": [{"rule": "block"}],
}


class _Read(Exception):
    pass


def decide_without_numbers(monkeypatch: pytest.MonkeyPatch, kinds: list[dict[str, Any]]) -> None:
    """Decide on a device that has shapes and no numbers: whatever looks at one fails, and the read raises `_Read`."""

    def reading(tensor: Tensor) -> Tensor:
        raise _Read

    monkeypatch.setattr(sampling, "read", reading)
    drafts = [(3, 4), (), (9,), (1, 2, 3)]
    sequences = [
        SampledSequence(SamplingParams(seed=i, **kinds[i % len(kinds)]), 2, [5, 6, 7, *own], own)
        for i, own in enumerate(drafts)
    ]
    sampling.decide(torch.empty(10, 50, device="meta", dtype=torch.bfloat16), sequences, (2,))


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
def test_nothing_waits_before_the_verdict_is_read(monkeypatch: pytest.MonkeyPatch, kinds: list[dict[str, Any]]) -> None:
    """Bug guarded: a number looked at on the host, or a shape that depends on one, between the forward and the verdict."""
    with pytest.raises(_Read):
        decide_without_numbers(monkeypatch, kinds)


def test_a_device_without_numbers_finds_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: the test above passing whatever is done. Filters do look: how many tokens they leave is a shape."""
    with pytest.raises(NotImplementedError, match="nonzero"):
        decide_without_numbers(monkeypatch, [{"top_k": 5}])
